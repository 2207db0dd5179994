//! The explored programs: collectives, overlapping groups, concurrent operations, data-parallel, sharded and pipeline
//! training, and checkpoints.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{Buffer, Communicator, ReduceOp, ReductionOrder};
use dist_groups::Group;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::{Ready, Saved};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut,
};
use dist_transport::sim::SimTransport;

/// The program of every rank, and its properties.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    /// The variant, which the seed chooses.
    pub(crate) world_sizes: RangeInclusive<usize>,
    /// The folder for files that later runs may use.
    pub(crate) run: fn(SimTransport, &Path) -> Ended,
    /// `true` if the program continues from the files of an earlier run.
    pub(crate) goes_on: bool,
    /// The virtual time by which every rank must have its result or its error, whatever fails.
    pub(crate) time_max: Duration,
}

/// The bits that all ranks must have at the end, or the error of this rank. Wrong results panic.
pub(crate) type Ended = Result<Vec<u64>, Told>;

/// The error of a rank.
#[derive(Debug, PartialEq)]
pub(crate) struct Told {
    pub(crate) error: String,
    /// The rank that caused the abort, by its number in the world, and the cause.
    pub(crate) culprit: Option<(usize, String)>,
}

impl Told {
    fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Self {
        let chain = std::iter::successors(Some(error), |error| error.source());
        let own = |error: &'a (dyn std::error::Error + 'static)| {
            error.downcast_ref().or_else(|| error.downcast_ref::<Box<_>>().map(AsRef::as_ref))
        };
        let culprit = chain.filter_map(own).find_map(|error| match error {
            dist_collectives::Error::Aborted { rank, cause, .. } => Some((*rank, cause.to_string())),
            _ => None,
        });
        Self { error: format!("{error:?}"), culprit }
    }
}

pub(crate) const PROGRAMS: &[Program] = &[
    Program { world_sizes: 2..=16, ..program("collectives", 5, |transport, _| collectives(transport)) },
    program("groups", 6, |transport, _| groups(transport)),
    program("pending", 4, |transport, _| pending(transport)),
    program("training", 4, |transport, _| training(transport)),
    program("sharded", 4, |transport, _| {
        train_sharded(transport, |_, _| Ok(0), |_, _, _| Ok(())).map_err(|error| Told::of(&error))
    }),
    program("pipeline", 4, |transport, _| train_staged(transport).map_err(|error| Told::of(&error))),
    Program { goes_on: true, ..program("checkpoints", 4, checkpoints) },
];

const fn program(name: &'static str, world_size: usize, run: fn(SimTransport, &Path) -> Ended) -> Program {
    let world_sizes = world_size..=world_size;
    Program { name, world_sizes, run, goes_on: false, time_max: Duration::from_secs(3600) }
}

fn collectives(transport: SimTransport) -> Ended {
    let mut comm = Communicator::new(transport);
    all_collectives(&mut comm).map_err(|error| Told::of(&error))
}

fn all_collectives(comm: &mut Communicator) -> dist_collectives::Result<Vec<u64>> {
    let (rank, world_size) = (comm.rank() as u64, comm.world_size() as u64);
    let sum = |each: fn(u64) -> u64| (0..world_size).map(each).sum::<u64>();
    let mut digest = Vec::new();
    let by_messages = Operation::AllReduce.algorithms().filter(|it| matches!(it, Algorithm::Messages(_)));
    for (round, algorithm) in by_messages.enumerate() {
        if !algorithm.supports(comm.world_size()) {
            continue;
        }
        let mut values = vec![rank + 1; 3 * round + 1];
        let mut scoped = comm.with_algorithm(algorithm);
        scoped.with_order(ReductionOrder::Any).all_reduce(&mut values, ReduceOp::Sum)?;
        assert_eq!(values, vec![sum(|rank| rank + 1); 3 * round + 1], "all_reduce by {algorithm}");
        digest.push(values[0]);
    }
    for root in 0..comm.world_size() {
        let mut values = [if comm.rank() == root { 7 + root as u64 } else { 0 }; 4];
        comm.broadcast(&mut values, root)?;
        assert_eq!(values, [7 + root as u64; 4], "broadcast from {root}");
    }
    let mut all = vec![0; comm.world_size()];
    comm.all_gather(&[rank * rank], &mut all)?;
    assert!(all.iter().zip(0..).all(|(value, rank)| *value == rank * rank), "all_gather");
    let mut own = [0];
    comm.reduce_scatter(
        &(0..world_size).map(|part| part + rank).collect::<Vec<_>>(),
        &mut own,
        ReduceOp::Sum,
    )?;
    assert_eq!(own[0], world_size * rank + sum(|rank| rank), "reduce_scatter");
    digest.extend(all);
    moves(comm)?;
    comm.barrier()?;
    Ok(digest)
}

