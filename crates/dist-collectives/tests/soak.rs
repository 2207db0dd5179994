//! Ten thousand steps of all operations, with ranks that arrive early and late: results stay right, and no
//! resources are lost. This test has its own binary, because descriptors, threads and memory belong to the process.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::VecDeque;
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Message, Pending, ReduceOp};
use dist_testkit::process;
use fastrand::Rng;
use rstest::rstest;

const WORLD: usize = 4;
/// Maximum number of operations in flight.
const STARTED_MAX: usize = 4;
/// The number of times that the second communicator is created anew, and the number of steps of each.
const FORKS: u64 = 20;
const FORK_STEPS: u64 = 500;
/// After this number of forks memory must not grow: every operation has been called with every size.
const WARM_FORKS: u64 = FORKS / 2;
/// An allocator may need up to 100 KiB more now and then, as measured. A loss of 64 bytes in every step exceeds
/// this limit.
const GROWTH_KIB_MAX: u64 = 256;
const LIMIT: Duration = Duration::from_secs(120);

/// The resources of this process.
#[derive(Debug)]
struct Possessions {
    descriptors: usize,
    threads: usize,
    /// The number of mappings that are or may be shared.
    shared: usize,
    own_kib: u64,
}

impl Possessions {
    fn count() -> Self {
        let entries = |directory: &str| std::fs::read_dir(directory).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            shared: maps.lines().filter(|line| line.contains("/memfd:")).count(),
            own_kib: own.trim().strip_suffix(" kB").unwrap().parse().unwrap(),
        }
    }

    /// Panics if more is left than before. A rank may have one connection more or less with each other rank: a pair
    /// has two until both ranks use the same one for their messages.
    fn check(&self, before: &Self) {
        let links = WORLD - 1;
        assert!(self.descriptors <= before.descriptors + links, "{before:?}, then {self:?}");
        assert!(self.threads <= before.threads, "{before:?}, then {self:?}");
        assert!(self.shared <= before.shared + links, "{before:?}, then {self:?}");
        assert!(self.own_kib <= before.own_kib + GROWTH_KIB_MAX, "{before:?}, then {self:?}");
    }
}

/// Returns an element of a rank's data in a step. No two are equal, and all ranks can compute the results.
fn element(number: u64, rank: usize, index: usize) -> u64 {
    (number * WORLD as u64 + rank as u64) << 32 | index as u64
}

fn brought(number: u64, rank: usize, len: usize) -> Vec<u64> {
    (0..len).map(|index| element(number, rank, index)).collect()
}

/// Returns the sum of all ranks' data.
fn sum(number: u64, len: usize) -> Vec<u64> {
    (0..len).map(|index| (0..WORLD).map(|rank| element(number, rank, index)).sum()).collect()
}

/// A started sum and its expected result.
type Started = (Pending<Buffer<u64>>, Vec<u64>);

fn finish((pending, expected): Started) {
    assert_eq!(*pending.wait().unwrap(), *expected);
}

