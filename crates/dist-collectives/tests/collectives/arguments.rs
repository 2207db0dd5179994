//! Invalid arguments are refused before anything is sent, even in a world of one rank.

use std::time::Duration;

use dist_collectives::error::ReduceKind;
use dist_collectives::tuning::{CostModel, Operation};
use dist_collectives::{
    Communicator, Complex, DType, Error, ReduceOp, ReductionOrder,
    algorithms::{binomial, recursive_doubling, ring},
};
use dist_transport::sim;
use half::{bf16, f16};
use rstest::rstest;

use crate::worlds::{self, Network};

type Program = fn(&mut Communicator) -> Result<(), Error>;

/// Makes a call that is refused on every rank, and checks that the communicator still works.
#[track_caller]
fn check(world_size: usize, call: Program, message: &str) {
    let messages = worlds::run(Network::Simulated, world_size, move |mut comm| {
        let message = call(&mut comm).expect_err("refused").to_string();
        let mut sum = [1_u64];
        comm.all_reduce(&mut sum, ReduceOp::Sum).expect("the communicator lives on");
        assert_eq!(sum, [world_size as u64]);
        assert_eq!(comm.traffic().messages_sent > 0, world_size > 1);
        message
    });
    assert!(messages.iter().all(|found| found == message), "{messages:?}");
}

