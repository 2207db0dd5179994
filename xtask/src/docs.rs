//! `cargo xtask docs`: generates pages from the code.

use crate::command::{Failure, cargo, output};

pub(crate) const HELP: &str = "\
cargo xtask docs

Generates docs/algorithms.md from the schedules. A test of dist-algos fails if the page is out of date.";

const PAGE: &str = "docs/algorithms.md";

pub(crate) fn run() -> Result<(), Failure> {
    let page = output(&mut cargo("run --quiet --package dist-algos --example algorithms"))?;
    Ok(std::fs::write(PAGE, page)?)
}
