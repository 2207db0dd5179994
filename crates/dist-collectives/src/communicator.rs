//! [`Communicator`]: the typed collectives of one group.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytemuck::Pod;
use dist_algos::{ALGORITHMS, Algorithm, AlgorithmTable, CostModel, Hosts, Placement};
#[cfg(feature = "tcp")]
use dist_transport::process::{Config, Medium, ProcessTransport};
use dist_transport::runtime::Deadline;
use dist_transport::{
    Cause, Chain, ChannelId, Error as TransportError, ErrorSource, Rank, Runtime, StartedCount, Store,
    Traffic, Transport,
};

use crate::engine::{CallOptions, Engine, MessageMemory, NewMessage, SharedMemory, alloc};
use crate::history::History;
use crate::message_stream::MessageStream;
use crate::operation_queue::{AbortHandle, OperationQueue, difference};
use crate::pending::{Failed, OperationOutcome, OperationSource, RunningOperation};
use crate::settings::Settings;
use crate::two_level::{HostLevels, SubgroupHosts};
use crate::window_service::ServiceChannels;
use crate::worker::{Worker, WorkerQueue, spins};
use crate::{Buffer, Call, Error, Operation, Pending, ReductionOrder, Result};
#[cfg(feature = "tcp")]
use crate::{CostCache, crossovers_from_env};

/// One rank's handle to a group of ranks, with all collectives of the group.
///
/// All ranks of the group make the same calls in the same order, with arguments that agree. If a rank disagrees,
/// the errors of all ranks that can know name it. A collective borrows the communicator exclusively, so one
/// collective runs at a time. For another thread, make a [`fork`](Communicator::fork).
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
/// The compiler checks that one collective runs at a time:
///
/// ```compile_fail
/// # use dist_collectives::{Communicator, ReduceOp};
/// fn twice(comm: &Communicator, left: &mut [f32]) {
///     comm.all_reduce(left, ReduceOp::Sum);   // needs &mut Communicator
/// }
/// ```
///
/// Every call has one deadline: it begins with the call and lasts as long as the
/// [timeout](Communicator::set_timeout). After an error other than a refused argument, the whole job is aborted.
///
/// Calls and [started](Communicator::start_all_reduce) collectives are executed in the order in which the program makes
/// them: a call first completes the collectives that were started before it.
///
/// Dropping a communicator waits for the operations that it has [started](Communicator::start_all_reduce), until
/// their deadlines at most. If rank 0 hosts the coordinator, dropping its last communicator waits until all other
/// ranks have left. Dropping a communicator during a panic aborts the job. A process that ends while it holds a
/// communicator counts as dead, and the job is aborted. [`std::process::exit`] drops nothing, so drop the
/// communicator before it.
#[doc(alias = "ProcessGroup")]
#[doc(alias = "MPI_Comm")]
#[doc(alias = "ncclComm_t")]
pub struct Communicator {
    /// The started collectives, once there was one. They come first, so that they end before the group is left.
    collectives: Option<Worker<OperationQueue>>,
    /// The started messages, once there was one.
    message_stream: Option<Worker<MessageStream>>,
    /// The engine for collectives. `None` if it is in the queue of started ones.
    engine: Option<Box<Engine>>,
    /// The engine for messages, or the reason why there is none. `None` if it is in the stream of started ones.
    messages: Result<Option<Box<Engine>>, ErrorSource<TransportError>>,
    /// The transport for everything that is not a call, or the reason why there is none.
    control: Result<Box<dyn Transport>, ErrorSource<TransportError>>,
    /// The transport of this rank alone, through which handles abort the job, once something was started. It is dropped with
    /// the communicator, even if handles live longer.
    alone: Option<Arc<Mutex<Box<dyn Transport>>>>,
    pub(crate) group: GroupInfo,
    pub(crate) settings: Settings,
    pub(crate) runtime: Runtime,
    /// The hosts of the ranks, if two-level algorithms are enabled.
    pub(crate) levels: Option<Arc<HostLevels>>,
    /// The channels of windows that threads serve, once there was such a window. `None` while one is open.
    pub(crate) window_channels: Option<ServiceChannels>,
    /// The started operations that have not ended.
    started: StartedCount,
    /// The number of announced calls.
    announced: u64,
    /// The number of groups that were created with each tag and list of members.
    local_groups: HashMap<(u32, Vec<usize>), u32>,
}

/// The properties of a group, which do not depend on the place of the engine.
pub(crate) struct GroupInfo {
    pub(crate) rank: Rank,
    members: Vec<usize>,
    channel: ChannelId,
    hosts: Vec<u64>,
    pub(crate) algorithms: AlgorithmTable<'static>,
    pub(crate) placement: Placement,
    pub(crate) is_on_one_host: bool,
    pub(crate) shared_memory: SharedMemory,
}

