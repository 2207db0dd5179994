//! Evaluation of pipelines compared with one process, and its cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::model::{Ready, Saved};
use dist_parallel::pipeline::{
    Action, Costs, Item, Pipeline, PipelineSchedule, PlainVectors, ScheduleKind, StageCost, Timeline,
    split_into_stages,
};
use dist_parallel::step::StepReport;
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, Error, Params, Sequence};
use dist_transport::sim::{self, Network};
use rstest::rstest;

use crate::mesh::on_mesh;
use crate::model::{STEPS, Trained, alone, deep, optimizer, without_parameters};
use crate::plain::{Numbers, Rows, batch, micro_batch, squared_error};
use crate::timing::{random_costs, sleepers};
use crate::training::{KINDS, Pipe, pipeline, whole};

/// The number of micro-batches of a step.
pub(crate) const TRAINED: usize = 4;

/// Returns the input of an evaluation micro-batch, and its target: of one to three rows.
fn validation(index: usize) -> (Rows, Rows) {
    let mut numbers = Numbers(99_000 + index as u64);
    let rows = 1 + index % 3;
    (numbers.take(3 * rows), numbers.take(2 * rows))
}

/// Returns the losses of one process before training and after every step.
pub(crate) fn alone_finds(evaluated: usize) -> Vec<u32> {
    let mut outcome = sim::run(1, 1, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), deep(7), DdpOptions::default()).unwrap();
        let (mut optimizer, mut losses) = (optimizer(), Vec::new());
        for step in 0..=STEPS {
            // The gradients are not used.
            let report = ddp.step(evaluated, |index| {
                let (input, target) = validation(index);
                Ok((input, squared_error(target)))
            });
            losses.push(report.unwrap().loss.to_bits());
            ddp.step(TRAINED, batch(step)).unwrap();
            ddp.update(&mut optimizer).unwrap();
        }
        losses
    });
    outcome.results.remove(0)
}

fn evaluate(pipeline: &mut Pipe, evaluated: usize) -> Result<StepReport, Error> {
    pipeline.evaluate(
        evaluated,
        |index| Ok(validation(index).0),
        |index, output| Ok(squared_error(validation(index).1)(output)?.0),
    )
}

/// Trains, and evaluates before training, between every step and its update, and at the end. Returns the parameters
/// and the losses.
pub(crate) fn train_and_evaluate(pipeline: &mut Pipe, evaluated: usize) -> (Trained, Vec<u32>) {
    let find = |pipeline: &mut Pipe| {
        let report = evaluate(pipeline, evaluated).unwrap();
        assert_eq!(report.micro_batches, evaluated);
        report.loss.to_bits()
    };
    let mut optimizer = optimizer();
    let (mut losses, mut found) = (Vec::new(), vec![find(pipeline)]);
    for step in 0..STEPS {
        let report = pipeline.step(
            |index| Ok(micro_batch(step, index).0),
            |index, output| squared_error(micro_batch(step, index).1)(output),
        );
        losses.push(report.unwrap().loss.to_bits());
        assert_eq!(find(pipeline), found[step], "nothing has changed yet");
        pipeline.update(&mut optimizer).unwrap();
        found.push(find(pipeline));
    }
    ((whole(pipeline), losses), found)
}

/// The network buffers no message, so a rank that sends waits for the receiver.
#[rstest]
fn every_schedule_evaluates_and_trains_like_one_process(
    #[values(1, 2, 3, 4, 6)] ranks: usize,
    #[values(1, 2, 5, 12)] evaluated: usize,
) {
    let (trained, found) = (alone(TRAINED), alone_finds(evaluated));
    for kind in KINDS {
        let schedule = kind.schedule(ranks, TRAINED).unwrap();
        let outcome = Network::new(ranks).with_window(0).run(move |transport| {
            let mut pipeline = pipeline(Communicator::new(transport), schedule.clone());
            train_and_evaluate(&mut pipeline, evaluated)
        });
        for (rank, results) in outcome.results.iter().enumerate() {
            assert_eq!(*results, (trained.clone(), found.clone()), "{kind:?}, rank {rank}");
        }
    }
}

