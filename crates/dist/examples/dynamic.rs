//! Dynamic scheduling: rounds take different times, so each rank takes the next ones when it is ready for them. The
//! store at the coordinator counts the rounds that were taken.
//!
//! `distctl run -n 4 -- target/release/examples/dynamic 200000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::prelude::*;

/// Rounds that a rank takes at once.
const CHUNK: usize = 256;

/// Returns the number of steps from `start` to 1: halve even numbers, and triple odd ones and add 1.
fn steps(start: usize) -> u64 {
    let mut number = start;
    let mut steps = 0;
    while number > 1 {
        number = if number.is_multiple_of(2) { number / 2 } else { 3 * number + 1 };
        steps += 1;
    }
    steps
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let rounds = std::env::args().nth(1).map_or(Ok(5_000), |rounds| rounds.parse::<usize>())?;
    let store = comm.store()?;

    comm.barrier()?;
    let start = Instant::now();
    let mut total = 0;
    loop {
        let end = usize::try_from(store.add("rounds taken", CHUNK as i64)?)?;
        let first = end - CHUNK;
        if first >= rounds {
            break;
        }
        total += (first..end.min(rounds)).map(steps).sum::<u64>();
    }
    let total = comm.all_reduce_value(total, ReduceOp::Sum)?;
    if comm.rank() == 0 {
        println!("{total} steps");
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}
