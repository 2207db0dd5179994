//! The engine executes the collectives of one group, on one thread at a time.
//!
//! Every collective has the same phases: check the arguments, [compile](Engine::compile) the call or find it in the
//! plan cache, [execute](Engine::execute) it. Compiling chooses the algorithm, decides between messages and shared
//! memory, and validates the schedule.

mod all_to_all;
mod arithmetic;
mod barriers;
mod coalesced;
mod copies;
mod custom;
mod direct;
mod direct_access;
mod execute;
mod memory;
mod messages;
mod native;
mod outstanding;
mod plan_cache;
mod rank_layout;
mod reductions;
mod strided;
mod wide;
mod window;

use std::sync::Arc;

use bytemuck::Pod;
use dist_algos::{AlgorithmTable, Memory, Partition, Placement, RunError, Scratch, Step};
use dist_transport::cpu::CacheLine;
use dist_transport::{
    Cause, Chain, ChannelId, Combine, Deadline, Fingerprint, LazyDeadline, Rank, Runtime, Traffic, Transport,
};

use crate::history::{History, HistoryEvent};
use crate::settings::Settings;
use crate::two_level::HostLevels;
use crate::{Buffer, Call, ElementType, Error, Operation, Result};
pub(crate) use direct::SharedMemory;
use direct::SlotGenerations;
pub(crate) use direct_access::{UpdatedBuffer, WindowBuffer};
pub(crate) use memory::CallInput;
use messages::EngineMessages;
pub(crate) use messages::FoundMessage;
pub(crate) use outstanding::{
    CancelAnswer, Cancellation, Direction, FinishMessages, MessageCommand, MessageCommands, MessageMemory,
    NewMessage, NewOperation, StartedWork, into_memory,
};
use plan_cache::PlanCache;
use wide::WidenedBuffers;
pub(crate) use wide::alloc;
pub(crate) use window::WindowAccess;

pub(crate) use all_to_all::check_part_counts;
pub(crate) use rank_layout::{check_counts, check_parts};
pub use reductions::BLOCK_BYTES_OF_RANK;
pub(crate) use reductions::bytes_at_once;

/// Settings and deadline of one call.
#[derive(Clone, Debug)]
pub(crate) struct CallOptions<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) due: LazyDeadline<'a>,
    /// A digest of further values that the ranks must agree on: the lengths of many buffers or the shape of an
    /// array. 0 if there are none.
    pub(crate) sizes: u64,
    /// The type of the caller's elements, if the call works on a copy of another type.
    element: Option<ElementType>,
}

impl<'a> CallOptions<'a> {
    /// Returns the options of a call that begins now.
    #[inline]
    pub(crate) const fn new(settings: &'a Settings, runtime: &'a Runtime) -> Self {
        Self { settings, due: LazyDeadline::within(runtime, settings.timeout), sizes: 0, element: None }
    }

    /// Returns the options of a call that began earlier and has this deadline.
    pub(crate) fn until(settings: &'a Settings, deadline: Deadline) -> Self {
        Self { settings, due: deadline.into(), sizes: 0, element: None }
    }

    /// Adds a digest that the ranks must agree on.
    pub(crate) fn with_sizes(&self, sizes: u64) -> Self {
        Self { sizes, ..self.clone() }
    }

    /// Returns the type of the caller's elements, for a call that works on elements of `T`.
    #[inline(always)]
    fn element<T: Pod>(&self) -> ElementType {
        self.element.unwrap_or_else(ElementType::of::<T>)
    }
}

/// Executes the collectives of a communicator, or its messages, on one transport.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) transport: Box<dyn Transport>,
    rank: Rank,
    /// The channel of the communicator. Messages name it too, although they use another channel.
    channel: u64,
    /// The algorithms that calls are compiled with; the same on every rank.
    algorithms: AlgorithmTable<'static>,
    history: History,
    scratch: Scratch,
    shared_memory: SharedMemory,
    slot_generations: SlotGenerations,
    plan_cache: PlanCache,
    messages: EngineMessages,
    /// The hosts of the ranks, if two-level algorithms are enabled.
    levels: Option<Arc<HostLevels>>,
    /// `true` if all ranks of the group run on one host.
    on_one_host: bool,
    /// The ranks, and the cores of their host. On several hosts it states one core per rank, because messages take
    /// longer than the work of the cores.
    placement: Placement,
    /// Memory for a copy of an input that must not change, or for data that this rank only forwards. Elements of every
    /// type are aligned in it.
    copy: Vec<CacheLine>,
    /// Memory for the partial sums of means that are not computed in the type of the elements.
    wide: WidenedBuffers,
    /// Memory for encoded values.
    #[cfg(feature = "serde")]
    pub(crate) value_memory: crate::values::ValueMemory,
}

