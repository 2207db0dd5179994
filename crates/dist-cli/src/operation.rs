//! What is measured and predicted: collectives, and single messages between two ranks.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dist_collectives::tuning::Operation;

use crate::parse::{possible_value, same_name};

/// Reads the name of a collective that there are algorithms of.
pub(crate) fn collective() -> impl TypedValueParser<Value = Operation> {
    let names = collectives().map(Operation::name).map(possible_value);
    PossibleValuesParser::new(names).map(|name| parse(&name).expect("it is one of the names"))
}

/// The collective of this name, if there are algorithms of it.
pub(crate) fn parse(name: &str) -> Option<Operation> {
    collectives().find(|operation| same_name(operation.name(), name))
}

/// All that there are algorithms of. An exclusive scan is measured and predicted as a scan.
pub(crate) fn collectives() -> impl Iterator<Item = Operation> {
    let has_algorithms = |operation: &Operation| operation.algorithms().next().is_some();
    Operation::ALL
        .into_iter()
        .filter(has_algorithms)
        .filter(|&operation| operation != Operation::ExclusiveScan)
}

/// By what the bytes per second of a rank's input are multiplied to give those on its link.
pub(crate) fn bus_factor(operation: Operation, world_size: usize) -> f64 {
    let n = world_size as f64;
    match operation {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::ReduceScatter | Operation::AllToAll | Operation::Scatter => (n - 1.0) / n,
        Operation::AllGather | Operation::Gather => n - 1.0,
        _ => 1.0,
    }
}

/// Messages between ranks 0 and 1, without any algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Messages {
    /// To each other at the same time.
    SendRecv,
    /// To rank 1 and back.
    PingPong,
    /// To rank 1, one after the other.
    Stream,
}

impl Messages {
    pub(crate) const ALL: [Self; 3] = [Self::SendRecv, Self::PingPong, Self::Stream];

    /// The name in lines and arguments.
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

    /// Those of one call that follow one another; the time is that of one.
    pub(crate) const fn trips(self) -> u32 {
        match self {
            Self::SendRecv => 1,
            Self::PingPong => 2,
            Self::Stream => 32,
        }
    }
}
