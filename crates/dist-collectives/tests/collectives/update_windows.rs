//! Windows for updates: puts and atomic operations on other ranks' memory, fences, and ranks that leave.

use std::time::Duration;

use bytemuck::Pod;
use dist_collectives::tuning::Operation;
use dist_collectives::{AtomicInteger, Buffer, Communicator, Complex, Error, Window, bf16};
use dist_transport::sim::{self, Fault, Link, When};
use rstest::rstest;

use crate::worlds::{Network, run};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the elements of a rank.
fn read<T: Pod + PartialEq + Send + Sync>(window: &mut Window<T>, rank: usize) -> Vec<T> {
    let mut elements = vec![T::zeroed(); window.len()];
    window.read(rank, 0, &mut elements).unwrap();
    if let Ok(view) = window.view(rank) {
        assert!(view == elements);
    }
    elements
}

#[test]
fn elements_that_every_rank_puts_are_read_after_the_fence() {
    for &network in Network::ALL {
        for world_size in [1, 2, 3, 4] {
            run(network, world_size, move |mut comm| {
                let (rank, len) = (comm.rank(), 7 * world_size);
                let mut own = comm.alloc::<u32>(len).unwrap();
                own.fill(0);
                let mut window = comm.open(own).unwrap();
                for round in 1..4 {
                    let value = |from: usize, to: usize| u32::try_from(100 * round + 10 * from + to).unwrap();
                    let mut updates = window.fence().unwrap();
                    for peer in 0..world_size {
                        updates.put(peer, 7 * rank, &[value(rank, peer); 7]).unwrap();
                        updates.put(peer, len, &[]).unwrap();
                    }
                    window = updates.fence().unwrap();
                    for peer in 0..world_size {
                        let expected = (0..world_size).flat_map(|from| [value(from, peer); 7]);
                        assert!(read(&mut window, peer).into_iter().eq(expected));
                    }
                }
                let (mut comm, own) = window.close().unwrap();
                assert_eq!(own.len(), len);
                comm.barrier().unwrap();
            });
        }
    }
}

/// Returns a communicator and a buffer of zeros.
fn zeros<T: Pod + Send + Sync>(mut comm: Communicator, len: usize) -> (Communicator, Buffer<T>) {
    let own = comm.alloc::<T>(len).unwrap();
    (comm, own)
}

/// Every rank counts up the same elements of each rank, and takes the even numbers of a counter.
fn count<T: AtomicInteger + Into<i128>>(comm: Communicator, amount: T) -> Communicator {
    const ADDED: usize = 50;
    let (comm, own) = zeros::<T>(comm, 2);
    let mut updates = comm.open_updates(own).unwrap();
    let ranks = updates.world_size();
    let mut last = i128::MIN;
    for _ in 0..ADDED {
        for rank in 0..ranks {
            let before = updates.fetch_add(rank, 0, amount).unwrap();
            if rank == 0 {
                // Every rank sees the sum grow or, with a negative amount, fall.
                let grown = before.into() * amount.into();
                assert!(grown > last);
                last = grown;
            }
        }
    }
    // Each rank replaces its predecessor's number, and waits for it.
    let [number, next] = [updates.rank(), updates.rank() + 1].map(|rank| T::from(rank).unwrap());
    while updates.compare_and_swap(ranks - 1, 1, number, next).unwrap() != number {
        std::thread::yield_now();
    }
    let mut window = updates.fence().unwrap();
    for rank in 0..ranks {
        let sum = read(&mut window, rank)[0].into();
        assert_eq!(sum, amount.into() * i128::try_from(ADDED * ranks).unwrap());
    }
    assert_eq!(read(&mut window, ranks - 1)[1], T::from(ranks).unwrap());
    window.close().unwrap().0
}

#[test]
fn no_addition_is_lost_and_swaps_take_turns() {
    for &network in Network::ALL {
        for world_size in [1, 2, 4] {
            run(network, world_size, |comm| {
                let comm = count(comm, 3_u64);
                let comm = count(comm, -3_i64);
                let comm = count(comm, 3_u32);
                count(comm, -3_i32);
            });
        }
    }
}

