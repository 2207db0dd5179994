//! The same program on two machines, with two ranks on each:
//!
//! ```console
//! $ (umask 077; head -c 32 /dev/urandom > secret)  # once; copy the file to both machines
//! $ export DIST_SECRET_FILE=secret                 # on both
//! $ distctl run -n 2 --nnodes 2 --node-rank 0 --rdzv 10.0.0.1:29500 -- ./two_machines  # on 10.0.0.1
//! $ distctl run -n 2 --nnodes 2 --node-rank 1 --rdzv 10.0.0.1:29500 -- ./two_machines  # on the other
//! ```
#![allow(clippy::print_stdout, reason = "a program prints")]

use dist::collectives::tuning::Hosts;
use dist::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    let rank = comm.rank();

    // A call works in the same way on one machine and on two.
    let mut sum = [rank as u64];
    comm.all_reduce(&mut sum, ReduceOp::Sum)?;

    // This group has the ranks of this machine.
    let mut here = comm.split_by_host()?;
    let mut sum_here = [rank as u64];
    here.all_reduce(&mut sum_here, ReduceOp::Sum)?;
    // This group has the first rank of each machine.
    if let Some(mut leaders) = comm.host_leaders()? {
        let mut sums = vec![0; leaders.world_size()];
        leaders.all_gather(&sum_here, &mut sums)?;
        println!(
            "rank {rank} is the first of {} here; the sums of the machines are {sums:?}",
            here.world_size()
        );
    }

    // Large operations reduce within each machine first, if that is faster.
    let mut large = vec![1.0_f32; 1 << 18];
    comm.all_reduce(&mut large, ReduceOp::Sum)?;
    if rank == 0 {
        let machines = Hosts::new(&comm.hosts()).count();
        println!("{machines} machines, sum of the ranks {}, sum of ones {}", sum[0], large[0]);
    }
    Ok(())
}
