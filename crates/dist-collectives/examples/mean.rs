//! The mean of a gradient of every rank.
//!
//! `distctl run -n 4 -- target/release/examples/mean` runs it as four processes.
#![allow(clippy::print_stdout, reason = "it is a program")]

use dist_collectives::{Communicator, ReduceOp};

fn main() -> anyhow::Result<()> {
    // `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` describe the world; if none is set, it has one rank.
    let mut comm = Communicator::from_env()?;
    let mut gradient = vec![comm.rank() as f32; 1000];
    comm.all_reduce(&mut gradient, ReduceOp::Mean)?;
    if comm.rank() == 0 {
        println!("the mean is {}", gradient[0]);
    }
    Ok(())
}
