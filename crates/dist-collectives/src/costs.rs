//! Measuring the costs of messages, agreeing on them and storing them between runs.

use std::time::Duration;

use dist_algos::direct::Crossovers;
use dist_algos::{Algorithm, CostModel};

use crate::communicator::GroupInfo;
use crate::cost_cache::{CostCache, TopologyKey};
use crate::engine::{Engine, bytes_at_once, copy};
use crate::level_costs::two_levels;
use crate::{Communicator, Operation, Ownership, ReduceOp, Result, combine};

/// # Costs of messages
impl Communicator {
    /// Returns the cost model by which algorithms are chosen.
    pub fn cost_model(&self) -> CostModel {
        self.settings.model
    }

    /// Sets the cost model by which algorithms are chosen. Every rank must set the same model. Otherwise the next
    /// collectives may use different algorithms, which is an [`Error::Mismatch`](crate::Error::Mismatch). Forks and
    /// subgroups that are made later inherit the model.
    pub fn set_cost_model(&mut self, model: CostModel) {
        self.settings.model = model;
    }

    /// Sets the sizes from which ranks that share memory use each direct algorithm. Every rank must set the same,
    /// as for [`set_cost_model`](Self::set_cost_model). Forks and subgroups that are made later inherit them.
    pub fn set_crossovers(&mut self, crossovers: Crossovers) {
        self.settings.crossovers = crossovers;
        self.change_engine(Engine::invalidate_plans);
    }

