//! The memory that all ranks of a group on one host share, beside their messages.
//!
//! An algorithm or a call is *direct* if it uses this memory instead of messages.
#![allow(
    unsafe_code,
    reason = "the trait gives access to memory that other processes write, under a contract"
)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use crate::owned::Lent;
use crate::{LazyDeadline, Rank, Result};

/// The most ranks whose memory one [`change`](ShmGroup::change) or one [`view_all`](ShmGroup::view_all) reaches.
pub const CHANGED_MAX: usize = 7;

/// The most calls that ranks may be in at the same time. Two ranks are always fewer than this many calls
/// apart.
///
/// The window of four calls, and an eager buffer for each of them, stay because they let a root or a
/// contributor run ahead on an oversubscribed host, which saves switches between ranks. Without both, 4 ranks on 2 cores of a Xeon take
/// 1.5 times as long for a broadcast of 8 B and of 1 KiB, and 1.4 times for 16 KiB. A reduce takes 1.7, 1.8
/// and 1.6 times as long (2026-11-28). Eight calls gave no more.
pub const CALLS_MAX: usize = 4;

/// Memory that all ranks of a group share. Each rank has a flag line (a few bytes), an eager buffer, slots,
/// and the memory that it exposes in a call.
///
/// All ranks enter the same calls in the same order and signal the same number of times in each call. A
/// signal publishes everything that the rank wrote before it. It also says that the rank has finished the
/// reads that came before it.
///
/// Slots are double-buffered. Flag lines and eager buffers are quadruple-buffered: they are reused after
/// [`CALLS_MAX`] calls. Before a rank reuses a slot, [`enter`](ShmGroup::enter) waits until every rank has
/// signalled in the previous call. Before it reuses a flag line or an eager buffer, it waits for the call
/// three before. A transport may wait for more ranks if that is faster.
///
/// Ranks are numbered as in the group. A method panics if it is given a rank outside the group.
///
/// After an error the whole job is aborted, as after an error of a [`Transport`](crate::Transport). The
/// exception is [`OutOfReach`](crate::Error::OutOfReach): this rank continues the call, or calls
/// [`abort`](crate::Transport::abort).
///
/// The trait is sealed: only transports of this crate implement it.
///
/// # Safety
/// The `unsafe` methods read and write memory that other ranks read and write, without a lock. The caller
/// guarantees the following for its own rank, and may rely on it for every other rank:
///
/// 1. **One plan.** In each call all ranks execute one plan that was checked for this number of ranks. If two
///    ranks access the same byte and one of them writes, one access comes before a signal and the other after
///    a [`wait`](ShmGroup::wait) for that signal. [`CallEntry::plan_digest`] identifies the plan, and waits
///    compare it.
/// 2. **Memory exposed for reading** ([`ExposedRegion::Read`]) is not freed, and is written only as the plan
///    says, until [`is_finished`](ShmGroup::is_finished) returns `true` or [`abandon`](ShmGroup::abandon) has
///    returned.
/// 3. **Lent memory** ([`ExposedRegion::Write`]) belongs to the call. Its owner reads and writes only what
///    the plan assigns to this rank, until [`reclaim`](ShmGroup::reclaim) returns the memory.
/// 4. **Atomic accesses.** Several ranks, the owner included, may access the same lent bytes without a signal
///    between the accesses if all of them are [`update_word`](ShmGroup::update_word) and
///    [`store_words`](ShmGroup::store_words) with one word size.
/// 5. Other processes that have the memory mapped run this crate, keep this contract, and write nothing else
///    there.
///
/// A program without `unsafe` cannot read shared memory
///
/// ```compile_fail,E0133
/// # use dist_transport::Result;
/// # use dist_transport::shm_group::{MemoryArea, ShmGroup};
/// fn look(direct: &mut dyn ShmGroup) -> Result<()> {
///     direct.view(0, MemoryArea::Slot(0), 0..8, &mut |_, bytes| println!("{bytes:?}"))
/// }
/// ```
///
/// nor write it:
///
/// ```compile_fail,E0133
/// # use dist_transport::Result;
/// # use dist_transport::shm_group::{MemoryArea, ShmGroup};
/// fn change(direct: &mut dyn ShmGroup) -> Result<()> {
///     direct.write(0, MemoryArea::Exposed, 0, &[1; 64])
/// }
/// ```
///
/// A program that keeps the contract can:
///
/// ```
/// # use dist_transport::Result;
/// # use dist_transport::shm_group::{MemoryArea, ShmGroup};
/// fn look(direct: &mut dyn ShmGroup) -> Result<()> {
///     // SAFETY: rank 0 has published it before a signal that was waited for.
///     unsafe { direct.view(0, MemoryArea::Slot(0), 0..8, &mut |_, bytes| println!("{bytes:?}")) }
/// }
/// ```
///
/// Lent memory belongs to its call, so the lender cannot take it back:
///
/// ```compile_fail,E0382
/// # use dist_transport::{LazyDeadline, Owned};
/// # use dist_transport::shm_group::{CallEntry, ExposedRegion, ShmGroup};
/// fn lend(direct: &mut dyn ShmGroup, entry: CallEntry, due: &LazyDeadline<'_>, memory: Owned<u64>) {
///     let lent = memory.lend();
///     // SAFETY: the ranks keep to the contract.
///     unsafe { direct.enter(entry, ExposedRegion::Write(lent), due) }.unwrap();
///     let memory = lent.into_owned::<u64>();
/// }
/// ```
///
/// Only the call returns it:
///
/// ```
/// # use dist_transport::{LazyDeadline, Owned};
/// # use dist_transport::shm_group::{CallEntry, ExposedRegion, ShmGroup};
/// fn lend(direct: &mut dyn ShmGroup, entry: CallEntry, due: &LazyDeadline<'_>, memory: Owned<u64>) -> Option<Owned<u64>> {
///     let lent = memory.lend();
///     // SAFETY: the ranks keep to the contract.
///     unsafe { direct.enter(entry, ExposedRegion::Write(lent), due) }.unwrap();
///     // … signals and waits, until all have signalled for the last time.
///     direct.reclaim().and_then(|lent| lent.into_owned().ok())
/// }
/// ```
pub trait ShmGroup: sealed::Sealed + fmt::Debug {
    /// Returns the layout of the shared memory, which is the same on all ranks.
    fn shared(&self) -> GroupLayout;

