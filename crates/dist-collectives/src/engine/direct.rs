//! Operations of ranks that share memory: direct schedules in place of messages.

use dist_algos::Partition;
use dist_algos::direct::{
    self, Crossovers, Exposure, Form, Kernel, Memory, Own, Ownership, Plan, Schedule, Step, Task,
};
use dist_transport::{Due, Fingerprint, Reach, Shared};

use super::arithmetic::Arithmetic;
use super::{Engine, Manner};
use crate::algorithm::OneOf;
use crate::{
    Algorithm, Buffer, Call, DType, Direct, Element, Error, Operation, ReduceKind, ReductionOrder, Result,
};

/// What the ranks of the group share.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sharing {
    /// They have not found out yet: they do in the first operation that wants to know.
    Unknown,
    Nothing,
    Memory(Shared),
}

/// How often slots have changed hands in direct calls so far, which have them in turns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns([usize; 2]);

impl Turns {
    /// Gives the plan of the next call the slots as they are.
    #[inline(always)]
    const fn take(&mut self, plan: &mut Plan) {
        let Self([now, next]) = *self;
        *self = Self([next, now + plan.turns()]);
        *plan = plan.with_turn(now);
    }
}

/// The memory that a reduction works on.
#[derive(Debug)]
pub(crate) enum Held<'a, T> {
    Borrowed(&'a mut [T]),
    Owned(&'a mut Buffer<T>),
}

/// What is to be done. A collective that is told from another by nothing of this is done in the same way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) task: Task,
    /// As in [`Call`].
    pub(super) dtype: Option<DType>,
    pub(super) count: usize,
    pub(super) sizes: u64,
    pub(super) op: Option<ReduceKind>,
    /// Bytes of the buffer that holds every rank's part.
    pub(super) bytes: usize,
    /// Whose the memory is on all ranks, by which they choose, and whose it is here.
    pub(super) ownership: Ownership,
    pub(super) here: Ownership,
}

impl Job {
    /// On so many bytes of the caller's own memory, of elements of this type, with nothing to reduce.
    #[inline]
    pub(super) const fn of<T: Element>(task: Task, count: usize, bytes: usize, sizes: u64) -> Self {
        let (ownership, here) = (Ownership::Borrowed, Ownership::Borrowed);
        Self { task, dtype: Some(T::DTYPE), count, sizes, op: None, bytes, ownership, here }
    }
}

/// What was asked for besides.
#[derive(Clone, Copy, Debug, PartialEq)]
struct How {
    order: ReductionOrder,
    forced: Option<Direct>,
}

/// How collectives are done, kept from one call to the next of the same kind.
#[derive(Debug, Default)]
pub(super) struct Known {
    all: Vec<Way>,
    /// The one that is used, of the call that was begun last.
    current: usize,
    /// The one that makes room for another.
    oldest: usize,
}

/// How one collective is done.
#[derive(Debug)]
struct Way {
    job: Job,
    how: How,
    plan: Plan,
    /// This rank's steps, unless they are many.
    steps: Vec<Step>,
    /// The last call of this kind, or the one that is about to be the first.
    call: Call,
    /// The next call of this kind as bytes, but for its number if others come between.
    next: Fingerprint,
}

impl Way {
    #[inline]
    fn fits(&self, job: &Job, how: How) -> bool {
        self.job == *job && self.how == how
    }

    /// The call with this number, as bytes.
    #[inline]
    fn begin(&mut self, sequence: u64) -> Fingerprint {
        if self.call.sequence.wrapping_add(1) != sequence {
            Call { sequence, ..self.call }.renumber(&mut self.next);
        }
        self.call.sequence = sequence;
        let fingerprint = self.next;
        debug_assert_eq!(fingerprint, self.call.encode(), "it was numbered ahead");
        // The next call has its number from here on: bytes of which a part was written directly before they are copied
        // keep a processor waiting until all that it has stored before is out.
        Call { sequence: sequence.wrapping_add(1), ..self.call }.renumber(&mut self.next);
        fingerprint
    }
}

impl Known {
    /// Makes the way that such a job was done in the current one, if there is one.
    #[inline(always)]
    fn find(&mut self, job: &Job, how: How) -> bool {
        self.all.get(self.current).is_some_and(|way| way.fits(job, how)) || self.find_another(job, how)
    }

    fn find_another(&mut self, job: &Job, how: How) -> bool {
        let fits = |way: &Way| way.fits(job, how);
        let found = self.all.iter().position(fits);
        self.current = found.unwrap_or(self.current);
        found.is_some()
    }

