//! Training in a loop of your own: the gradients of a backward pass are the mean over all ranks.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod adamw;
mod errors;
mod gradients;
mod model;
mod same_bits;
mod variables;
