//! Every operation against the oracle: types, reductions, worlds, lengths, algorithms, orders.

use dist_collectives::{
    Algorithm, Communicator, Element, Error, Operation, ReduceOp, ReductionOrder, Scoped,
};
use dist_testkit::oracle::{self, Number, Reduction};
use half::{bf16, f16};
use rstest::rstest;

use crate::worlds::{self, Network};

fn reduction(op: ReduceOp) -> Reduction {
    Reduction::parse(op.name()).expect("the oracle knows every operation")
}

fn lengths(world_size: usize) -> [usize; 7] {
    [0, 1, world_size - 1, world_size, world_size + 1, 127, 1000]
}

/// Every rank's input.
fn inputs<T: Number>(world_size: usize, len: usize) -> Vec<Vec<T>> {
    (0..world_size).map(|rank| oracle::sample(len as u64, rank, len)).collect()
}

#[track_caller]
fn assert_same<T: Number>(found: &[T], expected: &[T], context: &dyn std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{context}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.same(*expected), "{context}: element {index} is {found:?}, not {expected:?}");
    }
}

/// The communicator with this algorithm, if there is to be one.
fn by(comm: &mut Communicator, algorithm: Option<Algorithm>) -> Scoped<'_> {
    match algorithm {
        Some(algorithm) => comm.with_algorithm(algorithm),
        None => comm.with_order(ReductionOrder::Canonical),
    }
}

/// Whether the algorithm that was asked for was refused, as it may be for this world or this order; any other
/// error is a failure.
#[track_caller]
fn refused(algorithm: Option<Algorithm>, done: Result<(), Error>) -> bool {
    match done {
        Ok(()) => false,
        Err(Error::Unsupported { .. } | Error::Order { .. }) if algorithm.is_some() => true,
        Err(error) => panic!("{error}"),
    }
}

fn check_reductions<T: Element + Number>(
    comm: &mut Communicator,
    op: ReduceOp,
    algorithms: &[Option<Algorithm>],
) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for len in lengths(world_size) {
        let inputs = inputs::<T>(world_size, len);
        let expected = oracle::all_reduce(&inputs, reduction(op));
        let parts = inputs_of_parts::<T>(world_size, len);
        let expected_part = oracle::reduce_scatter(&parts, reduction(op), rank);
        for &algorithm in algorithms {
            let context = format!("{op} of {len} {} by {algorithm:?} on {world_size}", T::DTYPE);
            let operation = algorithm.map(Algorithm::operation);
            if operation.is_none_or(|operation| operation == Operation::AllReduce) {
                let mut buffer = inputs[rank].clone();
                if !refused(algorithm, by(comm, algorithm).all_reduce(&mut buffer, op)) {
                    assert_same(&buffer, &expected, &context);
                }
            }
            if operation.is_none_or(|operation| operation == Operation::Reduce) {
                let mut buffer = inputs[rank].clone();
                let root = len % world_size;
                let done = by(comm, algorithm).reduce(&mut buffer, op, root);
                if !refused(algorithm, done) && rank == root {
                    assert_same(&buffer, &expected, &context);
                }
            }
            if operation.is_none_or(|operation| operation == Operation::ReduceScatter) {
                let mut part = vec![T::zeroed(); len];
                if !refused(algorithm, by(comm, algorithm).reduce_scatter(&parts[rank], &mut part, op)) {
                    assert_same(&part, &expected_part, &context);
                }
            }
        }
    }
}

/// Inputs that every rank gets a part of as long as `len`.
fn inputs_of_parts<T: Number>(world_size: usize, len: usize) -> Vec<Vec<T>> {
    inputs(world_size, len * world_size)
}

fn check_all_ops<T: Element + Number>(comm: &mut Communicator, algorithms: &[Option<Algorithm>]) {
    for op in ReduceOp::PLAIN.into_iter().filter(|op| op.supports(T::DTYPE)) {
        check_reductions::<T>(comm, op, algorithms);
    }
}

fn algorithms() -> Vec<Option<Algorithm>> {
    Operation::ALL.into_iter().flat_map(Algorithm::of).map(Some).collect()
}

