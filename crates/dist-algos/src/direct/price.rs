//! Predicts the duration of a direct schedule.
//!
//! Every rank has a clock. The rank's own work and the signals that it waits for advance the clock. The simulated
//! network charges the same costs for the same work, so a schedule takes the same time there, to the nanosecond, if
//! nothing else runs.

use std::iter::Peekable;
use std::time::Duration;

use dist_transport::Rank;
use dist_transport::shm_group::{MemoryArea, MemoryCosts};

use super::run::pieces;
use super::volume::{MovedBytes, PartBytes};
use super::{DirectPlan, DirectSchedule, DirectStep};
use crate::Partition;

/// The costs of work and signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectCosts {
    /// The costs of work.
    pub costs: MemoryCosts,
    /// The time from a signal until other ranks see it.
    pub notice: Duration,
    /// Bytes of other ranks' memory that are summed at a time; see
    /// [`DirectMemory::piece_bytes`](super::DirectMemory::piece_bytes).
    pub piece_bytes: usize,
}

impl DirectPlan {
    /// Returns the time until the last rank has finished, if all ranks start at the same time on memory with these
    /// partitions. Reductions count as sums with a [loop](super::SumKernel) over all ranks.
    pub fn duration(
        self,
        partition: Partition<'_>,
        input: Option<Partition<'_>>,
        direct_costs: &DirectCosts,
    ) -> Duration {
        let sizes = PartBytes::new(self, partition, input);
        let mut signalled = vec![Vec::new(); self.world_size()];
        let start = |rank| (DirectClock::default(), self.schedule(rank).peekable());
        let mut ranks: Vec<(DirectClock, Peekable<DirectSchedule>)> =
            Rank::all(self.world_size()).map(start).collect();
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, (clock, steps)) in Rank::all(self.world_size()).zip(&mut ranks) {
                while let Some(&step) = steps.peek()
                    && clock.does(step, rank, &sizes, direct_costs, &mut signalled)
                {
                    steps.next();
                    moved = true;
                }
            }
        }
        Duration::from_nanos(ranks.iter().map(|(clock, _)| clock.nanoseconds).max().unwrap_or(0))
    }
}

/// The clock of one rank.
#[derive(Clone, Copy, Debug, Default)]
struct DirectClock {
    nanoseconds: u64,
    /// The part of the time below a nanosecond, in picoseconds. It is added to the next work.
    owed_ps: u64,
}

impl DirectClock {
    fn work(&mut self, picoseconds: u64) {
        self.owed_ps += picoseconds;
        self.nanoseconds += self.owed_ps / 1000;
        self.owed_ps %= 1000;
    }

    /// Executes a step and advances the clock of its rank. Returns `false` if the step waits for a signal that was
    /// not given yet.
    fn does(
        &mut self,
        step: DirectStep,
        rank: Rank,
        sizes: &PartBytes<'_>,
        direct_costs: &DirectCosts,
        signalled: &mut [Vec<u64>],
    ) -> bool {
        let costs = &direct_costs.costs;
        match step {
            DirectStep::Signal => {
                self.work(costs.signal_ps);
                signalled[rank.index()].push(self.nanoseconds);
            }
            DirectStep::Wait { ranks, signals } => {
                let peers = || ranks.ranks(rank.index(), rank.world_size());
                if peers().any(|peer| signalled[peer].len() < signals as usize) {
                    return false;
                }
                let notice = u64::try_from(direct_costs.notice.as_nanos()).unwrap_or(u64::MAX);
                for peer in peers() {
                    self.work(costs.wait_ps);
                    let seen = signalled[peer][signals as usize - 1].saturating_add(notice);
                    self.nanoseconds = self.nanoseconds.max(seen);
                }
            }
            DirectStep::Publish { place, .. } => self.work(costs.copied(place, sizes.moved(step).published)),
            DirectStep::Take { of, .. } => self.work(costs.copied(of, sizes.moved(step).read.0)),
            DirectStep::Keep { .. } => self.work(costs.copied(MemoryArea::FlagLine, sizes.moved(step).kept)),
            DirectStep::Reduce { of, .. } => {
                let at_once = sizes.plan().adds_at_once();
                let copied = if at_once { 0 } else { copied(rank.index(), 0, rank.world_size()).0 };
                self.reduce(of, sizes.moved(step), copied, direct_costs);
            }
        }
        true
    }

    /// Computes a sum. `copied` contributions are copied before others are added to them.
    fn reduce(&mut self, of: MemoryArea, moved: MovedBytes, copied: u64, direct_costs: &DirectCosts) {
        let (costs, (bytes, read), (_, written)) = (&direct_costs.costs, moved.read, moved.written);
        let viewed = read as u64 - copied;
        // In slots the cost does not depend on the pieces.
        let piece_bytes = if of == MemoryArea::Exposed { direct_costs.piece_bytes } else { bytes };
        for piece in pieces(bytes, piece_bytes) {
            let (copy, view) = (costs.copied(of, piece.len()), costs.viewed(of, piece.len()));
            self.work((copied + written as u64) * copy + viewed * view);
        }
    }
}

/// Returns the number of contributions that are copied in the sum T(count) of the ranks from `start` on. Also returns
/// `true` if the sum is then still in the memory of another rank; two such sums are added in scratch memory.
fn copied(me: usize, start: usize, count: usize) -> (u64, bool) {
    if count == 1 {
        return (0, start != me);
    }
    let low = count.next_power_of_two() / 2;
    let (left, left_is_there) = copied(me, start, low);
    let (right, right_is_there) = copied(me, start + low, count - low);
    (left + right + u64::from(left_is_there && right_is_there), false)
}
