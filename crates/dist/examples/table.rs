//! One table per host: each rank of a host computes a part of it, and all of them read everywhere in it through a
//! window, without a message.
//!
//! `distctl run -n 4 -- target/release/examples/table 1000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::cast_possible_truncation,
    reason = "a program prints, and measures its own time; ranks and places are small"
)]

use std::time::Instant;

use dist::prelude::*;

/// Entries of the table.
const ENTRIES: usize = 1 << 16;

/// Returns arbitrary bits that depend only on the number (SplitMix64).
fn mixed(number: usize) -> u64 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let reads = std::env::args().nth(1).map_or(Ok(20_000), |reads| reads.parse::<usize>())?;
    // All ranks of this host. Each has a part of the same length; the last one may have some entries too many.
    let mut here = comm.split_by_host()?.into_communicator();
    let len = ENTRIES.div_ceil(here.world_size());
    let mut part = here.alloc::<u64>(len)?;

    comm.barrier()?;
    let start = Instant::now();
    for (entry, number) in part.iter_mut().zip(here.rank() * len..) {
        *entry = mixed(number);
    }
    let mut table = here.open(part)?;
    let mut sum = 0_u64;
    for number in rank * reads / ranks..(rank + 1) * reads / ranks {
        let place = (mixed(number) % ENTRIES as u64) as usize;
        let mut entry = [0];
        table.read(place / len, place % len, &mut entry)?;
        sum = sum.wrapping_add(entry[0]);
    }
    table.close()?;
    let sum = comm.all_reduce_value(sum, ReduceOp::Sum)?;
    if rank == 0 {
        println!("{reads} reads, sum {sum:x}");
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}
