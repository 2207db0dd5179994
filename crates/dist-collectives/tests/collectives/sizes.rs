//! Parts of different sizes: invalid arguments, and disagreements between ranks.

use dist_collectives::{Communicator, Error, ReduceOp};
use dist_transport::Cause;
use rstest::rstest;

use crate::worlds::{self, Network};

type Program = fn(&mut Communicator, &[usize]) -> Result<(), Error>;

fn part(comm: &Communicator, counts: &[usize]) -> Vec<u8> {
    vec![0; counts.get(comm.rank()).copied().unwrap_or(0)]
}

fn whole(counts: &[usize]) -> Vec<u8> {
    vec![0; counts.iter().sum()]
}

/// All operations with one list of counts, and buffers of the required lengths.
const PROGRAMS: [Program; 4] = [
    |comm, counts| comm.all_gather_v(&part(comm, counts), counts, &mut whole(counts)),
    |comm, counts| comm.reduce_scatter_v(&whole(counts), counts, &mut part(comm, counts), ReduceOp::Sum),
    |comm, counts| comm.gather_v(&part(comm, counts), counts, &mut whole(counts), 0),
    |comm, counts| comm.scatter_v(&whole(counts), counts, &mut part(comm, counts), 0),
];

#[test]
fn differing_counts_are_an_error_before_a_byte_is_used() {
    for (index, program) in PROGRAMS.into_iter().enumerate() {
        // The sums and the sets of numbers are equal; only the order differs.
        for odd in [&[3, 1, 2][..], &[2, 2, 2], &[1, 2, 4]] {
            let errors = worlds::run(Network::Simulated, 3, move |mut comm| {
                let counts = if comm.rank() == 1 { odd } else { &[1, 2, 3] };
                program(&mut comm, counts).and_then(|()| comm.barrier()).unwrap_err()
            });
            let only_sizes_differ = ": the sizes of parts, buffers, shapes or hosts differ";
            let told = errors.iter().any(|error| error.to_string().ends_with(only_sizes_differ));
            // Counts with another sum are visible in the calls themselves.
            assert_eq!(told, odd.iter().sum::<usize>() == 6, "program {index}: {errors:?}");
            for error in errors {
                let mismatch = matches!(
                    error,
                    Error::Mismatch { .. } | Error::Aborted { cause: Cause::Mismatch { .. }, .. }
                );
                assert!(mismatch, "program {index}: {error:?}");
                assert!(error.to_string().contains("sizes "), "{error}");
            }
        }
    }
}

#[test]
fn an_even_call_is_not_an_uneven_one_of_equal_counts() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let done = match comm.rank() {
            0 => comm.all_gather(&[1_u8], &mut [0; 2]),
            _ => comm.all_gather_v(&[1_u8], &[1, 1], &mut [0; 2]),
        };
        assert!(done.and_then(|()| comm.barrier()).is_err());
    });
}

type Call = fn(&mut Communicator) -> Result<(), Error>;

