//! The shared memory of a group in use: calls, signals, waits, and copies.
#![allow(unsafe_code, reason = "mapped memory is reached under the contract of `Direct`")]

mod exposed;
mod probe;
mod waiting;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use self::exposed::Located;
use super::failure::{ErrorContext, PeerError};
use crate::bookkeeping::CallHistory;
use crate::bootstrap::session::{Membership, WAITING_LIMIT};
use crate::direct::sealed::Sealed;
use crate::link::counts::MessageCounts;
use crate::link::message::LinkError;
use crate::processor::is_intel;
use crate::runtime::{Unparker, Wake};
use crate::shm::{
    self, CopyPolicy, Generation, GroupMemory, LONG_BYTES, Mapping, Process, RegionOrigin, RemoteRegion,
};
use crate::wait::external_load::ExternalLoad;
use crate::wait::group_wait::GroupWaitPolicy;
use crate::{
    AbandonHandle, Activity, CALLS_MAX, CHANGED_MAX, CallEntry, ChannelId, Deadline, Direct, DirectCall,
    Error, ExposedRegion, Fingerprint, Grain, GroupLayout, LazyDeadline, Lent, Place, Rank, Reach, Result,
    Traffic,
};

/// One rank's handle on its group's shared memory.
#[derive(Debug)]
pub(super) struct ShmGroup {
    memory: Arc<GroupMemory>,
    membership: Arc<Membership>,
    channel: ChannelId,
    rank: Rank,
    /// The ranks of the group, as numbered in the world.
    members: Vec<usize>,
    /// The last calls of the transport, for reports of long waits.
    calls: CallHistory,
    /// The message counts of the transport, for the same reports.
    counts: Arc<MessageCounts>,
    wait_policy: GroupWaitPolicy,
    /// Measures who had this core recently, while yields are measured.
    external_load: Option<ExternalLoad>,
    /// Whether this rank waits for the other ranks in each call, even if it could run ahead. Running ahead
    /// saves switches between ranks on one core. With a core per rank, cache lines move faster between ranks
    /// that stay in lockstep.
    is_lockstep: bool,
    uses_short_slices: bool,
    /// Whether other ranks may sleep for a signal that this rank has given.
    owes_wake: bool,
    reach: Reach,
    current: CurrentCall,
    /// The last calls by the index of their generation, including the current one.
    entered: [Entered; CALLS_MAX],
    /// The regions that this rank exposed, by the index of the generation.
    regions: [RemoteRegion; CALLS_MAX],
    peers: Vec<GroupPeer>,
    /// The first call in which not all ranks were compared with this one.
    compared: usize,
    /// The deadline of the last call that exposed memory. Mappings made during a call finish by it.
    deadline: Deadline,
    /// The memory lent in the last call, until it is reclaimed.
    lent: Option<Lent>,
    /// The number of this memory within the process.
    group: u64,
    scratch: Vec<Grain>,
    copy_policy: CopyPolicy,
    traffic: Traffic,
}

/// The most published bytes of each rank that are prefetched: as many cache lines as a processor requests at
/// once.
const FETCHED_BYTES_MAX: usize = 1 << 10;

/// The call that this rank is in.
#[derive(Debug, Clone, Copy)]
struct CurrentCall {
    /// The number of the call, counted from 1.
    number: usize,
    /// Signals of each rank in all earlier calls.
    base: u64,
    /// Signals of each rank in this call.
    signals: u32,
    /// Signals of this rank so far.
    signalled: u32,
}

impl CurrentCall {
    #[inline(always)]
    const fn generation(&self) -> Generation {
        Generation::of(self.number)
    }
}

/// A call that other ranks may still be in.
#[derive(Debug, Clone, Copy, Default)]
struct Entered {
    hash: u64,
    /// Signals of each rank in all earlier calls.
    base: u64,
}

