//! Rank numbers in a group, in its parent and in the world, for nested groups.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use dist_collectives::Communicator;
use dist_groups::Group;
use proptest::prelude::*;

use crate::worlds::still;

/// Returns some of these ranks, in any order.
fn members(world_size: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::sample::subsequence((0..world_size).collect::<Vec<_>>(), 1..=world_size).prop_shuffle()
}

/// Returns a world's size, a group of its ranks, and a group of that group.
fn nested() -> impl Strategy<Value = (usize, Vec<usize>, Vec<usize>)> {
    (1_usize..=24).prop_flat_map(|world_size| (Just(world_size), members(world_size))).prop_flat_map(
        |(world_size, outer)| {
            let inner = members(outer.len());
            (Just(world_size), Just(outer), inner)
        },
    )
}

/// Returns the group of these members on each rank of a world.
fn everywhere(parents: &mut [Communicator], list: &[usize]) -> Vec<Option<Group>> {
    parents.iter_mut().map(|parent| Group::new(parent, list).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn exactly_the_members_are_in_a_group_and_translate_both_ways((world_size, list, _) in nested()) {
        let groups = everywhere(&mut still(world_size), &list);
        for (rank, group) in groups.iter().enumerate() {
            let place = list.iter().position(|&member| member == rank);
            prop_assert_eq!(group.as_ref().map(|group| group.rank()), place);
            let Some(group) = group else { continue };
            prop_assert_eq!(group.members(), &list[..]);
            prop_assert_eq!(group.world_size(), list.len());
            for number in (0..world_size + 2).chain([usize::MAX]) {
                prop_assert_eq!(group.to_parent(number), list.get(number).copied());
                prop_assert_eq!(group.parent_to_local(number), list.iter().position(|&member| member == number));
                if let Some(local) = group.parent_to_local(number) {
                    prop_assert_eq!(group.to_parent(local), Some(number));
                }
                if let Some(parent) = group.to_parent(number) {
                    prop_assert_eq!(group.parent_to_local(parent), Some(number));
                }
                // The parent is the world.
                prop_assert_eq!(group.to_world(number), group.to_parent(number));
                prop_assert_eq!(group.world_to_local(number), group.parent_to_local(number));
            }
        }
    }

    #[test]
    fn a_group_of_a_group_translates_to_the_world((world_size, outer, inner) in nested()) {
        let groups = everywhere(&mut still(world_size), &outer);
        for mut group in groups.into_iter().flatten() {
            let own = group.rank();
            let Some(inside) = Group::new(&mut group, &inner).unwrap() else {
                prop_assert!(!inner.contains(&own));
                continue;
            };
            let in_world: Vec<usize> = inner.iter().map(|&member| outer[member]).collect();
            prop_assert_eq!(inside.members_in_world(), &in_world[..]);
            for local in 0..=inner.len() {
                let by_hand = inside.to_parent(local).and_then(|parent| group.to_world(parent));
                prop_assert_eq!(inside.to_world(local), by_hand);
            }
            for rank in 0..=world_size {
                let by_hand = group.world_to_local(rank).and_then(|parent| inside.parent_to_local(parent));
                prop_assert_eq!(inside.world_to_local(rank), by_hand);
            }
        }
    }

    #[test]
    fn members_agree_on_a_channel_that_no_other_group_has((world_size, outer, inner) in nested()) {
        let mut world = still(world_size);
        let mut channels: Vec<u64> = world.iter().map(|comm| comm.channel().get()).collect();
        prop_assert!(channels.iter().all(|channel| *channel == channels[0]));
        channels.truncate(1);
        let mut add = |groups: &[Group]| {
            let channel = groups[0].channel();
            prop_assert!(groups.iter().all(|group| group.channel() == channel));
            prop_assert!(!channels.contains(&channel.get()));
            channels.push(channel.get());
            Ok(())
        };
        // The same lists twice: every call creates a new group.
        for _ in 0..2 {
            let mut groups: Vec<Group> = everywhere(&mut world, &outer).into_iter().flatten().collect();
            add(&groups)?;
            let inside = groups.iter_mut().filter_map(|group| Group::new(group, &inner).unwrap());
            add(&inside.collect::<Vec<_>>())?;
            let twins = groups.iter_mut().map(|group| group.duplicate().unwrap());
            add(&twins.collect::<Vec<_>>())?;
        }
    }
}
