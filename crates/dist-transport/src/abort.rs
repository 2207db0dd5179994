//! The abort record: why a job ended early, the same on every rank.

#[cfg(any(feature = "tcp", feature = "sim"))]
use std::collections::HashSet;
use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use crate::Fingerprint;
#[cfg(any(feature = "tcp", feature = "sim"))]
use crate::error::NAMED_MAX;
use crate::error::{named_ranks, rounded};
use crate::runtime::Unparker;

/// The first failure of a job. The first writer wins, and every rank receives the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The kind of failure.
    pub cause: Cause,
    /// The rank that it happened to, by its number in the world.
    pub rank: usize,
    /// The rank that reported it.
    pub reporter: usize,
    /// The call that the reporter was in.
    pub call: Fingerprint,
}

/// The place at which a transport decides which abort record its job gets. It can be used from any thread.
pub trait AbortDecision: Send + Sync + fmt::Debug {
    /// Proposes a record, which may name other ranks than this one. Ranks are numbered as in the world. The first proposal
    /// that reaches the place of the decision stands, on all ranks.
    fn propose(&self, abort: Abort);

    /// Returns the record that stands, once this rank knows it.
    fn decided(&self) -> Option<Abort>;

    /// Wakes this thread when this rank learns of the record that stands.
    fn notify(&self, thread: Unparker);
}

/// A rank of a circle of waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CircularWait {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// The rank that it waits for.
    pub on: usize,
    /// The call that it waits in.
    pub call: Fingerprint,
}

impl fmt::Display for CircularWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} waits for rank {}", self.rank, self.on)
    }
}

#[cfg(any(feature = "tcp", feature = "sim"))]
impl Abort {
    /// Returns this record with a circle of waits, if the cause is a timeout and the reporter's wait leads into a circle.
    /// `waits` are the waits of all ranks, perhaps several of one rank. A circle may contain calls of several communicators. A
    /// circle that the record already lists is kept.
    #[must_use]
    pub(crate) fn with_circle(mut self, waits: &[CircularWait]) -> Self {
        let own = CircularWait { rank: self.reporter, on: self.rank, call: self.call };
        // Waits outside any call are not compared.
        if let Cause::TimedOut { waits: listed, count } = &mut self.cause
            && listed.is_empty()
            && own.call != Fingerprint::NONE
        {
            *listed = circle_from(own, waits);
            *count = listed.len();
            listed.truncate(NAMED_MAX);
        }
        self
    }

    /// Creates the record of a circle. Each rank in the list waits for the next one, and the last one for the first.
    pub(crate) fn circle(mut waits: Vec<CircularWait>, reporter: usize) -> Self {
        begin_with_lowest(&mut waits);
        let own = waits.iter().find(|wait| wait.rank == reporter).copied();
        let (rank, call) = own.map_or((reporter, Fingerprint::NONE), |wait| (wait.on, wait.call));
        let count = waits.len();
        waits.truncate(NAMED_MAX);
        Self { cause: Cause::CircularWait { waits, count }, rank, reporter, call }
    }

    /// Returns this record with the last rank in a chain of waits as its rank, if the cause is a timeout.
    /// `waits_for` returns the rank for which another one waits in a call. If the ranks wait in a cycle, the
    /// record does not change.
    #[must_use]
    pub(crate) fn followed(self, waits_for: impl Fn(usize, &Fingerprint) -> Option<usize>) -> Self {
        if !matches!(self.cause, Cause::TimedOut { .. }) || self.call == Fingerprint::NONE {
            return self;
        }
        let mut chain = vec![self.reporter, self.rank];
        while let Some(next) = chain.last().and_then(|&last| waits_for(last, &self.call)) {
            if chain.contains(&next) {
                return self;
            }
            chain.push(next);
        }
        Self { rank: chain[chain.len() - 1], ..self }
    }
}

/// Returns the waits of a circle that this wait is in or leads to, the lowest rank first. Returns none if there is no circle.
#[cfg(any(feature = "tcp", feature = "sim"))]
fn circle_from(first: CircularWait, waits: &[CircularWait]) -> Vec<CircularWait> {
    let (mut path, mut tried) = (vec![first], HashSet::new());
    while let Some(&CircularWait { on, .. }) = path.last() {
        if let Some(start) = path.iter().position(|wait| wait.rank == on) {
            let mut circle = path.split_off(start);
            begin_with_lowest(&mut circle);
            return circle;
        }
        let is_next =
            |wait: &CircularWait| wait.rank == on && wait.on != on && wait.call != Fingerprint::NONE;
        let mut next = waits.iter().enumerate().filter(|(_, wait)| is_next(wait));
        match next.find(|(index, _)| tried.insert(*index)) {
            Some((_, wait)) => path.push(*wait),
            None => drop(path.pop()),
        }
    }
    Vec::new()
}

