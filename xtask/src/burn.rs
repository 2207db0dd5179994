//! `cargo xtask burn`: checks and tests the crate dist-burn, which is not a default member.

use std::process::Command;

use crate::command::{Failure, Steps, cargo, show};

pub(crate) const HELP: &str = "\
cargo xtask burn

Checks and tests dist-burn, and prints how long that took. dist-burn is no default member, because burn has
about 140 crates: clippy of its library, tests and examples, its documents, and all of its tests.";

pub(crate) fn run() -> Result<(), Failure> {
    let mut steps = Steps::default();
    steps.step("burn: clippy", || {
        show(&mut unoptimised("clippy --package dist-burn --all-targets -- -D warnings"))?;
        show(&mut unoptimised("clippy --package dist --features burn -- -D warnings"))
    })?;
    steps.step("burn: docs", || {
        show(unoptimised("doc --package dist-burn --no-deps").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.step("burn: tests", || show(&mut unoptimised("test --package dist-burn")))?;
    steps.summary();
    Ok(())
}

/// Returns a cargo command that builds without optimisation. The models of the tests are small, and burn builds faster.
fn unoptimised(arguments: &str) -> Command {
    let mut command = cargo(arguments);
    command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
    command
}