impl Engine {
    /// Creates the engine for the messages of the communicator with this channel.
    pub(crate) fn of_messages(
        transport: Box<dyn Transport>,
        channel: ChannelId,
        algorithms: AlgorithmTable<'static>,
    ) -> Self {
        Self::new(transport, channel, History::NEW, algorithms)
    }

    /// Creates the engine for the collectives of the communicator with this channel and this history, which chooses from
    /// this table of algorithms.
    pub(crate) fn new(
        mut transport: Box<dyn Transport>,
        channel: ChannelId,
        history: History,
        algorithms: AlgorithmTable<'static>,
    ) -> Self {
        transport.set_call_formatter(|fingerprint| Call::decode(fingerprint).map(|call| call.to_string()));
        let (hosts, ranks) = (transport.hosts(), transport.rank().world_size());
        let on_one_host = hosts.iter().all(|host| *host == hosts[0]);
        let cores = if on_one_host { transport.cores() } else { ranks };
        Self {
            rank: transport.rank(),
            on_one_host,
            placement: Placement { ranks, cores },
            transport,
            channel: channel.get(),
            algorithms,
            history,
            scratch: Scratch::new(),
            shared_memory: SharedMemory::default(),
            slot_generations: SlotGenerations::default(),
            plan_cache: PlanCache::default(),
            messages: EngineMessages::default(),
            levels: None,
            copy: Vec::new(),
            wide: WidenedBuffers::default(),
            #[cfg(feature = "serde")]
            value_memory: crate::values::ValueMemory::default(),
        }
    }

    pub(crate) const fn rank(&self) -> Rank {
        self.rank
    }

    const fn world_size(&self) -> usize {
        self.rank.world_size()
    }

    pub(crate) const fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns `true` if all ranks of the group run on one host.
    pub(crate) const fn is_on_one_host(&self) -> bool {
        self.on_one_host
    }

    /// Returns the memory that the ranks share, which they may not know yet.
    pub(crate) fn known_shared_memory(&self) -> SharedMemory {
        self.shared_memory.clone()
    }

    /// Returns `true` if two-level algorithms can be chosen.
    fn uses_hierarchical(&self) -> bool {
        self.levels.as_ref().is_some_and(|levels| levels.hosts.count() > 1)
    }

    /// Sets the hosts that two-level algorithms use.
    pub(crate) fn set_levels(&mut self, levels: Option<Arc<HostLevels>>) {
        if self.levels.as_ref().map(Arc::as_ptr) != levels.as_ref().map(Arc::as_ptr) {
            self.invalidate_plans();
        }
        self.levels = levels;
    }

