//! Errors of this crate.

use std::io;
use std::time::Duration;

use crate::{Abort, Fingerprint, Version};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a rank was doing when an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activity {
    /// Meeting the other ranks at the coordinator.
    Rendezvous,
    /// Opening a connection to a peer.
    Connect,
    /// Sending to a peer.
    Send,
    /// Receiving from a peer.
    Receive,
}

impl std::fmt::Display for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Rendezvous => "rendezvous",
            Self::Connect => "connecting",
            Self::Send => "sending",
            Self::Receive => "receiving",
        })
    }
}

crate::error_enum! {
/// Errors between ranks. Ranks have their numbers in the world, whichever group the failing transport serves.
/// A number that was refused because no such rank exists is given as the caller gave it.
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
    /// The members of a new group name a rank twice, or nobody.
    #[error("{members:?} is no list of members: it must name at least one rank, and none twice")]
    Members {
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
        "rank {peer} shares no memory with this rank, and shm allows nothing else: auto goes by TCP there"
    )]
    NotShared {
        /// The peer.
        peer: usize,
    },
    /// A peer did not do its part before the deadline.
    #[error("{activity}: rank {peer} did not do its part within {limit:?} (waited {elapsed:?})")]
    Timeout {
        /// What was being done.
        activity: Activity,
        /// The peer that was waited for.
        peer: usize,
        /// How long the call lasted.
        elapsed: Duration,
        /// How long it was allowed to last.
        limit: Duration,
    },
    /// Some ranks never joined the rendezvous, or are still in the previous world.
    #[error("rendezvous: ranks {} did not come within {limit:?}{}", first_of(missing), turned_away(*refused))]
    Missing {
        /// The ranks that did not join.
        missing: Vec<usize>,
        /// How many connections failed to authenticate.
        refused: u64,
        /// How long the rendezvous was allowed to last.
        limit: Duration,
    },
    /// The peer is in another call.
    #[error("rank {peer} is in another call")]
    Mismatch {
        /// The peer that disagrees.
        peer: usize,
        /// The call that this rank is in.
        ours: Fingerprint,
        /// The call that the peer is in.
        theirs: Fingerprint,
    },
    /// The peer has not exposed this range, or has no such place.
    #[error("rank {peer} has exposed no bytes {start} to {end}")]
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
    #[error("rank {peer} does not speak this protocol")]
    Garbage {
        /// The peer that sent it.
        peer: usize,
    },
    /// The peer closed the connection, in order or by dying, and no report of its death has arrived.
    #[error("{activity}: rank {peer} closed the connection")]
    Closed {
        /// What was being done.
        activity: Activity,
        /// The peer that left.
        peer: usize,
    },
    /// The job was aborted; every rank gets the same record.
    #[error("the job was aborted")]
    Aborted(#[source] Abort),
    /// Mutual authentication of a new connection failed: the other side has another secret, job or epoch, or
    /// is no rank of this library.
    #[error(
        "{activity}: {address} and this process do not share a secret, a job and an epoch: DIST_SECRET_FILE and \
         DIST_JOB_ID are to be the same for all ranks, and all of one start of the job"
    )]
    Refused {
        /// What was being done.
        activity: Activity,
        /// The other side's address.
        address: String,
    },
    /// The other side of a new connection runs another version of this library. All processes of a job,
    /// including `distctl run`, must have the same version except for the patch number.
    #[error("{activity}: {address} runs dist {theirs}, this process {ours}: build both with one version")]
    Version {
        /// What was being done.
        activity: Activity,
        /// The other side's address.
        address: String,
        /// This process's version.
        ours: Version,
        /// The other's.
        theirs: Version,
    },
    /// The process at the other end of a new connection belongs to another user, or the system does not say
    /// to whom. Without a secret, only processes of one user belong to a job.
    #[error(
        "{activity}: {address} belongs to {}, and without a secret a job is of one user: set DIST_SECRET_FILE on \
         every rank", owner(*user)
    )]
    OtherUser {
        /// What was being done.
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
         process were dropped within {limit:?}"
    )]
    Flooded {
        /// What was being done.
        activity: Activity,
        /// The other side's address.
        address: String,
        /// How many handshakes the other side has dropped.
        dropped: u32,
        /// How long it was tried.
        limit: Duration,
    },
    /// The limit of open files is too low for the size of the world.
    #[error(
        "a rank of {world_size} needs {needed} open files, and this process may have {limit}: raise the limit, as by \
         ulimit -n {needed}"
    )]
    FilesLimit {
        /// How many files this process may have open.
        limit: u64,
        /// How many it needs.
        needed: u64,
        /// The size of the world.
        world_size: usize,
    },
    /// Two processes claim the same rank.
    #[error("another process has already joined as rank {rank}")]
    DuplicateRank {
        /// The rank that both claim.
        rank: usize,
    },
    /// This process and the coordinator disagree about the size of the world.
    #[error("this process expects a world of {ours}, the coordinator one of {theirs}")]
    WorldSize {
        /// What this process was told.
        ours: usize,
        /// What the coordinator was told.
        theirs: usize,
    },
    /// No coordinator answered at its address.
    #[error("rendezvous: no coordinator at {address} within {limit:?}; rank 0 or the launcher hosts it")]
    NoCoordinator {
        /// The address as it was given.
        address: String,
        /// How long it was looked for.
        limit: Duration,
        /// What the system said last.
        source: io::Error,
    },
    /// A rank has joined the rendezvous that expects a world of another size, so the rendezvous cannot
    /// complete.
    #[error("rank {rank} expects a world of {theirs}, this process one of {ours}")]
    OtherWorldSize {
        /// The rank that has come.
        rank: usize,
        /// What this process was told.
        ours: usize,
        /// What the rank was told.
        theirs: usize,
    },
    /// Listening beyond loopback needs a secret.
    #[error("listening on {address}, beyond loopback, needs a secret: set DIST_SECRET_FILE on every rank")]
    SecretNeeded {
        /// The address to be listened on.
        address: String,
    },
    /// A setting is missing from the environment.
    #[error("{name} is not set: start the program with distctl run or torchrun, or give a Config")]
    MissingVariable {
        /// The environment variable.
        name: &'static str,
    },
    /// A variable of the environment has an invalid value.
    #[error("{name}={value:?} is not {expected}")]
    InvalidVariable {
        /// The environment variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
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
        /// What the system says.
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
        /// Where it should be.
        origin: String,
        /// Why not.
        reason: &'static str,
        /// What the system says, if it said anything.
        source: Option<io::Error>,
    },
    /// An address cannot be resolved, listened on or connected to.
    #[error("{activity}: cannot {action} {address}")]
    Address {
        /// What was being done.
        activity: Activity,
        /// What was tried: `listen on`, `connect to`, `resolve`, `share memory with`.
        action: &'static str,
        /// The address as it was given.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// A system call failed in the middle of a message.
    #[error("{activity}: the connection with rank {peer} failed")]
    Io {
        /// What was being done.
        activity: Activity,
        /// The peer at the other end.
        peer: usize,
        /// What the system says.
        source: io::Error,
    },
    /// The system lacks a resource for this process, whatever the peer: for example memory for a message or a
    /// wait.
    #[error("{activity}: the system fails this process")]
    System {
        /// What was being done.
        activity: Activity,
        /// What the system says.
        source: io::Error,
    },
    /// The system has no thread, socket or descriptor left for this process.
    #[error("cannot make a {what}")]
    Resources {
        /// What could not be made.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
}
}

