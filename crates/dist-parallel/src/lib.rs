#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod block;
mod error;
mod number;
mod optimizer;
mod params;
mod plan;
mod sequence;
#[cfg(test)]
mod tree;
mod values;

pub use block::{Block, Ready, Saved};
pub use error::{BoxError, Error, Result};
pub use optimizer::{AdamW, AdamWOptions, Momentum, Optimizer, Sgd, SgdOptions};
pub use params::{FloatType, ParamInfo, Params};
pub use plan::{Bucket, BucketBytes, BucketPlan, Place};
pub use sequence::Sequence;
pub use values::{Values, ValuesMut};
