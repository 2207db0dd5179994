//! The pages of the guide that have code: `cargo test -p book` compiles and runs every block of Rust.

#[doc = include_str!("src/first-all-reduce.md")]
pub mod first_all_reduce {}
#[doc = include_str!("src/install.md")]
pub mod install {}
