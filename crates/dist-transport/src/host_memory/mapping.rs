//! Shared memory mapped by several processes.
//!
//! The users of this module decide what lies where, who writes when, and how others learn of it. Loads and
//! stores of two processes meet here as in hardware, and only atomic counters order them. Access to a segment
//! is therefore `unsafe` here. It is safe only in types that keep the order themselves: the ends of a ring
//! and the fastboxes (`segment.rs`), the flag lines of a group (`group.rs`), and regions of the heap.
//!
//! All processes that map a segment are assumed to run this crate and to write nothing else there. Each has
//! authenticated before it got the segment.
#![allow(unsafe_code, reason = "mapped memory cannot be reached otherwise")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use smallvec::SmallVec;

use super::PAGE_BYTES;
use super::address_colouring::{self, HASHED_BYTES};
use crate::cpu::CacheLine;
use crate::cpu::copy_policy::copy_to_reader;
use crate::shm_group::{CHANGED_MAX, ViewedMemory, WordSize, WordUpdate};

/// Performs a [`WordUpdate`] on the atomic integer at a pointer, and returns the value from before. The pointer is
/// aligned and valid, and the integer is accessed by atomic operations of this size only.
macro_rules! updated {
    ($atomic:ty, $place:expr, $update:expr) => {{
        // SAFETY: as the users of this macro state.
        let word = unsafe { <$atomic>::from_ptr($place.cast()) };
        match $update {
            WordUpdate::Add(amount) => u64::from(word.fetch_add(amount as _, Ordering::SeqCst)),
            WordUpdate::CompareAndSwap { expected, new } => {
                let swapped =
                    word.compare_exchange(expected as _, new as _, Ordering::SeqCst, Ordering::SeqCst);
                u64::from(swapped.unwrap_or_else(|other| other))
            }
        }
    }};
}

