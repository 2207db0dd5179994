//! What ranks that share memory can do beside exchanging messages: each works in the others' memory, at the same time.
#![allow(
    unsafe_code,
    reason = "the trait gives access to memory that other processes write, under a contract"
)]

use std::fmt;
use std::ops::Range;

use crate::{LazyDeadline, Lent, Rank, Result};

/// The largest number of other ranks whose memory is [changed](Direct::change) or [viewed](Direct::view_all) at once.
pub const CHANGED_MAX: usize = 7;

/// How many calls may be under way at once: ranks that do not wait for each other are less than that apart.
pub const CALLS_MAX: usize = 4;

/// Memory that all ranks of a group share: for each rank a line of a few bytes, a sheet of some more, slots, and the memory
/// that the rank exposes in a call.
///
/// Ranks enter the same calls in the same order and signal equally often in each. A signal tells those who wait for it
/// that everything which this rank wrote before is there, and that this rank is done with what it read before.
///
/// Calls that follow each other have lines, sheets and slots of their own: lines and sheets are used again after
/// [`CALLS_MAX`] calls, slots after two. [`enter`](Direct::enter) waits until no rank is in a call any more whose places it
/// uses again. So every rank has to have signalled in the previous call if slots are used, and otherwise in the call three
/// before. A transport may wait for more where that is faster.
///
/// Ranks are numbered as in the group; a method that is given one which is not of the group panics.
///
/// After an error the whole job is aborted, as after one of a [`Transport`](crate::Transport)'s. Only
/// [`OutOfReach`](crate::Error::OutOfReach) ends nothing by itself: this rank goes on with the call, or calls
/// [`abort`](crate::Transport::abort).
///
/// The trait is sealed: only this crate's transports implement it.
///
/// # Safety
/// The methods that are `unsafe` read and write memory that other ranks read and write, without a lock. Whoever calls one
/// makes sure of this, for itself, and assumes it of every other rank of the group:
///
/// 1. **One plan.** In each call every rank does its part of one plan, the same on all ranks, whose steps were checked for
///    this number of ranks: of two accesses of different ranks to the same byte, of which one writes, one comes before a
///    signal and the other after a [`wait`](Direct::wait) for that signal. [`CallEntry::plan_digest`] names the plan, and waits compare it.
/// 2. **Memory that is exposed for reading** ([`ExposedRegion::Read`]) is not freed, and not written but as the plan says, until
///    [`finished`](Direct::is_finished) is true or [`abandon`](Direct::abandon) has returned.
/// 3. **Memory that is lent** ([`ExposedRegion::Write`]) belongs to the call. Nothing of it is read or written by the rank that has
///    lent it, but for what the plan gives this rank, until [`reclaim`](Direct::reclaim) gives it back.
/// 4. Other processes that have the memory mapped run this crate, do the same, and write nothing else there.
///
/// A program without `unsafe` cannot reach there, neither to read
///
/// ```compile_fail,E0133
/// # use dist_transport::{Direct, Place, Result};
/// fn look(direct: &mut dyn Direct) -> Result<()> {
///     direct.view(0, Place::Slot(0), 0..8, &mut |_, bytes| println!("{bytes:?}"))
/// }
/// ```
///
/// nor to write:
///
/// ```compile_fail,E0133
/// # use dist_transport::{Direct, Place, Result};
/// fn change(direct: &mut dyn Direct) -> Result<()> {
///     direct.write(0, Place::Memory, 0, &[1; 64])
/// }
/// ```
///
/// One that keeps to the contract can:
///
/// ```
/// # use dist_transport::{Direct, Place, Result};
/// fn look(direct: &mut dyn Direct) -> Result<()> {
///     // SAFETY: rank 0 has published it before a signal that was waited for.
///     unsafe { direct.view(0, Place::Slot(0), 0..8, &mut |_, bytes| println!("{bytes:?}")) }
/// }
/// ```
///
/// What was lent belongs to its call, so nothing else can give it back:
///
/// ```compile_fail,E0382
/// # use dist_transport::{Direct, LazyDeadline, CallEntry, ExposedRegion, Owned};
/// fn lend(direct: &mut dyn Direct, entry: CallEntry, due: &LazyDeadline<'_>, memory: Owned<u64>) {
///     let lent = memory.lend();
///     // SAFETY: the ranks keep to the contract.
///     unsafe { direct.enter(entry, ExposedRegion::Write(lent), due) }.unwrap();
///     let memory = lent.into_owned::<u64>();
/// }
/// ```
///
/// but the call:
///
/// ```
/// # use dist_transport::{Direct, LazyDeadline, CallEntry, ExposedRegion, Owned};
/// fn lend(direct: &mut dyn Direct, entry: CallEntry, due: &LazyDeadline<'_>, memory: Owned<u64>) -> Option<Owned<u64>> {
///     let lent = memory.lend();
///     // SAFETY: the ranks keep to the contract.
///     unsafe { direct.enter(entry, ExposedRegion::Write(lent), due) }.unwrap();
///     // … signals and waits, until all have signalled for the last time.
///     direct.reclaim().and_then(|lent| lent.into_owned().ok())
/// }
/// ```
pub trait Direct: sealed::Sealed + fmt::Debug {
    /// What there is; the same on all ranks.
    fn shared(&self) -> GroupLayout;

