//! The error type of training burn models.

use burn::tensor::DType;
use dist_parallel::BoxError;

dist_parallel::internal::error_enum! {
/// An error in training a burn model.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BurnError {
    /// A tensor has a type that cannot be sent or saved.
    #[error("{name} is of type {dtype:?}: only f32, f64, f16 and bf16 can be trained")]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// A value of an integer or boolean tensor cannot be sent or saved as `f64` exactly, or an `f64` that was
    /// received or loaded does not fit the tensor's type.
    #[error(
        "{name} has a value that cannot be carried: integers and booleans travel as f64, which holds integers up to \
         2^53, and have to fit the tensor's type"
    )]
    Inexact {
        /// The tensor with the value.
        name: String,
    },
    /// burn could not return the values of a tensor.
    #[error("burn could not read the values of {name}")]
    Unread {
        /// The tensor.
        name: String,
        /// The error of burn.
        source: BoxError,
    },
    /// A module has other tensors than the one that `DataParallel` was created with.
    #[error(
        "the model is not the one that DataParallel was made with: tensor number {index} is {found}, and was {expected}"
    )]
    ModelChanged {
        /// The number of the first tensor that differs.
        index: usize,
        /// The tensor at the start.
        expected: String,
        /// The tensor now.
        found: String,
    },
    /// Gradients belong to no trained parameter of the model, and would be lost.
    #[error(
        "{count} gradients belong to no parameter that the model trained when DataParallel was made: they would be lost"
    )]
    ForeignGradients {
        /// The number of these gradients.
        count: usize,
    },
    /// The loss does not have exactly one element.
    #[error("the loss is no single number but has the shape {shape:?}: take its mean or its sum")]
    Loss {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The loss depends on no parameter, because the model was created without autodiff or the loss was detached.
    #[error(
        "the loss depends on no parameter: make the model on a device with autodiff (device.autodiff()), and do not \
         detach the loss"
    )]
    Untracked,
    /// The state of an optimizer belongs to no parameter of the model.
    #[error("the optimizer has kept something of parameter {id}, which the model does not have")]
    ForeignState {
        /// burn's identifier of the parameter.
        id: u64,
    },
    /// burn could not write or read the record of an optimizer.
    #[error("burn could not convert the optimizer's record")]
    OptimizerRecord {
        /// The error of burn.
        source: BoxError,
    },
    /// No tensor of the model has this name.
    #[error("the model has no buffer named {name}")]
    UnknownName {
        /// The name in the request.
        name: String,
    },
    /// Training across ranks failed.
    #[error(transparent)]
    Parallel(Box<dist_parallel::Error>),
}
}

impl BurnError {
    /// Returns the rank that caused the error, if it is a single rank: see [`dist_parallel::Error::peer`].
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Parallel(error) => error.peer(),
            _ => None,
        }
    }

    /// Returns `true` if a deadline passed, on this rank or on another.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Parallel(error) if error.is_timeout())
    }
}

impl From<dist_parallel::Error> for BurnError {
    /// Unwraps an error of this crate that dist-parallel has wrapped in [`Compute`](dist_parallel::Error::Compute).
    fn from(error: dist_parallel::Error) -> Self {
        match error {
            dist_parallel::Error::Compute(source) => match source.downcast() {
                Ok(own) => *own,
                Err(source) => Self::Parallel(Box::new(dist_parallel::Error::Compute(source))),
            },
            error => Self::Parallel(Box::new(error)),
        }
    }
}
