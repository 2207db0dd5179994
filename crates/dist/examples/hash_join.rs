//! Joins two tables whose rows are divided among the ranks: each row goes to the rank that its key belongs to, and each
//! rank joins the rows that it got.
//!
//! `distctl run -n 4 -- target/release/examples/hash_join 1000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::cast_possible_truncation,
    reason = "a program prints, and measures its own time; ranks and places are small"
)]

use std::collections::HashMap;
use std::time::Instant;

use dist::prelude::*;

/// A key and a value.
type Row = [u64; 2];

/// Returns a row of table 0 or 1. About `rows` different keys are in each table.
fn row(table: u64, number: usize, rows: usize) -> Row {
    let mixed = (2 * number as u64 + table + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    [(mixed ^ (mixed >> 31)) % rows as u64, number as u64]
}

/// Sends each row to the rank that its key belongs to.
fn shuffle(comm: &mut Communicator, rows: &[Row]) -> dist::collectives::Result<Vec<Row>> {
    let ranks = comm.world_size();
    let mut lists = vec![Vec::new(); ranks];
    for &row in rows {
        lists[row[0] as usize % ranks].push(row);
    }
    // An element is a whole row.
    Ok(comm.all_to_all_vec(&lists)?.concat())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rows = std::env::args().nth(1).map_or(Ok(20_000), |rows| rows.parse::<usize>())?;
    let own = rank * rows / ranks..(rank + 1) * rows / ranks;
    let [left, right] =
        [0, 1].map(|table| own.clone().map(|number| row(table, number, rows)).collect::<Vec<_>>());

    comm.barrier()?;
    let start = Instant::now();
    let (left, right) = (shuffle(&mut comm, &left)?, shuffle(&mut comm, &right)?);
    let mut values_of = HashMap::<u64, Vec<u64>>::new();
    for [key, value] in left {
        values_of.entry(key).or_default().push(value);
    }
    let mut totals = [0_u64; 2];
    for [key, right] in right {
        for left in values_of.get(&key).into_iter().flatten() {
            totals = [totals[0] + 1, totals[1].wrapping_add(left ^ right)];
        }
    }
    comm.all_reduce(&mut totals, ReduceOp::Sum)?;
    if rank == 0 {
        println!("{} pairs, checksum {:x}", totals[0], totals[1]);
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}
