//! `distctl verify`: proofs of all schedules, and what is found when they are changed.

mod direct;
mod large;
mod line;
mod survey;
mod two_levels;

use dist_algos::ALGORITHMS;

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use line::Line;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Prove every world of up to so many ranks, 2 at the least
    #[arg(long, value_name = "N", default_value = "64", value_parser = crate::parse::several_ranks)]
    max_ranks: usize,
    /// Which larger worlds are taken as well
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,
    /// One JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// The roots that schedules which are executed step by step are proven with: in larger worlds the first and the last.
fn roots(world_size: usize) -> Vec<usize> {
    match world_size {
        0..=ALL_ROOTS_MAX => (0..world_size).collect(),
        _ => vec![0, world_size - 1],
    }
}

/// Up to so many ranks every root takes next to no time.
const ALL_ROOTS_MAX: usize = 16;

/// Proves everything; fails if a schedule is wrong or too many changed ones pass.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome, Error> {
    let table = ALGORITHMS;
    let larger = large::worlds(arguments.max_ranks, arguments.seed);
    let mut all_right = true;
    let progress = Progress::start()?;
    if !arguments.json {
        print(Line::HEADER)?;
    }
    for algorithm in table.messages() {
        progress.doing(format!("proving {} by {}", algorithm.collective, algorithm.name));
        let line = survey::line(algorithm, arguments.max_ranks, &larger);
        all_right &= line.wrong.is_none();
        print(&if arguments.json { line.json() } else { line.row() })?;
    }
    progress.doing("proving schedules on two levels and in shared memory");
    let two_levels = two_levels::lines(table, arguments.max_ranks);
    for line in two_levels.chain(direct::lines(table, arguments.max_ranks)) {
        all_right &= line.wrong.is_none();
        print(&if arguments.json { line.json() } else { line.row() })?;
    }
    progress.doing("changing schedules, which are to be rejected");
    let mut mutants = survey::mutants(table, arguments.max_ranks);
    let direct = direct::mutants(table, arguments.max_ranks);
    all_right &= mutants.is_enough() && direct.is_enough();
    mutants.add(direct.mutants, direct.rejected, direct.survivors);
    print(&if arguments.json { mutants.json() } else { mutants.text() })?;
    Ok(if all_right { Outcome::Success } else { Outcome::Code(1) })
}