/// Operations with different results on different ranks.
fn moves(comm: &mut Communicator) -> dist_collectives::Result<()> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let (root, before) = (n / 2, (0..=rank as u64).sum::<u64>());
    let whole: Vec<u64> = (0..n as u64).collect();
    let mut own = [rank as u64];
    comm.scan(&mut own, ReduceOp::Sum)?;
    assert_eq!(own, [before], "scan");
    comm.exclusive_scan(&mut own, ReduceOp::Max)?;
    let left: u64 = (0..rank as u64).sum();
    assert_eq!(own, [left], "exclusive_scan");
    let mut sum = [rank as u64];
    comm.reduce(&mut sum, ReduceOp::Sum, root)?;
    assert!(rank != root || sum[0] == whole.iter().sum::<u64>(), "reduce");
    let mut gathered = if rank == root { vec![0; n] } else { Vec::new() };
    comm.gather(&[rank as u64], &mut gathered, root)?;
    assert!(rank != root || gathered == whole, "gather");
    comm.scatter(&gathered, &mut own, root)?;
    assert_eq!(own, [rank as u64], "scatter");
    let sent: Vec<u64> = whole.iter().map(|to| 100 * rank as u64 + to).collect();
    let mut received = vec![0; n];
    comm.all_to_all(&sent, &mut received)?;
    assert!(received.iter().zip(0..).all(|(word, from)| *word == 100 * from + rank as u64), "all_to_all");
    let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
    comm.send_recv(&[rank as u64], right, &mut own, left)?;
    assert_eq!(own, [left as u64], "a message");
    comm.monitored_barrier()
}

/// Runs two rows and three columns of ranks. Each rank uses its row and its column concurrently, on two
/// threads.
fn groups(transport: SimTransport) -> Ended {
    let mut world = Communicator::new(transport);
    rows_and_columns(&mut world).map_err(|error| Told::of(&error))
}

