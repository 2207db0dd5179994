//! Windows: memory that ranks read or change in each other's processes until all of them close it.
//!
//! If ranks have access to each other's memory, an epoch of a window is one call in shared memory. Each rank signals
//! twice: when its memory may be accessed, and when it makes no more accesses. The caller decides how long the epoch
//! lasts. Without this access, an epoch begins and ends with messages, and a thread of each rank serves its memory.

use bytemuck::Pod;
use dist_algos::direct::{DirectCollective, Ownership};
use dist_transport::shm_group::{Reach, ShmGroup, WordUpdate};
use dist_transport::{Cause, Chain, LazyDeadline};

use super::direct_access::{UpdatedBuffer, WindowBuffer};
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::call::WindowStep;
use crate::{Buffer, Call, Error, Operation, ReduceKind, ReduceOp, Result};

/// The access that all ranks have to the buffers of all other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WindowAccess {
    /// Some ranks cannot read some buffers.
    Nothing,
    /// Every rank can read every buffer.
    Read,
    /// All buffers are allocated memory that every rank maps.
    Mapped,
}

impl WindowAccess {
    const ALL: [Self; 3] = [Self::Nothing, Self::Read, Self::Mapped];

    /// Returns the access of other ranks to memory of this kind. `reach` is their access to ordinary memory, if the
    /// ranks share memory.
    const fn to(memory: Ownership, reach: Option<Reach>) -> Self {
        match (memory, reach) {
            (Ownership::Allocated, Some(_)) => Self::Mapped,
            (_, Some(Reach::Read | Reach::Write)) => Self::Read,
            (_, Some(Reach::Slots) | None) => Self::Nothing,
        }
    }
}

impl Engine {
    /// Returns `true` if all ranks can read each other's buffers directly. Each rank passes the kind of its own memory.
    /// This is a collective.
    pub(crate) fn can_open(&mut self, here: Ownership, options: &CallOptions<'_>) -> Result<bool> {
        // The caller may have forced an algorithm for its own reductions. It must not apply here.
        let settings = options.settings.of_child();
        let options = &CallOptions { settings: &settings, ..options.clone() };
        // If the ranks do not know their shared memory yet, they establish it as part of this all_reduce.
        let collective = Collective::Direct(DirectCollective::AllReduce);
        let minimum =
            CallKey { op: Some(ReduceKind::Min), ..CallKey::of::<u8>(collective, 1, 1, options.sizes) };
        let reach = self.reach(Operation::AllReduce, &minimum, options)?;
        let mut all = [u8::from(WindowAccess::to(here, reach) != WindowAccess::Nothing)];
        self.all_reduce(&mut all[..], ReduceOp::Min, options)?;
        Ok(all[0] == 1)
    }

    /// Begins the call of an epoch of a window of this many elements, and returns the access of all ranks to each
    /// other's buffers. Each rank passes the kind of its own memory. `known` is the access, if an earlier epoch of the
    /// same buffers found it.
    ///
    /// Without access, the ranks have compared the calls. Otherwise they compare them when they expose their buffers.
    pub(crate) fn begin_epoch<T: Pod + Send + Sync>(
        &mut self,
        (len, step): (usize, WindowStep),
        (here, known): (Ownership, Option<WindowAccess>),
        options: &CallOptions<'_>,
    ) -> Result<(Call, WindowAccess)> {
        let key = window::<T>(len, step);
        let reach = self.reach(Operation::Window, &key, options)?;
        let call = self.begin(self.call_of(Operation::Window, &key, options.settings.order));
        if self.world_size() == 1 {
            return Ok((call, WindowAccess::Mapped));
        }
        // Every rank comes to the same conclusion without a message.
        let reads_any = matches!(reach, Some(Reach::Read | Reach::Write)).then_some(WindowAccess::Read);
        let known = known.or(reads_any.filter(|_| step == WindowStep::Open));
        if let Some(known) = known {
            return Ok((call, known));
        }
        let least = self.least_of_all(&call, WindowAccess::to(here, reach) as u8, &options.due)?;
        Ok((call, WindowAccess::ALL[usize::from(least)]))
    }

    /// Waits until all ranks end an epoch of a window whose memory threads serve. Returns the call.
    pub(crate) fn end_epoch<T: Pod + Send + Sync>(
        &mut self,
        (len, step): (usize, WindowStep),
        options: &CallOptions<'_>,
    ) -> Result<Call> {
        let key = window::<T>(len, step);
        let call = self.begin(self.call_of(Operation::Window, &key, options.settings.order));
        self.least_of_all(&call, 0, &options.due)?;
        Ok(call)
    }

    /// Returns the least value of all ranks, as a part of this call.
    fn least_of_all(&mut self, call: &Call, value: u8, due: &LazyDeadline<'_>) -> Result<u8> {
        let mut least = [value];
        self.agree(call, &mut least, &mut |into, from| into[0] = into[0].min(from[0]), due)?;
        Ok(least[0])
    }

