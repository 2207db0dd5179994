//! Ranks that wait for each other in a circle.

use std::time::Duration;

use dist_collectives::Error;
use dist_collectives::error::WaitingRank;
use rstest::rstest;

use crate::worlds::{self, Network};

/// Longer than the wait after which a rank reports it.
const LATE: Duration = Duration::from_millis(600);

/// The ranks of a circle, each with the rank that it waits for.
fn ranks(waits: &[WaitingRank]) -> Vec<(usize, usize)> {
    waits.iter().map(|wait| (wait.rank, wait.on)).collect()
}

#[rstest]
fn ranks_that_all_receive_first_are_told_long_before_the_deadline(#[values(2, 3, 4)] world_size: usize) {
    for &network in Network::ALL {
        let errors = worlds::run(network, world_size, |mut comm| {
            let right = (comm.rank() + 1) % comm.world_size();
            let error = comm.with_tag(7).recv(&mut [0_u8], right).unwrap_err();
            assert!(comm.runtime().now() < Duration::from_secs(25));
            error
        });
        let circle: Vec<_> = (0..world_size).map(|rank| (rank, (rank + 1) % world_size)).collect();
        for error in &errors {
            let Error::CircularWait { waits, count, .. } = error else { panic!("{network:?}: {error:?}") };
            assert_eq!((ranks(waits), *count), (circle.clone(), world_size), "{network:?}");
            assert!(!error.is_timeout() && error.peer().is_none());
        }
        if world_size == 2 {
            let expected = "message of 1 u8 (tag 7, from rank 1) failed: 2 ranks wait for each other: rank 0 waits for rank \
                            1 in message of u8 (tag 7); rank 1 waits for rank 0 in message of u8 (tag 7)";
            assert_eq!(errors[0].to_string(), expected, "{network:?}");
        }
    }
}

#[test]
fn messages_that_came_instead_are_listed_in_a_circle() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, |mut comm| {
            let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
            comm.with_tag(1).start_send(vec![1_u8; 5], left).wait().unwrap();
            comm.with_tag(2).send_recv(&[1_u8], left, &mut [0_u8], right).unwrap();
            comm.with_tag(7).recv(&mut [0_u8], right).unwrap_err()
        });
        for error in &errors {
            assert!(matches!(error, Error::CircularWait { .. }), "{network:?}: {error:?}");
            let text = error.to_string();
            assert!(
                text.ends_with("; these have come instead: message of 5 u8 (tag 1)"),
                "{network:?}: {text}"
            );
        }
    }
}

#[test]
fn a_rank_that_computes_while_a_started_receive_waits_is_in_no_circle() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            if comm.rank() == 1 {
                comm.with_tag(2).recv(&mut [0_u8], 0).unwrap();
                return comm.with_tag(1).send(&[1_u8], 0).unwrap();
            }
            let pending = comm.with_tag(1).start_recv(vec![0_u8], 1);
            comm.runtime().sleep(LATE);
            comm.with_tag(2).send(&[2_u8], 1).unwrap();
            assert_eq!(pending.wait().unwrap()[0], 1);
        });
    }
}

#[test]
fn a_rank_that_receives_from_any_rank_is_in_no_circle() {
    for &network in Network::ALL {
        for started in [false, true] {
            worlds::run(network, 3, move |mut comm| match comm.rank() {
                0 => {
                    let from = if started {
                        comm.with_tag(5).start_recv_any(vec![0_u8]).wait().unwrap().from.unwrap()
                    } else {
                        comm.with_tag(5).recv_any(&mut [0_u8]).unwrap()
                    };
                    assert_eq!(from, 1);
                    comm.with_tag(6).send(&[1_u8], 2).unwrap();
                }
                1 => {
                    comm.runtime().sleep(LATE);
                    comm.with_tag(5).send(&[1_u8], 0).unwrap();
                }
                _ => comm.with_tag(6).recv(&mut [0_u8], 0).unwrap(),
            });
        }
    }
}
