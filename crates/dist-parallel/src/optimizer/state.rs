//! The state of an optimizer for one slice, for checkpoints.

use crate::{FloatType, Values, ValuesMut};

/// The names and types of an optimizer's state for slices of one type of parameters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateLayout {
    /// Arrays with one value per value of the slice, and their types.
    pub arrays: Vec<(&'static str, FloatType)>,
    /// The names of scalars.
    pub scalars: Vec<&'static str>,
}

impl StateLayout {
    /// Returns `true` if there is no state.
    pub const fn is_empty(&self) -> bool {
        self.arrays.is_empty() && self.scalars.is_empty()
    }
}

/// The state of one slice, in the order of its [`StateLayout`].
#[derive(Debug, Clone, PartialEq)]
pub struct SliceState<'a> {
    /// The arrays.
    pub arrays: Vec<Values<'a>>,
    /// The scalars.
    pub scalars: Vec<f64>,
}

/// The state of one slice, to be filled, in the order of its [`StateLayout`].
#[derive(Debug, PartialEq)]
pub struct SliceStateMut<'a> {
    /// The arrays.
    pub arrays: Vec<ValuesMut<'a>>,
    /// The scalars.
    pub scalars: Vec<&'a mut f64>,
}
