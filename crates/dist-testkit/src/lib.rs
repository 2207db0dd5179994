#![doc = include_str!("../README.md")]

pub mod forward;
pub mod oracle;
pub mod process;