/// Stores bytes by one atomic store for each integer, from a pointer on. The pointer is as in [`updated`].
macro_rules! stored {
    ($atomic:ty, $integer:ty, $place:expr, $bytes:expr) => {
        for (index, bytes) in $bytes.as_chunks().0.iter().enumerate() {
            // SAFETY: as the users of this macro state.
            let word = unsafe { <$atomic>::from_ptr($place.cast::<$integer>().wrapping_add(index)) };
            word.store(<$integer>::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    };
}

/// A mapping of a whole segment. Clones are the same mapping; dropping the last one unmaps the segment.
#[derive(Debug, Clone)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    _space: Arc<Space>,
}

// SAFETY: the mapping belongs to the process, not to a thread; its counters are atomic, and its bytes are reached as
// those who own the counters allow each other to.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates a zeroed segment, with the descriptor that lets another process open it. Each page is allocated on first
    /// touch, or by [`reserve`](Self::reserve).
    pub(crate) fn create(len: usize) -> io::Result<(OwnedFd, Self)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("dist", flags)?;
        let size = len as u64;
        // Beyond the file size limit, the system would end the process by a signal.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < size) {
            return Err(Errno::FBIG.into());
        }
        retry_on_intr(|| rustix::fs::ftruncate(&file, size))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Self::new(&file, len)?;
        Ok((file, mapping))
    }

    /// Opens the segment that another process has created. Returns `None` if the file is no segment of this
    /// size.
    pub(crate) fn open(file: &OwnedFd, len: usize) -> io::Result<Option<Self>> {
        let seals = rustix::fs::fcntl_get_seals(file)?;
        let size = rustix::fs::fstat(file)?.st_size;
        // A file that could still shrink would let the other side end this process.
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) || usize::try_from(size) != Ok(len) {
            return Ok(None);
        }
        #[cfg(dist_one_mapping)]
        if let Some(known) = one_mapping::find(file, len)? {
            return Ok(Some(known));
        }
        Self::new(file, len).map(Some)
    }

    fn new(file: &impl AsFd, len: usize) -> io::Result<Self> {
        let room = if len < HASHED_BYTES { 0 } else { HASHED_BYTES };
        let space = Space::reserve(len.checked_add(room).ok_or(io::ErrorKind::OutOfMemory)?)?;
        let address = space.start.addr().get();
        let ahead = if room == 0 { 0 } else { address_colouring::next_colour().wrapping_sub(address) % room };
        // SAFETY: the space is `room` longer than the segment, and `ahead` less than that, or 0.
        let start = unsafe { space.start.add(ahead) };
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: what this replaces is part of the space, which is this mapping's alone: `ahead` is a number of pages, as the
        // beginnings are, so that the last page is within the space too. The file is `len` long and sealed against
        // shrinking, as both callers have made sure.
        let mapped = unsafe { rustix::mm::mmap(start.as_ptr().cast(), len, protection, flags, file, 0) };
        if let Err(error) = mapped {
            // The replaced mapping may be gone, and its addresses may belong to another mapping by now.
            std::mem::forget(space);
            return Err(error.into());
        }
        let mapping = Self { start, len, _space: Arc::new(space) };
        #[cfg(dist_one_mapping)]
        one_mapping::keep(file, &mapping)?;
        Ok(mapping)
    }

    /// Allocates the pages of `len` bytes from `offset` on, as the first store to each of them would. If memory is short,
    /// a store would end the process.
    ///
    /// # Errors
    /// If memory is short, with the kind [`OutOfMemory`](io::ErrorKind::OutOfMemory). If the system cannot do it.
    pub(crate) fn reserve(&self, offset: usize, len: usize) -> io::Result<()> {
        let place = self.at(offset, len).as_ptr().cast();
        // SAFETY: the pages are inside the mapping. Allocating them does not change their bytes.
        let reserved =
            retry_on_intr(|| unsafe { rustix::mm::madvise(place, len, Advice::LinuxPopulateWrite) });
        match reserved {
            // The system reports this where a store would be answered with a signal.
            Err(Errno::FAULT) => Err(Errno::NOMEM.into()),
            reserved => Ok(reserved?),
        }
    }

    /// Allocates all pages of the segment, through the descriptor with which it was created.
    pub(crate) fn reserve_file(&self, file: &impl AsFd) -> io::Result<()> {
        let size = self.len as u64;
        Ok(retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size))?)
    }

    /// Returns `true` if `len` bytes from `offset` on are inside the segment.
    #[inline]
    pub(crate) const fn holds(&self, offset: usize, len: usize) -> bool {
        offset <= self.len && len <= self.len - offset
    }

    /// Returns a pointer to `len` bytes inside the segment.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        if !self.holds(offset, len) {
            outside_segment();
        }
        // SAFETY: the mapping is `self.len` long and `offset` is at most that, as just checked.
        unsafe { self.start.add(offset) }
    }

    /// Returns an atomic counter.
    ///
    /// # Safety
    /// All processes access these eight bytes as an `AtomicU64` only.
    #[inline]
    pub(crate) unsafe fn counter(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as the caller has promised.
        let [counter] = unsafe { self.counters(offset) };
        counter
    }

    /// Returns consecutive atomic counters.
    ///
    /// # Safety
    /// All processes access these bytes as `AtomicU64` only.
    #[inline]
    pub(crate) unsafe fn counters<const COUNT: usize>(&self, offset: usize) -> &[AtomicU64; COUNT] {
        assert!(offset.is_multiple_of(align_of::<AtomicU64>()), "counters are aligned");
        let place = self.at(offset, size_of::<[AtomicU64; COUNT]>());
        // SAFETY: the place is inside the mapping, which lives as long as `self`, and aligned, since a page is and
        // `offset` was checked; the caller has promised the rest.
        unsafe { place.cast().as_ref() }
    }

    /// Returns a 32-bit word of the mapping as an atomic, for example for a futex.
    ///
    /// # Safety
    /// All processes access these four bytes as an `AtomicU32` only.
    #[inline]
    pub(crate) unsafe fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(align_of::<AtomicU32>()), "words are aligned");
        let place = self.at(offset, size_of::<AtomicU32>());
        // SAFETY: as for `counter`.
        unsafe { place.cast().as_ref() }
    }

    /// Returns bytes of the segment.
    ///
    /// # Safety
    /// Nobody writes them while they are borrowed, in this process or another: counters order the borrow and
    /// the writes.
    #[inline]
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        let place = self.at(offset, len);
        // SAFETY: the place and `len` bytes behind it are inside the mapping and initialised, by the system if by
        // nobody else; the caller has promised that nobody writes them.
        unsafe { slice::from_raw_parts(place.as_ptr(), len) }
    }

    /// Prefetches bytes for reading, if the processor supports it.
    #[inline]
    pub(crate) fn fetch(&self, offset: usize, len: usize) {
        self.lines(offset, len).for_each(ahead::fetch);
    }

    /// Prefetches bytes for writing: no other core has their lines then.
    #[inline]
    pub(crate) fn claim(&self, offset: usize, len: usize) {
        self.lines(offset, len).for_each(ahead::claim);
    }

    #[inline]
    fn lines(&self, offset: usize, len: usize) -> impl Iterator<Item = *const u8> {
        let place = self.at(offset, len).as_ptr();
        (0..len).step_by(CacheLine::BYTES).map(move |line| place.wrapping_add(line).cast_const())
    }

    /// Calls `write` with bytes of the segment.
    ///
    /// # Safety
    /// Nobody else reads or writes them meanwhile, in this process or another.
    pub(crate) unsafe fn fill(&self, offset: usize, len: usize, write: &mut dyn FnMut(&mut [u8])) {
        let place = self.at(offset, len);
        // SAFETY: as for `bytes`; the caller has promised that nobody else reaches them.
        write(unsafe { slice::from_raw_parts_mut(place.as_ptr(), len) });
    }

    /// Copies bytes into the segment.
    ///
    /// # Safety
    /// Nobody reads the bytes meanwhile. If somebody else writes them meanwhile, nobody reads them until they
    /// are written again.
    #[inline]
    pub(crate) unsafe fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let place = self.at(offset, bytes.len());
        // SAFETY: the place and as many bytes behind it are inside the mapping; a borrowed slice cannot overlap them, as
        // `bytes` are written by nobody. The caller has promised the rest.
        copy_to_reader(bytes, unsafe { slice::from_raw_parts_mut(place.as_ptr(), bytes.len()) });
    }

    /// Stores words into the segment, each by one atomic store.
    ///
    /// # Safety
    /// All processes access these words as `AtomicU64` only.
    #[inline]
    pub(crate) unsafe fn store<const WORDS: usize>(&self, offset: usize, words: [u64; WORDS]) {
        // SAFETY: as the caller has promised.
        let counters = unsafe { self.counters::<WORDS>(offset) };
        counters.iter().zip(words).for_each(|(counter, word)| counter.store(word, Ordering::Relaxed));
    }

    /// Loads words from the segment, each by one atomic load.
    ///
    /// # Safety
    /// All processes access these words as `AtomicU64` only.
    #[inline]
    pub(crate) unsafe fn load<const WORDS: usize>(&self, offset: usize) -> [u64; WORDS] {
        // SAFETY: as the caller has promised.
        let counters = unsafe { self.counters::<WORDS>(offset) };
        std::array::from_fn(|index| counters[index].load(Ordering::Relaxed))
    }

    /// Performs an atomic operation on a word, and returns the value from before. Returns `None` if the word is not
    /// aligned.
    ///
    /// # Safety
    /// As long as other processes may access the word, all access it by atomic operations of this size.
    #[allow(clippy::cast_possible_truncation, reason = "the low bits of a number are the word")]
    pub(crate) unsafe fn update_word(
        &self,
        offset: usize,
        size: WordSize,
        update: WordUpdate,
    ) -> Option<u64> {
        // Aligned and inside the mapping. The caller has promised the rest.
        let place = self.words(offset, size.bytes(), size)?;
        Some(match size {
            WordSize::One => updated!(AtomicU8, place, update),
            WordSize::Two => updated!(AtomicU16, place, update),
            WordSize::Four => updated!(AtomicU32, place, update),
            WordSize::Eight => updated!(AtomicU64, place, update),
        })
    }

    /// Stores bytes by one atomic store for each word. Returns `None` if the words are not aligned or not whole.
    ///
    /// # Safety
    /// As for [`update_word`](Self::update_word).
    pub(crate) unsafe fn store_words(&self, offset: usize, size: WordSize, bytes: &[u8]) -> Option<()> {
        // Aligned and inside the mapping. The caller has promised the rest.
        let place = self.words(offset, bytes.len(), size)?;
        match size {
            WordSize::One => stored!(AtomicU8, u8, place, bytes),
            WordSize::Two => stored!(AtomicU16, u16, place, bytes),
            WordSize::Four => stored!(AtomicU32, u32, place, bytes),
            WordSize::Eight => stored!(AtomicU64, u64, place, bytes),
        }
        Some(())
    }

    /// Returns a pointer to these bytes if they are whole aligned words inside the segment.
    fn words(&self, offset: usize, len: usize, size: WordSize) -> Option<*mut u8> {
        let fits = self.holds(offset, len) && len.is_multiple_of(size.bytes());
        let place = self.start.as_ptr().wrapping_add(offset);
        (fits && place.addr().is_multiple_of(size.bytes())).then_some(place)
    }

    /// Makes the pages of these bytes private to this process. They keep their content; later writes are
    /// visible to this process only, and other mappings keep the old bytes.
    ///
    /// # Safety
    /// No thread of this process writes these pages meanwhile, and nobody else does from here on.
    pub(crate) unsafe fn detach(&self, file: &impl AsFd, offset: usize, len: usize) {
        if cfg!(dist_one_mapping) {
            // There is no other mapping that could keep the old bytes.
            return;
        }
        let start = offset / PAGE_BYTES * PAGE_BYTES;
        let end = (offset + len).next_multiple_of(PAGE_BYTES).min(self.len);
        let place = self.at(start, end - start).as_ptr().cast();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: what this replaces are pages of this mapping, by the same bytes of the same file, copied when they are written.
        let mapped = unsafe { rustix::mm::mmap(place, end - start, protection, flags, file, start as u64) };
        if let Err(error) = mapped {
            // The bytes that others read would change, or nothing is mapped there any more.
            tracing::error!(%error, "memory that others read cannot be kept for them after a failed call");
            std::process::abort();
        }
    }

    /// Returns whole pages among these bytes to the system. They read as zeros from then on.
    ///
    /// # Safety
    /// Nobody else reads or writes the bytes meanwhile, in this process or another.
    pub(crate) unsafe fn return_pages(&self, range: Range<usize>) {
        let start = range.start.next_multiple_of(PAGE_BYTES);
        let len = (range.end / PAGE_BYTES * PAGE_BYTES).saturating_sub(start);
        let place = self.at(start, len).as_ptr().cast();
        // SAFETY: the pages are part of this mapping, and the caller has promised that nobody uses them.
        let returned = unsafe { rustix::mm::madvise(place, len, Advice::LinuxRemove) };
        if let Err(error) = returned {
            tracing::debug!(%error, "free memory of groups is kept");
        }
    }

    /// Returns the offset of these bytes in the segment, if they are inside.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<usize> {
        let offset = bytes.as_ptr().addr().checked_sub(self.start.addr().get())?;
        (offset <= self.len && bytes.len() <= self.len - offset).then_some(offset)
    }
}

