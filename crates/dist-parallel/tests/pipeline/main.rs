//! Tests of pipelines through the public interface.
#![allow(clippy::unwrap_used, reason = "this is a test")]

#[path = "../training/by_hand.rs"]
mod by_hand;
mod errors;
mod evaluate;
mod groups;
mod interpreter;
mod join;
mod mesh;
mod model;
mod mutants;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../training/plain.rs"]
mod plain;
#[cfg(feature = "tcp")]
mod processes;
mod schedules;
mod settings;
mod timing;
mod training;
mod weighted;
