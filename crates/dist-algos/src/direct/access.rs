//! The trait through which the runner of direct schedules accesses shared memory.

use std::ops::Range;

use dist_transport::shm_group::{GroupLayout, MemoryArea, SlotUse};
use dist_transport::{LazyDeadline, Rank, Result};

/// One rank's access to the memory that the ranks of a group share.
///
/// The methods correspond to the methods of [`dist_transport::shm_group::ShmGroup`] with the same names, where they are
/// described. They are safe to call here. An implementation on real shared memory is only given to
/// [`run`](super::run()) and [`signal_and_wait`](super::signal_and_wait). These get the steps of a checked plan and
/// call the methods as the steps say.
pub trait DirectAccess {
    /// Returns the layout of the shared memory; it is the same on all ranks.
    fn shared(&self) -> GroupLayout;

    /// Copies bytes into this rank's flag line, its eager buffer or one of its slots.
    fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]);

    /// Signals to the other ranks that this rank has completed its steps so far.
    fn signal(&mut self);

    /// Waits until `rank` has signalled this many times in this call.
    ///
    /// # Errors
    /// If the deadline passes before, `rank` is in another call, or the job is aborted.
    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()>;

    /// Enters a call with one signal per rank: publishes `bytes` at a place and an offset of a rank, signals, and
    /// waits for every other rank.
    ///
    /// # Errors
    /// As for [`write`](Self::write) and [`wait`](Self::wait).
    fn signal_and_wait(
        &mut self,
        rank: Rank,
        slots: SlotUse,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Passes a range of the bytes that `rank` has published or exposed to `read`. The range is passed in pieces,
    /// each with its offset from the start of the range.
    ///
    /// # Errors
    /// If `rank` has exposed no such range, or the system fails to read it.
    fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()>;

    /// Passes published bytes of several ranks to `read`: `len` bytes of each, from its offset on.
    ///
    /// # Errors
    /// If one of the ranks has published no such range.
    fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Copies bytes that `rank` has published or exposed, from `offset` on.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()>;

    /// Copies like [`read`](Self::read), with non-temporal stores if possible.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        self.read(rank, place, offset, into)
    }

    /// Copies between buffers of this rank. Simulations charge the time for it.
    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        dist_transport::cpu::copy(from, into);
    }

    /// Copies like [`copy`](Self::copy), with non-temporal stores if possible.
    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    /// Copies bytes into a slot of `rank`, or into the memory that it has lent, from `offset` on.
    ///
    /// # Errors
    /// If `rank` has no such slot and has lent no such memory, or the system fails to write it.
    fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Passes ranges of several ranks' slots or lent memory to `change`, without a copy. Returns `false` and does
    /// nothing if they are not all mapped.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn change(
        &mut self,
        _place: MemoryArea,
        _there: &[(usize, usize)],
        _len: usize,
        _change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        Ok(false)
    }

    /// Wakes the ranks that sleep until this rank signals.
    fn wake_waiters(&mut self) {}

    /// Updates the copy of the exposed memory that other ranks see, before a signal. Only simulated memory needs
    /// this.
    fn update_exposed(&mut self, _memory: &[u8]) {}
}

#[cfg(feature = "conformance")]
impl DirectAccess for dist_transport::conformance::Unchecked<'_> {
    fn shared(&self) -> GroupLayout {
        self.shared()
    }

    fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        self.publish(place, offset, bytes);
    }

    fn signal(&mut self) {
        self.signal();
    }

    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait(rank, signals, due)
    }

    fn signal_and_wait(
        &mut self,
        _: Rank,
        _: SlotUse,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.signal_and_wait(to, bytes, due)
    }

    fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.view(rank, place, range, read)
    }

    fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        self.view_all(place, there, len, read)
    }

    fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        self.read(rank, place, offset, into)
    }

    fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        self.read_non_temporal(rank, place, offset, into)
    }

    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy_non_temporal(from, into);
    }

    fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        self.write(rank, place, offset, bytes)
    }

    fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        self.change(place, there, len, change)
    }

    fn wake_waiters(&mut self) {
        self.wake_waiters();
    }

    fn update_exposed(&mut self, memory: &[u8]) {
        self.update_exposed(memory);
    }
}
