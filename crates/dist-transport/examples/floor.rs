//! Measures the memory of a group: a barrier, a few bytes one-shot, and 64 KiB, without the layers above the
//! transport.
//!
//! `distctl run -n 2 -- target/release/examples/floor` prints medians in µs.
#![allow(clippy::print_stdout, reason = "it is a program")]
#![allow(unsafe_code, reason = "shared memory is measured with no plan above it")]

use std::time::Duration;

use dist_transport::conformance::Unchecked;
use dist_transport::process::{Config, ProcessTransport};
use dist_transport::shm_group::{ExposedRegion, MemoryArea, SlotUse};
use dist_transport::{Error, Transport};

const CALLS: u32 = 2_000;
const SAMPLES: usize = 21;

fn main() -> Result<(), Error> {
    let mut transport = ProcessTransport::join(&Config::from_env()?)?;
    let (rank, runtime) = (transport.rank(), transport.runtime().clone());
    let deadline = runtime.deadline(Duration::from_secs(300));
    let peers: Vec<usize> = (1..rank.world_size()).map(|distance| rank.plus(distance).index()).collect();
    let Some(shm_group) = transport.shm_group(&deadline.into())? else {
        println!("the ranks share no memory");
        return Ok(());
    };
    // SAFETY: all ranks make the same calls, and read the data of a rank only after they have waited for its
    // signal.
    let mut shm_group = unsafe { Unchecked::new(shm_group) };
    println!("rank {rank}: {:?}", shm_group.shared());
    for (bytes, calls) in [(0, CALLS), (8, CALLS), (1024, CALLS / 2), (64 << 10, CALLS / 20)] {
        let mut sum = vec![0_u64; bytes / 8];
        let mine = vec![1_u8; bytes];
        let mut times = Vec::new();
        for _ in 0..SAMPLES {
            let start = runtime.now();
            for _ in 0..calls {
                call(&mut shm_group, &peers, &mine, &mut sum, deadline)?;
            }
            times.push((runtime.now() - start).as_secs_f64() * 1e6 / f64::from(calls));
        }
        times.sort_by(f64::total_cmp);
        if rank.index() == 0 {
            println!("{bytes:>8} B {:8.3} us (best {:.3})", times[SAMPLES / 2], times[0]);
        }
    }
    Ok(())
}

/// Publishes this rank's bytes, and adds up the bytes of all ranks.
fn call(
    shm_group: &mut Unchecked<'_>,
    peers: &[usize],
    mine: &[u8],
    sum: &mut [u64],
    deadline: dist_transport::Deadline,
) -> Result<(), Error> {
    let place = if mine.len() <= shm_group.shared().flag_line_bytes {
        MemoryArea::FlagLine
    } else {
        MemoryArea::Slot(0)
    };
    shm_group.enter(1, SlotUse::of(place), ExposedRegion::Nothing, &deadline.into())?;
    if !mine.is_empty() {
        shm_group.publish(place, 0, mine);
    }
    shm_group.signal();
    for &peer in peers {
        shm_group.wait(peer, 1, &deadline.into())?;
        if !mine.is_empty() {
            shm_group.view(peer, place, 0..mine.len(), &mut |at, bytes| {
                let words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("8")));
                sum[at / 8..].iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
            })?;
        }
    }
    shm_group.wake_waiters();
    Ok(())
}
