//! A cache of compiled calls: the execution plan of each kind of collective call is computed once.

use dist_algos::direct::{DirectCollective, DirectPlan, Ownership};
use dist_algos::scan::Extent;
use dist_algos::{Algorithm, Chunks, CollectiveKind, CostModel, MessageAlgorithm, Phases, Source, Step};
use dist_transport::{Fingerprint, Transport};

use super::direct::SharedMemory;
use super::direct_access::CheckedPlan;
use super::rank_layout::RankLayout;
use super::{CallOptions, Engine};
use crate::digest::digest;
use crate::history::{History, HistoryEvent};
use crate::two_level::ChosenAlgorithm;
use crate::{Call, DType, Element, Error, Operation, ReduceKind, ReduceOp, ReductionOrder, Result};

/// The key of a compiled call. Calls with equal keys are executed in the same way.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallKey {
    pub(super) collective: Collective,
    /// As in [`Call`].
    pub(super) dtype: Option<DType>,
    pub(super) count: usize,
    pub(super) sizes: u64,
    pub(super) op: Option<ReduceKind>,
    /// Bytes of the buffer that holds every rank's part.
    pub(super) bytes: usize,
    /// The kind of memory on all ranks, which determines the algorithm, and the kind on this rank.
    pub(super) ownership: Ownership,
    pub(super) here: Ownership,
}

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Collective {
    /// An operation that can also use shared memory.
    Direct(DirectCollective),
    // The other operations only use messages.
    Gather {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    Scan(Extent),
}

impl PartialEq for CallKey {
    // Same result as the derived implementation, but compares the fields in one step.
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let Self { collective, dtype, count, sizes, op, bytes, ownership, here } = *other;
        (self.count, self.bytes, self.sizes) == (count, bytes, sizes)
            && (self.dtype, self.op, self.ownership, self.here) == (dtype, op, ownership, here)
            && self.collective == collective
    }
}

impl CallKey {
    /// Returns the key of a call on this many bytes of borrowed memory, without a reduction.
    #[inline]
    pub(super) const fn of<T: Element>(
        collective: Collective,
        count: usize,
        bytes: usize,
        sizes: u64,
    ) -> Self {
        let (ownership, here) = (Ownership::Borrowed, Ownership::Borrowed);
        Self { collective, dtype: Some(T::DTYPE), count, sizes, op: None, bytes, ownership, here }
    }

    /// Adds a reduction of elements of `T`, or of the caller's elements that they stand for.
    #[inline]
    pub(super) fn reducing<T: Element>(self, op: ReduceOp, options: &CallOptions<'_>) -> Self {
        Self { op: Some(op.kind()), dtype: Some(options.dtype::<T>()), ..self }
    }

    /// Sets the kind of memory on all ranks and on this rank.
    #[inline]
    pub(super) const fn on(self, [ownership, here]: [Ownership; 2]) -> Self {
        Self { ownership, here, ..self }
    }
}

impl Collective {
    const fn root(self) -> Option<usize> {
        match self {
            Self::Direct(collective) => collective.root(),
            Self::Gather { root } | Self::Scatter { root } => Some(root),
            Self::Scan(_) => None,
        }
    }

    /// Returns the kind of the operation.
    #[inline(always)]
    pub(super) const fn kind(self) -> CollectiveKind {
        match self {
            Self::Direct(collective) => collective.kind(),
            Self::Gather { .. } => CollectiveKind::Gather,
            Self::Scatter { .. } => CollectiveKind::Scatter,
            Self::Scan(Extent::Inclusive) => CollectiveKind::Scan,
            Self::Scan(Extent::Exclusive) => CollectiveKind::ExclusiveScan,
        }
    }
}

/// The caller's preferences for the algorithm.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Preferences {
    order: ReductionOrder,
    forced: Option<Algorithm>,
}

/// The kind of program of a call that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) enum ProgramKind {
    /// A direct schedule on memory that is partitioned into this many parts.
    Direct { parts: usize },
    /// Messages, on memory that is partitioned into this many chunks.
    Messages { chunks: usize },
}

