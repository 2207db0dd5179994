//! Permutations, steps and places of samplers, and streams.

use std::collections::HashMap;

use dist_collectives::Communicator;
use dist_transport::sim;
use proptest::prelude::*;

use super::permutation::{Permutation, keyed};
use super::{LastStep, Sampler, SamplerStep, StreamSteps};
use crate::Error;

const WORLDS: [usize; 5] = [1, 2, 3, 5, 8];

fn permutation(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
    (0..len).map(|place| Permutation::new(len, seed, epoch).at(place)).collect()
}

/// Returns the examples of a step that the ranks of a world compute, rank by rank.
fn computed_by(world_size: usize, step: &SamplerStep) -> Vec<usize> {
    let shares = (0..world_size).flat_map(|rank| step.share(rank, world_size));
    shares.flat_map(|micro_batch| step.examples(micro_batch).unwrap()).collect()
}

fn examples_of(steps: impl IntoIterator<Item = SamplerStep>) -> Vec<usize> {
    steps.into_iter().flat_map(|step| computed_by(1, &step)).collect()
}

/// Another program computed these from the description of the algorithm. They must never change: a training that
/// continues with a newer version would see some examples twice and others never.
#[test]
fn permutations_are_the_same_in_every_version() {
    assert_eq!(permutation(10, 0, 0), [4, 0, 7, 3, 1, 9, 8, 2, 6, 5]);
    assert_eq!(permutation(10, 0, 1), [0, 4, 3, 1, 5, 8, 6, 9, 2, 7]);
    assert_eq!(permutation(10, 1, 0), [6, 2, 7, 3, 4, 5, 0, 1, 9, 8]);
    assert_eq!(permutation(7, 42, 3), [6, 2, 5, 4, 1, 0, 3]);
    assert_eq!(permutation(1000, 7, 2)[..8], [362, 887, 792, 514, 830, 817, 100, 716]);
    let long = Permutation::new((1 << 40) + 7, 3, 4);
    let ends = [0, 1, (1 << 40) + 6].map(|place| long.at(place));
    assert_eq!(ends, [1_002_736_803_073, 546_770_235_265, 81_477_003_525]);
    assert_eq!(keyed([7, 1, 64, 3]), 10_730_510_997_325_471_589);
}

#[test]
fn a_sampler_gives_the_same_examples_in_every_version() {
    let sampler = Sampler { len: 10, seed: 1, batch: 2, micro_batches: 2, ..Sampler::default() };
    let last = sampler.steps().unwrap().last().unwrap();
    assert_eq!(last.examples(0).unwrap(), [9, 8]);
    assert_eq!(last.examples(1).unwrap(), [6, 2], "the last step is filled up with the first examples");
    assert_eq!(last.seed(1), keyed([1, 0, 8, 1]));
    let saved =
        r#"{"len":10,"seed":1,"epoch":0,"taken":10,"shuffle":true,"batch":2,"micro_batches":2,"last":"Pad"}"#;
    assert_eq!(serde_json::to_string(&last.rest()).unwrap(), saved);
    assert_eq!(serde_json::from_str::<Sampler>(saved).unwrap(), last.rest());
}

/// The counts are deterministic: the seeds are the numbers from 0 on.
#[test]
fn all_orders_of_a_small_data_set_are_about_equally_frequent() {
    let mut counts: HashMap<Vec<u64>, u32> = HashMap::new();
    (0..2400).for_each(|seed| *counts.entry(permutation(4, seed, 0)).or_default() += 1);
    assert_eq!(counts.len(), 24);
    // 100 each; the standard deviation is 10.
    assert!(counts.values().all(|count| (65..135).contains(count)), "{counts:?}");
}

#[test]
fn neighbours_do_not_stay_neighbours() {
    let order = permutation(2000, 5, 0);
    let neighbours = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
    assert!(neighbours < 10, "2 are expected, {neighbours} were found");
    let displacement =
        order.iter().zip(0..).map(|(&example, place)| example.abs_diff(place)).sum::<u64>() / 2000;
    assert!(
        (600..734).contains(&displacement),
        "a third of the length is expected, {displacement} was found"
    );
}

