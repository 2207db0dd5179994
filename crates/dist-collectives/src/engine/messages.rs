//! Messages between two ranks, matched by their tags; the other ranks are not involved.

use std::collections::VecDeque;

use bytemuck::Pod;
use dist_transport::{
    Cause, Chain, Error as TransportError, ErrorSource, Fingerprint, Inbox, Outgoing, Refusal, Traffic,
    Transport,
};

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

/// The messages of an engine. They have a channel of their own, so that they never mix with collectives.
#[derive(Debug)]
pub(super) struct MessageChannel {
    transport: Result<Box<dyn Transport>, ErrorSource<TransportError>>,
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
    Kept {
        message: KeptMessage,
        /// The position of the receive in the current call that gets the message when it is complete.
        claimed_by: Option<usize>,
    },
}

/// A receive of the current call.
struct Receive<'a> {
    /// The sender; `None` for any rank.
    from: Option<usize>,
    call: Call,
    encoded: Fingerprint,
    destination: Destination<'a>,
    is_open: bool,
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

impl Receive<'_> {
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

impl MessageChannel {
    /// Creates the channel of a communicator with this transport.
    pub(super) fn new(transport: &mut dyn Transport) -> Self {
        let all: Vec<usize> = (0..transport.rank().world_size()).collect();
        let transport =
            transport.fork(&all).map(|forked| forked.expect("every rank is a member of a group of all"));
        Self {
            transport: transport.map_err(ErrorSource::from),
            queues: Vec::new(),
            sources: Vec::new(),
            next_source: 0,
            encoded: None,
        }
    }

    /// Creates the channel of an engine that only executes collectives.
    pub(super) fn closed() -> Self {
        let transport = Err(TransportError::Members { members: Vec::new() }.into());
        Self { transport, queues: Vec::new(), sources: Vec::new(), next_source: 0, encoded: None }
    }

    pub(super) fn traffic(&self) -> Traffic {
        self.transport.as_ref().map_or_else(|_| Traffic::default(), |transport| transport.traffic())
    }

    /// Returns a rank of the group whose message was not received, if one is known.
    pub(super) fn unread(&mut self) -> Option<usize> {
        let kept = self.queues.iter().position(|queue| !queue.kept.is_empty());
        kept.or_else(|| self.transport.as_mut().ok()?.unread())
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

impl MessageChannel {
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

    /// Returns `true` if the message that is arriving belongs to a receive of the current call.
    const fn is_receiving(&self) -> bool {
        matches!(
            self.arriving,
            Some(ArrivingMessage::Receive(_) | ArrivingMessage::Kept { claimed_by: Some(_), .. })
        )
    }

    /// Returns the calls of the oldest kept messages.
    fn list(&self) -> Vec<Call> {
        self.kept.iter().take(LISTED_MAX).map(|message| message.call).collect()
    }
}

/// The receives of one call. Messages that match none of them are kept.
struct Receives<'c, 'm> {
    channel: u64,
    me: usize,
    queues: &'c mut [MessageQueue],
    sources: &'c [usize],
    list: &'c mut [Receive<'m>],
    /// The number of receives from any rank that no message has matched yet.
    open_any: usize,
    /// The probe of this call, until its message has arrived.
    probe: Option<Probe>,
    /// `true` if the call does not wait.
    returns_at_once: bool,
    /// The position of the receive whose message was refused.
    refused: Option<usize>,
}

impl Receives<'_, '_> {
    /// Returns the position of the oldest open receive from this rank with this tag.
    fn open(&self, from: usize, tag: Option<u32>) -> Option<usize> {
        self.list.iter().position(|receive| receive.is_open && receive.takes(from, tag))
    }

