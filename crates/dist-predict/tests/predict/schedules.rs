//! Schedules of every algorithm for predictions.

use dist_algos::{ALGORITHMS, MessageAlgorithm, Partition, Step};
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

/// Returns the schedules of an algorithm, for this root.
pub(crate) fn schedules(algorithm: &'static MessageAlgorithm, root: usize) -> Schedules {
    Box::new(move |rank| Box::new(algorithm.steps(rank, root)))
}

/// Returns all algorithms for a world of this size, with their numbers of chunks.
pub(crate) fn all_schedules(world_size: usize) -> Vec<(String, usize, Schedules)> {
    let supported = ALGORITHMS.messages().filter(|algorithm| algorithm.supports(world_size));
    supported
        .map(|algorithm| {
            let schedules = schedules(algorithm, world_size / 2);
            (format!("{} {}", algorithm.collective, algorithm.name), algorithm.chunks(world_size), schedules)
        })
        .collect()
}
