//! Reductions: canonical order bit for bit, any order if the result is exact.

use dist_algos::direct::RemoteAccess;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{Communicator, Complex, ReduceOp, ReductionOrder};
use dist_testkit::oracle::{self, Reduction};
use half::{bf16, f16};
use rstest::rstest;

use super::{HOSTS, Probe, World, assert_same, inputs, lengths, part_of, parts, ways};
use crate::calls::by_messages;
use crate::worlds::{self, Network};

fn reduction(op: ReduceOp) -> Reduction {
    Reduction::parse(op.name()).expect("the oracle knows every operation")
}

/// A reduction of one length, which is checked in every form with these algorithms.
struct Case<'a, T> {
    op: ReduceOp,
    inputs: Vec<Vec<T>>,
    expected: Vec<T>,
    ways: &'a dyn Fn(Operation) -> Vec<Option<Algorithm>>,
}

impl<'a, T: Probe> Case<'a, T> {
    fn new(
        op: ReduceOp,
        world_size: usize,
        len: usize,
        ways: &'a dyn Fn(Operation) -> Vec<Option<Algorithm>>,
    ) -> Self {
        Self::of(op, inputs::<T>(world_size, len), ways)
    }

    fn of(op: ReduceOp, inputs: Vec<Vec<T>>, ways: &'a dyn Fn(Operation) -> Vec<Option<Algorithm>>) -> Self {
        let expected = oracle::all_reduce(&inputs, reduction(op));
        Self { op, inputs, expected, ways }
    }

    fn check(&self, comm: &mut World, roots: impl Iterator<Item = usize>) {
        self.all_reduce(comm);
        roots.for_each(|root| self.reduce(comm, root));
        self.reduce_scatter(comm);
        if !matches!(self.op, ReduceOp::Mean) {
            self.scan(comm);
        }
    }

    fn context(&self, operation: Operation, algorithm: Option<Algorithm>, comm: &World) -> String {
        let (len, world_size) = (self.expected.len(), comm.world_size());
        format!("{operation} {} of {len} {} by {algorithm:?} on {world_size}", self.op, T::DTYPE)
    }

    fn all_reduce(&self, comm: &mut World) {
        for way in (self.ways)(Operation::AllReduce) {
            let mut buffer = self.inputs[comm.rank()].clone();
            if comm.does(way, |comm| comm.all_reduce(&mut buffer, self.op)) {
                assert_same(&buffer, &self.expected, &self.context(Operation::AllReduce, way, comm));
            }
        }
    }

    fn reduce(&self, comm: &mut World, root: usize) {
        for way in (self.ways)(Operation::Reduce) {
            let mut buffer = self.inputs[comm.rank()].clone();
            if comm.does(way, |comm| comm.reduce(&mut buffer, self.op, root)) && comm.rank() == root {
                assert_same(&buffer, &self.expected, &self.context(Operation::Reduce, way, comm));
            }
        }
    }

    /// Checks equal parts of the divisible part of the input, in place, and uneven parts.
    fn reduce_scatter(&self, comm: &mut World) {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let input = &self.inputs[rank];
        let part = input.len() / world_size;
        let whole = part * world_size;
        let even = &self.expected[rank * part..][..part];
        let counts = parts(world_size, input.len());
        for way in (self.ways)(Operation::ReduceScatter) {
            let context = self.context(Operation::ReduceScatter, way, comm);
            let mut output = vec![T::zeroed(); part];
            if comm.does(way, |comm| comm.reduce_scatter(&input[..whole], &mut output, self.op)) {
                assert_same(&output, even, &context);
            }
            let mut buffer = input[..whole].to_vec();
            let mut own = Vec::new();
            let in_place = comm.does(way, |comm| {
                own = comm.reduce_scatter_in_place(&mut buffer, self.op)?.to_vec();
                Ok(())
            });
            if in_place {
                assert_same(&own, even, &context);
            }
            let mut output = vec![T::zeroed(); counts[rank]];
            if comm.does(way, |comm| comm.reduce_scatter_v(input, &counts, &mut output, self.op)) {
                assert_same(&output, part_of(&self.expected, &counts, rank), &context);
            }
        }
    }

    fn scan(&self, comm: &mut World) {
        let rank = comm.rank();
        let up_to_own = oracle::all_reduce(&self.inputs[..=rank], reduction(self.op));
        let before_own = match rank {
            0 => vec![nothing(self.op); self.expected.len()],
            _ => oracle::all_reduce(&self.inputs[..rank], reduction(self.op)),
        };
        for way in (self.ways)(Operation::Scan) {
            let context = self.context(Operation::Scan, way, comm);
            let mut buffer = self.inputs[rank].clone();
            if comm.does(way, |comm| comm.scan(&mut buffer, self.op)) {
                assert_same(&buffer, &up_to_own, &context);
            }
            let mut buffer = self.inputs[rank].clone();
            if comm.does(way, |comm| comm.exclusive_scan(&mut buffer, self.op)) {
                assert_same(&buffer, &before_own, &context);
            }
        }
    }
}

