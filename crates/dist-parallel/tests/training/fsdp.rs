//! Sharded training compared with one process, bit for bit.

use dist_collectives::Communicator;
use dist_parallel::checkpoint::{ShardMetadata, Shards};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_parallel::{Block, Ddp, DdpOptions, Error, FloatType, Params, Sequence, Values, ValuesMut};
use dist_transport::sim;
use proptest::prelude::*;
use rstest::rstest;

use crate::ddp::{Trained, train_alone, train_steps};
use crate::plain::{Linear, Numbers, Relu, Rows, batch, bits, micro_batch, model, model_that, squared_error};

const ALL: [ShardingStrategy; 4] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
];

fn adamw() -> AdamW {
    AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() }).unwrap()
}

/// The result of a training with clipping, and every step's norm.
type Clipped = (Trained, Vec<f64>);

/// Trains a model. Every rank starts with another model, which is replaced by rank 0's.
pub(crate) fn train(
    comm: Communicator,
    micro_batches: usize,
    steps: usize,
    clip: Option<f64>,
    options: &FsdpOptions,
) -> Clipped {
    let seed = 7 + comm.rank() as u64;
    train_model(comm, model(seed), micro_batches, steps, clip, options)
}

fn train_model(
    comm: Communicator,
    model: Sequence<Rows>,
    micro_batches: usize,
    steps: usize,
    clip: Option<f64>,
    options: &FsdpOptions,
) -> Clipped {
    let fsdp = Fsdp::new(comm, model, options).unwrap();
    train_steps(Box::new(fsdp), (steps, micro_batches), "adamw", clip)
}

/// Returns the same of one process with the whole model.
pub(crate) fn train_whole(micro_batches: usize, steps: usize, clip: f64) -> Clipped {
    let program = move |transport| {
        let ddp = Ddp::new(Communicator::new(transport), model(7), DdpOptions::default()).unwrap();
        train_steps(Box::new(ddp), (steps, micro_batches), "adamw", Some(clip))
    };
    sim::run(1, 1, program).results.remove(0)
}

#[track_caller]
fn check(ranks: usize, micro_batches: usize, options: FsdpOptions, expected: &Trained) {
    let network = || sim::Network::new(ranks).with_seed(ranks as u64);
    // With shared memory, ranks read each other's shards, and a model that copies its values gives no view of
    // them.
    let worlds =
        [(network(), false), (network().with_shared_memory(), false), (network().with_shared_memory(), true)];
    for (number, (network, copies)) in worlds.into_iter().enumerate() {
        let options = options.clone();
        let program = move |transport| {
            let comm = Communicator::new(transport);
            let model = model_that(7 + comm.rank() as u64, copies);
            train_model(comm, model, micro_batches, 5, None, &options).0
        };
        for (rank, trained) in network.run(program).results.into_iter().enumerate() {
            assert_eq!(trained, *expected, "rank {rank} of world {number}");
        }
    }
}

#[rstest]
fn every_strategy_trains_like_one_process(
    #[values((1, 8), (2, 8), (4, 8), (8, 8))] (ranks, micro_batches): (usize, usize),
    #[values(0, 1, 2, 3)] strategy: usize,
    #[values(Units::EachBlock, Units::OneForAll, Units::Blocks(vec![2, 3, 1]))] units: Units,
) {
    let options = FsdpOptions::new(ALL[strategy]).with_units(units);
    check(ranks, micro_batches, options, &train_alone(micro_batches, "adamw"));
}

#[rstest]
#[case(2, 7)]
#[case(4, 6)]
#[case(4, 3)]
#[case(8, 1)]
fn powers_of_two_train_any_number_of_micro_batches(#[case] ranks: usize, #[case] micro_batches: usize) {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
        check(ranks, micro_batches, FsdpOptions::new(strategy), &train_alone(micro_batches, "adamw"));
    }
}

