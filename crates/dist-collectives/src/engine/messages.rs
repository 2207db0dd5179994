//! Messages between two ranks, matched by their tags; the other ranks are not involved.

use std::collections::VecDeque;

use bytemuck::Pod;
use dist_transport::runtime::Deadline;
use dist_transport::{
    Cause, Chain, Error as TransportError, Fingerprint, Inbox, Interrupt, LazyDeadline, Outgoing, Pause,
    Refusal,
};

use super::outstanding::{ReceiveState, StartedMessages, StartedReceive, StartedSend};
use super::{CallOptions, Engine};
use crate::history::HistoryDigest;
use crate::{Call, ElementType, Error, Message, Operation, Result};

/// The maximum number of bytes of one rank's messages that are kept for later receives. A longer message may exceed
/// it if it is the only one.
pub(crate) const KEPT_BYTES_MAX: usize = 64 << 20;

/// The number of bytes that a kept message counts in addition to its elements, so that empty ones are bounded too.
const KEPT_OVERHEAD: usize = 64;

/// The maximum number of messages that an error lists.
const LISTED_MAX: usize = 8;

/// The messages of an engine.
#[derive(Debug, Default)]
pub(super) struct EngineMessages {
    /// The messages that were started and have not ended.
    pub(super) started: StartedMessages,
    /// The messages of each rank. Empty before the first call.
    queues: Vec<MessageQueue>,
    /// The ranks that the current call receives from.
    sources: Vec<usize>,
    /// The rank that a receive from any rank looks at first: the one behind the last sender, so that it is fair.
    next_source: usize,
    /// The element type, the tag and the fingerprint of the last message.
    encoded: Option<(ElementType, u32, Fingerprint)>,
}

/// The messages of one rank that have arrived, and those that the current call awaits.
#[derive(Debug, Default)]
struct MessageQueue {
    /// Messages that no receive has matched yet, the oldest first.
    kept: VecDeque<KeptMessage>,
    /// The number of their bytes, with [`KEPT_OVERHEAD`].
    kept_bytes: usize,
    /// The number of receives of the current call that no message has matched yet.
    open: usize,
    /// The message that is arriving. A message that is kept may arrive in several calls.
    arriving: Option<ArrivingMessage>,
    /// `true` if the rank has left, as far as the current receive from any rank knows.
    has_left: bool,
}

#[derive(Debug)]
struct KeptMessage {
    /// The call of its sender.
    call: Call,
    bytes: Vec<u8>,
}

/// The destination of a message whose bytes are arriving.
#[derive(Debug)]
enum ArrivingMessage {
    /// The memory of the receive at this position in the list.
    Receive(usize),
    /// The memory of the started receive with this number.
    Started(u64),
    Kept {
        message: KeptMessage,
        /// The receive that gets the message when it is complete.
        claimed_by: Option<Claimant>,
    },
}

/// A receive that gets a message which began to arrive before it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Claimant {
    /// The receive of the current call at this position.
    Call(usize),
    /// The started receive with this number.
    Started(u64),
}

/// The result of looking for a kept message.
pub(super) enum KeptMatch {
    Nothing,
    /// The receive has its message.
    Filled,
    /// Its message is arriving.
    Claimed,
}

/// A receive of the current call.
pub(super) struct Receive<'a> {
    /// The sender; `None` for any rank.
    from: Option<usize>,
    call: Call,
    encoded: Fingerprint,
    destination: Destination<'a>,
    is_open: bool,
    is_complete: bool,
    /// The sender of the message and its length in bytes.
    received: (usize, usize),
}

/// The message that a probe waits for.
#[derive(Debug, Clone, Copy)]
struct Probe {
    /// The sender; `None` for any rank.
    from: Option<usize>,
    tag: u32,
}

/// A message that has arrived and was not received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundMessage {
    pub(crate) from: usize,
    /// The call of the sender, with its element type and its number of elements.
    pub(crate) call: Call,
}

