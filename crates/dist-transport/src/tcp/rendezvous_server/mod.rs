//! Where the ranks of a job meet, and are watched until they have left: what the coordinator's thread does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;

use crate::auth::Purpose;
use crate::bookkeeping::HEARTBEAT;
use crate::tcp::abort_state::Waker;
use crate::tcp::acceptor::{Acceptor, Admitted};
use crate::tcp::control::{ControlConnection, FRAME_BYTES, Frame, PeerInfo, WaitReport};
use crate::tcp::coordinator::{COORDINATOR, FAREWELL_LIMIT};
use crate::tcp::session::lock;
use crate::tcp::{host, socket};
use crate::{Abort, CALLS_MAX, Cause, ChannelId, Deadline, Fingerprint, Result, Runtime};

/// How long one that has proven to belong to the job may take to join it.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// How long a rank that has waited in vain waits for the coordinator to say who is missing, at the most.
const ANSWER_GRACE_MAX: Duration = Duration::from_secs(1);

/// How many of the ranks that are still in the world before are named to one that waits for the next: what a connection takes
/// at once.
const NAMED_MAX: usize = 64;

/// Which worlds meet at one coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worlds {
    /// One: whoever hosts the coordinator is a rank of it.
    One,
    /// One after the other, until one of them is aborted.
    InTurn,
}

/// How long a rank with this timeout waits, after its timeout, for the coordinator to say who is missing. The coordinator says
/// it when the timeout is over, so that only a coordinator that does not respond makes the rank wait so long.
pub(super) fn answer_grace(timeout: Duration) -> Duration {
    (timeout / 4).min(ANSWER_GRACE_MAX)
}

/// How many ranks have not left since all had come; none before.
#[derive(Debug, Default)]
pub(super) struct Present {
    pub(super) all: AtomicUsize,
    /// Of these, those that are in another process than the coordinator.
    pub(super) elsewhere: AtomicUsize,
}

/// Everything that the coordinator's thread knows.
pub(super) struct RendezvousServer {
    acceptor: Acceptor,
    worlds: Worlds,
    /// Those who have proven that they belong to the job and have not logged yet that they join.
    arriving: Vec<(u32, ControlConnection, Deadline)>,
    slots: Vec<RankSlot>,
    started: bool,
    /// The last rank that came and expects a world of another size.
    other_size: Option<OtherSize>,
    /// What the others have yet to hear of those who have left: all at once, since often all ranks leave shm_group.
    leavings: Vec<[u8; FRAME_BYTES]>,
    /// The first thing that went wrong.
    abort_state: Arc<Mutex<Option<Abort>>>,
    /// How many ranks have not left since all had come, for whoever hosts this.
    present: Arc<Present>,
    /// The ranks whose processes have ended.
    ended: BTreeSet<u32>,
    /// Those that whoever hosts this has seen since it was last looked at.
    ended_here: Option<Arc<EndedRanks>>,
    /// Reports that two ranks cannot reach each other, and when they came: it is not known yet whether one of them is dead.
    unreachable: Vec<(Abort, Duration)>,
    last_look: Duration,
    next_heartbeat: Deadline,
    runtime: Runtime,
}

/// Ranks whose processes have ended, for the coordinator's thread from another one.
#[derive(Debug)]
pub(super) struct EndedRanks {
    ranks: Mutex<Vec<u32>>,
    waker: Waker,
}

impl EndedRanks {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { ranks: Mutex::default(), waker: Waker::new()? })
    }

    pub(super) fn push(&self, rank: u32) {
        lock(&self.ranks).push(rank);
        self.waker.notify();
    }

    fn take(&self) -> Vec<u32> {
        self.waker.drain();
        std::mem::take(&mut *lock(&self.ranks))
    }
}

/// A rank that expects a world of another size. Each of the others is told of it once, also if it comes later.
struct OtherSize {
    rank: u32,
    size: u32,
    /// The ranks that need not be told any more.
    told: HashSet<u32>,
}

impl OtherSize {
    /// Returns `true` if all ranks have been told, those that only the other rank expects too.
    fn is_told_to_all(&self, world_size: usize) -> bool {
        self.told.len() >= world_size.max(self.size as usize)
    }
}

