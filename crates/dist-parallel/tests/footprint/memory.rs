//! The memory that a rank's thread allocates. It shares memory with the operations that it starts on other threads,
//! which allocate none.

use allocation_counter::measure;
use dist_collectives::Communicator;
use dist_parallel::Sequence;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, MemoryEstimate, Reshard, ShardingStrategy, Units};
use dist_parallel::model::Materialised;
use dist_transport::sim;
use rstest::rstest;

use crate::weights::{Value, adamw, batch, initial, model, tied_model};

/// The numbers of parameters of the blocks, in units of the smallest.
const BLOCKS: [usize; 5] = [3, 1, 5, 2, 2];

/// The parameters of the smallest block. The memory of an operation depends on its algorithm, so both sizes must use
/// the same one. A reduce_scatter of 4 ranks copies nothing from 256 KiB on. The all_reduces of the last two
/// strategies change with the size.
const fn smallest(strategy: ShardingStrategy) -> usize {
    match strategy {
        ShardingStrategy::NoShard => 1 << 10,
        ShardingStrategy::HybridShard { .. } => 8 << 10,
        _ => 72 << 10,
    }
}

/// The measured memory of a rank, and the memory of its plan.
#[derive(Debug, Clone, Copy)]
struct Needed {
    /// The bytes after sharding, after one step and after another, and the peak of that step.
    bytes: [i64; 4],
    /// The bytes that further steps left behind.
    more: i64,
    predicted: MemoryEstimate,
}

/// The assignment of micro-batches.
#[derive(Debug, Clone, Copy)]
enum Steps {
    /// This number, assigned to the ranks.
    Of(usize),
    /// This number for each of four ranks.
    Own([usize; 4]),
}

impl Steps {
    /// Returns the number of assigned micro-batches with the same rounds.
    fn dealt(self) -> usize {
        match self {
            Self::Of(micro_batches) => micro_batches,
            Self::Own(own) => 4 * own.into_iter().max().unwrap_or(0),
        }
    }
}

/// Returns a model whose blocks have these numbers of parameters.
type Build = fn(&[usize], Materialised) -> Sequence<Value>;

/// Returns every rank's bytes in a training of `more` steps after two, with `len` parameters in the smallest block.
fn needed(
    build: Build,
    smallest: usize,
    ranks: usize,
    steps: Steps,
    more: usize,
    loaded: Materialised,
    options: &FsdpOptions,
) -> Vec<Needed> {
    let options = options.clone();
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let (model, mut fsdp) = (build(&BLOCKS.map(|block| block * smallest), loaded), None);
        let mut optimizer = adamw();
        let built = measure(|| fsdp = Some(Fsdp::with_values(comm, model, &options, initial).unwrap()));
        let mut fsdp = fsdp.unwrap();
        let mut step = || {
            match steps {
                Steps::Of(micro_batches) => drop(fsdp.step(micro_batches, batch).unwrap()),
                Steps::Own(own) => drop(fsdp.join(own[fsdp.rank()], batch).unwrap().unwrap()),
            }
            fsdp.update(&mut optimizer).unwrap();
        };
        let first = measure(&mut step);
        let second = measure(&mut step);
        let more = measure(|| (0..more).for_each(|_| step())).bytes_current;
        let persistent = built.bytes_current + first.bytes_current;
        let peak = persistent + i64::try_from(second.bytes_max).unwrap();
        let bytes = [built.bytes_current, persistent, persistent + second.bytes_current, peak];
        Needed { bytes, more, predicted: fsdp.plan().memory(steps.dealt(), 2, loaded) }
    };
    sim::run(1, ranks, program).results
}

#[track_caller]
fn check_for(more: usize, ranks: usize, steps: Steps, loaded: Materialised, options: &FsdpOptions) {
    check_model(model, more, ranks, steps, loaded, options);
}

#[track_caller]
fn check_model(
    build: Build,
    more: usize,
    ranks: usize,
    steps: Steps,
    loaded: Materialised,
    options: &FsdpOptions,
) {
    let smallest = smallest(options.strategy);
    let run = |smallest| needed(build, smallest, ranks, steps, more, loaded, options);
    for (small, large) in run(smallest).into_iter().zip(run(2 * smallest)) {
        let difference = [0, 1, 2, 3].map(|index| large.bytes[index] - small.bytes[index]);
        let of = |memory: &MemoryEstimate| {
            [memory.parameters, memory.persistent(), memory.persistent(), memory.peak]
                .map(|bytes| i64::try_from(bytes).unwrap())
        };
        let predicted = of(&small.predicted);
        assert_eq!(of(&large.predicted), predicted.map(|bytes| 2 * bytes));
        assert_eq!(difference, predicted, "parameters, persistent, after another step, peak");
        assert_eq!(large.more, small.more, "bytes are lost that depend on the model's size");
    }
}

#[track_caller]
fn check(ranks: usize, micro_batches: usize, loaded: Materialised, options: FsdpOptions) {
    check_for(0, ranks, Steps::Of(micro_batches), loaded, &options);
}

#[test]
fn nothing_leaks_in_a_hundred_steps() {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1);
    check_for(100, 4, Steps::Of(4), Materialised::Shared, &options.with_reshard(Reshard::ToGroup(2)));
}

/// In a world of one no other thread takes part, so no byte may be left, for any size.
#[rstest]
fn steps_of_one_process_leave_not_a_byte_behind(
    #[values(ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard)]
    strategy: ShardingStrategy,
) {
    let options = FsdpOptions::new(strategy).with_prefetch(1);
    let needed = needed(model, 128, 1, Steps::Of(3), 100, Materialised::Shared, &options);
    assert_eq!(needed[0].more, 0);
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn each_strategy_needs_the_memory_of_its_plan(
    #[case] strategy: ShardingStrategy,
    #[values(1, 3)] rounds: usize,
) {
    check(4, 4 * rounds, Materialised::Shared, FsdpOptions::new(strategy));
}

/// A tied parameter counts once. If parameters are freed, the units of both blocks need it, so it stays gathered.
#[rstest]
fn tied_parameters_need_the_memory_of_the_plan(
    #[values(
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::ShardOptimizer,
        ShardingStrategy::NoShard,
        ShardingStrategy::HybridShard { shard_degree: 2 }
    )]
    strategy: ShardingStrategy,
    #[values(Materialised::Shared, Materialised::Copied)] loaded: Materialised,
) {
    check_model(tied_model, 5, 4, Steps::Of(4), loaded, &FsdpOptions::new(strategy));
}

/// A rank without a micro-batch in a round needs as much as the others.
#[rstest]
fn ranks_that_join_need_the_memory_of_as_many_rounds(
    #[values(ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp)] strategy: ShardingStrategy,
) {
    check_for(20, 4, Steps::Own([1, 0, 3, 2]), Materialised::Shared, &FsdpOptions::new(strategy));
}

#[rstest]
fn prefetched_and_kept_units_need_the_memory_of_the_plan(
    #[values(0, 1, 2, 3)] prefetch: usize,
    #[values(Reshard::All, Reshard::AllButLast, Reshard::Nothing, Reshard::ToGroup(2))] reshard: Reshard,
) {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(prefetch).with_reshard(reshard);
    check(4, 4, Materialised::Shared, options);
}

#[test]
fn a_model_that_copies_needs_memory_for_both_copies() {
    check(4, 4, Materialised::Copied, FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1));
}

#[test]
fn larger_units_are_gathered_together() {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_units(Units::Blocks(vec![2, 1, 2]));
    check(4, 4, Materialised::Shared, options);
}
