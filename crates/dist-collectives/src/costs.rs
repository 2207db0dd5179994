//! What messages take: measured, agreed on by all ranks, and kept between runs.

use std::time::Duration;

use dist_algos::CostModel;
use dist_algos::direct::Crossovers;

use crate::communicator::WorkerState;
use crate::cost_cache::{CostCache, TopologyKey};
use crate::engine::copy;
use crate::{Algorithm, Communicator, Operation, Ownership, ReduceOp, Result, combine};

/// # What messages take
impl Communicator {
    /// What the choice of algorithms goes by.
    pub fn cost_model(&self) -> CostModel {
        self.settings.model
    }

    /// Lets the choice of algorithms go by this. Every rank must set the same: otherwise the next collectives may
    /// differ in their algorithms, which is an [`Error::Mismatch`](crate::Error::Mismatch). Forks and subgroups made
    /// later have it too.
    pub fn set_cost_model(&mut self, model: CostModel) {
        self.settings.model = model;
    }

    /// Lets the choice of a form go by these, where the ranks share memory. Every rank must set the same, as for
    /// [`set_cost_model`](Self::set_cost_model). Forks and subgroups made later have them too.
    pub fn set_crossovers(&mut self, crossovers: Crossovers) {
        self.settings.crossovers = crossovers;
        self.engine.invalidate_plans();
        if let WorkerState::Running(worker) = &self.worker {
            worker.invalidate_plans();
        }
    }