/// The destination of a received message.
enum Destination<'a> {
    /// Memory of the length of the message.
    Exact(&'a mut [u8]),
    /// Memory of the length of the message or more.
    UpTo(&'a mut [u8]),
    /// A vector that takes the length of the message.
    Vector(&'a mut dyn ByteVector),
}

impl Destination<'_> {
    /// Prepares the destination for a message with this length in bytes.
    fn accept(&mut self, len: usize) -> Result<(), Refusal> {
        match self {
            Self::Exact(memory) if memory.len() == len => Ok(()),
            Self::UpTo(memory) if memory.len() >= len => Ok(()),
            Self::Exact(memory) | Self::UpTo(memory) => Err(Refusal::Length(memory.len())),
            Self::Vector(vector) => vector.resize_bytes(len),
        }
    }

    /// Returns the memory of an accepted message with this length in bytes.
    fn memory(&mut self, len: usize) -> &mut [u8] {
        match self {
            Self::Exact(memory) | Self::UpTo(memory) => &mut memory[..len],
            Self::Vector(vector) => vector.bytes(),
        }
    }
}

impl<'a> Receive<'a> {
    const fn new(
        from: Option<usize>,
        call: Call,
        encoded: Fingerprint,
        destination: Destination<'a>,
    ) -> Self {
        Self { from, call, encoded, destination, is_open: true, is_complete: false, received: (0, 0) }
    }

    /// Creates a receive into the memory of a started one.
    pub(super) const fn started(from: usize, call: Call, encoded: Fingerprint, memory: &'a mut [u8]) -> Self {
        Self::new(Some(from), call, encoded, Destination::Exact(memory))
    }

    /// Returns `true` if the receive takes messages of this rank with this tag.
    fn takes(&self, from: usize, tag: Option<u32>) -> bool {
        self.from.is_none_or(|wanted| wanted == from) && self.call.tag() == tag
    }

    /// Prepares the receive for a message of this rank with this length in bytes.
    fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal> {
        self.destination.accept(len)?;
        self.received = (from, len);
        Ok(())
    }

    fn memory(&mut self) -> &mut [u8] {
        self.destination.memory(self.received.1)
    }

    /// Completes the receive with a message that was kept.
    fn fill(&mut self, message: &KeptMessage) {
        self.memory().copy_from_slice(&message.bytes);
        self.is_open = false;
        self.is_complete = true;
    }
}

/// A vector of any elements, as bytes.
trait ByteVector {
    /// Resizes the vector to this number of bytes.
    fn resize_bytes(&mut self, len: usize) -> Result<(), Refusal>;

    fn bytes(&mut self) -> &mut [u8];
}

impl<T: Pod> ByteVector for Vec<T> {
    fn resize_bytes(&mut self, len: usize) -> Result<(), Refusal> {
        let elements = len.checked_div(size_of::<T>()).unwrap_or(0);
        if elements * size_of::<T>() != len {
            return Err(Refusal::Length(elements * size_of::<T>()));
        }
        self.try_reserve_exact(elements.saturating_sub(self.len())).map_err(|_| Refusal::NoMemory)?;
        self.resize(elements, T::zeroed());
        Ok(())
    }

    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

/// A message that the current call sends.
type Send<'a> = (Fingerprint, Outgoing<'a>);

impl EngineMessages {
    /// Returns a rank of the group that has sent a message which no receive has matched, if one is known.
    pub(super) fn unread(&self) -> Option<usize> {
        self.queues.iter().position(|queue| !queue.kept.is_empty())
    }

    /// Encodes the call of a message. All messages of one type and one tag have the same fingerprint.
    fn encode<T: Pod>(&mut self, call: &Call, tag: u32) -> Fingerprint {
        let element = ElementType::of::<T>();
        match self.encoded {
            Some((last, last_tag, encoded)) if (last, last_tag) == (element, tag) => encoded,
            _ => self.encoded.insert((element, tag, call.encode())).2,
        }
    }
}

impl EngineMessages {
    /// Returns the oldest message that a probe matches, of the ranks in fair order.
    fn find(&self, probe: Probe) -> Option<FoundMessage> {
        let ranks = self.queues.len();
        let first = probe.from.unwrap_or(self.next_source);
        let looked_at = if probe.from.is_some() { 1 } else { ranks };
        (first..first + looked_at).map(|rank| rank % ranks).find_map(|from| {
            let message = self.queues[from].find(probe.tag)?;
            Some(FoundMessage { from, call: message.call })
        })
    }
}

impl MessageQueue {
    const fn is_full(&self) -> bool {
        self.kept_bytes >= KEPT_BYTES_MAX
    }

    /// Counts an open receive less.
    const fn close(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    fn keep(&mut self, message: KeptMessage) {
        self.kept_bytes += message.bytes.len() + KEPT_OVERHEAD;
        self.kept.push_back(message);
    }

    /// Takes the oldest kept message with this tag.
    fn take(&mut self, tag: Option<u32>) -> Option<KeptMessage> {
        let position = self.kept.iter().position(|message| message.call.tag() == tag)?;
        let message = self.kept.remove(position)?;
        self.kept_bytes -= message.bytes.len() + KEPT_OVERHEAD;
        Some(message)
    }

    /// Returns the oldest kept message with this tag.
    fn find(&self, tag: u32) -> Option<&KeptMessage> {
        self.kept.iter().find(|message| message.call.tag() == Some(tag))
    }

    /// Returns the call of the message that is arriving to be kept, if no receive has claimed it.
    const fn unclaimed(&self) -> Option<&KeptMessage> {
        match &self.arriving {
            Some(ArrivingMessage::Kept { message, claimed_by: None }) => Some(message),
            _ => None,
        }
    }

    /// Returns `true` if the message that is arriving belongs to a receive.
    const fn is_receiving(&self) -> bool {
        matches!(
            self.arriving,
            Some(
                ArrivingMessage::Receive(_)
                    | ArrivingMessage::Started(_)
                    | ArrivingMessage::Kept { claimed_by: Some(_), .. }
            )
        )
    }

    /// Returns the number of the started receive whose message is arriving.
    const fn arriving_started(&self) -> Option<u64> {
        match self.arriving {
            Some(
                ArrivingMessage::Started(id)
                | ArrivingMessage::Kept { claimed_by: Some(Claimant::Started(id)), .. },
            ) => Some(id),
            _ => None,
        }
    }

    /// Returns the calls of the oldest kept messages.
    fn list(&self) -> Vec<Call> {
        self.kept.iter().take(LISTED_MAX).map(|message| message.call).collect()
    }
}

/// The receives of one call, and the started ones. Messages that match none of them are kept.
struct Receives<'c, 'm> {
    channel: u64,
    me: usize,
    queues: &'c mut [MessageQueue],
    sources: &'c [usize],
    /// The started receives, which are older than those of the call.
    started: &'c mut [StartedReceive],
    list: &'c mut [Receive<'m>],
    /// The number of receives from any rank that no message has matched yet.
    open_any: usize,
    /// The probe of this call, until its message has arrived.
    probe: Option<Probe>,
    /// `true` if the call does not wait.
    returns_at_once: bool,
    /// The receive whose message was refused.
    refused: Option<Claimant>,
    /// The rest of the call, if there are started messages.
    beside: Option<BesideStarted>,
}

/// The state of a call that also moves started messages.
struct BesideStarted {
    interrupt: Interrupt,
    /// The number of started sends, which are the first of the list.
    started_sends: usize,
    /// The positions of the messages that are sent.
    sent: Vec<usize>,
    /// The number of messages that the call of this rank waits for; `None` if there is no call.
    call_waits_for: Option<usize>,
    /// `true` if a started message has ended.
    has_ended: bool,
    /// `true` if this call of the transport ends the operation whose deadline has passed.
    is_last: bool,
}

impl Receives<'_, '_> {
    /// Returns the receive that takes a message of this rank with this tag: the oldest open one.
    fn open(&self, from: usize, tag: Option<u32>) -> Option<Claimant> {
        let takes = |receive: &&StartedReceive| {
            receive.state == ReceiveState::Open && receive.from == from && receive.call.tag() == tag
        };
        if let Some(started) = self.started.iter().find(takes) {
            return Some(Claimant::Started(started.id));
        }
        let open = self.list.iter().position(|receive| receive.is_open && receive.takes(from, tag));
        open.map(Claimant::Call)
    }

    /// Returns the oldest open receive from this rank if it is of this call.
    fn first(&self, from: usize, call: &Fingerprint) -> Option<Claimant> {
        let is_open = |receive: &&StartedReceive| receive.state == ReceiveState::Open && receive.from == from;
        if let Some(started) = self.started.iter().find(is_open) {
            return (started.encoded == *call).then_some(Claimant::Started(started.id));
        }
        let is_candidate =
            |receive: &Receive<'_>| receive.is_open && receive.from.is_none_or(|wanted| wanted == from);
        let first = self.list.iter().position(is_candidate)?;
        (self.list[first].encoded == *call).then_some(Claimant::Call(first))
    }

    /// Decodes the call of a message that is not the expected one.
    #[cold]
    fn decode(&self, call: &Fingerprint) -> Result<Call, Refusal> {
        let is_message = |call: &Call| call.tag().is_some() && call.channel == self.channel;
        Call::decode(call).filter(is_message).ok_or(Refusal::Mismatch)
    }

    /// Accepts a message that no receive matches.
    fn keep(&mut self, from: usize, call: Call, len: usize) -> Result<(), Refusal> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Refusal::NoMemory)?;
        bytes.resize(len, 0);
        let size = call.element.map_or(1, ElementType::size);
        let call = Call { count: (len / size) as u64, ..call };
        let message = KeptMessage { call, bytes };
        self.queues[from].arriving = Some(ArrivingMessage::Kept { message, claimed_by: None });
        Ok(())
    }

    /// Accepts a message for the receive of the call at this position.
    fn accept_for_call(&mut self, position: usize, from: usize, len: usize) -> Result<(), Refusal> {
        let receive = &mut self.list[position];
        receive.accept(from, len)?;
        receive.is_open = false;
        match receive.from {
            Some(from) => self.queues[from].close(),
            None => self.open_any = self.open_any.saturating_sub(1),
        }
        self.queues[from].arriving = Some(ArrivingMessage::Receive(position));
        Ok(())
    }

    /// Returns the started receive with this number.
    fn started(&mut self, id: u64) -> &mut StartedReceive {
        let receive = self.started.iter_mut().find(|receive| receive.id == id);
        receive.expect("a receive whose message arrives has not ended")
    }

    /// Accepts a message for the started receive with this number.
    fn accept_for_started(&mut self, id: u64, from: usize, len: usize) -> Result<(), Refusal> {
        self.started(id).accept(len)?;
        self.queues[from].close();
        self.queues[from].arriving = Some(ArrivingMessage::Started(id));
        Ok(())
    }

    /// Returns the fingerprint that a receive expects.
    fn expected(&mut self, receive: Claimant) -> Fingerprint {
        match receive {
            Claimant::Call(position) => self.list[position].encoded,
            Claimant::Started(id) => self.started(id).encoded,
        }
    }

    fn complete_started(&mut self, id: u64) {
        self.started(id).state = ReceiveState::Complete;
        if let Some(beside) = &mut self.beside {
            beside.has_ended = true;
        }
    }

    /// Counts a message of the call that has ended.
    fn count_for_call(&mut self) {
        if let Some(BesideStarted { call_waits_for: Some(open), .. }) = &mut self.beside {
            *open -= 1;
        }
    }

    /// Returns `true` if a message of this rank would be awaited by a receive or probe that names the rank.
    fn names(&self, from: usize) -> bool {
        self.queues[from].open > 0 || self.probe.is_some_and(|probe| probe.from == Some(from))
    }

    /// Returns `true` if a receive or probe of the call names this rank.
    fn is_named_by_call(&self, from: usize) -> bool {
        self.list.iter().any(|receive| receive.is_open && receive.from == Some(from))
            || self.probe.is_some_and(|probe| probe.from == Some(from))
    }

    /// Returns `true` if messages of any rank are awaited.
    fn awaits_any(&self) -> bool {
        self.open_any > 0 || self.probe.is_some_and(|probe| probe.from.is_none())
    }
}

