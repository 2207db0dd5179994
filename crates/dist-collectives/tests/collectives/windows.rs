//! Windows: reads of other ranks' memory, the time from which it may change again, and ranks that leave.

use std::time::Duration;

use bytemuck::Pod;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{Buffer, Communicator, Element, Error, ReduceOp, bf16};
use rstest::rstest;

use crate::worlds::{Network, run};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the value of a rank at a position in a round.
fn value(round: usize, rank: usize, place: usize) -> u32 {
    u32::try_from(100_000 * round + 10_000 * rank + place).expect("few of each")
}

fn fill(buffer: &mut Buffer<u32>, round: usize, rank: usize) {
    buffer.iter_mut().enumerate().for_each(|(place, element)| *element = value(round, rank, place));
}

/// Returns a buffer of either kind.
fn buffer(comm: &mut Communicator, len: usize, allocated: bool) -> Buffer<u32> {
    if allocated { comm.alloc(len).unwrap() } else { Buffer::from(vec![0; len]) }
}

#[rstest]
fn every_rank_reads_the_memory_of_every_rank(
    #[values(0, 1)] network: usize,
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values(0, 1, 7, 1000)] len: usize,
) {
    let network = Network::SHARING[network.min(Network::SHARING.len() - 1)];
    run(network, world_size, move |mut comm| {
        let mut own = buffer(&mut comm, len, true);
        assert!(comm.can_open(&own).unwrap());
        for round in 0..3 {
            let rank = comm.rank();
            fill(&mut own, round, rank);
            let mut window = comm.open(own).unwrap();
            for peer in 0..world_size {
                for (start, end) in [(0, len), (len / 3, len), (0, len / 2), (len, len)] {
                    let mut read = vec![0; end - start];
                    window.read(peer, start, &mut read).unwrap();
                    let there = (start..end).map(|place| value(round, peer, place));
                    assert!(read.iter().copied().eq(there), "{start}..{end} of rank {peer} in round {round}");
                    assert!(window.view(peer).unwrap()[start..end] == read, "{start}..{end} of rank {peer}");
                }
            }
            assert!(window.iter().enumerate().all(|(place, &own)| own == value(round, rank, place)));
            (comm, own) = window.close().unwrap();
        }
        // The communicator can be used as before.
        comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
    });
}

#[rstest]
fn no_rank_gets_its_buffer_back_before_all_have_read_it(#[values(false, true)] allocated: bool) {
    for &network in Network::SHARING {
        run(network, 3, move |mut comm| {
            let (mut other, rank) = (comm.fork().unwrap(), comm.rank());
            let mut own = buffer(&mut comm, 100, allocated);
            if !comm.can_open(&own).unwrap() {
                return;
            }
            fill(&mut own, 1, rank);
            let mut window = comm.open(own).unwrap();
            if rank == 0 {
                // The others are about to close.
                for peer in [1, 2] {
                    other.recv(&mut [0_u8], peer).unwrap();
                }
                let mut read = [0; 100];
                for peer in [1, 2] {
                    window.read(peer, 0, &mut read).unwrap();
                    assert!((0..100).all(|place| read[place] == value(1, peer, place)));
                }
            } else {
                other.send(&[0_u8], 0).unwrap();
            }
            let (_comm, mut own) = window.close().unwrap();
            fill(&mut own, 2, rank);
            other.barrier().unwrap();
        });
    }
}

#[test]
fn ordinary_memory_is_read_and_has_no_view() {
    // More than one system call copies.
    const LEN: usize = 100_001;
    for &network in Network::SHARING {
        run(network, 2, move |mut comm| {
            let rank = comm.rank();
            let mut own = Buffer::from(vec![0; LEN]);
            if !comm.can_open(&own).unwrap() {
                return;
            }
            fill(&mut own, 1, rank);
            let mut window = comm.open(own).unwrap();
            let mut read = vec![0; LEN - 1];
            window.read(1 - rank, 1, &mut read).unwrap();
            assert!(read.into_iter().eq((1..LEN).map(|place| value(1, 1 - rank, place))));
            if network != Network::SharedMemory(7) {
                let error = window.view(1 - rank).unwrap_err();
                assert!(matches!(error, Error::NotMapped { rank: peer } if peer == 1 - rank), "{error}");
            }
            assert_eq!(window.view(rank).unwrap().len(), LEN);
            window.close().unwrap();
        });
    }
}

