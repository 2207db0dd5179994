//! `cargo xtask test`: runs all tests.

use crate::command::{Failure, Steps, cargo, show};
use crate::{matrix, members, sim};

pub(crate) const HELP: &str = "\
cargo xtask test

Builds and runs all tests of the default members: unit tests, documentation tests, property tests, proofs,
simulations and tests that start processes. Then it runs each bench once, 100 seeds of cargo xtask sim and the
whole cargo xtask matrix. It prints the time of each step.
One crate alone: cargo test -p dist-algos. One test: cargo test -p dist-algos NAME.";

pub(crate) fn run() -> Result<(), Failure> {
    let mut steps = Steps::default();
    add_steps(&mut steps)?;
    steps.summary();
    Ok(())
}

/// Runs the steps of this command, also for `ci`.
pub(crate) fn add_steps(steps: &mut Steps) -> Result<(), Failure> {
    // All steps build with these features, so that no crate is built twice.
    let features = members::all_features()?;
    steps.step("build tests", || show(&mut cargo(&format!("test {features} --no-run"))))?;
    steps.step("build benches", || show(&mut cargo(&format!("test {features} --no-run --bench *"))))?;
    // Shows the failures of all crates, not only of the first.
    steps.step("tests", || show(&mut cargo(&format!("test {features} --no-fail-fast"))))?;
    steps.step("each bench once", || show(&mut cargo(&format!("test {features} --bench *"))))?;
    steps.step("simulations", sim::run_some)?;
    steps.step("matrix", || matrix::run(""))
}