#[test]
fn sums_wrap_around_within_the_size_of_an_element() {
    for &network in Network::ALL {
        for world_size in [1, 2] {
            run(network, world_size, |comm| {
                let (comm, own) = zeros::<u32>(comm, 2);
                let mut updates = comm.open_updates(own).unwrap();
                if updates.rank() == 0 {
                    assert_eq!(updates.fetch_add(0, 0, u32::MAX).unwrap(), 0);
                    assert_eq!(updates.fetch_add(0, 0, 2).unwrap(), u32::MAX);
                    assert_eq!(updates.compare_and_swap(0, 0, 5, 9).unwrap(), 1);
                }
                let mut window = updates.fence().unwrap();
                assert_eq!(read(&mut window, 0), [1, 0]);
                window.close().unwrap();
            });
        }
    }
}

/// Puts two values of a type into the next rank's buffer.
fn put_some<T: Pod + PartialEq + Send + Sync>(comm: Communicator, values: [T; 2]) -> Communicator {
    let (comm, own) = zeros::<T>(comm, 3);
    let mut updates = comm.open_updates(own).unwrap();
    let next = (updates.rank() + 1) % updates.world_size();
    updates.put(next, 1, &values).unwrap();
    let window = updates.fence().unwrap();
    assert!(window[1..] == values && window[0] == T::zeroed());
    window.close().unwrap().0
}

#[test]
fn elements_of_any_type_are_put() {
    for &network in Network::ALL {
        run(network, 3, |comm| {
            let comm = put_some(comm, [1_u8, 2]);
            let comm = put_some(comm, [-1_i64, 2]);
            let comm = put_some(comm, [0.5_f64, 2.5]);
            let comm = put_some(comm, [Complex::new(0.5_f64, 2.5), Complex::new(1.0, -1.0)]);
            let comm = put_some(comm, [bf16::from_f32(0.5), bf16::ONE]);
            let comm = put_some(comm, [[1_u16, 2, 3], [4, 5, 6]]);
            put_some(comm, [[1_u64, 2, 3], [4, 5, 6]]);
        });
    }
}

#[test]
fn updates_outside_of_a_window_are_refused_and_the_window_stays_open() {
    for &network in Network::ALL {
        for world_size in [1, 2] {
            run(network, world_size, move |comm| {
                let (comm, own) = zeros::<u64>(comm, 10);
                let mut updates = comm.open_updates(own).unwrap();
                let error = updates.put(world_size, 0, &[1]).unwrap_err();
                assert!(matches!(error, Error::RankOutOfRange { .. }), "{error}");
                for start in [10, 11, usize::MAX] {
                    let errors = [
                        updates.put(0, start, &[1]).unwrap_err(),
                        updates.fetch_add(0, start, 1).unwrap_err(),
                        updates.compare_and_swap(0, start, 0, 1).unwrap_err(),
                    ];
                    for error in errors {
                        assert!(matches!(error, Error::OutsideWindow { len: 10, .. }), "{error}");
                    }
                }
                let window = updates.fence().unwrap();
                assert!(window.iter().all(|&element| element == 0));
                window.close().unwrap();
            });
        }
    }
}

#[test]
fn ordinary_buffers_of_some_ranks_are_served_by_threads() {
    for &network in Network::ALL {
        run(network, 2, move |mut comm| {
            let own = if comm.rank() == 0 { comm.alloc(10).unwrap() } else { vec![0; 10].into() };
            let mut updates = comm.open_updates::<u64>(own).unwrap();
            for rank in 0..2 {
                updates.fetch_add(rank, 3, 5).unwrap();
            }
            let (_comm, own) = updates.close().unwrap();
            assert_eq!(own[..], [0, 0, 0, 10, 0, 0, 0, 0, 0, 0]);
        });
    }
}

#[test]
fn a_rank_that_computes_serves_updates_all_the_same() {
    for &network in Network::ALL {
        run(network, 2, move |comm| {
            let runtime = comm.runtime().clone();
            let (comm, own) = zeros::<u64>(comm, 1);
            let mut updates = comm.open_updates(own).unwrap();
            if updates.rank() == 1 {
                for before in 0..10 {
                    assert_eq!(updates.fetch_add(0, 0, 1).unwrap(), before);
                }
                // Rank 0 waits for this without a call of its communicator.
                updates.put(0, 0, &[77]).unwrap();
                assert_eq!(updates.fetch_add(0, 0, 0).unwrap(), 77);
            } else {
                while updates.fetch_add(0, 0, 0).unwrap() != 77 {
                    runtime.sleep(Duration::from_millis(1));
                }
            }
            updates.close().unwrap();
        });
    }
}

