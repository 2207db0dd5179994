//! The job of another transport, beside which the ranks of a host share memory.

use std::sync::{Arc, Weak};

use crate::bootstrap::session::Session;
use crate::runtime::{Unparker, Wake};
use crate::{Abort, AbortDecision, Cause, CircularWait, Error};

/// The job of another transport. A session that belongs to it decides about no aborts: its coordinator only chooses
/// between the proposals of its ranks. Aborts and errors number ranks as the other job does.
#[derive(Debug, Clone)]
pub(crate) struct OuterJob {
    pub(crate) decision: Arc<dyn AbortDecision>,
    /// The ranks of the session by their numbers in the other job.
    pub(crate) members: Arc<[usize]>,
}

impl OuterJob {
    /// Returns the number of a rank of the session in this job.
    pub(crate) fn rank(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }

    /// Renumbers the ranks of a record of the session.
    pub(crate) fn abort(&self, mut abort: Abort) -> Abort {
        match &mut abort.cause {
            Cause::CircularWait { waits, .. } | Cause::TimedOut { waits, .. } => self.renumber(waits),
            Cause::NotInTime { missing, .. } => missing.iter_mut().for_each(|rank| *rank = self.rank(*rank)),
            _ => {}
        }
        Abort { rank: self.rank(abort.rank), reporter: self.rank(abort.reporter), ..abort }
    }

    fn renumber(&self, waits: &mut [CircularWait]) {
        for wait in waits {
            (wait.rank, wait.on) = (self.rank(wait.rank), self.rank(wait.on));
        }
    }

    /// Renumbers the ranks of an error of the session. An abort is not changed.
    pub(crate) fn error(&self, mut error: Error) -> Error {
        if let Error::Timeout { waits, .. } = &mut error {
            self.renumber(waits);
        }
        if let Some(peer) = error.peer_mut() {
            *peer = self.rank(*peer);
        }
        error
    }

    /// Wakes the service thread of the session when there is a decision.
    pub(crate) fn notify(&self, session: &Arc<Session>) {
        self.decision.notify(Unparker::of(Arc::new(ServiceWaker(Arc::downgrade(session)))));
    }
}

/// Wakes the service thread of a session that may have ended.
struct ServiceWaker(Weak<Session>);

impl Wake for ServiceWaker {
    fn wake(&self) {
        if let Some(session) = self.0.upgrade() {
            session.service_waker.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, OnceLock};
    use std::time::Duration;

    use super::*;
    use crate::bootstrap::coordinator::Coordinator;
    use crate::bootstrap::rendezvous::join;
    use crate::bootstrap::session::lock;
    use crate::process::Config;
    use crate::{Fingerprint, Runtime};

    const MEMBERS: [usize; 2] = [4, 7];

    /// A place of decision that collects proposals until the test decides.
    #[derive(Debug, Default)]
    struct Undecided {
        proposed: Mutex<Vec<Abort>>,
        decided: OnceLock<Abort>,
        notified: Mutex<Vec<Unparker>>,
    }

    impl Undecided {
        fn decide(&self, abort: Abort) {
            self.decided.set(abort).unwrap();
            lock(&self.notified).iter().for_each(Unparker::unpark);
        }
    }

    impl AbortDecision for Undecided {
        fn propose(&self, abort: Abort) {
            lock(&self.proposed).push(abort);
        }

        fn decided(&self) -> Option<Abort> {
            self.decided.get().cloned()
        }

        fn notify(&self, thread: Unparker) {
            lock(&self.notified).push(thread);
        }
    }

    fn of(cause: Cause, rank: usize) -> Abort {
        Abort { cause, rank, reporter: rank, call: Fingerprint::NONE }
    }

    #[test]
    fn ranks_are_renumbered_wherever_a_record_names_them() {
        let outer_job = OuterJob { decision: Arc::new(Undecided::default()), members: MEMBERS.into() };
        let wait = |rank, on| CircularWait { rank, on, call: Fingerprint::NONE };
        let circle = |waits: [CircularWait; 2]| Cause::CircularWait { waits: waits.to_vec(), count: 2 };
        let renumbered = outer_job.abort(of(circle([wait(0, 1), wait(1, 0)]), 1));
        assert_eq!(renumbered, of(circle([wait(4, 7), wait(7, 4)]), 7));
        let late = |waits: [CircularWait; 2]| Cause::TimedOut { waits: waits.to_vec(), count: 2 };
        let renumbered = outer_job.abort(of(late([wait(0, 1), wait(1, 0)]), 1));
        assert_eq!(renumbered, of(late([wait(4, 7), wait(7, 4)]), 7));
        assert_eq!(outer_job.error(Error::Garbage { peer: 0 }).peer(), Some(4));
        let aborted = outer_job.error(Error::Aborted(of(Cause::Left, 1)));
        assert_eq!(aborted.peer(), Some(1), "the record has its numbers already");
    }

    /// Joins both ranks of a session of an undecided job.
    fn sessions(decision: &Arc<Undecided>) -> (Coordinator, Vec<Arc<Session>>, Vec<impl Sized + use<>>) {
        let (runtime, coordinator) =
            (Runtime::system(), Coordinator::start("127.0.0.1:0", 2, "test", None).unwrap());
        let address = coordinator.address().to_string();
        let join = |rank| {
            let config = Config::new(rank, 2, &address).unwrap().with_job("test").with_external_coordinator();
            let outer_job = OuterJob { decision: decision.clone(), members: MEMBERS.into() };
            runtime
                .spawn("rank", move || join(&config, &Runtime::system(), Some(outer_job)).unwrap())
                .unwrap()
        };
        let joined = [0, 1].map(join).map(|task| task.join().unwrap());
        let sessions = joined.iter().map(|membership| membership.session.clone()).collect();
        (coordinator, sessions, joined.into())
    }

    /// Waits until this rank knows the final record.
    fn final_record(session: &Session) -> Option<Abort> {
        let deadline = session.runtime.deadline(Duration::from_secs(60));
        session.abort_state.wait_committed(&session.runtime, deadline)
    }

    fn await_proposal(decision: &Undecided) -> Abort {
        let runtime = Runtime::system();
        let deadline = runtime.deadline(Duration::from_secs(60));
        loop {
            if let Some(first) = lock(&decision.proposed).first() {
                return first.clone();
            }
            assert!(!runtime.expired(deadline), "nothing is proposed");
            runtime.sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_outer_job_decides_about_an_abort_of_a_session() {
        let decision = Arc::new(Undecided::default());
        let (_coordinator, sessions, _joined) = sessions(&decision);
        sessions[1].give_up(Cause::Panicked, Fingerprint::NONE);
        assert_eq!(await_proposal(&decision), of(Cause::Panicked, 7));
        assert!(sessions.iter().all(|session| !session.abort_state.is_final()));
        let record = of(Cause::Left, 2);
        decision.decide(record.clone());
        for session in sessions {
            assert_eq!(final_record(&session), Some(record.clone()));
            assert_eq!(session.why_ended(), Some(record.clone()));
        }
    }

    #[test]
    fn the_end_of_the_coordinator_is_proposed_as_the_death_of_its_rank() {
        let decision = Arc::new(Undecided::default());
        let (coordinator, sessions, _joined) = sessions(&decision);
        drop(coordinator);
        let Abort { cause, rank, .. } = await_proposal(&decision);
        assert_eq!((cause, rank), (Cause::Died, 4));
        decision.decide(of(Cause::Died, 4));
        assert!(sessions.iter().all(|session| final_record(session) == Some(of(Cause::Died, 4))));
    }
}