#[test]
fn a_window_is_closed_when_the_last_rank_closes_it() {
    const READS: Duration = Duration::from_secs(7);
    let ends = run(Network::SharedMemory(7), 3, |mut comm| {
        let (runtime, rank) = (comm.runtime().clone(), comm.rank());
        let own = buffer(&mut comm, 10, true);
        let window = comm.open(own).unwrap();
        if rank == 2 {
            runtime.sleep(READS);
        }
        window.close().unwrap();
        runtime.now()
    });
    assert!(ends.iter().all(|&end| end >= READS), "{ends:?}");
}

#[test]
fn elements_of_any_type_are_read() {
    for &network in Network::SHARING {
        run(network, 2, |comm| {
            let comm = read_some(comm, [1_u8, 2]);
            let comm = read_some(comm, [-1_i64, 2]);
            let comm = read_some(comm, [0.5_f64, 2.5]);
            let comm = read_some(comm, [bf16::from_f32(0.5), bf16::ONE]);
            read_some(comm, [[1_u16, 2, 3], [4, 5, 6]]);
        });
    }
}

/// Reads the other rank's number; ranks 0 and 1 have one each.
fn read_some<T: Pod + PartialEq + Send + Sync>(mut comm: Communicator, numbers: [T; 2]) -> Communicator {
    let mut own = comm.alloc(3).unwrap();
    own.fill(numbers[comm.rank()]);
    let mut window = comm.open(own).unwrap();
    let (other, mut read) = (1 - window.rank(), [numbers[window.rank()]; 2]);
    window.read(other, 1, &mut read).unwrap();
    assert!(read.iter().all(|read| *read == numbers[other]));
    window.close().unwrap().0
}

#[test]
fn reads_outside_of_a_window_are_refused_and_the_window_stays_open() {
    for &network in Network::SHARING {
        run(network, 2, |mut comm| {
            let own = buffer(&mut comm, 10, true);
            let mut window = comm.open(own).unwrap();
            let error = window.read(2, 0, &mut [0]).unwrap_err();
            assert!(matches!(error, Error::RankOutOfRange { rank: 2, world_size: 2 }), "{error}");
            for (start, elements) in [(10, 1), (9, 2), (usize::MAX, 1)] {
                let error = window.read(1, start, &mut vec![0; elements]).unwrap_err();
                assert!(matches!(error, Error::OutsideWindow { len: 10, .. }), "{error}");
            }
            let error = window.view(2).unwrap_err();
            assert!(matches!(error, Error::RankOutOfRange { rank: 2, world_size: 2 }), "{error}");
            window.read(1, 0, &mut [0; 10]).unwrap();
            window.close().unwrap();
        });
    }
}

#[test]
fn ranks_without_shared_memory_read_from_threads_of_the_owners() {
    for &network in Network::ALL.iter().filter(|network| !Network::SHARING.contains(network)) {
        run(network, 3, |mut comm| {
            let rank = comm.rank();
            let mut own = buffer(&mut comm, 1000, true);
            assert!(!comm.can_open(&own).unwrap());
            for round in 0..3 {
                fill(&mut own, round, rank);
                let mut window = comm.open(own).unwrap();
                for peer in 0..3 {
                    for (start, end) in [(0, 1000), (999, 1000), (1000, 1000), (7, 500)] {
                        let mut read = vec![0; end - start];
                        window.read(peer, start, &mut read).unwrap();
                        assert!(read.into_iter().eq((start..end).map(|place| value(round, peer, place))));
                    }
                }
                let error = window.view((rank + 1) % 3).unwrap_err();
                assert!(matches!(error, Error::NotMapped { .. }), "{error}");
                assert_eq!(window.view(rank).unwrap()[7], value(round, rank, 7));
                let error = window.read(1, 999, &mut [0, 0]).unwrap_err();
                assert!(matches!(error, Error::OutsideWindow { len: 1000, .. }), "{error}");
                (comm, own) = window.close().unwrap();
            }
            comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
        });
    }
}

