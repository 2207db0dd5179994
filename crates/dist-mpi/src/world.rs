//! The state that all channels of a process share: packets in order, queues of channels, credits, and the abort.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytemuck::cast_slice_mut;
use dist_transport::announced::MatchedFrame;
use dist_transport::cpu::CacheLine;
use dist_transport::runtime::{Task, Unparker};
use dist_transport::{Abort, AbortDecision, Cause, ChannelId, Fingerprint, Runtime};

use crate::library::{CreateCommunicator, NativeComm};
use crate::native::Natives;
use crate::records::{self, WaitReport};
use crate::store::{self, StoreState};
use crate::wire::{
    Buffer, Completions, HEADER, IN_FLIGHT_MAX, Kind, NativeSegment, Packet, SEGMENT, SHORT, Tag, Wire,
};

/// Bytes that a rank may send to another one on one channel before that one takes some.
const WINDOW: usize = 8 * SEGMENT;
/// The time that rank 0 has to decide about a proposed abort. After it, a rank decides alone. On a machine with fewer cores
/// than ranks, a rank that waits may get no core for tens of milliseconds.
const DECISION: Duration = Duration::from_secs(2);
/// The time between two looks of the service thread if the program makes no calls.
const LOOK: Duration = Duration::from_millis(5);
/// The time between two looks while packets are on their way, and while rank 0 serves requests to the store.
const LOOK_IN_FLIGHT: Duration = Duration::from_micros(200);
/// The time that a process waits, after an abort, for the others to leave in order.
const LEAVING_AFTER_ABORT: Duration = Duration::from_secs(5);

/// One process of the job, its library, and everything that has arrived.
pub(crate) struct World {
    pub(crate) runtime: Runtime,
    pub(crate) rank: usize,
    pub(crate) placement: Vec<Placement>,
    /// `true` if the ranks of this host have fewer cores than ranks.
    pub(crate) is_oversubscribed: bool,
    /// The smallest collective in bytes that the library executes, if it executes any.
    pub(crate) native_from: Option<usize>,
    abort: OnceLock<Abort>,
    /// The abort that this rank has proposed, until there is a decision.
    proposed: OnceLock<Abort>,
    state: Mutex<State>,
    service: Mutex<Option<Task<()>>>,
    service_thread: OnceLock<Unparker>,
    /// The threads that are woken when there is a decision.
    notified: Mutex<Vec<Unparker>>,
}

/// The place of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Ranks with equal numbers share a machine.
    pub(crate) host: u64,
    /// The cores that the rank may run on, as bits.
    pub(crate) cores: [u64; CORE_WORDS],
}

/// Words of a mask of 1,024 cores.
pub(crate) const CORE_WORDS: usize = 16;

pub(crate) struct State {
    wire: Box<dyn Wire>,
    completions: Completions,
    peers: Vec<Peer>,
    channels: Vec<Option<Channel>>,
    by_id: HashMap<u64, usize>,
    /// The time at which this rank proposed an abort.
    proposed_at: Option<Duration>,
    /// On rank 0: the last report of each rank that waits long on a channel.
    waits: HashMap<(usize, u64), WaitReport>,
    pub(crate) natives: Natives,
    pub(crate) store: StoreState,
    leaving_since: Option<Duration>,
}

/// The packets from and to another process.
#[derive(Default)]
struct Peer {
    /// The number of the next packet to it.
    next_sent: u16,
    /// The number of the next packet from it.
    next_received: u16,
    /// Packets from it that are complete before an earlier one.
    early: Vec<(u16, Packet)>,
    has_left: bool,
}

/// A channel of this process, from its first packet or endpoint on until all have left it.
struct Channel {
    id: u64,
    /// The members by their numbers in the world; `None` until this rank has made the channel.
    members: Option<Arc<[usize]>>,
    is_left: bool,
    pairs: Vec<Pair>,
}

