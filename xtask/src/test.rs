//! `cargo xtask test`: every test there is.

use crate::command::{Failure, Steps, cargo, show};
use crate::{matrix, members, sim};

pub(crate) const HELP: &str = "\
cargo xtask test

Runs every test there is: unit, document, property, symbolic and simulation tests of all crates, tests
that start processes, each bench once, 100 seeds of cargo xtask sim, and then the whole matrix
(cargo xtask matrix).
One crate alone: cargo test -p dist-algos. One test: cargo test -p dist-algos NAME.";

pub(crate) fn run() -> Result<(), Failure> {
    let mut steps = Steps::default();
    add_steps(&mut steps)?;
    steps.summary();
    Ok(())
}

/// The steps of this command, for `ci` to have them too.
pub(crate) fn add_steps(steps: &mut Steps) -> Result<(), Failure> {
    let features = members::all_features()?;
    steps.step("tests", || show(&mut cargo(&format!("test {features}"))))?;
    steps.step("each bench once", || show(&mut cargo("test --package benches --benches")))?;
    steps.step("simulations", sim::run_some)?;
    steps.step("matrix", || matrix::run(""))
}
