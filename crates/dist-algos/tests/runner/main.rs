//! The runner executes schedules: results equal the oracle's, and bytes on the wire equal the verifier's.

mod apart;
mod elements;
mod hierarchical;
mod link;
mod network;

use std::fmt::Debug;
use std::time::Duration;

use dist_algos::verify::{Report, prove};
use dist_algos::{
    ALGORITHMS, Chunks, CollectiveKind, Error, Memory, MessageAlgorithm, Order, Partition, Reduce,
    RingTransport, RunError, Scratch, Step, ValidatedSteps, pairwise, ring, run, run_validated,
};
use dist_testkit::oracle::{self, Number, Reduction};
use dist_transport::{Deadline, Rank, Runtime};
use rstest::rstest;

use network::{End, Network};

/// One rank's part of a test: an end of a network, a buffer, and a function that runs steps on them.
struct Bench<'a, N> {
    end: &'a mut End,
    buffer: Vec<N>,
    deadline: Deadline,
}

impl<N: Number + bytemuck::Pod> Bench<'_, N> {
    fn rank(&self) -> Rank {
        RingTransport::rank(self.end)
    }

    fn run(&mut self, steps: impl IntoIterator<Item = Step>, chunks: usize, scratch: &mut Scratch) {
        let partition = partition::<N>(self.buffer.len(), chunks);
        let memory = Memory::new(bytemuck::cast_slice_mut(&mut self.buffer), partition);
        run(self.end, steps, memory, &mut sum::<N>, scratch, &self.deadline.into()).expect("it runs");
    }
}

/// Sums on bytes, as a schedule wants them.
fn sum<N: Number + bytemuck::Pod>(into: &mut [u8], from: &[u8]) {
    let (into, from) = (bytemuck::cast_slice_mut::<_, N>(into), bytemuck::cast_slice::<_, N>(from));
    for (into, from) in into.iter_mut().zip(from) {
        *into = into.sum(*from);
    }
}

/// Returns the algorithms of an operation.
fn of(collective: CollectiveKind) -> impl Iterator<Item = &'static MessageAlgorithm> {
    ALGORITHMS.messages().filter(move |algorithm| algorithm.collective == collective)
}

fn partition<N>(len: usize, chunks: usize) -> Partition<'static> {
    Partition::new(len, size_of::<N>(), chunks.max(1)).expect("numbers have bytes")
}

/// Runs `work` on every rank, returns each rank's buffer, and compares the network's counts with the report.
#[track_caller]
fn check_ranks<N: Number + bytemuck::Pod + Send + Sync>(
    network: Network,
    inputs: &[Vec<N>],
    report: &Report,
    chunks: usize,
    work: impl Fn(&mut Bench<'_, N>) + Send + Sync + 'static,
) -> Vec<Vec<N>> {
    let partition = partition::<N>(inputs[0].len(), chunks);
    let begin = inputs.to_vec();
    let program = move |end: &mut End, deadline| {
        let buffer = begin[RingTransport::rank(end).index()].clone();
        let mut bench = Bench { end, buffer, deadline };
        work(&mut bench);
        (bench.buffer, bench.end.traffic())
    };
    let ranks = network.run(inputs.len(), program).into_iter().enumerate();
    ranks
        .map(|(rank, (buffer, traffic))| {
            assert_eq!(traffic, report.traffic(rank, &partition, None), "traffic of rank {rank}");
            buffer
        })
        .collect()
}

fn inputs<N: Number>(world_size: usize, len: usize) -> Vec<Vec<N>> {
    (0..world_size).map(|rank| oracle::sample(17, rank, len)).collect()
}

#[track_caller]
fn assert_same<N: Number + Debug>(what: &str, got: &[N], expected: &[N]) {
    let same = got.len() == expected.len() && got.iter().zip(expected).all(|(got, want)| got.same(*want));
    assert!(same, "{what}: {got:?} is not {expected:?}");
}

/// Lengths in elements that have caused errors before.
fn lengths(world_size: usize) -> [usize; 6] {
    [0, 1, world_size - 1, world_size, world_size + 1, 1009]
}

#[track_caller]
fn check_all_reduce<N: Number + bytemuck::Pod + Send + Sync>(
    network: Network,
    algorithm: &'static MessageAlgorithm,
    world_size: usize,
) {
    let (report, chunks) = (prove(algorithm, world_size, 0), algorithm.chunks(world_size));
    let report = report.expect("it is proven");
    for len in lengths(world_size) {
        let inputs = inputs::<N>(world_size, len);
        let buffers = check_ranks(network, &inputs, &report, chunks, move |bench| {
            let phases = algorithm.phases(bench.rank(), 0);
            let scratch = &mut Scratch::new();
            bench.run(phases.first, chunks, scratch);
            bench.run(phases.second, chunks, scratch);
        });
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        for (rank, buffer) in buffers.iter().enumerate() {
            assert_same(&format!("{algorithm:?}, {len} elements, rank {rank}"), buffer, &expected);
        }
    }
}

#[rstest]
fn all_reduce_is_the_oracles_to_the_last_bit(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9)] world_size: usize,
) {
    for algorithm in of(CollectiveKind::AllReduce) {
        check_all_reduce::<u64>(network, algorithm, world_size);
        if algorithm.order(world_size) == Some(Order::Canonical) {
            check_all_reduce::<f32>(network, algorithm, world_size);
            check_all_reduce::<half::f16>(network, algorithm, world_size);
        }
    }
}

