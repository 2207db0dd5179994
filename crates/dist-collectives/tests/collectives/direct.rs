//! Ranks that share memory: every operation by every direct algorithm, in every kind of memory, has the bits of the
//! oracle.

use dist_collectives::tuning::{Algorithm, Operation, Ownership};
use dist_collectives::{Buffer, Communicator, Complex, DType, Element, Error, ReduceOp};
use dist_testkit::oracle::{self, Number, Reduction};
use half::{bf16, f16};
use rstest::rstest;

use crate::oracle::{assert_same, inputs};
use crate::worlds::{self, Network};

/// Lengths: zero, less than a part for each rank, a flag line, a slot, and a pipeline of more blocks than slots.
const LENGTHS: [usize; 6] = [0, 1, 12, 1000, 40_001, 400_003];

/// Returns every direct algorithm of an operation.
fn direct(operation: Operation) -> impl Iterator<Item = Algorithm> {
    operation.algorithms().filter(|algorithm| matches!(algorithm, Algorithm::Direct(_)))
}

/// Returns every direct algorithm of an operation, and the library's choice.
fn ways(operation: Operation) -> impl Iterator<Item = Option<Algorithm>> {
    direct(operation).map(Some).chain([None])
}

/// Makes a call by this algorithm. Returns `false` if it was refused because of the kind of memory.
fn does(
    comm: &mut Communicator,
    way: Option<Algorithm>,
    call: impl FnOnce(&mut Communicator) -> Result<(), Error>,
) -> bool {
    let done = match way {
        Some(way) => call(&mut comm.with_algorithm(way)),
        None => call(comm),
    };
    match done {
        Err(Error::NotOpen { algorithm: Algorithm::Direct(_) }) => false,
        done => done.map(|()| true).unwrap_or_else(|error| panic!("{way:?}: {error:?}")),
    }
}

fn allocated(comm: &mut Communicator, elements: &[f32]) -> Buffer<f32> {
    let mut allocated = comm.alloc(elements.len()).unwrap();
    allocated.copy_from_slice(elements);
    allocated
}

fn all_reduces(comm: &mut Communicator, inputs: &[Vec<f32>], expected: &[f32]) {
    let rank = comm.rank();
    for way in ways(Operation::AllReduce) {
        let writes = way.is_some_and(|way| way.name() == "direct/write_to_all");
        let mut borrowed = inputs[rank].clone();
        let done = does(comm, way, |comm| comm.all_reduce(&mut borrowed, ReduceOp::Sum));
        assert_eq!(done, !writes, "no rank writes into borrowed memory");
        if done {
            assert_same(&borrowed, expected, &format!("{way:?}"));
        }
        let allocated = allocated(comm, &inputs[rank]);
        for mut buffer in [Buffer::from(inputs[rank].clone()), allocated] {
            if does(comm, way, |comm| comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum)) {
                assert_same(&buffer, expected, &format!("{way:?} of {buffer:?}"));
            }
        }
    }
}

fn reduce_scatters(comm: &mut Communicator, inputs: &[Vec<f32>], expected: &[f32]) {
    let (rank, part) = (comm.rank(), expected.len() / comm.world_size());
    let whole = part * comm.world_size();
    let own = rank * part..(rank + 1) * part;
    for way in ways(Operation::ReduceScatter) {
        let mut output = vec![0.0; part];
        does(comm, way, |comm| comm.reduce_scatter(&inputs[rank][..whole], &mut output, ReduceOp::Sum));
        assert_same(&output, &expected[own.clone()], &format!("reduce_scatter {way:?}"));
        let input = allocated(comm, &inputs[rank][..whole]);
        output.fill(0.0);
        does(comm, way, |comm| comm.reduce_scatter_buffer(&input, &mut output, ReduceOp::Sum));
        assert_same(&output, &expected[own.clone()], &format!("allocated reduce_scatter {way:?}"));
        let mut buffer = inputs[rank][..whole].to_vec();
        does(comm, way, |comm| comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum).map(drop));
        assert_same(&buffer[own.clone()], &expected[own.clone()], &format!("in place {way:?}"));
        let in_place = allocated(comm, &inputs[rank][..whole]);
        buffer.clear();
        does(comm, way, |comm| {
            buffer = comm.start_reduce_scatter_in_place(in_place, ReduceOp::Sum).wait()?.into_vec();
            Ok(())
        });
        assert_same(&buffer[own.clone()], &expected[own.clone()], &format!("allocated in place {way:?}"));
        let mut buffer = inputs[rank][..whole].to_vec();
        does(comm, way, |comm| match rank % 2 {
            0 => comm.reduce_scatter(&inputs[rank][..whole], &mut buffer[own.clone()], ReduceOp::Sum),
            _ => comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum).map(drop),
        });
        assert_same(&buffer[own.clone()], &expected[own.clone()], &format!("some in place {way:?}"));
    }
}