/// Returns the result of rank 0 in an exclusive scan.
fn nothing<T: Probe>(op: ReduceOp) -> T {
    // The last byte of an integer is its highest.
    let of_bytes = |others: u8, highest: u8| {
        let mut bytes = vec![others; size_of::<T>()];
        *bytes.last_mut().expect("elements have bytes") = highest;
        bytemuck::pod_read_unaligned(&bytes)
    };
    let is_signed = T::DTYPE.name().starts_with('i');
    let infinite = |infinity: f64| T::from(infinity).expect("floats are infinite");
    match op {
        ReduceOp::Product => T::one(),
        ReduceOp::Min if T::DTYPE.is_float() => infinite(f64::INFINITY),
        ReduceOp::Max if T::DTYPE.is_float() => infinite(f64::NEG_INFINITY),
        ReduceOp::Min => of_bytes(0xff, if is_signed { 0x7f } else { 0xff }),
        ReduceOp::Max => of_bytes(0, if is_signed { 0x80 } else { 0 }),
        ReduceOp::And => of_bytes(0xff, 0xff),
        _ => T::zero(),
    }
}

fn every(operation: Operation) -> Vec<Option<Algorithm>> {
    ways(operation).collect()
}

fn chosen(_: Operation) -> Vec<Option<Algorithm>> {
    vec![None]
}

/// Returns the library's choice and all algorithms on shared memory that support borrowed memory.
fn direct(operation: Operation) -> Vec<Option<Algorithm>> {
    let reads = |algorithm: &Algorithm| match algorithm {
        Algorithm::Direct(direct) => direct.remote_access != RemoteAccess::Write,
        _ => false,
    };
    operation.algorithms().filter(reads).map(Some).chain([None]).collect()
}

/// Checks every reduction of a type, by the library's choice.
fn check_type<T: Probe>(comm: &mut World) {
    check_type_by::<T>(comm, &chosen);
}

fn check_type_by<T: Probe>(comm: &mut World, ways: &dyn Fn(Operation) -> Vec<Option<Algorithm>>) {
    let world_size = comm.world_size();
    for op in ReduceOp::PLAIN.into_iter().filter(|op| op.supports(T::DTYPE)) {
        for len in [world_size + 1, 127] {
            Case::<T>::new(op, world_size, len, ways).check(comm, std::iter::once(len % world_size));
        }
        if !T::SPECIAL.is_empty() {
            let special = (0..world_size).map(|rank| oracle::sample_with_special(7, rank, 127)).collect();
            Case::<T>::of(op, special, ways).check(comm, std::iter::once(0));
        }
    }
}

/// Checks every length by every algorithm.
fn check_lengths<T: Probe>(comm: &mut World, op: ReduceOp) {
    let world_size = comm.world_size();
    for len in lengths(world_size) {
        Case::<T>::new(op, world_size, len, &every).check(comm, std::iter::once(len % world_size));
    }
}

#[rstest]
fn every_type_has_its_reductions_bit_for_bit(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4, 7, 8)] world_size: usize,
) {
    worlds::run(network, world_size, |comm| {
        let mut comm = World::new(comm);
        check_type::<f32>(&mut comm);
        check_type::<f64>(&mut comm);
        check_type::<f16>(&mut comm);
        check_type::<bf16>(&mut comm);
        check_type::<i8>(&mut comm);
        check_type::<i32>(&mut comm);
        check_type::<i64>(&mut comm);
        check_type::<u8>(&mut comm);
        check_type::<u32>(&mut comm);
        check_type::<u64>(&mut comm);
        check_type::<Complex<f32>>(&mut comm);
        check_type::<Complex<f64>>(&mut comm);
    });
}

#[rstest]
fn ranks_that_share_memory_reduce_every_type_bit_for_bit(#[values(2, 3, 4, 7)] world_size: usize) {
    const TYPES: [fn(&mut World); 10] = [
        |comm| check_type_by::<f32>(comm, &direct),
        |comm| check_type_by::<f64>(comm, &direct),
        |comm| check_type_by::<f16>(comm, &direct),
        |comm| check_type_by::<bf16>(comm, &direct),
        |comm| check_type_by::<i8>(comm, &direct),
        |comm| check_type_by::<i32>(comm, &direct),
        |comm| check_type_by::<i64>(comm, &direct),
        |comm| check_type_by::<u8>(comm, &direct),
        |comm| check_type_by::<u32>(comm, &direct),
        |comm| check_type_by::<u64>(comm, &direct),
    ];
    for (seed, check) in (0..20).zip(TYPES.into_iter().cycle()) {
        worlds::run(Network::SharedMemory(seed), world_size, move |comm| check(&mut World::new(comm)));
    }
}

