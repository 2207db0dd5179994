//! Optimizers on flat slices: what they keep between steps belongs to a slice, not to a model.
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

    /// The present learning rate, which [groups](ParamGroups) have a multiple of.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the following steps.
    ///
    /// # Errors
    /// If it is negative or not finite.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()>;

    /// The settings by which it changes parameters, in an order that depends on its kind only. All ranks of a training have to
    /// have the same: trainers compare them, and the error names the one that differs. By default the learning rate.
    fn settings(&self) -> Vec<OptimizerSetting> {
        vec![OptimizerSetting::new("the learning rate", self.learning_rate())]
    }

    /// What a checkpoint calls this kind of optimizer.
    fn name(&self) -> &'static str;

    /// What is kept of a slice of parameters of this type.
    fn layout(&self, parameters: FloatType) -> StateLayout;

    /// What has been kept of a slice; `None` if it has made no step, or nothing is kept of any.
    fn state(&self, slice: usize) -> Option<SliceState<'_>>;

    /// The numbers of the slices of which something has been kept, so that a save leaves none out.
    fn slices_with_state(&self) -> Vec<usize>;

    /// Makes room for what is kept of a slice of `len` parameters of this type, all zeros, in place of what was kept
    /// of it. It then counts as having made a step.
    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_>;

    /// Forgets what has been kept of all slices.
    fn clear_state(&mut self);
}

/// One setting of an optimizer, or what it is for one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSetting {
    /// What it is, as it is read in an error: "the learning rate".
    pub name: &'static str,
    /// The parameter that it is for, by its index in the model; `None` if it is for all.
    pub parameter: Option<usize>,
    /// Its value.
    pub value: f64,
}

impl OptimizerSetting {
    /// A setting for all parameters.
    pub const fn new(name: &'static str, value: f64) -> Self {
        Self { name, parameter: None, value }
    }
}

/// What is kept of one slice: as many values as the slice has, in the type that is calculated in.
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

/// The type that is calculated in for parameters of a type.
const fn calculated(parameters: FloatType) -> FloatType {
    match parameters {
        FloatType::F64 => FloatType::F64,
        FloatType::F32 | FloatType::F16 | FloatType::Bf16 => FloatType::F32,
    }
}

/// A type that optimizers calculate in.
trait Calculated: num_traits::Float {
    const DTYPE: FloatType;
    fn from_setting(value: f64) -> Self;
    /// `None` if the values kept are of the other type.
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

/// The values kept of a slice of `len` values.
fn kept<M: Calculated>(kept: &mut Kept, slice: usize, len: usize) -> Result<&mut [M]> {
    M::of(kept).filter(|values| values.len() == len).ok_or(Error::SliceChanged { slice })
}

/// The numbers of the slices that have an entry.
fn numbers<T>(entries: &[Option<T>]) -> Vec<usize> {
    entries.iter().enumerate().filter(|(_, entry)| entry.is_some()).map(|(number, _)| number).collect()
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