/// Bytes of a segment that another rank has exposed for reading.
#[derive(Debug)]
pub(super) struct MappedView {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl MappedView {
    pub(super) const fn new(mapping: Arc<Mapping>, offset: usize, len: usize) -> Self {
        Self { mapping, offset, len }
    }
}

impl ViewedMemory for MappedView {
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: as the caller has promised.
        unsafe { self.mapping.bytes(self.offset, self.len) }
    }
}

#[cfg(test)]
impl Mapping {
    /// Returns the first bytes of the segment, for tests that fill it before they share it.
    pub(crate) fn first_bytes(&self) -> [u8; 16] {
        // SAFETY: tests do not write meanwhile.
        unsafe { self.bytes(0, 16) }.try_into().expect("as many bytes")
    }
}

/// One mapping of each segment for all ranks of this process, because race detectors compare addresses.
#[cfg(dist_one_mapping)]
mod one_mapping {
    use std::collections::BTreeMap;
    use std::sync::{Mutex, PoisonError, Weak};

    use super::{Arc, AsFd, Mapping, NonNull, Space, io};

    /// The mapped segments, by device and inode.
    static ALL: Mutex<BTreeMap<(u64, u64), (Weak<Space>, usize)>> = Mutex::new(BTreeMap::new());

    fn key(file: &impl AsFd) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(file)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    pub(crate) fn find(file: &impl AsFd, len: usize) -> io::Result<Option<Mapping>> {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.get(&key(file)?).and_then(|(space, start)| Some((space.upgrade()?, *start)));
        Ok(known.map(|(space, start)| {
            let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start)).expect("it is mapped");
            Mapping { start, len, _space: space }
        }))
    }

    pub(crate) fn keep(file: &impl AsFd, mapping: &Mapping) -> io::Result<()> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(key(file)?, (Arc::downgrade(&mapping._space), mapping.start.as_ptr().expose_provenance()));
        Ok(())
    }
}

