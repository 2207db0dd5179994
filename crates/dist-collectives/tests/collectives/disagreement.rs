//! Ranks that make different calls get an error with both calls, and no rank hangs.

use std::error::Error as _;
use std::time::Duration;

use dist_algos::MessageAlgorithm;
use dist_collectives::error::Call;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{
    Communicator, DType, Error, ReduceOp, ReductionOrder,
    algorithms::{pairwise, ring},
};
use dist_transport::Cause;
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

type Program = fn(&mut Communicator) -> Result<(), Error>;
type Field = fn(&Call) -> String;

/// Returns both calls of a disagreement, the deviating rank's last.
fn calls(error: &Error, deviating: usize) -> Option<(Call, Call)> {
    match error {
        Error::Mismatch { peer, ours, theirs } if *peer == deviating => Some((**ours, **theirs)),
        Error::Mismatch { ours, theirs, .. } => Some((**theirs, **ours)),
        Error::Aborted { cause: Cause::Mismatch { .. }, rank, theirs, reported, .. } => {
            let (theirs, reported) = (**theirs.as_ref()?, **reported.as_ref()?);
            Some(if *rank == deviating { (reported, theirs) } else { (theirs, reported) })
        }
        _ => None,
    }
}

/// Lets one rank make another call than the others. Every rank must get an error about `field`, in this call
/// or in the barrier after it.
#[track_caller]
fn check(
    network: Network,
    (world_size, deviating): (usize, usize),
    (usual, unusual): (Program, Program),
    field: Field,
    expected: (&str, &str),
) {
    let errors = worlds::run(network, world_size, move |mut comm| {
        let program = if comm.rank() == deviating { unusual } else { usual };
        let done = program(&mut comm).and_then(|()| comm.barrier());
        done.expect_err("every rank must be told")
    });
    for (rank, error) in errors.iter().enumerate() {
        let (common, odd) = calls(error, deviating).unwrap_or_else(|| panic!("rank {rank}: {error:?}"));
        assert_eq!((&*field(&common), &*field(&odd)), expected, "rank {rank} of {world_size}: {error}");
    }
    assert!(
        errors.iter().all(|error| error.call().is_some() && error.peer().is_some() && !error.is_timeout())
    );
}

fn sum(comm: &mut Communicator) -> Result<(), Error> {
    comm.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)
}

fn sum_by(comm: &mut Communicator, algorithm: &'static MessageAlgorithm) -> Result<(), Error> {
    comm.set_order(ReductionOrder::Any);
    comm.with_algorithm(algorithm).all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)
}

