//! The runner does what the schedules say: results are the oracle's, bytes on the wire are the verifier's.

mod link;

use std::fmt::Debug;
use std::time::Duration;

use dist_algos::verify::{self, Report};
use dist_algos::{
    AllGather, AllReduce, Barrier, Broadcast, Chunks, Error, Order, Partition, Reduce, ReduceScatter,
    RingTransport, RunError, Scratch, Step, run,
};
use dist_testkit::oracle::{self, Number, Reduction};
use dist_transport::{Deadline, Rank, Runtime};
use rstest::rstest;

use link::Link;

/// One rank's part of a test: a link, a buffer, and how to run steps on them.
struct Bench<'a, N> {
    link: &'a mut Link,
    buffer: Vec<N>,
    deadline: Deadline,
}

impl<N: Number + bytemuck::Pod> Bench<'_, N> {
    fn rank(&self) -> Rank {
        RingTransport::rank(self.link)
    }

    fn run(&mut self, steps: impl IntoIterator<Item = Step>, chunks: usize, scratch: &mut Scratch) {
        let partition = partition::<N>(self.buffer.len(), chunks);
        let bytes = bytemuck::cast_slice_mut(&mut self.buffer);
        run(self.link, steps, bytes, &partition, &mut sum::<N>, scratch, self.deadline).expect("it runs");
    }
}

/// Sums on bytes, as a schedule wants them.
fn sum<N: Number + bytemuck::Pod>(into: &mut [u8], from: &[u8]) {
    let (into, from) = (bytemuck::cast_slice_mut::<_, N>(into), bytemuck::cast_slice::<_, N>(from));
    for (into, from) in into.iter_mut().zip(from) {
        *into = into.sum(*from);
    }
}

fn partition<N>(len: usize, chunks: usize) -> Partition {
    Partition::new(len, size_of::<N>(), chunks.max(1)).expect("the numbers' size divides 64")
}