#[test]
fn a_fence_is_no_close() {
    for &network in Network::ALL {
        run(network, 2, move |mut comm| {
            comm.set_timeout(TIMEOUT);
            let (comm, own) = zeros::<u64>(comm, 10);
            let updates = comm.open_updates(own).unwrap();
            let error = if updates.rank() == 0 {
                updates.fence().map_err(Error::from).unwrap_err()
            } else {
                let closed = updates.close().map_err(Error::from);
                closed.and_then(|(mut comm, _)| comm.barrier()).unwrap_err()
            };
            assert!(error.peer().is_some() && !error.is_timeout(), "{error}");
            assert!(error.to_string().contains(Operation::Window.name()), "{error}");
        });
    }
}

#[test]
fn a_window_for_updates_is_no_window_for_reading_and_none_of_another_length() {
    for &network in Network::ALL {
        for len in [None, Some(9)] {
            run(network, 2, move |mut comm| {
                comm.set_timeout(TIMEOUT);
                let (comm, own) = zeros::<u64>(comm, 10);
                let error = match (comm.rank(), len) {
                    (0, _) => Error::from(comm.open_updates(own).unwrap_err()),
                    (_, None) => comm.open(own).unwrap_err().into(),
                    (_, Some(len)) => {
                        let (comm, shorter) = zeros::<u64>(comm, len);
                        comm.open_updates(shorter).unwrap_err().into()
                    }
                };
                let differ = if len.is_some() { "lengths differ" } else { "calls of a window differ" };
                let text = error.to_string();
                assert!(text.contains(Operation::Window.name()) && text.contains(differ), "{text}");
            });
        }
    }
}

#[test]
fn a_rank_that_drops_its_window_for_updates_is_named() {
    for &network in Network::ALL {
        run(network, 3, move |mut comm| {
            comm.set_timeout(TIMEOUT);
            let mut other = comm.fork().unwrap();
            let (comm, own) = zeros::<u64>(comm, 10);
            let updates = comm.open_updates(own).unwrap();
            // No rank is in a call when rank 1 drops its window.
            if updates.rank() == 1 {
                [0, 2].into_iter().for_each(|peer| other.recv(&mut [0_u8], peer).unwrap());
                drop(updates);
                // Stays until the others have detected it.
                assert!(other.barrier().is_err());
                return;
            }
            other.send(&[1_u8], 1).unwrap();
            let failed = updates.fence().unwrap_err();
            assert!(failed.buffer.is_empty(), "other ranks may still write into its memory");
            let error = Error::from(failed);
            assert_eq!(error.peer(), Some(1), "{error}");
            assert!(!error.is_timeout(), "{error}");
        });
    }
}

