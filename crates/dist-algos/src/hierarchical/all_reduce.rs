//! Two-level all_reduce.

use std::fmt;

use dist_transport::Rank;

use super::LevelCosts;
use super::level::{ChunkMap, Steps};
use super::position::HostPosition;
use crate::{AllGather, AllReduce, Chunks, Hosts, Order, Phases, ReduceScatter, binomial};

/// A two-level all_reduce: an algorithm inside hosts and one between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TwoLevelAllReduce {
    /// The ranks of a host that communicate with other hosts.
    pub participants: HostParticipants,
    /// The algorithm that sums the hosts' sums.
    pub across: AllReduce,
}

/// The ranks of a host that communicate with other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostParticipants {
    /// The first rank of each host, to which the whole buffer is reduced. It supports any hosts and uses one
    /// connection between two of them.
    Leaders,
    /// All ranks, each for its part of the buffer: a reduce_scatter on the host comes before and an all_gather
    /// after. It moves the fewest bytes, and all hosts must have the same number of ranks.
    Parts,
}

impl HostParticipants {
    /// Returns the name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Leaders => "leaders",
            Self::Parts => "parts",
        }
    }
}

/// Writes the algorithm, for example `parts/halving_doubling`.
impl fmt::Display for TwoLevelAllReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.participants.name(), self.across)
    }
}

impl TwoLevelAllReduce {
    /// Returns `true` if there are schedules for these hosts.
    pub(super) fn supports(self, hosts: &Hosts) -> bool {
        self.across.supports(hosts.count())
            && (self.participants == HostParticipants::Leaders || hosts.regular().is_some())
    }

    /// Returns the number of chunks of the buffer.
    pub(super) fn chunks(self, hosts: &Hosts) -> usize {
        match self.participants {
            HostParticipants::Leaders => self.across.chunks(hosts.count()),
            HostParticipants::Parts => hosts.largest() * self.across.chunks(hosts.count()),
        }
    }

    /// Returns the order in which it reduces, or a weaker one. It is canonical only if [`Hosts::order`] is
    /// canonical.
    pub(super) fn order(self, hosts: &Hosts) -> Order {
        let inside = match self.participants {
            HostParticipants::Leaders => Order::Canonical,
            HostParticipants::Parts => scattering(hosts.largest()).order(hosts.largest()),
        };
        hosts.order().min(inside).min(self.across.order(hosts.count()))
    }

    /// Returns the cost for supported hosts.
    pub(super) fn cost(self, hosts: &Hosts) -> LevelCosts {
        let (count, size) = (hosts.count(), hosts.largest());
        let inside = match self.participants {
            HostParticipants::Leaders => AllReduce::Binomial.cost(size),
            HostParticipants::Parts => scattering(size).cost(size).then(gathering(size).cost(size)),
        };
        LevelCosts { inside: inside.magnified(self.across.chunks(count)), across: self.across.cost(count) }
    }

    /// Returns the schedules of a rank; `None` if the hosts are not supported or belong to another world.
    pub fn phases(self, rank: Rank, hosts: &Hosts) -> Option<Phases<Steps<'_>>> {
        let position = HostPosition::of(rank, hosts, 0).filter(|_| self.supports(hosts))?;
        let (phases, chunks) = (self.across.phases(position.across), self.across.chunks(hosts.count()));
        let each = ChunkMap::Neighbours { first: 0, each: chunks };
        let (inside, across, owned) = match self.participants {
            HostParticipants::Leaders => (
                [binomial::reduce(position.inside, 0), binomial::broadcast(position.inside, 0)],
                [position.among_leaders(phases.reduce), position.among_leaders(phases.gather)],
                if position.inside.index() == 0 { phases.owned } else { Chunks::NONE },
            ),
            HostParticipants::Parts => {
                let size = position.inside.world_size();
                let own = ChunkMap::Neighbours { first: position.inside.index() * chunks, each: 1 };
                let inside =
                    [scattering(size).schedule(position.inside)?, gathering(size).schedule(position.inside)?];
                let across = [phases.reduce, phases.gather].map(|half| position.among_places(half, own));
                (inside, across, own.of(phases.owned))
            }
        };
        let ([before, after], [reduce, gather]) =
            (inside.map(|half| position.among_members(half, each)), across);
        Some(Phases {
            reduce: Steps::new([before, reduce, position.nothing()]),
            owned,
            gather: Steps::new([gather, after, position.nothing()]),
        })
    }
}

/// Returns the algorithm by which the ranks of a host compute the parts of their sum.
const fn scattering(ranks: usize) -> ReduceScatter {
    if ranks.is_power_of_two() { ReduceScatter::HalvingDoubling } else { ReduceScatter::Circulant }
}

/// Returns the algorithm by which the ranks of a host exchange their parts of the result.
const fn gathering(ranks: usize) -> AllGather {
    if ranks.is_power_of_two() { AllGather::RecursiveDoubling } else { AllGather::Circulant }
}