/// The traffic of a channel with one other rank.
#[derive(Default)]
struct Pair {
    queue: VecDeque<Packet>,
    /// Bytes taken from the queue that were not yet credited to the sender.
    uncredited: usize,
    /// Sent bytes that the receiver is not known to have taken.
    outstanding: usize,
    /// The announced messages that the receiver has cleared, and whose bytes are not sent yet.
    cleared: Vec<u64>,
    has_left: bool,
}

/// The reason why a packet was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendState {
    Sent,
    /// The receiver has taken too little, or too many packets are on their way to it.
    Full,
    /// The receiver has left the channel.
    Left,
}

impl World {
    pub(crate) fn new(
        wire: Box<dyn Wire>,
        rank: usize,
        placement: Vec<Placement>,
        native_from: Option<usize>,
    ) -> Self {
        let size = placement.len();
        let state = State {
            wire,
            completions: Completions::default(),
            peers: (0..size).map(|_| Peer::default()).collect(),
            channels: Vec::new(),
            by_id: HashMap::new(),
            proposed_at: None,
            waits: HashMap::new(),
            natives: Natives::default(),
            store: StoreState::new(size),
            leaving_since: None,
        };
        let (cores, ranks) = cores_here(&placement, rank, |_| true);
        Self {
            runtime: Runtime::system(),
            rank,
            is_oversubscribed: cores < ranks,
            placement,
            native_from,
            abort: OnceLock::new(),
            proposed: OnceLock::new(),
            state: Mutex::new(state),
            service: Mutex::new(None),
            service_thread: OnceLock::new(),
            notified: Mutex::default(),
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.placement.len()
    }

    /// Hands over the service thread, for which the last endpoint waits.
    pub(crate) fn set_service(&self, task: Task<()>) {
        *self.service.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_notified(&self) -> MutexGuard<'_, Vec<Unparker>> {
        self.notified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the abort that stands, or what this rank has proposed.
    pub(crate) fn aborted(&self) -> Option<&Abort> {
        self.abort.get().or_else(|| self.proposed.get())
    }

    /// Returns the abort that stands.
    pub(crate) fn decided(&self) -> Option<&Abort> {
        self.abort.get()
    }

    /// Lets the library work, and handles every packet that has arrived.
    pub(crate) fn progress(&self, state: &mut State) {
        if let Err(error) = state.wire.poll(&mut state.completions) {
            self.library_failed(&error);
        }
        state.completions.natives.drain(..).for_each(|finished| state.natives.finish(finished));
        let mut arrived = std::mem::take(&mut state.completions.arrived);
        for (from, tag, packet) in arrived.drain(..) {
            self.handle_in_order(state, from, tag, packet);
        }
        state.completions.arrived = arrived;
        if state.proposed_at.is_some() {
            self.decide_if_late(state);
        }
    }

    fn handle_in_order(&self, state: &mut State, from: usize, tag: Tag, packet: Packet) {
        let Some(peer) = state.peers.get_mut(from) else { return };
        if tag.number != peer.next_received {
            return peer.early.push((tag.number, packet));
        }
        let mut next = Some(packet);
        while let Some(packet) = next {
            let peer = &mut state.peers[from];
            peer.next_received = Tag::after(peer.next_received);
            let awaited = peer.next_received;
            let place = peer.early.iter().position(|(number, _)| *number == awaited);
            next = place.map(|place| peer.early.swap_remove(place).1);
            self.handle(state, from, packet);
        }
    }

    fn handle(&self, state: &mut State, from: usize, packet: Packet) {
        if packet.bytes < HEADER {
            return self.protocol_broken(state, from);
        }
        match packet.kind {
            Kind::First | Kind::Next => return state.enqueue(from, packet, self.abort.get().is_some()),
            Kind::Credit => {
                let number = packet.header_number(0);
                let bytes = usize::try_from(number).unwrap_or(usize::MAX);
                if let Some(&place) = state.by_id.get(&packet.header_number(CHANNEL))
                    && let Some(channel) = &mut state.channels[place]
                {
                    let pair = &mut channel.pairs[from];
                    match MatchedFrame::decode(number) {
                        MatchedFrame::Clear(number) => pair.cleared.push(number),
                        _ => pair.outstanding = pair.outstanding.saturating_sub(bytes),
                    }
                }
            }
            Kind::Goodbye => {
                let place = state.channel(packet.header_number(CHANNEL));
                if let Some(channel) = &mut state.channels[place] {
                    channel.pairs[from].has_left = true;
                }
                state.forget_if_all_left(place);
            }
            Kind::WaitReport => {
                let waiting = (from, packet.header_number(CHANNEL));
                self.compare_waits(state, waiting, WaitReport::decode(packet.payload()));
            }
            Kind::Proposal => match records::decode(packet.payload()) {
                Some(record) => self.decide(state, record),
                None => self.protocol_broken(state, from),
            },
            Kind::Decision => match records::decode(packet.payload()) {
                Some(record) => self.accept(record),
                None => self.protocol_broken(state, from),
            },
            Kind::StoreRequest => {
                if self.serve_request(state, from, &packet).is_none() {
                    return self.protocol_broken(state, from);
                }
            }
            Kind::StoreReply => {
                if state.store.take_reply(&packet).is_none() {
                    return self.protocol_broken(state, from);
                }
            }
            Kind::CancelRequest => state.store.cancel((from, packet.header_number(0))),
            Kind::Leave => {
                state.peers[from].has_left = true;
                state.store.forget_rank(from);
                if self.rank == 0 && state.leaving_since.is_some() {
                    self.send_control(state, from, Kind::Leave, &[0; HEADER], &[]);
                }
            }
        }
        state.completions.recycle(packet.buffer);
    }

    fn protocol_broken(&self, state: &mut State, from: usize) {
        let call = Fingerprint::NONE;
        self.propose(state, Abort { cause: Cause::Protocol, rank: from, reporter: self.rank, call });
    }

    /// Ends the job on this rank. Nothing can be sent through a library that fails.
    pub(crate) fn library_failed(&self, error: &io::Error) {
        let cause = Cause::gave_up(format_args!("the MPI library failed: {error}"));
        self.accept(Abort { cause, rank: self.rank, reporter: self.rank, call: Fingerprint::NONE });
    }

    /// Stores the report of a rank, and ends the job if the calls of two waiting ranks contradict each other.
    fn compare_waits(&self, state: &mut State, (from, channel): (usize, u64), report: Option<WaitReport>) {
        state.waits.remove(&(from, channel));
        let Some(ours) = report else { return };
        let others = state.waits.iter().filter(|((rank, _), _)| *rank != from);
        let found = others.filter_map(|((rank, _), theirs)| Some((*rank, ours.contradiction(theirs)?)));
        if let Some((rank, (call, theirs))) = found.min_by_key(|(rank, _)| *rank) {
            self.decide(state, Abort { cause: Cause::Mismatch { theirs }, rank, reporter: from, call });
        }
        state.waits.insert((from, channel), ours);
    }

    /// Tells rank 0 that this rank waits long on a channel, or no longer.
    pub(crate) fn report_wait(&self, channel: ChannelId, report: Option<&WaitReport>) {
        let body = report.map_or_else(Vec::new, WaitReport::encode);
        let header = channel_header(channel.get(), 0);
        self.send_control(&mut self.lock(), 0, Kind::WaitReport, &header, &body);
    }

    /// Proposes to abort the job. The first proposal that reaches rank 0 stands.
    pub(crate) fn propose(&self, state: &mut State, record: Abort) {
        if self.abort.get().is_some() || self.proposed.get().is_some() {
            return;
        }
        if self.rank == 0 {
            return self.decide(state, record);
        }
        self.send_control(state, 0, Kind::Proposal, &[0; HEADER], &records::encode(&record));
        let _ = self.proposed.set(record);
        state.proposed_at = Some(self.runtime.now());
    }

    /// Decides alone if rank 0 does not: it may have stopped.
    ///
    /// Only rank 0 knows which rank each rank waits for. The awaited rank may itself wait for rank 0, so a timeout names
    /// rank 0.
    fn decide_if_late(&self, state: &mut State) {
        let Some(since) = state.proposed_at else { return };
        if self.abort.get().is_some() {
            state.proposed_at = None;
        } else if self.runtime.now().saturating_sub(since) > DECISION
            && let Some(mut record) = self.proposed.get().cloned()
        {
            if matches!(record.cause, Cause::TimedOut { .. }) {
                record.rank = 0;
            }
            self.decide(state, record);
        }
    }

    fn decide(&self, state: &mut State, record: Abort) {
        if self.abort.get().is_some() {
            return;
        }
        let record = records::followed(record, |rank, call| {
            let mut waits = state.waits.iter().filter(|((waiting, _), _)| *waiting == rank);
            waits.find_map(|(_, wait)| (wait.calls.first() == Some(call)).then_some(wait.waits_for))
        });
        let body = records::encode(&record);
        self.accept(record);
        for to in (0..self.size()).filter(|&to| to != self.rank) {
            self.send_control(state, to, Kind::Decision, &[0; HEADER], &body);
        }
    }

    fn accept(&self, record: Abort) {
        if self.abort.set(record).is_ok() {
            self.wake_service();
            self.lock_notified().iter().for_each(Unparker::unpark);
        }
    }

    /// Waits until the abort that this rank has proposed, or another one, stands.
    pub(crate) fn await_decision(&self) -> Abort {
        loop {
            self.progress(&mut self.lock());
            if let Some(abort) = self.abort.get() {
                return abort.clone();
            }
            self.runtime.yield_now();
        }
    }

    /// Sends a packet that is not limited by credits: there are few of them.
    fn send_control(&self, state: &mut State, to: usize, kind: Kind, header: &[u8; HEADER], body: &[u8]) {
        let bytes = HEADER + body.len();
        let mut buffer = vec![CacheLine::ZERO; bytes.div_ceil(CacheLine::BYTES)];
        let target: &mut [u8] = cast_slice_mut(&mut buffer);
        target[..HEADER].copy_from_slice(header);
        target[HEADER..bytes].copy_from_slice(body);
        if to == self.rank {
            return self.handle(state, to, Packet { kind, buffer, bytes });
        }
        if let Err(error) = state.send(to, kind, buffer, bytes) {
            self.library_failed(&error);
        }
    }

    /// Sends a request to the store.
    pub(crate) fn send_request(&self, state: &mut State, number: u64, request: &[u8]) {
        self.send_store(state, 0, Kind::StoreRequest, number, request);
    }

    /// Tells rank 0 that this rank no longer waits for the reply to a request.
    pub(crate) fn cancel_request(&self, state: &mut State, number: u64) {
        self.send_control(state, 0, Kind::CancelRequest, &store::header(number, true), &[]);
    }

    /// Takes a piece of a request on rank 0, and sends the replies that it causes. Returns `None` if it is no request.
    fn serve_request(&self, state: &mut State, from: usize, packet: &Packet) -> Option<()> {
        let now = self.runtime.now();
        let was_busy = state.store.is_busy(now);
        let mut is_long = false;
        for ((to, number), reply) in state.store.take_request(from, packet, now)? {
            let reply = reply.encode();
            is_long |= reply.len() > SHORT;
            self.send_store(state, to, Kind::StoreReply, number, &reply);
        }
        // The program may make no further call. Its service thread looks more often while there are requests.
        if is_long || !was_busy {
            self.wake_service();
        }
        Some(())
    }

    /// Sends a request or a reply, in pieces.
    fn send_store(&self, state: &mut State, to: usize, kind: Kind, number: u64, message: &[u8]) {
        let pieces = message.chunks(SEGMENT);
        let last = pieces.len().saturating_sub(1);
        for (index, piece) in pieces.enumerate() {
            self.send_control(state, to, kind, &store::header(number, index == last), piece);
        }
    }

    /// Creates an endpoint of a channel, and returns the place of the channel.
    pub(crate) fn enter(&self, id: ChannelId, members: &Arc<[usize]>) -> usize {
        let mut state = self.lock();
        let place = state.channel(id.get());
        let channel = state.channels[place].as_mut().expect("it was just made");
        channel.members = Some(members.clone());
        place
    }

    /// Ends an endpoint: tells the members that this rank has left the channel.
    pub(crate) fn leave(&self, place: usize) {
        let mut state = self.lock();
        let channel = state.channels[place].as_mut().expect("an endpoint has a channel");
        channel.is_left = true;
        channel.pairs.iter_mut().for_each(|pair| pair.queue.clear());
        let (members, header) = (channel.members.clone().unwrap_or_default(), channel_header(channel.id, 0));
        for &to in members.iter().filter(|&&to| to != self.rank) {
            self.send_control(&mut state, to, Kind::Goodbye, &header, &[]);
        }
        state.forget_if_all_left(place);
    }

    /// Says goodbye to all processes, and waits until they have done the same.
    ///
    /// Rank 0 replies to requests of a process until that one has said goodbye, and only then does so itself. Otherwise a
    /// process could finalise MPI while a reply is on its way.
    pub(crate) fn leave_job(&self) {
        {
            let mut state = self.lock();
            for to in (0..self.size()).filter(|&to| to != self.rank) {
                if self.rank != 0 || state.peers[to].has_left {
                    self.send_control(&mut state, to, Kind::Leave, &[0; HEADER], &[]);
                }
            }
            state.peers[self.rank].has_left = true;
            state.leaving_since = Some(self.runtime.now());
        }
        self.wake_service();
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(_)) = service.map(Task::join) {
            tracing::error!("the thread that owns MPI has panicked");
        }
    }

    /// Wakes the service thread, so that packets on their way advance while the program does something else.
    pub(crate) fn wake_service(&self) {
        if let Some(thread) = self.service_thread.get() {
            thread.unpark();
        }
    }

    /// Lets the library work while the program makes no calls, until all processes have left. Returns `false` if
    /// some did not leave in time after an abort.
    pub(crate) fn serve(&self) -> bool {
        let _ = self.service_thread.set(self.runtime.unparker());
        loop {
            let (is_over, is_busy, leaving) = {
                let mut state = self.lock();
                self.progress(&mut state);
                let is_busy = state.is_in_flight() || state.store.is_busy(self.runtime.now());
                (state.is_over(), is_busy, state.leaving_since)
            };
            if is_over {
                return true;
            }
            let is_late = |since| self.runtime.now().saturating_sub(since) > LEAVING_AFTER_ABORT;
            if self.abort.get().is_some() && leaving.is_some_and(is_late) {
                return false;
            }
            let look = if is_busy || leaving.is_some() { LOOK_IN_FLIGHT } else { LOOK };
            self.runtime.park(Some(self.runtime.deadline(look)));
        }
    }

    /// Ends the use of the library, before it is finalised.
    pub(crate) fn close_wire(&self) {
        if let Err(error) = self.lock().wire.close() {
            tracing::warn!(%error, "MPI did not end its requests in order");
        }
    }
}

/// Rank 0 decides.
impl AbortDecision for World {
    fn propose(&self, abort: Abort) {
        let state = &mut *self.lock();
        // A thread of the host's ranks may come late, and must not use a library that is finalised.
        if state.leaving_since.is_none() {
            self.propose(state, abort);
        }
    }