impl Inbox for Receives<'_, '_> {
    fn sources(&self) -> &[usize] {
        self.sources
    }

    fn awaits(&self, from: usize) -> bool {
        let queue = &self.queues[from];
        queue.is_receiving() || !queue.is_full() && (self.names(from) || self.awaits_any()) && !queue.has_left
    }

    fn awaited_bytes(&self) -> usize {
        let len = |receive: &Receive<'_>| match &receive.destination {
            Destination::Exact(memory) if receive.is_open => memory.len(),
            _ => 0,
        };
        self.list.iter().map(len).sum()
    }

    fn accept(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<(), Refusal> {
        let receive = match self.first(from, call) {
            Some(receive) => receive,
            None => {
                let theirs = self.decode(call)?;
                match self.open(from, theirs.tag()) {
                    Some(receive) => receive,
                    None => return self.keep(from, theirs, len),
                }
            }
        };
        let accepted = match receive {
            _ if self.expected(receive) != *call => Err(Refusal::Mismatch),
            Claimant::Call(position) => self.accept_for_call(position, from, len),
            Claimant::Started(id) => self.accept_for_started(id, from, len),
        };
        if accepted.is_err() {
            self.refused = Some(receive);
        }
        accepted
    }

    fn memory(&mut self, from: usize) -> &mut [u8] {
        match &mut self.queues[from].arriving {
            Some(ArrivingMessage::Receive(position)) => self.list[*position].memory(),
            Some(ArrivingMessage::Started(id)) => {
                let receive = self.started.iter_mut().find(|receive| receive.id == *id);
                receive.map_or(&mut [], |receive| receive.memory.bytes_mut())
            }
            Some(ArrivingMessage::Kept { message, .. }) => &mut message.bytes,
            None => &mut [],
        }
    }

    fn complete(&mut self, from: usize) {
        match self.queues[from].arriving.take() {
            Some(ArrivingMessage::Receive(position)) => {
                self.list[position].is_complete = true;
                self.count_for_call();
            }
            Some(ArrivingMessage::Started(id)) => self.complete_started(id),
            Some(ArrivingMessage::Kept { message, claimed_by: Some(Claimant::Call(position)) }) => {
                self.list[position].fill(&message);
                self.count_for_call();
            }
            Some(ArrivingMessage::Kept { message, claimed_by: Some(Claimant::Started(id)) }) => {
                self.started(id).memory.bytes_mut().copy_from_slice(&message.bytes);
                self.complete_started(id);
            }
            Some(ArrivingMessage::Kept { message, claimed_by: None }) => {
                let is_probed = self.probe.is_some_and(|probe| {
                    probe.from.is_none_or(|wanted| wanted == from) && message.call.tag() == Some(probe.tag)
                });
                if is_probed {
                    self.probe = None;
                    self.count_for_call();
                }
                self.queues[from].keep(message);
            }
            None => {}
        }
    }

    fn peer_left(&mut self, from: usize) -> bool {
        let is_last = self.beside.as_ref().is_some_and(|beside| beside.is_last);
        if from == self.me && self.beside.is_some() && !is_last && !self.is_named_by_call(from) {
            // This rank may send to itself later.
            self.queues[from].has_left = true;
            return true;
        }
        if self.queues[from].is_receiving() || (self.names(from) && !self.returns_at_once) {
            return false;
        }
        self.queues[from].has_left = true;
        let may_send = |&rank: &usize| rank != self.me && !self.queues[rank].has_left;
        self.returns_at_once || self.sources.iter().any(may_send)
    }

    fn sent(&mut self, position: usize) {
        let Some(beside) = &mut self.beside else { return };
        beside.sent.push(position);
        if position < beside.started_sends {
            beside.has_ended = true;
        } else {
            self.count_for_call();
        }
    }

    fn pause(&self) -> Pause {
        match &self.beside {
            Some(beside)
                if beside.has_ended
                    || beside.call_waits_for == Some(0)
                    || beside.interrupt.is_requested() =>
            {
                Pause::Now
            }
            _ if self.returns_at_once => Pause::WhenIdle,
            _ => Pause::Never,
        }
    }

    fn pauses_at_deadline(&self) -> bool {
        self.awaits_any() || self.beside.as_ref().is_some_and(|beside| !beside.is_last)
    }

    fn interrupt(&self) -> Option<Interrupt> {
        self.beside.as_ref().map(|beside| beside.interrupt.clone())
    }
}