#[test]
fn epochs_and_seeds_differ() {
    let sampler = Sampler { len: 100, ..Sampler::default() };
    let order = |sampler: Sampler| examples_of(sampler.steps().unwrap());
    let orders = [sampler, sampler.with_epoch(1), Sampler { seed: 1, ..sampler }].map(order);
    assert!(orders[0] != orders[1] && orders[0] != orders[2] && orders[1] != orders[2]);
    assert_eq!(order(Sampler { shuffle: false, ..sampler }), (0..100).collect::<Vec<_>>());
}

fn samplers() -> impl Strategy<Value = Sampler> {
    let last = prop_oneof![Just(LastStep::Pad), Just(LastStep::Drop), Just(LastStep::Keep)];
    (0..70_usize, 0..3_u64, any::<bool>(), 1..5_usize, 1..9_usize, last).prop_map(
        |(len, seed, shuffle, batch, micro_batches, last)| Sampler {
            len,
            seed,
            shuffle,
            batch,
            micro_batches,
            last,
            ..Sampler::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_number_has_one_place(len in 1..300_u64, seed: u64, epoch: u64) {
        let mut all = permutation(len, seed, epoch);
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..len));
    }

    #[test]
    fn an_epoch_has_every_example_once_except_by_the_rule_of_its_last_step(sampler in samplers()) {
        let whole = sampler.batch * sampler.micro_batches;
        let order: Vec<_> = (0..sampler.len).map(|place| sampler.example_at(place)).collect();
        let expected: Vec<_> = match sampler.last {
            LastStep::Keep => order,
            LastStep::Drop => order[..sampler.len / whole * whole].to_vec(),
            LastStep::Pad => order.iter().copied().cycle().take(sampler.len.div_ceil(whole) * whole).collect(),
        };
        let steps: Vec<_> = sampler.steps().unwrap().collect();
        prop_assert_eq!(steps.len(), sampler.steps_per_epoch().unwrap());
        prop_assert_eq!(examples_of(steps), expected);
    }

    #[test]
    fn the_ranks_of_any_world_compute_the_examples_of_one_rank(sampler in samplers()) {
        for step in sampler.endless_steps().unwrap().take(9) {
            for world_size in WORLDS {
                prop_assert_eq!(computed_by(world_size, &step), computed_by(1, &step));
            }
        }
    }

    #[test]
    fn a_training_goes_on_after_any_step_as_if_it_had_not_stopped(sampler in samplers(), stop in 0..40_usize) {
        let whole: Vec<_> = sampler.endless_steps().unwrap().take(stop + 20).collect();
        let rest = sampler.after(stop as u64).unwrap();
        if let Some(last) = whole.get(stop.wrapping_sub(1)) {
            prop_assert_eq!(rest, last.rest());
        }
        let resumed: Vec<_> = rest.endless_steps().unwrap().take(20).collect();
        let expected: Vec<_> = whole.iter().skip(stop).collect();
        prop_assert!(resumed.iter().eq(expected));
        // From the middle of an epoch as well.
        let again = sampler.after(stop as u64 / 2).unwrap().after((stop - stop / 2) as u64).unwrap();
        prop_assert_eq!(again, rest);
    }

    #[test]
    fn a_training_that_goes_on_with_steps_of_another_size_takes_every_example_once(
        sampler in samplers(), batch in 1..5_usize, micro_batches in 1..9_usize, stop in 0..10_usize,
    ) {
        let sampler = Sampler { last: LastStep::Keep, ..sampler };
        let first: Vec<_> = sampler.steps().unwrap().take(stop).collect();
        let rest = first.last().map_or(sampler, SamplerStep::rest);
        let second = Sampler { batch, micro_batches, ..rest }.steps().unwrap();
        let mut all = examples_of(first.into_iter().chain(second));
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..sampler.len));
    }

    #[test]
    fn a_stream_is_cut_as_the_numbers_of_its_examples_are(sampler in samplers()) {
        let Sampler { len, batch, micro_batches, last, .. } = sampler;
        let steps = StreamSteps::new(0..len, batch, micro_batches, last).unwrap();
        let sampler = Sampler { shuffle: false, ..sampler };
        let mut expected = sampler.steps().unwrap();
        let whole = batch * micro_batches;
        for step in steps {
            let expected = expected.next().unwrap();
            prop_assert_eq!(step.micro_batches(), expected.micro_batches());
            prop_assert_eq!(step.share(1, 3), expected.share(1, 3));
            for micro_batch in 0..step.micro_batches() {
                // A stream cannot begin again: its last step is filled up with its own examples.
                let (first, taken) = (step.examples(0).unwrap()[0], len - len % whole);
                let own = |example: usize| if last == LastStep::Pad && first == taken { taken + example % (len - taken) } else { example };
                let examples: Vec<_> = match (last, first == taken) {
                    (LastStep::Pad, true) => (0..batch).map(|at| own(micro_batch * batch + at)).collect(),
                    _ => expected.examples(micro_batch).unwrap(),
                };
                prop_assert_eq!(step.examples(micro_batch).unwrap(), examples);
            }
        }
        prop_assert!(expected.next().is_none());
    }
}