#[test]
fn a_rank_that_does_not_open_its_window_is_named_at_the_deadline() {
    for &network in Network::ALL {
        for for_updates in [false, true] {
            run(network, 2, move |mut comm| {
                let mut other = comm.fork().unwrap();
                comm.barrier().unwrap();
                if comm.rank() == 1 {
                    // Rank 0 makes no such call.
                    other.set_timeout(2 * TIMEOUT);
                    assert!(other.barrier().is_err());
                    return;
                }
                comm.set_timeout(Duration::from_millis(300));
                let (comm, own) = zeros::<u64>(comm, 10);
                let error = match for_updates {
                    false => Error::from(comm.open(own).unwrap_err()),
                    true => comm.open_updates(own).unwrap_err().into(),
                };
                assert!(error.is_timeout() && error.peer() == Some(1), "{error}");
                assert!(error.to_string().contains(Operation::Window.name()), "{error}");
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_end_its_epoch_is_named_at_the_deadline() {
    for &network in Network::ALL {
        for reads in [false, true] {
            run(network, 2, move |mut comm| {
                let mut other = comm.fork().unwrap();
                // Rank 1 has more time for its calls.
                let millis = if comm.rank() == 0 { 2_000 } else { 40_000 };
                comm.set_timeout(Duration::from_millis(millis));
                other.set_timeout(2 * TIMEOUT);
                let (comm, own) = zeros::<u64>(comm, 10);
                let updates = comm.open_updates(own).unwrap();
                if reads {
                    let mut window = updates.fence().unwrap();
                    // A rank that is in no call of its communicator serves its memory.
                    window.read(1 - window.rank(), 0, &mut [0; 10]).unwrap();
                    other.barrier().unwrap();
                    if window.rank() == 1 {
                        assert!(other.barrier().is_err());
                        return;
                    }
                    let error = Error::from(window.close().unwrap_err());
                    assert!(error.is_timeout() && error.peer() == Some(1), "{error}");
                    return;
                }
                other.barrier().unwrap();
                if updates.rank() == 1 {
                    assert!(other.barrier().is_err());
                    return;
                }
                let failed = updates.fence().unwrap_err();
                assert!(failed.buffer.is_empty(), "other ranks may still write into its memory");
                let error = Error::from(failed);
                assert!(error.is_timeout() && error.peer() == Some(1), "{error}");
                assert!(error.to_string().contains(Operation::Window.name()), "{error}");
            });
        }
    }
}

/// Changes the memory of all ranks in each of several epochs, and reads it in the epochs between. A rank uses no clock
/// and no barrier beside the fences.
fn exchange_in_epochs(comm: Communicator, epochs: u32) -> dist_collectives::Result<Communicator> {
    let (mut comm, own) = zeros::<u32>(comm, 4);
    let (ranks, rank) = (comm.world_size(), comm.rank());
    comm.set_timeout(TIMEOUT);
    let mut updates = comm.open_updates(own)?;
    for epoch in 1..=epochs {
        let from = u32::try_from(rank).unwrap();
        for peer in 0..ranks {
            updates.put(peer, rank, &[100 * epoch + from])?;
            updates.fetch_add(peer, 3, 1)?;
        }
        let mut window = updates.fence()?;
        for peer in (0..ranks).rev() {
            let mut found = [0; 4];
            window.read(peer, 0, &mut found)?;
            let puts =
                (0..3).map(|rank| if rank < ranks { 100 * epoch + u32::try_from(rank).unwrap() } else { 0 });
            let added = epoch * u32::try_from(ranks).unwrap();
            assert!(found.into_iter().eq(puts.chain([added])), "{found:?} in epoch {epoch}");
        }
        updates = window.fence()?;
    }
    Ok(updates.close()?.0)
}

#[test]
fn requests_of_the_next_epoch_do_not_reach_the_threads_of_this_one() {
    for seed in 0..60 {
        let outcome = sim::run(seed, 3, |transport| {
            let comm = exchange_in_epochs(Communicator::new(transport), 3).unwrap();
            // A later window uses the same channels.
            exchange_in_epochs(comm, 1).unwrap().barrier().unwrap();
        });
        assert_eq!(outcome.results.len(), 3);
    }
}

#[rstest]
#[case::death(Fault::Kill { rank: 2 })]
#[case::stall(Fault::Stall { rank: 2, lasts: None })]
fn a_rank_that_fails_during_an_epoch_is_named(#[case] fault: Fault, #[values(false, true)] shares: bool) {
    // Messages and signals have different delays, so that every time is a position in the program.
    let delay = Duration::from_millis(1);
    let link = Link::new(delay, u64::MAX).with_jitter(delay / 2);
    for moment in 0..40 {
        let network = sim::Network::new(3).with_seed(moment).with_external_coordinator();
        let network = network.with_memory_link(link).with_host_link(link);
        let network = if shares { network.with_shared_memory() } else { network };
        let at = When::At(delay * 3 + delay * 3 / 4 * u32::try_from(moment).unwrap());
        let outcome = network.with_fault(at, fault.clone()).try_run(|transport| {
            let comm = Communicator::new(transport);
            let (rank, runtime) = (comm.rank(), comm.runtime().clone());
            let ended = exchange_in_epochs(comm, 100_000).map(drop);
            (rank, ended.unwrap_err(), runtime.now())
        });
        let outcome = outcome.unwrap();
        for (rank, error, now) in outcome.results.into_iter().flatten().filter(|(rank, ..)| *rank != 2) {
            assert_eq!(error.peer(), Some(2), "rank {rank} at moment {moment}: {error}");
            assert!(now < 3 * TIMEOUT, "rank {rank} at moment {moment} after {now:?}");
        }
    }
}
