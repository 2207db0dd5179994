//! The rendezvous server, which the coordinator's thread runs: the ranks of a job join here, and are watched
//! until they have left.

mod circles;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;

use crate::bookkeeping::HEARTBEAT;
use crate::bootstrap::abort_state::Waker;
use crate::bootstrap::acceptor::{Acceptor, Admitted};
use crate::bootstrap::auth::Purpose;
use crate::bootstrap::control::{
    ControlConnection, FRAME_BYTES, Frame, PeerInfo, WaitReport, peer_frames, store_frames,
};
use crate::bootstrap::coordinator::{COORDINATOR, LATE_RANKS_LIMIT};
use crate::bootstrap::host;
use crate::bootstrap::session::lock;
use crate::link::socket;
use crate::shm_group::CALLS_MAX;
use crate::store::{StoreInbox, StoreRequest, StoreTable};
use crate::{Abort, Cause, ChannelId, Deadline, Fingerprint, Result, Runtime};
use circles::SentCount;

/// The target of the coordinator's log lines. Programs that report aborts themselves filter by it.
const LOG_TARGET: &str = "dist_transport::coordinator";

/// The time that an authenticated connection has to send a join.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// The longest time that a rank waits, after its timeout, for the list of missing ranks.
const ANSWER_GRACE_MAX: Duration = Duration::from_secs(1);

/// The interval at which one rank of each host is told for which ranks it waits.
pub(crate) const NOTICE_INTERVAL: Duration = Duration::from_secs(5);

/// The most ranks that a notice names: ranks of the previous world that are still there, or missing ranks. A connection
/// takes this number of frames at once.
const NAMED_MAX: usize = 64;

/// The number of worlds that a coordinator serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Worlds {
    /// One world, of which the process that hosts the coordinator is a rank.
    One,
    /// One world after the other, until one of them is aborted.
    InTurn,
}

/// Returns how long a rank waits, after its timeout, for the list of missing ranks. The coordinator sends the
/// list when the timeout is over, so the rank waits this long only if the coordinator does not respond.
pub(crate) fn answer_grace(timeout: Duration) -> Duration {
    (timeout / 4).min(ANSWER_GRACE_MAX)
}

/// Counts of ranks that have not left since all joined; 0 before that.
#[derive(Debug, Default)]
pub(crate) struct Present {
    pub(crate) all: AtomicUsize,
    /// The ranks among them that run in another process than the coordinator.
    pub(crate) elsewhere: AtomicUsize,
}

/// The state of the coordinator's thread.
pub(crate) struct RendezvousServer {
    acceptor: Acceptor,
    worlds: Worlds,
    /// Authenticated connections that have not sent a join yet.
    arriving: Vec<(u32, ControlConnection, Deadline)>,
    slots: Vec<RankSlot>,
    started: bool,
    /// The last rank that joined and expects a world of another size.
    other_size: Option<OtherSize>,
    /// Departures that were not sent to the other ranks yet. They are sent together, since often all ranks
    /// leave together.
    departures: Vec<[u8; FRAME_BYTES]>,
    /// The abort record: the first failure.
    abort_state: Arc<Mutex<Option<Abort>>>,
    /// The counts for the process that hosts the coordinator.
    present: Arc<Present>,
    /// The first report since the last start that ranks did not join in time.
    not_in_time: Option<Abort>,
    /// The ranks whose processes have ended.
    ended: BTreeSet<u32>,
    /// Ended ranks that the hosting process has reported since they were last read.
    ended_here: Option<Arc<EndedRanks>>,
    /// Reports that two ranks cannot reach each other, with the times of their arrival. It is not known yet
    /// whether one of the ranks is dead.
    unreachable: Vec<(Abort, Duration)>,
    /// The store of the world. A caller is a rank and the number of its request.
    store: StoreTable<(usize, u64)>,
    last_look: Duration,
    next_heartbeat: Deadline,
    runtime: Runtime,
}

/// Ranks whose processes have ended, reported to the coordinator's thread by another thread.
#[derive(Debug)]
pub(crate) struct EndedRanks {
    ranks: Mutex<Vec<u32>>,
    waker: Waker,
}

impl EndedRanks {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { ranks: Mutex::default(), waker: Waker::new()? })
    }

    pub(crate) fn push(&self, rank: u32) {
        lock(&self.ranks).push(rank);
        self.waker.notify();
    }

    fn take(&self) -> Vec<u32> {
        self.waker.drain();
        std::mem::take(&mut *lock(&self.ranks))
    }
}

