//! The memory of a link that two processes have mapped: a ring of bytes in each direction, and two fastboxes
//! that go back and forth.
//!
//! The layout is fixed: a page with the counters, each in its own cache lines, two rings, and the fastboxes.
//! A writer publishes bytes by raising a counter, and a reader reads only published bytes. It gives the room
//! back in the same way. The first page also has the words of single-copy sends (`single_copy.rs`).
//!
//! Both processes run this code, and each has authenticated before it got the memory. The types here keep to
//! the counters, so no two sides access the same bytes. A ring has one [`Producer`] and one [`Consumer`], and
//! a fastbox is owned by one side. Only [`create`] and [`open`] make them, once for each side.
#![allow(unsafe_code, reason = "mapped memory cannot be reached otherwise")]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::cursor::{Consumed, Produced};
use crate::cpu::CacheLine;
use crate::cpu::copy_policy::CopyPolicy;
use crate::host_memory::{Core, Mapping, PAGE_BYTES};

/// Bytes of a ring: as many as the L2 cache of a core holds. Bytes that the other side has read are slow to
/// overwrite while they are still in its cache.
pub(crate) const RING_BYTES: usize = 1 << 20;

/// Bytes of a message that a fastbox holds, behind a line with the header.
pub(super) const FASTBOX_BYTES: usize = 64 << 10;

const FASTBOXES_AT: usize = PAGE_BYTES + 2 * RING_BYTES;
/// Bytes of the counter at the start of a fastbox.
const FASTBOX_COUNTER_BYTES: usize = size_of::<u64>();
/// Bytes of a fastbox's header, which follows the counter.
const FASTBOX_HEADER_BYTES: usize = CacheLine::BYTES - FASTBOX_COUNTER_BYTES;
const FASTBOX_STEP: usize = PAGE_BYTES + FASTBOX_BYTES;
const SEGMENT_BYTES: usize = FASTBOXES_AT + 2 * FASTBOX_STEP;

/// Counters are this far apart: two cache lines, which processors fetch together.
const COUNTER_STEP: usize = 128;
const NONCE_AT: usize = 0;
/// The offset of the core word behind the word on which a side sleeps.
const CORE_AT: usize = 4;

/// A random number that identifies a segment.
pub(crate) type Nonce = [u8; 32];

/// The side of a segment: its creator, or the process that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Maker,
    Taker,
}

/// The parts of a segment that one side uses.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) outgoing: Producer,
    pub(super) incoming: Consumer,
    pub(super) fastboxes: Fastboxes,
    pub(super) sleep: Sleep,
}

/// Creates a segment, with the descriptor that lets another process open it.
///
/// The pages of the counters and fastboxes are allocated here, and those of a ring by its writer when it reaches them. They
/// are on the NUMA node of the process that allocates them. Most links carry only small messages, and allocating all pages
/// would take longer than everything else.
pub(super) fn create(nonce: &Nonce) -> io::Result<(OwnedFd, Ends)> {
    let (file, mapping) = Mapping::create(SEGMENT_BYTES)?;
    let grows = match mapping.reserve(0, PAGE_BYTES) {
        Ok(()) => {
            mapping.reserve(FASTBOXES_AT, SEGMENT_BYTES - FASTBOXES_AT)?;
            true
        }
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(error),
        // Linux cannot do this before 5.14.
        Err(_) => {
            mapping.reserve_file(&file)?;
            false
        }
    };
    // SAFETY: no other process has the memory yet.
    unsafe { mapping.copy_in(NONCE_AT, nonce) };
    Ok((file, Ends::of(mapping, Side::Maker, grows)))
}

/// Opens the segment that another process has created. Returns `None` if its nonce is another one.
pub(super) fn open(file: &OwnedFd, nonce: &Nonce) -> io::Result<Option<Ends>> {
    let mapping = Mapping::open(file, SEGMENT_BYTES)?;
    // SAFETY: the nonce was written before the memory was given away, and never is afterwards.
    let found = mapping.filter(|mapping| unsafe { mapping.bytes(NONCE_AT, nonce.len()) } == nonce);
    Ok(found.map(|mapping| {
        // Otherwise the creator has allocated all pages, since it has the same system.
        let grows = mapping.reserve(0, PAGE_BYTES).is_ok();
        Ends::of(mapping, Side::Taker, grows)
    }))
}

