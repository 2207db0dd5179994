//! The pages of the guide that have code: `cargo test -p book` compiles and runs every block of Rust.

#[doc = include_str!("src/checkpoints.md")]
pub mod checkpoints {}
#[doc = include_str!("src/data.md")]
pub mod data {}
#[doc = include_str!("src/first-all-reduce.md")]
pub mod first_all_reduce {}
#[doc = include_str!("src/install.md")]
pub mod install {}
#[doc = include_str!("src/own-loop.md")]
pub mod own_loop {}
#[doc = include_str!("src/pipelines.md")]
pub mod pipelines {}
#[doc = include_str!("src/shared-memory.md")]
pub mod shared_memory {}
#[doc = include_str!("src/slow-links.md")]
pub mod slow_links {}
#[doc = include_str!("src/strategy.md")]
pub mod strategy {}
#[doc = include_str!("src/testing.md")]
pub mod testing {}
#[doc = include_str!("src/train-candle.md")]
pub mod train_candle {}
#[doc = include_str!("../../README.md")]
pub mod readme {}
