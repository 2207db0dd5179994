//! `cargo xtask sim`: programs under many seeds, on the simulated network.

use crate::command::{Failure, cargo, print_help, show};
use crate::members;

pub(crate) const HELP: &str = "\
cargo xtask sim [--seeds N] [--first N] [--size]

Runs each program of crates/dist-parallel/examples/explore (collectives, groups that overlap, operations
under way at once, training with whole and with sharded models, by a pipeline, with checkpoints) under so
many seeds (500), from the first on (0). The seed decides in which order threads run, whether ranks share
memory and, in three runs of four, what goes wrong: ranks die, stall or are slow, messages are late, hosts
are cut off. Every rank must end with the right result or an error, and all that one coordinator told of
the end must name the same culprit; what a training has saved by then must lead where one comes that was
not interrupted. A failure is printed with its seed, what went wrong, and what every rank waited for;
--seeds 1 --first SEED does it again.
--size runs large worlds instead, and says how long they take: 1000 ranks must do an all_reduce of 1 MiB, and
64 ranks 20 steps of training, in 10 s each and in 4 GiB.";

pub(crate) fn run(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let (mut seeds, mut first, mut size) = (500_u64, 0_u64, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                return print_help(HELP);
            }
            lexopt::Arg::Long("seeds") => seeds = number(&mut arguments)?,
            lexopt::Arg::Long("first") => first = number(&mut arguments)?,
            lexopt::Arg::Long("size") => size = true,
            other => return Err(other.unexpected().into()),
        }
    }
    let arguments = if size { "size".to_owned() } else { format!("{seeds} {first}") };
    explore("--release --package dist-parallel", &arguments)
}

/// Runs a number of seeds that takes seconds, with what the tests have built, for `cargo xtask test`.
pub(crate) fn run_some() -> Result<(), Failure> {
    explore(&members::all_features()?, "100 0")
}

fn explore(build: &str, arguments: &str) -> Result<(), Failure> {
    show(&mut cargo(&format!("run --quiet {build} --example explore -- {arguments}")))
}

fn number(arguments: &mut lexopt::Parser) -> Result<u64, Failure> {
    let value = arguments.value()?.to_string_lossy().into_owned();
    value.parse().map_err(|_| Failure::Usage(format!("{value:?} is no number")))
}
