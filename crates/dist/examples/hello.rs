//! Every rank says hello, and rank 0 says who is there.
//!
//! `distctl run -n 3 -- target/release/examples/hello` starts it as three processes; alone it is a world of one rank.
#![allow(clippy::print_stdout, reason = "a program prints")]

use dist::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    println!("hello from rank {} of {}", comm.rank(), comm.world_size());
    // Every rank gives its process id and gets those of all ranks, in the order of the ranks.
    let mut processes = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut processes)?;
    if comm.rank() == 0 {
        println!("the processes are {processes:?}");
    }
    // Compares the last call of all ranks, too. It is not needed to end a program.
    comm.close()?;
    Ok(())
}
