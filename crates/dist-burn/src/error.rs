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
    /// Integers and booleans travel as `f64` and are saved as such. A value has no exact representation as an `f64`, or an `f64` that
    /// was received or loaded is no value of the tensor's type.
    #[error(
        "{name} has a value that cannot be carried: integers and booleans travel as f64, which holds integers up to 2^53, and \
         have to fit the tensor's type"
    )]
    Inexact {
        /// The tensor that has it.
        name: String,
    },
    /// burn could not hand out the values of a tensor.
    #[error("burn could not read the values of {name}")]
    Unread {
        /// The tensor.
        name: String,
        /// The error of burn.
        source: BoxError,
    },
    /// A module is not the one that `DataParallel` was made with: it has other tensors.
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
        /// The number of them.
        count: usize,
    },
    /// The loss is not one number.
    #[error("the loss is no single number but has the shape {shape:?}: take its mean or its sum")]
    Loss {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The loss depends on no parameter: the model or its input was made without autodiff.
    #[error(
        "the loss depends on no parameter: make the model on a device with autodiff (device.autodiff()), and do not \
         detach the loss"
    )]
    Untracked,
    /// The state of an optimizer belongs to no parameter of the model.
    #[error("the optimizer has kept something of parameter {id}, which the model does not have")]
    ForeignState {
        /// burn's number of the parameter.
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
        /// The name that was asked for.
        name: String,
    },
    /// Training across ranks failed.
    #[error(transparent)]
    Parallel(Box<dist_parallel::Error>),
}
}

impl BurnError {
    /// Returns the rank that caused the error, if it is a single one, like [`dist_parallel::Error::peer`].
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Parallel(error) => error.peer(),
            _ => None,
        }
    }

    /// Returns `true` if the deadline of this rank or of another has passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Parallel(error) if error.is_timeout())
    }
}

impl From<dist_parallel::Error> for BurnError {
    /// An error of this crate that training has passed on comes back as itself.
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
