//! The receives of a call and the started ones, as the transport sees them.

use dist_transport::{Fingerprint, Inbox, Interrupt, Pause, Refusal};

use super::queue::{ArrivingMessage, Claimant, KeptContent, KeptMessage, MessageQueue, Probe};
use super::receive::{Destination, Receive};
use crate::engine::outstanding::{ReceiveState, StartedReceive};
use crate::{Call, ElementType};

/// The receives of one call, and the started ones. Messages that match none of them are kept.
pub(super) struct Receives<'c, 'm> {
    pub(super) channel: u64,
    pub(super) me: usize,
    pub(super) queues: &'c mut [MessageQueue],
    pub(super) sources: &'c [usize],
    /// The started receives, which are older than those of the call.
    pub(super) started: &'c mut [StartedReceive],
    pub(super) list: &'c mut [Receive<'m>],
    /// The number of receives from any rank that no message has matched yet.
    pub(super) open_any: usize,
    /// The rank that the next receive from any rank looks at first.
    pub(super) next_source: &'c mut usize,
    /// The probe of this call, until its message has arrived.
    pub(super) probe: Option<Probe>,
    /// `true` if the call does not wait.
    pub(super) returns_at_once: bool,
    /// The receive whose message was refused.
    pub(super) refused: Option<Claimant>,
    /// The rest of the call, if there are started messages.
    pub(super) beside: Option<BesideStarted>,
}

/// The state of a call that also moves started messages.
pub(super) struct BesideStarted {
    pub(super) interrupt: Interrupt,
    /// The number of started sends, which are the first of the list.
    pub(super) started_sends: usize,
    /// The positions of the messages that are sent.
    pub(super) sent: Vec<usize>,
    /// The number of messages that the call of this rank waits for; `None` if there is no call.
    pub(super) call_waits_for: Option<usize>,
    /// `true` if a started message has ended.
    pub(super) has_ended: bool,
    /// `true` if this call of the transport ends the operation whose deadline has passed.
    pub(super) is_last: bool,
}

impl Receives<'_, '_> {
    /// Returns the receive that takes a message of this rank with this tag: the oldest open one.
    pub(super) fn open(&self, from: usize, tag: Option<u32>) -> Option<Claimant> {
        let takes = |receive: &&StartedReceive| receive.is_open_for(from) && receive.call.tag() == tag;
        if let Some(started) = self.started.iter().find(takes) {
            return Some(Claimant::Started(started.id));
        }
        let open = self.list.iter().position(|receive| receive.is_open && receive.takes(from, tag));
        open.map(Claimant::Call)
    }

    /// Returns the oldest open receive from this rank if it is of this call.
    pub(super) fn first(&self, from: usize, call: &Fingerprint) -> Option<Claimant> {
        if let Some(started) = self.started.iter().find(|receive| receive.is_open_for(from)) {
            return (started.encoded == *call).then_some(Claimant::Started(started.id));
        }
        let is_candidate =
            |receive: &Receive<'_>| receive.is_open && receive.from.is_none_or(|wanted| wanted == from);
        let first = self.list.iter().position(is_candidate)?;
        (self.list[first].encoded == *call).then_some(Claimant::Call(first))
    }

    /// Decodes the call of a message that is not the expected one.
    #[cold]
    pub(super) fn decode(&self, call: &Fingerprint) -> Result<Call, Refusal> {
        let is_message = |call: &Call| call.tag().is_some() && call.channel == self.channel;
        Call::decode(call).filter(is_message).ok_or(Refusal::Mismatch)
    }

