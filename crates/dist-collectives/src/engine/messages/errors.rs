//! The errors of messages that do not come, do not fit, or are too many.

use dist_transport::{Cause, Chain, Error as TransportError, LazyDeadline};

use super::EngineMessages;
use super::progress::CallPart;
use super::queue::{Claimant, LISTED_MAX, MessageQueue};
use super::receive::Receive;
use crate::engine::Engine;
use crate::engine::outstanding::{ReceiveState, StartedReceive};
use crate::{Call, Error, Result};

impl Engine {
    /// Prepares a receive for a message that was not sent for it, or refuses the message.
    pub(super) fn check_fits(
        &mut self,
        from: usize,
        receive: &mut Receive<'_>,
        call: &Call,
        len: usize,
    ) -> Result<()> {
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
    pub(super) fn check_queues(&mut self, receives: &[Receive<'_>]) -> Result<()> {
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
    pub(in crate::engine) fn fail_behind_full_queue(&mut self) {
        let EngineMessages { queues, started, .. } = &self.messages;
        let is_behind = |receive: &&StartedReceive| {
            let is_full = match receive.from {
                Some(from) => queues[from].is_full(),
                None => queues.iter().all(MessageQueue::is_full),
            };
            receive.state == ReceiveState::Open && is_full
        };
        if let Some(receive) = started.receives.iter().find(is_behind) {
            let (number, call, from) = (receive.operation, receive.call, receive.from);
            let error = self.too_many_kept(&call, from);
            self.fail_started(Some((number, error)));
        }
    }

    /// Returns an error if a receive got no message because too many others are kept.
    pub(super) fn check_all_received(
        &mut self,
        receives: &[Receive<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        match receives.iter().find(|receive| receive.is_open) {
            Some(open) => Err(self.unanswered(&open.call, open.from, due)),
            None => Ok(()),
        }
    }

    /// Aborts the job because an awaited message has not come: no rank has sent it in time, or too many others are kept.
    #[cold]
    pub(super) fn unanswered(&mut self, call: &Call, from: Option<usize>, due: &LazyDeadline<'_>) -> Error {
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
    pub(super) fn too_many_kept(&mut self, call: &Call, from: Option<usize>) -> Error {
        let full = || self.messages.queues.iter().position(MessageQueue::is_full);
        let from = from.or_else(full).unwrap_or(self.rank.index());
        let (peer, instead) = (self.in_world(from), self.messages.queues[from].list());
        let error = Error::TooManyKept { call: Box::new(*call), peer, instead };
        self.transport.abort(Cause::gave_up(Chain(&error)));
        error
    }

    /// Converts an error of the transport in a call.
    #[cold]
    pub(super) fn call_error(
        &self,
        call: &Call,
        part: &CallPart<'_, '_>,
        refused: Option<Claimant>,
        source: TransportError,
    ) -> Error {
        if let Some(error) = self.not_received_in(part.sends, &source) {
            return error;
        }
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
    pub(super) fn message_error(
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
            (Error::CircularWait { call, waits, count, .. }, _) => {
                Error::CircularWait { call, waits, count, instead }
            }
            (error, _) => error,
        }
    }

    /// Returns the calls of the oldest kept messages of all ranks, with their senders.
    pub(super) fn list_kept(&self) -> Vec<Call> {
        let queues = self.messages.queues.iter().enumerate();
        let calls = queues.flat_map(|(from, queue)| {
            let sender = Some(self.code(from));
            queue.list().into_iter().map(move |call| Call { root: sender, ..call })
        });
        calls.take(LISTED_MAX).collect()
    }
}