/// Runs `work` on every rank and gives each rank's buffer; compares what the links counted with the report.
#[track_caller]
fn check_ranks<N: Number + bytemuck::Pod + Send + Sync>(
    inputs: &[Vec<N>],
    report: &Report,
    chunks: usize,
    work: impl Fn(&mut Bench<'_, N>) + Send + Sync + Clone + 'static,
) -> Vec<Vec<N>> {
    let runtime = Runtime::system();
    let deadline = runtime.deadline(Duration::from_secs(20));
    let links = link::network(&runtime, inputs.len());
    let tasks: Vec<_> = links
        .into_iter()
        .zip(inputs)
        .map(|(mut link, input)| {
            let (work, buffer) = (work.clone(), input.clone());
            let task = move || {
                let mut bench = Bench { link: &mut link, buffer, deadline };
                work(&mut bench);
                (bench.buffer, link.traffic())
            };
            runtime.spawn("rank", task).expect("a thread")
        })
        .collect();
    let partition = partition::<N>(inputs[0].len(), chunks);
    tasks
        .into_iter()
        .enumerate()
        .map(|(rank, task)| {
            let (buffer, traffic) = task.join().expect("the rank does not panic");
            assert_eq!(traffic, report.traffic(rank, &partition), "traffic of rank {rank}");
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

/// Lengths in elements that have been trouble before.
fn lengths(world_size: usize) -> [usize; 6] {
    [0, 1, world_size - 1, world_size, world_size + 1, 1009]
}

#[track_caller]
fn check_all_reduce<N: Number + bytemuck::Pod + Send + Sync>(algorithm: AllReduce, world_size: usize) {
    let (report, chunks) = (verify::all_reduce(algorithm, world_size), algorithm.chunks(world_size));
    let report = report.expect("it is proven");
    for len in lengths(world_size) {
        let inputs = inputs::<N>(world_size, len);
        let buffers = check_ranks(&inputs, &report, chunks, move |bench| {
            let phases = algorithm.phases(bench.rank());
            let scratch = &mut Scratch::new();
            bench.run(phases.reduce, chunks, scratch);
            bench.run(phases.gather, chunks, scratch);
        });
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        for (rank, buffer) in buffers.iter().enumerate() {
            assert_same(&format!("{algorithm}, {len} elements, rank {rank}"), buffer, &expected);
        }
    }
}

#[rstest]
fn all_reduce_is_the_oracles_to_the_last_bit(#[values(1, 2, 3, 4, 5, 6, 7, 8, 9)] world_size: usize) {
    for &algorithm in AllReduce::ALL {
        check_all_reduce::<u64>(algorithm, world_size);
        if algorithm.order(world_size) == Order::Canonical {
            check_all_reduce::<f32>(algorithm, world_size);
            check_all_reduce::<half::f16>(algorithm, world_size);
        }
    }
}

#[rstest]
fn reduce_scatter_is_the_oracles_to_the_last_bit(#[values(1, 2, 3, 4, 5, 7, 8)] world_size: usize) {
    for &algorithm in ReduceScatter::ALL {
        if !algorithm.supports(world_size) || algorithm.order(world_size) < Order::Canonical {
            continue;
        }
        let report = verify::reduce_scatter(algorithm, world_size).unwrap();
        for len in lengths(world_size) {
            let inputs = inputs::<f32>(world_size, len);
            let buffers = check_ranks(&inputs, &report, world_size, move |bench| {
                let schedule = algorithm.schedule(bench.rank()).expect("it is supported");
                bench.run(schedule, world_size, &mut Scratch::new());
            });
            let (expected, partition) =
                (oracle::all_reduce(&inputs, Reduction::Sum), partition::<u8>(len, world_size));
            for (rank, buffer) in buffers.iter().enumerate() {
                let own = partition.range(rank);
                assert_same(
                    &format!("{algorithm}, {len} elements, rank {rank}"),
                    &buffer[own.clone()],
                    &expected[own],
                );
            }
        }
    }
}

#[rstest]
fn all_gather_brings_every_chunk_to_every_rank(#[values(1, 2, 3, 4, 5, 8)] world_size: usize) {
    for &algorithm in AllGather::ALL {
        if !algorithm.supports(world_size) {
            continue;
        }
        let report = verify::all_gather(algorithm, world_size).unwrap();
        for len in lengths(world_size) {
            let whole: Vec<u64> = oracle::sample(3, 0, len);
            let partition = partition::<u8>(len, world_size);
            let inputs: Vec<Vec<u64>> = (0..world_size)
                .map(|rank| {
                    let own = partition.range(rank);
                    (0..len).map(|index| if own.contains(&index) { whole[index] } else { 0 }).collect()
                })
                .collect();
            let buffers = check_ranks(&inputs, &report, world_size, move |bench| {
                let schedule = algorithm.schedule(bench.rank()).expect("it is supported");
                bench.run(schedule, world_size, &mut Scratch::new());
            });
            for buffer in buffers {
                assert_same(&format!("{algorithm}, {len} elements"), &buffer, &whole);
            }
        }
    }
}

#[rstest]
fn broadcast_and_reduce_work_with_every_root(#[values(1, 2, 3, 5, 6, 8)] world_size: usize) {
    for root in 0..world_size {
        let inputs = inputs::<f32>(world_size, 13);
        for &algorithm in Broadcast::ALL {
            let (report, chunks) =
                (verify::broadcast(algorithm, world_size, root), algorithm.chunks(world_size));
            let buffers = check_ranks(&inputs, &report.unwrap(), chunks, move |bench| {
                bench.run(algorithm.schedule(bench.rank(), root), chunks, &mut Scratch::new());
            });
            for buffer in buffers {
                assert_same(&format!("{algorithm} from {root}"), &buffer, &inputs[root]);
            }
        }
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        for &algorithm in Reduce::ALL {
            let (report, chunks) =
                (verify::reduce(algorithm, world_size, root), algorithm.chunks(world_size));
            let buffers = check_ranks(&inputs, &report.unwrap(), chunks, move |bench| {
                bench.run(algorithm.schedule(bench.rank(), root), chunks, &mut Scratch::new());
            });
            assert_same(&format!("{algorithm} to {root}"), &buffers[root], &expected);
        }
    }
}

#[rstest]
fn barriers_send_messages_of_no_bytes(#[values(1, 2, 3, 8)] world_size: usize) {
    for &algorithm in Barrier::ALL {
        let report = verify::barrier(algorithm, world_size).unwrap();
        check_ranks(&inputs::<u64>(world_size, 0), &report, 1, move |bench| {
            bench.run(algorithm.schedule(bench.rank()), 1, &mut Scratch::new());
        });
    }
}

#[test]
fn scratch_is_as_large_as_the_slots_and_serves_again() {
    let report = verify::reduce_scatter(ReduceScatter::Pairwise, 7).unwrap();
    let report_slots = report.slots_max;
    check_ranks(&inputs::<u64>(7, 700), &report, 7, move |bench| {
        let mut scratch = Scratch::new();
        let mut reduce_scatter = |bench: &mut Bench<'_, u64>| {
            let schedule = ReduceScatter::Pairwise.schedule(bench.rank()).expect("any world");
            bench.run(schedule, 7, &mut scratch);
            scratch.capacity_bytes()
        };
        let slot_bytes = 832; // 100 elements of 8 bytes, in whole lines of 64
        let grown = reduce_scatter(bench);
        assert!(grown <= report_slots * slot_bytes, "{grown} bytes for {report_slots} slots");
        bench.link.forget_traffic();
        bench.buffer.fill(1);
        assert_eq!(reduce_scatter(bench), grown);
        let own = bench.rank().index() * 100;
        assert!(bench.buffer[own..own + 100].iter().all(|&sum| sum == 7));
    });
}

#[test]
fn a_ring_adds_in_another_order_than_the_tree() {
    let report = verify::all_reduce(AllReduce::Ring, 5).unwrap();
    let inputs = inputs::<f32>(5, 1000);
    let buffers = check_ranks(&inputs, &report, 5, move |bench| {
        let phases = AllReduce::Ring.phases(bench.rank());
        bench.run(phases.reduce.chain(phases.gather), 5, &mut Scratch::new());
    });
    let canonical = oracle::all_reduce(&inputs, Reduction::Sum);
    let same = |left: &[f32], right: &[f32]| left.iter().zip(right).all(|(left, right)| left.same(*right));
    assert!(!same(&buffers[0], &canonical));
    assert!(buffers.iter().all(|buffer| same(buffer, &buffers[0])), "ranks agree all the same");
}

/// A step that the runner refuses before it touches the link.
#[track_caller]
fn check_refused(step: Step, expected: Error) {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 3).swap_remove(0);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u8>(4, 4);
    let result =
        run(&mut link, [step], &mut [0; 4], &partition, &mut sum::<u64>, &mut Scratch::new(), deadline);
    assert!(matches!(&result, Err(RunError::Schedule(error)) if *error == expected), "{result:?}");
}

#[test]
fn steps_that_make_no_sense_are_refused() {
    let far = Chunks::range(3, 2);
    check_refused(Step::send(3, Chunks::NONE), Error::NoPeer { rank: 0, step: 0, peer: 3 });
    check_refused(Step::send(0, Chunks::NONE), Error::NoPeer { rank: 0, step: 0, peer: 0 });
    check_refused(Step::send(1, far), Error::NoChunk { rank: 0, step: 0, chunks: far, parts: 4 });
    let slot = usize::MAX;
    let combine = Step::Combine { chunk: 0, from: slot, into: dist_algos::Place::Buffer };
    check_refused(combine, Error::BadSlot { rank: 0, step: 0, slot });
}

#[test]
fn a_buffer_that_is_not_the_partitions_is_refused() {
    let runtime = Runtime::system();
    let mut link = link::network(&runtime, 1).swap_remove(0);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u64>(4, 1);
    let result = run(&mut link, [], &mut [0; 31], &partition, &mut sum::<u64>, &mut Scratch::new(), deadline);
    let expected = Error::BufferLength { expected: 32, got: 31 };
    assert!(matches!(result, Err(RunError::Schedule(error)) if error == expected));
}

#[test]
fn a_failing_transport_names_its_step() {
    let runtime = Runtime::system();
    let mut links = link::network(&runtime, 2);
    let (mut link, peer) = (links.remove(0), links.remove(0));
    drop(peer);
    let deadline = runtime.deadline(Duration::from_secs(1));
    let partition = partition::<u64>(2, 2);
    let steps = AllReduce::Ring.phases(RingTransport::rank(&link)).reduce;
    let result =
        run(&mut link, steps, &mut [0; 16], &partition, &mut sum::<u64>, &mut Scratch::new(), deadline);
    assert!(matches!(result, Err(RunError::Transport { step: 0, .. })), "{result:?}");
}
