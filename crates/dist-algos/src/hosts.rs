//! The hosts of ranks.

use std::collections::HashMap;
use std::ops::Range;

use crate::Order;

/// The ranks of each host of a world. Hosts are numbered in the order of their first ranks, which are the leaders.
///
/// ```
/// use dist_algos::Hosts;
///
/// let hosts = Hosts::new(&[70, 70, 8, 70, 8]);
/// assert_eq!(hosts.members(0), [0, 1, 3]);
/// assert_eq!(hosts.members(1), [2, 4]);
/// assert_eq!(hosts.leaders().collect::<Vec<_>>(), [0, 2]);
/// assert_eq!((hosts.of(3), hosts.place(3)), (0, 2));
/// assert_eq!(hosts.across(1).collect::<Vec<_>>(), [1, 4]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// Each rank's host, and its position among the ranks of that host.
    places: Vec<(usize, usize)>,
    /// All ranks, host by host.
    members: Vec<usize>,
    /// The index of each host's first rank in `members`, and the end of the last host.
    starts: Vec<usize>,
}

impl Hosts {
    /// Groups ranks by the names of their hosts; any names will do.
    pub fn new(host_of_rank: &[u64]) -> Self {
        let mut numbers = HashMap::new();
        let mut sizes: Vec<usize> = Vec::new();
        let mut places = Vec::new();
        for name in host_of_rank {
            let host = *numbers.entry(name).or_insert(sizes.len());
            if host == sizes.len() {
                sizes.push(0);
            }
            places.push((host, sizes[host]));
            sizes[host] += 1;
        }
        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts[starts.len() - 1] + size);
        }
        let mut members = vec![0; places.len()];
        for (rank, &(host, place)) in places.iter().enumerate() {
            members[starts[host] + place] = rank;
        }
        Self { places, members, starts }
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of hosts.
    pub fn count(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the host of a rank.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn of(&self, rank: usize) -> usize {
        self.places[rank].0
    }

    /// Returns the position of a rank among the ranks of its host.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn place(&self, rank: usize) -> usize {
        self.places[rank].1
    }

    /// Returns the ranks of a host, in ascending order.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn members(&self, host: usize) -> &[usize] {
        &self.members[self.starts[host]..self.starts[host + 1]]
    }

    /// Returns the first rank of each host.
    pub fn leaders(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.count()).map(|host| self.members(host)[0])
    }

    /// Returns the ranks at this position on their hosts, host by host. Hosts with fewer ranks are left out.
    pub fn across(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.count()).filter_map(move |host| self.members(host).get(place)).copied()
    }

    /// Returns the number of ranks of the largest host.
    pub fn largest(&self) -> usize {
        (0..self.count()).map(|host| self.members(host).len()).max().unwrap_or(0)
    }

    /// Returns the number of ranks per host, if it is the same for all hosts.
    pub fn regular(&self) -> Option<usize> {
        let largest = self.largest();
        (largest * self.count() == self.world_size()).then_some(largest)
    }

    /// Returns the number of ranks per host, if it is the same for all hosts and the ranks of each host are
    /// consecutive.
    pub fn contiguous(&self) -> Option<usize> {
        self.regular().filter(|_| self.members.is_sorted())
    }

    /// Returns the order of a reduction that is canonical on every host and between the hosts. It is canonical if
    /// every host is a subtree of T(p): each host has 2^k consecutive ranks, and the last one may have fewer.
    /// Otherwise it is uniform.
    pub fn order(&self) -> Order {
        let subtrees = self.members.is_sorted() && self.are_subtrees(0..self.count());
        if subtrees { Order::Canonical } else { Order::Uniform }
    }

    /// Returns `true` if the canonical tree over these hosts splits at the same ranks as the canonical tree over
    /// their ranks. The ranks of each host are consecutive.
    fn are_subtrees(&self, hosts: Range<usize>) -> bool {
        if hosts.len() < 2 {
            return true;
        }
        let middle = hosts.start + hosts.len().next_power_of_two() / 2;
        let ranks = |hosts: Range<usize>| self.starts[hosts.end] - self.starts[hosts.start];
        let split = ranks(hosts.clone()).next_power_of_two() / 2;
        ranks(hosts.start..middle) == split
            && self.are_subtrees(hosts.start..middle)
            && self.are_subtrees(middle..hosts.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Hosts of consecutive ranks with these numbers of ranks.
    fn of_sizes(sizes: &[usize]) -> Hosts {
        let names: Vec<u64> = (0..).zip(sizes).flat_map(|(host, &size)| vec![host; size]).collect();
        Hosts::new(&names)
    }

    #[test]
    fn hosts_are_numbered_by_their_first_ranks() {
        let hosts = Hosts::new(&[9, 3, 9, 1, 3, 9]);
        assert_eq!((hosts.count(), hosts.world_size(), hosts.largest()), (3, 6, 3));
        assert_eq!([0, 1, 2].map(|host| hosts.members(host).to_vec()), [vec![0, 2, 5], vec![1, 4], vec![3]]);
        assert!((0..6).all(|rank| hosts.members(hosts.of(rank))[hosts.place(rank)] == rank));
        assert_eq!((hosts.regular(), hosts.contiguous()), (None, None));
    }

    #[test]
    fn hosts_of_one_size_are_regular_and_contiguous_if_their_ranks_are_neighbours() {
        let (neighbours, strided_count) = (of_sizes(&[3, 3]), Hosts::new(&[0, 1, 0, 1]));
        assert_eq!((neighbours.regular(), neighbours.contiguous()), (Some(3), Some(3)));
        assert_eq!((strided_count.regular(), strided_count.contiguous()), (Some(2), None));
    }

    #[test]
    fn a_world_without_ranks_has_no_hosts() {
        let nobody = Hosts::new(&[]);
        assert_eq!((nobody.count(), nobody.world_size(), nobody.largest()), (0, 0, 0));
        assert_eq!(nobody.leaders().len(), 0);
    }

    #[test]
    fn neighbours_by_a_power_of_two_keep_the_canonical_order() {
        for sizes in [&[4, 4, 4][..], &[4, 4, 3], &[7], &[1, 1, 1, 1, 1], &[8, 5], &[2, 2, 4]] {
            assert_eq!(of_sizes(sizes).order(), Order::Canonical, "{sizes:?}");
        }
        for sizes in [&[3, 3][..], &[3, 4], &[4, 2, 2], &[4, 5], &[1, 2]] {
            assert_eq!(of_sizes(sizes).order(), Order::Uniform, "{sizes:?}");
        }
        assert_eq!(Hosts::new(&[0, 1, 0, 1]).order(), Order::Uniform);
    }

    proptest! {
        #[test]
        fn every_rank_is_where_its_name_is(names in prop::collection::vec(0_u64..6, 0..40)) {
            let hosts = Hosts::new(&names);
            for (rank, name) in names.iter().enumerate() {
                let together: Vec<usize> = (0..names.len()).filter(|&other| names[other] == *name).collect();
                prop_assert_eq!(hosts.members(hosts.of(rank)), &together);
                prop_assert_eq!(together[hosts.place(rank)], rank);
                prop_assert!(hosts.across(hosts.place(rank)).any(|other| other == rank));
            }
            prop_assert!(hosts.leaders().eq(hosts.across(0)) && hosts.leaders().is_sorted());
            prop_assert_eq!((0..40).flat_map(|place| hosts.across(place)).count(), names.len());
        }
    }
}