impl Ends {
    /// Returns the parts of one side. `grows` is `true` if the pages of the rings are allocated when they are reached.
    fn of(mapping: Mapping, side: Side, grows: bool) -> Self {
        let mapping = Arc::new(mapping);
        let (first, second) = match side {
            Side::Maker => (0, 1),
            Side::Taker => (1, 0),
        };
        Self {
            outgoing: Producer {
                mapping: mapping.clone(),
                ring: Ring(first),
                cursor: Produced::default(),
                reserved: if grows { 0 } else { RING_BYTES },
                copy_policy: CopyPolicy::default(),
            },
            incoming: Consumer { mapping: mapping.clone(), ring: Ring(second), cursor: Consumed::default() },
            fastboxes: Fastboxes::beginning(mapping.clone(), first),
            sleep: Sleep { mapping, mine: first, theirs: second },
        }
    }
}

/// One of the two rings: its counters and its bytes.
#[derive(Debug, Clone, Copy)]
struct Ring(usize);

impl Ring {
    fn produced(self, mapping: &Mapping) -> &AtomicU64 {
        // SAFETY: counters have cache lines of their own on the first page, and are accessed only as
        // counters.
        unsafe { mapping.counter((1 + 2 * self.0) * COUNTER_STEP) }
    }

    fn consumed(self, mapping: &Mapping) -> &AtomicU64 {
        // SAFETY: counters have cache lines of their own on the first page, and are accessed only as
        // counters.
        unsafe { mapping.counter((2 + 2 * self.0) * COUNTER_STEP) }
    }

    /// Returns the word of single-copy sends, which follows the words on which the sides sleep.
    fn single_copy(self, mapping: &Mapping) -> &AtomicU64 {
        // SAFETY: counters have cache lines of their own on the first page, and are accessed only as
        // counters.
        unsafe { mapping.counter((7 + self.0) * COUNTER_STEP) }
    }

    const fn offset(self, position: usize) -> usize {
        PAGE_BYTES + self.0 * RING_BYTES + position
    }
}

/// The counters are invalid: the other side has corrupted the memory.
#[derive(Debug)]
pub(super) struct Broken;

/// The reason why a ring has no room.
#[derive(Debug)]
pub(super) enum NoRoom {
    /// The counters are invalid.
    Broken,
    /// The system has no memory for the pages.
    NoMemory,
}

/// The pages of a ring are allocated in steps of this many bytes.
const RESERVED_STEP: usize = 16 << 10;

/// The writing end of a ring.
#[derive(Debug)]
pub(super) struct Producer {
    mapping: Arc<Mapping>,
    ring: Ring,
    cursor: Produced,
    /// The number of bytes from the start of the ring whose pages are allocated.
    reserved: usize,
    copy_policy: CopyPolicy,
}

impl Producer {
    /// Returns the free bytes of the ring, in whole cache lines. Reads the reader's counter only if fewer than `wanted`
    /// bytes are known to be free. Allocates the pages of `wanted` bytes, and returns only bytes that have pages.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize, NoRoom> {
        let consumed = self.ring.consumed(&self.mapping);
        let room = self.cursor.room(wanted, || consumed.load(Ordering::Acquire)).ok_or(NoRoom::Broken)?;
        if self.reserved == RING_BYTES { Ok(room) } else { self.reserve(room, wanted) }
    }

    /// Allocates the pages of the wanted room. Returns the room that has pages. The ring is written for the first time.
    #[cold]
    fn reserve(&mut self, room: usize, wanted: usize) -> Result<usize, NoRoom> {
        let start = self.cursor.first_lap();
        let end = (start + room.min(wanted)).next_multiple_of(RESERVED_STEP).min(RING_BYTES);
        if end > self.reserved {
            let reserved = self.mapping.reserve(self.ring.offset(self.reserved), end - self.reserved);
            reserved.map_err(|_| NoRoom::NoMemory)?;
            self.reserved = end;
        }
        Ok(if end == RING_BYTES { room } else { room.min(self.reserved - start) })
    }

    /// Writes bytes into the room, `ahead` of the published ones.
    pub(super) fn write(&mut self, ahead: usize, bytes: &[u8]) {
        let [first, second] = self.cursor.places(ahead, bytes.len());
        let (one, two) = bytes.split_at(first.len());
        let Self { mapping, ring, copy_policy, .. } = self;
        // SAFETY: the cursor returns places only in the space that the other side has consumed, and nothing
        // there is published before `publish`; this is the only producer.
        unsafe {
            mapping.fill(ring.offset(first.start), one.len(), &mut |place| copy_policy.copy(one, place))
        };
        if !two.is_empty() {
            // SAFETY: as above.
            unsafe {
                mapping.fill(ring.offset(second.start), two.len(), &mut |place| copy_policy.copy(two, place))
            };
        }
    }

    /// Publishes the next bytes, rounded up to whole cache lines.
    pub(super) fn publish(&mut self, bytes: usize) {
        let count = self.cursor.advance(bytes.next_multiple_of(CacheLine::BYTES));
        self.ring.produced(&self.mapping).store(count, Ordering::Release);
    }

    /// Skips a cache line for a message in a fastbox, and returns the counter behind it. The next publication
    /// includes it.
    pub(super) fn skip(&mut self) -> u64 {
        self.cursor.advance(CacheLine::BYTES)
    }

    /// Returns the word of single-copy sends in this direction.
    pub(super) fn single_copy(&self) -> &AtomicU64 {
        self.ring.single_copy(&self.mapping)
    }
}

