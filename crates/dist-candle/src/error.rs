//! What can go wrong between candle and parallel training.

use std::fmt;

use candle_core::{DType, Shape};
use dist_parallel::internal::Chain;

dist_parallel::internal::error_enum! {
/// What can go wrong between candle and parallel training.
///
/// In a function that returns candle's own `Result`, `?` turns it into [`candle_core::Error::Wrapped`], whose text is the
/// message and its causes.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CandleError {
    /// candle could not compute something.
    #[error("{place}: candle failed")]
    Candle {
        /// The block, and what it was doing; or the loss.
        place: String,
        /// What candle says.
        source: candle_core::Error,
    },
    /// A variable has a type that dist does not know, or one that cannot be trained was to be trained.
    #[error(
        "variable {name} is of type {dtype:?}: f32, f64, f16 and bf16 can be trained, and u8, u32, i16, i32 and i64 can be \
         buffers"
    )]
    Type {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// An integer is too large to travel between ranks, or is no value of its variable's type.
    #[error(
        "{name}: {value} cannot be carried: integers travel as f64, which holds them up to 2^53, and have to fit {dtype:?}"
    )]
    Integer {
        /// The variable.
        name: String,
        /// The value.
        value: f64,
        /// The variable's type.
        dtype: DType,
    },
    /// A parameter or gradient is not a slice in this process's memory.
    #[error("{name} cannot be reached as a slice: {reason}")]
    NoSlice {
        /// The parameter.
        name: String,
        /// Why not.
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
    /// No variable of the block or model has this name.
    #[error("{place} has no parameter named {name}")]
    UnknownName {
        /// The block or model.
        place: String,
        /// The name that was asked for.
        name: String,
    },
    /// No variable's name begins with the block's; or there is no variable at all.
    #[error("{place} has no variables: the map has none whose name begins with {prefix:?}")]
    NoVariables {
        /// The block or model.
        place: String,
        /// What names should begin with; nothing for a whole model.
        prefix: String,
    },
    /// No gradient reaches the block's input: some operation on the way has no backward pass.
    ///
    /// In candle that is not an error by itself. `candle_nn`'s fused layer norm, RMS norm and softmax over the
    /// last dimension are such operations: their results depend on nothing, as far as gradients go.
    #[error("{place}: no gradient reaches the input, because an operation has no backward pass. {}", WITHOUT_BACKWARD)]
    NoInputGradient {
        /// The block, or the loss.
        place: String,
    },
    /// No gradient reaches some parameters: the loss does not depend on them, or some operation after them has no backward
    /// pass, as [`NoInputGradient`](Self::NoInputGradient) says of the input.
    ///
    /// A parameter that is not used in every forward is said to be one that [may be
    /// unused](crate::Variables::may_be_unused).
    #[error(
        "{place}: no gradient reaches {}. Either the output does not depend on them: then say so with may_be_unused. Or an \
         operation after them has no backward pass. {}",
        parameters.join(", "),
        WITHOUT_BACKWARD
    )]
    NoGradient {
        /// The block or model.
        place: String,
        /// All parameters that no gradient reaches, in the model's order.
        parameters: Vec<String>,
    },
    /// A gradient reaches a variable that is not among the block's or model's own, and would be lost.
    ///
    /// List the variable, also if another block lists it; [freeze](crate::Variables::freeze) it if it is not to
    /// be trained, or let the module use it detached. A loss has no parameters: its variables must be detached. A
    /// [`DataParallel`](crate::DataParallel) has the variables that were in its map when it was made, so it is made after
    /// all layers.
    #[error("{place} uses a variable of shape {shape:?} that it does not list: its gradient would be lost")]
    UnlistedVariable {
        /// The block or model, or the loss.
        place: String,
        /// The shape of the variable, which has no name.
        shape: Shape,
    },
    /// The gradient of a block's output does not look like the output.
    #[error("{place}: the output is {output:?}, its gradient {gradient:?}")]
    OutputGradient {
        /// The block.
        place: String,
        /// Shape and type of the output.
        output: (Shape, DType),
        /// Shape and type of the gradient.
        gradient: (Shape, DType),
    },
    /// An activation or its gradient does not have the tensors that it must have.
    #[error("an activation of {expected} tensors was expected, and there are {got}")]
    TensorCount {
        /// The number of tensors that there should be.
        expected: usize,
        /// The number of tensors that there are.
        got: usize,
    },
    /// A message between stages does not contain the tensors of an activation.
    #[error("the message of an activation cannot be read: its header is invalid, or it is too short")]
    Message,
    /// The loss is not one number.
    #[error("the loss is no single number but {shape:?}")]
    Loss {
        /// Its shape.
        shape: Shape,
    },
    /// A batch has fewer rows than there are ranks, so that some ranks would have nothing to compute.
    #[error(
        "a batch of {rows} rows cannot be divided among {ranks} ranks: leave out the last batch of an epoch if it is smaller, \
         or use larger batches"
    )]
    FewRows {
        /// The number of rows of the batch.
        rows: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// An optimizer that is to be saved or loaded has trained a variable that the training does not train.
    #[error(
        "the optimizer has changed a variable of shape {shape:?} that is no trained parameter of this DataParallel, so that \
         its moments cannot be saved"
    )]
    ForeignMoments {
        /// The shape of the variable.
        shape: Shape,
    },
    /// A checkpoint has moments of a variable that the optimizer does not have.
    #[error(
        "the checkpoint has moments of {name}, but the optimizer does not train that variable: create the optimizer with all \
         variables that it trained when it was saved"
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

/// The advice of errors about missing gradients: which operations of candle lose them, and what to use instead.
const WITHOUT_BACKWARD: &str = "Of candle these have none: layer_norm and rms_norm, which the layers LayerNorm and RmsNorm use \
     for contiguous input, softmax_last_dim, rope, rope_i, rope_thd, and products with quantized matrices. Use \
     layer_norm_slow, rms_norm_slow, softmax, rope_slow and rope_i_slow";

impl CandleError {
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

impl From<dist_parallel::Error> for CandleError {
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

impl From<CandleError> for candle_core::Error {
    fn from(error: CandleError) -> Self {
        Self::wrap(WithCauses(error))
    }
}

/// An error whose text is its message and its causes: candle keeps of a wrapped error only its text.
struct WithCauses(CandleError);

impl fmt::Display for WithCauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Chain(&self.0).fmt(f)
    }
}
