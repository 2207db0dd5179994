//! A test suite for implementations of [`RingTransport`].
//!
//! [`check`] moves messages of all sizes, one by one and many at once, and runs every all_reduce algorithm of a table.
//! It panics at the first broken promise and names it.
#![allow(clippy::unwrap_used, reason = "a promise that is broken ends in a panic")]

use std::time::Duration;

use dist_transport::{Incoming, LazyDeadline, Outgoing, Rank, Runtime, Sink};

use crate::{
    AlgorithmTable, CollectiveKind, Memory, MessageAlgorithm, Partition, RingTransport, Scratch, run,
};

/// The world sizes to check: one rank, a pair, odd numbers and a power of two.
const WORLDS: [usize; 5] = [1, 2, 3, 5, 8];
/// The message lengths: empty, below a cache line, a cache line, and more than one piece.
const LENGTHS: [usize; 6] = [0, 1, 63, 64, 1000, 400_001];
/// The time limit of a world.
const LIMIT: Duration = Duration::from_secs(60);

/// Checks a kind of link with the all_reduce algorithms of `table`, for example
/// [`ALGORITHMS`](crate::ALGORITHMS). `connect` returns the links of a new world of this size, one per rank, in rank
/// order. Every rank runs on a thread of `runtime`, whose clock determines the deadlines.
///
/// # Panics
/// If a promise is broken.
pub fn check<L: RingTransport + Send + 'static>(
    table: AlgorithmTable<'static>,
    runtime: &Runtime,
    connect: impl Fn(usize) -> Vec<L>,
) {
    for world_size in WORLDS {
        let links = connect(world_size);
        assert_eq!(links.len(), world_size, "there is a link for each rank");
        let start = |(index, link): (usize, L)| {
            assert_eq!(Some(link.rank()), Rank::new(index, world_size), "links come in rank order");
            let mut end = RankUnderTest { link, table, runtime: runtime.clone() };
            runtime.spawn("rank", move || end.promises()).unwrap()
        };
        let tasks: Vec<_> = links.into_iter().enumerate().map(start).collect();
        for task in tasks {
            task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

struct RankUnderTest<L> {
    link: L,
    table: AlgorithmTable<'static>,
    runtime: Runtime,
}

/// Returns the bytes of a rank's message with this number and length.
fn payload(from: Rank, number: usize, len: usize) -> Vec<u8> {
    let first = from.index() * 31 + number * 17;
    (0..len).map(|index| u8::try_from((first + index * 7 + index / 256) % 256).unwrap()).collect()
}

impl<L: RingTransport> RankUnderTest<L> {
    fn promises(&mut self) {
        for (number, len) in LENGTHS.into_iter().enumerate() {
            self.ring(number, len);
            self.pieces(number, len);
            self.in_place(number, len);
        }
        self.order();
        self.all_at_once();
        for algorithm in self.table.messages().filter(|it| it.collective == CollectiveKind::AllReduce) {
            for elements in [0, 1, 7, 1000] {
                self.all_reduce(algorithm, elements);
            }
        }
    }

    fn ring(&mut self, number: usize, len: usize) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        let (sent, mut received) = (payload(rank, number, len), vec![0; len]);
        let (head, tail) = sent.split_at(len / 3);
        let send = Outgoing { to: rank.right().index(), parts: &[head, &[], tail] };
        let receive = Incoming { from: rank.left().index(), len, sink: Sink::Into(&mut received) };
        self.link.exchange(Some(send), Some(receive), due).unwrap();
        assert!(received == payload(rank.left(), number, len), "a message of {len} bytes arrives whole");
    }

    fn pieces(&mut self, number: usize, len: usize) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        let (sent, mut received) = (payload(rank, number, len), Vec::new());
        let mut take = |offset: usize, bytes: &[u8]| {
            assert_eq!(offset, received.len(), "pieces come in order");
            assert!(offset.is_multiple_of(64), "pieces begin at multiples of 64 bytes");
            assert!(bytes.as_ptr().addr().is_multiple_of(64), "pieces are aligned to 64 bytes");
            received.extend_from_slice(bytes);
        };
        let send = Outgoing { to: rank.left().index(), parts: &[&sent] };
        let receive = Incoming { from: rank.right().index(), len, sink: Sink::Each(&mut take) };
        self.link.exchange(Some(send), Some(receive), due).unwrap();
        assert!(received == payload(rank.right(), number, len), "pieces tile a message of {len} bytes");
    }

    fn in_place(&mut self, number: usize, len: usize) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        let peer = Rank::new(rank.index() ^ 1, rank.world_size()).unwrap_or(rank);
        let mut buffer = payload(rank, number, len);
        // The function is not symmetric, so it shows whose bytes these are and that they arrive once.
        let combined = |ours: u8, theirs: u8| ours.wrapping_mul(3).wrapping_add(theirs.wrapping_mul(5));
        let mut combine = |ours: &mut [u8], theirs: &[u8]| {
            assert_eq!(
                ours.len(),
                theirs.len(),
                "a range and the bytes combined into it have the same length"
            );
            ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours = combined(*ours, *theirs));
        };
        self.link.exchange_in_place(peer.index(), &mut buffer, &mut combine, due).unwrap();
        let (ours, theirs) = (payload(rank, number, len), payload(peer, number, len));
        let expected = ours.into_iter().zip(theirs).map(|(ours, theirs)| combined(ours, theirs));
        assert!(buffer.into_iter().eq(expected), "an exchange in place of {len} bytes combines each once");
    }

    /// Sends several messages from rank 0 to rank 1. A send may wait for its receiver.
    fn order(&mut self) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        for number in 0..20 {
            let len = number * 37 % 11;
            if rank.index() == 0 && rank.world_size() > 1 {
                let sent = payload(rank, number, len);
                self.link.exchange(Some(Outgoing { to: 1, parts: &[&sent] }), None, due).unwrap();
            } else if rank.index() == 1 {
                let mut received = vec![0; len];
                let receive = Incoming { from: 0, len, sink: Sink::Into(&mut received) };
                self.link.exchange(None, Some(receive), due).unwrap();
                assert_eq!(received, payload(rank.minus(1), number, len), "messages arrive in order");
            }
        }
    }

    /// Sends from every rank to every rank at once.
    fn all_at_once(&mut self) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        let len = LENGTHS[5];
        let sent = payload(rank, 1, len);
        let parts: [&[u8]; 1] = [&sent];
        let sends: Vec<_> = (0..rank.world_size()).map(|to| Outgoing { to, parts: &parts }).collect();
        let mut memory = vec![vec![0; len]; rank.world_size()];
        let receive = |(from, memory)| Incoming { from, len, sink: Sink::Into(memory) };
        let mut receives: Vec<_> =
            memory.iter_mut().enumerate().map(|(from, memory)| receive((from, &mut memory[..]))).collect();
        self.link.exchange_all(&sends, &mut receives, due).unwrap();
        for (from, memory) in Rank::all(rank.world_size()).zip(memory) {
            assert!(memory == payload(from, 1, len), "many messages at once arrive whole");
        }
    }

    fn all_reduce(&mut self, algorithm: &MessageAlgorithm, elements: usize) {
        let (rank, due) = (self.link.rank(), &LazyDeadline::from(self.runtime.deadline(LIMIT)));
        let world_size = rank.world_size();
        let mut buffer = vec![u8::try_from(rank.index() + 1).unwrap(); elements];
        let cut = Partition::new(elements, 1, algorithm.chunks(world_size)).unwrap();
        let mut add = |ours: &mut [u8], theirs: &[u8]| {
            ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours = ours.wrapping_add(*theirs));
        };
        let phases = algorithm.phases(rank, 0);
        let mut scratch = Scratch::new();
        for steps in [phases.first, phases.second] {
            let memory = Memory::new(&mut buffer, cut);
            run(&mut self.link, steps, memory, &mut add, &mut scratch, due).unwrap();
        }
        let sum = u8::try_from(world_size * (world_size + 1) / 2).unwrap();
        assert_eq!(buffer, vec![sum; elements], "all_reduce by {} sums", algorithm.name);
    }
}