/// Executes one step, which is the same on all ranks.
fn step(comm: &mut Communicator, number: u64, shared: &mut Rng, started: &mut VecDeque<Started>) {
    let (rank, len) = (comm.rank(), shared.choice([0, 1, 7, 100, 1000, 5000]).unwrap());
    let (root, whole) = (shared.usize(0..WORLD), WORLD * len);
    let mut own = brought(number, rank, len);
    match shared.u8(0..19) {
        0 => {
            comm.all_reduce(&mut own, ReduceOp::Sum).unwrap();
            assert_eq!(own, sum(number, len));
        }
        1 => {
            let mut gathered = vec![0; whole];
            comm.all_gather(&own, &mut gathered).unwrap();
            let expected: Vec<u64> = (0..WORLD).flat_map(|from| brought(number, from, len)).collect();
            assert_eq!(gathered, expected);
        }
        2 => {
            comm.reduce_scatter(&brought(number, rank, whole), &mut own, ReduceOp::Sum).unwrap();
            assert_eq!(own, sum(number, whole)[rank * len..][..len]);
        }
        3 => {
            comm.broadcast(&mut own, root).unwrap();
            assert_eq!(own, brought(number, root, len));
        }
        4 => {
            comm.reduce(&mut own, ReduceOp::Max, root).unwrap();
            assert!(rank != root || own == brought(number, WORLD - 1, len), "{own:?}");
        }
        5 => {
            let mut dealt = vec![0; whole];
            comm.all_to_all(&brought(number, rank, whole), &mut dealt).unwrap();
            for (from, part) in dealt.chunks(len.max(1)).enumerate() {
                assert_eq!(part, &brought(number, from, whole)[rank * len..][..len]);
            }
        }
        6 | 17 => step_of_messages(comm, number, shared, &own),
        7 => {
            let mut memory = comm.alloc::<u64>(len).unwrap();
            memory.copy_from_slice(&own);
            comm.all_reduce_buffer(&mut memory, ReduceOp::Sum).unwrap();
            assert_eq!(*memory, *sum(number, len));
        }
        8 => {
            comm.scan(&mut own, ReduceOp::Sum).unwrap();
            let up_to = |index| (0..=rank).map(|rank| element(number, rank, index)).sum::<u64>();
            assert!(own.into_iter().eq((0..len).map(up_to)));
        }
        9 => {
            comm.exclusive_scan(&mut own, ReduceOp::Max).unwrap();
            assert_eq!(own, if rank == 0 { vec![0; len] } else { brought(number, rank - 1, len) });
        }
        10..=15 => step_of_parts(comm, number, shared, (len, root)),
        #[cfg(feature = "serde")]
        16 => {
            let values = comm.all_gather_values(&(rank, own)).unwrap();
            assert!((0..WORLD).map(|from| (from, brought(number, from, len))).eq(values));
        }
        _ => {
            if started.len() == STARTED_MAX {
                finish(started.pop_front().unwrap());
            }
            started.push_back((comm.start_all_reduce(own, ReduceOp::Sum), sum(number, len)));
        }
    }
}

/// Executes a step that sends each rank's data to the next rank, or to all ranks.
fn step_of_messages(comm: &mut Communicator, number: u64, shared: &mut Rng, own: &[u64]) {
    let (rank, len) = (comm.rank(), own.len());
    if shared.bool() {
        let (left, right) = ((rank + WORLD - 1) % WORLD, (rank + 1) % WORLD);
        let mut received = vec![0; len];
        comm.send_recv(own, right, &mut received, left).unwrap();
        assert_eq!(received, brought(number, left, len));
        return;
    }
    let others: Vec<usize> = (0..WORLD).filter(|&other| other != rank).collect();
    let mut received = vec![vec![0; len]; WORLD - 1];
    let sends = others.iter().map(|&to| Message::send(to, own));
    let pairs = others.iter().zip(&mut received);
    let receives = pairs.map(|(&from, elements)| Message::receive(from, &mut elements[..]));
    comm.batch(&mut sends.chain(receives).collect::<Vec<_>>()).unwrap();
    assert!(others.into_iter().map(|from| brought(number, from, len)).eq(received));
}