/// The state that this rank keeps about a peer.
#[derive(Debug, Clone, Default)]
struct GroupPeer {
    /// The number of signals seen, over all calls.
    seen: u64,
    /// The first call in which the peer was not yet compared with this rank.
    compared: usize,
    /// Mapped arenas of its heap, by number.
    arenas: Vec<Option<Arc<Mapping>>>,
    /// Its process, if this one can write there.
    process: Option<Arc<Process>>,
}

impl ShmGroup {
    pub(super) fn new(
        memory: GroupMemory,
        membership: &Arc<Membership>,
        (channel, calls, counts): (ChannelId, CallHistory, Arc<MessageCounts>),
        rank: Rank,
        members: Vec<usize>,
    ) -> Self {
        let memory = Arc::new(memory);
        let session = &membership.session;
        let group_waker = GroupWaker { memory: memory.clone(), rank: rank.index() };
        session.abort_state.add_sleeper(channel, Unparker::of(Arc::new(group_waker)));
        let peer = GroupPeer { compared: 1, ..GroupPeer::default() };
        Self {
            memory,
            channel,
            rank,
            calls,
            counts,
            wait_policy: GroupWaitPolicy::new(session.has_core_per_rank()),
            external_load: None,
            is_lockstep: session.has_core_per_rank(),
            uses_short_slices: false,
            owes_wake: false,
            reach: Reach::Slots,
            current: CurrentCall { number: 0, base: 0, signals: 0, signalled: 0 },
            entered: [Entered::default(); CALLS_MAX],
            regions: [RemoteRegion::NOTHING; CALLS_MAX],
            peers: vec![peer; members.len()],
            compared: 1,
            deadline: session.runtime.deadline(WAITING_LIMIT),
            lent: None,
            group: DirectCall::next_group(),
            scratch: Vec::new(),
            copy_policy: CopyPolicy::default(),
            traffic: Traffic::default(),
            members,
            membership: membership.clone(),
        }
    }

    /// Sets the fingerprint of the call that is entered next.
    #[inline]
    pub(super) fn begin(&mut self, call: &Fingerprint) {
        self.calls.begin(call);
    }

    pub(super) const fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Returns how many signals this rank has given, over all calls.
    pub(super) fn signals(&self) -> u64 {
        self.current.base + u64::from(self.current.signalled)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.rank.index();
        (0..self.rank.world_size()).filter(move |&peer| peer != me)
    }

    /// Returns the error of a call that has failed. The call may be one that other ranks are still in.
    #[cold]
    fn fail(&self, call: Generation, (peer, link_error): (usize, LinkError), deadline: Deadline) -> Error {
        self.memory.fail(self.rank.index());
        let session = &*self.membership.session;
        let call = self.memory.call(self.rank.index(), call);
        let context = ErrorContext { session, channel: self.channel, members: &self.members, call };
        context.fail(PeerError { activity: Activity::Receive, peer, link_error }, deadline)
    }

    /// Enters the next call. Ranks compare their calls by the fingerprint and by the plan digest.
    #[inline(always)]
    fn enter_next(&mut self, entry: CallEntry, due: &LazyDeadline<'_>) -> Result<()> {
        let CallEntry { rank, plan_digest, signals, slots } = entry;
        assert!(signals > 0 && rank == self.rank, "every rank enters for itself, and signals in every call");
        if self.lent.is_some() {
            // The memory was not reclaimed, so other ranks may still write there: it is never freed.
            self.lent = None;
        }
        let CurrentCall { number: last, base, signals: last_signals, .. } = self.current;
        let awaited_call = if self.is_lockstep { last } else { slots.awaited_call(last) };
        if self.compared <= awaited_call {
            self.wait_for_all_in(awaited_call, due)?;
        }
        let fingerprint = self.calls.current();
        let (me, number, base) = (self.rank.index(), last + 1, base + u64::from(last_signals));
        let (generation, hash) = (Generation::of(number), shm::hash(fingerprint).wrapping_add(plan_digest));
        // The first signal publishes all of this. Nobody needs the old contents, because all ranks have left
        // that call.
        self.memory.set_call(me, generation, fingerprint);
        // Stored after the last signal of the previous call: a rank that reads this hash instead of an older
        // one also sees that signal.
        self.memory.hash(me, generation).store(hash, Ordering::Release);
        self.entered[generation.index()] = Entered { hash, base };
        self.current = CurrentCall { number, base, signals, signalled: 0 };
        Ok(())
    }

