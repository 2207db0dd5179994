//! Bytes on the wire for any number of ranks, as the verifier counts them for the chosen schedules.

use dist_algos::Partition;
use dist_algos::verify::prove;
use dist_collectives::Communicator;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_parallel::buckets::{BucketBytes, BucketPlan};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::Materialised;
use dist_parallel::{Ddp, DdpOptions, Params};
use dist_transport::sim;
use rstest::rstest;

use crate::weights::{batch, initial, model};

/// The parameters of each block, f32: few and many. No number of ranks divides all of them.
const LENS: [usize; 3] = [1001, 70_001, 2];

const F32: usize = 4;

/// Returns the bytes that this rank sends in an operation on a buffer of `len` elements, by the chosen schedule.
fn sent(comm: &Communicator, operation: Operation, len: usize, size: usize) -> u64 {
    let (ranks, rank) = (comm.world_size(), comm.rank());
    let Some(algorithm) = comm.algorithm(operation, len * size).unwrap() else { panic!("{operation:?}") };
    let Algorithm::Messages(algorithm) = algorithm else { panic!("{algorithm:?}") };
    let cut = Partition::new(len, size, algorithm.chunks(ranks)).unwrap();
    prove(algorithm, ranks, 0).unwrap().traffic(rank, &cut, Some(&cut)).bytes_sent
}

/// Returns the bytes of a step of `rounds` rounds, from the operations of each strategy.
fn expected(world: &mut Communicator, strategy: ShardingStrategy, rounds: u64) -> u64 {
    let (ranks, rank) = (world.world_size(), world.rank());
    let degree = match strategy {
        ShardingStrategy::HybridShard { shard_degree } => shard_degree,
        ShardingStrategy::NoShard => 1,
        _ => ranks,
    };
    let copy = Vec::from_iter(rank - rank % degree..rank - rank % degree + degree);
    let shards = world.subgroup(&copy).unwrap().unwrap();
    let alike = Vec::from_iter((0..ranks / degree).map(|copy| copy * degree + rank % degree));
    let replicas = world.subgroup(&alike).unwrap().unwrap();
    let of_unit = |len: &usize| {
        let part = len.div_ceil(degree);
        let scatter = || sent(&shards, Operation::ReduceScatter, part * degree, F32);
        let gather = || sent(&shards, Operation::AllGather, part * degree, F32);
        match strategy {
            ShardingStrategy::FullShard => rounds * (2 * gather() + scatter()),
            ShardingStrategy::ShardGradOp => rounds * scatter() + gather(),
            ShardingStrategy::ShardOptimizer => scatter() + gather(),
            ShardingStrategy::NoShard => sent(&replicas, Operation::AllReduce, part, F32),
            ShardingStrategy::HybridShard { .. } => {
                rounds * (2 * gather() + scatter()) + sent(&replicas, Operation::AllReduce, part, F32)
            }
        }
    };
    LENS.iter().map(of_unit).sum()
}

#[track_caller]
fn check(ranks: usize, rounds: usize, strategy: ShardingStrategy) {
    let program = move |transport| {
        let mut world = Communicator::new(transport);
        let (comm, options) = (world.fork().unwrap(), FsdpOptions::new(strategy));
        let mut fsdp =
            Fsdp::with_values(comm, model(&LENS, Materialised::Shared), &options, initial).unwrap();
        fsdp.step(rounds * ranks, batch).unwrap();
        fsdp.update(&mut crate::weights::adamw()).unwrap();
        (fsdp.tensor_bytes_sent(), expected(&mut world, strategy, rounds as u64))
    };
    for (rank, (counted, expected)) in sim::run(1, ranks, program).results.into_iter().enumerate() {
        assert_eq!(counted, expected, "rank {rank}");
        assert_eq!(counted > 0, ranks > 1);
    }
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
fn a_step_sends_the_bytes_that_the_verifier_counts(
    #[case] strategy: ShardingStrategy,
    #[values(1, 2, 3, 5, 6, 7)] ranks: usize,
) {
    check(ranks, 2, strategy);
}

#[rstest]
#[case(6, 3)]
#[case(6, 2)]
#[case(9, 3)]
#[case(5, 1)]
#[case(7, 7)]
fn replicas_send_the_bytes_that_the_verifier_counts(#[case] ranks: usize, #[case] shard_degree: usize) {
    check(ranks, 2, ShardingStrategy::HybridShard { shard_degree });
}

#[rstest]
fn ddp_sends_the_bytes_that_the_verifier_counts(#[values(2, 3, 5, 6, 7)] ranks: usize) {
    let bytes = BucketBytes { first_max: 0, other_max: 1 << 20 };
    let program = move |transport| {
        let mut world = Communicator::new(transport);
        let mut model = model(&LENS, Materialised::Shared);
        (0..LENS.len()).for_each(|p| model.write(p, &mut |values| initial(p, values)).unwrap());
        let plan = BucketPlan::new(model.infos(), bytes);
        let options = DdpOptions::default().with_bucket_bytes(bytes);
        let mut ddp = Ddp::new(world.fork().unwrap(), model, options).unwrap();
        let counted = ddp.step(ranks, batch).unwrap().bytes_sent;
        let buckets =
            plan.buckets().iter().map(|bucket| sent(&world, Operation::AllReduce, bucket.len(), F32));
        // In addition to the buckets, the loss, four numbers, and one number for each parameter are sent.
        let loss = sent(&world, Operation::AllReduce, 1, F32);
        let tally = sent(&world, Operation::AllReduce, 4 + LENS.len(), size_of::<i64>());
        (counted, buckets.sum::<u64>() + loss + tally)
    };
    for (rank, (counted, expected)) in sim::run(1, ranks, program).results.into_iter().enumerate() {
        assert_eq!(counted, expected, "rank {rank}");
    }
}
