//! Pipelines, from the level of their users.
#![allow(clippy::unwrap_used, reason = "this is a test")]

mod interpreter;
mod mutants;
mod schedules;