    /// Creates a transport among these ranks of the group; `None` if this rank is not one of them. The fork is added to
    /// the history, which later calls compare. So a rank that forked alone, and uses other channels from then on, is
    /// detected.
    pub(crate) fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let forked = self.transport.fork(members).map_err(|source| Error::Members(source.into()))?;
        self.history.add_fork();
        Ok(forked)
    }

    /// Returns the history of this communicator.
    pub(crate) const fn history(&self) -> &History {
        &self.history
    }

    /// Returns the history, to mark calls that the user has not made.
    pub(crate) const fn history_mut(&mut self) -> &mut History {
        &mut self.history
    }

    /// Returns a rank whose message this rank has not received, by its number in the world; `None` if all were
    /// received.
    pub(crate) fn unread(&mut self) -> Option<usize> {
        let unread = self.messages.unread().or_else(|| self.transport.unread());
        unread.map(|peer| self.in_world(peer))
    }

    /// Returns the traffic of the collectives and messages so far.
    pub(crate) fn traffic(&self) -> Traffic {
        self.transport.traffic()
    }

    /// Begins a call: adds it to the history, and tells the transport that the following messages belong to it.
    fn begin(&mut self, call: Call) -> Call {
        self.announce(&call, &call.encode_with(self.algorithms));
        self.history.add_call(HistoryEvent::of(&call, self.algorithms));
        call
    }

    /// Tells the transport that the following messages belong to this call.
    fn announce(&mut self, call: &Call, encoded: &Fingerprint) {
        tracing::trace!(rank = self.rank().index(), channel = call.channel, "{call}");
        self.transport.begin(encoded);
    }

    /// Executes steps without a plan, as a part of this call.
    fn run_in(
        &mut self,
        call: &Call,
        steps: impl IntoIterator<Item = Step>,
        memory: Memory<'_>,
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        dist_algos::run(&mut *self.transport, steps, memory, combine, &mut self.scratch, due)
            .map_err(|error| Self::failed(&mut *self.transport, call, error))
    }

    /// Converts the error of a run. If only this rank knows the error, the job is aborted, so that all ranks learn it.
    #[cold]
    fn failed(transport: &mut dyn Transport, call: &Call, error: RunError<dist_transport::Error>) -> Error {
        match error {
            RunError::Transport { source, .. } => {
                if matches!(source, dist_transport::Error::OutOfReach { .. }) {
                    transport.abort(Cause::gave_up(Chain(&source)));
                }
                Error::in_call(*call, source)
            }
            RunError::Schedule(source) => {
                transport.abort(Cause::gave_up(Chain(&source)));
                Error::Schedule { call: Box::new(*call), source: source.into() }
            }
            _ => unreachable!("a run fails by its transport or by its schedule"),
        }
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank, world_size }) }
    }

    /// Allocates memory for an operation's output. If that fails, the job is aborted, because other ranks wait.
    pub(crate) fn output<T: Pod>(&mut self, len: usize) -> Result<Buffer<T>> {
        Buffer::zeroed(len).inspect_err(|error| self.transport.abort(Cause::gave_up(Chain(error))))
    }

    pub(crate) fn check_root(&self, operation: Operation, root: usize) -> Result<()> {
        let world_size = self.world_size();
        if root < world_size { Ok(()) } else { Err(Error::RootOutOfRange { operation, root, world_size }) }
    }

    /// Returns the number of a rank in the world, which errors use.
    pub(crate) fn in_world(&self, rank: usize) -> usize {
        self.transport.members()[rank]
    }

    /// Returns the number of a rank in the world, as calls encode it.
    fn code(&self, rank: usize) -> u32 {
        u32::try_from(self.in_world(rank)).expect("a world has fewer than 2^32 ranks")
    }

    /// Returns the number of elements of each rank's part of a buffer.
    fn check_divisible(&self, operation: Operation, elements: usize) -> Result<usize> {
        let world_size = self.world_size();
        if elements.is_multiple_of(world_size) {
            Ok(elements / world_size)
        } else {
            Err(Error::Indivisible { operation, elements, world_size })
        }
    }
}

impl Drop for Engine {
    /// Logs a message that will never be received, which shows that the program's sends and receives do not match.
    /// After an abort such messages are expected.
    fn drop(&mut self) {
        if std::thread::panicking() || self.transport.aborted().is_some() {
            return;
        }
        if let Some(peer) = self.unread() {
            let (rank, channel) = (self.in_world(self.rank.index()), self.channel);
            tracing::warn!(rank, channel, "dropped with a message of rank {peer} that was never received");
        }
    }
}

/// Returns the partition of `len` elements into parts of nearly equal size.
fn partition(len: usize, element_size: usize, parts: usize) -> Partition<'static> {
    Partition::new(len, element_size, parts)
        .expect("a slice exists, elements have bytes and a world has a rank")
}

/// Returns the first `len` elements of memory that is kept between calls, and enlarges the memory if necessary. If
/// there is not enough memory, the job is aborted, because other ranks wait.
fn reserve<'m, T: Pod>(
    memory: &'m mut Vec<CacheLine>,
    len: usize,
    transport: &mut dyn Transport,
) -> Result<&'m mut [T]> {
    let bytes = len.saturating_mul(size_of::<T>());
    let lines = bytes.div_ceil(CacheLine::BYTES);
    if let Err(source) = memory.try_reserve(lines.saturating_sub(memory.len())) {
        let error = Error::Memory { elements: len, source };
        transport.abort(Cause::gave_up(Chain(&error)));
        return Err(error);
    }
    memory.resize(lines.max(memory.len()), CacheLine::ZERO);
    Ok(bytemuck::cast_slice_mut(&mut bytemuck::cast_slice_mut::<_, u8>(memory)[..bytes]))
}

/// Copies elements to memory of the same length. The [copy](dist_transport::cpu::copy) is fast for any relative
/// alignment.
pub(crate) fn copy<T: Pod>(from: &[T], into: &mut [T]) {
    dist_transport::cpu::copy(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(into));
}
