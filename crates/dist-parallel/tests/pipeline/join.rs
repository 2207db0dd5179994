//! Steps of pipelines with different numbers of micro-batches, and sums over pipelines by a communication hook.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_groups::Mesh;
use dist_parallel::compress::{BucketGradients, BucketHook, PowerSgdHook};
use dist_parallel::pipeline::ScheduleKind;
use dist_parallel::step::StepReport;
use dist_parallel::{BoxError, Ddp, DdpOptions, Error, Result, Values, ValuesMut};
use dist_transport::sim;
use rstest::rstest;

use crate::mesh::on_mesh;
use crate::model::{STEPS, Trained, alone, deep, optimizer};
use crate::plain::{batch, micro_batch, squared_error};
use crate::training::{Pipe, pipeline, train, whole};

/// Joins with `own` micro-batches, which begin with number `first` of all pipelines.
fn join(pipeline: &mut Pipe, step: usize, own: usize, first: usize) -> Result<Option<StepReport>> {
    pipeline.join(
        own,
        |index| Ok(micro_batch(step, first + index).0),
        |index, output| squared_error(micro_batch(step, first + index).1)(output),
    )
}

/// Trains on a mesh of data × pipeline × shard. Pipeline i joins with `counts[i]` micro-batches in every step.
fn train_joined(
    kind: ScheduleKind,
    degrees @ [data, pipelined, shards]: [usize; 3],
    counts: &'static [usize],
) -> Vec<Trained> {
    let program = move |transport| {
        let world = Communicator::new(transport);
        let schedule = kind.schedule(pipelined, 4).unwrap().with_gathers(1);
        let mut pipeline = on_mesh(world, schedule, [data, shards], shards > 1);
        let number = pipeline.share().start / 4;
        let (own, first) = (counts[number], counts[..number].iter().sum());
        let (mut optimizer, mut losses) = (optimizer(), Vec::new());
        for step in 0..STEPS {
            let report = join(&mut pipeline, step, own, first).unwrap().unwrap();
            assert_eq!(report.micro_batches, counts.iter().sum::<usize>());
            losses.push(report.loss.to_bits());
            pipeline.update(&mut optimizer).unwrap();
        }
        // All have run out.
        assert_eq!(join(&mut pipeline, 0, 0, 0).unwrap(), None);
        (whole(&mut pipeline), losses)
    };
    sim::run(3, degrees.iter().product(), program).results
}

/// The model has parameters of several stages.
#[rstest]
#[case::a_pipeline_without_any(ScheduleKind::OneForwardOneBackward, [2, 2, 1], &[4, 0])]
#[case::the_first_without_any(ScheduleKind::Zb1p, [2, 2, 1], &[0, 3])]
#[case::equally_few(ScheduleKind::Gpipe, [2, 2, 1], &[2, 2])]
#[case::alone(ScheduleKind::Zbv, [1, 3, 1], &[3])]
#[case::several_stages(ScheduleKind::Interleaved { stages_per_rank: 2 }, [2, 2, 1], &[4, 0])]
#[case::sharded(ScheduleKind::OneForwardOneBackward, [1, 2, 2], &[3, 0])]
#[case::shards_without_any(ScheduleKind::Zb1p, [2, 2, 2], &[0, 0, 2, 2])]
fn pipelines_that_join_train_like_one_process(
    #[case] kind: ScheduleKind,
    #[case] degrees: [usize; 3],
    #[case] counts: &'static [usize],
) {
    let expected = alone(counts.iter().sum());
    for (rank, trained) in train_joined(kind, degrees, counts).into_iter().enumerate() {
        assert_eq!(trained, expected, "rank {rank}");
    }
}

#[rstest]
#[case([2, 2, 1], &[3, 1])]
#[case([3, 1, 1], &[1, 4, 0])]
#[case([2, 2, 2], &[1, 3, 0, 2])]
fn uneven_numbers_give_the_same_bits_on_every_rank(
    #[case] degrees: [usize; 3],
    #[case] counts: &'static [usize],
) {
    let trained = train_joined(ScheduleKind::OneForwardOneBackward, degrees, counts);
    let (expected, _) = alone(counts.iter().sum());
    for (parameters, losses) in &trained {
        assert_eq!((parameters, losses), (&trained[0].0, &trained[0].1));
        let apart =
            parameters.iter().zip(&expected).map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-3, "{parameters:?}");
    }
}

/// All ranks get the error, and the training continues with the bits of one process.
#[test]
fn a_join_that_cannot_be_computed_is_refused_on_every_rank() {
    let expected = alone(8);
    let outcome = sim::run(3, 4, move |transport| {
        let world = Communicator::new(transport);
        let rank = world.rank();
        let mut pipeline =
            on_mesh(world, ScheduleKind::OneForwardOneBackward.schedule(2, 4).unwrap(), [2, 1], false);
        let differ = join(&mut pipeline, 0, if rank == 3 { 1 } else { 2 }, 0).unwrap_err();
        let too_many = join(&mut pipeline, 0, if rank < 2 { 3 } else { 5 }, 0).unwrap_err();
        assert_eq!(train(&mut pipeline), expected);
        (differ, too_many)
    });
    assert!(outcome.elapsed < Duration::from_secs(1), "a rank waited for {:?}", outcome.elapsed);
    for (differ, too_many) in outcome.results {
        let Error::JoinsDiffer { pipeline: 1, rank: 1, there: 1, on_first: 2 } = differ else {
            panic!("{differ}")
        };
        let Error::JoinedMicroBatches { scheduled: 4, given: 5 } = too_many else { panic!("{too_many}") };
    }
}

