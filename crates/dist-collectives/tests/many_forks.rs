//! Processes that make many groups: memory is used again, and a death is named.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_collectives::transport::Runtime;
use dist_collectives::{Communicator, Config, Error, ReduceOp, Result};
use dist_testkit::process;
use rstest::rstest;
use rustix::process::{Signal, getpid, kill_process};

const LIMIT: Duration = Duration::from_secs(120);
const FORKS: usize = 5000;
const VICTIM: usize = 1;
/// The time of the victim's death, in microseconds after the first barrier.
const MOMENT: &str = "DIST_TEST_MOMENT";

fn join() -> Communicator {
    let mut comm = Communicator::join(&Config::from_env().unwrap()).unwrap();
    comm.set_timeout(LIMIT);
    comm
}

/// Sums in a fork and in a fork of it, which are dropped in either order.
fn sum_in_forks(world: &mut Communicator, number: usize) -> Result<()> {
    let mut fork = world.fork()?;
    let all: Vec<usize> = (0..world.world_size()).collect();
    let mut group = fork.subgroup(&all)?.expect("every rank is a member");
    for comm in [&mut fork, &mut group] {
        let mut values = [number, world.rank()].map(|value| value as u64);
        comm.all_reduce(&mut values, ReduceOp::Sum)?;
        let ranks = world.world_size();
        assert_eq!(values, [ranks * number, ranks * (ranks - 1) / 2].map(|value| value as u64));
    }
    if number.is_multiple_of(2) {
        drop(fork)
    } else {
        drop(group)
    }
    Ok(())
}

/// Returns the numbers of mappings and of open files of this process.
fn held() -> (usize, usize) {
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    (mappings, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn forks_that_are_dropped_leave_no_mapping_and_no_file() {
    if process::rank().is_some() {
        let mut world = join();
        (0..10).for_each(|number| sum_in_forks(&mut world, number).unwrap());
        let before = held();
        (0..FORKS).for_each(|number| sum_in_forks(&mut world, number).unwrap());
        let after = held();
        let grown =
            [(before.0, after.0), (before.1, after.1)].map(|(before, after)| after.saturating_sub(before));
        assert!(grown.iter().all(|&more| more < 32), "{before:?} {after:?}");
        return;
    }
    let name = "forks_that_are_dropped_leave_no_mapping_and_no_file";
    let job = process::ranks_with(2, name, LIMIT, &[("DIST_TRANSPORT", "shm")]);
    for ended in &job.ranks {
        assert!(ended.status.is_some_and(|status| status.success()), "rank {}: {}", ended.rank, ended.output);
    }
}

/// Forks until the victim is dead, and returns the error.
fn fork_until_the_end(moment: Duration) -> Error {
    let mut world = join();
    sum_in_forks(&mut world, 1).unwrap();
    world.barrier().unwrap();
    if world.rank() == VICTIM {
        let die = move || {
            Runtime::system().sleep(moment);
            kill_process(getpid(), Signal::KILL).unwrap();
        };
        drop(Runtime::system().spawn("end", die).unwrap());
    }
    (0..).find_map(|number| sum_in_forks(&mut world, number).err()).unwrap()
}

#[rstest]
fn a_rank_that_dies_while_groups_are_made_is_named(#[values(0, 400, 3000, 20_000)] moment: u64) {
    if process::rank().is_some() {
        let moment = Duration::from_micros(std::env::var(MOMENT).unwrap().parse().unwrap());
        let error = fork_until_the_end(moment);
        assert_eq!(error.peer(), Some(VICTIM), "{error}");
        assert!(error.to_string().contains("died"), "{error}");
        return;
    }
    let (name, moment) = (std::thread::current().name().unwrap().to_owned(), moment.to_string());
    let job = process::ranks_with(3, &name, LIMIT, &[(MOMENT, &moment), ("DIST_TRANSPORT", "shm")]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank != VICTIM, "rank {}: {}", ended.rank, ended.output);
    }
}
