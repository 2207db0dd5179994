//! Operations that are measured and predicted: collectives, and single messages between two ranks.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dist_collectives::tuning::Operation;

use crate::parse::{possible_value, same_name};

/// Returns the parser of the name of a collective.
pub(crate) fn collective() -> impl TypedValueParser<Value = Operation> {
    let names = collectives().map(Operation::name).map(possible_value);
    PossibleValuesParser::new(names).map(|name| parse(&name).expect("it is one of the names"))
}

/// Returns the collective with this name, if there are algorithms for it.
pub(crate) fn parse(name: &str) -> Option<Operation> {
    collectives().find(|operation| same_name(operation.name(), name))
}

/// Iterates over the collectives that have algorithms. An exclusive scan is measured and predicted as a scan.
pub(crate) fn collectives() -> impl Iterator<Item = Operation> {
    let has_algorithms = |operation: &Operation| operation.algorithms().next().is_some();
    Operation::ALL
        .into_iter()
        .filter(has_algorithms)
        .filter(|&operation| operation != Operation::ExclusiveScan)
}

/// Returns the ratio of bus bandwidth to algorithm bandwidth: multiplied with a rank's input bytes per
/// second, it gives the bytes per second on the rank's link.
pub(crate) fn bus_factor(operation: Operation, world_size: usize) -> f64 {
    let n = world_size as f64;
    match operation {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::ReduceScatter | Operation::AllToAll | Operation::Scatter => (n - 1.0) / n,
        Operation::AllGather | Operation::Gather => n - 1.0,
        _ => 1.0,
    }
}

/// Messages between ranks 0 and 1, without a collective algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Messages {
    /// Both ranks send to each other at the same time.
    SendRecv,
    /// Rank 0 sends to rank 1, which sends back.
    PingPong,
    /// Rank 0 sends several messages to rank 1, one after the other.
    Stream,
}

impl Messages {
    pub(crate) const ALL: [Self; 3] = [Self::SendRecv, Self::PingPong, Self::Stream];

    /// Returns the name in output and arguments.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::SendRecv => "sendrecv",
            Self::PingPong => "pingpong",
            Self::Stream => "stream",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|messages| same_name(messages.name(), name))
    }

    /// Returns the number of consecutive messages in one call. The reported time is that of one message.
    pub(crate) const fn trips(self) -> u32 {
        match self {
            Self::SendRecv => 1,
            Self::PingPong => 2,
            Self::Stream => 32,
        }
    }
}
