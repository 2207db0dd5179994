//! The cost of dist-mpi beside plain MPI: `mpirun -n 4 overhead plain|messages|memory|native`.
//!
//! Prints, for each size, the median time of a message between neighbours (half a round trip, all pairs at once)
//! and of an all_reduce of f32. `plain` calls MPI; `messages` is a communicator without shared memory, `memory`
//! one with it, and `native` one that gives collectives from 64 KiB on to MPI. Start them in turns and compare them.
#![allow(clippy::print_stdout, reason = "a program prints")]

use std::error::Error;
use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp, ReductionOrder};
use dist_mpi::MpiOptions;
use dist_transport::Runtime;
use mpi::collective::SystemOperation;
use mpi::topology::Communicator as _;
use mpi::traits::{CommunicatorCollectives, Destination, Source};

const SIZES: [usize; 5] = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20];
/// The time that is spent on one size.
const PER_SIZE: Duration = Duration::from_millis(400);
const ROUNDS_MAX: usize = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("plain") => plain(),
        Some("messages") => through_dist(MpiOptions::new().without_shared_memory().init()?),
        Some("memory") => through_dist(MpiOptions::new().init()?),
        Some("native") => {
            let options = MpiOptions::new().without_shared_memory().with_native_collectives(64 << 10);
            let mut comm = options.init()?;
            comm.set_order(ReductionOrder::Any);
            through_dist(comm)
        }
        _ => Err("overhead plain|messages|memory|native".into()),
    }
}

fn plain() -> Result<(), Box<dyn Error>> {
    let universe = mpi::initialize().ok_or("MPI is initialised already")?;
    let world = universe.world();
    let rank = usize::try_from(world.rank())?;
    let is_alone = rank ^ 1 >= usize::try_from(world.size())?;
    let peer = world.process_at_rank(i32::try_from(rank ^ 1)?);
    for bytes in SIZES {
        let (sent, mut received) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        let message = || {
            if is_alone {
            } else if rank.is_multiple_of(2) {
                peer.send(&sent[..]);
                peer.receive_into(&mut received[..]);
            } else {
                peer.receive_into(&mut received[..]);
                peer.send(&sent[..]);
            }
            Ok(())
        };
        let agree = |count: &mut [usize; 1]| {
            let own = *count;
            world.all_reduce_into(&own[..], &mut count[..], SystemOperation::min());
            Ok(())
        };
        let message = median(message, agree)?;
        let (own, mut sum) = (vec![1_f32; bytes / 4], vec![0_f32; bytes / 4]);
        let all_reduce = || {
            world.all_reduce_into(&own[..], &mut sum[..], SystemOperation::sum());
            Ok(())
        };
        let all_reduce = median(all_reduce, agree)?;
        show(rank, bytes, message, all_reduce);
    }
    Ok(())
}

fn through_dist(mut comm: Communicator) -> Result<(), Box<dyn Error>> {
    let rank = comm.rank();
    let peer = rank ^ 1;
    let mut groups = comm.fork()?;
    for bytes in SIZES {
        let (sent, mut received) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        let agree = |count: &mut [usize; 1]| -> Result<(), Box<dyn Error>> {
            let mut number = [u64::try_from(count[0])?];
            groups.all_reduce(&mut number, ReduceOp::Min)?;
            count[0] = usize::try_from(number[0])?;
            Ok(())
        };
        let mut agree = agree;
        let is_alone = peer >= comm.world_size();
        let message = || -> Result<(), Box<dyn Error>> {
            if is_alone {
            } else if rank.is_multiple_of(2) {
                comm.send(&sent, peer)?;
                comm.recv(&mut received, peer)?;
            } else {
                comm.recv(&mut received, peer)?;
                comm.send(&sent, peer)?;
            }
            Ok(())
        };
        let message = median(message, &mut agree)?;
        let mut values = vec![1_f32; bytes / 4];
        let all_reduce = || -> Result<(), Box<dyn Error>> {
            comm.all_reduce(&mut values, ReduceOp::Sum)?;
            Ok(())
        };
        let all_reduce = median(all_reduce, &mut agree)?;
        show(rank, bytes, message, all_reduce);
    }
    Ok(())
}

/// Returns the median time of a call. All ranks make equally many calls: as many as the slowest has time for.
fn median(
    mut call: impl FnMut() -> Result<(), Box<dyn Error>>,
    mut agree: impl FnMut(&mut [usize; 1]) -> Result<(), Box<dyn Error>>,
) -> Result<Duration, Box<dyn Error>> {
    let runtime = Runtime::system();
    let begun = runtime.now();
    for _ in 0..3 {
        call()?;
    }
    let each = ((runtime.now() - begun) / 3).max(Duration::from_nanos(100));
    let mut rounds = [usize::try_from(PER_SIZE.as_nanos() / each.as_nanos())?.clamp(5, ROUNDS_MAX)];
    agree(&mut rounds)?;
    let mut times = Vec::with_capacity(rounds[0]);
    for _ in 0..rounds[0] {
        let begun = runtime.now();
        call()?;
        times.push(runtime.now() - begun);
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn show(rank: usize, bytes: usize, round_trip: Duration, all_reduce: Duration) {
    if rank == 0 {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{bytes:>9} B  message {:>10.2} us  all_reduce {:>10.2} us",
            micros(round_trip) / 2.0,
            micros(all_reduce)
        );
    }
}
