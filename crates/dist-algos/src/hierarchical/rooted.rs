//! Two-level broadcast and reduce: an algorithm between hosts, and a binomial tree inside each host.

use dist_transport::Rank;

use super::position::HostPosition;
use super::{LevelCosts, Steps, TwoLevelAlgorithm};
use crate::{CollectiveKind, Hosts, MessageAlgorithm, Phases, binomial, chain, circulant, knomial, pairwise};

/// A broadcast with [`binomial::BROADCAST`] between hosts.
pub static BROADCAST_BINOMIAL: TwoLevelAlgorithm = broadcast("two_level/binomial", &binomial::BROADCAST);
/// A broadcast with [`knomial::BROADCAST`] between hosts.
pub static BROADCAST_KNOMIAL: TwoLevelAlgorithm = broadcast("two_level/knomial", &knomial::BROADCAST);
/// A broadcast with [`chain::BROADCAST`] between hosts.
pub static BROADCAST_CHAIN: TwoLevelAlgorithm = broadcast("two_level/chain", &chain::BROADCAST);
/// A broadcast with [`circulant::BROADCAST`] between hosts.
pub static BROADCAST_CIRCULANT: TwoLevelAlgorithm =
    broadcast("two_level/scatter_circulant", &circulant::BROADCAST);
/// A reduce with [`binomial::REDUCE`] between hosts.
pub static REDUCE_BINOMIAL: TwoLevelAlgorithm = reduce("two_level/binomial", &binomial::REDUCE);
/// A reduce with [`pairwise::REDUCE`] between hosts.
pub static REDUCE_PAIRWISE: TwoLevelAlgorithm = reduce("two_level/pairwise_gather", &pairwise::REDUCE);

/// Returns a broadcast with this algorithm between hosts: first to the leader of each host, then inside each host. The
/// leader is the root on its own host, and the first rank on the others.
pub const fn broadcast(name: &'static str, across: &'static MessageAlgorithm) -> TwoLevelAlgorithm {
    TwoLevelAlgorithm {
        collective: CollectiveKind::Broadcast,
        name,
        across,
        supports: |across, hosts| across.supports(hosts.count()),
        chunks: |across, hosts| across.chunks(hosts.count()),
        order: |_, _| None,
        cost: |across, hosts| cost(&binomial::BROADCAST, across, hosts),
        phases: broadcast_phases,
    }
}

/// Returns a reduce with this algorithm between hosts: first inside each host to its leader, then from the leaders to
/// the root. The leader is the root on its own host, and the first rank on the others.
pub const fn reduce(name: &'static str, across: &'static MessageAlgorithm) -> TwoLevelAlgorithm {
    TwoLevelAlgorithm {
        collective: CollectiveKind::Reduce,
        name,
        across,
        supports: |across, hosts| across.supports(hosts.count()),
        chunks: |across, hosts| across.chunks(hosts.count()),
        order: |across, hosts| Some(hosts.order().min(across.order(hosts.count())?)),
        cost: |across, hosts| cost(&binomial::REDUCE, across, hosts),
        phases: reduce_phases,
    }
}

fn cost(inside: &MessageAlgorithm, across: &MessageAlgorithm, hosts: &Hosts) -> LevelCosts {
    let count = hosts.count();
    let inside = inside.cost(hosts.largest()).magnified(across.chunks(count));
    LevelCosts { inside, across: across.cost(count) }
}

fn broadcast_phases<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    root: usize,
) -> Option<Phases<Steps<'a>>> {
    let position = HostPosition::of(rank, hosts, root)?;
    let Phases { first, second, .. } = across.phases(position.across, hosts.of(position.root));
    let inside = binomial::broadcast(position.inside, position.lead);
    let whole = HostPosition::whole(across.chunks(hosts.count()));
    Some(position.one_phase([
        position.among_leaders(first),
        position.among_leaders(second),
        position.among_members(inside, whole),
    ]))
}

fn reduce_phases<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    root: usize,
) -> Option<Phases<Steps<'a>>> {
    let position = HostPosition::of(rank, hosts, root)?;
    let Phases { first, second, .. } = across.phases(position.across, hosts.of(position.root));
    let inside = binomial::reduce(position.inside, position.lead);
    let whole = HostPosition::whole(across.chunks(hosts.count()));
    Some(position.one_phase([
        position.among_members(inside, whole),
        position.among_leaders(first),
        position.among_leaders(second),
    ]))
}
