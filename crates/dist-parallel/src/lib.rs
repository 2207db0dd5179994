#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod block;
mod error;
mod params;
mod sequence;
mod values;

pub use block::{Block, Ready, Saved};
pub use error::{BoxError, Error, Result};
pub use params::{FloatType, ParamInfo, Params};
pub use sequence::Sequence;
pub use values::{Values, ValuesMut};
