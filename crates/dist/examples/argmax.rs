//! Finds where a function is largest: each rank looks through its share of the points, and one reduction keeps the
//! largest value with its index.
//!
//! `distctl run -n 4 -- target/release/examples/argmax 10000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::collectives::{CustomOp, IndexedValue};

/// A function with the same largest value at several points.
fn height(point: usize) -> f64 {
    ((point * 7919 % 10_007) as f64).sqrt()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let points = std::env::args().nth(1).map_or(Ok(100_000), |points| points.parse::<usize>())?;

    comm.barrier()?;
    let start = Instant::now();
    let mut best = IndexedValue::new(f64::NEG_INFINITY, u64::MAX);
    for point in rank * points / ranks..(rank + 1) * points / ranks {
        let height = height(point);
        if height > best.value() {
            best = IndexedValue::new(height, point as u64);
        }
    }
    // Of equal values, the one with the lower index is kept.
    let mut best = [best];
    comm.all_reduce_with(&mut best, &CustomOp::max_loc())?;
    if rank == 0 {
        println!("{:.6} at {}", best[0].value(), best[0].index());
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}
