//! The layout of the memory that all ranks of a group have mapped.
//!
//! Each rank has four generations of: a flag line (signal count, hash of the call, and 48 bytes of data), the
//! fingerprint of the call, the exposed region, and an eager buffer. It also has the words for sleeping, and
//! two generations of slots. In a group of two, the ranks swap the blocks that hold their flag lines every
//! fourth call. Everything except eager buffers and slots has its own pair of cache lines. Pages of eager
//! buffers and slots are allocated on first touch.
//!
//! Flag lines, fingerprints, regions and words are atomic: they may be read and written at any time. The
//! published bytes in flag lines, eager buffers and slots are not, so every access to them is `unsafe`.
#![allow(unsafe_code, reason = "mapped memory cannot be reached otherwise")]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use smallvec::SmallVec;

use super::PAGE_BYTES;
use super::futex;
use super::generation::Generation;
use super::group_pool::PoolLease;
use super::mapping::{self, Mapping};
use super::remote_region::RemoteRegion;
use crate::cpu::CacheLine;
use crate::link::shm::segment::Nonce;
use crate::shm_group::{CALLS_MAX, CHANGED_MAX, GroupLayout, MemoryArea, Reach};
use crate::{Fingerprint, Rank};

const SLOTS: usize = GroupLayout::on_host(Reach::Slots).slots;
const SLOT_BYTES: usize = GroupLayout::on_host(Reach::Slots).slot_bytes;
const EAGER_BYTES: usize = GroupLayout::on_host(Reach::Slots).eager_bytes;
const FLAG_DATA_BYTES: usize = CacheLine::BYTES - FLAG_DATA_AT;
const _: () =
    assert!(FLAG_DATA_BYTES == GroupLayout::on_host(Reach::Slots).flag_line_bytes, "as it is predicted");

/// Two cache lines, which processors fetch together.
pub(super) const PAIR_BYTES: usize = 128;
/// Bytes of a rank's words and flag lines.
pub(super) const BLOCK_BYTES: usize = REGIONS_AT + CALLS_MAX * PAIR_BYTES;
/// Bytes of the words of the whole group.
pub(super) const HEAD_BYTES: usize = PAIR_BYTES;

/// Words of a fingerprint.
const CALL_WORDS: usize = Fingerprint::SIZE / size_of::<u64>();

/// The offset of the words of the whole group on the first page of a segment, behind the nonce.
const HEAD_AT: usize = PAIR_BYTES;
/// The offset of the external-load flag in the words of the whole group.
const EXTERNAL_LOAD_AT: usize = 0;
/// The offset of the hash in a flag line, behind the signal count. The data follows the hash.
const HASH_AT: usize = 8;
const FLAG_DATA_AT: usize = 16;
/// The offset of the sleep words in a rank's block, behind its flag lines.
const SLEEPING_AT: usize = CALLS_MAX * PAIR_BYTES;
const WAKE_COUNT_AT: usize = SLEEPING_AT + 4;
const CORE_AT: usize = WAKE_COUNT_AT + 4;
const LEFT_AT: usize = SLEEPING_AT + PAIR_BYTES;
const PROCESS_AT: usize = LEFT_AT + 4;
const FAILED_AT: usize = PROCESS_AT + 4;
const CALLS_AT: usize = LEFT_AT + PAIR_BYTES;
const REGIONS_AT: usize = CALLS_AT + CALLS_MAX * PAIR_BYTES;
/// The offset of the eager buffers in a rank's large part, behind its slots.
const EAGER_AT: usize = 2 * SLOTS * SLOT_BYTES;
/// Bytes of a rank's slots and eager buffers.
pub(super) const LARGE_BYTES: usize = EAGER_AT + CALLS_MAX * EAGER_BYTES;

/// The memory of one group.
#[derive(Debug)]
pub(crate) struct GroupMemory {
    mapping: Mapping,
    place: Place,
    ranks: usize,
    /// `true` if the group has two ranks. Each then has its flag line where it has read the other's the last
    /// time, because a signal is seen sooner if the line is in the cache.
    is_of_two: bool,
    /// Keeps the memory from being used again; `None` in a segment of the group's own. Dropped after every access.
    _lease: Option<PoolLease>,
}

/// The offsets of a group's memory in its segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The words of the whole group.
    pub(super) head_at: usize,
    /// The words and flag lines of each rank, [`BLOCK_BYTES`] apart, at a multiple of [`PAIR_BYTES`].
    pub(super) blocks_at: usize,
    /// The slots and eager buffers of each rank, [`LARGE_BYTES`] apart.
    pub(super) slots_at: usize,
}

