//! Reductions of elements whose size does not divide 64, so that pieces of messages end inside of them.

use dist_algos::{
    ALGORITHMS, CollectiveKind, Memory, MessageAlgorithm, Partition, RingTransport, Scratch, run,
};
use dist_transport::Rank;
use rstest::rstest;

use crate::network::Network;

/// An element type that consists of several numbers.
#[derive(Clone, Copy, Debug)]
struct Elements {
    len: usize,
    /// The numbers of one element.
    numbers: usize,
}

impl Elements {
    fn contribution(self, rank: usize) -> Vec<u64> {
        (0..self.len * self.numbers).map(|index| (rank + 1) as u64 * 1000 + index as u64).collect()
    }

    /// Adds slices that must consist of whole elements.
    fn add(self, into: &mut [u8], from: &[u8]) {
        assert!(into.len().is_multiple_of(self.numbers * 8), "{} bytes for {self:?}", into.len());
        let (into, from) = (bytemuck::cast_slice_mut::<_, u64>(into), bytemuck::cast_slice::<_, u64>(from));
        into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
    }

    /// Returns the expected contents of a rank, and the range of bytes of its buffer that holds them.
    fn expected(
        self,
        algorithm: &MessageAlgorithm,
        rank: Rank,
        root: usize,
    ) -> (Vec<u8>, std::ops::Range<usize>) {
        let (own, all) = (rank.index(), rank.world_size());
        let whole = 0..self.len * self.numbers * 8;
        let (contributors, result) = match algorithm.collective {
            CollectiveKind::Scan => (own + 1, whole),
            CollectiveKind::ExclusiveScan => (own, if own == 0 { 0..0 } else { whole }),
            CollectiveKind::Reduce => (all, if own == root { whole } else { 0..0 }),
            CollectiveKind::ReduceScatter => (all, self.partition(algorithm, all).range(own)),
            _ => (all, whole),
        };
        let mut sum = vec![0_u64; self.len * self.numbers];
        for contributor in 0..contributors {
            let from = self.contribution(contributor);
            self.add(bytemuck::cast_slice_mut(&mut sum), bytemuck::cast_slice(&from));
        }
        (bytemuck::cast_slice(&sum)[result.clone()].to_vec(), result)
    }

    fn partition(self, algorithm: &MessageAlgorithm, world_size: usize) -> Partition<'static> {
        Partition::new(self.len, self.numbers * 8, algorithm.chunks(world_size)).expect("elements have bytes")
    }

    /// Checks every algorithm that reduces.
    fn check(self, network: Network, world_size: usize) {
        let root = self.len % world_size;
        for algorithm in ALGORITHMS.messages().filter(|algorithm| algorithm.collective.reduces()) {
            let ranks = network.run(world_size, move |end, deadline| {
                let rank = RingTransport::rank(end);
                let mut buffer = self.contribution(rank.index());
                let partition = self.partition(algorithm, world_size);
                let memory = Memory::new(bytemuck::cast_slice_mut(&mut buffer), partition);
                let (reduce, scratch) =
                    (&mut |into: &mut [u8], from: &[u8]| self.add(into, from), &mut Scratch::new());
                run(end, algorithm.steps(rank, root), memory, reduce, scratch, &deadline.into())
                    .expect("it runs");
                (rank, buffer)
            });
            for (rank, buffer) in ranks {
                let (expected, result) = self.expected(algorithm, rank, root);
                let found = &bytemuck::cast_slice::<_, u8>(&buffer)[result];
                assert_eq!(found, expected, "{algorithm:?}, {self:?}, {rank}");
            }
        }
    }
}

#[rstest]
fn elements_that_do_not_divide_a_cache_line_are_reduced_whole(
    #[values(Network::Mailboxes, Network::Simulated { seed: 5 })] network: Network,
    #[values(1, 2, 3, 5, 8)] world_size: usize,
) {
    for (len, numbers) in [(0, 3), (1, 3), (world_size + 1, 3), (301, 3), (40, 21)] {
        Elements { len, numbers }.check(network, world_size);
    }
}
