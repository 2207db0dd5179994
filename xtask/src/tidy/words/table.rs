//! The private words that code of this workspace may not use, and the field's term for each.

use super::definitions::Kind::{self, Field, Function, Module, Type, Variant};

/// The crates whose words are checked.
pub(super) const CRATES: &[&str] = &[
    "dist-transport",
    "dist-algos",
    "dist-predict",
    "dist-collectives",
    "dist-groups",
    "dist-parallel",
    "dist-candle",
    "dist-burn",
    "dist-testkit",
    "dist-cli",
    "dist-mpi",
    "dist-torch",
    "dist",
];

/// The crates in which a type name of a crate that they use may not be defined again.
pub(super) const UNIQUE_TYPES: &[&str] =
    &["dist-transport", "dist-algos", "dist-predict", "dist-collectives", "dist-groups", "dist-parallel"];

/// A name that no definition of its kind may have in its crates.
#[derive(Debug)]
pub(super) struct PrivateName {
    pub(super) kind: Kind,
    pub(super) name: &'static str,
    /// Empty for every crate.
    pub(super) crates: &'static [&'static str],
    pub(super) standard: &'static str,
}

const fn everywhere(kind: Kind, name: &'static str, standard: &'static str) -> PrivateName {
    PrivateName { kind, name, crates: &[], standard }
}

const fn transport(kind: Kind, name: &'static str, standard: &'static str) -> PrivateName {
    PrivateName { kind, name, crates: &["dist-transport"], standard }
}

const fn algos(kind: Kind, name: &'static str, standard: &'static str) -> PrivateName {
    PrivateName { kind, name, crates: &["dist-algos", "dist-predict"], standard }
}

const fn collectives(kind: Kind, name: &'static str, standard: &'static str) -> PrivateName {
    PrivateName { kind, name, crates: &["dist-collectives"], standard }
}

const fn training(kind: Kind, name: &'static str, standard: &'static str) -> PrivateName {
    PrivateName { kind, name, crates: &["dist-parallel", "dist-candle", "dist-burn", "dist-cli"], standard }
}