/// Invalid calls of two ranks, and the beginning of both errors.
const REFUSED: &[(Call, &str)] = &[
    (
        |comm| comm.all_gather_v(&[1_u8], &[1], &mut [0; 2]),
        "all_gather: 1 counts were given for 2 ranks: give one for each rank",
    ),
    (|comm| comm.all_gather_v(&[1_u8], &[2, 2], &mut [0; 4]), "all_gather: the input has 1 elements, not 2"),
    (|comm| comm.all_gather_v(&[1_u8], &[1, 1], &mut [0; 3]), "all_gather: the output has 3 elements, not 2"),
    (
        |comm| comm.all_gather_v(&[1_u8; 2], &[2; 2], &mut [0; 0]),
        "all_gather: the output has 0 elements, not 4",
    ),
    (
        |comm| comm.reduce_scatter_v(&[1_u8], &[usize::MAX, 1], &mut [0], ReduceOp::Sum),
        "reduce_scatter: the sum of the counts is larger than any memory",
    ),
    (
        |comm| comm.reduce_scatter_v(&[1_u8; 3], &[1, 1], &mut [0], ReduceOp::Sum),
        "reduce_scatter: the input has 3 elements, not 2",
    ),
    (
        |comm| comm.reduce_scatter_v(&[1_u8; 2], &[1, 1], &mut [], ReduceOp::Sum),
        "reduce_scatter: the output has 0 elements, not 1",
    ),
    (
        |comm| comm.reduce_scatter_v(&[1.0_f32; 2], &[1, 1], &mut [0.0], ReduceOp::And),
        "and does not support f32: it needs integers",
    ),
    (|comm| comm.gather(&[1_u8], &mut [0; 2], 2), "gather: root 2 is outside a group of 2"),
    (
        |comm| comm.gather_v(&[1_u8], &[1, 1, 1], &mut [0; 3], 0),
        "gather: 3 counts were given for 2 ranks: give one for each rank",
    ),
    (|comm| comm.gather_v(&[1_u8; 3], &[1, 1], &mut [0; 2], 0), "gather: the input has 3 elements, not 1"),
    (|comm| comm.scatter(&[1_u8; 2], &mut [0], 5), "scatter: root 5 is outside a group of 2"),
    (|comm| comm.scatter_v(&[1_u8; 2], &[1, 1], &mut [0; 2], 0), "scatter: the output has 2 elements, not 1"),
    (
        |comm| comm.all_to_all(&[1_u8; 3], &mut [0; 3]),
        "all_to_all: 3 elements cannot be divided evenly among 2 ranks: pad the buffer, or use the form with counts",
    ),
    (|comm| comm.all_to_all(&[1_u8; 4], &mut [0; 2]), "all_to_all: the output has 2 elements, not 4"),
    (
        |comm| comm.all_to_all_v(&[1_u8], &[1], &mut [0; 2], &[1, 1]),
        "all_to_all: 1 counts were given for 2 ranks: give one for each rank",
    ),
    (
        |comm| comm.all_to_all_v(&[1_u8; 2], &[1, 1], &mut [0], &[1]),
        "all_to_all: 1 counts were given for 2 ranks: give one for each rank",
    ),
    (
        |comm| comm.all_to_all_v(&[1_u8; 3], &[1, 1], &mut [0; 2], &[1, 1]),
        "all_to_all: the input has 3 elements, not 2",
    ),
    (
        |comm| comm.all_to_all_v(&[1_u8; 2], &[1, 1], &mut [0; 3], &[1, 1]),
        "all_to_all: the output has 3 elements, not 2",
    ),
    (
        |comm| {
            let mut comm = comm.with_algorithm(&dist_algos::all_to_all::BRUCK);
            comm.all_to_all_v(&[1_u8; 2], &[1, 1], &mut [0; 2], &[1, 1])
        },
        "all_to_all by bruck needs parts of one size",
    ),
    (|comm| comm.scan(&mut [1.0_f32], ReduceOp::Mean), "there is no scan with mean"),
    (
        |comm| comm.exclusive_scan(&mut [1.0_f32], ReduceOp::WeightedMean(1.0)),
        "there is no scan with weighted_mean",
    ),
    (
        |comm| comm.scan(&mut [1_u8], ReduceOp::PreMulSum(1.0)),
        "pre_mul_sum does not support u8: it needs floating",
    ),
];

#[test]
fn invalid_sizes_are_refused_on_every_rank() {
    for &(call, message) in REFUSED {
        worlds::run(Network::Simulated, 2, move |mut comm| {
            let error = call(&mut comm).unwrap_err();
            assert!(error.to_string().starts_with(message), "{error}");
            assert_eq!(comm.traffic().messages_sent, 0);
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn only_the_root_needs_memory_for_all_parts() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let short = comm.gather(&[1_u8; 2], &mut [0; 3][..3 * (1 - comm.rank())], 0);
        match comm.rank() {
            0 => assert_eq!(
                short.unwrap_err().to_string(),
                "gather: the long buffer has 3 elements, not 2 ranks times the 2 elements of the short one"
            ),
            // Its part has left; the root ends before it needs the root again.
            _ => drop(short),
        }
    });
}

/// Rank `from` sends another number of elements to `to` than it expects: all ranks get the same error, and the
/// communicator still works.
#[rstest]
fn every_rank_names_the_rank_that_sends_an_unexpected_length(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values((1, 0, 0), (2, 0, 1), (3, 2, 0), (5, 1, 1), (8, 6, 3))] place: (usize, usize, usize),
) {
    let (world_size, from, to) = place;
    worlds::run(network, world_size, move |mut comm| {
        let counts = vec![2; world_size];
        let (mut sent, received) = (counts.clone(), counts.clone());
        if comm.rank() == from {
            sent[to] = 3;
        }
        let mut output = whole(&received);
        let error = comm.all_to_all_v(&whole(&sent), &sent, &mut output, &received).unwrap_err();
        let Error::Disagreement { from: sender, to: receiver, sent: 3, expected: 2 } = error else {
            panic!("{error:?}")
        };
        assert_eq!((sender, receiver), (from, to));
        comm.all_to_all_v(&whole(&counts), &counts, &mut output, &received).unwrap();
    });
}

/// All ranks report the first of several disagreements, by sender and receiver.
#[test]
fn of_many_disagreements_all_ranks_report_one() {
    let errors = worlds::run(Network::Simulated, 4, |mut comm| {
        let (sent, received) = (vec![1; 4], vec![comm.rank(); 4]);
        let done = comm.all_to_all_v(&whole(&sent), &sent, &mut whole(&received), &received);
        done.unwrap_err().to_string()
    });
    assert_eq!(errors, ["all_to_all: rank 0 sends 1 elements to rank 0, which expects 0"; 4]);
}
