//! Mean and variance of numbers that are divided among the ranks. Each rank adds up its own numbers (Welford), and an
//! operation of the program's own merges the results.
//!
//! `distctl run -n 4 -- target/release/examples/welford 10000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::collectives::CustomOp;

/// A number of values, their mean, and the sum of the squares of their distances from the mean.
type Moments = [f64; 3];

fn merge([left, left_mean, left_squares]: Moments, [right, right_mean, right_squares]: Moments) -> Moments {
    let (count, delta) = (left + right, right_mean - left_mean);
    if count == 0.0 {
        return [0.0; 3];
    }
    let squares = left_squares + right_squares + delta * delta * left * right / count;
    [count, left_mean + delta * right / count, squares]
}

/// A number near 1,000,000, where the usual formula loses all digits.
fn number(index: usize) -> f64 {
    1e6 + ((index + 1) as f64 * 0.618_033_988_749_895).fract()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let count = std::env::args().nth(1).map_or(Ok(100_000), |count| count.parse::<usize>())?;

    comm.barrier()?;
    let start = Instant::now();
    let own = (rank * count / ranks..(rank + 1) * count / ranks).map(number);
    let mut moments = [own.fold([0.0; 3], |moments, number| merge(moments, [1.0, number, 0.0]))];
    comm.all_reduce_with(&mut moments, &CustomOp::of_pairs("merge moments", merge))?;
    let [count, mean, squares] = moments[0];
    if rank == 0 {
        println!("{count} numbers, mean {mean:.6}, variance {:.6}", squares / (count - 1.0));
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}
