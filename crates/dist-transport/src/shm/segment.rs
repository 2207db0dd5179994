//! Memory that two processes have mapped, with a ring of bytes in each direction: all unsafe code of this crate.
//!
//! The layout is fixed: a page with the counters, each in a cache line of its own, and two rings. What is written is
//! published by raising a counter, and only what is published is read; what was read is given back in the same way.
//! Both processes run this code, which every one of them has proven before it was given the memory.
#![allow(unsafe_code, reason = "mapped memory cannot be reached otherwise")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::cursor::{Consumed, Produced};
use crate::Grain;

/// Bytes of a ring.
pub(super) const RING_BYTES: usize = 256 << 10;

const PAGE_BYTES: usize = 4096;
const SEGMENT_BYTES: usize = PAGE_BYTES + 2 * RING_BYTES;

/// Counters lie this far apart: two cache lines, which processors fetch together.
const COUNTER_STEP: usize = 128;
const NONCE_AT: usize = 0;

/// What tells one segment from every other.
pub(super) type Nonce = [u8; 32];

/// Who made the segment, or was given it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Maker,
    Taker,
}

/// What a side does with a segment.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) outgoing: Producer,
    pub(super) incoming: Consumer,
    pub(super) sleep: Sleep,
}

/// Makes a segment, with the descriptor that lets another process open it.
pub(super) fn create(nonce: &Nonce) -> io::Result<(OwnedFd, Ends)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("dist", flags)?;
    // Without its pages the first store would end the process where memory is short.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, SEGMENT_BYTES as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Mapping::new(&file)?;
    mapping.copy_in(NONCE_AT, nonce);
    Ok((file, mapping.ends(Side::Maker)))
}

/// Opens the segment that another process has made: `None` if it is not the one with this nonce.
pub(super) fn open(file: &OwnedFd, nonce: &Nonce) -> io::Result<Option<Ends>> {
    let seals = rustix::fs::fcntl_get_seals(file)?;
    let size = rustix::fs::fstat(file)?.st_size;
    // A file that could still shrink would let the other side end this process.
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) || usize::try_from(size) != Ok(SEGMENT_BYTES) {
        return Ok(None);
    }
    let mapping = Mapping::new(file)?;
    let found = mapping.bytes(NONCE_AT, nonce.len()) == nonce;
    Ok(found.then(|| mapping.ends(Side::Taker)))
}

/// A mapping of a whole segment; unmapped when it is dropped.
#[derive(Debug)]
struct Mapping(NonNull<u8>);