impl Engine {
    pub(crate) fn send<T: Pod>(
        &mut self,
        elements: &[T],
        to: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(to)?;
        let tag = options.settings.tag;
        let call = self.message_call::<T>(elements.len(), Some(self.rank().index()), tag);
        let encoded = self.messages.encode::<T>(&call, tag);
        let parts = [bytemuck::cast_slice(elements)];
        self.exchange_messages(&call, &[(encoded, Outgoing { to, parts: &parts })], &mut [], options)
    }

    pub(crate) fn receive<T: Pod>(
        &mut self,
        elements: &mut [T],
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(from)?;
        let receive = self.exact_receive(elements, Some(from), options.settings.tag);
        self.receive_one(receive, options).map(drop)
    }

    /// Receives a message of any rank. Returns the rank.
    pub(crate) fn receive_any<T: Pod>(
        &mut self,
        elements: &mut [T],
        options: &CallOptions<'_>,
    ) -> Result<usize> {
        let receive = self.exact_receive(elements, None, options.settings.tag);
        self.receive_one(receive, options).map(|(from, _)| from)
    }

    /// Receives a message that may be shorter than the slice. Returns its number of elements.
    pub(crate) fn receive_up_to<T: Pod>(
        &mut self,
        elements: &mut [T],
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<usize> {
        self.check_rank(from)?;
        let (source, count) = ((Some(from), options.settings.tag), elements.len());
        let destination = Destination::UpTo(bytemuck::cast_slice_mut(elements));
        let receive = self.open_receive::<T>(source, count, destination);
        let (_, bytes) = self.receive_one(receive, options)?;
        Ok(bytes.checked_div(size_of::<T>()).unwrap_or(0))
    }

    /// Receives a message of any length, of this rank or of any. Returns the sender too.
    pub(crate) fn receive_vec<T: Pod>(
        &mut self,
        from: Option<usize>,
        options: &CallOptions<'_>,
    ) -> Result<(usize, Vec<T>)> {
        from.map_or(Ok(()), |from| self.check_rank(from))?;
        let mut elements = Vec::new();
        let source = (from, options.settings.tag);
        let receive = self.open_receive::<T>(source, 0, Destination::Vector(&mut elements));
        let (from, _) = self.receive_one(receive, options)?;
        Ok((from, elements))
    }

    /// Receives one message. Returns its sender and its length in bytes.
    fn receive_one(&mut self, mut receive: Receive<'_>, options: &CallOptions<'_>) -> Result<(usize, usize)> {
        let (call, is_any) = (receive.call, receive.from.is_none());
        self.exchange_messages(&call, &[], std::slice::from_mut(&mut receive), options)?;
        if is_any {
            self.messages.next_source = (receive.received.0 + 1) % self.world_size();
        }
        Ok(receive.received)
    }

    /// Finds a message of this rank, or of any, that has arrived and was not received. Waits for one if `waits`.
    pub(crate) fn probe(
        &mut self,
        from: Option<usize>,
        waits: bool,
        options: &CallOptions<'_>,
    ) -> Result<Option<FoundMessage>> {
        from.map_or(Ok(()), |from| self.check_rank(from))?;
        let probe = Probe { from, tag: options.settings.tag };
        self.prepare_queues();
        let found = self.messages.find(probe);
        if found.is_some() {
            return Ok(found);
        }
        let call = Call { element: None, ..self.message_call::<u8>(0, from, probe.tag) };
        let ask = Ask { probe: Some(probe), returns_at_once: !waits };
        self.exchange_with(&call, &[], &mut [], ask, options)?;
        let found = self.messages.find(probe);
        match found {
            Some(found) => self.messages.next_source = (found.from + 1) % self.world_size(),
            None if waits => return Err(self.unanswered(&call, from, &options.due)),
            None => {}
        }
        Ok(found)
    }

    pub(crate) fn send_receive<T: Pod>(
        &mut self,
        sent: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(to)?;
        self.check_rank(from)?;
        let tag = options.settings.tag;
        let call = self.message_call::<T>(0, None, tag);
        let receive = self.exact_receive(received, Some(from), tag);
        let parts = [bytemuck::cast_slice(sent)];
        let send = (receive.encoded, Outgoing { to, parts: &parts });
        self.exchange_messages(&call, &[send], &mut [receive], options)
    }

    pub(crate) fn batch<T: Pod>(
        &mut self,
        messages: &mut [Message<'_, T>],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        messages.iter().try_for_each(|message| self.check_rank(message.peer()))?;
        let (mut sent, mut receives) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { to, tag, elements } => {
                    let call = self.message_call::<T>(elements.len(), Some(self.rank().index()), *tag);
                    let encoded = self.messages.encode::<T>(&call, *tag);
                    sent.push((encoded, *to, [bytemuck::cast_slice(elements)]));
                }
                Message::Receive { from, tag, elements } => {
                    receives.push(self.exact_receive(elements, Some(*from), *tag));
                }
            }
        }
        let sends: Vec<Send<'_>> =
            sent.iter().map(|(encoded, to, parts)| (*encoded, Outgoing { to: *to, parts })).collect();
        let call = self.message_call::<T>(0, None, 0);
        self.exchange_messages(&call, &sends, &mut receives, options)
    }

