//! The pool of a host: one segment that its ranks have mapped, and that has memory for many groups.
//!
//! The first rank of the host creates the segment, and its service thread passes it to the others. A group then
//! needs no connection and no new mapping: the first member that comes takes memory from the pool and records it
//! under the group's channel, and the other members find it there.
//!
//! The record also decides. If a member has not mapped the pool yet, or no memory is free, the first member
//! records that the group agrees by messages on a segment of its own. So all members do the same.
//!
//! Memory is free again once every member has left the group. A process that dies leaves no group, so memory that
//! another process still reads is never used again.
#![allow(unsafe_code, reason = "mapped memory cannot be reached otherwise")]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::PAGE_BYTES;
use super::group_memory::{BLOCK_BYTES, GroupMemory, HEAD_BYTES, LARGE_BYTES, PAIR_BYTES, Place};
use super::mapping::Mapping;
use super::spin_lock;
use crate::{ChannelId, Rank};

/// The most members of a group in the pool. Larger groups have segments of their own.
pub(crate) const POOL_MEMBERS_MAX: usize = 64;
/// The most ranks of a job whose hosts have pools.
pub(crate) const POOL_RANKS_MAX: usize = 4096;

/// Words of the bitmap of used units. The units of a group are in one word.
const BITMAP_WORDS: usize = 2;
/// Units of the pool: the memory of one member each.
const UNITS: usize = BITMAP_WORDS * 64;
/// Units that keep their pages when they are free. Groups use the first free units, so these are used again soon. Their pages
/// stay on the NUMA node of the rank that used them first.
const KEPT_UNITS: usize = 16;
/// Records of the table, a power of two. A process can map fewer segments than this.
const RECORDS: usize = 1 << 16;

const LOCK_AT: usize = 0;
const BITMAP_AT: usize = 128;
const RANKS_AT: usize = PAGE_BYTES;
const RECORDS_AT: usize = RANKS_AT + POOL_RANKS_MAX * size_of::<u32>();
const RECORD_BYTES: usize = 32;
const HEADS_AT: usize = RECORDS_AT + RECORDS * RECORD_BYTES;
const BLOCKS_AT: usize = HEADS_AT + UNITS * HEAD_BYTES;
const _: () = assert!(BLOCKS_AT.is_multiple_of(PAIR_BYTES), "blocks begin at pairs of cache lines");
/// Half a page behind the beginning of a page, as in a segment of one group.
const LARGE_AT: usize = (BLOCKS_AT + UNITS * BLOCK_BYTES).next_multiple_of(PAGE_BYTES) + PAGE_BYTES / 2;
pub(crate) const POOL_BYTES: usize = (LARGE_AT + UNITS * LARGE_BYTES).next_multiple_of(PAGE_BYTES);

/// The number by which other processes ask for the pool among the arenas of the heap.
pub(crate) const POOL_NUMBER: u32 = u32::MAX;

/// The pool, as mapped by this process.
#[derive(Debug)]
pub(crate) struct GroupPool {
    mapping: Mapping,
    /// `true` if this process has waited for the lock in vain. It does not wait again.
    is_lost: AtomicBool,
}

/// This process's access to the pool of its host. It tries to map the pool once.
#[derive(Debug, Default)]
pub(crate) struct PoolHandle(OnceLock<Option<Arc<GroupPool>>>);

impl PoolHandle {
    /// Returns the pool if this process has mapped it.
    pub(crate) fn get(&self) -> Option<&Arc<GroupPool>> {
        self.0.get()?.as_ref()
    }

    /// Returns the pool. At the first call, `map` maps it for this rank of the world.
    pub(crate) fn get_or_map(
        &self,
        rank: usize,
        map: impl FnOnce() -> Option<Arc<GroupPool>>,
    ) -> Option<&Arc<GroupPool>> {
        let pool = self.0.get_or_init(|| map().inspect(|pool| pool.record_mapped(rank)));
        pool.as_ref()
    }
}

/// The memory that the members of a group use.
#[derive(Debug)]
pub(crate) enum PoolEntry {
    /// Memory of the pool.
    Memory(GroupMemory),
    /// A segment of their own, on which they agree by messages.
    Messages(PoolLease),
}

/// A member's place in the record of its group. Dropping it leaves the group.
#[derive(Debug)]
pub(crate) struct PoolLease {
    pool: Arc<GroupPool>,
    channel: ChannelId,
    rank: Rank,
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        if let Some(locked) = self.pool.lock() {
            locked.leave(self.channel, self.rank);
        }
    }
}

