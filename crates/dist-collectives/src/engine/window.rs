//! Memory that ranks read in each other's processes, for as long as all of them let it be.
//!
//! It is one call of the memory that the ranks share, in which they post twice: when theirs may be read, and when they
//! read no more. What is between takes as long as the caller likes.

use dist_algos::direct::{DirectCollective, Ownership};
use dist_transport::{Cause, Chain, LazyDeadline, Reach};

use super::direct_access::WindowBuffer;
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::{Buffer, Call, Element, Error, Operation, ReduceKind, ReduceOp, Result};

impl Engine {
    /// Whether every rank can read what the others have in memory like the one that they ask for.
    pub(crate) fn can_open(&mut self, here: Ownership, options: &CallOptions<'_>) -> Result<bool> {
        // In a way of its own, whatever was asked for of the caller's reductions.
        let settings = options.settings.of_child();
        let options = &CallOptions { settings: &settings, ..options.clone() };
        // If the ranks have to find out what they share, they do it as a part of the call that follows.
        let collective = Collective::Direct(DirectCollective::AllReduce);
        let minimum =
            CallKey { op: Some(ReduceKind::Min), ..CallKey::of::<u8>(collective, 1, 1, options.sizes) };
        let reach = self.reach(Operation::AllReduce, &minimum, options)?;
        let can = reach.is_some_and(|reach| here == Ownership::Allocated || reach != Reach::Slots);
        let mut all = [u8::from(can)];
        self.all_reduce(&mut all[..], ReduceOp::Min, options)?;
        Ok(all[0] == 1)
    }

    /// Lets the others read a buffer, and waits until theirs may be read.
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
        let opened = match self.transport.direct(&options.due) {
            Ok(Some(direct)) => WindowBuffer::open(buffer, direct, rank, &call, &options.due)
                .map_err(|(buffer, source)| (buffer, Error::in_call(call, source))),
            Ok(None) => Err((buffer, Error::Sharing)),
            Err(source) => Err((buffer, Error::in_call(call, source))),
        };
        match opened {
            Ok(open) => Ok((call, open)),
            Err((buffer, error)) => {
                // Memory out of reach is known to this rank alone.
                self.transport.abort(Cause::gave_up(Chain(&error)));
                Err((buffer, error))
            }
        }
    }

    /// Copies elements of another rank's, from this one on.
    pub(crate) fn read_window<T: Element>(
        &mut self,
        (call, open): (&Call, &WindowBuffer<T>),
        from: (usize, usize),
        into: &mut [T],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        match self.transport.direct(due) {
            Ok(Some(direct)) => open.read(direct, from, into).map_err(|error| of_window(call, error)),
            Ok(None) => Err(Error::Sharing),
            Err(source) => Err(Error::in_call(*call, source)),
        }
    }

    /// Waits until nobody reads any more.
    pub(crate) fn close_window<T: Element>(
        &mut self,
        (call, open): (&Call, &mut WindowBuffer<T>),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok(());
        }
        match self.transport.direct(due) {
            Ok(Some(direct)) => open.close(direct, rank, due).map_err(|error| of_window(call, error)),
            Ok(None) => Err(Error::Sharing),
            Err(source) => Err(Error::in_call(*call, source)),
        }
    }

    /// How far ranks reach into each other's ordinary memory; `None` where they share none at all.
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

/// A window of so many elements on each rank; until it is closed its ranks meet as in a barrier.
const fn window<T: Element>(len: usize, options: &CallOptions<'_>) -> CallKey {
    CallKey::of::<T>(Collective::Direct(DirectCollective::Barrier), len, 0, options.sizes)
}

/// The error of a window: none from the transport if its memory is in another call.
fn of_window(call: &Call, error: Option<dist_transport::Error>) -> Error {
    error.map_or(Error::Sharing, |source| Error::in_call(*call, source))
}