    /// Copies bytes that a rank has published or exposed, with `copy` if they are mapped.
    ///
    /// # Safety
    /// See the contract of [`Direct`].
    #[inline]
    unsafe fn read_by(
        &mut self,
        copy: impl FnOnce(&[u8], &mut [u8]),
        (rank, place, offset): (usize, Place, usize),
        into: &mut [u8],
    ) -> Result<()> {
        let range = offset..offset.saturating_add(into.len());
        self.traffic.bytes_received += range.len() as u64;
        if place != Place::Memory {
            // SAFETY: as the caller has promised.
            let bytes =
                unsafe { self.memory.published(rank, self.current.generation(), place, range.clone()) };
            copy(bytes.ok_or_else(|| self.out_of_reach(rank, &range))?, into);
            return Ok(());
        }
        match self.locate(rank, &range, false)? {
            Located::Mapped(mapping, offset) => {
                // SAFETY: as the caller has promised.
                copy(unsafe { mapping.bytes(offset, into.len()) }, into);
            }
            Located::Process(process, address) => {
                shm::read_process(process, address, into).map_err(|error| self.system_error(rank, error))?;
            }
        }
        self.check_not_failed(rank)
    }

    /// Fails if the call has failed for a rank meanwhile. Bytes read from its exposed memory are then
    /// worthless, because the rank may have written there.
    fn check_not_failed(&self, rank: usize) -> Result<()> {
        if self.memory.has_failed(rank) {
            Err(self.fail(self.current.generation(), (rank, LinkError::Closed), self.by_now()))
        } else {
            Ok(())
        }
    }

    fn system_error(&self, rank: usize, error: std::io::Error) -> Error {
        let link_error =
            if self.memory.has_failed(rank) { LinkError::Closed } else { LinkError::of_system(error) };
        self.fail(self.current.generation(), (rank, link_error), self.by_now())
    }

    /// Returns the deadline for finding the reason of a failure. Exposed memory can be read long after the
    /// deadline of its call.
    fn by_now(&self) -> Deadline {
        self.membership.session.runtime.deadline(WAITING_LIMIT)
    }

    #[cold]
    fn out_of_reach(&self, rank: usize, range: &Range<usize>) -> Error {
        Error::OutOfReach { peer: self.members[rank], start: range.start, end: range.end }
    }
}

impl Sealed for ShmGroup {}

impl Direct for ShmGroup {
    fn shared(&self) -> GroupLayout {
        GroupLayout { fast_attach: is_intel(), ..GroupLayout::on_host(self.reach) }
    }

    #[inline]
    fn rank(&self) -> Rank {
        self.rank
    }

    fn call(&self) -> DirectCall {
        DirectCall { group: self.group, number: self.current.number }
    }

    #[inline]
    unsafe fn enter(
        &mut self,
        entry: CallEntry,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if !matches!(memory, ExposedRegion::Nothing) {
            self.deadline = due.deadline();
        }
        self.enter_next(entry, due)?;
        self.expose(memory);
        Ok(())
    }

    #[inline(always)]
    unsafe fn publish(&mut self, place: Place, offset: usize, bytes: &[u8]) {
        let (me, generation) = (self.rank.index(), self.current.generation());
        // On a shared core, ranks read better from caches, and a copy may be interrupted by any of them.
        let published = if bytes.len() < LONG_BYTES || !self.is_lockstep {
            // SAFETY: as the caller has promised.
            unsafe { self.memory.publish(me, generation, place, offset, bytes) }
        } else {
            let Self { memory, copy_policy, .. } = self;
            let write = &mut |place: &mut [u8]| copy_policy.copy(bytes, place);
            // SAFETY: as the caller has promised.
            unsafe { memory.fill(me, generation, place, offset..offset + bytes.len(), write) }
        };
        published.expect("bytes are published where there is room for them");
        self.traffic.bytes_sent += bytes.len() as u64;
    }