    /// Keeps a way, which is the current one from now on.
    fn keep(&mut self, mut way: Way, schedule: Schedule) {
        let room = self.all.len() < WAYS_MAX;
        if !room {
            way.steps = std::mem::take(&mut self.all[self.oldest].steps);
        }
        way.steps.clear();
        way.steps.extend(schedule.take(STEPS_MAX + 1));
        if way.steps.len() > STEPS_MAX {
            way.steps.clear();
        }
        if room {
            self.current = self.all.len();
            self.all.push(way);
        } else {
            self.current = self.oldest;
            self.all[self.oldest] = way;
            self.oldest = (self.oldest + 1) % WAYS_MAX;
        }
    }

    fn current(&self) -> &Way {
        &self.all[self.current]
    }

    #[inline]
    fn current_mut(&mut self) -> &mut Way {
        &mut self.all[self.current]
    }
}

impl Engine {
    /// Lets how collectives are done be thought of anew.
    pub(crate) fn forget_ways(&mut self) {
        self.known = Known::default();
    }

    /// Begins an operation that is done directly, and gives into how many parts its memory is cut; `None` if it is done by
    /// messages. All ranks come to the same.
    pub(super) fn begin_directly<A: OneOf>(
        &mut self,
        job: &Job,
        part_bytes_max: impl Fn(usize) -> usize,
        manner: &Manner<'_>,
    ) -> Result<Option<usize>> {
        let forced = match manner.settings.forced_any(A::SERVES) {
            None if self.levels.is_none() => None,
            Some(Algorithm::Direct(direct)) => Some(direct),
            _ => return Ok(None),
        };
        if self.world_size() == 1 {
            return Ok(None);
        }
        let how = How { forced, order: manner.settings.order };
        if !self.known.find(job, how) {
            let Some(plan) = self.plan::<A>(job, how, part_bytes_max, manner)? else { return Ok(None) };
            self.keep::<A>(job, how, plan);
        }
        let way = self.known.current_mut();
        let fingerprint = way.begin(self.sequence);
        self.sequence += 1;
        tracing::trace!(rank = self.transport.rank().index(), channel = way.call.channel, "{}", way.call);
        self.transport.begin(fingerprint);
        Ok(Some(way.plan.parts()))
    }

    /// The next call, as long as it is not known how it is done.
    pub(super) fn call_of(&self, operation: Operation, job: &Job, order: ReductionOrder) -> Call {
        Call {
            epoch: 0,
            channel: self.transport.channel().get(),
            sequence: self.sequence,
            operation,
            dtype: job.dtype,
            count: job.count as u64,
            sizes: job.sizes,
            op: job.op,
            root: job.task.root().map(|root| self.code(root)),
            algorithm: None,
            order: job.op.map(|_| order),
        }
    }

    fn keep<A: OneOf>(&mut self, job: &Job, how: How, plan: Plan) {
        let algorithm = Some(Direct::new(A::SERVES, plan.form()).into());
        let call = Call { algorithm, ..self.call_of(A::SERVES, job, how.order) };
        let way = Way { job: *job, how, plan, steps: Vec::new(), next: call.encode(), call };
        self.known.keep(way, plan.schedule(self.rank()));
    }

    /// How an operation is done directly; `None` if it is done by messages.
    fn plan<A: OneOf>(
        &mut self,
        job: &Job,
        How { forced, .. }: How,
        part_bytes_max: impl Fn(usize) -> usize,
        manner: &Manner<'_>,
    ) -> Result<Option<Plan>> {
        let Some(shared) = self.sharing(A::SERVES, job, manner)? else { return Ok(None) };
        let world_size = self.world_size();
        let suggest = || {
            let crossovers = manner.settings.crossovers;
            Form::suggest(job.task, world_size, job.bytes, job.ownership, crossovers)
        };
        let form = forced.map_or_else(suggest, Direct::form);
        let part_bytes_max = part_bytes_max(job.task.parts(form, world_size));
        let block_bytes = form.block_bytes(job.task, job.bytes);
        let plan = Plan::new((job.task, form), world_size, part_bytes_max, block_bytes, shared);
        let Some(plan) = plan else {
            let unsupported = |direct: Direct| Error::Unsupported { algorithm: direct.into(), world_size };
            return forced.map(unsupported).map_or(Ok(None), Err);
        };
        let is_open = |ownership| reaches(form, ownership, shared.reach);
        if is_open(job.here) {
            return Ok(Some(plan));
        }
        if is_open(job.ownership) {
            // The others can, and wait for this rank.
            self.transport.abort();
            return Err(Error::OutOfReach { operation: A::SERVES, bytes: job.bytes });
        }
        forced.map_or(Ok(None), |direct| Err(Error::NotOpen { algorithm: direct.into() }))
    }

