//! [`Group`]: some ranks of a communicator, with their own communicator.

use std::ops::{Deref, DerefMut};

use dist_collectives::Communicator;

#[cfg(doc)]
use crate::CommunicatorExt;
use crate::{Error, Result};

/// Some ranks of a parent communicator, renumbered, with their own communicator. A group dereferences to its
/// communicator.
///
/// Messages of different groups are separate, so groups that share ranks can be used at the same time, each on its
/// own thread. A group inherits its parent's timeout and order of reduction, and can be a parent itself.
///
/// Use a group to translate between its ranks and the ranks of the parent, or if not all ranks know the lists:
/// [`split`](CommunicatorExt::split) creates groups from values that each rank knows about itself. If you have a
/// list and need no translation, use [`Communicator::subgroup`].
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
#[doc(alias = "ProcessGroup")]
#[doc(alias = "MPI_Group")]
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
    #[doc(alias = "new_subgroups_by_enumeration")]
    pub fn new(parent: &mut Communicator, members: &[usize]) -> Result<Option<Self>> {
        check(members, parent.world_size())?;
        let communicator = parent.subgroup(members)?;
        let members = members.to_vec();
        Ok(communicator.map(|communicator| Self { communicator, members }))
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
    #[doc(alias = "get_process_group_ranks")]
    #[doc(alias = "MPI_Comm_group")]
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the number in the parent of the member with this number in the group; `None` if the group has no
    /// such rank.
    #[doc(alias = "MPI_Group_translate_ranks")]
    pub fn to_parent(&self, rank: usize) -> Option<usize> {
        self.members.get(rank).copied()
    }

    /// Returns the number in the group of the rank with this number in the parent; `None` if it is no member.
    #[doc(alias = "MPI_Group_translate_ranks")]
    pub fn parent_to_local(&self, parent_rank: usize) -> Option<usize> {
        position(&self.members, parent_rank)
    }

    /// Returns the number in the world of the member with this number in the group, through any number of parent
    /// groups. Returns `None` if the group has no such rank.
    #[doc(alias = "get_global_rank")]
    pub fn to_world(&self, rank: usize) -> Option<usize> {
        self.members_in_world().get(rank).copied()
    }

    /// Returns the number in the group of the rank with this number in the world; `None` if it is no member.
    #[doc(alias = "get_group_rank")]
    pub fn world_to_local(&self, world_rank: usize) -> Option<usize> {
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