#[rstest]
fn every_algorithm_gives_the_canonical_tree_for_every_length(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)] world_size: usize,
) {
    worlds::run(Network::Simulated, world_size, |comm| {
        let mut comm = World::new(comm);
        check_lengths::<f32>(&mut comm, ReduceOp::Sum);
        check_lengths::<bf16>(&mut comm, ReduceOp::Mean);
        check_lengths::<f16>(&mut comm, ReduceOp::Mean);
    });
}

#[rstest]
fn every_algorithm_gives_the_canonical_tree_between_threads(#[values(2, 3, 5, 8)] world_size: usize) {
    worlds::run(Network::Threads, world_size, |comm| {
        let mut comm = World::new(comm);
        check_lengths::<f32>(&mut comm, ReduceOp::Sum);
        check_lengths::<f16>(&mut comm, ReduceOp::Product);
        check_lengths::<i32>(&mut comm, ReduceOp::Min);
    });
}

#[rstest]
fn two_levels_give_the_canonical_tree_where_hosts_allow_it(#[values(0, 1, 2, 3, 4, 5, 6)] hosts: usize) {
    let hosts = HOSTS[hosts];
    worlds::run(Network::Simulated, hosts.len(), move |comm| {
        let mut comm = World::among(comm, hosts);
        check_lengths::<f32>(&mut comm, ReduceOp::Sum);
        check_lengths::<bf16>(&mut comm, ReduceOp::Mean);
        check_lengths::<f16>(&mut comm, ReduceOp::Mean);
        let case = Case::<f64>::new(ReduceOp::Max, hosts.len(), 20, &every);
        (0..hosts.len()).for_each(|root| case.reduce(&mut comm, root));
        comm.set_order(ReductionOrder::Any);
        let (inputs, op) = (small_inputs(hosts.len(), 127), ReduceOp::Sum);
        let expected = oracle::all_reduce(&inputs, reduction(op));
        let case = Case { op, inputs, expected, ways: &every_in_any_order };
        case.check(&mut comm, 0..hosts.len());
    });
}

#[cfg(all(feature = "shm", target_os = "linux"))]
#[rstest]
fn every_algorithm_gives_the_canonical_tree_between_processes(
    #[values(Network::Tcp, Network::Shm)] network: Network,
    #[values(1, 2, 3, 4, 5)] world_size: usize,
) {
    worlds::run(network, world_size, |comm| {
        let mut comm = World::new(comm);
        check_lengths::<f32>(&mut comm, ReduceOp::Sum);
        check_type::<bf16>(&mut comm);
        check_type::<f16>(&mut comm);
        check_type::<Complex<f64>>(&mut comm);
    });
}

#[rstest]
fn every_root_gets_the_same_reduction(#[values(2, 3, 5, 8, 17)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, move |comm| {
        let mut comm = World::new(comm);
        let case = Case::<f32>::new(ReduceOp::Mean, world_size, 100, &every);
        (0..world_size).for_each(|root| case.reduce(&mut comm, root));
    });
}

/// Returns whole numbers so small that every order gives the same sum.
fn small_inputs(world_size: usize, len: usize) -> Vec<Vec<f32>> {
    let small = |noise: u8| f32::from(noise % 16);
    inputs::<u8>(world_size, len).into_iter().map(|input| input.into_iter().map(small).collect()).collect()
}

#[rstest]
fn any_order_gives_exact_sums_and_the_same_bits_on_every_rank(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)] world_size: usize,
) {
    let results = worlds::run(Network::Simulated, world_size, move |comm| {
        let mut comm = World::new(comm);
        comm.set_order(ReductionOrder::Any);
        let mut noisy_sums = Vec::new();
        for len in lengths(world_size) {
            let (inputs, op) = (small_inputs(world_size, len), ReduceOp::Sum);
            let expected = oracle::all_reduce(&inputs, reduction(op));
            let case = Case { op, inputs, expected, ways: &every_in_any_order };
            case.all_reduce(&mut comm);
            case.reduce(&mut comm, len % world_size);
            case.reduce_scatter(&mut comm);
            for algorithm in by_messages(Operation::AllReduce) {
                let mut noisy = oracle::sample::<bf16>(5, comm.rank(), len);
                comm.with_algorithm(algorithm).all_reduce(&mut noisy, ReduceOp::Mean).expect("any order");
                noisy_sums.push(noisy);
            }
        }
        noisy_sums
    });
    assert!(results.iter().all(|noisy| *noisy == results[0]));
}

