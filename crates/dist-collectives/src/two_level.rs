//! Algorithms that know which ranks share a host.

use std::fmt;
use std::sync::{Arc, LazyLock};

use dist_algos::hierarchical::{self, LevelCosts, Plan};
use dist_algos::{CostModel, Hosts, Order, Step};
use dist_transport::Rank;

use crate::algorithm::OneOf;
use crate::digest::digest;
use crate::{Algorithm, AllReduce, Barrier, Broadcast, Operation, Reduce};

/// How an operation is done among the ranks of each host, and across hosts. It needs to know
/// [which ranks share a host](crate::Communicator::set_hosts).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TwoLevel {
    /// Of all_reduce.
    AllReduce(Plan),
    /// Of reduce_scatter; for hosts of equally many neighbouring ranks.
    ReduceScatter,
    /// Of all_gather; for hosts of equally many neighbouring ranks.
    AllGather,
    /// Of broadcast, and what it is across hosts.
    Broadcast(Broadcast),
    /// Of reduce, and what it is across hosts.
    Reduce(Reduce),
    /// Of barrier, and what it is across hosts.
    Barrier(Barrier),
}

impl TwoLevel {
    /// Every one, whatever the hosts.
    fn all() -> impl Iterator<Item = Self> {
        let forms = [hierarchical::Form::Leaders, hierarchical::Form::Parts].into_iter();
        forms
            .flat_map(|form| AllReduce::ALL.iter().map(move |&across| Self::AllReduce(Plan { form, across })))
            .chain([Self::ReduceScatter, Self::AllGather])
            .chain(Broadcast::ALL.iter().map(|&across| Self::Broadcast(across)))
            .chain(Reduce::ALL.iter().map(|&across| Self::Reduce(across)))
            .chain(Barrier::ALL.iter().map(|&across| Self::Barrier(across)))
    }

    /// Every one of an operation, whatever the hosts.
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        Self::all().filter(move |two| two.operation() == operation)
    }

    /// The operation that this is an algorithm of.
    pub const fn operation(self) -> Operation {
        match self {
            Self::AllReduce(_) => Operation::AllReduce,
            Self::ReduceScatter => Operation::ReduceScatter,
            Self::AllGather => Operation::AllGather,
            Self::Broadcast(_) => Operation::Broadcast,
            Self::Reduce(_) => Operation::Reduce,
            Self::Barrier(_) => Operation::Barrier,
        }
    }

    /// The name, unique among the algorithms of its operation: `two_level`, and what is done across hosts.
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

    /// Whether there are schedules for these hosts.
    pub fn supports(self, hosts: &Hosts) -> bool {
        match self {
            Self::AllReduce(plan) => plan.supports(hosts),
            Self::ReduceScatter | Self::AllGather => hosts.contiguous().is_some(),
            Self::Broadcast(across) => across.supports(hosts.count()),
            Self::Reduce(across) => across.supports(hosts.count()),
            Self::Barrier(across) => across.supports(hosts.count()),
        }
    }

    /// In which order it reduces, or a stricter one, if it reduces.
    pub fn order(self, hosts: &Hosts) -> Option<Order> {
        match self {
            Self::AllReduce(plan) => Some(plan.order(hosts)),
            Self::ReduceScatter => Some(hierarchical::reduce_scatter_order(hosts)),
            Self::Reduce(across) => Some(hosts.order().min(across.order(hosts.count()))),
            Self::AllGather | Self::Broadcast(_) | Self::Barrier(_) => None,
        }
    }

    /// Whether it reduces in this order or a stricter one, if it reduces.
    pub(crate) fn keeps(self, order: Order, hosts: &Hosts) -> bool {
        self.order(hosts).is_none_or(|own| own >= order)
    }

    /// What it costs in hosts that it supports.
    pub fn cost(self, hosts: &Hosts) -> LevelCosts {
        match self {
            Self::AllReduce(plan) => plan.cost(hosts),
            Self::ReduceScatter => hierarchical::reduce_scatter_cost(hosts),
            Self::AllGather => hierarchical::all_gather_cost(hosts),
            Self::Broadcast(across) => hierarchical::broadcast_cost(hosts, across),
            Self::Reduce(across) => hierarchical::reduce_cost(hosts, across),
            Self::Barrier(across) => hierarchical::barrier_cost(hosts, across),
        }
    }

    /// Into how many chunks the memory is cut; one that is empty for a barrier.
    pub fn chunks(self, hosts: &Hosts) -> usize {
        match self {
            Self::AllReduce(plan) => plan.chunks(hosts),
            Self::ReduceScatter | Self::AllGather => hosts.world_size(),
            Self::Broadcast(across) => across.chunks(hosts.count()),
            Self::Reduce(across) => across.chunks(hosts.count()),
            Self::Barrier(_) => 1,
        }
    }

    /// What a rank does; `None` in hosts that it does not support or whose world is another. A root says nothing if the
    /// operation has none.
    pub fn steps(self, rank: Rank, hosts: &Hosts, root: usize) -> Option<impl Iterator<Item = Step> + '_> {
        let (steps, gather) = match self {
            Self::AllReduce(plan) => {
                let phases = plan.phases(rank, hosts)?;
                (Some(phases.reduce), Some(phases.gather))
            }
            Self::ReduceScatter => (hierarchical::reduce_scatter(rank, hosts), None),
            Self::AllGather => (hierarchical::all_gather(rank, hosts), None),
            Self::Broadcast(across) => (hierarchical::broadcast(rank, hosts, across, root), None),
            Self::Reduce(across) => (hierarchical::reduce(rank, hosts, across, root), None),
            Self::Barrier(across) => (hierarchical::barrier(rank, hosts, across), None),
        };
        Some(steps?.chain(gather.into_iter().flatten()))
    }
}

