//! Where the ranks of a job meet, and are watched until they have left: what the coordinator's thread does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;

use crate::auth::Purpose;
use crate::bookkeeping::BEAT;
use crate::tcp::control::{FRAME_BYTES, Frame, Home, Line, Wait};
use crate::tcp::coordinator::{COORDINATOR, FAREWELL_LIMIT};
use crate::tcp::gate::{Admitted, Gate};
use crate::tcp::session::lock;
use crate::tcp::verdict::Bell;
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
pub(super) struct Meeting {
    gate: Gate,
    worlds: Worlds,
    /// Those who have proven that they belong to the job and have not said yet that they join.
    arriving: Vec<(u32, Line, Deadline)>,
    places: Vec<Place>,
    started: bool,
    /// The last rank that came and expects a world of another size.
    other_size: Option<OtherSize>,
    /// What the others have yet to hear of those who have left: all at once, since often all ranks leave together.
    leavings: Vec<[u8; FRAME_BYTES]>,
    /// The first thing that went wrong.
    verdict: Arc<Mutex<Option<Abort>>>,
    /// How many ranks have not left since all had come, for whoever hosts this.
    present: Arc<Present>,
    /// The ranks whose processes have ended.
    ended: BTreeSet<u32>,
    /// Those that whoever hosts this has seen since it was last looked at.
    ended_here: Option<Arc<EndedRanks>>,
    /// Reports that two ranks cannot reach each other, and when they came: it is not known yet whether one of them is dead.
    unreachable: Vec<(Abort, Duration)>,
    last_look: Duration,
    next_beat: Deadline,
    runtime: Runtime,
}

/// Ranks whose processes have ended, for the coordinator's thread from another one.
#[derive(Debug)]
pub(super) struct EndedRanks {
    ranks: Mutex<Vec<u32>>,
    bell: Bell,
}

