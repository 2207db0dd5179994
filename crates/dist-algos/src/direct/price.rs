//! How long a direct schedule takes.
//!
//! Every rank has a clock, which its own work moves on, and the posts that it waits for. The simulated network charges
//! the same costs for the same work, so a schedule that is alone there takes as long to the nanosecond.

use std::iter::Peekable;
use std::time::Duration;

use dist_transport::{MemoryCosts, Place, Rank};

use super::run::pieces;
use super::volume::{MovedBytes, PartBytes};
use super::{DirectPlan, DirectSchedule, DirectStep};
use crate::Partition;

/// What work and posts take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectCosts {
    /// What work takes.
    pub costs: MemoryCosts,
    /// From a post until others see it.
    pub notice: Duration,
    /// Bytes of others' memory that a sum is made of at a time; see [`DirectMemory::piece_bytes`](super::Memory::piece_bytes).
    pub piece_bytes: usize,
}

impl DirectPlan {
    /// How long it takes until the last rank is through, if all begin at once; of memory that is cut like this. A reduction is
    /// taken for a sum, of which there is a [loop](super::Total) over all.
    pub fn duration(
        self,
        partition: Partition<'_>,
        input: Option<Partition<'_>>,
        pace: &DirectCosts,
    ) -> Duration {
        let sizes = PartBytes::new(self, partition, input);
        let mut posted = vec![Vec::new(); self.world_size()];
        let start = |rank| (DirectClock::default(), self.schedule(rank).peekable());
        let mut ranks: Vec<(DirectClock, Peekable<DirectSchedule>)> =
            Rank::all(self.world_size()).map(start).collect();
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, (clock, steps)) in Rank::all(self.world_size()).zip(&mut ranks) {
                while let Some(&step) = steps.peek()
                    && clock.does(step, rank, &sizes, pace, &mut posted)
                {
                    steps.next();
                    moved = true;
                }
            }
        }
        Duration::from_nanos(ranks.iter().map(|(clock, _)| clock.nanoseconds).max().unwrap_or(0))
    }
}

/// The time of one rank.
#[derive(Clone, Copy, Debug, Default)]
struct DirectClock {
    nanoseconds: u64,
    /// Less than a nanosecond, to be added to what comes next.
    owed_ps: u64,
}

impl DirectClock {
    fn work(&mut self, picoseconds: u64) {
        self.owed_ps += picoseconds;
        self.nanoseconds += self.owed_ps / 1000;
        self.owed_ps %= 1000;
    }

    /// Does a step; `false` if it has to wait for a post that was not made yet.
    fn does(
        &mut self,
        step: DirectStep,
        rank: Rank,
        sizes: &PartBytes<'_>,
        pace: &DirectCosts,
        posted: &mut [Vec<u64>],
    ) -> bool {
        let costs = &pace.costs;
        match step {
            DirectStep::Post => {
                self.work(costs.signal_ps);
                posted[rank.index()].push(self.nanoseconds);
            }
            DirectStep::Await { ranks, posts } => {
                let peers = || ranks.ranks(rank.index(), rank.world_size());
                if peers().any(|peer| posted[peer].len() < posts as usize) {
                    return false;
                }
                let notice = u64::try_from(pace.notice.as_nanos()).unwrap_or(u64::MAX);
                for peer in peers() {
                    self.work(costs.wait_ps);
                    let seen = posted[peer][posts as usize - 1].saturating_add(notice);
                    self.nanoseconds = self.nanoseconds.max(seen);
                }
            }
            DirectStep::Publish { place, .. } => self.work(costs.copied(place, sizes.moved(step).published)),
            DirectStep::Take { of, .. } => self.work(costs.copied(of, sizes.moved(step).read.0)),
            DirectStep::Keep { .. } => self.work(costs.copied(Place::FlagLine, sizes.moved(step).kept)),
            DirectStep::Reduce { of, .. } => {
                let at_once = sizes.plan().adds_at_once();
                let copied = if at_once { 0 } else { copied(rank.index(), 0, rank.world_size()).0 };
                self.reduce(of, sizes.moved(step), copied, pace);
            }
        }
        true
    }

    /// Makes a sum, for which so many contributions are copied before others are added.
    fn reduce(&mut self, of: Place, moved: MovedBytes, copied: u64, pace: &DirectCosts) {
        let (costs, (bytes, read), (_, written)) = (&pace.costs, moved.read, moved.written);
        let viewed = read as u64 - copied;
        // In slots nothing depends on the pieces.
        let piece_bytes = if of == Place::Memory { pace.piece_bytes } else { bytes };
        for piece in pieces(bytes, piece_bytes) {
            let (copy, view) = (costs.copied(of, piece.len()), costs.viewed(of, piece.len()));
            self.work((copied + written as u64) * copy + viewed * view);
        }
    }
}

/// How many contributions to T(count) of the ranks from `start` on are copied before the next is added, and whether the
/// sum is still where one other rank has it: two such are added in scratch memory.
fn copied(me: usize, start: usize, count: usize) -> (u64, bool) {
    if count == 1 {
        return (0, start != me);
    }
    let low = count.next_power_of_two() / 2;
    let (left, left_is_there) = copied(me, start, low);
    let (right, right_is_there) = copied(me, start + low, count - low);
    (left + right + u64::from(left_is_there && right_is_there), false)
}
