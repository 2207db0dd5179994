//! `distctl verify`: proves all schedules, and checks that the proofs reject mutated schedules.

mod direct;
mod large;
mod line;
mod survey;
mod task;
mod two_levels;

use dist_algos::{ALGORITHMS, AlgorithmTable, CollectiveKind};

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use line::{Mutants, ProofLine};
use task::{Proofs, Task};

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArguments {
    /// Prove all worlds of up to N ranks, at least 2
    #[arg(long, value_name = "N", default_value = "64", value_parser = crate::parse::several_ranks)]
    max_ranks: usize,
    /// Seed that selects some larger worlds, which are proven too
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Returns the roots with which a two-level or a direct schedule is proven: all of a small world, the first and the last
/// of a larger one.
fn roots(world_size: usize) -> Vec<usize> {
    match world_size {
        0..=ALL_ROOTS_MAX => (0..world_size).collect(),
        _ => vec![0, world_size - 1],
    }
}

/// The largest world in which every root is proven.
const ALL_ROOTS_MAX: usize = 16;

/// Proves everything. Fails if a schedule is wrong or too many mutants are not rejected.
pub(crate) fn run(arguments: &VerifyArguments) -> Result<Outcome, Error> {
    let (max_ranks, json) = (arguments.max_ranks, arguments.json);
    let progress = Progress::start()?;
    if !json {
        print(ProofLine::HEADER)?;
    }
    let lines = task::prove_all(&progress, proofs(ALGORITHMS, arguments));
    for line in &lines {
        print(&if json { line.json() } else { line.row() })?;
    }
    let mutants = |tasks: Vec<Task<Mutants>>| Mutants::sum(task::run_all(&progress, &tasks));
    let messages = mutants(survey::mutants(ALGORITHMS, max_ranks));
    let direct = mutants(direct::mutants(ALGORITHMS, max_ranks));
    let all_right =
        lines.iter().all(|line| line.wrong.is_none()) && messages.is_enough() && direct.is_enough();
    let mutants = Mutants::sum([messages, direct]);
    print(&if json { mutants.json() } else { mutants.text() })?;
    Ok(if all_right { Outcome::Success } else { Outcome::Code(1) })
}

/// Returns the proofs of every algorithm of a table.
fn proofs(table: AlgorithmTable<'_>, arguments: &VerifyArguments) -> Vec<Proofs> {
    let max_ranks = arguments.max_ranks;
    let larger = large::worlds(max_ranks, arguments.seed);
    let messages = table.messages().map(|algorithm| survey::proofs(algorithm, max_ranks, &larger));
    let two_levels = CollectiveKind::ALL.into_iter().filter_map(|collective| {
        let algorithms: Vec<_> = table.two_level().filter(|two| two.collective == collective).collect();
        (!algorithms.is_empty()).then(|| two_levels::proofs(collective, &algorithms, max_ranks))
    });
    let direct = table.direct().map(|algorithm| direct::proofs(algorithm, max_ranks));
    messages.chain(two_levels).chain(direct).collect()
}
