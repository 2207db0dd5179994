//! Sharded training against one process's, bit for bit.

use dist_collectives::Communicator;
use dist_parallel::{
    AdamW, AdamWOptions, Ddp, DdpOptions, Fsdp, FsdpOptions, Optimizer, Reshard, ShardingStrategy, Units,
};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::{Trained, train_alone};
use crate::plain::{bits, micro_batch, model, squared_error};

const ALL: [ShardingStrategy; 4] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
];

fn adamw() -> AdamW {
    AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() }).unwrap()
}

/// What a run with clipping leaves, and every step's norm.
type Clipped = (Trained, Vec<f64>);

/// Every rank begins with another model: rank 0's is to be everybody's.
pub(crate) fn train(
    comm: Communicator,
    micro_batches: usize,
    steps: usize,
    clip: Option<f64>,
    options: &FsdpOptions,
) -> Clipped {
    let seed = 7 + comm.rank() as u64;
    let mut fsdp = Fsdp::new(comm, model(seed), options).unwrap();
    let mut optimizer = adamw();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        optimizer.set_learning_rate(0.05 / (step + 1) as f64).unwrap();
        let report = fsdp.step(micro_batches, |index| {
            let (input, target) = micro_batch(step, index);
            Ok((input, squared_error(target)))
        });
        losses.push(report.unwrap().loss.to_bits());
        if let Some(max) = clip {
            norms.push(fsdp.clip_gradients(max).unwrap());
        }
        fsdp.update(&mut optimizer).unwrap();
    }
    let (_, model) = fsdp.into_parts().unwrap();
    ((bits(&model), losses), norms)
}

/// The same on one process with the whole model.
pub(crate) fn train_whole(micro_batches: usize, steps: usize, clip: f64) -> Clipped {
    let program = move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(7), DdpOptions::default()).unwrap();
        let mut optimizer = adamw();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..steps {
            optimizer.set_learning_rate(0.05 / (step + 1) as f64).unwrap();
            let report = ddp.step(micro_batches, |index| {
                let (input, target) = micro_batch(step, index);
                Ok((input, squared_error(target)))
            });
            losses.push(report.unwrap().loss.to_bits());
            norms.push(ddp.clip_gradients(clip));
            ddp.update(&mut optimizer).unwrap();
        }
        ((bits(ddp.model()), losses), norms)
    };
    sim::run(1, 1, program).results.remove(0)
}

#[track_caller]
fn check(ranks: usize, micro_batches: usize, options: FsdpOptions, expected: &Trained) {
    let program = move |transport| train(Communicator::new(transport), micro_batches, 5, None, &options).0;
    for (rank, trained) in sim::run(ranks as u64, ranks, program).results.into_iter().enumerate() {
        assert_eq!(trained, *expected, "rank {rank}");
    }
}

#[rstest]
fn every_strategy_trains_what_one_process_trains(
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
fn copies_of_groups_train_what_one_process_trains(
    #[case] ranks: usize,
    #[case] shard_degree: usize,
    #[case] micro_batches: usize,
) {
    let options = FsdpOptions::new(ShardingStrategy::HybridShard { shard_degree });
    check(ranks, micro_batches, options, &train_alone(micro_batches, "adamw"));
}

#[rstest]
fn neither_prefetch_nor_what_is_freed_changes_a_bit(
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
