//! Reductions by operations of the user's own: against a fold over the ranks in order, on every network.

use std::fmt::Debug;

use bytemuck::{Pod, Zeroable};
use dist_collectives::algorithms::{recursive_doubling, ring};
use dist_collectives::error::ReduceKind;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{
    Communicator, CustomOp, Element, ElementType, Error, IndexedValue, ReduceOp, ReductionOrder,
};
use dist_testkit::oracle;
use dist_transport::Cause;
use rstest::rstest;

use crate::worlds::{self, Network};

/// A 2 × 2 matrix of integers. Its product is associative and not commutative, and wraps.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Matrix([u32; 4]);

impl Matrix {
    fn times(Self([a, b, c, d]): Self, Self([e, f, g, h]): Self) -> Self {
        let sum = |x: u32, y: u32, z: u32, w: u32| x.wrapping_mul(y).wrapping_add(z.wrapping_mul(w));
        Self([sum(a, e, b, g), sum(a, f, b, h), sum(c, e, d, g), sum(c, f, d, h)])
    }
}

/// A mean of floats with its count: 24 bytes, which do not divide 64. Its merge is commutative up to rounding only.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Welford {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Welford {
    fn merge(self, other: Self) -> Self {
        let (count, delta) = (self.count + other.count, other.mean - self.mean);
        Self {
            count,
            mean: self.mean + delta * other.count / count,
            squares: self.squares + other.squares + delta * delta * self.count * other.count / count,
        }
    }
}

/// An operation and the elements of each rank.
struct Case<T, F, G> {
    op: CustomOp<T, F>,
    pairs: G,
    identity: T,
    inputs: Vec<Vec<T>>,
}

impl<T: Pod + Debug + PartialEq, F: Fn(&mut [T], &[T]), G: Fn(T, T) -> T> Case<T, F, G> {
    /// Returns the result of the first `count` ranks in canonical order.
    fn reduced(&self, count: usize) -> Vec<T> {
        let of = |index: usize| {
            let all: Vec<T> = self.inputs[..count].iter().map(|input| input[index]).collect();
            oracle::tree(&all, &|left, right| (self.pairs)(*left, *right))
        };
        (0..self.inputs[0].len()).map(of).collect()
    }

    /// Checks all operations, each with the library's choice and with every canonical algorithm.
    fn check(&self, comm: &mut Communicator) {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let (own, whole) = (&self.inputs[rank], self.reduced(world_size));
        let root = own.len() % world_size;
        for_each_way(comm, Operation::AllReduce, |comm, way| {
            let mut buffer = own.clone();
            comm.all_reduce_with(&mut buffer, &self.op)?;
            assert_eq!(buffer, whole, "all_reduce by {way:?}");
            Ok(())
        });
        for_each_way(comm, Operation::Reduce, |comm, way| {
            let mut buffer = own.clone();
            comm.reduce_with(&mut buffer, &self.op, root)?;
            assert!(rank != root || buffer == whole, "reduce by {way:?}: {buffer:?} is not {whole:?}");
            Ok(())
        });
        let part = own.len() / world_size;
        for_each_way(comm, Operation::ReduceScatter, |comm, way| {
            let mut output = vec![T::zeroed(); part];
            comm.reduce_scatter_with(&own[..part * world_size], &mut output, &self.op)?;
            assert_eq!(output, whole[rank * part..][..part], "reduce_scatter by {way:?}");
            Ok(())
        });
        let mut buffer = own.clone();
        comm.scan_with(&mut buffer, &self.op).unwrap();
        assert_eq!(buffer, self.reduced(rank + 1), "scan");
        let before = if rank == 0 { vec![self.identity; own.len()] } else { self.reduced(rank) };
        let mut buffer = own.clone();
        comm.exclusive_scan_with(&mut buffer, &self.op, self.identity).unwrap();
        assert_eq!(buffer, before, "exclusive_scan");
    }
}

/// Makes a call with the library's choice and with every algorithm. An algorithm that is not canonical is
/// rejected.
fn for_each_way(
    comm: &mut Communicator,
    operation: Operation,
    call: impl Fn(&mut Communicator, Option<Algorithm>) -> Result<(), Error>,
) {
    call(comm, None).unwrap();
    for algorithm in operation.algorithms() {
        let keeps = match algorithm {
            Algorithm::Messages(flat) => {
                flat.supports(comm.world_size())
                    && flat.keeps(ReductionOrder::Canonical.least(), comm.world_size())
            }
            Algorithm::TwoLevel(_) | Algorithm::Direct(_) => false,
        };
        let called = call(&mut comm.with_algorithm(algorithm), Some(algorithm));
        assert_eq!(called.is_ok(), keeps, "{algorithm:?}: {called:?}");
    }
}

