//! Overlapping groups used at the same time: each on its own thread, or started by one thread in any order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use dist_collectives::{Communicator, ReduceOp};
use dist_groups::{CommunicatorExt, Group};

use crate::worlds::{Dice, in_processes, run_seeded};

const GROUPS: usize = 8;
const ROUNDS: usize = 6;

/// Returns the groups of this rank, among groups that all ranks create, with their numbers.
fn groups(world: &mut Communicator, dice: &mut Dice) -> Vec<(usize, Group)> {
    let (rank, world_size) = (world.rank(), world.world_size());
    let mut own: Vec<(usize, Group)> = Vec::new();
    for number in 0..GROUPS {
        let members = dice.members(world_size);
        let colours = 1 + dice.below(3);
        let group = match number % 4 {
            0 => {
                let colour = dice.members(world_size).contains(&rank).then_some(rank % colours);
                let colour = colour.map(|colour| u32::try_from(colour).expect("three colours"));
                world.split(colour, -i64::try_from(rank).expect("few ranks")).unwrap()
            }
            1 => match own.last_mut() {
                // Every member of a group makes the same calls on it.
                Some((of, group)) if *of == number - 1 => Some(group.duplicate().unwrap()),
                _ => None,
            },
            _ => Group::new(world, &members).unwrap(),
        };
        own.extend(group.map(|group| (number, group)));
    }
    own
}

/// Uses a group for some rounds and checks that no data comes from another group, round or position.
fn talk(number: usize, group: &mut Group) {
    let size = group.world_size();
    for round in 0..ROUNDS {
        let stamp =
            |local: usize| [number, round, group.to_parent(local).expect("a member")].map(|n| n as u64);
        let expected: Vec<u64> = (0..size).flat_map(stamp).collect();
        let own = stamp(group.rank());
        let mut all = vec![0; own.len() * size];
        group.all_gather(&own, &mut all).unwrap();
        assert_eq!(all, expected);
        let mut values = contribution(number, round);
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert_eq!(values, total(number, round, size));
        let (left, right) = ((group.rank() + size - 1) % size, (group.rank() + 1) % size);
        let mut received = [0; 3];
        group.send(&own, right).unwrap();
        group.recv(&mut received, left).unwrap();
        assert_eq!(received, expected[3 * left..][..3]);
    }
}

/// Returns data whose length differs between groups and rounds.
fn contribution(number: usize, round: usize) -> Vec<u64> {
    vec![(1 + number * ROUNDS + round) as u64; 1 + (number * 7919 + round * 104_729) % 5000]
}

fn total(number: usize, round: usize, size: usize) -> Vec<u64> {
    contribution(number, round).into_iter().map(|value| value * size as u64).collect()
}

/// Starts a thread for each group, in another order on each rank.
fn talk_from_threads(world: &mut Communicator, seed: u64) {
    let mut own = groups(world, &mut Dice(seed));
    Dice(seed ^ world.rank() as u64).shuffle(&mut own);
    let runtime = world.runtime().clone();
    let start = |(number, mut group): (usize, Group)| {
        runtime.spawn("group", move || talk(number, &mut group)).unwrap()
    };
    let tasks: Vec<_> = own.into_iter().map(start).collect();
    tasks.into_iter().for_each(|task| task.join().unwrap());
}

/// Starts operations on all groups in one thread and then waits for them, both in another order on each rank.
fn talk_without_blocking(world: &mut Communicator, seed: u64) {
    let mut own = groups(world, &mut Dice(seed));
    let mut dice = Dice(seed ^ world.rank() as u64);
    let mut pending = Vec::new();
    for round in 0..ROUNDS {
        dice.shuffle(&mut own);
        for (number, group) in &mut own {
            let started = group.start_all_reduce(contribution(*number, round), ReduceOp::Sum);
            pending.push((started, total(*number, round, group.world_size())));
        }
    }
    dice.shuffle(&mut pending);
    for (started, expected) in pending {
        assert_eq!(started.wait().unwrap().into_vec(), expected);
    }
}

#[test]
fn threads_use_groups_that_overlap_in_every_interleaving() {
    for seed in 0..40 {
        let world_size = 2 + usize::try_from(seed % 5).unwrap();
        run_seeded(seed, world_size, move |world| talk_from_threads(world, seed));
    }
}

#[test]
fn one_thread_starts_on_groups_that_overlap_in_every_interleaving() {
    for seed in 0..40 {
        let world_size = 2 + usize::try_from(seed % 5).unwrap();
        run_seeded(seed, world_size, move |world| talk_without_blocking(world, seed));
    }
}

#[test]
fn threads_of_processes_use_groups_that_overlap() {
    in_processes(4, "concurrent::threads_of_processes_use_groups_that_overlap", |world| {
        (0..5).for_each(|seed| talk_from_threads(world, seed));
    });
}

#[test]
fn processes_start_on_groups_that_overlap() {
    in_processes(4, "concurrent::processes_start_on_groups_that_overlap", |world| {
        (0..5).for_each(|seed| talk_without_blocking(world, seed));
    });
}