#[test]
fn windows_of_different_lengths_or_types_are_refused_on_all_ranks() {
    /// Checks that the error is about the windows, and returns the number of elements of the buffer that came back.
    fn refused<T: Element>(comm: Communicator, len: usize, difference: &str) -> usize {
        let failed = comm.open(Buffer::from(vec![T::zeroed(); len])).unwrap_err();
        let text = failed.error.to_string();
        assert!(text.contains(Operation::Window.name()) && text.contains(difference), "{text}");
        failed.buffer.len()
    }
    for &network in Network::ALL {
        run(network, 3, |mut comm| {
            comm.set_timeout(TIMEOUT);
            let len = if comm.rank() == 2 { 9 } else { 10 };
            assert_eq!(refused::<u32>(comm, len, "lengths differ"), len);
        });
        run(network, 2, |mut comm| {
            comm.set_timeout(TIMEOUT);
            match comm.rank() {
                0 => refused::<u32>(comm, 3, "types differ"),
                _ => refused::<i32>(comm, 3, "types differ"),
            };
        });
    }
}

#[test]
fn a_window_between_hosts_that_is_dropped_ends_the_job() {
    for &network in Network::ALL.iter().filter(|network| !Network::SHARING.contains(network)) {
        run(network, 3, |mut comm| {
            comm.set_timeout(TIMEOUT);
            let (mut other, rank) = (comm.fork().unwrap(), comm.rank());
            let own = buffer(&mut comm, 10, true);
            let window = comm.open(own).unwrap();
            // No rank is in a call when rank 1 drops its window.
            if rank == 1 {
                [0, 2].into_iter().for_each(|peer| other.recv(&mut [0_u8], peer).unwrap());
                drop(window);
                return;
            }
            other.send(&[1_u8], 1).unwrap();
            let error = Error::from(window.close().unwrap_err());
            assert_eq!(error.peer(), Some(1), "{error}");
            assert!(!error.is_timeout(), "{error}");
        });
    }
}

#[test]
fn can_open_does_not_depend_on_the_forced_algorithm() {
    for network in [Network::Simulated, Network::SharedMemory(7)] {
        run(network, 3, move |mut comm| {
            let own = buffer(&mut comm, 10, true);
            // Some of these are refused for a reduction because of its order or its memory.
            let is_asked = |it: &Algorithm| matches!(it, Algorithm::Direct(_)) || it.name() == "ring";
            let asked = Operation::AllReduce.algorithms().filter(is_asked);
            for algorithm in asked {
                let can = comm.with_algorithm(algorithm).can_open(&own).unwrap();
                assert_eq!(can, network != Network::Simulated, "{algorithm}");
            }
        });
    }
}

#[test]
fn a_window_is_no_other_call_and_no_window_of_another_length() {
    for &network in Network::SHARING {
        for len in [None, Some(9)] {
            run(network, 2, move |mut comm| {
                comm.set_timeout(TIMEOUT);
                let own = buffer(&mut comm, 10, true);
                assert!(comm.can_open(&own).unwrap());
                let error = match (comm.rank(), len) {
                    (0, _) => Error::from(comm.open(own).unwrap_err()),
                    (_, None) => comm.barrier().unwrap_err(),
                    (_, Some(len)) => {
                        let shorter = buffer(&mut comm, len, true);
                        comm.open(shorter).unwrap_err().into()
                    }
                };
                assert!(error.to_string().contains(Operation::Window.name()), "{error}");
            });
        }
    }
}

#[test]
fn a_window_that_is_dropped_is_missed() {
    for &network in Network::SHARING {
        run(network, 3, move |mut comm| {
            comm.set_timeout(TIMEOUT);
            let (mut other, rank) = (comm.fork().unwrap(), comm.rank());
            let own = buffer(&mut comm, 10, true);
            let mut window = comm.open(own).unwrap();
            other.barrier().unwrap();
            if rank == 1 {
                drop(window);
                other.barrier().unwrap();
                // Stays until the others have detected it.
                assert!(other.barrier().is_err());
                return;
            }
            other.barrier().unwrap();
            if network != Network::SharedMemory(7) {
                // The simulated window is a copy.
                let error = window.read(1, 0, &mut [0; 10]).unwrap_err();
                assert_eq!(error.peer(), Some(1), "{error}");
            }
            let failed = window.close().unwrap_err();
            assert_eq!(failed.buffer.len(), 10, "it has its own again");
            let error = Error::from(failed);
            assert_eq!(error.peer(), Some(1), "{error}");
            assert!(!error.is_timeout(), "{error}");
        });
    }
}
