//! What the runner of direct schedules works on.

use std::ops::Range;

use dist_transport::{GroupLayout, LazyDeadline, Place, Rank, Result, SlotUse};

/// One rank's access to the memory that the ranks of a group share.
///
/// The methods are those of [`dist_transport::Direct`] by the same names, which says what they do. They are safe to call here:
/// an implementation that reaches real shared memory is given to [`run`](super::run()) and [`meet`](super::meet) only, with the
/// steps of a plan that was checked, and these call it as the steps say.
pub trait DirectAccess {
    /// What there is; the same on all ranks.
    fn shared(&self) -> GroupLayout;

    /// Copies bytes into this rank's line, its sheet or one of its slots.
    fn publish(&mut self, place: Place, offset: usize, bytes: &[u8]);

    /// Tells the others that this rank has done its steps so far.
    fn post(&mut self);

    /// Waits until `rank` has posted this often in this call.
    ///
    /// # Errors
    /// If it does not by the deadline, is in another call, or the job is aborted.
    fn wait(&mut self, rank: usize, posts: u32, due: &LazyDeadline<'_>) -> Result<()>;

    /// Enters a call in which every rank posts once, publishes `bytes` at a place and an offset of a rank's, posts, and waits
    /// for every other rank.
    ///
    /// # Errors
    /// As for [`write`](Self::write) and [`wait`](Self::wait).
    fn meet(
        &mut self,
        rank: Rank,
        slots: SlotUse,
        to: (usize, Place, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Lets `read` see a range of what `rank` has published or exposed, in pieces, each with its offset from the start of the
    /// range.
    ///
    /// # Errors
    /// If `rank` has exposed no such range, or the system fails to read it.
    fn view(
        &mut self,
        rank: usize,
        place: Place,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()>;

    /// Lets `read` see as many bytes of what several ranks have published, each from an offset on.
    ///
    /// # Errors
    /// If one of them has published no such range.
    fn view_all(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Copies from what `rank` has published or exposed, beginning at `offset`.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    fn read(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()>;

    /// As [`read`](Self::read), by non-temporal stores where that is possible.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    fn read_past(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()> {
        self.read(rank, place, offset, into)
    }

    /// Copies what is this rank's own anyway: for those who simulate how long that takes.
    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        dist_transport::copy(from, into);
    }

    /// As [`copy`](Self::copy), by non-temporal stores where that is possible.
    fn copy_past(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    /// Copies into a slot of `rank`, or into the memory that it has lent, beginning at `offset`.
    ///
    /// # Errors
    /// If `rank` has no such slot and has lent no such memory, or the system fails to write it.
    fn write(&mut self, rank: usize, place: Place, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Lets `change` have as many bytes of slots of several ranks, or of memory that they have lent, all where they lie.
    /// `false`, and nothing done, where that cannot be.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn change(
        &mut self,
        _place: Place,
        _there: &[(usize, usize)],
        _len: usize,
        _change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        Ok(false)
    }

    /// Wakes those who sleep for what was posted.
    fn settle(&mut self) {}

    /// Tells, before a post, what the memory that is exposed for reading holds now.
    fn show(&mut self, _memory: &[u8]) {}
}

#[cfg(feature = "conformance")]
impl DirectAccess for dist_transport::conformance::Unchecked<'_> {
    fn shared(&self) -> GroupLayout {
        self.shared()
    }

    fn publish(&mut self, place: Place, offset: usize, bytes: &[u8]) {
        self.publish(place, offset, bytes);
    }

    fn post(&mut self) {
        self.signal();
    }

    fn wait(&mut self, rank: usize, posts: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait(rank, posts, due)
    }

    fn meet(
        &mut self,
        _: Rank,
        _: SlotUse,
        to: (usize, Place, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.signal_and_wait(to, bytes, due)
    }

    fn view(
        &mut self,
        rank: usize,
        place: Place,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.view(rank, place, range, read)
    }

    fn view_all(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        self.view_all(place, there, len, read)
    }

    fn read(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()> {
        self.read(rank, place, offset, into)
    }

    fn read_past(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()> {
        self.read_non_temporal(rank, place, offset, into)
    }

    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    fn copy_past(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy_non_temporal(from, into);
    }

    fn write(&mut self, rank: usize, place: Place, offset: usize, bytes: &[u8]) -> Result<()> {
        self.write(rank, place, offset, bytes)
    }

    fn change(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        self.change(place, there, len, change)
    }

    fn settle(&mut self) {
        self.wake_waiters();
    }

    fn show(&mut self, memory: &[u8]) {
        self.update_exposed(memory);
    }
}
