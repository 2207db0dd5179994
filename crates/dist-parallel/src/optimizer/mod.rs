//! Optimizers on flat slices: their state belongs to a slice, not to a model.
//!
//! The same slices, gradients and settings give the same bits, on any number of ranks.

mod adamw;
mod groups;
mod schedule;
mod sgd;
mod state;
#[cfg(test)]
mod tests;

pub use adamw::{AdamW, AdamWOptions};
pub use groups::{ParamGroups, ParamOptions};
pub use schedule::{Decay, LearningRateSchedule};
pub use sgd::{Momentum, Sgd, SgdOptions};
pub use state::{SliceState, SliceStateMut, StateLayout};

use crate::{Error, FloatType, Result, Values, ValuesMut};

/// An algorithm that updates parameters by their gradients.
pub trait Optimizer {
    /// Makes one step for one slice of parameters. The caller numbers its slices, and the state of earlier steps is
    /// stored by this number. A slice without a gradient is skipped, and its state does not change.
    ///
    /// Half types are computed in `f32`, with state in `f32`.
    ///
    /// # Errors
    /// Parameters and gradients differ in type or length, or differ from the last step.
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()>;

    /// Returns the current learning rate, to which [groups](ParamGroups) apply a factor.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the following steps.
    ///
    /// # Errors
    /// It is negative or not finite.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()>;

    /// Returns the settings of an update, in an order that depends only on the kind of the optimizer. All ranks of a
    /// training must have the same settings: trainers compare them, and the error names the one that differs. The
    /// default is the learning rate.
    fn settings(&self) -> Vec<OptimizerSetting> {
        vec![OptimizerSetting::new("the learning rate", self.learning_rate())]
    }

    /// Returns the name of this kind of optimizer in checkpoints.
    fn name(&self) -> &'static str;

    /// Returns the layout of the state for a slice of parameters of this type.
    fn layout(&self, parameters: FloatType) -> StateLayout;

    /// Returns the state of a slice. `None` if the slice has made no step, or if the optimizer has no state.
    fn state(&self, slice: usize) -> Option<SliceState<'_>>;

    /// Returns the numbers of the slices with state, so that a save omits none.
    fn slices_with_state(&self) -> Vec<usize>;

    /// Replaces the state of a slice of `len` parameters by zeros and returns it, to be filled. The slice then counts
    /// as having made a step.
    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_>;

    /// Drops the state of all slices.
    fn clear_state(&mut self);
}

/// A setting of an optimizer, for all parameters or for one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSetting {
    /// The name in errors, such as "the learning rate".
    pub name: &'static str,
    /// The index of the parameter in the model. `None` if the setting is for all parameters.
    pub parameter: Option<usize>,
    /// The value.
    pub value: f64,
}

impl OptimizerSetting {
    /// Returns a setting for all parameters.
    pub const fn new(name: &'static str, value: f64) -> Self {
        Self { name, parameter: None, value }
    }
}

/// An array of state: one value per value of the slice, in the type of the computation.
#[derive(Debug)]
enum Kept {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Kept {
    fn zeros(parameters: FloatType, len: usize) -> Self {
        match calculated(parameters) {
            FloatType::F64 => Self::F64(vec![0.0; len]),
            _ => Self::F32(vec![0.0; len]),
        }
    }

    fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F64(values) => Values::F64(values),
        }
    }

    fn values_mut(&mut self) -> ValuesMut<'_> {
        match self {
            Self::F32(values) => ValuesMut::F32(values),
            Self::F64(values) => ValuesMut::F64(values),
        }
    }
}

/// Returns the type in which updates of parameters of this type are computed.
const fn calculated(parameters: FloatType) -> FloatType {
    match parameters {
        FloatType::F64 => FloatType::F64,
        FloatType::F32 | FloatType::F16 | FloatType::Bf16 => FloatType::F32,
    }
}

/// A type in which updates are computed.
trait Calculated: num_traits::Float {
    const DTYPE: FloatType;
    fn from_setting(value: f64) -> Self;
    /// Returns `None` if the array has the other type.
    fn of(kept: &mut Kept) -> Option<&mut [Self]>;
}

impl Calculated for f32 {
    const DTYPE: FloatType = FloatType::F32;

    #[expect(clippy::cast_possible_truncation, reason = "settings are rounded to the type calculated in")]
    fn from_setting(value: f64) -> Self {
        value as Self
    }

    fn of(kept: &mut Kept) -> Option<&mut [Self]> {
        match kept {
            Kept::F32(values) => Some(values),
            Kept::F64(_) => None,
        }
    }
}

impl Calculated for f64 {
    const DTYPE: FloatType = FloatType::F64;

    fn from_setting(value: f64) -> Self {
        value
    }

    fn of(kept: &mut Kept) -> Option<&mut [Self]> {
        match kept {
            Kept::F64(values) => Some(values),
            Kept::F32(_) => None,
        }
    }
}

/// Returns the state array of a slice of `len` values.
fn kept<M: Calculated>(kept: &mut Kept, slice: usize, len: usize) -> Result<&mut [M]> {
    M::of(kept).filter(|values| values.len() == len).ok_or(Error::SliceChanged { slice })
}

/// Returns the numbers of the slices that have an entry.
fn numbers<T>(entries: &[Option<T>]) -> Vec<usize> {
    entries.iter().enumerate().filter(|(_, entry)| entry.is_some()).map(|(number, _)| number).collect()
}

/// Returns the entry of a slice, which is created if needed.
fn entry<T>(entries: &mut Vec<Option<T>>, slice: usize) -> &mut Option<T> {
    if entries.len() <= slice {
        entries.resize_with(slice + 1, || None);
    }
    &mut entries[slice]
}

fn check(name: &'static str, value: f64, allowed: bool) -> Result<()> {
    if allowed && value.is_finite() { Ok(()) } else { Err(Error::Setting { name, value }) }
}
