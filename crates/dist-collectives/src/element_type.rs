//! The type of the elements of a call, as all ranks must agree on it.

use std::any::TypeId;
use std::fmt;

use bytemuck::Pod;
use dist_transport::cpu::CacheLine;
use half::{bf16, f16};
use num_complex::Complex;

use crate::DType;

/// The type of a call's elements: a [`DType`], or the size and the alignment of any other type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ElementType {
    /// A type that the built-in reductions support.
    Known(DType),
    /// Any other type. Ranks with different types of one size and alignment are not detected.
    Other {
        /// The number of bytes of an element, at least 1 and less than 2²¹.
        size: u32,
        /// The alignment in bytes: a power of two, at most 64.
        align: u8,
    },
}

impl ElementType {
    /// Returns the type of elements of `T`.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the assertion limits both numbers")]
    pub(crate) fn of<T: Pod>() -> Self {
        const {
            assert!(
                size_of::<T>() > 0 && size_of::<T>() < SIZE_END && align_of::<T>() <= CacheLine::BYTES,
                "elements have a size of 1 byte to 2 MiB and an alignment of at most 64 bytes"
            );
        }
        match known::<T>() {
            Some(dtype) => Self::Known(dtype),
            None => Self::Other { size: size_of::<T>() as u32, align: align_of::<T>() as u8 },
        }
    }

    /// Returns the number of bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Known(dtype) => dtype.size(),
            Self::Other { size, .. } => size as usize,
        }
    }

    /// Returns the type, if the built-in reductions support it.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::Known(dtype) => Some(dtype),
            Self::Other { .. } => None,
        }
    }

    /// Returns size and alignment of an unknown type in [`LAYOUT_BITS`] bits; 0 for a known type.
    pub(crate) const fn layout(self) -> u64 {
        match self {
            Self::Known(_) => 0,
            Self::Other { size, align } => size as u64 | (align.trailing_zeros() as u64) << SIZE_BITS,
        }
    }

    /// Returns the unknown type with this [`layout`](Self::layout); `None` if there is no such type.
    #[allow(clippy::cast_possible_truncation, reason = "a mask limits the number")]
    pub(crate) fn from_layout(layout: u64) -> Option<Self> {
        let (size, align) = ((layout & (SIZE_END as u64 - 1)) as u32, 1_u8 << (layout >> SIZE_BITS & 7));
        (size > 0 && usize::from(align) <= CacheLine::BYTES).then_some(Self::Other { size, align })
    }
}

/// Returns the [`DType`] of `T`, if it has one.
#[inline(always)]
fn known<T: 'static>() -> Option<DType> {
    let is = |other: TypeId| TypeId::of::<T>() == other;
    Some(match () {
        () if is(TypeId::of::<f32>()) => DType::F32,
        () if is(TypeId::of::<f64>()) => DType::F64,
        () if is(TypeId::of::<f16>()) => DType::F16,
        () if is(TypeId::of::<bf16>()) => DType::Bf16,
        () if is(TypeId::of::<i8>()) => DType::I8,
        () if is(TypeId::of::<i32>()) => DType::I32,
        () if is(TypeId::of::<i64>()) => DType::I64,
        () if is(TypeId::of::<u8>()) => DType::U8,
        () if is(TypeId::of::<u32>()) => DType::U32,
        () if is(TypeId::of::<u64>()) => DType::U64,
        () if is(TypeId::of::<Complex<f32>>()) => DType::ComplexF32,
        () if is(TypeId::of::<Complex<f64>>()) => DType::ComplexF64,
        () => return None,
    })
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        Self::Known(dtype)
    }
}

impl fmt::Display for ElementType {
    /// Writes the name of the type, or `elements of 24 bytes aligned to 8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(dtype) => dtype.fmt(f),
            Self::Other { size: 1, .. } => f.write_str("elements of 1 byte"),
            Self::Other { size, align } => write!(f, "elements of {size} bytes aligned to {align}"),
        }
    }
}

/// The number of bits of a [`layout`](ElementType::layout): the size, then log₂ of the alignment.
pub(crate) const LAYOUT_BITS: u32 = SIZE_BITS + 3;
const SIZE_BITS: u32 = 21;
const SIZE_END: usize = 1 << SIZE_BITS;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    #[test]
    fn types_of_reductions_are_known_and_all_others_have_a_layout() {
        fn is_known<T: Element>() {
            assert_eq!(ElementType::of::<T>(), ElementType::Known(T::DTYPE));
            assert_eq!(ElementType::of::<T>().size(), size_of::<T>());
        }
        is_known::<f32>();
        is_known::<f64>();
        is_known::<f16>();
        is_known::<bf16>();
        is_known::<i8>();
        is_known::<i32>();
        is_known::<i64>();
        is_known::<u8>();
        is_known::<u32>();
        is_known::<u64>();
        is_known::<Complex<f32>>();
        is_known::<Complex<f64>>();
        let others = [
            (ElementType::of::<u16>(), 2, 2, "elements of 2 bytes aligned to 2"),
            (
                ElementType::of::<usize>(),
                size_of::<usize>(),
                align_of::<usize>(),
                "elements of 8 bytes aligned to 8",
            ),
            (ElementType::of::<u128>(), 16, align_of::<u128>(), "elements of 16 bytes aligned to 16"),
            (ElementType::of::<[f32; 3]>(), 12, 4, "elements of 12 bytes aligned to 4"),
            (ElementType::of::<[u8; 1]>(), 1, 1, "elements of 1 byte"),
        ];
        for (other, size, align, text) in others {
            let expected =
                ElementType::Other { size: size.try_into().unwrap(), align: align.try_into().unwrap() };
            assert_eq!((other, other.size(), &*other.to_string()), (expected, size, text));
            assert_eq!(ElementType::from_layout(other.layout()), Some(other));
        }
    }

    #[test]
    fn a_layout_without_bytes_or_of_a_large_alignment_is_no_type() {
        assert_eq!(ElementType::from_layout(0), None);
        assert_eq!(ElementType::from_layout(8 | 7 << SIZE_BITS), None);
        assert!(ElementType::from_layout(8 | 6 << SIZE_BITS).is_some());
    }
}
