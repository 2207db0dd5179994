//! What ranks that share memory can do beside exchanging messages: all at once, each in the others' memory.

use std::fmt;
use std::ops::Range;

use crate::{Due, Lent, Rank, Result};

/// Of how many other ranks memory is [changed](Direct::change) or [viewed](Direct::view_all) at once, at the most.
pub const CHANGED_MAX: usize = 7;

/// How many calls may be under way at once: ranks that do not wait for each other are less than that apart.
pub const CALLS_MAX: usize = 4;

/// Memory that all ranks of a group share: a place for a few bytes, one for some more, slots, and the memory that a rank
/// lays open.
///
/// Ranks enter the same calls in the same order and post equally often in each. A post says to whoever waits for it
/// that everything which this rank wrote before is there, and that it is done with what it read before. Who reads or
/// writes what others write or read without such a wait between gets bytes of before or after; schedules are proven
/// not to.
///
/// Calls that follow each other have lines, sheets and slots of their own, [`CALLS_MAX`] in a row the first two, and two
/// the slots: entering a call waits until no rank is in one any more whose places it uses again. So every rank has to have
/// posted in the previous call if slots are used, and otherwise in the one three before. A transport may wait for more
/// where that is faster.
///
/// Ranks are numbered as in the group; a method that is given one which is not of the group panics.
///
/// After an error the whole job is aborted, as after one of a [`Transport`](crate::Transport)'s. Only
/// [`OutOfReach`](crate::Error::OutOfReach) ends nothing by itself: this rank goes on with the call, or calls
/// [`abort`](crate::Transport::abort).
pub trait Direct: fmt::Debug {
    /// What there is; the same on all ranks.
    fn shared(&self) -> Shared;

    /// Begins the next call, the one that [`begin`](crate::Transport::begin) has named. Every rank posts `posts` times in it, which is at least once,
    /// and lays `memory` open for it: until every rank has posted for the last time, see [`finished`](Direct::finished).
    /// All say the same of `slots`: where they are [`Slots::Unused`], nobody publishes or writes in one.
    ///
    /// # Errors
    /// If a rank does not come out of the last call whose places are used again, or was in another one.
    fn enter(&mut self, posts: u32, slots: Slots, memory: Exposed<'_>, due: &Due<'_>) -> Result<()>;

    /// Copies bytes into this rank's line, its sheet or one of its slots. Others see them after the next
    /// [`post`](Direct::post).
    ///
    /// # Panics
    /// If the bytes do not fit, or `place` is [`Place::Memory`].
    fn publish(&mut self, place: Place, offset: usize, bytes: &[u8]);

    /// Says to the others that this rank has come as far as this. Those who sleep are woken when this one begins to wait,
    /// at the latest by [`settle`](Direct::settle).
    fn post(&mut self);