/// The call of most ranks, the call of one rank, and the visible difference.
const DEVIATIONS: &[(Program, Program, Field, (&str, &str))] = &[
    (
        sum,
        |comm| comm.all_reduce(&mut [1_i32; 10], ReduceOp::Sum),
        |call| format!("{:?}", call.element),
        ("Some(Known(F32))", "Some(Known(I32))"),
    ),
    (
        |comm| comm.all_gather(&[[1_u64; 3]; 2], &mut vec![[0; 3]; 2 * comm.world_size()]),
        |comm| comm.all_gather(&[[1_u32; 6]; 2], &mut vec![[0; 6]; 2 * comm.world_size()]),
        |call| format!("{:?}", call.element),
        ("Some(Other { size: 24, align: 8 })", "Some(Other { size: 24, align: 4 })"),
    ),
    (
        |comm| comm.all_gather(&[[1_u8; 3]; 2], &mut vec![[0; 3]; 2 * comm.world_size()]),
        |comm| comm.all_gather(&[[1_u8; 2]; 3], &mut vec![[0; 2]; 3 * comm.world_size()]),
        |call| call.element.map_or_else(String::new, |element| format!("{} {element}", call.count)),
        ("2 elements of 3 bytes aligned to 1", "3 elements of 2 bytes aligned to 1"),
    ),
    (
        sum,
        |comm| comm.all_reduce(&mut [1.0_f32; 11], ReduceOp::Sum),
        |call| call.count.to_string(),
        ("10", "11"),
    ),
    (
        sum,
        |comm| comm.all_reduce(&mut [1.0_f32; 0], ReduceOp::Sum),
        |call| call.count.to_string(),
        ("10", "0"),
    ),
    (
        sum,
        |comm| comm.all_reduce(&mut [1.0_f32; 10], ReduceOp::Max),
        |call| format!("{:?}", call.op),
        ("Some(Sum)", "Some(Max)"),
    ),
    (sum, |comm| comm.barrier(), |call| call.operation.to_string(), ("all_reduce", "barrier")),
    (
        sum,
        |comm| comm.all_gather(&[1.0_f32; 10], &mut vec![0.0; 10 * comm.world_size()]),
        |call| call.operation.to_string(),
        ("all_reduce", "all_gather"),
    ),
    (
        sum,
        |comm| comm.with_order(ReductionOrder::Any).all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum),
        |call| format!("{:?}", call.order),
        ("Some(Canonical)", "Some(Any)"),
    ),
    (
        |comm| sum_by(comm, &ring::ALL_REDUCE),
        |comm| sum_by(comm, &pairwise::ALL_REDUCE),
        |call| call.algorithm.map_or("none", Algorithm::name).to_owned(),
        ("ring", "pairwise_circulant"),
    ),
    (
        |comm| comm.barrier().and_then(|()| comm.barrier()),
        |comm| comm.barrier().and_then(|()| sum(comm)),
        |call| format!("{} #{}", call.operation, call.sequence),
        ("barrier #1", "all_reduce #1"),
    ),
    (
        sum,
        |comm| comm.fork().and_then(|_fork| sum(comm)),
        |call| format!("{} #{}", call.operation, call.sequence),
        ("all_reduce #0", "all_reduce #0"),
    ),
    // In the second call the algorithm is known.
    (
        |comm| twice(comm).and_then(|()| comm.fork()).and_then(|_| twice(comm)),
        |comm| {
            twice(comm)?;
            let _alone = comm.subgroup(&[comm.rank()])?;
            let _pair = comm.subgroup(&[0, 1])?;
            twice(comm)
        },
        |call| format!("{} #{}", call.operation, call.sequence),
        ("all_reduce #2", "all_reduce #2"),
    ),
];

fn twice(comm: &mut Communicator) -> Result<(), Error> {
    sum(comm).and_then(|()| sum(comm))
}

#[rstest]
fn the_field_that_differs_is_reported_on_every_rank(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values((2, 0), (2, 1), (3, 1), (4, 0), (4, 3), (5, 2), (7, 4), (8, 7))] place: (usize, usize),
) {
    for &(usual, unusual, field, expected) in DEVIATIONS {
        check(network, place, (usual, unusual), field, expected);
    }
}

fn broadcast(comm: &mut Communicator, root: usize) -> Result<(), Error> {
    comm.broadcast(&mut [1_u8; 5], root)
}

fn reduce(comm: &mut Communicator, root: usize) -> Result<(), Error> {
    comm.reduce(&mut [1_u8; 5], ReduceOp::Sum, root)
}

/// If ranks have different roots, both may only send and learn of it in a later call, or both may only receive and
/// learn of it because they wait.
#[rstest]
fn another_root_is_reported_on_every_rank(
    #[values(2, 3, 4, 5, 8)] world_size: usize,
    #[values(broadcast, reduce)] rooted: fn(&mut Communicator, usize) -> Result<(), Error>,
) {
    let mut told = 0;
    for deviating in 0..world_size {
        let outcome = sim::run(3, world_size, move |transport| {
            let mut comm = Communicator::new(transport);
            let root = usize::from(comm.rank() == deviating);
            rooted(&mut comm, root).and_then(|()| comm.barrier()).expect_err("every rank must be told")
        });
        assert!(outcome.elapsed < Duration::from_secs(60));
        for error in outcome.results {
            let (common, odd) = calls(&error, deviating).unwrap_or_else(|| panic!("{error:?}"));
            let told_of_root = common.root.or(odd.root).is_some();
            assert!(told_of_root || error.to_string().contains("but with different arguments"), "{error}");
            if common.root.is_some() && odd.root.is_some() {
                assert_eq!((common.root, odd.root), (Some(0), Some(1)), "{error}");
                told += 1;
            }
        }
    }
    assert!(told > 0 || world_size <= 3, "in larger worlds some rank sees both roots");
}

