//! The configuration of a simulated network: hosts, racks and links.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::clock::{Skew, Skewed};
use super::fabric::SimFabric;
use super::fault::{Fault, When};
use super::link::{Link, Links};
use super::random::{SplitMix64, mix};
use super::scheduler::{Failure, Scheduler, Statistics};
use super::sim_shm_group::Segments;
use super::world::World;
use super::{Outcome, SimTransport};
use crate::runtime::Executor;
use crate::shm_group::MemoryCosts;
use crate::{Rank, Runtime};

/// A network in one process: its ranks, their hosts, its links, and the seed that decides everything else.
///
/// By default all ranks share a host and nothing costs any time, as in [`run`](super::run).
///
/// ```
/// use std::time::Duration;
/// use dist_transport::{Incoming, Outgoing, Sink, Transport, sim};
///
/// // Two hosts of two ranks, connected by 1 Gbit/s to a switch 50 µs away.
/// let uplink = sim::Link::new(Duration::from_micros(50), 125_000_000);
/// let network = sim::Network::new(4).with_seed(7).with_hosts(&[0, 0, 1, 1]).with_host_link(uplink);
/// let outcome = network.run(|mut transport| {
///     let deadline = transport.runtime().deadline(Duration::from_secs(60));
///     let peer = transport.rank().plus(2).index();
///     let mut memory = [0; 1000];
///     let send = Outgoing { to: peer, parts: &[&[7; 1000]] };
///     let receive = Incoming { from: peer, len: 1000, sink: Sink::Into(&mut memory) };
///     transport.exchange(Some(send), Some(receive), &deadline.into()).map(|()| transport.runtime().now())
/// });
/// // 8 µs for the bytes, 100 µs for the way; the second rank of a host waits for the first one's bytes.
/// let times = outcome.results.into_iter().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(times.iter().min(), Some(&Duration::from_micros(108)));
/// assert_eq!(outcome.elapsed, Duration::from_micros(116));
/// # Ok::<(), dist_transport::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Network {
    seed: u64,
    links: Links,
    window: Option<usize>,
    coordinator: Option<usize>,
    clocks: HashMap<usize, Skew>,
    faults: Vec<(When, Fault)>,
    random_faults: usize,
    shared_memory: Option<MemoryCosts>,
    without_heap: Vec<usize>,
}

impl Network {
    /// Creates a network of `world_size` ranks on one host, without any cost, with seed 0.
    ///
    /// # Panics
    /// If the world size is 0: a program that runs on no rank would test nothing.
    pub fn new(world_size: usize) -> Self {
        assert_ne!(world_size, 0, "a world has at least one rank");
        Self {
            seed: 0,
            links: Links::new(world_size),
            window: None,
            coordinator: Some(0),
            clocks: HashMap::new(),
            faults: Vec::new(),
            random_faults: 0,
            shared_memory: None,
            without_heap: Vec::new(),
        }
    }

    /// Sets the seed, which decides the order of threads and the jitter of messages.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets the host of each rank: ranks with equal numbers share a host.
    /// [`Transport::hosts`](crate::Transport::hosts) returns them.
    ///
    /// # Panics
    /// If the list does not have one entry for each rank.
    pub fn with_hosts(mut self, hosts: &[u64]) -> Self {
        assert_eq!(hosts.len(), self.links.hosts.len(), "every rank runs on one host");
        self.links.hosts = hosts.to_vec();
        self
    }

    /// Sets the rack of each rank.
    ///
    /// # Panics
    /// If the list does not have one entry for each rank.
    pub fn with_racks(mut self, racks: &[u64]) -> Self {
        assert_eq!(racks.len(), self.links.racks.len(), "every rank runs in one rack");
        self.links.racks = racks.to_vec();
        self
    }

    /// Lets ranks of one host share memory: their transports offer [`direct`](crate::Transport::shm_group). A
    /// signal costs as much as an empty message; reading and writing cost nothing.
    pub fn with_shared_memory(self) -> Self {
        self.with_shared_memory_costs(MemoryCosts::default())
    }

    /// Shares memory as [`with_shared_memory`](Self::with_shared_memory) does, with costs for operations in
    /// memory.
    pub fn with_shared_memory_costs(self, costs: MemoryCosts) -> Self {
        Self { shared_memory: Some(costs), ..self }
    }

    /// Makes [`allocate`](crate::Transport::allocate) fail for this rank, as if there were no shared memory
    /// left.
    pub fn without_heap(mut self, rank: usize) -> Self {
        self.without_heap.push(rank);
        self
    }

    /// Sets the link between the ranks of one host. As with memory, each rank has its own link to the others.
    pub fn with_memory_link(mut self, link: Link) -> Self {
        self.links.memory = link;
        self
    }

    /// Sets the link between a host and its switch, which a message uses on its way out and on its way in.
    /// The ranks of a host share it.
    pub fn with_host_link(mut self, link: Link) -> Self {
        self.links.host = link;
        self
    }