    /// Returns the call of a message. It has no sequence number, because messages between two ranks keep their order
    /// and the receiver compares their lengths. Only errors of this rank show `count` and `sender`.
    fn message_call<T: Pod>(&self, count: usize, sender: Option<usize>, tag: u32) -> Call {
        self.message_call_of(ElementType::of::<T>(), count, sender, tag)
    }

    /// Returns the call of a message of elements of this type.
    pub(super) fn message_call_of(
        &self,
        element: ElementType,
        count: usize,
        sender: Option<usize>,
        tag: u32,
    ) -> Call {
        Call {
            channel: self.channel,
            sequence: 0,
            operation: Operation::Message,
            element: Some(element),
            count: count as u64,
            sizes: u64::from(tag),
            op: None,
            root: sender.map(|sender| self.code(sender)),
            algorithm: None,
            order: None,
            past: HistoryDigest::default(),
            after_agreement: false,
        }
    }

    /// Creates a receive of elements of this type. `count` is the number of elements that errors state.
    fn open_receive<'a, T: Pod>(
        &mut self,
        (from, tag): (Option<usize>, u32),
        count: usize,
        destination: Destination<'a>,
    ) -> Receive<'a> {
        let call = self.message_call::<T>(count, from, tag);
        let encoded = self.messages.encode::<T>(&call, tag);
        Receive::new(from, call, encoded, destination)
    }

    /// Creates a receive of a message with the length of this slice.
    fn exact_receive<'a, T: Pod>(
        &mut self,
        elements: &'a mut [T],
        from: Option<usize>,
        tag: u32,
    ) -> Receive<'a> {
        let count = elements.len();
        self.open_receive::<T>((from, tag), count, Destination::Exact(bytemuck::cast_slice_mut(elements)))
    }

    /// Prepares one queue for each rank.
    pub(super) fn prepare_queues(&mut self) {
        if self.messages.queues.is_empty() {
            self.messages.queues.resize_with(self.world_size(), MessageQueue::default);
        }
    }

    /// Sends and receives all of these messages at once. `call` is the call that errors without a receive name.
    fn exchange_messages(
        &mut self,
        call: &Call,
        sends: &[Send<'_>],
        receives: &mut [Receive<'_>],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.prepare_queues();
        self.execute_commands();
        for (position, receive) in receives.iter_mut().enumerate() {
            self.match_kept(Claimant::Call(position), receive)?;
        }
        self.exchange_with(call, sends, receives, Ask::NOTHING, options)
    }

    fn exchange_with(
        &mut self,
        call: &Call,
        sends: &[Send<'_>],
        receives: &mut [Receive<'_>],
        ask: Ask,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.execute_commands();
        self.begin_messages(call, sends, receives, &ask);
        let mut part = CallPart { sends, receives, ask, is_sent: Vec::new() };
        if !self.messages.started.is_empty() {
            return self.exchange_beside_started(call, &mut part, &options.due);
        }
        let (me, ranks) = (self.rank.index(), self.world_size());
        let EngineMessages { queues, sources, next_source, .. } = &mut self.messages;
        let Ask { probe, returns_at_once } = part.ask;
        let open_any = list_sources((queues, sources), (part.receives, probe), *next_source, ranks);
        let mut inbox = Receives {
            channel: self.channel,
            me,
            queues,
            sources,
            started: &mut [],
            list: part.receives,
            open_any,
            probe,
            returns_at_once,
            refused: None,
            beside: None,
        };
        let done = self.transport.exchange_matched(sends, &mut inbox, &options.due);
        let refused = inbox.refused;
        match done {
            Ok(()) => self.check_all_received(part.receives, &options.due),
            Err(source) => Err(self.call_error(call, &part, refused, source)),
        }
    }

    /// Tells the transport the call of the messages that follow.
    fn begin_messages(&mut self, call: &Call, sends: &[Send<'_>], receives: &[Receive<'_>], ask: &Ask) {
        let current = receives.iter().find(|receive| receive.is_open).map(|receive| &receive.encoded);
        if let Some(current) = current.or_else(|| sends.first().map(|(encoded, _)| encoded)) {
            tracing::trace!(rank = self.rank.index(), channel = call.channel, "{call}");
            self.transport.begin(current);
        } else if ask.probe.is_some() {
            self.transport.begin(&call.encode());
        }
    }

    /// Executes a call while there are started messages, which it moves too.
    #[inline(never)]
    fn exchange_beside_started(
        &mut self,
        call: &Call,
        part: &mut CallPart<'_, '_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        part.is_sent.resize(part.sends.len(), false);
        loop {
            self.execute_commands();
            let waits_for = part.waits_for();
            if waits_for == 0 {
                return Ok(());
            }
            self.fail_behind_full_queue();
            if let Err(error) = self.check_queues(part.receives) {
                self.fail_started(None);
                return Err(error);
            }
            let (deadline, first) = match self.messages.started.earliest() {
                Some((earliest, number)) if earliest.earlier(due.deadline()) == earliest => {
                    (earliest, Only::Started(number))
                }
                _ => (due.deadline(), Only::Call),
            };
            let only = self.transport.runtime().expired(deadline).then_some(first);
            match self.exchange_once(part, Some(waits_for), only, deadline) {
                Ok(()) if part.ask.returns_at_once => return Ok(()),
                Ok(()) if matches!(only, Some(Only::Call)) && part.waits_for_any() => {
                    let open = part.receives.iter().find(|receive| receive.is_open);
                    let call = open.map_or(*call, |receive| receive.call);
                    let error = self.unanswered(&call, None, due);
                    self.fail_started(None);
                    return Err(error);
                }
                Ok(()) => {}
                Err((refused, source)) => return Err(self.fail_beside(call, part, (refused, only), source)),
            }
        }
    }

    /// Moves the started messages until one of them has ended or another thread interrupts. `only` is the operation
    /// whose deadline has passed.
    pub(super) fn move_started(&mut self, only: Option<u64>, deadline: Deadline) {
        let mut nothing = CallPart { sends: &[], receives: &mut [], ask: Ask::NOTHING, is_sent: Vec::new() };
        let only = only.map(Only::Started);
        self.fail_behind_full_queue();
        if let Err((refused, source)) = self.exchange_once(&mut nothing, None, only, deadline) {
            let owner = self.owner(refused, only, &source);
            self.fail_started_by(owner, source);
        }
    }

    /// Sends and receives the messages of a call, if there is one, and the started ones, until one of them has ended,
    /// the call has, or another thread interrupts. `only` is the part whose deadline has passed: then only it is moved,
    /// and the transport fails unless it can end at once.
    fn exchange_once(
        &mut self,
        part: &mut CallPart<'_, '_>,
        call_waits_for: Option<usize>,
        only: Option<Only>,
        deadline: Deadline,
    ) -> Result<(), (Option<Claimant>, TransportError)> {
        let (me, ranks) = (self.rank.index(), self.world_size());
        let EngineMessages { queues, sources, next_source, started, .. } = &mut self.messages;
        let StartedMessages { sends: started_sends, receives: started_receives, commands, .. } = started;
        list_all_sources((queues, sources), (part, started_receives), only, *next_source, ranks);
        let takes_call = !matches!(only, Some(Only::Started(_)));
        let is_any = |receive: &&Receive<'_>| takes_call && receive.is_open && receive.from.is_none();
        let open_any = part.receives.iter().filter(is_any).count();
        let interrupt = commands.as_ref().map(|commands| commands.interrupt.clone()).unwrap_or_default();
        let of_started = list_sends(started_sends, part, only);
        let parts: Vec<[&[u8]; 1]> =
            of_started.iter().map(|&index| [started_sends[index].memory.bytes()]).collect();
        let to_send = of_started.iter().map(|&index| &started_sends[index]).zip(&parts);
        let mut sends: Vec<Send<'_>> =
            to_send.map(|(send, parts)| (send.encoded, Outgoing { to: send.to, parts })).collect();
        let of_call: Vec<usize> =
            (0..part.sends.len()).filter(|&index| takes_call && !part.is_sent[index]).collect();
        sends.extend(of_call.iter().map(|&index| part.sends[index]));
        let beside = BesideStarted {
            interrupt,
            started_sends: of_started.len(),
            sent: Vec::new(),
            call_waits_for,
            has_ended: false,
            is_last: only.is_some(),
        };
        let mut inbox = Receives {
            channel: self.channel,
            me,
            queues,
            sources,
            started: started_receives,
            list: &mut *part.receives,
            open_any,
            probe: part.ask.probe.filter(|_| takes_call),
            returns_at_once: part.ask.returns_at_once,
            refused: None,
            beside: Some(beside),
        };
        let done = self.transport.exchange_matched(&sends, &mut inbox, &deadline.into());
        let (refused, probe) = (inbox.refused, inbox.probe);
        let sent = inbox.beside.map(|beside| beside.sent).unwrap_or_default();
        if takes_call {
            part.ask.probe = probe;
        }
        let mut sent_started = Vec::new();
        for position in sent {
            match of_started.get(position) {
                Some(&index) => sent_started.push(index),
                None => part.is_sent[of_call[position - of_started.len()]] = true,
            }
        }
        self.end_started(sent_started);
        done.map_err(|source| (refused, source))
    }

    /// Returns the part that a failure of the transport belongs to.
    fn owner(&self, refused: Option<Claimant>, only: Option<Only>, source: &TransportError) -> Option<u64> {
        match (refused, only) {
            (Some(Claimant::Started(id)), _) => self.messages.started.operation_of(id),
            (Some(Claimant::Call(_)), _) | (None, Some(Only::Call)) => None,
            (None, Some(Only::Started(number))) => Some(number),
            (None, None) => self.started_with(source),
        }
    }

    /// Ends a call and all started messages after a failure of the transport. Returns the error of the call.
    #[cold]
    fn fail_beside(
        &mut self,
        call: &Call,
        part: &CallPart<'_, '_>,
        (refused, only): (Option<Claimant>, Option<Only>),
        source: TransportError,
    ) -> Error {
        let owner = match self.owner(refused, only, &source) {
            Some(number) if only.is_some() || refused.is_some() || !self.is_in_call(part, &source) => {
                Some(number)
            }
            _ => None,
        };
        if owner.is_some() {
            self.fail_started_by(owner, source);
            return self.aborted(call);
        }
        let error = self.call_error(call, part, refused, source);
        self.fail_started(None);
        error
    }

    /// Returns `true` if a failure of the transport may be one of this call.
    fn is_in_call(&self, part: &CallPart<'_, '_>, source: &TransportError) -> bool {
        let is_named = |peer: usize| source.peer() == Some(self.in_world(peer));
        let mut receives = part.receives.iter().filter(|receive| !receive.is_complete);
        let mut sends = part.sends.iter().zip(&part.is_sent).filter(|(_, is_sent)| !**is_sent);
        receives.any(|receive| receive.from.is_none_or(is_named))
            || sends.any(|((_, send), _)| is_named(send.to))
    }

    /// Ends all started messages. The failure belongs to this operation.
    #[cold]
    fn fail_started_by(&mut self, owner: Option<u64>, source: TransportError) {
        let first = owner.and_then(|number| {
            let (receives, call) = self.started_calls(number);
            let call = call?;
            Some((number, self.message_error(&call, &receives, source)))
        });
        self.fail_started(first);
    }

    /// Completes a receive if its message was kept. If its message is arriving to be kept, the receive claims it.
    pub(super) fn match_kept(&mut self, claimant: Claimant, receive: &mut Receive<'_>) -> Result<KeptMatch> {
        let tag = receive.call.tag();
        let ranks = self.world_size();
        let first = receive.from.unwrap_or(self.messages.next_source);
        let looked_at = if receive.from.is_some() { 1 } else { ranks };
        for from in (first..first + looked_at).map(|rank| rank % ranks) {
            let queue = &mut self.messages.queues[from];
            if queue.kept.is_empty() && queue.arriving.is_none() {
                continue;
            }
            if let Some(kept) = queue.take(tag) {
                self.check_fits(from, receive, &kept.call, kept.bytes.len())?;
                receive.fill(&kept);
                return Ok(KeptMatch::Filled);
            }
            let arriving = queue.unclaimed().filter(|message| message.call.tag() == tag);
            let arriving = arriving.map(|message| (message.call, message.bytes.len()));
            let Some((call, len)) = arriving else { continue };
            self.check_fits(from, receive, &call, len)?;
            receive.is_open = false;
            if let Some(ArrivingMessage::Kept { claimed_by, .. }) = &mut self.messages.queues[from].arriving {
                *claimed_by = Some(claimant);
            }
            return Ok(KeptMatch::Claimed);
        }
        Ok(KeptMatch::Nothing)
    }

    /// Prepares a receive for a message that was not sent for it, or refuses the message.
    fn check_fits(&mut self, from: usize, receive: &mut Receive<'_>, call: &Call, len: usize) -> Result<()> {
        if call.element == receive.call.element && receive.accept(from, len).is_ok() {
            return Ok(());
        }
        let sender = Some(self.code(from));
        let ours = Box::new(Call { root: sender, ..receive.call });
        let theirs = Box::new(Call { root: sender, ..*call });
        let error = Error::Mismatch { peer: self.in_world(from), ours, theirs };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        Err(error)
    }

    /// Returns an error if a receive can get no message because too many others are kept.
    fn check_queues(&mut self, receives: &[Receive<'_>]) -> Result<()> {
        let queues = &self.messages.queues;
        let is_behind = |receive: &&Receive<'_>| match receive.from {
            Some(from) => receive.is_open && queues[from].is_full(),
            None => receive.is_open && queues.iter().all(MessageQueue::is_full),
        };
        match receives.iter().find(is_behind) {
            Some(open) => Err(self.too_many_kept(&open.call, open.from)),
            None => Ok(()),
        }
    }

    /// Ends all started messages if one of them can get no message because too many others are kept.
    pub(super) fn fail_behind_full_queue(&mut self) {
        let EngineMessages { queues, started, .. } = &self.messages;
        let is_behind =
            |receive: &&StartedReceive| receive.state == ReceiveState::Open && queues[receive.from].is_full();
        if let Some(receive) = started.receives.iter().find(is_behind) {
            let (number, call, from) = (receive.operation, receive.call, receive.from);
            let error = self.too_many_kept(&call, Some(from));
            self.fail_started(Some((number, error)));
        }
    }

    /// Returns an error if a receive got no message because too many others are kept.
    fn check_all_received(&mut self, receives: &[Receive<'_>], due: &LazyDeadline<'_>) -> Result<()> {
        match receives.iter().find(|receive| receive.is_open) {
            Some(open) => Err(self.unanswered(&open.call, open.from, due)),
            None => Ok(()),
        }
    }

    /// Aborts the job because an awaited message has not come: no rank has sent it in time, or too many others are kept.
    #[cold]
    fn unanswered(&mut self, call: &Call, from: Option<usize>, due: &LazyDeadline<'_>) -> Error {
        if from.is_some() || !self.transport.runtime().expired(due.deadline()) {
            return self.too_many_kept(call, from);
        }
        let queues = self.messages.queues.iter().enumerate();
        let others = queues.filter(|(rank, queue)| *rank != self.rank.index() && !queue.has_left);
        let ranks = others.map(|(rank, _)| self.in_world(rank)).collect();
        let (instead, limit) = (self.list_kept(), due.deadline().limit());
        let error = Error::NoneSent { call: Box::new(*call), ranks, instead, limit };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        error
    }

    /// Aborts the job because too many messages are kept for a receive to get its own.
    #[cold]
    fn too_many_kept(&mut self, call: &Call, from: Option<usize>) -> Error {
        let full = || self.messages.queues.iter().position(MessageQueue::is_full);
        let from = from.or_else(full).unwrap_or(self.rank.index());
        let (peer, instead) = (self.in_world(from), self.messages.queues[from].list());
        let error = Error::TooManyKept { call: Box::new(*call), peer, instead };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        error
    }

    /// Converts an error of the transport in a call.
    #[cold]
    fn call_error(
        &self,
        call: &Call,
        part: &CallPart<'_, '_>,
        refused: Option<Claimant>,
        source: TransportError,
    ) -> Error {
        let in_question = match refused {
            Some(Claimant::Call(position)) => &part.receives[position..][..1],
            _ => &*part.receives,
        };
        let receives = in_question.iter().filter(|receive| receive.is_open);
        let receives = receives.map(|receive| (receive.from, receive.call));
        let probe = part.ask.probe.map(|probe| (probe.from, *call));
        self.message_error(call, &receives.chain(probe).collect::<Vec<_>>(), source)
    }

    /// Converts an error of the transport that one of these receives may have met, each with its sender and its call.
    /// If other messages have come, the error lists them.
    #[cold]
    fn message_error(
        &self,
        call: &Call,
        receives: &[(Option<usize>, Call)],
        source: TransportError,
    ) -> Error {
        let named = source.peer();
        let is_meant = |from: Option<usize>| {
            from.is_none_or(|from| named.is_none_or(|named| named == self.in_world(from)))
        };
        let receive = receives.iter().copied().find(|(from, _)| is_meant(*from));
        let Some((from, call)) = receive else { return Error::in_call(*call, source) };
        let instead = match from {
            Some(from) => self.messages.queues[from].list(),
            None => self.list_kept(),
        };
        match (Error::in_call(call, source), from) {
            (Error::Transport { call, source }, Some(from)) if !instead.is_empty() => {
                Error::Unmatched { call, peer: self.in_world(from), instead, source }
            }
            (Error::Transport { call, source }, None) if !instead.is_empty() => {
                Error::UnmatchedAny { call, instead, source }
            }
            (error, _) => error,
        }
    }

    /// Returns the calls of the oldest kept messages of all ranks, with their senders.
    fn list_kept(&self) -> Vec<Call> {
        let queues = self.messages.queues.iter().enumerate();
        let calls = queues.flat_map(|(from, queue)| {
            let sender = Some(self.code(from));
            queue.list().into_iter().map(move |call| Call { root: sender, ..call })
        });
        calls.take(LISTED_MAX).collect()
    }
}

/// The part of a call that is no receive: a probe.
#[derive(Debug, Clone, Copy)]
struct Ask {
    probe: Option<Probe>,
    /// `true` if the call does not wait.
    returns_at_once: bool,
}

impl Ask {
    const NOTHING: Self = Self { probe: None, returns_at_once: false };
}

/// The part whose deadline has passed.
#[derive(Debug, Clone, Copy)]
enum Only {
    /// The call.
    Call,
    /// The started operation with this number.
    Started(u64),
}

/// The messages of a call.
struct CallPart<'a, 'm> {
    sends: &'a [Send<'a>],
    receives: &'a mut [Receive<'m>],
    ask: Ask,
    /// The sends that are done, if there are started messages.
    is_sent: Vec<bool>,
}

impl CallPart<'_, '_> {
    /// Returns `true` if a message of any rank is awaited.
    fn waits_for_any(&self) -> bool {
        self.receives.iter().any(|receive| receive.is_open && receive.from.is_none())
            || self.ask.probe.is_some_and(|probe| probe.from.is_none())
    }

    /// Returns the number of messages that have not ended.
    fn waits_for(&self) -> usize {
        let unsent = self.is_sent.iter().filter(|is_sent| !**is_sent).count();
        let incomplete = self.receives.iter().filter(|receive| !receive.is_complete).count();
        unsent + incomplete + usize::from(self.ask.probe.is_some())
    }
}

/// Lists the positions of the started sends that are sent: all, or those to the receivers of one part, whose messages may
/// be behind others.
fn list_sends(sends: &[StartedSend], part: &CallPart<'_, '_>, only: Option<Only>) -> Vec<usize> {
    let is_listed = |to: usize| match only {
        None => true,
        Some(Only::Call) => {
            part.sends.iter().zip(&part.is_sent).any(|((_, send), is_sent)| send.to == to && !is_sent)
        }
        Some(Only::Started(number)) => sends.iter().any(|send| send.to == to && send.operation == number),
    };
    (0..sends.len()).filter(|&index| is_listed(sends[index].to)).collect()
}

/// Lists the ranks that a call receives from, and counts the open receives of each. Returns the number of open receives
/// from any rank.
fn list_sources(
    (queues, sources): (&mut [MessageQueue], &mut Vec<usize>),
    (receives, probe): (&[Receive<'_>], Option<Probe>),
    first: usize,
    ranks: usize,
) -> usize {
    for from in sources.drain(..) {
        queues[from].open = 0;
    }
    let mut open_any = 0;
    for receive in receives.iter().filter(|receive| receive.is_open) {
        match receive.from {
            Some(from) => {
                if queues[from].open == 0 {
                    sources.push(from);
                }
                queues[from].open += 1;
                queues[from].has_left = false;
            }
            None => open_any += 1,
        }
    }
    let asks_any = probe.is_some_and(|probe| probe.from.is_none());
    let is_claimed = receives.iter().any(|receive| !receive.is_open);
    if open_any > 0 || probe.is_some() {
        queues.iter_mut().for_each(|queue| queue.has_left = false);
    }
    if open_any > 0 || asks_any {
        sources.clear();
        sources.extend((first..first + ranks).map(|rank| rank % ranks));
        return open_any;
    }
    if let Some(Probe { from: Some(from), .. }) = probe {
        sources.push(from);
    }
    if is_claimed {
        let claimed = (0..ranks).filter(|&from| queues[from].is_receiving() && queues[from].open == 0);
        sources.extend(claimed);
    }
    open_any
}

/// Lists the ranks that a call and the started receives receive from, or only one of these parts. Counts the open
/// receives of each.
fn list_all_sources(
    (queues, sources): (&mut [MessageQueue], &mut Vec<usize>),
    (part, started): (&CallPart<'_, '_>, &[StartedReceive]),
    only: Option<Only>,
    first: usize,
    ranks: usize,
) {
    sources.clear();
    for queue in &mut *queues {
        (queue.open, queue.has_left) = (0, false);
    }
    let takes_call = !matches!(only, Some(Only::Started(_)));
    let takes_started = |receive: &StartedReceive| match only {
        None => true,
        Some(Only::Call) => false,
        Some(Only::Started(number)) => receive.operation == number,
    };
    let mut is_any = takes_call && part.ask.probe.is_some_and(|probe| probe.from.is_none());
    for receive in part.receives.iter().filter(|receive| takes_call && receive.is_open) {
        match receive.from {
            Some(from) => queues[from].open += 1,
            None => is_any = true,
        }
    }
    for receive in started.iter().filter(|receive| takes_started(receive)) {
        if receive.state == ReceiveState::Open {
            queues[receive.from].open += 1;
        }
    }
    let is_probed = |from: usize| takes_call && part.ask.probe.is_some_and(|probe| probe.from == Some(from));
    let is_arriving = |from: usize| match queues[from].arriving_started() {
        Some(id) => started.iter().any(|receive| receive.id == id && takes_started(receive)),
        None => takes_call && queues[from].is_receiving(),
    };
    let is_source = |from: &usize| is_any || queues[*from].open > 0 || is_probed(*from) || is_arriving(*from);
    sources.extend((first..first + ranks).map(|rank| rank % ranks).filter(is_source));
}
