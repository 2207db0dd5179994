//! The programs that are explored: collectives, groups that overlap, operations under way at once, training.

use std::time::Duration;

use dist_collectives::{AllReduce, Buffer, Communicator, ReduceOp, ReductionOrder};
use dist_groups::Group;
use dist_parallel::{
    BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Params, Sgd, SgdOptions, Values, ValuesMut,
};
use dist_transport::sim::SimTransport;

/// What every rank does, and what holds of it.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) world_size: usize,
    pub(crate) run: fn(SimTransport) -> Ended,
    /// The virtual time by which every rank has its result or its error, whatever goes wrong.
    pub(crate) time_max: Duration,
}

/// The bits of what all ranks must end with, or why this one has none. Wrong results are panics.
pub(crate) type Ended = Result<Vec<u64>, String>;

pub(crate) const PROGRAMS: &[Program] = &[
    Program { name: "collectives", world_size: 5, run: collectives, time_max: HOUR },
    Program { name: "groups", world_size: 6, run: groups, time_max: HOUR },
    Program { name: "pending", world_size: 4, run: pending, time_max: HOUR },
    Program { name: "training", world_size: 4, run: training, time_max: HOUR },
];

const HOUR: Duration = Duration::from_secs(3600);

fn collectives(transport: SimTransport) -> Ended {
    let mut comm = Communicator::new(transport);
    all_collectives(&mut comm).map_err(|error| format!("{error:?}"))
}

fn all_collectives(comm: &mut Communicator) -> dist_collectives::Result<Vec<u64>> {
    let (rank, world_size) = (comm.rank() as u64, comm.world_size() as u64);
    let sum = |each: fn(u64) -> u64| (0..world_size).map(each).sum::<u64>();
    let mut digest = Vec::new();
    for (round, algorithm) in AllReduce::ALL.iter().copied().enumerate() {
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
    comm.barrier()?;
    digest.extend(all);
    Ok(digest)
}

/// Rows and columns of two by three ranks, each rank in one of each, both used at once by threads of their own.
fn groups(transport: SimTransport) -> Ended {
    let mut world = Communicator::new(transport);
    rows_and_columns(&mut world).map_err(|error| format!("{error:?}"))
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

/// Several operations under way at once, and blocking ones between.
fn pending(transport: SimTransport) -> Ended {
    let mut comm = Communicator::new(transport);
    under_way(&mut comm).map_err(|error| format!("{error:?}"))
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
    pub(crate) fn new(len: usize) -> Self {
        let info = |name| ParamInfo::new(name, [len], FloatType::F32);
        Self { infos: [info("slope"), info("offset")], values: [vec![0.0; len], vec![0.5; len]] }
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
    train(transport, 5, 4).map_err(|error| format!("{error:?}"))
}

/// Trains for so many steps; the bits of the parameters.
pub(crate) fn train(transport: SimTransport, len: usize, steps: u32) -> dist_parallel::Result<Vec<u64>> {
    let comm = Communicator::new(transport);
    let micro_batches = comm.world_size();
    let mut ddp = Ddp::new(comm, Line::new(len), DdpOptions::default())?;
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
