//! What becomes of a wait that failed: its reason is found, the others are told, and the error is made.

use std::io;
use std::time::Duration;

use crate::bookkeeping::Calls;
use crate::tcp::message::Fault;
use crate::tcp::session::{Session, WaitError, timeout};
use crate::tcp::socket;
use crate::{Abort, Activity, Cause, Chain, ChannelId, Deadline, Error, Fingerprint};

/// How long to wait for the reason when a connection breaks.
const REASON_LIMIT: Duration = Duration::from_millis(250);

/// How long to wait for the coordinator's word on a wait that was in vain.
const WORD_LIMIT: Duration = Duration::from_millis(50);

/// What went wrong with which peer.
pub(super) struct Trouble {
    pub(super) activity: Activity,
    /// As numbered in the group.
    pub(super) peer: usize,
    pub(super) fault: Fault,
}

impl Fault {
    /// Why there is no connection. One that was not there in time is a wait like any other.
    pub(super) fn unconnected(error: WaitError<Error>) -> Self {
        match error {
            WaitError::Late | WaitError::Unanswered => Self::TimedOut,
            WaitError::Aborted(abort) => Self::Aborted(abort),
            WaitError::Failed(error) => Self::Unconnected(error),
        }
    }
}

/// Ends the job if it is dropped, as only a panic does: one of a function that was given bytes of a message, which is half taken
/// then, whoever catches the panic.
pub(super) struct Alarm<'a> {
    pub(super) session: &'a Session,
    pub(super) calls: &'a Calls,
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.session.give_up(Cause::Panicked, *self.calls.current());
    }
}

/// Where something went wrong.
pub(super) struct Scene<'a> {
    pub(super) session: &'a Session,
    pub(super) channel: ChannelId,
    /// The ranks of the group, as numbered in the world.
    pub(super) members: &'a [usize],
    pub(super) call: Fingerprint,
}

impl Scene<'_> {
    /// Finds the reason, tells the others, and makes the error, which numbers ranks as the world does.
    pub(super) fn fail(&self, Trouble { activity, peer, fault }: Trouble, deadline: Deadline) -> Error {
        let (session, ours) = (self.session, self.call);
        // A connection breaks when its peer dies, but also when its peer gave up because of somebody else.
        let reason = match &fault {
            Fault::Aborted(abort) => Some(abort.clone()),
            Fault::Closed | Fault::Io(_) | Fault::Unconnected(_) => self.await_reason(deadline),
            _ => session.verdict.get(),
        };
        if let Some(abort) = reason {
            return Error::Aborted(abort);
        }
        let peer = self.members[peer];
        let left = session.has_left(self.channel, peer);
        let (cause, error) = match fault {
            Fault::Aborted(abort) => return Error::Aborted(abort),
            Fault::TimedOut => (Cause::TimedOut, timeout(&session.runtime, activity, peer, deadline)),
            Fault::Goodbye | Fault::Closed => (Cause::Left, Error::Closed { activity, peer }),
            Fault::Mismatch { theirs } => {
                (Cause::Mismatch { theirs }, Error::Mismatch { peer, ours, theirs })
            }
            Fault::Length { got, expected } => {
                (Cause::Length { got, expected }, Error::Length { peer, got, expected })
            }
            Fault::Garbage => (Cause::Protocol, Error::Garbage { peer }),
            Fault::Io(source) => (Cause::Died, Error::Io { activity, peer, source }),
            Fault::Own(source) => {
                session.give_up(Cause::gave_up(format_args!("{activity}: {source}")), ours);
                return Error::System { activity, source };
            }
            Fault::Unconnected(_) if left => (Cause::Left, Error::Closed { activity, peer }),
            Fault::Unconnected(error) if is_own_failure(&error) => {
                session.give_up(Cause::gave_up(Chain(&error)), ours);
                return error;
            }
            Fault::Unconnected(error) => (Cause::Died, error),
        };
        let own = Abort { cause, rank: peer, reporter: session.rank.index(), call: ours };
        session.report(own.clone());
        if own.cause == Cause::TimedOut && peer != own.reporter { self.heed(&own, error) } else { error }
    }

    /// Gives the error of a wait that was in vain the name that all others hear: whom it was for may have been waiting itself.
    fn heed(&self, own: &Abort, error: Error) -> Error {
        let runtime = &self.session.runtime;
        let word = self.session.verdict.await_word(runtime, runtime.deadline(WORD_LIMIT));
        match (word, error) {
            (Some(word), Error::Timeout { activity, elapsed, limit, .. })
                if word == (Abort { rank: word.rank, ..own.clone() }) =>
            {
                Error::Timeout { activity, peer: word.rank, elapsed, limit }
            }
            (Some(word), _) => Error::Aborted(word),
            (None, error) => error,
        }
    }

    /// The coordinator notices a death as soon as the peer does: its word tells more than a broken connection.
    fn await_reason(&self, deadline: Deadline) -> Option<Abort> {
        let (session, runtime) = (self.session, &self.session.runtime);
        let until = runtime.deadline(runtime.remaining(deadline).min(REASON_LIMIT));
        loop {
            let reason = session.verdict.get();
            if reason.is_some() || runtime.expired(until) {
                return reason;
            }
            socket::poll(&mut [session.verdict.watch()], runtime.remaining(until)).ok()?;
        }
    }
}

/// Whether a connection could not be opened because of this process, not of the peer.
fn is_own_failure(error: &Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error {
        Error::Address { source, .. } => !matches!(
            source.kind(),
            ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
        ),
        Error::Resources { .. }
        | Error::NotShared { .. }
        | Error::OtherUser { .. }
        | Error::Flooded { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_the_system_does_not_reach_is_not_late_and_no_failure_of_ours() {
        let unreached = Error::Address {
            activity: Activity::Connect,
            action: "connect to",
            address: "10.0.0.1:1".to_owned(),
            source: rustix::io::Errno::TIMEDOUT.into(),
        };
        let fault = Fault::unconnected(unreached.into());
        assert!(matches!(&fault, Fault::Unconnected(error) if !is_own_failure(error)), "{fault:?}");
        let fault = Fault::unconnected(WaitError::Late);
        assert!(matches!(fault, Fault::TimedOut), "{fault:?}");
    }
}
