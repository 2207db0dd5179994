//! A task farm: rank 0 gives tasks to the ranks that are ready for them, and receives the results in the order in which
//! they are ready, from any rank.
//!
//! `distctl run -n 4 -- target/release/examples/task_farm 10000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::prelude::*;

/// The task that ends a worker.
const END: u64 = u64::MAX;

/// Returns the number of steps from each of 64 numbers to 1: halve even numbers, and triple odd ones and add 1.
fn work(task: u64) -> u64 {
    let mut steps = 0;
    for mut number in 64 * task..64 * (task + 1) {
        while number > 1 {
            number = if number.is_multiple_of(2) { number / 2 } else { 3 * number + 1 };
            steps += 1;
        }
    }
    steps
}

/// Returns the sum of the results of all tasks.
fn give(comm: &mut Communicator, tasks: u64) -> dist::collectives::Result<u64> {
    let (mut total, mut next, mut working) = (0, 0, comm.world_size() - 1);
    while working > 0 {
        // The first result of a worker is 0: it asks for a task.
        let mut result = [0];
        let from = comm.recv_any(&mut result)?;
        total += result[0];
        let task = if next < tasks { next } else { END };
        next += 1;
        working -= usize::from(task == END);
        comm.send(&[task], from)?;
    }
    Ok(total)
}

/// Works until there is nothing left to do.
fn take(comm: &mut Communicator) -> dist::collectives::Result<()> {
    let mut task = [0];
    comm.send(&[0_u64], 0)?;
    loop {
        comm.recv(&mut task, 0)?;
        if task[0] == END {
            return Ok(());
        }
        comm.send(&[work(task[0])], 0)?;
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let tasks = std::env::args().nth(1).map_or(Ok(100), |tasks| tasks.parse::<u64>())?;

    comm.barrier()?;
    let start = Instant::now();
    let total = match (comm.rank(), comm.world_size()) {
        // There are no workers.
        (0, 1) => (0..tasks).map(work).sum(),
        (0, _) => give(&mut comm, tasks)?,
        _ => return Ok(take(&mut comm)?),
    };
    println!("{total} steps");
    println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    Ok(())
}
