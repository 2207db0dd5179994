//! Errors of this crate.

use std::io;
use std::time::Duration;

use crate::{Abort, Cause, CircularWait, Fingerprint, Version};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The operation during which an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activity {
    /// Joining the other ranks at the coordinator.
    Rendezvous,
    /// Opening a connection to a peer.
    Connect,
    /// Sending to a peer.
    Send,
    /// Receiving from a peer.
    Receive,
    /// Waiting until a receive of a peer matches a long message.
    Match,
}

impl Activity {
    /// Returns advice on how to set a longer time limit.
    const fn longer(self) -> &'static str {
        match self {
            Self::Rendezvous => "set a longer time with Config::with_timeout",
            Self::Connect | Self::Send | Self::Receive | Self::Match => "set a longer time with set_timeout",
        }
    }
}

impl std::fmt::Display for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Rendezvous => "rendezvous",
            Self::Connect => "connecting",
            Self::Send => "sending",
            Self::Receive => "receiving",
            Self::Match => "waiting for a receive that matches",
        })
    }
}

crate::error_enum! {
/// An error of a transport, of joining a job, or of an argument. Ranks have their numbers in the world, even if the
/// transport serves a smaller group. Only the rank of [`RankOutOfRange`](Self::RankOutOfRange) is the caller's number.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank that is not in the group was named.
    #[error("rank {rank} is outside a group of {world_size}")]
    RankOutOfRange {
        /// The rank that was asked for.
        rank: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The members of a new group are an empty list, or name a rank twice.
    #[error("{members:?} is no list of members: name at least one rank, and no rank twice")]
    Members {
        /// The list that was given.
        members: Vec<usize>,
    },
    /// A rank creates a group that it is not a member of.
    #[error("rank {rank} of the group is not among the members {members:?}: only members make such a group")]
    NotAMember {
        /// This rank's number in the group.
        rank: usize,
        /// The list that was given.
        members: Vec<usize>,
    },
    /// Two ranks have made a group by the same call and named different members, or the same members in
    /// another order.
    #[error("rank {rank} made a group of ranks {} where rank {peer} made one of {}: name the same list", first_of(ours), first_of(theirs))]
    OtherMembers {
        /// This rank.
        rank: usize,
        /// The members that it named.
        ours: Vec<usize>,
        /// The other rank.
        peer: usize,
        /// The members that the other rank named, or the first of them if they are many.
        theirs: Vec<usize>,
    },
    /// Only shared memory is allowed, and this peer cannot share it.
    #[error(
        "rank {peer} shares no memory with this rank, and the medium shm allows nothing else: set DIST_TRANSPORT=auto, \
         which uses TCP for this peer"
    )]
    NotShared {
        /// The peer.
        peer: usize,
    },
    /// A peer did not send, receive or signal before the deadline.
    #[error(
        "{activity}: rank {peer} did not take part within {} (waited {}); if it only needs longer, {} on every rank",
        rounded(*limit), rounded(*elapsed), activity.longer()
    )]
    Timeout {
        /// The operation that failed.
        activity: Activity,
        /// The peer that was waited for.
        peer: usize,
        /// The time since the call began.
        elapsed: Duration,
        /// The timeout of the call.
        limit: Duration,
        /// The waits of a circle, as in [`Cause::TimedOut`]. The message does not list them, because only the layer above
        /// can decode their calls.
        waits: Vec<CircularWait>,
        /// The number of ranks in the circle.
        count: usize,
    },
    /// Some ranks never joined the rendezvous, or are still in the previous world.
    #[error(
        "rendezvous: {} did not join within {}{}: start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; \
         if it only needs longer, {} on every rank",
        named_ranks(missing, missing.len()), rounded(*limit), turned_away(*refused), Activity::Rendezvous.longer()
    )]
    Missing {
        /// The ranks that did not join.
        missing: Vec<usize>,
        /// The number of connections that failed to authenticate.
        refused: u64,
        /// The timeout of the rendezvous.
        limit: Duration,
    },
    /// The peer is in another call.
    #[error("rank {peer} is in another call: all ranks must make the same calls in the same order")]
    Mismatch {
        /// The peer that disagrees.
        peer: usize,
        /// The call that this rank is in.
        ours: Fingerprint,
        /// The call that the peer is in.
        theirs: Fingerprint,
    },
    /// The peer has not exposed this range, or does not have this memory area.
    #[error("rank {peer} has not exposed bytes {start} to {end} of its memory in this call")]
    OutOfReach {
        /// The peer that owns the memory.
        peer: usize,
        /// The start of the range.
        start: usize,
        /// The end of the range.
        end: usize,
    },
    /// The peer is in the same call but sends another number of bytes.
    #[error("rank {peer} sends {got} bytes where {expected} are expected")]
    Length {
        /// The peer that disagrees.
        peer: usize,
        /// Bytes that this rank expects.
        expected: u64,
        /// Bytes that the peer sends.
        got: u64,
    },
    /// The peer sent bytes that are not a message of this protocol.
    #[error("the connection with rank {peer} delivered bytes that are no message of this library")]
    Garbage {
        /// The peer that sent it.
        peer: usize,
    },
    /// The peer closed the connection, in order or by dying, and no report of its death has arrived.
    #[error(
        "{activity}: rank {peer} closed the connection without making this call: a loop of another length, an early \
         return, or an error that its own output tells"
    )]
    Closed {
        /// The operation that failed.
        activity: Activity,
        /// The peer that left.
        peer: usize,
    },
    /// The job was aborted. Every rank gets the same record, which is the source.
    #[error("the job was aborted")]
    Aborted(#[source] Abort),
    /// Mutual authentication of a new connection failed: the other side has another secret, job or epoch, or
    /// is no rank of this library.
    #[error(
        "{activity}: {address} and this process do not share a secret, a job and an epoch: give all ranks the same \
         DIST_SECRET_FILE and DIST_JOB_ID, and start them together"
    )]
    Refused {
        /// The operation that failed.
        activity: Activity,
        /// The other side's address.
        address: String,
    },
    /// The other side of a new connection runs another version of this library. All processes of a job,
    /// including `distctl run`, must have the same version except for the patch number.
    #[error("{activity}: {address} runs dist {theirs}, this process {ours}: build both with one version")]
    Version {
        /// The operation that failed.
        activity: Activity,
        /// The other side's address.
        address: String,
        /// This process's version.
        ours: Version,
        /// The version of the other process.
        theirs: Version,
    },
    /// The process at the other end of a new connection belongs to another user, or the system does not
    /// report its user. Without a secret, only processes of one user belong to a job.
    #[error(
        "{activity}: {address} belongs to {}, and without a secret a job is of one user: set DIST_SECRET_FILE on \
         every rank", owner(*user)
    )]
    OtherUser {
        /// The operation that failed.
        activity: Activity,
        /// The other side's address.
        address: String,
        /// The other user's number; `None` if the system does not say.
        user: Option<u32>,
        /// The system's error, if it names no user.
        source: Option<io::Error>,
    },
    /// The other side belongs to the job, but its port is flooded with connections and it dropped this
    /// process's handshakes.
    #[error(
        "{activity}: the port {address} is flooded by unauthenticated connections: {dropped} handshakes of this \
         process were dropped within {limit:?}; let a firewall keep other hosts from the port"
    )]
    Flooded {
        /// The operation that failed.
        activity: Activity,
        /// The other side's address.
        address: String,
        /// The number of handshakes that the other side has dropped.
        dropped: u32,
        /// The time for which it was tried.
        limit: Duration,
    },
    /// The limit of open files is too low for the size of the world.
    #[error(
        "a rank of {world_size} needs {needed} open files, and this process may have {limit}: raise the limit, as by \
         ulimit -n {needed}"
    )]
    FilesLimit {
        /// The number of files that this process may have open.
        limit: u64,
        /// The number of files that it needs.
        needed: u64,
        /// The size of the world.
        world_size: usize,
    },
    /// Two processes claim the same rank.
    #[error("another process has already joined as rank {rank}: give each process a RANK of its own")]
    DuplicateRank {
        /// The rank that both claim.
        rank: usize,
    },
    /// This process and the coordinator disagree about the size of the world.
    #[error("this process expects a world of {ours}, the coordinator one of {theirs}: set the same WORLD_SIZE on every rank")]
    WorldSize {
        /// The size that this process expects.
        ours: usize,
        /// The size that the coordinator expects.
        theirs: usize,
    },
    /// No coordinator answered at its address.
    #[error("rendezvous: no coordinator answered at {address} within {limit:?}: check that rank 0 or the launcher, which hosts it, runs at this address")]
    NoCoordinator {
        /// The address as it was given.
        address: String,
        /// The time for which it was tried.
        limit: Duration,
        /// The system's error.
        source: io::Error,
    },
    /// A rank has joined the rendezvous that expects a world of another size, so the rendezvous cannot
    /// complete.
    #[error("rank {rank} expects a world of {theirs}, this process one of {ours}: set the same WORLD_SIZE on every rank")]
    OtherWorldSize {
        /// The rank that has come.
        rank: usize,
        /// The size that this process expects.
        ours: usize,
        /// The size that the rank expects.
        theirs: usize,
    },
    /// Another rank uses another number of sockets for each peer.
    #[error(
        "rank {rank} uses {theirs} sockets per peer, this process {ours}: set the same DIST_SOCKETS_PER_PEER on every rank"
    )]
    OtherSocketsPerPeer {
        /// The first rank with another number.
        rank: usize,
        /// The number that this process uses.
        ours: u16,
        /// The number that the rank uses.
        theirs: u16,
    },
    /// Listening beyond loopback needs a secret.
    #[error("listening on {address}, beyond loopback, needs a secret: set DIST_SECRET_FILE on every rank")]
    SecretNeeded {
        /// The address to be listened on.
        address: String,
    },
    /// A setting is missing from the environment.
    #[error("{name} is not set: {}", how_to_set(name))]
    MissingVariable {
        /// The environment variable.
        name: &'static str,
    },
    /// A variable of the environment has an invalid value.
    #[error("{name}={value:?} is not {expected}")]
    InvalidVariable {
        /// The environment variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// A description of valid values.
        expected: &'static str,
    },
    /// Another process listens on the port where rank 0 should host the coordinator.
    #[error(
        "the port {address}, where rank 0 hosts the coordinator, is in use: set MASTER_PORT, or under torchrun DIST_PORT, to \
         a free port on every rank"
    )]
    PortInUse {
        /// The address to be listened on.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The coordinator's address is malformed.
    #[error(
        "the coordinator's address {address:?} is not a host and a port, as in node0:29500, 10.0.0.1:29500 or \
         [fe80::1%eth0]:29500"
    )]
    InvalidAddress {
        /// The address that was given.
        address: String,
    },
    /// The secret cannot be read, or other users can read it.
    #[error("the secret in {origin} cannot be used: {reason}")]
    Secret {
        /// The variable or file that names it.
        origin: String,
        /// The reason.
        reason: &'static str,
        /// The system's error, if there is one.
        source: Option<io::Error>,
    },
    /// An address cannot be resolved, listened on or connected to.
    #[error("{activity}: cannot {action} {address}")]
    Address {
        /// The operation that failed.
        activity: Activity,
        /// The failed action: `listen on`, `connect to`, `resolve`, `share memory with`.
        action: &'static str,
        /// The address as it was given.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// A system call failed in the middle of a message.
    #[error("{activity}: the connection with rank {peer} failed")]
    Io {
        /// The operation that failed.
        activity: Activity,
        /// The peer at the other end.
        peer: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The system lacks a resource for this process, whatever the peer: for example memory for a message or a
    /// wait.
    #[error("{activity}: a system call of this process failed")]
    System {
        /// The operation that failed.
        activity: Activity,
        /// The system's error.
        source: io::Error,
    },
    /// The system has no thread, socket or descriptor left for this process.
    #[error("this process cannot create a {what}")]
    Resources {
        /// The resource.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
}

impl Error {
    /// Returns `true` if a deadline passed.
    pub const fn is_timeout(&self) -> bool {
        matches!(
            self,
            Self::Timeout { .. }
                | Self::Missing { .. }
                | Self::NoCoordinator { .. }
                | Self::Flooded { .. }
                | Self::Aborted(Abort { cause: Cause::NotInTime { .. }, .. })
        )
    }

    /// Returns `true` if the call failed because this process or its system has no more file descriptors.
    #[cfg(feature = "tcp")]
    pub(crate) fn is_out_of_files(&self) -> bool {
        match self {
            Self::Address { source, .. } | Self::System { source, .. } | Self::Resources { source, .. } => {
                crate::link::socket::is_out_of_files(source)
            }
            _ => false,
        }
    }

    /// Returns the peer that the error names, for renumbering, unless the peer is part of an abort.
    #[cfg(feature = "tcp")]
    pub(crate) const fn peer_mut(&mut self) -> Option<&mut usize> {
        match self {
            Self::Timeout { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::Length { peer, .. }
            | Self::OutOfReach { peer, .. }
            | Self::Garbage { peer }
            | Self::NotShared { peer }
            | Self::Closed { peer, .. }
            | Self::Io { peer, .. } => Some(peer),
            Self::OtherWorldSize { rank, .. } | Self::OtherSocketsPerPeer { rank, .. } => Some(rank),
            _ => None,
        }
    }

    /// Returns the peer that the error is about, if it is about one, by its number in the world.
    pub const fn peer(&self) -> Option<usize> {
        match self {
            Self::Timeout { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::Length { peer, .. }
            | Self::OutOfReach { peer, .. }
            | Self::Garbage { peer }
            | Self::NotShared { peer }
            | Self::OtherMembers { peer, .. }
            | Self::Closed { peer, .. }
            | Self::Io { peer, .. } => Some(*peer),
            Self::OtherWorldSize { rank, .. } | Self::OtherSocketsPerPeer { rank, .. } => Some(*rank),
            Self::Aborted(Abort { cause: Cause::CircularWait { .. }, .. }) => None,
            Self::Aborted(abort) => Some(abort.rank),
            _ => None,
        }
    }
}

/// The most ranks that a message names.
pub(crate) const NAMED_MAX: usize = 16;

/// Returns the first ones of `count` ranks as the subject of a sentence.
pub(crate) fn named_ranks(ranks: &[usize], count: usize) -> String {
    match ranks {
        [rank] if count == 1 => format!("rank {rank}"),
        _ => format!("ranks {}", first_of_many(ranks, count)),
    }
}

/// Returns a time with at most three digits.
pub(crate) fn rounded(time: Duration) -> String {
    let time = time.as_nanos();
    let unit = 10_u128.pow(time.checked_ilog10().unwrap_or(0).saturating_sub(2));
    let nanoseconds = (time + unit / 2) / unit * unit;
    u64::try_from(nanoseconds)
        .map_or_else(|_| "forever".to_owned(), |n| format!("{:?}", Duration::from_nanos(n)))
}

/// Formats at most 16 ranks, followed by the number of the others.
fn first_of(ranks: &[usize]) -> String {
    first_of_many(ranks, ranks.len())
}

/// Returns the first ranks of a list as text, followed by the number of further ranks if there are more.
pub(crate) fn first_of_many(ranks: &[usize], count: usize) -> String {
    let named = &ranks[..ranks.len().min(NAMED_MAX)];
    match count.saturating_sub(named.len()) {
        0 => format!("{named:?}"),
        more => format!("{named:?} and {more} more"),
    }
}

pub(crate) fn turned_away(connections: u64) -> String {
    const FLOOD: u64 = 1000;
    match connections {
        0 => String::new(),
        1..FLOOD => format!(" ({connections} connections did not prove that they belong to this job)"),
        _ => format!(
            " (the port is flooded: {connections} connections did not prove that they belong to this job)"
        ),
    }
}

fn owner(user: Option<u32>) -> String {
    user.map_or_else(|| "an unknown user".to_owned(), |user| format!("user {user}"))
}

/// Says how a launcher sets a variable.
fn how_to_set(name: &str) -> &'static str {
    match name {
        "MASTER_ADDR" | "MASTER_PORT" => {
            "it is the address of rank 0's machine, or a port that is free there, the same on all ranks, as in \
             `mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500` (Open MPI), `mpiexec -genv MASTER_ADDR node0 -genv \
             MASTER_PORT 29500` (MPICH) or `export` before srun; distctl run and torchrun set it. A program that calls \
             dist::init and is built with the feature mpi of dist needs none: it uses MPI under mpirun and mpiexec, and \
             anywhere with DIST_TRANSPORT=mpi"
        }
        "RANK" | "WORLD_SIZE" => {
            "both are needed, on every rank: start the program with distctl run or torchrun, or give a Config"
        }
        _ => "start the program with distctl run or torchrun, or give a Config",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_at_most_three_digits() {
        let text = |nanoseconds| rounded(Duration::from_nanos(nanoseconds));
        assert_eq!(text(60_000_204_515), "60s");
        assert_eq!(text(1_234_567_890), "1.23s");
        assert_eq!(text(999_600_000), "1s");
        assert_eq!([text(1_500_000), text(12), text(0)], ["1.5ms", "12ns", "0ns"]);
        assert_eq!(rounded(Duration::MAX), "forever");
    }

    #[test]
    fn a_timeout_names_the_setting_for_more_time() {
        let late = |activity| {
            let (elapsed, limit) = (Duration::from_nanos(60_000_204_515), Duration::from_secs(60));
            Error::Timeout { activity, peer: 2, elapsed, limit, waits: Vec::new(), count: 0 }.to_string()
        };
        let expected = "receiving: rank 2 did not take part within 60s (waited 60s); \
                        if it only needs longer, set a longer time with set_timeout on every rank";
        assert_eq!(late(Activity::Receive), expected);
        assert!(late(Activity::Rendezvous).contains("Config::with_timeout"));
    }

    #[test]
    fn a_missing_address_is_an_error_with_the_option_of_the_launcher() {
        let message = Error::MissingVariable { name: "MASTER_ADDR" }.to_string();
        assert!(message.starts_with("MASTER_ADDR is not set: "), "{message}");
        assert!(message.contains("mpirun -x MASTER_ADDR=node0"), "{message}");
        assert!(message.ends_with("with DIST_TRANSPORT=mpi") && message.contains("feature mpi"), "{message}");
    }

    #[test]
    fn a_list_of_missing_ranks_is_short() {
        let message = |missing: std::ops::Range<usize>, refused| {
            Error::Missing { missing: missing.collect(), refused, limit: Duration::from_secs(4) }.to_string()
        };
        let two = message(1..3, 0);
        assert!(
            two.starts_with("rendezvous: ranks [1, 2] did not join within 4s: start every rank"),
            "{two}"
        );
        let one = message(2..3, 0);
        assert!(one.starts_with("rendezvous: rank 2 did not join within 4s: "), "{one}");
        assert!(one.ends_with("set a longer time with Config::with_timeout on every rank"), "{one}");
        let many = message(0..70_000, 3);
        assert!(
            many.contains("14, 15] and 69984 more did not join within 4s (3 connections did not prove"),
            "{many}"
        );
    }
}