impl GroupMemory {
    /// Creates the memory, with the descriptor that lets the other ranks open it.
    pub(crate) fn create(nonce: &Nonce, world_size: usize) -> io::Result<(OwnedFd, Self)> {
        let (file, mapping) = Mapping::create(bytes(world_size))?;
        // SAFETY: nobody else has the memory yet.
        unsafe { mapping.copy_in(0, nonce) };
        Ok((file, Self::in_segment(mapping, world_size)))
    }

    /// Opens the memory that another rank has created. Returns `None` if its nonce is another one.
    pub(crate) fn open(file: &OwnedFd, nonce: &Nonce, world_size: usize) -> io::Result<Option<Self>> {
        let mapping = Mapping::open(file, bytes(world_size))?;
        // SAFETY: the nonce was written before the memory was given away, and never is afterwards.
        let found = mapping.filter(|mapping| unsafe { mapping.bytes(0, nonce.len()) } == nonce);
        Ok(found.map(|mapping| Self::in_segment(mapping, world_size)))
    }

    fn in_segment(mapping: Mapping, world_size: usize) -> Self {
        let place = Place { head_at: HEAD_AT, blocks_at: PAGE_BYTES, slots_at: slots_at(world_size) };
        Self::in_pool(mapping, place, world_size, None)
    }

    /// Returns the memory at these offsets of a pool.
    pub(super) const fn in_pool(
        mapping: Mapping,
        place: Place,
        world_size: usize,
        lease: Option<PoolLease>,
    ) -> Self {
        Self { mapping, place, ranks: world_size, is_of_two: world_size == 2, _lease: lease }
    }

    /// Zeroes all words and flag lines, as in a new segment.
    ///
    /// # Safety
    /// No other process uses this memory.
    pub(super) unsafe fn reset(&self) {
        let blocks = self.ranks * BLOCK_BYTES;
        for (at, len) in [(self.place.head_at, HEAD_BYTES), (self.place.blocks_at, blocks)] {
            // SAFETY: as the caller has promised.
            unsafe { self.mapping.fill(at, len, &mut |bytes| bytes.fill(0)) };
        }
    }

    /// Returns the signal count of a rank, over all calls.
    #[inline]
    pub(crate) fn signals(&self, rank: usize, generation: Generation) -> &AtomicU64 {
        self.counter(self.flag_line(rank, generation))
    }