    fn decided(&self) -> Option<Abort> {
        self.abort.get().cloned()
    }

    fn notify(&self, thread: Unparker) {
        self.lock_notified().push(thread);
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("rank", &self.rank).field("size", &self.size()).finish()
    }
}

/// Returns the number of cores, and of those ranks on the host of a rank for which `counts` is true.
pub(crate) fn cores_here(
    placement: &[Placement],
    rank: usize,
    counts: impl Fn(usize) -> bool,
) -> (usize, usize) {
    let host = placement[rank].host;
    let here = placement.iter().enumerate().filter(|(rank, other)| other.host == host && counts(*rank));
    let mut cores = [0; CORE_WORDS];
    let mut ranks = 0;
    for (_, placement) in here {
        ranks += 1;
        cores.iter_mut().zip(placement.cores).for_each(|(all, of_rank)| *all |= of_rank);
    }
    (cores.iter().map(|word| word.count_ones() as usize).sum(), ranks)
}

/// The offset of the channel in the headers of packets that have one.
const CHANNEL: usize = HEADER - 8;

/// Returns the header of a packet about a channel, which begins with a number.
fn channel_header(id: u64, number: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&number.to_le_bytes());
    header[CHANNEL..].copy_from_slice(&id.to_le_bytes());
    header
}

