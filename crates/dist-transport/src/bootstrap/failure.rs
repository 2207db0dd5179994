//! Handles a failed wait: finds the reason, reports it to the other ranks, and builds the error.

use std::io;
use std::time::Duration;

use crate::bookkeeping::CallHistory;
use crate::bootstrap::session::{Session, timeout};
use crate::link::message::LinkError;
use crate::{Abort, Activity, Cause, Chain, ChannelId, Deadline, Error, Fingerprint};

/// The longest wait for the reason of a broken connection. The coordinator notices the break at about the
/// same time as this rank, but on a busy machine it may be later.
const REASON_LIMIT: Duration = Duration::from_secs(2);

/// An error of a link, and the peer that it concerns.
pub(crate) struct PeerError {
    pub(crate) activity: Activity,
    /// The peer's rank in the group.
    pub(crate) peer: usize,
    pub(crate) link_error: LinkError,
}

/// A guard that aborts the job if it is dropped, which only happens by a panic. The panic comes from a
/// function that was receiving bytes of a message. The message is then half received, even if the panic is
/// caught.
pub(crate) struct AbortOnUnwind<'a> {
    pub(crate) session: &'a Session,
    pub(crate) calls: &'a CallHistory,
}

impl Drop for AbortOnUnwind<'_> {
    fn drop(&mut self) {
        self.session.give_up(Cause::Panicked, *self.calls.current());
    }
}

/// The state that is needed to report an error: the session, the channel and the call.
pub(crate) struct ErrorContext<'a> {
    pub(crate) session: &'a Session,
    pub(crate) channel: ChannelId,
    /// The ranks of the group, as numbered in the world.
    pub(crate) members: &'a [usize],
    pub(crate) call: Fingerprint,
}