/// The state of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    /// Members have left, and none has needed memory yet.
    Open,
    /// The group agrees by messages.
    Messages,
    /// The group has the units from this one on.
    Units(usize),
}

impl Decision {
    const fn encode(self) -> u64 {
        match self {
            Self::Open => 0,
            Self::Messages => 1,
            Self::Units(first) => 2 + first as u64,
        }
    }

    fn decode(word: u64) -> Self {
        match word {
            0 => Self::Open,
            1 => Self::Messages,
            word => Self::Units(usize::try_from(word - 2).unwrap_or(0) % UNITS),
        }
    }
}

/// One record of the table: what a group has decided, and the members that have left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PoolRecord {
    /// The channel of the group; 0 if the record is free.
    key: u64,
    decision: Decision,
    /// One bit for each member.
    left: u64,
}

impl PoolRecord {
    const FREE: Self = Self { key: 0, decision: Decision::Open, left: 0 };
}

impl GroupPool {
    /// Creates the pool of a host, with the descriptor that lets other processes map it.
    pub(crate) fn create() -> io::Result<(OwnedFd, Self)> {
        let (file, mapping) = Mapping::create(POOL_BYTES)?;
        Ok((file, Self::of(mapping)))
    }

    /// Returns the pool that another process has created.
    pub(crate) fn open(mapping: Mapping) -> Option<Self> {
        mapping.holds(0, POOL_BYTES).then(|| Self::of(mapping))
    }

    fn of(mapping: Mapping) -> Self {
        Self { mapping, is_lost: AtomicBool::new(false) }
    }

    /// Records that a rank of the world has mapped the pool, and takes the memory of its groups from it.
    pub(crate) fn record_mapped(&self, rank: usize) {
        self.mapped(rank).store(1, Ordering::Release);
    }

    /// Enters a group, whose members are numbered as in the world. Returns `None` if another process keeps the
    /// table locked.
    pub(crate) fn enter(
        self: &Arc<Self>,
        channel: ChannelId,
        rank: Rank,
        members: &[usize],
    ) -> Option<PoolEntry> {
        let lease = || PoolLease { pool: self.clone(), channel, rank };
        let decision = self.lock()?.enter(channel, members);
        Some(match decision {
            Decision::Units(first) => PoolEntry::Memory(self.memory(first, members.len(), Some(lease()))),
            Decision::Open | Decision::Messages => PoolEntry::Messages(lease()),
        })
    }

    /// Leaves a group in which this rank has not used shared memory.
    pub(crate) fn leave_unused(&self, channel: ChannelId, rank: Rank) {
        let Some(locked) = self.lock() else { return };
        if let Some(PoolRecord { decision: Decision::Units(first), .. }) = locked.record(channel) {
            let memory = self.memory(first, rank.world_size(), None);
            memory.leave(rank.index());
            memory.wake_sleepers(rank);
        }
        locked.leave(channel, rank);
    }

    fn memory(&self, first: usize, members: usize, lease: Option<PoolLease>) -> GroupMemory {
        let place = Place {
            head_at: HEADS_AT + first * HEAD_BYTES,
            blocks_at: BLOCKS_AT + first * BLOCK_BYTES,
            slots_at: LARGE_AT + first * LARGE_BYTES,
        };
        GroupMemory::in_pool(self.mapping.clone(), place, members, lease)
    }

    /// Locks the table and the bitmap. Returns `None` if they stay locked: then a process was stopped or has ended
    /// in between.
    fn lock(&self) -> Option<LockedPool<'_>> {
        let may_wait = !self.is_lost.load(Ordering::Relaxed);
        let is_locked = spin_lock::acquire(self.word(LOCK_AT), may_wait);
        self.is_lost.store(!is_locked, Ordering::Relaxed);
        is_locked.then_some(LockedPool(self))
    }

    fn mapped(&self, rank: usize) -> &AtomicU32 {
        assert!(rank < POOL_RANKS_MAX, "larger jobs have no pool");
        self.word(RANKS_AT + rank * size_of::<u32>())
    }

    fn used(&self, word: usize) -> &AtomicU64 {
        self.counter(BITMAP_AT + 8 * word)
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the lock and the words of ranks lie where nothing else does, and are reached as words only.
        unsafe { self.mapping.word(at) }
    }

    fn counter(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the bitmap lies where nothing else does, and is reached as counters only.
        unsafe { self.mapping.counter(at) }
    }
}

