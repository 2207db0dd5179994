//! Operations of ranks that share memory: direct schedules in place of messages.

use dist_algos::direct::{self, Exposure, Form, Kernel, Memory, Own, Ownership, Plan, Task};
use dist_algos::{Partition, Scratch};
use dist_transport::{Deadline, Reach, Shared};

use super::arithmetic::Arithmetic;
use super::{Engine, Manner};
use crate::algorithm::OneOf;
use crate::{Algorithm, Buffer, Call, Direct, Element, Error, Operation, Result};

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
    /// The plan of the next call, with the slots as they are.
    const fn take(&mut self, plan: Plan) -> Plan {
        let Self([now, next]) = *self;
        *self = Self([next, now + plan.turns()]);
        plan.with_turn(now)
    }
}

/// The memory that a reduction works on.
#[derive(Debug)]
pub(crate) enum Held<'a, T> {
    Borrowed(&'a mut [T]),
    Owned(&'a mut Buffer<T>),
}

/// What is to be done, for the choice of how.
pub(super) struct Job<F> {
    pub(super) task: Task,
    /// Bytes of the buffer that holds every rank's part.
    pub(super) bytes: usize,
    pub(super) ownership: Ownership,
    /// Bytes of the largest part, if memory is cut into so many.
    pub(super) part_bytes_max: F,
}

impl Engine {
    /// How an operation is done directly; `None` if it is done by messages. All ranks come to the same.
    pub(super) fn plan<A: OneOf>(
        &mut self,
        job: Job<impl Fn(usize) -> usize>,
        manner: Manner,
    ) -> Result<Option<Plan>> {
        let forced = manner.settings.forced_any(A::SERVES);
        let by_messages = match forced {
            None => self.levels.is_some(),
            Some(algorithm) => !matches!(algorithm, Algorithm::Direct(_)),
        };
        if by_messages || self.world_size() == 1 {
            return Ok(None);
        }
        let Some(shared) = self.sharing(manner)? else { return Ok(None) };
        let world_size = self.world_size();
        let (form, block_bytes) = match forced {
            Some(Algorithm::Direct(direct)) => (direct.form(), BLOCK_BYTES),
            _ => Form::suggest(job.task, world_size, job.bytes, job.ownership),
        };
        let part_bytes_max = (job.part_bytes_max)(job.task.parts(form, world_size));
        let plan = Plan::new((job.task, form), world_size, part_bytes_max, block_bytes, shared);
        match (plan.filter(|_| reaches(form, job.ownership, shared.reach)), forced) {
            (None, Some(algorithm)) => Err(Error::Unsupported { algorithm, world_size }),
            (plan, _) => Ok(plan),
        }
    }

    /// The form that an operation would be done in, as far as it is known what the ranks share.
    pub(crate) fn direct_form(
        &self,
        operation: Operation,
        bytes: usize,
        ownership: Ownership,
    ) -> Option<Direct> {
        let Sharing::Memory(_) = self.sharing else { return None };
        let task = Task::all(0).into_iter().find(|task| task.name() == operation.name())?;
        let (form, _) = Form::suggest(task, self.world_size(), bytes, ownership);
        self.levels.is_none().then_some(Direct::new(operation, form))
    }

    fn sharing(&mut self, manner: Manner) -> Result<Option<Shared>> {
        if let Sharing::Unknown = self.sharing {
            let call = Call {
                algorithm: None,
                dtype: None,
                ..self.collective::<u8>(dist_algos::Barrier::Ring, 0, manner)
            };
            let direct =
                self.transport.direct(manner.deadline).map_err(|source| Error::in_call(call, source))?;
            self.sharing = direct.map_or(Sharing::Nothing, |direct| Sharing::Memory(direct.shared()));
        }
        match self.sharing {
            Sharing::Memory(shared) => Ok(Some(shared)),
            _ => Ok(None),
        }
    }

    /// The next collective, done directly.
    pub(super) fn directly<T: Element, A: OneOf>(&self, plan: &Plan, count: usize, manner: Manner) -> Call {
        self.collective::<T>(Direct::new(A::SERVES, plan.form()), count, manner)
    }

    /// Runs a direct schedule on memory that others read at most.
    pub(super) fn run_directly<T: Element>(
        &mut self,
        call: &Call,
        plan: Plan,
        (buffer, cut): (&mut [T], Partition<'_>),
        input: Option<(&[T], Partition<'_>)>,
        arithmetic: Option<&Arithmetic>,
        deadline: Deadline,
    ) -> Result<()> {
        let own = Own::Borrowed(bytemuck::cast_slice_mut(buffer));
        let input = input.map(|(input, cut)| (bytemuck::cast_slice(input), cut));
        let memory = Memory { own, cut, input, piece_bytes: ATTACHED_PIECE_BYTES };
        self.run_on::<T>(call, plan, memory, arithmetic, deadline)
    }

    /// Runs a direct schedule on memory that others may write into, if it is owned.
    pub(super) fn run_on_held<T: Element>(
        &mut self,
        call: &Call,
        plan: Plan,
        held: Held<'_, T>,
        arithmetic: &Arithmetic,
        deadline: Deadline,
    ) -> Result<()> {
        let cut = super::partition::<T>(held.len(), plan.parts());
        let buffer = match held {
            Held::Owned(buffer) if plan.form().exposure() == Exposure::Write => buffer,
            Held::Owned(buffer) => {
                return self.run_directly(call, plan, (buffer, cut), None, Some(arithmetic), deadline);
            }
            Held::Borrowed(buffer) => {
                return self.run_directly(call, plan, (buffer, cut), None, Some(arithmetic), deadline);
            }
        };
        let piece_bytes = match buffer.ownership() {
            Ownership::Allocated => SHARED_PIECE_BYTES,
            _ => ATTACHED_PIECE_BYTES,
        };
        let memory = Memory { own: Own::Lent(buffer.lend()), cut, input: None, piece_bytes };
        let done = self.run_on::<T>(call, plan, memory, Some(arithmetic), deadline);
        let direct = self.transport.direct(deadline);
        match direct {
            Ok(Some(direct)) => buffer.reclaim(direct),
            // It is not known who is through with it.
            Ok(None) | Err(_) => *buffer = Buffer::from(Vec::new()),
        }
        done
    }

    fn run_on<T: Element>(
        &mut self,
        call: &Call,
        plan: Plan,
        memory: Memory<'_>,
        arithmetic: Option<&Arithmetic>,
        deadline: Deadline,
    ) -> Result<()> {
        let (rank, plan) = (self.rank(), self.turns.take(plan));
        let direct = self.transport.direct(deadline).map_err(|source| Error::in_call(*call, source))?;
        let direct = direct.expect("a plan is made only where memory is shared");
        let scratch: &mut Scratch = &mut self.scratch;
        let done = match arithmetic {
            Some(arithmetic) => {
                let combine = &mut arithmetic.combine::<T>();
                let finish = &mut |sums: &mut [u8]| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums));
                direct::run(
                    direct,
                    plan.schedule(rank),
                    memory,
                    Kernel { combine, finish },
                    scratch,
                    deadline,
                )
            }
            None => {
                let kernel = Kernel { combine: &mut |_, _| (), finish: &mut |_| () };
                direct::run(direct, plan.schedule(rank), memory, kernel, scratch, deadline)
            }
        };
        done.map_err(|error| Self::failed(call, error))
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

    pub(super) fn ownership(&self) -> Ownership {
        match self {
            Self::Borrowed(_) => Ownership::Borrowed,
            Self::Owned(buffer) => buffer.ownership(),
        }
    }

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

/// What a slot takes if the form was asked for.
const BLOCK_BYTES: usize = 256 << 10;
/// Bytes of other ranks' memory that a sum is made of at a time, where the system copies them: few calls, but what was
/// copied stays in the second cache.
const ATTACHED_PIECE_BYTES: usize = 128 << 10;
/// The same where they are read in place: what is summed up stays in the nearest cache until it is written to all.
const SHARED_PIECE_BYTES: usize = 16 << 10;