/// Executes a step that gives the ranks equal or unequal parts.
fn step_of_parts(comm: &mut Communicator, number: u64, shared: &mut Rng, (len, root): (usize, usize)) {
    let (rank, whole) = (comm.rank(), WORLD * len);
    // The parts of some ranks are empty.
    let counts: Vec<usize> = (0..WORLD).map(|part| len * ((part + root) % 3)).collect();
    let uneven: usize = counts.iter().sum();
    let start: usize = counts[..rank].iter().sum();
    let part = start..start + counts[rank];
    let mut own = vec![0; len];
    let mut own_uneven = vec![0; counts[rank]];
    match shared.u8(0..7) {
        0 => {
            let mut gathered = vec![0; if rank == root { whole } else { 0 }];
            comm.gather(&brought(number, rank, len), &mut gathered, root).unwrap();
            let expected = (0..WORLD).flat_map(|from| brought(number, from, len));
            assert!(rank != root || expected.eq(gathered));
        }
        1 => {
            comm.scatter(&brought(number, rank, whole), &mut own, root).unwrap();
            assert_eq!(own, brought(number, root, whole)[rank * len..][..len]);
        }
        2 => {
            let mut gathered = vec![0; uneven];
            comm.all_gather_v(&brought(number, rank, counts[rank]), &counts, &mut gathered).unwrap();
            let expected = (0..WORLD).flat_map(|from| brought(number, from, counts[from]));
            assert!(expected.eq(gathered));
        }
        3 => {
            let mut gathered = vec![0; if rank == root { uneven } else { 0 }];
            comm.gather_v(&brought(number, rank, counts[rank]), &counts, &mut gathered, root).unwrap();
            let expected = (0..WORLD).flat_map(|from| brought(number, from, counts[from]));
            assert!(rank != root || expected.eq(gathered));
        }
        4 => {
            comm.scatter_v(&brought(number, rank, uneven), &counts, &mut own_uneven, root).unwrap();
            assert_eq!(own_uneven, brought(number, root, uneven)[part]);
        }
        5 => {
            let input = brought(number, rank, uneven);
            comm.reduce_scatter_v(&input, &counts, &mut own_uneven, ReduceOp::Sum).unwrap();
            assert_eq!(own_uneven, sum(number, uneven)[part]);
        }
        _ => {
            // All parts for other ranks have the same length.
            let (mut dealt, sends) = (vec![0; uneven], [counts[rank]; WORLD]);
            let input = brought(number, rank, WORLD * counts[rank]);
            comm.all_to_all_v(&input, &sends, &mut dealt, &counts).unwrap();
            let part_of = |(from, &len): (usize, &usize)| {
                brought(number, from, WORLD * len).into_iter().skip(rank * len).take(len)
            };
            assert!(counts.iter().enumerate().flat_map(part_of).eq(dealt));
        }
    }
}

/// Reads the next rank's data directly, if the ranks share memory.
fn look_into_a_window(mut comm: Communicator, number: u64) -> Communicator {
    const LEN: usize = 1000;
    let (rank, mut memory) = (comm.rank(), comm.alloc::<u64>(LEN).unwrap());
    memory.copy_from_slice(&brought(number, rank, LEN));
    if !comm.can_open(&memory).unwrap() {
        return comm;
    }
    let (mut window, next, mut read) = (comm.open(memory).unwrap(), (rank + 1) % WORLD, [0; LEN / 2]);
    window.read(next, LEN / 4, &mut read).unwrap();
    assert_eq!(read, brought(number, next, LEN)[LEN / 4..][..LEN / 2]);
    window.close().unwrap().0
}

#[rstest]
fn ten_thousand_steps_are_right_and_leave_nothing_behind(#[values("auto", "tcp")] transport: &str) {
    if process::rank().is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        // Freed memory is returned to the system.
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
    let (mut shared, mut skew) = (Rng::with_seed(28), Rng::with_seed(comm.rank() as u64));
    let mut before = None;
    for life in 1..=FORKS {
        let mut fork = comm.fork().unwrap();
        let mut started = VecDeque::new();
        for number in (life - 1) * FORK_STEPS..life * FORK_STEPS {
            // Ranks also have other work, in different amounts.
            if skew.u8(0..32) == 0 {
                comm.runtime().sleep(Duration::from_micros(skew.u64(0..300)));
            }
            let communicator = if shared.bool() { &mut comm } else { &mut fork };
            step(communicator, number, &mut shared, &mut started);
        }
        started.drain(..).for_each(finish);
        let _fork = look_into_a_window(fork, life);
        // No rank continues during the measurement.
        comm.barrier().unwrap();
        let now = Possessions::count();
        comm.barrier().unwrap();
        match &before {
            None if life == WARM_FORKS => before = Some(now),
            None => {}
            Some(before) => now.check(before),
        }
    }
}