/// Calls with different message paths, so that ranks may wait for ranks that wait for others.
const CALLS: &[Program] = &[
    sum,
    |comm| comm.all_reduce(&mut vec![1.0_f32; 300_000], ReduceOp::Sum),
    |comm| comm.reduce_scatter(&vec![1_u8; 10 * comm.world_size()], &mut [0; 10], ReduceOp::Sum),
    |comm| comm.all_gather(&[1_u8; 10], &mut vec![0; 10 * comm.world_size()]),
    |comm| comm.broadcast(&mut [1_u8; 10], 0),
    |comm| comm.broadcast(&mut vec![1_u8; 3_000_000], 0),
    |comm| comm.reduce(&mut [1.0_f32; 10], ReduceOp::Sum, 0),
    |comm| comm.barrier(),
];

#[rstest]
fn every_rank_learns_of_both_calls_for_any_two_calls(#[values(2, 3, 5, 6)] world_size: usize) {
    for (index, &usual) in CALLS.iter().enumerate() {
        for &unusual in CALLS[..index].iter().chain(&CALLS[index + 1..]) {
            for deviating in 0..world_size {
                let outcome = sim::run(1, world_size, move |transport| {
                    let mut comm = Communicator::new(transport);
                    let program = if comm.rank() == deviating { unusual } else { usual };
                    let error = program(&mut comm).and_then(|()| comm.barrier()).unwrap_err();
                    assert!(calls(&error, deviating).is_some(), "{error:?}");
                });
                assert!(outcome.elapsed < Duration::from_secs(60));
            }
        }
    }
}

/// In their first call, ranks determine which memory they share. A rank in another call does not answer.
#[cfg(all(feature = "shm", target_os = "linux"))]
#[rstest]
fn a_rank_in_another_first_call_is_reported_while_the_others_find_their_shared_memory(
    #[values(0, 1)] deviating: usize,
) {
    const OTHERS: &[Program] = &[
        |comm| comm.scatter(&[1_u8; 20][..20 * usize::from(comm.rank() == 0)], &mut [0; 10], 0),
        |comm| comm.gather(&[1_u8; 10], &mut [0; 20][..20 * comm.rank()], 1),
        |comm| sum_by(comm, &ring::ALL_REDUCE),
        |comm| comm.barrier(),
    ];
    for &unusual in OTHERS {
        worlds::run(Network::Shm, 2, move |mut comm| {
            let program = if comm.rank() == deviating { unusual } else { sum };
            let error = program(&mut comm).and_then(|()| comm.barrier()).unwrap_err();
            assert!(calls(&error, deviating).is_some(), "{error:?}");
        });
    }
}

#[test]
fn a_rank_that_skips_a_call_is_reported_with_both_numbers() {
    worlds::run(Network::Simulated, 3, |mut comm| {
        if comm.rank() != 2 {
            let error = comm.barrier().and_then(|()| sum(&mut comm)).unwrap_err();
            let (ours, theirs) = calls(&error, 2).unwrap();
            assert_eq!((ours.operation, theirs.operation), (Operation::Barrier, Operation::AllReduce));
            return;
        }
        sum(&mut comm).unwrap_err();
    });
}

#[test]
fn messages_must_agree_in_type_and_count() {
    for (types_differ, text) in [
        (
            true,
            "types differ: rank 0 has f32, this rank has u32; sender and receiver must pass the same type: rank 0 is in message of f32, this rank in message of 4 u32 (from rank 0)",
        ),
        (
            false,
            "lengths differ: rank 0 has 4 elements, this rank has 3 elements; sender and receiver must pass the same length: rank 0 is in message of 4 f32 (from rank 0), this rank in message of 3 f32 (from rank 0)",
        ),
    ] {
        worlds::run(Network::Simulated, 2, move |mut comm| {
            if comm.rank() == 0 {
                comm.send(&[1.0_f32; 4], 1).unwrap();
                return;
            }
            let received =
                if types_differ { comm.recv(&mut [0_u32; 4], 0) } else { comm.recv(&mut [0.0_f32; 3], 0) };
            let error = received.unwrap_err();
            assert_eq!(error.to_string(), text);
            assert_eq!(error.peer(), Some(0));
        });
    }
}