    /// The algorithm that an operation on a buffer of so many bytes is done with, as things are set now; `None` for
    /// operations that are done in one way. For reduce_scatter, all_gather and their like the buffer is the one that
    /// holds every rank's part.
    ///
    /// Whether the ranks share memory is found out in their first operation; before it, the answer is that they do not.
    ///
    /// # Errors
    /// As the operation's, if the algorithm that was asked for does not serve.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Result<Option<Algorithm>> {
        self.algorithm_on(operation, bytes, Ownership::Borrowed)
    }

    /// As [`algorithm`](Self::algorithm), for memory of this kind.
    ///
    /// # Errors
    /// As for [`algorithm`](Self::algorithm).
    pub fn algorithm_on(
        &self,
        operation: Operation,
        bytes: usize,
        ownership: Ownership,
    ) -> Result<Option<Algorithm>> {
        match self.settings.forced(operation) {
            Some(Algorithm::Direct(direct)) => {
                self.engine.check_direct(direct, ownership)?;
                return Ok(Some(direct.into()));
            }
            Some(_) => {}
            None => {
                let form =
                    self.engine.direct_algorithm(operation, bytes, ownership, self.settings.crossovers);
                if let Some(form) = form {
                    return Ok(Some(form.into()));
                }
            }
        }
        let at_once = self.engine.bytes_at_once(operation, bytes);
        Algorithm::chosen(operation, &self.settings, self.engine.placement(), at_once, self.engine.levels())
    }

    /// Measures what messages and reductions take in this group, all ranks at once, in a second at most where links are
    /// fast; every rank gets the same. Nothing is changed. Where they are slow, what is measured twice (11 MiB each way each
    /// time) has to do, so that a connection of 10 Mbit/s takes 20 s.
    ///
    /// Messages go to the right while others come from the left. A byte is what one of 1 MiB takes longer than one of
    /// 384 KiB, or of 128 KiB where all ranks run on one host and share its cores, for each byte more; a round is the rest
    /// of the latter, or what a message of one byte takes, if that is more.
    /// A reduced byte is what it takes longer to add what comes than to receive it. The quickest of several tries counts,
    /// on the slowest rank.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn measure_costs(&mut self) -> Result<CostModel> {
        let placement = self.engine.placement();
        let middle_bytes = if placement.is_oversubscribed() { MIDDLE_OF_SHARED_CORES } else { MIDDLE };
        let [mut small, mut middle, mut large] = [Duration::MAX; 3];
        let (mut tries, mut done) = (TRIES, 0);
        // Who comes late makes nothing slow.
        self.barrier()?;
        // In turns, so that a machine that is slow for a while is so for all of them.
        while done < tries {
            let start = self.runtime().now();
            small = small.min(self.time_per_round(1, SMALL_ROUNDS)?);
            middle = middle.min(self.time_per_round(middle_bytes, LARGE_ROUNDS)?);
            large = large.min(self.time_per_round(LARGE, LARGE_ROUNDS)?);
            if done == 0 {
                let mut took = [picoseconds(self.runtime().now() - start)];
                self.all_reduce(&mut took, ReduceOp::Max)?;
                tries = tries_within(took[0]);
            }
            done += 1;
        }
        let reduction = self.time_per_reduction();
        let byte = picoseconds(large.saturating_sub(middle)) / (LARGE - middle_bytes) as u64;
        // Which algorithm serves is a question of messages of about this size: shorter ones take less than a line through
        // these says, and need the fewest rounds whatever a round takes.
        let round = picoseconds(middle).saturating_sub(byte * middle_bytes as u64).max(picoseconds(small));
        let mut costs = [round, byte, picoseconds(reduction) / LARGE as u64];
        self.all_reduce(&mut costs, ReduceOp::Max)?;
        // Where time stands still, as on a simulated network, there still is an order.
        let [round_ps, byte_ps, reduced_byte_ps] = costs.map(|cost| cost.max(1));
        Ok(CostModel { round_ps, byte_ps, reduced_byte_ps })
    }

    /// Lets the choice of algorithms go by what was measured in an earlier run on a world like this, or else by what
    /// is measured now, which is then kept. Rank 0's file counts, and every rank has the same afterwards. Where rank 0 has
    /// `None`, as [`CostCache::for_user`] gives it for `DIST_COSTS=off`, nothing is measured, and all go by what rank 0 goes by
    /// already. `transport` is what moves the bytes, as in `tcp`: what one takes says nothing of another.
    ///
    /// What was kept is compared with a few large messages: if they take less than three quarters of it, others were at work
    /// when it was measured, and all is measured again. What has become slower since stays as it was kept.
    ///
    /// That a file cannot be read or written is logged, and harms nothing else. Whoever wants to measure in any case, or to know
    /// whether it was written, has [`measure_costs`](Self::measure_costs) and, on rank 0, [`CostCache::save`].
    ///
    /// # Errors
    /// Those of a collective.
    pub fn tune(&mut self, cache: Option<&CostCache>, transport: &str) -> Result<CostModel> {
        let world = TopologyKey::new(transport, &self.hosts());
        let cache = cache.filter(|_| self.rank() == 0);
        let (word, costs) = match cache.map(|cache| cache.find(&world)) {
            None => (SET, self.settings.model),
            Some(Some(found)) => (FOUND, found),
            Some(None) => (UNKNOWN, self.settings.model),
        };
        let mut words = [word, costs.round_ps, costs.byte_ps, costs.reduced_byte_ps];
        self.broadcast(&mut words, 0)?;
        let [word, round_ps, byte_ps, reduced_byte_ps] = words;
        let costs = CostModel { round_ps, byte_ps, reduced_byte_ps };
        if word == UNKNOWN || word == FOUND && self.are_too_high(&costs)? {
            let measured = self.measure_costs()?;
            self.settings.model = measured;
            if let Some(cache) = cache {
                let _ = cache.save(&world, measured).inspect_err(|e| cache.log_failure("write", e));
            }
            return Ok(measured);
        }
        self.settings.model = costs;
        Ok(costs)
    }

    /// Whether a large message that is reduced takes far less now than these costs say.
    fn are_too_high(&mut self, costs: &CostModel) -> Result<bool> {
        let mut times = [0; CHECKS + 1];
        for time in &mut times[..CHECKS] {
            *time = picoseconds(self.time_per_round(LARGE, CHECK_ROUNDS)?);
        }
        times[CHECKS] = picoseconds(self.time_per_reduction());
        // A rank that was late for a message found it there, so each counts as on the slowest rank.
        self.all_reduce(&mut times, ReduceOp::Max)?;
        let message = times[..CHECKS].iter().min().expect("there are some");
        Ok(is_far_less(message.saturating_add(times[CHECKS]), costs))
    }

    fn time_per_round(&mut self, len: usize, rounds: u32) -> Result<Duration> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let (right, left) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        // Memory that nobody has written to is one page of zeros, which is quick to send, and slow to receive into.
        let (sent, mut received) = (vec![1_u8; len], vec![1_u8; len]);
        self.barrier()?;
        let start = self.runtime().now();
        for _ in 0..rounds {
            self.send_recv(&sent, right, &mut received, left)?;
        }
        Ok((self.runtime().now() - start) / rounds)
    }

    /// How much longer it takes to reduce [`LARGE`] bytes as they come than to receive them: they are copied to where caches
    /// hold them, piece by piece, and added from there, instead of being copied to where they belong. Vectors that are made
    /// one after the other lie a few bytes apart in their pages, unlike a transport's memory: hence [`copy`].
    fn time_per_reduction(&self) -> Duration {
        let (mut into, from) = (vec![0.0_f32; LARGE / 4], vec![1.0_f32; LARGE / 4]);
        let mut scratch = vec![0.0_f32; PIECE / 4];
        let reduced = self.shortest(|| {
            for (into, from) in into.chunks_mut(PIECE / 4).zip(from.chunks(PIECE / 4)) {
                copy(from, &mut scratch);
                combine(ReduceOp::Sum, into, &scratch);
            }
        });
        let received = || copy(&from, &mut into);
        reduced.saturating_sub(self.shortest(received))
    }

    fn shortest(&self, mut work: impl FnMut()) -> Duration {
        let times = (0..TRIES).map(|_| {
            let start = self.runtime().now();
            work();
            self.runtime().now() - start
        });
        times.min().unwrap_or_default()
    }
}