impl Communicator {
    /// Creates a communicator of the group that a transport connects.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_table(Box::new(transport), ALGORITHMS)
    }

    /// Joins the world that the environment variables describe: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`
    /// and others, as `distctl run` or torchrun set them. If none is set, the result is a world of one rank.
    ///
    /// Algorithms are chosen by measured costs. The first such world on rank 0's host [measures](Self::tune) them
    /// and stores them in [a file](crate::CostCache::for_user). Measuring takes some hundredths of a second;
    /// checking stored costs takes some thousandths. Two variables on rank 0 change this for all ranks:
    /// `DIST_COSTS=off` selects fixed costs, `DIST_COSTS=FILE` another file.
    ///
    /// If the ranks run on several hosts, and a host has several of them, two-level algorithms are used where they are
    /// faster. Groups inside a host use algorithms of one level.
    ///
    /// `DIST_CROSSOVERS=staged=64K,write_to_all=1M,read_from_all=4M,read_ordinary=2M` sets the sizes from which
    /// ranks that share memory use these [algorithms](dist_algos::direct). Entries may be left out. All ranks
    /// must have the same value.
    ///
    /// # Errors
    /// If the variables are invalid, or the ranks do not join in time.
    #[cfg(feature = "tcp")]
    #[doc(alias = "init_process_group")]
    #[doc(alias = "MPI_Init")]
    #[doc(alias = "mpi_init_thread")]
    pub fn from_env() -> Result<Self> {
        let config = Config::from_env().map_err(|source| Error::Join(source.into()))?;
        let crossovers = crossovers_from_env()?;
        let (mut comm, medium) = Self::join_world(&config)?;
        comm.set_crossovers(crossovers);
        if comm.world_size() > 1 {
            comm.tune(CostCache::for_user().as_ref(), medium.name())?;
        }
        Ok(comm)
    }

    /// Joins the world that this configuration describes. Algorithms are chosen by fixed costs until
    /// [`tune`](Self::tune) is called, and `DIST_CROSSOVERS` is ignored. To change a part of the environment's
    /// configuration, begin with [`Config::from_env`]:
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
    /// If the ranks do not join in time, or belong to different jobs.
    #[cfg(feature = "tcp")]
    #[doc(alias = "init_process_group")]
    #[doc(alias = "ncclCommInitRank")]
    pub fn join(config: &Config) -> Result<Self> {
        Self::join_world(config).map(|(comm, _)| comm)
    }

    /// Joins the world and returns the medium of its messages.
    #[cfg(feature = "tcp")]
    fn join_world(config: &Config) -> Result<(Self, Medium)> {
        let transport = ProcessTransport::join(config).map_err(|source| Error::Join(source.into()))?;
        let medium = transport.medium();
        let comm = Self::new(transport);
        tracing::info!(rank = comm.rank(), world_size = comm.world_size(), "joined the world");
        Ok((comm, medium))
    }

    /// Creates a communicator that chooses from this table of algorithms. Forks, subgroups and the worker use the same
    /// table.
    fn with_table(transport: Box<dyn Transport>, table: AlgorithmTable<'static>) -> Self {
        Self::with_settings(transport, table, Settings::default(), History::NEW)
    }

    /// Creates a communicator of the ranks of this group, with the settings that a child inherits.
    fn child(&self, transport: Box<dyn Transport>) -> Self {
        let history = self.engine.as_ref().map_or(History::NEW, |engine| engine.history().of_child());
        Self::with_settings(transport, self.group.algorithms, self.settings.of_child(), history)
    }

    fn with_settings(
        mut transport: Box<dyn Transport>,
        table: AlgorithmTable<'static>,
        settings: Settings,
        history: History,
    ) -> Self {
        let all: Vec<usize> = (0..transport.rank().world_size()).collect();
        let forked = transport.fork(&all);
        let (runtime, channel) = (transport.runtime().clone(), transport.channel());
        let (members, hosts) = (transport.members().to_vec(), transport.hosts());
        let mut control = forked.map(|forked| forked.expect(OF_ALL)).map_err(ErrorSource::from);
        let messages = match &mut control {
            Ok(control) => control.fork(&all).map_err(ErrorSource::from),
            Err(source) => Err(source.clone()),
        };
        let of_messages = |forked: Option<_>| Engine::of_messages(forked.expect(OF_ALL), channel, table);
        let started = StartedCount::default();
        let messages = messages.map(|forked| {
            let mut engine = of_messages(forked);
            engine.transport.set_started_count(&started);
            Some(Box::new(engine))
        });
        let mut engine = Engine::new(transport, channel, history, table);
        engine.transport.set_started_count(&started);
        let group = GroupInfo {
            rank: engine.rank(),
            members,
            channel,
            hosts,
            algorithms: table,
            placement: engine.placement(),
            is_on_one_host: engine.is_on_one_host(),
            shared_memory: engine.known_shared_memory(),
        };
        Self {
            collectives: None,
            message_stream: None,
            engine: Some(Box::new(engine)),
            messages,
            control,
            alone: None,
            group,
            settings,
            runtime,
            levels: None,
            window_channels: None,
            started,
            announced: 0,
            local_groups: HashMap::new(),
        }
    }

    /// Runs an operation of the engine with the options of a call that begins now. Started collectives end first.
    #[inline(always)]
    pub(crate) fn call<R>(
        &mut self,
        operation: impl FnOnce(&mut Engine, &CallOptions<'_>) -> Result<R>,
    ) -> Result<R> {
        let begun = if self.engine.is_some() { None } else { self.take_engine()? };
        let mut options = CallOptions::new(&self.settings, &self.runtime);
        if let Some(deadline) = begun {
            options.due = deadline.into();
        }
        let Some(engine) = &mut self.engine else { unreachable!("{TAKEN}") };
        operation(engine, &options)
    }

    /// Returns the engine after all started collectives have ended.
    pub(crate) fn engine(&mut self) -> Result<&mut Engine> {
        if self.engine.is_none() {
            self.take_engine()?;
        }
        Ok(self.engine.as_mut().expect(TAKEN))
    }

    /// Moves the engine back from the queue after it has executed the started collectives. Returns the deadline of the
    /// call that needs it, if the call has had to wait.
    #[cold]
    fn take_engine(&mut self) -> Result<Option<Deadline>> {
        let queue = &self.collectives.as_ref().expect("an engine is in the communicator or in a queue").queue;
        match queue.take_engine(self.settings.timeout) {
            Ok((engine, deadline)) => {
                self.engine = Some(engine);
                Ok(deadline)
            }
            Err(error) => {
                self.transport().abort(Cause::gave_up(&error));
                Err(error)
            }
        }
    }

    /// Changes the engine's state for the calls that follow.
    pub(crate) fn change_engine(&mut self, change: impl FnOnce(&mut Engine) + Send + 'static) {
        match (&mut self.engine, &self.collectives) {
            (Some(engine), _) => change(engine),
            (None, Some(worker)) => worker.queue.change_engine(change),
            (None, None) => unreachable!("an engine is in the communicator or in a queue"),
        }
    }

    /// Sends or receives messages with the options of a call that begins now. Started collectives go on.
    #[inline(always)]
    pub(crate) fn call_messages<R>(
        &mut self,
        operation: impl FnOnce(&mut Engine, CallOptions<'_>) -> Result<R>,
    ) -> Result<R> {
        if let Ok(Some(engine)) = &mut self.messages {
            return operation(engine, CallOptions::new(&self.settings, &self.runtime));
        }
        let mut engine = self.take_message_engine()?;
        let done = operation(&mut engine, CallOptions::new(&self.settings, &self.runtime));
        self.return_message_engine(engine);
        done
    }

    /// Takes the engine for messages from the stream of started ones.
    #[cold]
    fn take_message_engine(&mut self) -> Result<Box<Engine>> {
        match (&mut self.messages, &self.message_stream) {
            (Ok(engine), stream) => match (engine.take(), stream) {
                (Some(engine), _) => Ok(engine),
                (None, Some(worker)) => Ok(worker.queue.take_engine()),
                (None, None) => unreachable!("an engine is in the communicator or in a stream"),
            },
            (Err(source), _) => {
                let error = Error::NoMessages(source.clone());
                self.abort(Chain(&error));
                Err(error)
            }
        }
    }

    /// Gives the engine for messages back to the stream, or to the communicator if no started message is left.
    fn return_message_engine(&mut self, engine: Box<Engine>) {
        let engine = match &self.message_stream {
            Some(worker) => worker.queue.return_engine(engine),
            None => Some(engine),
        };
        self.messages = Ok(engine);
    }

    /// Returns a transport of the group that is not in a collective.
    fn transport(&mut self) -> &mut dyn Transport {
        match (&mut self.control, &mut self.engine) {
            (Ok(control), _) => &mut **control,
            (Err(_), Some(engine)) => &mut *engine.transport,
            (Err(_), None) => unreachable!("nothing is started without a second transport"),
        }
    }

    fn set_levels(&mut self, levels: Option<Arc<HostLevels>>) {
        self.levels.clone_from(&levels);
        self.change_engine(|engine| engine.set_levels(levels));
    }

    /// Returns this rank's number in the group.
    #[doc(alias = "get_rank")]
    #[doc(alias = "MPI_Comm_rank")]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> usize {
        self.group.rank.index()
    }

    /// Returns the number of ranks in the group.
    #[doc(alias = "get_world_size")]
    #[doc(alias = "MPI_Comm_size")]
    #[doc(alias = "ncclCommCount")]
    pub fn world_size(&self) -> usize {
        self.group.rank.world_size()
    }

    /// Returns the world ranks of the group's members, in the group's order. Errors name ranks by these numbers.
    #[doc(alias = "get_process_group_ranks")]
    #[doc(alias = "MPI_Group_translate_ranks")]
    pub fn members_in_world(&self) -> &[usize] {
        &self.group.members
    }

    /// Returns the channel of the group. No two groups of a job have the same channel.
    pub fn channel(&self) -> ChannelId {
        self.group.channel
    }

    /// Returns one number for each rank of the group; ranks with equal numbers share a machine. The result is the
    /// same on every rank.
    #[doc(alias = "MPI_Get_processor_name")]
    pub fn hosts(&self) -> Vec<u64> {
        self.group.hosts.clone()
    }

    /// Enables two-level algorithms, as [`tune`](Self::tune) does by itself: sets the host of each rank and the cost of messages inside a host.
    /// [`cost_model`](Self::cost_model) then holds for messages between hosts. If all ranks share one host, the
    /// cost model becomes `inside`. Later operations communicate inside hosts first and then between hosts if that
    /// is faster. Every rank must set the same. Forks and subgroups that are made later inherit the topology.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_collectives::tuning::{CostModel, Hosts, Operation};
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
    /// If `hosts` has another number of ranks than the group.
    pub fn set_topology(&mut self, hosts: Hosts, inside: CostModel) -> Result<()> {
        let (ranks, world_size) = (hosts.world_size(), self.world_size());
        if ranks != world_size {
            return Err(Error::Hosts { ranks, world_size });
        }
        if hosts.count() == 1 {
            self.settings.model = inside;
        }
        self.set_levels(Some(Arc::new(HostLevels::new(hosts, inside))));
        Ok(())
    }

    /// Returns the clock and the threads that this communicator uses.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Returns the traffic of this communicator's blocking operations so far.
    pub fn traffic(&self) -> Traffic {
        let of_messages = match (&self.messages, &self.message_stream) {
            (Ok(Some(engine)), _) => difference(engine.traffic(), engine.started_traffic()),
            (Ok(None), Some(worker)) => worker.queue.traffic_of_calls(),
            (Ok(None), None) | (Err(_), _) => Traffic::default(),
        };
        let of_collectives = match (&self.engine, &self.collectives) {
            (Some(engine), None) => engine.traffic(),
            (Some(engine), Some(worker)) => difference(engine.traffic(), worker.queue.traffic()),
            (None, Some(worker)) => worker.queue.traffic_of_calls(),
            (None, None) => unreachable!("an engine is in the communicator or in a queue"),
        };
        of_collectives + of_messages
    }

    /// Returns the traffic of the [started](Self::start_all_reduce) operations of this communicator that have
    /// ended.
    pub fn traffic_of_started(&self) -> Traffic {
        let of_collectives = self.collectives.iter().map(|worker| worker.queue.traffic());
        let of_messages = self.message_stream.iter().map(|worker| worker.queue.traffic());
        of_collectives.chain(of_messages).fold(Traffic::default(), |sum, traffic| sum + traffic)
    }

    /// Returns how long a call may last.
    pub fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// Sets how long each following call may last. The default is 60 seconds.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.settings.timeout = timeout;
    }

    /// Returns the reduction order of the following calls.
    pub fn order(&self) -> ReductionOrder {
        self.settings.order
    }

    /// Sets the order in which following calls reduce. The default is canonical.
    pub fn set_order(&mut self, order: ReductionOrder) {
        self.settings.order = order;
    }

    /// Returns the communicator with another timeout while the guard lives. For one call:
    /// `comm.with_timeout(limit).barrier()`.
    pub fn with_timeout(&mut self, timeout: Duration) -> Scoped<'_> {
        let before = mem::replace(&mut self.settings.timeout, timeout);
        Scoped { communicator: self, before: SavedSetting::Timeout(before) }
    }

    /// Returns the communicator with another order of reduction while the guard lives.
    pub fn with_order(&mut self, order: ReductionOrder) -> Scoped<'_> {
        let before = mem::replace(&mut self.settings.order, order);
        Scoped { communicator: self, before: SavedSetting::Order(before) }
    }

    /// Returns the communicator with another tag while the guard lives: the tag of [`send`](Self::send),
    /// [`recv`](Self::recv), [`send_recv`](Self::send_recv), of values, and of their `start_` forms. The default is
    /// 0. Messages of a [`batch`](Self::batch) have tags of their own.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (mut first, mut second) = ([0], [0]);
    ///     if comm.rank() == 0 {
    ///         comm.with_tag(1).send(&[10], 1).unwrap();
    ///         comm.with_tag(2).send(&[20], 1).unwrap();
    ///     } else {
    ///         comm.with_tag(2).recv(&mut second, 0).unwrap();
    ///         comm.with_tag(1).recv(&mut first, 0).unwrap();
    ///     }
    ///     first[0] + second[0]
    /// });
    /// assert_eq!(outcome.results[1], 30);
    /// ```
    pub fn with_tag(&mut self, tag: u32) -> Scoped<'_> {
        let before = mem::replace(&mut self.settings.tag, tag);
        Scoped { communicator: self, before: SavedSetting::Tag(before) }
    }

    /// Returns the communicator with a forced algorithm, until the guard is dropped. The algorithm applies to its own
    /// operation only. A call is refused if the algorithm does not support it or does not keep the requested order.
    ///
    /// An algorithm is given by the path of its record or by its [name](Operation::algorithm):
    ///
    /// ```
    /// # use dist_collectives::{algorithms::ring, Communicator, ReduceOp};
    /// # use dist_collectives::tuning::Operation;
    /// # fn example(comm: &mut Communicator) -> dist_collectives::Result<()> {
    /// let mut sums = [1.0, 2.0];
    /// comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut sums, ReduceOp::Sum)?;
    /// let ring = Operation::AllReduce.algorithm("ring").unwrap();
    /// comm.with_algorithm(ring).all_reduce(&mut sums, ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_algorithm(&mut self, algorithm: impl Into<Algorithm>) -> Scoped<'_> {
        let algorithm = algorithm.into();
        let operation = algorithm.collective().into();
        let before = self.settings.force(operation, Some(algorithm));
        Scoped { communicator: self, before: SavedSetting::Algorithm(operation, before) }
    }

    /// Creates another communicator of the same ranks, for another thread. Started collectives end first. Apart from them,
    /// nothing is communicated. Every rank of the
    /// group must make the same forks and subgroups at the same positions among its calls. If a rank does not, the
    /// next collective call of this communicator or of its forks fails with an
    /// [`Error::Mismatch`](crate::Error::Mismatch).
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_dup")]
    #[doc(alias = "ncclCommDup")]
    pub fn fork(&mut self) -> Result<Self> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        let transport = self.engine()?.fork(&all)?.expect(OF_ALL);
        let mut forked = self.child(transport);
        forked.set_levels(self.levels.clone());
        Ok(forked)
    }

    /// Creates a communicator of these ranks, numbered in the order of the list. It inherits the timeout and the
    /// order. Returns `None` on ranks that are not in the list. Nothing is communicated. Every rank of the group,
    /// member or not, must make the same forks and subgroups at the same positions among its calls, as for
    /// [`fork`](Self::fork).
    ///
    /// One call can create several groups that share no rank: each rank lists the members of its own group. If two
    /// ranks of a group list different members, or another order, the first of them that waits for the other gets
    /// an error with both lists. The job is then aborted.
    ///
    /// Use this method if you have the list and do not need the members' numbers in this group later. `Group` of
    /// dist-groups also translates ranks between the two groups, and can be split by colour.
    ///
    /// # Errors
    /// If the list is empty, repeats a rank, or contains a rank that does not exist.
    #[doc(alias = "MPI_Comm_create")]
    #[doc(alias = "new_group")]
    pub fn subgroup(&mut self, members: &[usize]) -> Result<Option<Self>> {
        let Some(transport) = self.engine()?.fork(members)? else { return Ok(None) };
        let group = self.child(transport);
        Ok(Some(self.with_topology_of(group, members)))
    }

    /// Creates a communicator of these ranks, numbered in the order of the list, which only they create. Other ranks
    /// know nothing of it, and it does not count among the calls of this communicator. The members create it at any
    /// time; those that give the same list and the same tag are in one group. Members that create several groups with
    /// one list and one tag create them in the same order. Nothing is communicated.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 4, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut sum = [comm.rank()].map(|rank| rank as u64);
    ///     if comm.rank() % 2 == 1 {
    ///         let mut odd = comm.subgroup_local(&[1, 3], 0).unwrap();
    ///         odd.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    ///     }
    ///     sum[0]
    /// });
    /// assert_eq!(outcome.results, [0, 4, 2, 4]);
    /// ```
    ///
    /// If two members give different lists or tags, they are in different groups, and wait for each other in vain.
    /// The errors at their deadlines name the members that are missing.
    ///
    /// # Errors
    /// If the list is empty, repeats a rank, contains a rank that does not exist, or does not contain this rank.
    #[doc(alias = "MPI_Comm_create_group")]
    #[doc(alias = "use_local_synchronization")]
    pub fn subgroup_local(&mut self, members: &[usize], tag: u32) -> Result<Self> {
        let key = (tag, members.to_vec());
        let count = self.local_groups.get(&key).copied().unwrap_or(0);
        let number = u64::from(tag) << 32 | u64::from(count);
        let forked = self.transport().fork_local(members, number);
        let transport = forked.map_err(|source| Error::Members(source.into()))?;
        self.local_groups.insert(key, count + 1);
        let settings = self.settings.of_child();
        let group = Self::with_settings(transport, self.group.algorithms, settings, History::NEW);
        Ok(self.with_topology_of(group, members))
    }

    /// Sets the part of this communicator's topology that belongs to a group of these members.
    fn with_topology_of(&self, mut group: Self, members: &[usize]) -> Self {
        match self.levels.as_ref().map(|levels| levels.of(members)) {
            Some(SubgroupHosts::Hosts(levels)) => group.set_levels(Some(Arc::new(levels))),
            Some(SubgroupHosts::OneHost { inside }) => group.settings.model = inside,
            None => {}
        }
        group
    }

    /// Passes a collective to the queue of started ones, with its memory and the options of a call that begins now.
    pub(crate) fn start<B: Send + 'static>(
        &mut self,
        buffer: B,
        operation: impl FnOnce(&mut Engine, &mut B, &CallOptions<'_>) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        if self.collectives.is_none()
            && let Err(error) = self.start_worker()
        {
            return Pending::failed(buffer, error);
        }
        let engine = self.engine.take();
        let (Some(worker), Some(alone)) = (&self.collectives, &self.alone) else {
            unreachable!("a worker runs, and its transport exists")
        };
        let settings = self.settings;
        let deadline = self.runtime.deadline(settings.timeout);
        worker.queue.start(engine, (buffer, deadline), AbortHandle::new(alone), move |engine, buffer| {
            operation(engine, buffer, &CallOptions::until(&settings, deadline))
        })
    }

    /// Starts messages as one operation, with the deadline of a call that begins now. `collect` makes the memory of the
    /// handle from that of the messages.
    pub(crate) fn start_messages<B: Send + 'static>(
        &mut self,
        messages: Vec<NewMessage>,
        collect: impl FnOnce(Vec<Box<dyn MessageMemory>>) -> B + Send + 'static,
    ) -> Pending<B> {
        let ready = self.check_messages(&messages).and_then(|()| self.start_message_worker());
        if let Err(error) = ready {
            let memories = messages.into_iter().map(|message| message.memory).collect();
            return Pending::failed(collect(memories), error);
        }
        let engine = self.messages.as_mut().ok().and_then(Option::take);
        let (Some(worker), Some(alone)) = (&self.message_stream, &self.alone) else {
            unreachable!("a worker runs, and its transport exists")
        };
        let outcome = Arc::new(OperationOutcome::new());
        let own_outcome = Arc::clone(&outcome);
        let started = self.started.clone();
        started.record_start();
        let finish = move |memories, result: Result<()>| {
            started.record_end();
            let memory = collect(memories);
            own_outcome.complete(match result {
                Ok(()) => Ok(memory),
                Err(error) => Err(Failed::new(memory, error)),
            });
        };
        let deadline = self.runtime.deadline(self.settings.timeout);
        let number = worker.queue.start(engine, messages, deadline, Box::new(finish));
        let (source, abort_handle) =
            (OperationSource::Messages(worker.queue.clone()), AbortHandle::new(alone));
        Pending::running(RunningOperation { outcome, source, number, abort_handle, claim: None })
    }

    /// Returns an error if the peer of a message is not in the group.
    fn check_messages(&self, messages: &[NewMessage]) -> Result<()> {
        let world_size = self.world_size();
        let outside =
            messages.iter().filter_map(|message| message.direction.peer()).find(|peer| *peer >= world_size);
        outside.map_or(Ok(()), |rank| Err(Error::RankOutOfRange { rank, world_size }))
    }

    /// Starts the worker for collectives.
    #[cold]
    fn start_worker(&mut self) -> Result<()> {
        self.fork_alone()?;
        let queue = OperationQueue::new(self.runtime.clone(), self.spins(), self.started.clone());
        self.collectives = Some(self.new_worker(queue, "worker")?);
        Ok(())
    }

    /// Starts the worker for messages, unless it runs.
    fn start_message_worker(&mut self) -> Result<()> {
        if self.message_stream.is_some() {
            return Ok(());
        }
        self.fork_alone()?;
        let engine = self.take_message_engine()?;
        let stream = MessageStream::new(engine, self.runtime.clone(), self.spins());
        self.message_stream = Some(self.new_worker(stream, "messages")?);
        Ok(())
    }

    /// Starts a worker. If that fails, the job is aborted, because peers would wait for this rank.
    fn new_worker<Q: WorkerQueue>(&mut self, queue: Q, name: &str) -> Result<Worker<Q>> {
        let worker = Worker::new(queue, &format!("dist-{name}-{}", self.rank()), &self.runtime);
        worker.inspect_err(|error| self.abort(Chain(error)))
    }

    /// Returns the number of polls of a worker before it sleeps.
    fn spins(&mut self) -> u32 {
        let hosts = self.group.hosts.clone();
        spins(&hosts, self.transport())
    }

    /// Forks the transport of this rank alone, if that has not happened.
    fn fork_alone(&mut self) -> Result<()> {
        if self.alone.is_some() {
            return Ok(());
        }
        let rank = self.rank();
        let forked = match &mut self.control {
            Ok(control) => control.fork(&[rank]).map_err(|source| Error::Members(source.into())),
            Err(source) => Err(Error::NoWorker(source.clone())),
        };
        let alone = forked.inspect_err(|error| self.abort(Chain(error)))?;
        let alone = alone.expect("this rank is a member of the group");
        self.alone = Some(Arc::new(Mutex::new(alone)));
        Ok(())
    }

    /// Creates an engine for messages of all ranks on a channel of its own. Every rank calls this.
    pub(crate) fn fork_for_messages(&mut self) -> Result<Box<Engine>> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        let transport = self.engine()?.fork(&all)?.expect(OF_ALL);
        let channel = transport.channel();
        Ok(Box::new(Engine::of_messages(transport, channel, self.group.algorithms)))
    }

    /// Returns the key-value store of the job, whose requests last as long as the calls of this communicator. All
    /// communicators of all ranks reach the same store. Requests are no collectives: each rank makes them when it
    /// wants, also on other threads.
    ///
    /// Dynamic scheduling, where each rank takes the next piece of work when it is ready:
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let store = comm.store()?;
    ///     let mut sum = [0];
    ///     loop {
    ///         let piece = store.add("next piece", 1)? - 1;
    ///         if piece >= 100 {
    ///             break;
    ///         }
    ///         sum[0] += piece * piece;
    ///     }
    ///     comm.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///     Ok::<_, dist_collectives::Error>(sum[0])
    /// });
    /// assert!(outcome.results.into_iter().all(|sum| sum.unwrap() == 328_350));
    /// ```
    ///
    /// # Errors
    /// If the transport has no store.
    #[doc(alias = "TCPStore")]
    pub fn store(&self) -> Result<Store> {
        let store = match (&self.control, &self.engine) {
            (Ok(control), _) => control.store()?,
            (Err(_), Some(engine)) => engine.transport.store()?,
            (Err(_), None) => unreachable!("nothing is started without a second transport"),
        };
        Ok(store.with_timeout(self.settings.timeout))
    }

    /// Announces the start of an operation that consists of many calls, perhaps of several communicators: a training
    /// step or a checkpoint. All ranks must announce the same kinds of operation in the same order. Nothing is sent.
    ///
    /// Ranks that wait for each other in calls of different communicators would only notice at the deadline. The
    /// announcement finds this earlier. If two ranks wait for long, in any calls, and have announced different
    /// kinds, the job ends. The errors contain the first 16 bytes of both names. Work of the same kind may have
    /// different names.
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
    /// assert!(outcome.results.iter().all(|error| error.contains("save (call 1)") && error.contains("step (call 1)")));
    /// ```
    pub fn announce(&mut self, kind: &str, name: &str) {
        let channel = self.channel().of_announcements().get();
        let call = Call::announced(channel, self.announced, kind, name);
        self.announced += 1;
        tracing::trace!(rank = self.rank(), "{call}");
        self.transport().announce(&call.encode());
    }

    /// Allocates zeroed elements in memory that the ranks of this host share. Operations on them read and write the
    /// memory of other ranks directly. If there is no shared memory, or no more of it, the elements are in ordinary
    /// memory. The buffer can be used with every communicator.
    ///
    /// A rank can get ordinary memory, for example if `ulimit -f` allows less than the 256 MiB that shared memory
    /// begins with. It takes part in operations on shared memory if the other ranks may access its memory.
    /// Otherwise an operation that needs such access fails with [`Error::OutOfReach`] and ends the job, even if all
    /// ranks got ordinary memory.
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
    /// If there is not enough memory.
    #[doc(alias = "MPI_Alloc_mem")]
    #[doc(alias = "MPI_Win_allocate_shared")]
    #[doc(alias = "ncclMemAlloc")]
    pub fn alloc<T: Pod>(&mut self, len: usize) -> Result<Buffer<T>> {
        alloc(self.transport(), len)
    }

    /// Ends the communicator after every rank has called this. It compares all calls of the ranks up to the last one,
    /// as a [`barrier`](Self::barrier) does, and reports differences. It waits for operations that were
    /// [started](Self::start_all_reduce).
    ///
    /// A program need not call it. Without it, nothing reports that the last calls differed if their messages never
    /// met, and a message that was never received is only logged.
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
    /// As for [`barrier`](Self::barrier), and [`Error::Unread`] if another rank has sent a message that this rank
    /// has not received. Over sockets, a message that is still on its way is not noticed.
    #[doc(alias = "MPI_Comm_free")]
    #[doc(alias = "destroy_process_group")]
    #[doc(alias = "MPI_Finalize")]
    #[doc(alias = "ncclCommFinalize")]
    pub fn close(mut self) -> Result<()> {
        // Started messages end first, or fail.
        if self.message_stream.is_some() {
            let mut engine = self.take_message_engine()?;
            engine.drive_started(&|| false);
            self.return_message_engine(engine);
        }
        self.barrier()?;
        let unread = self.engine()?.unread();
        let of_messages = self.messages.as_mut().ok().and_then(Option::as_mut);
        let unread = unread.or_else(|| of_messages.and_then(|engine| engine.unread()));
        unread.map_or(Ok(()), |peer| Err(Error::Unread { peer }))
    }

    /// Ends the job for every rank, with this rank as the cause. The errors of the other ranks contain [the
    /// reason](Cause::gave_up). With [anyhow](https://docs.rs/anyhow), `format_args!("{error:#}")` contains an
    /// error and all its sources.
    #[doc(alias = "MPI_Abort")]
    #[doc(alias = "ncclCommAbort")]
    #[doc(alias = "abort_process_group")]
    pub fn abort(&mut self, why: impl fmt::Display) {
        self.transport().abort(Cause::gave_up(why));
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.transport().abort(Cause::Panicked);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({}, channel {:x})", self.group.rank, self.channel().get())
    }
}

