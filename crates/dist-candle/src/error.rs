//! The error type of this crate.

use std::fmt;

use candle_core::{DType, Shape};
use dist_parallel::internal::Chain;

dist_parallel::internal::error_enum! {
/// An error of training a candle model across processes.
///
/// In a function that returns candle's own `Result`, `?` converts it into [`candle_core::Error::Wrapped`],
/// whose text has the message and all causes.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CandleError {
    /// candle could not compute something.
    #[error("{place}: candle failed")]
    Candle {
        /// The block and its operation, or the loss.
        place: String,
        /// candle's error.
        source: candle_core::Error,
    },
    /// A variable has a type that dist does not support, or is a trained parameter and has a type that cannot
    /// be trained.
    #[error(
        "variable {name} is of type {dtype:?}: f32, f64, f16 and bf16 can be trained, and u8, u32, i16, i32 and \
         i64 can be buffers"
    )]
    Type {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// An integer is too large to be sent as `f64`, or does not fit its variable's type.
    #[error(
        "{name}: {value} cannot be carried: integers travel as f64, which holds them up to 2^53, and have to fit \
         {dtype:?}"
    )]
    Integer {
        /// The variable.
        name: String,
        /// The value.
        value: f64,
        /// The variable's type.
        dtype: DType,
    },
    /// A parameter or gradient is not one contiguous slice in this process's memory.
    #[error("{name} cannot be reached as a slice: {reason}")]
    NoSlice {
        /// The parameter.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// Two variables of one block or model have the same name.
    #[error("{place} has two parameters named {name}")]
    DuplicateName {
        /// The block or model.
        place: String,
        /// The name.
        name: String,
    },
    /// The block or model has no variable of this name.
    #[error("{place} has no parameter named {name}")]
    UnknownName {
        /// The block or model.
        place: String,
        /// The name in the request.
        name: String,
    },
    /// No variable's name begins with the block's name, or the map has no variables.
    #[error("{place} has no variables: the map has none whose name begins with {prefix:?}")]
    NoVariables {
        /// The block or model.
        place: String,
        /// The expected prefix of the names. It is empty for a whole model.
        prefix: String,
    },
    /// No gradient reaches the block's input, because some operation after it has no backward pass.
    ///
    /// candle itself reports no error. `candle_nn`'s fused layer norm, RMS norm and softmax over the last
    /// dimension are such operations: candle treats their results as constants.
    #[error(
        "{place}: no gradient reaches the input, because an operation has no backward pass. {}",
        WITHOUT_BACKWARD
    )]
    NoInputGradient {
        /// The block, or the loss.
        place: String,
    },
    /// No gradient reaches some parameters. Either the loss does not depend on them, or some operation after
    /// them has no backward pass: see [`NoInputGradient`](Self::NoInputGradient).
    ///
    /// Declare parameters that are not used in every forward pass with
    /// [`may_be_unused`](crate::Variables::may_be_unused).
    #[error(
        "{place}: no gradient reaches {}. Either the output does not depend on them: then say so with \
         may_be_unused. Or an operation after them has no backward pass. {}",
        parameters.join(", "),
        WITHOUT_BACKWARD
    )]
    NoGradient {
        /// The block or model.
        place: String,
        /// All parameters that no gradient reaches, in the model's order.
        parameters: Vec<String>,
    },
    /// A gradient reaches a variable that the block or model does not list. The gradient would be lost.
    ///
    /// List the variable, even if another block lists it too. If it is not to be trained,
    /// [freeze](crate::Variables::freeze) it, or let the module use it detached. A loss has no parameters:
    /// detach its variables. A [`DataParallel`](crate::DataParallel) trains the variables that its map had
    /// when it was created, so create it after all layers.
    #[error("{place} uses a variable of shape {shape:?} that it does not list: its gradient would be lost")]
    UnlistedVariable {
        /// The block or model, or the loss.
        place: String,
        /// The shape of the variable, which has no name.
        shape: Shape,
    },
    /// The gradient of a block's output does not have the shape of the output, or is not of floats.
    #[error("{place}: the output is {output:?}, its gradient {gradient:?}")]
    OutputGradient {
        /// The block.
        place: String,
        /// Shape and type of the output.
        output: (Shape, DType),
        /// Shape and type of the gradient.
        gradient: (Shape, DType),
    },
    /// An activation or its gradient has the wrong number of tensors.
    #[error("an activation of {expected} tensors was expected, and there are {got}")]
    TensorCount {
        /// The number of tensors that were expected.
        expected: usize,
        /// The number of tensors that were found.
        got: usize,
    },
    /// A message between stages does not contain the tensors of an activation.
    #[error("the message of an activation cannot be read: its header is invalid, or it is too short")]
    Message,
    /// The loss does not have exactly one element.
    #[error("the loss is no single number but {shape:?}")]
    Loss {
        /// Its shape.
        shape: Shape,
    },
    /// A batch has fewer rows than there are ranks. Some ranks would have nothing to compute.
    #[error(
        "a batch of {rows} rows cannot be divided among {ranks} ranks: leave out the last batch of an epoch if it \
         is smaller, or use larger batches"
    )]
    FewRows {
        /// The number of rows of the batch.
        rows: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// An optimizer that is being saved or loaded has trained a variable that is no trained parameter of the
    /// `DataParallel`.
    #[error(
        "the optimizer has changed a variable of shape {shape:?} that is no trained parameter of this \
         DataParallel, so that its moments cannot be saved"
    )]
    ForeignMoments {
        /// The shape of the variable.
        shape: Shape,
    },
    /// A checkpoint has moments of a variable that the optimizer does not train.
    #[error(
        "the checkpoint has moments of {name}, but the optimizer does not train that variable: create the \
         optimizer with all variables that it trained when it was saved"
    )]
    NotOptimized {
        /// The name of the variable.
        name: String,
    },
    /// Training across ranks failed.
    #[error(transparent)]
    Parallel(Box<dist_parallel::Error>),
}
}

/// Advice for errors about missing gradients: candle's operations without a backward pass, and their
/// replacements.
const WITHOUT_BACKWARD: &str = "These operations of candle have none: layer_norm and rms_norm, which the layers \
     LayerNorm and RmsNorm use for contiguous input, softmax_last_dim, rope, rope_i, rope_thd, and products with \
     quantized matrices. Use layer_norm_slow, rms_norm_slow, softmax, rope_slow and rope_i_slow";

impl CandleError {
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

impl From<dist_parallel::Error> for CandleError {
    /// Unwraps an error of this crate that dist-parallel has wrapped in
    /// [`Compute`](dist_parallel::Error::Compute).
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

impl From<CandleError> for candle_core::Error {
    fn from(error: CandleError) -> Self {
        Self::wrap(WithCauses(error))
    }
}

/// An error whose text has its message and all causes. candle keeps only the text of a wrapped error.
struct WithCauses(CandleError);

impl fmt::Display for WithCauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Chain(&self.0).fmt(f)
    }
}
