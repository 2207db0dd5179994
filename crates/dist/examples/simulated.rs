//! A program for many ranks as a unit test: in one process, in virtual time, with a rank that dies.
//!
//! `cargo run --example simulated`
#![allow(clippy::print_stdout, reason = "a program prints")]

use std::time::Duration;

use dist::collectives::{Error, Result};
use dist::prelude::*;
use dist::sim::{Fault, Link, Network, When};
use dist::transport::Cause;

/// Runs the program under test. It takes a communicator, so it works with processes and with simulated ranks.
fn largest_of_means(mut comm: Communicator) -> Result<f32> {
    let mut means = vec![comm.rank() as f32; 250_000];
    comm.all_reduce(&mut means, ReduceOp::Mean)?;
    let mut largest = [means.iter().copied().fold(0.0, f32::max)];
    comm.all_reduce(&mut largest, ReduceOp::Max)?;
    Ok(largest[0])
}

fn main() {
    // Four ranks on two hosts, with 10 Gbit/s and 20 µs between them. The seed determines the order of the
    // threads.
    let network = Network::new(4)
        .with_seed(7)
        .with_hosts(&[0, 0, 1, 1])
        .with_host_link(Link::new(Duration::from_micros(20), 1_250_000_000));
    let outcome = network.run(|transport| largest_of_means(Communicator::new(transport)));
    for result in &outcome.results {
        assert_eq!(*result.as_ref().expect("no rank fails"), 1.5);
    }
    println!("all ranks have 1.5 after {:?} of virtual time", outcome.elapsed);

    // The same program again, but rank 2 dies in its third exchange of messages.
    let network = Network::new(4).with_fault(When::Operation { rank: 2, number: 3 }, Fault::Kill { rank: 2 });
    let outcome = network.try_run(|transport| largest_of_means(Communicator::new(transport)));
    let outcome = outcome.expect("ranks fail, and the program does not panic");
    assert!(outcome.results[2].is_none(), "a killed rank leaves no result");
    for error in outcome.results.iter().flatten() {
        // The other ranks do not hang. Their error names rank 2.
        assert!(matches!(error, Err(Error::Aborted { cause: Cause::Died, rank: 2, .. })), "{error:?}");
    }
    println!("rank 2 died, and the others were told so after {:?}", outcome.elapsed);
}