#[rstest]
#[case(4, 2, 8)]
#[case(8, 2, 16)]
#[case(8, 4, 8)]
#[case(6, 2, 12)]
#[case(4, 1, 8)]
#[case(4, 4, 8)]
fn replicas_of_shard_groups_train_like_one_process(
    #[case] ranks: usize,
    #[case] shard_degree: usize,
    #[case] micro_batches: usize,
) {
    let options = FsdpOptions::new(ShardingStrategy::HybridShard { shard_degree });
    check(ranks, micro_batches, options, &train_alone(micro_batches, "adamw"));
}

#[rstest]
fn neither_prefetch_nor_resharding_changes_a_bit(
    #[values(0, 1, 2, 3)] prefetch: usize,
    #[values(Reshard::All, Reshard::AllButLast, Reshard::Nothing, Reshard::ToGroup(2), Reshard::ToGroup(1))]
    reshard: Reshard,
) {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(prefetch).with_reshard(reshard);
    check(4, 8, options, &train_alone(8, "adamw"));
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn a_hundred_clipped_steps_are_those_of_one_process(#[case] strategy: ShardingStrategy) {
    const CLIP: f64 = 0.4;
    let options = FsdpOptions::new(strategy).with_prefetch(1);
    let program = move |transport| train(Communicator::new(transport), 4, 100, Some(CLIP), &options);
    let expected = train_whole(4, 100, CLIP);
    let norms = &expected.1;
    assert!(norms.iter().any(|&norm| norm > CLIP) && norms.iter().any(|&norm| norm < CLIP), "both happen");
    for trained in sim::run(1, 4, program).results {
        assert_eq!(trained, expected);
    }
}

#[rstest]
fn as_many_micro_batches_as_ranks_are_summed_as_by_one_process(#[values(3, 5, 6, 7)] ranks: usize) {
    let expected = train_alone(ranks, "adamw");
    for strategy in ALL {
        check(ranks, ranks, FsdpOptions::new(strategy), &expected);
    }
}

#[rstest]
#[case(3, 7)]
#[case(6, 16)]
fn other_numbers_of_ranks_train_alike_on_every_rank_with_any_resharding(
    #[case] ranks: usize,
    #[case] micro_batches: usize,
) {
    let run = |options: FsdpOptions| {
        let program =
            move |transport| train(Communicator::new(transport), micro_batches, 3, None, &options).0;
        sim::run(3, ranks, program).results
    };
    let first = run(FsdpOptions::new(ShardingStrategy::FullShard));
    assert!(first.iter().all(|trained| *trained == first[0]));
    assert_eq!(run(FsdpOptions::new(ShardingStrategy::ShardGradOp)), first);
    assert_eq!(run(FsdpOptions::new(ShardingStrategy::FullShard).with_units(Units::OneForAll)), first);
}

/// Returns a model that trains with many kinds of units.
fn random_model(widths: &[usize], frozen: usize, seed: u64) -> Sequence<Rows> {
    let mut blocks: Vec<Box<dyn Block<Rows>>> = Vec::new();
    for (index, pair) in widths.windows(2).enumerate() {
        let linear = Linear::new(&format!("layer{index}"), pair[0], pair[1], seed + index as u64);
        blocks.push(Box::new(if index == frozen { linear.frozen() } else { linear }));
        blocks.push(Box::new(Relu));
    }
    Sequence::new(blocks).unwrap()
}

/// Returns the parameters after two steps, on rank 0.
fn train_random(comm: Communicator, widths: &[usize], frozen: usize, options: &FsdpOptions) -> Vec<u32> {
    let mut fsdp = Fsdp::new(comm, random_model(widths, frozen, 5), options).unwrap();
    let mut optimizer = adamw();
    for step in 0..2 {
        fsdp.step(4, |index| {
            let mut numbers = Numbers((step * 10 + index) as u64);
            Ok((numbers.take(widths[0]), squared_error(numbers.take(*widths.last().unwrap()))))
        })
        .unwrap();
        fsdp.clip_gradients(0.05).unwrap();
        fsdp.update(&mut optimizer).unwrap();
    }
    bits(&fsdp.into_parts().unwrap().1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_model_is_trained_alike_by_all_strategies(
        widths in prop::collection::vec(1..6_usize, 2..5),
        frozen in 0..4_usize,
        prefetch in 0..4_usize,
        reshard in prop::sample::select(vec![Reshard::All, Reshard::AllButLast, Reshard::ToGroup(2)]),
    ) {
        let run = |ranks, strategy| {
            let (widths, options) = (widths.clone(), FsdpOptions::new(strategy).with_prefetch(prefetch));
            let options = if ranks == 4 { options.with_reshard(reshard) } else { options };
            let program = move |transport| train_random(Communicator::new(transport), &widths, frozen, &options);
            sim::run(2, ranks, program).results
        };
        let alone = run(1, ShardingStrategy::NoShard).remove(0);
        for strategy in [
            ShardingStrategy::FullShard,
            ShardingStrategy::ShardGradOp,
            ShardingStrategy::ShardOptimizer,
            ShardingStrategy::HybridShard { shard_degree: 4 },
        ] {
            prop_assert_eq!(run(4, strategy), vec![alone.clone(); 4]);
        }
    }
}

#[test]
fn gathering_ahead_is_used_once() {
    let outcome = sim::run(1, 2, |transport| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let input = || micro_batch(0, 3).0;
        let plain = fsdp.forward(input()).unwrap();
        let mut whole = model(7);
        assert_eq!(plain, whole.forward(input()).unwrap().0);
        let mut ddp =
            Ddp::new(fsdp.communicator_mut().fork().unwrap(), whole, DdpOptions::default()).unwrap();
        assert_eq!(plain, ddp.forward(input()).unwrap(), "with copies as with shards");
        fsdp.prefetch().unwrap();
        assert!(matches!(fsdp.prefetch(), Err(Error::Prefetch { .. })));
        assert_eq!(fsdp.forward(input()).unwrap(), plain);
        fsdp.prefetch().unwrap();
        fsdp.step(2, batch(0)).unwrap();
        fsdp.prefetch().unwrap();
        // Units that were prefetched before an update are not used after it.
        fsdp.update(&mut adamw()).unwrap();
        assert_ne!(fsdp.forward(input()).unwrap(), plain);
        fsdp.tensor_bytes_sent()
    });
    assert!(outcome.results[0] > 0);
    let outcome = sim::run(1, 2, |transport| {
        let options = FsdpOptions::new(ShardingStrategy::ShardGradOp);
        Fsdp::new(Communicator::new(transport), model(7), &options).unwrap().prefetch().is_err()
    });
    assert_eq!(outcome.results, [true; 2]);
}

/// A loop that is correct on several ranks is correct on one, and a wrong one fails on one too.
#[rstest]
#[case(1, ShardingStrategy::FullShard)]
#[case(2, ShardingStrategy::FullShard)]
#[case(2, ShardingStrategy::HybridShard { shard_degree: 1 })]
#[case(4, ShardingStrategy::HybridShard { shard_degree: 2 })]
fn units_are_gathered_ahead_until_something_uses_or_frees_them(
    #[case] ranks: usize,
    #[case] strategy: ShardingStrategy,
    #[values(false, true)] shares_memory: bool,
) {
    let network = sim::Network::new(ranks);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let _outcome = network.run(move |transport| {
        let options = FsdpOptions::new(strategy).with_prefetch(1);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let ends: [fn(&mut Fsdp<Rows>); 5] = [
            |fsdp| drop(fsdp.forward(micro_batch(0, 3).0).unwrap()),
            |fsdp| assert_eq!(fsdp.step(4, batch(0)).unwrap().micro_batches, 4),
            |fsdp| fsdp.for_each_parameter(|_, _| ()).unwrap(),
            |fsdp| fsdp.update(&mut adamw()).unwrap(),
            |fsdp| fsdp.set_shard(Values::F32(&vec![0.5; fsdp.shard_len()])).unwrap(),
        ];
        for end in ends {
            fsdp.prefetch().unwrap();
            assert!(matches!(fsdp.prefetch(), Err(Error::Prefetch { .. })));
            end(&mut fsdp);
        }
        fsdp.prefetch().unwrap();
        fsdp.step(4, batch(1)).unwrap();
    });
}

#[test]
fn ranks_that_disagree_get_an_error_and_can_continue() {
    let outcome = sim::run(1, 2, |transport| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let none = fsdp.synchronise().unwrap_err();
        assert!(matches!(none, Error::NoMicroBatches), "{none}");
        let differ = fsdp.step(2 + fsdp.rank(), batch(0)).unwrap_err();
        assert!(matches!(differ, Error::StepsDiffer { rank: 1, .. }), "{differ}");
        fsdp.step(2, batch(0)).unwrap().loss.is_finite()
    });
    assert_eq!(outcome.results, [true; 2]);
}

