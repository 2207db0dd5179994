//! [`CommunicatorExt`]: methods of a communicator that create groups.

use std::collections::BTreeMap;

use dist_collectives::Communicator;
use dist_collectives::tuning::Hosts;

use crate::{Group, Result};

/// An extension of [`Communicator`] with methods that create groups. Every rank of the communicator must make
/// the same call. A [`Group`] has them too, because it dereferences to its communicator.
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_groups::CommunicatorExt;
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 4, |transport| {
///     let mut world = Communicator::new(transport);
///     let parity = u32::from(world.rank() % 2 == 1);
///     let mut group = world.split(Some(parity), 0)?.expect("every rank has a parity");
///     let mut values = [group.members()[0]].map(|rank| rank as u64);
///     group.all_reduce(&mut values, ReduceOp::Sum)?;
///     Ok::<_, dist_groups::Error>(values[0])
/// });
/// let sums: Vec<u64> = outcome.results.into_iter().map(|sum| sum.unwrap()).collect();
/// assert_eq!(sums, [0, 2, 0, 2]);
/// ```
pub trait CommunicatorExt {
    /// Creates the group of all ranks that pass the same colour. They are numbered by key, and by their numbers in
    /// the communicator if keys are equal. Returns `None` on a rank that passes no colour. It needs one all_gather.
    ///
    /// # Errors
    /// If the all_gather fails.
    #[doc(alias = "MPI_Comm_split")]
    #[doc(alias = "ncclCommSplit")]
    #[doc(alias = "split_group")]
    #[doc(alias = "color")]
    fn split(&mut self, colour: Option<u32>, key: i64) -> Result<Option<Group>>;

    /// Creates the group of the ranks that run on this rank's host. Nothing is communicated.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_split_type")]
    #[doc(alias = "new_subgroups")]
    fn split_by_host(&mut self) -> Result<Group>;

    /// Creates the group of the ranks with the same position on their hosts as this rank, numbered by host. If all
    /// hosts have [equally many ranks](Hosts::regular), it contains one rank of each host; otherwise some hosts may
    /// be missing. Nothing is communicated.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    fn split_across_hosts(&mut self) -> Result<Group>;

    /// Creates the group of the first rank of each host, numbered by host. Returns `None` on other ranks. Nothing
    /// is communicated.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    fn host_leaders(&mut self) -> Result<Option<Group>>;
}

impl CommunicatorExt for Communicator {
    fn split(&mut self, colour: Option<u32>, key: i64) -> Result<Option<Group>> {
        let own = [i64::from(colour.is_some()), i64::from(colour.unwrap_or(0)), key];
        let mut all = vec![0; own.len() * self.world_size()];
        self.all_gather(&own, &mut all)?;
        let mut groups = BTreeMap::<i64, Vec<(i64, usize)>>::new();
        for (rank, entry) in all.chunks_exact(own.len()).enumerate() {
            if entry[0] != 0 {
                groups.entry(entry[1]).or_default().push((entry[2], rank));
            }
        }
        // One call creates all groups. A rank without a colour also makes the call, with a group that it is
        // not in, so that the channels stay equal on all ranks.
        let group = match colour {
            Some(colour) => groups.remove(&i64::from(colour)),
            None => groups.into_values().next(),
        };
        let Some(mut group) = group else { return Ok(None) };
        group.sort_unstable();
        let members: Vec<usize> = group.into_iter().map(|(_, rank)| rank).collect();
        Group::new(self, &members)
    }

    fn split_by_host(&mut self) -> Result<Group> {
        let hosts = Hosts::new(&self.hosts());
        Group::of_own(self, hosts.members(hosts.of(self.rank())))
    }

    fn split_across_hosts(&mut self) -> Result<Group> {
        let hosts = Hosts::new(&self.hosts());
        let across: Vec<usize> = hosts.across(hosts.place(self.rank())).collect();
        Group::of_own(self, &across)
    }

    fn host_leaders(&mut self) -> Result<Option<Group>> {
        let leaders: Vec<usize> = Hosts::new(&self.hosts()).leaders().collect();
        Group::new(self, &leaders)
    }
}