// SAFETY: the mapping belongs to the process, not to a thread; its counters are atomic, and its bytes are reached
// through `Producer` and `Consumer` only, which take `&mut self`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &impl AsFd) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses a place where nothing is mapped, and the file is `SEGMENT_BYTES` long and
        // sealed against shrinking, as both callers have made sure.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), SEGMENT_BYTES, protection, MapFlags::SHARED, file, 0)
        }?;
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn ends(self, side: Side) -> Ends {
        let mapping = Arc::new(self);
        let (first, second) = match side {
            Side::Maker => (0, 1),
            Side::Taker => (1, 0),
        };
        Ends {
            outgoing: Producer { mapping: mapping.clone(), ring: Ring(first), cursor: Produced::default() },
            incoming: Consumer { mapping: mapping.clone(), ring: Ring(second), cursor: Consumed::default() },
            sleep: Sleep { mapping, mine: first, theirs: second },
        }
    }

    /// A place in the segment from where `len` bytes lie inside it.
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset <= SEGMENT_BYTES && len <= SEGMENT_BYTES - offset, "outside the segment");
        // SAFETY: the mapping is `SEGMENT_BYTES` long and `offset` is at most that, as just checked.
        unsafe { self.0.add(offset) }
    }

    fn counter(&self, number: usize) -> &AtomicU64 {
        let place = self.at((1 + number) * COUNTER_STEP, size_of::<AtomicU64>());
        // SAFETY: the place is inside the mapping, which lives as long as `self`, and aligned, since a page is and
        // `COUNTER_STEP` is a multiple of 8; both processes reach it as an `AtomicU64` only.
        unsafe { place.cast().as_ref() }
    }

    /// The word that says whether a side sleeps: behind the counters of the rings.
    fn sleeping(&self, side: usize) -> &AtomicU32 {
        let place = self.at((5 + side) * COUNTER_STEP, size_of::<AtomicU32>());
        // SAFETY: as for `counter`; both processes reach it as an `AtomicU32` only.
        unsafe { place.cast().as_ref() }
    }

    /// Bytes that nobody writes while they are borrowed: the caller's counters say so.
    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        let place = self.at(offset, len);
        // SAFETY: the place and `len` bytes behind it are inside the mapping and initialised, by the system if by
        // nobody else; the other side writes only what is not published, and gets it back after the borrow.
        unsafe { slice::from_raw_parts(place.as_ptr(), len) }
    }

    /// Writes bytes that nobody reads yet: the caller's counters say so.
    fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let place = self.at(offset, bytes.len());
        // SAFETY: the place and as many bytes behind it are inside the mapping; a borrowed slice cannot overlap them,
        // as `bytes` lends from it only what is published, and the other side reads only that too.
        unsafe { place.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing borrows from the mapping any more, since all that does borrows `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), SEGMENT_BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own can be unmapped");
    }
}

/// One of the two rings: its counters and its bytes.
#[derive(Debug, Clone, Copy)]
struct Ring(usize);

impl Ring {
    fn produced(self, mapping: &Mapping) -> &AtomicU64 {
        mapping.counter(2 * self.0)
    }

    fn consumed(self, mapping: &Mapping) -> &AtomicU64 {
        mapping.counter(2 * self.0 + 1)
    }

    const fn offset(self, position: usize) -> usize {
        PAGE_BYTES + self.0 * RING_BYTES + position
    }
}

/// The counters make no sense: the other side has broken the memory.
#[derive(Debug)]
pub(super) struct Broken;

/// The end of a ring that bytes go into.
#[derive(Debug)]
pub(super) struct Producer {
    mapping: Arc<Mapping>,
    ring: Ring,
    cursor: Produced,
}

impl Producer {
    /// How many bytes there is room for, if `wanted` are to be written; whole grains.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize, Broken> {
        let consumed = self.ring.consumed(&self.mapping);
        self.cursor.room(wanted, || consumed.load(Ordering::Acquire)).ok_or(Broken)
    }

    /// Writes bytes into the room, `ahead` of what is published.
    pub(super) fn write(&mut self, ahead: usize, bytes: &[u8]) {
        let [first, second] = self.cursor.places(ahead, bytes.len());
        let (one, two) = bytes.split_at(first.len());
        self.mapping.copy_in(self.ring.offset(first.start), one);
        if !two.is_empty() {
            self.mapping.copy_in(self.ring.offset(second.start), two);
        }
    }

    /// Hands over the next bytes, rounded up to whole grains.
    pub(super) fn publish(&mut self, bytes: usize) {
        let count = self.cursor.advance(bytes.next_multiple_of(Grain::BYTES));
        self.ring.produced(&self.mapping).store(count, Ordering::Release);
    }
}

/// The end of a ring that bytes come out of.
#[derive(Debug)]
pub(super) struct Consumer {
    mapping: Arc<Mapping>,
    ring: Ring,
    cursor: Consumed,
}

impl Consumer {
    /// The oldest bytes, at most `max` and as far as they lie side by side; none if none have come. All but the last
    /// of a message are whole grains, aligned as such.
    pub(super) fn peek(&mut self, max: usize) -> Result<&[u8], Broken> {
        let produced = self.ring.produced(&self.mapping);
        let place = self.cursor.next(max, || produced.load(Ordering::Acquire)).ok_or(Broken)?;
        Ok(self.mapping.bytes(self.ring.offset(place.start), place.len()))
    }

    /// Leaves these bytes behind, rounded up to whole grains; `true` if room was given back.
    pub(super) fn advance(&mut self, bytes: usize) -> bool {
        let given_back = self.cursor.advance(bytes.next_multiple_of(Grain::BYTES));
        if let Some(count) = given_back {
            self.ring.consumed(&self.mapping).store(count, Ordering::Release);
        }
        given_back.is_some()
    }
}

/// Whether the sides sleep, so that whoever moves something rings only for one that does.
///
/// A side says that it sleeps and then looks at the counters once more; the other raises a counter and then looks
/// whether somebody sleeps. With a full fence between the two on both sides, one of them sees the other.
#[derive(Debug)]
pub(super) struct Sleep {
    mapping: Arc<Mapping>,
    mine: usize,
    theirs: usize,
}

impl Sleep {
    /// Says that this side is about to sleep. It looks at the counters once more before it does.
    pub(super) fn begin(&self) {
        self.mapping.sleeping(self.mine).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that this side is awake.
    pub(super) fn end(&self) {
        self.mapping.sleeping(self.mine).store(0, Ordering::Relaxed);
    }

    /// Whether the other side has to be woken, after a counter was raised. Only the first to ask is told so.
    pub(super) fn is_to_be_woken(&self) -> bool {
        let sleeping = self.mapping.sleeping(self.theirs);
        fence(Ordering::SeqCst);
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::AcqRel) != 0
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
