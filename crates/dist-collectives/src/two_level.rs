//! The hosts of a communicator and the choice of two-level algorithms.

use std::sync::Arc;

use dist_algos::hierarchical::TwoLevelAlgorithm;
use dist_algos::{
    Algorithm, AlgorithmTable, CollectiveKind, CostModel, Hosts, MessageAlgorithm, Order, Phases, Step,
};
use dist_transport::Rank;

use crate::digest::digest;

/// The hosts of a communicator's ranks and the costs inside hosts.
#[derive(Debug)]
pub(crate) struct HostLevels {
    pub(crate) hosts: Hosts,
    /// The cost of messages between ranks of one host.
    inside: CostModel,
    /// A digest of the hosts, for calls that use a two-level algorithm.
    digest: u64,
}

impl HostLevels {
    pub(crate) fn new(hosts: Hosts, inside: CostModel) -> Self {
        let digest = digest((0..hosts.world_size()).map(|rank| hosts.of(rank) as u64));
        Self { hosts, inside, digest }
    }

    /// Returns the hosts of a group of these ranks.
    pub(crate) fn of(&self, members: &[usize]) -> SubgroupHosts {
        let ids: Vec<u64> = members.iter().map(|&member| self.hosts.of(member) as u64).collect();
        let hosts = Hosts::new(&ids);
        match hosts.count() {
            1 => SubgroupHosts::OneHost { inside: self.inside },
            _ => SubgroupHosts::Hosts(Self::new(hosts, self.inside)),
        }
    }

    /// Returns the costs of messages for an algorithm that treats all ranks alike. The ranks of a host then send to other
    /// hosts at the same time, and share the host's link.
    pub(crate) fn of_flat_algorithms(&self, across: CostModel) -> CostModel {
        let sharing = self.hosts.largest().max(1) as u64;
        CostModel { byte_ps: across.byte_ps.saturating_mul(sharing), ..across }
    }

    /// Returns the cheapest two-level algorithm of a table that reduces in this order or a stricter one, and its
    /// predicted time.
    pub(crate) fn suggest(
        &self,
        table: AlgorithmTable<'_>,
        collective: CollectiveKind,
        bytes: usize,
        order: Order,
        across: &CostModel,
    ) -> Option<(&'static TwoLevelAlgorithm, u128)> {
        table.suggest_two_level(collective, &self.hosts, bytes, order, [&self.inside, across])
    }
}

/// The hosts of a subgroup.
#[derive(Debug)]
pub(crate) enum SubgroupHosts {
    /// All ranks run on one host, and all messages stay inside it.
    OneHost { inside: CostModel },
    /// The ranks run on several hosts.
    Hosts(HostLevels),
}

/// The algorithm of a call: a flat one, which treats all ranks alike, or a two-level one.
#[derive(Clone, Debug)]
pub(crate) enum ChosenAlgorithm {
    Flat(&'static MessageAlgorithm),
    TwoLevel(&'static TwoLevelAlgorithm, Arc<HostLevels>),
}

impl ChosenAlgorithm {
    pub(crate) fn algorithm(&self) -> Algorithm {
        match self {
            Self::Flat(algorithm) => Algorithm::Messages(algorithm),
            Self::TwoLevel(two, _) => Algorithm::TwoLevel(two),
        }
    }

    /// Returns the number of chunks of the buffer.
    pub(crate) fn chunks(&self, world_size: usize) -> usize {
        match self {
            Self::Flat(algorithm) => algorithm.chunks(world_size),
            Self::TwoLevel(two, levels) => two.chunks(&levels.hosts),
        }
    }

    /// Returns the digest that the call carries beside the algorithm, so that ranks agree on the schedule.
    pub(crate) fn digest(&self) -> Option<u64> {
        match self {
            Self::Flat(_) => None,
            Self::TwoLevel(_, levels) => Some(levels.digest),
        }
    }

    /// Returns the steps of a rank in two phases; see [`Phases`].
    pub(crate) fn phases(&self, rank: Rank, root: usize) -> Phases<Vec<Step>> {
        match self {
            Self::Flat(algorithm) => algorithm.phases(rank, root).computed(),
            Self::TwoLevel(two, levels) => two.phases(rank, &levels.hosts, root).expect(SUPPORTED).computed(),
        }
    }
}

const SUPPORTED: &str =
    "the settings choose an algorithm that these hosts support, in a group of their ranks";