#[track_caller]
fn check_reduce_scatter<N: Number + bytemuck::Pod + Send + Sync>(
    network: Network,
    algorithm: &'static MessageAlgorithm,
    world_size: usize,
) {
    let report = prove(algorithm, world_size, 0).expect("it is proven");
    for len in lengths(world_size) {
        let inputs = inputs::<N>(world_size, len);
        let buffers = check_ranks(network, &inputs, &report, world_size, move |bench| {
            bench.run(algorithm.steps(bench.rank(), 0), world_size, &mut Scratch::new());
        });
        let (expected, partition) =
            (oracle::all_reduce(&inputs, Reduction::Sum), partition::<u8>(len, world_size));
        for (rank, buffer) in buffers.iter().enumerate() {
            let (own, what) = (partition.range(rank), format!("{algorithm:?}, {len} elements, rank {rank}"));
            assert_same(&what, &buffer[own.clone()], &expected[own]);
        }
    }
}

#[rstest]
fn reduce_scatter_is_the_oracles_to_the_last_bit(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8)] world_size: usize,
) {
    for algorithm in of(CollectiveKind::ReduceScatter) {
        check_reduce_scatter::<u64>(network, algorithm, world_size);
        if algorithm.order(world_size) == Some(Order::Canonical) {
            check_reduce_scatter::<f32>(network, algorithm, world_size);
        }
    }
}

#[rstest]
fn all_gather_brings_every_chunk_to_every_rank(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 8)] world_size: usize,
) {
    for algorithm in of(CollectiveKind::AllGather).filter(|algorithm| algorithm.supports(world_size)) {
        let report = prove(algorithm, world_size, 0).unwrap();
        for len in lengths(world_size) {
            let whole: Vec<u64> = oracle::sample(3, 0, len);
            let partition = partition::<u8>(len, world_size);
            let inputs: Vec<Vec<u64>> = (0..world_size)
                .map(|rank| {
                    let own = partition.range(rank);
                    (0..len).map(|index| if own.contains(&index) { whole[index] } else { 0 }).collect()
                })
                .collect();
            let buffers = check_ranks(network, &inputs, &report, world_size, move |bench| {
                bench.run(algorithm.steps(bench.rank(), 0), world_size, &mut Scratch::new());
            });
            for buffer in buffers {
                assert_same(&format!("{algorithm:?}, {len} elements"), &buffer, &whole);
            }
        }
    }
}