    /// Sets the additional link between racks, which a message uses on its way out of one rack and into the
    /// other. The hosts of a rack share it.
    pub fn with_rack_link(mut self, link: Link) -> Self {
        self.links.rack = link;
        self
    }

    /// Gives two hosts a link of their own, which replaces the default link between hosts.
    pub fn with_link_between(mut self, one: u64, other: u64, link: Link) -> Self {
        self.links.between.insert((one.min(other), one.max(other)), link);
        self
    }

    /// Limits sends: a send returns when at most `bytes` of the bytes sent to this peer on this channel are
    /// unreceived, as with the finite buffers of sockets. Without a window no send ever waits.
    pub fn with_window(self, bytes: usize) -> Self {
        Self { window: Some(bytes), ..self }
    }

    /// Runs the coordinator outside of the ranks, where every rank reaches it. By default it runs in rank 0
    /// and ends with it.
    pub fn with_external_coordinator(self) -> Self {
        Self { coordinator: None, ..self }
    }

    /// Sets the clock of a rank: it began `ahead` earlier, and gains `drift_ppm` microseconds per second, or
    /// loses them.
    pub fn with_clock(mut self, rank: usize, ahead: Duration, drift_ppm: i32) -> Self {
        self.clocks.insert(rank, Skew { ahead, drift_ppm });
        self
    }

    /// Injects a fault at this time.
    ///
    /// # Panics
    /// If the fault names a rank that does not exist.
    pub fn with_fault(mut self, when: When, fault: Fault) -> Self {
        let known = fault.ranks().iter().all(|&rank| rank < self.world_size());
        assert!(known, "a world of {} has no such rank: {fault}", self.world_size());
        self.faults.push((when, fault));
        self
    }

    /// Injects this many random faults. The seed determines their kinds, ranks and times.
    pub fn with_random_faults(self, count: usize) -> Self {
        Self { random_faults: count, ..self }
    }

    /// Connects the caller's own threads, which may be real ones. Returns one transport per rank, in rank
    /// order. Faults and clocks work only with [`run`](Self::run).
    pub fn connect(&self, runtime: &Runtime) -> Vec<SimTransport> {
        let calm = Self { faults: Vec::new(), random_faults: 0, ..self.clone() };
        let world = calm.world(runtime.clone(), None);
        let ranks = Rank::all(self.world_size());
        ranks.map(|rank| world.enter(runtime.clone(), Skew::default(), rank)).collect()
    }

