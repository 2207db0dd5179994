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
    /// The message that is arriving.
    arriving: Option<ArrivingMessage>,
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
    Kept(KeptMessage),
}

/// A receive of the current call.
struct Receive<'a> {
    from: usize,
    call: Call,
    encoded: Fingerprint,
    destination: Destination<'a>,
    is_open: bool,
}

/// The destination of a received message.
enum Destination<'a> {
    /// Memory of the length of the message.
    Exact(&'a mut [u8]),
    /// A vector that takes the length of the message.
    Vector(&'a mut dyn ByteVector),
}

impl Destination<'_> {
    /// Prepares the destination for a message with this length in bytes.
    fn accept(&mut self, len: usize) -> Result<(), Refusal> {
        match self {
            Self::Exact(memory) if memory.len() == len => Ok(()),
            Self::Exact(memory) => Err(Refusal::Length(memory.len())),
            Self::Vector(vector) => vector.resize_bytes(len),
        }
    }

    fn memory(&mut self) -> &mut [u8] {
        match self {
            Self::Exact(memory) => memory,
            Self::Vector(vector) => vector.bytes(),
        }
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
            encoded: None,
        }
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

    /// Returns the calls of the oldest kept messages.
    fn list(&self) -> Vec<Call> {
        self.kept.iter().take(LISTED_MAX).map(|message| message.call).collect()
    }
}

/// The receives of one call. Messages that match none of them are kept.
struct Receives<'c, 'm> {
    channel: u64,
    queues: &'c mut [MessageQueue],
    sources: &'c [usize],
    list: &'c mut [Receive<'m>],
    /// The position of the receive whose message was refused.
    refused: Option<usize>,
}

impl Receives<'_, '_> {
    /// Returns the position of the oldest open receive from this rank, with this tag unless it is `None`.
    fn open(&self, from: usize, tag: Option<u32>) -> Option<usize> {
        let fits = |receive: &Receive<'_>| tag.is_none() || receive.call.tag() == tag;
        self.list.iter().position(|receive| receive.is_open && receive.from == from && fits(receive))
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
        self.queues[from].arriving = Some(ArrivingMessage::Kept(KeptMessage { call, bytes }));
        Ok(())
    }
}

impl Inbox for Receives<'_, '_> {
    fn sources(&self) -> &[usize] {
        self.sources
    }

    fn awaits(&self, from: usize) -> bool {
        let queue = &self.queues[from];
        match queue.arriving {
            Some(ArrivingMessage::Receive(_)) => true,
            _ => queue.open > 0 && !queue.is_full(),
        }
    }