impl State {
    /// Returns `true` if all processes have left, and nothing is on its way.
    pub(crate) fn is_over(&self) -> bool {
        self.leaving_since.is_some()
            && self.wire.in_flight() == 0
            && self.natives.creating == 0
            && self.peers.iter().all(|peer| peer.has_left)
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.wire.in_flight() > 0
    }

    /// Returns `true` if few packets are on their way to a process.
    pub(crate) fn has_room_for(&self, to: usize) -> bool {
        self.wire.in_flight_to(to) < IN_FLIGHT_MAX
    }

    fn send(&mut self, to: usize, kind: Kind, buffer: Buffer, bytes: usize) -> io::Result<()> {
        let peer = &mut self.peers[to];
        let tag = Tag { kind, number: peer.next_sent };
        peer.next_sent = Tag::after(peer.next_sent);
        self.wire.send(to, tag, buffer, bytes)
    }

    /// See [`Wire::create_communicator`].
    pub(crate) fn create_communicator(
        &self,
        members: &[usize],
        count: u64,
    ) -> io::Result<CreateCommunicator> {
        self.wire.create_communicator(members, count)
    }

    /// See [`Wire::begin_native`].
    pub(crate) fn begin_native(
        &mut self,
        comm: NativeComm,
        segment: NativeSegment,
        send: Buffer,
        receive: Buffer,
    ) -> io::Result<()> {
        self.wire.begin_native(comm, segment, send, receive)
    }

