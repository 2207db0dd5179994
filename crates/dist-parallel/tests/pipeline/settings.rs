//! Different settings on the ranks of pipelines: every rank of all of them gets the same error.

use dist_collectives::Communicator;
use dist_parallel::Error;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::optim::Optimizer;
use dist_parallel::pipeline::ScheduleKind;
use dist_transport::{Transport as _, sim};
use rstest::rstest;

use crate::mesh::on_mesh;
use crate::model::optimizer;
use crate::plain::{micro_batch, squared_error};
use crate::training::Pipe;

fn step(pipeline: &mut Pipe) -> Result<(), Error> {
    let step = pipeline.step(
        |index| Ok(micro_batch(0, index).0),
        |index, output| squared_error(micro_batch(0, index).1)(output),
    );
    step.map(drop)
}

fn evaluate(pipeline: &mut Pipe) -> Result<(), Error> {
    let evaluated = pipeline.evaluate(
        3,
        |index| Ok(micro_batch(0, index).0),
        |index, output| Ok(squared_error(micro_batch(0, index).1)(output)?.0),
    );
    evaluated.map(drop)
}

/// Each rank of the world in turn has another learning rate or clipping limit, for every stage and pipeline.
#[rstest]
#[case::one_pipeline([1, 3, 1])]
#[case::beside_each_other([2, 2, 1])]
#[case::divided([1, 2, 2])]
#[case::both([2, 2, 2])]
fn settings_that_differ_are_the_same_error_on_every_rank(
    #[case] degrees: [usize; 3],
    #[values(false, true)] clips: bool,
    #[values("step", "evaluation", "save")] then: &str,
) {
    let then = then.to_owned();
    let [data, pipelined, shards] = degrees;
    for odd in 1..data * pipelined * shards {
        let folder = tempfile::tempdir().unwrap();
        let (directory, then) = (folder.path().to_owned(), then.clone());
        let outcome = sim::run(1, data * pipelined * shards, move |transport| {
            let is_odd = transport.rank().index() == odd;
            let schedule = ScheduleKind::OneForwardOneBackward.schedule(pipelined, 4).unwrap();
            let mut pipeline = on_mesh(Communicator::new(transport), schedule, [data, shards], shards > 1);
            let mut optimizer = optimizer();
            step(&mut pipeline).unwrap();
            if clips {
                pipeline.clip_gradients(if is_odd { 0.25 } else { 0.5 }).unwrap();
            } else if is_odd {
                optimizer.set_learning_rate(0.25).unwrap();
            }
            pipeline.update(&mut optimizer).unwrap();
            match then.as_str() {
                "step" => step(&mut pipeline),
                "evaluation" => evaluate(&mut pipeline),
                _ => Checkpoints::at(&directory).save(&mut pipeline, Some(&optimizer), 1),
            }
        });
        for result in outcome.results {
            let Err(Error::SettingsDiffer { rank, there, .. }) = result else { panic!("{result:?}") };
            assert_eq!((rank, &*there), (odd, "0.25"));
        }
    }
}