#[test]
fn ranks_that_cannot_be_divided_are_an_error() {
    let refused = |options: FsdpOptions| {
        let program = move |transport| Fsdp::new(Communicator::new(transport), model(7), &options).map(drop);
        sim::run(1, 4, program).results.remove(0).unwrap_err()
    };
    let full = || FsdpOptions::new(ShardingStrategy::FullShard);
    for shard_degree in [0, 3, 8] {
        let error = refused(FsdpOptions::new(ShardingStrategy::HybridShard { shard_degree }));
        let expected = format!("4 ranks cannot be divided into groups of {shard_degree}");
        assert_eq!(error.to_string(), expected);
        assert!(matches!(
            refused(full().with_reshard(Reshard::ToGroup(shard_degree))),
            Error::ShardDegree { .. }
        ));
    }
    let error = refused(full().with_units(Units::Blocks(vec![2, 3])));
    assert_eq!(error.to_string(), "units of [2, 3] blocks do not cover a model with 6 blocks");
}

#[test]
fn differing_options_are_an_error_on_every_rank() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let prefetch = usize::from(comm.rank() == 2);
        Fsdp::new(comm, model(7), &FsdpOptions::default().with_prefetch(prefetch)).unwrap_err().to_string()
    });
    let expected = "the options differ between ranks: prefetch is 1 on rank 2 and 0 on rank 0";
    assert_eq!(outcome.results, [expected; 3]);
}