/// Whether this is less than three quarters of what these costs say of one large message that is reduced. Where time stands
/// still nothing is known.
fn is_far_less(picoseconds: u64, costs: &CostModel) -> bool {
    let [round, byte, reduced] = [costs.round_ps, costs.byte_ps, costs.reduced_byte_ps].map(u128::from);
    let cache = round + LARGE as u128 * (byte + reduced);
    picoseconds > 0 && u128::from(picoseconds) * 4 < cache * 3
}

/// How often to measure all if once takes so long.
fn tries_within(once: u64) -> u64 {
    (picoseconds(TRYING) / once.max(1)).clamp(TRIES_MIN, TRIES)
}

fn picoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().saturating_mul(1000)).unwrap_or(u64::MAX)
}

/// What rank 0 says of its costs: that they hold, that they were found in its file, or that none were.
const SET: u64 = 0;
const FOUND: u64 = 1;
const UNKNOWN: u64 = 2;
/// How often everything is measured: at least and at most, and within which time if it can be.
const TRIES_MIN: u64 = 2;
const TRIES: u64 = 15;
const TRYING: Duration = Duration::from_secs(1);
/// How often it is looked whether what was measured earlier still holds, with so many messages in a row.
const CHECKS: usize = 3;
const CHECK_ROUNDS: u32 = 2;
const SMALL_ROUNDS: u32 = 32;
/// Bytes that show, between them, what a byte takes. The longer messages of a connection are, the less each byte adds, and
/// what is decided last is how a block of 512 KiB for each rank goes; where ranks share cores, that is decided earlier.
const MIDDLE: usize = 384 << 10;
const MIDDLE_OF_SHARED_CORES: usize = 128 << 10;
const LARGE: usize = 1 << 20;
const LARGE_ROUNDS: u32 = 8;
/// Bytes that are reduced at once as they come.
const PIECE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_is_not_measured_for_long() {
        let tries = |ms| tries_within(picoseconds(Duration::from_millis(ms)));
        assert_eq!([0, 20, 100, 400, 9_000].map(tries), [15, 15, 10, 2, 2]);
    }

    #[test]
    fn costs_are_too_high_from_a_third_more_on() {
        let costs = CostModel { round_ps: 4 << 20, byte_ps: 3, reduced_byte_ps: 1 };
        assert!(is_far_less((6 << 20) - 1, &costs));
        assert!(!is_far_less(6 << 20, &costs));
        assert!(!is_far_less(0, &costs), "a clock that stands still tells nothing");
        let most = CostModel { round_ps: u64::MAX, byte_ps: u64::MAX, reduced_byte_ps: u64::MAX };
        assert!(is_far_less(u64::MAX, &most));
    }
}