const REFUSED: &[(usize, Program, &str)] = &[
    (
        1,
        |comm| comm.all_reduce(&mut [1_i32], ReduceOp::Mean),
        "mean does not support i32: it needs floating-point or complex numbers",
    ),
    (
        3,
        |comm| comm.reduce(&mut [1_u8], ReduceOp::Mean, 0),
        "mean does not support u8: it needs floating-point or complex numbers",
    ),
    (
        2,
        |comm| comm.reduce_scatter(&[0_u64; 4], &mut [0; 2], ReduceOp::Mean),
        "mean does not support u64: it needs floating-point or complex numbers",
    ),
    (
        3,
        |comm| comm.all_reduce(&mut [f16::ONE], ReduceOp::Xor),
        "xor does not support f16: it needs integers",
    ),
    (
        2,
        |comm| comm.reduce_scatter_in_place(&mut [1_u8; 4], ReduceOp::PreMulSum(0.5)).map(drop),
        "pre_mul_sum does not support u8: it needs floating-point numbers",
    ),
    (
        2,
        |comm| comm.reduce(&mut [1.0_f32], ReduceOp::WeightedMean(-0.5), 0),
        "weighted_mean: the weight -0.5 is not a finite number of at least zero",
    ),
    (
        3,
        |comm| comm.all_reduce(&mut [1.0_f32], ReduceOp::WeightedMean(f64::NAN)),
        "weighted_mean: the weight NaN is not a finite number of at least zero",
    ),
    (
        3,
        |comm| comm.all_reduce(&mut [1.0_f32], ReduceOp::WeightedMean(0.0)),
        "weighted_mean: the weights of all ranks add up to 0.0, and f32 cannot be divided by it",
    ),
    (
        2,
        |comm| comm.all_reduce(&mut [1.0_f64], ReduceOp::WeightedMean(f64::MAX)),
        "weighted_mean: the weights of all ranks add up to inf, and f64 cannot be divided by it",
    ),
    (
        1,
        |comm| comm.reduce(&mut [bf16::ONE], ReduceOp::WeightedMean(1e-60), 0),
        "weighted_mean: the weights of all ranks add up to 1e-60, and bf16 cannot be divided by it",
    ),
    (
        3,
        |comm| comm.all_gather_in_place(&mut [1_u8; 4]),
        "all_gather: 4 elements cannot be divided evenly among 3 ranks: pad the buffer, or use the form with counts",
    ),
    (
        3,
        |comm| comm.reduce_scatter_in_place(&mut [1_u8; 5], ReduceOp::Sum).map(drop),
        "reduce_scatter: 5 elements cannot be divided evenly among 3 ranks: pad the buffer, or use the form with counts",
    ),
    (2, |comm| comm.send_recv(&[1_u8], 0, &mut [0_u8], 2), "rank 2 is outside a group of 2"),
    (1, |comm| comm.broadcast(&mut [1.0_f32], 1), "broadcast: root 1 is outside a group of 1"),
    (3, |comm| comm.broadcast(&mut [1.0_f32], 3), "broadcast: root 3 is outside a group of 3"),
    (3, |comm| comm.reduce(&mut [1.0_f32], ReduceOp::Sum, 7), "reduce: root 7 is outside a group of 3"),
    (
        1,
        |comm| comm.all_gather(&[1.0_f32; 2], &mut [0.0; 3]),
        "all_gather: the long buffer has 3 elements, not 1 ranks times the 2 elements of the short one",
    ),
    (
        3,
        |comm| comm.all_gather(&[1.0_f32; 2], &mut [0.0; 5]),
        "all_gather: the long buffer has 5 elements, not 3 ranks times the 2 elements of the short one",
    ),
    (
        3,
        |comm| comm.reduce_scatter(&[1.0_f32; 7], &mut [0.0; 2], ReduceOp::Sum),
        "reduce_scatter: the long buffer has 7 elements, not 3 ranks times the 2 elements of the short one",
    ),
    (
        1,
        |comm| comm.reduce_scatter(&[1.0_f32; 7], &mut [0.0; 2], ReduceOp::Sum),
        "reduce_scatter: the long buffer has 7 elements, not 1 ranks times the 2 elements of the short one",
    ),
    (1, |comm| comm.send(&[1_u8], 1), "rank 1 is outside a group of 1"),
    (2, |comm| comm.recv(&mut [1_u8], 2), "rank 2 is outside a group of 2"),
    (
        3,
        |comm| comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut [1.0_f32], ReduceOp::Sum),
        "all_reduce by ring does not reduce in canonical order in a group of 3",
    ),
    (
        3,
        |comm| comm.with_algorithm(&recursive_doubling::ALL_GATHER).all_gather(&[0_u8], &mut [0; 3]),
        "all_gather by recursive_doubling does not work for a group of 3",
    ),
    (2, |comm| comm.subgroup(&[]).map(drop), "these ranks cannot form a group"),
    (2, |comm| comm.subgroup(&[0, 2]).map(drop), "these ranks cannot form a group"),
    (2, |comm| comm.subgroup(&[1, 1]).map(drop), "these ranks cannot form a group"),
    (
        1,
        |comm| comm.start_all_reduce(vec![1_i8], ReduceOp::Mean).wait().map(drop).map_err(Error::from),
        "mean does not support i8: it needs floating-point or complex numbers",
    ),
];

#[test]
fn invalid_arguments_are_refused_with_their_numbers() {
    for &(world_size, call, message) in REFUSED {
        check(world_size, call, message);
    }
}

#[test]
fn refusals_have_types_of_their_own() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let error = comm.all_reduce(&mut [1_i32], ReduceOp::Mean).unwrap_err();
        assert!(matches!(error, Error::Unreducible { op: ReduceKind::Mean, dtype: DType::I32 }));
        for op in [
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::And,
            ReduceOp::PreMulSum(0.5),
            ReduceOp::WeightedMean(1.0),
        ] {
            let error = comm.all_reduce(&mut [Complex::new(1.0_f32, 0.0)], op).unwrap_err();
            let expected = (op.kind(), DType::ComplexF32);
            assert!(matches!(error, Error::Unreducible { op, dtype } if (op, dtype) == expected), "{error}");
        }
        let error = comm.broadcast(&mut [1_i32], 4).unwrap_err();
        let root = Error::RootOutOfRange { operation: Operation::Broadcast, root: 4, world_size: 1 };
        assert_eq!(format!("{error:?}"), format!("{root:?}"));
        assert!(!error.is_timeout() && error.peer().is_none() && error.call().is_none());
    });
}

