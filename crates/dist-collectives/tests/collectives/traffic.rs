//! The traffic of an operation equals the traffic of the forced schedule, as the verifier counts it, to the
//! byte.

use dist_algos::verify::{self, Report};
use dist_algos::{
    ALGORITHMS, CollectiveKind, CostModel, MessageAlgorithm, Order, Partition, Placement, barrier,
};
use dist_collectives::transport::Traffic;
use dist_collectives::tuning::{Algorithm, Hosts};
use dist_collectives::{Communicator, Error, ReduceOp, ReductionOrder};
use rstest::rstest;

use crate::worlds::{self, Network};

type Call = fn(&mut Communicator) -> Result<(), Error>;

/// Elements of the longest buffer, of 4 bytes each: no world size divides it, so chunks differ.
const LEN: usize = 1009;

/// Makes a call by each two-level algorithm of an operation that supports these hosts, and compares the traffic.
/// The buffer has this many elements.
#[track_caller]
fn check_two_levels(hosts: &'static [u64], collective: CollectiveKind, len: usize, call: Call) {
    let known = Hosts::new(hosts);
    let of_operation = ALGORITHMS.two_level().filter(|two| two.collective == collective);
    for two in of_operation.filter(|two| two.supports(&known)) {
        let root = collective.roots(known.world_size()).end - 1;
        let report = verify::two_level(two, &known, root)
            .expect("algorithms are proven for the hosts that they support");
        let call = move |comm: &mut Communicator| {
            let model = CostModel::default();
            comm.set_topology(Hosts::new(hosts), model).and_then(|()| call(&mut comm.with_algorithm(two)))
        };
        let cut = cut(len, two.chunks(&known));
        // The order does not change; the algorithm is forced after the hosts are set.
        check(hosts.len(), &barrier::RING, call, |rank| report.traffic(rank, &cut, None));
    }
}

/// Makes a call by this algorithm, and compares the traffic of each rank.
#[track_caller]
fn check(
    world_size: usize,
    algorithm: impl Into<Algorithm>,
    call: impl Fn(&mut Communicator) -> Result<(), Error> + Send + Sync + 'static,
    counted: impl Fn(usize) -> Traffic,
) {
    let algorithm = algorithm.into();
    let moved = worlds::run(Network::Simulated, world_size, move |mut comm| {
        let mut comm = comm.with_order(ReductionOrder::Any);
        call(&mut comm.with_algorithm(algorithm)).unwrap();
        comm.traffic()
    });
    for (rank, moved) in moved.into_iter().enumerate() {
        assert_eq!(moved, counted(rank), "rank {rank} of {world_size} in {algorithm:?}");
    }
}

/// Returns the algorithms that support a world, and their reports of the verifier.
fn proven(collective: CollectiveKind, n: usize, root: usize) -> Vec<(&'static MessageAlgorithm, Report)> {
    let of_operation = ALGORITHMS.messages().filter(|algorithm| algorithm.collective == collective);
    let prove = |algorithm| {
        verify::prove(algorithm, n, root).expect("algorithms are proven for the worlds that they support")
    };
    let proven: Vec<_> = of_operation
        .filter(|algorithm| algorithm.supports(n))
        .map(|algorithm| (algorithm, prove(algorithm)))
        .collect();
    assert!(!proven.is_empty(), "an algorithm serves every world");
    proven
}

fn cut(len: usize, parts: usize) -> Partition<'static> {
    Partition::new(len, 4, parts).expect("it fits")
}

/// Returns uneven counts: the square of each rank's number.
fn counts(world_size: usize) -> Vec<usize> {
    (0..world_size).map(|rank| rank * rank).collect()
}

