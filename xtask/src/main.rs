//! The developer's tool: checks, tests, measurements and generated pages of this workspace.

mod bench;
mod book;
mod burn;
mod ci;
mod command;
mod compare;
mod docs;
mod hosts;
mod matrix;
mod members;
mod mpi;
mod predict;
mod sim;
mod test;
mod tidy;
mod torch;

use std::process::ExitCode;

use command::{Failure, print_help};

const HELP: &str = "\
cargo xtask COMMAND [OPTIONS]      cargo xtask COMMAND --help

  ci       run all checks: fmt, clippy, tidy, docs, each crate alone, cargo-deny, test
  test     run all tests: unit, documentation, property, simulation and process tests, then the matrix
  matrix   check every transport, number of ranks, algorithm, type and operation in processes  [--filter TEXT]
  sim      run programs on the simulated network under many seeds with random faults           [--seeds N]
  predict  compare predicted with measured times, on this host and on slowed links             [--filter NAME]
  hosts    run a program as ranks on several hosts, which are network namespaces of this machine
  compare  compare times with those of other libraries, measured in the same run               [--ops LIST]
  burn     check and test dist-burn, which is no default member
  mpi      check and test dist-mpi, which is no default member, with each installed MPI          [--all]
  torch    check and test dist-torch, which is no default member, with PyTorch                 [--all]
  bench    run the criterion benches, one file per algorithm                                   [--filter TEXT]
  book     check the guide and build it into target/book                                       [--write]
  docs     generate docs/algorithms.md from the schedules
  tidy     check layers, headers, unsafe, names, words, lengths, and the links of pages        [--words]

Also: cargo demo trains a small model on 2 processes; distctl (crates/dist-cli) starts and measures jobs.";

fn main() -> ExitCode {
    match run(lexopt::Parser::from_env()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the names of all commands that the help lists.
pub(crate) fn commands() -> impl Iterator<Item = &'static str> {
    HELP.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
}

fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let command = match arguments.next()? {
        Some(lexopt::Arg::Value(name)) => name.to_string_lossy().into_owned(),
        Some(lexopt::Arg::Long("help") | lexopt::Arg::Short('h')) | None => {
            return print_help(HELP);
        }
        Some(other) => return Err(other.unexpected().into()),
    };
    std::env::set_current_dir(command::workspace_root())?;
    match command.as_str() {
        "ci" => with_help(arguments, ci::HELP, ci::run),
        "burn" => with_help(arguments, burn::HELP, burn::run),
        "mpi" => mpi::run(arguments),
        "test" => with_help(arguments, test::HELP, test::run),
        "book" => book::run(arguments),
        "docs" => with_help(arguments, docs::HELP, docs::run),
        "tidy" => tidy::run(arguments),
        "torch" => torch::run(arguments),
        "matrix" => with_filter(arguments, matrix::HELP, matrix::run),
        "sim" => sim::run(arguments),
        "compare" => compare::run(arguments),
        "hosts" => hosts::run(arguments),
        "predict" => predict::run(arguments),
        "bench" => with_filter(arguments, bench::HELP, bench::run),
        _ => Err(Failure::Usage(format!("there is no command {command:?}\n\n{HELP}"))),
    }
}

fn with_help(
    arguments: lexopt::Parser,
    help: &str,
    command: fn() -> Result<(), Failure>,
) -> Result<(), Failure> {
    match parse(arguments, help, false)? {
        Some(_) => command(),
        None => Ok(()),
    }
}

fn with_filter(
    arguments: lexopt::Parser,
    help: &str,
    command: fn(&str) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match parse(arguments, help, true)? {
        Some(filter) => command(&filter),
        None => Ok(()),
    }
}

/// Parses the arguments and returns the value of `--filter`, which is empty if it is not given. Returns `None` if help was
/// requested, and prints it.
fn parse(mut arguments: lexopt::Parser, help: &str, takes_filter: bool) -> Result<Option<String>, Failure> {
    let mut filter = String::new();
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                print_help(help)?;
                return Ok(None);
            }
            lexopt::Arg::Long("filter") if takes_filter => {
                filter = arguments.value()?.to_string_lossy().into_owned();
            }
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Some(filter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_help_fits_on_one_screen() {
        for help in [
            HELP,
            ci::HELP,
            burn::HELP,
            mpi::HELP,
            torch::HELP,
            test::HELP,
            tidy::HELP,
            matrix::HELP,
            bench::HELP,
            book::HELP,
            sim::HELP,
            predict::HELP,
            hosts::HELP,
            compare::HELP,
        ] {
            assert!(help.lines().count() <= 24, "{help}");
            assert!(help.lines().all(|line| line.chars().count() <= 110), "{help}");
        }
    }

    #[test]
    fn a_filter_is_refused_where_there_is_nothing_to_filter() {
        let arguments = || lexopt::Parser::from_args(["--filter", "ring"]);
        assert_eq!(parse(arguments(), "", true).unwrap().as_deref(), Some("ring"));
        assert!(parse(arguments(), "", false).is_err());
    }
}