/// Rotates a circle so that the wait of the lowest rank comes first.
#[cfg(any(feature = "tcp", feature = "sim"))]
fn begin_with_lowest(circle: &mut [CircularWait]) {
    let lowest = circle.iter().enumerate().min_by_key(|(_, wait)| wait.rank);
    let first = lowest.map_or(0, |(index, _)| index);
    circle.rotate_left(first);
}

/// Describes ranks that wait for each other.
fn circle(waits: &[CircularWait], count: usize) -> String {
    let all: Vec<_> = waits.iter().map(CircularWait::to_string).collect();
    let more = count.saturating_sub(waits.len());
    let more = if more > 0 { format!("; {more} more ranks wait") } else { String::new() };
    format!("{count} ranks wait for each other: {}{more}", all.join("; "))
}

impl Error for Abort {}

impl fmt::Display for Abort {
    /// If two calls differ, nobody knows which rank is wrong, so the message names both.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cause, rank, reporter, .. } = self;
        match cause {
            Cause::Mismatch { .. } => {
                let (lower, upper) = (rank.min(reporter), rank.max(reporter));
                write!(f, "ranks {lower} and {upper} are in different calls")
            }
            Cause::Length { expected, got } => {
                write!(f, "rank {rank} sends {got} bytes where rank {reporter} expects {expected}")
            }
            Cause::Unreachable { hosts } => {
                let host = |index: usize| {
                    hosts.map_or_else(String::new, |hosts| format!(" on host {}", hosts[index]))
                };
                let mut ends = [(*rank, host(0)), (*reporter, host(1))];
                ends.sort_by_key(|(rank, _)| *rank);
                let [lower, upper] = ends.map(|(rank, host)| format!("rank {rank}{host}"));
                write!(f, "{lower} and {upper} cannot reach each other")
            }
            Cause::CircularWait { waits, count } => f.write_str(&circle(waits, *count)),
            Cause::TimedOut { waits, count } if !waits.is_empty() => {
                let circle = circle(waits, *count);
                write!(f, "rank {rank} {cause} (reported by rank {reporter}); {circle}")
            }
            Cause::NotInTime { missing, count, .. } => {
                let missing = named_ranks(missing, *count);
                write!(f, "{missing} {cause} (reported by rank {reporter})")
            }
            _ if rank == reporter => write!(f, "rank {rank} {cause}"),
            _ => write!(f, "rank {rank} {cause} (reported by rank {reporter})"),
        }
    }
}

/// The failure of the rank that an [`Abort`] names, called “the rank” below.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The rank's process ended without leaving in order.
    #[error("died")]
    Died,
    /// The rank sent no heartbeat for too long, although its process may still run.
    #[error("stopped responding")]
    Silent,
    /// Nothing arrives any more from the rank's host: not from any of its ranks, or not from the coordinator, which runs
    /// there. Its power, its link or a switch may have failed.
    #[error("is on host {host}, from which nothing arrives any more{}", extent(*hosts, *ranks))]
    HostLost {
        /// The address by which the host was reached.
        host: IpAddr,
        /// The number of hosts from which nothing arrives. The abort names the first one.
        hosts: usize,
        /// The number of ranks on these hosts.
        ranks: usize,
    },
    /// The rank's process ended before it joined the world, as its launcher has seen.
    #[error("ended before it joined")]
    NotJoined,
    /// The rank did not join in time, so the reporter, which waited for it to join, has ended.
    #[error("did not join within {}", rounded(*limit))]
    NotInTime {
        /// The first of the ranks that did not join; the abort names the first one.
        missing: Vec<usize>,
        /// The number of ranks that did not join.
        count: usize,
        /// How long the reporter has waited.
        limit: Duration,
    },
    /// The rank and the reporter could not reach each other for too long, although the coordinator reaches both.
    /// Nobody knows which side of the network failed.
    #[error("and a peer cannot reach each other")]
    Unreachable {
        /// The addresses of the rank's host and of the reporter's. Hosts of a simulated network have no addresses.
        hosts: Option<[IpAddr; 2]>,
    },
    /// The rank closed its communicator while a peer was still waiting for it.
    #[error(
        "left without making a call in which a peer waits for it: a loop of another length, or an early return"
    )]
    Left,
    /// A peer waited for it until the deadline.
    #[error("was waited for until the deadline")]
    TimedOut {
        /// The waits of a circle, at most the first 16. The reporter's wait leads into this circle. Empty if no
        /// circle is known. The ranks wait in calls of several communicators, for room, or beside started operations, so
        /// another thread of one of them may have been late.
        waits: Vec<CircularWait>,
        /// The number of ranks in the circle.
        count: usize,
    },
    /// Ranks wait for each other's messages or signals in a circle, and none is on its way. None of them is more to blame than
    /// the others.
    #[error("waits in a circle with others")]
    CircularWait {
        /// The first waits of the circle, at most 16. Each rank waits for the next one.
        waits: Vec<CircularWait>,
        /// The number of ranks in the circle.
        count: usize,
    },
    /// The rank was in another call than the reporter: one of the two made a call that the other did not make.
    #[error("was in another call than a peer")]
    Mismatch {
        /// The call that the named rank was in; [`Abort::call`] is the reporter's.
        theirs: Fingerprint,
    },
    /// The rank was in the same call as the reporter and sent another number of bytes. Nobody knows which of the
    /// two is wrong.
    #[error("sent {got} bytes where {expected} were expected")]
    Length {
        /// Bytes that the reporter expected.
        expected: u64,
        /// Bytes that the named rank sent.
        got: u64,
    },
    /// The rank sent bytes that no correct peer sends.
    #[error("broke the protocol")]
    Protocol,
    /// The rank's program panicked.
    #[error("panicked")]
    Panicked,
    /// The rank's program gave up and reported it.
    #[error("gave up{}{why}", if why.is_empty() { "" } else { ": " })]
    GaveUp {
        /// The reason that it gave: one line of at most [`WHY_BYTES`](Self::WHY_BYTES) bytes, empty if it
        /// gave none.
        why: Box<str>,
    },
    /// The rank's process hosted the coordinator and ended.
    #[error("hosted the coordinator, which went away")]
    CoordinatorLost,
    /// The rank's launcher hosts the coordinator, and ended or stopped responding.
    #[error("lost its launcher, which hosts the coordinator")]
    LauncherLost,
}

