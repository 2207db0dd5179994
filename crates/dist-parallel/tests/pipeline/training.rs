//! Training with a pipeline compared with one process: equal to the last bit.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Shards as _;
use dist_parallel::pipeline::{Pipeline, PipelineSchedule, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::{Params, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::model::{BLOCKS, STEPS, Trained, alone, deep, optimizer};
use crate::plain::{Rows, bits, micro_batch, squared_error};

pub(crate) type Pipe = Pipeline<Rows>;

/// Returns a pipeline of the deep model with equal numbers of blocks per stage.
pub(crate) fn pipeline(comm: Communicator, schedule: PipelineSchedule) -> Pipe {
    let stages = split_into_stages(BLOCKS, schedule.stages()).unwrap();
    Pipeline::new(comm, deep(7), schedule, &stages, PlainVectors).unwrap()
}

pub(crate) fn train(pipeline: &mut Pipe) -> Trained {
    train_with(pipeline, |_| ())
}

/// Returns the result with a change of every step's gradients.
pub(crate) fn train_with(pipeline: &mut Pipe, mut change: impl FnMut(&mut Pipe)) -> Trained {
    let mut optimizer = optimizer();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let report = pipeline.step(
            |index| Ok(micro_batch(step, index).0),
            |index, output| squared_error(micro_batch(step, index).1)(output),
        );
        losses.push(report.unwrap().loss.to_bits());
        change(pipeline);
        pipeline.update(&mut optimizer).unwrap();
    }
    (whole(pipeline), losses)
}

/// Returns all parameters of the whole model, like [`bits`] for one process.
pub(crate) fn whole(pipeline: &mut Pipe) -> Vec<u32> {
    let mut all: Vec<Vec<u32>> = vec![Vec::new(); pipeline.infos().len()];
    pipeline
        .for_each_parameter(|index, values| match values {
            Values::F32(values) => all[index] = values.iter().map(|value| value.to_bits()).collect(),
            other => panic!("the model is not {}", other.dtype()),
        })
        .unwrap();
    let same_as: Vec<usize> =
        pipeline.infos().iter().enumerate().map(|(index, info)| info.same_as.unwrap_or(index)).collect();
    same_as.into_iter().flat_map(|index| all[index].clone()).collect()
}

pub(crate) const KINDS: [ScheduleKind; 6] = [
    ScheduleKind::Gpipe,
    ScheduleKind::OneForwardOneBackward,
    ScheduleKind::Interleaved { stages_per_rank: 2 },
    ScheduleKind::Interleaved { stages_per_rank: 3 },
    ScheduleKind::Zb1p,
    ScheduleKind::Zbv,
];

#[rstest]
fn every_schedule_trains_like_one_process(
    #[values(1, 2, 3, 4, 6)] ranks: usize,
    #[values(1, 3, 4, 8)] micro_batches: usize,
) {
    let expected = alone(micro_batches);
    for kind in KINDS {
        let schedule = kind.schedule(ranks, micro_batches).unwrap();
        let program = move |transport| {
            let mut pipeline = pipeline(Communicator::new(transport), schedule.clone());
            let trained = train(&mut pipeline);
            let own = pipeline.into_parts().unwrap().1.iter().flat_map(|stage| bits(stage)).count();
            (trained, own)
        };
        let results = sim::run(ranks as u64, ranks, program).results;
        for (rank, (trained, _)) in results.iter().enumerate() {
            assert_eq!(*trained, expected, "{kind:?}, rank {rank}");
        }
        let own: usize = results.iter().map(|(_, own)| own).sum();
        assert_eq!(own, expected.0.len(), "every parameter is on one rank");
    }
}

#[rstest]
fn accumulated_micro_batches_are_summed_like_those_of_one_step(
    #[values(1, 2, 3)] ranks: usize,
    #[values(1, 3, 4)] each: usize,
) {
    let expected = alone(3 * each);
    for kind in KINDS {
        let schedule = kind.schedule(ranks, each).unwrap();
        let outcome = sim::run(ranks as u64, ranks, move |transport| {
            let mut pipeline = pipeline(Communicator::new(transport), schedule.clone());
            let mut optimizer = optimizer();
            let mut losses = Vec::new();
            for step in 0..STEPS {
                let input = |first: usize| move |index: usize| Ok(micro_batch(step, first + index).0);
                let loss = |first: usize| {
                    move |index: usize, output| squared_error(micro_batch(step, first + index).1)(output)
                };
                for first in [0, each] {
                    pipeline.accumulate(input(first), loss(first)).unwrap();
                }
                assert!(pipeline.unsaved().unwrap().contains(&format!("of {} accumulated", 2 * each)));
                let report = pipeline.step(input(2 * each), loss(2 * each)).unwrap();
                assert_eq!((report.micro_batches, pipeline.unsaved()), (3 * each, None));
                losses.push(report.loss.to_bits());
                pipeline.update(&mut optimizer).unwrap();
            }
            (whole(&mut pipeline), losses)
        });
        assert!(outcome.results.iter().all(|trained| *trained == expected), "{kind:?}");
    }
}

/// One rank catches its panic, while others wait for its messages.
#[test]
fn a_step_that_panicked_leaves_nothing_for_the_next() {
    for kind in KINDS {
        let schedule = kind.schedule(1, 4).unwrap();
        let outcome = sim::run(1, 1, move |transport| {
            let mut pipeline = pipeline(Communicator::new(transport), schedule.clone());
            let input = |index| Ok(micro_batch(9, index).0);
            let loss = |index: usize, output| {
                assert!(index < 2, "the third micro-batch has no loss");
                squared_error(micro_batch(9, index).1)(output)
            };
            catch_unwind(AssertUnwindSafe(|| pipeline.step(input, loss))).unwrap_err();
            train(&mut pipeline)
        });
        assert_eq!(outcome.results, [alone(4)], "{kind:?}");
    }
}

#[test]
fn the_seed_decides_everything_but_the_result() {
    let run = |seed| {
        let schedule = ScheduleKind::Zbv.schedule(3, 5).unwrap();
        sim::run(seed, 3, move |transport| {
            train(&mut pipeline(Communicator::new(transport), schedule.clone()))
        })
    };
    let expected = alone(5);
    let mut interleavings = std::collections::HashSet::new();
    for seed in 0..12 {
        let outcome = run(seed);
        assert!(outcome.results.iter().all(|trained| *trained == expected), "seed {seed}");
        interleavings.insert(outcome.trace_hash);
    }
    assert!(interleavings.len() > 9, "12 seeds gave {} interleavings", interleavings.len());
}

#[rstest]
#[case::uneven(&[1, 10, 2, 6])]
#[case::all_but_one_in_the_last(&[1, 1, 1, 16])]
fn any_cut_trains_the_same(#[case] lens: &'static [usize]) {
    let expected = alone(4);
    let outcome = sim::run(5, lens.len(), move |transport| {
        let mut end = 0;
        let stages: Vec<_> = lens
            .iter()
            .map(|len| {
                end += len;
                end - len..end
            })
            .collect();
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(stages.len(), 4).unwrap();
        let comm = Communicator::new(transport);
        train(&mut Pipeline::new(comm, deep(7), schedule, &stages, PlainVectors).unwrap())
    });
    assert!(outcome.results.into_iter().all(|trained| trained == expected));
}

/// Copies of a tied weight start with the values of the first, and change with it.
#[test]
fn copies_of_a_tied_parameter_stay_the_same() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank() as u64;
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(3, 4).unwrap();
        let stages = split_into_stages(BLOCKS, 3).unwrap();
        // Every rank starts with other values.
        let mut pipeline = Pipeline::new(comm, deep(7 + rank), schedule, &stages, PlainVectors).unwrap();
        train(&mut pipeline);
        let weights: Vec<Vec<f32>> = pipeline
            .stages()
            .flat_map(|(_, stage)| {
                let tied = ["l0.weight", "l2.weight", "l5.weight", "l7.weight"];
                let of_stage = stage.infos().iter().enumerate();
                let found = of_stage.filter(move |(_, info)| tied.contains(&info.name.as_str()));
                found.map(|(index, _)| {
                    let mut read = Vec::new();
                    stage
                        .read(index, &mut |values| {
                            if let Values::F32(values) = values {
                                read = values.to_vec();
                            }
                        })
                        .unwrap();
                    read
                })
            })
            .collect();
        (pipeline.gradient(0).is_some(), weights)
    });
    let (_, weights) = &outcome.results[0];
    for (rank, (has_gradient, others)) in outcome.results.iter().enumerate() {
        assert_eq!(*has_gradient, rank == 0, "the first stage's rank has the mean");
        assert!(!others.is_empty() && others.iter().all(|values| *values == weights[0]), "rank {rank}");
    }
}

