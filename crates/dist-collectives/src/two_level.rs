//! What a communicator knows of hosts, and what it chooses by that.

use std::sync::Arc;

use dist_algos::{CostModel, Hosts, Order};

use crate::algorithm::OneOf;
use crate::digest::digest;
use crate::{Algorithm, Operation, TwoLevel};

/// What a communicator knows of hosts.
#[derive(Debug)]
pub(crate) struct HostLevels {
    pub(crate) hosts: Hosts,
    /// What messages between ranks of one host take.
    inside: CostModel,
    /// What stands in calls that go by it.
    digest: u64,
}

impl HostLevels {
    pub(crate) fn new(hosts: Hosts, inside: CostModel) -> Self {
        let digest = digest((0..hosts.world_size()).map(|rank| hosts.of(rank) as u64));
        Self { hosts, inside, digest }
    }

    /// What a group of these ranks knows.
    pub(crate) fn of(&self, members: &[usize]) -> SubgroupHosts {
        let ids: Vec<u64> = members.iter().map(|&member| self.hosts.of(member) as u64).collect();
        let hosts = Hosts::new(&ids);
        match hosts.count() {
            1 => SubgroupHosts::OneHost { inside: self.inside },
            _ => SubgroupHosts::Hosts(Self::new(hosts, self.inside)),
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
        TwoLevel::suggest(operation.name(), &self.hosts, bytes, order, &self.inside, across)
    }
}

/// Where the ranks of a subgroup run.
#[derive(Debug)]
pub(crate) enum SubgroupHosts {
    /// On one host: all messages are inside of it.
    OneHost { inside: CostModel },
    /// On several.
    Hosts(HostLevels),
}

/// An algorithm that serves a call: one that takes all ranks for alike, or one of two levels.
#[derive(Clone, Debug)]
pub(crate) enum ChosenAlgorithm<A> {
    Flat(A),
    TwoLevel(TwoLevel, Arc<HostLevels>),
}

impl<A: OneOf> ChosenAlgorithm<A> {
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

    #[test]
    fn every_two_level_algorithm_is_of_the_operation_of_its_name() {
        for two in TwoLevel::all() {
            assert_eq!(Algorithm::from(two).operation().name(), two.operation());
        }
    }
}