#[test]
fn settings_without_sense_and_missing_micro_batches_are_errors() {
    let sampler = Sampler { len: 10, batch: 4, micro_batches: 2, last: LastStep::Keep, ..Sampler::default() };
    for wrong in [
        Sampler { batch: 0, ..sampler },
        Sampler { micro_batches: 0, ..sampler },
        Sampler { micro_batches: usize::MAX, ..sampler },
    ] {
        let errors = [wrong.steps().err(), wrong.steps_per_epoch().err(), wrong.after(1).err()];
        assert!(errors.iter().all(|error| matches!(error, Some(Error::Setting { .. }))), "{errors:?}");
        assert!(StreamSteps::new(0..9, wrong.batch, wrong.micro_batches, wrong.last).is_err());
    }
    let last = sampler.steps().unwrap().last().unwrap();
    assert_eq!((last.micro_batches(), last.examples(0).unwrap().len()), (1, 2));
    let error = last.examples(1).unwrap_err();
    assert!(matches!(error, Error::NoSuchMicroBatch { index: 1, count: 1 }), "{error}");
    let step = StreamSteps::new([1, 2, 3], 2, 2, LastStep::Keep).unwrap().next().unwrap();
    assert_eq!(step.examples(1).unwrap(), [3]);
    assert!(matches!(step.examples(2), Err(Error::NoSuchMicroBatch { index: 2, count: 2 })));
}

#[test]
fn extreme_numbers_neither_overflow_nor_loop() {
    let huge = Sampler { len: usize::MAX, batch: usize::MAX / 2, micro_batches: 2, ..Sampler::default() };
    let steps: Vec<_> = huge.steps().unwrap().collect();
    assert_eq!(steps.iter().map(SamplerStep::micro_batches).collect::<Vec<_>>(), [2, 2]);
    let last_epoch = Sampler { len: 3, epoch: u64::MAX, ..Sampler::default() };
    assert_eq!(last_epoch.endless_steps().unwrap().count(), 3);
    assert_eq!(last_epoch.after(u64::MAX).unwrap().epoch, u64::MAX);
    let beyond = Sampler { len: 3, taken: 100, ..Sampler::default() };
    assert_eq!(beyond.steps().unwrap().count(), 0);
    assert_eq!(beyond.endless_steps().unwrap().next().unwrap().epoch(), 1);
    for last in [LastStep::Pad, LastStep::Drop, LastStep::Keep] {
        let none = Sampler { last, ..Sampler::default() };
        assert_eq!(none.endless_steps().unwrap().count(), 0);
        assert_eq!(none.after(7).unwrap(), none);
    }
    assert_eq!(Sampler { len: 5, ..Sampler::default() }.steps().unwrap().next().unwrap().share(3, 2), 0..0);
}

#[test]
fn an_error_of_different_samplers_names_the_field() {
    let outcome = sim::run(1, 3, |transport| {
        let mut comm = Communicator::new(transport);
        let sampler = Sampler { len: 100, ..Sampler::default() };
        sampler.check(&mut comm).unwrap();
        let sampler = Sampler { len: 100 - comm.rank() / 2, ..sampler };
        sampler.check(&mut comm)
    });
    for result in outcome.results {
        let Err(Error::OptionsDiffer { rank, setting, there, on_rank_0 }) = result else {
            panic!("the ranks have different samplers");
        };
        assert_eq!((rank, &*setting, &*there, &*on_rank_0), (2, "the sampler's len", "99", "100"));
    }
}