#[rstest]
#[case(2, 2)]
#[case(3, 2)]
#[case(2, 4)]
fn several_pipelines_train_like_one_process(#[case] ranks: usize, #[case] pipelines: usize) {
    let expected = alone(4 * pipelines);
    for kind in [ScheduleKind::Gpipe, ScheduleKind::OneForwardOneBackward, ScheduleKind::Zbv] {
        let outcome = sim::run(3, ranks * pipelines, move |transport| {
            let mut world = Communicator::new(transport);
            let (own, place) = (world.rank() / ranks, world.rank() % ranks);
            let members: Vec<usize> = (own * ranks..(own + 1) * ranks).collect();
            let comm = world.subgroup(&members).unwrap().unwrap();
            let members: Vec<usize> = (0..pipelines).map(|pipeline| pipeline * ranks + place).collect();
            let data = world.subgroup(&members).unwrap().unwrap();
            let mut pipeline = pipeline(comm, kind.schedule(ranks, 4).unwrap());
            pipeline.reduce_over(data).unwrap();
            assert_eq!(pipeline.share(), 4 * own..4 * own + 4);
            train(&mut pipeline)
        });
        for (rank, trained) in outcome.results.iter().enumerate() {
            assert_eq!(*trained, expected, "{kind:?}, rank {rank}");
        }
    }
}

/// Every message is counted: activations and their gradients, tied weights with a flag, and the loss with its weight
/// and kind. The first step also sends the shape.
#[test]
fn evaluations_send_the_documented_bytes() {
    let outcome = sim::run(1, 2, |transport| {
        let mut pipeline = pipeline(
            Communicator::new(transport),
            ScheduleKind::OneForwardOneBackward.schedule(2, 4).unwrap(),
        );
        let mut step = || {
            let report = pipeline.step(
                |index| Ok(micro_batch(0, index).0),
                |index, output| squared_error(micro_batch(0, index).1)(output),
            );
            report.unwrap().bytes_sent
        };
        [step(), step()]
    });
    // Two rows of 3 numbers forward and back, 4 micro-batches. l0.weight has 9 numbers and is on both ranks.
    let (rows, weight, loss) = (4 * 6 * 4, 4 * (9 + 1), 5 * 8);
    let shape = 8 * (2 + 8);
    // Rank 0 sends activations, in the first step their shape, and its totals with the loss.
    assert_eq!(outcome.results[0], [shape + rows + loss, rows + loss]);
    // Rank 1 sends gradients, each micro-batch's sum for the weight, and the loss.
    assert_eq!(outcome.results[1], [rows + 4 * weight + loss; 2]);
}