    /// The call that was begun directly last.
    pub(super) fn current_call(&self) -> Call {
        self.known.current().call
    }

    /// The form that an operation would be done in, as far as it is known what the ranks share.
    pub(crate) fn direct_form(
        &self,
        operation: Operation,
        bytes: usize,
        ownership: Ownership,
        crossovers: Crossovers,
    ) -> Option<Direct> {
        let Sharing::Memory(_) = self.sharing else { return None };
        let task = Task::all(0).into_iter().find(|task| task.name() == operation.name())?;
        let form = Form::suggest(task, self.world_size(), bytes, ownership, crossovers);
        self.levels.is_none().then_some(Direct::new(operation, form))
    }

    /// What ranks share, which they find out in the first operation of a group that wants to know.
    pub(super) fn sharing(
        &mut self,
        operation: Operation,
        job: &Job,
        manner: &Manner<'_>,
    ) -> Result<Option<Shared>> {
        if let Sharing::Unknown = self.sharing {
            let call = self.call_of(operation, job, manner.settings.order);
            let direct = self.transport.direct(&manner.due).map_err(|source| Error::in_call(call, source))?;
            self.sharing = direct.map_or(Sharing::Nothing, |direct| Sharing::Memory(direct.shared()));
        }
        match self.sharing {
            Sharing::Memory(shared) => Ok(Some(shared)),
            _ => Ok(None),
        }
    }

    /// Does what was begun, if ranks only meet: on memory of which others see copies.
    #[inline(always)]
    pub(super) fn meet(
        &mut self,
        own: &mut [u8],
        mut combine: impl FnMut(&mut [u8], &[u8]),
        due: &Due<'_>,
    ) -> Result<()> {
        let (rank, way) = (self.rank, self.known.current_mut());
        self.turns.take(&mut way.plan);
        let direct = self.transport.direct(due).map_err(|source| Error::in_call(way.call, source))?;
        let direct = direct.expect("a plan is made only where memory is shared");
        direct::meet(direct, (&way.plan, rank), own, &mut combine, &mut self.scratch, due)
            .map_err(|error| Self::failed(&way.call, error))
    }

