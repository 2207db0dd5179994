//! A cache of compiled calls: the execution plan of each kind of collective call is computed once.

use bytemuck::Pod;
use dist_algos::direct::{DirectCollective, DirectPlan, Ownership};
use dist_algos::scan::Extent;
use dist_algos::{
    Algorithm, AlgorithmTable, Chunks, CollectiveKind, CostModel, MessageAlgorithm, Phases, RunError, Source,
    Step, ValidatedSteps,
};
use dist_transport::native::NativeCollective;
use dist_transport::{Fingerprint, Transport};

use super::direct_access::CheckedPlan;
use super::rank_layout::RankLayout;
use super::{CallOptions, Engine};
use crate::call::{ALGORITHM, COUNT_BITS};
use crate::digest::digest;
use crate::history::{History, HistoryEvent};
use crate::two_level::ChosenAlgorithm;
use crate::{Call, Element, ElementType, Error, Operation, ReduceKind, ReduceOp, ReductionOrder, Result};

/// The key of a compiled call. Calls with equal keys are executed in the same way.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallKey {
    pub(super) collective: Collective,
    /// As in [`Call`].
    pub(super) element: Option<ElementType>,
    pub(super) count: usize,
    pub(super) sizes: u64,
    pub(super) op: Option<ReduceKind>,
    /// Bytes of the buffer, or of the parts of all ranks together.
    pub(super) bytes: usize,
    /// The ownership of the memory that other ranks may access.
    pub(super) ownership: Ownership,
}

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Collective {
    /// An operation that can also use shared memory.
    Direct(DirectCollective),
    // The other operations only use messages.
    /// An all_to_all of parts of different sizes.
    UnevenAllToAll,
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
        let Self { collective, element, count, sizes, op, bytes, ownership } = other;
        (self.count, self.bytes, self.sizes) == (*count, *bytes, *sizes)
            && (&self.element, self.op, self.ownership) == (element, *op, *ownership)
            && self.collective == *collective
    }
}

impl CallKey {
    /// Returns the key of a call on this many bytes of borrowed memory, without a reduction.
    #[inline]
    pub(super) fn of<T: Pod>(collective: Collective, count: usize, bytes: usize, sizes: u64) -> Self {
        let (element, ownership) = (Some(ElementType::of::<T>()), Ownership::Borrowed);
        Self { collective, element, count, sizes, op: None, bytes, ownership }
    }

    /// Returns the key of a call on borrowed memory in which every rank has a part.
    pub(super) fn in_parts<T: Pod>(
        collective: Collective,
        layout: &RankLayout,
        options: &CallOptions<'_>,
    ) -> Self {
        let bytes = layout.total().saturating_mul(size_of::<T>());
        let key = Self::of::<T>(collective, layout.count(), bytes, layout.digest(options.sizes));
        Self { element: Some(options.element::<T>()), ..key }
    }

    /// Adds a reduction, and the type of the caller's elements.
    #[inline]
    pub(super) fn reducing<T: Element>(self, op: ReduceOp, options: &CallOptions<'_>) -> Self {
        Self { op: Some(op.kind()), element: Some(options.element::<T>()), ..self }
    }

    /// Sets the ownership of the memory.
    #[inline]
    pub(super) const fn on(self, ownership: Ownership) -> Self {
        Self { ownership, ..self }
    }
}

impl Collective {
    const fn root(self) -> Option<usize> {
        match self {
            Self::Direct(collective) => collective.root(),
            Self::Gather { root } | Self::Scatter { root } => Some(root),
            Self::UnevenAllToAll | Self::Scan(_) => None,
        }
    }

    /// Returns the memory that holds the data for other ranks, if the operation can use shared memory.
    const fn source(self) -> Source {
        match self {
            Self::Direct(collective) => collective.source(),
            _ => Source::Buffer,
        }
    }

    /// Returns the kind of the operation.
    #[inline(always)]
    pub(super) const fn kind(self) -> CollectiveKind {
        match self {
            Self::Direct(collective) => collective.kind(),
            Self::UnevenAllToAll => CollectiveKind::AllToAll,
            Self::Gather { .. } => CollectiveKind::Gather,
            Self::Scatter { .. } => CollectiveKind::Scatter,
            Self::Scan(Extent::Inclusive) => CollectiveKind::Scan,
            Self::Scan(Extent::Exclusive) => CollectiveKind::ExclusiveScan,
        }
    }
}

/// The caller's preferences for the algorithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Preferences {
    pub(super) order: ReductionOrder,
    pub(super) forced: Option<Algorithm>,
}

/// The number of a compiled call in the [`PlanCache`]. It is valid until another call is compiled.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanId(usize);

