//! Two-level reduce_scatter and all_gather, for hosts with the same number of consecutive ranks.

use dist_transport::Rank;

use super::level::ChunkMap;
use super::position::HostPosition;
use super::{LevelCosts, Steps, TwoLevelAlgorithm};
use crate::{
    CollectiveKind, Hosts, MessageAlgorithm, Phases, halving_doubling, pairwise, recursive_doubling, ring,
};

/// A reduce_scatter: first inside each host, then among the ranks at the same position of all hosts. A host
/// sends each chunk of another host once, as the sum of its ranks. It is [`ALL_GATHER`] backwards.
pub static REDUCE_SCATTER: TwoLevelAlgorithm = TwoLevelAlgorithm {
    collective: CollectiveKind::ReduceScatter,
    name: "two_level",
    across: &pairwise::REDUCE_SCATTER,
    supports,
    chunks: |_, hosts| hosts.world_size(),
    order: |_, hosts| {
        let size = hosts.largest();
        Some(hosts.order().min(scattering(size, &ring::REDUCE_SCATTER).order(size)?))
    },
    cost: |across, hosts| {
        let (count, size) = (hosts.count(), hosts.largest());
        LevelCosts {
            inside: scattering(size, &ring::REDUCE_SCATTER).cost(size).magnified(count),
            across: scattering(count, across).cost(count),
        }
    },
    phases: reduce_scatter,
};

/// An all_gather: first among the ranks at the same position of all hosts, then inside each host. Every chunk
/// is sent to every other host once.
pub static ALL_GATHER: TwoLevelAlgorithm = TwoLevelAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "two_level",
    across: &ring::ALL_GATHER,
    supports,
    chunks: |_, hosts| hosts.world_size(),
    order: |_, _| None,
    cost: |across, hosts| {
        let (count, size) = (hosts.count(), hosts.largest());
        LevelCosts {
            inside: gathering(size, &ring::ALL_GATHER).cost(size).magnified(count),
            across: gathering(count, across).cost(count),
        }
    },
    phases: all_gather,
};

fn supports(_: &MessageAlgorithm, hosts: &Hosts) -> bool {
    hosts.contiguous().is_some_and(|size| size > 0)
}

fn reduce_scatter<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    _: usize,
) -> Option<Phases<Steps<'a>>> {
    let (position, size) = (HostPosition::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = scattering(hosts.count(), across).phases(position.across, 0).first;
    let inside = scattering(size, &ring::REDUCE_SCATTER).phases(position.inside, 0).first;
    let repeated = ChunkMap::Repeated { period: size, times: hosts.count() };
    Some(position.one_phase([
        position.among_members(inside, repeated),
        position.among_places(across, ChunkMap::Apart { first: hosts.place(rank.index()), step: size }),
        position.nothing(),
    ]))
}

fn all_gather<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    _: usize,
) -> Option<Phases<Steps<'a>>> {
    let (position, size) = (HostPosition::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = gathering(hosts.count(), across).phases(position.across, 0).first;
    let inside = gathering(size, &ring::ALL_GATHER).phases(position.inside, 0).first;
    let repeated = ChunkMap::Repeated { period: size, times: hosts.count() };
    Some(position.one_phase([
        position.among_places(across, ChunkMap::Apart { first: hosts.place(rank.index()), step: size }),
        position.among_members(inside, repeated),
        position.nothing(),
    ]))
}

/// Returns the reduce_scatter for this many ranks: halving-doubling for powers of two, and `otherwise` for others. The
/// chunks of a message need not be consecutive.
pub(super) const fn scattering(ranks: usize, otherwise: &MessageAlgorithm) -> &MessageAlgorithm {
    if ranks.is_power_of_two() { &halving_doubling::REDUCE_SCATTER } else { otherwise }
}

/// Returns the all_gather for this many ranks: recursive doubling for powers of two, and `otherwise` for others. The
/// chunks of a message need not be consecutive.
pub(super) const fn gathering(ranks: usize, otherwise: &MessageAlgorithm) -> &MessageAlgorithm {
    if ranks.is_power_of_two() { &recursive_doubling::ALL_GATHER } else { otherwise }
}