fn numbers<T>(world_size: usize, len: usize, number: impl Fn(u32) -> T) -> Vec<Vec<T>> {
    let of = |rank: usize| oracle::sample::<u32>(3, rank, len).into_iter().map(&number).collect();
    (0..world_size).map(of).collect()
}

fn check_all(comm: &mut Communicator, len: usize) {
    let world_size = comm.world_size();
    let unit = Matrix([1, 0, 0, 1]);
    let matrices = numbers(world_size, len, |x| Matrix([x, x >> 3, x ^ 5, x.rotate_left(7)]));
    let op = CustomOp::of_pairs("matrix product", Matrix::times);
    Case { op, pairs: Matrix::times, identity: unit, inputs: matrices }.check(comm);
    let samples = numbers(world_size, len, |x| Welford { count: 1.0, mean: f64::from(x), squares: 0.0 });
    let nothing = Welford { count: 0.0, mean: 0.0, squares: 0.0 };
    let merge = CustomOp::new("Welford", |left: &mut [Welford], right: &[Welford]| {
        left.iter_mut().zip(right).for_each(|(left, right)| *left = left.merge(*right));
    });
    Case { op: merge, pairs: Welford::merge, identity: nothing, inputs: samples }.check(comm);
}

#[rstest]
fn operations_that_are_not_commutative_combine_the_ranks_in_order(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16)] world_size: usize,
) {
    worlds::run(Network::Simulated, world_size, move |mut comm| {
        for len in [0, 1, world_size + 1, 300] {
            check_all(&mut comm, len);
        }
    });
}

#[test]
fn operations_of_the_users_own_run_on_every_network() {
    for &network in Network::ALL {
        for world_size in [2, 3, 5] {
            worlds::run(network, world_size, move |mut comm| {
                check_all(&mut comm, 700);
                // A built-in reduction works as before.
                let mut sum = [1_u64];
                comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [world_size as u64]);
            });
        }
    }
}

#[test]
fn an_operation_that_is_not_commutative_keeps_its_order_if_any_order_is_set() {
    worlds::run(Network::Simulated, 6, |mut comm| {
        comm.set_order(ReductionOrder::Any);
        check_all(&mut comm, 100);
    });
}

#[test]
fn a_commutative_operation_may_use_an_algorithm_of_any_order() {
    let sums = worlds::run(Network::Simulated, 5, |mut comm| {
        let op = CustomOp::of_pairs("sum of u128", |a: u128, b: u128| a + b).commutative();
        let mut sum = vec![comm.rank() as u128 + 1; 20];
        comm.set_order(ReductionOrder::Any);
        comm.with_algorithm(&ring::ALL_REDUCE).all_reduce_with(&mut sum, &op).unwrap();
        sum
    });
    assert_eq!(sums, vec![vec![15; 20]; 5]);
}

#[test]
fn operations_with_different_names_are_an_error_on_every_rank() {
    type Program = fn(&mut Communicator) -> Result<(), Error>;
    fn reduce<T: Pod>(comm: &mut Communicator, name: &'static str) -> Result<(), Error> {
        comm.all_reduce_with(&mut [T::zeroed(); 4], &CustomOp::of_pairs(name, |left: T, _| left))
    }
    let sum: Program = |comm| reduce::<u128>(comm, "sum");
    let others: [(Program, &str); 4] = [
        (|comm| reduce::<u128>(comm, "max"), "operations differ"),
        (
            |comm| {
                let sum = CustomOp::of_pairs("sum", |left: u128, _| left).commutative();
                comm.all_reduce_with(&mut [0; 4], &sum)
            },
            "operations differ",
        ),
        (|comm| reduce::<[u64; 2]>(comm, "sum"), "types differ"),
        (|comm| reduce::<[u128; 2]>(comm, "sum"), "types differ"),
    ];
    for &network in Network::ALL {
        for (other, expected) in others {
            let errors = worlds::run(network, 2, move |mut comm| {
                let call = if comm.rank() == 0 { sum } else { other };
                call(&mut comm).and_then(|()| comm.barrier()).unwrap_err()
            });
            for error in &errors {
                let call = error.call().expect("the error names the call");
                assert!(call.op == Some(ReduceKind::Custom) && !error.is_timeout(), "{network:?}: {error}");
                assert!(matches!(call.element, Some(ElementType::Other { .. })), "{network:?}: {error}");
            }
            let is_told = errors.iter().any(|error| error.to_string().contains(expected));
            assert!(is_told, "{network:?}: {errors:?}");
        }
    }
}

