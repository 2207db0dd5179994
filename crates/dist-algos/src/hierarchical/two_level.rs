//! All two-level algorithms and their properties.

use std::fmt;
use std::ops::Range;
use std::sync::LazyLock;

use dist_transport::Rank;

use super::level::ChunkMap;
use super::position::HostPosition;
use super::{HostParticipants, LevelCosts, Steps, TwoLevelAllReduce};
use crate::{
    AllGather, AllReduce, Barrier, Broadcast, CostModel, Hosts, Order, Reduce, ReduceScatter, Step, binomial,
};

/// A two-level algorithm: an operation inside each host and between hosts. It needs to know the host of each rank.
///
/// ```
/// use dist_algos::hierarchical::TwoLevel;
/// use dist_algos::{Broadcast, Hosts};
///
/// let (two, hosts) = (TwoLevel::Broadcast(Broadcast::Binomial), Hosts::new(&[7, 7, 7, 8, 8, 8]));
/// assert_eq!((two.operation(), two.name()), ("broadcast", "two_level/binomial"));
/// assert_eq!(two.cost(&hosts).across.rounds, 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TwoLevel {
    /// An all_reduce.
    AllReduce(TwoLevelAllReduce),
    /// A reduce_scatter for hosts with the same number of consecutive ranks. It is [`AllGather`](Self::AllGather)
    /// backwards, so that every host sends one sum of each chunk to each other host.
    ReduceScatter,
    /// An all_gather for hosts with the same number of consecutive ranks. First each rank gathers the chunks of the
    /// ranks at its place on other hosts, so that every chunk goes to every other host once.
    AllGather,
    /// A broadcast, with its algorithm between hosts: first to one rank of each host, then to the other ranks.
    Broadcast(Broadcast),
    /// A reduce, with its algorithm between hosts: first to one rank of each host (the root on its own host), then
    /// between hosts.
    Reduce(Reduce),
    /// A barrier, with its algorithm between hosts. Each rank signals the first rank of its host, these ranks
    /// signal each other, and then the ranks of their hosts.
    Barrier(Barrier),
}

impl TwoLevel {
    /// Returns all algorithms, for any hosts.
    pub fn all() -> impl Iterator<Item = Self> {
        let forms = [HostParticipants::Leaders, HostParticipants::Parts].into_iter();
        forms
            .flat_map(|participants| {
                AllReduce::ALL
                    .iter()
                    .map(move |&across| Self::AllReduce(TwoLevelAllReduce { participants, across }))
            })
            .chain([Self::ReduceScatter, Self::AllGather])
            .chain(Broadcast::ALL.iter().map(|&across| Self::Broadcast(across)))
            .chain(Reduce::ALL.iter().map(|&across| Self::Reduce(across)))
            .chain(Barrier::ALL.iter().map(|&across| Self::Barrier(across)))
    }

    /// Returns all algorithms of the operation with this name, for any hosts.
    pub fn of(operation: &str) -> impl Iterator<Item = Self> {
        Self::all().filter(move |two| two.operation() == operation)
    }