/// Describes how much was lost, if it is more than one rank.
fn extent(hosts: usize, ranks: usize) -> String {
    match (hosts, ranks) {
        (..2, ..2) => String::new(),
        (..2, _) => format!(" ({ranks} ranks are there)"),
        _ => format!(" (nor from {} more; {ranks} ranks are there)", hosts - 1),
    }
}

impl Cause {
    /// The longest reason of [`GaveUp`](Self::GaveUp) that other ranks receive, in bytes.
    pub const WHY_BYTES: usize = 160;

    /// Creates the cause of a rank that was waited for until the deadline, without a circle of waits.
    pub const fn timed_out() -> Self {
        Self::TimedOut { waits: Vec::new(), count: 0 }
    }

    /// Returns the list of waits of a circle, if the cause has one.
    #[cfg(feature = "tcp")]
    pub(crate) const fn circle_mut(&mut self) -> Option<&mut Vec<CircularWait>> {
        match self {
            Self::TimedOut { waits, .. } | Self::CircularWait { waits, .. } => Some(waits),
            _ => None,
        }
    }

    /// Creates the cause of ranks that did not join within this time.
    #[cfg(feature = "tcp")]
    pub(crate) fn not_in_time(mut missing: Vec<usize>, limit: Duration) -> Self {
        let count = missing.len();
        missing.truncate(NAMED_MAX);
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        Self::NotInTime { missing, count, limit: Duration::from_millis(limit) }
    }

    /// Creates the cause for a rank whose program gave up. The reason is shortened to one line.
    pub fn gave_up(why: impl fmt::Display) -> Self {
        let mut why = why.to_string().replace(char::is_control, " ");
        if why.len() > Self::WHY_BYTES {
            why.truncate(why.floor_char_boundary(Self::WHY_BYTES - "…".len()));
            why.push('…');
        }
        Self::GaveUp { why: why.into() }
    }
}

