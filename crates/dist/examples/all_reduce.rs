//! Sums, maxima and means over all ranks, in place and without waiting.
//!
//! `distctl run -n 4 -- target/release/examples/all_reduce`
#![allow(clippy::print_stdout, reason = "a program prints")]

use dist::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    let rank = comm.rank() as f32;

    // In place: afterwards every rank has the sums, with the same bits.
    let mut sums = vec![rank + 1.0; 1_000_000];
    comm.all_reduce(&mut sums, ReduceOp::Sum)?;

    // Two operations run at once, while this rank computes. They own their memory until `wait` returns it.
    let largest = comm.start_all_reduce(vec![rank; 1000], ReduceOp::Max);
    let means = comm.start_all_reduce(vec![rank; 1000], ReduceOp::Mean);
    let computed: f64 = (0..1000).map(|number| f64::from(number).sqrt()).sum();
    let (largest, means) = (largest.wait()?.into_vec(), means.wait()?.into_vec());

    // Other types work in the same way. Integers wrap on overflow, and have no mean.
    let mut ranks = [1_u64];
    comm.all_reduce(&mut ranks, ReduceOp::Sum)?;

    if comm.rank() == 0 {
        println!("{} ranks: sum {}, largest {}, mean {}", ranks[0], sums[999_999], largest[999], means[999]);
        println!("meanwhile rank 0 computed {computed:.3}");
    }
    Ok(())
}