    /// Returns the algorithm for an operation on a buffer of this many bytes under the current settings. It is
    /// `None` for operations that have only one algorithm. For reduce_scatter, all_gather and similar operations,
    /// `bytes` is the size of the buffer that holds every rank's part.
    ///
    /// The ranks find out in their first operation if they share memory. Before that, the result assumes that they
    /// do not. Calls that the transport gives to a library below it, such as MPI, have no algorithm of this table; they
    /// are not considered here.
    ///
    /// # Errors
    /// The error of the operation, if the forced algorithm does not support it.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Result<Option<Algorithm>> {
        self.algorithm_on(operation, bytes, Ownership::Borrowed)
    }

    /// Returns the algorithm as [`algorithm`](Self::algorithm) does, for memory of this kind.
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
                self.group.shared_memory.check_direct(direct, ownership, self.world_size())?;
                return Ok(Some(direct.into()));
            }
            Some(_) => {}
            None => {
                let hosts = self.levels.as_ref().map_or(1, |levels| levels.hosts.count());
                let direct = self.group.shared_memory.direct_algorithm(
                    (self.group.algorithms, self.world_size()),
                    (operation, bytes),
                    ownership,
                    self.settings.crossovers,
                );
                if let Some(direct) = direct.filter(|_| hosts == 1) {
                    return Ok(Some(direct.into()));
                }
            }
        }
        let Some(collective) = operation.collective() else { return Ok(None) };
        let GroupInfo { algorithms, placement, is_on_one_host, .. } = self.group;
        let at_once = bytes_at_once(operation, bytes, is_on_one_host.then_some(self.world_size()));
        let chosen =
            self.settings.choose(algorithms, collective, placement, at_once, self.levels.as_ref())?;
        Ok(Some(chosen.algorithm()))
    }

    /// Measures the cost of messages and reductions in this group, on all ranks at once. Every rank gets the same
    /// result, and no setting changes. On fast links this takes at most one second. On slow links everything is
    /// measured only twice, with 11 MiB in each direction each time; a connection of 10 Mbit/s takes 20 s.
    ///
    /// Every rank sends to its right neighbour while it receives from its left one. Messages of 1 byte, 384 KiB and
    /// 1 MiB are timed. If all ranks run on one host and share its cores, 128 KiB replaces 384 KiB.
    ///
    /// - The cost of a byte is the slope between the two larger sizes.
    /// - The cost of a round is the rest of the time for the middle size, or the time for one byte if that is
    ///   longer.
    /// - The cost of a reduced byte is the extra time to add a received byte instead of copying it.
    ///
    /// The fastest of several tries on the slowest rank counts.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn measure_costs(&mut self) -> Result<CostModel> {
        self.internally(Self::time_messages)
    }

    fn time_messages(&mut self) -> Result<CostModel> {
        let placement = self.group.placement;
        let middle_bytes = if placement.is_oversubscribed() { MIDDLE_OF_SHARED_CORES } else { MIDDLE };
        let [mut small, mut middle, mut large] = [Duration::MAX; 3];
        let (mut tries, mut done) = (TRIES, 0);
        // A rank that arrives late must not slow down the measurement.
        self.barrier()?;
        // The sizes are measured in turn, so that a temporary slowdown of the machine affects all of them.
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
        // The choice of an algorithm matters for messages of about this size. Shorter ones take less time than the
        // linear model says, and for them the fewest rounds are best at any cost of a round.
        let round = picoseconds(middle).saturating_sub(byte * middle_bytes as u64).max(picoseconds(small));
        let mut costs = [round, byte, picoseconds(reduction) / LARGE as u64];
        self.all_reduce(&mut costs, ReduceOp::Max)?;
        // If the clock does not advance, as on a simulated network, the costs must still order the algorithms.
        let [round_ps, byte_ps, reduced_byte_ps] = costs.map(|cost| cost.max(1));
        Ok(CostModel { round_ps, byte_ps, reduced_byte_ps })
    }

    /// Sets the cost model to costs that were stored by an earlier run on a similar world. If there are none, it
    /// measures the costs and stores them. The file of rank 0 counts, and afterwards every rank has the same model.
    ///
    /// If `cache` is `None` on rank 0, nothing is measured and all ranks use the current model of rank 0.
    /// [`CostCache::for_user`] returns `None` for `DIST_COSTS=off`. `transport` names what moves the bytes, for
    /// example `tcp`; costs of different transports are stored separately.
    ///
    /// Stored costs are checked with a few large messages. If these take less than three quarters of the stored
    /// time, other work slowed down the earlier measurement, and everything is measured again. If they take longer,
    /// the stored costs stay.
    ///
    /// If the ranks run on several hosts, and a host has several of them, the costs inside hosts and between hosts are
    /// measured and stored apart, and two-level algorithms are [enabled](Self::set_topology). Operations then communicate
    /// inside hosts first and then between hosts if that is faster, so that fewer messages and bytes use the slow links.
    /// Without a measurement, a message inside a host is taken to last a quarter of one between hosts. The result is
    /// the model between hosts.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use dist_collectives::Communicator;
    /// use dist_collectives::tuning::{CostCache, Operation};
    /// use dist_transport::sim;
    ///
    /// let memory = sim::Link::new(Duration::from_micros(1), 5_000_000_000);
    /// let cable = sim::Link::new(Duration::from_micros(50), 100_000_000);
    /// let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
    /// let network = sim::Network::new(8).with_hosts(&hosts).with_memory_link(memory).with_host_link(cable);
    /// let outcome = network.run(|transport| {
    ///     let mut world = Communicator::new(transport);
    ///     world.tune(Some(&CostCache::disabled()), "sim").unwrap();
    ///     world.algorithm(Operation::AllReduce, 1 << 20).unwrap().unwrap().name()
    /// });
    /// assert!(outcome.results[0].starts_with("two_level/"));
    /// ```
    ///
    /// A file that cannot be read or written is logged and has no other effect. To measure in any case, call
    /// [`measure_costs`](Self::measure_costs). To see the error of a failed write, call [`CostCache::save`] on rank
    /// 0.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn tune(&mut self, cache: Option<&CostCache>, transport: &str) -> Result<CostModel> {
        match two_levels(&self.hosts()) {
            Some(hosts) => self.internally(|comm| comm.find_level_costs(hosts, cache, transport)),
            None => self.internally(|comm| comm.find_costs(cache, transport)),
        }
    }

    /// Makes calls that the user did not make. They are not counted in the numbers that users see.
    pub(crate) fn internally<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let before = self.engine()?.history_mut().begin_internal();
        let done = work(self);
        self.engine()?.history_mut().end_internal(before);
        done
    }

    fn find_costs(&mut self, cache: Option<&CostCache>, transport: &str) -> Result<CostModel> {
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

    /// Returns `true` if a large message with a reduction takes less than three quarters of the time that these costs
    /// predict.
    pub(crate) fn are_too_high(&mut self, costs: &CostModel) -> Result<bool> {
        let mut times = [0; CHECKS + 1];
        for time in &mut times[..CHECKS] {
            *time = picoseconds(self.time_per_round(LARGE, CHECK_ROUNDS)?);
        }
        times[CHECKS] = picoseconds(self.time_per_reduction());
        // A rank that was late found its message waiting, so the time of the slowest rank counts.
        self.all_reduce(&mut times, ReduceOp::Max)?;
        let message = times[..CHECKS].iter().min().expect("there are some");
        Ok(is_far_less(message.saturating_add(times[CHECKS]), costs))
    }

    fn time_per_round(&mut self, len: usize, rounds: u32) -> Result<Duration> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let (right, left) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        // Untouched memory is one shared page of zeros, which is fast to send and slow to receive into. So all
        // bytes are written first.
        let (sent, mut received) = (vec![1_u8; len], vec![1_u8; len]);
        self.barrier()?;
        let start = self.runtime().now();
        for _ in 0..rounds {
            self.send_recv(&sent, right, &mut received, left)?;
        }
        Ok((self.runtime().now() - start) / rounds)
    }

    /// Returns the extra time to reduce [`LARGE`] bytes instead of receiving them.
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

