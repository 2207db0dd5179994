//! Several pipelines and sharded stages on one mesh.

use std::fs;
use std::num::NonZeroUsize;

use dist_collectives::Communicator;
use dist_groups::Mesh;
use dist_parallel::checkpoint::{Checkpoints, Shards};
use dist_parallel::fsdp::Precision;
use dist_parallel::optim::OptimizerState;
use dist_parallel::pipeline::{Pipeline, PipelineSchedule, PlainVectors, ScheduleKind};
use dist_parallel::{Error, FloatType, Params, ValuesMut};
use dist_transport::{Transport as _, sim};
use rstest::rstest;

use crate::model::{BLOCKS, Trained, alone, alone_with, deep, optimizer};
use crate::plain::{bits, micro_batch, squared_error};
use crate::training::{Pipe, pipeline, train, train_with, whole};

/// Returns a pipeline on a mesh of data × pipeline × shard, with or without sharding.
pub(crate) fn on_mesh(
    world: Communicator,
    schedule: PipelineSchedule,
    [data, shards]: [usize; 2],
    is_divided: bool,
) -> Pipe {
    let axes = [("data", data), ("pipeline", schedule.ranks()), ("shard", shards)];
    let mut mesh = Mesh::new(world, axes).unwrap();
    let comm = |mesh: &mut Mesh, axis: &str| mesh.take(axis).unwrap().into_communicator();
    let mut pipeline = pipeline(comm(&mut mesh, "pipeline"), schedule);
    pipeline.reduce_over(comm(&mut mesh, "data")).unwrap();
    if is_divided {
        pipeline.shard_over(mesh.slice(["pipeline", "shard"]).unwrap().into_communicator()).unwrap();
    }
    pipeline
}

/// Trains on a mesh of data × pipeline × shard. Returns the parameters, and the number of parameters in memory
/// afterwards.
fn train_on_mesh(
    world: Communicator,
    kind: ScheduleKind,
    [data, pipelined, shards]: [usize; 3],
    gathered_max: Option<usize>,
) -> (Trained, usize) {
    let mut schedule = kind.schedule(pipelined, 4).unwrap();
    if let Some(gathered_max) = gathered_max {
        schedule = schedule.with_gathers(gathered_max);
    }
    let mut pipeline = on_mesh(world, schedule, [data, shards], true);
    let trained = train(&mut pipeline);
    let in_memory = |stage: &dyn Params| {
        let all = 0..stage.infos().len();
        all.filter(|&index| stage.read(index, &mut |_| ()).is_ok()).count()
    };
    let left = pipeline.stages().map(|(_, stage)| in_memory(stage)).sum();
    (trained, left)
}

#[rstest]
#[case::two_of_each(ScheduleKind::OneForwardOneBackward, [2, 2, 2], Some(1))]
#[case::whole_during_the_step(ScheduleKind::Gpipe, [2, 2, 2], None)]
#[case::several_stages_of_which_one_is_gathered(ScheduleKind::Interleaved { stages_per_rank: 2 }, [1, 2, 2], Some(1))]
#[case::halves(ScheduleKind::Zbv, [1, 2, 4], Some(2))]
#[case::no_shards(ScheduleKind::Zb1p, [2, 3, 1], Some(1))]
fn a_mesh_trains_like_one_process(
    #[case] kind: ScheduleKind,
    #[case] degrees: [usize; 3],
    #[case] gathered_max: Option<usize>,
) {
    let expected = alone(4 * degrees[0] * degrees[2]);
    let outcome = sim::run(3, degrees.iter().product(), move |transport| {
        train_on_mesh(Communicator::new(transport), kind, degrees, gathered_max)
    });
    for (rank, (trained, _)) in outcome.results.iter().enumerate() {
        assert_eq!(*trained, expected, "rank {rank}");
    }
    // Every rank has all of the tied weight: l0, l2, l5, l7. Without shards it has everything.
    let whole: usize = outcome.results.iter().map(|(_, left)| left).sum();
    let of_one = if degrees[2] > 1 { 4 } else { deep(7).infos().len() };
    assert_eq!(whole, of_one * degrees[0] * degrees[2]);
}