impl EndedRanks {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { ranks: Mutex::default(), bell: Bell::new()? })
    }

    pub(super) fn push(&self, rank: u32) {
        lock(&self.ranks).push(rank);
        self.bell.ring();
    }

    fn take(&self) -> Vec<u32> {
        self.bell.rung();
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
enum Place {
    Empty,
    Taken(Box<Member>),
    /// It was told before the start that not all have come, and went. It may come again, but is none of those who did not.
    GaveUp,
    Left,
}

impl Place {
    /// Whether a rank has come that has not been told how that ends.
    fn is_expectant(&self) -> bool {
        matches!(self, Self::Taken(member) if member.answer_by.is_some())
    }
}

struct Member {
    line: Line,
    home: Home,
    /// None once it was told that all have come, or that not all have.
    answer_by: Option<Deadline>,
    last_seen: Duration,
    /// How long it may be silent.
    liveness: Duration,
    /// By channel, what it waits for there, as it has said, and its last calls there, the current one first. Of waits that are
    /// over, which are for itself, only the last is kept.
    waiting: HashMap<ChannelId, (Wait, [Fingerprint; CALLS_MAX])>,
}

impl Member {
    /// How soon it is silent for too long, unless it gives a sign of life before.
    fn silent_in(&self, now: Duration) -> Duration {
        self.last_seen.saturating_add(self.liveness).saturating_sub(now)
    }
}

impl Meeting {
    pub(super) fn new(
        gate: Gate,
        worlds: Worlds,
        world_size: usize,
        verdict: Arc<Mutex<Option<Abort>>>,
        present: Arc<Present>,
        runtime: &Runtime,
    ) -> Self {
        Self {
            gate,
            worlds,
            arriving: Vec::new(),
            places: (0..world_size).map(|_| Place::Empty).collect(),
            started: false,
            other_size: None,
            leavings: Vec::new(),
            verdict,
            present,
            ended: BTreeSet::new(),
            ended_here: None,
            unreachable: Vec::new(),
            last_look: runtime.now(),
            next_beat: runtime.deadline(BEAT),
            runtime: runtime.clone(),
        }
    }

    /// The same, told of ranks whose processes have ended.
    pub(super) fn with_ended(self, ended: Arc<EndedRanks>) -> Self {
        Self { ended_here: Some(ended), ..self }
    }

    /// Waits for something to happen and deals with it. `true` when there is nothing more to do.
    pub(super) fn turn(&mut self, stop: &Bell) -> bool {
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
            for admitted in self.gate.advance() {
                self.admit(admitted);
            }
            if let Some(error) = self.gate.take_out_of_files() {
                self.run_out_of_files(&error);
            }
        }
        // Before those who have arrived: a rank that comes again has said before that it leaves.
        ready.into_iter().for_each(|rank| self.listen(rank));
        self.tell_leavings();
        self.welcome();
        self.miss_ended();
        self.watch_silence(looked_at);
        if self.started {
            self.beat();
        } else {
            self.answer_the_impatient();
        }
        if self.started && self.count_present() == 0 {
            self.end_world();
        }
        let stopped = stop.rung();
        if stopped && !self.started {
            self.answer(|_| true);
        }
        // Whoever has just arrived is still to hear that it is over.
        self.is_over() && self.arriving.is_empty() || self.cannot_start() || stopped
    }

    /// Returns `true` if the only world that meets here never starts, and all ranks have been told so.
    fn cannot_start(&self) -> bool {
        let all_told = self.other_size.as_ref().is_some_and(|other| other.is_told_to_all(self.places.len()));
        self.worlds == Worlds::One && !self.started && all_told
    }

    /// Whether nobody is left of the only world that meets here. Of worlds in turn there always may be another, or somebody to
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
            Worlds::InTurn if lock(&self.verdict).is_none() => {
                self.started = false;
                self.places.fill_with(|| Place::Empty);
                self.unreachable.clear();
                tracing::debug!("all ranks have left: the next world may meet");
            }
            Worlds::InTurn => {}
        }
    }

    /// Waits for something to happen, and says which ranks' lines have something to be heard or take more.
    fn wait(&self, stop: &Bell) -> io::Result<Vec<usize>> {
        let mut watched = vec![stop.watch()];
        watched.extend(self.ended_here.iter().map(|ended| ended.bell.watch()));
        let gate = Some(&self.gate).filter(|_| !self.is_over());
        watched.extend(gate.into_iter().flat_map(Gate::watch));
        watched.extend(self.arriving.iter().map(|(_, line, _)| socket::watch(&line.stream, PollFlags::IN)));
        let first = watched.len();
        watched.extend(self.members().map(|member| {
            let unsent = if member.line.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            socket::watch(&member.line.stream, PollFlags::IN | unsent)
        }));
        let next = self.next_deadline().min(gate.and_then(Gate::look_again_in).unwrap_or(BEAT));
        socket::poll(&mut watched, next)?;
        // To read where nothing has come is a system call for each rank, and every sign of life of a rank ends this wait.
        let taken = self.places.iter().enumerate().filter(|(_, place)| matches!(place, Place::Taken(_)));
        let ready = taken.zip(&watched[first..]).filter(|(_, line)| !line.revents().is_empty());
        Ok(ready.map(|((rank, _), _)| rank).collect())
    }

    /// How soon there is something to do although nothing has happened: a sign of life to give, or a rank that has to be
    /// answered, or is silent for too long then.
    fn next_deadline(&self) -> Duration {
        let now = self.runtime.now();
        let answers = self.members().filter_map(|member| member.answer_by);
        let next = answers.chain([self.next_beat]).map(|deadline| self.runtime.remaining(deadline));
        let silences = self.members().filter(|_| self.started).map(|member| member.silent_in(now));
        next.chain(silences).min().unwrap_or(BEAT)
    }

    /// Counts the ranks that have not left, for whoever hosts this as well.
    fn count_present(&self) -> usize {
        let present = self.members().count();
        let here = host::process();
        let elsewhere = self.members().filter(|member| member.home.process != here).count();
        self.present.all.store(present, Ordering::Release);
        self.present.elsewhere.store(elsewhere, Ordering::Release);
        present
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.places
            .iter()
            .filter_map(|place| if let Place::Taken(member) = place { Some(&**member) } else { None })
    }

    fn members_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Member> {
        self.places
            .iter_mut()
            .filter_map(|place| if let Place::Taken(member) = place { Some(&mut **member) } else { None })
    }

    fn admit(&mut self, Admitted { stream, identity, .. }: Admitted) {
        let (now, deadline) = (self.runtime.now(), self.runtime.deadline(JOIN_LIMIT));
        match identity.purpose {
            Purpose::Control if identity.to == COORDINATOR => {
                self.arriving.push((identity.from, Line::new(stream), deadline));
            }
            Purpose::Probe if identity.to == COORDINATOR => {
                if let Some(Place::Taken(member)) = self.places.get_mut(identity.from as usize) {
                    member.last_seen = now;
                }
            }
            _ => {}
        }
    }

    /// A rank has come that there is no descriptor for: it could not hear of anything that happens.
    fn run_out_of_files(&mut self, error: &io::Error) {
        let missing =
            self.places.iter().position(|place| !matches!(place, Place::Taken(_))).unwrap_or_default();
        let rank = if self.worlds == Worlds::One { 0 } else { missing };
        let cause = Cause::gave_up(format_args!("the coordinator cannot accept its connection: {error}"));
        self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
    }

    /// Hears those who have just arrived.
    fn welcome(&mut self) {
        for (rank, mut line, deadline) in std::mem::take(&mut self.arriving) {
            match line.pull() {
                Ok(None) if self.runtime.expired(deadline) => {}
                Ok(None) => self.arriving.push((rank, line, deadline)),
                Ok(Some(Frame::Join { world_size, patience_ms, liveness_ms, home })) => {
                    let [patience, liveness] =
                        [patience_ms, liveness_ms].map(|time| Duration::from_millis(time.into()));
                    self.join((rank, line), world_size, home, [patience, liveness]);
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
    fn miss_ended(&mut self) {
        self.ended.extend(self.ended_here.iter().flat_map(|ended| ended.take()));
        if self.started || self.members().next().is_none() {
            return;
        }
        let has_not_come =
            |&rank: &u32| matches!(self.places.get(rank as usize), Some(Place::Empty | Place::GaveUp));
        if let Some(rank) = self.ended.iter().copied().find(has_not_come) {
            let rank = rank as usize;
            self.abort(Abort { cause: Cause::NotJoined, rank, reporter: rank, call: Fingerprint::NONE });
        }
    }

    fn join(
        &mut self,
        (rank, mut line): (u32, Line),
        size: u32,
        home: Home,
        [patience, liveness]: [Duration; 2],
    ) {
        if let Some(abort) = self.aborted_for_all() {
            let _ = line.push(Frame::Abort(abort));
            return;
        }
        let expected = u32::try_from(self.places.len()).expect("checked when the coordinator was started");
        let fits = size == expected && rank < expected;
        // Whoever cannot join is told why; if the line breaks meanwhile there is nobody left to tell.
        if !fits {
            let _ = line.push(Frame::WorldSize { expected });
            if !self.started {
                self.part(rank, size);
            }
            return;
        }
        if let Some(refusal) = self.other_size_for(rank) {
            let _ = line.push(refusal);
            return;
        }
        let place = &mut self.places[rank as usize];
        let refusal = match place {
            Place::Empty | Place::GaveUp => None,
            Place::Taken(_) => Some(Frame::Duplicate),
            Place::Left => Some(Frame::Over),
        };
        if let Some(refusal) = refusal {
            // All others come again anyway.
            if refusal == Frame::Over && patience < 2 * ANSWER_GRACE_MAX {
                let mut still_there = those(&self.places, |place| matches!(place, Place::Taken(_)));
                still_there.truncate(NAMED_MAX);
                tell_missing(&mut line, &still_there, self.gate.refused());
            }
            let _ = line.push(refusal);
            return;
        }
        *place = Place::Taken(Box::new(Member {
            line,
            home,
            answer_by: Some(self.runtime.deadline(patience)),
            last_seen: self.runtime.now(),
            liveness,
            waiting: HashMap::new(),
        }));
        tracing::debug!(rank, address = %home.address, "joined");
        // Whoever was told that not all have come is about to go, and may come again.
        if self.places.iter().all(Place::is_expectant) {
            self.start();
        }
    }

    /// Why no world meets here any more: a rank could not join, or a world was aborted that others were to follow.
    fn aborted_for_all(&self) -> Option<Abort> {
        lock(&self.verdict).clone().filter(|_| self.worlds == Worlds::InTurn || !self.started)
    }

    /// Tells those who have come that they wait in vain, because this rank expects a world of another size.
    fn part(&mut self, rank: u32, size: u32) {
        // Whoever was told before that there is another size need not hear of this one too.
        let mut told = self.other_size.take().map(|other| other.told).unwrap_or_default();
        told.insert(rank);
        for (number, place) in (0..).zip(&mut self.places) {
            if let Place::Taken(member) = place {
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
        let peers =
            (0..).zip(self.members()).map(|(rank, member)| Frame::Peer { rank, home: member.home }.encode());
        let peers: Vec<_> = peers.collect();
        for rank in 0..self.places.len() {
            // Those who were told first wait for signs of life while the last are told.
            self.beat();
            if let Place::Taken(member) = &mut self.places[rank] {
                member.answer_by = None;
                // It gives signs of life from now on.
                member.last_seen = self.runtime.now();
                // A broken line is noticed when it is listened to.
                let _ = member.line.push_all(&peers);
            }
        }
    }

    /// Hears what one rank has to say.
    fn listen(&mut self, rank: usize) {
        let number = u32::try_from(rank).expect("checked when the coordinator was started");
        loop {
            let Place::Taken(member) = &mut self.places[rank] else { return };
            // A broken line says so when all was heard that came by it: a rank that has said goodbye may have hung up first.
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
                    let left = std::mem::replace(&mut self.places[rank], Place::Left);
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
        if let Some(Place::Taken(member)) = self.places.get_mut(to as usize) {
            // A broken line is noticed when it is listened to.
            let _ = member.line.push(frame);
        }
    }

    /// Tells the others who has left, for those who might wait for a connection of theirs.
    fn tell_leavings(&mut self) {
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
        let contradiction = self.places.iter().enumerate().find_map(|(rank, place)| {
            let Place::Taken(member) = place else { return None };
            let contradiction =
                |(_, theirs): &(Wait, [Fingerprint; CALLS_MAX])| Fingerprint::contradiction(calls, theirs);
            member.waiting.values().find_map(contradiction).map(|(call, theirs)| (rank, call, theirs))
        });
        if let Some((rank, call, theirs)) = contradiction {
            self.abort(Abort { cause: Cause::Mismatch { theirs }, rank, reporter, call });
        }
    }

    /// Ends the job if the reporter and the rank that it waits for wait for each other, in two calls, for what neither has sent
    /// yet: a message on one side, as of `send_recv`, and a post in shared memory on the other, say.
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

    fn wait_of(&self, rank: usize, channel: ChannelId) -> Option<(Wait, [Fingerprint; CALLS_MAX])> {
        let Some(Place::Taken(member)) = self.places.get(rank) else { return None };
        member.waiting.get(&channel).copied()
    }

    /// A rank is gone without a goodbye: before the start it may come again, after it that is the job's end.
    fn lose(&mut self, rank: usize, cause: Cause) {
        if self.started {
            self.places[rank] = Place::Left;
            self.abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE });
            return;
        }
        let answered = matches!(&self.places[rank], Place::Taken(member) if member.answer_by.is_none());
        self.places[rank] = if answered { Place::GaveUp } else { Place::Empty };
    }

    /// Notes that a rank's process has ended, which may have left before. What it has said before it ended is heard first.
    fn note_ended(&mut self, rank: usize) {
        if rank < self.places.len() {
            self.listen(rank);
        }
        if let Some(Place::Taken(_)) = self.places.get(rank) {
            self.lose(rank, Cause::Died);
        }
    }

    fn abort(&mut self, abort: Abort) {
        if lock(&self.verdict).is_some() {
            return;
        }
        let abort = abort.followed(|rank, call| self.waits_for(rank, call));
        // Rank 0 last, and whoever hosts this after it: its process may end as soon as it knows.
        for member in self.members_mut().rev() {
            let _ = member.line.push(Frame::Abort(abort.clone()));
        }
        *lock(&self.verdict) = Some(abort.clone());
        // Last, because a log may keep its writer waiting.
        tracing::warn!(%abort, "the job is aborted");
    }

    /// For which rank another has last said that it waits, if that was in this call and it has not said since that it waits no
    /// longer.
    fn waits_for(&self, rank: usize, call: &Fingerprint) -> Option<usize> {
        let Some(Place::Taken(member)) = self.places.get(rank) else { return None };
        let (wait, _) = member.waiting.values().find(|(_, calls)| calls.contains(call))?;
        Some(wait.on as usize).filter(|&on| on != rank)
    }

    /// Notices ranks of which nothing had come for too long when all were `looked_at`: what has come since is not seen yet.
    fn watch_silence(&mut self, looked_at: Duration) {
        let slept = looked_at.saturating_sub(std::mem::replace(&mut self.last_look, looked_at));
        if slept > 2 * BEAT {
            // Not they were silent, we were not looking.
            self.members_mut().for_each(|member| member.last_seen = looked_at);
        }
        if !self.started {
            return;
        }
        self.judge_unreachable(looked_at);
        for rank in 0..self.places.len() {
            let is_silent = |member: &Member| looked_at.saturating_sub(member.last_seen) > member.liveness;
            if matches!(&self.places[rank], Place::Taken(member) if is_silent(member)) {
                // Told as well, should it ever hear it; but nobody waits for it any longer.
                self.abort(Abort { cause: Cause::Silent, rank, reporter: rank, call: Fingerprint::NONE });
                self.places[rank] = Place::Left;
            }
        }
    }

    /// Two ranks that cannot reach each other end the job, if both live: the one that is reported has given a sign of life since,
    /// or a moment ago. Else it is silent before long, and that is the cause.
    fn judge_unreachable(&mut self, now: Duration) {
        let places = &self.places;
        let is_certain = |(abort, reported): &mut (Abort, Duration)| match places.get(abort.rank) {
            Some(Place::Taken(peer)) => {
                peer.last_seen > *reported || now.saturating_sub(peer.last_seen) < 2 * BEAT
            }
            _ => true,
        };
        let certain = self.unreachable.extract_if(.., is_certain).next();
        if let Some((abort, _)) = certain {
            self.abort(abort);
        }
    }

    fn beat(&mut self) {
        if self.runtime.expired(self.next_beat) {
            self.next_beat = self.runtime.deadline(BEAT);
            for member in self.members_mut() {
                let _ = member.line.push(Frame::Beat);
            }
        }
    }

    /// Tells those who cannot wait any longer who is missing.
    fn answer_the_impatient(&mut self) {
        if self.runtime.expired(self.next_beat) {
            self.next_beat = self.runtime.deadline(BEAT);
        }
        let runtime = self.runtime.clone();
        self.answer(|member| member.answer_by.is_some_and(|deadline| runtime.expired(deadline)));
    }

    /// Tells some of those who have come who has not; if all have come, but not at one time, who has gone again.
    fn answer(&mut self, to_whom: impl Fn(&Member) -> bool) {
        let mut missing = those(&self.places, |place| matches!(place, Place::Empty));
        if missing.is_empty() {
            missing = those(&self.places, |place| !place.is_expectant());
        }
        let refused = self.gate.refused();
        for member in self.members_mut() {
            if to_whom(member) {
                member.answer_by = None;
                tell_missing(&mut member.line, &missing, refused);
                let _ = member.line.push(Frame::NotAll);
            }
        }
    }
}

/// The ranks whose places are meant.
fn those(places: &[Place], is_meant: impl Fn(&Place) -> bool) -> Vec<u32> {
    (0..).zip(places).filter(|(_, place)| is_meant(place)).map(|(rank, _)| rank).collect()
}

fn tell_missing(line: &mut Line, missing: &[u32], refused: u64) {
    let frames: Vec<_> = missing.iter().map(|&rank| Frame::Missing { rank, refused }.encode()).collect();
    // A broken line is noticed when it is listened to.
    let _ = line.push_all(&frames);
}

#[cfg(test)]
mod tests;
