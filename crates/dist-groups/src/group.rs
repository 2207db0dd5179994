//! Some ranks of a communicator, and a communicator of their own.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use dist_collectives::{Communicator, Hosts};

use crate::{Error, Result};

/// Some ranks of a parent communicator, numbered anew, with a communicator of their own: it dereferences to it.
///
/// Messages of different groups never meet, so groups that share ranks can be used at the same time, each from
/// its own thread. A group inherits its parent's timeout and order of reduction, and can be a parent itself.
///
/// Take a group if its members' numbers in the parent matter, or if the ranks do not all know the lists: it
/// translates numbers, and [`split`](Self::split) makes groups from what each rank knows of itself. If a list is at
/// hand and nothing is to be translated, [`Communicator::subgroup`] makes the same communicator without the table.
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
    /// The parent's numbers, in the group's order.
    members: Vec<usize>,
}

impl Group {
    /// The group of these ranks of the parent, numbered in the order of the list; `None` on ranks that are not in
    /// it. Nothing is communicated: every rank of the parent, member or not, makes the same call. Several groups
    /// that share no rank can be made by one call: each rank names the members of its own group.
    ///
    /// # Errors
    /// If the list is empty, names a rank twice, or one that the parent does not have; on every rank alike.
    #[doc(alias = "MPI_Comm_create")]
    #[doc(alias = "new_group")]
    pub fn new(parent: &mut Communicator, members: &[usize]) -> Result<Option<Self>> {
        check(members, parent.world_size())?;
        let communicator = parent.subgroup(members)?;
        let members = members.to_vec();
        Ok(communicator.map(|communicator| Self { communicator, members }))
    }

    /// The group of all ranks of the parent that give the same colour, numbered by key, and by their numbers in
    /// the parent where keys are equal; `None` for a rank that gives no colour. Takes one all_gather.
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
        // One call makes all groups. A rank of no colour makes it as well, to stay in step: it names a group that
        // it is not in.
        let group = match colour {
            Some(colour) => groups.remove(&i64::from(colour)),
            None => groups.into_values().next(),
        };
        let Some(mut group) = group else { return Ok(None) };
        group.sort_unstable();
        let members: Vec<usize> = group.into_iter().map(|(_, rank)| rank).collect();
        Self::new(parent, &members)
    }

    /// The ranks of the parent that run on this rank's host. Nothing is communicated; every rank of the parent makes
    /// the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_split_type")]
    pub fn on_host(parent: &mut Communicator) -> Result<Self> {
        let hosts = Hosts::new(&parent.hosts());
        Self::of_own(parent, hosts.members(hosts.of(parent.rank())))
    }

    /// The ranks of the parent that have this rank's number on their hosts, numbered by host: as many as there are
    /// hosts if all have [equally many](Hosts::regular), else those that there are. Nothing is communicated; every rank of
    /// the parent makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    pub fn across_hosts(parent: &mut Communicator) -> Result<Self> {
        let hosts = Hosts::new(&parent.hosts());
        let across: Vec<usize> = hosts.across(hosts.place(parent.rank())).collect();
        Self::of_own(parent, &across)
    }

    /// The first rank of each host, numbered by host; `None` on the others. Nothing is communicated; every rank of
    /// the parent makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    pub fn of_leaders(parent: &mut Communicator) -> Result<Option<Self>> {
        let leaders: Vec<usize> = Hosts::new(&parent.hosts()).leaders().collect();
        Self::new(parent, &leaders)
    }

    /// The group that this rank names, and is in.
    pub(crate) fn of_own(parent: &mut Communicator, members: &[usize]) -> Result<Self> {
        let group = Self::new(parent, members)?;
        Ok(group.expect("this rank is among the members"))
    }

    /// The same group once more, with messages of its own, for another thread. Nothing is communicated; every
    /// member makes the same call.
    ///
    /// # Errors
    /// If the transport cannot be forked.
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&mut self) -> Result<Self> {
        let communicator = self.communicator.fork()?;
        Ok(Self { communicator, members: self.members.clone() })
    }

    /// The members by their numbers in the parent, in the group's order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The number in the parent of the member with this number in the group; `None` if the group has no such rank.
    pub fn to_parent(&self, rank: usize) -> Option<usize> {
        self.members.get(rank).copied()
    }

    /// The number in the group of the rank with this number in the parent; `None` if it is no member.
    pub fn to_local(&self, parent_rank: usize) -> Option<usize> {
        position(&self.members, parent_rank)
    }

    /// The number in the world of the member with this number in the group, however many groups lie between;
    /// `None` if the group has no such rank.
    pub fn to_world(&self, rank: usize) -> Option<usize> {
        self.members_in_world().get(rank).copied()
    }

    /// The number in the group of the rank with this number in the world; `None` if it is no member.
    pub fn from_world(&self, world_rank: usize) -> Option<usize> {
        position(self.members_in_world(), world_rank)
    }

    /// The communicator alone.
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
