//! Times what a group costs until its first result. `benches/peers/group_setup.c` does the same with MPI.
//!
//! ```text
//! distctl run -n 2 target/release/examples/group_setup
//! mpicc -O2 benches/peers/group_setup.c -o group_setup && mpirun -n 2 ./group_setup
//! ```

use std::time::Duration;

use dist_collectives::{Communicator, Config, ReduceOp, Result};
use dist_groups::CommunicatorExt;

/// Samples of each case. The first ones are not counted.
const SAMPLES: usize = 300;
const WARMUPS: usize = 20;

/// A case: it makes groups of the world, uses them, and drops them.
type Case = fn(&mut Communicator) -> Result<()>;

const CASES: [(&str, Case); 4] = [
    ("fork + all_reduce", |world| sum(&mut world.fork()?)),
    ("split + all_reduce", |world| {
        let mut group = split(world)?;
        sum(&mut group)
    }),
    ("fork + message", |world| {
        let mut fork = world.fork()?;
        match fork.rank() {
            0 => fork.send(&[1.0_f32; 2], 1),
            1 => fork.recv(&mut [0.0_f32; 2], 0),
            _ => Ok(()),
        }
    }),
    ("fork + split + 2 all_reduces", |world| {
        let mut fork = world.fork()?;
        let mut group = split(&mut fork)?;
        sum(&mut fork)?;
        sum(&mut group)
    }),
];

fn sum(comm: &mut Communicator) -> Result<()> {
    comm.all_reduce(&mut [1.0_f32; 2], ReduceOp::Sum)
}

fn split(comm: &mut Communicator) -> Result<dist_groups::Group> {
    let group = comm.split(Some(0), 0).expect("the ranks are connected");
    Ok(group.expect("every rank has a colour"))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut world = Communicator::join(&Config::from_env()?)?;
    let runtime = dist_collectives::transport::Runtime::system();
    sum(&mut world)?;
    for (name, case) in CASES {
        let mut samples: Vec<Duration> = Vec::new();
        for _ in 0..SAMPLES {
            world.barrier()?;
            let began = runtime.now();
            case(&mut world)?;
            samples.push(runtime.now() - began);
        }
        let first = samples[0];
        samples.drain(..WARMUPS);
        samples.sort_unstable();
        if world.rank() == 0 {
            let [first, least, median] =
                [first, samples[0], samples[samples.len() / 2]].map(|time| time.as_secs_f64() * 1e6);
            #[allow(clippy::print_stdout, reason = "it is the result")]
            {
                println!("{name}: first {first:.1}, least {least:.1}, median {median:.1} µs");
            }
        }
    }
    Ok(())
}
