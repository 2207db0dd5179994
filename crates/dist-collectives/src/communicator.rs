//! The typed collectives of one group, as its user calls them.

use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use dist_algos::{CostModel, Hosts};
#[cfg(feature = "tcp")]
use dist_transport::tcp::{Config, Medium, TcpTransport};
use dist_transport::{Cause, Chain, ChannelId, Error as TransportError, Runtime, Source, Traffic, Transport};

use crate::engine::{Engine, alloc};
use crate::history::History;
use crate::settings::Settings;
use crate::two_level::{HostLevels, SubgroupHosts};
use crate::worker::Worker;
use crate::{Algorithm, Buffer, Call, Element, Error, Operation, ReductionOrder, Result};
#[cfg(feature = "tcp")]
use crate::{CostCache, crossovers_from_env};

/// This rank's place in a group, and everything that the group does together.
///
/// All ranks of the group make the same calls in the same order, with arguments that agree; whoever disagrees is
/// named in the error of every rank that can know. A collective takes the communicator exclusively, so that it
/// runs one at a time; another thread takes a [`fork`](Communicator::fork).
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 3, |transport| {
///     let mut comm = Communicator::new(transport);
///     let mut values = [comm.rank() as f32, 1.0];
///     comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
///     values
/// });
/// assert_eq!(outcome.results, [[3.0, 3.0]; 3]);
/// ```
///
/// One collective at a time is what the compiler checks:
///
/// ```compile_fail
/// # use dist_collectives::{Communicator, ReduceOp};
/// fn twice(comm: &Communicator, left: &mut [f32]) {
///     comm.all_reduce(left, ReduceOp::Sum);   // needs &mut Communicator
/// }
/// ```
///
/// Every call has one deadline, the [timeout](Communicator::set_timeout) from its beginning. After an error other
/// than an argument that was refused, the whole job is aborted.
///
/// Dropping a communicator waits for the operations that it has [started](Communicator::start_all_reduce), until
/// their deadlines at most; on rank 0, if it hosts the coordinator, dropping the last one of a job waits until all other
/// ranks have left too. Dropping it in a panic aborts the job. A process that ends while it has a communicator
/// counts as dead, and the job is aborted: [`std::process::exit`] drops nothing, so drop the communicator before it.
pub struct Communicator {
    /// First, so that what was started ends before the group says goodbye.
    pub(crate) worker: WorkerState,
    pub(crate) engine: Engine,
    pub(crate) settings: Settings,
    pub(crate) runtime: Runtime,
    /// How many calls were announced.
    announced: u64,
}

/// What does the operations that do not block.
pub(crate) enum WorkerState {
    /// None was started yet; this is the transport that they will use. It was forked when the communicator was
    /// made, so that its channel does not depend on when the first is started.
    Idle(Box<dyn Transport>),
    Running(Worker),
    /// That fork failed. It is not tried again: a rank that forks alone has other channels than its peers.
    Unavailable(Source<TransportError>),
    /// For the moment in which the worker is started.
    Starting,
}

impl Communicator {
    /// The group that a transport connects.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_settings(Box::new(transport), Settings::default(), History::NEW)
    }

    /// Joins the world that the environment describes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and more, as
    /// set by `distctl run` or torchrun. Nothing set is a world of one.
    ///
    /// The choice of algorithms goes by what was [measured](Self::tune) in the first such world on rank 0's host that had
    /// it for itself, and is kept in [a file](crate::CostCache::for_user) since; the first measurement takes some hundredths
    /// of a second, a look whether it still holds some thousandths. On rank 0, `DIST_COSTS=off` lets the choice of all ranks
    /// go by fixed costs instead, and `DIST_COSTS=FILE` by those of another file. `DIST_CROSSOVERS=staged=64K,write_to_all=1M,read_from_all=4M,read_ordinary=2M`, or some of them, on all ranks alike, says from how many
    /// bytes on ranks that share memory use these [forms](crate::DirectAlgorithm).
    ///
    /// # Errors
    /// If the environment makes no sense, or the ranks do not meet in time.
    #[cfg(feature = "tcp")]
    pub fn from_env() -> Result<Self> {
        let config = Config::from_env().map_err(|source| Error::Join(source.into()))?;
        let crossovers = crossovers_from_env()?;
        let (mut comm, medium) = Self::meet(&config)?;
        comm.set_crossovers(crossovers);
        if comm.world_size() > 1 {
            comm.tune(CostCache::for_user().as_ref(), medium.name())?;
        }
        Ok(comm)
    }

    /// Joins the world that this configuration describes, and nothing else: the choice of algorithms goes by fixed costs
    /// until [`tune`](Self::tune) is called, and `DIST_CROSSOVERS` is not looked at. To change what the environment says
    /// of the world, begin with [`Config::from_env`]:
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use dist_collectives::{Communicator, Config};
    ///
    /// let config = Config::from_env()?.with_timeout(Duration::from_secs(600));
    /// let comm = Communicator::join(&config)?;
    /// # assert_eq!(comm.world_size(), 1);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the ranks do not meet in time, or do not belong together.
    #[cfg(feature = "tcp")]
    pub fn join(config: &Config) -> Result<Self> {
        Self::meet(config).map(|(comm, _)| comm)
    }

    /// The world, and what its messages go through.
    #[cfg(feature = "tcp")]
    fn meet(config: &Config) -> Result<(Self, Medium)> {
        let transport = TcpTransport::join(config).map_err(|source| Error::Join(source.into()))?;
        let medium = transport.medium();
        let comm = Self::new(transport);
        tracing::info!(rank = comm.rank(), world_size = comm.world_size(), "joined the world");
        Ok((comm, medium))
    }

    fn with_settings(mut transport: Box<dyn Transport>, settings: Settings, history: History) -> Self {
        let all: Vec<usize> = (0..transport.rank().world_size()).collect();
        let worker = match transport.fork(&all) {
            Ok(forked) => WorkerState::Idle(forked.expect(OF_ALL)),
            Err(error) => WorkerState::Unavailable(error.into()),
        };
        let (runtime, channel) = (transport.runtime().clone(), transport.channel());
        Self { engine: Engine::new(transport, channel, history), settings, runtime, worker, announced: 0 }
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.engine.rank().index()
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.engine.rank().world_size()
    }

    /// The ranks of the group by their numbers in the world, in the group's order. Errors name ranks by these.
    pub fn members_in_world(&self) -> &[usize] {
        self.engine.transport.members()
    }

    /// The channel that the group communicates on; no two groups of a job have the same.
    pub fn channel(&self) -> ChannelId {
        self.engine.transport.channel()
    }

    /// Where each rank of the group runs: ranks with equal numbers share a machine. Every rank sees the same.
    pub fn hosts(&self) -> Vec<u64> {
        self.engine.transport.hosts()
    }

    /// Says which ranks share a host, and what messages between these take: what [`cost_model`](Self::cost_model) says
    /// then holds for messages from host to host; where all share one it is set to what messages take inside. The
    /// following operations go by it where that is faster: among the ranks of each host, and across. Every rank must set
    /// the same. Forks and subgroups made later go by it too.
    ///
    /// ```
    /// use dist_collectives::{Communicator, CostModel, Hosts, Operation};
    /// use dist_transport::sim;
    ///
    /// sim::run(1, 8, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let inside = CostModel { round_ps: 1_000_000, byte_ps: 100, reduced_byte_ps: 0 };
    ///     comm.set_topology(Hosts::new(&[1, 1, 1, 1, 2, 2, 2, 2]), inside).unwrap();
    ///     let algorithm = comm.algorithm(Operation::AllReduce, 4096).unwrap().unwrap();
    ///     assert!(algorithm.name().starts_with("two_level/"));
    /// });
    /// ```
    ///
    /// # Errors
    /// If they are the hosts of another number of ranks.
    pub fn set_topology(&mut self, hosts: Hosts, inside: CostModel) -> Result<()> {
        let (ranks, world_size) = (hosts.world_size(), self.world_size());
        if ranks != world_size {
            return Err(Error::Hosts { ranks, world_size });
        }
        if hosts.count() == 1 {
            self.settings.model = inside;
        }
        self.engine.set_levels(Some(Arc::new(HostLevels::new(hosts, inside))));
        Ok(())
    }

    /// The clock and the threads that this communicator lives by.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// What the blocking operations of this communicator have moved so far.
    pub fn traffic(&self) -> Traffic {
        self.engine.transport.traffic()
    }

    /// What the operations that this communicator has [started](Self::start_all_reduce), and that have ended, have
    /// moved so far.
    pub fn traffic_of_started(&self) -> Traffic {
        match &self.worker {
            WorkerState::Running(worker) => worker.traffic(),
            WorkerState::Idle(_) | WorkerState::Unavailable(_) | WorkerState::Starting => Traffic::default(),
        }
    }

    /// How long a call may last.
    pub fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// Says how long each following call may last; 60 seconds if nothing is said.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.settings.timeout = timeout;
    }

    /// The order in which calls reduce.
    pub fn order(&self) -> ReductionOrder {
        self.settings.order
    }

    /// Says in which order the following calls reduce; canonical if nothing is said.
    pub fn set_order(&mut self, order: ReductionOrder) {
        self.settings.order = order;
    }

    /// The communicator with another timeout, as long as the guard lives: for one call,
    /// `comm.with_timeout(limit).barrier()`.
    pub fn with_timeout(&mut self, timeout: Duration) -> Scoped<'_> {
        let before = mem::replace(&mut self.settings.timeout, timeout);
        Scoped { communicator: self, before: SavedSetting::Timeout(before) }
    }

    /// The communicator with another order of reduction, as long as the guard lives.
    pub fn with_order(&mut self, order: ReductionOrder) -> Scoped<'_> {
        let before = mem::replace(&mut self.settings.order, order);
        Scoped { communicator: self, before: SavedSetting::Order(before) }
    }

    /// The communicator with this algorithm for its operation, as long as the guard lives. A call that the
    /// algorithm cannot do, or not in the order asked for, is refused. Other operations ignore it.
    pub fn with_algorithm(&mut self, algorithm: impl Into<Algorithm>) -> Scoped<'_> {
        let algorithm = algorithm.into();
        let before = self.settings.force(algorithm.operation(), Some(algorithm));
        Scoped { communicator: self, before: SavedSetting::Algorithm(algorithm.operation(), before) }
    }

    /// Another communicator of the same ranks, for another thread. Nothing is communicated; every rank of the
    /// group makes the same forks and subgroups at the same places among its calls. If one does not, the next collective
    /// call of this communicator, or of what is made of it, is an [`Error::Mismatch`](crate::Error::Mismatch) that says so.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_dup")]
    pub fn fork(&mut self) -> Result<Self> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        let transport = self.engine.fork(&all)?.expect(OF_ALL);
        let history = self.engine.history().of_child();
        let mut forked = Self::with_settings(transport, self.settings.of_child(), history);
        forked.engine.set_levels(self.engine.levels().cloned());
        Ok(forked)
    }

    /// A communicator of these ranks, numbered in the order of the list, with the timeout and the order of this
    /// one; `None` on ranks that are not in the list. Nothing is communicated; every rank of the group, member or
    /// not, makes the same forks and subgroups at the same places among its calls, as for [`fork`](Self::fork).
    ///
    /// Several groups that share no rank can be made by one call: each rank names the members of its own group. If two ranks
    /// of a group name different members, or name them in another order, the first of them that waits for the other one in
    /// that group gets an error with both lists, and the job is aborted.
    ///
    /// Take this if the list is at hand and the members' numbers in this group are not needed later. `Group` of
    /// dist-groups is this with a table that translates ranks between the two, and can also be split by colour.
    ///
    /// # Errors
    /// If the list is empty, names a rank twice, or one that does not exist.
    #[doc(alias = "MPI_Comm_create")]
    #[doc(alias = "new_group")]
    pub fn subgroup(&mut self, members: &[usize]) -> Result<Option<Self>> {
        let Some(transport) = self.engine.fork(members)? else { return Ok(None) };
        let history = self.engine.history().of_child();
        let mut group = Self::with_settings(transport, self.settings.of_child(), history);
        match self.engine.levels().map(|levels| levels.of(members)) {
            Some(SubgroupHosts::Hosts(levels)) => group.engine.set_levels(Some(Arc::new(levels))),
            Some(SubgroupHosts::OneHost { inside }) => group.settings.model = inside,
            None => {}
        }
        Ok(Some(group))
    }

    /// The worker, started if there is none. Without one the job is aborted, because peers would wait for this rank.
    pub(crate) fn worker(&mut self) -> Result<&mut Worker> {
        let channel = self.channel();
        let (worker, failed) = match mem::replace(&mut self.worker, WorkerState::Starting) {
            WorkerState::Idle(transport) => match Worker::new(transport, channel) {
                Ok(worker) => (WorkerState::Running(worker), None),
                Err((transport, error)) => (WorkerState::Idle(transport), Some(error)),
            },
            WorkerState::Unavailable(source) => {
                let error = Error::NoWorker(source.clone());
                (WorkerState::Unavailable(source), Some(error))
            }
            worker => (worker, None),
        };
        self.worker = worker;
        match (failed, &mut self.worker) {
            (None, WorkerState::Running(worker)) => Ok(worker),
            (Some(error), _) => {
                self.engine.transport.abort(Cause::gave_up(Chain(&error)));
                Err(error)
            }
            (None, _) => unreachable!("a worker that does not run has failed to start"),
        }
    }

    /// Announces that this rank begins something that is made of many calls, perhaps of several communicators: a step of a
    /// training, a save. All ranks announce calls of the same kinds in the same order. Nothing is sent. If a rank waits for
    /// long, in whatever call, and has announced another kind than a rank that waits as well, the job ends, and the errors have
    /// the names of both calls, of which 16 bytes count: such ranks may wait for each other in calls of different
    /// communicators, where nothing else would tell before the deadline. Calls of one kind find out by themselves what they do
    /// not agree in, and may have different names.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut other = comm.fork().unwrap();
    ///     let name = if comm.rank() == 0 { "save" } else { "step" };
    ///     comm.announce(name, name);
    ///     let done = if comm.rank() == 0 { other.barrier() } else { comm.barrier() };
    ///     done.unwrap_err().to_string()
    /// });
    /// assert!(outcome.results.iter().all(|error| error.contains("save #0") && error.contains("step #0")));
    /// ```
    pub fn announce(&mut self, kind: &str, name: &str) {
        let channel = self.channel().of_announcements().get();
        let call = Call::announced(channel, self.announced, kind, name);
        self.announced += 1;
        tracing::trace!(rank = self.rank(), "{call}");
        self.engine.transport.announce(&call.encode());
    }

    /// Elements, all zero, in memory that the ranks of this host share, so that operations on them reach into each
    /// other's; in ordinary memory where there is none to share, or no more of it. What is allocated here can be used with
    /// every communicator.
    ///
    /// A rank that gets ordinary memory, as where files may not have the 256 MiB that shared memory begins with (`ulimit -f`),
    /// takes part in what is done with shared memory if the others may reach into its own; otherwise an operation that
    /// reaches into it fails ([`Error::OutOfReach`]) and ends the job, even if all ranks got ordinary memory.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut buffer = comm.alloc::<f32>(3).unwrap();
    ///     buffer.fill(1.0);
    ///     comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
    ///     buffer.into_vec()
    /// });
    /// assert_eq!(outcome.results, [[2.0; 3]; 2]);
    /// ```
    ///
    /// # Errors
    /// If there is not so much memory.
    #[doc(alias = "MPI_Alloc_mem")]
    pub fn alloc<T: Element>(&mut self, len: usize) -> Result<Buffer<T>> {
        alloc(&mut *self.engine.transport, len)
    }

    /// Ends the communicator when every rank has called this, and reports what its ranks have not done alike, the last call
    /// included: it compares all calls, as a [`barrier`](Self::barrier) does. It waits for the operations that were
    /// [started](Self::start_all_reduce).
    ///
    /// A program need not call it. Without it, nothing reports that the last calls differed if their messages never met,
    /// and a message that was never received is only logged.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Error};
    /// use dist_transport::sim;
    ///
    /// sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut values = [0; 2];
    ///     // Each rank only sends to the other.
    ///     let root = comm.rank();
    ///     comm.broadcast(&mut values, root).unwrap();
    ///     let error = comm.close().unwrap_err();
    ///     assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { .. }));
    /// });
    /// ```
    ///
    /// # Errors
    /// As for [`barrier`](Self::barrier), and [`Error::Unread`] if this rank has not received a message that another one
    /// has sent.
    #[doc(alias = "MPI_Comm_free")]
    #[doc(alias = "destroy_process_group")]
    pub fn close(mut self) -> Result<()> {
        // What was started ends first, or fails.
        drop(mem::replace(&mut self.worker, WorkerState::Starting));
        self.barrier()?;
        self.engine.unread().map_or(Ok(()), |peer| Err(Error::Unread { peer }))
    }

    /// Ends the job for every rank, with this rank as the cause: the others' errors say [why](Cause::gave_up) it gave up.
    /// With [anyhow](https://docs.rs/anyhow), `format_args!("{error:#}")` is an error and all that led to it.
    #[doc(alias = "MPI_Abort")]
    pub fn abort(&mut self, why: impl fmt::Display) {
        self.engine.transport.abort(Cause::gave_up(why));
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.transport.abort(Cause::Panicked);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({}, channel {:x})", self.engine.rank(), self.channel().get())
    }
}

const OF_ALL: &str = "every rank is a member of a group of all";

/// A [`Communicator`] with another setting, which ends by giving it the old one back. Other settings that are changed
/// meanwhile stay so.
#[derive(Debug)]
#[must_use = "the setting holds as long as this lives"]
pub struct Scoped<'a> {
    communicator: &'a mut Communicator,
    before: SavedSetting,
}

/// The one setting that is given back.
#[derive(Debug)]
enum SavedSetting {
    Timeout(Duration),
    Order(ReductionOrder),
    Algorithm(Operation, Option<Algorithm>),
}

impl Deref for Scoped<'_> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        self.communicator
    }
}

impl DerefMut for Scoped<'_> {
    fn deref_mut(&mut self) -> &mut Communicator {
        self.communicator
    }
}

impl Drop for Scoped<'_> {
    fn drop(&mut self) {
        let settings = &mut self.communicator.settings;
        match self.before {
            SavedSetting::Timeout(before) => settings.timeout = before,
            SavedSetting::Order(before) => settings.order = before,
            SavedSetting::Algorithm(operation, before) => {
                settings.force(operation, before);
            }
        }
    }
}