fn others(comm: &mut Communicator, inputs: &[Vec<f32>], expected: &[f32]) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (root, part) = (world_size - 1, expected.len() / world_size);
    let whole = part * world_size;
    let own = rank * part..(rank + 1) * part;
    for way in ways(Operation::Reduce) {
        let mut buffer = inputs[rank].clone();
        if does(comm, way, |comm| comm.reduce(&mut buffer, ReduceOp::Sum, root)) && rank == root {
            assert_same(&buffer, expected, &format!("reduce {way:?}"));
        }
    }
    for way in ways(Operation::Broadcast) {
        let mut buffer = inputs[rank].clone();
        does(comm, way, |comm| comm.broadcast(&mut buffer, root));
        assert_same(&buffer, &inputs[root], &format!("broadcast {way:?}"));
    }
    for way in ways(Operation::AllGather) {
        let mut output = vec![0.0; whole];
        does(comm, way, |comm| comm.all_gather(&inputs[rank][own.clone()], &mut output));
        let gathered: Vec<f32> =
            (0..world_size).flat_map(|from| inputs[from][from * part..(from + 1) * part].to_vec()).collect();
        assert_same(&output, &gathered, &format!("all_gather {way:?}"));
        let input = allocated(comm, &inputs[rank][own.clone()]);
        output.fill(0.0);
        does(comm, way, |comm| comm.all_gather_buffer(&input, &mut output));
        assert_same(&output, &gathered, &format!("allocated all_gather {way:?}"));
        // Other ranks cannot distinguish a part in place from a part in another buffer.
        let mut buffer = inputs[rank][..whole].to_vec();
        does(comm, way, |comm| match rank % 2 {
            0 => comm.all_gather(&inputs[rank][own.clone()], &mut buffer),
            _ => comm.all_gather_in_place(&mut buffer),
        });
        assert_same(&buffer, &gathered, &format!("all_gather with some in place {way:?}"));
    }
    for way in ways(Operation::AllToAll) {
        let mut output = vec![0.0; whole];
        does(comm, way, |comm| comm.all_to_all(&inputs[rank][..whole], &mut output));
        let dealt: Vec<f32> = inputs.iter().flat_map(|input| input[own.clone()].to_vec()).collect();
        assert_same(&output, &dealt, &format!("all_to_all {way:?}"));
        let input = allocated(comm, &inputs[rank][..whole]);
        output.fill(0.0);
        does(comm, way, |comm| comm.all_to_all_buffer(&input, &mut output));
        assert_same(&output, &dealt, &format!("allocated all_to_all {way:?}"));
    }
    for way in ways(Operation::Barrier) {
        does(comm, way, Communicator::barrier);
    }
}

fn check(network: Network, world_size: usize, lengths: &'static [usize]) {
    worlds::run(network, world_size, move |mut comm| {
        for &len in lengths {
            let inputs = inputs::<f32>(world_size, len);
            let expected = oracle::all_reduce(&inputs, Reduction::Sum);
            all_reduces(&mut comm, &inputs, &expected);
            reduce_scatters(&mut comm, &inputs, &expected);
            others(&mut comm, &inputs, &expected);
        }
    });
}