    /// Runs `program` once per rank in virtual time, as [`run`](super::run) does.
    ///
    /// # Panics
    /// As [`run`](super::run) does, and if a rank left no result because it was killed.
    pub fn run<T: Send + 'static>(
        &self,
        program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
    ) -> Outcome<T> {
        let Outcome { results, elapsed, trace_hash, switches, operations, faults, waits } =
            self.try_run(program).unwrap_or_else(|failure| panic!("{failure}"));
        let expect = |(rank, result): (usize, Option<T>)| {
            result.unwrap_or_else(|| panic!("seed {}: rank {rank} left no result: {faults:?}", self.seed))
        };
        let results = results.into_iter().enumerate().map(expect).collect();
        Outcome { results, elapsed, trace_hash, switches, operations, faults, waits }
    }

    /// Runs `program` once per rank in virtual time. A rank that was killed, or stalled until the end, has no
    /// result.
    ///
    /// # Errors
    /// In the cases in which [`run`](super::run) panics.
    pub fn try_run<T: Send + 'static>(
        &self,
        program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
    ) -> Result<Outcome<Option<T>>, SimulationError> {
        self.run_turns(TURN_MAX, program)
    }

    /// Returns the failure of the first of these seeds under which `program` fails: a rank panics, or threads
    /// wait forever. The program itself asserts that its results are right.
    ///
    /// ```
    /// use std::time::Duration;
    /// use dist_transport::{Incoming, Outgoing, Sink, Transport, sim};
    ///
    /// let found = sim::Network::new(2).find(0..100, |mut transport| {
    ///     let deadline = transport.runtime().deadline(Duration::from_secs(60));
    ///     if transport.rank().index() == 0 {
    ///         transport.exchange(Some(Outgoing { to: 1, parts: &[&[7]] }), None, &deadline.into()).unwrap();
    ///     } else if transport.wait_any_peer(&[0], &transport.runtime().deadline(Duration::ZERO).into()).unwrap().is_empty() {
    ///         let mut byte = [0];
    ///         let receive = Incoming { from: 0, len: 1, sink: Sink::Into(&mut byte) };
    ///         transport.exchange(None, Some(receive), &deadline.into()).unwrap();
    ///     } else {
    ///         panic!("too early");
    ///     }
    /// });
    /// assert!(found.unwrap().to_string().contains("rank 1 panicked: too early"));
    /// ```
    pub fn find<T: Send + 'static>(
        &self,
        seeds: impl IntoIterator<Item = u64>,
        program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
    ) -> Option<SimulationError> {
        let program = Arc::new(program);
        seeds.into_iter().find_map(|seed| {
            let program = program.clone();
            self.clone().with_seed(seed).try_run(move |transport| program(transport)).err()
        })
    }

    pub(super) fn run_turns<T: Send + 'static>(
        &self,
        turn_max: Duration,
        program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
    ) -> Result<Outcome<Option<T>>, SimulationError> {
        let scheduler = Scheduler::new(self.seed);
        let runtime = Runtime::new(Arc::new(scheduler.clone()));
        let world = self.world(runtime.clone(), Some(scheduler.clone()));
        let program = Arc::new(program);
        let results = Arc::new(Mutex::new(Vec::from_iter((0..self.world_size()).map(|_| None))));
        for rank in Rank::all(self.world_size()) {
            let transport = self.enter(&world, rank, &scheduler);
            let (program, results, killer) = (program.clone(), results.clone(), scheduler.clone());
            scheduler.add_rank(rank.index(), move || {
                let result = program(transport);
                // A rank that was killed before it began has no scheduling point at which it would unwind.
                if !killer.is_killed(rank.index()) {
                    results.lock().unwrap_or_else(PoisonError::into_inner)[rank.index()] = Some(result);
                }
            });
        }
        if !self.faults.is_empty() || self.random_faults > 0 {
            let world = world.clone();
            scheduler.add_daemon("network", move || world.keep_time());
        }
        let watched_world = Arc::downgrade(&world);
        scheduler.set_failure_hook(move || {
            watched_world.upgrade().iter().for_each(|world| world.fabric.keep_waits())
        });
        let end = scheduler.run_to_end(turn_max);
        let (operations, faults, waits) = world.fabric.history();
        match end {
            Ok(Statistics { elapsed, trace_hash, switches }) => {
                let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                let results = std::mem::take(&mut *results);
                Ok(Outcome { results, elapsed, trace_hash, switches, operations, faults, waits })
            }
            Err(failure) => {
                let first_panic = scheduler.first_panic().map(|panic| format!("first, {panic}"));
                Err(SimulationError { seed: self.seed, faults, waits, first_panic, failure })
            }
        }
    }

    fn enter(&self, world: &Arc<World>, rank: Rank, scheduler: &Scheduler) -> SimTransport {
        let executor: Arc<dyn Executor> = Arc::new(scheduler.clone());
        match self.clocks.get(&rank.index()) {
            Some(&skew) => world.enter(Runtime::new(Arc::new(Skewed { executor, skew })), skew, rank),
            None => world.enter(Runtime::new(executor), Skew::default(), rank),
        }
    }

    fn world_size(&self) -> usize {
        self.links.hosts.len()
    }

    fn world(&self, clock: Runtime, scheduler: Option<Scheduler>) -> Arc<World> {
        // Separate generators: the costs of messages change neither the order of threads nor the faults.
        let mut fault_random = SplitMix64::new(mix(self.seed ^ FAULTS));
        let random = |_| Fault::random(&mut fault_random, self.world_size());
        let faults = self.faults.iter().cloned().chain((0..self.random_faults).map(random)).collect();
        let random = SplitMix64::new(mix(self.seed ^ LINKS));
        let fabric = SimFabric::new(self.links.clone(), self.coordinator, faults, random);
        let hosts = self.links.hosts.clone();
        let segments = self.shared_memory.map(Segments::new);
        let without_heap = self.without_heap.clone();
        Arc::new(World { fabric, clock, scheduler, hosts, window: self.window, segments, without_heap })
    }
}

/// The reason why a run could not be completed.
#[derive(thiserror::Error)]
#[error("seed {seed}: {failure}{}{}{}", list(first_panic), list(faults), list(waits))]
pub struct SimulationError {
    seed: u64,
    faults: Vec<String>,
    waits: Vec<String>,
    /// The first panic of a spawned thread. A rank that joins the thread has only the panic's payload.
    first_panic: Option<String>,
    failure: Failure,
}

/// Prints the full message, because `unwrap` prints the debug form.
impl fmt::Debug for SimulationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl SimulationError {
    /// Returns the seed that reproduces the run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the faults that had happened.
    pub fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Returns the wait of every rank when the job ended, or when the run could not continue.
    pub fn waits(&self) -> &[String] {
        &self.waits
    }

    #[cfg(test)]
    pub(super) fn failure(&self) -> &Failure {
        &self.failure
    }
}

fn list<'a>(lines: impl IntoIterator<Item = &'a String>) -> String {
    lines.into_iter().map(|line| format!("\n  {line}")).collect()
}

/// Constants that separate the generators of one seed.
const FAULTS: u64 = 0x6661_756c;
const LINKS: u64 = 0x6c69_6e6b;

/// The longest time that a thread may run without calling the scheduler, by the system's clock.
const TURN_MAX: Duration = Duration::from_secs(120);
