//! Operations that `distctl bench` measures.

use std::fmt;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dist_collectives::tuning::{Algorithm, Operation as Collective, Ownership};
use dist_collectives::{Communicator, ReductionOrder};

use crate::Error;
use crate::operation::{self, Messages, bus_factor};
use crate::parse::possible_value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Collective(Collective),
    Messages(Messages),
}

impl Operation {
    /// Returns the parser of the names, which the help lists.
    pub(super) fn parser() -> impl TypedValueParser<Value = Self> {
        let collectives = operation::collectives().map(|collective| possible_value(collective.name()));
        let messages = Messages::ALL.map(|messages| {
            let spelt = [
                ("send-recv", Messages::SendRecv),
                ("send_recv", Messages::SendRecv),
                ("ping-pong", Messages::PingPong),
                ("ping_pong", Messages::PingPong),
            ];
            let spelt = spelt.into_iter().filter(|(_, named)| *named == messages).map(|(name, _)| name);
            possible_value(messages.name()).aliases(spelt).help(match messages {
                Messages::SendRecv => "Ranks 0 and 1 send to each other at the same time",
                Messages::PingPong => "Rank 0 sends to rank 1, which sends back; the time is half of both",
                Messages::Stream => {
                    "Rank 0 sends 32 messages to rank 1, one after the other; the time is one message's"
                }
            })
        });
        PossibleValuesParser::new(collectives.chain(messages)).map(|name| {
            let messages = Messages::parse(&name).map(Self::Messages);
            messages
                .or_else(|| operation::parse(&name).map(Self::Collective))
                .expect("it is one of the names")
        })
    }

    /// Returns the name in output and arguments.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Collective(collective) => collective.name(),
            Self::Messages(messages) => messages.name(),
        }
    }

    /// Returns `true` if the operation reduces elements of different ranks.
    pub(super) fn reduces(self) -> bool {
        use Collective::{AllReduce, Reduce, ReduceScatter, Scan};
        matches!(self, Self::Collective(AllReduce | ReduceScatter | Reduce | Scan))
    }

    /// Returns `true` if only ranks 0 and 1 take part.
    pub(super) fn between_two(self) -> bool {
        matches!(self, Self::Messages(_))
    }

    /// Returns `true` if the operation has a root. The root advances by one with each call.
    pub(super) fn is_rooted(self) -> bool {
        use Collective::{Broadcast, Gather, Reduce, Scatter};
        matches!(self, Self::Collective(Broadcast | Reduce | Gather | Scatter))
    }

    /// Returns `true` for the barrier, which has neither input nor result.
    pub(super) fn is_barrier(self) -> bool {
        self == Self::Collective(Collective::Barrier)
    }

    /// Returns the number of consecutive messages in one call. The reported time is that of one message.
    pub(super) fn trips(self) -> u32 {
        if let Self::Messages(messages) = self { messages.trips() } else { 1 }
    }

    /// Returns the number of elements of each rank's input, as close to `wish` as the operation allows.
    pub(super) fn input_len(self, wish: usize, world_size: usize) -> usize {
        use Collective::{AllToAll, Barrier, ReduceScatter, Scatter};
        match self {
            Self::Collective(ReduceScatter | Scatter | AllToAll) => wish / world_size * world_size,
            Self::Collective(Barrier) => 0,
            _ => wish,
        }
    }

    /// Returns the number of elements of each rank's output; 0 if the operation works in place.
    pub(super) fn output_len(self, input: usize, world_size: usize) -> usize {
        use Collective::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        match self {
            Self::Collective(ReduceScatter | Scatter) => input / world_size,
            Self::Collective(AllGather | Gather) => input * world_size,
            Self::Collective(AllToAll) | Self::Messages(Messages::SendRecv) => input,
            Self::Collective(_) | Self::Messages(Messages::PingPong | Messages::Stream) => 0,
        }
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth.
    pub(super) fn bus_factor(self, world_size: usize) -> f64 {
        self.collective().map_or(1.0, |collective| bus_factor(collective, world_size))
    }

    /// Returns the collective, if the operation is one.
    fn collective(self) -> Option<Collective> {
        if let Self::Collective(collective) = self { Some(collective) } else { None }
    }

    /// Returns the algorithms that a user can select.
    pub(super) fn algorithms(self) -> Vec<Algorithm> {
        let all = self.collective().into_iter().flat_map(Collective::algorithms);
        all.filter(|algorithm| !matches!(algorithm, Algorithm::TwoLevel(_))).collect()
    }

    /// Returns the name of the algorithm that is used for inputs of this size.
    pub(super) fn algorithm(
        self,
        comm: &Communicator,
        bytes: usize,
        ownership: Ownership,
    ) -> Result<&'static str, Error> {
        let Some(collective) = self.collective() else { return Ok("message") };
        let gathers = matches!(collective, Collective::AllGather | Collective::Gather);
        let whole = if gathers { bytes * comm.world_size() } else { bytes };
        Ok(comm.algorithm_on(collective, whole, ownership)?.map_or("only", |algorithm| algorithm.name()))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Checks that an algorithm can be used, before anything is started.
pub(super) fn check_algorithm(
    algorithm: Algorithm,
    world_size: usize,
    order: ReductionOrder,
) -> Result<(), Error> {
    if !algorithm.supports(world_size) {
        return Err(Error::Usage(format!("{algorithm} does not support {world_size} ranks")));
    }
    if !algorithm.keeps(order.least(), world_size) {
        return Err(Error::Usage(format!(
            "{algorithm} does not reduce in canonical order on {world_size} ranks: add --order any"
        )));
    }
    Ok(())
}