/// The cached execution plans of the last kinds of collective calls.
#[derive(Debug, Default)]
pub(super) struct PlanCache {
    all: Vec<CompiledCall>,
    /// The index of the plan of the call that was begun last.
    current: usize,
    /// The index of the plan that is replaced next.
    oldest: usize,
    /// The index of the plan of the call before.
    before: usize,
}

/// A cached execution plan for one kind of collective call.
#[derive(Debug)]
pub(super) struct CompiledCall {
    key: CallKey,
    preferences: Preferences,
    program: Program,
    /// The last call of this kind, or the next one if there was none.
    pub(super) call: Call,
    /// The next call of this kind, encoded. Its sequence number and history are those that it has if the calls
    /// follow one another in the same order as before.
    next: Fingerprint,
    /// The event that the call adds to the history.
    event: HistoryEvent,
    /// The index of the plan that followed this one last.
    follower: usize,
}

#[derive(Debug)]
enum Program {
    Direct(CheckedPlan),
    Messages(CompiledSchedule),
}

/// The schedule of this rank for a call by messages. It has a few steps for each other rank at most, for example in
/// a ring (130 kB among 512 ranks).
#[derive(Debug)]
pub(super) struct CompiledSchedule {
    /// The cost model that the algorithm was chosen by. Direct plans do not depend on it.
    model: CostModel,
    /// The memory that steps send from.
    pub(super) of: Source,
    chunks: usize,
    /// The steps that bring sums to their owners, then all other steps.
    steps: Vec<Step>,
    sums_complete: usize,
    /// The chunks whose sums this rank owns after the first steps.
    pub(super) owned: Chunks,
}

impl CompiledSchedule {
    pub(super) fn all(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the steps until all sums are complete. Only an all_reduce has steps after them.
    pub(super) fn reduce(&self) -> &[Step] {
        &self.steps[..self.sums_complete]
    }

    /// Returns the remaining steps of an all_reduce.
    pub(super) fn gather(&self) -> &[Step] {
        &self.steps[self.sums_complete..]
    }
}

impl CompiledCall {
    fn new(key: CallKey, preferences: Preferences, program: Program, call: Call) -> Self {
        Self {
            key,
            preferences,
            program,
            next: call.encode(),
            event: HistoryEvent::of(&call),
            call,
            follower: 0,
        }
    }

    #[inline(always)]
    fn fits(&self, key: &CallKey, preferences: Preferences, model: &CostModel) -> bool {
        let fits = self.key == *key && self.preferences == preferences;
        fits && match &self.program {
            Program::Direct(_) => true,
            Program::Messages(schedule) => schedule.model == *model,
        }
    }

    /// Begins the next call of this kind.
    #[inline]
    fn begin(&mut self, history: &mut History, transport: &mut dyn Transport) {
        self.call =
            Call { sequence: history.sequence(), part: history.part(), past: history.past(), ..self.call };
        self.call.patch(&mut self.next);
        debug_assert_eq!(self.next, self.call.encode(), "it differs by its number and its past only");
        transport.begin(&self.next);
        history.add_call(self.event);
    }

    /// Patches sequence number and history in the encoded next call. They are right unless another call comes
    /// between.
    ///
    /// This is done long before the call begins. If a part of the bytes was written just before they are copied,
    /// the copy waits until all earlier stores have left the core (a failed store-to-load forwarding).
    #[inline]
    fn expect(&mut self, history: &History) {
        let (sequence, part, past) = (history.sequence(), history.part(), history.past());
        Call { sequence, part, past, ..self.call }.patch(&mut self.next);
    }

    /// Returns the kind of memory on this rank.
    pub(super) const fn here(&self) -> Ownership {
        self.key.here
    }

    /// Returns the plan of a direct call.
    #[inline(always)]
    pub(super) fn plan(&self) -> &DirectPlan {
        let Program::Direct(checked) = &self.program else { unreachable!("{NOT_DIRECT}") };
        checked.plan()
    }

    /// Returns a direct call and its checked plan.
    #[inline(always)]
    pub(super) fn direct_program(&mut self) -> (&Call, &mut CheckedPlan) {
        let Program::Direct(checked) = &mut self.program else { unreachable!("{NOT_DIRECT}") };
        (&self.call, checked)
    }

