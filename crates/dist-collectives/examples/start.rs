//! The time from the start of a job until its last rank has passed its first barrier.
//!
//! `distctl run -n 256 -- target/release/examples/start $(date +%s%N)` prints it on rank 0. The argument is the time of the
//! start, in nanoseconds since 1970.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use dist_collectives::{Communicator, ReduceOp};

fn main() -> anyhow::Result<()> {
    let begun = std::env::args().nth(1).context("start $(date +%s%N)")?;
    let begun = UNIX_EPOCH + Duration::from_nanos(begun.parse()?);
    let is_begun = SystemTime::now();
    let mut comm = Communicator::from_env()?;
    let has_joined = SystemTime::now();
    comm.barrier()?;
    let times = [is_begun, has_joined, SystemTime::now()];
    let mut seconds = [0.0; 3];
    for (seconds, time) in seconds.iter_mut().zip(times) {
        *seconds = time.duration_since(begun)?.as_secs_f64();
    }
    comm.all_reduce(&mut seconds, ReduceOp::Max)?;
    if comm.rank() == 0 {
        let ([main, join, barrier], ranks) = (seconds, comm.world_size());
        println!(
            "the last of {ranks} ranks: main {main:.2} s, joined {join:.2} s, first barrier {barrier:.2} s"
        );
    }
    Ok(comm.close()?)
}