/// A rank that expects a world of another size. Every other rank is told of it once, even if it joins later.
struct OtherSize {
    rank: u32,
    size: u32,
    /// The ranks that have been told.
    told: HashSet<u32>,
}

impl OtherSize {
    /// Returns `true` if every rank has received the announcement, including ranks that exist only in the other
    /// world size.
    fn is_told_to_all(&self, world_size: usize) -> bool {
        self.told.len() >= world_size.max(self.size as usize)
    }
}

/// The state of a rank at the coordinator.
enum RankSlot {
    Empty,
    Joined(Box<Member>),
    /// The rank left before the start, because it was told that not all ranks have joined. It may join again, and
    /// is not one of the missing ranks.
    GaveUp,
    Left,
}

impl RankSlot {
    /// Returns `true` if a rank has joined and has not received the result yet.
    fn is_expectant(&self) -> bool {
        matches!(self, Self::Joined(member) if member.answer_by.is_some())
    }
}

struct Member {
    line: ControlConnection,
    peer_info: PeerInfo,
    /// `None` once it was told that all ranks have joined, or that not all have.
    answer_by: Option<Deadline>,
    /// The time of the next notice about missing ranks.
    notice_at: Deadline,
    last_seen: Duration,
    /// The longest time that it may send no heartbeat.
    liveness: Duration,
    /// The rank's last wait report and its last calls, by channel, the current call first. A report of a finished
    /// wait names the rank itself; only the last of these is kept.
    waiting: HashMap<ChannelId, (WaitReport, [Fingerprint; CALLS_MAX])>,
    /// The messages that it has begun to send, and the signals that it has given, by channel and member, where it was asked
    /// since its last report.
    sent: HashMap<(ChannelId, u32), SentCount>,
    store_inbox: StoreInbox,
}

impl Member {
    /// Returns how soon the rank has been silent for too long, unless it sends a heartbeat before.
    fn silent_in(&self, now: Duration) -> Duration {
        self.last_seen.saturating_add(self.liveness).saturating_sub(now)
    }
}

impl RendezvousServer {
    pub(crate) fn new(
        acceptor: Acceptor,
        worlds: Worlds,
        world_size: usize,
        abort_state: Arc<Mutex<Option<Abort>>>,
        present: Arc<Present>,
        runtime: &Runtime,
    ) -> Self {
        Self {
            acceptor,
            worlds,
            arriving: Vec::new(),
            slots: (0..world_size).map(|_| RankSlot::Empty).collect(),
            started: false,
            other_size: None,
            departures: Vec::new(),
            abort_state,
            present,
            not_in_time: None,
            ended: BTreeSet::new(),
            ended_here: None,
            unreachable: Vec::new(),
            store: StoreTable::default(),
            last_look: runtime.now(),
            next_heartbeat: runtime.deadline(HEARTBEAT),
            runtime: runtime.clone(),
        }
    }

    /// Adds a source of ended ranks.
    pub(crate) fn with_ended(self, ended: Arc<EndedRanks>) -> Self {
        Self { ended_here: Some(ended), ..self }
    }

    /// Waits for one event and handles it. Returns `true` if the server can stop.
    pub(crate) fn run_once(&mut self, stop: &Waker) -> bool {
        let ready = match self.wait(stop) {
            Ok(ready) => ready,
            Err(e) => {
                tracing::error!(target: LOG_TARGET, error = %e, "the coordinator cannot wait for its ranks and ends");
                return true;
            }
        };
        let looked_at = self.runtime.now();
        // A rank that joins after all have left should find the next coordinator, and not keep this one
        // alive.
        if !self.is_over() {
            for admitted in self.acceptor.advance() {
                self.admit(admitted);
            }
            if let Some(error) = self.acceptor.take_out_of_files() {
                self.run_out_of_files(&error);
            }
        }
        // Comes before the arrivals: a rank that joins again has said goodbye before.
        ready.into_iter().for_each(|rank| self.read_frames(rank));
        self.send_departures();
        self.take_arrivals();
        self.abort_if_awaited_rank_ended();
        self.watch_silence(looked_at);
        if self.started {
            self.heartbeat();
        } else {
            self.answer_expired();
            self.tell_who_is_missing();
        }
        if self.started && self.count_present() == 0 {
            self.end_world();
        }
        let stopped = stop.drain();
        if stopped && !self.started {
            self.answer(|_| true);
        }
        // A connection that has just arrived should still be told that the job is over.
        self.is_over() && self.arriving.is_empty() || self.cannot_start() || stopped
    }