/// The shares are even, uneven, and empty for some pipelines.
#[rstest]
#[case::beside_each_other(ScheduleKind::OneForwardOneBackward, [4, 2, 1], None)]
#[case::both(ScheduleKind::OneForwardOneBackward, [2, 2, 2], Some(1))]
#[case::whole_meanwhile(ScheduleKind::Gpipe, [2, 2, 2], None)]
#[case::several_stages_of_which_one_is_gathered(ScheduleKind::Interleaved { stages_per_rank: 3 }, [1, 2, 4], Some(1))]
#[case::halves(ScheduleKind::Zbv, [1, 2, 4], Some(2))]
fn a_mesh_evaluates_and_trains_like_one_process(
    #[case] kind: ScheduleKind,
    #[case] degrees: [usize; 3],
    #[case] gathered_max: Option<usize>,
    #[values(1, 3, 8, 11)] evaluated: usize,
) {
    let [data, pipelined, shards] = degrees;
    // One micro-batch for each of the four pipelines makes a step.
    let (trained, found) = (alone(TRAINED), alone_finds(evaluated));
    let mut schedule = kind.schedule(pipelined, 1).unwrap();
    if let Some(gathered_max) = gathered_max {
        schedule = schedule.with_gathers(gathered_max);
    }
    let outcome = Network::new(data * pipelined * shards).with_window(0).run(move |transport| {
        let world = Communicator::new(transport);
        let mut pipeline = on_mesh(world, schedule.clone(), [data, shards], shards > 1);
        train_and_evaluate(&mut pipeline, evaluated)
    });
    for (rank, results) in outcome.results.iter().enumerate() {
        assert_eq!(*results, (trained.clone(), found.clone()), "rank {rank}");
    }
}

/// An evaluation frees every gathered stage: the deep model's trained parameters of a single stage then have no
/// memory.
#[test]
fn an_evaluation_frees_gathered_stages() {
    for gathers in [false, true] {
        let outcome = sim::run(1, 4, move |transport| {
            let schedule = ScheduleKind::Zbv.schedule(2, 2).unwrap();
            let schedule = if gathers { schedule.with_gathers(1) } else { schedule };
            let mut pipeline = on_mesh(Communicator::new(transport), schedule, [1, 2], true);
            let in_memory = |pipeline: &Pipe| {
                let of_stage = |stage: &dyn Params| {
                    (0..stage.infos().len()).filter(|&index| stage.read(index, &mut |_| ()).is_ok()).count()
                };
                pipeline.stages().map(|(_, stage)| of_stage(stage)).sum::<usize>()
            };
            let before = in_memory(&pipeline);
            evaluate(&mut pipeline, 3).unwrap();
            (before, in_memory(&pipeline))
        });
        assert!(outcome.results.iter().all(|(before, after)| before == after), "{:?}", outcome.results);
    }
}

/// Runs the ranks in order. A link holds one message, which the computation that needs it receives.
#[track_caller]
fn follow(schedule: &PipelineSchedule, micro_batches: usize) {
    let placement = schedule.placement();
    let lists: Vec<Vec<Action>> =
        (0..schedule.ranks()).map(|rank| schedule.forwards(rank, micro_batches).unwrap()).collect();
    let mut next = vec![0; lists.len()];
    let mut done = vec![0; placement.len()];
    // The input of each stage, from another rank or the same.
    let mut given: Vec<Option<usize>> = vec![None; placement.len() + 1];
    let mut received: Vec<Option<usize>> = vec![None; placement.len()];
    loop {
        let before = next.clone();
        for (rank, list) in lists.iter().enumerate() {
            while let Some(&action) = list.get(next[rank]) {
                let stage = action.stage();
                assert_eq!(placement[stage], rank, "{action}");
                match action {
                    Action::ReceiveActivation(Item { micro_batch, .. }) => {
                        let Some(arrived) = given[stage].take() else { break };
                        assert_eq!(arrived, micro_batch, "{action}");
                        received[stage] = Some(arrived);
                    }
                    Action::Forward(Item { micro_batch, .. }) => {
                        let input = match stage {
                            0 => Some(done[0]),
                            _ if schedule.is_sent(stage - 1) => received[stage].take(),
                            _ => given[stage].take(),
                        };
                        assert_eq!((input, done[stage]), (Some(micro_batch), micro_batch), "{action}");
                        done[stage] += 1;
                        if !schedule.is_sent(stage) {
                            let waits = given[stage + 1].replace(micro_batch);
                            assert!(
                                stage + 1 == placement.len() || waits.is_none(),
                                "two wait after {action}"
                            );
                        }
                    }
                    Action::SendActivation(Item { micro_batch, .. }) => {
                        if given[stage + 1].is_some() {
                            break;
                        }
                        assert_eq!(done[stage], micro_batch + 1, "{action}");
                        given[stage + 1] = Some(micro_batch);
                    }
                    other => panic!("{other} in an evaluation"),
                }
                next[rank] += 1;
            }
        }
        if next == before {
            break;
        }
    }
    for (rank, list) in lists.iter().enumerate() {
        assert_eq!(list.get(next[rank]), None, "rank {rank} of {placement:?} waits forever");
    }
    assert!(done.iter().all(|&done| done == micro_batches), "{placement:?}: {done:?}");
}