    /// This rank and the size of the group.
    fn rank(&self) -> Rank;

    /// Identifies the call that this rank is in. No two calls of a process have the same value, in whatever group they are.
    fn call(&self) -> DirectCall;

    /// Begins the next call, the one that [`begin`](crate::Transport::begin) has named, and exposes `memory` in it.
    ///
    /// What was [lent](ExposedRegion::Write) stays with the group until [`reclaim`](Direct::reclaim) gives it back, and is never
    /// freed if it does not.
    ///
    /// # Errors
    /// If a rank does not come out of the last call whose places are used again, or was in another one.
    ///
    /// # Panics
    /// If `entry` names another rank than this one, or no signals.
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn enter(
        &mut self,
        entry: CallEntry,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Copies bytes into this rank's line, its sheet or one of its slots. Others see them after the next
    /// [`signal`](Direct::signal).
    ///
    /// # Panics
    /// If the bytes do not fit, or `place` is [`Place::Memory`].
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn publish(&mut self, place: Place, offset: usize, bytes: &[u8]);

    /// Tells the others that this rank has done its steps so far. Those who sleep are woken when this one begins to wait,
    /// at the latest by [`wake_waiters`](Direct::wake_waiters).
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn signal(&mut self);

    /// Waits until `rank` has signalled this often in this call. The first wait for a rank in a call finds out whether it
    /// is in the same one.
    ///
    /// # Errors
    /// If it does not by the deadline, is in another call, or the job is aborted.
    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()>;

    /// Does all of a call in which every rank publishes some bytes and signals once, but for their use: enters it, publishes
    /// `bytes` at an offset of a place of `holder`'s, which is this rank or one whose slot it writes, signals, waits for every
    /// other rank, and wakes those who sleep for its signal. It is one method so that no clock is looked at unless a rank
    /// waits.
    ///
    /// # Errors
    /// As for [`enter`](Direct::enter), [`write`](Direct::write) and [`wait`](Direct::wait).
    ///
    /// # Panics
    /// As for [`enter`](Direct::enter) and [`publish`](Direct::publish).
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn signal_and_wait(
        &mut self,
        entry: CallEntry,
        (holder, place, offset): (usize, Place, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let rank = entry.rank;
        // SAFETY: as the caller has promised.
        unsafe { self.enter(entry, ExposedRegion::Nothing, due) }?;
        if holder == rank.index() {
            // SAFETY: as the caller has promised.
            unsafe { self.publish(place, offset, bytes) };
        } else {
            // SAFETY: as the caller has promised.
            unsafe { self.write(holder, place, offset, bytes) }?;
        }
        // SAFETY: as the caller has promised.
        unsafe { self.signal() };
        for distance in 1..rank.world_size() {
            self.wait(rank.plus(distance).index(), 1, due)?;
        }
        self.wake_waiters();
        Ok(())
    }

    /// Lets `read` see a range of what `rank` has published or exposed, in pieces, each with its offset from the
    /// start of the range. Offsets are multiples of 64, and so is the length of each piece but the last. Pieces of slots
    /// are as long as the range.
    ///
    /// Memory that a rank's program was given by [`allocate`](crate::Transport::allocate) is mapped here when it is first
    /// read or written, by the deadline of the last call in which this rank has exposed something: so a rank that reaches
    /// for what others have exposed exposes something too, if only no bytes.
    ///
    /// # Errors
    /// If `rank` has exposed no such range, or the system fails to read it.
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn view(
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
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn view_all(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Copies from what `rank` has published or exposed, beginning at `offset`.
    ///
    /// # Errors
    /// As for [`view`](Direct::view).
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn read(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()>;

    /// As [`read`](Direct::read), by non-temporal stores where that is possible: for what is not used again before it would
    /// have left the caches. Memory that is only written is then not fetched first.
    ///
    /// # Errors
    /// As for [`read`](Direct::read).
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn read_non_temporal(
        &mut self,
        rank: usize,
        place: Place,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read(rank, place, offset, into) }
    }

    /// Copies what is this rank's own anyway: for those who simulate how long that takes.
    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        crate::copy(from, into);
    }

    /// As [`copy`](Direct::copy), by non-temporal stores where that is possible.
    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    /// Copies into a slot of `rank`, or into the memory that it has lent, beginning at `offset`.
    ///
    /// # Errors
    /// If `rank` has no such slot and has lent no such memory, or the system fails to write it.
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn write(&mut self, rank: usize, place: Place, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Lets `change` have as many bytes of slots of several ranks, or of memory that they have lent, all
    /// where they lie: for each of `there`, a rank and an offset, in this order. `false`, and nothing done, if one is not
    /// within reach like this, or they are more than [`CHANGED_MAX`]: then there are [`view`](Direct::view) and
    /// [`write`](Direct::write).
    ///
    /// # Errors
    /// As for [`write`](Direct::write).
    ///
    /// # Panics
    /// If two of the ranges overlap, or for [`Place::Memory`] if ranks do not rise or one is this one.
    ///
    /// # Safety
    /// As said of the [trait](Direct).
    unsafe fn change(
        &mut self,
        _place: Place,
        _there: &[(usize, usize)],
        _len: usize,
        _change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        Ok(false)
    }

    /// Wakes those who sleep for what was signalled: what every call ends with.
    fn wake_waiters(&mut self) {}

    /// Tells, before a signal, what the memory that is exposed for reading holds now. Where ranks really reach into it there is
    /// nothing to do; those who simulate it need to be told.
    fn update_exposed(&mut self, _memory: &[u8]) {}

    /// Whether every rank is known to have signalled for the last time in the last call, so that none reaches into this
    /// rank's memory any more.
    fn is_finished(&self) -> bool;

    /// Gives back what was [lent](ExposedRegion::Write) in the last call, with what others have written into it, if that call is
    /// [finished](Direct::is_finished). Otherwise the memory stays lent, and is never freed.
    fn reclaim(&mut self) -> Option<Lent>;

    /// Gives up the last call. From here on what was [exposed for reading](ExposedRegion::Read) in it is the caller's again: others
    /// who still read there get an error, or what was there before, and see none of what the caller writes.
    fn abandon(&mut self) {
        self.abandon_handle().now();
    }

    /// What [abandons](Direct::abandon) the present call at a later time, wherever this memory is by then.
    fn abandon_handle(&self) -> AbandonHandle;
}

/// Gives up one call of a group's memory; see [`Direct::abandon`].
pub struct AbandonHandle(Box<dyn FnMut() + Send + Sync>);

impl AbandonHandle {
    #[cfg(any(all(feature = "shm", target_os = "linux"), feature = "sim"))]
    pub(crate) fn new(abandon: impl FnMut() + Send + Sync + 'static) -> Self {
        Self(Box::new(abandon))
    }

    /// Gives it up.
    pub fn now(&mut self) {
        (self.0)();
    }
}

impl fmt::Debug for AbandonHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbandonHandle")
    }
}

pub(crate) mod sealed {
    #[allow(unnameable_types, reason = "that it cannot be named is what seals the trait")]
    /// Keeps other crates from implementing [`Direct`](super::Direct): what is `unsafe` there relies on how this crate does it.
    pub trait Sealed {}
}

/// What a rank enters a call with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallEntry {
    /// The rank that enters, as the caller takes it to be.
    pub rank: Rank,
    /// A digest of all that ranks must agree on beside the call that was [begun](crate::Transport::begin): of the whole plan.
    /// Ranks that differ in it are in different calls.
    pub plan_digest: u64,
    /// How often every rank signals in the call, which is at least once.
    pub signals: u32,
    /// Whether anybody publishes or writes in slots. All ranks say the same.
    pub slots: SlotUse,
}

/// A call of one group's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirectCall {
    /// The group's memory, among all that this process has had.
    pub(crate) group: u64,
    /// How many calls it has entered.
    pub(crate) number: usize,
}