#[test]
fn a_guard_changes_the_settings_for_one_call() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let before = (comm.timeout(), comm.order());
        let second = Duration::from_secs(1);
        {
            let mut scoped = comm.with_timeout(second);
            assert_eq!(scoped.timeout(), second);
            let both = scoped.with_order(ReductionOrder::Any);
            assert_eq!((both.timeout(), both.order()), (second, ReductionOrder::Any));
        }
        comm.with_timeout(second).with_algorithm(&ring::ALL_REDUCE).barrier().unwrap();
        assert_eq!((comm.timeout(), comm.order()), before);
    });
}

#[test]
fn a_guard_restores_only_the_setting_that_it_changed() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let (second, costs) = (Duration::from_secs(1), CostModel { round_ps: 7, ..CostModel::default() });
        let timeout = comm.timeout();
        {
            let mut scoped = comm.with_timeout(second);
            scoped.set_order(ReductionOrder::Any);
            scoped.set_cost_model(costs);
            let mut forced = scoped.with_algorithm(&ring::ALL_REDUCE);
            assert_eq!(forced.algorithm(Operation::AllReduce, 8).unwrap(), Some((&ring::ALL_REDUCE).into()));
            forced.set_timeout(second * 2);
        }
        assert_eq!((comm.timeout(), comm.order()), (timeout, ReductionOrder::Any));
        assert_eq!(comm.cost_model(), costs);
        assert_ne!(comm.algorithm(Operation::AllReduce, 8).unwrap(), Some((&ring::ALL_REDUCE).into()));
    });
}

/// Ranks 0 and 3 see that their memory has another length. Rank 2, whose own part is right, would forward the data
/// of rank 3.
#[rstest]
fn a_rank_does_not_forward_more_than_any_memory_holds(#[values(false, true)] scatters: bool) {
    let errors = move_counted(scatters, usize::MAX / 16);
    assert!(
        matches!(&errors[..], [Error::Length { .. }, _, Error::Memory { .. }, Error::Length { .. }]),
        "{errors:?}"
    );
}

#[rstest]
fn counts_whose_sum_overflows_are_rejected_on_all_ranks(#[values(false, true)] scatters: bool) {
    let errors = move_counted(scatters, usize::MAX);
    assert!(errors.iter().all(|error| matches!(error, Error::TotalCount { .. })), "{errors:?}");
}

/// Returns the errors of four ranks with parts of one element each, except the last, which has this many.
fn move_counted(scatters: bool, absurd: usize) -> Vec<Error> {
    let outcome = sim::run(1, 4, move |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(Duration::from_secs(1));
        let counts = [1, 1, 1, absurd];
        if scatters {
            let mut comm = comm.with_algorithm(&binomial::SCATTER);
            comm.scatter_v(&[1.0_f32; 4], &counts, &mut [0.0], 0).unwrap_err()
        } else {
            let mut comm = comm.with_algorithm(&binomial::GATHER);
            comm.gather_v(&[1.0_f32], &counts, &mut [0.0; 4], 0).unwrap_err()
        }
    });
    outcome.results
}

/// Only the root needs memory for the data of all ranks.
#[test]
fn a_rank_without_memory_for_an_output_blocks_no_other() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        let theirs = if comm.rank() == 0 { usize::MAX / 16 } else { 1 };
        let gathered = comm.start_gather_v(vec![1.0_f32], vec![1, theirs], 0).wait();
        let met = comm.barrier();
        (gathered.map(drop).map_err(|failed| *failed.error), met)
    });
    let [(root, _), (_, other)] = &outcome.results[..] else { unreachable!("two ranks ran") };
    assert!(matches!(root, Err(Error::Memory { .. })), "{root:?}");
    assert!(matches!(other, Err(Error::Aborted { rank: 0, .. })), "{other:?}");
}