#[rstest]
fn broadcast_and_reduce_work_with_every_root(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 5, 6, 8)] world_size: usize,
    #[values(0, 1, 13, 331)] len: usize,
) {
    for root in 0..world_size {
        let inputs = inputs::<f32>(world_size, len);
        for algorithm in of(CollectiveKind::Broadcast) {
            let (report, chunks) = (prove(algorithm, world_size, root), algorithm.chunks(world_size));
            let buffers = check_ranks(network, &inputs, &report.unwrap(), chunks, move |bench| {
                bench.run(algorithm.steps(bench.rank(), root), chunks, &mut Scratch::new());
            });
            for buffer in buffers {
                assert_same(&format!("{algorithm:?} from {root}"), &buffer, &inputs[root]);
            }
        }
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        for algorithm in of(CollectiveKind::Reduce) {
            let (report, chunks) = (prove(algorithm, world_size, root), algorithm.chunks(world_size));
            let buffers = check_ranks(network, &inputs, &report.unwrap(), chunks, move |bench| {
                bench.run(algorithm.steps(bench.rank(), root), chunks, &mut Scratch::new());
            });
            assert_same(&format!("{algorithm:?} to {root}"), &buffers[root], &expected);
        }
    }
}

#[rstest]
fn barriers_send_messages_of_no_bytes(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 8)] world_size: usize,
) {
    for algorithm in of(CollectiveKind::Barrier) {
        let report = prove(algorithm, world_size, 0).unwrap();
        check_ranks(network, &inputs::<u64>(world_size, 0), &report, 1, move |bench| {
            bench.run(algorithm.steps(bench.rank(), 0), 1, &mut Scratch::new());
        });
    }
}

#[test]
fn scratch_is_as_large_as_the_slots_and_serves_again() {
    let slots = prove(&pairwise::REDUCE_SCATTER, 7, 0).unwrap().slots_max;
    let ranks = Network::Mailboxes.run(7, |end, deadline| {
        let rank = RingTransport::rank(end);
        let mut bench = Bench { end, buffer: vec![0_u64; 700], deadline };
        let mut scratch = Scratch::new();
        let mut capacities = [0; 2];
        for (value, capacity) in (1..).zip(&mut capacities) {
            bench.buffer.fill(value);
            bench.run(pairwise::reduce_scatter(rank), 7, &mut scratch);
            assert_eq!(bench.buffer[rank.index() * 100..][..100], [7 * value; 100]);
            *capacity = scratch.capacity_bytes();
        }
        capacities
    });
    let slot_bytes = 832; // 100 elements of 8 bytes, in whole lines of 64
    for [first, second] in ranks {
        assert!(first > 0 && first <= slots * slot_bytes, "{first} bytes for {slots} slots");
        assert_eq!(first, second);
    }
}

#[test]
fn a_ring_adds_in_another_order_than_the_tree() {
    let report = prove(&ring::ALL_REDUCE, 5, 0).unwrap();
    let inputs = inputs::<f32>(5, 1000);
    let buffers = check_ranks(Network::Mailboxes, &inputs, &report, 5, move |bench| {
        bench.run(ring::ALL_REDUCE.steps(bench.rank(), 0), 5, &mut Scratch::new());
    });
    let canonical = oracle::all_reduce(&inputs, Reduction::Sum);
    let same = |left: &[f32], right: &[f32]| left.iter().zip(right).all(|(left, right)| left.same(*right));
    assert!(!same(&buffers[0], &canonical));
    assert!(buffers.iter().all(|buffer| same(buffer, &buffers[0])), "ranks agree all the same");
}

/// Checks that a step is refused when it is validated, and by the runner before it uses the link.
#[track_caller]
fn check_refused(step: Step, expected: Error) {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 3).swap_remove(0);
    let validated = ValidatedSteps::new(RingTransport::rank(&link), vec![step], [4, 0]);
    assert_eq!(validated.err(), Some(expected.clone()));
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u8>(4, 4);
    let result = run(
        &mut link,
        [step],
        Memory::new(&mut [0; 4], partition),
        &mut sum::<u64>,
        &mut Scratch::new(),
        &deadline.into(),
    );
    assert!(matches!(&result, Err(RunError::Schedule(error)) if *error == expected), "{result:?}");
}

