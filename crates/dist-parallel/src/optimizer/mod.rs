//! Optimizers on flat slices: what they keep between steps belongs to a slice, not to a model.
//!
//! The same slices, gradients and settings give the same bits, on any number of ranks.

mod adamw;
mod sgd;
#[cfg(test)]
mod tests;

pub use adamw::{AdamW, AdamWOptions};
pub use sgd::{Momentum, Sgd, SgdOptions};

use crate::{Error, Result, Values, ValuesMut};

/// Changes parameters by their gradients.
pub trait Optimizer {
    /// Makes one step for one slice of parameters. The caller numbers its slices; what was kept from the steps
    /// before is kept by number. A slice without a gradient is left out, and then nothing of it changes.
    ///
    /// Half types are calculated in `f32`, and what is kept for them is `f32`.
    ///
    /// # Errors
    /// If parameters and gradients differ in type or length, or differ from the last step's.
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()>;

    /// The present learning rate.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the following steps.
    ///
    /// # Errors
    /// If it is negative or not finite.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()>;
}

/// What is kept of one slice: as many values as the slice has, in the type that is calculated in.
#[derive(Debug)]
enum Kept {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

/// A type that optimizers calculate in.
trait Calculated: num_traits::Float {
    fn from_setting(value: f64) -> Self;
    fn zeros(len: usize) -> Kept;
    /// `None` if the values kept are of the other type.
    fn of(kept: &mut Kept) -> Option<&mut [Self]>;
}

impl Calculated for f32 {
    #[expect(clippy::cast_possible_truncation, reason = "settings are rounded to the type calculated in")]
    fn from_setting(value: f64) -> Self {
        value as Self
    }

    fn zeros(len: usize) -> Kept {
        Kept::F32(vec![0.0; len])
    }

    fn of(kept: &mut Kept) -> Option<&mut [Self]> {
        match kept {
            Kept::F32(values) => Some(values),
            Kept::F64(_) => None,
        }
    }
}

impl Calculated for f64 {
    fn from_setting(value: f64) -> Self {
        value
    }

    fn zeros(len: usize) -> Kept {
        Kept::F64(vec![0.0; len])
    }

    fn of(kept: &mut Kept) -> Option<&mut [Self]> {
        match kept {
            Kept::F64(values) => Some(values),
            Kept::F32(_) => None,
        }
    }
}

/// The values kept of a slice of `len` values.
fn kept<M: Calculated>(kept: &mut Kept, slice: usize, len: usize) -> Result<&mut [M]> {
    M::of(kept).filter(|values| values.len() == len).ok_or(Error::SliceChanged { slice })
}

/// The entry of a slice, which need not exist yet.
fn entry<T>(entries: &mut Vec<Option<T>>, slice: usize) -> &mut Option<T> {
    if entries.len() <= slice {
        entries.resize_with(slice + 1, || None);
    }
    &mut entries[slice]
}

fn check(name: &'static str, value: f64, allowed: bool) -> Result<()> {
    if allowed && value.is_finite() { Ok(()) } else { Err(Error::Setting { name, value }) }
}
