//! Operations on arrays: what dim 0 becomes, and a shape that all ranks agree on.
//!
//! Memory that is not in the order of the indices is copied there and back; the engine knows slices only.

mod in_place;
mod moving;
mod shape;
