//! The start of a sample: when a rank leaves a barrier, or at the same time on all ranks.
//!
//! Ranks leave a barrier up to one message latency apart. On a long link, one exchange after the barrier
//! therefore takes two latencies on the rank that left first. With compared clocks all ranks can start at the
//! same time. The clocks are compared by round trips, as in Cristian, "Probabilistic clock synchronization",
//! 1989: the fastest of several round trips counts, and its error is at most half of the difference between
//! the two directions.

use std::time::Duration;

use dist_collectives::{Communicator, Result};

/// The start of a sample.
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

/// A rank's view of rank 0's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starter {
    /// The lead of rank 0's clock over this rank's in nanoseconds, and the time in nanoseconds until a
    /// broadcast has reached all ranks; `None` if ranks start when they leave a barrier.
    clock: Option<(i64, i64)>,
}

/// Number of round trips with each rank.
const TRIES: usize = 5;

/// Margin in nanoseconds, added to the time of the broadcast.
const MARGIN: i64 = 200_000;

/// Maximum oversleep in nanoseconds. The thread sleeps that much less and spins for the rest.
const WAKE_UP: i64 = 200_000;

impl Starter {
    /// Creates a starter, and compares the clocks if `start` needs it.
    pub(super) fn new(comm: &mut Communicator, start: Start) -> Result<Self> {
        let clock = match start {
            Start::Barrier => None,
            Start::Clock => Some(compare(comm)?),
        };
        Ok(Self { clock })
    }

    /// Waits for the start. Returns its time by this rank's clock.
    pub(super) fn begin(self, comm: &mut Communicator) -> Result<Duration> {
        comm.barrier()?;
        let runtime = comm.runtime().clone();
        let Some((ahead, broadcast_time)) = self.clock else { return Ok(runtime.now()) };
        let mut begins = [nanos(runtime.now()) + broadcast_time];
        comm.broadcast(&mut begins, 0)?;
        let begins = begins[0] - ahead;
        let left = |now: Duration| begins - nanos(now);
        let sleep = u64::try_from(left(runtime.now()) - WAKE_UP).unwrap_or(0);
        runtime.sleep(Duration::from_nanos(sleep));
        while left(runtime.now()) > 0 {
            runtime.yield_now();
        }
        // A rank that receives the time too late starts late. The delay counts as a part of its sample.
        Ok(Duration::from_nanos(u64::try_from(begins).unwrap_or(0)))
    }
}

/// Returns the lead of rank 0's clock over this rank's, and the time until a broadcast has reached all ranks.
fn compare(comm: &mut Communicator) -> Result<(i64, i64)> {
    let (runtime, rank) = (comm.runtime().clone(), comm.rank());
    let (mut ahead, mut slowest) = (0, 0);
    for peer in 1..comm.world_size() {
        if rank == peer {
            for _ in 0..TRIES {
                comm.recv(&mut [0_i64], 0)?;
                comm.send(&[nanos(runtime.now())], 0)?;
            }
            let mut received = [0];
            comm.recv(&mut received, 0)?;
            [ahead] = received;
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
    // A broadcast has ⌈log2(world size)⌉ messages on its longest path.
    let messages = i64::from(comm.world_size().next_power_of_two().trailing_zeros());
    Ok((ahead, messages * slowest / 2 + slowest / 4 + MARGIN))
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}
