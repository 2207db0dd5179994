//! The `ShmGroup` of processes, in memory that all of them map: calls, signals, waits and copies.
#![allow(unsafe_code, reason = "mapped memory is reached under the contract of `ShmGroup`")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;

use crate::bookkeeping::CallHistory;
use crate::bootstrap::channels::ForkPath;
use crate::bootstrap::control::{Missing, WaitReport};
use crate::bootstrap::failure::{ErrorContext, PeerError};
use crate::bootstrap::session::{LongWait, Membership, ProvenReach, WAITING_LIMIT, lock, number};
use crate::bootstrap::{auth, dial};
use crate::cpu::CacheLine;
use crate::cpu::copy_policy::{CopyPolicy, LONG_BYTES};
use crate::cpu::tuning;
use crate::host_memory::mapping::MappedView;
use crate::host_memory::{self, Generation, GroupMemory, Mapping, Process, RegionOrigin, RemoteRegion};
use crate::link::counts::MessageCounts;
use crate::link::message::LinkError;
use crate::runtime::{Unparker, Wake};
use crate::shm_group::sealed::Sealed;
use crate::shm_group::{
    AbandonHandle, CALLS_MAX, CHANGED_MAX, CallEntry, DirectCall, ExposedRegion, ExposedView, GroupLayout,
    Lent, MemoryArea, Reach, ShmGroup, SlotUse, WordSize, WordUpdate,
};
use crate::wait::{CoreDemand, Wait, WaitPolicy, WaitStep};
use crate::{Activity, ChannelId, Deadline, Error, Fingerprint, LazyDeadline, Owned, Rank, Result, Traffic};

/// One rank's handle on the mapped memory of its group.
///
/// The system lets one process access another's memory depending on users, namespaces, capabilities and
/// filters, and does not say whether it will. So every rank reads a random number from every other rank and
/// writes it back. If one access fails anywhere, no rank uses it. A rank that finds the number has the right
/// process. It keeps a descriptor of the process, because the number of an ended process may be reused.
#[derive(Debug)]
pub(crate) struct MappedGroup {
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
    /// The forks that made the channel, by which other ranks are asked about it.
    origin: Option<ForkPath>,
    wait_policy: WaitPolicy,
    /// `true` if this rank waits for the other ranks in each call, even if it could run ahead. Running ahead
    /// saves switches between ranks on one core. With a core per rank, cache lines move faster between ranks
    /// that stay in lockstep.
    is_lockstep: bool,
    uses_short_slices: bool,
    /// `true` if other ranks may sleep for a signal that this rank has given.
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
    /// Memory for the bytes that one system call reads from another process.
    piece_buffer: Vec<CacheLine>,
    copy_policy: CopyPolicy,
    traffic: Traffic,
}

/// The most published bytes of each rank that are prefetched: as many cache lines as a processor requests at
/// once.
const FETCHED_BYTES_MAX: usize = 1 << 10;

/// Bytes that one system call reads from another process: small enough for the cache.
const PIECE_BYTES: usize = 128 << 10;

/// The scheduler slice that ranks ask for under external load: the shortest that the system grants.
const SHORT_SLICE: Duration = Duration::from_micros(100);

/// The number of polls of the signal count between two checks of the clock and the abort state, which take longer.
const LOOKS: usize = 16;

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
    /// The peer's process, if this process can write into its memory.
    process: Option<Arc<Process>>,
}

