//! Probes with new connections whether a silent process of another host can be reached.
//!
//! After a network outage, an old connection may be silent for as long again, because TCP retransmits after
//! doubling pauses. A new connection is open as soon as the network is back.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bookkeeping::HEARTBEAT;
use crate::bootstrap::auth::{Identity, Purpose};
use crate::bootstrap::coordinator::COORDINATOR;
use crate::bootstrap::dial::{self, Opened, RETRY};
use crate::bootstrap::session::{Session, WaitError, lock};
use crate::{Deadline, Error, Result};

/// The longest silence before the other side is probed.
const PROBE_AFTER_MAX: Duration = Duration::from_millis(1500);

/// The shortest and the longest time for one connection attempt, before a new one is started.
const ATTEMPT_LIMITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// Returns how long a side may be silent before it is probed, given the silence limit after which it counts as
/// lost.
pub(crate) fn probe_after(limit: Duration) -> Duration {
    (limit / 2).min(PROBE_AFTER_MAX)
}

/// Returns the time limit of one connection attempt to a host, given its silence limit.
pub(crate) fn attempt_limit(limit: Duration) -> Duration {
    let [least, most] = ATTEMPT_LIMITS;
    (limit / 4).clamp(least, most)
}

/// The probes that are running, by rank, each on its own thread.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    /// The time until which a rank is waited for.
    ranks: Mutex<HashMap<usize, Deadline>>,
    /// Two flags: the coordinator is being probed, and it has answered since the last check.
    coordinator: Mutex<(bool, bool)>,
}

impl Probes {
    /// Returns `true` if the coordinator has answered since the last call.
    pub(crate) fn coordinator_has_answered(&self) -> bool {
        std::mem::take(&mut lock(&self.coordinator).1)
    }
}

/// Starts to probe a rank of another host, or continues. The probing ends two heartbeats after the last call.
/// If the rank does not answer within the silence limit, the coordinator is informed.
pub(crate) fn rank(session: &Arc<Session>, peer: usize) {
    let Some(limit) = session.silence_limit(peer) else { return };
    let waited_until = session.runtime.deadline(2 * HEARTBEAT);
    if lock(&session.probes.ranks).insert(peer, waited_until).is_some() {
        return;
    }
    let probing = session.clone();
    let probe = move || {
        if !is_reached(&probing, peer, limit) {
            probing.report_unreachable(peer);
        }
        lock(&probing.probes.ranks).remove(&peer);
    };
    if let Err(error) = session.runtime.spawn("dist-probe", probe) {
        tracing::debug!(%error, "no thread to probe a rank with");
        lock(&session.probes.ranks).remove(&peer);
    }
}

/// Probes the coordinator on another host until it answers.
pub(crate) fn coordinator(session: &Arc<Session>, address: SocketAddr) {
    if std::mem::replace(&mut lock(&session.probes.coordinator).0, true) {
        return;
    }
    let probing = session.clone();
    let probe = move || {
        let answered = answers_in_time(&probing, address);
        *lock(&probing.probes.coordinator) = (false, answered);
        probing.service_waker.notify();
    };
    if let Err(error) = session.runtime.spawn("dist-probe", probe) {
        tracing::debug!(%error, "no thread to probe the coordinator with");
        lock(&session.probes.coordinator).0 = false;
    }
}

/// Returns `true` if the coordinator answers a probe before it would count as lost.
fn answers_in_time(session: &Session, address: SocketAddr) -> bool {
    let deadline = session.runtime.deadline(session.liveness);
    while !is_over(session) && !session.runtime.expired(deadline) {
        if ask(session, address, COORDINATOR, session.liveness) == Answer::Admitted {
            return true;
        }
    }
    false
}

/// Probes a rank repeatedly. Returns `false` if it has not answered for too long, and `true` when no thread
/// waits for it any more.
fn is_reached(session: &Session, peer: usize, limit: Duration) -> bool {
    let (runtime, peer_info) = (&session.runtime, session.peer_infos[peer]);
    let Ok(number) = dial::number(peer) else { return true };
    let mut unanswered_since = None;
    loop {
        let is_awaited = lock(&session.probes.ranks).get(&peer).is_some_and(|until| !runtime.expired(*until));
        if !is_awaited || is_over(session) {
            return true;
        }
        let asked = runtime.now();
        match ask(session, peer_info.address, number, limit) {
            Answer::None => {
                let since = *unanswered_since.get_or_insert(asked);
                // The rank was already silent before the first of these attempts.
                if runtime.now().saturating_sub(since) + HEARTBEAT >= limit {
                    return false;
                }
            }
            Answer::Admitted | Answer::Refused => {
                unanswered_since = None;
                runtime.park(Some(runtime.deadline(2 * HEARTBEAT)));
            }
        }
    }
}

/// Returns `true` if this process has left the job, or the job has ended.
fn is_over(session: &Session) -> bool {
    session.closing.load(Ordering::Acquire) || session.abort_state.is_reached()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The probed process has answered.
    Admitted,
    /// The host of the process has answered.
    Refused,
    None,
}

/// Tries to open a connection.
fn ask(session: &Session, address: SocketAddr, to: u32, limit: Duration) -> Answer {
    let answer = try_to_connect(session, address, to, limit).unwrap_or_else(|error| {
        tracing::debug!(%address, %error, "cannot probe");
        Answer::None
    });
    if answer != Answer::Admitted {
        session.runtime.park(Some(session.runtime.deadline(RETRY)));
    }
    answer
}

fn try_to_connect(session: &Session, address: SocketAddr, to: u32, limit: Duration) -> Result<Answer> {
    let from = dial::number(session.rank.index())?;
    let identity = Identity { epoch: session.epoch, from, to, purpose: Purpose::Probe };
    let watch = session.connection_wait(session.runtime.deadline(attempt_limit(limit)));
    match dial::open(address, &session.key, identity, watch) {
        Ok(Opened::Proven(_)) => Ok(Answer::Admitted),
        Ok(Opened::HungUp { .. }) => Ok(Answer::Refused),
        Err(WaitError::Failed(error)) if dial::is_unreached(&error) => Ok(Answer::None),
        Err(WaitError::Failed(Error::Address { .. })) => Ok(Answer::Refused),
        Err(WaitError::Failed(error)) => Err(error),
        Err(_) => Ok(Answer::None),
    }
}