    /// Waits until `rank` has posted this often in this call. The first wait for a rank in a call finds out whether it
    /// is in the same one.
    ///
    /// # Errors
    /// If it does not by the deadline, is in another call, or the job is aborted.
    fn wait(&mut self, rank: usize, posts: u32, due: &Due<'_>) -> Result<()>;

    /// Does all of a call that every rank brings some bytes to and posts once in, but for their use: enters it, publishes
    /// `bytes` at an offset of a place of `holder`'s, which is this rank or one whose slot it writes, posts, waits for every
    /// other rank, and wakes those who sleep for its post. It is there to be called as one, in which no clock is looked at
    /// unless somebody waits.
    ///
    /// # Errors
    /// As for [`enter`](Direct::enter), [`write`](Direct::write) and [`wait`](Direct::wait).
    ///
    /// # Panics
    /// As for [`publish`](Direct::publish).
    fn meet(
        &mut self,
        rank: Rank,
        (holder, place, offset): (usize, Place, usize),
        bytes: &[u8],
        due: &Due<'_>,
    ) -> Result<()> {
        self.enter(1, Slots::of(place), Exposed::Nothing, due)?;
        if holder == rank.index() {
            self.publish(place, offset, bytes);
        } else {
            self.write(holder, place, offset, bytes)?;
        }
        self.post();
        for distance in 1..rank.world_size() {
            self.wait(rank.plus(distance).index(), 1, due)?;
        }
        self.settle();
        Ok(())
    }

    /// Lets `read` see a range of what `rank` has published or laid open, in pieces, each with its offset from the
    /// start of the range. Offsets are multiples of 64, and so is the length of each piece but the last. Pieces of slots
    /// are as long as the range.
    ///
    /// Memory that a rank's program was given by [`allocate`](crate::Transport::allocate) is mapped here when it is first
    /// read or written, by the deadline of the last call in which this rank has laid something open: so a rank that reaches
    /// for what others have laid open lays open something too, if only no bytes.
    ///
    /// # Errors
    /// If `rank` has laid no such range open, or the system fails to read it.
    fn view(
        &mut self,
        rank: usize,
        place: Place,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()>;

    /// Lets `read` see as many bytes of what several ranks have published, [`CHANGED_MAX`] at the most, all at once: for each
    /// of `there`, a rank and an offset, in this order.
    ///
    /// # Errors
    /// If one of them has published no such range, as nobody has in [`Place::Memory`].
    ///
    /// # Panics
    /// If they are more.
    fn view_all(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Copies from what `rank` has published or laid open, beginning at `offset`.
    ///
    /// # Errors
    /// As for [`view`](Direct::view).
    fn read(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()>;

    /// As [`read`](Direct::read), past the caches where that is possible: for what is not used again before it would have
    /// left them. Memory that is only written is then not fetched first.
    ///
    /// # Errors
    /// As for [`read`](Direct::read).
    fn read_past(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()> {
        self.read(rank, place, offset, into)
    }

    /// Copies what is this rank's own anyway: for those who simulate how long that takes.
    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        crate::copy(from, into);
    }

    /// As [`copy`](Direct::copy), past the caches where that is possible.
    fn copy_past(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    /// Copies into a slot of `rank`, or into the memory that it has laid open for writing, beginning at `offset`.
    ///
    /// # Errors
    /// If `rank` has no such slot and has laid no such memory open, or the system fails to write it.
    fn write(&mut self, rank: usize, place: Place, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Lets `change` have as many bytes of slots of several ranks, or of memory that they have laid open for writing, all
    /// where they lie: for each of `there`, a rank and an offset, in this order. `false`, and nothing done, if one is not
    /// within reach like this, or they are more than [`CHANGED_MAX`]: then there are [`view`](Direct::view) and
    /// [`write`](Direct::write).
    ///
    /// # Errors
    /// As for [`write`](Direct::write).
    ///
    /// # Panics
    /// If two of the ranges overlap, or for [`Place::Memory`] if ranks do not rise or one is this one.
    fn change(
        &mut self,
        _place: Place,
        _there: &[(usize, usize)],
        _len: usize,
        _change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        Ok(false)
    }

    /// Wakes those who sleep for what was posted: what every call ends with.
    fn settle(&mut self) {}

    /// Says, before a post, what the memory that was laid open holds now. Where ranks really reach into it there is nothing to
    /// do; those who simulate it need to be told.
    fn show(&mut self, _memory: &[u8]) {}

    /// Brings what others have written into the memory that was laid open, once they are waited for. Where they really
    /// reach into it, it is there already.
    fn collect(&mut self, _memory: &mut [u8]) {}

    /// Whether every rank is known to have posted for the last time in the last call, so that none reaches into this
    /// rank's memory any more.
    fn finished(&self) -> bool;
}

/// What the ranks of a group share; the same on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shared {
    /// Slots of each rank.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a line: what travels with a post for nothing.
    pub line_bytes: usize,
    /// Bytes of a sheet: what a rank can publish while others are up to three calls behind.
    pub sheet_bytes: usize,
    /// What can be done with memory that a rank lays open and that is not [allocated](crate::Transport::allocate).
    pub reach: Reach,
    /// Whether the system copies much ordinary memory to another rank faster than it goes through slots.
    pub fast_attach: bool,
}

impl Shared {
    /// What ranks of one host share in this crate's transports, where they reach so far.
    pub const fn on_host(reach: Reach) -> Self {
        let (slots, slot_bytes, line_bytes, sheet_bytes) = (4, 512 << 10, 48, 64 << 10);
        Self { slots, slot_bytes, line_bytes, sheet_bytes, reach, fast_attach: false }
    }
}

/// How far ranks reach into each other's ordinary memory. Memory that the transport allocated is reached by all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Not at all: they share slots only.
    Slots,
    /// They may read it.
    Read,
    /// They may read and write it.
    Write,
}

/// Where a rank's bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the line that says how often it has posted. It can be written before the call's first post only.
    Line,
    /// In its sheet, of which there is one for as many calls as there are lines. Only the rank itself writes there.
    Sheet,
    /// In the slot with this number.
    Slot(usize),
    /// In the memory that it has laid open.
    Memory,
}

/// Whether anything is published or written in slots in a call. They take turns with two calls; so nobody enters one that
/// uses them before every rank has posted in the call before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slots {
    /// Only in lines, sheets and memory that is laid open.
    Unused,
    /// In slots, and perhaps elsewhere.
    Used,
}

impl Slots {
    /// For a call in which things are published in such a place.
    #[inline]
    pub const fn of(place: Place) -> Self {
        match place {
            Place::Slot(_) => Self::Used,
            Place::Line | Place::Sheet | Place::Memory => Self::Unused,
        }
    }

    /// The call that every rank has to have posted in, so that none is in the one before it any more, until a rank enters
    /// the one that follows its `last`. Calls are counted from 1; 0 is before all of them.
    #[inline]
    pub const fn begun_by_all(self, last: usize) -> usize {
        match self {
            Self::Unused => last.saturating_sub(CALLS_MAX - 2),
            Self::Used => last,
        }
    }
}

/// The memory that a rank lays open to the others in a call.
#[derive(Debug)]
pub enum Exposed<'a> {
    /// None.
    Nothing,
    /// They may read this. What they read after the call failed for this rank is an error there.
    Read(&'a [u8]),
    /// They may read and write this, also long after the call has failed.
    Write(Lent<'a>),
}

/// What work in shared memory takes, in picoseconds of the rank that does it: for simulations and predictions.
///
/// A post is seen by others as much later as a message of no bytes takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCosts {
    /// To post.
    pub post_ps: u64,
    /// To wait for a rank, beside the time until it has posted.
    pub wait_ps: u64,
    /// To copy a byte: to publish, to read or to write it.
    pub copied_byte_ps: u64,
    /// To view a byte, and combine it with another.
    pub viewed_byte_ps: u64,
    /// To reach into memory that a rank has laid open, each time, besides; nothing where it is mapped.
    pub attach_ps: u64,
    /// The same for each byte.
    pub attached_byte_ps: u64,
}

impl MemoryCosts {
    /// To copy so many bytes, in picoseconds.
    pub const fn copied(&self, place: Place, bytes: usize) -> u64 {
        self.attached(place, bytes) + self.copied_byte_ps * bytes as u64
    }

    /// To view so many bytes, in picoseconds.
    pub const fn viewed(&self, place: Place, bytes: usize) -> u64 {
        self.attached(place, bytes) + self.viewed_byte_ps * bytes as u64
    }

    const fn attached(&self, place: Place, bytes: usize) -> u64 {
        match place {
            Place::Memory => self.attach_ps + self.attached_byte_ps * bytes as u64,
            Place::Line | Place::Sheet | Place::Slot(_) => 0,
        }
    }
}
