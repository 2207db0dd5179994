//! Weighted micro-batches in pipelines.

use dist_collectives::Communicator;
use dist_parallel::pipeline::ScheduleKind;
use dist_parallel::{BoxError, Ddp, DdpOptions, Error};
use dist_transport::sim;
use rstest::rstest;

use crate::mesh::on_mesh;
use crate::model::{STEPS, Trained, deep, optimizer};
use crate::plain::{Rows, bits, micro_batch, squared_error};
use crate::training::{KINDS, Pipe, pipeline, whole};

type Weighted = ((f32, u64), Rows);

/// Returns the number of tokens of each micro-batch of a step.
fn tokens(step: usize, index: usize) -> u64 {
    [3, 0, 128, 1, 77, 50, 2, 9][(step + index) % 8]
}

/// Returns the sum of the losses of `tokens` equal tokens, and its gradient.
fn sum_of(tokens: u64, target: Rows) -> impl FnOnce(Rows) -> Result<Weighted, BoxError> {
    move |output| {
        let (loss, gradient) = squared_error(target)(output)?;
        let times = tokens as f32;
        Ok(((times * loss, tokens), gradient.into_iter().map(|g| times * g).collect()))
    }
}

/// Returns the parameters of one process, and its final loss on the first training data.
fn alone(micro_batches: usize) -> (Trained, u32) {
    let mut outcome = sim::run(1, 1, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), deep(7), DdpOptions::default()).unwrap();
        let (mut optimizer, mut losses) = (optimizer(), Vec::new());
        let step = |ddp: &mut Ddp<_>, step| {
            let report = ddp.step(micro_batches, |index| {
                let (input, target) = micro_batch(step, index);
                Ok((input, sum_of(tokens(step, index), target)))
            });
            report.unwrap().loss.to_bits()
        };
        for number in 0..STEPS {
            losses.push(step(&mut ddp, number));
            ddp.update(&mut optimizer).unwrap();
        }
        ((bits(ddp.model()), losses), step(&mut ddp, 0))
    });
    outcome.results.remove(0)
}

/// Returns the same of a pipeline, which evaluates at the end.
fn train(pipeline: &mut Pipe, micro_batches: usize) -> (Trained, u32) {
    let (mut optimizer, mut losses) = (optimizer(), Vec::new());
    for step in 0..STEPS {
        let report = pipeline.step(
            |index| Ok(micro_batch(step, index).0),
            |index, output| sum_of(tokens(step, index), micro_batch(step, index).1)(output),
        );
        let report = report.unwrap();
        assert_eq!(report.micro_batches, micro_batches);
        losses.push(report.loss.to_bits());
        pipeline.update(&mut optimizer).unwrap();
    }
    let found = pipeline.evaluate(
        micro_batches,
        |index| Ok(micro_batch(0, index).0),
        |index, output| Ok(sum_of(tokens(0, index), micro_batch(0, index).1)(output)?.0),
    );
    ((whole(pipeline), losses), found.unwrap().loss.to_bits())
}

#[rstest]
fn every_schedule_takes_the_mean_of_all_tokens(
    #[values(1, 2, 3)] ranks: usize,
    #[values(3, 8)] micro_batches: usize,
) {
    let expected = alone(micro_batches);
    for kind in KINDS {
        let schedule = kind.schedule(ranks, micro_batches).unwrap();
        let outcome = sim::run(1, ranks, move |transport| {
            train(&mut pipeline(Communicator::new(transport), schedule.clone()), micro_batches)
        });
        assert!(outcome.results.iter().all(|found| *found == expected), "{kind:?}");
    }
}

#[rstest]
#[case::beside_each_other([2, 2, 1])]
#[case::divided([1, 2, 2])]
#[case::both([2, 2, 2])]
fn a_mesh_takes_the_mean_of_all_tokens(#[case] degrees: [usize; 3]) {
    let [data, pipelined, shards] = degrees;
    let micro_batches = 2 * data * shards;
    let expected = alone(micro_batches);
    let outcome = sim::run(3, data * pipelined * shards, move |transport| {
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(pipelined, 2).unwrap();
        let world = Communicator::new(transport);
        train(&mut on_mesh(world, schedule, [data, shards], shards > 1), micro_batches)
    });
    for (rank, found) in outcome.results.iter().enumerate() {
        assert_eq!(*found, expected, "rank {rank}");
    }
}

/// One of several pipelines can have weight 0. If all have, every rank gets an error, and training continues.
#[test]
fn weight_0_is_an_error_on_every_rank_and_the_next_step_can_follow() {
    let expected = alone(8);
    let outcome = sim::run(3, 8, move |transport| {
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, 2).unwrap();
        let mut pipeline = on_mesh(Communicator::new(transport), schedule, [2, 2], true);
        let nothing = pipeline
            .step(
                |index| Ok(micro_batch(0, index).0),
                |index, output| sum_of(0, micro_batch(0, index).1)(output),
            )
            .unwrap_err();
        assert!(matches!(nothing, Error::ZeroWeight { micro_batches: 8 }), "{nothing}");
        assert!((0..pipeline.infos().len()).all(|parameter| pipeline.gradient(parameter).is_none()));
        let nothing = pipeline.evaluate(5, |index| Ok(micro_batch(0, index).0), |_, _| Ok((0.0, 0)));
        assert!(matches!(nothing, Err(Error::ZeroWeight { micro_batches: 5 })), "{nothing:?}");
        let half = pipeline.evaluate(
            2,
            |index| Ok(micro_batch(0, index).0),
            |index, _| Ok((3.0 * index as f32, index as u64)),
        );
        assert_eq!(half.unwrap().loss, 3.0);
        train(&mut pipeline, 8)
    });
    for (rank, found) in outcome.results.iter().enumerate() {
        assert_eq!(*found, expected, "rank {rank}");
    }
}

#[test]
fn weights_in_only_one_pipeline_are_an_error_and_training_continues() {
    let outcome = sim::run(3, 2, |transport| {
        let world = Communicator::new(transport);
        let is_weighted = world.rank() == 1;
        let schedule = ScheduleKind::Gpipe.schedule(1, 2).unwrap();
        let mut pipeline = on_mesh(world, schedule, [2, 1], false);
        let input = |index| Ok(micro_batch(0, index).0);
        let step = if is_weighted {
            pipeline.step(input, |index, output| sum_of(1, micro_batch(0, index).1)(output))
        } else {
            pipeline.step(input, |index, output| squared_error(micro_batch(0, index).1)(output))
        };
        let loss = |index, output| squared_error(micro_batch(0, index).1)(output);
        (step.unwrap_err().to_string(), pipeline.step(input, loss).map(|report| report.micro_batches))
    });
    for (told, next) in outcome.results {
        let asked = "a step of 4 micro-batches with weights, rank 0 for a step of 4 micro-batches";
        assert_eq!(told, format!("the ranks called for different steps: rank 1 for {asked}"));
        assert!(matches!(next, Ok(4)), "{next:?}");
    }
}