impl MappedGroup {
    pub(crate) fn new(
        memory: GroupMemory,
        membership: &Arc<Membership>,
        (channel, origin, calls, counts): (ChannelId, Option<ForkPath>, CallHistory, Arc<MessageCounts>),
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
            origin,
            wait_policy: WaitPolicy::new(session.has_core_per_rank()),
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
            group: DirectCall::new_group_number(),
            piece_buffer: Vec::new(),
            copy_policy: CopyPolicy::default(),
            traffic: Traffic::default(),
            members,
            membership: membership.clone(),
        }
    }

    /// Sets the fingerprint of the call that is entered next.
    #[inline]
    pub(crate) fn begin(&mut self, call: &Fingerprint) {
        self.calls.begin(call);
    }

    pub(crate) const fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Returns the number of signals that this rank has given, over all calls.
    pub(crate) fn signals(&self) -> u64 {
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
        let (generation, hash) =
            (Generation::of(number), host_memory::hash(fingerprint).wrapping_add(plan_digest));
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
    /// See the contract of [`ShmGroup`].
    #[inline]
    unsafe fn read_by(
        &mut self,
        copy: impl FnOnce(&[u8], &mut [u8]),
        (rank, place, offset): (usize, MemoryArea, usize),
        into: &mut [u8],
    ) -> Result<()> {
        let range = offset..offset.saturating_add(into.len());
        self.traffic.bytes_received += range.len() as u64;
        if place != MemoryArea::Exposed {
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
                host_memory::read_process(process, address, into)
                    .map_err(|error| self.system_error(rank, error))?;
            }
        }
        self.check_not_failed(rank)
    }

    /// Returns an error if the current call has failed for a rank. Bytes that were read from its exposed memory
    /// are then invalid, because the rank may have written there since.
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
        Error::OutOfReach {
            peer: self.membership.session.rank_in_job(self.members[rank]),
            start: range.start,
            end: range.end,
        }
    }

    /// Waits until every rank has signalled in this call, which is one of the last calls.
    #[inline(never)]
    fn wait_for_all_in(&mut self, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_for_all(call, due)
    }

    #[inline(always)]
    fn wait_for_all(&mut self, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_for_each(call, |_, _| {}, due)
    }

    /// Like `wait_for_all`, and calls `seen` with each rank as soon as it has signalled.
    #[inline(always)]
    fn wait_for_each(
        &mut self,
        call: usize,
        mut seen: impl FnMut(&GroupMemory, usize),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let mut peer = self.rank;
        for _ in 1..self.rank.world_size() {
            peer = peer.right();
            self.wait_in(call, peer.index(), 1, due)?;
            seen(&self.memory, peer.index());
        }
        self.compared = call + 1;
        Ok(())
    }

    /// Waits until a rank has signalled this many times in one of the last calls.
    #[inline(always)]
    fn wait_in(&mut self, call: usize, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        let generation = Generation::of(call);
        let Entered { hash, base } = self.entered[generation.index()];
        let wanted = base + u64::from(signals);
        if self.peers[rank].seen < wanted {
            let seen = match self.memory.look(rank, generation, wanted, 1) {
                Some(seen) => seen,
                None => self.wait_for((rank, generation), wanted, due)?,
            };
            self.peers[rank].seen = seen;
        }
        let compared = self.peers[rank].compared;
        if compared <= call && signals > 0 {
            if compared < call || self.memory.hash(rank, generation).load(Ordering::Acquire) != hash {
                (compared..=call).try_for_each(|call| self.compare(rank, call, due))?;
            }
            self.peers[rank].compared = call + 1;
        }
        Ok(())
    }

    /// Checks that a rank which has signalled in one of the last calls was in the same call as this rank.
    #[cold]
    fn compare(&self, rank: usize, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        let generation = Generation::of(call);
        let Entered { hash, base } = self.entered[generation.index()];
        let found = || self.memory.hash(rank, generation).load(Ordering::Acquire);
        let in_line_before = || self.memory.signals(rank, generation.before_next()).load(Ordering::Acquire);
        if host_memory::is_same_call((hash, base), found, in_line_before) {
            return Ok(());
        }
        let link_error = LinkError::Mismatch { theirs: self.memory.call(rank, generation) };
        Err(self.fail(generation, (rank, link_error), due.deadline()))
    }

    /// Waits until the rank has signalled `wanted` times, and returns its number of signals.
    #[inline(never)]
    fn wait_for(
        &mut self,
        (peer, generation): (usize, Generation),
        wanted: u64,
        due: &LazyDeadline<'_>,
    ) -> Result<u64> {
        let signal = AwaitedSignal { peer, generation, wanted };
        if !self.is_wanted()
            && let Some(seen) = signal.look(&self.memory, LOOKS)
        {
            return Ok(seen);
        }
        let deadline = due.deadline();
        self.wait_long(signal, deadline)
            .map_err(|link_error| self.fail(generation, (peer, link_error), deadline))
    }

    fn wait_long(&mut self, signal: AwaitedSignal, deadline: Deadline) -> Result<u64, LinkError> {
        // The awaited rank may sleep for this one.
        self.wake_waiters();
        self.shorten_slices();
        let session = &*self.membership.session;
        let (mut wait, mut long) = (Wait::default(), LongWait::default());
        let mut now = session.runtime.now();
        let seen = loop {
            let demand = if self.is_wanted() { CoreDemand::Wanted } else { CoreDemand::Free };
            match self.wait_policy.next(&mut wait, now, demand) {
                WaitStep::Spin => {}
                WaitStep::Yield => {
                    self.wait_policy.yield_to_rank((&self.memory, self.rank), now, &session.runtime);
                }
                WaitStep::Sleep => self.sleep(signal, deadline, &mut long),
            }
            let looks = if demand == CoreDemand::Wanted { 1 } else { LOOKS };
            if let Some(seen) = signal.look(&self.memory, looks) {
                break seen;
            }
            if let Some(seen) = self.look_at_end(signal, &long)? {
                break seen;
            }
            now = session.runtime.now();
            if deadline.has_passed(now) {
                return Err(LinkError::TimedOut);
            }
        };
        long.end(session, self.channel, &self.calls);
        Ok(seen)
    }

    /// Asks for short scheduler slices if any rank has detected external load.
    fn shorten_slices(&mut self) {
        if !self.uses_short_slices && self.memory.has_external_load() {
            self.uses_short_slices = true;
            if let Err(error) = host_memory::request_short_slices(SHORT_SLICE) {
                tracing::debug!(%error, "the system grants no short scheduler slices");
            }
        }
    }

    /// Sleeps until the signal arrives, the peer leaves, the job is aborted, or the deadline passes. A long
    /// wait is reported to the coordinator.
    fn sleep(&self, signal: AwaitedSignal, deadline: Deadline, long: &mut LongWait) {
        let session = &*self.membership.session;
        let limit = session.runtime.remaining(deadline.earlier(long.until(&session.runtime)));
        let ready = || {
            signal.look(&self.memory, 1).is_some()
                || self.memory.has_left(signal.peer)
                || session.abort_state.get().is_some()
        };
        self.memory.sleep(self.rank.index(), signal.peer, limit, ready);
        let seen = self.memory.all_signals(signal.peer, self.current.number);
        let wait = || WaitReport {
            on: number(self.members[signal.peer]),
            index: number(self.rank.index()),
            // A signal that has arrived meanwhile is not missing.
            missing: if seen < signal.wanted { Missing::Signal(seen) } else { Missing::Anything },
            messages: self.counts.sent(signal.peer),
            signals: self.signals(),
            is_only_call: self.counts.is_only_call(),
        };
        let is_reported = long.report_if_due(session, self.channel, &self.calls, wait);
        if is_reported && self.peers[signal.peer].seen == 0 {
            // The rank may have made another group at this point, or none.
            session.ask(self.members[signal.peer], self.origin);
        }
    }

    /// Returns an error if a rank that has never signalled is known to be in another group.
    #[cold]
    fn check_members(&self, peer: usize) -> Result<(), LinkError> {
        let (session, member) = (&self.membership.session, self.members[peer]);
        let theirs = session.channels.other_members(self.channel, member);
        theirs.map_or(Ok(()), |theirs| Err(LinkError::OtherMembers(theirs)))
    }

    /// Returns `true` if a rank has left this memory, or the channel before it used this memory.
    fn has_left(&self, peer: usize, long: &LongWait) -> bool {
        let may_ask = long.is_reported() && self.peers[peer].seen == 0;
        self.memory.has_left(peer)
            || may_ask && self.membership.session.has_left(self.channel, self.members[peer])
    }

    /// Returns an error if the job is aborted, or if the peer has left without giving the signal.
    fn look_at_end(&self, signal: AwaitedSignal, long: &LongWait) -> Result<Option<u64>, LinkError> {
        if let Some(abort) = self.membership.session.abort_state.get() {
            return Err(LinkError::Aborted(abort));
        }
        if long.is_reported() && self.peers[signal.peer].seen == 0 {
            self.check_members(signal.peer)?;
        }
        if !self.has_left(signal.peer, long) {
            return Ok(None);
        }
        // The rank may have signalled before it left.
        signal.look(&self.memory, 1).map(Some).ok_or(LinkError::Goodbye)
    }

    /// Returns `true` if a rank of the group that is behind this one needs this core to run.
    fn is_wanted(&self) -> bool {
        let (memory, call) = (&*self.memory, &self.current);
        let core = memory.record_core(self.rank.index());
        let come = call.base + u64::from(call.signalled);
        self.others().any(|peer| {
            memory.waits_for_core(peer, core) && memory.look(peer, call.generation(), come, 1).is_none()
        })
    }

    /// Publishes the region that this rank exposes in the current call, and keeps lent memory.
    #[inline(always)]
    fn expose(&mut self, memory: ExposedRegion<'_>) {
        let region = match memory {
            ExposedRegion::Nothing => RemoteRegion::NOTHING,
            ExposedRegion::Read(bytes) => self.region(bytes, false),
            ExposedRegion::Write(lent) => {
                let region = self.region(lent.bytes(), true);
                self.lent = Some(lent);
                region
            }
        };
        self.store_region(region);
    }

    fn region(&self, bytes: &[u8], writable: bool) -> RemoteRegion {
        RemoteRegion { len: bytes.len() as u64, writable, origin: self.origin(bytes) }
    }

    /// Publishes the exposed region for the other ranks, unless it is unchanged since the last call with the
    /// same index.
    #[inline]
    fn store_region(&mut self, region: RemoteRegion) {
        let generation = self.current.generation();
        if self.regions[generation.index()] != region {
            self.regions[generation.index()] = region;
            self.memory.expose(self.rank.index(), generation, region);
        }
    }

    /// Returns the location of exposed memory of this rank.
    fn origin(&self, memory: &[u8]) -> RegionOrigin {
        match self.membership.session.heap.find(memory) {
            Some((arena, offset)) => RegionOrigin::Heap { arena, offset },
            None => RegionOrigin::Process { address: memory.as_ptr().expose_provenance() as u64 },
        }
    }

    /// Calls `read` with memory that a rank has exposed.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`](crate::shm_group::ShmGroup).
    #[inline(never)]
    unsafe fn view_exposed(
        &mut self,
        rank: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        match self.locate(rank, &range, false)? {
            Located::Mapped(mapping, offset) => {
                // SAFETY: as the caller has promised.
                read(0, unsafe { mapping.bytes(offset, range.len()) });
            }
            Located::Process(process, address) => {
                let mut piece_buffer = std::mem::take(&mut self.piece_buffer);
                piece_buffer.resize(PIECE_BYTES / CacheLine::BYTES, CacheLine::ZERO);
                let pieces: &mut [u8] = bytemuck::cast_slice_mut(&mut piece_buffer);
                let outcome = (0..range.len()).step_by(PIECE_BYTES).try_for_each(|start| {
                    let piece = &mut pieces[..PIECE_BYTES.min(range.len() - start)];
                    host_memory::read_process(process, address + start as u64, piece)?;
                    read(start, piece);
                    Ok(())
                });
                self.piece_buffer = piece_buffer;
                outcome.map_err(|error| self.system_error(rank, error))?;
            }
        }
        self.check_not_failed(rank)
    }

    /// Copies bytes into memory that a rank has lent.
    ///
    /// # Safety
    /// See the contract of [`ShmGroup`](crate::shm_group::ShmGroup).
    #[inline(never)]
    unsafe fn write_lent(&mut self, rank: usize, range: &Range<usize>, bytes: &[u8]) -> Result<()> {
        match self.locate(rank, range, true)? {
            // SAFETY: as the caller has promised.
            Located::Mapped(mapping, offset) => unsafe { mapping.copy_in(offset, bytes) },
            Located::Process(_, address) => {
                let process = self.peers[rank].process.as_ref();
                let process = process.ok_or_else(|| self.out_of_reach(rank, range))?;
                // SAFETY: the rank has lent these bytes in this call, and frees them only after the call is
                // over for every rank.
                let written = unsafe { process.write(address, bytes) };
                written.map_err(|error| self.system_error(rank, error))?;
            }
        }
        Ok(())
    }

    /// Returns the mapped location of a range that a rank, or this rank, has lent.
    fn locate_words(&mut self, rank: usize, range: &Range<usize>) -> Result<(Arc<Mapping>, usize)> {
        match self.locate(rank, range, true)? {
            Located::Mapped(mapping, offset) => Ok((mapping, offset)),
            Located::Process(..) => Err(self.out_of_reach(rank, range)),
        }
    }

    /// Returns the location of a range that a rank has exposed.
    fn locate(&mut self, rank: usize, range: &Range<usize>, to_write: bool) -> Result<Located> {
        let region = self.memory.region(rank, self.current.generation());
        let inside = range.start <= range.end && range.end as u64 <= region.len;
        let allowed = region.writable || !to_write;
        let reach = if to_write { Reach::Write } else { Reach::Read };
        match region.origin {
            RegionOrigin::Heap { arena, offset } if inside && allowed => {
                let arena = self.arena(rank, arena)?;
                let begin = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(range.start));
                match begin.filter(|&begin| arena.holds(begin, range.len())) {
                    Some(begin) => Ok(Located::Mapped(arena, begin)),
                    None => Err(self.out_of_reach(rank, range)),
                }
            }
            RegionOrigin::Process { address } if inside && allowed && self.reach >= reach => {
                let process = self.memory.process(rank).load(Ordering::Relaxed).cast_signed();
                Ok(Located::Process(process, address.wrapping_add(range.start as u64)))
            }
            _ => Err(self.out_of_reach(rank, range)),
        }
    }

    /// Returns an arena of a rank's heap, and maps it at the first access.
    fn arena(&mut self, rank: usize, number: u32) -> Result<Arc<Mapping>> {
        let place = number as usize;
        if let Some(Some(mapping)) = self.peers[rank].arenas.get(place) {
            return Ok(mapping.clone());
        }
        let (session, member) = (&*self.membership.session, self.members[rank]);
        let own = if rank == self.rank.index() { session.heap.mapping(number) } else { None };
        let known = own.or_else(|| lock(&session.arenas).get(&(member, number)).cloned());
        let mapping = match known {
            Some(mapping) => mapping,
            None => {
                let mapped = dial::map_arena(session, member, number, session.connection_wait(self.deadline));
                let mapping = mapped.map_err(|e| {
                    self.fail(self.current.generation(), (rank, LinkError::from(e)), self.deadline)
                })?;
                let mapping = Arc::new(mapping);
                lock(&session.arenas).entry((member, number)).or_insert(mapping).clone()
            }
        };
        let arenas = &mut self.peers[rank].arenas;
        arenas.resize(arenas.len().max(place + 1), None);
        arenas[place] = Some(mapping.clone());
        Ok(mapping)
    }

    /// Agrees with the other ranks on the access to each other's memory, at most `limit`, which may differ between
    /// ranks. They probe it only if a pair of them has never done so.
    pub(crate) fn agree_reach(&mut self, limit: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        let proven = self.proven_reach();
        let [limit, proven] = self.least([limit, proven], due)?;
        if proven < limit {
            return self.probe(limit, due);
        }
        let session = &self.membership.session;
        for (peer, &member) in self.peers.iter_mut().zip(&self.members) {
            peer.process = lock(&session.proven).get(&member).and_then(|proven| proven.process.clone());
        }
        self.reach = limit;
        self.traffic = Traffic::default();
        Ok(limit)
    }

    /// Returns the access that was found before, between this rank and all others of the group.
    fn proven_reach(&self) -> Reach {
        let proven = lock(&self.membership.session.proven);
        let reach = |peer| proven.get(&self.members[peer]).map_or(Reach::Slots, |proven| proven.reach);
        self.others().map(reach).min().unwrap_or(Reach::Slots)
    }

    /// Records the access that was found, for other groups of these ranks.
    fn record_proven(&self) {
        let mut proven = lock(&self.membership.session.proven);
        for peer in self.others() {
            let (reach, process) = (self.reach, self.peers[peer].process.clone());
            let known = proven.get(&self.members[peer]).map_or(Reach::Slots, |known| known.reach);
            if reach > known {
                proven.insert(self.members[peer], ProvenReach { reach, process });
            }
        }
    }

    /// Agrees with the other ranks on the access to each other's memory, at most `limit`.
    pub(crate) fn probe(&mut self, limit: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        if limit > Reach::Slots {
            let found = self.try_reach(limit, due)?;
            [self.reach] = self.least([found], due)?;
            self.record_proven();
            // Probing does not count as traffic.
            self.traffic = Traffic::default();
        }
        Ok(self.reach)
    }

    /// Returns the access to ordinary memory that works in both directions: from this rank to all others, and
    /// from all others to this rank.
    fn try_reach(&mut self, limit: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        let [number, ..]: [u64; 4] = bytemuck::pod_read_unaligned(&auth::random_bytes()?);
        let me = self.rank.index();
        // One cell for the number, and one for each rank to write it back.
        let mut cells = vec![0_u64; 1 + self.rank.world_size()];
        cells[0] = number;
        let entry = CallEntry { rank: self.rank, plan_digest: 0, signals: 2, slots: SlotUse::Unused };
        // SAFETY: all ranks do these steps. Each writes its own flag line before its first signal. In another
        // rank's memory it writes only its own cell, after that rank's first signal and before its own last.
        unsafe { self.enter(entry, ExposedRegion::Write(Owned::from(cells).lend()), due) }?;
        // SAFETY: as above.
        unsafe { self.publish(MemoryArea::FlagLine, 0, &number.to_ne_bytes()) };
        // SAFETY: as above.
        unsafe { self.signal() };
        let (mut reads, mut writes) = (true, limit == Reach::Write);
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let (mut told, mut found) = ([0; 8], [0; 8]);
            // SAFETY: as above; the rank has signalled.
            unsafe { self.read(peer, MemoryArea::FlagLine, 0, &mut told) }?;
            let mut process = None;
            reads &= self.reach_into(peer, |number, address| {
                // Opened before the number is read, so that the number is not found in another process.
                process = Process::open(number).ok();
                host_memory::read_process(number, address, &mut found)
            });
            reads &= found == told;
            // Nothing is written unless this was the peer's memory.
            writes &= reads
                && process.is_some_and(|process| {
                    let written = self.reach_into(peer, |_, address| {
                        // SAFETY: the rank has lent its cells in this call, of which this is the one for this rank.
                        unsafe { process.write(address + 8 * (1 + me as u64), &told) }
                    });
                    self.peers[peer].process = Some(process);
                    written
                });
        }
        // SAFETY: as above.
        unsafe { self.signal() };
        self.others().try_for_each(|peer| self.wait(peer, 2, due))?;
        self.wake_waiters();
        let lent = self.reclaim().expect("all have signalled for the last time");
        let cells = lent.into_owned::<u64>().expect("they are what was lent");
        writes &= self.others().all(|peer| cells[1 + peer] == number);
        Ok(match (reads, writes) {
            (true, true) => Reach::Write,
            (true, false) => Reach::Read,
            _ => Reach::Slots,
        })
    }

    fn reach_into(&self, peer: usize, reach: impl FnOnce(i32, u64) -> std::io::Result<()>) -> bool {
        let RegionOrigin::Process { address } = self.memory.region(peer, self.current.generation()).origin
        else {
            return false;
        };
        let process = self.memory.process(peer).load(Ordering::Relaxed).cast_signed();
        let reached = reach(process, address);
        if let Err(error) = &reached {
            tracing::info!(peer = self.members[peer], %error, "this rank's memory is out of reach");
        }
        reached.is_ok()
    }

    /// Returns the least of any rank for each of these values.
    fn least<const N: usize>(&mut self, own: [Reach; N], due: &LazyDeadline<'_>) -> Result<[Reach; N]> {
        const ALL: [Reach; 3] = [Reach::Slots, Reach::Read, Reach::Write];
        let mut least = own;
        let entry = CallEntry { rank: self.rank, plan_digest: N as u64, signals: 1, slots: SlotUse::Unused };
        // SAFETY: all ranks do these steps: each writes its own line before its signal, and reads others' after theirs.
        unsafe { self.enter(entry, ExposedRegion::Nothing, due) }?;
        // SAFETY: as above.
        unsafe { self.publish(MemoryArea::FlagLine, 0, &own.map(|reach| reach as u8)) };
        // SAFETY: as above.
        unsafe { self.signal() };
        self.wake_waiters();
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let mut theirs = [0; N];
            // SAFETY: as above; the rank has signalled.
            unsafe { self.read(peer, MemoryArea::FlagLine, 0, &mut theirs) }?;
            for (least, theirs) in least.iter_mut().zip(theirs) {
                *least = (*least).min(ALL.get(usize::from(theirs)).copied().unwrap_or(Reach::Slots));
            }
        }
        Ok(least)
    }
}

