//! Errors of collectives, and the descriptions of calls that they contain.

use std::collections::{HashSet, TryReserveError};
use std::fmt;
use std::io;
use std::time::Duration;

pub use crate::call::Call;
pub use crate::reduce_op::ReduceKind;
use dist_algos::Algorithm;
/// The error of the runner of algorithms, in [`Error::Schedule`].
#[doc(no_inline)]
pub use dist_algos::Error as AlgorithmError;
/// The error of a transport, as a source of errors of this crate.
#[doc(no_inline)]
pub use dist_transport::Error as TransportError;
use dist_transport::{Abort, Cause, CircularWait, ErrorSource, Fingerprint, StoreError};

use crate::history::HistoryDigest;
use crate::{DType, ElementType, Operation, ReductionOrder};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_transport::error_enum! {
/// An error of a collective.
///
/// The variants up to [`Members`](Error::Members) are invalid arguments, of this rank or of all ranks together. If
/// all ranks were refused alike, the communicator can still be used. After any other error the job is aborted, and
/// the contents of a buffer that was passed for writing are unspecified.
///
/// No message repeats its source. Print the whole chain of sources, as [`Chain`](crate::transport::Chain) does.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The root is not in the group.
    #[error("{operation}: root {root} is outside a group of {world_size}")]
    RootOutOfRange {
        /// The operation.
        operation: Operation,
        /// The given root.
        root: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The peer of a message is not in the group.
    #[error("rank {rank} is outside a group of {world_size}")]
    RankOutOfRange {
        /// The given rank.
        rank: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// A rank sent a request for memory that is outside of a window, or in the wrong epoch.
    #[error("window: rank {from} sent an invalid request: check that all ranks run the same version")]
    Request {
        /// The rank, by its number in the group.
        from: usize,
    },
    /// The memory of a rank is not mapped in this process.
    #[error("window: the memory of rank {rank} is not mapped here: copy it with Window::read, or allocate it with Communicator::alloc if all ranks share a host")]
    NotMapped {
        /// The rank.
        rank: usize,
    },
    /// The layout of the transport's shared memory differs from the layout that the ranks of the group had agreed on.
    #[error("the transport's shared memory has another layout than the ranks of the group have agreed on")]
    Sharing,
    /// The transport has no collectives of a library any more, although it had them when the call was compiled.
    #[error("the transport has no collectives of a library any more: it must offer them as long as it exists")]
    Native,
    /// The read is outside of the window.
    #[error("window: {elements} elements from {start} on are not among its {len}")]
    OutsideWindow {
        /// The first requested element.
        start: usize,
        /// The number of requested elements.
        elements: usize,
        /// The number of elements that each rank has in the window.
        len: usize,
    },
    /// The blocks of a strided view overlap, or are not inside the slice.
    #[error("{blocks} blocks of {block_len} elements, each {stride} after the one before, overlap or are not inside a slice of {len} elements")]
    Strided {
        /// The number of blocks.
        blocks: usize,
        /// The number of elements of a block.
        block_len: usize,
        /// The distance between the starts of two blocks.
        stride: usize,
        /// The number of elements of the slice.
        len: usize,
    },
    /// The length of the long buffer is not the world size times the length of the short one.
    #[error("{operation}: the long buffer has {whole} elements, not {world_size} ranks times the {part} elements of the short one")]
    Parts {
        /// The operation.
        operation: Operation,
        /// Elements of the long buffer.
        whole: usize,
        /// Elements of the short buffer.
        part: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// A buffer cannot be divided among the ranks.
    #[error("{operation}: {elements} elements cannot be divided evenly among {world_size} ranks: pad the buffer, or use the form with counts")]
    Indivisible {
        /// The operation.
        operation: Operation,
        /// Elements of the buffer.
        elements: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The rows of an array, its dim 0, cannot be divided among the ranks.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: {rows} rows cannot be divided evenly among {world_size} ranks: pad the array, or give the rows of each rank")]
    IndivisibleRows {
        /// The operation.
        operation: Operation,
        /// The length of dim 0.
        rows: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// An array has another number of rows than the list of all ranks' rows says.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: the array has {got} rows, not {expected}")]
    Rows {
        /// The operation.
        operation: Operation,
        /// The required number of rows.
        expected: usize,
        /// The length of dim 0.
        got: usize,
    },
    /// An array without dims cannot be divided or concatenated.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: an array of no dims has no rows")]
    NoRows {
        /// The operation.
        operation: Operation,
    },
    /// An array of the output's shape cannot exist.
    #[cfg(feature = "ndarray")]
    #[error("{operation}: there is no array of the output's shape")]
    Shape {
        /// The operation.
        operation: Operation,
        /// The error of the shape.
        source: ndarray::ShapeError,
    },
    /// The element type does not support this reduction.
    #[error("{op} does not support {dtype}: it needs {}", .op.needs())]
    Unreducible {
        /// The reduction.
        op: ReduceKind,
        /// The type of the elements.
        dtype: DType,
    },
    /// This rank's weight is negative or not finite.
    #[error("weighted_mean: the weight {weight:?} is not a finite number of at least zero")]
    Weight {
        /// The given weight.
        weight: f64,
    },
    /// The sum of the weights of all ranks cannot be a divisor. Every rank gets this error.
    #[error(
        "weighted_mean: the weights of all ranks add up to {total:?}, and {dtype} cannot be divided by it"
    )]
    TotalWeight {
        /// The sum.
        total: f64,
        /// The type of the elements.
        dtype: DType,
    },
    /// A list of counts does not have one count for each rank.
    #[error("{operation}: {counts} counts were given for {world_size} ranks: give one for each rank")]
    Counts {
        /// The operation.
        operation: Operation,
        /// The number of given counts.
        counts: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// A buffer does not have the length that other arguments require.
    #[error("{operation}: the {buffer} has {got} elements, not {expected}")]
    Length {
        /// The operation.
        operation: Operation,
        /// The name of the buffer.
        buffer: &'static str,
        /// The required number of elements.
        expected: usize,
        /// The actual number of elements.
        got: usize,
    },
    /// Two ranks disagree about the data that one sends to the other. Every rank gets this error, before data
    /// moves.
    #[error("all_to_all: rank {from} sends {sent} elements to rank {to}, which expects {expected}")]
    Disagreement {
        /// The sending rank, by its number in the world.
        from: usize,
        /// The receiving rank, by its number in the world.
        to: usize,
        /// The number of elements that are sent.
        sent: u64,
        /// The number of elements that are expected.
        expected: u64,
    },
    /// Received bits are no element of a type whose bits are [checked](crate::Checked).
    #[error("{operation}: the bits received as element {element} are no valid {name}: check that all ranks pass elements of this type")]
    BitPattern {
        /// The operation.
        operation: Operation,
        /// The number of the element in the buffer.
        element: usize,
        /// The type of the elements.
        name: &'static str,
    },
    /// A value could not be transferred.
    #[cfg(feature = "serde")]
    #[error("the value of rank {rank} {}", problem.as_predicate())]
    Value {
        /// The rank of the value, by its number in the world.
        rank: usize,
        /// The reason.
        problem: crate::values::ValueProblem,
        /// The error of serde, if this rank has called it.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The forced algorithm has no schedule for this world.
    #[error("{} by {algorithm} does not work for a group of {world_size}", .algorithm.collective())]
    Unsupported {
        /// The algorithm.
        algorithm: Algorithm,
        /// The size of the group.
        world_size: usize,
    },
    /// The forced algorithm needs to know the hosts of the ranks.
    #[error("{} by {algorithm} needs to know which ranks share a host: call set_topology first", .algorithm.collective())]
    NoHosts {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The forced algorithm needs memory that the ranks share, and they share none.
    #[error("{} by {algorithm} needs ranks that share memory", .algorithm.collective())]
    NotShared {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The forced algorithm works on shared memory, and an operation of the user's own needs messages.
    #[error("{} by {algorithm} has only the built-in reductions: force an algorithm that sends messages, or none", .algorithm.collective())]
    NeedsMessages {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The forced algorithm needs access to memory that other ranks do not have: write access to the caller's
    /// memory, or access to ordinary memory that the system does not permit.
    #[error("{} by {algorithm} needs memory that other ranks may access: allocate the buffer with Communicator::alloc", .algorithm.collective())]
    NotOpen {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The hosts belong to a group of another size.
    #[error("these are the hosts of {ranks} ranks, not of {world_size}")]
    Hosts {
        /// The number of ranks of the hosts.
        ranks: usize,
        /// The size of the group.
        world_size: usize,
    },
    /// The forced algorithm does not support parts of different sizes.
    #[error("{} by {algorithm} needs parts of one size", .algorithm.collective())]
    NeedsEvenParts {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// There is no scan with this reduction, because its result is no sum.
    #[error("there is no scan with {op}")]
    NoScan {
        /// The reduction.
        op: ReduceKind,
    },
    /// The forced algorithm does not reduce in the required order.
    #[error("{} by {algorithm} does not reduce in {order} order in a group of {world_size}", .algorithm.collective())]
    Order {
        /// The algorithm.
        algorithm: Algorithm,
        /// The required order.
        order: ReductionOrder,
        /// The size of the group.
        world_size: usize,
    },
    /// The sum of all ranks' counts exceeds any memory.
    #[error("{operation}: the sum of the counts is larger than any memory")]
    TotalCount {
        /// The operation.
        operation: Operation,
    },
    /// The list of ranks is not a valid group.
    #[error("these ranks cannot form a group")]
    Members(#[source] ErrorSource<TransportError>),
    /// There is not enough memory for an output, or for data that passes through this rank. If other ranks wait for
    /// this rank in an operation, the job is aborted.
    #[error("there is no memory for {elements} elements")]
    Memory {
        /// The number of elements.
        elements: usize,
        /// The error of the allocator.
        source: TryReserveError,
    },
    /// This rank got no memory that the ranks share ([`Communicator::alloc`](crate::Communicator::alloc)), and the
    /// other ranks may not access its ordinary memory. The job is aborted, even if no rank got shared memory,
    /// because no rank knows that of the others.
    #[error("{operation}: no other rank can access this rank's {bytes} bytes, because it got no shared memory")]
    OutOfReach {
        /// The operation.
        operation: Operation,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// These ranks did not enter a monitored barrier before its deadline. Every rank that entered gets this error. If rank 0 of the
    /// group is absent, only rank 0 is named, because the other ranks do not exchange messages.
    #[error("monitored_barrier: ranks {ranks:?} did not come")]
    Absent {
        /// The absent ranks, by their numbers in the world.
        ranks: Vec<usize>,
    },
    /// This rank entered a monitored barrier after the other ranks had stopped waiting for it.
    #[error("monitored_barrier: this rank came after the deadline of the others, who no longer wait for it")]
    Late,
    /// A peer is in another call. Nothing that it sent was used.
    #[error(
        "{}rank {peer} is in {theirs}, this rank in {ours}{}",
        lead((&format!("rank {peer}"), .theirs), ("this rank", .ours)),
        hint(("this rank", .ours), (&format!("rank {peer}"), .theirs))
    )]
    Mismatch {
        /// The peer that disagrees, by its number in the world.
        peer: usize,
        /// The call that this rank is in.
        ours: Box<Call>,
        /// The call that the peer is in.
        theirs: Box<Call>,
    },
    /// A message did not come. The peer has sent others, which no receive has matched.
    #[error("{call} failed; rank {peer} has sent instead: {}{}", list(.instead), late_circle(.source))]
    Unmatched {
        /// The receive.
        call: Box<Call>,
        /// The sender, by its number in the world.
        peer: usize,
        /// The oldest messages that it has sent and this rank has not received, at most eight.
        instead: Vec<Call>,
        /// The error of the transport.
        source: ErrorSource<TransportError>,
    },
    /// A message of any rank did not come. Other messages have come, which no receive has matched.
    #[error("{call} from any rank failed; these messages have come instead: {}{}", list(.instead), late_circle(.source))]
    UnmatchedAny {
        /// The receive.
        call: Box<Call>,
        /// The oldest messages of each rank that this rank has not received, at most eight.
        instead: Vec<Call>,
        /// The error of the transport.
        source: ErrorSource<TransportError>,
    },
    /// No rank has sent an awaited message of any rank in time. The job is aborted, and the abort names this rank, because
    /// nobody knows which of the others should have sent it.
    #[error("{call} from any rank: none of ranks {ranks:?} has sent it within {limit:?}{}", instead_of(.instead))]
    NoneSent {
        /// The receive.
        call: Box<Call>,
        /// The ranks that have not left, by their numbers in the world.
        ranks: Vec<usize>,
        /// The oldest messages of each rank that this rank has not received, at most eight.
        instead: Vec<Call>,
        /// The time limit of the receive.
        limit: Duration,
    },
    /// Ranks wait for each other in a circle: each for a message of the next one, or for its part in a collective, in calls of
    /// one communicator. They would wait forever, so the job is aborted.
    #[error("{call} failed: {}{}", circle(.waits, *.count), instead_of(.instead))]
    CircularWait {
        /// The current call of this rank.
        call: Box<Call>,
        /// The first ranks of the circle, at most 16, each with the rank that it waits for.
        waits: Vec<WaitingRank>,
        /// The number of ranks in the circle.
        count: usize,
        /// The oldest messages that have come instead of the awaited one, at most eight.
        instead: Vec<Call>,
    },
    /// A peer has sent 64 MiB or more in messages that no receive has matched, and this rank keeps no more of them.
    /// The job is aborted, because the awaited message may come behind them.
    #[error("{call} failed: rank {peer} has sent too many messages that must be received before: {}", list(.instead))]
    TooManyKept {
        /// The receive.
        call: Box<Call>,
        /// The sender, by its number in the world.
        peer: usize,
        /// The oldest of these messages, at most eight.
        instead: Vec<Call>,
    },
    /// A long message was not sent in time, because no receive of its receiver has matched it. The job is aborted. Only
    /// messages of more than [`KEPT_MESSAGE_BYTES_MAX`](crate::transport::KEPT_MESSAGE_BYTES_MAX) bytes wait for that.
    #[error(
        "{call} failed: rank {peer} has not received this message of {bytes} bytes with tag {}: none of its receives has \
         matched it{}",
        .call.tag().unwrap_or(0),
        late_circle(.source)
    )]
    NotReceived {
        /// The send.
        call: Box<Call>,
        /// The receiver, by its number in the world.
        peer: usize,
        /// The length of the message in bytes.
        bytes: usize,
        /// The error of the transport.
        source: ErrorSource<TransportError>,
    },
    /// A communicator was [closed](crate::Communicator::close) before this rank had received all messages sent to
    /// it.
    #[error("rank {peer} has sent a message that this rank never received: each send needs a recv of its receiver")]
    Unread {
        /// The sender, by its number in the world.
        peer: usize,
    },
    /// The job was aborted, because of this rank or another.
    #[error("{call}: the job was aborted{}", because(*.rank, .cause, .theirs.as_deref(), *.reporter, .reported.as_deref()))]
    Aborted {
        /// The current call of this rank.
        call: Box<Call>,
        /// The rank that caused the abort, by its number in the world.
        rank: usize,
        /// The cause.
        cause: Cause,
        /// The current call of the rank that caused the abort, if it is known.
        theirs: Option<Box<Call>>,
        /// The rank that noticed, by its number in the world.
        reporter: usize,
        /// The current call of the reporter, if it was in one.
        reported: Option<Box<Call>>,
    },
    /// The transport failed, or the deadline passed. If the ranks wait for each other in calls of several communicators when
    /// a deadline passes, the message lists these waits.
    #[error("{call} failed{}", late_circle(.source))]
    Transport {
        /// The current call of this rank.
        call: Box<Call>,
        /// The error of the transport.
        source: ErrorSource<TransportError>,
    },
    /// The algorithm does not work with this transport.
    #[error("{call} cannot be executed")]
    Schedule {
        /// The current call of this rank.
        call: Box<Call>,
        /// The error of the schedule.
        source: ErrorSource<dist_algos::Error>,
    },
    /// The world could not be joined.
    #[error("cannot join the world")]
    Join(#[source] ErrorSource<TransportError>),
    /// The thread for operations that do not block could not be started.
    #[error("cannot start a thread for operations that do not block")]
    Worker(#[source] io::Error),
    /// The transport could not be forked when the communicator was created, so there is no transport for operations
    /// that do not block.
    #[error("this communicator has no transport for operations that do not block")]
    NoWorker(#[source] ErrorSource<TransportError>),
    /// The transport could not be forked when the communicator was created, so there is no transport for messages.
    #[error("this communicator has no transport for messages")]
    NoMessages(#[source] ErrorSource<TransportError>),
    /// An operation that does not block had not begun when its deadline passed. An operation that was started
    /// before it has a longer timeout and had not ended.
    #[error("the operation did not begin within {limit:?}: an operation that was started before it has not ended")]
    NotStarted {
        /// The time limit of the operation.
        limit: Duration,
    },
    /// An [operation of the user's own](crate::CustomOp) panicked on this rank. The other ranks get
    /// [`Aborted`](Self::Aborted) with [`Cause::Panicked`].
    #[error("the operation {name:?} panicked; the panic is in the output of this rank")]
    OperationPanicked {
        /// The name of the operation.
        name: &'static str,
    },
    /// An operation that does not block panicked on this rank: the transport, or the code that encodes or decodes
    /// values.
    #[error("an operation that does not block panicked; the panic is in the output of this rank")]
    Panicked,
    /// A request to the [store](crate::Communicator::store) failed. The job goes on, unless it was aborted.
    #[error("the key-value store failed")]
    Store(#[source] ErrorSource<StoreError>),
}
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::Store(error.into())
    }
}

impl Error {
    /// Returns `true` if a deadline passed, on this rank or on another.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Transport { source, .. }
            | Self::Unmatched { source, .. }
            | Self::UnmatchedAny { source, .. }
            | Self::NotReceived { source, .. }
            | Self::Join(source) => source.is_timeout(),
            Self::Aborted { cause, .. } => matches!(cause, Cause::TimedOut { .. }),
            Self::Store(source) => source.is_timeout(),
            Self::Absent { .. } | Self::Late | Self::NotStarted { .. } | Self::NoneSent { .. } => true,
            _ => false,
        }
    }

    /// Returns the world rank that the error is about, if it is about one rank.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Mismatch { peer, .. }
            | Self::Unmatched { peer, .. }
            | Self::TooManyKept { peer, .. }
            | Self::NotReceived { peer, .. }
            | Self::Unread { peer } => Some(*peer),
            Self::Aborted { rank, .. } => Some(*rank),
            #[cfg(feature = "serde")]
            Self::Value { rank, .. } => Some(*rank),
            Self::Absent { ranks } => <[usize; 1]>::try_from(ranks.as_slice()).ok().map(|[rank]| rank),
            Self::Transport { source, .. } | Self::UnmatchedAny { source, .. } | Self::Join(source) => {
                source.peer()
            }
            Self::Store(source) => source.peer(),
            _ => None,
        }
    }

    /// Returns the current call of this rank, if it was in one.
    pub fn call(&self) -> Option<&Call> {
        match self {
            Self::Mismatch { ours: call, .. }
            | Self::Aborted { call, .. }
            | Self::Unmatched { call, .. }
            | Self::UnmatchedAny { call, .. }
            | Self::NoneSent { call, .. }
            | Self::CircularWait { call, .. }
            | Self::TooManyKept { call, .. }
            | Self::NotReceived { call, .. }
            | Self::Transport { call, .. }
            | Self::Schedule { call, .. } => Some(call),
            _ => None,
        }
    }

    /// Replaces the call of this rank by the call that it is a part of.
    pub(crate) fn in_other_call(mut self, other: &Call) -> Self {
        if let Self::Transport { call, .. } | Self::Aborted { call, .. } | Self::CircularWait { call, .. } =
            &mut self
        {
            **call = *other;
        }
        self
    }

    /// Converts an error of the transport in this call.
    pub(crate) fn in_call(call: Call, source: TransportError) -> Self {
        let ours = Box::new(call);
        match &source {
            TransportError::Mismatch { peer, ours: begun, theirs } => match Call::decode(theirs) {
                Some(theirs) => {
                    // If announced calls differ, the current call is not wrong.
                    let announced = Call::decode(begun).filter(|call| call.operation == Operation::Announced);
                    let ours = announced.map_or(ours, Box::new);
                    Self::Mismatch { peer: *peer, ours, theirs: Box::new(theirs) }
                }
                None => Self::Transport { call: ours, source: source.into() },
            },
            TransportError::Aborted(Abort { cause: Cause::CircularWait { waits, count }, .. }) => {
                let waits = waits.iter().map(WaitingRank::decode).collect();
                Self::CircularWait { call: ours, waits, count: *count, instead: Vec::new() }
            }
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
            // Messages with equal fingerprints may differ in length: then they are calls with different counts.
            &TransportError::Length { peer, expected, got } if call.operation == Operation::Message => {
                let count = |bytes: u64| bytes / call.element.map_or(1, ElementType::size) as u64;
                let theirs = Box::new(Call { count: count(got), ..call });
                Self::Mismatch { peer, ours: Box::new(Call { count: count(expected), ..call }), theirs }
            }
            _ => Self::Transport { call: ours, source: source.into() },
        }
    }
}

/// A rank of a circle of waits.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingRank {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// The rank that it waits for.
    pub on: usize,
    /// The call that it waits in, if it is one of this crate.
    pub call: Option<Box<Call>>,
}

impl WaitingRank {
    fn decode(wait: &CircularWait) -> Self {
        Self { rank: wait.rank, on: wait.on, call: Call::decode(&wait.call).map(Box::new) }
    }
}

impl fmt::Display for WaitingRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, on, call } = self;
        write!(f, "rank {rank} waits for rank {on}")?;
        call.as_ref().map_or(Ok(()), |call| write!(f, " in {call}"))
    }
}

/// Describes ranks that wait for each other.
fn circle(waits: &[WaitingRank], count: usize) -> String {
    let list = list_of(waits.iter().map(WaitingRank::to_string), count);
    format!("{count} ranks wait for each other: {list}")
}

/// Describes the circle of waits that the error of a deadline lists, as the end of a sentence.
fn late_circle(source: &TransportError) -> String {
    match source {
        TransportError::Timeout { waits, count, .. } => circle_at_deadline(waits, *count),
        _ => String::new(),
    }
}

/// Describes ranks that wait for each other when a deadline passes, perhaps in calls of several communicators, as the end of a
/// sentence.
fn circle_at_deadline(waits: &[CircularWait], count: usize) -> String {
    if waits.is_empty() {
        return String::new();
    }
    let waits: Vec<_> = waits.iter().map(WaitingRank::decode).collect();
    let channels = waits.iter().filter_map(|wait| wait.call.as_ref()).map(|call| call.channel);
    if channels.clone().collect::<HashSet<_>>().len() < 2 {
        return format!("; {}", circle(&waits, count));
    }
    let wait = |wait: &WaitingRank| match &wait.call {
        Some(call) => format!("{wait} on channel {:x}", call.channel),
        None => wait.to_string(),
    };
    let list = list_of(waits.iter().map(wait), count);
    format!("; {count} ranks wait for each other across communicators: {list}")
}

/// Joins the first items of a list, and says how many more there are.
fn list_of(items: impl ExactSizeIterator<Item = String>, count: usize) -> String {
    let more = match count.saturating_sub(items.len()) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    items.collect::<Vec<_>>().join("; ") + &more
}

/// Describes the messages that have come instead of an awaited one.
fn instead_of(instead: &[Call]) -> String {
    if instead.is_empty() { String::new() } else { format!("; these have come instead: {}", list(instead)) }
}

/// Returns the list of some calls.
fn list(calls: &[Call]) -> String {
    calls.iter().map(Call::to_string).collect::<Vec<_>>().join("; ")
}

/// Returns the reason of an abort, as the end of a sentence.
fn because(
    rank: usize,
    cause: &Cause,
    theirs: Option<&Call>,
    reporter: usize,
    reported: Option<&Call>,
) -> String {
    if let Cause::TimedOut { waits, count } = cause
        && !waits.is_empty()
    {
        let reason = because(rank, &Cause::timed_out(), theirs, reporter, reported);
        return reason + &circle_at_deadline(waits, *count);
    }
    match (theirs, reported) {
        _ if matches!(cause, Cause::Unreachable { .. }) => {
            let abort = Abort { cause: cause.clone(), rank, reporter, call: Fingerprint::NONE };
            format!(": {abort}")
        }
        // Either of the two ranks may be wrong.
        (Some(theirs), Some(reported)) => {
            let (named, noticed) = (format!("rank {rank}"), format!("rank {reporter}"));
            let hint = hint((&named, theirs), (&noticed, reported));
            let lead = lead((&named, theirs), (&noticed, reported));
            format!(": {lead}rank {rank} in {theirs} and rank {reporter} in {reported} do not agree{hint}")
        }
        (Some(theirs), None) => format!(": rank {rank} was in {theirs} (reported by rank {reporter})"),
        // The rank reported itself, or its end was noticed: its last call may be over.
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

/// Returns a message about the cause of an abort. If two ranks were in different calls, it says in what the calls
/// differ.
pub fn explain(abort: &Abort) -> String {
    if let Cause::CircularWait { waits, count, .. } = &abort.cause {
        return circle(&waits.iter().map(WaitingRank::decode).collect::<Vec<_>>(), *count);
    }
    if let Cause::TimedOut { waits, count } = &abort.cause
        && !waits.is_empty()
    {
        let alone = Abort { cause: Cause::timed_out(), ..abort.clone() };
        return alone.to_string() + &circle_at_deadline(waits, *count);
    }
    let calls = match &abort.cause {
        Cause::Mismatch { theirs } => Call::decode(theirs).zip(Call::decode(&abort.call)),
        _ => None,
    };
    let [named, noticed] = [abort.rank, abort.reporter].map(|rank| format!("rank {rank}"));
    let difference = |(theirs, ours)| Call::difference((&named, &theirs), (&noticed, &ours));
    calls
        .and_then(difference)
        .map_or_else(|| abort.to_string(), |difference| format!("{abort}: {difference}"))
}

/// Returns the beginning of a message about two calls that differ: the first visible difference, or nothing.
fn lead(one: (&str, &Call), other: (&str, &Call)) -> String {
    Call::difference(one, other).map_or_else(String::new, |difference| difference + ": ")
}

/// Returns a hint about differences that the calls themselves do not show: different digests of sizes, or different
/// earlier calls.
fn hint((one, first): (&str, &Call), (other, second): (&str, &Call)) -> String {
    let same_sizes = Call { sizes: second.sizes, ..*first };
    if first != second && same_sizes == *second {
        return ": the sizes of parts, buffers, shapes or hosts differ".to_owned();
    }
    // Announced calls differ in their kind, and are not counted with other calls.
    if first.operation == Operation::Announced {
        return String::new();
    }
    let same_place = Call { sequence: second.sequence, past: second.past, ..*first };
    if first.sequence != second.sequence && same_place == *second {
        let [one_more, other_more] = [first, second].map(Call::user_calls_before);
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
            ": an earlier call differed, more than {recent} calls before, or on the parent of this communicator"
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