/// The cached execution plans of the last kinds of collective calls.
#[derive(Debug, Default)]
pub(super) struct PlanCache {
    all: Vec<CompiledCall>,
    /// The index of the plan of the call that was begun last.
    last: usize,
    /// The index of the plan that is replaced next.
    oldest: usize,
}

/// A cached execution plan for one kind of collective call.
#[derive(Debug)]
pub(super) struct CompiledCall {
    pub(super) key: CallKey,
    preferences: Preferences,
    pub(super) program: Program,
    /// The last call of this kind; before the first one, the first one.
    pub(super) call: Call,
    /// The next call of this kind, encoded. Its sequence number and history are right if the plans are used in the same
    /// order as before.
    next: Fingerprint,
    /// The event that the call adds to the history.
    event: HistoryEvent,
    /// The index of the plan that was used after this one the last time.
    follower: usize,
}

/// The program of a compiled call. All ranks have the same kind of program.
#[derive(Debug)]
pub(super) enum Program {
    /// On shared memory, as one fused barrier.
    Fused(CheckedPlan),
    /// On shared memory, step by step.
    Direct(CheckedPlan),
    /// By the library below the transport.
    Native(NativeCollective),
    Messages(CompiledSchedule),
}

/// The schedule of this rank for a call by messages. The longest schedules have a few steps for each other rank, for
/// example a ring: 130 kB with 512 ranks.
#[derive(Debug)]
pub(super) struct CompiledSchedule {
    /// The cost model that the algorithm was chosen by. Direct plans do not depend on it.
    model: CostModel,
    pub(super) chunks: usize,
    /// The steps are executed on blocks of this many bytes, one block after the other.
    pub(super) block_bytes: usize,
    /// The steps until the sums are complete, then the other steps.
    pub(super) steps: ValidatedSteps,
    /// The number of steps until the sums are complete.
    pub(super) sums_complete: usize,
    /// The chunks whose complete sums this rank owns. It finishes them before it continues.
    pub(super) owned: Chunks,
}

impl CompiledCall {
    pub(super) fn new(
        key: CallKey,
        preferences: Preferences,
        program: Program,
        call: Call,
        table: AlgorithmTable<'_>,
    ) -> Self {
        let (next, event) = (call.encode_with(table), HistoryEvent::of(&call, table));
        Self { key, preferences, program, next, event, call, follower: 0 }
    }

    #[inline(always)]
    fn fits(&self, key: &CallKey, preferences: &Preferences, model: &CostModel) -> bool {
        let fits = self.key == *key && self.preferences == *preferences;
        fits && match &self.program {
            Program::Fused(_) | Program::Direct(_) | Program::Native(_) => true,
            Program::Messages(schedule) => schedule.model == *model,
        }
    }

    /// Begins the next call of this kind.
    #[inline]
    fn begin(&mut self, history: &mut History, transport: &mut dyn Transport) {
        self.call = Call { sequence: history.sequence(), past: history.past(), ..self.call };
        Call::patch(&mut self.next, history);
        debug_assert_eq!(
            self.next.0[..ALGORITHM],
            Call { algorithm: None, ..self.call }.encode().0[..ALGORITHM],
            "the patched call is encoded like any other"
        );
        transport.begin(&self.next);
        history.add_call(self.event);
    }

    /// Patches the sequence number and the history in the encoded next call, assuming that this plan is used next.
    ///
    /// This is done long before the call begins. If some of the bytes were written just before all are copied, the copy
    /// would wait until the stores have left the core (a failed store-to-load forwarding).
    #[inline]
    fn expect(&mut self, history: &History) {
        Call::patch(&mut self.next, history);
    }

    /// Returns `true` if the program reads the input in place. Otherwise the caller copies the input into the buffer.
    pub(super) fn reads_input(&self) -> bool {
        match &self.program {
            Program::Fused(_) => false,
            Program::Direct(checked) => checked.plan().collective().source() == Source::Input,
            Program::Native(_) => self.key.collective.source() == Source::Input,
            Program::Messages(schedule) => schedule.steps.send_from_input(),
        }
    }

    /// Returns a direct call and its checked plan.
    #[inline(always)]
    pub(super) fn direct_program(&mut self) -> (&Call, &mut CheckedPlan) {
        let (Program::Fused(checked) | Program::Direct(checked)) = &mut self.program else {
            unreachable!("{NOT_DIRECT}")
        };
        (&self.call, checked)
    }

    /// Returns the plan of a direct call.
    #[inline(always)]
    pub(super) fn direct_plan(&self) -> &DirectPlan {
        let (Program::Fused(checked) | Program::Direct(checked)) = &self.program else {
            unreachable!("{NOT_DIRECT}")
        };
        checked.plan()
    }

    /// Returns the collective of a call that the library below the transport executes.
    pub(super) fn native(&self) -> NativeCollective {
        let Program::Native(collective) = self.program else { unreachable!("{NOT_NATIVE}") };
        collective
    }