impl Sealed for MappedGroup {}

impl ShmGroup for MappedGroup {
    fn shared(&self) -> GroupLayout {
        GroupLayout { fast_attach: tuning().copies_by_system, ..GroupLayout::on_host(self.reach) }
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
    unsafe fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
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
        self.counts.record_signals(signals);
        self.owes_wake = true;
    }

    #[inline(always)]
    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_in(self.current.number, rank, signals, due)
    }

    unsafe fn signal_and_wait(
        &mut self,
        entry: CallEntry,
        (holder, place, offset): (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.enter_next(entry, due)?;
        self.store_region(RemoteRegion::NOTHING);
        let rank = entry.rank;
        match bytes {
            [] => {}
            // SAFETY: as the caller has promised.
            _ if holder == rank.index() => unsafe { self.publish(place, offset, bytes) },
            // SAFETY: as the caller has promised.
            _ => unsafe { self.write(holder, place, offset, bytes) }?,
        }
        // SAFETY: as the caller has promised.
        unsafe { self.signal() };
        self.wake_waiters();
        let CurrentCall { number, .. } = self.current;
        if rank.world_size() == 2 {
            spin_delay();
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
        if tuning().prefetches_next_call {
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
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.traffic.bytes_received += range.len() as u64;
        if place == MemoryArea::Exposed {
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
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        assert!(there.len() <= CHANGED_MAX, "at most {CHANGED_MAX} places are viewed at once");
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

    unsafe fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read_by(crate::cpu::copy, (rank, place, offset), into) }
    }

    unsafe fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        unsafe { self.read_by(host_memory::copy_non_temporal, (rank, place, offset), into) }
    }

    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        host_memory::copy_non_temporal(from, into);
    }

    unsafe fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len());
        self.traffic.bytes_sent += range.len() as u64;
        match place {
            MemoryArea::FlagLine | MemoryArea::EagerBuffer => Err(self.out_of_reach(rank, &range)),
            MemoryArea::Slot(_) => {
                // SAFETY: as the caller has promised.
                let written =
                    unsafe { self.memory.publish(rank, self.current.generation(), place, offset, bytes) };
                written.ok_or_else(|| self.out_of_reach(rank, &range))
            }
            // SAFETY: as the caller has promised.
            MemoryArea::Exposed => unsafe { self.write_lent(rank, &range, bytes) },
        }
    }

    unsafe fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        if there.len() > CHANGED_MAX {
            return Ok(false);
        }
        let range = |offset: usize| offset..offset.saturating_add(len);
        match place {
            MemoryArea::FlagLine | MemoryArea::EagerBuffer => {
                let nothing = |&(rank, offset)| Err(self.out_of_reach(rank, &range(offset)));
                return there.first().map_or(Ok(false), nothing);
            }
            MemoryArea::Slot(_) => {
                // SAFETY: as the caller has promised.
                let changed =
                    unsafe { self.memory.change(self.current.generation(), place, there, len, change) };
                changed.map_err(|(rank, offset)| self.out_of_reach(rank, &range(offset)))?;
            }
            // Does not check for a failed call: the memory is then leaked, and nobody reads it.
            MemoryArea::Exposed => {
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
                unsafe { host_memory::change(places, len, change) };
            }
        }
        let bytes = (there.len() * len) as u64;
        self.traffic.bytes_received += bytes;
        self.traffic.bytes_sent += bytes;
        Ok(true)
    }

    unsafe fn update_word(
        &mut self,
        rank: usize,
        offset: usize,
        size: WordSize,
        update: WordUpdate,
    ) -> Result<u64> {
        let range = offset..offset.saturating_add(size.bytes());
        let (mapping, offset) = self.locate_words(rank, &range)?;
        // SAFETY: as the caller has promised.
        let before = unsafe { mapping.update_word(offset, size, update) };
        let before = before.ok_or_else(|| self.out_of_reach(rank, &range))?;
        self.traffic.bytes_sent += range.len() as u64;
        self.traffic.bytes_received += range.len() as u64;
        self.check_not_failed(rank)?;
        Ok(before)
    }

    unsafe fn store_words(&mut self, rank: usize, offset: usize, size: WordSize, bytes: &[u8]) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len());
        let (mapping, offset) = self.locate_words(rank, &range)?;
        // SAFETY: as the caller has promised.
        let stored = unsafe { mapping.store_words(offset, size, bytes) };
        stored.ok_or_else(|| self.out_of_reach(rank, &range))?;
        self.traffic.bytes_sent += range.len() as u64;
        self.check_not_failed(rank)
    }

    unsafe fn exposed_view(&mut self, rank: usize, len: usize) -> Result<Option<ExposedView>> {
        Ok(match self.locate(rank, &(0..len), false)? {
            Located::Mapped(mapping, offset) => Some(ExposedView::new(MappedView::new(mapping, offset, len))),
            Located::Process(..) => None,
        })
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

impl Drop for MappedGroup {
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

/// A signal that this rank waits for.
#[derive(Debug, Clone, Copy)]
struct AwaitedSignal {
    peer: usize,
    generation: Generation,
    /// The number of signals of the peer, over all calls.
    wanted: u64,
}

impl AwaitedSignal {
    /// See [`GroupMemory::look`].
    fn look(self, memory: &GroupMemory, times: usize) -> Option<u64> {
        memory.look(self.peer, self.generation, self.wanted, times)
    }
}

/// The location of another rank's bytes.
enum Located {
    /// The bytes are in a mapping of this process, from this byte on.
    Mapped(Arc<Mapping>, usize),
    /// The bytes are in another process, at this address.
    Process(i32, u64),
}

/// Delays one of two ranks by 15 to 30 ns between its own signal and its first look for the other's. Both
/// signal at the same time, and an earlier look would take the cache line away from the core that is about to
/// write it.
///
/// `spin_loop` would take too long. The delay is the measured cost of this many stores to the stack.
#[inline(always)]
fn spin_delay() {
    #[inline(always)]
    fn store(times: u32) {
        (0..times).for_each(|time| {
            std::hint::black_box(time);
        });
    }
    if tuning().long_delay { store(80) } else { store(60) }
}
