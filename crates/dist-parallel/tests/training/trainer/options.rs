//! Options that do not work with a strategy.

use dist_parallel::buckets::BucketBytes;
use dist_parallel::fsdp::{Reshard, Units};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, TrainerOptions};
use rstest::rstest;

use super::blocks;
use crate::errors::run_at_once;

/// Builds a trainer on every rank and returns the error of each.
fn refusals(ranks: usize, options: impl Fn(usize) -> TrainerOptions + Send + Sync + 'static) -> Vec<String> {
    let results = run_at_once(ranks, move |comm| {
        let options = options(comm.rank());
        options.build(comm, blocks(), PlainVectors).unwrap_err().to_string()
    });
    assert!(results.iter().all(|refusal| *refusal == results[0]), "{results:?}");
    results
}

#[rstest]
#[case::single(2, "single", |options: TrainerOptions| options, "a world of several processes does not work with the strategy single: it is for one process: use ddp")]
#[case::micro_batches(
    2,
    "pipeline:zb1p",
    |options: TrainerOptions| options,
    "an open number of micro-batches does not work with the strategy pipeline:zb1p"
)]
#[case::buckets(
    2,
    "fsdp",
    |options: TrainerOptions| options.with_bucket_bytes(BucketBytes::default()),
    "a size of buckets does not work with the strategy fsdp"
)]
#[case::units(2, "ddp", |options: TrainerOptions| options.with_units(Units::OneForAll), "a choice of units does not work with the strategy ddp")]
#[case::prefetch(2, "zero2", |options: TrainerOptions| options.with_prefetch(2), "prefetch does not work with the strategy zero2")]
#[case::reshard(
    2,
    "zero1",
    |options: TrainerOptions| options.with_reshard(Reshard::Nothing),
    "a choice of resharding does not work with the strategy zero1"
)]
#[case::stages(
    2,
    "local_sgd:2",
    |options: TrainerOptions| options.with_stages(vec![0..2, 2..5]),
    "a choice of stages does not work with the strategy local_sgd:2"
)]
#[case::groups(3, "hybrid:2", |options: TrainerOptions| options, "3 ranks cannot be divided into groups of 2")]
#[case::pipelines(3, "pipeline:1f1b:2", |options: TrainerOptions| options.with_micro_batches(8), "3 ranks cannot be divided into groups of 2")]
#[case::shares(
    3,
    "pipeline:1f1b:1",
    |options: TrainerOptions| options.with_micro_batches(8),
    "8 micro-batches cannot be divided evenly among 3 pipelines"
)]
#[case::blocks(3, "pipeline:zbv", |options: TrainerOptions| options.with_micro_batches(8), "5 layers cannot be divided into 6 stages")]
#[case::steps(2, "local_sgd:0", |options: TrainerOptions| options, "the number of inner steps cannot be 0")]
fn options_that_do_not_work_are_refused_on_every_rank(
    #[case] ranks: usize,
    #[case] strategy: &str,
    #[case] change: fn(TrainerOptions) -> TrainerOptions,
    #[case] expected: &str,
) {
    let strategy: Strategy = strategy.parse().unwrap();
    let options = move |_| change(TrainerOptions::new(strategy));
    let refused = refusals(ranks, options);
    assert!(refused[0].starts_with(expected), "{}", refused[0]);
}

#[test]
fn ranks_with_different_strategies_are_named() {
    let options = |rank| TrainerOptions::new(if rank == 2 { Strategy::Fsdp } else { Strategy::Ddp });
    let expected = "the options differ between ranks: the strategy is fsdp on rank 2 and ddp on rank 0";
    assert_eq!(refusals(3, options), [expected; 3]);
}