    /// Returns the name of the operation.
    pub const fn operation(self) -> &'static str {
        match self {
            Self::AllReduce(_) => AllReduce::OPERATION,
            Self::ReduceScatter => ReduceScatter::OPERATION,
            Self::AllGather => AllGather::OPERATION,
            Self::Broadcast(_) => Broadcast::OPERATION,
            Self::Reduce(_) => Reduce::OPERATION,
            Self::Barrier(_) => Barrier::OPERATION,
        }
    }

    /// Returns the name, which is unique among the algorithms of its operation: `two_level` and the algorithm
    /// between hosts.
    pub fn name(self) -> &'static str {
        static NAMES: LazyLock<Vec<(TwoLevel, String)>> =
            LazyLock::new(|| TwoLevel::all().map(|two| (two, two.full_name())).collect());
        let known = NAMES.iter().find(|(two, _)| *two == self);
        known.map_or("two_level", |(_, name)| name)
    }

    fn full_name(self) -> String {
        match self {
            Self::AllReduce(plan) => format!("two_level/{plan}"),
            Self::ReduceScatter | Self::AllGather => "two_level".to_owned(),
            Self::Broadcast(across) => format!("two_level/{across}"),
            Self::Reduce(across) => format!("two_level/{across}"),
            Self::Barrier(across) => format!("two_level/{across}"),
        }
    }

    /// Returns `true` if there are schedules for these hosts.
    pub fn supports(self, hosts: &Hosts) -> bool {
        match self {
            Self::AllReduce(plan) => plan.supports(hosts),
            Self::ReduceScatter | Self::AllGather => hosts.contiguous().is_some_and(|size| size > 0),
            Self::Broadcast(across) => across.supports(hosts.count()),
            Self::Reduce(across) => across.supports(hosts.count()),
            Self::Barrier(across) => across.supports(hosts.count()),
        }
    }

    /// Returns the possible roots: every rank, or one number if the operation has no root.
    pub fn roots(self, hosts: &Hosts) -> Range<usize> {
        match self {
            Self::Broadcast(_) | Self::Reduce(_) => 0..hosts.world_size(),
            Self::AllReduce(_) | Self::ReduceScatter | Self::AllGather | Self::Barrier(_) => 0..1,
        }
    }

    /// Returns the order in which it reduces, or a weaker one, if it reduces. It is canonical only if
    /// [`Hosts::order`] is canonical.
    pub fn order(self, hosts: &Hosts) -> Option<Order> {
        match self {
            Self::AllReduce(plan) => Some(plan.order(hosts)),
            Self::ReduceScatter => {
                let size = hosts.largest();
                Some(hosts.order().min(scattering(size, ReduceScatter::Ring).order(size)))
            }
            Self::Reduce(across) => Some(hosts.order().min(across.order(hosts.count()))),
            Self::AllGather | Self::Broadcast(_) | Self::Barrier(_) => None,
        }
    }

    /// Returns `true` if it reduces in this order or a stricter one, or does not reduce.
    pub fn keeps(self, order: Order, hosts: &Hosts) -> bool {
        self.order(hosts).is_none_or(|own| own >= order)
    }

    /// Returns the cost for supported hosts, with the most expensive root.
    pub fn cost(self, hosts: &Hosts) -> LevelCosts {
        let (count, size) = (hosts.count(), hosts.largest());
        let (inside, across) = match self {
            Self::AllReduce(plan) => return plan.cost(hosts),
            Self::ReduceScatter => {
                let inside = scattering(size, ReduceScatter::Ring).cost(size).magnified(count);
                (inside, scattering(count, ReduceScatter::Pairwise).cost(count))
            }
            Self::AllGather => (gathering(size).cost(size).magnified(count), gathering(count).cost(count)),
            Self::Broadcast(across) => {
                (Broadcast::Binomial.cost(size).magnified(across.chunks(count)), across.cost(count))
            }
            Self::Reduce(across) => {
                (Reduce::Binomial.cost(size).magnified(across.chunks(count)), across.cost(count))
            }
            Self::Barrier(across) => (AllReduce::Binomial.cost(size).magnified(0), across.cost(count)),
        };
        LevelCosts { inside, across }
    }

    /// Returns the number of chunks of the memory; a barrier has one empty chunk.
    pub fn chunks(self, hosts: &Hosts) -> usize {
        match self {
            Self::AllReduce(plan) => plan.chunks(hosts),
            Self::ReduceScatter | Self::AllGather => hosts.world_size(),
            Self::Broadcast(across) => across.chunks(hosts.count()),
            Self::Reduce(across) => across.chunks(hosts.count()),
            Self::Barrier(across) => across.chunks(hosts.count()),
        }
    }

    /// Returns the steps of a rank; `None` if the hosts are not supported or belong to another world. The root is
    /// ignored if the operation has none, and is taken modulo the size of the world.
    pub fn steps(self, rank: Rank, hosts: &Hosts, root: usize) -> Option<impl Iterator<Item = Step> + '_> {
        let (steps, gather) = match self {
            Self::AllReduce(plan) => {
                let phases = plan.phases(rank, hosts)?;
                (phases.reduce, Some(phases.gather))
            }
            Self::ReduceScatter => (reduce_scatter(rank, hosts)?, None),
            Self::AllGather => (all_gather(rank, hosts)?, None),
            Self::Broadcast(across) => (broadcast(rank, hosts, across, root)?, None),
            Self::Reduce(across) => (reduce(rank, hosts, across, root)?, None),
            Self::Barrier(across) => (barrier(rank, hosts, across)?, None),
        };
        Some(steps.chain(gather.into_iter().flatten()))
    }

    /// Returns the cheapest algorithm of an operation that reduces in this order or a stricter one, and its time.
    /// The cost models are those of messages inside hosts and between hosts. Returns `None` if there is no such
    /// algorithm, for example for canonical order on hosts that do not preserve it.
    pub fn suggest(
        operation: &str,
        hosts: &Hosts,
        bytes: usize,
        order: Order,
        inside: &CostModel,
        across: &CostModel,
    ) -> Option<(Self, u128)> {
        let fits = |two: &Self| two.supports(hosts) && two.keeps(order, hosts);
        let time = |two: Self| two.cost(hosts).picoseconds(inside, across, bytes, two.chunks(hosts));
        Self::of(operation).filter(fits).map(|two| (two, time(two))).min_by_key(|&(_, time)| time)
    }
}