/// Returns schedules of forwards for any placement of stages.
fn lying(placement: Vec<usize>) -> PipelineSchedule {
    let ranks = placement.iter().max().unwrap() + 1;
    PipelineSchedule::new(placement, 1, vec![1; ranks], vec![Vec::new(); ranks])
}

#[test]
fn no_placement_of_stages_has_a_deadlock() {
    for stages in 1..=6_u32 {
        for number in 0..3_usize.pow(stages) {
            let placement: Vec<usize> = (0..stages).map(|stage| number / 3_usize.pow(stage) % 3).collect();
            for micro_batches in [1, 2, 7] {
                follow(&lying(placement.clone()), micro_batches);
            }
        }
    }
    for kind in KINDS {
        for (ranks, micro_batches) in (1..=8).flat_map(|ranks| (1..=20).map(move |count| (ranks, count))) {
            follow(&kind.schedule(ranks, 3).unwrap(), micro_batches);
        }
    }
}

#[rstest]
fn ranks_wait_no_longer_than_it_takes_to_fill_the_pipeline(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(1, 2, 3)] rounds: usize,
) {
    let unit = Duration::from_millis(1);
    for kind in KINDS {
        let (micro_batches, each) = (rounds * ranks, kind.stages_per_rank());
        let schedule = kind.schedule(ranks, 2).unwrap();
        let stage = StageCost { forward: unit, ..StageCost::default() };
        let costs = Costs::uniform(schedule.stages(), stage);
        let lists = (0..ranks).map(|rank| schedule.forwards(rank, micro_batches).unwrap()).collect();
        let predicted = Timeline::predict(&schedule.clone().with_actions(lists), &costs).makespan();
        // A rank's own work, and the work of others before its first and after its last. In ZB-V all others come
        // before or after.
        let last = if kind == ScheduleKind::Zbv { 0 } else { ranks - 1 };
        let fill = if kind == ScheduleKind::Zbv { 2 * (ranks - 1) } else { last };
        let units = u32::try_from(micro_batches * each + fill).unwrap();
        assert_eq!(predicted, units * unit, "{kind:?}");
        // The makespan has this bound if a rank waits until its last output was received.
        let count = schedule.stages();
        let outcome = Network::new(ranks).with_window(0).run(move |transport| {
            let comm = Communicator::new(transport);
            let model = sleepers(&vec![stage; count], comm.runtime());
            let stages = split_into_stages(count, count).unwrap();
            let mut pipeline = Pipeline::new(comm, model, schedule.clone(), &stages, PlainVectors).unwrap();
            pipeline.evaluate(micro_batches, |_| Ok(vec![1.0]), |_, _| Ok(1.0)).unwrap().elapsed
        });
        assert!(
            outcome.results.iter().all(|elapsed| *elapsed == predicted),
            "{kind:?}: {:?}",
            outcome.results
        );
    }
}

#[rstest]
fn an_evaluation_takes_exactly_as_long_as_is_predicted_and_leaves_the_timeline(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(1, 4, 7)] micro_batches: usize,
) {
    for kind in ScheduleKind::ALL {
        let schedule = kind.schedule(ranks, 2).unwrap();
        let costs = random_costs(schedule.stages(), (100 * ranks + micro_batches) as u64);
        let lists = (0..ranks).map(|rank| schedule.forwards(rank, micro_batches).unwrap()).collect();
        let predicted =
            Timeline::predict(&schedule.clone().with_actions(lists), &Costs::new(costs.clone())).makespan();
        let outcome = sim::run(1, ranks, move |transport| {
            let comm = Communicator::new(transport);
            let model = sleepers(&costs, comm.runtime());
            let stages = split_into_stages(costs.len(), costs.len()).unwrap();
            let mut pipeline = Pipeline::new(comm, model, schedule.clone(), &stages, PlainVectors).unwrap();
            pipeline.step(|_| Ok(vec![1.0]), |_, output| Ok((1.0, output))).unwrap();
            let before = (pipeline.timeline().unwrap(), pipeline.kept());
            let report = pipeline.evaluate(micro_batches, |_| Ok(vec![1.0]), |_, _| Ok(1.0)).unwrap();
            assert_eq!((pipeline.timeline().unwrap(), pipeline.kept()), before);
            report.elapsed
        });
        assert!(outcome.results.iter().all(|elapsed| *elapsed == predicted), "{kind}: {:?}", outcome.results);
    }
}

