//! Direct schedules are proven in every world, and the verifier finds mistakes in them.

use dist_algos::direct::verify::mutate::DirectMutation;
use dist_algos::direct::verify::{DirectPrograms, check, plans, prove, prove_alone};
use dist_algos::direct::{
    DirectAlgorithm, DirectCollective, DirectPlan, DirectStep, PartSet, PeerSet, one_shot, read_from_all,
    staged, write_to_all,
};
use dist_algos::verify::mutate::Score;
use dist_algos::verify::on_all_cores;
use dist_algos::{ALGORITHMS, Algorithm, Error, Source};
use dist_transport::shm_group::{GroupLayout, MemoryArea, Reach};
use rstest::rstest;

/// Returns all operations and algorithms in a world, with the first and the last root.
fn all(world_size: usize) -> impl Iterator<Item = (DirectCollective, &'static DirectAlgorithm)> {
    let last = DirectCollective::all(world_size - 1)
        .into_iter()
        .filter(move |collective| world_size > 1 && collective.root().is_some());
    let collectives = DirectCollective::all(0).into_iter().chain(last);
    collectives.flat_map(|collective| {
        let served = ALGORITHMS.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        served.map(move |algorithm| (collective, algorithm))
    })
}

#[test]
fn every_schedule_is_proven_in_every_world() {
    let worlds: Vec<usize> = (1..=40).collect();
    let prove_world = |&world_size: &usize| {
        for (collective, algorithm) in all(world_size) {
            let plans = plans(collective, algorithm, world_size);
            prove(&plans)
                .unwrap_or_else(|error| panic!("{collective:?} {algorithm:?} {world_size}: {error}"));
        }
    };
    on_all_cores(&worlds, |&world_size| world_size, prove_world);
}

#[test]
fn every_plan_is_proven_alone_and_one_of_many_blocks_by_fewer() {
    let shared = GroupLayout { slot_bytes: 1 << 16, ..GroupLayout::on_host(Reach::Write) };
    for world_size in (1..=9).chain([16, 33, 64]) {
        for (collective, algorithm) in all(world_size) {
            let largest: &[usize] = if world_size > 9 { &[64] } else { &[0, 1, 64, 640, 64 * 30, 64 * 31] };
            for &part_bytes in largest {
                let plan = DirectPlan::new((collective, algorithm), world_size, part_bytes, 64, shared);
                let Some(plan) = plan else { continue };
                for generation in [0, 1] {
                    let plan = plan.with_generation(generation);
                    prove_alone(&plan).unwrap_or_else(|error| panic!("{plan:?}: {error}"));
                    let shortened = plan.shortened();
                    assert!(shortened.blocks() <= 24 && shortened.blocks() % 8 == plan.blocks() % 8);
                    // This proof includes all blocks and all knowledge of the ranks.
                    prove(&[plan]).unwrap_or_else(|error| panic!("{plan:?}: {error}"));
                }
            }
        }
    }
}

#[test]
fn plans_have_digests_of_their_own() {
    let mut digests: Vec<(u64, DirectPlan)> = Vec::new();
    for world_size in 1..=9 {
        for (collective, algorithm) in all(world_size) {
            let of =
                |collective, call: usize| plans(collective, algorithm, world_size)[call].with_generation(0);
            for call in 0..plans(collective, algorithm, world_size).len() {
                let plan = of(collective, call);
                let same = match collective {
                    DirectCollective::ReduceScatter { .. } => {
                        of(DirectCollective::ReduceScatter { of: Source::Buffer }, call)
                    }
                    DirectCollective::AllGather { .. } => {
                        of(DirectCollective::AllGather { of: Source::Buffer }, call)
                    }
                    _ => plan,
                };
                digests.push((plan.digest(), same));
            }
        }
    }
    digests.sort_unstable_by_key(|(digest, _)| *digest);
    for pair in digests.windows(2) {
        assert_eq!(pair[0].0 == pair[1].0, pair[0].1 == pair[1].1, "{pair:?}");
    }
}

