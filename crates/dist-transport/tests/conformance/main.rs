//! What every transport promises: one suite for all of them.
//!
//! Every test says what each rank does, through [`Transport`](dist_transport::Transport) alone, and what must come
//! of it; [`Backend`](backend::Backend) is the only place that knows the transports there are. A test may not
//! rely on more than the trait says: a send may wait for its receiver.
#![cfg(all(feature = "sim", feature = "tcp"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod backend;
mod calls;
mod errors;
mod forks;
mod messages;
mod together;
