//! Memory that a rank's thread allocates: with what it starts on another thread it shares memory, and allocates none there.

use allocation_counter::{AllocationInfo, measure};
use dist_collectives::Communicator;
use dist_parallel::{
    AdamW, AdamWOptions, Fsdp, FsdpOptions, Loaded, Memory, Reshard, ShardingStrategy, Units,
};
use dist_transport::sim;
use rstest::rstest;

use crate::weights::{batch, initial, model};

/// How many parameters blocks have, in units of the smallest.
const BLOCKS: [usize; 5] = [3, 1, 5, 2, 2];

/// Parameters of the smallest block. On 4 ranks the smallest buffer is a quarter of it.
const SMALLEST: usize = 128 << 10;

/// What messages and lists may take besides, in bytes: on both sides of 0 together little more than the smallest buffer,
/// so that what is measured says which buffers there are. Messages between threads are counted where they are made,
/// or not where they are freed, so that it is mostly less than nothing.
const BOOKKEEPING: std::ops::Range<i64> = -(112 << 10)..32 << 10;

#[track_caller]
fn check(ranks: usize, micro_batches: usize, loaded: Loaded, options: FsdpOptions) {
    check_for(0, SMALLEST, ranks, micro_batches, loaded, options);
}

/// With so many more steps, and blocks of so many parameters or more.
#[track_caller]
fn check_for(
    steps: usize,
    smallest: usize,
    ranks: usize,
    micro_batches: usize,
    loaded: Loaded,
    options: FsdpOptions,
) {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let (model, mut fsdp) = (model(&BLOCKS.map(|block| block * smallest), loaded), None);
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let built = measure(|| fsdp = Some(Fsdp::with_values(comm, model, &options, initial).unwrap()));
        let mut fsdp = fsdp.unwrap();
        let mut step = || {
            fsdp.step(micro_batches, batch).unwrap();
            fsdp.update(&mut optimizer).unwrap();
        };
        let first = measure(&mut step);
        let second = measure(&mut step);
        let more = measure(|| (0..steps).for_each(|_| step()));
        let predicted = fsdp.plan().memory(micro_batches, 2, loaded);
        compare(predicted, built, first, second);
        // What messages take is counted on one thread and freed on another.
        let leak = more.bytes_current.abs() / i64::try_from(steps.max(1)).unwrap();
        assert!(leak < i64::try_from(smallest).unwrap(), "{leak} bytes are lost in each step");
    };
    let _outcome = sim::run(1, ranks, program);
}

#[track_caller]
fn compare(predicted: Memory, built: AllocationInfo, first: AllocationInfo, second: AllocationInfo) {
    let is = |measured: i64, predicted: usize, what: &str| {
        let difference = measured - i64::try_from(predicted).unwrap();
        assert!(BOOKKEEPING.contains(&difference), "{what}: {measured} bytes, not {predicted}");
    };
    is(built.bytes_current, predicted.parameters, "parameters");
    let persistent = built.bytes_current + first.bytes_current;
    is(persistent, predicted.persistent(), "persistent");
    is(persistent + i64::try_from(second.bytes_max).unwrap(), predicted.peak, "peak");
    is(persistent + second.bytes_current, predicted.persistent(), "after another step");
}

#[test]
fn nothing_leaks_in_a_hundred_steps() {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1);
    check_for(100, 16 << 10, 4, 4, Loaded::Lent, options.with_reshard(Reshard::ToGroup(2)));
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn each_strategy_needs_the_memory_that_its_plan_says(
    #[case] strategy: ShardingStrategy,
    #[values(1, 3)] rounds: usize,
) {
    check(4, 4 * rounds, Loaded::Lent, FsdpOptions::new(strategy));
}

#[rstest]
fn what_is_gathered_ahead_and_kept_takes_the_memory_that_the_plan_says(
    #[values(0, 1, 2, 3)] prefetch: usize,
    #[values(Reshard::All, Reshard::AllButLast, Reshard::Nothing, Reshard::ToGroup(2))] reshard: Reshard,
) {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(prefetch).with_reshard(reshard);
    check(4, 4, Loaded::Lent, options);
}

#[test]
fn a_model_that_copies_needs_its_copy_beside_what_it_copies() {
    check(4, 4, Loaded::Copied, FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1));
}

#[test]
fn larger_units_are_gathered_together() {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_units(Units::Blocks(vec![2, 1, 2]));
    check(4, 4, Loaded::Lent, options);
}
