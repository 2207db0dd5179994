//! Two-level all_reduce.

use dist_transport::Rank;

use super::level::{ChunkMap, Steps};
use super::position::HostPosition;
use super::scattered::{gathering, scattering};
use super::{LevelCosts, TwoLevelAlgorithm};
use crate::{
    Chunks, CollectiveKind, Hosts, MessageAlgorithm, Phases, binomial, circulant, halving_doubling, pairwise,
    recursive_doubling, ring,
};

/// An all_reduce [`by_leaders`] with [`recursive_doubling::ALL_REDUCE`] between hosts.
pub static LEADERS_RECURSIVE_DOUBLING: TwoLevelAlgorithm =
    by_leaders("two_level/leaders/recursive_doubling", &recursive_doubling::ALL_REDUCE);
/// An all_reduce [`by_leaders`] with [`halving_doubling::ALL_REDUCE`] between hosts.
pub static LEADERS_HALVING_DOUBLING: TwoLevelAlgorithm =
    by_leaders("two_level/leaders/halving_doubling", &halving_doubling::ALL_REDUCE);
/// An all_reduce [`by_leaders`] with [`circulant::ALL_REDUCE`] between hosts.
pub static LEADERS_CIRCULANT: TwoLevelAlgorithm =
    by_leaders("two_level/leaders/circulant", &circulant::ALL_REDUCE);
/// An all_reduce [`by_leaders`] with [`binomial::ALL_REDUCE`] between hosts.
pub static LEADERS_BINOMIAL: TwoLevelAlgorithm =
    by_leaders("two_level/leaders/binomial", &binomial::ALL_REDUCE);
/// An all_reduce [`by_leaders`] with [`ring::ALL_REDUCE`] between hosts.
pub static LEADERS_RING: TwoLevelAlgorithm = by_leaders("two_level/leaders/ring", &ring::ALL_REDUCE);
/// An all_reduce [`by_leaders`] with [`pairwise::ALL_REDUCE`] between hosts.
pub static LEADERS_PAIRWISE: TwoLevelAlgorithm =
    by_leaders("two_level/leaders/pairwise_circulant", &pairwise::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`recursive_doubling::ALL_REDUCE`] between hosts.
pub static PARTS_RECURSIVE_DOUBLING: TwoLevelAlgorithm =
    by_parts("two_level/parts/recursive_doubling", &recursive_doubling::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`halving_doubling::ALL_REDUCE`] between hosts.
pub static PARTS_HALVING_DOUBLING: TwoLevelAlgorithm =
    by_parts("two_level/parts/halving_doubling", &halving_doubling::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`circulant::ALL_REDUCE`] between hosts.
pub static PARTS_CIRCULANT: TwoLevelAlgorithm = by_parts("two_level/parts/circulant", &circulant::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`binomial::ALL_REDUCE`] between hosts.
pub static PARTS_BINOMIAL: TwoLevelAlgorithm = by_parts("two_level/parts/binomial", &binomial::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`ring::ALL_REDUCE`] between hosts.
pub static PARTS_RING: TwoLevelAlgorithm = by_parts("two_level/parts/ring", &ring::ALL_REDUCE);
/// An all_reduce [`by_parts`] with [`pairwise::ALL_REDUCE`] between hosts.
pub static PARTS_PAIRWISE: TwoLevelAlgorithm =
    by_parts("two_level/parts/pairwise_circulant", &pairwise::ALL_REDUCE);

/// Returns an all_reduce in which one rank of each host communicates with other hosts.
///
/// Each host reduces the whole buffer to its first rank. These ranks execute the algorithm `across`, and then broadcast
/// the result inside their hosts. Any hosts are supported, and two hosts need one connection between them.
pub const fn by_leaders(name: &'static str, across: &'static MessageAlgorithm) -> TwoLevelAlgorithm {
    TwoLevelAlgorithm {
        collective: CollectiveKind::AllReduce,
        name,
        across,
        supports: |across, hosts| across.supports(hosts.count()),
        chunks: |across, hosts| across.chunks(hosts.count()),
        order: |across, hosts| Some(hosts.order().min(across.order(hosts.count())?)),
        cost: |across, hosts| {
            let inside = binomial::ALL_REDUCE.cost(hosts.largest());
            let chunks = across.chunks(hosts.count());
            LevelCosts { inside: inside.magnified(chunks), across: across.cost(hosts.count()) }
        },
        phases: leaders_phases,
    }
}

/// Returns an all_reduce in which every rank communicates with other hosts, for its part of the buffer.
///
/// A reduce_scatter inside each host gives each rank one part. The ranks with the same part execute the algorithm
/// `across`. Then an all_gather inside each host collects the parts. It moves the fewest bytes. All hosts must have the
/// same number of ranks.
pub const fn by_parts(name: &'static str, across: &'static MessageAlgorithm) -> TwoLevelAlgorithm {
    TwoLevelAlgorithm {
        collective: CollectiveKind::AllReduce,
        name,
        across,
        supports: |across, hosts| across.supports(hosts.count()) && hosts.regular().is_some(),
        chunks: |across, hosts| hosts.largest() * across.chunks(hosts.count()),
        order: |across, hosts| {
            let inside = scattering(hosts.largest(), &circulant::REDUCE_SCATTER).order(hosts.largest())?;
            Some(hosts.order().min(inside).min(across.order(hosts.count())?))
        },
        cost: |across, hosts| {
            let (count, size) = (hosts.count(), hosts.largest());
            let scatter = scattering(size, &circulant::REDUCE_SCATTER).cost(size);
            let inside = scatter.then(gathering(size, &circulant::ALL_GATHER).cost(size));
            LevelCosts { inside: inside.magnified(across.chunks(count)), across: across.cost(count) }
        },
        phases: parts_phases,
    }
}

fn leaders_phases<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    _: usize,
) -> Option<Phases<Steps<'a>>> {
    let position = HostPosition::of(rank, hosts, 0)?;
    let Phases { first, owned, second } = across.phases(position.across, 0);
    let whole = HostPosition::whole(across.chunks(hosts.count()));
    let (up, down) = (binomial::reduce(position.inside, 0), binomial::broadcast(position.inside, 0));
    Some(Phases {
        first: Steps::new([
            position.among_members(up, whole),
            position.among_leaders(first),
            position.nothing(),
        ]),
        owned: if position.inside.index() == 0 { owned } else { Chunks::NONE },
        second: Steps::new([
            position.among_leaders(second),
            position.among_members(down, whole),
            position.nothing(),
        ]),
    })
}

fn parts_phases<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    _: usize,
) -> Option<Phases<Steps<'a>>> {
    let size = hosts.regular()?;
    let position = HostPosition::of(rank, hosts, 0)?;
    let chunks = across.chunks(hosts.count());
    let Phases { first, owned, second } = across.phases(position.across, 0);
    let whole = HostPosition::whole(chunks);
    let own = ChunkMap::Neighbours { first: position.inside.index() * chunks, each: 1 };
    let scatter = scattering(size, &circulant::REDUCE_SCATTER).phases(position.inside, 0).first;
    let gather = gathering(size, &circulant::ALL_GATHER).phases(position.inside, 0).first;
    Some(Phases {
        first: Steps::new([
            position.among_members(scatter, whole),
            position.among_places(first, own),
            position.nothing(),
        ]),
        owned: own.of(owned),
        second: Steps::new([
            position.among_places(second, own),
            position.among_members(gather, whole),
            position.nothing(),
        ]),
    })
}