/// A rank as the coordinator sees it.
enum RankSlot {
    Empty,
    Taken(Box<Member>),
    /// It was told before the start that not all have come, and went. It may come again, but is none of those who did not.
    GaveUp,
    Left,
}

impl RankSlot {
    /// Whether a rank has come that has not been told how that ends.
    fn is_expectant(&self) -> bool {
        matches!(self, Self::Taken(member) if member.answer_by.is_some())
    }
}

struct Member {
    line: ControlConnection,
    peer_info: PeerInfo,
    /// None once it was told that all have come, or that not all have.
    answer_by: Option<Deadline>,
    last_seen: Duration,
    /// How long it may be silent.
    liveness: Duration,
    /// By channel, what it waits for there, as it has logged, and its last calls there, the current one first. Of waits that are
    /// over, which are for itself, only the last is kept.
    waiting: HashMap<ChannelId, (WaitReport, [Fingerprint; CALLS_MAX])>,
}

impl Member {
    /// How soon it is silent for too long, unless it gives a sign of life before.
    fn silent_in(&self, now: Duration) -> Duration {
        self.last_seen.saturating_add(self.liveness).saturating_sub(now)
    }
}

impl RendezvousServer {
    pub(super) fn new(
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
            leavings: Vec::new(),
            abort_state,
            present,
            ended: BTreeSet::new(),
            ended_here: None,
            unreachable: Vec::new(),
            last_look: runtime.now(),
            next_heartbeat: runtime.deadline(HEARTBEAT),
            runtime: runtime.clone(),
        }
    }

    /// The same, told of ranks whose processes have ended.
    pub(super) fn with_ended(self, ended: Arc<EndedRanks>) -> Self {
        Self { ended_here: Some(ended), ..self }
    }

    /// Waits for something to happen and deals with it. `true` when there is nothing more to do.
    pub(super) fn run_once(&mut self, stop: &Waker) -> bool {
        let ready = match self.wait(stop) {
            Ok(ready) => ready,
            Err(e) => {
                tracing::error!(error = %e, "the coordinator cannot wait for its ranks and ends");
                return true;
            }
        };
        let looked_at = self.runtime.now();
        // Whoever comes when all have left is to find the next coordinator, and not to keep this one.
        if !self.is_over() {
            for admitted in self.acceptor.advance() {
                self.admit(admitted);
            }
            if let Some(error) = self.acceptor.take_out_of_files() {
                self.run_out_of_files(&error);
            }
        }
        // Before those who have arrived: a rank that comes again has logged before that it leaves.
        ready.into_iter().for_each(|rank| self.read_frames(rank));
        self.send_leavings();
        self.take_arrivals();
        self.abort_if_awaited_rank_ended();
        self.watch_silence(looked_at);
        if self.started {
            self.heartbeat();
        } else {
            self.answer_expired();
        }
        if self.started && self.count_present() == 0 {
            self.end_world();
        }
        let stopped = stop.drain();
        if stopped && !self.started {
            self.answer(|_| true);
        }
        // Whoever has just arrived is still to hear that it is over.
        self.is_over() && self.arriving.is_empty() || self.cannot_start() || stopped
    }

    /// Returns `true` if the only world that meets here never starts, and all ranks have been told so.
    fn cannot_start(&self) -> bool {
        let all_told = self.other_size.as_ref().is_some_and(|other| other.is_told_to_all(self.slots.len()));
        self.worlds == Worlds::One && !self.started && all_told
    }

    /// Whether nobody is left of the only world that meets here. Of worlds in run_once there always may be another, or somebody to
    /// be told that there is none.
    fn is_over(&self) -> bool {
        self.worlds == Worlds::One && self.started && self.members().next().is_none()
    }

    /// Goes on when all ranks of a world have left or are gone: the next one may meet, if there is one after it.
    fn end_world(&mut self) {
        match self.worlds {
            Worlds::One => {
                let farewell = self.runtime.deadline(FAREWELL_LIMIT);
                let deadlines = self.arriving.iter_mut().map(|(_, _, deadline)| deadline);
                deadlines.for_each(|deadline| *deadline = deadline.earlier(farewell));
            }
            Worlds::InTurn if lock(&self.abort_state).is_none() => {
                self.started = false;
                self.slots.fill_with(|| RankSlot::Empty);
                self.unreachable.clear();
                tracing::debug!("all ranks have left: the next world may meet");
            }
            Worlds::InTurn => {}
        }
    }

    /// Waits for something to happen, and says which ranks' lines have something to be heard or take more.
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
        // To read where nothing has come is a system call for each rank, and every sign of life of a rank ends this wait.
        let taken = self.slots.iter().enumerate().filter(|(_, slot)| matches!(slot, RankSlot::Taken(_)));
        let ready = taken.zip(&watched[first..]).filter(|(_, line)| !line.revents().is_empty());
        Ok(ready.map(|((rank, _), _)| rank).collect())
    }

    /// How soon there is something to do although nothing has happened: a sign of life to give, or a rank that has to be
    /// answered, or is silent for too long then.
    fn next_deadline(&self) -> Duration {
        let now = self.runtime.now();
        let answers = self.members().filter_map(|member| member.answer_by);
        let next = answers.chain([self.next_heartbeat]).map(|deadline| self.runtime.remaining(deadline));
        let silences = self.members().filter(|_| self.started).map(|member| member.silent_in(now));
        next.chain(silences).min().unwrap_or(HEARTBEAT)
    }

    /// MessageCounts the ranks that have not left, for whoever hosts this as well.
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
            .filter_map(|slot| if let RankSlot::Taken(member) = slot { Some(&**member) } else { None })
    }

    fn members_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Member> {
        self.slots
            .iter_mut()
            .filter_map(|slot| if let RankSlot::Taken(member) = slot { Some(&mut **member) } else { None })
    }

    fn admit(&mut self, Admitted { stream, identity, .. }: Admitted) {
        let (now, deadline) = (self.runtime.now(), self.runtime.deadline(JOIN_LIMIT));
        match identity.purpose {
            Purpose::Control if identity.to == COORDINATOR => {
                self.arriving.push((identity.from, ControlConnection::new(stream), deadline));
            }
            Purpose::Probe if identity.to == COORDINATOR => {
                if let Some(RankSlot::Taken(member)) = self.slots.get_mut(identity.from as usize) {
                    member.last_seen = now;
                }
            }
            _ => {}
        }
    }

    /// A rank has come that there is no descriptor for: it could not hear of anything that happens.
    fn run_out_of_files(&mut self, error: &io::Error) {
        let missing =
            self.slots.iter().position(|slot| !matches!(slot, RankSlot::Taken(_))).unwrap_or_default();
        let rank = if self.worlds == Worlds::One { 0 } else { missing };
        let cause = Cause::gave_up(format_args!("the coordinator cannot accept its connection: {error}"));
        self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
    }

    /// Hears those who have just arrived.
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
                    // There may be more.
                    self.arriving.push((rank, line, deadline));
                }
                // It cannot join, whatever the others do.
                Ok(Some(Frame::Abort(abort))) if !self.started => self.abort(abort),
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }

    /// Ends the job if others wait for a rank to join whose process has ended.
    fn abort_if_awaited_rank_ended(&mut self) {
        self.ended.extend(self.ended_here.iter().flat_map(|ended| ended.take()));
        if self.started || self.members().next().is_none() {
            return;
        }
        let has_not_come =
            |&rank: &u32| matches!(self.slots.get(rank as usize), Some(RankSlot::Empty | RankSlot::GaveUp));
        if let Some(rank) = self.ended.iter().copied().find(has_not_come) {
            let rank = rank as usize;
            self.abort(Abort { cause: Cause::NotJoined, rank, reporter: rank, call: Fingerprint::NONE });
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
        // Whoever cannot join is told why; if the line breaks meanwhile there is nobody left to tell.
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
            RankSlot::Taken(_) => Some(Frame::Duplicate),
            RankSlot::Left => Some(Frame::Over),
        };
        if let Some(refusal) = refusal {
            // All others come again anyway.
            if refusal == Frame::Over && wait_policy < 2 * ANSWER_GRACE_MAX {
                let mut still_there = those(&self.slots, |slot| matches!(slot, RankSlot::Taken(_)));
                still_there.truncate(NAMED_MAX);
                tell_missing(&mut line, &still_there, self.acceptor.refused());
            }
            let _ = line.push(refusal);
            return;
        }
        *slot = RankSlot::Taken(Box::new(Member {
            line,
            peer_info,
            answer_by: Some(self.runtime.deadline(wait_policy)),
            last_seen: self.runtime.now(),
            liveness,
            waiting: HashMap::new(),
        }));
        tracing::debug!(rank, address = %peer_info.address, "joined");
        // Whoever was told that not all have come is about to go, and may come again.
        if self.slots.iter().all(RankSlot::is_expectant) {
            self.start();
        }
    }

    /// Why no world meets here any more: a rank could not join, or a world was aborted that others were to follow.
    fn aborted_for_all(&self) -> Option<Abort> {
        lock(&self.abort_state).clone().filter(|_| self.worlds == Worlds::InTurn || !self.started)
    }

    /// Tells those who have come that they wait in vain, because this rank expects a world of another size.
    fn announce_other_size(&mut self, rank: u32, size: u32) {
        // Whoever was told before that there is another size need not hear of this one too.
        let mut told = self.other_size.take().map(|other| other.told).unwrap_or_default();
        told.insert(rank);
        for (number, slot) in (0..).zip(&mut self.slots) {
            if let RankSlot::Taken(member) = slot {
                member.answer_by = None;
                let _ = member.line.push(Frame::OtherWorldSize { rank, size });
                told.insert(number);
            }
        }
        self.other_size = Some(OtherSize { rank, size, told });
    }

    /// What a rank that comes now, and expects the world that meets here, is told of one that came before and expects another.
    fn other_size_for(&mut self, rank: u32) -> Option<Frame> {
        let other = self.other_size.as_mut().filter(|_| !self.started)?;
        if other.rank == rank {
            // It has come again, and expects this world now.
            self.other_size = None;
            return None;
        }
        let refusal = Frame::OtherWorldSize { rank: other.rank, size: other.size };
        let is_news = other.told.insert(rank);
        // A rank that comes again was started again, and the other one may have been too.
        is_news.then_some(refusal)
    }

    /// Tells everyone where everyone is.
    fn start(&mut self) {
        self.started = true;
        // Before anybody can hear of it, do all there is to do, and leave.
        self.count_present();
        let peers = (0..)
            .zip(self.members())
            .map(|(rank, member)| Frame::Peer { rank, peer_info: member.peer_info }.encode());
        let peers: Vec<_> = peers.collect();
        for rank in 0..self.slots.len() {
            // Those who were told first wait for signs of life while the last are told.
            self.heartbeat();
            if let RankSlot::Taken(member) = &mut self.slots[rank] {
                member.answer_by = None;
                // It gives signs of life from now on.
                member.last_seen = self.runtime.now();
                // A system_error line is noticed when it is listened to.
                let _ = member.line.push_all(&peers);
            }
        }
    }

    /// Hears what one rank has to say.
    fn read_frames(&mut self, rank: usize) {
        let number = u32::try_from(rank).expect("checked when the coordinator was started");
        loop {
            let RankSlot::Taken(member) = &mut self.slots[rank] else { return };
            // A system_error line says so when all was heard that came by it: a rank that has logged goodbye may have hung up first.
            let _ = member.line.flush();
            match member.line.pull() {
                Ok(None) => return,
                Ok(Some(Frame::Beat)) => member.last_seen = self.runtime.now(),
                Ok(Some(Frame::Abort(abort))) if abort.cause == Cause::Unreachable => {
                    self.unreachable.push((abort, self.runtime.now()));
                }
                Ok(Some(Frame::Abort(abort))) => self.abort(abort),
                Ok(Some(Frame::Ended { rank: peer })) if peer != number => self.note_ended(peer as usize),
                Ok(Some(Frame::Waiting { channel, wait, calls })) => {
                    member.waiting.retain(|_, (wait, _)| wait.on != number);
                    member.waiting.insert(channel, (wait, calls));
                    self.compare(rank, &calls);
                    self.compare_waits(rank, channel);
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
                Ok(Some(Frame::Goodbye)) => {
                    let left = std::mem::replace(&mut self.slots[rank], RankSlot::Left);
                    // Whoever is hung up on finds itself counted.
                    if self.started {
                        self.count_present();
                    }
                    drop(left);
                    self.leavings.push(Frame::Left { rank: number }.encode());
                }
                Ok(Some(_)) => self.lose(rank, Cause::Protocol),
                Err(e) if e.kind() == io::ErrorKind::InvalidData => self.lose(rank, Cause::Protocol),
                Err(_) => self.lose(rank, Cause::Died),
            }
        }
    }

    /// Tells one rank what another says to it; one that has left needs no telling.
    fn pass_on(&mut self, to: u32, frame: Frame) {
        if let Some(RankSlot::Taken(member)) = self.slots.get_mut(to as usize) {
            // A system_error line is noticed when it is listened to.
            let _ = member.line.push(frame);
        }
    }

    /// Tells the others who has left, for those who might wait for a connection of theirs.
    fn send_leavings(&mut self) {
        let leavings = std::mem::take(&mut self.leavings);
        if !leavings.is_empty() {
            for member in self.members_mut() {
                let _ = member.line.push_all(&leavings);
            }
        }
    }

    /// Aborts the job if the reporter waits in calls that cannot meet those in which another rank waits: both would wait until
    /// their deadline. The last report of each rank is enough to know, however old it is. All channels are looked at, since
    /// an operation that one rank starts and another one calls is on different channels of one communicator.
    fn compare(&mut self, reporter: usize, calls: &[Fingerprint]) {
        let contradiction = self.slots.iter().enumerate().find_map(|(rank, slot)| {
            let RankSlot::Taken(member) = slot else { return None };
            let contradiction = |(_, theirs): &(WaitReport, [Fingerprint; CALLS_MAX])| {
                Fingerprint::contradiction(calls, theirs)
            };
            member.waiting.values().find_map(contradiction).map(|(call, theirs)| (rank, call, theirs))
        });
        if let Some((rank, call, theirs)) = contradiction {
            self.abort(Abort { cause: Cause::Mismatch { theirs }, rank, reporter, call });
        }
    }

    /// Ends the job if the reporter and the rank that it waits for wait for each other, in two calls, for what neither has sent
    /// yet: a message on one side, as of `send_recv`, and a signal in shared memory on the other, say.
    fn compare_waits(&mut self, reporter: usize, channel: ChannelId) {
        let Some((ours, [call, ..])) = self.wait_of(reporter, channel) else { return };
        let rank = ours.on as usize;
        let Some((theirs, [their_call, ..])) = self.wait_of(rank, channel) else { return };
        let is_mutual = rank != reporter && theirs.on as usize == reporter;
        // Of messages outside any call nobody knows what they belong to.
        let differ = call != their_call && ![call, their_call].contains(&Fingerprint::NONE);
        if is_mutual && differ && ours.is_forever_with(&theirs) {
            self.abort(Abort { cause: Cause::Mismatch { theirs: their_call }, rank, reporter, call });
        }
    }

    fn wait_of(&self, rank: usize, channel: ChannelId) -> Option<(WaitReport, [Fingerprint; CALLS_MAX])> {
        let Some(RankSlot::Taken(member)) = self.slots.get(rank) else { return None };
        member.waiting.get(&channel).copied()
    }

    /// A rank is gone without a goodbye: before the start it may come again, after it that is the job's end.
    fn lose(&mut self, rank: usize, cause: Cause) {
        if self.started {
            self.slots[rank] = RankSlot::Left;
            self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
            return;
        }
        let answered = matches!(&self.slots[rank], RankSlot::Taken(member) if member.answer_by.is_none());
        self.slots[rank] = if answered { RankSlot::GaveUp } else { RankSlot::Empty };
    }

    /// Notes that a rank's process has ended, which may have left before. What it has logged before it ended is heard first.
    fn note_ended(&mut self, rank: usize) {
        if rank < self.slots.len() {
            self.read_frames(rank);
        }
        if let Some(RankSlot::Taken(_)) = self.slots.get(rank) {
            self.lose(rank, Cause::Died);
        }
    }

    fn abort(&mut self, abort: Abort) {
        if lock(&self.abort_state).is_some() {
            return;
        }
        let abort = abort.followed(|rank, call| self.waits_for(rank, call));
        // Rank 0 last, and whoever hosts this after it: its process may end as soon as it knows.
        for member in self.members_mut().rev() {
            let _ = member.line.push(Frame::Abort(abort.clone()));
        }
        *lock(&self.abort_state) = Some(abort.clone());
        // Last, because a log may keep its writer waiting.
        tracing::warn!(%abort, "the job is aborted");
    }

    /// For which rank another has last logged that it waits, if that was in this call and it has not logged since that it waits no
    /// longer.
    fn waits_for(&self, rank: usize, call: &Fingerprint) -> Option<usize> {
        let Some(RankSlot::Taken(member)) = self.slots.get(rank) else { return None };
        let (wait, _) = member.waiting.values().find(|(_, calls)| calls.contains(call))?;
        Some(wait.on as usize).filter(|&on| on != rank)
    }

    /// Notices ranks of which nothing had come for too long when all were `looked_at`: what has come since is not seen yet.
    fn watch_silence(&mut self, looked_at: Duration) {
        let slept = looked_at.saturating_sub(std::mem::replace(&mut self.last_look, looked_at));
        if slept > 2 * HEARTBEAT {
            // Not they were silent, we were not looking.
            self.members_mut().for_each(|member| member.last_seen = looked_at);
        }
        if !self.started {
            return;
        }
        self.judge_unreachable(looked_at);
        for rank in 0..self.slots.len() {
            let is_silent = |member: &Member| looked_at.saturating_sub(member.last_seen) > member.liveness;
            if matches!(&self.slots[rank], RankSlot::Taken(member) if is_silent(member)) {
                // Told as well, should it ever hear it; but nobody waits for it any longer.
                self.abort(Abort { cause: Cause::Silent, rank, reporter: rank, call: Fingerprint::NONE });
                self.slots[rank] = RankSlot::Left;
            }
        }
    }

    /// Two ranks that cannot reach each other end the job, if both live: the one that is reported has given a sign of life since,
    /// or a moment ago. Else it is silent before long, and that is the cause.
    fn judge_unreachable(&mut self, now: Duration) {
        let slots = &self.slots;
        let is_certain = |(abort, reported): &mut (Abort, Duration)| match slots.get(abort.rank) {
            Some(RankSlot::Taken(peer)) => {
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

    /// Tells those who cannot wait any longer who is missing.
    fn answer_expired(&mut self) {
        if self.runtime.expired(self.next_heartbeat) {
            self.next_heartbeat = self.runtime.deadline(HEARTBEAT);
        }
        let runtime = self.runtime.clone();
        self.answer(|member| member.answer_by.is_some_and(|deadline| runtime.expired(deadline)));
    }

    /// Tells some of those who have come who has not; if all have come, but not at one time, who has gone again.
    fn answer(&mut self, to_whom: impl Fn(&Member) -> bool) {
        let mut missing = those(&self.slots, |slot| matches!(slot, RankSlot::Empty));
        if missing.is_empty() {
            missing = those(&self.slots, |slot| !slot.is_expectant());
        }
        let refused = self.acceptor.refused();
        for member in self.members_mut() {
            if to_whom(member) {
                member.answer_by = None;
                tell_missing(&mut member.line, &missing, refused);
                let _ = member.line.push(Frame::NotAll);
            }
        }
    }
}

/// The ranks whose slots are meant.
fn those(slots: &[RankSlot], is_meant: impl Fn(&RankSlot) -> bool) -> Vec<u32> {
    (0..).zip(slots).filter(|(_, slot)| is_meant(slot)).map(|(rank, _)| rank).collect()
}

fn tell_missing(line: &mut ControlConnection, missing: &[u32], refused: u64) {
    let frames: Vec<_> = missing.iter().map(|&rank| Frame::Missing { rank, refused }.encode()).collect();
    // A system_error line is noticed when it is listened to.
    let _ = line.push_all(&frames);
}

#[cfg(test)]
mod tests;