/// A hook that sums exactly, and then scales by 2. It checks the tensors of each bucket.
struct Twice;

impl BucketHook for Twice {
    fn name(&self) -> String {
        "twice".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let len: usize = bucket.tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        if len > bucket.values.len() {
            return Err(format!("bucket {} has tensors of {len} values", bucket.bucket).into());
        }
        let ValuesMut::F32(values) = bucket.values else { return Err("the model has f32".into()) };
        comm.all_reduce(values, ReduceOp::Sum)?;
        values.iter_mut().for_each(|value| *value *= 2.0);
        Ok(())
    }
}

/// Returns a pipeline on a mesh of data × pipeline × shard, with a hook between the pipelines.
fn with_hook(
    world: Communicator,
    [data, pipelined, shards]: [usize; 3],
    hook: impl BucketHook + 'static,
) -> Pipe {
    let axes = [("data", data), ("pipeline", pipelined), ("shard", shards)];
    let mut mesh = Mesh::new(world, axes).unwrap();
    let comm = |mesh: &mut Mesh, axis: &str| mesh.take(axis).unwrap().into_communicator();
    let schedule = ScheduleKind::Interleaved { stages_per_rank: 2 }.schedule(pipelined, 4).unwrap();
    let mut pipeline = pipeline(comm(&mut mesh, "pipeline"), schedule);
    pipeline.reduce_over_with_hook(comm(&mut mesh, "data"), hook).unwrap();
    if shards > 1 {
        pipeline.shard_over(mesh.slice(["pipeline", "shard"]).unwrap().into_communicator()).unwrap();
    }
    pipeline
}

/// Parameters of several stages are summed without the hook, so their gradients are not twice as large. The norm shows it.
#[rstest]
fn a_hook_sums_the_gradients_of_each_stage(
    #[values([2, 2, 1], [1, 2, 1], [2, 2, 2], [1, 2, 2])] degrees: [usize; 3],
) {
    let [data, pipelined, shards] = degrees;
    // The optimizer does not depend on the scale of all gradients, so their norm is compared.
    let squares = |values: Option<Values<'_>>| match values {
        Some(Values::F32(values)) => values.iter().map(|value| f64::from(*value).powi(2)).sum(),
        _ => 0.0,
    };
    let mut alone = sim::run(1, 1, move |transport| {
        let model = deep(7);
        let comm = Communicator::new(transport);
        let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
        ddp.step(4 * data * shards, batch(0)).unwrap();
        (ddp.gradient_norm().unwrap(), squares(ddp.gradient(0)))
    });
    let (norm, tied) = alone.results.remove(0);
    let expected = (4.0 * (norm.powi(2) - tied) + tied).sqrt();
    let outcome = sim::run(3, data * pipelined * shards, move |transport| {
        let mut pipeline = with_hook(Communicator::new(transport), degrees, Twice);
        let step = pipeline.step(
            |index| Ok(micro_batch(0, index).0),
            |index, output| squared_error(micro_batch(0, index).1)(output),
        );
        step.unwrap();
        pipeline.gradient_norm().unwrap()
    });
    for found in outcome.results {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} instead of {expected}");
    }
}

#[test]
fn a_hook_that_keeps_residuals_trains_several_pipelines_alike() {
    let (expected, _) = alone(8);
    let outcome = sim::run(3, 4, move |transport| {
        let mut pipeline = with_hook(Communicator::new(transport), [2, 2, 1], PowerSgdHook::new(1).unwrap());
        train(&mut pipeline).0
    });
    for found in &outcome.results {
        assert_eq!(found, &outcome.results[0]);
        let apart = found.iter().zip(&expected).map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs());
        assert!(apart.fold(0.0, f32::max) < 0.3);
    }
}

#[test]
fn different_hooks_on_different_pipelines_are_an_error_on_every_rank() {
    let outcome = sim::run(3, 2, move |transport| {
        let mut world = Communicator::new(transport);
        let rank = world.rank();
        let alone = world.subgroup(&[rank]).unwrap().unwrap();
        let mut pipeline = pipeline(alone, ScheduleKind::Gpipe.schedule(1, 4).unwrap());
        if rank == 0 { pipeline.reduce_over_with_hook(world, Twice) } else { pipeline.reduce_over(world) }
    });
    // The first rank that gets the error aborts the job.
    let is_named = |result: &Result<()>| {
        let text = result.as_ref().map_err(ToString::to_string);
        matches!(text, Err(text) if text.contains("the hook") && text.contains("twice"))
    };
    assert!(outcome.results.iter().any(is_named), "{:?}", outcome.results);
    assert!(outcome.results.iter().all(Result::is_err), "{:?}", outcome.results);
}
