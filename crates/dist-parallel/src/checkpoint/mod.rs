//! Checkpoints: saving a training and continuing it on any number of ranks, with any strategy.
//!
//! A trainer returns chunks of parameters and of its optimizer's state ([`Shards`]), and this module knows nothing
//! else of a strategy. `docs/book/src/checkpoints.md` describes the files.

mod agree;
mod assignment;
mod checkpoints;
mod directory;
mod disk;
mod error;
mod fetch;
mod index;
mod load;
mod owner;
mod part;
mod plain;
mod rank_request;
mod replicas;
mod save;
mod saving;
mod shards;
mod state;
mod stored_type;
#[cfg(test)]
mod tests;
mod weights;

pub use checkpoints::Checkpoints;
pub use error::{CheckpointError, CheckpointProblem};
pub(crate) use load::States;
pub(crate) use part::SavedStates;
pub(crate) use replicas::accumulated;
pub use saving::Saving;
pub use shards::{Chunk, ShardMetadata, Shards, Slice};
pub use weights::{LoadedTensor, WeightOptions, WeightReport, load_weights};

/// The name of the index in a checkpoint's directory.
const INDEX: &str = "index.jsonl";

/// The size limit of an index that is read into memory.
const INDEX_BYTES_MAX: u64 = 1 << 30;