#[rstest]
fn a_wider_master_is_changed_alike_however_it_is_divided(
    #[values(FloatType::F64, FloatType::Bf16)] reduce: FloatType,
) {
    let precision = Precision { master: Some(FloatType::F64), reduce: Some(reduce) };
    let run = |ranks: usize, strategy: ShardingStrategy| {
        let options = FsdpOptions::new(strategy).with_precision(precision);
        let program = move |transport| train(Communicator::new(transport), 4, 5, Some(0.4), &options);
        sim::run(1, ranks, program).results
    };
    let alone = run(1, ShardingStrategy::NoShard);
    assert_ne!(alone[0].0, train_whole(4, 5, 0.4).0, "the type makes a difference");
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        assert!(run(4, strategy).iter().all(|trained| *trained == alone[0]), "{strategy:?}");
    }
}

/// Gradients are summed in narrower and wider types than the parameters'.
#[rstest]
fn a_norm_is_taken_in_the_type_of_the_sums(#[values(1e-36, 1e-44)] scale: f32) {
    let precision = Precision { master: None, reduce: Some(FloatType::F64) };
    let norms = |ranks: usize| {
        let outcome = sim::run(1, ranks, move |transport| {
            let options = FsdpOptions::new(ShardingStrategy::FullShard).with_precision(precision);
            let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
            let report = fsdp.step(4, |index| {
                let (input, target) = micro_batch(0, index);
                Ok((input, move |output| {
                    let (loss, gradient) = squared_error(target)(output)?;
                    Ok((loss, gradient.into_iter().map(|value| value * scale).collect()))
                }))
            });
            report.unwrap();
            fsdp.gradient_norm().unwrap()
        });
        outcome.results
    };
    let alone = norms(1)[0];
    assert!(alone > 0.0 && alone < f64::from(scale) * 1e3, "{alone}");
    assert_eq!(norms(4), [alone; 4]);
}