    /// Opens a window in this call: exposes this rank's buffer for reading, and waits until every other rank has done the
    /// same. All ranks have [access](WindowAccess::Read) to each other's buffers.
    pub(crate) fn open_window<T: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        buffer: Buffer<T>,
        options: &CallOptions<'_>,
    ) -> Result<WindowBuffer<T>, (Buffer<T>, Error)> {
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok(WindowBuffer::alone(buffer));
        }
        let opened = match self.open_group(call, &options.due) {
            Ok(shm_group) => WindowBuffer::open(buffer, shm_group, rank, call, &options.due)
                .map_err(|(buffer, source)| (buffer, Error::in_call(*call, source))),
            Err(error) => Err((buffer, error)),
        };
        // Only this rank knows that memory is out of reach.
        opened.inspect_err(|(_, error)| self.transport.abort(Cause::gave_up(Chain(error))))
    }

    /// Copies elements of another rank's buffer. `from` is the rank and the index of the first element.
    pub(crate) fn read_window<T: Pod + Send + Sync>(
        &mut self,
        (call, open): (&Call, &WindowBuffer<T>),
        from: (usize, usize),
        into: &mut [T],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let shm_group = self.open_group(call, due)?;
        open.read(shm_group, from, into).map_err(|error| of_window(call, error))
    }

    /// Closes a window: waits until no rank reads any more.
    pub(crate) fn close_window<T: Pod + Send + Sync>(
        &mut self,
        (call, open): (&Call, &mut WindowBuffer<T>),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok(());
        }
        let shm_group = self.open_group(call, due)?;
        open.close(shm_group, rank, due).map_err(|error| of_window(call, error))
    }

    /// Opens a window for updates in this call: lends this rank's buffer to all ranks, and waits until every other rank
    /// has done the same. All buffers are [mapped](WindowAccess::Mapped). After an error the buffer may be empty.
    pub(crate) fn open_updates<T: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        buffer: &mut Buffer<T>,
        options: &CallOptions<'_>,
    ) -> Result<UpdatedBuffer<T>> {
        let rank = self.rank;
        let opened = self.open_group(call, &options.due).and_then(|shm_group| {
            let opened = UpdatedBuffer::open(buffer, shm_group, rank, call, &options.due);
            opened.map_err(|source| Error::in_call(*call, source))
        });
        // Only this rank knows that memory is out of reach.
        opened.inspect_err(|error| self.transport.abort(Cause::gave_up(Chain(error))))
    }

    /// Stores elements into a rank's buffer. `there` is the rank and the index of the first element.
    pub(crate) fn put<T: Pod + Send + Sync>(
        &mut self,
        (call, open): (&Call, &UpdatedBuffer<T>),
        there: (usize, usize),
        elements: &[T],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let shm_group = self.open_group(call, due)?;
        open.store(shm_group, there, elements).map_err(|error| of_window(call, error))
    }

    /// Performs an atomic operation on an element. `there` is the rank and the index of the element.
    pub(crate) fn update<T: Pod + Send + Sync>(
        &mut self,
        (call, open): (&Call, &UpdatedBuffer<T>),
        there: (usize, usize),
        update: WordUpdate,
        due: &LazyDeadline<'_>,
    ) -> Result<u64> {
        let shm_group = self.open_group(call, due)?;
        open.update(shm_group, there, update).map_err(|error| of_window(call, error))
    }

    /// Closes a window for updates: waits until no rank changes a buffer any more, and returns this rank's buffer.
    pub(crate) fn close_updates<T: Pod + Send + Sync>(
        &mut self,
        (call, open): (&Call, UpdatedBuffer<T>),
        due: &LazyDeadline<'_>,
    ) -> Result<Buffer<T>> {
        let rank = self.rank;
        let shm_group = self.open_group(call, due)?;
        open.close(shm_group, rank, due).map_err(|error| of_window(call, error))
    }

    /// Returns the shared memory that an open window is in.
    fn open_group(&mut self, call: &Call, due: &LazyDeadline<'_>) -> Result<&mut dyn ShmGroup> {
        match self.transport.shm_group(due) {
            Ok(shm_group) => shm_group.ok_or(Error::Sharing),
            Err(source) => Err(Error::in_call(*call, source)),
        }
    }

    /// Returns which access ranks have to each other's ordinary memory; `None` if they share none.
    fn reach(
        &mut self,
        operation: Operation,
        key: &CallKey,
        options: &CallOptions<'_>,
    ) -> Result<Option<Reach>> {
        if self.world_size() == 1 {
            return Ok(Some(Reach::Write));
        }
        Ok(self.shared_memory(operation, key, options)?.map(|shared| shared.reach))
    }
}

/// Returns the key of a window of this many elements per rank. Its steps are those of a barrier.
fn window<T: Pod + Send + Sync>(len: usize, step: WindowStep) -> CallKey {
    CallKey::of::<T>(Collective::Direct(DirectCollective::Barrier), len, 0, step as u64)
}

/// Converts an error of a window. `None` means that the shared memory is already in another call.
fn of_window(call: &Call, error: Option<dist_transport::Error>) -> Error {
    error.map_or(Error::Sharing, |source| Error::in_call(*call, source))
}
