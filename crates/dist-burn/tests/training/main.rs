//! Burn models trained on several ranks, in the user's own loop.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod buffers;
mod checkpoints;
mod gradients;
mod mistakes;
mod models;
mod own_loop;
mod same_bits;
