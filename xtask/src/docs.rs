//! `cargo xtask docs`: pages that are made of the code.

use crate::command::{Failure, cargo, output};

pub(crate) const HELP: &str = "\
cargo xtask docs

Writes docs/algorithms.md from the schedules themselves. A test of dist-algos fails while the page is another.";

const PAGE: &str = "docs/algorithms.md";

pub(crate) fn run() -> Result<(), Failure> {
    let page = output(&mut cargo("run --quiet --package dist-algos --example algorithms"))?;
    Ok(std::fs::write(PAGE, page)?)
}
