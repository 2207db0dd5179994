//! Optimizers with parameter groups in pipelines, compared with one optimizer per group in one process.

use dist_collectives::Communicator;
use dist_parallel::optim::Optimizer;
use dist_parallel::pipeline::ScheduleKind;
use dist_parallel::{Ddp, DdpOptions, Params};
use dist_transport::sim;
use rstest::rstest;

use crate::by_hand::{ByHand, grouped};
use crate::mesh::on_mesh;
use crate::model::{STEPS, alone, deep};
use crate::plain::{batch, bits, micro_batch, squared_error};
use crate::training::whole;

/// A name of the weight that several stages share.
const TIED: &str = "l5.weight";

fn expected(micro_batches: usize) -> Vec<u32> {
    let mut outcome = sim::run(1, 1, move |transport| {
        let model = deep(7);
        let mut optimizer = ByHand::new(model.infos(), TIED);
        let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
        for step in 0..STEPS {
            optimizer.set_learning_rate(rate(step)).unwrap();
            let batch = batch(step);
            ddp.step(micro_batches, batch).unwrap();
            ddp.update(&mut optimizer).unwrap();
        }
        bits(ddp.model())
    });
    outcome.results.remove(0)
}

fn rate(step: usize) -> f64 {
    0.03 / (step + 1) as f64
}

#[rstest]
#[case::one_pipeline(ScheduleKind::Zbv, [1, 3, 1])]
#[case::several_stages_on_a_rank(ScheduleKind::Interleaved { stages_per_rank: 2 }, [1, 2, 1])]
#[case::beside_each_other(ScheduleKind::Gpipe, [2, 2, 1])]
#[case::divided(ScheduleKind::OneForwardOneBackward, [1, 2, 2])]
fn groups_train_like_separate_optimizers(#[case] kind: ScheduleKind, #[case] degrees: [usize; 3]) {
    let [data, pipelined, shards] = degrees;
    let micro_batches = 4 * data * shards;
    let expected = expected(micro_batches);
    assert_ne!(expected, alone(micro_batches).0);
    let outcome = sim::run(3, degrees.iter().product(), move |transport| {
        let schedule = kind.schedule(pipelined, 4).unwrap();
        let mut pipeline = on_mesh(Communicator::new(transport), schedule, [data, shards], shards > 1);
        let mut optimizer = grouped(pipeline.infos(), TIED);
        for step in 0..STEPS {
            optimizer.set_learning_rate(rate(step)).unwrap();
            let input = |index| Ok(micro_batch(step, index).0);
            pipeline.step(input, |index, output| squared_error(micro_batch(step, index).1)(output)).unwrap();
            pipeline.update(&mut optimizer).unwrap();
        }
        whole(&mut pipeline)
    });
    for (rank, trained) in outcome.results.iter().enumerate() {
        assert_eq!(*trained, expected, "rank {rank}");
    }
}