/// A range of addresses of this process, with whatever is mapped there. Dropping it unmaps the range.
#[derive(Debug)]
struct Space {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: addresses belong to the process, not to a thread, and only the last owner unmaps them.
unsafe impl Send for Space {}
// SAFETY: as above; a shared reference gives no access to what is mapped.
unsafe impl Sync for Space {}

impl Space {
    /// Reserves this many addresses without access.
    fn reserve(len: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: the system chooses a place where nothing is mapped.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: the addresses are this space's since it was reserved: where they may have been lost it is forgotten. Nothing
        // gets from what is mapped there any more, since all that does gets the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "what is mapped here can be unmapped");
    }
}

/// Panics out of line, because every access checks its range.
#[cold]
#[inline(never)]
fn outside_segment() -> ! {
    panic!("outside the segment")
}

/// Calls `change` with equally long ranges of several mappings.
///
/// # Panics
/// If two ranges in one mapping overlap.
///
/// # Safety
/// Nobody else reads or writes the bytes meanwhile. No two of the mappings are of one segment, unless they
/// are the same mapping.
pub(crate) unsafe fn change<'a>(
    places: impl Iterator<Item = (&'a Mapping, usize)>,
    len: usize,
    change: &mut dyn FnMut(&mut [&mut [u8]]),
) {
    let mut all: SmallVec<[&mut [u8]; CHANGED_MAX]> = SmallVec::new();
    for (mapping, offset) in places {
        let place = mapping.at(offset, len);
        let start = place.addr().get();
        let is_disjoint = |other: &[u8]| start.abs_diff(other.as_ptr().addr()) >= len;
        assert!(all.iter().all(|other| is_disjoint(other)), "places that are changed at once overlap");
        // SAFETY: as for `fill`, and none of these places overlaps another: not in one mapping, as just checked, and not in
        // two, as the caller has promised.
        all.push(unsafe { slice::from_raw_parts_mut(place.as_ptr(), len) });
    }
    change(&mut all);
}

/// Copies with non-temporal stores, except for the bytes before the first aligned vector.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy_non_temporal(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "what is copied has one length");
    let head = into.as_ptr().align_offset(stream::ALIGNMENT).min(into.len());
    let ((first, from), (before, into)) = (from.split_at(head), into.split_at_mut(head));
    before.copy_from_slice(first);
    let streamed = stream::copy(NonNull::from(&mut *into).cast(), from);
    into[streamed..].copy_from_slice(&from[streamed..]);
}

