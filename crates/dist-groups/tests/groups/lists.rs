//! Groups from lists, by colour and key, and duplicates.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_groups::{CommunicatorExt, Error, Group};
use rstest::rstest;

use crate::worlds::{gathered, run};

#[rstest]
#[case(&[0])]
#[case(&[4, 2, 0])]
#[case(&[1, 3])]
#[case(&[0, 1, 2, 3, 4])]
#[case(&[4, 3, 2, 1, 0])]
fn a_list_makes_a_group_in_its_order(#[case] members: &'static [usize]) {
    let groups = run(5, move |world| {
        let mut group = Group::new(world, members).unwrap()?;
        assert_eq!(group.members(), members);
        for (local, &parent) in members.iter().enumerate() {
            assert_eq!((group.to_parent(local), group.parent_to_local(parent)), (Some(parent), Some(local)));
        }
        assert_eq!((group.to_parent(members.len()), group.parent_to_local(5)), (None, None));
        Some(gathered(&mut group))
    });
    let expected: Vec<u64> = members.iter().map(|&member| member as u64).collect();
    for (rank, group) in groups.into_iter().enumerate() {
        assert_eq!(group, members.contains(&rank).then(|| expected.clone()), "rank {rank}");
    }
}

#[rstest]
#[case(&[], "a group needs at least one rank")]
#[case(&[0, 3], "rank 3 is outside the parent, which has 3 ranks")]
#[case(&[1, 0, 1], "rank 1 is named twice in the list of members")]
fn a_list_that_makes_no_group_is_refused_on_every_rank(
    #[case] members: &'static [usize],
    #[case] message: &'static str,
) {
    run(3, move |world| {
        assert_eq!(Group::new(world, members).unwrap_err().to_string(), message);
        // The numbering of later groups is not affected.
        let mut group = Group::new(world, &[2, 1, 0]).unwrap().unwrap();
        assert_eq!(gathered(&mut group), [2, 1, 0]);
    });
}

#[test]
fn a_split_numbers_by_key_and_then_by_rank() {
    let groups = run(7, |world| {
        let rank = world.rank();
        // Rank 6 is in no group. Odd ranks count backwards, even ones have equal keys.
        let colour = (rank != 6).then_some(u32::try_from(rank % 2).unwrap());
        let key = if rank % 2 == 1 { -i64::try_from(rank).unwrap() } else { i64::MIN };
        world.split(colour, key).unwrap().map(|mut group| gathered(&mut group))
    });
    let (even, odd) = (Some(vec![0, 2, 4]), Some(vec![5, 3, 1]));
    assert_eq!(groups, [even.clone(), odd.clone(), even.clone(), odd.clone(), even, odd, None]);
}

#[test]
fn a_split_without_colours_creates_no_group() {
    run(3, |world| {
        assert!(world.split(None, 0).unwrap().is_none());
        let mut group = world.split(Some(u32::MAX), 0).unwrap().unwrap();
        assert_eq!(gathered(&mut group), [0, 1, 2]);
    });
}

#[test]
fn a_split_is_one_all_gather() {
    let traffic = run(5, |world| {
        let rank = world.rank();
        let mut all = [0; 15];
        world.all_gather(&[0_i64; 3], &mut all).unwrap();
        let gather = world.traffic();
        let _group = world.split(Some(u32::try_from(rank % 3).unwrap()), 0).unwrap();
        (gather, world.traffic())
    });
    for (gather, both) in traffic {
        assert_eq!((both.messages_sent, both.bytes_sent), (2 * gather.messages_sent, 2 * gather.bytes_sent));
    }
}

#[test]
fn a_duplicate_has_the_same_table_and_messages_of_its_own() {
    run(4, |world| {
        let Some(mut group) = Group::new(world, &[3, 0, 2]).unwrap() else { return };
        let mut twin = group.duplicate().unwrap();
        assert_ne!(group.channel(), twin.channel());
        assert_eq!(twin.members(), group.members());
        assert_eq!(twin.members_in_world(), group.members_in_world());
        // Ranks use the two groups in different orders, and messages stay in their group.
        let right = (group.rank() + 1) % 3;
        group.send(&[1_u8], right).unwrap();
        twin.send(&[2_u8], right).unwrap();
        let (mut first, mut second, left) = ([0_u8], [0_u8], (group.rank() + 2) % 3);
        twin.recv(&mut second, left).unwrap();
        group.recv(&mut first, left).unwrap();
        assert_eq!((first, second), ([1], [2]));
        drop(group);
        assert_eq!(gathered(&mut twin), [3, 0, 2]);
    });
}

#[test]
fn one_call_makes_groups_that_share_no_rank() {
    let groups = run(6, |world| {
        let own: &[usize] = if world.rank().is_multiple_of(3) { &[3, 0] } else { &[1, 5, 4, 2] };
        let mut group = Group::new(world, own).unwrap().unwrap();
        gathered(&mut group)
    });
    let (pair, four) = (vec![3, 0], vec![1, 5, 4, 2]);
    assert_eq!(groups, [&pair, &four, &four, &pair, &four, &four].map(Clone::clone));
}

#[test]
fn groups_of_a_split_work_side_by_side_and_can_be_parents() {
    let sums = run(8, |world| {
        world.set_timeout(Duration::from_secs(9));
        let rank = u32::try_from(world.rank()).unwrap();
        let mut row = world.split(Some(rank / 4), 0).unwrap().unwrap();
        assert_eq!(row.timeout(), Duration::from_secs(9));
        let mut pair = row.split(Some(rank % 4 / 2), 0).unwrap().unwrap();
        let mut column = world.split(Some(rank % 4), 0).unwrap().unwrap().into_communicator();
        let reduce = |comm: &mut Communicator| {
            let mut sum = [rank];
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            sum[0]
        };
        [reduce(&mut row), reduce(&mut pair), reduce(&mut column)]
    });
    assert_eq!(sums[0], [6, 1, 4]);
    assert_eq!(sums[7], [22, 13, 10]);
    assert_eq!(sums[5], [22, 9, 6]);
}

#[test]
fn a_failed_split_names_the_cause() {
    run(2, |world| {
        if world.rank() == 1 {
            world.abort("enough");
            return;
        }
        let error = world.split(Some(0), 0).unwrap_err();
        let Error::Collective(error) = error else { panic!("{error}") };
        assert_eq!(error.peer(), Some(1));
    });
}

#[test]
fn a_rank_that_leaves_a_group_is_named_to_waiting_members() {
    let errors = run(3, |world| {
        let mut group = Group::new(world, &[2, 1, 0]).unwrap().unwrap();
        if world.rank() == 0 {
            drop(group);
            return world.barrier().unwrap_err();
        }
        group.barrier().unwrap_err()
    });
    // The rank has number 2 in the group that it has left, and 0 in the world.
    assert!(errors.iter().all(|error| error.peer() == Some(0)), "{errors:?}");
}

#[test]
fn a_group_of_one_does_not_wait() {
    let outcome = run(3, |world| {
        let started = world.runtime().now();
        if let Some(mut alone) = Group::new(world, &[1]).unwrap() {
            alone.barrier().unwrap();
            let mut values = [5.0_f64];
            alone.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            alone.broadcast(&mut values, 0).unwrap();
            assert_eq!(values, [5.0]);
            assert_eq!(alone.traffic().messages_sent, 0);
        }
        let waited = world.runtime().now() - started;
        world.barrier().unwrap();
        waited
    });
    assert_eq!(outcome, [Duration::ZERO; 3]);
}
