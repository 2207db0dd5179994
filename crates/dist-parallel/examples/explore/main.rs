//! Programs under many seeds, with and without faults: what `cargo xtask sim` runs.
//!
//! `explore SEEDS [FIRST]` runs each program under SEEDS seeds, from FIRST on; a failure is printed with its
//! seed and a report, and `explore 1 SEED` does it again. `explore size` shows how long large worlds take, and how much memory.
#![allow(clippy::print_stdout, reason = "a program prints")]

mod programs;
mod size;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use dist_transport::sim::{Network, Outcome};
use programs::{Ended, PROGRAMS, Program};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<u64> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    // The report of the run has the messages of panics.
    std::panic::set_hook(Box::new(|_| {}));
    let held = match (&arguments[..], &numbers[..]) {
        ([only], []) if only == "size" => size::measure(),
        ([_], &[seeds]) => explore(0, seeds),
        ([_, _], &[seeds, first]) => explore(first, seeds),
        _ => {
            eprintln!("explore SEEDS [FIRST] | explore size");
            false
        }
    };
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the number of faults of a run, by its seed: 0 for a quarter. Half of the runs with a number of faults use
/// shared memory.
const FAULTS: u64 = 4;

/// One run in this number is repeated, for every number of faults.
const TWICE: u64 = 15;

fn explore(first: u64, seeds: u64) -> bool {
    let mut held = true;
    let folder = tempfile::tempdir().expect("a folder can be made");
    for program in PROGRAMS {
        let mut disturbed = 0;
        let mut seeds_left = first..first.saturating_add(seeds);
        let explored = Explored { program, folder: folder.path() };
        let broken = seeds_left.try_for_each(|seed| {
            disturbed += u64::from(explored.check(seed)?);
            Ok::<(), String>(())
        });
        match broken {
            Ok(()) => {
                println!("{:12} {seeds} seeds from {first} on held, {disturbed} ended early", program.name);
            }
            Err(report) => {
                held = false;
                println!("{:12} BROKEN: {report}", program.name);
            }
        }
    }
    held
}

/// A program and its folder.
#[derive(Clone, Copy)]
struct Explored<'a> {
    program: &'a Program,
    folder: &'a Path,
}

impl Explored<'_> {
    /// Runs the program under this seed. Returns whether a rank was told of an abort, or the program's mistake.
    fn check(self, seed: u64) -> Result<bool, String> {
        let faults = usize::try_from(seed % FAULTS).expect("a small number");
        let mut world_sizes = self.program.world_sizes.clone();
        let place = usize::try_from(seed).expect("a number of the system") % world_sizes.clone().count();
        let network = Network::new(world_sizes.nth(place).expect("it is below the count")).with_seed(seed);
        let shares = seed / FAULTS % 2 == 1;
        let network = if shares { network.with_shared_memory() } else { network };
        let disturbed = network.clone().with_random_faults(faults);
        let outcome = self.run_anew(&disturbed)?;
        let wrong = match wrong(self.program, &outcome) {
            None if seed.is_multiple_of(TWICE) && self.run_anew(&disturbed)? != outcome => {
                Some("the same seed gave another run".to_owned())
            }
            None if self.program.goes_on => self.goes_on(&network)?,
            wrong => wrong,
        };
        match wrong {
            None => Ok(outcome.results.iter().flatten().any(Result::is_err)),
            Some(wrong) => {
                let lines = outcome.faults.iter().chain(&outcome.waits);
                Err(lines.fold(format!("seed {seed}: {wrong}"), |told, line| told + "\n  " + line))
            }
        }
    }

    /// Returns the mistake of a run that continues from the files of the last one, if any. Without faults it must end
    /// like an uninterrupted run.
    fn goes_on(self, network: &Network) -> Result<Option<String>, String> {
        let after = self.run(network)?.results;
        let whole = self.run_anew(network)?.results;
        let right = after.iter().all(|ended| matches!(ended, Some(Ok(_)))) && after == whole;
        Ok((!right).then(|| format!("went on to {after:?}, not to {whole:?}")))
    }

    fn run_anew(self, network: &Network) -> Result<Outcome<Option<Ended>>, String> {
        let emptied = fs::remove_dir_all(self.folder).and_then(|()| fs::create_dir(self.folder));
        emptied.map_err(|error| format!("the folder cannot be emptied: {error}"))?;
        self.run(network)
    }

    fn run(self, network: &Network) -> Result<Outcome<Option<Ended>>, String> {
        let (run, folder) = (self.program.run, self.folder.to_owned());
        network.try_run(move |transport| run(transport, &folder)).map_err(|failed| failed.to_string())
    }
}

/// Returns the mistake in the results of a run, if any.
fn wrong(program: &Program, outcome: &Outcome<Option<Ended>>) -> Option<String> {
    if outcome.elapsed > program.time_max {
        return Some(format!("it took {:?} of virtual time", outcome.elapsed));
    }
    let ended = outcome.results.iter().enumerate();
    let mut ended = ended.filter_map(|(rank, result)| result.as_ref().map(|result| (rank, result)));
    let digest = outcome.results.iter().flatten().find_map(|ended| ended.as_ref().ok());
    ended
        .find_map(|(rank, ended)| match ended {
            // All ranks without an error must have the same result.
            Ok(own) => {
                (Some(own) != digest).then(|| format!("rank {rank} has another result than the others"))
            }
            Err(told) => outcome.faults.is_empty().then(|| format!("rank {rank}: {}", told.error)),
        })
        .or_else(|| culprits_differ(outcome))
}

/// Returns a message if ranks that one coordinator told of an abort name different culprits.
fn culprits_differ(outcome: &Outcome<Option<Ended>>) -> Option<String> {
    // A rank that is cut off, or has no coordinator, reports its own view.
    let alone = |fault: &String| {
        ["nothing gets", "the coordinator dies", "rank 0 stands"].iter().any(|words| fault.contains(words))
    };
    if outcome.faults.iter().any(alone) {
        return None;
    }
    let told = outcome.results.iter().flatten().filter_map(|ended| ended.as_ref().err()?.culprit.as_ref());
    let mut told: Vec<_> = told.collect();
    told.dedup();
    (told.len() > 1).then(|| format!("ranks were told of different culprits: {told:?}"))
}
