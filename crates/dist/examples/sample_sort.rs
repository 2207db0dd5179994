//! Sorts keys that are divided among the ranks. The ranks agree on borders by samples, and each rank gets and sorts the
//! keys between two borders.
//!
//! `distctl run -n 4 -- target/release/examples/sample_sort 1000000`
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program prints, and measures its own time"
)]

use std::time::Instant;

use dist::prelude::*;

/// Samples of each rank.
const SAMPLES: usize = 64;

/// Returns arbitrary bits that depend only on the number (SplitMix64).
fn key(number: usize) -> u64 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Sorts the keys of all ranks. Rank 0 has the smallest ones afterwards.
fn sort(comm: &mut Communicator, mut keys: Vec<u64>) -> dist::collectives::Result<Vec<u64>> {
    let ranks = comm.world_size();
    keys.sort_unstable();
    let samples = keys.len().min(SAMPLES);
    let samples: Vec<u64> = (0..samples).map(|sample| keys[sample * keys.len() / samples]).collect();
    let mut samples = comm.all_gather_vec(&samples)?.concat();
    samples.sort_unstable();
    // Rank r gets the keys from border r - 1 up to border r.
    let borders: Vec<u64> = (1..ranks).map(|rank| samples[rank * samples.len() / ranks]).collect();
    let mut rest = &keys[..];
    let mut parts = Vec::new();
    for border in borders {
        let (part, others) = rest.split_at(rest.partition_point(|&key| key < border));
        parts.push(part.to_vec());
        rest = others;
    }
    parts.push(rest.to_vec());
    // Nobody knows in advance how many keys arrive.
    let mut sorted = comm.all_to_all_vec(&parts)?.concat();
    sorted.sort_unstable();
    Ok(sorted)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let count = std::env::args().nth(1).map_or(Ok(20_000), |count| count.parse::<usize>())?;
    let own = (rank * count / ranks..(rank + 1) * count / ranks).map(key).collect();

    comm.barrier()?;
    let start = Instant::now();
    let sorted = sort(&mut comm, own)?;
    let spent = start.elapsed();

    // The checksum depends on the place of each key among all keys.
    let mut first = [sorted.len() as u64];
    comm.exclusive_scan(&mut first, ReduceOp::Sum)?;
    let places = first[0] + 1..;
    let sum = places.zip(&sorted).fold(0_u64, |sum, (place, key)| sum.wrapping_add(key.wrapping_mul(place)));
    let sum = comm.all_reduce_value(sum, ReduceOp::Sum)?;
    if rank == 0 {
        println!("{count} keys, checksum {sum:016x}");
        println!("{:.3} ms", spent.as_secs_f64() * 1e3);
    }
    Ok(())
}
