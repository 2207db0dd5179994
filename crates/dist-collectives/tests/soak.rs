//! Ten thousand steps of everything at once, with ranks that come early and late: results stay right, and nothing is kept. In
//! a binary of its own, because descriptors, threads and memory belong to the process.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::VecDeque;
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Pending, ReduceOp};
use dist_testkit::process;
use fastrand::Rng;
use rstest::rstest;

const WORLD: usize = 4;
const STEPS: u64 = 10_000;
/// From here on nothing grows: every operation was met with every size.
const WARM: u64 = STEPS / 2; // a multiple of FORK_STEPS
/// So many operations are in flight at once.
const STARTED_MAX: usize = 4;
/// The communicator beside the first is made anew after so many steps.
const FORK_STEPS: u64 = 500;
/// What an allocator may need more now and then, up to 100 KiB as measured; 64 bytes lost in every step are more.
const GROWTH_KIB_MAX: u64 = 256;
const LIMIT: Duration = Duration::from_secs(120);

/// What this process has: open descriptors, threads, and KiB of memory.
fn possessions() -> (usize, usize, u64) {
    let entries = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib = resident.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    (entries("/proc/self/fd"), entries("/proc/self/task"), kib)
}

/// What each rank brings, of which all ranks can tell what becomes of it: `base` and its rank.
fn brought(base: u64, rank: usize, len: usize) -> Vec<u64> {
    vec![base + rank as u64; len]
}

fn sum(base: u64) -> u64 {
    (0..WORLD as u64).map(|rank| base + rank).sum()
}

/// An operation that was started, and what every element of its result is to be.
type Started = (Pending<Buffer<u64>>, u64);

fn finish((pending, expected): Started) {
    let result = pending.wait().unwrap();
    assert!(result.iter().all(|&value| value == expected), "{expected}: {result:?}");
}

/// One step, which all ranks take alike.
fn step(comm: &mut Communicator, base: u64, shared: &mut Rng, started: &mut VecDeque<Started>) {
    let (rank, len) = (comm.rank(), shared.choice([0, 1, 7, 100, 1000, 5000]).unwrap());
    let mut own = brought(base, rank, len);
    let all: Vec<u64> = (0..WORLD).flat_map(|from| brought(base, from, len)).collect();
    let root = shared.usize(0..WORLD);
    match shared.u8(0..9) {
        0 => {
            comm.all_reduce(&mut own, ReduceOp::Sum).unwrap();
            assert_eq!(own, vec![sum(base); len]);
        }
        1 => {
            let mut gathered = vec![0; WORLD * len];
            comm.all_gather(&own, &mut gathered).unwrap();
            assert_eq!(gathered, all);
        }
        2 => {
            let whole = brought(base, rank, WORLD * len);
            comm.reduce_scatter(&whole, &mut own, ReduceOp::Sum).unwrap();
            assert_eq!(own, vec![sum(base); len]);
        }
        3 => {
            comm.broadcast(&mut own, root).unwrap();
            assert_eq!(own, brought(base, root, len));
        }
        4 => {
            comm.reduce(&mut own, ReduceOp::Max, root).unwrap();
            assert!(rank != root || own == vec![base + WORLD as u64 - 1; len], "{own:?}");
        }
        5 => {
            let mut dealt = vec![0; WORLD * len];
            comm.all_to_all(&brought(base, rank, WORLD * len), &mut dealt).unwrap();
            assert_eq!(dealt, all);
        }
        6 => {
            let (left, right) = ((rank + WORLD - 1) % WORLD, (rank + 1) % WORLD);
            let mut received = vec![0; len];
            comm.send_recv(&own, right, &mut received, left).unwrap();
            assert_eq!(received, brought(base, left, len));
        }
        7 => {
            let mut memory = comm.alloc::<u64>(len).unwrap();
            memory.copy_from_slice(&own);
            comm.all_reduce_buffer(&mut memory, ReduceOp::Sum).unwrap();
            assert_eq!(*memory, vec![sum(base); len]);
        }
        _ => {
            if started.len() == STARTED_MAX {
                finish(started.pop_front().unwrap());
            }
            started.push_back((comm.start_all_reduce(own, ReduceOp::Sum), sum(base)));
        }
    }
}

#[rstest]
fn ten_thousand_steps_are_right_and_leave_nothing_behind(#[values("auto", "tcp")] transport: &str) {
    if process::rank().is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        // What is freed goes back to the system.
        let variables = [
            ("DIST_TRANSPORT", transport),
            ("MALLOC_ARENA_MAX", "1"),
            ("MALLOC_MMAP_THRESHOLD_", "16384"),
            ("MALLOC_TRIM_THRESHOLD_", "0"),
        ];
        process::ranks_with(WORLD, &name, LIMIT, &variables).assert_success();
        return;
    }
    let mut comm = Communicator::from_env().unwrap();
    let mut fork = comm.fork().unwrap();
    let (mut shared, mut skew) = (Rng::with_seed(28), Rng::with_seed(comm.rank() as u64));
    let mut started = VecDeque::new();
    let mut held = Vec::new();
    for number in 0..STEPS {
        if number % FORK_STEPS == 0 {
            started.drain(..).for_each(finish);
            fork = comm.fork().unwrap();
        }
        if skew.u8(0..32) == 0 {
            comm.runtime().sleep(Duration::from_micros(skew.u64(0..300)));
        }
        let communicator = if shared.bool() { &mut comm } else { &mut fork };
        step(communicator, number, &mut shared, &mut started);
        // At the end of a fork's life, as after the last step, and while nobody goes on.
        if number + 1 == WARM || number + 1 == STEPS {
            started.drain(..).for_each(finish);
            comm.barrier().unwrap();
            held.push(possessions());
            comm.barrier().unwrap();
        }
    }
    let [(descriptors, threads, kib), after] = held[..] else { unreachable!("there are two such steps") };
    assert_eq!((after.0, after.1), (descriptors, threads));
    assert!(after.2 <= kib + GROWTH_KIB_MAX, "{kib} KiB, then {} KiB", after.2);
}
