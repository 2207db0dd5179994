//! The two-level barrier: each rank signals the first rank of its host, the first ranks execute a barrier, and then
//! they signal the ranks of their hosts.

use dist_transport::Rank;

use super::position::HostPosition;
use super::{LevelCosts, Steps, TwoLevelAlgorithm};
use crate::{Chunks, CollectiveKind, Hosts, MessageAlgorithm, Phases, barrier, binomial};

/// A barrier with [`barrier::RING`] between hosts.
pub static BARRIER_RING: TwoLevelAlgorithm = barrier("two_level/ring", &barrier::RING);
/// A barrier with [`barrier::DISSEMINATION`] between hosts.
pub static BARRIER_DISSEMINATION: TwoLevelAlgorithm =
    barrier("two_level/dissemination", &barrier::DISSEMINATION);

/// Returns a barrier with this algorithm between hosts.
pub const fn barrier(name: &'static str, across: &'static MessageAlgorithm) -> TwoLevelAlgorithm {
    TwoLevelAlgorithm {
        collective: CollectiveKind::Barrier,
        name,
        across,
        supports: |across, hosts| across.supports(hosts.count()),
        chunks: |across, hosts| across.chunks(hosts.count()),
        order: |_, _| None,
        cost: |across, hosts| LevelCosts {
            inside: binomial::ALL_REDUCE.cost(hosts.largest()).magnified(0),
            across: across.cost(hosts.count()),
        },
        phases,
    }
}

fn phases<'a>(
    across: &MessageAlgorithm,
    rank: Rank,
    hosts: &'a Hosts,
    _: usize,
) -> Option<Phases<Steps<'a>>> {
    let position = HostPosition::of(rank, hosts, 0)?;
    let (up, down) = (binomial::reduce(position.inside, 0), binomial::broadcast(position.inside, 0));
    let Phases { first, second, .. } = across.phases(position.across, 0);
    Some(Phases {
        first: Steps::new([
            position.among_members(up, HostPosition::whole(0)),
            position.among_leaders(first),
            position.among_leaders(second),
        ]),
        owned: Chunks::NONE,
        second: Steps::new([
            position.among_members(down, HostPosition::whole(0)),
            position.nothing(),
            position.nothing(),
        ]),
    })
}