    /// Returns the schedule of a call by messages.
    pub(super) fn schedule(&self) -> &CompiledSchedule {
        let Program::Messages(schedule) = &self.program else { unreachable!("{NOT_MESSAGES}") };
        schedule
    }

    /// Returns the algorithm, if the call sends messages and the algorithm treats all ranks alike.
    pub(super) const fn message_algorithm(&self) -> Option<&'static MessageAlgorithm> {
        match self.call.algorithm {
            Some(Algorithm::Messages(algorithm)) => Some(algorithm),
            _ => None,
        }
    }
}

impl PlanCache {
    /// Returns the plan with this key.
    #[inline(always)]
    fn find(&self, key: &CallKey, preferences: &Preferences, model: &CostModel) -> Option<PlanId> {
        let last = self.all.get(self.last);
        match last.is_some_and(|compiled| compiled.fits(key, preferences, model)) {
            true => Some(PlanId(self.last)),
            false => self.find_another(key, preferences, model),
        }
    }

    #[inline(never)]
    fn find_another(&self, key: &CallKey, preferences: &Preferences, model: &CostModel) -> Option<PlanId> {
        self.all.iter().position(|compiled| compiled.fits(key, preferences, model)).map(PlanId)
    }

    fn insert(&mut self, compiled: CompiledCall) -> PlanId {
        let index = if self.all.len() < COMPILED_CALLS_MAX { self.all.len() } else { self.oldest };
        if index == self.all.len() {
            self.all.push(compiled);
        } else {
            self.all[index] = compiled;
            self.oldest = (index + 1) % COMPILED_CALLS_MAX;
        }
        // Until another plan is used after this one, it is expected to follow itself.
        self.all[index].follower = index;
        PlanId(index)
    }

    /// Begins the next call, which uses this plan.
    #[inline(always)]
    fn begin(&mut self, PlanId(plan): PlanId, history: &mut History, transport: &mut dyn Transport) {
        let before = std::mem::replace(&mut self.last, plan);
        self.all[before].follower = plan;
        let compiled = &mut self.all[plan];
        compiled.begin(history, transport);
        let follower = compiled.follower;
        self.all[follower].expect(history);
    }

    #[inline(always)]
    pub(super) fn get(&self, PlanId(plan): PlanId) -> &CompiledCall {
        &self.all[plan]
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, PlanId(plan): PlanId) -> &mut CompiledCall {
        &mut self.all[plan]
    }
}

impl Engine {
    /// Removes all cached plans.
    pub(crate) fn invalidate_plans(&mut self) {
        self.plan_cache = PlanCache::default();
    }

