#![doc = include_str!("../README.md")]

pub mod oracle;
pub mod process;