fn rows_and_columns(world: &mut Communicator) -> dist_groups::Result<Vec<u64>> {
    let (runtime, rank) = (world.runtime().clone(), world.rank());
    let (row, column) = (rank / 3, rank % 3);
    let groups =
        [Group::new(world, &[3 * row, 3 * row + 1, 3 * row + 2])?, Group::new(world, &[column, column + 3])?];
    let sums = [[3, 12][row], [3, 5, 7][column]];
    let tasks = groups.into_iter().flatten().zip(sums).map(|(mut group, sum)| {
        let work = move || {
            for round in 1..=8 {
                let mut values = vec![round * rank as u64; 5];
                group.all_reduce(&mut values, ReduceOp::Sum)?;
                assert_eq!(values, vec![round * sum; 5], "a group of {:?}", group.members());
            }
            Ok(())
        };
        runtime.spawn("group", work).expect("a thread is to be had")
    });
    let ends: Vec<dist_collectives::Result<()>> = tasks
        .collect::<Vec<_>>()
        .into_iter()
        .map(|task| task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect();
    ends.into_iter().collect::<dist_collectives::Result<()>>()?;
    let mut all = [rank as u64];
    world.all_reduce(&mut all, ReduceOp::Sum)?;
    assert_eq!(all, [15]);
    Ok(all.to_vec())
}

/// Runs several asynchronous operations, with blocking ones between them.
fn pending(transport: SimTransport) -> Ended {
    let mut comm = Communicator::new(transport);
    under_way(&mut comm).map_err(|error| Told::of(&error))
}

fn under_way(comm: &mut Communicator) -> dist_collectives::Result<Vec<u64>> {
    let rank = comm.rank() as u64;
    let mut digest = Vec::new();
    for round in 0..4 {
        let start = |comm: &mut Communicator, value: u64| {
            let buffer = Buffer::from(vec![value; 6]);
            comm.start_all_reduce(buffer, ReduceOp::Sum)
        };
        let pending = [start(comm, rank), start(comm, rank + round), start(comm, 1)];
        comm.barrier()?;
        for (pending, sum) in pending.into_iter().zip([6, 6 + 4 * round, 4]) {
            let buffer = pending.wait()?;
            assert_eq!(buffer[..], [sum; 6]);
            digest.push(buffer[0]);
        }
    }
    Ok(digest)
}

/// A model of two parameters.
#[derive(Debug)]
pub(crate) struct Line {
    infos: [ParamInfo; 2],
    values: [Vec<f32>; 2],
}

impl Line {
    pub(crate) fn new(len: usize, slope: &str, offset: &str) -> Self {
        let info = |name| ParamInfo::new(name, [len], FloatType::F32);
        Self { infos: [info(slope), info(offset)], values: [vec![0.0; len], vec![0.5; len]] }
    }
}

impl Params for Line {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, parameter: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(Values::F32(&self.values[parameter]));
        Ok(())
    }

    fn write(&mut self, parameter: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        f(ValuesMut::F32(&mut self.values[parameter]));
        Ok(())
    }
}

fn training(transport: SimTransport) -> Ended {
    train(transport, 5, 4).map_err(|error| Told::of(&error))
}

/// Trains for `steps` steps and returns the bits of the parameters.
pub(crate) fn train(transport: SimTransport, len: usize, steps: u32) -> dist_parallel::Result<Vec<u64>> {
    let comm = Communicator::new(transport);
    let micro_batches = comm.world_size();
    let mut ddp = Ddp::new(comm, Line::new(len, "slope", "offset"), DdpOptions::default())?;
    let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.01, ..SgdOptions::default() })?;
    for _ in 0..steps {
        ddp.step_with(micro_batches, |line, index, ready| {
            let x = index as f32 / 7.0;
            let errors: Vec<f32> =
                line.values[0].iter().zip(&line.values[1]).map(|(a, b)| a * x + b - 3.0 * x).collect();
            let slopes: Vec<f32> = errors.iter().map(|error| 2.0 * error * x).collect();
            ready(0, Values::F32(&slopes))?;
            ready(1, Values::F32(&errors))?;
            Ok(errors[0] * errors[0])
        })?;
        ddp.update(&mut sgd)?;
    }
    let bits = |values: &Vec<f32>| values.iter().map(|value| u64::from(value.to_bits())).collect::<Vec<_>>();
    Ok(ddp.model().values.iter().flat_map(bits).collect())
}

