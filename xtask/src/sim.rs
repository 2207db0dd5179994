//! `cargo xtask sim`: runs programs on the simulated network, under many seeds.

use crate::command::{Failure, cargo, print_help, show};
use crate::members;

pub(crate) const HELP: &str = "\
cargo xtask sim [--seeds N] [--first N] [--size]

Runs each program of crates/dist-parallel/examples/explore on the simulated network, under N seeds (500) from
the first one (0) on. The programs are collectives, overlapping groups, concurrent operations, and training
with replicated and sharded models, as a pipeline, and with checkpoints.
The seed determines the order of threads, whether ranks share memory, and in three of four runs the faults:
ranks die, stall or are slow, messages are late, hosts are cut off.
Every rank must end with the right result or with an error. All ranks that the same coordinator informed must
report the same cause. Training that continues from a checkpoint must give the result of a run without faults.
A failure is printed with its seed and the state of every rank; --seeds 1 --first SEED repeats it.
--size runs large worlds instead and prints their times. An all_reduce of 1 MiB among 1000 ranks, and 20 steps
of training on 64 ranks, must each take at most 10 s and 4 GiB.";

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

/// Runs as many seeds as take a few seconds, with the programs that the tests have built, for `cargo xtask test`.
pub(crate) fn run_some() -> Result<(), Failure> {
    explore(&members::all_features()?, "100 0")
}

fn explore(build: &str, arguments: &str) -> Result<(), Failure> {
    show(&mut cargo(&format!("run --quiet {build} --example explore -- {arguments}")))
}

fn number(arguments: &mut lexopt::Parser) -> Result<u64, Failure> {
    let value = arguments.value()?.to_string_lossy().into_owned();
    value.parse().map_err(|_| Failure::Usage(format!("{value:?} is not a number")))
}