    /// Returns `true` if the server's only world can never start, and all ranks have been informed.
    fn cannot_start(&self) -> bool {
        let all_told = self.other_size.as_ref().is_some_and(|other| other.is_told_to_all(self.slots.len()));
        self.worlds == Worlds::One && !self.started && all_told
    }

    /// Returns `true` if the server's only world has ended. A server of several worlds is never over, because
    /// another rank may join.
    fn is_over(&self) -> bool {
        self.worlds == Worlds::One && self.started && self.members().next().is_none()
    }

    /// Ends the world when all its ranks have left or failed. The next world may then begin, if the server
    /// serves several.
    fn end_world(&mut self) {
        match self.worlds {
            Worlds::One => {
                let limit = self.runtime.deadline(LATE_RANKS_LIMIT);
                let deadlines = self.arriving.iter_mut().map(|(_, _, deadline)| deadline);
                deadlines.for_each(|deadline| *deadline = deadline.earlier(limit));
            }
            Worlds::InTurn if lock(&self.abort_state).is_none() => {
                self.started = false;
                self.slots.fill_with(|| RankSlot::Empty);
                self.unreachable.clear();
                self.store = StoreTable::default();
                tracing::debug!(target: LOG_TARGET, "all ranks have left: the next world may meet");
            }
            Worlds::InTurn => {}
        }
    }

    /// Waits for an event. Returns the ranks whose connections are ready to read or to write.
    fn wait(&self, stop: &Waker) -> io::Result<Vec<usize>> {
        let mut watched = vec![stop.watch()];
        watched.extend(self.ended_here.iter().map(|ended| ended.waker.watch()));
        let acceptor = Some(&self.acceptor).filter(|_| !self.is_over());
        watched.extend(acceptor.into_iter().flat_map(Acceptor::watch));
        watched.extend(self.arriving.iter().map(|(_, line, _)| socket::watch(&line.stream, PollFlags::IN)));
        let first = watched.len();
        watched.extend(self.members().map(|member| {
            let unsent = if member.line.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            socket::watch(&member.line.stream, PollFlags::IN | unsent)
        }));
        let next = self.next_deadline().min(acceptor.and_then(Acceptor::look_again_in).unwrap_or(HEARTBEAT));
        socket::poll(&mut watched, next)?;
        // Only connections with bytes are read: this wait ends at every heartbeat, and a read from each rank would be a
        // system call.
        let joined = self.slots.iter().enumerate().filter(|(_, slot)| matches!(slot, RankSlot::Joined(_)));
        let ready = joined.zip(&watched[first..]).filter(|(_, line)| !line.revents().is_empty());
        Ok(ready.map(|((rank, _), _)| rank).collect())
    }

    /// Returns how soon to act without an event: to send a heartbeat, to answer a rank, or to notice a silent
    /// one.
    fn next_deadline(&self) -> Duration {
        let now = self.runtime.now();
        let answers = self.members().filter_map(|member| member.answer_by);
        let notices =
            self.members().filter(|member| member.answer_by.is_some()).map(|member| member.notice_at);
        let next = answers
            .chain(notices)
            .chain([self.next_heartbeat])
            .map(|deadline| self.runtime.remaining(deadline));
        let silences = self.members().filter(|_| self.started).map(|member| member.silent_in(now));
        next.chain(silences).min().unwrap_or(HEARTBEAT)
    }

    /// Counts the ranks that have not left, and publishes the number for the process that hosts the
    /// coordinator.
    fn count_present(&self) -> usize {
        let present = self.members().count();
        let here = host::process();
        let elsewhere = self.members().filter(|member| member.peer_info.process != here).count();
        self.present.all.store(present, Ordering::Release);
        self.present.elsewhere.store(elsewhere, Ordering::Release);
        present
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.slots
            .iter()
            .filter_map(|slot| if let RankSlot::Joined(member) = slot { Some(&**member) } else { None })
    }

    fn members_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Member> {
        self.slots
            .iter_mut()
            .filter_map(|slot| if let RankSlot::Joined(member) = slot { Some(&mut **member) } else { None })
    }

    fn admit(&mut self, Admitted { stream, identity, .. }: Admitted) {
        let (now, deadline) = (self.runtime.now(), self.runtime.deadline(JOIN_LIMIT));
        match identity.purpose {
            Purpose::Control if identity.to == COORDINATOR => {
                self.arriving.push((identity.from, ControlConnection::new(stream), deadline));
            }
            Purpose::Probe if identity.to == COORDINATOR => {
                if let Some(RankSlot::Joined(member)) = self.slots.get_mut(identity.from as usize) {
                    member.last_seen = now;
                }
            }
            _ => {}
        }
    }

