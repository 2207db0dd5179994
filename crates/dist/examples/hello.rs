//! Every rank prints its number, and rank 0 prints the process ids of all ranks.
//!
//! `distctl run -n 3 -- target/release/examples/hello` starts it as three processes; alone it is a world of one rank.
//! Built with the feature `mpi`, it goes through MPI: `mpirun -n 3 target/release/examples/hello`.
#![allow(clippy::print_stdout, reason = "a program prints")]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = dist::init()?;
    println!("hello from rank {} of {}", comm.rank(), comm.world_size());
    // Every rank passes its process id and gets the process ids of all ranks, in rank order.
    let mut processes = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut processes)?;
    if comm.rank() == 0 {
        println!("the processes are {processes:?}");
    }
    // Also compares the last call of all ranks. A program can end without it.
    comm.close()?;
    Ok(())
}
