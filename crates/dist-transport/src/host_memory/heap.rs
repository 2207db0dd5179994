//! The heap of a job on one host: memory that a process allocates for sharing, and that its peers map on
//! first access.
//!
//! Each process allocates from its own arenas, so no allocation waits for another process. All channels of
//! the job share them.
//!
//! Freed memory is kept for the next allocation for a while, because the system takes long to provide pages.
//! After it has been free for 0.5 to 1 s, the service thread returns its pages, a part at a time.
#![allow(unsafe_code, reason = "mapped memory cannot be given away otherwise")]

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::FallocateFlags;

use super::address_colouring::HASHED_BYTES;
use super::group_pool::{GroupPool, POOL_BYTES, POOL_NUMBER};
use super::mapping::{Mapping, Region};
use super::ranges::Ranges;
use crate::Allocation;
use crate::cpu::CacheLine;
use crate::owned::Bytes;

/// Bytes of an arena, unless one allocation needs more. Pages are allocated on first touch.
const ARENA_BYTES: usize = 256 << 20;
/// The bytes of free memory that are returned to the system at once: a few milliseconds of work.
const RETURNED_BYTES: usize = 64 << 20;
/// Allocations do not share pages, so that a leaked one keeps nothing else alive.
const UNIT_BYTES: usize = 4096;

/// This process's part of the heap.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    arenas: Mutex<Vec<Arena>>,
    /// The pool of this host, if this process has created it; `None` inside if the system has no memory for it.
    pool: OnceLock<Option<(Arc<OwnedFd>, Arc<GroupPool>)>>,
}

#[derive(Debug)]
struct Arena {
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    len: usize,
    /// Free ranges.
    holes: Ranges,
    /// Free ranges whose pages hold old bytes: freed since the last [`Heap::age`], and before it. Other free
    /// pages are zero.
    lately: Ranges,
    earlier: Ranges,
    /// First pages of ranges that other ranks still read after a failed call. They are never allocated again.
    detached: BTreeSet<usize>,
}

impl Heap {
    /// Allocates this many bytes, zeroed. Returns `None` if the system has none left.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Allocation> {
        let len = bytes.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let mut arenas = self.arenas();
        let found =
            arenas.iter_mut().enumerate().find_map(|(number, arena)| Some((number, arena.take(len)?)));
        let (arena, range) = match found {
            Some(found) => found,
            None => {
                // Before the heap grows, all free memory is returned: buffers that grow would otherwise keep
                // all their old sizes.
                arenas.iter_mut().for_each(Arena::return_all);
                let made = Arena::new(len.max(ARENA_BYTES))
                    .inspect_err(|error| tracing::info!(%error, bytes, "no memory for the heap"));
                arenas.push(made.ok()?);
                let last = arenas.len() - 1;
                (last, arenas[last].take(len)?)
            }
        };
        let space = &mut arenas[arena];
        // SAFETY: `take` gives each byte to one region at a time, and other processes reach it only when it is exposed in a call.
        let region = unsafe { Region::new(space.mapping.clone(), range.start, bytes) };
        let old = [space.lately.remove(&range), space.earlier.remove(&range)].concat();
        // Zeroing much memory takes long, and other threads allocate meanwhile.
        drop(arenas);
        let mut memory = Allocated { region, heap: self.clone(), arena, range: range.clone() };
        for old in old {
            memory.bytes_mut()[old.start - range.start..bytes.min(old.end - range.start)].fill(0);
        }
        Some(Allocation::new(Box::new(memory)))
    }

    /// Ages free memory: memory that has been free since the last call will be returned to the system.
    pub(crate) fn age(&self) {
        for arena in &mut *self.arenas() {
            for range in std::mem::take(&mut arena.lately).iter() {
                arena.earlier.insert(range);
            }
        }
    }

    /// Returns the pages of some memory to the system that has been free for a while. Returns `false` if there
    /// is none.
    pub(crate) fn return_some(&self) -> bool {
        let mut arenas = self.arenas();
        let found = arenas.iter_mut().enumerate().find_map(|(number, arena)| {
            let range = arena.earlier.first_of(1)?;
            let range = range.start..range.end.min(range.start + RETURNED_BYTES);
            arena.earlier.remove(&range);
            // Removed from the free ranges, so that it is not allocated meanwhile.
            arena.holes.remove(&range);
            Some((number, range, arena.file.clone()))
        });
        drop(arenas);
        let Some((number, range, file)) = found else { return false };
        let returned = return_pages(&file, &range);
        let mut arenas = self.arenas();
        arenas[number].holes.insert(range.clone());
        if !returned {
            // Memory with old bytes must not count as zero. It is tried again at the next age.
            arenas[number].lately.insert(range);
        }
        true
    }

    /// Returns this process's mapping of an arena.
    pub(crate) fn mapping(&self, arena: u32) -> Option<Arc<Mapping>> {
        self.arenas().get(arena as usize).map(|arena| arena.mapping.clone())
    }

    /// Returns the arena and the offset of these bytes, if they are in the heap.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<(u32, u64)> {
        let find = |(number, arena): (usize, &Arena)| {
            Some((u32::try_from(number).ok()?, arena.mapping.find(bytes)? as u64))
        };
        self.arenas().iter().enumerate().find_map(find)
    }

    /// Keeps bytes that other ranks may still read after a failed call. The owner of the allocation continues
    /// with private pages.
    pub(crate) fn detach(&self, number: u32, offset: u64, len: u64) {
        let mut arenas = self.arenas();
        let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        let (Some(arena), Some((offset, len))) = (arenas.get_mut(number as usize), range) else { return };
        if len > 0 {
            arena.detached.insert(offset / UNIT_BYTES * UNIT_BYTES);
            // SAFETY: the pages belong to one allocation, which the caller of the call has borrowed, as it was exposed for reading
            // only: nobody writes there.
            unsafe { arena.mapping.detach(&arena.file, offset, len) };
        }
    }

    /// Returns the pool of this host, which is created at the first call.
    pub(crate) fn pool(&self) -> Option<Arc<GroupPool>> {
        self.pool_with_file().map(|(_, pool)| pool.clone())
    }

    fn pool_with_file(&self) -> Option<&(Arc<OwnedFd>, Arc<GroupPool>)> {
        let made = self.pool.get_or_init(|| {
            let made = GroupPool::create()
                .inspect_err(|error| tracing::info!(%error, "no memory for a pool of groups"));
            made.ok().map(|(file, pool)| (Arc::new(file), Arc::new(pool)))
        });
        made.as_ref()
    }

    /// Returns the descriptor by which another process maps an arena, or the pool of this host, and its size.
    pub(crate) fn file(&self, arena: u32) -> Option<(Arc<OwnedFd>, usize)> {
        if arena == POOL_NUMBER {
            return self.pool_with_file().map(|(file, _)| (file.clone(), POOL_BYTES));
        }
        self.arenas().get(arena as usize).map(|arena| (arena.file.clone(), arena.len))
    }

    fn arenas(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    fn new(len: usize) -> io::Result<Self> {
        let (file, mapping) = Mapping::create(len)?;
        Ok(Self {
            file: Arc::new(file),
            mapping: Arc::new(mapping),
            len,
            holes: Ranges::of(0..len),
            lately: Ranges::default(),
            earlier: Ranges::default(),
            detached: BTreeSet::new(),
        })
    }

    /// Takes this many bytes from the first free range that has them.
    fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let start = self.holes.first_of(len)?.start;
        self.holes.remove(&(start..start + len));
        Some(start..start + len)
    }

    fn give_back(&mut self, range: Range<usize>) {
        if self.detached.range(range.clone()).next().is_none() {
            self.lately.insert(range.clone());
            self.holes.insert(range);
        }
    }

    /// Returns the pages of all free memory to the system.
    fn return_all(&mut self) {
        let old: Vec<_> = self.lately.iter().chain(self.earlier.iter()).collect();
        (self.lately, self.earlier) = Default::default();
        for range in old {
            if !return_pages(&self.file, &range) {
                self.lately.insert(range);
            }
        }
    }
}