/// Bytes of a segment with one exclusive owner, except while it lends them.
#[derive(Debug)]
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl Region {
    /// Creates a region of these bytes.
    ///
    /// # Safety
    /// In this process nobody else accesses the bytes while the region lives. Other processes write there
    /// only while the owner has lent the region to a call and does not access it itself. They read there only
    /// bytes that the owner does not write.
    pub(crate) unsafe fn new(mapping: Arc<Mapping>, offset: usize, len: usize) -> Self {
        mapping.at(offset, len);
        Self { mapping, offset, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the region is borrowed, so its owner does not write there, nor has it lent it to others who do.
        unsafe { self.mapping.bytes(self.offset, self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let place = self.mapping.at(self.offset, self.len);
        // SAFETY: the bytes are inside the mapping, which `self` keeps; the region is borrowed exclusively, and nobody else
        // reaches them, as was promised when it was made.
        unsafe { slice::from_raw_parts_mut(place.as_ptr(), self.len) }
    }
}

/// Prefetch instructions. They change nothing that a program can see.
#[cfg(target_arch = "x86_64")]
mod ahead {
    use std::arch::asm;
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

    #[inline]
    pub(crate) fn fetch(line: *const u8) {
        // SAFETY: every processor of this architecture has the instruction, and takes any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }

    #[inline]
    pub(crate) fn claim(line: *const u8) {
        // SAFETY: a processor that does not know the instruction does nothing, and the others take any address.
        unsafe { asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod ahead {
    pub(crate) fn fetch(_: *const u8) {}

    pub(crate) fn claim(_: *const u8) {}
}

/// Copies by `rep movsb`, which the C library uses for more than about 2 KiB. On Intel processors it is also
/// faster for fewer bytes if another core has read the destination.
#[cfg(target_arch = "x86_64")]
pub(crate) mod string {
    use std::arch::asm;
    use std::ops::Range;

    /// The sizes that are copied this way; the library uses the instruction for larger ones itself.
    pub(crate) const BYTES: Range<usize> = 1 << 10..4 << 10;

    /// Copies all bytes.
    ///
    /// # Panics
    /// If the lengths differ.
    pub(crate) fn copy(from: &[u8], into: &mut [u8]) {
        assert_eq!(from.len(), into.len(), "what is copied has one length");
        // SAFETY: as many bytes are read as there are at the one place, and written as there are at the other, upwards, as the
        // direction flag is clear between any two statements of a program.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") from.len() => _,
                inout("rsi") from.as_ptr() => _,
                inout("rdi") into.as_mut_ptr() => _,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Not used on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) mod string {
    pub(crate) const BYTES: std::ops::Range<usize> = 0..0;
    pub(crate) use crate::cpu::copy;
}

#[cfg(target_arch = "x86_64")]
mod stream {
    use std::arch::x86_64::{__m128i, _mm_sfence, _mm_stream_si128};
    use std::ptr::NonNull;

    /// The alignment that non-temporal stores need.
    pub(crate) const ALIGNMENT: usize = align_of::<__m128i>();

    /// Copies whole vectors with non-temporal stores, and returns the number of bytes. The destination has
    /// room for all bytes, and nobody else reads it yet.
    pub(crate) fn copy(to: NonNull<u8>, bytes: &[u8]) -> usize {
        let to: NonNull<__m128i> = to.cast();
        if !to.is_aligned() {
            return 0;
        }
        let (vectors, _) = bytes.as_chunks::<{ size_of::<__m128i>() }>();
        for (index, &vector) in vectors.iter().enumerate() {
            // SAFETY: the caller has room for all bytes there, and this vector is among them.
            let place = unsafe { to.add(index) };
            // SAFETY: every processor of this architecture has the instruction, and the place is aligned, as checked.
            unsafe { _mm_stream_si128(place.as_ptr(), bytemuck::cast(vector)) }
        }
        // Non-temporal stores are not ordered with others, such as the signal that publishes them, without
        // this fence.
        // SAFETY: every processor of this architecture has the instruction, which does nothing else.
        unsafe { _mm_sfence() }
        size_of_val(vectors)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod stream {
    use std::ptr::NonNull;

    pub(crate) const ALIGNMENT: usize = 1;

    /// There are no non-temporal stores here.
    pub(crate) fn copy(_: NonNull<u8>, _: &[u8]) -> usize {
        0
    }
}

/// Returns the core of this thread, if the system reports it. The C library reads it from memory on every
/// architecture, where `rustix` makes a system call on some.
pub(crate) fn current_core() -> Option<u32> {
    // SAFETY: it takes nothing and says a number.
    u32::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Asks the scheduler for short slices of this length for this thread, if it has the default policy. The
/// thread keeps its share of the core. Systems before Linux 6.12 ignore it.
///
/// # Errors
/// If the system does not allow it.
pub(crate) fn request_short_slices(slice: Duration) -> io::Result<()> {
    let size = u32::try_from(size_of::<libc::sched_attr>()).expect("a few bytes");
    // SAFETY: all of its fields are integers, which may be 0.
    let mut schedule: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the system writes at most `size` bytes at the address, where as many are.
    let outcome = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut schedule, size, 0) };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    if schedule.sched_policy != libc::SCHED_OTHER.cast_unsigned() {
        return Ok(());
    }
    schedule.size = size;
    schedule.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the system reads `size` bytes at the address, as the struct says itself.
    let outcome = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const schedule, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "mapping_tests.rs"]
mod tests;