#[rstest]
fn parts_are_set_from_a_flat_slice(#[values(0, 1, 2, 3)] strategy: usize, #[values(1, 4)] ranks: usize) {
    let outcome = sim::run(1, ranks, move |transport| {
        let options = FsdpOptions::new(ALL[strategy]);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let part = vec![1.5; fsdp.shard_len()];
        fsdp.set_shard(Values::F32(&part)).unwrap();
        let mut all = Vec::new();
        fsdp.for_each_parameter(|parameter, values| {
            all.push((parameter, values == Values::F32(&vec![1.5; values.len()])))
        })
        .unwrap();
        all.sort_unstable();
        all
    });
    let all: Vec<(usize, bool)> = [0, 1, 3, 4, 5, 6, 7].map(|parameter| (parameter, true)).into();
    assert_eq!(outcome.results, vec![all; ranks]);
}

#[test]
fn a_flat_slice_of_another_length_is_refused() {
    let outcome = sim::run(1, 1, |transport| {
        let comm = Communicator::new(transport);
        let mut fsdp = Fsdp::new(comm, model(7), &FsdpOptions::default()).unwrap();
        fsdp.set_shard(Values::F32(&[0.0; 3])).unwrap_err().to_string()
    });
    assert_eq!(outcome.results, ["got 3 values of f32, expected 41 of f32"]);
}

#[rstest]
fn ranks_hold_every_value_once_and_restore_it(
    #[values(0, 1, 2, 3)] strategy: usize,
    #[values(1, 3, 4)] ranks: usize,
) {
    let outcome = sim::run(1, ranks, move |transport| {
        let options = FsdpOptions::new(ALL[strategy]);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let ShardMetadata { chunks, copy, copies } = fsdp.parameters();
        assert_eq!(copy, fsdp.rank() % copies);
        // Every value is set to a combination of its parameter's index and its own.
        for chunk in &chunks {
            let mut set = |values: ValuesMut<'_>| {
                let ValuesMut::F32(values) = values else { panic!("the model is f32") };
                let number = |index| (100 * chunk.parameter + chunk.offset + index) as f32;
                values.iter_mut().enumerate().for_each(|(index, value)| *value = number(index));
            };
            Shards::write(&mut fsdp, *chunk, &mut set).unwrap();
        }
        fsdp.loaded().unwrap();
        let mut right = 0;
        fsdp.for_each_parameter(|parameter, values| {
            let Values::F32(values) = values else { panic!("the model is f32") };
            let number = |index| (100 * parameter + index) as f32;
            right += values.iter().enumerate().filter(|(index, value)| **value == number(*index)).count();
        })
        .unwrap();
        let held: usize = chunks.iter().map(|chunk| chunk.len).sum();
        let trained: usize = fsdp.slices().chunks.iter().map(|slice| slice.chunk.len).sum();
        (right, held as f64 / copies as f64, trained as f64 / copies as f64)
    });
    let infos = model(7);
    let stored = || infos.infos().iter().filter(|info| info.same_as.is_none());
    let total: usize = stored().map(|info| info.len()).sum();
    let trained: usize = stored().filter(|info| info.trainable).map(|info| info.len()).sum();
    assert!(outcome.results.iter().all(|(right, _, _)| *right == total));
    assert_eq!(outcome.results.iter().map(|(_, held, _)| held).sum::<f64>(), total as f64);
    assert_eq!(outcome.results.iter().map(|(_, _, slices)| slices).sum::<f64>(), trained as f64);
}

/// Gathered parameters and sums lie in shared memory, if there is any.
#[cfg(feature = "tcp")]
#[rstest]
#[case("tcp")]
#[case("shm")]
fn sharded_processes_train_like_one_process(#[case] medium: &str) {
    use dist_testkit::process;
    if process::rank().is_none() {
        let case = if medium == "tcp" { "case_1" } else { "case_2" };
        let name = format!("fsdp::sharded_processes_train_like_one_process::{case}");
        let limit = std::time::Duration::from_secs(60);
        process::ranks_with(4, &name, limit, &[("DIST_TRANSPORT", medium)]).assert_success();
        return;
    }
    let mut world = Communicator::from_env().unwrap();
    let expected = train_whole(8, 20, 0.4);
    for strategy in ALL.into_iter().chain([ShardingStrategy::HybridShard { shard_degree: 2 }]) {
        let options = FsdpOptions::new(strategy).with_prefetch(2);
        assert_eq!(train(world.fork().unwrap(), 8, 20, Some(0.4), &options), expected, "{strategy:?}");
    }
}
