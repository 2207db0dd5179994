//! Memory that ranks read in each other's processes, for as long as all of them let it be.
//!
//! It is one call of the memory that the ranks share, in which they post twice: when theirs may be read, and when they
//! read no more. What is between takes as long as the caller likes.

use dist_algos::direct::{Ownership, Task};
use dist_transport::{
    Cause, Chain, Direct, Due, Exposed, Place, Rank, Reach, Result as TransportResult, Slots,
};

use super::ways::{Job, Work};
use super::{Engine, Manner};
use crate::{Call, Element, Error, Operation, ReduceOp, Result};

/// Posts of each rank.
const OPENED: u32 = 1;
const CLOSED: u32 = 2;

impl Engine {
    /// Whether every rank can read what the others have in memory like the one that they ask for.
    pub(crate) fn can_open(&mut self, here: Ownership, manner: &Manner<'_>) -> Result<bool> {
        let reach = self.reach(&window::<u8>(0, manner), manner)?;
        let can = reach.is_some_and(|reach| here == Ownership::Allocated || reach != Reach::Slots);
        let mut all = [u8::from(can)];
        // In a way of its own, whatever was asked for of the caller's reductions.
        let settings = manner.settings.of_child();
        let manner = &Manner { settings: &settings, ..manner.clone() };
        self.all_reduce(&mut all[..], ReduceOp::Min, manner)?;
        Ok(all[0] == 1)
    }

    /// Lets the others read elements, and waits until theirs may be read.
    pub(crate) fn open_window<T: Element>(&mut self, elements: &[T], manner: &Manner<'_>) -> Result<Call> {
        let job = window::<T>(elements.len(), manner);
        self.reach(&job, manner)?.ok_or(Error::NoWindow)?;
        let call = self.begin(self.call_of(Operation::Window, &job, manner.settings.order));
        let opened = self.in_window(&call, &manner.due, |direct, rank, due| {
            direct.enter(CLOSED, Slots::Unused, Exposed::Read(bytemuck::cast_slice(elements)), due)?;
            direct.post();
            for peer in others(rank) {
                direct.wait(peer, OPENED, due)?;
                // What has to be found is found by the call's deadline, and not when something is read.
                direct.read(peer, Place::Memory, 0, &mut [])?;
            }
            Ok(())
        });
        // Memory out of reach is known to this rank alone.
        opened.inspect_err(|error| self.transport.abort(Cause::gave_up(Chain(error))))?;
        Ok(call)
    }

    /// Copies elements of another rank's, from this one on.
    pub(crate) fn read_window<T: Element>(
        &mut self,
        call: &Call,
        (peer, start): (usize, usize),
        into: &mut [T],
        due: &Due<'_>,
    ) -> Result<()> {
        let (offset, into) = (start * size_of::<T>(), bytemuck::cast_slice_mut(into));
        self.in_window(call, due, |direct, _, _| direct.read(peer, Place::Memory, offset, into))
    }

    /// Waits until nobody reads any more.
    pub(crate) fn close_window(&mut self, call: &Call, due: &Due<'_>) -> Result<()> {
        self.in_window(call, due, |direct, rank, due| {
            direct.post();
            others(rank).try_for_each(|peer| direct.wait(peer, CLOSED, due))
        })
    }

    /// How far ranks reach into each other's ordinary memory; `None` where they share none at all.
    fn reach(&mut self, job: &Job, manner: &Manner<'_>) -> Result<Option<Reach>> {
        if self.world_size() == 1 {
            return Ok(Some(Reach::Write));
        }
        Ok(self.sharing(Operation::Window, job, manner)?.map(|shared| shared.reach))
    }

    fn in_window(
        &mut self,
        call: &Call,
        due: &Due<'_>,
        work: impl FnOnce(&mut dyn Direct, Rank, &Due<'_>) -> TransportResult<()>,
    ) -> Result<()> {
        let rank = self.rank;
        if rank.world_size() == 1 {
            return Ok(());
        }
        let done = self.transport.direct(due).and_then(|direct| {
            let direct = direct.expect("a window is opened where memory is shared");
            work(direct, rank, due)?;
            direct.settle();
            Ok(())
        });
        done.map_err(|source| Error::in_call(*call, source))
    }
}

/// A window of so many elements on each rank; until it is closed its ranks meet as in a barrier.
const fn window<T: Element>(len: usize, manner: &Manner<'_>) -> Job {
    Job::of::<T>(Work::Task(Task::Barrier), len, 0, manner.sizes)
}

fn others(rank: Rank) -> impl Iterator<Item = usize> {
    (1..rank.world_size()).map(move |distance| rank.plus(distance).index())
}
