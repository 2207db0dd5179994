//! Messages between two ranks, matched by their tags; the other ranks are not involved.

mod announced;
mod errors;
mod inbox;
mod progress;
mod queue;
mod receive;

use bytemuck::Pod;
use dist_transport::{Fingerprint, Outgoing};

use super::outstanding::StartedMessages;
use super::{CallOptions, Engine};
use crate::history::HistoryDigest;
use crate::{Call, ElementType, Message, Operation, Result};
use inbox::Receives;
use progress::{Ask, CallPart, list_sources};
pub(crate) use queue::FoundMessage;
use queue::{ArrivingMessage, KeptContent, MessageQueue, Probe};
pub(super) use queue::{Claimant, KeptMatch};
use receive::Destination;
pub(super) use receive::{ByteVector, Receive};

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

    /// Records the sender of the message that a receive has matched, so that a receive from any rank looks at another one
    /// next.
    fn record_sender(&mut self, receive: &Receive<'_>, ranks: usize) {
        if receive.from.is_none() {
            self.next_source = (receive.received.0 + 1) % ranks;
        }
    }

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
        let call = receive.call;
        self.exchange_messages(&call, &[], std::slice::from_mut(&mut receive), options)?;
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
        messages.iter().filter_map(Message::peer).try_for_each(|peer| self.check_rank(peer))?;
        let (mut sent, mut receives) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { to: Some(to), tag, elements } => {
                    let call = self.message_call::<T>(elements.len(), Some(self.rank().index()), *tag);
                    let encoded = self.messages.encode::<T>(&call, *tag);
                    sent.push((encoded, *to, [bytemuck::cast_slice(elements)]));
                }
                Message::Receive { from: Some(from), tag, elements } => {
                    receives.push(self.exact_receive(elements, Some(*from), *tag));
                }
                Message::Send { to: None, .. } | Message::Receive { from: None, .. } => {}
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
            next_source,
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

    /// Completes a receive if its message was kept. If its message is arriving to be kept, or was announced, the receive
    /// claims it.
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
                self.check_fits(from, receive, &kept.call, kept.len())?;
                self.messages.record_sender(receive, ranks);
                return Ok(match kept.content {
                    KeptContent::Bytes(bytes) => {
                        receive.fill(&bytes);
                        KeptMatch::Filled
                    }
                    KeptContent::Announced { number, .. } => {
                        receive.is_open = false;
                        self.messages.queues[from].claim(number, claimant, false);
                        KeptMatch::Claimed
                    }
                });
            }
            let Some((call, len)) = queue.unclaimed().filter(|(call, _)| call.tag() == tag) else { continue };
            self.check_fits(from, receive, &call, len)?;
            receive.is_open = false;
            self.messages.record_sender(receive, ranks);
            if let Some(ArrivingMessage::Kept { claimed_by, .. }) = &mut self.messages.queues[from].arriving {
                *claimed_by = Some(claimant);
            }
            return Ok(KeptMatch::Claimed);
        }
        Ok(KeptMatch::Nothing)
    }
}
