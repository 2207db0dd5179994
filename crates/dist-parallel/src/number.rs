//! The numbers that parameters are made of.

use half::{bf16, f16};
use num_traits::Float;

/// A type of parameters, and the type in which is calculated: for half types `f32`, for others their own.
pub(crate) trait Number: Copy {
    type Math: Float;

    fn widen(self) -> Self::Math;

    /// Rounded to nearest even.
    fn narrow(value: Self::Math) -> Self;
}

impl Number for f32 {
    type Math = Self;

    fn widen(self) -> Self {
        self
    }

    fn narrow(value: Self) -> Self {
        value
    }
}

impl Number for f64 {
    type Math = Self;

    fn widen(self) -> Self {
        self
    }

    fn narrow(value: Self) -> Self {
        value
    }
}

impl Number for f16 {
    type Math = f32;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Number for bf16 {
    type Math = f32;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}
