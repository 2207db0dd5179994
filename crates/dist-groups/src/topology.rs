//! Which ranks share a host.

use dist_algos::Hosts;
use dist_collectives::Communicator;

/// Which ranks of a communicator share a host. Hosts are numbered in the order of their first ranks, and the ranks of
/// a host in the order of their numbers: the first of them is the host's leader.
///
/// These are numbers only. [`Group::on_host`](crate::Group::on_host), [`Group::across_hosts`](crate::Group::across_hosts)
/// and [`Group::of_leaders`](crate::Group::of_leaders) are groups made of them.
///
/// ```
/// use dist_groups::Topology;
///
/// let topology = Topology::new(&[70, 20, 70, 20, 20]);
/// assert_eq!((topology.ranks_on(0), topology.ranks_on(1)), (Some(&[0, 2][..]), Some(&[1, 3, 4][..])));
/// assert_eq!((topology.host_of(4), topology.local_rank_of(4)), (Some(1), Some(2)));
/// assert_eq!(topology.leaders(), [0, 1]);
/// assert_eq!(topology.across(1), [2, 3]);
/// assert!(!topology.is_regular());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology(Hosts);

impl Topology {
    /// Where the ranks of a communicator run, as the ranks said when they joined. Nothing is communicated.
    pub fn of(communicator: &Communicator) -> Self {
        Self::new(&communicator.hosts())
    }

    /// Where ranks run of which each one's host is given, by any number that it shares with no other host.
    pub fn new(host_of_rank: &[u64]) -> Self {
        Self(Hosts::new(host_of_rank))
    }

    /// The hosts as two-level schedules take them.
    pub fn hosts(&self) -> &Hosts {
        &self.0
    }

    /// How many hosts there are.
    pub fn host_count(&self) -> usize {
        self.0.count()
    }

    /// The ranks of a host in ascending order; `None` if there is no such host.
    pub fn ranks_on(&self, host: usize) -> Option<&[usize]> {
        (host < self.0.count()).then(|| self.0.members(host))
    }

    /// The number of a rank's host; `None` if there is no such rank.
    pub fn host_of(&self, rank: usize) -> Option<usize> {
        self.has(rank).then(|| self.0.of(rank))
    }

    /// A rank's number among the ranks of its host; `None` if there is no such rank.
    pub fn local_rank_of(&self, rank: usize) -> Option<usize> {
        self.has(rank).then(|| self.0.place(rank))
    }

    /// The first rank of each host.
    pub fn leaders(&self) -> Vec<usize> {
        self.0.leaders().collect()
    }

    /// The ranks with this number on their hosts, in the order of the hosts; hosts with fewer ranks have none.
    pub fn across(&self, local_rank: usize) -> Vec<usize> {
        (0..self.0.count()).filter_map(|host| self.0.members(host).get(local_rank)).copied().collect()
    }

    /// Whether all hosts have the same number of ranks.
    pub fn is_regular(&self) -> bool {
        self.0.regular().is_some()
    }

    /// Whether there are several hosts, and several ranks on one of them: where it is worth to go by host.
    pub fn has_levels(&self) -> bool {
        self.0.count() > 1 && self.0.largest() > 1
    }

    fn has(&self, rank: usize) -> bool {
        rank < self.0.world_size()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[], true, false)]
    #[case(&[9], true, false)]
    #[case(&[9, 9], true, false)]
    #[case(&[9, 8], true, false)]
    #[case(&[9, 8, 9], false, true)]
    #[case(&[9, 8, 9, 8], true, true)]
    fn hosts_are_counted(#[case] ids: &[u64], #[case] regular: bool, #[case] levels: bool) {
        let topology = Topology::new(ids);
        assert_eq!((topology.is_regular(), topology.has_levels()), (regular, levels));
    }

    proptest! {
        #[test]
        fn every_rank_is_where_its_id_is(ids in prop::collection::vec(0_u64..6, 0..40)) {
            let topology = Topology::new(&ids);
            for (rank, id) in ids.iter().enumerate() {
                let (host, local) = (topology.host_of(rank).unwrap(), topology.local_rank_of(rank).unwrap());
                let together: Vec<usize> = (0..ids.len()).filter(|&other| ids[other] == *id).collect();
                prop_assert_eq!(topology.ranks_on(host).unwrap(), &together);
                prop_assert_eq!(together[local], rank);
                prop_assert!(topology.across(local).contains(&rank));
            }
            prop_assert!(topology.leaders().is_sorted());
            prop_assert_eq!((topology.host_of(ids.len()), topology.local_rank_of(ids.len())), (None, None));
            prop_assert_eq!(topology.ranks_on(topology.host_count()), None);
            let counted: usize = (0..40).map(|local| topology.across(local).len()).sum();
            prop_assert_eq!(counted, ids.len());
        }
    }
}