    fn awaited_bytes(&self) -> usize {
        let len = |receive: &Receive<'_>| match &receive.destination {
            Destination::Exact(memory) if receive.is_open => memory.len(),
            _ => 0,
        };
        self.list.iter().map(len).sum()
    }

    fn accept(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<(), Refusal> {
        let first = self.open(from, None).filter(|&position| self.list[position].encoded == *call);
        let position = match first {
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
        let accepted = if is_same_type { receive.destination.accept(len) } else { Err(Refusal::Mismatch) };
        if let Err(refusal) = accepted {
            self.refused = Some(position);
            return Err(refusal);
        }
        receive.is_open = false;
        let queue = &mut self.queues[from];
        queue.open -= 1;
        queue.arriving = Some(ArrivingMessage::Receive(position));
        Ok(())
    }

    fn memory(&mut self, from: usize) -> &mut [u8] {
        match &mut self.queues[from].arriving {
            Some(ArrivingMessage::Receive(position)) => self.list[*position].destination.memory(),
            Some(ArrivingMessage::Kept(message)) => &mut message.bytes,
            None => &mut [],
        }
    }

    fn complete(&mut self, from: usize) {
        if let Some(ArrivingMessage::Kept(message)) = self.queues[from].arriving.take() {
            self.queues[from].keep(message);
        }
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
        let receive = self.open_receive(elements, from, options.settings.tag);
        let call = receive.call;
        self.exchange_messages(&call, &[], &mut [receive], options)
    }

    /// Receives a message of any length.
    pub(crate) fn receive_vec<T: Pod>(&mut self, from: usize, options: &CallOptions<'_>) -> Result<Vec<T>> {
        self.check_rank(from)?;
        let tag = options.settings.tag;
        let call = self.message_call::<T>(0, Some(from), tag);
        let encoded = self.messages.encode::<T>(&call, tag);
        let mut elements = Vec::new();
        let destination = Destination::Vector(&mut elements);
        let receive = Receive { from, call, encoded, destination, is_open: true };
        self.exchange_messages(&call, &[], &mut [receive], options)?;
        Ok(elements)
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
        let receive = self.open_receive(received, from, tag);
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
                    receives.push(self.open_receive(elements, *from, *tag));
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
            started: self.history.is_of_worker(),
            operation: Operation::Message,
            element: Some(ElementType::of::<T>()),
            count: count as u64,
            sizes: u64::from(tag),
            op: None,
            root: sender.map(|sender| self.code(sender)),
            algorithm: None,
            order: None,
            part: 0,
            past: HistoryDigest::default(),
            after_agreement: false,
        }
    }

    fn open_receive<'a, T: Pod>(&mut self, elements: &'a mut [T], from: usize, tag: u32) -> Receive<'a> {
        let call = self.message_call::<T>(elements.len(), Some(from), tag);
        let encoded = self.messages.encode::<T>(&call, tag);
        Receive {
            from,
            call,
            encoded,
            destination: Destination::Exact(bytemuck::cast_slice_mut(elements)),
            is_open: true,
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
        if self.messages.queues.is_empty() {
            self.messages.queues.resize_with(self.world_size(), MessageQueue::default);
        }
        receives.iter_mut().try_for_each(|receive| self.receive_kept(receive))?;
        let MessageChannel { transport, queues, sources, .. } = &mut self.messages;
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
            tracing::trace!(rank = self.rank.index(), channel = call.channel, "{call}");
            transport.begin(current);
        }
        sources.clear();
        for receive in receives.iter().filter(|receive| receive.is_open) {
            if queues[receive.from].open == 0 {
                sources.push(receive.from);
            }
            queues[receive.from].open += 1;
        }
        let mut inbox = Receives { channel: self.channel, queues, sources, list: receives, refused: None };
        let done = transport.exchange_matched(sends, &mut inbox, &options.due);
        let refused = inbox.refused;
        match done {
            Ok(()) => self.check_all_received(receives),
            Err(source) => {
                let in_question = match refused {
                    Some(position) => &receives[position..][..1],
                    None => receives,
                };
                Err(self.message_error(call, in_question, source))
            }
        }
    }

    /// Completes a receive if its message was kept.
    fn receive_kept(&mut self, receive: &mut Receive<'_>) -> Result<()> {
        let Some(kept) = self.messages.queues[receive.from].take(receive.call.tag()) else { return Ok(()) };
        if kept.call.element == receive.call.element && receive.destination.accept(kept.bytes.len()).is_ok() {
            receive.destination.memory().copy_from_slice(&kept.bytes);
            receive.is_open = false;
            return Ok(());
        }
        let (ours, theirs) =
            (Box::new(receive.call), Box::new(Call { root: receive.call.root, ..kept.call }));
        let error = Error::Mismatch { peer: self.in_world(receive.from), ours, theirs };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        Err(error)
    }

    /// Returns an error if a receive got no message because too many others are kept.
    fn check_all_received(&mut self, receives: &[Receive<'_>]) -> Result<()> {
        let Some(open) = receives.iter().find(|receive| receive.is_open) else { return Ok(()) };
        let (peer, instead) = (self.in_world(open.from), self.messages.queues[open.from].list());
        let error = Error::TooManyKept { call: Box::new(open.call), peer, instead };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        Err(error)
    }

    /// Converts an error of the transport that one of these receives may have met. If the peer has sent other
    /// messages, the error lists them.
    #[cold]
    fn message_error(&self, call: &Call, receives: &[Receive<'_>], source: TransportError) -> Error {
        let named = source.peer();
        let receive = receives
            .iter()
            .filter(|receive| receive.is_open)
            .find(|receive| named.is_none_or(|named| named == self.in_world(receive.from)));
        let Some(receive) = receive else { return Error::in_call(*call, source) };
        let instead = self.messages.queues[receive.from].list();
        match Error::in_call(receive.call, source) {
            Error::Transport { call, source } if !instead.is_empty() => {
                Error::Unmatched { call, peer: self.in_world(receive.from), instead, source }
            }
            error => error,
        }
    }
}