fn borders(counts: &[usize]) -> Vec<usize> {
    let ends = counts.iter().scan(0, |end, &count| {
        *end += count;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

#[rstest]
fn reductions(#[values(1, 2, 3, 4, 5, 7, 8, 13, 16, 17)] n: usize) {
    for (algorithm, report) in proven(CollectiveKind::AllReduce, n, 0) {
        let call = |comm: &mut Communicator| comm.all_reduce(&mut [1.0_f32; LEN], ReduceOp::Sum);
        check(n, algorithm, call, |rank| report.traffic(rank, &cut(LEN, algorithm.chunks(n)), None));
    }
    let root = n / 2;
    for (algorithm, report) in proven(CollectiveKind::Reduce, n, root) {
        let call = move |comm: &mut Communicator| comm.reduce(&mut [1.0_f32; LEN], ReduceOp::Max, root);
        check(n, algorithm, call, |rank| report.traffic(rank, &cut(LEN, algorithm.chunks(n)), None));
    }
    let scans: [(CollectiveKind, Call); 2] = [
        (CollectiveKind::Scan, |comm| comm.scan(&mut [1.0_f32; LEN], ReduceOp::Sum)),
        (CollectiveKind::ExclusiveScan, |comm| comm.exclusive_scan(&mut [1.0_f32; LEN], ReduceOp::Sum)),
    ];
    for (scan, call) in scans {
        for (algorithm, report) in proven(scan, n, 0) {
            check(n, algorithm, call, |rank| report.traffic(rank, &cut(LEN, algorithm.chunks(n)), None));
        }
    }
    for (algorithm, report) in proven(CollectiveKind::ReduceScatter, n, 0) {
        let call = |comm: &mut Communicator| {
            let part = [1_i32; 10];
            comm.reduce_scatter(&part.repeat(comm.world_size()), &mut [0; 10], ReduceOp::Sum)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &cut(10 * n, n), None));
        let call = |comm: &mut Communicator| {
            let counts = counts(comm.world_size());
            let (input, mut output) = (vec![1_i32; counts.iter().sum()], vec![0; counts[comm.rank()]]);
            comm.reduce_scatter_v(&input, &counts, &mut output, ReduceOp::Sum)
        };
        let borders = borders(&counts(n));
        let uneven = Partition::at(&borders, 4).unwrap();
        check(n, algorithm, call, |rank| report.traffic(rank, &uneven, None));
    }
}

#[rstest]
fn copies(#[values(1, 2, 3, 4, 5, 7, 8, 13, 16, 17)] n: usize) {
    let (root, borders) = (n / 2, borders(&counts(n)));
    let (even, uneven) = (cut(10 * n, n), Partition::at(&borders, 4).unwrap());
    for (algorithm, report) in proven(CollectiveKind::Broadcast, n, root) {
        let call = move |comm: &mut Communicator| comm.broadcast(&mut [1.0_f32; LEN], root);
        check(n, algorithm, call, |rank| report.traffic(rank, &cut(LEN, algorithm.chunks(n)), None));
    }
    for (algorithm, report) in proven(CollectiveKind::AllGather, n, 0) {
        let call =
            |comm: &mut Communicator| comm.all_gather(&[1_u32; 10], &mut vec![0; 10 * comm.world_size()]);
        check(n, algorithm, call, |rank| report.traffic(rank, &even, None));
        let call = |comm: &mut Communicator| {
            let counts = counts(comm.world_size());
            let (input, mut output) = (vec![1_u32; counts[comm.rank()]], vec![0; counts.iter().sum()]);
            comm.all_gather_v(&input, &counts, &mut output)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &uneven, None));
    }
    for (algorithm, report) in proven(CollectiveKind::Gather, n, root) {
        let call = move |comm: &mut Communicator| {
            comm.gather(&[1_u32; 10], &mut vec![0; 10 * comm.world_size()], root)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &even, Some(&even)));
        let call = move |comm: &mut Communicator| {
            let counts = counts(comm.world_size());
            let (input, mut output) = (vec![1_u32; counts[comm.rank()]], vec![0; counts.iter().sum()]);
            comm.gather_v(&input, &counts, &mut output, root)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &uneven, Some(&uneven)));
    }
    for (algorithm, report) in proven(CollectiveKind::Scatter, n, root) {
        let call = move |comm: &mut Communicator| {
            comm.scatter(&vec![1_u32; 10 * comm.world_size()], &mut [0; 10], root)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &even, Some(&even)));
        let call = move |comm: &mut Communicator| {
            let counts = counts(comm.world_size());
            let (input, mut output) = (vec![1_u32; counts.iter().sum()], vec![0; counts[comm.rank()]]);
            comm.scatter_v(&input, &counts, &mut output, root)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &uneven, Some(&uneven)));
    }
    for (algorithm, report) in proven(CollectiveKind::Barrier, n, 0) {
        check(n, algorithm, |comm| comm.barrier(), |rank| report.traffic(rank, &cut(0, 1), None));
    }
}

/// Returns the traffic of a small all_reduce on whose value all ranks agree.
fn agreement(rank: usize, n: usize, bytes: usize) -> Traffic {
    let algorithm = suggested(CollectiveKind::AllReduce, n, bytes);
    let cut = Partition::new(1, bytes, algorithm.chunks(n)).unwrap();
    verify::prove(algorithm, n, 0).unwrap().traffic(rank, &cut, None)
}

fn suggested(collective: CollectiveKind, n: usize, bytes: usize) -> &'static MessageAlgorithm {
    let (ranks, model) = (Placement::dedicated(n), CostModel::default());
    ALGORITHMS.suggest(collective, ranks, bytes, Order::Canonical, &model).expect("there is one")
}

