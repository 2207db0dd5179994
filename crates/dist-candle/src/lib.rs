#![doc = include_str!("../README.md")]

mod activations;
mod adamw;
mod array;
mod block;
mod data_parallel;
mod dropout;
mod error;
mod gradient;
mod integers;
mod loss;
mod module;
mod packed;
mod sequence;
mod slices;
mod spare;
mod sync_batch_norm;
mod variables;

pub use activations::{Activation, Tensors};
pub use adamw::AdamW;
pub use block::CandleBlock;
pub use data_parallel::{DataParallel, NoSync};
pub use dropout::Dropout;
pub use error::CandleError;
pub use gradient::{backward_from, loss_and_gradient};
pub use loss::TensorLoss;
pub use module::{BlockModule, PassFn};
pub use sequence::SequenceBuilder;
pub use sync_batch_norm::SyncBatchNorm;
pub use variables::Variables;