/// The rank that reads a cell in a slot writes it when the slot is reused, and no two cells have the same place.
#[test]
fn two_ranks_alternate_in_the_cells_for_each_other() {
    const SLOTS: usize = 4;
    let is_for_one = |collective: &DirectCollective| {
        matches!(collective, DirectCollective::ReduceScatter { .. } | DirectCollective::AllToAll)
    };
    let scatters = [2, 3, 5]
        .into_iter()
        .flat_map(|p| DirectCollective::all(0).into_iter().filter(is_for_one).map(move |t| (t, p)));
    for (collective, world_size) in scatters.chain([(DirectCollective::AllReduce, 2)]) {
        let one_shot = ALGORITHMS.find(collective.kind(), "direct/one_shot");
        let Ok(Algorithm::Direct(one_shot)) = one_shot else { panic!("{one_shot:?}") };
        let all = plans(collective, one_shot, world_size);
        // Data in the flag line is in no slot.
        for plan in all.iter().filter(|plan| plan.slots() > 0) {
            let mut locations = Vec::new();
            let slot = MemoryArea::Slot(0);
            for (from, to) in (0..world_size).flat_map(|from| (0..world_size).map(move |to| (from, to))) {
                // If all ranks use one part, there is one cell for each rank.
                let (part, back) = if plan.parts() == 1 { (0, 0) } else { (to, from) };
                if from != to {
                    let location = plan.cell_location(from, (part, 0), slot);
                    assert_eq!(plan.cell_location(to, (back, SLOTS), slot), location, "{plan:?} {from} {to}");
                    locations.push(location);
                }
            }
            locations.sort_unstable();
            locations.dedup();
            assert_eq!(locations.len(), world_size * (world_size - 1), "{plan:?}");
        }
        // Plans of six blocks and of one.
        assert_eq!([all[0].generations(), all[1].generations()], [2, 1], "{collective:?}");
    }
}

#[test]
fn any_two_calls_can_follow_each_other() {
    for world_size in [2, 3] {
        let all: Vec<DirectPlan> = all(world_size)
            .flat_map(|(collective, algorithm)| plans(collective, algorithm, world_size).into_iter().take(4))
            .collect();
        for (index, &first) in all.iter().enumerate() {
            for &second in &all[index..] {
                let calls = [first, second, first, first, second, second];
                prove(&calls).unwrap_or_else(|error| panic!("{first:?} {second:?}: {error}"));
            }
        }
    }
}

#[test]
fn mutants_are_rejected() {
    let (mut mutants, mut swaps) = (0, 0);
    for world_size in [2, 3, 4] {
        for (collective, algorithm) in all(world_size) {
            let plans = plans(collective, algorithm, world_size);
            for mutated in 0..4 {
                let score = Score::of_call(&plans, mutated).expect("the original is right");
                mutants += score.mutants;
                for mutant in score.survivors {
                    // Surviving mutants are proven to be as good as the original: a slot is free earlier than
                    // necessary.
                    assert_eq!(
                        mutant.mutation,
                        DirectMutation::SwappedWithNext,
                        "{collective:?} {algorithm:?} {world_size}: {mutant}"
                    );
                    swaps += 1;
                }
            }
        }
    }
    assert!(mutants > 10_000 && swaps * 100 < mutants, "{swaps} of {mutants} pass");
}

/// Proves three calls of one all_reduce by three ranks, with changed steps.
fn planted(algorithm: &'static DirectAlgorithm, change: impl Fn(&mut Vec<DirectStep>)) -> Result<(), Error> {
    let plan = plans(DirectCollective::AllReduce, algorithm, 3)[3];
    let mut calls = vec![DirectPrograms::new(plan); 3];
    calls.iter_mut().flat_map(|call| &mut call.programs).for_each(change);
    check(&calls).map(drop)
}

/// Returns the step with another slot, as if there were only this many.
fn with_slots(step: DirectStep, slots: usize) -> DirectStep {
    let fewer =
        |place| if let MemoryArea::Slot(slot) = place { MemoryArea::Slot(slot % slots) } else { place };
    match step {
        DirectStep::Publish { parts, block, of, .. } => {
            DirectStep::Publish { parts, block, of, place: MemoryArea::Slot(block % slots) }
        }
        DirectStep::Reduce { part, block, of, into } => {
            let of = if fewer(of) == of && of == MemoryArea::Exposed {
                of
            } else {
                MemoryArea::Slot(block % slots)
            };
            DirectStep::Reduce { part, block, of, into }
        }
        DirectStep::Take { from, part, block, into, .. } => {
            DirectStep::Take { from, part, block, of: MemoryArea::Slot(block % slots), into }
        }
        step => step,
    }
}

#[rstest]
#[case::one_shot(&one_shot::ALL_REDUCE, 3)]
#[case::staged(&staged::ALL_REDUCE, 2)]
fn slots_that_are_used_again_too_early_are_a_race(
    #[case] algorithm: &'static DirectAlgorithm,
    #[case] too_few: usize,
) {
    assert_eq!(planted(algorithm, |_| ()), Ok(()));
    for slots in 1..=too_few {
        let error = planted(algorithm, |program| {
            program.iter_mut().for_each(|step| *step = with_slots(*step, slots))
        });
        assert!(matches!(error, Err(Error::Race { .. })), "{slots}: {error:?}");
    }
}

