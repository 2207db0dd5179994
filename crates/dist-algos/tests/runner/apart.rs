//! Operations with separate input and output, with chunks of any sizes; and scans.

use dist_algos::verify::prove;
use dist_algos::{
    Chunks, CollectiveKind, Memory, MessageAlgorithm, Partition, RingTransport, Scratch, Step, all_to_all,
    run, scan,
};
use dist_testkit::oracle::{self, Reduction};
use dist_transport::{Deadline, Rank, Traffic};
use rstest::rstest;

use crate::network::{End, Network};
use crate::{of, sum};

/// A buffer of elements and their boundaries.
#[derive(Clone, Debug, PartialEq)]
struct Boundaries {
    elements: Vec<u64>,
    borders: Vec<usize>,
}

impl Boundaries {
    fn new(chunks: impl IntoIterator<Item = Vec<u64>>) -> Self {
        let mut partition = Self { elements: Vec::new(), borders: vec![0] };
        for chunk in chunks {
            partition.elements.extend(chunk);
            partition.borders.push(partition.elements.len());
        }
        partition
    }

    fn partition(&self) -> Partition<'_> {
        Partition::at(&self.borders, 8).expect("borders ascend")
    }

    fn chunk(&self, chunk: usize) -> &[u64] {
        &self.elements[self.borders[chunk]..self.borders[chunk + 1]]
    }
}

/// The number of elements of a message.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    Even(usize),
    /// A different number for each pair of ranks, and none for some.
    Uneven,
}

impl Sizes {
    /// Returns the message from one rank to another.
    fn message(self, from: usize, to: usize) -> Vec<u64> {
        let len = match self {
            Self::Even(len) => len,
            Self::Uneven => (from * 5 + to * 3) % 7 * 40,
        };
        (0..len).map(|index| (from * 1_000_000 + to * 10_000 + index) as u64).collect()
    }
}

fn run_on(
    end: &mut End,
    steps: impl IntoIterator<Item = Step>,
    buffer: &mut [u64],
    partition: Partition<'_>,
    input: Option<(&[u64], Partition<'_>)>,
    deadline: Deadline,
) -> Traffic {
    let input = input.map(|(elements, partition)| (bytemuck::cast_slice(elements), partition));
    let memory = Memory { buffer: bytemuck::cast_slice_mut(buffer), partition, input };
    run(end, steps, memory, &mut sum::<u64>, &mut Scratch::new(), &deadline.into()).expect("it runs");
    end.traffic()
}

#[rstest]
fn all_to_all_of_any_sizes_brings_every_message_to_its_rank(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 7, 8, 11)] world_size: usize,
    #[values(Sizes::Even(0), Sizes::Even(33), Sizes::Uneven)] sizes: Sizes,
) {
    for algorithm in [&all_to_all::WINDOWED, &all_to_all::PAIRWISE] {
        let report = prove(algorithm, world_size, 0).unwrap();
        network.run(world_size, move |end, deadline| {
            let rank = RingTransport::rank(end);
            let own = rank.index();
            let input = Boundaries::new((0..world_size).map(|to| sizes.message(own, to)));
            let expected = Boundaries::new((0..world_size).map(|from| sizes.message(from, own)));
            let mut buffer = vec![0; expected.elements.len()];
            buffer[expected.borders[own]..expected.borders[own + 1]].copy_from_slice(input.chunk(own));
            let (partition, from) = (expected.partition(), Some((&input.elements[..], input.partition())));
            let traffic = run_on(end, algorithm.steps(rank, 0), &mut buffer, partition, from, deadline);
            assert_eq!(buffer, expected.elements, "{algorithm:?}, {rank}");
            assert_eq!(traffic, report.traffic(own, &partition, Some(&input.partition())));
        });
    }
}

#[rstest]
fn bruck_replaces_chunks_for_others_by_chunks_from_others(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 7, 8, 11)] world_size: usize,
    #[values(0, 1, 33)] len: usize,
) {
    let (algorithm, sizes) = (&all_to_all::BRUCK, Sizes::Even(len));
    let report = prove(algorithm, world_size, 0).unwrap();
    network.run(world_size, move |end, deadline| {
        let rank = RingTransport::rank(end);
        let before = |chunk| sizes.message(rank.index(), rank.plus(chunk).index());
        let after = |chunk| sizes.message(rank.minus(chunk).index(), rank.index());
        let mut work = Boundaries::new((0..world_size).map(before));
        let partition = Partition::new(world_size * len, 8, world_size).unwrap();
        let traffic = run_on(end, algorithm.steps(rank, 0), &mut work.elements, partition, None, deadline);
        assert_eq!(work, Boundaries::new((0..world_size).map(after)));
        assert_eq!(traffic, report.traffic(rank.index(), &partition, None));
    });
}

