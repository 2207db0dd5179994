//! The types of elements, and the sealed trait that they implement.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex;
use num_traits::{Num, NumCast};

use crate::kernel::{self, Bitwise, Ordering, Scalar, Scaling, Widening};

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
    /// IEEE 16-bit floating point.
    F16,
    /// The upper half of an `f32`.
    Bf16,
    /// 8-bit signed integer.
    I8,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// 8-bit unsigned integer.
    U8,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit unsigned integer.
    U64,
    /// Complex number of two `f32`, which torch and NumPy call `complex64`.
    #[doc(alias = "complex64")]
    ComplexF32,
    /// Complex number of two `f64`, which torch and NumPy call `complex128`.
    #[doc(alias = "complex128")]
    ComplexF64,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 12] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U32,
        Self::U64,
        Self::ComplexF32,
        Self::ComplexF64,
    ];

    /// Returns the name: that of the Rust type, or `complex_f32` and `complex_f64`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::ComplexF32 => "complex_f32",
            Self::ComplexF64 => "complex_f64",
        }
    }

    /// Returns the type with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the number of bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::ComplexF32 => 8,
            Self::ComplexF64 => 16,
        }
    }

    /// Returns `true` for floating-point types. Complex types are not among them.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }

    /// Returns `true` for complex types.
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::ComplexF32 | Self::ComplexF64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A type of elements that the built-in reductions support. Operations that only move elements take any type that is
/// [`Pod`], and [`CustomOp`](crate::CustomOp) reduces them. The set is closed: `f32`, `f64`, [`struct@f16`], [`bf16`], `i8`,
/// `i32`, `i64`, `u8`, `u32`, `u64`, and [`Complex`] of `f32` and `f64`. For arithmetic in generic code, use `num-traits`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type that collectives work on",
    note = "elements are f32, f64, f16, bf16, i8, i32, i64, u8, u32, u64 or Complex of f32 and f64; operations that only move elements take any `bytemuck::Pod` type, and `all_reduce_with` reduces them by an operation of your own"
)]
pub trait Element: Pod + Scalar + Num + NumCast + fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: DType;

    /// The functions that compare values, and their bounds; `None` for complex numbers.
    #[doc(hidden)]
    const ORDERING: Option<Ordering<Self>>;

    /// The functions that scale floating-point and complex numbers; `None` for integers.
    #[doc(hidden)]
    const SCALING: Option<Scaling<Self>>;

    /// The functions that combine the bits of integers; `None` for all others.
    #[doc(hidden)]
    const BITWISE: Option<Bitwise<Self>>;

    /// The conversion to `f32` and back, for types whose means compute their partial sums as `f32`; `None` for all
    /// others.
    #[doc(hidden)]
    const WIDENING: Option<Widening<Self>>;
}

macro_rules! floats {
    ($($float:ty => $dtype:ident, $widening:expr;)*) => {$(
        impl Element for $float {
            const DTYPE: DType = DType::$dtype;
            const ORDERING: Option<Ordering<Self>> =
                Some(kernel::ordering(<$float>::NEG_INFINITY, <$float>::INFINITY));
            const SCALING: Option<Scaling<Self>> = Some(kernel::scaling());
            const BITWISE: Option<Bitwise<Self>> = None;
            const WIDENING: Option<Widening<Self>> = $widening;
        }
    )*};
}

floats! {
    f32 => F32, None;
    f64 => F64, None;
    f16 => F16, Some(kernel::WIDENING_F16);
    bf16 => Bf16, None;
}

macro_rules! integers {
    ($($integer:ty => $dtype:ident;)*) => {$(
        impl Element for $integer {
            const DTYPE: DType = DType::$dtype;
            const ORDERING: Option<Ordering<Self>> = Some(kernel::ordering(<$integer>::MIN, <$integer>::MAX));
            const SCALING: Option<Scaling<Self>> = None;
            const BITWISE: Option<Bitwise<Self>> = Some(kernel::bitwise(!0));
            const WIDENING: Option<Widening<Self>> = None;
        }
    )*};
}

integers! {
    i8 => I8;
    i32 => I32;
    i64 => I64;
    u8 => U8;
    u32 => U32;
    u64 => U64;
}

macro_rules! complex {
    ($($part:ty => $dtype:ident;)*) => {$(
        impl Element for Complex<$part> {
            const DTYPE: DType = DType::$dtype;
            const ORDERING: Option<Ordering<Self>> = None;
            const SCALING: Option<Scaling<Self>> = Some(kernel::scaling());
            const BITWISE: Option<Bitwise<Self>> = None;
            const WIDENING: Option<Widening<Self>> = None;
        }
    )*};
}

complex! {
    f32 => ComplexF32;
    f64 => ComplexF64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    #[test]
    fn names_parse_back_and_sizes_are_those_of_the_rust_types() {
        for dtype in DType::ALL {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::parse("f8"), None);
        fn agrees<T: Element>() {
            assert_eq!(T::DTYPE.size(), size_of::<T>());
            let (float, complex) = (T::DTYPE.is_float(), T::DTYPE.is_complex());
            let name =
                T::DTYPE.name().replace("complex_f32", "Complex<f32>").replace("complex_f64", "Complex<f64>");
            assert!(std::any::type_name::<T>().ends_with(&name));
            assert_eq!(T::ORDERING.is_some(), !complex);
            assert_eq!(T::SCALING.is_some(), float || complex);
            assert_eq!(T::BITWISE.is_some(), !float && !complex);
            assert_eq!(ReduceOp::Min.supports(T::DTYPE), T::ORDERING.is_some());
            assert_eq!(ReduceOp::Mean.supports(T::DTYPE), T::SCALING.is_some());
            assert_eq!(ReduceOp::And.supports(T::DTYPE), T::BITWISE.is_some());
            assert_eq!(T::WIDENING.is_some(), ReduceOp::Mean.partial_dtype(T::DTYPE) != T::DTYPE);
        }
        agrees::<f32>();
        agrees::<f64>();
        agrees::<f16>();
        agrees::<bf16>();
        agrees::<i8>();
        agrees::<i32>();
        agrees::<i64>();
        agrees::<u8>();
        agrees::<u32>();
        agrees::<u64>();
        agrees::<Complex<f32>>();
        agrees::<Complex<f64>>();
    }
}