impl fmt::Display for TwoLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a communicator knows of hosts.
#[derive(Debug)]
pub(crate) struct Levels {
    pub(crate) hosts: Hosts,
    /// What messages between ranks of one host take.
    inside: CostModel,
    /// What stands in calls that go by it.
    digest: u64,
}

impl Levels {
    pub(crate) fn new(hosts: Hosts, inside: CostModel) -> Self {
        let digest = digest((0..hosts.world_size()).map(|rank| hosts.of(rank) as u64));
        Self { hosts, inside, digest }
    }

    /// What a group of these ranks knows.
    pub(crate) fn of(&self, members: &[usize]) -> Among {
        let ids: Vec<u64> = members.iter().map(|&member| self.hosts.of(member) as u64).collect();
        let hosts = Hosts::new(&ids);
        match hosts.count() {
            1 => Among::OneHost { inside: self.inside },
            _ => Among::Hosts(Self::new(hosts, self.inside)),
        }
    }

    /// The cheapest algorithm of two levels that reduces in this order or a stricter one, and how long it takes.
    pub(crate) fn suggest(
        &self,
        operation: Operation,
        bytes: usize,
        order: Order,
        across: &CostModel,
    ) -> Option<(TwoLevel, u128)> {
        let fits = |two: &TwoLevel| two.supports(&self.hosts) && two.keeps(order, &self.hosts);
        let time = |two: TwoLevel| {
            two.cost(&self.hosts).picoseconds(&self.inside, across, bytes, two.chunks(&self.hosts))
        };
        TwoLevel::of(operation).filter(fits).map(|two| (two, time(two))).min_by_key(|&(_, time)| time)
    }
}

/// Where the ranks of a subgroup run.
#[derive(Debug)]
pub(crate) enum Among {
    /// On one host: all messages are inside of it.
    OneHost { inside: CostModel },
    /// On several.
    Hosts(Levels),
}

/// An algorithm that serves a call: one that takes all ranks for alike, or one of two levels.
#[derive(Clone, Debug)]
pub(crate) enum Chosen<A> {
    Flat(A),
    TwoLevel(TwoLevel, Arc<Levels>),
}

impl<A: OneOf> Chosen<A> {
    pub(crate) fn algorithm(&self) -> Algorithm {
        match self {
            Self::Flat(algorithm) => (*algorithm).into(),
            Self::TwoLevel(two, _) => Algorithm::TwoLevel(*two),
        }
    }

    /// Into how many chunks the buffer is cut.
    pub(crate) fn chunks(&self, world_size: usize) -> usize {
        match self {
            Self::Flat(algorithm) => algorithm.chunks(world_size),
            Self::TwoLevel(two, levels) => two.chunks(&levels.hosts),
        }
    }

    /// What has to be in the call, beside the algorithm, for ranks to agree on the schedule.
    pub(crate) fn digest(&self) -> Option<u64> {
        match self {
            Self::Flat(_) => None,
            Self::TwoLevel(_, levels) => Some(levels.digest),
        }
    }
}

pub(crate) const SUPPORTED: &str = "settings choose what these hosts support, in a group of their ranks";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_in_their_operation_and_numbers_lead_back() {
        for operation in Operation::ALL {
            let all: Vec<Algorithm> = Algorithm::every(operation).collect();
            let mut names: Vec<_> = all.iter().map(|algorithm| algorithm.name()).collect();
            for algorithm in &all {
                assert_eq!(Algorithm::nth(operation, algorithm.index()), Some(*algorithm));
            }
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all.len(), "{operation}");
        }
    }
}
