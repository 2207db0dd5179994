#![doc = include_str!("../README.md")]

mod checkpoint;
mod data_parallel;
mod error;
mod gradients;
mod loss;
mod module;
mod optimizer;
mod values;
mod walk;

pub use data_parallel::{DataParallel, NoSync};
pub use error::BurnError;
pub use loss::TensorLoss;
pub use module::ModuleParams;