    /// Returns the place of a channel, which is made if it is new.
    fn channel(&mut self, id: u64) -> usize {
        if let Some(&place) = self.by_id.get(&id) {
            return place;
        }
        let pairs = (0..self.peers.len()).map(|_| Pair::default()).collect();
        let channel = Some(Channel { id, members: None, is_left: false, pairs });
        let free = self.channels.iter().position(Option::is_none);
        let place = free.unwrap_or(self.channels.len());
        match free {
            Some(place) => self.channels[place] = channel,
            None => self.channels.push(channel),
        }
        self.by_id.insert(id, place);
        place
    }

    /// Forgets a channel that this rank and all other members have left.
    fn forget_if_all_left(&mut self, place: usize) {
        let Some(channel) = &self.channels[place] else { return };
        let Some(members) = channel.members.as_ref().filter(|_| channel.is_left) else { return };
        let others = members.len() - 1;
        if channel.pairs.iter().filter(|pair| pair.has_left).count() == others {
            self.by_id.remove(&channel.id);
            self.channels[place] = None;
        }
    }

    fn enqueue(&mut self, from: usize, packet: Packet, is_aborted: bool) {
        let place = self.channel(packet.header_number(CHANNEL));
        match &mut self.channels[place] {
            Some(channel) if !channel.is_left && !is_aborted => channel.pairs[from].queue.push_back(packet),
            _ => self.completions.recycle(packet.buffer),
        }
    }