    /// Returns the schedule of a call by messages.
    pub(super) fn schedule(&self) -> &CompiledSchedule {
        let Program::Messages(schedule) = &self.program else { unreachable!("{NOT_MESSAGES}") };
        schedule
    }
}

impl PlanCache {
    /// Makes the plan with this key the current one. Returns `false` if there is none.
    #[inline(always)]
    fn find(&mut self, key: &CallKey, preferences: Preferences, model: &CostModel) -> bool {
        let current = self.all.get(self.current);
        current.is_some_and(|compiled| compiled.fits(key, preferences, model))
            || self.find_another(key, preferences, model)
    }

    fn find_another(&mut self, key: &CallKey, preferences: Preferences, model: &CostModel) -> bool {
        let fits = |compiled: &CompiledCall| compiled.fits(key, preferences, model);
        let found = self.all.iter().position(fits);
        self.current = found.unwrap_or(self.current);
        found.is_some()
    }

    /// Adds a plan and makes it the current one.
    fn keep(&mut self, compiled: CompiledCall) {
        if self.all.len() < COMPILED_CALLS_MAX {
            self.current = self.all.len();
            self.all.push(compiled);
        } else {
            self.current = self.oldest;
            self.all[self.oldest] = compiled;
            self.oldest = (self.oldest + 1) % COMPILED_CALLS_MAX;
        }
        // Holds until another call has followed this one.
        self.all[self.current].follower = self.current;
    }

    /// Begins the next call, which uses the current plan.
    #[inline(always)]
    fn begin(&mut self, history: &mut History, transport: &mut dyn Transport) {
        let (before, current) = (std::mem::replace(&mut self.before, self.current), self.current);
        self.all[before].follower = current;
        let compiled = &mut self.all[current];
        compiled.begin(history, transport);
        let follower = compiled.follower;
        self.all[follower].expect(history);
    }

    pub(super) fn current(&self) -> &CompiledCall {
        &self.all[self.current]
    }

    #[inline]
    pub(super) fn current_mut(&mut self) -> &mut CompiledCall {
        &mut self.all[self.current]
    }
}

impl Engine {
    /// Removes all cached plans.
    pub(crate) fn invalidate_plans(&mut self) {
        self.plan_cache = PlanCache::default();
    }