/// A pipeline that publishes a block while others use the previous one needs at least three slots. With two,
/// each rank would wait for the others to use a block that they can only use after they have waited for it in
/// turn.
#[test]
fn a_pipeline_of_two_slots_waits_for_ever() {
    let with_waits = |slots: usize| {
        planted(&one_shot::ALL_REDUCE, |program| {
            let free = |step: &DirectStep| match *step {
                DirectStep::Publish { block, .. } if block >= slots => {
                    let signals = u32::try_from(block + 3 - slots).unwrap();
                    vec![DirectStep::Wait { ranks: PeerSet::Others, signals }, with_slots(*step, slots)]
                }
                step => vec![with_slots(step, slots)],
            };
            *program = program.iter().flat_map(free).collect();
        })
    };
    assert!(matches!(with_waits(2), Err(Error::Deadlock { .. })), "{:?}", with_waits(2));
    assert_eq!(with_waits(3), Ok(()));
}

#[rstest]
#[case::one_shot(&one_shot::ALL_REDUCE)]
#[case::staged(&staged::ALL_REDUCE)]
#[case::read_from_all(&read_from_all::ALL_REDUCE)]
#[case::write_to_all(&write_to_all::ALL_REDUCE)]
fn a_wait_that_is_missing_is_noticed(#[case] algorithm: &'static DirectAlgorithm) {
    let waits = |program: &[DirectStep]| {
        program.iter().filter(|step| matches!(step, DirectStep::Wait { .. })).count()
    };
    let count = waits(&DirectPrograms::new(plans(DirectCollective::AllReduce, algorithm, 3)[3]).programs[0]);
    for missing in 0..count {
        let error = planted(algorithm, |program| {
            let mut index = 0;
            program.retain(|step| {
                let is_wait = matches!(step, DirectStep::Wait { .. });
                index += usize::from(is_wait);
                !is_wait || index != missing + 1
            });
        });
        let noticed =
            matches!(error, Err(Error::Race { .. } | Error::Unwritten { .. } | Error::WrongResult { .. }));
        assert!(noticed, "wait {missing}: {error:?}");
    }
}

#[test]
fn a_signal_before_its_data_is_a_race() {
    let error = planted(&one_shot::ALL_REDUCE, |program| program.swap(0, 1));
    assert!(matches!(error, Err(Error::Race { .. })), "{error:?}");
}

#[test]
fn a_rank_that_signals_less_often_than_the_others_is_named() {
    let plan = plans(DirectCollective::Broadcast { root: 0 }, &one_shot::BROADCAST, 3)[1];
    let mut call = DirectPrograms::new(plan);
    call.programs[2].retain(|step| *step != DirectStep::Signal);
    assert_eq!(check(&[call]), Err(Error::Signals { rank: 2, expected: 1, got: 0 }));
}

#[test]
fn a_barrier_that_can_be_left_early_is_none() {
    let mut call = DirectPrograms::new(plans(DirectCollective::Barrier, &one_shot::BARRIER, 3)[0]);
    call.programs[1][1] = DirectStep::Wait { ranks: PeerSet::One(0), signals: 1 };
    assert_eq!(check(&[call]), Err(Error::LeavesEarly { rank: 1, absent: 2 }));
}

#[test]
fn steps_that_name_missing_things_are_refused() {
    let plan = plans(DirectCollective::AllReduce, &one_shot::ALL_REDUCE, 2)[1];
    let with = |step: DirectStep| {
        let mut call = DirectPrograms::new(plan);
        call.programs[1][0] = step;
        check(&[call]).unwrap_err()
    };
    let of = Source::Buffer;
    let publish = |part, place| DirectStep::Publish { parts: PartSet::One(part), block: 0, of, place };
    assert!(matches!(with(publish(1, MemoryArea::Slot(0))), Error::NoChunk { rank: 1, step: 0, .. }));
    assert_eq!(with(publish(0, MemoryArea::Slot(9))), Error::BadSlot { rank: 1, step: 0, slot: 9 });
    assert_eq!(
        with(DirectStep::Wait { ranks: PeerSet::One(2), signals: 1 }),
        Error::NoPeer { rank: 1, step: 0, peer: 2 }
    );
    let read = DirectStep::Take { from: 0, part: 0, block: 0, of: MemoryArea::Exposed, into: 0 };
    assert_eq!(with(read), Error::Closed { rank: 1, step: 0 });
}
