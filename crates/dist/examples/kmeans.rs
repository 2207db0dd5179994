//! k-means: every rank has a share of the points, and the ranks sum the points of each centre.
//!
//! `distctl run -n 4 -- target/release/examples/kmeans 1000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::prelude::*;

const CENTRES: usize = 3;
type Point = [f64; 2];

/// Returns a point near (0, 0), (10, 0) or (0, 10). It depends only on its number, so the data are the same
/// on any number of ranks.
fn point(number: usize) -> Point {
    let centre = [[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]][number % CENTRES];
    let noise = |factor: f64| ((number + 1) as f64 * factor).fract() * 4.0 - 2.0;
    [centre[0] + noise(0.618_033_988_749_895), centre[1] + noise(0.754_877_666_246_693)]
}

fn distance(a: Point, b: Point) -> f64 {
    (a[0] - b[0]).hypot(a[1] - b[1])
}

fn nearest(centres: &[Point], point: Point) -> usize {
    let to = |centre: &usize| distance(centres[*centre], point);
    (0..centres.len()).min_by(|a, b| to(a).total_cmp(&to(b))).expect("there are centres")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let points = std::env::args().nth(1).map_or(Ok(30_000), |points| points.parse::<usize>())?;
    let own: Vec<Point> = (rank * points / ranks..(rank + 1) * points / ranks).map(point).collect();

    comm.barrier()?;
    let start = Instant::now();
    // Rank 0 chooses the first centres.
    let mut centres = [[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]];
    comm.broadcast(centres.as_flattened_mut(), 0)?;
    for round in 1.. {
        // For each centre: the sum of its points, and their number.
        let mut sums = [[0.0; 3]; CENTRES];
        for &[x, y] in &own {
            let sum = &mut sums[nearest(&centres, [x, y])];
            *sum = [sum[0] + x, sum[1] + y, sum[2] + 1.0];
        }
        comm.all_reduce(sums.as_flattened_mut(), ReduceOp::Sum)?;
        let next = sums.map(|[x, y, count]| [x / count, y / count]);
        // Every rank has the same bits, so all ranks stop in the same round.
        let moved = (0..CENTRES).map(|centre| distance(centres[centre], next[centre])).fold(0.0, f64::max);
        centres = next;
        if moved < 1e-9 {
            if rank == 0 {
                println!("after {round} rounds:");
                centres.iter().for_each(|[x, y]| println!("({x:.3}, {y:.3})"));
                println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
            }
            return Ok(());
        }
    }
    Ok(())
}