/// Only definitions are compared: many of these are ordinary words elsewhere.
pub(super) const NAMES: &[PrivateName] = &[
    everywhere(Type, "Together", "ShmGroup"),
    everywhere(Function, "come_together", "establish"),
    everywhere(Module, "together", "shm_group"),
    everywhere(Function, "meet", "join, exchange or signal_and_wait"),
    everywhere(Type, "Manner", "CallOptions"),
    everywhere(Type, "Meeting", "RendezvousServer"),
    everywhere(Type, "Tray", "Mailbox"),
    everywhere(Type, "Crew", "Placement"),
    everywhere(Function, "spacious", "oversubscribed"),
    everywhere(Function, "crowded", "oversubscribed"),
    everywhere(Field, "crowded", "oversubscribed"),
    everywhere(Type, "Pen", "CopyPolicy"),
    everywhere(Type, "Home", "PeerInfo or GradientSlot"),
    everywhere(Type, "Due", "LazyDeadline"),
    everywhere(Type, "Bell", "Waker"),
    everywhere(Type, "Rope", "Futex"),
    everywhere(Type, "Verdict", "AbortState"),
    everywhere(Type, "Scene", "ErrorContext"),
    everywhere(Type, "Trouble", "PeerError"),
    everywhere(Type, "Alarm", "AbortOnUnwind"),
    everywhere(Type, "Weather", "NetworkConditions"),
    everywhere(Type, "Storm", "FaultInjector"),
    everywhere(Type, "Courtesy", "WaitPolicy"),
    everywhere(Type, "Patience", "WaitPolicy"),
    everywhere(Type, "Watch", "WaitPolicy"),
    everywhere(Type, "Turn", "Generation"),
    everywhere(Type, "Way", "CompiledCall"),
    everywhere(Variant, "Way", "the name of the thing"),
    everywhere(Type, "Known", "PlanCache"),
    everywhere(Function, "think_of_a_way", "compile"),
    everywhere(Function, "forget_ways", "invalidate"),
    everywhere(Function, "lay_open", "expose"),
    everywhere(Function, "next_beginning", "the name of the colour"),
    everywhere(Module, "door", "unix_socket"),
    everywhere(Module, "gate", "acceptor"),
    everywhere(Function, "go_by_host", "enable_hierarchical"),
    everywhere(Function, "set_hosts", "set_topology"),
    everywhere(Function, "describe_calls", "set_call_formatter"),
    everywhere(Type, "KeptCosts", "CostCache"),
    everywhere(Type, "Courier", "communication-hook worker"),
    everywhere(Function, "whereabouts", "position"),
    everywhere(Type, "Lane", "RankState"),
    everywhere(Type, "Parcel", "Transfer"),
    everywhere(Type, "Flight", "Transfer"),
    everywhere(Type, "Pace", "Costs"),
    everywhere(Type, "Mail", "Queue"),
    everywhere(Type, "Letter", "Event"),
    everywhere(Type, "Exposure", "RemoteAccess"),
    everywhere(Type, "Exposed", "RemoteRegion"),
    everywhere(Type, "Ways", "a name that says which paths"),
    transport(Type, "Direct", "ShmGroup"),
    transport(Module, "group", "host_memory"),
    transport(Type, "Loan", "SingleCopy"),
    transport(Module, "loan", "single_copy"),
    transport(Variant, "Taken", "Joined"),
    transport(Function, "knock", "dial"),
    transport(Field, "posted", "signalled"),
    transport(Function, "post", "signal"),
    transport(Function, "note", "set_progress or record"),
    transport(Type, "Storms", "FaultInjector"),
    algos(Type, "Form", "DirectAlgorithm"),
    algos(Type, "Task", "DirectCollective"),
    algos(Type, "Cut", "Partition"),
    algos(Type, "Deal", "BlockAssignment"),
    algos(Type, "Seat", "HostPosition"),
    algos(Type, "Spread", "ChunkMap"),
    algos(Type, "Circle", "ChunkNumbering"),
    algos(Type, "Doing", "DrawnRank"),
    algos(Type, "Held", "SlotContent or SumLocation"),
    algos(Function, "post", "signal"),
    algos(Function, "note", "set_progress or push"),
    algos(Field, "pace", "costs"),
    algos(Variant, "LostPost", "LostSignal"),
    algos(Variant, "EarlyPost", "EarlySignal"),
    algos(Variant, "MissingAwait", "MissingWait"),
    collectives(Type, "Job", "CallKey"),
    collectives(Type, "Work", "Collective"),
    collectives(Type, "How", "Preferences"),
    collectives(Type, "Begun", "EnteredCall"),
    collectives(Type, "Done", "Program"),
    collectives(Type, "Script", "CompiledSchedule"),
    collectives(Type, "Wide", "WidenedElements"),
    collectives(Type, "Shares", "RankLayout"),
    collectives(Type, "Past", "HistoryDigest"),
    collectives(Type, "Overlap", "WorkerState"),
    collectives(Type, "Among", "SubgroupHosts"),
    collectives(Type, "Held", "ReductionBuffer"),
    training(Type, "Strip", "FlatParameter"),
    training(Type, "Parts", "ShardBuffer"),
    training(Type, "Spot", "an offset"),
    training(Type, "Delivery", "WorkHandle"),
    training(Type, "OnItsWay", "InFlightBucket"),
    training(Type, "Landed", "ReducedStep"),
    training(Type, "Lent", "BufferView"),
    training(Type, "Loaded", "Materialised"),
    training(Type, "Unloaded", "Resharded"),
    training(Type, "Deal", "MicroBatchAssignment"),
    training(Type, "Piece", "Chunk"),
    training(Type, "Spare", "BufferPool"),
    training(Function, "lend", "materialise"),
    training(Function, "unload", "reshard"),
    training(Function, "tell", "broadcast or all_gather_updates"),
    training(Function, "land", "finish_in_flight"),
    training(Function, "begin_anew", "reset"),
    training(Field, "leaf", "gradient"),
    training(Field, "vessel", "recycled"),
    training(Field, "told", "update_buffer"),
    training(Field, "homes", "slots or locations"),
    training(Type, "Leaf", "MicroBatchGradient"),
    training(Type, "Vessel", "Buffer"),
    training(Type, "Room", "BufferPool"),
    training(Type, "Keepers", "ReshardGroup"),
    training(Function, "take_apart", "to_flat"),
    training(Function, "put_together", "unflatten"),
    training(Type, "Asked", "StepDescriptor"),
    training(Type, "Tally", "the consensus of a step"),
    training(Type, "Look", "TensorMeta"),
    training(Type, "Elsewhere", "a placeholder"),
    training(Field, "counts_for", "weight"),
    training(Type, "Holding", "ShardMetadata"),
    training(Type, "Claim", "SavePlan"),
];

/// Words and phrases that comments, messages and names may not use, with their replacements. The first word
/// may be in any form: "knock" stands for "knocks" and "knocking" too.
pub(super) const METAPHORS: &[(&str, &str)] = &[
    ("alarm", "abort on unwind"),
    ("bell", "waker"),
    ("courier", "communication-hook worker"),
    ("courtesy", "wait policy"),
    ("crew", "placement"),
    ("door", "Unix socket"),
    ("farewell", "goodbye message"),
    ("gate", "acceptor"),
    ("keeper", "reshard group"),
    ("knock", "pending handshake"),
    ("leavings", "leftover files"),
    ("letter", "message or event"),
    ("linger", "spin delay"),
    ("parcel", "transfer"),
    ("patience", "wait policy"),
    ("pen", "copy policy"),
    ("scene", "error context"),
    ("storm", "fault injector"),
    ("stranger", "external load, or unauthenticated client"),
    ("tray", "mailbox"),
    ("trouble", "peer error"),
    ("verdict", "abort state"),
    ("vessel", "buffer"),
    ("weather", "network conditions"),
    ("keeps step", "runs in lockstep"),
    ("lay open", "expose"),
    ("lays open", "exposes"),
    ("laid open", "exposed"),
    ("past the cache", "non-temporal"),
    ("past the caches", "non-temporal"),
    ("give the core away", "yield"),
    ("gives the core away", "yields"),
    ("so many", "the number"),
    ("so much as", "the number"),
    ("that which", "the name of the thing"),
    ("whoever", "the name of the rank or caller"),
];

/// Names that types of two crates may share.
pub(super) const SHARED_TYPE_NAMES: &[&str] = &["Error", "Result", "Sealed"];

/// The name of files whose types have the names of others on purpose: a build has one of the two.
pub(super) const STAND_IN: &str = "/absent.rs";
