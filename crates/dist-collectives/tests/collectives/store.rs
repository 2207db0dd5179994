//! The key-value store of a job, reached through communicators.

use std::time::Duration;

use dist_collectives::{Error, ReduceOp, StoreError};
use rstest::rstest;

use crate::worlds::{self, Network};

#[rstest]
fn ranks_that_take_pieces_of_work_from_the_store_do_each_piece_once(#[values(1, 2, 3, 4)] world_size: usize) {
    const PIECES: usize = 50;
    for &network in Network::ALL {
        let counts = worlds::run(network, world_size, |mut comm| {
            let store = comm.store().unwrap();
            let next = || usize::try_from(store.add("next piece", 1).unwrap() - 1).unwrap();
            let mut times_done = [0_u64; PIECES];
            std::iter::repeat_with(next)
                .take_while(|&piece| piece < PIECES)
                .for_each(|piece| times_done[piece] += 1);
            comm.all_reduce(&mut times_done, ReduceOp::Sum).unwrap();
            times_done
        });
        assert!(counts.iter().all(|times| *times == [1; PIECES]), "{network:?}: {counts:?}");
    }
}

#[test]
fn a_wait_lasts_as_long_as_a_call_and_names_its_key_and_the_job_goes_on() {
    for &network in Network::ALL {
        let short = Duration::from_millis(20);
        worlds::run(network, 2, move |mut comm| {
            let error = Error::from(comm.with_timeout(short).store().unwrap().wait("gone").unwrap_err());
            assert!(error.is_timeout());
            let Error::Store(source) = error else { panic!("{error}") };
            assert!(
                matches!(&*source, StoreError::NotSet { key, limit } if key == "gone" && *limit == short)
            );
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn a_store_serves_several_threads_and_outlives_its_communicator() {
    for &network in Network::ALL {
        worlds::run(network, 2, |comm| {
            let (rank, runtime) = (comm.rank(), comm.runtime().clone());
            let store = comm.store().unwrap();
            drop(comm);
            let waiting = store.clone();
            let task = runtime.spawn("waiting", move || waiting.wait("both").unwrap()).unwrap();
            if store.add("arrivals", 1).unwrap() == 2 {
                store.set("both", &[7]).unwrap();
            }
            assert_eq!(task.join().unwrap(), [7], "rank {rank}");
        });
    }
}