    /// Accepts a message that no receive matches.
    pub(super) fn keep(&mut self, from: usize, call: Call, len: usize) -> Result<(), Refusal> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Refusal::NoMemory)?;
        bytes.resize(len, 0);
        self.queues[from].arriving =
            Some(ArrivingMessage::Kept { call: with_length(call, len), bytes, claimed_by: None });
        Ok(())
    }

    /// Keeps the announcement of a message that no receive matches.
    fn keep_announced(&mut self, from: usize, call: Call, len: usize, number: u64) {
        let content = KeptContent::Announced { number, len };
        self.keep_complete(from, KeptMessage { call: with_length(call, len), content });
    }

    /// Keeps a message, and ends the probe that waits for it.
    fn keep_complete(&mut self, from: usize, message: KeptMessage) {
        let is_probed = self.probe.is_some_and(|probe| {
            probe.from.is_none_or(|wanted| wanted == from) && message.call.tag() == Some(probe.tag)
        });
        if is_probed {
            self.probe = None;
            self.count_for_call();
        }
        self.queues[from].keep(message);
    }

    /// Returns the receive that takes a message of this rank, or the call of a message that no receive matches.
    fn find_receive(&self, from: usize, call: &Fingerprint) -> Result<Result<Claimant, Call>, Refusal> {
        if let Some(receive) = self.first(from, call) {
            return Ok(Ok(receive));
        }
        let theirs = self.decode(call)?;
        Ok(self.open(from, theirs.tag()).ok_or(theirs))
    }

    /// Prepares a receive for a message with this fingerprint and this length, which it takes.
    fn prepare(
        &mut self,
        receive: Claimant,
        from: usize,
        call: &Fingerprint,
        len: usize,
    ) -> Result<(), Refusal> {
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

    /// Accepts a message for the receive of the call at this position.
    fn accept_for_call(&mut self, position: usize, from: usize, len: usize) -> Result<(), Refusal> {
        let receive = &mut self.list[position];
        receive.accept(from, len)?;
        receive.is_open = false;
        let is_any = receive.from.is_none();
        self.close(from, is_any);
        Ok(())
    }

    /// Counts an open receive less, which has matched a message of this rank.
    fn close(&mut self, from: usize, is_any: bool) {
        if is_any {
            self.open_any = self.open_any.saturating_sub(1);
            *self.next_source = (from + 1) % self.queues.len();
        } else {
            self.queues[from].close();
        }
    }

    /// Returns the started receive with this number.
    pub(super) fn started(&mut self, id: u64) -> &mut StartedReceive {
        let receive = self.started.iter_mut().find(|receive| receive.id == id);
        receive.expect("a receive whose message arrives has not ended")
    }

    /// Accepts a message for the started receive with this number.
    fn accept_for_started(&mut self, id: u64, from: usize, len: usize) -> Result<(), Refusal> {
        let receive = self.started(id);
        receive.accept(from, len)?;
        let is_any = receive.from.is_none();
        self.close(from, is_any);
        Ok(())
    }

    /// Directs the bytes of the next message of this rank to a receive.
    fn direct(&mut self, from: usize, receive: Claimant) {
        self.queues[from].arriving = Some(match receive {
            Claimant::Call(position) => ArrivingMessage::Receive(position),
            Claimant::Started(id) => ArrivingMessage::Started(id),
        });
    }

    /// Returns the fingerprint that a receive expects.
    pub(super) fn expected(&mut self, receive: Claimant) -> Fingerprint {
        match receive {
            Claimant::Call(position) => self.list[position].encoded,
            Claimant::Started(id) => self.started(id).encoded,
        }
    }

    pub(super) fn complete_started(&mut self, id: u64) {
        self.started(id).state = ReceiveState::Complete;
        if let Some(beside) = &mut self.beside {
            beside.has_ended = true;
        }
    }

    /// Counts a message of the call that has ended.
    pub(super) fn count_for_call(&mut self) {
        if let Some(BesideStarted { call_waits_for: Some(open), .. }) = &mut self.beside {
            *open -= 1;
        }
    }

    /// Returns `true` if a message of this rank would be awaited by a receive or probe that names the rank.
    pub(super) fn names(&self, from: usize) -> bool {
        self.queues[from].open > 0 || self.probe.is_some_and(|probe| probe.from == Some(from))
    }

    /// Returns `true` if a receive or probe of the call names this rank.
    pub(super) fn is_named_by_call(&self, from: usize) -> bool {
        self.list.iter().any(|receive| receive.is_open && receive.from == Some(from))
            || self.probe.is_some_and(|probe| probe.from == Some(from))
    }

    /// Returns `true` if messages of any rank are awaited.
    pub(super) fn awaits_any(&self) -> bool {
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
            Destination::Exact(memory) if !receive.is_complete => memory.len(),
            _ => 0,
        };
        self.list.iter().map(len).sum()
    }

    fn accept(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<(), Refusal> {
        match self.find_receive(from, call)? {
            Ok(receive) => {
                self.prepare(receive, from, call, len)?;
                self.direct(from, receive);
                Ok(())
            }
            Err(theirs) => self.keep(from, theirs, len),
        }
    }

    fn announce(
        &mut self,
        from: usize,
        call: &Fingerprint,
        len: usize,
        number: u64,
    ) -> Result<bool, Refusal> {
        match self.find_receive(from, call)? {
            Ok(receive) => {
                self.prepare(receive, from, call, len)?;
                self.queues[from].claim(number, receive, true);
                Ok(true)
            }
            Err(theirs) => {
                self.keep_announced(from, theirs, len, number);
                Ok(false)
            }
        }
    }

    fn next_wanted(&mut self) -> Option<(usize, u64)> {
        self.queues.iter_mut().enumerate().find_map(|(from, queue)| {
            let claimed = queue.claimed.iter_mut().find(|claimed| !claimed.is_requested)?;
            claimed.is_requested = true;
            Some((from, claimed.number))
        })
    }

    fn begin_announced(&mut self, from: usize, number: u64) {
        let claimed = &mut self.queues[from].claimed;
        if let Some(index) = claimed.iter().position(|claimed| claimed.number == number) {
            let receive = claimed.remove(index).claimed_by;
            self.direct(from, receive);
        }
    }

    fn keeps(&self, from: usize) -> bool {
        !self.queues[from].is_full()
    }

    fn next_memory(&mut self, from: usize) -> Option<(Fingerprint, &mut [u8])> {
        // With one receive of one rank, no other receive can take the message.
        match &mut *self.list {
            [
                Receive {
                    from: Some(wanted),
                    is_open: true,
                    encoded,
                    destination: Destination::Exact(memory),
                    ..
                },
            ] if *wanted == from && self.started.is_empty() => Some((*encoded, memory)),
            _ => None,
        }
    }

    fn memory(&mut self, from: usize) -> &mut [u8] {
        match &mut self.queues[from].arriving {
            Some(ArrivingMessage::Receive(position)) => self.list[*position].memory(),
            Some(ArrivingMessage::Started(id)) => {
                let receive = self.started.iter_mut().find(|receive| receive.id == *id);
                receive.map_or(&mut [], |receive| receive.memory.bytes_mut())
            }
            Some(ArrivingMessage::Kept { bytes, .. }) => bytes,
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
            Some(ArrivingMessage::Kept { bytes, claimed_by: Some(Claimant::Call(position)), .. }) => {
                self.list[position].fill(&bytes);
                self.count_for_call();
            }
            Some(ArrivingMessage::Kept { bytes, claimed_by: Some(Claimant::Started(id)), .. }) => {
                self.started(id).memory.bytes_mut().copy_from_slice(&bytes);
                self.complete_started(id);
            }
            Some(ArrivingMessage::Kept { call, bytes, claimed_by: None }) => {
                self.keep_complete(from, KeptMessage { call, content: KeptContent::Bytes(bytes) });
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

/// Returns the call of a message with its number of elements.
fn with_length(call: Call, len: usize) -> Call {
    let size = call.element.map_or(1, ElementType::size);
    Call { count: (len / size) as u64, ..call }
}