impl DirectCall {
    /// The number of another group's memory.
    #[cfg(any(all(feature = "shm", target_os = "linux"), feature = "sim"))]
    pub(crate) fn next_group() -> u64 {
        use std::sync::atomic::{AtomicU64, Ordering};
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        GROUPS.fetch_add(1, Ordering::Relaxed)
    }
}

/// What the ranks of a group share; the same on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLayout {
    /// SlotUse of each rank.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a line: what travels with a signal for nothing.
    pub flag_line_bytes: usize,
    /// Bytes of a sheet: what a rank can publish while others are up to three calls behind.
    pub eager_bytes: usize,
    /// What can be done with memory that a rank exposes and that is not [allocated](crate::Transport::allocate).
    pub reach: Reach,
    /// Whether the system copies much ordinary memory to another rank faster than it goes through slots.
    pub fast_attach: bool,
}

impl GroupLayout {
    /// What ranks of one host share in this crate's transports, where they reach so far.
    pub const fn on_host(reach: Reach) -> Self {
        let (slots, slot_bytes, flag_line_bytes, eager_bytes) = (4, 512 << 10, 48, 64 << 10);
        Self { slots, slot_bytes, flag_line_bytes, eager_bytes, reach, fast_attach: false }
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
    /// In the line that says how often it has signalled. It can be written before the call's first signal only.
    FlagLine,
    /// In its sheet, of which there is one for as many calls as there are lines. Only the rank itself writes there.
    EagerBuffer,
    /// In the slot with this number.
    Slot(usize),
    /// In the memory that it has exposed.
    Memory,
}

/// Whether anything is published or written in slots in a call. They take turns with two calls; so nobody enters one that
/// uses them before every rank has signalled in the call before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotUse {
    /// Only in lines, sheets and memory that is exposed.
    Unused,
    /// In slots, and perhaps elsewhere.
    Used,
}