#[rstest]
fn reductions_are_the_canonical_tree_bit_for_bit(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9)] world_size: usize,
) {
    worlds::run(network, world_size, |mut comm| {
        let chosen = [None];
        check_all_ops::<f32>(&mut comm, &chosen);
        check_all_ops::<f64>(&mut comm, &chosen);
        check_all_ops::<f16>(&mut comm, &chosen);
        check_all_ops::<bf16>(&mut comm, &chosen);
        check_all_ops::<i8>(&mut comm, &chosen);
        check_all_ops::<i32>(&mut comm, &chosen);
        check_all_ops::<i64>(&mut comm, &chosen);
        check_all_ops::<u8>(&mut comm, &chosen);
        check_all_ops::<u32>(&mut comm, &chosen);
        check_all_ops::<u64>(&mut comm, &chosen);
        let every = algorithms();
        check_reductions::<f32>(&mut comm, ReduceOp::Sum, &every);
        check_reductions::<bf16>(&mut comm, ReduceOp::Mean, &every);
        check_reductions::<f16>(&mut comm, ReduceOp::Product, &every);
        check_reductions::<i32>(&mut comm, ReduceOp::Min, &every);
    });
}

/// Whole numbers so small that every order gives the same sum.
fn small_inputs(world_size: usize, len: usize) -> Vec<Vec<f32>> {
    let small = |noise: u8| f32::from(noise % 16);
    inputs::<u8>(world_size, len).into_iter().map(|input| input.into_iter().map(small).collect()).collect()
}

#[rstest]
fn any_order_gives_exact_sums_and_the_same_bits_on_every_rank(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9)] world_size: usize,
) {
    let results = worlds::run(network, world_size, move |mut comm| {
        comm.set_order(ReductionOrder::Any);
        let mut noisy_sums = Vec::new();
        for len in lengths(world_size) {
            let exact = small_inputs(world_size, len);
            let expected = oracle::all_reduce(&exact, Reduction::Sum);
            let integers = inputs::<u64>(world_size, len);
            let wrapped = oracle::all_reduce(&integers, Reduction::Sum);
            for algorithm in Algorithm::of(Operation::AllReduce) {
                let context = format!("{len} by {algorithm} on {world_size}");
                let mut comm = comm.with_algorithm(algorithm);
                let rank = comm.rank();
                let mut buffer = exact[rank].clone();
                comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                assert_same(&buffer, &expected, &context);
                let mut buffer = integers[rank].clone();
                comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                assert_same(&buffer, &wrapped, &context);
                let mut noisy = oracle::sample::<bf16>(5, rank, len);
                comm.all_reduce(&mut noisy, ReduceOp::Mean).unwrap();
                noisy_sums.push(noisy);
            }
            let exact = small_inputs(world_size, len * world_size);
            for algorithm in Algorithm::of(Operation::ReduceScatter) {
                let rank = comm.rank();
                let mut part = vec![0.0; len];
                let done =
                    comm.with_algorithm(algorithm).reduce_scatter(&exact[rank], &mut part, ReduceOp::Sum);
                if !refused(Some(algorithm), done) {
                    assert_same(&part, &oracle::reduce_scatter(&exact, Reduction::Sum, rank), &algorithm);
                }
            }
        }
        noisy_sums
    });
    assert!(results.iter().all(|noisy| *noisy == results[0]));
}

fn check_copies<T: Element + Number>(comm: &mut Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let with = |operation| std::iter::once(None).chain(Algorithm::of(operation).map(Some));
    for len in lengths(world_size) {
        let inputs = inputs::<T>(world_size, len);
        for algorithm in with(Operation::AllGather) {
            let context = format!("{len} {} by {algorithm:?} on {world_size}", T::DTYPE);
            let mut gathered = vec![T::zeroed(); len * world_size];
            if !refused(algorithm, by(comm, algorithm).all_gather(&inputs[rank], &mut gathered)) {
                assert_same(&gathered, &oracle::all_gather(&inputs), &context);
            }
        }
        for algorithm in with(Operation::Broadcast) {
            for root in 0..world_size {
                let context = format!("{len} {} from {root} by {algorithm:?} on {world_size}", T::DTYPE);
                let mut buffer = inputs[rank].clone();
                by(comm, algorithm).broadcast(&mut buffer, root).expect("every rank calls it");
                assert_same(&buffer, &inputs[root], &context);
            }
        }
        for algorithm in with(Operation::Barrier) {
            by(comm, algorithm).barrier().expect("every rank calls it");
        }
    }
}

#[rstest]
fn gathers_and_broadcasts_move_every_bit(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9)] world_size: usize,
) {
    worlds::run(network, world_size, |mut comm| {
        check_copies::<f32>(&mut comm);
        check_copies::<bf16>(&mut comm);
        check_copies::<u64>(&mut comm);
        check_copies::<i8>(&mut comm);
    });
}