impl fmt::Display for TwoLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

fn reduce(rank: Rank, hosts: &Hosts, across: Reduce, root: usize) -> Option<Steps<'_>> {
    let position = HostPosition::of(rank, hosts, root)?;
    let [first, second] = across.parts(position.across, hosts.of(position.root));
    let inside = binomial::reduce(position.inside, position.lead);
    let whole = HostPosition::whole(across.chunks(hosts.count()));
    Some(Steps::new([
        position.among_members(inside, whole),
        position.among_leaders(first),
        position.among_leaders(second),
    ]))
}

fn broadcast(rank: Rank, hosts: &Hosts, across: Broadcast, root: usize) -> Option<Steps<'_>> {
    let position = HostPosition::of(rank, hosts, root)?;
    let [first, second] = across.parts(position.across, hosts.of(position.root));
    let inside = binomial::broadcast(position.inside, position.lead);
    let whole = HostPosition::whole(across.chunks(hosts.count()));
    Some(Steps::new([
        position.among_leaders(first),
        position.among_leaders(second),
        position.among_members(inside, whole),
    ]))
}

fn barrier(rank: Rank, hosts: &Hosts, across: Barrier) -> Option<Steps<'_>> {
    let position = HostPosition::of(rank, hosts, 0)?;
    let (up, down) = (binomial::reduce(position.inside, 0), binomial::broadcast(position.inside, 0));
    Some(Steps::new([
        position.among_members(up, HostPosition::whole(0)),
        position.among_leaders(across.schedule(position.across)),
        position.among_members(down, HostPosition::whole(0)),
    ]))
}

fn all_gather(rank: Rank, hosts: &Hosts) -> Option<Steps<'_>> {
    let (position, size) = (HostPosition::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = gathering(hosts.count()).schedule(position.across)?;
    let inside = gathering(size).schedule(position.inside)?;
    let repeated = ChunkMap::Repeated { period: size, times: hosts.count() };
    Some(Steps::new([
        position.among_places(across, ChunkMap::Apart { first: hosts.place(rank.index()), step: size }),
        position.among_members(inside, repeated),
        position.nothing(),
    ]))
}

fn reduce_scatter(rank: Rank, hosts: &Hosts) -> Option<Steps<'_>> {
    let (position, size) = (HostPosition::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = scattering(hosts.count(), ReduceScatter::Pairwise).schedule(position.across)?;
    let inside = scattering(size, ReduceScatter::Ring).schedule(position.inside)?;
    let repeated = ChunkMap::Repeated { period: size, times: hosts.count() };
    Some(Steps::new([
        position.among_members(inside, repeated),
        position.among_places(across, ChunkMap::Apart { first: hosts.place(rank.index()), step: size }),
        position.nothing(),
    ]))
}

/// Returns the algorithm by which this many ranks gather. The chunks of its messages need not be consecutive.
const fn gathering(ranks: usize) -> AllGather {
    if ranks.is_power_of_two() { AllGather::RecursiveDoubling } else { AllGather::Ring }
}

/// Returns the algorithm by which this many ranks reduce and scatter. The chunks of its messages need not be
/// consecutive.
const fn scattering(ranks: usize, otherwise: ReduceScatter) -> ReduceScatter {
    if ranks.is_power_of_two() { ReduceScatter::HalvingDoubling } else { otherwise }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_in_their_operation() {
        for two in TwoLevel::all() {
            assert_eq!(TwoLevel::of(two.operation()).filter(|other| other.name() == two.name()).count(), 1);
        }
    }
}
