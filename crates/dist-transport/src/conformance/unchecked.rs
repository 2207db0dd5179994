//! Direct access to shared memory for tests that keep its contract themselves.
#![allow(unsafe_code, reason = "the contract is passed on to the code that makes one of these")]

use std::ops::Range;

use crate::shm_group::{
    CallEntry, DirectCall, ExposedRegion, GroupLayout, Lent, MemoryArea, ShmGroup, SlotUse, WordSize,
    WordUpdate,
};
use crate::{LazyDeadline, Rank, Result, Transport};

/// The methods of [`ShmGroup`] as safe functions, for programs that keep its contract without a checked plan:
/// tests and measurements. Ranks agree on nothing beside the fingerprint when they enter a call.
#[derive(Debug)]
pub struct Unchecked<'a>(&'a mut dyn ShmGroup);

impl<'a> Unchecked<'a> {
    /// Wraps the memory of a group.
    ///
    /// # Safety
    /// Every call on the result, by this rank and by all others, keeps the contract of [`ShmGroup`].
    pub unsafe fn new(shm_group: &'a mut dyn ShmGroup) -> Self {
        Self(shm_group)
    }

    /// Wraps the memory that the ranks of a simulated network share; `None` if they share none. This is safe,
    /// because ranks of a simulation see only copies.
    ///
    /// # Errors
    /// As for [`Transport::shm_group`].
    #[cfg(feature = "sim")]
    pub fn simulated(
        transport: &'a mut crate::sim::SimTransport,
        due: &LazyDeadline<'_>,
    ) -> Result<Option<Self>> {
        Ok(transport.shm_group(due)?.map(Self))
    }

    /// Wraps the memory of a transport's group for the promises of this suite, which keep the contract.
    pub(super) fn of(transport: &'a mut dyn Transport, due: &LazyDeadline<'_>) -> Result<Option<Self>> {
        Ok(transport.shm_group(due)?.map(Self))
    }

    /// Calls [`ShmGroup::shared`].
    pub fn shared(&self) -> GroupLayout {
        self.0.shared()
    }

    /// Calls [`ShmGroup::rank`].
    pub fn rank(&self) -> Rank {
        self.0.rank()
    }

    /// Calls [`ShmGroup::call`].
    pub fn call(&self) -> DirectCall {
        self.0.call()
    }

    /// Calls [`ShmGroup::enter`].
    ///
    /// # Errors
    /// As there.
    pub fn enter(
        &mut self,
        signals: u32,
        slots: SlotUse,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.enter_with_digest(0, signals, slots, memory, due)
    }

    /// Calls [`ShmGroup::enter`] with this digest of the plan.
    ///
    /// # Errors
    /// As there.
    pub fn enter_with_digest(
        &mut self,
        plan_digest: u64,
        signals: u32,
        slots: SlotUse,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let entry = CallEntry { rank: self.0.rank(), plan_digest, signals, slots };
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.enter(entry, memory, due) }
    }

    /// Calls [`ShmGroup::publish`].
    pub fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.publish(place, offset, bytes) };
    }

    /// Calls [`ShmGroup::signal`].
    pub fn signal(&mut self) {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.signal() };
    }

    /// Calls [`ShmGroup::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.0.wait(rank, signals, due)
    }

    /// Calls [`ShmGroup::signal_and_wait`].
    ///
    /// # Errors
    /// As there.
    pub fn signal_and_wait(
        &mut self,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let entry = CallEntry { rank: self.0.rank(), plan_digest: 0, signals: 1, slots: SlotUse::of(to.1) };
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.signal_and_wait(entry, to, bytes, due) }
    }

    /// Calls [`ShmGroup::view`].
    ///
    /// # Errors
    /// As there.
    pub fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.view(rank, place, range, read) }
    }

    /// Calls [`ShmGroup::view_all`].
    ///
    /// # Errors
    /// As there.
    pub fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.view_all(place, there, len, read) }
    }

    /// Calls [`ShmGroup::read`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.read(rank, place, offset, into) }
    }

    /// Calls [`ShmGroup::read_non_temporal`].
    ///
    /// # Errors
    /// As there.
    pub fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.read_non_temporal(rank, place, offset, into) }
    }

    /// Calls [`ShmGroup::copy`].
    pub fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        self.0.copy(from, into);
    }

    /// Calls [`ShmGroup::copy_non_temporal`].
    pub fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.0.copy_non_temporal(from, into);
    }

    /// Calls [`ShmGroup::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.write(rank, place, offset, bytes) }
    }

    /// Calls [`ShmGroup::change`].
    ///
    /// # Errors
    /// As there.
    pub fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.change(place, there, len, change) }
    }

    /// Calls [`ShmGroup::update_word`].
    ///
    /// # Errors
    /// As there.
    pub fn update_word(
        &mut self,
        rank: usize,
        offset: usize,
        size: WordSize,
        update: WordUpdate,
    ) -> Result<u64> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.update_word(rank, offset, size, update) }
    }

    /// Calls [`ShmGroup::store_words`].
    ///
    /// # Errors
    /// As there.
    pub fn store_words(&mut self, rank: usize, offset: usize, size: WordSize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller of `new` guarantees the contract of every call.
        unsafe { self.0.store_words(rank, offset, size, bytes) }
    }

    /// Calls [`ShmGroup::wake_waiters`].
    pub fn wake_waiters(&mut self) {
        self.0.wake_waiters();
    }

    /// Calls [`ShmGroup::update_exposed`].
    pub fn update_exposed(&mut self, memory: &[u8]) {
        self.0.update_exposed(memory);
    }

    /// Calls [`ShmGroup::is_finished`].
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Calls [`ShmGroup::reclaim`].
    pub fn reclaim(&mut self) -> Option<Lent> {
        self.0.reclaim()
    }

    /// Calls [`ShmGroup::abandon`].
    pub fn abandon(&mut self) {
        self.0.abandon();
    }
}