/// The limit of the norm, which clips.
const NORM_MAX: f64 = 0.01;

/// It includes parameters of several stages and sharded ones.
#[rstest]
#[case::one_pipeline([1, 3, 1])]
#[case::beside_each_other([2, 2, 1])]
#[case::divided([1, 2, 2])]
#[case::both([2, 2, 2])]
fn gradients_are_clipped_as_in_one_process(#[case] degrees: [usize; 3]) {
    let expected = alone_with(4 * degrees[0] * degrees[2], |ddp| {
        assert!(ddp.clip_gradients(NORM_MAX).unwrap() > 2.0 * NORM_MAX);
    });
    assert_ne!(expected, alone(4 * degrees[0] * degrees[2]));
    let outcome = sim::run(3, degrees.iter().product(), move |transport| {
        let (world, [data, pipelined, shards]) = (Communicator::new(transport), degrees);
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(pipelined, 4).unwrap();
        let mut pipeline = on_mesh(world, schedule, [data, shards], shards > 1);
        train_with(&mut pipeline, |pipeline| {
            let norm = pipeline.clip_gradients(NORM_MAX).unwrap();
            let clipped = pipeline.gradient_norm().unwrap();
            assert!(norm > 2.0 * NORM_MAX && (clipped / NORM_MAX - 1.0).abs() < 1e-6, "{norm}, {clipped}");
        })
    });
    for (rank, trained) in outcome.results.iter().enumerate() {
        assert_eq!(*trained, expected, "rank {rank}");
    }
}

/// Returns a pipeline on a mesh of data × pipeline.
fn beside(transport: sim::SimTransport, [data, pipelined]: [usize; 2]) -> Pipe {
    let schedule = ScheduleKind::Gpipe.schedule(pipelined, 12 / data).unwrap();
    on_mesh(Communicator::new(transport), schedule, [data, 1], false)
}

/// Returns one step's gradients.
fn step(pipeline: &mut Pipe) {
    let step = pipeline.step(
        |index| Ok(micro_batch(0, index).0),
        |index, output| squared_error(micro_batch(0, index).1)(output),
    );
    step.unwrap();
}

/// Every pipeline has all parameters. One of them saves, and all load the same.
#[rstest]
fn pipelines_beside_each_other_save_once_and_go_on_together(
    #[values([3, 2], [1, 2], [2, 1])] later: [usize; 2],
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let before = path.clone();
    let saved = sim::run(3, 6, move |transport| {
        let mut pipeline = beside(transport, [3, 2]);
        let (trained, _) = train(&mut pipeline);
        let mut checkpoints = Checkpoints::at(&before).keep_last(NonZeroUsize::new(2).unwrap());
        for step in 1..4 {
            checkpoints.save(&mut pipeline, None, step).unwrap();
        }
        checkpoints.start_save(&mut pipeline, None, 4).unwrap().wait().unwrap();
        trained
    });
    assert_eq!(Checkpoints::at(&path).steps().unwrap(), [3, 4]);
    let loaded = sim::run(4, later.iter().product(), move |transport| {
        let mut pipeline = beside(transport, later);
        assert_eq!(Checkpoints::at(&path).load(&mut pipeline, None).unwrap(), Some(4));
        whole(&mut pipeline)
    });
    for loaded in loaded.results {
        assert_eq!(loaded, saved.results[0]);
    }
}

