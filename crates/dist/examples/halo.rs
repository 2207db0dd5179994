//! Heat spreads over a plate whose rows are divided among the ranks. In each step neighbours exchange the rows at
//! their edges, the halo.
//!
//! `distctl run -n 4 -- target/release/examples/halo 10000`
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program prints and takes its time")]

use std::time::Instant;

use dist::collectives::Message;
use dist::prelude::*;

const ROWS: usize = 48;
const COLUMNS: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let steps = std::env::args().nth(1).map_or(Ok(100), |steps| steps.parse::<usize>())?;
    let first = |rank: usize| rank * ROWS / ranks;
    let rows = first(rank + 1) - first(rank);

    // Rows 1 to `rows` are this rank's own; row 0 and the last one are copies of its neighbours' rows.
    let mut plate = vec![[0.0_f64; COLUMNS]; rows + 2];
    let hot = ROWS / 2;
    if (first(rank)..first(rank + 1)).contains(&hot) {
        plate[hot - first(rank) + 1] = [100.0; COLUMNS];
    }
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..steps {
        exchange(&mut comm, &mut plate)?;
        plate = step(&plate);
    }

    // Rank 0 gets all rows. The ranks can have different numbers of rows.
    let counts: Vec<usize> = (0..ranks).map(|rank| (first(rank + 1) - first(rank)) * COLUMNS).collect();
    let mut whole = vec![0.0; if rank == 0 { ROWS * COLUMNS } else { 0 }];
    comm.gather_v(plate[1..=rows].as_flattened(), &counts, &mut whole, 0)?;
    if rank == 0 {
        let middle = whole[hot * COLUMNS + COLUMNS / 2];
        let heat: f64 = whole.iter().sum();
        println!("heat {heat:.3}, {middle:.3} in the middle, bits {:x}", middle.to_bits());
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Sends the first and the last own row to the neighbours, and receives theirs. All four messages are sent at once.
fn exchange(comm: &mut Communicator, plate: &mut [[f64; COLUMNS]]) -> dist::collectives::Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let [above, own @ .., below] = plate else { unreachable!("a plate has a halo") };
    // At the edge of the plate no heat is lost: the halo is a copy of the edge.
    let (Some(top), Some(bottom)) = (own.first(), own.last()) else {
        unreachable!("there are fewer ranks than rows")
    };
    (*above, *below) = (*top, *bottom);
    let mut messages = Vec::new();
    if rank > 0 {
        messages.push(Message::send(rank - 1, top));
        messages.push(Message::receive(rank - 1, above));
    }
    if rank + 1 < ranks {
        messages.push(Message::send(rank + 1, bottom));
        messages.push(Message::receive(rank + 1, below));
    }
    comm.batch(&mut messages)
}

/// Moves each point towards the mean of its four neighbours, by a quarter of the difference.
fn step(plate: &[[f64; COLUMNS]]) -> Vec<[f64; COLUMNS]> {
    let mut next = plate.to_vec();
    for row in 1..plate.len() - 1 {
        for column in 0..COLUMNS {
            let sides = plate[row][column.saturating_sub(1)] + plate[row][(column + 1).min(COLUMNS - 1)];
            let around = sides + plate[row - 1][column] + plate[row + 1][column];
            next[row][column] += 0.25 * (0.25 * around - plate[row][column]);
        }
    }
    next
}
