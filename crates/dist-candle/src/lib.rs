#![doc = include_str!("../README.md")]

mod activations;
mod block;
mod error;
mod gradient;
mod sequence;
mod slices;
mod spare;

pub use activations::Tensors;
pub use block::CandleBlock;
pub use error::CandleError;
pub use gradient::{backward_from, loss_and_gradient};
pub use sequence::SequenceBuilder;
