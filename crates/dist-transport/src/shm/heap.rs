//! The heap of a job on one host: memory that a process gives away and its peers map when they first reach into it.
//!
//! Each process allocates from arenas of its own, so no allocation waits for anybody. All channels of the job share
//! them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;

use super::apart::HASHED_BYTES;
use super::map::{Mapping, Pages, Region};
use crate::{Allocation, Grain};

/// Bytes of an arena, unless one allocation takes more. Its pages come when they are touched.
const ARENA_BYTES: usize = 256 << 20;
/// Allocations do not share pages, so that one that is leaked keeps nothing else.
const UNIT_BYTES: usize = 4096;

/// This process's part of the heap.
#[derive(Debug, Default)]
pub(crate) struct Heap(Mutex<Vec<Arena>>);

#[derive(Debug)]
struct Arena {
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    len: usize,
    /// What is free: beginnings and lengths. No two of them touch.
    holes: BTreeMap<usize, usize>,
    /// What lies behind this was never given away, and is zero.
    used: usize,
}

impl Heap {
    /// Memory of this many bytes, zero at first. `None` if the system has none left.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Box<dyn Allocation>> {
        let len = bytes.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let mut arenas = self.arenas();
        let found =
            arenas.iter_mut().enumerate().find_map(|(number, arena)| Some((number, arena.take(len)?)));
        let (arena, offset) = match found {
            Some(found) => found,
            None => {
                // Before there is more, what is free is no longer kept: buffers that grow would keep all that they were.
                arenas.iter_mut().for_each(Arena::return_pages);
                let made = Arena::new(len.max(ARENA_BYTES))
                    .inspect_err(|error| tracing::info!(%error, bytes, "no memory for the heap"));
                arenas.push(made.ok()?);
                let last = arenas.len() - 1;
                (last, arenas[last].take(len)?)
            }
        };
        let space = &mut arenas[arena];
        let region = Region::new(space.mapping.clone(), offset, bytes);
        let used = space.used.saturating_sub(offset).min(bytes);
        space.used = space.used.max(offset + len);
        // Much memory is long in being zeroed, and others allocate meanwhile.
        drop(arenas);
        let mut memory = Allocated { region, heap: self.clone(), arena, offset, len };
        memory.bytes_mut()[..used].fill(0);
        Some(Box::new(memory))
    }

    /// In which arena these bytes lie, and where, if they do.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<(u32, u64)> {
        let find = |(number, arena): (usize, &Arena)| {
            Some((u32::try_from(number).ok()?, arena.mapping.find(bytes)? as u64))
        };
        self.arenas().iter().enumerate().find_map(find)
    }

    /// What lets another process map an arena, and its size.
    pub(crate) fn file(&self, arena: u32) -> Option<(Arc<OwnedFd>, usize)> {
        self.arenas().get(arena as usize).map(|arena| (arena.file.clone(), arena.len))
    }

    fn arenas(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    fn new(len: usize) -> io::Result<Self> {
        let (file, mapping) = Mapping::create(len, Pages::OnDemand)?;
        let holes = BTreeMap::from([(0, len)]);
        Ok(Self { file: Arc::new(file), mapping: Arc::new(mapping), len, holes, used: 0 })
    }

    /// Takes so many bytes from the first hole that has them.
    fn take(&mut self, len: usize) -> Option<usize> {
        let (&start, &hole) = self.holes.iter().find(|&(_, &hole)| hole >= len)?;
        self.holes.remove(&start);
        if hole > len {
            self.holes.insert(start + len, hole - len);
        }
        Some(start)
    }

    fn give_back(&mut self, mut start: usize, mut len: usize) {
        if let Some((&before, &hole)) = self.holes.range(..start).next_back()
            && before + hole == start
        {
            self.holes.remove(&before);
            (start, len) = (before, len + hole);
        }
        if let Some(hole) = self.holes.remove(&(start + len)) {
            len += hole;
        }
        self.holes.insert(start, len);
    }

    /// Gives the system the pages of what is free, in place of which zeros are read from now on. Nobody writes there any more,
    /// since what is lent is never given back; who still reads there is in a call that has failed for this rank, and throws
    /// away what it read.
    fn return_pages(&mut self) {
        for (&start, &len) in &self.holes {
            let end = self.used.min(start + len);
            if start >= end {
                continue;
            }
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match rustix::fs::fallocate(&self.file, flags, start as u64, (end - start) as u64) {
                Ok(()) if end == self.used => self.used = start,
                Ok(()) => {}
                Err(error) => tracing::debug!(%error, "free memory of the heap is kept"),
            }
        }
    }
}

/// Memory that was given away.
#[derive(Debug)]
struct Allocated {
    region: Region,
    heap: Arc<Heap>,
    arena: usize,
    offset: usize,
    len: usize,
}

impl Allocation for Allocated {
    fn bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.region.bytes_mut()
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        self.heap.arenas()[self.arena].give_back(self.offset, self.len);
    }
}

const _: () = assert!(UNIT_BYTES.is_multiple_of(Grain::BYTES), "allocations begin where a grain can");
const _: () = assert!(ARENA_BYTES >= HASHED_BYTES, "arenas are mapped apart");

#[cfg(test)]
mod tests {
    use super::*;

    fn place(memory: &dyn Allocation) -> (usize, usize) {
        let bytes = memory.bytes();
        (bytes.as_ptr().addr(), bytes.len())
    }

    #[test]
    fn memory_that_is_given_back_is_given_away_again_as_zeros() {
        let heap = Arc::new(Heap::default());
        let mut memory = heap.allocate(5000).unwrap();
        let first = place(&*memory);
        memory.bytes_mut().fill(7);
        drop(memory);
        let memory = heap.allocate(8000).unwrap();
        assert_eq!(place(&*memory), (first.0, 8000));
        assert!(memory.bytes().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn what_is_free_is_the_systems_again_before_the_heap_grows() {
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
        let places = [place(&*memory), place(&*last)];
        drop((memory, last));
        assert_eq!(held(&heap), touched, "the next of this size need not find its pages again");
        let large = heap.allocate(ARENA_BYTES).unwrap();
        assert!(large.bytes().iter().step_by(UNIT_BYTES << 10).all(|&byte| byte == 0));
        assert_eq!(held(&heap), touched - 2 * LEN);
        assert_eq!((before.bytes(), between.bytes()), (&[7; UNIT_BYTES][..], &[7; UNIT_BYTES][..]));
        for expected in places {
            let again = heap.allocate(LEN).unwrap();
            assert_eq!(place(&*again), expected);
            assert!(again.bytes().iter().all(|&byte| byte == 0));
            std::mem::forget(again);
        }
    }

    #[test]
    fn holes_that_touch_become_one() {
        let heap = Arc::new(Heap::default());
        let mut all: Vec<_> = (0..4).map(|_| heap.allocate(UNIT_BYTES)).collect();
        for number in [1, 3, 2, 0] {
            all[number] = None;
        }
        let holes = heap.arenas()[0].holes.clone();
        assert_eq!(holes, BTreeMap::from([(0, ARENA_BYTES)]));
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