#[rstest]
fn every_direct_algorithm_has_the_bits_of_the_oracle(#[values(2, 3, 4)] world_size: usize) {
    Network::SHARING.iter().for_each(|&network| check(network, world_size, &LENGTHS));
}

#[rstest]
fn the_bits_do_not_depend_on_the_order_of_arrival(#[values(2, 3, 5, 8)] world_size: usize) {
    (0..20).for_each(|seed| check(Network::SharedMemory(seed), world_size, &[1, 12, 1000]));
}

#[rstest]
fn more_ranks_than_are_summed_up_at_once_have_the_bits_of_the_oracle(#[values(8, 9)] world_size: usize) {
    Network::SHARING.iter().for_each(|&network| check(network, world_size, &[20_001]));
}

/// Checks that every algorithm in shared memory gives the bits of the message algorithms.
fn have_the_bits_of_messages<T: Element + Number>(comm: &mut Communicator, op: ReduceOp) {
    let input: Vec<T> = oracle::sample(3, comm.rank(), 30_000);
    let mut by_messages = input.clone();
    let binomial = &dist_algos::binomial::ALL_REDUCE;
    comm.with_algorithm(binomial).all_reduce(&mut by_messages, op).unwrap();
    for way in direct(Operation::AllReduce) {
        let mut allocated = comm.alloc(input.len()).unwrap();
        allocated.copy_from_slice(&input);
        comm.with_algorithm(way).all_reduce_buffer(&mut allocated, op).unwrap();
        assert_same(&allocated, &by_messages, &format!("{op} {way}"));
    }
}

#[rstest]
fn reductions_in_shared_memory_give_the_bits_of_messages(#[values(2, 3, 8)] world_size: usize) {
    let operations = [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::PreMulSum(0.5),
        ReduceOp::WeightedMean(2.0),
        ReduceOp::Min,
        ReduceOp::Product,
    ];
    let program = move |mut comm: Communicator| {
        for op in operations {
            have_the_bits_of_messages::<f32>(&mut comm, op);
            if op.supports(DType::ComplexF64) {
                have_the_bits_of_messages::<Complex<f32>>(&mut comm, op);
                have_the_bits_of_messages::<Complex<f64>>(&mut comm, op);
            }
            have_the_bits_of_messages::<f16>(&mut comm, op);
            have_the_bits_of_messages::<bf16>(&mut comm, op);
        }
    };
    Network::SHARING.iter().for_each(|&network| drop(worlds::run(network, world_size, program)));
}

#[test]
fn means_and_factors_are_applied_once_by_the_rank_that_computes_the_sum() {
    for op in [ReduceOp::Mean, ReduceOp::PreMulSum(0.5), ReduceOp::WeightedMean(2.0)] {
        let means = move |mut comm: Communicator| {
            let input: Vec<f32> = oracle::sample(3, comm.rank(), 30_000);
            let mut by_messages = input.clone();
            let binomial = &dist_algos::binomial::ALL_REDUCE;
            comm.with_algorithm(binomial).all_reduce(&mut by_messages, op).unwrap();
            for way in direct(Operation::AllReduce) {
                let mut buffer = Buffer::from(input.clone());
                comm.with_algorithm(way).all_reduce_buffer(&mut buffer, op).unwrap();
                assert_same(&buffer, &by_messages, &format!("{op} {way}"));
            }
            let mut part = vec![0.0; 10_000];
            comm.reduce_scatter(&input, &mut part, op).unwrap();
            let rank = comm.rank();
            assert_same(&part, &by_messages[rank * 10_000..][..10_000], &format!("reduce_scatter {op}"));
        };
        Network::SHARING.iter().for_each(|&network| drop(worlds::run(network, 3, means)));
    }
}