#[rstest]
#[case::a_fork(|comm: &mut Communicator| comm.fork().map(drop))]
#[case::a_subgroup_without_it(|comm: &mut Communicator| comm.subgroup(&[0]).map(drop))]
fn a_rank_that_forks_alone_gets_an_error_in_the_next_call(
    #[case] make: Program,
    #[values(2, 3, 5)] world_size: usize,
) {
    const ALONE: usize = 1;
    for network in [Network::Simulated, Network::SharedMemory(3), Network::Threads] {
        let errors = worlds::run(network, world_size, move |mut comm| {
            make(&mut comm)?;
            twice(&mut comm)?;
            if comm.rank() == ALONE {
                make(&mut comm)?;
            }
            twice(&mut comm)
        });
        for (rank, error) in errors.into_iter().enumerate() {
            let text = error.unwrap_err().to_string();
            let hint = ": an earlier call differed: the call before this one, ";
            let (calls, made) = text.split_once(hint).unwrap_or_else(|| panic!("rank {rank}: {text}"));
            assert!(calls.contains("all_reduce (call 3)"), "rank {rank}: {text}");
            let alone = if rank == ALONE && calls.contains("this rank") { "this rank" } else { "rank 1" };
            assert!(made.contains(&format!("{alone} made a fork or subgroup")), "rank {rank}: {text}");
            assert!(made.contains("called all_reduce"), "rank {rank}: {text}");
        }
    }
}

/// Messages are between two ranks and do not depend on the forks of other ranks.
#[test]
fn messages_arrive_although_ranks_created_different_communicators() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let _fork = (comm.rank() == 0).then(|| comm.fork().unwrap());
        let mut word = [7_u8];
        if comm.rank() == 0 { comm.send(&word, 1) } else { comm.recv(&mut word, 0) }.unwrap();
        assert_eq!(word, [7]);
    });
}

#[test]
fn third_ranks_learn_of_both_calls() {
    let outcome = sim::run(11, 3, |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(Duration::from_secs(5));
        let dtype = if comm.rank() == 1 { DType::I32 } else { DType::F32 };
        let done = match dtype {
            DType::I32 => comm.all_reduce(&mut [1_i32], ReduceOp::Sum),
            _ => comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
        };
        let error = done.and_then(|()| comm.barrier()).unwrap_err();
        if matches!(error, Error::Aborted { .. }) {
            assert!(error.source().is_none(), "everything is said already: {error}");
            let text = error.to_string();
            assert!(text.contains("rank 1 in all_reduce (call 1) of 1 i32 (sum, "), "{text}");
            assert!(text.contains("the job was aborted: types differ: rank "), "{text}");
            assert!(text.ends_with(") do not agree"), "neither is blamed, and not for its sizes: {text}");
        }
        error.to_string()
    });
    assert!(
        outcome.results.iter().all(|text| text.contains("1 i32") && text.contains("1 f32")),
        "{outcome:?}"
    );
    assert!(outcome.elapsed.is_zero());
}

/// Rank 0 waits for the others in shared memory, or until its message is received, while the others exchange
/// messages.
#[rstest]
#[case::the_others_wait_for_its_messages(|comm: &mut Communicator| comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum), None)]
#[case::it_waits_for_room(|comm: &mut Communicator| comm.broadcast(&mut [1_u8; 9_000], 0), Some(1_000))]
fn calls_with_and_without_shared_memory_are_distinguished_at_once(
    #[case] usual: Program,
    #[case] window: Option<usize>,
    #[values(2, 3, 5)] world_size: usize,
) {
    let network = sim::Network::new(world_size).with_shared_memory();
    let network = window.into_iter().fold(network, sim::Network::with_window);
    let outcome = network.run(move |transport| {
        let mut comm = Communicator::new(transport);
        let operation = if window.is_none() { Operation::AllReduce } else { Operation::Broadcast };
        let direct = operation.algorithm("direct/one_shot").expect("there is a direct form");
        let exchanges = operation.algorithm("binomial").expect("there is one by messages");
        let meets = (comm.rank() == 0) == window.is_none();
        let algorithm = if meets { direct } else { exchanges };
        let error = usual(&mut comm.with_algorithm(algorithm)).unwrap_err();
        assert!(calls(&error, 0).is_some(), "{error:?}");
    });
    assert_eq!(outcome.elapsed, Duration::ZERO, "no rank waits for a deadline");
    let waits = outcome.waits.join("\n");
    assert!(waits.contains("for a signal of rank"), "{waits}");
    assert!(!waits.contains("on channel"), "{waits}");
}
