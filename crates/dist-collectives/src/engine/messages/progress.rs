//! Moves started messages, alone or together with a blocking call.

use dist_transport::runtime::Deadline;
use dist_transport::{Error as TransportError, LazyDeadline, Outgoing};

use super::inbox::{BesideStarted, Receives};
use super::queue::{Claimant, MessageQueue, Probe};
use super::receive::Receive;
use super::{EngineMessages, Send};
use crate::engine::Engine;
use crate::engine::outstanding::{ReceiveState, StartedMessages, StartedReceive, StartedSend};
use crate::{Call, Error, Result};

impl Engine {
    /// Executes a call while there are started messages, which it moves too.
    #[inline(never)]
    pub(super) fn exchange_beside_started(
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
            if let Err((refused, source)) = self.exchange_once(part, Some(waits_for), only, deadline) {
                return Err(self.fail_beside(call, part, (refused, only), source));
            }
            match only {
                Some(Only::Started(number)) if self.fail_unanswered(number, deadline) => {
                    return Err(self.aborted(call));
                }
                _ if part.ask.returns_at_once => return Ok(()),
                Some(Only::Call) if part.waits_for_any() => {
                    let open = part.receives.iter().find(|receive| receive.is_open);
                    let call = open.map_or(*call, |receive| receive.call);
                    let error = self.unanswered(&call, None, due);
                    self.fail_started(None);
                    return Err(error);
                }
                _ => {}
            }
        }
    }

    /// Moves the started messages until one of them has ended or another thread interrupts. `only` is the operation
    /// whose deadline has passed.
    pub(in crate::engine) fn move_started(&mut self, only: Option<u64>, deadline: Deadline) {
        let mut nothing = CallPart { sends: &[], receives: &mut [], ask: Ask::NOTHING, is_sent: Vec::new() };
        self.fail_behind_full_queue();
        match (self.exchange_once(&mut nothing, None, only.map(Only::Started), deadline), only) {
            (Err((refused, source)), _) => {
                let owner = self.owner(refused, only.map(Only::Started), &source);
                self.fail_started_by(owner, source);
            }
            (Ok(()), Some(number)) => drop(self.fail_unanswered(number, deadline)),
            (Ok(()), None) => {}
        }
    }

    /// Ends an operation whose deadline has passed if it still receives from any rank. Returns `false` if it does not.
    fn fail_unanswered(&mut self, number: u64, deadline: Deadline) -> bool {
        let Some(receive) = self.messages.started.open_any(number) else { return false };
        let call = receive.call;
        let error = self.unanswered(&call, None, &deadline.into());
        self.fail_started(Some((number, error)));
        true
    }

    /// Sends and receives the messages of a call, if there is one, and the started ones, until one of them has ended,
    /// the call has, or another thread interrupts. `only` is the part whose deadline has passed: then only it is moved,
    /// and the transport fails unless it can end at once.
    pub(super) fn exchange_once(
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
        let open_any = count_open_any(part, started_receives, only);
        let interrupt = commands.as_ref().map(|commands| commands.interrupt.clone()).unwrap_or_default();
        let of_started = list_sends(started_sends, part, only);
        let parts: Vec<[&[u8]; 1]> =
            of_started.iter().map(|&index| [started_sends[index].memory.bytes()]).collect();
        let to_send = of_started.iter().map(|&index| &started_sends[index]).zip(&parts);
        let mut sends: Vec<Send<'_>> =
            to_send.map(|(send, parts)| (send.encoded, Outgoing { to: send.to, parts })).collect();
        // The transport gets all messages to a rank again, because it may have begun several of them.
        let is_listed =
            |to: usize| takes_call || of_started.iter().any(|&index| started_sends[index].to == to);
        let is_sent_now = |&index: &usize| !part.is_sent[index] && is_listed(part.sends[index].1.to);
        let of_call: Vec<usize> = (0..part.sends.len()).filter(is_sent_now).collect();
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
            next_source,
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
    pub(super) fn owner(
        &self,
        refused: Option<Claimant>,
        only: Option<Only>,
        source: &TransportError,
    ) -> Option<u64> {
        match (refused, only) {
            (Some(Claimant::Started(id)), _) => self.messages.started.operation_of(id),
            (Some(Claimant::Call(_)), _) | (None, Some(Only::Call)) => None,
            (None, Some(Only::Started(number))) => Some(number),
            (None, None) => self.started_with(source),
        }
    }

    /// Ends a call and all started messages after a failure of the transport. Returns the error of the call.
    #[cold]
    pub(super) fn fail_beside(
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
    pub(super) fn is_in_call(&self, part: &CallPart<'_, '_>, source: &TransportError) -> bool {
        let is_named = |peer: usize| source.peer() == Some(self.in_world(peer));
        let mut receives = part.receives.iter().filter(|receive| !receive.is_complete);
        let mut sends = part.sends.iter().zip(&part.is_sent).filter(|(_, is_sent)| !**is_sent);
        receives.any(|receive| receive.from.is_none_or(is_named))
            || sends.any(|((_, send), _)| is_named(send.to))
    }

    /// Ends all started messages. The failure belongs to this operation.
    #[cold]
    pub(super) fn fail_started_by(&mut self, owner: Option<u64>, source: TransportError) {
        let first = owner.and_then(|number| {
            if let Some(error) = self.started_not_received(number, &source) {
                return Some((number, error));
            }
            let (receives, call) = self.started_calls(number);
            let call = call?;
            Some((number, self.message_error(&call, &receives, source)))
        });
        self.fail_started(first);
    }
}

/// The part of a call that is no receive: a probe.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) probe: Option<Probe>,
    /// `true` if the call does not wait.
    pub(super) returns_at_once: bool,
}

