//! The networks on which the suite runs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::rank_result::RankResult;
use crate::forwarding::ForwardingTransport;
use crate::shm_group::{Reach, ShmGroup};
use crate::{Allocation, LazyDeadline, Result, Transport};

/// A kind of transport for [`conformance`](mod@crate::conformance) to check.
pub trait Fabric: Sync {
    /// Connects a world of this size by new transports and runs `program` once on each, every one on its own
    /// thread, until all have returned. `run` is the number of this run of the program.
    ///
    /// # Panics
    /// If `program` panics on some rank, with that rank's panic.
    fn run(&self, run: u64, world_size: usize, program: TransportProgram);

    /// Like [`run`](Self::run), with the host of each rank. Ranks with equal numbers share a host. A fabric that
    /// cannot place ranks runs them on one host.
    fn run_on(&self, run: u64, hosts: &[u64], program: TransportProgram) {
        self.run(run, hosts.len(), program);
    }

    /// Returns whether the ranks of a world share memory, and how far they reach at least into each other's
    /// ordinary memory. If they share none, promises about shared memory are kept trivially. If they do,
    /// a promise fails on a transport that offers no memory or less reach.
    fn shared_memory(&self) -> Option<Reach>;

    /// Returns `true` if ranks that wait for each other in a circle are told soon. Otherwise their waits end at a
    /// deadline.
    fn finds_circles(&self) -> bool {
        true
    }

    /// Returns `true` if the transports have a key-value store. If they have none, promises about it are kept
    /// trivially.
    fn has_store(&self) -> bool {
        true
    }

    /// Returns `true` if the transports have collectives of a library, of any size. If they have none, promises about
    /// them are kept trivially.
    fn has_native(&self) -> bool {
        false
    }

    /// Returns how often each program runs. Runs of a simulated network may all differ.
    fn runs(&self) -> u64 {
        1
    }

    /// Returns the processes of the fabric if each rank is a process of its own. Then all processes check the same
    /// promises in the same order, and [`run`](Self::run) runs the program of this process's rank only, if the
    /// world has this rank.
    fn processes(&self) -> Option<&dyn Processes> {
        None
    }

    /// Returns a timeout for waits that must time out. It is long enough for a message to arrive in the
    /// meantime, if one is sent.
    fn short(&self) -> Duration {
        Duration::from_millis(50)
    }
}

/// The processes of a fabric whose ranks are processes.
pub trait Processes {
    /// Returns the number of processes. Programs of larger worlds do not run.
    fn count(&self) -> usize;

    /// Sends the bytes of this process to all, and returns the bytes of each process in the order of their ranks.
    fn all_gather(&self, own: &[u8]) -> Vec<Vec<u8>>;
}

/// The program of each rank.
pub type TransportProgram = Arc<dyn Fn(Box<dyn Transport>) + Send + Sync>;

/// A fabric, with helpers of the suite.
#[derive(Clone, Copy)]
pub(super) struct Backend(pub(super) &'static dyn Fabric);

impl Backend {
    /// Runs `program` on every rank, and `verify` on the results of the ranks, in rank order.
    pub(super) fn check<T: RankResult + Send + 'static>(
        self,
        world_size: usize,
        program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
        verify: impl Fn(Vec<T>),
    ) {
        let start = |run, program| self.0.run(run, world_size, program);
        self.check_runs(world_size, start, program, verify);
    }

    /// Like [`check`](Self::check), with ranks on these hosts.
    pub(super) fn check_on<T: RankResult + Send + 'static>(
        self,
        hosts: &[u64],
        program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
        verify: impl Fn(Vec<T>),
    ) {
        let start = |run, program| self.0.run_on(run, hosts, program);
        self.check_runs(hosts.len(), start, program, verify);
    }

    fn check_runs<T: RankResult + Send + 'static>(
        self,
        world_size: usize,
        start: impl Fn(u64, TransportProgram),
        program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
        verify: impl Fn(Vec<T>),
    ) {
        let processes = self.0.processes();
        if processes.is_some_and(|processes| processes.count() < world_size) {
            return;
        }
        let program = Arc::new(program);
        for run in 0..self.0.runs() {
            let results: Arc<Mutex<Vec<Option<T>>>> =
                Arc::new(Mutex::new((0..world_size).map(|_| None).collect()));
            let (program, of_ranks) = (program.clone(), results.clone());
            let shared_memory = self.0.shared_memory();
            let keep = move |inner: Box<dyn Transport>| {
                let rank = inner.rank().index();
                let result = program(Box::new(CheckedTransport { inner, shared_memory }));
                of_ranks.lock().unwrap_or_else(PoisonError::into_inner)[rank] = Some(result);
            };
            start(run, Arc::new(keep));
            let mut results = std::mem::take(&mut *results.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(processes) = processes {
                results = all_gather(processes, results);
            }
            verify(
                results
                    .into_iter()
                    .map(|result| result.expect("the program has run on every rank"))
                    .collect(),
            );
        }
    }

    /// Returns a timeout for a wait that must time out.
    pub(super) fn short(self) -> Duration {
        self.0.short()
    }
}

/// Exchanges the results of processes, each of which has at most one.
fn all_gather<T: RankResult>(processes: &dyn Processes, results: Vec<Option<T>>) -> Vec<Option<T>> {
    let world_size = results.len();
    let mut own = Vec::new();
    results.into_iter().flatten().next().encode(&mut own);
    let all = processes.all_gather(&own);
    all.iter().take(world_size).map(|bytes| RankResult::decode(&mut &bytes[..])).collect()
}

/// A transport of a fabric that offers the memory which the fabric has stated.
#[derive(Debug)]
struct CheckedTransport {
    inner: Box<dyn Transport>,
    shared_memory: Option<Reach>,
}

impl ForwardingTransport for CheckedTransport {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let shared_memory = self.shared_memory;
        let fork = (*self.inner).fork(members)?;
        Ok(fork.map(|inner| -> Box<dyn Transport> { Box::new(Self { inner, shared_memory }) }))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        let inner = (*self.inner).fork_local(members, number)?;
        Ok(Box::new(Self { inner, shared_memory: self.shared_memory }))
    }

    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        let is_group = self.inner.rank().world_size() > 1;
        let shm_group = (*self.inner).shm_group(due)?;
        let reach = shm_group.as_ref().map(|shm_group| shm_group.shared().reach);
        if is_group || reach.is_some() {
            assert!(
                reach >= self.shared_memory,
                "{reach:?} is less than the fabric's {:?}",
                self.shared_memory
            );
            assert_eq!(
                reach.is_some(),
                self.shared_memory.is_some(),
                "the fabric states that nothing is shared"
            );
        }
        Ok(shm_group)
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        let allocation = (*self.inner).allocate(bytes);
        let is_group = self.inner.rank().world_size() > 1;
        assert!(allocation.is_some() || !is_group || self.shared_memory.is_none(), "{bytes} B are allocated");
        allocation
    }
}

/// A timeout that ends after all other ranks have waited long and have reported it.
pub(super) const AFTER_ALL_WAIT: Duration = Duration::from_secs(2);

/// A timeout for waits that must not time out.
pub(super) const LONG: Duration = Duration::from_secs(60);
