//! What an optimizer keeps of a slice, handed out to be saved and to be filled.

use crate::{FloatType, Values, ValuesMut};

/// What an optimizer keeps of every slice of one type of parameters, as names and types.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateLayout {
    /// Arrays with one value for each of the slice's, and their types.
    pub arrays: Vec<(&'static str, FloatType)>,
    /// Single numbers.
    pub scalars: Vec<&'static str>,
}

impl StateLayout {
    /// Whether nothing is kept.
    pub const fn is_empty(&self) -> bool {
        self.arrays.is_empty() && self.scalars.is_empty()
    }
}

/// What an optimizer has kept of one slice, in the order of its [`StateLayout`].
#[derive(Debug, Clone, PartialEq)]
pub struct SliceState<'a> {
    /// The arrays.
    pub arrays: Vec<Values<'a>>,
    /// The single numbers.
    pub scalars: Vec<f64>,
}

/// What an optimizer keeps of one slice, to be filled, in the order of its [`StateLayout`].
#[derive(Debug, PartialEq)]
pub struct SliceStateMut<'a> {
    /// The arrays.
    pub arrays: Vec<ValuesMut<'a>>,
    /// The single numbers.
    pub scalars: Vec<&'a mut f64>,
}
