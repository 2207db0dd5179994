//! Operations on arrays: concatenation and division along dim 0, and a shape that all ranks agree on; messages of arrays.
//!
//! Memory that is not in index order is copied; the engine only knows slices.

mod in_place;
mod messages;
mod moving;
mod shape;

pub use messages::ArrayMessage;