#[test]
fn ranks_that_share_memory_choose_direct_algorithms_from_their_first_operation_on() {
    let names = |mut comm: Communicator| {
        let name = |comm: &Communicator, ownership| {
            let chosen = comm.algorithm_on(Operation::AllReduce, 1 << 20, ownership);
            chosen.unwrap().unwrap().name()
        };
        let before = name(&comm, Ownership::Allocated);
        comm.barrier().unwrap();
        [before, name(&comm, Ownership::Borrowed), name(&comm, Ownership::Allocated)]
    };
    for &network in Network::SHARING {
        let names = worlds::run(network, 2, names);
        let [before, borrowed, allocated] = names[0];
        assert!(!before.starts_with("direct/"), "{before}");
        assert_eq!([borrowed, allocated], ["direct/staged", "direct/write_to_all"]);
        assert_eq!(names[0], names[1]);
    }
}

/// An allocation on some ranks only is reported, if it makes a difference.
#[test]
fn an_allocation_on_some_ranks_only_is_reported() {
    let len = (1 << 20) / size_of::<f32>();
    let errors = move |mut comm: Communicator| {
        let chosen = |comm: &Communicator, operation, ownership| {
            comm.algorithm_on(operation, 1 << 20, ownership).unwrap().unwrap().name()
        };
        // Memory that is not allocated goes through slots on any processor.
        comm.set_crossovers("read_ordinary=1G".parse().unwrap());
        comm.barrier().unwrap();
        for operation in [Operation::ReduceScatter, Operation::AllToAll, Operation::AllGather] {
            let names = [Ownership::Borrowed, Ownership::Allocated].map(|it| chosen(&comm, operation, it));
            assert_eq!(names, ["direct/one_shot", "direct/read_from_all"], "{operation}");
        }
        let input = match comm.rank() {
            0 => comm.alloc(len).unwrap(),
            _ => vec![0.0_f32; len].into(),
        };
        let mut output = vec![0.0; len / 2];
        comm.reduce_scatter_buffer(&input, &mut output, ReduceOp::Sum).unwrap_err().to_string()
    };
    for &network in Network::SHARING {
        let errors = worlds::run(network, 2, errors);
        assert!(errors.iter().all(|error| error.contains("direct/read_from_all")), "{errors:?}");
    }
}

#[cfg(feature = "tcp")]
#[test]
fn a_direct_algorithm_is_refused_without_shared_memory() {
    let refused = worlds::run(Network::Tcp, 2, |mut comm| {
        let direct = Operation::AllReduce.algorithm("direct/one_shot");
        let error =
            comm.with_algorithm(direct.unwrap()).all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
        let mut values = [1.0_f32];
        comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        let chosen = comm.with_algorithm(direct.unwrap()).algorithm(Operation::AllReduce, 4);
        assert!(matches!(chosen, Err(Error::NotShared { .. })), "{chosen:?}");
        (matches!(error, Error::NotShared { .. }), values)
    });
    assert_eq!(refused, [(true, [2.0]); 2]);
}

#[test]
fn ranks_that_force_different_algorithms_get_an_error() {
    let errors = |mut comm: Communicator| {
        let forms: Vec<Algorithm> = direct(Operation::AllReduce).collect();
        let mut comm = comm.with_algorithm(forms[comm.rank()]);
        comm.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum).unwrap_err().to_string()
    };
    for &network in Network::SHARING {
        let errors = worlds::run(network, 2, errors);
        assert!(errors.iter().all(|error| error.contains("direct/")), "{errors:?}");
    }
}

/// Data that fits into one block of a forced algorithm is divided into several blocks by the library's choice, on
/// all ranks.
#[test]
fn a_rank_that_forces_the_algorithm_that_the_others_choose_is_in_their_call() {
    let len = (256 << 10) / size_of::<f32>();
    for &network in Network::SHARING {
        let received = worlds::run(network, 3, move |mut comm| {
            let mut buffer = vec![comm.rank() as f32; len];
            let way =
                ways(Operation::Broadcast).find(|way| way.is_some_and(|way| way.name() == "direct/one_shot"));
            let asked = if comm.rank() == 0 { way.flatten() } else { None };
            assert!(does(&mut comm, asked, |comm| comm.broadcast(&mut buffer, 2)));
            buffer
        });
        assert_eq!(received, vec![vec![2.0; len]; 3], "over {network:?}");
    }
}
