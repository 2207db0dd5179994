//! Bytes of parameters and gradients on the wire.

#[cfg(feature = "tcp")]
use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Reshard, ShardingStrategy};
use dist_parallel::model::Materialised;
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_transport::sim;
use rstest::rstest;

use crate::weights::{batch, initial, model};

/// The parameters of each block, which the ranks divide. They are enough for the bandwidth-optimal all_reduce.
const LENS: [usize; 3] = [320 << 10, 512 << 10, 192 << 10];

/// The bytes of all parameters.
const P: u64 = 4 << 20;

/// Returns the bytes of a step, counted and predicted.
fn bytes(comm: Communicator, rounds: usize, options: &FsdpOptions) -> (u64, u64) {
    let micro_batches = rounds * comm.world_size();
    let mut fsdp = Fsdp::with_values(comm, model(&LENS, Materialised::Shared), options, initial).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    fsdp.step(micro_batches, batch).unwrap();
    fsdp.update(&mut optimizer).unwrap();
    (fsdp.tensor_bytes_sent(), fsdp.plan().wire_bytes(micro_batches) as u64)
}

/// Returns the bytes by the formula of a strategy. `HybridShard` shards among 2.
fn expected(strategy: ShardingStrategy, ranks: u64, rounds: u64) -> u64 {
    let once = (ranks - 1) * P / ranks;
    match strategy {
        ShardingStrategy::FullShard => 3 * rounds * once,
        ShardingStrategy::ShardGradOp => (1 + rounds) * once,
        ShardingStrategy::ShardOptimizer | ShardingStrategy::NoShard => 2 * once,
        ShardingStrategy::HybridShard { .. } => {
            3 * rounds * P / 2 + 2 * (ranks / 2 - 1) * (P / 2) / (ranks / 2)
        }
    }
}

const STRATEGIES: [ShardingStrategy; 5] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard { shard_degree: 2 },
];

#[rstest]
fn a_step_sends_exactly_the_bytes_of_the_formulas(
    #[values(2, 4, 8)] ranks: usize,
    #[values(1, 3)] rounds: usize,
    #[values(0, 1, 2, 3, 4)] strategy: usize,
) {
    let strategy = STRATEGIES[strategy];
    let program = move |transport| bytes(Communicator::new(transport), rounds, &FsdpOptions::new(strategy));
    let expected = expected(strategy, ranks as u64, rounds as u64);
    assert_eq!(sim::run(1, ranks, program).results, vec![(expected, expected); ranks]);
}

#[rstest]
#[case(Reshard::AllButLast)]
#[case(Reshard::Nothing)]
#[case(Reshard::ToGroup(2))]
fn parameters_that_stay_gathered_are_not_sent_again(
    #[case] reshard: Reshard,
    #[values(0, 2)] prefetch: usize,
) {
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_reshard(reshard).with_prefetch(prefetch);
    for (counted, predicted) in
        sim::run(1, 4, move |transport| bytes(Communicator::new(transport), 2, &options)).results
    {
        assert_eq!(counted, predicted);
        assert!(counted < expected(ShardingStrategy::FullShard, 4, 2));
    }
}

#[cfg(feature = "tcp")]
#[test]
fn over_tcp_it_is_the_same() {
    use dist_testkit::process;

    if process::rank().is_none() {
        let (name, limit) = ("wire::over_tcp_it_is_the_same", Duration::from_secs(60));
        process::ranks_with(4, name, limit, &[("DIST_TRANSPORT", "tcp")]).assert_success();
        return;
    }
    let mut world = Communicator::from_env().unwrap();
    for strategy in STRATEGIES {
        let expected = expected(strategy, 4, 2);
        let comm = world.fork().unwrap();
        assert_eq!(bytes(comm, 2, &FsdpOptions::new(strategy)), (expected, expected), "{strategy:?}");
    }
}