/// Displays an error and all its sources on one line, separated by colons. A source whose text already ends
/// the line is not repeated.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.0.to_string();
        for error in std::iter::successors(self.0.source(), |&error| error.source()) {
            let error = error.to_string();
            if !line.ends_with(&error) {
                line = format!("{line}: {error}");
            }
        }
        f.write_str(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_short_line() {
        let told = |why: &str| Cause::gave_up(why).to_string();
        assert_eq!(told("no more data"), "gave up: no more data");
        assert_eq!(told("two\nlines\0"), "gave up: two lines ");
        assert_eq!(told(""), "gave up");
        let most = "é".repeat(Cause::WHY_BYTES / 2);
        assert_eq!(told(&most), format!("gave up: {most}"));
        let Cause::GaveUp { why } = Cause::gave_up(most + "!") else { panic!("it gave up") };
        assert!(why.len() <= Cause::WHY_BYTES && why.ends_with("é…"), "{why}");
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn ranks_that_did_not_join_are_named_before_the_one_that_waited() {
        let text = |missing: Vec<usize>| {
            let (rank, cause) = (missing[0], Cause::not_in_time(missing, Duration::from_millis(59_998)));
            Abort { cause, rank, reporter: 0, call: Fingerprint::NONE }.to_string()
        };
        assert_eq!(text(vec![2]), "rank 2 did not join within 60s (reported by rank 0)");
        assert_eq!(text(vec![1, 3]), "ranks [1, 3] did not join within 60s (reported by rank 0)");
        let many = text((1..99).collect());
        assert!(many.contains("15, 16] and 82 more did not join"), "{many}");
    }

    #[test]
    #[cfg(any(feature = "tcp", feature = "sim"))]
    fn a_timeout_lists_the_circle_that_its_reporter_waits_in_or_for() {
        const CALL: Fingerprint = Fingerprint([5; Fingerprint::SIZE]);
        let wait = |(rank, on): (usize, usize)| CircularWait { rank, on, call: CALL };
        let listed = |(reporter, rank): (usize, usize), waits: &[(usize, usize)]| {
            let abort = Abort { cause: Cause::timed_out(), rank, reporter, call: CALL };
            let waits: Vec<_> = waits.iter().copied().map(wait).collect();
            let Cause::TimedOut { waits, count } = abort.with_circle(&waits).cause else {
                panic!("it is late")
            };
            assert_eq!(waits.len(), count.min(NAMED_MAX));
            waits.iter().map(|wait| (wait.rank, wait.on)).collect::<Vec<_>>()
        };
        assert_eq!(listed((0, 1), &[]), []);
        assert_eq!(listed((0, 1), &[(1, 2), (2, 3)]), [], "a chain");
        assert_eq!(listed((1, 0), &[(0, 1)]), [(0, 1), (1, 0)], "no report of its own is needed");
        assert_eq!(listed((1, 2), &[(2, 0), (0, 1)]), [(0, 1), (1, 2), (2, 0)]);
        assert_eq!(listed((5, 2), &[(2, 1), (1, 2)]), [(1, 2), (2, 1)], "it waits for a rank of the circle");
        assert_eq!(listed((0, 1), &[(1, 3), (1, 2), (2, 0)]), [(0, 1), (1, 2), (2, 0)], "rank 1 waits twice");
        assert_eq!(listed((0, 1), &[(1, 1)]), [], "rank 1 waits no longer");
        let many: Vec<_> = (1..99).map(|rank| (rank, (rank + 1) % 99)).collect();
        assert_eq!(listed((0, 1), &many).len(), NAMED_MAX);
        let own = Abort { cause: Cause::timed_out(), rank: 1, reporter: 0, call: CALL };
        let outside = CircularWait { call: Fingerprint::NONE, ..wait((1, 0)) };
        assert_eq!(own.clone().with_circle(&[outside]), own, "it waits outside any call");
        let listed = own.clone().with_circle(&[wait((1, 0))]);
        assert_eq!(listed.clone().with_circle(&[]), listed, "another place of decision keeps the circle");
        let text = own.with_circle(&[wait((1, 0))]).to_string();
        let circle = "2 ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0";
        assert_eq!(text, format!("rank 1 was waited for until the deadline (reported by rank 0); {circle}"));
    }

    #[test]
    fn a_lost_host_is_named_with_its_ranks() {
        let text = |hosts, ranks| {
            let cause = Cause::HostLost { host: [10, 0, 0, 3].into(), hosts, ranks };
            Abort { cause, rank: 4, reporter: 4, call: Fingerprint::NONE }.to_string()
        };
        let lost = "rank 4 is on host 10.0.0.3, from which nothing arrives any more";
        assert_eq!(text(1, 1), lost);
        assert_eq!(text(1, 2), format!("{lost} (2 ranks are there)"));
        assert_eq!(text(2, 4), format!("{lost} (nor from 1 more; 4 ranks are there)"));
    }

    #[test]
    fn two_ranks_that_cannot_reach_each_other_are_named_with_their_hosts() {
        let text = |rank, reporter, hosts| {
            Abort { cause: Cause::Unreachable { hosts }, rank, reporter, call: Fingerprint::NONE }.to_string()
        };
        let [one, other] = [[10, 0, 0, 2].into(), [10, 0, 0, 4].into()];
        let expected = "rank 1 on host 10.0.0.2 and rank 3 on host 10.0.0.4 cannot reach each other";
        assert_eq!(text(1, 3, Some([one, other])), expected);
        assert_eq!(text(3, 1, Some([other, one])), expected);
        assert_eq!(text(3, 1, None), "rank 1 and rank 3 cannot reach each other");
    }

    #[test]
    fn an_error_and_all_that_led_to_it_are_one_line() {
        #[derive(Debug, thiserror::Error)]
        #[error("{0}")]
        struct Step(&'static str, #[source] Option<Box<Self>>);
        let first = Step("no such file", None);
        let said_already = Step("opening data: no such file", Some(Box::new(first)));
        let last = Step("step 3", Some(Box::new(said_already)));
        assert_eq!(Chain(&last).to_string(), "step 3: opening data: no such file");
    }
}