    /// Begins an operation. All ranks choose the same program.
    #[inline(always)]
    pub(super) fn begin_collective(
        &mut self,
        key: &CallKey,
        part_bytes_max: impl Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<ProgramKind> {
        let settings = options.settings;
        let forced = settings.forced(key.collective.kind().into());
        let preferences = Preferences { order: settings.order, forced };
        if !self.plan_cache.find(key, preferences, &settings.model) {
            let compiled = self.compile(key, preferences, part_bytes_max, options)?;
            self.plan_cache.keep(compiled);
        }
        self.plan_cache.begin(&mut self.history, &mut *self.transport);
        let compiled = self.plan_cache.current();
        tracing::trace!(rank = self.rank.index(), channel = compiled.call.channel, "{}", compiled.call);
        Ok(match &compiled.program {
            Program::Direct(checked) => ProgramKind::Direct { parts: checked.plan().parts() },
            Program::Messages(schedule) => ProgramKind::Messages { chunks: schedule.chunks },
        })
    }

    /// Begins an operation on memory in which every rank has a part.
    pub(super) fn begin_with_layout<T: Element>(
        &mut self,
        collective: Collective,
        op: Option<ReduceOp>,
        ownership: [Ownership; 2],
        layout: &RankLayout,
        options: &CallOptions<'_>,
    ) -> Result<ProgramKind> {
        let bytes = layout.total().saturating_mul(size_of::<T>());
        let key =
            CallKey::of::<T>(collective, layout.count(), bytes, layout.digest(options.sizes)).on(ownership);
        let key = CallKey { op: op.map(ReduceOp::kind), dtype: Some(options.dtype::<T>()), ..key };
        self.begin_collective(&key, |_| layout.partition::<T>().chunk_bytes_max(), options)
    }

    #[inline(never)]
    fn compile(
        &mut self,
        key: &CallKey,
        preferences: Preferences,
        part_bytes_max: impl Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<CompiledCall> {
        let plan = self.plan(key, part_bytes_max, options)?;
        let kind = key.collective.kind();
        let operation = Operation::from(kind);
        let call = self.call_of(operation, key, preferences.order);
        if let Some(plan) = plan {
            let algorithm = Algorithm::Direct(plan.algorithm());
            let call = Call { algorithm: Some(algorithm), ..call };
            if let Some(checked) = CheckedPlan::new(plan, self.rank, &call) {
                return Ok(CompiledCall::new(*key, preferences, Program::Direct(checked), call));
            }
            if preferences.forced.is_some() {
                return Err(Error::Unsupported { algorithm, world_size: self.world_size() });
            }
        }
        let bytes = self.bytes_at_once(operation, key.bytes);
        let chosen = options.settings.choose(kind, self.placement, bytes, self.levels.as_ref())?;
        let schedule = self.compile_schedule(&chosen, key.collective, options.settings.model);
        let sizes = chosen.digest().map_or(key.sizes, |hosts| digest([hosts, key.sizes]));
        let call = Call { algorithm: Some(chosen.algorithm()), sizes, ..call };
        Ok(CompiledCall::new(*key, preferences, Program::Messages(schedule), call))
    }

    /// Compiles the schedule of this rank.
    fn compile_schedule(
        &self,
        chosen: &ChosenAlgorithm,
        collective: Collective,
        model: CostModel,
    ) -> CompiledSchedule {
        let (rank, kind) = (self.rank, collective.kind());
        let Phases { first, owned, second } = match kind {
            // An all_to_all computes its steps during the call, because it also supports uneven parts, which are not
            // cached.
            CollectiveKind::AllToAll => Phases { first: Vec::new(), owned: Chunks::NONE, second: Vec::new() },
            _ => chosen.phases(rank, collective.root().unwrap_or_default()),
        };
        let of = match (chosen, collective) {
            (
                ChosenAlgorithm::Flat(flat),
                Collective::Direct(DirectCollective::ReduceScatter { of: Source::Input }),
            ) => flat.sends_from(rank.world_size()),
            _ => Source::Buffer,
        };
        let sums = first.len() + if kind == CollectiveKind::AllReduce { 0 } else { second.len() };
        let steps = first.into_iter().chain(second);
        let steps = match of {
            Source::Input => steps.map(Step::from_input).collect(),
            Source::Buffer => steps.collect(),
        };
        let chunks = chosen.chunks(rank.world_size());
        CompiledSchedule { model, of, chunks, steps, sums_complete: sums, owned }
    }

    /// Returns the next call, without an algorithm.
    pub(super) fn call_of(&self, operation: Operation, key: &CallKey, order: ReductionOrder) -> Call {
        Call {
            channel: self.channel,
            sequence: self.history.sequence(),
            started: self.history.is_of_worker(),
            operation,
            dtype: key.dtype,
            count: key.count as u64,
            sizes: key.sizes,
            op: key.op,
            root: key.collective.root().map(|root| self.code(root)),
            algorithm: None,
            order: key.op.map(|_| order),
            part: self.history.part(),
            past: self.history.past(),
            after_agreement: !matches!(self.shared_memory, SharedMemory::Unknown),
        }
    }

    /// Returns the current call and its algorithm, for an operation by messages without two-level algorithms.
    pub(super) fn flat(&self) -> (Call, &'static MessageAlgorithm) {
        let CompiledCall { call, .. } = self.plan_cache.current();
        let Some(Algorithm::Messages(algorithm)) = call.algorithm else { unreachable!("{NOT_FLAT}") };
        (*call, algorithm)
    }

    /// Begins an operation that always goes by messages. Returns the number of chunks of its memory.
    pub(super) fn begin_by_messages(&mut self, key: &CallKey, options: &CallOptions<'_>) -> Result<usize> {
        let program = self.begin_collective(key, |_| 0, options)?;
        let ProgramKind::Messages { chunks } = program else {
            unreachable!("it is no task for memory that is shared")
        };
        Ok(chunks)
    }
}

const NOT_FLAT: &str = "the operation has only flat algorithms by messages";
const NOT_DIRECT: &str = "a call's plan is asked for where it was begun directly";
const NOT_MESSAGES: &str = "a call's script is asked for where it was begun by messages";

/// Maximum number of cached plans.
const COMPILED_CALLS_MAX: usize = 64;