    /// Aborts the job because a rank could not be accepted: there was no free file descriptor.
    fn run_out_of_files(&mut self, error: &io::Error) {
        let missing =
            self.slots.iter().position(|slot| !matches!(slot, RankSlot::Joined(_))).unwrap_or_default();
        let rank = if self.worlds == Worlds::One { 0 } else { missing };
        let cause = Cause::gave_up(format_args!("the coordinator cannot accept its connection: {error}"));
        self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
    }

    /// Reads frames of connections that have just arrived.
    fn take_arrivals(&mut self) {
        for (rank, mut line, deadline) in std::mem::take(&mut self.arriving) {
            match line.pull() {
                Ok(None) if self.runtime.expired(deadline) => {}
                Ok(None) => self.arriving.push((rank, line, deadline)),
                Ok(Some(Frame::Join { world_size, timeout_ms, liveness_ms, peer_info })) => {
                    let [wait_policy, liveness] =
                        [timeout_ms, liveness_ms].map(|time| Duration::from_millis(time.into()));
                    self.join((rank, line), world_size, peer_info, [wait_policy, liveness]);
                }
                Ok(Some(Frame::Ended { rank: ended })) => {
                    self.ended.insert(ended);
                    // More may follow.
                    self.arriving.push((rank, line, deadline));
                }
                // It cannot join, whatever the others do.
                Ok(Some(Frame::Abort(abort))) if !self.started => self.abort(abort),
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }

    /// Aborts the job if ranks wait for a rank to join whose process has ended. If that process ended because
    /// it had waited in vain for others to join, those ranks are the cause.
    fn abort_if_awaited_rank_ended(&mut self) {
        self.ended.extend(self.ended_here.iter().flat_map(|ended| ended.take()));
        if self.started || self.members().next().is_none() {
            return;
        }
        let ended = |wanted: fn(&RankSlot) -> bool| {
            let mut ranks = self.ended.iter().map(|&rank| rank as usize);
            ranks.find(|&rank| self.slots.get(rank).is_some_and(wanted))
        };
        let never_joined = ended(|slot| matches!(slot, RankSlot::Empty));
        let gave_up = ended(|slot| matches!(slot, RankSlot::GaveUp));
        let reported = self.not_in_time.clone().filter(|_| gave_up.is_some() && never_joined.is_none());
        let not_joined =
            |rank| Abort { cause: Cause::NotJoined, rank, reporter: rank, call: Fingerprint::NONE };
        if let Some(abort) = reported.or_else(|| never_joined.or(gave_up).map(not_joined)) {
            self.abort(abort);
        }
    }

    fn join(
        &mut self,
        (rank, mut line): (u32, ControlConnection),
        size: u32,
        peer_info: PeerInfo,
        [wait_policy, liveness]: [Duration; 2],
    ) {
        if let Some(abort) = self.aborted_for_all() {
            let _ = line.push(Frame::Abort(abort));
            return;
        }
        let expected = u32::try_from(self.slots.len()).expect("checked when the coordinator was started");
        let fits = size == expected && rank < expected;
        // A rank that cannot join is told why. If the connection breaks meanwhile, there is nobody to tell.
        if !fits {
            let _ = line.push(Frame::WorldSize { expected });
            if !self.started {
                self.announce_other_size(rank, size);
            }
            return;
        }
        if let Some(refusal) = self.other_size_for(rank) {
            let _ = line.push(refusal);
            return;
        }
        let slot = &mut self.slots[rank as usize];
        let refusal = match slot {
            RankSlot::Empty | RankSlot::GaveUp => None,
            RankSlot::Joined(_) => Some(Frame::Duplicate),
            RankSlot::Left => Some(Frame::Over),
        };
        if let Some(refusal) = refusal {
            // All other ranks retry anyway.
            if refusal == Frame::Over && wait_policy < 2 * ANSWER_GRACE_MAX {
                let mut still_there = those(&self.slots, |slot| matches!(slot, RankSlot::Joined(_)));
                still_there.truncate(NAMED_MAX);
                tell_missing(&mut line, &still_there, self.acceptor.refused());
            }
            let _ = line.push(refusal);
            return;
        }
        *slot = RankSlot::Joined(Box::new(Member {
            line,
            peer_info,
            answer_by: Some(self.runtime.deadline(wait_policy)),
            notice_at: self.runtime.deadline(NOTICE_INTERVAL),
            last_seen: self.runtime.now(),
            liveness,
            waiting: HashMap::new(),
            sent: HashMap::new(),
            store_inbox: StoreInbox::default(),
        }));
        tracing::debug!(target: LOG_TARGET, rank, address = %peer_info.address, "joined");
        // A rank that was told that not all have joined is about to leave, and may join again.
        if self.slots.iter().all(RankSlot::is_expectant) {
            self.start();
        }
    }

    /// Returns why no world of this server can start any more: a rank could not join, or an earlier world was
    /// aborted.
    fn aborted_for_all(&self) -> Option<Abort> {
        lock(&self.abort_state).clone().filter(|_| self.worlds == Worlds::InTurn || !self.started)
    }

    /// Informs the joined ranks that this rank expects a world of another size, so that they cannot start.
    fn announce_other_size(&mut self, rank: u32, size: u32) {
        // Ranks that were told of another size before need not be told of this one.
        let mut told = self.other_size.take().map(|other| other.told).unwrap_or_default();
        told.insert(rank);
        for (number, slot) in (0..).zip(&mut self.slots) {
            if let RankSlot::Joined(member) = slot {
                member.answer_by = None;
                let _ = member.line.push(Frame::OtherWorldSize { rank, size });
                told.insert(number);
            }
        }
        self.other_size = Some(OtherSize { rank, size, told });
    }

    /// Returns the refusal for a rank that joins now, if an earlier rank expects another size.
    fn other_size_for(&mut self, rank: u32) -> Option<Frame> {
        let other = self.other_size.as_mut().filter(|_| !self.started)?;
        if other.rank == rank {
            // It has joined again, and expects this world now.
            self.other_size = None;
            return None;
        }
        let refusal = Frame::OtherWorldSize { rank: other.rank, size: other.size };
        let is_news = other.told.insert(rank);
        // A rank that joins again was restarted, and the other one may have been too.
        is_news.then_some(refusal)
    }

    /// Sends the addresses of all ranks to all ranks.
    fn start(&mut self) {
        self.started = true;
        self.not_in_time = None;
        // Counted before any rank can receive this, finish its work, and leave.
        self.count_present();
        let peers: Vec<_> = self.members().map(|member| member.peer_info).collect();
        // Ranks that read slowly share this memory until they have it all.
        let peers: Arc<[u8]> = Arc::from(peer_frames(&peers).as_flattened());
        for rank in 0..self.slots.len() {
            // The first ranks wait for heartbeats while the last are told.
            self.heartbeat();
            if let RankSlot::Joined(member) = &mut self.slots[rank] {
                member.answer_by = None;
                // It sends heartbeats from now on.
                member.last_seen = self.runtime.now();
                // A broken connection is noticed when it is read.
                let _ = member.line.push_shared(&peers);
            }
        }
    }

    /// Reads and handles the frames of one rank.
    fn read_frames(&mut self, rank: usize) {
        let number = u32::try_from(rank).expect("checked when the coordinator was started");
        loop {
            let RankSlot::Joined(member) = &mut self.slots[rank] else { return };
            // A broken connection reports its error after all frames were read: a rank that has said goodbye
            // may have hung up first.
            let _ = member.line.flush();
            match member.line.pull() {
                Ok(None) => return,
                Ok(Some(Frame::Beat)) => member.last_seen = self.runtime.now(),
                Ok(Some(Frame::Abort(abort))) if matches!(abort.cause, Cause::Unreachable { .. }) => {
                    self.unreachable.push((abort, self.runtime.now()));
                }
                Ok(Some(Frame::Abort(abort))) => self.abort(abort),
                Ok(Some(Frame::Ended { rank: peer })) if peer != number => self.record_ended(peer as usize),
                Ok(Some(Frame::Waiting { channel, wait, calls })) => {
                    member.waiting.retain(|_, (wait, _)| wait.on != number);
                    member.waiting.insert(channel, (wait, calls));
                    self.compare(rank, &calls);
                    self.compare_waits(rank, channel);
                    self.suspect_circle(rank, channel);
                }
                Ok(Some(Frame::Sent { channel, to, messages, signals })) => {
                    self.take_sent(rank, (channel, to), (messages, signals));
                }
                Ok(Some(Frame::Ask { rank: peer, origin })) => {
                    self.pass_on(peer, Frame::Ask { rank: number, origin });
                }
                Ok(Some(Frame::LeftChannel { rank: peer, channel })) => {
                    self.pass_on(peer, Frame::LeftChannel { rank: number, channel });
                }
                Ok(Some(Frame::OtherMembers { rank: peer, channel, members })) => {
                    self.pass_on(peer, Frame::OtherMembers { rank: number, channel, members });
                }
                Ok(Some(Frame::Store { number, is_last, piece })) => {
                    match member.store_inbox.add(&piece, is_last) {
                        Ok(None) => {}
                        Ok(Some(request)) => self.serve_store((rank, number), &request),
                        Err(_) => self.lose(rank, Cause::Protocol),
                    }
                }
                Ok(Some(Frame::CancelStore { number })) => {
                    self.store.cancel(|caller| *caller == (rank, number));
                }
                Ok(Some(Frame::Goodbye)) => {
                    self.store.cancel(|(caller, _)| *caller == rank);
                    let left = std::mem::replace(&mut self.slots[rank], RankSlot::Left);
                    // Counted before the connection is closed, so that the rank finds itself counted.
                    if self.started {
                        self.count_present();
                    }
                    drop(left);
                    self.departures.push(Frame::Left { rank: number }.encode());
                }
                Ok(Some(_)) => self.lose(rank, Cause::Protocol),
                Err(e) if e.kind() == io::ErrorKind::InvalidData => self.lose(rank, Cause::Protocol),
                Err(_) => self.lose(rank, Cause::Died),
            }
        }
    }

    /// Serves a request of a rank to the store, and sends the replies that it causes.
    fn serve_store(&mut self, caller: (usize, u64), request: &[u8]) {
        let Some(request) = StoreRequest::decode(request) else {
            return self.lose(caller.0, Cause::Protocol);
        };
        for ((rank, number), reply) in self.store.serve(caller, request) {
            if let Some(RankSlot::Joined(member)) = self.slots.get_mut(rank) {
                let frames: Vec<_> =
                    store_frames(number, &reply.encode()).map(|frame| frame.encode()).collect();
                // A broken connection is noticed when it is read.
                let _ = member.line.push_all(&frames);
            }
        }
    }

    /// Forwards a frame to a rank that has not left.
    fn pass_on(&mut self, to: u32, frame: Frame) {
        if let Some(RankSlot::Joined(member)) = self.slots.get_mut(to as usize) {
            // A broken connection is noticed when it is read.
            let _ = member.line.push(frame);
        }
    }

    /// Informs the other ranks which ranks have left, because they may wait for a connection of one of them.
    fn send_departures(&mut self) {
        let departures = std::mem::take(&mut self.departures);
        if !departures.is_empty() {
            let departures: Arc<[u8]> = Arc::from(departures.as_flattened());
            for member in self.members_mut() {
                let _ = member.line.push_shared(&departures);
            }
        }
    }

    /// Aborts the job if the reporter waits in calls that contradict those in which another rank waits: both
    /// would wait until their deadline. The last report of each rank is enough, however old it is. All
    /// channels are compared, because an operation that one rank starts and another one calls uses different
    /// channels of one communicator.
    fn compare(&mut self, reporter: usize, calls: &[Fingerprint]) {
        let contradiction = self.slots.iter().enumerate().find_map(|(rank, slot)| {
            let RankSlot::Joined(member) = slot else { return None };
            let contradiction = |(_, theirs): &(WaitReport, [Fingerprint; CALLS_MAX])| {
                Fingerprint::contradiction(calls, theirs)
            };
            member.waiting.values().find_map(contradiction).map(|(call, theirs)| (rank, call, theirs))
        });
        if let Some((rank, call, theirs)) = contradiction {
            self.abort(Abort { cause: Cause::Mismatch { theirs }, rank, reporter, call });
        }
    }

    /// Aborts the job if the reporter and another rank wait for each other in different calls, and neither has
    /// sent what the other needs. For example, one waits for a message of `send_recv`, and the other for a
    /// signal in shared memory.
    fn compare_waits(&mut self, reporter: usize, channel: ChannelId) {
        let Some((ours, [call, ..])) = self.wait_of(reporter, channel) else { return };
        let rank = ours.on as usize;
        let Some((theirs, [their_call, ..])) = self.wait_of(rank, channel) else { return };
        let is_mutual = rank != reporter && theirs.on as usize == reporter;
        // Messages outside any call cannot be compared.
        let differ = call != their_call && ![call, their_call].contains(&Fingerprint::NONE);
        if is_mutual && differ && ours.is_forever_with(&theirs) {
            self.abort(Abort { cause: Cause::Mismatch { theirs: their_call }, rank, reporter, call });
        }
    }

    fn wait_of(&self, rank: usize, channel: ChannelId) -> Option<(WaitReport, [Fingerprint; CALLS_MAX])> {
        let Some(RankSlot::Joined(member)) = self.slots.get(rank) else { return None };
        member.waiting.get(&channel).copied()
    }

    /// Handles a rank whose connection broke without a goodbye. Before the start it may join again; after the
    /// start the job is aborted.
    fn lose(&mut self, rank: usize, cause: Cause) {
        if self.started {
            self.slots[rank] = RankSlot::Left;
            self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
            return;
        }
        let answered = matches!(&self.slots[rank], RankSlot::Joined(member) if member.answer_by.is_none());
        self.slots[rank] = if answered { RankSlot::GaveUp } else { RankSlot::Empty };
    }

    /// Records that a rank's process has ended. The rank may have left before, so its last frames are read
    /// first.
    fn record_ended(&mut self, rank: usize) {
        if rank < self.slots.len() {
            self.read_frames(rank);
        }
        if let Some(RankSlot::Joined(_)) = self.slots.get(rank) {
            self.lose(rank, Cause::Died);
        }
    }

    fn abort(&mut self, abort: Abort) {
        if lock(&self.abort_state).is_some() {
            return;
        }
        let abort = abort.with_circle(&self.waits()).followed(|rank, call| self.waits_for(rank, call));
        let waits = match &abort.cause {
            Cause::CircularWait { waits, .. } | Cause::TimedOut { waits, .. } => waits.clone(),
            _ => Vec::new(),
        };
        // Rank 0 is told last, and the hosting process after it: its process may end as soon as it knows.
        for member in self.members_mut().rev() {
            for wait in &waits {
                let _ = member.line.push(Frame::Circle(*wait));
            }
            let _ = member.line.push(Frame::Abort(abort.clone()));
        }
        *lock(&self.abort_state) = Some(abort.clone());
        // Last, because a log may block its writer.
        tracing::warn!(target: LOG_TARGET, %abort, "the job is aborted");
    }

    /// Returns the rank that another one waits for in this call, according to its last report.
    fn waits_for(&self, rank: usize, call: &Fingerprint) -> Option<usize> {
        let Some(RankSlot::Joined(member)) = self.slots.get(rank) else { return None };
        let (wait, _) = member.waiting.values().find(|(_, calls)| calls.contains(call))?;
        Some(wait.on as usize).filter(|&on| on != rank)
    }

    /// Aborts the job if nothing has arrived from a rank for too long at `looked_at`. Frames that have arrived
    /// since then were not read yet and do not count.
    fn watch_silence(&mut self, looked_at: Duration) {
        let slept = looked_at.saturating_sub(std::mem::replace(&mut self.last_look, looked_at));
        if slept > 2 * HEARTBEAT {
            // This thread was not running, so the silence proves nothing.
            self.members_mut().for_each(|member| member.last_seen = looked_at);
        }
        if !self.started {
            return;
        }
        self.judge_unreachable(looked_at);
        for rank in 0..self.slots.len() {
            let is_silent = |member: &Member| looked_at.saturating_sub(member.last_seen) > member.liveness;
            if matches!(&self.slots[rank], RankSlot::Joined(member) if is_silent(member)) {
                let (named, cause) = self.lost_hosts(rank, looked_at).unwrap_or((rank, Cause::Silent));
                // The rank is told as well, in case it still reads; but nobody waits for it any longer.
                self.abort(Abort { cause, rank: named, reporter: named, call: Fingerprint::NONE });
                self.slots[rank] = RankSlot::Left;
            }
        }
    }

    /// Returns the first rank of the lost hosts, and the cause, if the host of a silent rank is lost: it is another one than
    /// the coordinator's, and nothing arrives from any of its ranks. Several hosts are lost together if a network fails.
    fn lost_hosts(&self, silent: usize, now: Duration) -> Option<(usize, Cause)> {
        // The heartbeats of different ranks do not stop at the same moment.
        let is_quiet = |member: &Member| now.saturating_sub(member.last_seen) > member.liveness / 2;
        let is_lost = |member: &Member| is_quiet(member) && !socket::is_within_host(&member.line.stream);
        let host = |member: &Member| member.peer_info.host;
        let heard: HashSet<u64> = self.members().filter(|member| !is_lost(member)).map(host).collect();
        let joined = self.slots.iter().enumerate().filter_map(|(rank, slot)| match slot {
            RankSlot::Joined(member) if !heard.contains(&host(member)) => Some((rank, member)),
            _ => None,
        });
        let lost: Vec<_> = joined.collect();
        let is_among_them = lost.iter().any(|(rank, _)| *rank == silent);
        let &(first, member) = lost.first().filter(|_| is_among_them)?;
        let hosts = lost.iter().map(|(_, member)| host(member)).collect::<HashSet<_>>().len();
        let host = member.peer_info.address.ip().to_canonical();
        Some((first, Cause::HostLost { host, hosts, ranks: lost.len() }))
    }

    /// Aborts the job because two ranks cannot reach each other. Both must be alive: the reported one has sent
    /// a heartbeat recently. Otherwise it will soon count as silent, which is then the cause.
    fn judge_unreachable(&mut self, now: Duration) {
        let slots = &self.slots;
        let is_certain = |(abort, reported): &mut (Abort, Duration)| match slots.get(abort.rank) {
            Some(RankSlot::Joined(peer)) => {
                peer.last_seen > *reported || now.saturating_sub(peer.last_seen) < 2 * HEARTBEAT
            }
            _ => true,
        };
        let certain = self.unreachable.extract_if(.., is_certain).next();
        if let Some((abort, _)) = certain {
            self.abort(abort);
        }
    }

    fn heartbeat(&mut self) {
        if self.runtime.expired(self.next_heartbeat) {
            self.next_heartbeat = self.runtime.deadline(HEARTBEAT);
            for member in self.members_mut() {
                let _ = member.line.push(Frame::Beat);
            }
        }
    }

    /// Informs ranks whose timeout has passed which ranks are missing.
    fn answer_expired(&mut self) {
        if self.runtime.expired(self.next_heartbeat) {
            self.next_heartbeat = self.runtime.deadline(HEARTBEAT);
        }
        let runtime = self.runtime.clone();
        self.answer(|member| member.answer_by.is_some_and(|deadline| runtime.expired(deadline)));
    }

    /// Sends the list of missing ranks to the first waiting rank of each host, every 5 s, for its log.
    fn tell_who_is_missing(&mut self) {
        let runtime = self.runtime.clone();
        let is_due = |member: &Member| member.answer_by.is_some() && runtime.expired(member.notice_at);
        if !self.members().any(is_due) {
            return;
        }
        let mut missing = self.missing();
        let count = u32::try_from(missing.len()).expect("checked when the coordinator was started");
        missing.truncate(NAMED_MAX);
        let refused = self.acceptor.refused();
        let mut hosts = HashSet::new();
        for member in self.members_mut().filter(|member| member.answer_by.is_some()) {
            let is_first = hosts.insert(member.peer_info.host);
            if runtime.expired(member.notice_at) {
                member.notice_at = runtime.deadline(NOTICE_INTERVAL);
                if is_first {
                    tell_missing(&mut member.line, &missing, refused);
                    let _ = member.line.push(Frame::NotYet { missing: count });
                }
            }
        }
    }

    /// Returns the ranks that have not joined. If all have joined, but not at the same time, returns those that
    /// have left again.
    fn missing(&self) -> Vec<u32> {
        let missing = those(&self.slots, |slot| matches!(slot, RankSlot::Empty));
        if missing.is_empty() { those(&self.slots, |slot| !slot.is_expectant()) } else { missing }
    }

    /// Sends the [missing](Self::missing) ranks to some of the joined ranks.
    fn answer(&mut self, to_whom: impl Fn(&Member) -> bool) {
        let missing = self.missing();
        let refused = self.acceptor.refused();
        let mut not_in_time = None;
        for (rank, slot) in self.slots.iter_mut().enumerate() {
            if let RankSlot::Joined(member) = slot
                && to_whom(member)
            {
                if let Some(answer_by) = member.answer_by.take() {
                    not_in_time.get_or_insert((rank, answer_by.limit()));
                }
                tell_missing(&mut member.line, &missing, refused);
                let _ = member.line.push(Frame::NotAll);
            }
        }
        if let (Some((reporter, limit)), Some(&first)) = (not_in_time, missing.first()) {
            let cause = Cause::not_in_time(missing.iter().map(|&rank| rank as usize).collect(), limit);
            let abort = Abort { cause, rank: first as usize, reporter, call: Fingerprint::NONE };
            self.not_in_time.get_or_insert(abort);
        }
    }
}

/// Returns the ranks whose slots satisfy a condition.
fn those(slots: &[RankSlot], is_meant: impl Fn(&RankSlot) -> bool) -> Vec<u32> {
    (0..).zip(slots).filter(|(_, slot)| is_meant(slot)).map(|(rank, _)| rank).collect()
}

fn tell_missing(line: &mut ControlConnection, missing: &[u32], refused: u64) {
    let frames: Vec<_> = missing.iter().map(|&rank| Frame::Missing { rank, refused }.encode()).collect();
    // A broken connection is noticed when it is read.
    let _ = line.push_all(&frames);
}

#[cfg(test)]
mod tests;
