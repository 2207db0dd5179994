//! What can go wrong in parallel training.

use crate::FloatType;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of code that this crate calls: a model, a data source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What can go wrong in parallel training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two parameters of one model have the same name.
    #[error("the model has two parameters named {name}")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// No parameter has this name.
    #[error("the model has no parameter named {name}")]
    UnknownName {
        /// The name that was asked for.
        name: String,
    },
    /// A parameter cannot be the same as another, because they do not look the same or come in the wrong order.
    #[error("parameter {name} cannot be the same as {same_as}: {reason}")]
    CannotTie {
        /// The parameter that was to be tied.
        name: String,
        /// The parameter that it was to be tied to.
        same_as: String,
        /// Why not.
        reason: &'static str,
    },
    /// A block was given what another block saved.
    #[error("backward was given what the forward of another block saved")]
    ForeignSaved,
    /// Two runs of values that must look the same do not.
    #[error("{got_len} values of {got} were given where {expected_len} of {expected} are expected")]
    ValuesDiffer {
        /// How many values are expected.
        expected_len: usize,
        /// Their type.
        expected: FloatType,
        /// How many values were given.
        got_len: usize,
        /// Their type.
        got: FloatType,
    },
    /// A setting of an optimizer makes no sense.
    #[error("{name} cannot be {value}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What it was to be.
        value: f64,
    },
    /// A slice has another length or type than at its last step.
    #[error("slice {slice} has another length or type than at its last step")]
    SliceChanged {
        /// The slice's number.
        slice: usize,
    },
}
