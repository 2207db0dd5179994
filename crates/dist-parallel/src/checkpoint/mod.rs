//! Saving a training and going on from there, on as many ranks and by whatever strategy.

mod replicas;
mod shards;

pub use shards::{Holding, Piece, Shards, Slice};