    /// Returns the position of the oldest open receive from this rank if it is of this call.
    fn first(&self, from: usize, call: &Fingerprint) -> Option<usize> {
        let is_candidate =
            |receive: &Receive<'_>| receive.is_open && receive.from.is_none_or(|wanted| wanted == from);
        let first = self.list.iter().position(is_candidate)?;
        (self.list[first].encoded == *call).then_some(first)
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

    /// Ends the wait of a receive whose message has begun to arrive.
    fn close(&mut self, position: usize) {
        let receive = &mut self.list[position];
        receive.is_open = false;
        match receive.from {
            Some(from) => self.queues[from].open -= 1,
            None => self.open_any -= 1,
        }
    }

    /// Returns `true` if a message of this rank would be awaited by a receive or probe that names the rank.
    fn names(&self, from: usize) -> bool {
        self.queues[from].open > 0 || self.probe.is_some_and(|probe| probe.from == Some(from))
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
        let position = match self.first(from, call) {
            Some(position) => position,
            None => {
                let theirs = self.decode(call)?;
                match self.open(from, theirs.tag()) {
                    Some(position) => position,
                    None => return self.keep(from, theirs, len),
                }
            }
        };
        let receive = &mut self.list[position];
        let is_same_type = receive.encoded == *call;
        let accepted = if is_same_type { receive.accept(from, len) } else { Err(Refusal::Mismatch) };
        if let Err(refusal) = accepted {
            self.refused = Some(position);
            return Err(refusal);
        }
        self.close(position);
        self.queues[from].arriving = Some(ArrivingMessage::Receive(position));
        Ok(())
    }

    fn memory(&mut self, from: usize) -> &mut [u8] {
        match &mut self.queues[from].arriving {
            Some(ArrivingMessage::Receive(position)) => self.list[*position].memory(),
            Some(ArrivingMessage::Kept { message, .. }) => &mut message.bytes,
            None => &mut [],
        }
    }

    fn complete(&mut self, from: usize) {
        let Some(ArrivingMessage::Kept { message, claimed_by }) = self.queues[from].arriving.take() else {
            return;
        };
        if let Some(position) = claimed_by {
            self.list[position].fill(&message);
            return;
        }
        let is_probed = self.probe.is_some_and(|probe| {
            probe.from.is_none_or(|wanted| wanted == from) && message.call.tag() == Some(probe.tag)
        });
        if is_probed {
            self.probe = None;
        }
        self.queues[from].keep(message);
    }

    fn peer_left(&mut self, from: usize) -> bool {
        if self.queues[from].is_receiving() || (self.names(from) && !self.returns_at_once) {
            return false;
        }
        self.queues[from].has_left = true;
        let may_send = |&rank: &usize| rank != self.me && !self.queues[rank].has_left;
        self.returns_at_once || self.sources.iter().any(may_send)
    }

    fn returns_at_once(&self) -> bool {
        self.returns_at_once
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
            None if waits => return Err(self.too_many_kept(&call, from)),
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
        Call {
            channel: self.channel,
            sequence: 0,
            operation: Operation::Message,
            element: Some(ElementType::of::<T>()),
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
        Receive { from, call, encoded, destination, is_open: true, received: (0, 0) }
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
    fn prepare_queues(&mut self) {
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
        for (position, receive) in receives.iter_mut().enumerate() {
            self.receive_kept(position, receive)?;
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
        let (me, ranks) = (self.rank.index(), self.world_size());
        let MessageChannel { transport, queues, sources, next_source, .. } = &mut self.messages;
        let transport = match transport {
            Ok(transport) => transport,
            Err(source) => {
                let error = Error::NoMessages(source.clone());
                self.transport.abort(Cause::gave_up(Chain(&error)));
                return Err(error);
            }
        };
        let current = receives.iter().find(|receive| receive.is_open).map(|receive| &receive.encoded);
        if let Some(current) = current.or_else(|| sends.first().map(|(encoded, _)| encoded)) {
            tracing::trace!(rank = me, channel = call.channel, "{call}");
            transport.begin(current);
        } else if ask.probe.is_some() {
            transport.begin(&call.encode());
        }
        let open_any = list_sources((queues, sources), receives, &ask, *next_source, ranks);
        let Ask { probe, returns_at_once } = ask;
        let mut inbox = Receives {
            channel: self.channel,
            me,
            queues,
            sources,
            list: receives,
            open_any,
            probe,
            returns_at_once,
            refused: None,
        };
        let done = transport.exchange_matched(sends, &mut inbox, &options.due);
        let refused = inbox.refused;
        match done {
            Ok(()) => self.check_all_received(receives),
            Err(source) => {
                let in_question = match refused {
                    Some(position) => &receives[position..][..1],
                    None => receives,
                };
                Err(self.message_error(call, in_question, probe, source))
            }
        }
    }

    /// Completes a receive if its message was kept. If its message is arriving to be kept, the receive claims it.
    fn receive_kept(&mut self, position: usize, receive: &mut Receive<'_>) -> Result<()> {
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
                return Ok(());
            }
            let arriving = queue.unclaimed().filter(|message| message.call.tag() == tag);
            let arriving = arriving.map(|message| (message.call, message.bytes.len()));
            let Some((call, len)) = arriving else { continue };
            self.check_fits(from, receive, &call, len)?;
            receive.is_open = false;
            if let Some(ArrivingMessage::Kept { claimed_by, .. }) = &mut self.messages.queues[from].arriving {
                *claimed_by = Some(position);
            }
            return Ok(());
        }
        Ok(())
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

    /// Returns an error if a receive got no message because too many others are kept.
    fn check_all_received(&mut self, receives: &[Receive<'_>]) -> Result<()> {
        match receives.iter().find(|receive| receive.is_open) {
            Some(open) => Err(self.too_many_kept(&open.call, open.from)),
            None => Ok(()),
        }
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

    /// Converts an error of the transport that one of these receives, or the probe, may have met. If other messages
    /// have come, the error lists them.
    #[cold]
    fn message_error(
        &self,
        call: &Call,
        receives: &[Receive<'_>],
        probe: Option<Probe>,
        source: TransportError,
    ) -> Error {
        let named = source.peer();
        let is_meant = |from: Option<usize>| {
            from.is_none_or(|from| named.is_none_or(|named| named == self.in_world(from)))
        };
        let receive = receives.iter().filter(|receive| receive.is_open);
        let receive = receive.map(|receive| (receive.from, receive.call)).find(|(from, _)| is_meant(*from));
        let receive = receive.or_else(|| probe.map(|probe| (probe.from, *call)));
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
struct Ask {
    probe: Option<Probe>,
    /// `true` if the call does not wait.
    returns_at_once: bool,
}

impl Ask {
    const NOTHING: Self = Self { probe: None, returns_at_once: false };
}

/// Lists the ranks that a call receives from, and counts the open receives of each. Returns the number of open receives
/// from any rank.
fn list_sources(
    (queues, sources): (&mut [MessageQueue], &mut Vec<usize>),
    receives: &[Receive<'_>],
    ask: &Ask,
    first: usize,
    ranks: usize,
) -> usize {
    sources.clear();
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
    let asks_any = ask.probe.is_some_and(|probe| probe.from.is_none());
    let is_claimed = receives.iter().any(|receive| !receive.is_open);
    if open_any > 0 || ask.probe.is_some() {
        queues.iter_mut().for_each(|queue| queue.has_left = false);
    }
    if open_any > 0 || asks_any {
        sources.clear();
        sources.extend((first..first + ranks).map(|rank| rank % ranks));
        return open_any;
    }
    if let Some(Probe { from: Some(from), .. }) = ask.probe {
        sources.push(from);
    }
    if is_claimed {
        let claimed = (0..ranks).filter(|&from| queues[from].is_receiving() && queues[from].open == 0);
        sources.extend(claimed);
    }
    open_any
}