/// The reading end of a ring.
#[derive(Debug)]
pub(super) struct Consumer {
    mapping: Arc<Mapping>,
    ring: Ring,
    cursor: Consumed,
}

impl Consumer {
    /// Returns the oldest bytes, at most `max` and contiguous. Returns none if none have arrived. All pieces
    /// of a message except the last are whole, aligned cache lines.
    pub(super) fn peek(&mut self, max: usize) -> Result<&[u8], Broken> {
        let produced = self.ring.produced(&self.mapping);
        let place = self.cursor.next(max, || produced.load(Ordering::Acquire)).ok_or(Broken)?;
        // SAFETY: the cursor gives places only of what is published and not yet left behind: the other side writes there once
        // it has been, by `advance`, which needs `self` exclusively.
        Ok(unsafe { self.mapping.bytes(self.ring.offset(place.start), place.len()) })
    }

    /// Consumes this many bytes, rounded up to whole cache lines. Returns `true` if the producer got new room.
    pub(super) fn advance(&mut self, bytes: usize) -> bool {
        let given_back = self.cursor.advance(bytes.next_multiple_of(CacheLine::BYTES));
        if let Some(count) = given_back {
            self.ring.consumed(&self.mapping).store(count, Ordering::Release);
        }
        given_back.is_some()
    }

    /// Returns the counter behind the next cache line.
    pub(super) const fn next(&self) -> u64 {
        self.cursor.next_grain()
    }

    /// Consumes a cache line that the producer has skipped. Returns `true` if the producer got new room.
    pub(super) fn skip(&mut self) -> bool {
        self.cursor.skip();
        self.advance(CacheLine::BYTES)
    }

    /// Returns the word of single-copy sends in this direction.
    pub(super) fn single_copy(&self) -> &AtomicU64 {
        self.ring.single_copy(&self.mapping)
    }
}

/// The two fastboxes of a link: mailboxes for one small message each. Each side owns one at first. A message
/// is sent in the fastbox that its sender has owned for longest; the receiver then owns it. Both sides
/// therefore know the next fastbox.
///
/// A core writes lines quickly if it has just read them from another core, and slowly if they are its own and
/// others have read them since. With two fastboxes the writes are quick even if both sides send at the same
/// time. Only the owner accesses a fastbox.
///
/// The first line of a fastbox holds its counter and the header of the message. The counter is the ring's
/// counter behind a skipped cache line, which represents the message, and includes the number of the ring.
/// Messages in fastboxes and in the ring therefore keep their order, and a small message moves only its own
/// lines.
#[derive(Debug)]
pub(super) struct Fastboxes {
    mapping: Arc<Mapping>,
    /// The number of this side's ring. Counters are whole cache lines, so their low bits have room for it.
    ring: usize,
    /// The fastboxes that this side owns, then those of the peer, each in the order of use.
    order: [usize; 2],
    /// The number of fastboxes that this side owns.
    here: usize,
    /// `true` if the message in the last received fastbox is still needed.
    occupied: bool,
}

impl Fastboxes {
    const fn beginning(mapping: Arc<Mapping>, own: usize) -> Self {
        Self { mapping, ring: own, order: [own, 1 - own], here: 1, occupied: false }
    }

    const fn offset(&self, place: usize) -> usize {
        FASTBOXES_AT + self.order[place] * FASTBOX_STEP
    }