    fn pair(&mut self, place: usize, peer: usize) -> &mut Pair {
        &mut self.channels[place].as_mut().expect("an endpoint has a channel").pairs[peer]
    }

    /// Returns `true` if a message of this peer has begun to arrive.
    pub(crate) fn has_message(&mut self, place: usize, peer: usize) -> bool {
        !self.pair(place, peer).queue.is_empty()
    }

    /// Returns `true` if this peer has left the channel.
    pub(crate) fn has_left(&mut self, place: usize, peer: usize) -> bool {
        self.pair(place, peer).has_left
    }

    /// Takes the next packet of a peer.
    pub(crate) fn take(&mut self, place: usize, peer: usize) -> Option<Packet> {
        self.pair(place, peer).queue.pop_front()
    }

    /// Sends the next packet of a message. `fill` writes the payload. A message of this rank to itself is not
    /// limited: the thread that sends it receives it later.
    pub(crate) fn send_part(
        &mut self,
        world: &World,
        (place, to): (usize, usize),
        (kind, header): (Kind, &[u8; HEADER]),
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> SendState {
        let is_full = !self.has_room_for(to);
        let pair = self.pair(place, to);
        if pair.has_left {
            return SendState::Left;
        }
        if to != world.rank {
            if is_full || pair.outstanding >= WINDOW {
                return SendState::Full;
            }
            pair.outstanding += HEADER + len;
        }
        let mut buffer = self.completions.full_buffer();
        let bytes: &mut [u8] = cast_slice_mut(&mut buffer);
        bytes[..HEADER].copy_from_slice(header);
        fill(&mut bytes[HEADER..HEADER + len]);
        let bytes = HEADER + len;
        if to == world.rank {
            self.pair(place, to).queue.push_back(Packet { kind, buffer, bytes });
        } else if let Err(error) = self.send(to, kind, buffer, bytes) {
            world.library_failed(&error);
        }
        SendState::Sent
    }

    /// Gives back a packet that was taken, so that its sender may send more.
    pub(crate) fn give_back(&mut self, world: &World, (place, from): (usize, usize), packet: Packet) {
        let bytes = packet.bytes;
        self.completions.recycle(packet.buffer);
        if from == world.rank {
            return;
        }
        let channel = self.channels[place].as_mut().expect("an endpoint has a channel");
        let id = channel.id;
        let pair = &mut channel.pairs[from];
        pair.uncredited += bytes;
        if pair.uncredited >= WINDOW / 4 {
            let taken = std::mem::take(&mut pair.uncredited);
            world.send_control(self, from, Kind::Credit, &channel_header(id, taken as u64), &[]);
        }
    }

    /// Lets the sender of an announced message send its bytes. The packet is not limited by credits, so it passes messages
    /// that the sender has no room for.
    pub(crate) fn send_clear(&mut self, world: &World, (place, to): (usize, usize), number: u64) {
        let id = self.channels[place].as_ref().expect("an endpoint has a channel").id;
        let header = channel_header(id, MatchedFrame::Clear(number).encode());
        world.send_control(self, to, Kind::Credit, &header, &[]);
    }

    /// Returns `true` if the receiver has cleared the announced message with this number, and forgets that.
    pub(crate) fn take_clear(&mut self, (place, to): (usize, usize), number: u64) -> bool {
        let cleared = &mut self.pair(place, to).cleared;
        let index = cleared.iter().position(|&cleared| cleared == number);
        index.is_some_and(|index| cleared.swap_remove(index) == number)
    }

    /// Returns a peer of these that has sent a message which was not received.
    pub(crate) fn first_with_message(&mut self, place: usize, peers: &[usize]) -> Option<usize> {
        peers.iter().position(|&peer| self.has_message(place, peer))
    }
}