    /// Returns the plan of the calls with this key, and compiles it if it is not cached. `part_bytes_max` returns the
    /// size of the largest part, given the number of parts.
    #[inline(always)]
    pub(super) fn compile(
        &mut self,
        key: &CallKey,
        part_bytes_max: impl Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<PlanId> {
        let settings = options.settings;
        let forced = settings.forced(key.collective.kind().into());
        let preferences = Preferences { order: settings.order, forced };
        match self.plan_cache.find(key, &preferences, &settings.model) {
            Some(plan) => Ok(plan),
            None => self.compile_anew(key, preferences, &part_bytes_max, options),
        }
    }

    /// Compiles a call on memory in which every rank has a part.
    pub(super) fn compile_in_parts<T: Pod>(
        &mut self,
        key: &CallKey,
        layout: &RankLayout,
        options: &CallOptions<'_>,
    ) -> Result<PlanId> {
        self.compile(key, |_| layout.partition(size_of::<T>()).chunk_bytes_max(), options)
    }

    /// Begins the next call of this plan. Every message from here on belongs to it.
    #[inline(always)]
    pub(super) fn begin_compiled(&mut self, plan: PlanId) {
        self.plan_cache.begin(plan, &mut self.history, &mut *self.transport);
        let (rank, channel) = (self.rank.index(), self.channel);
        tracing::trace!(rank, channel, "{}", self.plan_cache.get(plan).call);
    }

    /// Compiles a call and adds it to the cache.
    #[inline(never)]
    fn compile_anew(
        &mut self,
        key: &CallKey,
        preferences: Preferences,
        part_bytes_max: &dyn Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<PlanId> {
        let is_other = matches!(key.element, Some(ElementType::Other { .. }));
        if is_other && key.count as u64 >> COUNT_BITS != 0 {
            return Err(Error::TotalCount { operation: key.collective.kind().into() });
        }
        let direct = self.compile_direct(key, preferences, part_bytes_max, options)?;
        let compiled = match direct.or_else(|| self.compile_native(key, preferences)) {
            Some(compiled) => compiled,
            None => self.compile_messages(key, preferences, options)?,
        };
        Ok(self.plan_cache.insert(compiled))
    }

    /// Compiles a call on shared memory; `None` if messages are to be used.
    fn compile_direct(
        &mut self,
        key: &CallKey,
        preferences: Preferences,
        part_bytes_max: &dyn Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<Option<CompiledCall>> {
        let Some(plan) = self.direct_plan(key, part_bytes_max, options)? else { return Ok(None) };
        let (operation, algorithm) = (key.collective.kind().into(), Algorithm::Direct(plan.algorithm()));
        let call = Call { algorithm: Some(algorithm), ..self.call_of(operation, key, preferences.order) };
        match CheckedPlan::new(plan, self.rank, &call, self.algorithms) {
            Some(checked) => {
                let program =
                    if plan.is_fused() { Program::Fused(checked) } else { Program::Direct(checked) };
                Ok(Some(CompiledCall::new(*key, preferences, program, call, self.algorithms)))
            }
            None if preferences.forced.is_some() => {
                Err(Error::Unsupported { algorithm, world_size: self.world_size() })
            }
            None => Ok(None),
        }
    }

    /// Compiles a call by messages.
    fn compile_messages(
        &mut self,
        key: &CallKey,
        preferences: Preferences,
        options: &CallOptions<'_>,
    ) -> Result<CompiledCall> {
        let (kind, world_size, model) = (key.collective.kind(), self.world_size(), options.settings.model);
        let operation = Operation::from(kind);
        let block_bytes = self.bytes_at_once(operation, key.bytes);
        let (table, placement) = (self.algorithms, self.placement);
        let chosen = options.settings.choose(table, kind, placement, block_bytes, self.levels.as_ref())?;
        let sizes = chosen.digest().map_or(key.sizes, |hosts| digest([hosts, key.sizes]));
        let call = self.call_of(operation, key, preferences.order);
        let call = Call { algorithm: Some(chosen.algorithm()), sizes, ..call };
        let chunks = chosen.chunks(world_size);
        let Phases { first, owned, second } = self.phases(&chosen, key.collective, chunks);
        let sums_complete = first.len();
        let steps = first.into_iter().chain(second).collect();
        let steps = ValidatedSteps::new(self.rank, steps, [chunks, world_size])
            .map_err(|source| Self::failed(&mut *self.transport, &call, RunError::Schedule(source)))?;
        let schedule = CompiledSchedule { model, chunks, block_bytes, steps, sums_complete, owned };
        Ok(CompiledCall::new(*key, preferences, Program::Messages(schedule), call, self.algorithms))
    }

    /// Returns the steps of this rank until the sums are complete, the chunks whose sums it then finishes, and the
    /// other steps.
    fn phases(&self, chosen: &ChosenAlgorithm, collective: Collective, chunks: usize) -> Phases<Vec<Step>> {
        let (rank, root) = (self.rank, collective.root().unwrap_or_default());
        let phases = chosen.phases(rank, root);
        if collective.kind() == CollectiveKind::AllReduce {
            return phases;
        }
        let mut steps = [phases.first, phases.second].concat();
        let sends_from = match chosen {
            ChosenAlgorithm::Flat(algorithm) => algorithm.sends_from(rank.world_size()),
            ChosenAlgorithm::TwoLevel(..) => Source::Buffer,
        };
        let owned = match collective {
            Collective::Direct(DirectCollective::Reduce { .. }) if rank.index() == root => {
                Chunks::all(chunks)
            }
            Collective::Direct(DirectCollective::ReduceScatter { of }) => {
                if (of, sends_from) == (Source::Input, Source::Input) {
                    steps = steps.into_iter().map(Step::from_input).collect();
                }
                Chunks::one(rank.index())
            }
            _ => Chunks::NONE,
        };
        Phases { first: steps, owned, second: Vec::new() }
    }

    /// Returns the next call, without an algorithm.
    pub(super) fn call_of(&self, operation: Operation, key: &CallKey, order: ReductionOrder) -> Call {
        Call {
            channel: self.channel,
            sequence: self.history.sequence(),
            operation,
            element: key.element,
            count: key.count as u64,
            sizes: key.sizes,
            op: key.op,
            root: key.collective.root().map(|root| self.code(root)),
            algorithm: None,
            order: key.op.map(|_| order),
            past: self.history.past(),
            after_agreement: self.shared_memory.is_known(),
        }
    }
}

const NOT_DIRECT: &str = "only direct programs are executed on shared memory";
const NOT_NATIVE: &str = "only native programs are executed by the library below the transport";
const NOT_MESSAGES: &str = "only programs by messages are executed as messages";

/// Maximum number of cached plans.
const COMPILED_CALLS_MAX: usize = 64;