    /// Returns `true` if a fastbox is free for a message of this many bytes.
    pub(super) fn takes(&self, bytes: usize) -> bool {
        self.here > usize::from(self.occupied) && bytes <= FASTBOX_BYTES
    }

    /// Writes bytes into the fastbox that is sent next.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(self.takes(at + bytes.len()), "a fastbox is here and has room");
        // SAFETY: this side has the fastbox, so the other does not reach into it.
        unsafe { self.mapping.copy_in(self.offset(0) + CacheLine::BYTES + at, bytes) };
    }

    /// Hands the written fastbox to the peer, with the header and the counter behind the skipped cache line.
    pub(super) fn hand_over(&mut self, about: &[u8], count: u64) {
        assert!(about.len() == FASTBOX_HEADER_BYTES, "it fills the line");
        let offset = self.offset(0);
        // SAFETY: this side has the fastbox, so the other does not reach into it but for the counter.
        unsafe { self.mapping.copy_in(offset + FASTBOX_COUNTER_BYTES, about) };
        self.counter(offset).store(count | self.ring as u64, Ordering::Release);
        self.order = [self.order[1], self.order[0]];
        self.here -= 1;
    }

    /// Returns the header of the next message, if it has arrived in a fastbox: the one with this counter.
    pub(super) fn look(&self, count: u64) -> Option<&[u8]> {
        if self.here == 2 {
            return None;
        }
        let offset = self.offset(self.here);
        let theirs = count | (1 - self.ring) as u64;
        let come = self.counter(offset).load(Ordering::Acquire) == theirs;
        // SAFETY: the fastbox has come, so this side has it, and the other does not write there.
        come.then(|| unsafe { self.mapping.bytes(offset + FASTBOX_COUNTER_BYTES, FASTBOX_HEADER_BYTES) })
    }

    /// Returns the counter of the fastbox at this offset.
    fn counter(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the first eight bytes of a fastbox are reached as a counter only.
        unsafe { self.mapping.counter(offset) }
    }

    /// Takes the fastbox that has just arrived.
    pub(super) fn receive(&mut self) {
        assert!(self.here < 2 && !self.occupied, "messages come one after the other");
        self.here += 1;
        self.occupied = true;
    }

    /// Returns bytes of the last received message.
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(self.occupied && range.end <= FASTBOX_BYTES, "a message of that length has come");
        // SAFETY: this side has the fastbox, and hands it over only with `self` borrowed exclusively.
        unsafe {
            self.mapping.bytes(self.offset(self.here - 1) + CacheLine::BYTES + range.start, range.len())
        }
    }

    /// Marks the message as delivered.
    pub(super) const fn clear(&mut self) {
        self.occupied = false;
    }
}

/// The sleep flags of both sides, so that a side wakes only a sleeping peer.
///
/// A side announces that it sleeps and then checks the counters once more. The other side raises a counter
/// and then checks whether the peer sleeps. With a full fence between the two steps on both sides, one of
/// them sees the other.
#[derive(Debug)]
pub(super) struct Sleep {
    mapping: Arc<Mapping>,
    mine: usize,
    theirs: usize,
}

impl Sleep {
    /// Returns the word on which a side sleeps.
    fn word(&self, side: usize) -> &AtomicU32 {
        // SAFETY: the words have cache lines of their own on the first page, and are accessed only as words.
        unsafe { self.mapping.word((5 + side) * COUNTER_STEP) }
    }

    /// Returns the core that a side was on when it last waited; 0 before that.
    fn core(&self, side: usize) -> &AtomicU32 {
        // SAFETY: as for `word`.
        unsafe { self.mapping.word((5 + side) * COUNTER_STEP + CORE_AT) }
    }

    /// Returns `true` if the other side last waited on the core of this side. Records the core of this side.
    pub(super) fn shares_core(&self) -> bool {
        Core::record(self.core(self.mine)).is_recorded(self.core(self.theirs))
    }

    /// Announces that this side is about to sleep. It checks the counters once more before it does.
    pub(super) fn begin(&self) {
        self.word(self.mine).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Announces that this side is awake.
    pub(super) fn end(&self) {
        self.word(self.mine).store(0, Ordering::Relaxed);
    }

    /// Returns `true` if the other side has to be woken, after a counter was raised. Only the first call
    /// returns `true`.
    pub(super) fn is_to_be_woken(&self) -> bool {
        let sleeping = self.word(self.theirs);
        fence(Ordering::SeqCst);
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::AcqRel) != 0
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
