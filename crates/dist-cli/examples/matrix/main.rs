//! One rank of the integration matrix: runs every case and compares the results with the oracle to the last bit.
//!
//! `cargo xtask matrix` starts this in jobs of different sizes. Rank 0 prints a line of JSON per case; a rank with
//! a wrong element names it on stderr. With a first argument `sim:N`, the ranks are N threads of one process on
//! the simulated network instead of the processes of a job.
#![allow(clippy::print_stdout, reason = "a program prints")]

mod cases;
mod check;

use std::process::ExitCode;

use cases::Case;
use check::Checker;
use dist_collectives::algorithms::ALGORITHMS;
use dist_collectives::{Communicator, Config};
use dist_transport::{Runtime, sim};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let world_size = arguments.first().and_then(|first| first.strip_prefix("sim:")).map(str::to_owned);
    let result = match world_size {
        Some(world_size) => {
            arguments.remove(0);
            in_threads(&world_size, arguments)
        }
        None => Config::from_env()
            .map_err(BoxError::from)
            .and_then(|config| all_cases(&mut Communicator::from_env()?, config.medium().name(), &arguments)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("    because {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs all ranks as threads of this process.
fn in_threads(world_size: &str, words: Vec<String>) -> Result<bool, BoxError> {
    let runtime = Runtime::system();
    let mut tasks = Vec::new();
    for transport in sim::network(&runtime, world_size.parse()?) {
        let words = words.clone();
        let rank = move || all_cases(&mut Communicator::new(transport), "sim", &words);
        tasks.push(runtime.spawn("rank", rank)?);
    }
    let mut held = true;
    for task in tasks {
        held &= task.join().map_err(|_| "a rank panicked")??;
    }
    Ok(held)
}

/// Runs every case of this world whose name contains all of the words. Returns `true` if all results were right.
fn all_cases(comm: &mut Communicator, transport: &str, words: &[String]) -> Result<bool, BoxError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut checker = Checker::new(world_size);
    let mut all_held = true;
    for case in Case::all(ALGORITHMS, world_size) {
        let name = case.to_string();
        if !words.iter().all(|word| name.contains(word.as_str())) {
            continue;
        }
        let held = checker.check(comm, case).map_err(|source| Failed { name: name.clone(), source })?;
        all_held &= held;
        if rank == 0 {
            let calls = checker.lengths(case).len();
            println!(
                "{{\"case\":\"{name}\",\"transport\":\"{transport}\",\"ranks\":{world_size},\"calls\":{calls},\"held\":{held}}}"
            );
        }
    }
    Ok(all_held)
}

#[derive(Debug, thiserror::Error)]
#[error("{name}")]
struct Failed {
    name: String,
    source: BoxError,
}
