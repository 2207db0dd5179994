//! Behaviour that all operations have in common.

use std::time::Duration;

use dist_algos::MessageAlgorithm;
use dist_collectives::{
    Communicator, Error, Message, ReduceOp, ReductionOrder,
    algorithms::{barrier, ring},
};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

type Call = fn(&mut Communicator) -> Result<(), Error>;

type Move = fn(&mut Communicator, &[f32], &mut [f32]) -> Result<(), Error>;

/// All operations among three ranks. In this sequence each rank waits for every other at some point.
const EVERYTHING: &[Call] = &[
    |comm| comm.all_reduce(&mut [1.0_f32; 5], ReduceOp::Sum),
    |comm| comm.all_reduce(&mut [1.0_f32; 5], ReduceOp::WeightedMean(1.0)),
    |comm| comm.reduce_scatter(&[1_u8; 6], &mut [0; 2], ReduceOp::Sum),
    |comm| comm.reduce_scatter_in_place(&mut [1_u8; 6], ReduceOp::Sum).map(drop),
    |comm| comm.reduce_scatter_v(&[1_u8; 3], &[1; 3], &mut [0], ReduceOp::Sum),
    |comm| comm.all_gather(&[1_u8; 2], &mut [0; 6]),
    |comm| comm.all_gather_in_place(&mut [1_u8; 6]),
    |comm| comm.all_gather_v(&[1_u8], &[1; 3], &mut [0; 3]),
    |comm| comm.broadcast(&mut [1_u8], ABSENT),
    |comm| comm.reduce(&mut [1_u8], ReduceOp::Sum, comm.rank()),
    |comm| comm.gather(&[1_u8], &mut [0; 3], comm.rank()),
    |comm| comm.gather_v(&[1_u8], &[1; 3], &mut [0; 3], comm.rank()),
    |comm| comm.scatter(&[1_u8; 3], &mut [0], ABSENT),
    |comm| comm.scatter_v(&[1_u8; 3], &[1; 3], &mut [0], ABSENT),
    |comm| comm.all_to_all(&[1_u8; 3], &mut [0; 3]),
    |comm| comm.all_to_all_v(&[1_u8; 3], &[1; 3], &mut [0; 3], &[1; 3]),
    |comm| comm.barrier(),
    |comm| comm.recv(&mut [1_u8], ABSENT),
    |comm| comm.send_recv(&[1_u8], ABSENT, &mut [0], ABSENT),
    |comm| comm.batch(&mut [Message::receive(ABSENT, &mut [1_u8])]),
];

const ABSENT: usize = 2;

#[test]
fn every_operation_ends_by_the_timeout_of_the_call() {
    let limit = Duration::from_secs(3);
    for (index, &call) in EVERYTHING.iter().enumerate() {
        let outcome = sim::run(1, 3, move |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() == ABSENT {
                // The rank exists, and does nothing until the others have given up.
                let late = comm.runtime().deadline(10 * limit);
                while !comm.runtime().expired(late) {
                    comm.runtime().park(Some(late));
                }
                return limit;
            }
            let error = call(&mut comm.with_timeout(limit)).unwrap_err();
            // Ranks with different roots may detect each other before that.
            assert!(error.is_timeout() || error.peer().is_some(), "call {index}: {error:?}");
            comm.runtime().now()
        });
        assert!(outcome.results.iter().all(|&time| time <= limit), "call {index}: {:?}", outcome.results);
    }
}

#[test]
fn every_operation_works_in_a_world_of_one() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let one = [7.5_f32, -0.0];
        let mut buffer = one;
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            comm.all_reduce(&mut buffer, op).unwrap();
            comm.reduce(&mut buffer, op, 0).unwrap();
            comm.reduce_scatter_in_place(&mut buffer, op).unwrap();
        }
        comm.scan(&mut buffer, ReduceOp::Sum).unwrap();
        comm.broadcast(&mut buffer, 0).unwrap();
        comm.all_gather_in_place(&mut buffer).unwrap();
        let calls: [Move; 9] = [
            |comm, input, output| comm.all_gather(input, output),
            |comm, input, output| comm.all_gather_v(input, &[2], output),
            |comm, input, output| comm.reduce_scatter(input, output, ReduceOp::Mean),
            |comm, input, output| comm.reduce_scatter_v(input, &[2], output, ReduceOp::Sum),
            |comm, input, output| comm.gather(input, output, 0),
            |comm, input, output| comm.scatter(input, output, 0),
            |comm, input, output| comm.all_to_all(input, output),
            |comm, input, output| comm.all_to_all_v(input, &[2], output, &[2]),
            |comm, input, output| comm.send_recv(input, 0, output, 0),
        ];
        for call in calls {
            let input = buffer;
            call(&mut comm, &input, &mut buffer).unwrap();
        }
        comm.barrier().unwrap();
        assert_eq!(buffer.map(f32::to_bits), one.map(f32::to_bits));
    });
}

#[test]
fn sizes_are_checked_in_a_world_of_one_too() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let refused = [
            comm.all_to_all(&[1_u8; 2], &mut [0; 3]),
            comm.all_to_all_v(&[1_u8; 2], &[1], &mut [0; 2], &[2]),
            comm.all_to_all_v(&[1_u8; 2], &[2, 0], &mut [0; 2], &[2]),
            comm.all_to_all_v(&[1_u8; 2], &[2], &mut [0; 3], &[3]),
            comm.all_gather_v(&[1_u8; 2], &[], &mut [0; 2]),
            comm.gather(&[1_u8; 2], &mut [0; 3], 0),
            comm.scatter(&[1_u8; 3], &mut [0; 2], 0),
            comm.send_recv(&[1_u8], 1, &mut [0], 0),
        ];
        assert!(refused.iter().all(Result::is_err), "{refused:?}");
        comm.barrier().unwrap();
    });
}

#[rstest]
fn a_ring_sends_two_n_minus_one_nths_of_the_buffer(#[values(2, 3, 5, 8)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, move |mut comm| {
        let mut buffer = vec![1.0_f32; 60 * world_size];
        let mut comm = comm.with_order(ReductionOrder::Any);
        comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        let nth = size_of_val(&*buffer) / world_size;
        assert_eq!(comm.traffic().bytes_sent, (2 * (world_size - 1) * nth) as u64);
        assert_eq!(comm.traffic().messages_sent, 2 * (world_size - 1) as u64);
    });
}

/// In each round another rank comes a second after the others.
#[rstest]
fn barriers_back_to_back_release_no_rank_before_the_last_has_entered(
    #[values(&barrier::RING, &barrier::DISSEMINATION)] algorithm: &'static MessageAlgorithm,
    #[values(2, 3, 6)] world_size: usize,
) {
    let second = Duration::from_secs(1);
    let outcome = sim::run(1, world_size, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut left = Vec::new();
        for round in 0..3 * world_size {
            if round % world_size == comm.rank() {
                let late = comm.runtime().deadline(second);
                while !comm.runtime().expired(late) {
                    comm.runtime().park(Some(late));
                }
            }
            comm.with_algorithm(algorithm).barrier().unwrap();
            left.push(comm.runtime().now());
        }
        left
    });
    for left in outcome.results {
        for (round, time) in (1..).zip(left) {
            assert!(time >= second * round, "round {round}: {time:?}");
        }
    }
}