impl ErrorContext<'_> {
    /// Finds the reason, reports it to the other ranks, and returns the error. The error numbers ranks as the
    /// job does.
    pub(crate) fn fail(
        &self,
        PeerError { activity, peer, link_error }: PeerError,
        deadline: Deadline,
    ) -> Error {
        let (session, ours) = (self.session, self.call);
        let peer = self.members[peer];
        if may_be_explained(&link_error) {
            self.wait_for_reason(peer, deadline);
        }
        if let Some(abort) = session.why_ended() {
            return Error::Aborted(abort);
        }
        let left = session.has_left(self.channel, peer);
        let (cause, error) = match link_error {
            LinkError::Aborted(abort) => return Error::Aborted(abort),
            LinkError::TimedOut => (Cause::timed_out(), timeout(&session.runtime, activity, peer, deadline)),
            LinkError::Goodbye | LinkError::Closed => (Cause::Left, Error::Closed { activity, peer }),
            LinkError::Mismatch { theirs } => {
                (Cause::Mismatch { theirs }, Error::Mismatch { peer, ours, theirs })
            }
            LinkError::Length { got, expected } => {
                (Cause::Length { got, expected }, Error::Length { peer, got, expected })
            }
            LinkError::Garbage => (Cause::Protocol, Error::Garbage { peer }),
            LinkError::Io(source) => (Cause::Died, Error::Io { activity, peer, source }),
            LinkError::Own(source) => {
                let cause = Cause::gave_up(format_args!("{activity}: {source}"));
                return self.give_up(cause, Error::System { activity, source });
            }
            LinkError::OtherMembers(theirs) => {
                let error = self.other_members(peer, &theirs);
                return self.give_up(Cause::gave_up(&error), error);
            }
            LinkError::Unconnected(_) if left => (Cause::Left, Error::Closed { activity, peer }),
            LinkError::Unconnected(error) if is_own_failure(&error) => {
                let error = session.error_in_job(error);
                return self.give_up(Cause::gave_up(Chain(&error)), error);
            }
            LinkError::Unconnected(error) => (Cause::Died, error),
        };
        let own = Abort { cause, rank: peer, reporter: session.rank.index(), call: ours };
        session.report(own.clone());
        self.committed_error(&session.abort_in_job(own), session.error_in_job(error))
    }

    /// Aborts the job because of this rank, and returns its error once there is a record.
    fn give_up(&self, cause: Cause, error: Error) -> Error {
        self.session.give_up(cause, self.call);
        let _ = self.session.why_ended();
        error
    }

    /// Returns the error that a rank has named other members of this group, as numbered in the job.
    fn other_members(&self, peer: usize, theirs: &[usize]) -> Error {
        let in_job = |rank: usize| self.session.rank_in_job(rank);
        Error::OtherMembers {
            rank: in_job(self.session.rank.index()),
            ours: self.members.iter().copied().map(in_job).collect(),
            peer: in_job(peer),
            theirs: theirs.iter().copied().map(in_job).collect(),
        }
    }

    /// Returns the error of this rank's call: [`Error::Aborted`] if the coordinator has committed another abort
    /// record than `own`, and the error of `own` otherwise. The peer may itself have been waiting; the
    /// committed record then names the rank that delayed all others, and lists a circle of waits if there is one.
    fn committed_error(&self, own: &Abort, error: Error) -> Error {
        match (self.session.why_ended(), error) {
            (Some(word), error) if word == *own => error,
            (
                Some(Abort { cause: Cause::TimedOut { waits, count }, rank, reporter, call }),
                Error::Timeout { activity, elapsed, limit, .. },
            ) if (reporter, call) == (own.reporter, own.call) => {
                Error::Timeout { activity, peer: rank, elapsed, limit, waits, count }
            }
            (Some(word), _) => Error::Aborted(word),
            (None, error) => error,
        }
    }

    /// Waits until the coordinator has reported why the connection with a rank broke, or that the rank has
    /// left. Both explain more than the broken connection. The rank is numbered as in the world.
    fn wait_for_reason(&self, peer: usize, deadline: Deadline) {
        let (session, runtime) = (self.session, &self.session.runtime);
        let until = runtime.deadline(runtime.remaining(deadline).min(REASON_LIMIT));
        let is_known = || session.abort_state.is_reached() || session.has_left(self.channel, peer);
        session.abort_state.wait_until(runtime, until, || is_known().then_some(()));
    }
}

/// Returns `true` if the coordinator may know the reason of an error. A connection breaks if the peer dies, but
/// also if the peer gave up because of another rank. If this process lacks a resource, that is the reason
/// itself.
fn may_be_explained(link_error: &LinkError) -> bool {
    match link_error {
        LinkError::Closed | LinkError::Io(_) => true,
        LinkError::Unconnected(error) => !lacks_resource(error),
        _ => false,
    }
}

/// Returns `true` if a connection could not be opened because of this process, not because of the peer.
fn is_own_failure(error: &Error) -> bool {
    let is_refusal =
        matches!(error, Error::NotShared { .. } | Error::OtherUser { .. } | Error::Flooded { .. });
    is_refusal || lacks_resource(error)
}

/// Returns `true` if the system gave this process no socket, file descriptor or memory for a connection.
fn lacks_resource(error: &Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error {
        Error::Address { source, .. } => !matches!(
            source.kind(),
            ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
        ),
        Error::Resources { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::session::WaitError;

    #[test]
    fn a_peer_that_the_system_does_not_reach_is_not_late_and_no_failure_of_ours() {
        let unreached = Error::Address {
            activity: Activity::Connect,
            action: "connect to",
            address: "10.0.0.1:1".to_owned(),
            source: rustix::io::Errno::TIMEDOUT.into(),
        };
        let link_error = LinkError::from(WaitError::from(unreached));
        assert!(
            matches!(&link_error, LinkError::Unconnected(error) if !is_own_failure(error)),
            "{link_error:?}"
        );
        let link_error = LinkError::from(WaitError::<Error>::Late);
        assert!(matches!(link_error, LinkError::TimedOut), "{link_error:?}");
    }
}
