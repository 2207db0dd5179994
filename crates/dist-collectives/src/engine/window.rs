//! Windows: memory that ranks read in each other's processes until all of them close it.
//!
//! A window is one call on the shared memory in which each rank signals twice: when its memory may be read, and when
//! it no longer reads. The caller decides how long the window stays open.

use std::ops::Range;

use dist_algos::direct::{DirectCollective, Ownership};
use dist_transport::shm_group::Reach;
use dist_transport::{Cause, Chain, LazyDeadline};

use super::direct_access::WindowBuffer;
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::{Buffer, Call, Element, Error, Operation, ReduceKind, ReduceOp, Result};

impl Engine {
    /// Returns `true` if a window can be opened on all ranks. Each rank passes the kind of its own memory. This is a
    /// collective.
    pub(crate) fn can_open(&mut self, here: Ownership, options: &CallOptions<'_>) -> Result<bool> {
        // The caller may have forced an algorithm for its own reductions. It must not apply here.
        let settings = options.settings.of_child();
        let options = &CallOptions { settings: &settings, ..options.clone() };
        // If the ranks do not know their shared memory yet, they establish it as part of this all_reduce.
        let collective = Collective::Direct(DirectCollective::AllReduce);
        let minimum =
            CallKey { op: Some(ReduceKind::Min), ..CallKey::of::<u8>(collective, 1, 1, options.sizes) };
        let reach = self.reach(Operation::AllReduce, &minimum, options)?;
        let can = reach.is_some_and(|reach| here == Ownership::Allocated || reach != Reach::Slots);
        let mut all = [u8::from(can)];
        self.all_reduce(&mut all[..], ReduceOp::Min, options)?;
        Ok(all[0] == 1)
    }

    /// Opens a window: exposes this rank's buffer for reading, and waits until every other rank has done the same.
    pub(crate) fn open_window<T: Element>(
        &mut self,
        buffer: Buffer<T>,
        options: &CallOptions<'_>,
    ) -> Result<(Call, WindowBuffer<T>), (Buffer<T>, Error)> {
        let key = window::<T>(buffer.len(), options);
        match self.reach(Operation::Window, &key, options) {
            Ok(Some(_)) => {}
            Ok(None) => return Err((buffer, Error::NoWindow)),
            Err(error) => return Err((buffer, error)),
        }
        let call = self.begin(self.call_of(Operation::Window, &key, options.settings.order));
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok((call, WindowBuffer::alone(buffer)));
        }
        let opened = match self.transport.shm_group(&options.due) {
            Ok(Some(shm_group)) => WindowBuffer::open(buffer, shm_group, rank, &call, &options.due)
                .map_err(|(buffer, source)| (buffer, Error::in_call(call, source))),
            Ok(None) => Err((buffer, Error::Sharing)),
            Err(source) => Err((buffer, Error::in_call(call, source))),
        };
        match opened {
            Ok(open) => Ok((call, open)),
            Err((buffer, error)) => {
                // Only this rank knows that memory is out of reach.
                self.transport.abort(Cause::gave_up(Chain(&error)));
                Err((buffer, error))
            }
        }
    }

    /// Copies elements of another rank's buffer. `from` is the rank and the index of the first element.
    pub(crate) fn read_window<T: Element>(
        &mut self,
        (call, open): (&Call, &WindowBuffer<T>),
        from: (usize, usize),
        into: &mut [T],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        match self.transport.shm_group(due) {
            Ok(Some(shm_group)) => open.read(shm_group, from, into).map_err(|error| of_window(call, error)),
            Ok(None) => Err(Error::Sharing),
            Err(source) => Err(Error::in_call(*call, source)),
        }
    }

    /// Calls `look` once with a range of another rank's buffer. `there` is the rank and the range.
    pub(crate) fn view_window<T: Element>(
        &mut self,
        (call, open): (&Call, &WindowBuffer<T>),
        there: (usize, Range<usize>),
        look: &mut dyn FnMut(&[T]),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        match self.transport.shm_group(due) {
            Ok(Some(shm_group)) => open.view(shm_group, there, look).map_err(|error| of_window(call, error)),
            Ok(None) => Err(Error::Sharing),
            Err(source) => Err(Error::in_call(*call, source)),
        }
    }

    /// Closes a window: waits until no rank reads any more.
    pub(crate) fn close_window<T: Element>(
        &mut self,
        (call, open): (&Call, &mut WindowBuffer<T>),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok(());
        }
        match self.transport.shm_group(due) {
            Ok(Some(shm_group)) => open.close(shm_group, rank, due).map_err(|error| of_window(call, error)),
            Ok(None) => Err(Error::Sharing),
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
fn window<T: Element>(len: usize, options: &CallOptions<'_>) -> CallKey {
    CallKey::of::<T>(Collective::Direct(DirectCollective::Barrier), len, 0, options.sizes)
}

/// Converts an error of a window. `None` means that the shared memory is already in another call.
fn of_window(call: &Call, error: Option<dist_transport::Error>) -> Error {
    error.map_or(Error::Sharing, |source| Error::in_call(*call, source))
}