/// Only the last stage takes time. The first then starts a micro-batch as soon as at most two for each later stage
/// are unfinished.
#[rstest]
fn evaluations_have_the_documented_number_of_micro_batches_in_flight(#[values(1, 2, 3, 5)] ranks: usize) {
    let ended = Arc::new(AtomicUsize::new(0));
    let outcome = Network::new(ranks).with_window(0).run(move |transport| {
        let comm = Communicator::new(transport);
        let mut costs = vec![StageCost::default(); ranks];
        costs[ranks - 1].forward = Duration::from_millis(1);
        let model = sleepers(&costs, comm.runtime());
        let (runtime, stages) = (comm.runtime().clone(), split_into_stages(ranks, ranks).unwrap());
        let schedule = ScheduleKind::Gpipe.schedule(ranks, 1).unwrap();
        let mut pipeline = Pipeline::new(comm, model, schedule, &stages, PlainVectors).unwrap();
        let mut most = 0;
        let input = |index: usize| {
            // After all other events of this time.
            runtime.sleep(Duration::from_micros(1));
            most = most.max(index + 1 - ended.load(Ordering::SeqCst));
            Ok(vec![1.0])
        };
        let loss = |_, _| {
            ended.fetch_add(1, Ordering::SeqCst);
            Ok(1.0)
        };
        pipeline.evaluate(30, input, loss).unwrap();
        most
    });
    assert_eq!(outcome.results[0], 2 * ranks - 1);
}

/// Every message is counted: requests, activations with their shapes, losses of other pipelines, and the mean.
#[test]
fn evaluations_send_the_documented_bytes() {
    let outcome = sim::run(1, 4, |transport| {
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, 2).unwrap();
        let mut pipeline = on_mesh(Communicator::new(transport), schedule, [2, 1], false);
        let step = |pipeline: &mut Pipe| {
            let report = pipeline.step(
                |index| Ok(micro_batch(0, index).0),
                |index, output| squared_error(micro_batch(0, index).1)(output),
            );
            report.unwrap().bytes_sent
        };
        let first = step(&mut pipeline);
        let expected = step(&mut pipeline);
        let found = evaluate(&mut pipeline, 5).unwrap().bytes_sent;
        // The shape of training activations is still known.
        assert_eq!(step(&mut pipeline), expected);
        (first - expected, found)
    });
    // Requests go to the neighbour in the pipeline, and both of them to the other pipeline.
    let (numbers, shape, losses, mean) = (8 + 2 * 8, 8 * (2 + 8), 5 * 4 + 8, 2 * 8);
    // The first pipeline has micro-batches 0 and 1, the other 2 to 4, of one to three rows of 3 numbers.
    let rows = |rows: u64| rows * 3 * 4;
    assert_eq!(outcome.results[0], (shape, numbers + 2 * shape + rows(1 + 2)));
    assert_eq!(outcome.results[1], (0, numbers + losses + mean));
    assert_eq!(outcome.results[2], (shape, numbers + 3 * shape + rows(3 + 1 + 2)));
    assert_eq!(outcome.results[3], (0, numbers + losses + mean));
}

/// A block that counts its saved activations.
struct CountingBlock {
    alive: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

struct Kept(Arc<AtomicUsize>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

without_parameters!(CountingBlock);

impl Block<Rows> for CountingBlock {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        let alive = self.alive.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(alive, Ordering::SeqCst);
        Ok((input, Saved::new(Kept(self.alive.clone()))))
    }
    fn backward(&mut self, _: Saved, _: Rows, _: &mut Ready<'_>) -> Result<Option<Rows>, BoxError> {
        Err("nothing goes back".into())
    }
}

#[test]
fn nothing_is_kept_for_a_backward() {
    let outcome = sim::run(1, 2, |transport| {
        let (alive, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let keeper =
            || Box::new(CountingBlock { alive: alive.clone(), most: most.clone() }) as Box<dyn Block<Rows>>;
        let model = Sequence::new((0..8).map(|_| keeper()).collect()).unwrap();
        let schedule = ScheduleKind::Zbv.schedule(2, 2).unwrap();
        let stages = split_into_stages(8, 4).unwrap();
        let comm = Communicator::new(transport);
        let mut pipeline = Pipeline::new(comm, model, schedule, &stages, PlainVectors).unwrap();
        pipeline.evaluate(5, |_| Ok(vec![1.0]), |_, _| Ok(1.0)).unwrap();
        (alive.load(Ordering::SeqCst), most.load(Ordering::SeqCst))
    });
    assert_eq!(outcome.results, [(0, 1); 2]);
}