#[test]
fn steps_that_make_no_sense_are_refused() {
    let far = Chunks::range(3, 2);
    check_refused(Step::send(3, Chunks::NONE), Error::NoPeer { rank: 0, step: 0, peer: 3 });
    check_refused(Step::send(0, Chunks::NONE), Error::NoPeer { rank: 0, step: 0, peer: 0 });
    check_refused(Step::send(1, far), Error::NoChunk { rank: 0, step: 0, chunks: far, parts: 4 });
    let slot = usize::MAX;
    let combine = Step::Combine { chunk: 0, from: slot, into: dist_algos::ChunkLocation::Buffer };
    check_refused(combine, Error::BadSlot { rank: 0, step: 0, slot });
}

#[test]
fn steps_that_were_validated_for_other_memory_are_validated_again() {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 2).swap_remove(0);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let steps = vec![Step::send(1, Chunks::one(3))];
    let valid = ValidatedSteps::new(RingTransport::rank(&link), steps, [4, 0]).unwrap();
    let mut run_in = |chunks: usize| {
        let mut buffer = [0; 4];
        let memory = Memory::new(&mut buffer, partition::<u8>(4, chunks));
        let scratch = &mut Scratch::new();
        run_validated(
            &mut link,
            (&valid, 0..1),
            memory,
            Reduce::AnySide(&mut sum::<u64>),
            scratch,
            &deadline.into(),
        )
    };
    assert!(run_in(4).is_ok());
    let expected = Error::NoChunk { rank: 0, step: 0, chunks: Chunks::one(3), parts: 2 };
    assert!(matches!(run_in(2), Err(RunError::Schedule(error)) if error == expected));
}

#[test]
fn a_buffer_that_is_not_the_partitions_is_refused() {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 1).swap_remove(0);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u64>(4, 1);
    let result = run(
        &mut link,
        [] as [Step; 0],
        Memory::new(&mut [0; 31], partition),
        &mut sum::<u64>,
        &mut Scratch::new(),
        &deadline.into(),
    );
    let expected = Error::BufferLength { expected: 32, got: 31 };
    assert!(matches!(result, Err(RunError::Schedule(error)) if error == expected));
}

#[test]
fn an_input_that_is_not_its_partitions_or_does_not_exist_is_refused() {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 2).swap_remove(0);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u64>(2, 2);
    let mut run_with = |input: Option<&[u8]>| {
        let mut buffer = [0; 16];
        let memory = Memory { buffer: &mut buffer, partition, input: input.map(|input| (input, partition)) };
        let step = Step::Window { first: 1, last: 1 };
        run(&mut link, [step], memory, &mut sum::<u64>, &mut Scratch::new(), &deadline.into())
    };
    let expected = Error::InputLength { expected: 16, got: 15 };
    assert!(matches!(run_with(Some(&[0; 15])), Err(RunError::Schedule(error)) if error == expected));
    let expected = Error::NoChunk { rank: 0, step: 0, chunks: Chunks::all(2), parts: 0 };
    assert!(matches!(run_with(None), Err(RunError::Schedule(error)) if error == expected));
}

#[test]
fn a_failing_transport_names_its_step() {
    let runtime = Runtime::system();
    let mut links = link::network(&runtime, 2);
    let (mut link, peer) = (links.remove(0), links.remove(0));
    drop(peer);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u64>(2, 2);
    let steps = ring::reduce_scatter(RingTransport::rank(&link));
    let result = run(
        &mut link,
        steps,
        Memory::new(&mut [0; 16], partition),
        &mut sum::<u64>,
        &mut Scratch::new(),
        &deadline.into(),
    );
    assert!(matches!(result, Err(RunError::Transport { step: 0, .. })), "{result:?}");
}

#[test]
fn mailbox_links_and_simulated_transports_conform() {
    let runtime = Runtime::system();
    dist_algos::conformance::check(ALGORITHMS, &runtime, |world_size| link::network(&runtime, world_size));
    dist_algos::conformance::check(ALGORITHMS, &runtime, |world_size| {
        dist_transport::sim::network(&runtime, world_size)
    });
}