/// All ranks get the error of one pipeline, so that none continues alone.
#[test]
fn a_failure_in_one_of_several_pipelines_is_an_error_on_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(3, 4, move |transport| {
        let mut pipeline = beside(transport, [2, 2]);
        let own = pipeline.share().start / pipeline.schedule().micro_batches();
        let mut checkpoints = Checkpoints::at(path.join("checkpoints"));
        checkpoints.save(&mut pipeline, None, 1).unwrap();
        // Only the second pipeline uses another directory, which is empty.
        let mut elsewhere = Checkpoints::at(path.join(["checkpoints", "elsewhere"][own]));
        let found = elsewhere.steps().unwrap();
        let file = path.join("file");
        fs::write(&file, []).unwrap();
        let saved = Checkpoints::at(file).save(&mut pipeline, None, 2).unwrap_err();
        let before = whole(&mut pipeline);
        let loaded = elsewhere.load(&mut pipeline, None).unwrap_err();
        assert_eq!(whole(&mut pipeline), before);
        (found.len(), [saved, loaded].map(|error| error.to_string()))
    });
    let (counts, errors): (Vec<_>, Vec<_>) = outcome.results.into_iter().unzip();
    assert_eq!(counts, [1, 1, 0, 0]);
    assert!(errors.iter().all(|found| *found == errors[0]), "{errors:?}");
    assert!(errors[0][0].contains("file"), "{errors:?}");
}

/// Trains two steps on a mesh of data × pipeline × shard, with a checkpoint in between if there is none yet. Returns
/// the parameters.
fn train_with_checkpoint(
    transport: sim::SimTransport,
    directory: &std::path::Path,
    [data, pipelined, shards]: [usize; 3],
) -> Vec<u32> {
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(pipelined, 8 / (data * shards)).unwrap();
    let schedule = schedule.with_gathers(1);
    let mut pipeline = on_mesh(Communicator::new(transport), schedule, [data, shards], shards > 1);
    let (mut checkpoints, mut optimizer) = (Checkpoints::at(directory), optimizer());
    let loaded = checkpoints.load(&mut pipeline, Some(&mut optimizer)).unwrap();
    if loaded.is_none() {
        step(&mut pipeline);
        pipeline.update(&mut optimizer).unwrap();
        checkpoints.save(&mut pipeline, Some(&optimizer), 1).unwrap();
    }
    step(&mut pipeline);
    pipeline.update(&mut optimizer).unwrap();
    whole(&mut pipeline)
}

/// The model has frozen parameters, and some of several stages.
#[rstest]
#[case::sharded_stages([1, 2, 2])]
#[case::beside_each_other([2, 2, 2])]
#[case::more_shards([1, 1, 4])]
#[case::no_shards([2, 2, 1])]
fn a_checkpoint_of_sharded_stages_continues_with_other_stages_and_shards(
    #[case] before: [usize; 3],
    #[values([1, 2, 2], [2, 1, 2], [1, 3, 1], [1, 1, 1])] after: [usize; 3],
) {
    let directory = tempfile::tempdir().unwrap();
    let train = |degrees: [usize; 3]| {
        let path = directory.path().to_owned();
        let ranks = degrees.iter().product();
        sim::run(3, ranks, move |transport| train_with_checkpoint(transport, &path, degrees)).results
    };
    let expected = train(before);
    for (rank, trained) in expected.iter().chain(&train(after)).enumerate() {
        assert_eq!(*trained, expected[0], "rank {rank}");
    }
}

#[test]
fn a_group_without_equally_many_ranks_of_each_stage_is_refused() {
    let outcome = sim::run(3, 2, move |transport| {
        let mut world = Communicator::new(transport);
        let rank = world.rank();
        let alone = world.subgroup(&[rank]).unwrap().unwrap();
        let schedule = ScheduleKind::Gpipe.schedule(2, 4).unwrap();
        // Another rank can have aborted the job before this one is ready.
        let mut pipeline = Pipeline::new(world, deep(7), schedule, &[0..9, 9..BLOCKS], PlainVectors)?;
        pipeline.shard_over(alone)
    });
    let is_refused =
        |result: &Result<(), Error>| matches!(result, Err(Error::PipelineRanks { ranks: 2, world_size: 1 }));
    assert!(outcome.results.iter().any(is_refused), "{:?}", outcome.results);
    assert!(outcome.results.iter().all(Result::is_err), "{:?}", outcome.results);
}

