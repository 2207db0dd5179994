//! Proofs on all cores.

use std::cmp::Reverse;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Runs a function on every task and returns the results in the order of the tasks. There is one thread per core.
/// Tasks of the largest size begin first, so that all threads end at about the same time.
///
/// ```
/// use dist_algos::verify::{on_all_cores, prove};
/// use dist_algos::ring;
///
/// let worlds = [2, 3, 4];
/// let reports = on_all_cores(&worlds, |&ranks| ranks, |&ranks| prove(&ring::ALL_GATHER, ranks, 0));
/// assert_eq!(reports[2].as_ref().unwrap().rounds, 3);
/// ```
///
/// # Panics
/// If the function panics.
pub fn on_all_cores<T: Sync, R: Send>(
    tasks: &[T],
    size: impl Fn(&T) -> usize,
    run: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&task| Reverse(size(&tasks[task])));
    let begun = AtomicUsize::new(0);
    let work = || {
        let next = || order.get(begun.fetch_add(1, Ordering::Relaxed)).copied();
        std::iter::from_fn(next).map(|task| (task, run(&tasks[task]))).collect::<Vec<_>>()
    };
    let mut results = on_each_core(tasks.len(), &work);
    results.sort_unstable_by_key(|&(task, _)| task);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Calls a function on one thread per core, on at most `threads_max` threads. Returns all results.
fn on_each_core<R: Send>(threads_max: usize, work: &(impl Fn() -> Vec<R> + Sync)) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(threads_max);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_tasks_and_no_task_is_left_out() {
        let tasks: Vec<usize> = (0..1000).map(|task| task * 7919 % 31).collect();
        let squares = on_all_cores(&tasks, |&task| task, |&task| task * task);
        assert_eq!(squares, tasks.iter().map(|task| task * task).collect::<Vec<_>>());
        assert!(on_all_cores(&[], |&task: &usize| task, |&task| task).is_empty());
    }

    #[test]
    #[should_panic(expected = "task 3 is wrong")]
    fn a_panic_of_a_task_is_passed_on() {
        on_all_cores(&[1, 2, 3], |&task| task, |&task| assert!(task != 3, "task {task} is wrong"));
    }
}