    /// Returns the signal count of a rank over all calls, if the rank has not passed this call. It is at most
    /// three calls behind. Flag lines of earlier calls may belong to another rank by now.
    pub(crate) fn all_signals(&self, rank: usize, call: usize) -> u64 {
        let calls = call.saturating_sub(CALLS_MAX - 1)..=call;
        calls.map(|call| self.signals(rank, Generation::of(call)).load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// Polls the signal count of a rank up to `times` times, with pauses, until it is at least `wanted`.
    /// Returns the count. The loads have acquire order: all writes of the rank before the signal are visible.
    #[inline]
    pub(crate) fn look(&self, rank: usize, generation: Generation, wanted: u64, times: usize) -> Option<u64> {
        let signals = self.signals(rank, generation);
        (0..times).find_map(|time| {
            if time > 0 {
                std::hint::spin_loop();
            }
            let seen = signals.load(Ordering::Acquire);
            (seen >= wanted).then_some(seen)
        })
    }

    /// Returns the hash of a rank's call. Read after a signal of that call was seen.
    #[inline]
    pub(crate) fn hash(&self, rank: usize, generation: Generation) -> &AtomicU64 {
        self.counter(self.flag_line(rank, generation) + HASH_AT)
    }

    /// Returns the fingerprint of a rank's call. It is that of the current call if a signal of that call was
    /// seen, and otherwise unspecified.
    pub(crate) fn call(&self, rank: usize, generation: Generation) -> Fingerprint {
        // SAFETY: calls lie where nothing else does, and are reached here and in `set_call` only.
        Fingerprint(bytemuck::cast(unsafe {
            self.mapping.load::<CALL_WORDS>(self.pair(rank, CALLS_AT, generation))
        }))
    }

    #[inline]
    pub(crate) fn set_call(&self, rank: usize, generation: Generation, call: &Fingerprint) {
        let words: [u64; CALL_WORDS] = bytemuck::cast(call.0);
        // SAFETY: as for `call`.
        unsafe { self.mapping.store(self.pair(rank, CALLS_AT, generation), words) };
    }

    /// Returns the region that a rank has exposed. It is that of the current call if a signal of that call
    /// was seen, and otherwise unspecified.
    pub(crate) fn region(&self, rank: usize, generation: Generation) -> RemoteRegion {
        self.check(rank);
        // SAFETY: exposures lie where nothing else does, and are reached here and in `expose` only.
        RemoteRegion::decode(unsafe { self.mapping.load(self.pair(rank, REGIONS_AT, generation)) })
    }

    pub(crate) fn expose(&self, rank: usize, generation: Generation, region: RemoteRegion) {
        // SAFETY: as for `region`.
        unsafe { self.mapping.store(self.pair(rank, REGIONS_AT, generation), region.encode()) };
    }

    /// Sleeps until `awaited` signals or leaves, this rank is woken, or `limit` passes. Does not sleep if
    /// `ready` returns `true`.
    pub(crate) fn sleep(&self, me: usize, awaited: usize, limit: Duration, ready: impl FnOnce() -> bool) {
        let (sleeping, wake_count) = (self.sleeping(me), self.wake_count(me));
        let before = futex::prepare_sleep(sleeping, wake_count, futex::awaited_word(awaited));
        if !ready() {
            futex::sleep(wake_count, before, limit);
        }
        sleeping.store(0, Ordering::Relaxed);
    }

    /// Wakes ranks that sleep for this one, after it has signalled or left.
    #[inline]
    pub(crate) fn wake_sleepers(&self, me: Rank) {
        futex::fence_after_signal::<AtomicU32>();
        let signaller = futex::awaited_word(me.index());
        let mut peer = me;
        for _ in 1..me.world_size() {
            peer = peer.right();
            if futex::sleeps_for(self.sleeping(peer.index()), signaller) {
                self.wake_if_sleeping(peer.index(), signaller);
            }
        }
    }

    /// Wakes a rank that seemed to sleep for this one, if it does.
    #[cold]
    fn wake_if_sleeping(&self, peer: usize, signaller: u32) {
        let wake_count = self.wake_count(peer);
        if futex::claim_wake(self.sleeping(peer), wake_count, signaller) {
            futex::wake(wake_count);
        }
    }

    /// Wakes a rank, whatever it sleeps for.
    pub(crate) fn wake(&self, rank: usize) {
        let wake_count = self.wake_count(rank);
        wake_count.fetch_add(1, Ordering::Release);
        futex::wake(wake_count);
    }

    /// Records the core on which this rank runs. A rank on the same core can then yield to it.
    pub(crate) fn record_core(&self, me: usize) -> Core {
        Core::record(self.core(me))
    }

    /// Returns `true` if a rank could run if the rank on this core slept, as far as is known.
    pub(crate) fn waits_for_core(&self, rank: usize, core: Core) -> bool {
        self.is_on(rank, core) && self.sleeping(rank).load(Ordering::Relaxed) == 0
    }

    /// Returns `true` if a rank was on this core when it last waited.
    pub(crate) fn is_on(&self, rank: usize, core: Core) -> bool {
        core.is_recorded(self.core(rank))
    }

    /// Returns the core that a rank was on when it last waited; 0 before that.
    fn core(&self, rank: usize) -> &AtomicU32 {
        self.word(self.block(rank) + CORE_AT)
    }

    /// Returns the rank for which a rank sleeps, counted from 1; 0 if it is awake.
    #[inline]
    fn sleeping(&self, rank: usize) -> &AtomicU32 {
        self.word(self.block(rank) + SLEEPING_AT)
    }

    /// Returns the wake count of a rank, the futex word of its sleep.
    fn wake_count(&self, rank: usize) -> &AtomicU32 {
        self.word(self.block(rank) + WAKE_COUNT_AT)
    }

    /// Records that a rank will not enter another call.
    pub(crate) fn leave(&self, rank: usize) {
        self.word(self.block(rank) + LEFT_AT).store(1, Ordering::Release);
    }

    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.word(self.block(rank) + LEFT_AT).load(Ordering::Acquire) != 0
    }

    /// Records that a call has failed for a rank. The record is visible before any later write of the rank.
    pub(crate) fn fail(&self, rank: usize) {
        self.word(self.block(rank) + FAILED_AT).store(1, Ordering::Relaxed);
        // Pairs with the fence in `has_failed`: a rank that reads later writes also reads this flag.
        fence(Ordering::Release);
    }

    /// Returns `true` if a call had failed for a rank before the bytes that were read from its memory were
    /// written.
    pub(crate) fn has_failed(&self, rank: usize) -> bool {
        fence(Ordering::Acquire);
        self.word(self.block(rank) + FAILED_AT).load(Ordering::Relaxed) != 0
    }

    /// Records that external load uses the ranks' cores.
    pub(crate) fn record_external_load(&self) {
        self.external_load().store(1, Ordering::Relaxed);
    }

    /// Returns `true` if any rank has recorded external load.
    pub(crate) fn has_external_load(&self) -> bool {
        self.external_load().load(Ordering::Relaxed) != 0
    }

    fn external_load(&self) -> &AtomicU32 {
        self.word(self.place.head_at + EXTERNAL_LOAD_AT)
    }

    /// Returns the number of a rank's process, as the creator of this memory sees it, or in a pool as the rank itself
    /// does.
    pub(crate) fn process(&self, rank: usize) -> &AtomicU32 {
        self.word(self.block(rank) + PROCESS_AT)
    }

    #[inline]
    fn counter(&self, at: usize) -> &AtomicU64 {
        // SAFETY: signals and hashes lie where nothing else does, and are reached as counters only.
        unsafe { self.mapping.counter(at) }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: words lie where nothing else does, and are reached as words only.
        unsafe { self.mapping.word(at) }
    }

    /// Returns the bytes that a rank has published in a memory area. Returns `None` if the area does not have
    /// these bytes.
    ///
    /// # Safety
    /// Nobody writes the bytes while they are borrowed.
    #[inline]
    pub(crate) unsafe fn published(
        &self,
        rank: usize,
        generation: Generation,
        place: MemoryArea,
        range: Range<usize>,
    ) -> Option<&[u8]> {
        let at = self.place(rank, generation, place, &range)?;
        // SAFETY: as the caller has promised.
        Some(unsafe { self.mapping.bytes(at, range.len()) })
    }

    /// Prefetches bytes that a rank has published, which are read soon.
    #[inline]
    pub(crate) fn fetch(&self, rank: usize, generation: Generation, place: MemoryArea, range: Range<usize>) {
        if let Some(at) = self.place(rank, generation, place, &range) {
            self.mapping.fetch(at, range.len());
        }
    }

    /// Prefetches bytes of this rank for writing, which takes their cache lines back from other cores.
    #[inline]
    pub(crate) fn claim(&self, me: usize, generation: Generation, place: MemoryArea, range: Range<usize>) {
        if let Some(at) = self.place(me, generation, place, &range) {
            self.mapping.claim(at, range.len());
        }
    }

    /// Calls `write` with the bytes of a memory area of this rank. Returns `None` if the area does not have
    /// these bytes.
    ///
    /// # Safety
    /// As for [`Mapping::fill`].
    pub(crate) unsafe fn fill(
        &self,
        rank: usize,
        generation: Generation,
        place: MemoryArea,
        range: Range<usize>,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Option<()> {
        let at = self.place(rank, generation, place, &range)?;
        // SAFETY: as the caller has promised.
        unsafe { self.mapping.fill(at, range.len(), write) };
        Some(())
    }

    /// Copies bytes into a memory area of a rank. Returns `None` if the area does not have room for them.
    ///
    /// # Safety
    /// As for [`Mapping::copy_in`].
    #[inline(always)]
    pub(crate) unsafe fn publish(
        &self,
        rank: usize,
        generation: Generation,
        place: MemoryArea,
        offset: usize,
        bytes: &[u8],
    ) -> Option<()> {
        let at = self.place(rank, generation, place, &(offset..offset.checked_add(bytes.len())?))?;
        // SAFETY: as the caller has promised.
        unsafe { self.mapping.copy_in(at, bytes) };
        Some(())
    }

    /// Calls `change` with equally long ranges of one place of several ranks, each at its offset.
    ///
    /// # Errors
    /// The first rank and offset without such a place.
    ///
    /// # Safety
    /// As for [`Mapping::fill`].
    pub(crate) unsafe fn change(
        &self,
        generation: Generation,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<(), (usize, usize)> {
        let at = |&(rank, offset): &(usize, usize)| {
            let range = offset..offset.saturating_add(len);
            self.place(rank, generation, place, &range).ok_or((rank, offset))
        };
        let places: SmallVec<[usize; CHANGED_MAX]> = there.iter().map(at).collect::<Result<_, _>>()?;
        // SAFETY: as the caller has promised, and it is one mapping.
        unsafe { mapping::change(places.into_iter().map(|at| (&self.mapping, at)), len, change) };
        Ok(())
    }

    const fn block(&self, rank: usize) -> usize {
        // The rounding changes nothing. It shows the compiler that words and counters are aligned.
        self.place.blocks_at / PAIR_BYTES * PAIR_BYTES + rank * BLOCK_BYTES
    }

    const fn pair(&self, rank: usize, at: usize, generation: Generation) -> usize {
        self.block(rank) + at + generation.index() * PAIR_BYTES
    }

    /// Returns the offset of a rank's flag line in a call.
    #[inline]
    fn flag_line(&self, rank: usize, generation: Generation) -> usize {
        let owner = if self.is_of_two && generation.uses_peer_block() { 1 - rank } else { rank };
        self.pair(owner, 0, generation)
    }

    /// Panics if the rank is outside the group.
    #[inline]
    fn check(&self, rank: usize) {
        assert!(rank < self.ranks, "rank {rank} is one of {}", self.ranks);
    }

    #[inline]
    fn place(
        &self,
        rank: usize,
        generation: Generation,
        place: MemoryArea,
        range: &Range<usize>,
    ) -> Option<usize> {
        self.check(rank);
        let (start, len) = match place {
            MemoryArea::FlagLine => (self.flag_line(rank, generation) + FLAG_DATA_AT, FLAG_DATA_BYTES),
            MemoryArea::Slot(slot) if slot < SLOTS => {
                let number = generation.parity() * SLOTS + slot;
                (self.place.slots_at + rank * LARGE_BYTES + number * SLOT_BYTES, SLOT_BYTES)
            }
            MemoryArea::EagerBuffer => {
                let start = EAGER_AT + generation.index() * EAGER_BYTES;
                (self.place.slots_at + rank * LARGE_BYTES + start, EAGER_BYTES)
            }
            MemoryArea::Slot(_) | MemoryArea::Exposed => return None,
        };
        (range.start <= range.end && range.end <= len).then_some(start + range.start)
    }
}

/// A core of this host, numbered from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Core(u32);

impl Core {
    /// The core of a rank if the system does not report it. Ranks then seem to share a core, and yield to each other.
    const UNKNOWN: u32 = u32::MAX;

    /// Stores the core of this process in a word.
    pub(crate) fn record(word: &AtomicU32) -> Self {
        let core = Self::current();
        // The other ranks read the word in every wait, so it is written only if it changes.
        if !core.is_recorded(word) {
            word.store(core.0, Ordering::Relaxed);
        }
        core
    }

    /// Returns `true` if a word holds this core.
    pub(crate) fn is_recorded(self, word: &AtomicU32) -> bool {
        word.load(Ordering::Relaxed) == self.0
    }

    fn current() -> Self {
        Self(mapping::current_core().map_or(Self::UNKNOWN, |core| core + 1))
    }
}

/// Half a page behind the beginning of a page, where no large vector begins. Copies between two buffers with
/// nearly equal page offsets are [slow](crate::cpu::copy).
const fn slots_at(world_size: usize) -> usize {
    (PAGE_BYTES + world_size * BLOCK_BYTES).next_multiple_of(PAGE_BYTES) + PAGE_BYTES / 2
}

const fn bytes(world_size: usize) -> usize {
    slots_at(world_size) + world_size * LARGE_BYTES
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::remote_region::RegionOrigin;
    use super::*;

    #[test]
    fn no_two_places_of_a_group_overlap() {
        let (_file, memory) = GroupMemory::create(&[7; 32], 3).unwrap();
        let all = || {
            let calls = (0..3).flat_map(|rank| (0..CALLS_MAX).map(move |call| (rank, call)));
            let slots = |call| (0..SLOTS).filter(move |_| call < 2).map(MemoryArea::Slot);
            let places =
                move |call| [MemoryArea::FlagLine, MemoryArea::EagerBuffer].into_iter().chain(slots(call));
            calls.flat_map(move |(rank, call)| {
                places(call).map(move |place| (rank, Generation::of(call), place))
            })
        };
        let size = |place| match place {
            MemoryArea::FlagLine => FLAG_DATA_BYTES,
            MemoryArea::EagerBuffer => EAGER_BYTES,
            _ => SLOT_BYTES,
        };
        for (number, (rank, generation, place)) in (1..).zip(all()) {
            // SAFETY: nobody else has the memory.
            unsafe { memory.publish(rank, generation, place, 0, &vec![number; size(place)]) }.unwrap();
        }
        assert!(!memory.has_external_load());
        for (rank, call) in [(0, 0), (2, 5)] {
            let (generation, other) = (Generation::of(call), Generation::of(call + 1));
            memory.signals(rank, generation).store(u64::MAX, Ordering::Relaxed);
            memory.hash(rank, generation).store(u64::MAX, Ordering::Relaxed);
            memory.set_call(rank, generation, &Fingerprint([9; 48]));
            let origin = RegionOrigin::Heap { arena: 3, offset: 1 << 40 };
            let region = RemoteRegion { len: 77, writable: true, origin };
            memory.expose(rank, generation, region);
            memory.leave(rank);
            memory.record_external_load();
            assert_eq!(memory.region(rank, generation), region);
            assert_eq!(memory.call(rank, generation), Fingerprint([9; 48]));
            assert_eq!(memory.region(rank, other), RemoteRegion::NOTHING);
        }
        assert_eq!([0, 1, 2].map(|rank| memory.has_left(rank)), [true, false, true]);
        // SAFETY: nobody else has the memory.
        assert!(memory.has_external_load() && unsafe { memory.mapping.bytes(0, 32) } == [7; 32]);
        for (number, (rank, generation, place)) in (1_u8..).zip(all()) {
            // SAFETY: nobody else has the memory.
            let bytes = unsafe { memory.published(rank, generation, place, 0..size(place)) }.unwrap();
            assert!(bytes.iter().all(|&byte| byte == number), "{rank} {generation:?} {place:?}");
        }
    }

    #[test]
    fn each_of_two_has_its_line_where_the_other_had_it_the_last_time() {
        let (_file, memory) = GroupMemory::create(&[7; 32], 2).unwrap();
        for call in 1..2 * CALLS_MAX {
            memory.signals(0, Generation::of(call)).store(call as u64, Ordering::Relaxed);
            let next = Generation::of(call + CALLS_MAX);
            assert_eq!(memory.signals(1, next).load(Ordering::Relaxed), call as u64);
            assert_ne!(memory.signals(0, next).load(Ordering::Relaxed), call as u64);
        }
    }

    #[test]
    fn places_beyond_flag_lines_eager_buffers_and_slots_do_not_exist() {
        let (_file, memory) = GroupMemory::create(&[7; 32], 2).unwrap();
        for (place, range) in [
            (MemoryArea::FlagLine, 0..FLAG_DATA_BYTES + 1),
            (MemoryArea::EagerBuffer, 0..EAGER_BYTES + 1),
            (MemoryArea::Slot(SLOTS), 0..1),
            (MemoryArea::Slot(0), SLOT_BYTES..SLOT_BYTES + 1),
            (MemoryArea::Exposed, 0..1),
        ] {
            // SAFETY: nobody else has the memory.
            assert_eq!(unsafe { memory.published(0, Generation::of(0), place, range) }, None);
        }
    }

    #[rstest]
    #[should_panic = "rank 3 is one of 3"]
    fn a_rank_outside_the_group_has_no_places(
        #[values(MemoryArea::FlagLine, MemoryArea::EagerBuffer, MemoryArea::Slot(0), MemoryArea::Exposed)]
        place: MemoryArea,
    ) {
        let (_file, memory) = GroupMemory::create(&[7; 32], 3).unwrap();
        match place {
            MemoryArea::Exposed => drop(memory.region(3, Generation::of(0))),
            // SAFETY: nobody else has the memory.
            _ => drop(unsafe { memory.published(3, Generation::of(0), place, 0..1) }.map(<[u8]>::len)),
        }
    }

    #[test]
    fn another_nonce_or_size_is_another_group() {
        let (file, _memory) = GroupMemory::create(&[7; 32], 2).unwrap();
        assert!(GroupMemory::open(&file, &[7; 32], 2).unwrap().is_some());
        assert!(GroupMemory::open(&file, &[8; 32], 2).unwrap().is_none());
        assert!(GroupMemory::open(&file, &[7; 32], 3).unwrap().is_none());
    }
}