    /// Returns this rank and the size of the group.
    fn rank(&self) -> Rank;

    /// Identifies the current call. The value is unique within the process, across all groups.
    fn call(&self) -> DirectCall;

    /// Enters the next call, which [`begin`](crate::Transport::begin) has announced, and exposes `memory` in
    /// it.
    ///
    /// [Lent](ExposedRegion::Write) memory stays with the group until [`reclaim`](ShmGroup::reclaim) returns
    /// it. If it is never reclaimed, it is never freed.
    ///
    /// # Errors
    /// If a rank does not signal in the call whose places are reused, or is in another call.
    ///
    /// # Panics
    /// If `entry` names another rank than this one, or has no signals.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn enter(
        &mut self,
        entry: CallEntry,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Copies bytes into this rank's flag line, its eager buffer or one of its slots. Other ranks see them
    /// after the next [`signal`](ShmGroup::signal).
    ///
    /// # Panics
    /// If the bytes do not fit, or `place` is [`MemoryArea::Exposed`].
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]);

    /// Signals to the other ranks that this rank has done its steps so far. Sleeping ranks are woken when
    /// this rank begins to wait, at the latest by [`wake_waiters`](ShmGroup::wake_waiters).
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn signal(&mut self);

    /// Waits until `rank` has signalled this many times in the current call. The first wait for a rank in a
    /// call also compares the calls.
    ///
    /// # Errors
    /// If the deadline passes, if `rank` is in another call, or if the job is aborted.
    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()>;

    /// Executes a whole call in which every rank publishes some bytes and signals once (a fused barrier). It
    /// enters the call, writes `bytes` at an offset of a place of `holder`, signals, waits for every other
    /// rank, and wakes sleeping ranks. `holder` is this rank, or a rank whose slot this rank writes.
    ///
    /// It is one method so that the clock is read only if a rank has to wait.
    ///
    /// # Errors
    /// As for [`enter`](ShmGroup::enter), [`write`](ShmGroup::write) and [`wait`](ShmGroup::wait).
    ///
    /// # Panics
    /// As for [`enter`](ShmGroup::enter) and [`publish`](ShmGroup::publish).
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn signal_and_wait(
        &mut self,
        entry: CallEntry,
        (holder, place, offset): (usize, MemoryArea, usize),
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

    /// Calls `read` with a range of the bytes that `rank` has published or exposed. The range comes in
    /// pieces, each with its offset from the start of the range. Offsets are multiples of 64, and so is the
    /// length of each piece except the last. A range of a slot comes in one piece.
    ///
    /// [Allocated](crate::Transport::allocate) memory of another rank is mapped here at the first access. The
    /// deadline for that is the one of the last call in which this rank exposed something. A rank that
    /// accesses exposed memory therefore exposes something too, even if that is no bytes.
    ///
    /// # Errors
    /// If `rank` has not exposed this range, or the system fails to read it.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()>;

    /// Calls `read` once with equally long ranges of several ranks, at most [`CHANGED_MAX`]. Each element of
    /// `there` is a rank and an offset; the slices come in the same order.
    ///
    /// # Errors
    /// If a rank has published no such range. [`MemoryArea::Exposed`] always fails.
    ///
    /// # Panics
    /// If `there` has more than [`CHANGED_MAX`] elements.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Copies bytes that `rank` has published or exposed, from `offset` on.
    ///
    /// # Errors
    /// As for [`view`](ShmGroup::view).
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()>;

    /// Like [`read`](ShmGroup::read), with non-temporal stores if possible. Use it for bytes that are not used
    /// again before they would leave the caches. Destination lines are then not fetched first.
    ///
    /// # Errors
    /// As for [`read`](ShmGroup::read).
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read(rank, place, offset, into) }
    }

    /// Copies bytes between two buffers of this rank. Simulated memory charges time for it.
    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        crate::cpu::copy(from, into);
    }

    /// Like [`copy`](ShmGroup::copy), with non-temporal stores if possible.
    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.copy(from, into);
    }

    /// Copies `bytes` into a slot of `rank`, or into the memory that it has lent, from `offset` on.
    ///
    /// # Errors
    /// If `rank` has no such slot or has lent no such memory, or the system fails to write it.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Calls `change` with equally long mutable ranges of slots, or of lent memory, of several ranks. Each
    /// element of `there` is a rank and an offset; the slices come in the same order.
    ///
    /// Returns `false` and does nothing if a range is not mapped here, or if there are more than
    /// [`CHANGED_MAX`]. The caller then uses [`view`](ShmGroup::view) and [`write`](ShmGroup::write).
    ///
    /// # Errors
    /// As for [`write`](ShmGroup::write).
    ///
    /// # Panics
    /// If two ranges overlap. For [`MemoryArea::Exposed`] also if the ranks do not ascend, or one is this rank.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn change(
        &mut self,
        _place: MemoryArea,
        _there: &[(usize, usize)],
        _len: usize,
        _change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        Ok(false)
    }

    /// Performs an atomic operation on a word that a rank, or this rank, has [lent](ExposedRegion::Write).
    /// Returns the value from before. A word is zero-extended to 8 bytes.
    ///
    /// # Errors
    /// If the rank has lent no such word, or its memory is not mapped here.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn update_word(
        &mut self,
        rank: usize,
        offset: usize,
        size: WordSize,
        update: WordUpdate,
    ) -> Result<u64>;

    /// Copies bytes into memory that a rank, or this rank, has [lent](ExposedRegion::Write), by one atomic
    /// store for each word.
    ///
    /// # Errors
    /// As for [`update_word`](ShmGroup::update_word), and if the bytes are no whole words.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn store_words(&mut self, rank: usize, offset: usize, size: WordSize, bytes: &[u8]) -> Result<()>;

    /// Returns a handle to the first `len` bytes that a rank has [exposed for reading](ExposedRegion::Read).
    /// Returns `None` if they are not mapped here. Simulated memory is copied.
    ///
    /// # Errors
    /// As for [`view`](ShmGroup::view).
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`].
    unsafe fn exposed_view(&mut self, rank: usize, len: usize) -> Result<Option<ExposedView>>;

    /// Wakes ranks that sleep for a signal of this rank. Every call ends with it.
    fn wake_waiters(&mut self) {}

    /// Updates the copy of the exposed memory that other ranks see, before a signal. Real shared memory needs
    /// no update; simulated memory does.
    fn update_exposed(&mut self, _memory: &[u8]) {}

    /// Returns `true` if every rank is known to have given its last signal in the last call. No rank accesses
    /// this rank's memory after that.
    fn is_finished(&self) -> bool;

    /// Returns the memory that was [lent](ExposedRegion::Write) in the last call, with the bytes that others
    /// wrote, if the call is [finished](ShmGroup::is_finished). Otherwise the memory stays lent and is never
    /// freed.
    fn reclaim(&mut self) -> Option<Lent>;

    /// Abandons the last call. From then on memory [exposed for reading](ExposedRegion::Read) belongs to the
    /// caller again. Ranks that still read it get an error or the old bytes, and never the caller's new
    /// bytes.
    fn abandon(&mut self) {
        self.abandon_handle().now();
    }

    /// Returns a handle that [abandons](ShmGroup::abandon) the current call later, from any place in the
    /// program.
    fn abandon_handle(&self) -> AbandonHandle;
}

/// A handle that abandons one call of a group's memory; see [`ShmGroup::abandon`].
pub struct AbandonHandle(Box<dyn FnMut() + Send + Sync>);

impl AbandonHandle {
    #[cfg(any(all(feature = "shm", target_os = "linux"), feature = "sim"))]
    pub(crate) fn new(abandon: impl FnMut() + Send + Sync + 'static) -> Self {
        Self(Box::new(abandon))
    }

    /// Abandons the call.
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
    #[allow(unnameable_types, reason = "the trait is sealed because this type cannot be named")]
    /// Keeps other crates from implementing [`ShmGroup`](super::ShmGroup), whose `unsafe` contract relies on the
    /// implementations of this crate.
    pub trait Sealed {}
}

/// The parameters with which a rank enters a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallEntry {
    /// The rank that enters, as the caller sees it.
    pub rank: Rank,
    /// A digest of the whole plan, in addition to the fingerprint of the [current
    /// call](crate::Transport::begin). Ranks with different digests are in different calls.
    pub plan_digest: u64,
    /// The number of signals that every rank gives in the call, at least 1.
    pub signals: u32,
    /// The use of slots by any rank in the call; the same on all ranks.
    pub slots: SlotUse,
}

/// An identifier of one call of one group's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirectCall {
    /// The number of the group's memory within this process.
    pub(crate) group: u64,
    /// The number of the call, counted from 1.
    pub(crate) number: usize,
}

impl DirectCall {
    /// Returns a new number for the memory of a group. No other group of this process has it.
    #[cfg(any(all(feature = "shm", target_os = "linux"), feature = "sim"))]
    pub(crate) fn new_group_number() -> u64 {
        use std::sync::atomic::{AtomicU64, Ordering};
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        GROUPS.fetch_add(1, Ordering::Relaxed)
    }
}

/// The layout of the memory that the ranks of a group share; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLayout {
    /// Slots of each rank.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Data bytes of a flag line, which travel with a signal at no extra cost.
    pub flag_line_bytes: usize,
    /// Bytes of an eager buffer. A rank can publish this much while other ranks are up to three calls behind.
    pub eager_bytes: usize,
    /// Access to memory that a rank exposes and that was not [allocated](crate::Transport::allocate) by the
    /// transport.
    pub reach: Reach,
    /// `true` if the system copies large ordinary memory between ranks faster than slots do.
    pub fast_attach: bool,
}

impl GroupLayout {
    /// Returns the layout that this crate's transports use on one host, with this access to ordinary memory.
    pub const fn on_host(reach: Reach) -> Self {
        let (slots, slot_bytes, flag_line_bytes, eager_bytes) = (4, 512 << 10, 48, 64 << 10);
        Self { slots, slot_bytes, flag_line_bytes, eager_bytes, reach, fast_attach: false }
    }
}

/// The access that ranks have to each other's ordinary memory. Memory that the transport allocated is always
/// reachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// No access: ranks share only slots.
    Slots,
    /// Other ranks may read ordinary memory.
    Read,
    /// Other ranks may read and write ordinary memory.
    Write,
}

/// An area of memory that holds bytes of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryArea {
    /// The flag line that counts the rank's signals. It can be written only before the first signal of a
    /// call.
    FlagLine,
    /// The eager buffer. Each rank has one for each flag line, and only the rank itself writes there.
    EagerBuffer,
    /// The slot with this number.
    Slot(usize),
    /// The memory that the rank has exposed.
    Exposed,
}

/// The number of bytes of a word that ranks change by atomic operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WordSize {
    /// One byte.
    One,
    /// Two bytes.
    Two,
    /// Four bytes.
    Four,
    /// Eight bytes.
    Eight,
}

impl WordSize {
    /// Returns the largest word whose multiples are elements of this many bytes. In memory that begins at a multiple
    /// of 64 bytes, its words are aligned.
    pub const fn of_element(bytes: usize) -> Self {
        if bytes.is_multiple_of(8) {
            Self::Eight
        } else if bytes.is_multiple_of(4) {
            Self::Four
        } else if bytes.is_multiple_of(2) {
            Self::Two
        } else {
            Self::One
        }
    }

    /// Returns the number of bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Returns the largest value of a word.
    const fn max(self) -> u64 {
        u64::MAX >> (64 - 8 * self.bytes())
    }
}

/// An atomic operation on a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordUpdate {
    /// Adds to the word. The sum wraps around.
    Add(u64),
    /// Replaces the word by `new` if it is `expected`.
    CompareAndSwap {
        /// The value that is replaced.
        expected: u64,
        /// The value that replaces it.
        new: u64,
    },
}

impl WordUpdate {
    /// Returns the word after the operation.
    pub const fn apply(self, before: u64, size: WordSize) -> u64 {
        let after = match self {
            Self::Add(amount) => before.wrapping_add(amount),
            Self::CompareAndSwap { expected, new } if before == expected & size.max() => new,
            Self::CompareAndSwap { .. } => before,
        };
        after & size.max()
    }
}

/// A handle to memory that a rank has exposed for reading. The memory stays mapped as long as the handle lives.
#[derive(Debug, Clone)]
pub struct ExposedView(Arc<dyn ViewedMemory>);

impl ExposedView {
    #[cfg(any(all(feature = "shm", target_os = "linux"), feature = "sim"))]
    pub(crate) fn new(memory: impl ViewedMemory + 'static) -> Self {
        Self(Arc::new(memory))
    }

    /// Returns the bytes, which are aligned to 64 if the exposed memory is.
    ///
    /// # Safety
    /// The rank has signalled that its memory may be read. No rank writes there as long as the bytes are
    /// borrowed. A rank that [abandons](ShmGroup::abandon) the call does not change them.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: as the caller has promised.
        unsafe { self.0.bytes() }
    }
}

/// Memory behind an [`ExposedView`].
pub(crate) trait ViewedMemory: Send + Sync + fmt::Debug {
    /// See [`ExposedView::bytes`].
    ///
    /// # Safety
    /// As there.
    unsafe fn bytes(&self) -> &[u8];
}

/// The use of slots by a call. Slots are double-buffered: a rank enters a call that uses
/// them only after every rank has signalled in the previous call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotUse {
    /// The call uses flag lines, eager buffers and exposed memory only.
    Unused,
    /// The call uses slots, and perhaps other places.
    Used,
}

impl SlotUse {
    /// Returns the slot use of a call that publishes in `place`.
    #[inline]
    pub const fn of(place: MemoryArea) -> Self {
        match place {
            MemoryArea::Slot(_) => Self::Used,
            MemoryArea::FlagLine | MemoryArea::EagerBuffer | MemoryArea::Exposed => Self::Unused,
        }
    }

    /// Returns the call in which every rank must have signalled before a rank enters the call after `last`.
    /// Calls are counted from 1; 0 means no call.
    #[inline]
    pub const fn awaited_call(self, last: usize) -> usize {
        match self {
            Self::Unused => last.saturating_sub(CALLS_MAX - 2),
            Self::Used => last,
        }
    }
}

/// The memory that a rank exposes to the other ranks in a call.
#[derive(Debug)]
pub enum ExposedRegion<'a> {
    /// No memory.
    Nothing,
    /// Other ranks may read this memory. If the call fails for this rank, their later reads return errors.
    Read(&'a [u8]),
    /// Other ranks may read and write this memory, even long after the call has failed. It belongs to the
    /// call, which [returns it](ShmGroup::reclaim).
    Write(Lent),
}

/// The costs of operations in shared memory, in picoseconds of the rank that performs them. Simulations and
/// predictions use them.
///
/// Other ranks see a signal after the latency of an empty message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCosts {
    /// Cost of a signal.
    pub signal_ps: u64,
    /// Cost of a wait for one rank, without the time until that rank signals.
    pub wait_ps: u64,
    /// Cost of copying one byte: publishing, reading or writing it.
    pub copied_byte_ps: u64,
    /// Cost of viewing one byte and combining it with another.
    pub viewed_byte_ps: u64,
    /// Additional cost of each access to exposed memory; 0 if it is mapped.
    pub attach_ps: u64,
    /// Additional cost of each byte of exposed memory.
    pub attached_byte_ps: u64,
}

impl MemoryCosts {
    /// Returns the cost of copying this many bytes, in picoseconds.
    pub const fn copied(&self, place: MemoryArea, bytes: usize) -> u64 {
        self.attached(place, bytes) + self.copied_byte_ps * bytes as u64
    }

    /// Returns the cost of viewing this many bytes, in picoseconds.
    pub const fn viewed(&self, place: MemoryArea, bytes: usize) -> u64 {
        self.attached(place, bytes) + self.viewed_byte_ps * bytes as u64
    }

    const fn attached(&self, place: MemoryArea, bytes: usize) -> u64 {
        match place {
            MemoryArea::Exposed => self.attach_ps + self.attached_byte_ps * bytes as u64,
            MemoryArea::FlagLine | MemoryArea::EagerBuffer | MemoryArea::Slot(_) => 0,
        }
    }
}