/// The table and the bitmap, while this process has them locked.
struct LockedPool<'a>(&'a GroupPool);

impl Drop for LockedPool<'_> {
    fn drop(&mut self) {
        spin_lock::release(self.0.word(LOCK_AT));
    }
}

impl LockedPool<'_> {
    /// Returns the decision of a group. The first member that enters decides.
    fn enter(&self, channel: ChannelId, members: &[usize]) -> Decision {
        let Some(at) = self.find_or_insert(channel) else { return Decision::Messages };
        let mut record = self.load(at);
        if record.decision == Decision::Open {
            let all_mapped = members.iter().all(|&member| self.0.mapped(member).load(Ordering::Acquire) != 0);
            let units = all_mapped.then(|| self.take_units(members.len())).flatten();
            record.decision = units.map_or(Decision::Messages, Decision::Units);
            if let Some(first) = units {
                let memory = self.0.memory(first, members.len(), None);
                // SAFETY: the units were free, so no process uses their memory.
                unsafe { memory.reset() };
                (0..members.len()).filter(|rank| record.left & (1 << rank) != 0).for_each(|rank| {
                    memory.leave(rank);
                });
            }
            self.store(at, record);
        }
        record.decision
    }

    /// Records that a member has left a group. If it is the last one, the memory of the group is free.
    fn leave(&self, channel: ChannelId, rank: Rank) {
        let Some(at) = self.find_or_insert(channel) else { return };
        let mut record = self.load(at);
        record.left |= 1 << rank.index();
        self.store(at, record);
        if record.left.count_ones() as usize == rank.world_size() {
            if let Decision::Units(first) = record.decision {
                self.give_units(first, rank.world_size());
            }
            self.remove(at);
        }
    }

    /// Takes this many consecutive units of one word of the bitmap, the first that are free.
    fn take_units(&self, count: usize) -> Option<usize> {
        let mask = u64::MAX >> (64 - count);
        (0..BITMAP_WORDS).find_map(|word| {
            let used = self.0.used(word).load(Ordering::Relaxed);
            let shift = (0..=64 - count).find(|shift| used & (mask << shift) == 0)?;
            self.0.used(word).store(used | (mask << shift), Ordering::Relaxed);
            Some(64 * word + shift)
        })
    }

    /// Frees units. Returns pages to the system, except those of the first units.
    fn give_units(&self, first: usize, count: usize) {
        let end = first + count;
        if end > KEPT_UNITS {
            let start = LARGE_AT + first.max(KEPT_UNITS) * LARGE_BYTES;
            // SAFETY: all members have left, so no process uses this memory.
            unsafe { self.0.mapping.return_pages(start..LARGE_AT + end * LARGE_BYTES) };
        }
        let (word, mask) = (first / 64, (u64::MAX >> (64 - count)) << (first % 64));
        let used = self.0.used(word).load(Ordering::Relaxed);
        self.0.used(word).store(used & !mask, Ordering::Relaxed);
    }

    /// Returns the record of a channel, if there is one.
    fn record(&self, channel: ChannelId) -> Option<PoolRecord> {
        let record = self.load(self.position(key(channel))?);
        (record.key != 0).then_some(record)
    }

    /// Returns the number of a channel's record. Returns `None` if the table is full.
    fn find_or_insert(&self, channel: ChannelId) -> Option<usize> {
        let at = self.position(key(channel))?;
        if self.load(at).key == 0 {
            self.store(at, PoolRecord { key: key(channel), ..PoolRecord::FREE });
        }
        Some(at)
    }

    /// Returns the number of the record with this key, or of the free record in which it would be.
    fn position(&self, key: u64) -> Option<usize> {
        (0..RECORDS).map(|step| (home(key) + step) % RECORDS).find(|&at| {
            let found = self.load(at).key;
            found == key || found == 0
        })
    }

    /// Frees a record. Later records move up, so that searches still find them.
    fn remove(&self, at: usize) {
        let distance = |from: usize, to: usize| to.wrapping_sub(from) % RECORDS;
        let (mut hole, mut next) = (at, (at + 1) % RECORDS);
        loop {
            let record = self.load(next);
            if record.key == 0 || next == at {
                break;
            }
            if distance(home(record.key), next) >= distance(hole, next) {
                self.store(hole, record);
                hole = next;
            }
            next = (next + 1) % RECORDS;
        }
        self.store(hole, PoolRecord::FREE);
    }

    fn load(&self, at: usize) -> PoolRecord {
        // SAFETY: records lie where nothing else does, and are reached as words only.
        let [key, decision, left] = unsafe { self.0.mapping.load(RECORDS_AT + at * RECORD_BYTES) };
        PoolRecord { key, decision: Decision::decode(decision), left }
    }

    fn store(&self, at: usize, PoolRecord { key, decision, left }: PoolRecord) {
        // SAFETY: as for `load`.
        unsafe {
            self.0.mapping.store(RECORDS_AT + at * RECORD_BYTES, [key, decision.encode(), left]);
        }
    }
}