/// Rank 1 panics in the function. The message may be half received, or wholly.
#[rstest]
fn a_panic_of_an_operation_is_an_error_on_every_rank(#[values(1, 24, 3000)] len: usize) {
    for &network in Network::ALL {
        for world_size in [2, 3, 4] {
            let errors = worlds::run(network, world_size, move |mut comm| {
                let panics = comm.rank() == 1;
                let op = CustomOp::new("planted", move |left: &mut [[u64; 3]], _: &[[u64; 3]]| {
                    // Without a message of the panic's hook.
                    if panics {
                        std::panic::resume_unwind(Box::new("planted"));
                    }
                    left.fill([1; 3]);
                });
                let mut buffer = vec![[0; 3]; len];
                // With this algorithm every rank reduces.
                let mut forced = comm.with_algorithm(&recursive_doubling::ALL_REDUCE);
                let reduced = forced.all_reduce_with(&mut buffer, &op);
                drop(forced);
                reduced.and_then(|()| comm.barrier()).unwrap_err()
            });
            for (rank, error) in errors.iter().enumerate() {
                let is_told = match error {
                    Error::OperationPanicked { name } => rank == 1 && *name == "planted",
                    Error::Aborted { cause: Cause::Panicked, rank: culprit, .. } => {
                        rank != 1 && *culprit == 1
                    }
                    _ => false,
                };
                assert!(is_told, "rank {rank} of {world_size}, {network:?}: {error:?}");
            }
        }
    }
}

/// The values of the ranks, and the rank of the expected result.
#[rstest]
#[case::the_only_smallest(&[3.0, 1.0, 2.0], 1, 0)]
#[case::ties_go_to_the_lower_index(&[4.0, 1.0, 1.0, 4.0, 4.0], 1, 0)]
#[case::minus_zero_is_less_than_zero(&[0.0, -0.0, 0.0], 1, 0)]
#[case::a_nan_is_kept(&[1.0, f64::NAN, 0.0, f64::NAN], 1, 1)]
#[case::one_rank(&[7.0], 0, 0)]
fn the_place_of_the_extreme_value_is_found(
    #[case] values: &'static [f64],
    #[case] least: usize,
    #[case] greatest: usize,
) {
    fn check<T: Element + PartialOrd>(comm: &mut Communicator, value: T, least: usize, greatest: usize) {
        let own = comm.rank() as u64;
        let mut found = [IndexedValue::new(value, own)];
        comm.all_reduce_with(&mut found, &CustomOp::min_loc()).unwrap();
        assert_eq!(found[0].index(), least as u64, "{found:?}");
        let mut found = [IndexedValue::new(value, own)];
        comm.all_reduce_with(&mut found, &CustomOp::max_loc()).unwrap();
        assert_eq!(found[0].index(), greatest as u64, "{found:?}");
    }
    for &network in Network::ALL {
        worlds::run(network, values.len(), move |mut comm| {
            let value = values[comm.rank()];
            check(&mut comm, value, least, greatest);
            #[allow(clippy::cast_possible_truncation, reason = "the values are small")]
            check(&mut comm, value as f32, least, greatest);
        });
    }
}

#[test]
fn ties_go_to_the_lower_index_and_not_to_the_lower_rank() {
    let found = worlds::run(Network::Simulated, 3, |mut comm| {
        let mut found = [IndexedValue::new(5_i32, 10 - comm.rank() as u64)];
        comm.all_reduce_with(&mut found, &CustomOp::min_loc()).unwrap();
        found[0].index()
    });
    assert_eq!(found, [8; 3]);
}

#[test]
fn one_value_of_each_rank_is_reduced_to_one() {
    let found = worlds::run(Network::Simulated, 3, |mut comm| {
        let rank = u32::try_from(comm.rank()).unwrap() + 1;
        (
            comm.all_reduce_value(rank, ReduceOp::Sum).unwrap(),
            comm.all_reduce_value(rank, ReduceOp::Product).unwrap(),
        )
    });
    assert_eq!(found, [(6, 6); 3]);
}