impl Error {
    /// Returns `true` if a deadline passed.
    pub const fn is_timeout(&self) -> bool {
        matches!(
            self,
            Self::Timeout { .. } | Self::Missing { .. } | Self::NoCoordinator { .. } | Self::Flooded { .. }
        )
    }

    /// Returns `true` if this process, or its system, may open no more files.
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
    #[cfg(all(feature = "shm", target_os = "linux"))]
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
            Self::OtherWorldSize { rank, .. } => Some(rank),
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
            Self::OtherWorldSize { rank, .. } => Some(*rank),
            Self::Aborted(abort) => Some(abort.rank),
            _ => None,
        }
    }
}

/// Formats at most 16 ranks, followed by the number of the others.
fn first_of(ranks: &[usize]) -> String {
    first_of_many(ranks, ranks.len())
}

/// Returns the first ones of a list of ranks as text, and how many more there are if there are `count` in all.
pub(crate) fn first_of_many(ranks: &[usize], count: usize) -> String {
    const NAMED_MAX: usize = 16;
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
    user.map_or_else(|| "nobody knows which user".to_owned(), |user| format!("user {user}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_missing_ranks_is_short() {
        let message = |missing: std::ops::Range<usize>, refused| {
            Error::Missing { missing: missing.collect(), refused, limit: Duration::from_secs(4) }.to_string()
        };
        assert_eq!(message(1..3, 0), "rendezvous: ranks [1, 2] did not come within 4s");
        let many = message(0..70_000, 3);
        assert!(
            many.contains("14, 15] and 69984 more did not come within 4s (3 connections did not prove"),
            "{many}"
        );
    }
}
