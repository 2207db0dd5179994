#![doc = include_str!("../README.md")]

pub mod hosts;
pub mod oracle;
pub mod process;