#[test]
fn a_parameter_of_several_stages_with_mixed_precision_is_refused_on_every_rank() {
    let outcome = sim::run(3, 2, move |transport| {
        let precision = Precision { master: Some(FloatType::F64), reduce: None };
        let schedule = ScheduleKind::Gpipe.schedule(2, 4).unwrap();
        let (world, stages) = (Communicator::new(transport), [0..9, 9..BLOCKS]);
        Pipeline::with_precision(world, deep(7), schedule, &stages, PlainVectors, precision).map(drop)
    });
    for result in outcome.results {
        let Err(Error::CannotTie { same_as, reason, .. }) = result else { panic!("{result:?}") };
        assert_eq!(
            (&*same_as, reason),
            ("l0.weight", "stages of a pipeline with mixed precision cannot share it")
        );
    }
}

/// All pipelines get the rank's number in the world, and nothing is saved.
#[rstest]
#[case::another_step(&[2, 3], true, "rank 2 saves step 2 without an optimizer, rank 0 saves step 1 without an optimizer")]
#[case::another_step_of_one_rank(&[2], true, "rank 3 saves step 1 without an optimizer, rank 2 saves step 2 without an optimizer")]
#[case::another_value(&[3], false, "tensor l5.bias, on rank 1: ranks 1 and 3 hold different values of it")]
fn pipelines_beside_each_other_that_differ_save_nothing(
    #[case] odd: &'static [usize],
    #[case] differs_in_step: bool,
    #[case] expected: &str,
    #[values(false, true)] copied: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(3, 4, move |transport| {
        let rank = transport.rank().index();
        let mut pipeline = beside(transport, [2, 2]);
        // The second pipeline has ranks 2 and 3.
        let is_odd = odd.contains(&rank);
        if is_odd && !differs_in_step {
            let change = &mut |values: ValuesMut<'_>| match values {
                ValuesMut::F32(values) => values.iter_mut().for_each(|value| *value = 1.0 - *value),
                other => panic!("the model is not {}", other.dtype()),
            };
            let first = Shards::parameters(&pipeline).chunks[0];
            Shards::write(&mut pipeline, first, change).unwrap();
        }
        let number = if is_odd && differs_in_step { 2 } else { 1 };
        let mut checkpoints = Checkpoints::at(&path);
        let saved = if copied {
            checkpoints.start_save(&mut pipeline, None, number).unwrap().wait()
        } else {
            checkpoints.save(&mut pipeline, None, number)
        };
        assert!(checkpoints.steps().unwrap().is_empty());
        saved.unwrap_err().to_string()
    });
    let expected = if copied { expected.replace("saves", "starts to save") } else { expected.to_owned() };
    for error in &outcome.results {
        assert!(error.contains(&expected) && *error == outcome.results[0], "{error}");
    }
}

/// Rank 3 is rank 1 of its pipeline.
#[test]
fn a_failed_load_in_another_pipeline_names_the_rank_in_the_world() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(3, 4, move |transport| {
        let rank = transport.rank().index();
        let mut pipeline = beside(transport, [2, 2]);
        Checkpoints::at(&path).save(&mut pipeline, None, 1).unwrap();
        // Only this rank does not find the files.
        let own = if rank == 3 { path.join("elsewhere") } else { path.clone() };
        let Err(Error::Checkpoint(error)) = Checkpoints::at(own).load(&mut pipeline, None) else {
            panic!("rank 3 has nothing to load")
        };
        error.rank
    });
    assert_eq!(outcome.results, [Some(3); 4]);
}