/// Returns the key of a channel, which is not 0. The ids of forks are odd.
const fn key(channel: ChannelId) -> u64 {
    if channel.get() == 0 { 2 } else { channel.get() }
}

/// Returns the number of the record from which on a key is searched. Ids of channels are hashes already.
const fn home(key: u64) -> usize {
    (key >> 32) as usize % RECORDS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::Generation;
    use super::*;

    fn pool(mapped: usize) -> Arc<GroupPool> {
        let (_file, pool) = GroupPool::create().unwrap();
        (0..mapped).for_each(|rank| pool.record_mapped(rank));
        Arc::new(pool)
    }

    fn channel(number: u64) -> ChannelId {
        ChannelId::WORLD.child(number, &[0, 1])
    }

    fn enter(pool: &Arc<GroupPool>, channel: ChannelId, rank: usize, members: &[usize]) -> PoolEntry {
        pool.enter(channel, Rank::new(rank, members.len()).unwrap(), members).unwrap()
    }

    fn memory(pool: &Arc<GroupPool>, channel: ChannelId, rank: usize, members: &[usize]) -> GroupMemory {
        match enter(pool, channel, rank, members) {
            PoolEntry::Memory(memory) => memory,
            PoolEntry::Messages(_) => panic!("there is memory for {channel:?}"),
        }
    }

    fn used(pool: &GroupPool) -> u32 {
        (0..BITMAP_WORDS).map(|word| pool.used(word).load(Ordering::Relaxed).count_ones()).sum()
    }

    /// Writes a signal count, by which the memory of two groups can be told apart.
    fn mark(memory: &GroupMemory, value: u64) {
        memory.signals(0, Generation::of(1)).store(value, Ordering::Relaxed);
    }

    fn marked(memory: &GroupMemory) -> u64 {
        memory.signals(0, Generation::of(1)).load(Ordering::Relaxed)
    }

    #[test]
    fn members_of_a_group_find_the_same_memory_and_other_groups_do_not() {
        let pool = pool(3);
        let (one, other) = (memory(&pool, channel(1), 0, &[0, 1]), memory(&pool, channel(2), 0, &[1, 2]));
        mark(&one, 7);
        mark(&other, 8);
        assert_eq!(marked(&memory(&pool, channel(1), 1, &[0, 1])), 7);
        assert_eq!(marked(&memory(&pool, channel(2), 1, &[1, 2])), 8);
    }

    #[test]
    fn memory_is_used_again_and_is_zero_once_every_member_has_left() {
        let pool = pool(2);
        let [first, second] = [0, 1].map(|rank| memory(&pool, channel(1), rank, &[0, 1]));
        mark(&first, 7);
        first.leave(0);
        drop(first);
        assert_eq!((used(&pool), marked(&second)), (2, 7), "a member still has it");
        drop(second);
        assert_eq!(used(&pool), 0);
        let again = memory(&pool, channel(2), 0, &[0, 1]);
        assert_eq!((marked(&again), again.has_left(0)), (0, false));
    }

    #[test]
    fn memory_of_a_member_that_dies_is_never_used_again() {
        let pool = pool(2);
        let [first, second] = [0, 1].map(|rank| memory(&pool, channel(1), rank, &[0, 1]));
        // A process that dies drops nothing.
        std::mem::forget(second);
        mark(&first, 7);
        drop(first);
        let next = memory(&pool, channel(2), 0, &[0, 1]);
        assert_eq!((used(&pool), marked(&next)), (4, 0));
    }

    #[test]
    fn a_member_that_leaves_before_it_uses_the_memory_is_noticed_and_counted() {
        let (pool, members) = (pool(2), [0, 1]);
        let [zero, one] = [0, 1].map(|rank| Rank::new(rank, 2).unwrap());
        pool.leave_unused(channel(1), one);
        let late = memory(&pool, channel(1), 0, &members);
        assert!(late.has_left(1) && !late.has_left(0));
        drop(late);
        let early = memory(&pool, channel(2), 1, &members);
        pool.leave_unused(channel(2), zero);
        assert!(early.has_left(0) && !early.has_left(1));
        drop(early);
        assert_eq!(used(&pool), 0);
        for rank in [zero, one] {
            pool.leave_unused(channel(3), rank);
        }
        let locked = pool.lock().unwrap();
        assert!((0..RECORDS).all(|at| locked.load(at) == PoolRecord::FREE));
    }

    #[test]
    fn a_group_with_a_member_that_has_not_mapped_the_pool_agrees_by_messages_for_good() {
        let pool = pool(1);
        let first = enter(&pool, channel(1), 0, &[0, 1]);
        assert!(matches!(first, PoolEntry::Messages(_)));
        pool.record_mapped(1);
        assert!(matches!(enter(&pool, channel(1), 1, &[0, 1]), PoolEntry::Messages(_)));
        assert!(matches!(enter(&pool, channel(2), 1, &[0, 1]), PoolEntry::Memory(_)));
    }

    #[test]
    fn groups_agree_by_messages_while_no_memory_is_free() {
        const MANY: usize = POOL_MEMBERS_MAX - 1;
        let pool = pool(MANY);

        let members: Vec<usize> = (0..MANY).collect();
        let mut all: Vec<_> =
            (0..BITMAP_WORDS as u64).map(|number| memory(&pool, channel(number), 0, &members)).collect();
        assert!(matches!(enter(&pool, channel(7), 0, &members), PoolEntry::Messages(_)));
        let (number, last) = (all.len() as u64 - 1, all.pop());
        drop(last);
        (1..MANY).for_each(|rank| drop(memory(&pool, channel(number), rank, &members)));
        assert!(matches!(enter(&pool, channel(8), 0, &members), PoolEntry::Memory(_)));
    }

    #[test]
    fn pages_of_units_behind_the_first_are_returned() {
        let members: Vec<usize> = (0..KEPT_UNITS + 1).collect();
        let (file, pool) = GroupPool::create().unwrap();
        let pool = Arc::new(pool);
        members.iter().for_each(|&rank| pool.record_mapped(rank));
        let held = || rustix::fs::fstat(&file).unwrap().st_blocks;
        let all: Vec<_> = members.iter().map(|&rank| memory(&pool, channel(1), rank, &members)).collect();
        let before = held();
        let place = crate::shm_group::MemoryArea::Slot(0);
        for rank in [0, KEPT_UNITS] {
            // SAFETY: nobody else has the memory.
            unsafe { all[0].publish(rank, Generation::of(0), place, 0, &[1; 8 * PAGE_BYTES]) }.unwrap();
        }
        let written = held();
        drop(all);
        let kept = (held() - before) * 2;
        assert!(written > before && (kept - (written - before)).abs() <= 2 * (PAGE_BYTES / 512) as i64);
    }

    proptest! {
        #[test]
        fn no_two_groups_have_the_same_memory(steps in prop::collection::vec((0_u64..6, 0_usize..3), 1..120)) {
            let pool = pool(3);
            let members = [0, 1, 2];
            let mut entered: BTreeMap<(u64, usize), GroupMemory> = BTreeMap::new();
            let mut incarnation: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
            for (group, rank) in steps {
                // Each group is left by all of its members before another one takes its name.
                let (number, left) = *incarnation.entry(group).or_insert((group, 0));
                if let Some(memory) = entered.remove(&(group, rank)) {
                    prop_assert_eq!(marked(&memory), number + 1);
                    drop(memory);
                    let left = left | 1 << rank;
                    let next = if left == 0b111 { (number + 6, 0) } else { (number, left) };
                    incarnation.insert(group, next);
                } else if left & (1 << rank) == 0 {
                    let memory = memory(&pool, channel(number), rank, &members);
                    let found = marked(&memory);
                    prop_assert!(found == 0 || found == number + 1);
                    mark(&memory, number + 1);
                    entered.insert((group, rank), memory);
                }
            }
            entered.clear();
        }
    }
}