const OF_ALL: &str = "every rank is a member of a group of all";
const TAKEN: &str = "the engine was taken from the queue";

/// A [`Communicator`] with one temporary setting. Dropping the guard restores the old value; other settings that
/// were changed meanwhile stay.
#[derive(Debug)]
#[must_use = "the setting holds as long as this lives"]
pub struct Scoped<'a> {
    communicator: &'a mut Communicator,
    before: SavedSetting,
}

/// The setting that the guard restores.
#[derive(Debug)]
enum SavedSetting {
    Timeout(Duration),
    Order(ReductionOrder),
    Algorithm(Operation, Option<Algorithm>),
    Tag(u32),
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
            SavedSetting::Tag(before) => settings.tag = before,
            SavedSetting::Algorithm(operation, before) => {
                settings.force(operation, before);
            }
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use dist_algos::{Cost, MessageAlgorithm, pairwise};
    use dist_transport::sim;

    use super::*;
    use crate::ReduceOp;

    /// An all_reduce that no other table has. It is chosen because it declares no cost.
    static STAR: MessageAlgorithm =
        MessageAlgorithm { name: "star", cost: |_| Cost::NOTHING, ..pairwise::ALL_REDUCE };

    static WITH_STAR: [Algorithm; 2] =
        [Algorithm::Messages(&pairwise::ALL_REDUCE), Algorithm::Messages(&STAR)];

    fn chosen(comm: &Communicator) -> &'static str {
        let algorithm = comm.algorithm(Operation::AllReduce, 8).expect("no algorithm is forced");
        algorithm.expect("an all_reduce has algorithms").name()
    }

    #[test]
    fn an_algorithm_that_only_the_passed_table_has_is_chosen_and_executed() {
        let sums = sim::run(1, 3, |transport| {
            let mut comm = Communicator::with_table(Box::new(transport), AlgorithmTable::new(&WITH_STAR));
            assert_eq!(chosen(&comm), "star");
            let mut forked = comm.fork().unwrap();
            assert_eq!(chosen(&forked), "star");
            let mut sum = [comm.rank() as u64 + 1];
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            forked.start_all_reduce(sum.to_vec(), ReduceOp::Sum).wait().unwrap()[0]
        });
        assert_eq!(sums.results, [18; 3]);
    }

    #[test]
    fn an_algorithm_outside_the_table_is_not_chosen() {
        drop(sim::run(1, 3, |transport| assert_ne!(chosen(&Communicator::new(transport)), "star")));
    }
}
