//! What can be measured.

use std::fmt;

use dist_collectives::{Algorithm, Communicator, Direct, Operation as Collective, Ownership, ReductionOrder};

use crate::Error;
use crate::operation::bus_factor;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Scan,
    Barrier,
    /// Ranks 0 and 1 send to each other at the same time
    #[value(name = "sendrecv")]
    SendRecv,
    /// Rank 0 sends to rank 1, which sends back; the time is half of both
    #[value(name = "pingpong")]
    PingPong,
    /// Rank 0 sends 32 messages to rank 1, one after the other; the time is one message's
    Stream,
}

/// Messages of a stream.
pub(super) const STREAM: u32 = 32;

impl Operation {
    /// The name in lines and arguments.
    pub(super) fn name(self) -> &'static str {
        match (self, self.collective()) {
            (_, Some(collective)) => collective.name(),
            (Self::SendRecv, None) => "sendrecv",
            (Self::Stream, None) => "stream",
            (_, None) => "pingpong",
        }
    }

    /// Whether elements of different ranks become one.
    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce | Self::Scan)
    }

    /// Whether only ranks 0 and 1 take part.
    pub(super) fn between_two(self) -> bool {
        matches!(self, Self::SendRecv | Self::PingPong | Self::Stream)
    }

    /// Whether there is a root, which moves on by one with each call.
    pub(super) fn is_rooted(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// Messages that follow one another in one call.
    pub(super) fn trips(self) -> u32 {
        match self {
            Self::PingPong => 2,
            Self::Stream => STREAM,
            _ => 1,
        }
    }

    /// Elements of each rank's input, for a wish.
    pub(super) fn input_len(self, wish: usize, world_size: usize) -> usize {
        match self {
            Self::ReduceScatter | Self::Scatter | Self::AllToAll => wish / world_size * world_size,
            Self::Barrier => 0,
            _ => wish,
        }
    }

    /// Elements of each rank's output; none where the input is worked on in place.
    pub(super) fn output_len(self, input: usize, world_size: usize) -> usize {
        match self {
            Self::ReduceScatter | Self::Scatter => input / world_size,
            Self::AllGather | Self::Gather => input * world_size,
            Self::AllToAll | Self::SendRecv => input,
            Self::AllReduce
            | Self::Broadcast
            | Self::Reduce
            | Self::Scan
            | Self::Barrier
            | Self::PingPong
            | Self::Stream => 0,
        }
    }

    /// By what the bytes per second of a rank's input are multiplied to give those on its link.
    pub(super) fn bus_factor(self, world_size: usize) -> f64 {
        self.collective().map_or(1.0, |collective| bus_factor(collective, world_size))
    }

    /// The collective that this measures, if it is one.
    pub(super) fn collective(self) -> Option<Collective> {
        match self {
            Self::AllReduce => Some(Collective::AllReduce),
            Self::ReduceScatter => Some(Collective::ReduceScatter),
            Self::AllGather => Some(Collective::AllGather),
            Self::Broadcast => Some(Collective::Broadcast),
            Self::Reduce => Some(Collective::Reduce),
            Self::Gather => Some(Collective::Gather),
            Self::Scatter => Some(Collective::Scatter),
            Self::AllToAll => Some(Collective::AllToAll),
            Self::Scan => Some(Collective::Scan),
            Self::Barrier => Some(Collective::Barrier),
            Self::SendRecv | Self::PingPong | Self::Stream => None,
        }
    }

    /// The algorithms that can be asked for.
    pub(super) fn algorithms(self) -> Vec<Algorithm> {
        let direct = |collective| Direct::of(collective).map(Algorithm::from);
        self.collective().into_iter().flat_map(|it| Algorithm::of(it).chain(direct(it))).collect()
    }

    /// The name of the algorithm that serves inputs of so many bytes.
    pub(super) fn algorithm(
        self,
        comm: &Communicator,
        bytes: usize,
        ownership: Ownership,
    ) -> Result<&'static str, Error> {
        let Some(collective) = self.collective() else { return Ok("message") };
        let gathers = matches!(self, Self::AllGather | Self::Gather);
        let whole = if gathers { bytes * comm.world_size() } else { bytes };
        Ok(comm.algorithm_on(collective, whole, ownership)?.map_or("only", |algorithm| algorithm.name()))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Says why an algorithm cannot be used, before anything is started.
pub(super) fn check_algorithm(
    algorithm: Algorithm,
    world_size: usize,
    order: ReductionOrder,
) -> Result<(), Error> {
    if !algorithm.supports(world_size) {
        return Err(Error::Usage(format!("{algorithm} cannot serve {world_size} ranks")));
    }
    if !algorithm.keeps(order, world_size) {
        return Err(Error::Usage(format!(
            "{algorithm} does not reduce in canonical order on {world_size} ranks: add --order any"
        )));
    }
    Ok(())
}