/// Returns the part of a buffer that a rank holds, among all chunks.
fn among<'a>(partition: &'a Boundaries, held: Chunks, world_size: usize) -> Partition<'a> {
    match held.is_empty() {
        true => Partition::new(0, 8, world_size).expect("a world has a rank"),
        false => partition.partition().among(held.first(), world_size).expect("it holds some"),
    }
}

#[rstest]
fn gather_and_scatter_work_with_every_root_and_any_sizes(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 5, 6, 8)] world_size: usize,
    #[values(Sizes::Even(0), Sizes::Even(33), Sizes::Uneven)] sizes: Sizes,
) {
    for root in 0..world_size {
        for algorithm in of(CollectiveKind::Gather) {
            let report = prove(algorithm, world_size, root).unwrap();
            network.run(world_size, move |end, deadline| {
                let rank = RingTransport::rank(end);
                let held = algorithm.held(rank, root);
                let is_own = |from| from == rank.index();
                let expected = Boundaries::new(held.indices().map(|from| sizes.message(from, root)));
                let mut buffer =
                    Boundaries::new(held.indices().map(|from| match sizes.message(from, root) {
                        message if is_own(from) => message,
                        message => vec![0; message.len()],
                    }));
                let input = Boundaries::new([sizes.message(rank.index(), root)]);
                let (partition, from) = (among(&expected, held, world_size), among_one(&input, rank));
                let schedule = algorithm.steps(rank, root);
                let own = Some((&input.elements[..], from));
                let traffic = run_on(end, schedule, &mut buffer.elements, partition, own, deadline);
                if rank.index() == root {
                    assert_eq!(buffer, expected, "{algorithm:?} to {root}");
                }
                assert_eq!(traffic, report.traffic(rank.index(), &partition, Some(&from)));
            });
        }
        for algorithm in of(CollectiveKind::Scatter) {
            let report = prove(algorithm, world_size, root).unwrap();
            network.run(world_size, move |end, deadline| {
                let rank = RingTransport::rank(end);
                let held = algorithm.held(rank, root);
                let expected = Boundaries::new(held.indices().map(|to| sizes.message(root, to)));
                let whole = Boundaries::new((0..world_size).map(|to| sizes.message(root, to)));
                let mut buffer = vec![0; expected.elements.len()];
                let partition = among(&expected, held, world_size);
                let input = (rank.index() == root).then(|| (&whole.elements[..], whole.partition()));
                let schedule = algorithm.steps(rank, root);
                let traffic = run_on(end, schedule, &mut buffer, partition, input, deadline);
                assert_eq!(buffer, expected.elements, "{algorithm:?} from {root}, {rank}");
                assert_eq!(
                    traffic,
                    report.traffic(rank.index(), &partition, input.map(|(_, partition)| partition).as_ref())
                );
            });
        }
    }
}

/// Returns the only chunk of an input as the chunk of a rank.
fn among_one<'a>(input: &'a Boundaries, rank: Rank) -> Partition<'a> {
    among(input, Chunks::one(rank.index()), rank.world_size())
}

#[rstest]
fn scans_are_the_oracles_sums_of_the_first_ranks(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 13)] world_size: usize,
    #[values(0, 1, 100)] len: usize,
    #[values(&scan::SCAN, &scan::EXCLUSIVE_SCAN)] algorithm: &'static MessageAlgorithm,
) {
    let report = prove(algorithm, world_size, 0).unwrap();
    let inputs: Vec<Vec<f32>> = (0..world_size).map(|rank| oracle::sample(11, rank, len)).collect();
    let begin = inputs.clone();
    let ranks = network.run(world_size, move |end, deadline| {
        let rank = RingTransport::rank(end);
        let mut buffer = begin[rank.index()].clone();
        let partition = Partition::new(len, 4, 1).unwrap();
        let memory = Memory::new(bytemuck::cast_slice_mut(&mut buffer), partition);
        let schedule = algorithm.steps(rank, 0);
        run(end, schedule, memory, &mut sum::<f32>, &mut Scratch::new(), &deadline.into()).expect("it runs");
        assert_eq!(end.traffic(), report.traffic(rank.index(), &partition, None));
        buffer
    });
    for (rank, buffer) in ranks.iter().enumerate() {
        let count = if algorithm.collective == CollectiveKind::Scan { rank + 1 } else { rank };
        if count > 0 {
            crate::assert_same(
                &format!("{algorithm:?}, {rank} of {world_size}"),
                buffer,
                &oracle::all_reduce(&inputs[..count], Reduction::Sum),
            );
        }
    }
}