/// Multiplies each element by a parameter and adds another.
impl Block<Vec<f32>> for Line {
    fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
        let [slopes, offsets] = &self.values;
        let output = input.iter().zip(slopes).zip(offsets).map(|((x, a), b)| a * x + b).collect();
        Ok((output, Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Vec<f32>,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Vec<f32>>, BoxError> {
        let input: Vec<f32> = saved.take()?;
        let product = |other: &[f32]| -> Vec<f32> {
            other.iter().zip(&output_gradient).map(|(x, gradient)| x * gradient).collect()
        };
        let input_gradient = product(&self.values[0]);
        ready(0, Values::F32(&product(&input)))?;
        ready(1, Values::F32(&output_gradient))?;
        Ok(Some(input_gradient))
    }
}

/// A model of three blocks that are sharded by four ranks.
type Sharded = Fsdp<Vec<f32>>;

const LEN: usize = 5;

/// Returns the loss whose target is three times the input.
fn squared_error(x: f32) -> impl FnOnce(Vec<f32>) -> Result<(f32, Vec<f32>), BoxError> {
    move |output| {
        let errors: Vec<f32> = output.iter().map(|y| y - 3.0 * x).collect();
        Ok((errors[0] * errors[0], errors))
    }
}

fn blocks<const N: usize>(names: [[&str; 2]; N]) -> Vec<Box<dyn Block<Vec<f32>>>> {
    names.map(|[slope, offset]| -> Box<dyn Block<_>> { Box::new(Line::new(LEN, slope, offset)) }).into()
}

/// Trains for three steps of two rounds, from the step that `load` returns. Calls `save` after each step and returns
/// the bits of the parameters.
fn train_sharded(
    transport: SimTransport,
    load: impl FnOnce(&mut Sharded, &mut Sgd) -> dist_parallel::Result<u64>,
    mut save: impl FnMut(&mut Sharded, &Sgd, u64) -> dist_parallel::Result<()>,
) -> dist_parallel::Result<Vec<u64>> {
    let comm = Communicator::new(transport);
    let micro_batches = 2 * comm.world_size();
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1);
    let model = Sequence::new(blocks([["a", "b"], ["c", "d"], ["e", "f"]]))?;
    let mut fsdp = Fsdp::new(comm, model, &options)?;
    let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.01, ..SgdOptions::default() })?;
    for step in load(&mut fsdp, &mut sgd)?..3 {
        fsdp.step(micro_batches, |index| {
            let x = (step + index as u64) as f32 / 7.0;
            Ok((vec![x; LEN], squared_error(x)))
        })?;
        fsdp.update(&mut sgd)?;
        save(&mut fsdp, &sgd, step + 1)?;
    }
    let mut bits = Vec::new();
    fsdp.for_each_parameter(|_, values| bits.extend(bits_of(&values)))?;
    Ok(bits)
}

fn bits_of(values: &Values<'_>) -> Vec<u64> {
    let Values::F32(values) = values else { return Vec::new() };
    values.iter().map(|value| u64::from(value.to_bits())).collect()
}

/// Runs the same training from the newest checkpoint in the folder, with a checkpoint after each step.
fn checkpoints(transport: SimTransport, folder: &Path) -> Ended {
    let mut writer = Checkpoints::at(folder);
    let trained = train_sharded(
        transport,
        |fsdp, sgd| Ok(Checkpoints::at(folder).load(fsdp, Some(sgd))?.unwrap_or(0)),
        |fsdp, sgd, step| writer.save(fsdp, Some(sgd), step),
    );
    trained.map_err(|error| Told::of(&error))
}

/// Trains a stage on each rank for two steps of 1F1B.
fn train_staged(transport: SimTransport) -> dist_parallel::Result<Vec<u64>> {
    let comm = Communicator::new(transport);
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(comm.world_size(), 6)?;
    let model = Sequence::new(blocks([["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]))?;
    let stages = split_into_stages(4, schedule.stages())?;
    let mut pipeline = Pipeline::new(comm, model, schedule, &stages, PlainVectors)?;
    let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.01, ..SgdOptions::default() })?;
    let x = |index| index as f32 / 7.0;
    for _ in 0..2 {
        pipeline.step(|index| Ok(vec![x(index); LEN]), |index, output| squared_error(x(index))(output))?;
        pipeline.update(&mut sgd)?;
    }
    let mut bits = Vec::new();
    pipeline.for_each_parameter(|_, values| bits.extend(bits_of(&values)))?;
    Ok(bits)
}