/// Returns algorithms to force, because the library's choice assumes canonical order here.
fn every_in_any_order(operation: Operation) -> Vec<Option<Algorithm>> {
    ways(operation).filter(Option::is_some).collect()
}

fn check_numbers<T: Probe>(comm: &mut Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    // A rank may have weight zero, and one weight may exceed all others together.
    let weights: Vec<f64> = (0..world_size).map(|rank| [0.1, 7.0, 0.0, 1.0 / 3.0][rank % 4]).collect();
    let own = weights[rank];
    for part in [0, 1, world_size + 1, 127] {
        let inputs = inputs::<T>(world_size, part * world_size);
        let sums = oracle::scaled_sum(&inputs, &weights);
        let means = oracle::weighted_mean(&inputs, &weights);
        for (op, expected) in [(ReduceOp::PreMulSum(own), sums), (ReduceOp::WeightedMean(own), means)] {
            let context = format!("{op} of {part} {} on {world_size}", T::DTYPE);
            let mut buffer = inputs[rank].clone();
            comm.all_reduce(&mut buffer, op).expect("every rank calls it");
            assert_same(&buffer, &expected, &context);
            let mut buffer = inputs[rank].clone();
            comm.reduce(&mut buffer, op, world_size - 1).expect("every rank calls it");
            if rank == world_size - 1 {
                assert_same(&buffer, &expected, &context);
            }
            let mut buffer = inputs[rank].clone();
            let own = comm.reduce_scatter_in_place(&mut buffer, op).expect("every rank calls it");
            assert_same(own, &expected[rank * part..][..part], &context);
        }
        let mut buffer = inputs[rank].clone();
        comm.scan(&mut buffer, ReduceOp::PreMulSum(own)).expect("every rank calls it");
        let expected = oracle::scaled_sum(&inputs[..=rank], &weights[..=rank]);
        assert_same(&buffer, &expected, &format!("scan of {part} {} on {world_size}", T::DTYPE));
    }
}

fn check_equal_weights<T: Probe>(comm: &mut Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for len in [0, 1, 127, 1000] {
        let own = inputs::<T>(world_size, len).swap_remove(rank);
        let (mut weighted, mut mean) = (own.clone(), own);
        comm.all_reduce(&mut weighted, ReduceOp::WeightedMean(1.0)).expect("every rank calls it");
        comm.all_reduce(&mut mean, ReduceOp::Mean).expect("every rank calls it");
        assert_same(&weighted, &mean, &format!("{len} {} on {world_size}", T::DTYPE));
    }
}

#[rstest]
fn weights_of_one_give_the_bits_of_the_mean(#[values(1, 2, 3, 5, 8)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, |mut comm| {
        check_equal_weights::<f32>(&mut comm);
        check_equal_weights::<f64>(&mut comm);
        check_equal_weights::<f16>(&mut comm);
        check_equal_weights::<bf16>(&mut comm);
    });
}

#[test]
fn a_weight_of_nothing_hides_no_nan_and_a_large_one_overflows_but_for_f16() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let (weight, own) = [(0.0, f32::NAN), (1.0, 1.0)][comm.rank()];
        let mut mean = [own];
        comm.all_reduce(&mut mean, ReduceOp::WeightedMean(weight)).expect("every rank calls it");
        assert!(mean[0].is_nan());
        let mut mean = [bf16::MAX];
        comm.all_reduce(&mut mean, ReduceOp::WeightedMean(1000.0)).expect("every rank calls it");
        assert_eq!(mean[0], bf16::INFINITY);
        let mut mean = [f16::MAX];
        comm.all_reduce(&mut mean, ReduceOp::WeightedMean(1000.0)).expect("every rank calls it");
        assert_eq!(mean[0], f16::MAX);
        comm.all_reduce(&mut mean, ReduceOp::WeightedMean(0.0)).expect_err("the weights add up to nothing");
    });
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
        for algorithm in by_messages(Operation::ReduceScatter) {
            let input = oracle::sample::<f32>(1, comm.rank(), 40);
            let mut part = [0.0; 10];
            let mut comm = comm.with_order(ReductionOrder::Any);
            comm.with_algorithm(algorithm)
                .reduce_scatter(&input, &mut part, ReduceOp::WeightedMean(0.5))
                .unwrap();
            assert_eq!(input, oracle::sample::<f32>(1, comm.rank(), 40));
        }
    });
}
