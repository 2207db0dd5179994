//! Independent tasks of a verification, and the threads that run them.

use std::sync::atomic::{AtomicUsize, Ordering};

use dist_algos::verify::on_all_cores;

use super::line::{ProofLine, Proven};
use crate::progress::Progress;

/// An independent part of the verification.
pub(super) struct Task<R> {
    /// Its description for the progress on stderr.
    pub(super) name: String,
    /// The number of ranks. More ranks take longer.
    pub(super) ranks: usize,
    pub(super) run: Box<dyn Fn() -> R + Sync>,
}

/// The proofs of one algorithm.
pub(super) struct Proofs {
    /// The line for the algorithm, without results.
    pub(super) line: ProofLine,
    /// The proofs in the order in which they are added to the line.
    pub(super) tasks: Vec<Task<Result<Proven, String>>>,
}

/// Runs all tasks, and returns their results in the order of the tasks.
pub(super) fn run_all<R: Send>(progress: &Progress, tasks: &[Task<R>]) -> Vec<R> {
    let done = AtomicUsize::new(0);
    let run = |task: &Task<R>| {
        progress.doing(format!("{}, {} of {} done", task.name, done.load(Ordering::Relaxed), tasks.len()));
        let result = (task.run)();
        done.fetch_add(1, Ordering::Relaxed);
        result
    };
    on_all_cores(tasks, |task| task.ranks, run)
}

/// Runs all proofs, and returns the lines of all algorithms.
pub(super) fn prove_all(progress: &Progress, all: Vec<Proofs>) -> Vec<ProofLine> {
    let mut lines: Vec<(ProofLine, usize)> = Vec::new();
    let mut tasks = Vec::new();
    for proofs in all {
        lines.push((proofs.line, proofs.tasks.len()));
        tasks.extend(proofs.tasks);
    }
    let mut results = run_all(progress, &tasks).into_iter();
    let fill = |(mut line, count): (ProofLine, usize)| {
        results.by_ref().take(count).for_each(|found| line.add(found));
        line
    };
    lines.into_iter().map(fill).collect()
}