    #[inline]
    unsafe fn signal(&mut self) {
        self.current.signalled += 1;
        let signals = self.current.base + u64::from(self.current.signalled);
        // Release: a rank that sees the signal also sees everything written before it.
        self.memory.signals(self.rank.index(), self.current.generation()).store(signals, Ordering::Release);
        self.owes_wake = true;
    }

    #[inline(always)]
    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_in(self.current.number, rank, signals, due)
    }

    unsafe fn signal_and_wait(
        &mut self,
        entry: CallEntry,
        (holder, place, offset): (usize, Place, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.enter_next(entry, due)?;
        self.store_region(RemoteRegion::NOTHING);
        let rank = entry.rank;
        if holder == rank.index() {
            // SAFETY: as the caller has promised.
            unsafe { self.publish(place, offset, bytes) };
        } else {
            // SAFETY: as the caller has promised.
            unsafe { self.write(holder, place, offset, bytes) }?;
        }
        // SAFETY: as the caller has promised.
        unsafe { self.signal() };
        self.wake_waiters();
        let CurrentCall { number, .. } = self.current;
        if rank.world_size() == 2 {
            waiting::spin_delay();
            return self.wait_for_all(number, due);
        }
        // Prefetches the published bytes of one rank while waiting for the next one, which may need this core
        // first. A barrier publishes nothing, but its signal is in a flag line all the same.
        let (generation, range) =
            (self.current.generation(), offset..offset + bytes.len().clamp(1, FETCHED_BYTES_MAX));
        let fetch = |memory: &GroupMemory, peer| memory.fetch(peer, generation, place, range.clone());
        self.wait_for_each(number, fetch, due)?;
        // All ranks have left the previous call. The lines that they read then are fetched back while this
        // call's bytes are added.
        if is_intel() {
            self.memory.claim(rank.index(), Generation::of(number + 1), place, range);
        }
        Ok(())
    }

    #[inline]
    fn wake_waiters(&mut self) {
        // A fence must come between the signal and the look at sleeping ranks. It waits until the signal has
        // left this core.
        if std::mem::take(&mut self.owes_wake) {
            self.memory.wake_sleepers(self.rank);
        }
    }

    unsafe fn view(
        &mut self,
        rank: usize,
        place: Place,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.traffic.bytes_received += range.len() as u64;
        if place == Place::Memory {
            // SAFETY: as the caller has promised.
            return unsafe { self.view_exposed(rank, range, read) };
        }
        // SAFETY: as the caller has promised.
        match unsafe { self.memory.published(rank, self.current.generation(), place, range.clone()) } {
            Some(bytes) => read(0, bytes),
            None => return Err(self.out_of_reach(rank, &range)),
        }
        Ok(())
    }

    unsafe fn view_all(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        assert!(there.len() <= CHANGED_MAX, "so many are viewed at once");
        self.traffic.bytes_received += (there.len() * len) as u64;
        let mut all: [&[u8]; CHANGED_MAX] = [&[]; CHANGED_MAX];
        for (one, &(rank, offset)) in all.iter_mut().zip(there) {
            let range = offset..offset.saturating_add(len);
            // SAFETY: as the caller has promised.
            let bytes =
                unsafe { self.memory.published(rank, self.current.generation(), place, range.clone()) };
            *one = bytes.ok_or_else(|| self.out_of_reach(rank, &range))?;
        }
        read(&all[..there.len()]);
        Ok(())
    }

    unsafe fn read(&mut self, rank: usize, place: Place, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read_by(crate::copy, (rank, place, offset), into) }
    }

    unsafe fn read_non_temporal(
        &mut self,
        rank: usize,
        place: Place,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read_by(shm::copy_non_temporal, (rank, place, offset), into) }
    }

    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        shm::copy_non_temporal(from, into);
    }

    unsafe fn write(&mut self, rank: usize, place: Place, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len());
        self.traffic.bytes_sent += range.len() as u64;
        match place {
            Place::FlagLine | Place::EagerBuffer => Err(self.out_of_reach(rank, &range)),
            Place::Slot(_) => {
                // SAFETY: as the caller has promised.
                let written =
                    unsafe { self.memory.publish(rank, self.current.generation(), place, offset, bytes) };
                written.ok_or_else(|| self.out_of_reach(rank, &range))
            }
            // SAFETY: as the caller has promised.
            Place::Memory => unsafe { self.write_lent(rank, &range, bytes) },
        }
    }

    unsafe fn change(
        &mut self,
        place: Place,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        if there.len() > CHANGED_MAX {
            return Ok(false);
        }
        let range = |offset: usize| offset..offset.saturating_add(len);
        match place {
            Place::FlagLine | Place::EagerBuffer => {
                let nothing = |&(rank, offset)| Err(self.out_of_reach(rank, &range(offset)));
                return there.first().map_or(Ok(false), nothing);
            }
            Place::Slot(_) => {
                // SAFETY: as the caller has promised.
                let changed =
                    unsafe { self.memory.change(self.current.generation(), place, there, len, change) };
                changed.map_err(|(rank, offset)| self.out_of_reach(rank, &range(offset)))?;
            }
            // Does not check for a failed call: the memory is then leaked, and nobody reads it.
            Place::Memory => {
                let others = there.iter().all(|&(rank, _)| rank != self.rank.index());
                let rise = there.is_sorted_by(|(left, _), (right, _)| left < right);
                assert!(others && rise, "memory of other ranks is changed, in their order");
                let mut places: SmallVec<[(Arc<Mapping>, usize); CHANGED_MAX]> = SmallVec::new();
                for &(rank, offset) in there {
                    match self.locate(rank, &range(offset), true)? {
                        Located::Mapped(mapping, offset) => places.push((mapping, offset)),
                        Located::Process(..) => return Ok(false),
                    }
                }
                let places = places.iter().map(|(mapping, offset)| (&**mapping, *offset));
                // SAFETY: as the caller has promised; the arenas are of several other ranks, who share none.
                unsafe { shm::change(places, len, change) };
            }
        }
        let bytes = (there.len() * len) as u64;
        self.traffic.bytes_received += bytes;
        self.traffic.bytes_sent += bytes;
        Ok(true)
    }

    fn is_finished(&self) -> bool {
        let last = self.current.base + u64::from(self.current.signals);
        self.current.signalled == self.current.signals
            && self.others().all(|peer| self.peers[peer].seen >= last)
    }

    fn reclaim(&mut self) -> Option<Lent> {
        if self.is_finished() { self.lent.take() } else { None }
    }

    fn abandon_handle(&self) -> AbandonHandle {
        let (memory, membership) = (self.memory.clone(), self.membership.clone());
        let (me, region) = (self.rank.index(), self.regions[self.current.generation().index()]);
        AbandonHandle::new(move || {
            // Comes before the caller writes there: a rank that reads the new bytes also sees this flag.
            memory.fail(me);
            if let RemoteRegion { len, writable: false, origin: RegionOrigin::Heap { arena, offset } } =
                region
            {
                membership.session.heap.detach(arena, offset, len);
            }
        })
    }
}

impl Drop for ShmGroup {
    fn drop(&mut self) {
        // Comes before the exposed memory is used for something else.
        if self.current.signalled < self.current.signals {
            self.abandon();
        }
        let abort_state = &self.membership.session.abort_state;
        abort_state.remove_sleeper(self.channel);
        // After an abort the other ranks should see the abort, not a departure.
        if abort_state.get().is_none() {
            self.memory.leave(self.rank.index());
            self.memory.wake_sleepers(self.rank);
        }
    }
}

/// Wakes this rank from its sleep in the group's memory.
#[derive(Debug)]
struct GroupWaker {
    memory: Arc<GroupMemory>,
    rank: usize,
}

impl Wake for GroupWaker {
    fn wake(&self) {
        self.memory.wake(self.rank);
    }
}