    /// Does what was begun, on memory that others read at most.
    #[inline]
    pub(super) fn run_directly<T: Element>(
        &mut self,
        (buffer, cut): (&mut [T], Partition<'_>),
        input: Option<(&[T], Partition<'_>)>,
        arithmetic: Option<&Arithmetic>,
        due: &Due<'_>,
    ) -> Result<()> {
        let own = Own::Borrowed(bytemuck::cast_slice_mut(buffer));
        let input = input.map(|(input, cut)| (bytemuck::cast_slice(input), cut));
        let memory = Memory { own, cut, input, piece_bytes: ATTACHED_PIECE_BYTES };
        self.run_on::<T>(memory, arithmetic, due)
    }

    /// Does the all_reduce that was begun, on memory that others may write into, if it is owned.
    #[inline(always)]
    pub(super) fn reduce_held<T: Element>(
        &mut self,
        mut held: Held<'_, T>,
        arithmetic: &Arithmetic,
        due: &Due<'_>,
    ) -> Result<()> {
        if self.known.current().plan.is_meeting() {
            let own = held.elements();
            arithmetic.prepare(own);
            self.meet(bytemuck::cast_slice_mut(own), arithmetic.combine::<T>(), due)?;
            arithmetic.finish(own);
            Ok(())
        } else {
            arithmetic.prepare(held.elements());
            self.reduce_large(held, arithmetic, due)
        }
    }

    #[inline(never)]
    fn reduce_large<T: Element>(
        &mut self,
        held: Held<'_, T>,
        arithmetic: &Arithmetic,
        due: &Due<'_>,
    ) -> Result<()> {
        let plan = &self.known.current().plan;
        let cut = super::partition::<T>(held.len(), plan.parts());
        let buffer = match held {
            Held::Owned(buffer) if plan.form().exposure() == Exposure::Write => buffer,
            Held::Owned(buffer) => {
                return self.run_directly((&mut **buffer, cut), None, Some(arithmetic), due);
            }
            Held::Borrowed(buffer) => {
                return self.run_directly((buffer, cut), None, Some(arithmetic), due);
            }
        };
        let piece_bytes = match buffer.ownership() {
            Ownership::Allocated => SHARED_PIECE_BYTES,
            _ => ATTACHED_PIECE_BYTES,
        };
        let memory = Memory { own: Own::Lent(buffer.lend()), cut, input: None, piece_bytes };
        let done = self.run_on::<T>(memory, Some(arithmetic), due);
        let direct = self.transport.direct(due);
        match direct {
            Ok(Some(direct)) => buffer.reclaim(direct),
            // It is not known who is through with it.
            Ok(None) | Err(_) => *buffer = Buffer::from(Vec::new()),
        }
        done
    }

    fn run_on<T: Element>(
        &mut self,
        memory: Memory<'_>,
        arithmetic: Option<&Arithmetic>,
        due: &Due<'_>,
    ) -> Result<()> {
        let rank = self.rank();
        let (way, scratch) = (self.known.current_mut(), &mut self.scratch);
        self.turns.take(&mut way.plan);
        let direct = self.transport.direct(due).map_err(|source| Error::in_call(way.call, source))?;
        let direct = direct.expect("a plan is made only where memory is shared");
        let program = (&way.plan, rank);
        let done = with_kernel::<T, _>(arithmetic, |kernel| match &*way.steps {
            [] => direct::run(direct, program, way.plan.schedule(rank), memory, kernel, scratch, due),
            steps => direct::run(direct, program, steps.iter().copied(), memory, kernel, scratch, due),
        });
        let done = done.map_err(|error| Self::failed(&way.call, error));
        if let Err(Error::Transport { source, .. }) = &done
            && matches!(**source, dist_transport::Error::OutOfReach { .. })
        {
            // The others know nothing of it: each reads for itself.
            self.transport.abort();
        }
        done
    }
}

/// Does this with a kernel for such arithmetic, if there is any to do.
fn with_kernel<T: Element, R>(arithmetic: Option<&Arithmetic>, work: impl FnOnce(Kernel<'_, '_>) -> R) -> R {
    match arithmetic {
        Some(arithmetic) => work(Kernel {
            combine: &mut arithmetic.combine::<T>(),
            finish: &mut |sums| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums)),
            complete: &mut arithmetic.complete::<T>(),
        }),
        None => work(Kernel { combine: &mut |_, _| (), finish: &mut |_| (), complete: &mut |_| () }),
    }
}

/// Whether memory like this can be used like that.
const fn reaches(form: Form, ownership: Ownership, reach: Reach) -> bool {
    match (form.exposure(), ownership) {
        (Exposure::Nothing, _) | (_, Ownership::Allocated) => true,
        (Exposure::Read, _) => !matches!(reach, Reach::Slots),
        (Exposure::Write, Ownership::Owned) => matches!(reach, Reach::Write),
        (Exposure::Write, Ownership::Borrowed) => false,
    }
}

impl<T: Element> Held<'_, T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Borrowed(elements) => elements.len(),
            Self::Owned(buffer) => buffer.len(),
        }
    }

    /// Whose the memory is on all ranks, and whose it is here.
    pub(super) fn ownership(&self) -> [Ownership; 2] {
        match self {
            Self::Borrowed(_) => [Ownership::Borrowed; 2],
            Self::Owned(buffer) => [buffer.meant(), buffer.ownership()],
        }
    }

    #[inline(always)]
    pub(super) fn elements(&mut self) -> &mut [T] {
        match self {
            Self::Borrowed(elements) => elements,
            Self::Owned(buffer) => buffer,
        }
    }
}

impl<'a, T> From<&'a mut [T]> for Held<'a, T> {
    fn from(elements: &'a mut [T]) -> Self {
        Self::Borrowed(elements)
    }
}

impl<'a, T> From<&'a mut Buffer<T>> for Held<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Self::Owned(buffer)
    }
}

/// How many kinds of collectives are done without a thought.
const WAYS_MAX: usize = 64;
/// Steps of one of them that are kept: where there are more, nobody notices what they take to make.
const STEPS_MAX: usize = 64;
/// Bytes of other ranks' memory that a sum is made of at a time, where the system copies them: few calls, but what was
/// copied stays in the second cache.
const ATTACHED_PIECE_BYTES: usize = 128 << 10;
/// The same where they are read in place: what is summed up stays in the nearest cache until it is written to all.
const SHARED_PIECE_BYTES: usize = 16 << 10;