/// Returns pages to the system, if it takes them; they read as zeros from then on. No rank accesses them: lent
/// memory is never free, and memory that others may read is detached first.
fn return_pages(file: &OwnedFd, range: &Range<usize>) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let returned = rustix::fs::fallocate(file, flags, range.start as u64, range.len() as u64);
    returned.inspect_err(|error| tracing::debug!(%error, "free memory of the heap is kept")).is_ok()
}

/// Memory that was allocated.
#[derive(Debug)]
struct Allocated {
    region: Region,
    heap: Arc<Heap>,
    arena: usize,
    range: Range<usize>,
}

impl Bytes for Allocated {
    fn bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.region.bytes_mut()
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        self.heap.arenas()[self.arena].give_back(self.range.clone());
    }
}

const _: () = assert!(UNIT_BYTES.is_multiple_of(CacheLine::BYTES), "allocations begin where a line can");
const _: () = assert!(ARENA_BYTES >= HASHED_BYTES, "arenas are mapped with different colours");

#[cfg(test)]
mod tests {
    use super::*;

    fn place(memory: &Allocation) -> (usize, usize) {
        let bytes = memory.bytes();
        (bytes.as_ptr().addr(), bytes.len())
    }

    #[test]
    fn memory_that_is_given_back_is_given_away_again_as_zeros() {
        let heap = Arc::new(Heap::default());
        let mut memory = heap.allocate(5000).unwrap();
        let first = place(&memory);
        memory.bytes_mut().fill(7);
        drop(memory);
        let memory = heap.allocate(8000).unwrap();
        assert_eq!(place(&memory), (first.0, 8000));
        assert!(memory.bytes().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn free_memory_is_returned_before_the_heap_grows() {
        const LEN: usize = 64 * UNIT_BYTES;
        let heap = Arc::new(Heap::default());
        let held = |heap: &Heap| {
            let (file, _) = heap.file(0).unwrap();
            usize::try_from(rustix::fs::fstat(&file).unwrap().st_blocks).unwrap() * 512
        };
        let mut all = [UNIT_BYTES, LEN, UNIT_BYTES, LEN].map(|len| heap.allocate(len).unwrap());
        all.iter_mut().for_each(|memory| memory.bytes_mut().fill(7));
        let touched = held(&heap);
        let [before, memory, between, last] = all;
        let places = [place(&memory), place(&last)];
        drop((memory, last));
        assert_eq!(held(&heap), touched, "the next of this size need not find its pages again");
        let large = heap.allocate(ARENA_BYTES).unwrap();
        assert!(large.bytes().iter().step_by(UNIT_BYTES << 10).all(|&byte| byte == 0));
        assert_eq!(held(&heap), touched - 2 * LEN);
        assert_eq!((before.bytes(), between.bytes()), (&[7; UNIT_BYTES][..], &[7; UNIT_BYTES][..]));
        for expected in places {
            let again = heap.allocate(LEN).unwrap();
            assert_eq!(place(&again), expected);
            assert!(again.bytes().iter().all(|&byte| byte == 0));
            std::mem::forget(again);
        }
    }

    #[test]
    fn memory_that_other_ranks_may_still_read_does_not_change_for_them() {
        const LEN: usize = 3 * UNIT_BYTES;
        let heap = Arc::new(Heap::default());
        let mut all = [(); 3].map(|()| heap.allocate(LEN).unwrap());
        all.iter_mut().for_each(|memory| memory.bytes_mut().fill(1));
        let (file, len) = heap.file(0).unwrap();
        let theirs = Mapping::open(&file, len).unwrap().expect("it is of this size");
        let (arena, offset) = heap.find(&all[1].bytes()[UNIT_BYTES + 10..]).unwrap();
        heap.detach(arena, offset, 20);
        all.iter_mut().for_each(|memory| memory.bytes_mut().fill(2));
        assert!(all.iter().all(|memory| memory.bytes() == [2; LEN]));
        // SAFETY: nothing is written there meanwhile.
        let bytes = unsafe { theirs.bytes(0, 3 * LEN) };
        let changed = |&byte: &u8| byte == 2;
        assert_eq!(bytes.iter().filter(|byte| !changed(byte)).count(), UNIT_BYTES);
        assert!(!bytes[LEN + UNIT_BYTES..][..UNIT_BYTES].iter().any(changed));
        let places = all.each_ref().map(place);
        drop(all);
        let again = [(); 3].map(|()| heap.allocate(LEN).unwrap());
        let again = again.each_ref().map(place);
        assert!(again.contains(&places[0]) && again.contains(&places[2]) && !again.contains(&places[1]));
    }

    #[test]
    fn memory_that_has_been_free_for_a_while_is_returned() {
        const LEN: usize = 3 * RETURNED_BYTES / 2;
        let heap = Arc::new(Heap::default());
        let held = |heap: &Heap| rustix::fs::fstat(heap.file(0).unwrap().0).unwrap().st_blocks;
        let mut memory = [UNIT_BYTES, LEN, UNIT_BYTES].map(|len| heap.allocate(len).unwrap());
        memory.iter_mut().for_each(|memory| {
            memory.bytes_mut().iter_mut().step_by(UNIT_BYTES).for_each(|byte| *byte = 7);
        });
        let all = held(&heap);
        let [before, large, after] = memory;
        let at = place(&large);
        drop(large);
        assert!(!heap.return_some() && held(&heap) == all, "it is kept for the next");
        heap.age();
        assert!(heap.return_some());
        let again = heap.allocate(LEN).unwrap();
        assert_eq!(place(&again), at);
        assert!(again.bytes().iter().step_by(UNIT_BYTES).all(|&byte| byte == 0));
        assert!(!heap.return_some(), "it is in use");
        drop(again);
        heap.age();
        while heap.return_some() {}
        assert_eq!(held(&heap), 2 * (UNIT_BYTES / 512) as i64);
        drop((before, after));
    }

    #[test]
    fn holes_that_touch_become_one() {
        let heap = Arc::new(Heap::default());
        let mut all: Vec<_> = (0..4).map(|_| heap.allocate(UNIT_BYTES)).collect();
        for number in [1, 3, 2, 0] {
            all[number] = None;
        }
        let holes = heap.arenas()[0].holes.clone();
        assert_eq!(holes, Ranges::of(0..ARENA_BYTES));
    }

    #[test]
    fn an_allocation_that_fits_no_arena_has_one_of_its_own() {
        let heap = Arc::new(Heap::default());
        let small = heap.allocate(1).unwrap();
        let large = heap.allocate(ARENA_BYTES + 1).unwrap();
        assert_eq!(heap.find(small.bytes()), Some((0, 0)));
        assert_eq!(heap.find(&large.bytes()[100..]), Some((1, 100)));
        assert_eq!(heap.find(&[0; 8]), None);
        assert_eq!(heap.file(1).unwrap().1, (ARENA_BYTES + 1).next_multiple_of(UNIT_BYTES));
    }

    #[test]
    fn an_allocation_of_more_than_there_is_is_none() {
        assert!(Arc::new(Heap::default()).allocate(usize::MAX).is_none());
        assert!(Arc::new(Heap::default()).allocate(usize::MAX / 4).is_none());
    }
}
