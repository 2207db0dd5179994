//! `cargo xtask book`: checks and builds the guide.

use std::process::{Command, Stdio};

use crate::command::{Failure, cargo, output, print_help, show, target_folder};
use crate::tidy;

pub(crate) const HELP: &str = "\
cargo xtask book [--write]

Checks the guide in docs/book as cargo xtask tidy does, and builds it with mdBook into target/book. The Rust
code of its pages is tested by cargo test -p book.
  --write   first generate the reference of distctl; a test fails if that page is out of date";

/// The version of mdBook that builds the book; .ci/run installs it.
const INSTALL: &str = "cargo install mdbook --version 0.5.4 --locked --no-default-features --features search";

/// The page of the guide that `distctl reference` prints.
const REFERENCE: &str = "distctl.md";

pub(crate) fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let mut write = false;
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                return print_help(HELP);
            }
            lexopt::Arg::Long("write") => write = true,
            other => return Err(other.unexpected().into()),
        }
    }
    if write {
        write_generated()?;
    }
    tidy::check_pages()?;
    if !is_installed() {
        return Err(Failure::Usage(format!("mdBook builds the book, and is not installed: {INSTALL}")));
    }
    build()
}

/// Builds the book if mdBook is installed. Does not repeat the checks of `tidy`.
pub(crate) fn build_if_possible() -> Result<(), Failure> {
    if is_installed() {
        return build();
    }
    eprintln!("     skipped: mdBook is not installed ({INSTALL})");
    Ok(())
}

fn is_installed() -> bool {
    let version =
        Command::new("mdbook").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

fn build() -> Result<(), Failure> {
    let folder = target_folder()?.join("book");
    show(Command::new("mdbook").args(["build", "docs/book", "--dest-dir"]).arg(&folder))?;
    eprintln!("     {}", folder.join("index.html").display());
    Ok(())
}

fn write_generated() -> Result<(), Failure> {
    let page = output(&mut cargo("run --quiet --package dist-cli --bin distctl -- reference"))?;
    Ok(std::fs::write(format!("{}{REFERENCE}", tidy::BOOK), page)?)
}
