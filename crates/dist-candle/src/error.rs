//! What can go wrong between candle and parallel training.

use candle_core::{DType, Shape};

dist_parallel::error_enum! {
/// What can go wrong between candle and parallel training.
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
    /// A parameter has a type that cannot be trained.
    #[error("parameter {name} is of type {dtype:?}: only f32, f64, f16 and bf16 can be trained")]
    Type {
        /// The parameter.
        name: String,
        /// Its type.
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
    /// Two parameters of one block have the same name.
    #[error("block {block} has two parameters named {name}")]
    DuplicateName {
        /// The block.
        block: String,
        /// The name.
        name: String,
    },
    /// No parameter of the block has this name.
    #[error("block {block} has no parameter named {name}")]
    UnknownName {
        /// The block.
        block: String,
        /// The name that was asked for.
        name: String,
    },
    /// No variable's name begins with the block's.
    #[error("no variable has a name that begins with {block}.")]
    NoVariables {
        /// The block.
        block: String,
    },
    /// No gradient reaches the block's input: some operation on the way has no backward pass.
    ///
    /// In candle that is not an error by itself. `candle_nn`'s fused layer norm, RMS norm and softmax over the
    /// last dimension are such operations: their results depend on nothing, as far as gradients go.
    #[error("block {block}: no gradient reaches the input, because an operation has no backward pass")]
    NoInputGradient {
        /// The block.
        block: String,
    },
    /// No gradient reaches a parameter of the block: the module does not use it, or some operation after it has no backward
    /// pass, as [`NoInputGradient`](Self::NoInputGradient) says of the input.
    ///
    /// A parameter that is not used in every forward is said to be one that [may be
    /// unused](crate::CandleBlock::may_be_unused).
    #[error(
        "block {block}: no gradient reaches {parameter}, which is not used, or an operation has no backward pass"
    )]
    NoGradient {
        /// The block.
        block: String,
        /// The parameter.
        parameter: String,
    },
    /// A gradient reaches a variable that is not among the block's own, and would be lost.
    ///
    /// List the variable, also if another block lists it; [freeze](crate::CandleBlock::freeze) it if it is not to
    /// be trained, or let the module use it detached. A loss has no parameters: its variables must be detached.
    #[error(
        "block {block} uses a variable of shape {shape:?} that it does not list: its gradient would be lost"
    )]
    UnlistedVariable {
        /// The block.
        block: String,
        /// The shape of the variable, which has no name.
        shape: Shape,
    },
    /// The gradient of a block's output does not look like the output.
    #[error("block {block}: the output is {output:?}, its gradient {gradient:?}")]
    OutputGradient {
        /// The block.
        block: String,
        /// Shape and type of the output.
        output: (Shape, DType),
        /// Shape and type of the gradient.
        gradient: (Shape, DType),
    },
    /// The loss is not one number.
    #[error("the loss is no single number but {shape:?}")]
    Loss {
        /// Its shape.
        shape: Shape,
    },
}
}