impl SlotUse {
    /// For a call in which things are published in such a place.
    #[inline]
    pub const fn of(place: Place) -> Self {
        match place {
            Place::Slot(_) => Self::Used,
            Place::FlagLine | Place::EagerBuffer | Place::Memory => Self::Unused,
        }
    }

    /// The call that every rank has to have signalled in, so that none is in the one before it any more, until a rank enters
    /// the one that follows its `last`. Calls are counted from 1; 0 is before all of them.
    #[inline]
    pub const fn awaited_call(self, last: usize) -> usize {
        match self {
            Self::Unused => last.saturating_sub(CALLS_MAX - 2),
            Self::Used => last,
        }
    }
}

/// The memory that a rank exposes to the others in a call.
#[derive(Debug)]
pub enum ExposedRegion<'a> {
    /// None.
    Nothing,
    /// They may read this. What they read after the call failed for this rank is an error there.
    Read(&'a [u8]),
    /// They may read and write this, also long after the call has failed: it belongs to the call, which
    /// [gives it back](Direct::reclaim).
    Write(Lent),
}

/// What work in shared memory takes, in picoseconds of the rank that does it: for simulations and predictions.
///
/// A signal is seen by others as much later as a message of no bytes takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCosts {
    /// To signal.
    pub signal_ps: u64,
    /// To wait for a rank, beside the time until it has signalled.
    pub wait_ps: u64,
    /// To copy a byte: to publish, to read or to write it.
    pub copied_byte_ps: u64,
    /// To view a byte, and combine it with another.
    pub viewed_byte_ps: u64,
    /// To reach into memory that a rank has exposed, each time, besides; nothing where it is mapped.
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
            Place::FlagLine | Place::EagerBuffer | Place::Slot(_) => 0,
        }
    }
}