#[rstest]
fn all_to_all(#[values(1, 2, 3, 4, 5, 7, 8, 13, 16, 17)] n: usize) {
    let even = cut(10 * n, n);
    for (algorithm, report) in proven(CollectiveKind::AllToAll, n, 0) {
        let call = |comm: &mut Communicator| {
            let (input, mut output) = (vec![1_u32; 10 * comm.world_size()], vec![0; 10 * comm.world_size()]);
            comm.all_to_all(&input, &mut output)
        };
        check(n, algorithm, call, |rank| report.traffic(rank, &even, Some(&even)));
        if algorithm.name == "bruck" {
            continue;
        }
        // Every rank sends `counts` to the others, so it receives its own count from each of them.
        let call = |comm: &mut Communicator| {
            let (sent, world_size) = (counts(comm.world_size()), comm.world_size());
            let received = vec![sent[comm.rank()]; world_size];
            let mut output = vec![0; received.iter().sum()];
            comm.all_to_all_v(&vec![1_u32; sent.iter().sum()], &sent, &mut output, &received)
        };
        check(n, algorithm, call, |rank| {
            let (sent, received) = (borders(&counts(n)), borders(&vec![counts(n)[rank]; n]));
            let (sent, received) = (Partition::at(&sent, 4).unwrap(), Partition::at(&received, 4).unwrap());
            let data = report.traffic(rank, &received, Some(&sent));
            let announcing = suggested(CollectiveKind::AllToAll, n, 8 * n);
            let numbers = Partition::new(n, 8, n).unwrap();
            let announced = verify::prove(announcing, n, 0).unwrap().traffic(rank, &numbers, Some(&numbers));
            // The first disagreement, the largest part, the elements of all parts, and the ranks that need messages.
            data + announced + agreement(rank, n, 8 * (4 + 3))
        });
    }
}

#[rstest]
fn a_weighted_mean_moves_one_number_more(#[values(1, 2, 5, 8)] n: usize) {
    for (algorithm, report) in proven(CollectiveKind::AllReduce, n, 0) {
        let call =
            |comm: &mut Communicator| comm.all_reduce(&mut [1.0_f32; LEN], ReduceOp::WeightedMean(0.5));
        let mean = |rank| report.traffic(rank, &cut(LEN, algorithm.chunks(n)), None);
        check(n, algorithm, call, |rank| mean(rank) + agreement(rank, n, 8));
    }
}

#[rstest]
fn two_levels(
    #[values(&[0, 0, 1, 1, 2, 2], &[0, 1, 0, 1], &[0, 0, 0, 1, 1], &[0, 0], &[4, 3])] hosts: &'static [u64],
) {
    let check = |operation, len, call| check_two_levels(hosts, operation, len, call);
    check(CollectiveKind::AllReduce, LEN, |comm| comm.all_reduce(&mut [1.0_f32; LEN], ReduceOp::Sum));
    check(CollectiveKind::Broadcast, LEN, |comm| comm.broadcast(&mut [1.0_f32; LEN], comm.world_size() - 1));
    check(CollectiveKind::Reduce, LEN, |comm| {
        comm.reduce(&mut [1.0_f32; LEN], ReduceOp::Sum, comm.world_size() - 1)
    });
    check(CollectiveKind::AllGather, 10 * hosts.len(), |comm| {
        comm.all_gather(&[1_u32; 10], &mut vec![0; 10 * comm.world_size()])
    });
    check(CollectiveKind::ReduceScatter, 10 * hosts.len(), |comm| {
        comm.reduce_scatter(&vec![1_i32; 10 * comm.world_size()], &mut [0; 10], ReduceOp::Sum)
    });
    check(CollectiveKind::Barrier, 0, |comm| comm.barrier());
}

/// Each rank reports its arrival and, after an answer, its remaining time in 8 bytes. It receives one bit for every
/// rank.
#[rstest]
fn a_monitored_barrier_moves_one_bit_for_each_rank_to_each(#[values(1, 2, 9, 17)] n: usize) {
    let word = n.div_ceil(8) as u64;
    let peers = n as u64 - 1;
    let moved = worlds::run(Network::Simulated, n, |mut comm| {
        comm.monitored_barrier().unwrap();
        comm.traffic()
    });
    let told = Traffic { messages_sent: 2, bytes_sent: 8, messages_received: 2, bytes_received: word };
    assert!(moved[1..].iter().all(|&moved| moved == told));
    let counting = Traffic {
        messages_sent: 2 * peers,
        bytes_sent: peers * word,
        messages_received: 2 * peers,
        bytes_received: 8 * peers,
    };
    assert_eq!(moved[0], counting);
}
