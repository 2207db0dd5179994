//! The record of a two-level algorithm.

use std::fmt;

use dist_transport::Rank;

use super::{LevelCosts, Steps};
use crate::{CollectiveKind, Hosts, MessageAlgorithm, Order, Phases, Step};

/// The record of a two-level algorithm, which works inside each host and between hosts. Its schedules depend on the
/// host of each rank.
///
/// The fields are what an algorithm declares. The first argument of its functions is the algorithm
/// [between hosts](Self::across). Callers use the methods of the same names.
///
/// ```
/// use dist_algos::{Hosts, hierarchical};
///
/// let hosts = Hosts::new(&[7, 7, 7, 8, 8, 8]);
/// assert_eq!(hierarchical::BROADCAST_BINOMIAL.name, "two_level/binomial");
/// assert_eq!(hierarchical::BROADCAST_BINOMIAL.cost(&hosts).across.rounds, 1);
/// ```
pub struct TwoLevelAlgorithm {
    /// The operation.
    pub collective: CollectiveKind,
    /// The name, which is unique among the algorithms of the operation: `two_level` and the algorithm between hosts.
    pub name: &'static str,
    /// The algorithm between hosts.
    pub across: &'static MessageAlgorithm,
    /// Returns `true` if there are schedules for these hosts.
    pub supports: fn(&MessageAlgorithm, &Hosts) -> bool,
    /// Returns the number of chunks of the memory.
    pub chunks: fn(&MessageAlgorithm, &Hosts) -> usize,
    /// Returns a class of reduction order that the algorithm keeps at least; `None` if nothing is reduced.
    pub order: fn(&MessageAlgorithm, &Hosts) -> Option<Order>,
    /// Returns the cost for supported hosts and the most expensive root.
    pub cost: fn(&MessageAlgorithm, &Hosts) -> LevelCosts,
    /// Returns the schedule of a rank for a root; `None` if the hosts belong to another world.
    pub phases: TwoLevelPhases,
}

/// The type of [`TwoLevelAlgorithm::phases`]. The arguments are the algorithm between hosts, the rank, the hosts and
/// the root.
pub type TwoLevelPhases = for<'a> fn(&MessageAlgorithm, Rank, &'a Hosts, usize) -> Option<Phases<Steps<'a>>>;

impl TwoLevelAlgorithm {
    /// Returns `true` if there are schedules for these hosts.
    pub fn supports(&self, hosts: &Hosts) -> bool {
        (self.supports)(self.across, hosts)
    }

    /// Returns the number of chunks of the memory; a barrier has one empty chunk.
    pub fn chunks(&self, hosts: &Hosts) -> usize {
        (self.chunks)(self.across, hosts)
    }

    /// Returns a class of reduction order that the algorithm keeps at least; `None` if nothing is reduced. It is
    /// canonical only if [`Hosts::order`] is canonical.
    pub fn order(&self, hosts: &Hosts) -> Option<Order> {
        (self.order)(self.across, hosts)
    }

    /// Returns `true` if the algorithm reduces in this order or a stricter one, or reduces nothing.
    pub fn keeps(&self, order: Order, hosts: &Hosts) -> bool {
        self.order(hosts).is_none_or(|own| own >= order)
    }

    /// Returns the cost for supported hosts and the most expensive root.
    pub fn cost(&self, hosts: &Hosts) -> LevelCosts {
        (self.cost)(self.across, hosts)
    }

    /// Returns the schedule of a rank; `None` if the hosts are not supported or belong to another world. The root is
    /// ignored if the operation has none, and is taken modulo the size of the world.
    pub fn phases<'a>(&self, rank: Rank, hosts: &'a Hosts, root: usize) -> Option<Phases<Steps<'a>>> {
        if self.supports(hosts) { (self.phases)(self.across, rank, hosts, root) } else { None }
    }

    /// Returns the steps of a rank, as [`phases`](Self::phases) does.
    pub fn steps<'a>(
        &self,
        rank: Rank,
        hosts: &'a Hosts,
        root: usize,
    ) -> Option<impl Iterator<Item = Step> + use<'a>> {
        self.phases(rank, hosts, root).map(Phases::steps)
    }
}

impl fmt::Debug for TwoLevelAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.collective, self.name)
    }
}
