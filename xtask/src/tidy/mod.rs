//! `cargo xtask tidy`: what neither the compiler nor clippy checks.

mod layers;
mod markdown;
mod pages;
mod porting;
mod source;
mod tree;
mod words;

#[cfg(test)]
mod tests;

use lexopt::ValueExt;

use crate::command::{Failure, cargo, output, print, print_help};
pub(crate) use pages::BOOK;
use tree::Tree;
use words::Words;

pub(crate) const HELP: &str = "\
cargo xtask tidy [--words [--seed N]]

Checks what neither the compiler nor clippy does:
  layers     crates depend only on crates below them (except for tests); only dist-candle and dist-burn
             depend on their frameworks
  members    every crate is a default member, or is listed as one that CI checks in a step of its own
  headers    every .rs file begins with //! or includes its README, and every crate has a README
  unsafe     only the listed files contain unsafe; every crate uses the lints of the workspace
  names      no file is called utils, common, helpers, types, base, manager, misc; no glob re-exports
  words      names and comments use the field's terms; crates that use each other share no type name;
             --words prints figures of each crate and ten comments to judge, drawn by the seed
  top level  the root folder contains only the listed files
  links      links in Markdown pages lead to existing files and headings
  sentences  in the guide and README.md: at most 20 words on average, and none above 40
  porting    the functions and types in the tables for those who port a program exist
  guide      every page is listed, its Rust is tested, and the cargo commands that it names exist
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
    layers::frameworks_stay_home,
    layers::workspace_lints,
    layers::readmes,
    layers::top_level,
    source::headers,
    source::no_unsafe,
    source::names,
    source::no_glob_exports,
    source::lengths,
    words::rule,
];

/// Rules about Markdown pages.
const PAGE_RULES: &[Rule] =
    &[pages::links, pages::short_sentences, pages::book, pages::cargo_commands, porting::rule];

pub(crate) fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let mut prints_words = false;
    let mut seed = 0;
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                return print_help(HELP);
            }
            lexopt::Arg::Long("words") => prints_words = true,
            lexopt::Arg::Long("seed") => seed = arguments.value()?.parse()?,
            other => return Err(other.unexpected().into()),
        }
    }
    let tree = read_tree()?;
    if prints_words {
        let words = Words::read(&tree);
        print(&words.report(seed))?;
        return report(&words.findings(&tree));
    }
    report(&check(&tree))
}

/// Runs every rule.
pub(crate) fn check_all() -> Result<(), Failure> {
    report(&check(&read_tree()?))
}

/// Checks the Markdown pages only.
pub(crate) fn check_pages() -> Result<(), Failure> {
    let tree = read_tree()?;
    report(&PAGE_RULES.iter().flat_map(|rule| rule(&tree)).collect::<Vec<_>>())
}

fn read_tree() -> Result<Tree, Failure> {
    Tree::read(&output(&mut cargo("metadata --no-deps --format-version 1"))?)
}

fn report(findings: &[Finding]) -> Result<(), Failure> {
    for Finding { path, text, warning } in findings {
        eprintln!("{}: {path}: {text}", if *warning { "warning" } else { "error" });
    }
    match findings.iter().filter(|finding| !finding.warning).count() {
        0 => Ok(()),
        errors => Err(Failure::Check(format!("tidy: {errors} errors"))),
    }
}

fn check(tree: &Tree) -> Vec<Finding> {
    RULES.iter().chain(PAGE_RULES).flat_map(|rule| rule(tree)).collect()
}