fn check_numbers<T: Element + Number>(comm: &mut Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    // One rank's contribution may count nothing, one weight may be more than all others.
    let weights: Vec<f64> = (0..world_size).map(|rank| [0.1, 7.0, 0.0, 1.0 / 3.0][rank % 4]).collect();
    let own = weights[rank];
    for len in [0, 1, world_size + 1, 127] {
        let inputs = inputs_of_parts::<T>(world_size, len);
        let sums = oracle::scaled_sum(&inputs, &weights);
        let means = oracle::weighted_mean(&inputs, &weights);
        for (op, expected) in [(ReduceOp::PreMulSum(own), sums), (ReduceOp::WeightedMean(own), means)] {
            let context = format!("{op} of {len} {} on {world_size}", T::DTYPE);
            let mut buffer = inputs[rank].clone();
            comm.all_reduce(&mut buffer, op).expect("every rank calls it");
            assert_same(&buffer, &expected, &context);
            let mut buffer = inputs[rank].clone();
            comm.reduce(&mut buffer, op, world_size - 1).expect("every rank calls it");
            if rank == world_size - 1 {
                assert_same(&buffer, &expected, &context);
            }
            let mut buffer = inputs[rank].clone();
            let part = comm.reduce_scatter_in_place(&mut buffer, op).expect("every rank calls it");
            assert_same(part, &expected[rank * len..][..len], &context);
        }
    }
}

#[rstest]
fn every_rank_brings_its_own_factor_or_weight(#[values(1, 2, 3, 4, 5, 8)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, |mut comm| {
        check_numbers::<f32>(&mut comm);
        check_numbers::<f64>(&mut comm);
        check_numbers::<f16>(&mut comm);
        check_numbers::<bf16>(&mut comm);
    });
}

#[rstest]
fn every_root_gets_the_same_reduction(#[values(2, 3, 5, 8)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, move |mut comm| {
        let inputs = inputs::<f32>(world_size, 100);
        let expected = oracle::all_reduce(&inputs, Reduction::Mean);
        for algorithm in Algorithm::of(Operation::Reduce) {
            for root in 0..world_size {
                let mut buffer = inputs[comm.rank()].clone();
                comm.with_algorithm(algorithm).reduce(&mut buffer, ReduceOp::Mean, root).unwrap();
                if comm.rank() == root {
                    assert_same(&buffer, &expected, &algorithm);
                }
            }
        }
    });
}

#[rstest]
fn a_nan_on_one_rank_is_the_least_and_the_greatest(#[values(1, 2, 3, 7, 8)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, move |mut comm| {
        for odd_one in 0..world_size {
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let own = if comm.rank() == odd_one { f16::NAN } else { f16::NEG_ZERO };
                let zero = if comm.rank() == odd_one { 0.0_f64 } else { -0.0 };
                let (mut nans, mut zeros) = ([own, f16::ONE], [zero]);
                comm.all_reduce(&mut nans, op).unwrap();
                comm.all_reduce(&mut zeros, op).unwrap();
                assert!(nans[0].is_nan() && nans[1] == f16::ONE);
                let positive = if op == ReduceOp::Min { world_size == 1 } else { true };
                assert_eq!(zeros[0].is_sign_positive(), positive, "{op} on {world_size}");
            }
        }
    });
}

#[test]
fn the_input_of_a_reduce_scatter_stays_as_it_is() {
    worlds::run(Network::Simulated, 4, |mut comm| {
        for algorithm in Algorithm::of(Operation::ReduceScatter) {
            let input = oracle::sample::<f32>(1, comm.rank(), 40);
            let mut part = [0.0; 10];
            let mut comm = comm.with_order(ReductionOrder::Any);
            comm.with_algorithm(algorithm).reduce_scatter(&input, &mut part, ReduceOp::Sum).unwrap();
            assert_eq!(input, oracle::sample::<f32>(1, comm.rank(), 40));
        }
    });
}

#[cfg(feature = "tcp")]
#[rstest]
fn sockets_give_the_same_bits(#[values(1, 2, 3, 4, 5)] world_size: usize) {
    worlds::run(Network::Tcp, world_size, |mut comm| {
        check_reductions::<f32>(&mut comm, ReduceOp::Sum, &algorithms());
        check_all_ops::<bf16>(&mut comm, &[None]);
        check_copies::<f64>(&mut comm);
    });
}