/// Returns `true` if `time` is less than three quarters of the predicted time of one large message with a reduction.
/// A clock that does not advance gives `false`.
fn is_far_less(picoseconds: u64, costs: &CostModel) -> bool {
    let [round, byte, reduced] = [costs.round_ps, costs.byte_ps, costs.reduced_byte_ps].map(u128::from);
    let cache = round + LARGE as u128 * (byte + reduced);
    picoseconds > 0 && u128::from(picoseconds) * 4 < cache * 3
}

/// Returns how many times to measure if one measurement takes this long.
fn tries_within(once: u64) -> u64 {
    (picoseconds(TRYING) / once.max(1)).clamp(TRIES_MIN, TRIES)
}

fn picoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().saturating_mul(1000)).unwrap_or(u64::MAX)
}

/// The answer of rank 0 about its costs: they are set, they were found in its file, or there are none.
pub(crate) const SET: u64 = 0;
pub(crate) const FOUND: u64 = 1;
pub(crate) const UNKNOWN: u64 = 2;
/// The minimum and maximum number of measurements, and the time limit for more than the minimum.
const TRIES_MIN: u64 = 2;
const TRIES: u64 = 15;
const TRYING: Duration = Duration::from_secs(1);
/// The number of checks of stored costs, and the number of messages in a row in each check.
const CHECKS: usize = 3;
const CHECK_ROUNDS: u32 = 2;
const SMALL_ROUNDS: u32 = 32;
/// The middle message size, from which the slope to [`LARGE`] gives the cost of a byte. Each byte of a connection
/// costs less in longer messages. The choice with the largest size is how a block of 512 KiB per rank is reduced;
/// if ranks share cores, that choice is made for smaller sizes.
const MIDDLE: usize = 384 << 10;
const MIDDLE_OF_SHARED_CORES: usize = 128 << 10;
const LARGE: usize = 1 << 20;
const LARGE_ROUNDS: u32 = 8;
/// Bytes that are reduced at once when they arrive.
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
