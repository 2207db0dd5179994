//! What can go wrong in a collective.

use std::collections::TryReserveError;
use std::io;
use std::time::Duration;

use dist_transport::{Cause, Error as TransportError, Source};

use crate::history::HistoryDigest;
use crate::{Algorithm, Call, DType, Operation, ReduceKind, ReductionOrder};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_transport::error_enum! {
/// What can go wrong in a collective.
///
/// The variants up to [`Members`](Error::Members) are arguments that make no sense, of this rank or of all ranks
/// together: the communicator can be used on, if all ranks were refused alike. After any other error the job is aborted, and
/// the contents of a buffer that was passed for writing are unspecified.
///
/// No message repeats what its source says: print the whole chain of sources to see everything.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The root is not in the group.
    #[error("{operation}: root {root} is outside a group of {world_size}")]
    RootOutOfRange {
        /// What was called.
        operation: Operation,
        /// The root that was given.
        root: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The other end of a message is not in the group.
    #[error("rank {rank} is outside a group of {world_size}")]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The ranks of the group share no memory, so that none can read what others have in theirs. A communicator that was to
    /// open a window is gone.
    #[error("window: the ranks of the group share no memory")]
    NoWindow,
    /// The transport has other memory for the ranks of the group, or none, than when they found out what they share.
    #[error("the transport does not give the memory that the ranks of the group have agreed to share")]
    Sharing,
    /// There is less in a window.
    #[error("window: {elements} elements from {start} on are not among its {len}")]
    OutsideWindow {
        /// The first element that was asked for.
        start: usize,
        /// How many were.
        elements: usize,
        /// How many each rank has in the window.
        len: usize,
    },
    /// The long buffer is not as many times as long as the short one as there are ranks.
    #[error("{operation}: {whole} elements are not {world_size} ranks times {part} elements")]
    Parts {
        /// What was called.
        operation: Operation,
        /// Elements of the long buffer.
        whole: usize,
        /// Elements of the short buffer.
        part: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// A buffer cannot be divided among the ranks.
    #[error("{operation}: {elements} elements cannot be divided among {world_size} ranks")]
    Indivisible {
        /// What was called.
        operation: Operation,
        /// Elements of the buffer.
        elements: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The rows of an array, its dim 0, cannot be divided among the ranks.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: {rows} rows cannot be divided among {world_size} ranks")]
    IndivisibleRows {
        /// What was called.
        operation: Operation,
        /// The length of dim 0.
        rows: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// An array has not as many rows as the list of all ranks' rows says.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: the array has {got} rows, not {expected}")]
    Rows {
        /// What was called.
        operation: Operation,
        /// The rows that it should have.
        expected: usize,
        /// The length of dim 0.
        got: usize,
    },
    /// An array has no dims where rows are divided or put together.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: an array of no dims has no rows")]
    NoRows {
        /// What was called.
        operation: Operation,
    },
    /// There is no array of the output's shape.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: there is no array of the output's shape")]
    Shape {
        /// What was called.
        operation: Operation,
        /// What is wrong with the shape.
        source: ndarray::ShapeError,
    },
    /// The elements cannot be reduced like this.
    #[error("{op} is not for {dtype}: it needs {}", if .dtype.is_float() { "integers" } else { "floating-point numbers" })]
    Unreducible {
        /// What was asked for.
        op: ReduceKind,
        /// The type of the elements.
        dtype: DType,
    },
    /// This rank's weight is no weight.
    #[error("weighted_mean: the weight {weight:?} is not a finite number of at least zero")]
    Weight {
        /// The weight that was given.
        weight: f64,
    },
    /// The weights of all ranks make no mean. Every rank gets this error.
    #[error(
        "weighted_mean: the weights of all ranks add up to {total:?}, by which {dtype} cannot be divided"
    )]
    TotalWeight {
        /// Their sum.
        total: f64,
        /// The type of the elements.
        dtype: DType,
    },
    /// A list of counts does not have one count for each rank.
    #[error("{operation}: {counts} counts for {world_size} ranks")]
    Counts {
        /// What was called.
        operation: Operation,
        /// How many counts were given.
        counts: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// A buffer is not as long as other arguments say.
    #[error("{operation}: the {buffer} has {got} elements, not {expected}")]
    Length {
        /// What was called.
        operation: Operation,
        /// Which buffer.
        buffer: &'static str,
        /// Elements that it should have.
        expected: usize,
        /// Elements that it has.
        got: usize,
    },
    /// Two ranks disagree about what one sends the other. Every rank gets this error, before data moves.
    #[error("all_to_all: rank {from} sends {sent} elements to rank {to}, which expects {expected}")]
    Disagreement {
        /// The sending rank, by its number in the world.
        from: usize,
        /// The receiving rank, likewise.
        to: usize,
        /// Elements that are sent.
        sent: u64,
        /// Elements that are expected.
        expected: u64,
    },
    /// A value does not come across.
    #[cfg(feature = "serde")]
    #[error("the value of rank {rank} {}", problem.as_predicate())]
    Value {
        /// The rank whose value it is, by its number in the world.
        rank: usize,
        /// Why not.
        problem: crate::ValueProblem,
        /// What serde says, if this rank has asked it.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The algorithm that was asked for has no schedule for this world.
    #[error("{} by {algorithm} does not work for a group of {world_size}", .algorithm.operation())]
    Unsupported {
        /// What was asked for.
        algorithm: Algorithm,
        /// The size of the group.
        world_size: usize,
    },
    /// The algorithm that was asked for needs to know which ranks share a host.
    #[error("{} by {algorithm} needs to know which ranks share a host", .algorithm.operation())]
    NoHosts {
        /// What was asked for.
        algorithm: Algorithm,
    },
    /// The algorithm that was asked for needs memory that the ranks share, and these share none.
    #[error("{} by {algorithm} needs ranks that share memory", .algorithm.operation())]
    NotShared {
        /// What was asked for.
        algorithm: Algorithm,
    },
    /// The algorithm that was asked for reaches into memory that is not open to the other ranks like that: into what is the
    /// caller's own, to write it, or into ordinary memory where the system does not let them.
    #[error("{} by {algorithm} needs memory that the other ranks may reach into", .algorithm.operation())]
    NotOpen {
        /// What was asked for.
        algorithm: Algorithm,
    },
    /// The hosts are those of another group.
    #[error("these are the hosts of {ranks} ranks, not of {world_size}")]
    Hosts {
        /// Ranks of the hosts.
        ranks: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The algorithm that was asked for does not work with parts of different sizes.
    #[error("{} by {algorithm} needs parts of one size", .algorithm.operation())]
    NeedsEvenParts {
        /// What was asked for.
        algorithm: Algorithm,
    },
    /// There is no scan with this operation, whose result is no sum.
    #[error("there is no scan with {op}")]
    NoScan {
        /// What was asked for.
        op: ReduceKind,
    },
    /// The algorithm that was asked for reduces in another order than was asked for.
    #[error("{} by {algorithm} does not reduce in {order} order in a group of {world_size}", .algorithm.operation())]
    Order {
        /// The algorithm that was asked for.
        algorithm: Algorithm,
        /// The order that was asked for.
        order: ReductionOrder,
        /// The size of the group.
        world_size: usize,
    },
    /// The counts of all ranks are together more elements than any memory holds.
    #[error("{operation}: the counts are together more than any memory holds")]
    TotalCount {
        /// What was called.
        operation: Operation,
    },
    /// A list of ranks makes no group.
    #[error("a group cannot be made of these ranks")]
    Members(#[source] Source<TransportError>),
    /// There is no memory for an output, or for what passes through this rank. In an operation the others wait for this
    /// rank: the job is aborted.
    #[error("no memory for {elements} elements")]
    Memory {
        /// How many.
        elements: usize,
        /// What the allocator says.
        source: TryReserveError,
    },
    /// This rank got no memory that the ranks share ([`Communicator::alloc`](crate::Communicator::alloc)), and the others may
    /// not reach into what it has instead. It is told so, and the job is aborted, also where no rank got any: none knows
    /// of the others.
    #[error("{operation}: this rank's {bytes} bytes lie where no other rank can reach them")]
    OutOfReach {
        /// What was called.
        operation: Operation,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// Ranks that a monitored barrier waited for in vain. Every rank that came gets this error. If it is rank 0 of the
    /// group that is absent, it alone is named, because nobody else knows of the others.
    #[error("monitored_barrier: ranks {ranks:?} did not come")]
    Absent {
        /// Those that did not come, by their numbers in the world.
        ranks: Vec<usize>,
    },
    /// This rank came to a monitored barrier after the others had given it up.
    #[error("monitored_barrier: this rank came too late, the others had given it up")]
    Late,
    /// A peer is in another call. Nothing that it sent was used.
    #[error("rank {peer} is in {theirs}, this rank in {ours}{}", hint(("this rank", .ours), (&format!("rank {peer}"), .theirs)))]
    Mismatch {
        /// The peer that disagrees, by its number in the world.
        peer: usize,
        /// The call that this rank is in.
        ours: Box<Call>,
        /// The call that the peer is in.
        theirs: Box<Call>,
    },
    /// A communicator was [closed](crate::Communicator::close) before this rank had received everything that was sent to it.
    #[error("rank {peer} has sent a message that this rank never received: each send needs a recv of its receiver")]
    Unread {
        /// The rank that has sent it, by its number in the world.
        peer: usize,
    },
    /// The job was aborted, because of this rank or another.
    #[error("{call}: the job was aborted{}", because(*.rank, .cause, .theirs.as_deref(), *.reporter, .reported.as_deref()))]
    Aborted {
        /// The call that this rank was in.
        call: Box<Call>,
        /// The rank that is the cause, by its number in the world.
        rank: usize,
        /// What happened to it.
        cause: Cause,
        /// The call that it was in, if it is known.
        theirs: Option<Box<Call>>,
        /// The rank that noticed, by its number in the world.
        reporter: usize,
        /// The call that the reporter was in, if it was in one.
        reported: Option<Box<Call>>,
    },
    /// The transport failed, or the deadline passed.
    #[error("{call} failed")]
    Transport {
        /// The call that this rank was in.
        call: Box<Call>,
        /// What the transport says.
        source: Source<TransportError>,
    },
    /// The algorithm does not work with this transport.
    #[error("{call} cannot be done")]
    Schedule {
        /// The call that this rank was in.
        call: Box<Call>,
        /// What is wrong.
        source: Source<dist_algos::Error>,
    },
    /// The world could not be joined.
    #[error("cannot join the world")]
    Join(#[source] Source<TransportError>),
    /// There is no thread for operations that do not block.
    #[error("cannot start a thread for operations that do not block")]
    Worker(#[source] io::Error),
    /// The transport refused to be forked when the communicator was made, so that there is none for operations that
    /// do not block.
    #[error("this communicator has no transport for operations that do not block")]
    NoWorker(#[source] Source<TransportError>),
    /// An operation that does not block had not begun when its deadline passed: one that was started before it has a longer
    /// timeout and had not ended.
    #[error("the operation did not get its turn within {limit:?}: one started before it had not ended")]
    NotStarted {
        /// How long it could wait.
        limit: Duration,
    },
    /// An operation that does not block panicked, on this rank: the transport, or where it moves values, what encodes or
    /// decodes them.
    #[error("an operation that does not block panicked")]
    Panicked,
}
}

impl Error {
    /// Whether a deadline ran out, this rank's or another's.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Transport { source, .. } | Self::Join(source) => source.is_timeout(),
            Self::Aborted { cause, .. } => matches!(cause, Cause::TimedOut),
            Self::Absent { .. } | Self::Late | Self::NotStarted { .. } => true,
            _ => false,
        }
    }

    /// The one rank that the error is about, if it is about one, by its number in the world.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Mismatch { peer, .. } | Self::Unread { peer } => Some(*peer),
            Self::Aborted { rank, .. } => Some(*rank),
            #[cfg(feature = "serde")]
            Self::Value { rank, .. } => Some(*rank),
            Self::Absent { ranks } => <[usize; 1]>::try_from(ranks.as_slice()).ok().map(|[rank]| rank),
            Self::Transport { source, .. } | Self::Join(source) => source.peer(),
            _ => None,
        }
    }

    /// The call that this rank was in, if it was in one.
    pub fn call(&self) -> Option<&Call> {
        match self {
            Self::Mismatch { ours: call, .. }
            | Self::Aborted { call, .. }
            | Self::Transport { call, .. }
            | Self::Schedule { call, .. } => Some(call),
            _ => None,
        }
    }

    /// What a transport's error means in this call.
    pub(crate) fn in_call(call: Call, source: TransportError) -> Self {
        let ours = Box::new(call);
        match &source {
            TransportError::Mismatch { peer, ours: begun, theirs } => match Call::decode(theirs) {
                Some(theirs) => {
                    // Where announced calls differ, it is not the present one that is wrong.
                    let announced = Call::decode(begun).filter(|call| call.operation == Operation::Announced);
                    let ours = announced.map_or(ours, Box::new);
                    Self::Mismatch { peer: *peer, ours, theirs: Box::new(theirs) }
                }
                None => Self::Transport { call: ours, source: source.into() },
            },
            TransportError::Aborted(abort) => {
                let theirs = match &abort.cause {
                    Cause::Mismatch { theirs } => Call::decode(theirs),
                    _ => None,
                };
                Self::Aborted {
                    call: ours,
                    rank: abort.rank,
                    cause: abort.cause.clone(),
                    theirs: theirs.map(Box::new),
                    reporter: abort.reporter,
                    reported: Call::decode(&abort.call).map(Box::new),
                }
            }
            // Messages that look alike may differ in length: then they are calls with other counts.
            &TransportError::Length { peer, expected, got } if call.operation == Operation::Message => {
                let count = |bytes: u64| bytes / call.dtype.map_or(1, DType::size) as u64;
                let theirs = Box::new(Call { count: count(got), ..call });
                Self::Mismatch { peer, ours: Box::new(Call { count: count(expected), ..call }), theirs }
            }
            _ => Self::Transport { call: ours, source: source.into() },
        }
    }
}

/// The reason of an abort, as the end of a sentence.
fn because(
    rank: usize,
    cause: &Cause,
    theirs: Option<&Call>,
    reporter: usize,
    reported: Option<&Call>,
) -> String {
    match (theirs, reported) {
        _ if *cause == Cause::Unreachable => {
            let (lower, upper) = (rank.min(reporter), rank.max(reporter));
            format!(": rank {lower} and rank {upper} cannot reach each other")
        }
        // Which of the two is wrong, nobody knows.
        (Some(theirs), Some(reported)) => {
            let (named, noticed) = (format!("rank {rank}"), format!("rank {reporter}"));
            let hint = hint((&named, theirs), (&noticed, reported));
            format!(": rank {rank} in {theirs} and rank {reporter} in {reported} do not agree{hint}")
        }
        (Some(theirs), None) => format!(": rank {rank} was in {theirs} (reported by rank {reporter})"),
        // What it says of itself, or its end tells: its last call may be over.
        (None, Some(reported)) if rank == reporter => {
            format!(": rank {rank} {cause}; its last call was {reported}")
        }
        (None, None) if rank == reporter => format!(": rank {rank} {cause}"),
        (None, Some(reported)) => {
            format!(": rank {rank} {cause} (reported by rank {reporter} from {reported})")
        }
        (None, None) => format!(": rank {rank} {cause} (reported by rank {reporter})"),
    }
}

/// What two ranks have done differently, where their calls do not show it: digests of sizes that differ, or earlier calls.
fn hint((one, first): (&str, &Call), (other, second): (&str, &Call)) -> String {
    let same_sizes = Call { sizes: second.sizes, ..*first };
    if first != second && same_sizes == *second {
        return ": the sizes of parts, buffers, shapes or hosts differ".to_owned();
    }
    // Announced calls differ by their kind, and are not counted with others.
    if first.operation == Operation::Announced {
        return String::new();
    }
    let same_place = Call { sequence: second.sequence, past: second.past, ..*first };
    if first.sequence != second.sequence && same_place == *second {
        let [one_more, other_more] = [first, second].map(|call| call.sequence);
        let [by_one, by_other] = [first, second].map(|call| call.past.newest());
        return format!(
            ": {one} has called or started {one_more} collectives before it and {other} {other_more}; last, {one} {by_one} and {other} {by_other}"
        );
    }
    if first.number() == 0 || first.number() != second.number() || first.past == second.past {
        return String::new();
    }
    let Some((ago, by_one, by_other)) = first.past.newest_difference(second.past) else {
        let recent = HistoryDigest::RECENT;
        return format!(
            ": an earlier call differed, more than {recent} calls before, or on the communicator that this one was made of"
        );
    };
    let when = match ago {
        1 => "the call before this one".to_owned(),
        _ => format!("{ago} calls before this one"),
    };
    if by_one == by_other {
        return format!(
            ": an earlier call differed: {when}, both {by_one}, but with different arguments, such as the type, the count or the root"
        );
    }
    format!(": an earlier call differed: {when}, {one} {by_one} and {other} {by_other}")
}
