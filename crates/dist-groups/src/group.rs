//! [`Group`]: some ranks of a communicator, with their own communicator.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use dist_collectives::{Communicator, Hosts};

use crate::{Error, Result};

/// Some ranks of a parent communicator, renumbered, with their own communicator. A group dereferences to its
/// communicator.
///
/// Messages of different groups are separate, so groups that share ranks can be used at the same time, each on its
/// own thread. A group inherits its parent's timeout and order of reduction, and can be a parent itself.
///
/// Use a group to translate between its ranks and the ranks of the parent, or if not all ranks know the lists:
/// [`split`](Self::split) creates groups from values that each rank knows about itself. If you have a list and need
/// no translation, use [`Communicator::subgroup`].
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_groups::Group;
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 4, |transport| {
///     let mut world = Communicator::new(transport);
///     let Some(mut group) = Group::new(&mut world, &[3, 1]).unwrap() else { return None };
///     let mut values = [group.to_parent(group.rank()).unwrap() as u64];
///     group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
///     Some((group.rank(), values[0]))
/// });
/// assert_eq!(outcome.results, [None, Some((1, 4)), None, Some((0, 4))]);
/// ```
#[derive(Debug)]
pub struct Group {
    communicator: Communicator,
    /// The members by their numbers in the parent, in the group's order.
    members: Vec<usize>,
}

impl Group {
    /// Creates the group of these ranks of the parent, numbered in the order of the list. Returns `None` on ranks
    /// that are not in the list. Nothing is communicated. Every rank of the parent, member or not, makes the same
    /// call. One call can create several groups that share no rank: each rank lists the members of its own group.
    ///
    /// # Errors
    /// If the list is empty, repeats a rank, or contains a rank that the parent does not have. Every rank gets the
    /// same error.
    #[doc(alias = "MPI_Comm_create")]
    #[doc(alias = "new_group")]
    pub fn new(parent: &mut Communicator, members: &[usize]) -> Result<Option<Self>> {
        check(members, parent.world_size())?;
        let communicator = parent.subgroup(members)?;
        let members = members.to_vec();
        Ok(communicator.map(|communicator| Self { communicator, members }))
    }

    /// Creates the group of all ranks of the parent that pass the same colour. They are numbered by key, and by
    /// their numbers in the parent if keys are equal. Returns `None` on a rank that passes no colour. It needs one
    /// all_gather.
    ///
    /// # Errors
    /// If the all_gather fails.
    #[doc(alias = "MPI_Comm_split")]
    #[doc(alias = "ncclCommSplit")]
    #[doc(alias = "color")]
    pub fn split(parent: &mut Communicator, colour: Option<u32>, key: i64) -> Result<Option<Self>> {
        let own = [i64::from(colour.is_some()), i64::from(colour.unwrap_or(0)), key];
        let mut all = vec![0; own.len() * parent.world_size()];
        parent.all_gather(&own, &mut all)?;
        let mut groups = BTreeMap::<i64, Vec<(i64, usize)>>::new();
        for (rank, entry) in all.chunks_exact(own.len()).enumerate() {
            if entry[0] != 0 {
                groups.entry(entry[1]).or_default().push((entry[2], rank));
            }
        }
        // One call creates all groups. A rank without a colour makes it too, to keep the channels equal on all
        // ranks: it names a group that it is not in.
        let group = match colour {
            Some(colour) => groups.remove(&i64::from(colour)),
            None => groups.into_values().next(),
        };
        let Some(mut group) = group else { return Ok(None) };
        group.sort_unstable();
        let members: Vec<usize> = group.into_iter().map(|(_, rank)| rank).collect();
        Self::new(parent, &members)
    }

    /// Creates the group of the parent's ranks that run on this rank's host. Nothing is communicated. Every rank of
    /// the parent makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_split_type")]
    pub fn on_host(parent: &mut Communicator) -> Result<Self> {
        let hosts = Hosts::new(&parent.hosts());
        Self::of_own(parent, hosts.members(hosts.of(parent.rank())))
    }

    /// Creates the group of the parent's ranks that have the same position on their hosts as this rank, numbered by
    /// host. If all hosts have [equally many ranks](Hosts::regular), it has one rank of each host; otherwise some
    /// hosts may be missing. Nothing is communicated. Every rank of the parent makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    pub fn across_hosts(parent: &mut Communicator) -> Result<Self> {
        let hosts = Hosts::new(&parent.hosts());
        let across: Vec<usize> = hosts.across(hosts.place(parent.rank())).collect();
        Self::of_own(parent, &across)
    }

    /// Creates the group of the first rank of each host, numbered by host. Returns `None` on other ranks. Nothing
    /// is communicated. Every rank of the parent makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    pub fn of_leaders(parent: &mut Communicator) -> Result<Option<Self>> {
        let leaders: Vec<usize> = Hosts::new(&parent.hosts()).leaders().collect();
        Self::new(parent, &leaders)
    }

    /// Creates the group of these ranks, which include this rank.
    pub(crate) fn of_own(parent: &mut Communicator, members: &[usize]) -> Result<Self> {
        let group = Self::new(parent, members)?;
        Ok(group.expect("this rank is among the members"))
    }

    /// Creates another communicator for the same group, for another thread. Nothing is communicated. Every member
    /// makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&mut self) -> Result<Self> {
        let communicator = self.communicator.fork()?;
        Ok(Self { communicator, members: self.members.clone() })
    }

    /// Returns the members by their numbers in the parent, in the group's order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the number in the parent of the member with this number in the group; `None` if the group has no
    /// such rank.
    pub fn to_parent(&self, rank: usize) -> Option<usize> {
        self.members.get(rank).copied()
    }

    /// Returns the number in the group of the rank with this number in the parent; `None` if it is no member.
    pub fn to_local(&self, parent_rank: usize) -> Option<usize> {
        position(&self.members, parent_rank)
    }

    /// Returns the number in the world of the member with this number in the group, through any number of parent
    /// groups. Returns `None` if the group has no such rank.
    pub fn to_world(&self, rank: usize) -> Option<usize> {
        self.members_in_world().get(rank).copied()
    }

    /// Returns the number in the group of the rank with this number in the world; `None` if it is no member.
    pub fn from_world(&self, world_rank: usize) -> Option<usize> {
        position(self.members_in_world(), world_rank)
    }

    /// Returns the communicator without the group.
    pub fn into_communicator(self) -> Communicator {
        self.communicator
    }
}

impl Deref for Group {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.communicator
    }
}

impl DerefMut for Group {
    fn deref_mut(&mut self) -> &mut Communicator {
        &mut self.communicator
    }
}

fn position(members: &[usize], rank: usize) -> Option<usize> {
    members.iter().position(|&member| member == rank)
}

fn check(members: &[usize], world_size: usize) -> Result<()> {
    if members.is_empty() {
        return Err(Error::Empty);
    }
    let mut seen = vec![false; world_size];
    for &rank in members {
        match seen.get_mut(rank) {
            None => return Err(Error::UnknownRank { rank, world_size }),
            Some(true) => return Err(Error::DuplicateRank { rank }),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}
