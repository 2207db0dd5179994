//! `cargo xtask tidy`: what neither the compiler nor clippy checks.

mod layers;
mod source;
mod tree;

#[cfg(test)]
mod tests;

use crate::command::{Failure, cargo, output};
use tree::Tree;

pub(crate) const HELP: &str = "\
cargo xtask tidy

Checks what neither the compiler nor clippy does:
  layers     a crate's manifest names only crates below it (not for tests); candle only in dist-candle
  members    every crate is a default member, or is listed as one that has a step of its own
  headers    every .rs file begins with //! or with its README, every crate has a README
  unsafe     nowhere but in the files that are listed for it; every crate takes the workspace's lints
  names      no file is called utils, common, helpers, types, base, manager, misc; no glob re-exports
  top level  nothing in the root folder but what belongs there
  lengths    warns of files over 500 lines and functions over 70";

/// One thing that a rule found.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    text: String,
    /// A warning is printed but fails nothing.
    warning: bool,
}

impl Finding {
    fn error(path: &str, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), text: text.into(), warning: false }
    }

    fn warning(path: &str, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), text: text.into(), warning: true }
    }
}

type Rule = fn(&Tree) -> Vec<Finding>;

const RULES: &[Rule] = &[
    layers::order,
    layers::default_members,
    layers::candle_stays_home,
    layers::workspace_lints,
    layers::readmes,
    layers::top_level,
    source::headers,
    source::no_unsafe,
    source::names,
    source::no_glob_exports,
    source::lengths,
];

pub(crate) fn run() -> Result<(), Failure> {
    let metadata = output(&mut cargo("metadata --no-deps --format-version 1"))?;
    let tree = Tree::read(&metadata)?;
    let findings = check(&tree);
    for Finding { path, text, warning } in &findings {
        eprintln!("{}: {path}: {text}", if *warning { "warning" } else { "error" });
    }
    match findings.iter().filter(|finding| !finding.warning).count() {
        0 => Ok(()),
        errors => Err(Failure::Check(format!("tidy: {errors} errors"))),
    }
}

fn check(tree: &Tree) -> Vec<Finding> {
    RULES.iter().flat_map(|rule| rule(tree)).collect()
}
