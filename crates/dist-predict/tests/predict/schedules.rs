//! Schedules of every algorithm for predictions.

use dist_algos::scan::Extent;
use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Partition, Reduce, ReduceScatter, Scan,
    Scatter, Step,
};
use dist_predict::Workload;
use dist_transport::Rank;

/// The steps of a rank.
pub(crate) type Steps = Box<dyn Iterator<Item = Step>>;

/// The steps of every rank.
pub(crate) type Schedules = Box<dyn Fn(Rank) -> Steps + Send + Sync>;

/// Returns the workload of a buffer of this many bytes.
pub(crate) fn plan(schedules: &Schedules, parts: usize, bytes: usize) -> Workload<'_, &Schedules> {
    Workload { steps: schedules, buffer: Partition::new(bytes, 1, parts).unwrap(), input: None }
}

/// Returns both halves of an algorithm.
pub(crate) fn all_reduce(algorithm: AllReduce) -> Schedules {
    Box::new(move |rank| {
        let phases = algorithm.phases(rank);
        Box::new(phases.reduce.chain(phases.gather))
    })
}

/// Returns all algorithms for a world of this size, with their numbers of chunks.
pub(crate) fn all_schedules(world_size: usize) -> Vec<(String, usize, Schedules)> {
    let mut all: Vec<(String, usize, Schedules)> = Vec::new();
    for &algorithm in AllReduce::ALL.iter().filter(|algorithm| algorithm.supports(world_size)) {
        all.push((format!("all_reduce {algorithm}"), algorithm.chunks(world_size), all_reduce(algorithm)));
    }
    for &algorithm in ReduceScatter::ALL.iter().filter(|algorithm| algorithm.supports(world_size)) {
        let steps = move |rank| Box::new(algorithm.schedule(rank).unwrap()) as Steps;
        all.push((format!("reduce_scatter {algorithm}"), world_size, Box::new(steps)));
    }
    for &algorithm in AllGather::ALL.iter().filter(|algorithm| algorithm.supports(world_size)) {
        let steps = move |rank| Box::new(algorithm.schedule(rank).unwrap()) as Steps;
        all.push((format!("all_gather {algorithm}"), world_size, Box::new(steps)));
    }
    let root = world_size / 2;
    for &algorithm in Broadcast::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank, root)) as Steps;
        all.push((format!("broadcast {algorithm}"), algorithm.chunks(world_size), Box::new(steps)));
    }
    for &algorithm in Reduce::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank, root)) as Steps;
        all.push((format!("reduce {algorithm}"), algorithm.chunks(world_size), Box::new(steps)));
    }
    for &algorithm in Barrier::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank)) as Steps;
        all.push((format!("barrier {algorithm}"), 1, Box::new(steps)));
    }
    for &algorithm in Gather::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank, root)) as Steps;
        all.push((format!("gather {algorithm}"), world_size, Box::new(steps)));
    }
    for &algorithm in Scatter::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank, root)) as Steps;
        all.push((format!("scatter {algorithm}"), world_size, Box::new(steps)));
    }
    for &algorithm in AllToAll::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank)) as Steps;
        all.push((format!("all_to_all {algorithm}"), world_size, Box::new(steps)));
    }
    for &algorithm in Scan::ALL {
        let steps = move |rank| Box::new(algorithm.schedule(rank, Extent::Inclusive)) as Steps;
        all.push((format!("scan {algorithm}"), 1, Box::new(steps)));
    }
    all
}
