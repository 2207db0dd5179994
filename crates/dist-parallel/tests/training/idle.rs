//! Ranks and replicas without micro-batches in shared memory. Their zeros are reduced in the same kind of memory, for
//! any size.

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::{Block, Ddp, DdpOptions, Sequence};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::optimizer;
use crate::plain::{Linear, Rows, batch, bits};

/// Returns a model of two flat parameters, of 1 MiB and of 0.5 MiB.
fn wide() -> Sequence<Rows> {
    const WIDTH: usize = 1 << 16;
    let blocks: Vec<Box<dyn Block<Rows>>> =
        vec![Box::new(Linear::new("first", 3, WIDTH, 7)), Box::new(Linear::new("last", WIDTH, 2, 8))];
    Sequence::new(blocks).unwrap()
}

const STEPS: usize = 2;

#[rstest]
#[case::whole(2, ShardingStrategy::NoShard)]
#[case::whole_gradients(2, ShardingStrategy::ShardOptimizer)]
#[case::copies(4, ShardingStrategy::HybridShard { shard_degree: 2 })]
fn a_rank_without_micro_batches_changes_nothing(
    #[case] ranks: usize,
    #[case] strategy: ShardingStrategy,
    #[values(false, true)] accumulates: bool,
) {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let mut fsdp = Fsdp::new(comm, wide(), &FsdpOptions::new(strategy)).unwrap();
        let mut optimizer = optimizer("sgd");
        for step in 0..STEPS {
            let report = if accumulates {
                fsdp.accumulate(1, batch(step)).unwrap();
                fsdp.synchronise()
            } else {
                fsdp.step(1, batch(step))
            };
            assert_eq!(report.unwrap().micro_batches, 1);
            fsdp.update(&mut *optimizer).unwrap();
        }
        bits(&fsdp.into_parts().unwrap().1)
    };
    let trained = sim::Network::new(ranks).with_shared_memory().run(program).results;
    let alone = sim::run(1, 1, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), wide(), DdpOptions::default()).unwrap();
        let mut optimizer = optimizer("sgd");
        for step in 0..STEPS {
            ddp.step(1, batch(step)).unwrap();
            ddp.update(&mut *optimizer).unwrap();
        }
        bits(ddp.model())
    });
    assert!(trained.iter().all(|trained| *trained == alone.results[0]));
}
