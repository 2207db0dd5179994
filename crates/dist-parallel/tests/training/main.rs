//! Tests of data-parallel and sharded training through the public interface.
#![allow(clippy::unwrap_used, reason = "this is a test")]

mod aggregate;
mod buffers;
mod by_hand;
mod calls;
mod checkpoint;
mod compress;
mod data;
mod ddp;
mod dtypes;
mod errors;
mod evaluate;
mod faults;
mod fsdp;
mod groups;
mod half_sums;
mod halves;
mod idle;
mod join;
mod local_sgd;
mod local_sgd_counts;
mod not_finite;
mod panicked;
mod params_crc32;
mod passes;
mod plain;
#[cfg(feature = "tcp")]
mod processes;
mod same_bits;
mod sequence;
mod settings;
mod simulation;
mod strategies;
mod trainer;
mod weighted;