/// The first rank of every pipeline passes another optimizer than the others.
#[rstest]
#[case::of_one_pipeline([2, 2], 1)]
#[case::of_one_rank([1, 4], 3)]
fn ranks_that_load_with_different_optimizers_change_nothing(#[case] degrees: [usize; 2], #[case] odd: usize) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(3, 4, move |transport| {
        let rank = transport.rank().index();
        let mut pipeline = beside(transport, degrees);
        let mut optimizer = optimizer();
        step(&mut pipeline);
        pipeline.update(&mut optimizer).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        checkpoints.save(&mut pipeline, Some(&optimizer), 1).unwrap();
        step(&mut pipeline);
        pipeline.update(&mut optimizer).unwrap();
        let before = whole(&mut pipeline);
        let with: Option<&mut dyn OptimizerState> = if rank == odd { None } else { Some(&mut optimizer) };
        let error = checkpoints.load(&mut pipeline, with).unwrap_err();
        assert_eq!(whole(&mut pipeline), before);
        error.to_string()
    });
    for error in outcome.results {
        let expected = format!(
            "rank {odd} loads the newest checkpoint without an optimizer, rank 0 loads the newest checkpoint with adamw"
        );
        assert!(error.contains(&expected), "{error}");
    }
}

/// The gradients of an earlier step are invalid for the joined pipelines and change nothing.
#[rstest]
fn a_pipeline_that_is_joined_with_others_forgets_its_gradients(#[values(false, true)] is_divided: bool) {
    let outcome = sim::run(3, 4, move |transport| {
        let mut mesh = Mesh::new(Communicator::new(transport), [("pipeline", 2), ("beside", 2)]).unwrap();
        let schedule = ScheduleKind::Gpipe.schedule(2, 4).unwrap();
        let comm = |mesh: &mut Mesh, axis: &str| mesh.take(axis).unwrap().into_communicator();
        let mut pipeline = pipeline(comm(&mut mesh, "pipeline"), schedule);
        step(&mut pipeline);
        let before = whole(&mut pipeline);
        if is_divided {
            pipeline.shard_over(mesh.into_communicator()).unwrap();
        } else {
            pipeline.reduce_over(comm(&mut mesh, "beside")).unwrap();
        }
        pipeline.update(&mut optimizer()).unwrap();
        assert_eq!(pipeline.gradient_norm().unwrap(), 0.0);
        whole(&mut pipeline) == before
    });
    assert_eq!(outcome.results, [true; 4]);
}

/// It also returns the parameters of sharded stages.
#[rstest]
fn a_pipeline_gives_its_stages_back_with_all_that_was_trained(#[values(false, true)] is_divided: bool) {
    let expected = alone(8).0;
    let outcome = sim::run(3, 4, move |transport| {
        let schedule =
            ScheduleKind::OneForwardOneBackward.schedule(2, if is_divided { 4 } else { 8 }).unwrap();
        let world = Communicator::new(transport);
        let rank = world.rank();
        // Two pipelines with the same stages, one after the other or sharded on each rank.
        let mut pipeline = if is_divided {
            on_mesh(world, schedule, [1, 2], true)
        } else {
            let mut mesh = Mesh::new(world, [("pipeline", 2), ("twice", 2)]).unwrap();
            pipeline(mesh.take("pipeline").unwrap().into_communicator(), schedule)
        };
        train(&mut pipeline);
        let (_, stages) = pipeline.into_parts().unwrap();
        (rank, stages.iter().flat_map(|stage| bits(stage)).collect::<Vec<u32>>())
    });
    // The axis of the data varies faster.
    for beside in 0..2 {
        let of_pipeline = |&(rank, _): &&(usize, Vec<u32>)| rank % 2 == beside;
        let whole = outcome.results.iter().filter(of_pipeline).flat_map(|(_, bits)| bits.clone());
        assert_eq!(whole.collect::<Vec<_>>(), expected);
    }
}

#[cfg(feature = "tcp")]
#[test]
fn eight_processes_train_like_one_process() {
    use dist_testkit::process;
    if process::rank().is_none() {
        let name = "mesh::eight_processes_train_like_one_process";
        process::ranks(8, name, std::time::Duration::from_secs(60)).assert_success();
        return;
    }
    let comm = Communicator::from_env().unwrap();
    let (trained, _) = train_on_mesh(comm, ScheduleKind::OneForwardOneBackward, [2, 2, 2], Some(1));
    assert_eq!(trained, alone(16));
}
