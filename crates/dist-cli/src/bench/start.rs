//! When ranks begin a sample: as they leave a barrier, or all at the same time.
//!
//! Ranks leave a barrier up to a message's latency apart, so on a long link one exchange after it takes two latencies
//! on the rank that left first. Clocks that were compared let all begin at once. They are compared by messages to and
//! fro, as in Cristian, "Probabilistic clock synchronization", 1989: the fastest of several counts, and is off by half
//! of what the ways differ at most.

use std::time::Duration;

use dist_collectives::{Communicator, Result};

/// When ranks begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Start {
    /// Each rank starts when it leaves a barrier
    Barrier,
    /// All ranks start at the same time, by clocks that are compared first
    Clock,
}

impl Start {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Clock => "clock",
        }
    }
}

/// What one rank knows of the others' clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starter {
    /// What rank 0's clock shows more than this rank's, in nanoseconds, and how long it takes until all have heard of a
    /// time; `None` for ranks that begin as they leave a barrier.
    clock: Option<(i64, i64)>,
}

/// How often clocks are compared with each rank.
const TRIES: usize = 5;

/// What is left beside the time of messages until all begin, in nanoseconds.
const MARGIN: i64 = 200_000;

/// A thread that sleeps may wake up so much later, in nanoseconds: it sleeps no longer.
const WAKE_UP: i64 = 200_000;

impl Starter {
    /// Compares clocks, if that is how ranks are to begin.
    pub(super) fn new(comm: &mut Communicator, start: Start) -> Result<Self> {
        let clock = match start {
            Start::Barrier => None,
            Start::Clock => Some(compare(comm)?),
        };
        Ok(Self { clock })
    }

    /// Waits until the ranks begin: the time by this rank's clock at which they do.
    pub(super) fn begin(self, comm: &mut Communicator) -> Result<Duration> {
        comm.barrier()?;
        let runtime = comm.runtime().clone();
        let Some((ahead, heard)) = self.clock else { return Ok(runtime.now()) };
        let mut begins = [nanos(runtime.now()) + heard];
        comm.broadcast(&mut begins, 0)?;
        let begins = begins[0] - ahead;
        let left = |now: Duration| begins - nanos(now);
        let sleep = u64::try_from(left(runtime.now()) - WAKE_UP).unwrap_or(0);
        runtime.sleep(Duration::from_nanos(sleep));
        while left(runtime.now()) > 0 {
            runtime.yield_now();
        }
        // Whoever hears of it too late has begun late, which counts.
        Ok(Duration::from_nanos(u64::try_from(begins).unwrap_or(0)))
    }
}

/// What rank 0's clock shows more than this rank's, and until when all have heard of a time that it tells.
fn compare(comm: &mut Communicator) -> Result<(i64, i64)> {
    let (runtime, rank) = (comm.runtime().clone(), comm.rank());
    let (mut ahead, mut slowest) = (0, 0);
    for peer in 1..comm.world_size() {
        if rank == peer {
            for _ in 0..TRIES {
                comm.recv(&mut [0_i64], 0)?;
                comm.send(&[nanos(runtime.now())], 0)?;
            }
            let mut told = [0];
            comm.recv(&mut told, 0)?;
            [ahead] = told;
        } else if rank == 0 {
            let mut best = (i64::MAX, 0);
            for _ in 0..TRIES {
                let sent = nanos(runtime.now());
                comm.send(&[0_i64], peer)?;
                let mut theirs = [0];
                comm.recv(&mut theirs, peer)?;
                let both_ways = nanos(runtime.now()) - sent;
                best = best.min((both_ways, sent + both_ways / 2 - theirs[0]));
            }
            comm.send(&[best.1], peer)?;
            slowest = slowest.max(best.0);
        }
    }
    // A broadcast takes as many messages one after the other as doublings make up the world.
    let messages = i64::from(comm.world_size().next_power_of_two().trailing_zeros());
    Ok((ahead, messages * slowest / 2 + slowest / 4 + MARGIN))
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}