impl Ask {
    pub(super) const NOTHING: Self = Self { probe: None, returns_at_once: false };
}

/// The part whose deadline has passed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Only {
    /// The call.
    Call,
    /// The started operation with this number.
    Started(u64),
}

/// The messages of a call.
pub(super) struct CallPart<'a, 'm> {
    pub(super) sends: &'a [Send<'a>],
    pub(super) receives: &'a mut [Receive<'m>],
    pub(super) ask: Ask,
    /// The sends that are done, if there are started messages.
    pub(super) is_sent: Vec<bool>,
}

impl CallPart<'_, '_> {
    /// Returns `true` if a message of any rank is awaited.
    pub(super) fn waits_for_any(&self) -> bool {
        self.receives.iter().any(|receive| receive.is_open && receive.from.is_none())
            || self.ask.probe.is_some_and(|probe| probe.from.is_none())
    }

    /// Returns the number of messages that have not ended.
    pub(super) fn waits_for(&self) -> usize {
        let unsent = self.is_sent.iter().filter(|is_sent| !**is_sent).count();
        let incomplete = self.receives.iter().filter(|receive| !receive.is_complete).count();
        unsent + incomplete + usize::from(self.ask.probe.is_some())
    }
}

/// Lists the positions of the started sends that are sent: all, or those to the receivers of one part, whose messages may
/// be behind others.
pub(super) fn list_sends(sends: &[StartedSend], part: &CallPart<'_, '_>, only: Option<Only>) -> Vec<usize> {
    let is_listed = |to: usize| match only {
        None => true,
        Some(Only::Call) => {
            part.sends.iter().zip(&part.is_sent).any(|((_, send), is_sent)| send.to == to && !is_sent)
        }
        Some(Only::Started(number)) => sends.iter().any(|send| send.to == to && send.operation == number),
    };
    (0..sends.len()).filter(|&index| is_listed(sends[index].to)).collect()
}

/// Returns `true` if a started receive is moved: all are, or only those of one part.
fn is_moved(receive: &StartedReceive, only: Option<Only>) -> bool {
    match only {
        None => true,
        Some(Only::Call) => false,
        Some(Only::Started(number)) => receive.operation == number,
    }
}

/// Returns the number of open receives from any rank of a call and of the started receives, or of one part.
fn count_open_any(part: &CallPart<'_, '_>, started: &[StartedReceive], only: Option<Only>) -> usize {
    let takes_call = !matches!(only, Some(Only::Started(_)));
    let of_call = part.receives.iter().filter(|receive| receive.is_open && receive.from.is_none());
    let of_call = if takes_call { of_call.count() } else { 0 };
    let is_any = |receive: &&StartedReceive| receive.is_open_for_any() && is_moved(receive, only);
    of_call + started.iter().filter(is_any).count()
}

/// Lists the ranks that a call receives from, and counts the open receives of each. Returns the number of open receives
/// from any rank.
pub(super) fn list_sources(
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
pub(super) fn list_all_sources(
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
    let mut is_any = takes_call && part.ask.probe.is_some_and(|probe| probe.from.is_none());
    for receive in part.receives.iter().filter(|receive| takes_call && receive.is_open) {
        match receive.from {
            Some(from) => queues[from].open += 1,
            None => is_any = true,
        }
    }
    for receive in started.iter().filter(|receive| is_moved(receive, only)) {
        match receive.from {
            _ if receive.state != ReceiveState::Open => {}
            Some(from) => queues[from].open += 1,
            None => is_any = true,
        }
    }
    let is_probed = |from: usize| takes_call && part.ask.probe.is_some_and(|probe| probe.from == Some(from));
    let is_meant = |receive: Claimant| match receive {
        Claimant::Started(id) => started.iter().any(|receive| receive.id == id && is_moved(receive, only)),
        Claimant::Call(_) => takes_call,
    };
    let is_arriving = |from: usize| queues[from].receivers().any(is_meant);
    let is_source = |from: &usize| is_any || queues[*from].open > 0 || is_probed(*from) || is_arriving(*from);
    sources.extend((first..first + ranks).map(|rank| rank % ranks).filter(is_source));
}
