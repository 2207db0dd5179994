//! Every schedule is proven for every world size and root, and has its declared cost.

use std::ops::RangeInclusive;

use dist_algos::all_to_all::WINDOW;
use dist_algos::verify::{self, Finish, Goal, RankProgram, Report};
use dist_algos::{
    ALGORITHMS, ChunkLocation, Chunks, Error, MessageAlgorithm, OnArrival, Order, Partition, ReceiveHalf,
    SendHalf, Step, all_to_all, barrier, binomial, circulant, halving_doubling, neighbour, pairwise,
    recursive_doubling, ring, scan,
};
use dist_transport::Rank;
use rstest::rstest;

/// The world sizes for these proofs; `distctl verify` goes further.
const WORLDS: RangeInclusive<usize> = 1..=40;

#[test]
fn every_schedule_is_proven_for_every_world_and_root() {
    let tasks: Vec<(&MessageAlgorithm, usize)> = ALGORITHMS
        .messages()
        .flat_map(|algorithm| WORLDS.map(move |world_size| (algorithm, world_size)))
        .filter(|&(algorithm, world_size)| algorithm.supports(world_size))
        .collect();
    verify::on_all_cores(
        &tasks,
        |&(_, world_size)| world_size,
        |&(algorithm, world_size)| {
            is_proven(algorithm, world_size);
        },
    );
}

#[track_caller]
fn is_proven(algorithm: &MessageAlgorithm, world_size: usize) {
    let what = format!("{algorithm:?} in a world of {world_size}");
    let proof = verify::prove_world(algorithm, world_size).unwrap_or_else(|error| panic!("{what}: {error}"));
    let goal = Goal::of(algorithm, world_size, 0);
    let (bound, chunks) = (goal.lower_bound(world_size), algorithm.chunks(world_size));
    // The bound assumes that ranks send one message at a time.
    let at_once = if algorithm.name == "windowed" { WINDOW } else { 1 };
    assert!(proof.cost.rounds * at_once >= bound.rounds, "{what}");
    assert!(proof.cost.path * world_size >= bound.moved * chunks, "{what}");
    assert_eq!(proof.order, algorithm.order(world_size));
}

#[test]
fn the_best_algorithms_meet_the_lower_bounds() {
    for world_size in WORLDS {
        let bound = Goal::AllReduce.lower_bound(world_size);
        for algorithm in [&ring::ALL_REDUCE, &pairwise::ALL_REDUCE] {
            assert_eq!(verify::prove(algorithm, world_size, 0).unwrap().path, bound.moved);
        }
        let circulant = verify::prove(&circulant::ALL_REDUCE, world_size, 0).unwrap();
        assert_eq!((circulant.path, circulant.rounds), (bound.moved, 2 * bound.rounds));
        let bound = Goal::AllGather.lower_bound(world_size);
        for algorithm in [&circulant::BRUCK, &circulant::ALL_GATHER] {
            let report = verify::prove(algorithm, world_size, 0).unwrap();
            assert_eq!((report.path, report.rounds), (bound.moved, bound.rounds));
        }
        if world_size.is_power_of_two() {
            let bound = Goal::AllReduce.lower_bound(world_size);
            let halving = verify::prove(&halving_doubling::ALL_REDUCE, world_size, 0).unwrap();
            assert_eq!((halving.path, halving.rounds), (bound.moved, 2 * bound.rounds));
            let doubling = verify::prove(&recursive_doubling::ALL_REDUCE, world_size, 0).unwrap();
            assert_eq!(doubling.rounds, bound.rounds);
            let bound = Goal::ReduceScatter.lower_bound(world_size);
            let halving = verify::prove(&halving_doubling::REDUCE_SCATTER, world_size, 0).unwrap();
            assert_eq!((halving.path, halving.rounds), (bound.moved, bound.rounds));
        }
        let rounds = Goal::Barrier.lower_bound(world_size).rounds;
        assert_eq!(verify::prove(&barrier::DISSEMINATION, world_size, 0).unwrap().rounds, rounds);
        assert_eq!(verify::prove(&binomial::BROADCAST, world_size, 0).unwrap().rounds, rounds);
        assert_eq!(verify::prove(&binomial::REDUCE, world_size, world_size - 1).unwrap().rounds, rounds);
    }
}

#[rstest]
#[case::two_ranks(&ring::ALL_REDUCE, 2, Order::Canonical)]
#[case::a_ring(&ring::ALL_REDUCE, 3, Order::Any)]
#[case::a_power_of_two(&recursive_doubling::ALL_REDUCE, 8, Order::Canonical)]
#[case::pairs_that_fill_subtrees(&recursive_doubling::ALL_REDUCE, 6, Order::Canonical)]
#[case::pairs_across_subtrees(&recursive_doubling::ALL_REDUCE, 5, Order::Uniform)]
#[case::halving_in_blocks(&halving_doubling::ALL_REDUCE, 11, Order::Canonical)]
#[case::halving_at_a_power_of_two(&halving_doubling::ALL_REDUCE, 16, Order::Canonical)]
#[case::a_circle(&circulant::ALL_REDUCE, 6, Order::Any)]
#[case::a_circle_of_a_power_of_two(&circulant::ALL_REDUCE, 16, Order::Uniform)]
#[case::any_world(&pairwise::ALL_REDUCE, 13, Order::Canonical)]
fn orders_are_as_documented(
    #[case] algorithm: &MessageAlgorithm,
    #[case] world_size: usize,
    #[case] order: Order,
) {
    assert_eq!(verify::prove(algorithm, world_size, 0).unwrap().order, Some(order));
}

#[test]
fn slots_grow_with_the_logarithm_and_only_pairwise_needs_any() {
    for world_size in WORLDS {
        let depth = world_size.next_power_of_two().ilog2() as usize;
        let pairwise = verify::prove(&pairwise::REDUCE_SCATTER, world_size, 0).unwrap();
        assert!(pairwise.slots_max <= 2 * depth, "{} slots for {world_size}", pairwise.slots_max);
        for rank in 0..world_size {
            assert_eq!(pairwise.reductions(rank), world_size - 1);
        }
        assert_eq!(verify::prove(&ring::REDUCE_SCATTER, world_size, 0).unwrap().slots_max, 0);
        assert_eq!(verify::prove(&halving_doubling::ALL_REDUCE, world_size, 0).unwrap().slots_max, 0);
    }
}

#[rstest]
#[case::equal_to_one_block(8, 6, 14, 14)]
#[case::a_half_beside_it(12, 9, 18, 16)]
#[case::a_block_of_one(9, 15, 30, 22)]
#[case::three_blocks(7, 8, 15, 10)]
fn halving_in_blocks_costs_more_the_smaller_the_smallest_block(
    #[case] world_size: usize,
    #[case] rounds: usize,
    #[case] path: usize,
    #[case] sent: usize,
) {
    let report = verify::prove(&halving_doubling::ALL_REDUCE, world_size, 0).unwrap();
    assert_eq!((report.rounds, report.path, report.chunks_sent_max()), (rounds, path, sent));
}

#[rstest]
#[case::one_block(8, 3, 7, 7)]
#[case::a_half_beside_it(12, 6, 15, 12)]
#[case::a_block_of_one(9, 12, 18, 9)]
#[case::three_blocks(7, 6, 16, 7)]
fn scattering_in_blocks_has_fewer_rounds_than_pairwise_if_they_are_of_like_sizes(
    #[case] world_size: usize,
    #[case] rounds: usize,
    #[case] path: usize,
    #[case] sent: usize,
) {
    let report = verify::prove(&halving_doubling::REDUCE_SCATTER, world_size, 0).unwrap();
    assert_eq!((report.rounds, report.path, report.chunks_sent_max()), (rounds, path, sent));
    assert_eq!(report.order, Some(Order::Canonical));
}

#[test]
fn a_ring_needs_two_peers_and_doubling_a_logarithm_of_them() {
    assert_eq!(verify::prove(&ring::ALL_REDUCE, 64, 0).unwrap().peers_max, 2);
    assert_eq!(verify::prove(&neighbour::ALL_GATHER, 64, 0).unwrap().peers_max, 2);
    assert_eq!(verify::prove(&recursive_doubling::ALL_REDUCE, 64, 0).unwrap().peers_max, 6);
    assert_eq!(verify::prove(&pairwise::ALL_REDUCE, 64, 0).unwrap().peers_max, 63);
}

#[test]
fn bytes_are_counted_for_every_length() {
    for world_size in 1..=9 {
        for elements in [0, 1, world_size - 1, world_size, 1009] {
            let partition = Partition::new(elements, 4, world_size).unwrap();
            let report = verify::prove(&ring::ALL_REDUCE, world_size, 0).unwrap();
            let ranks: Vec<_> = (0..world_size).map(|rank| report.traffic(rank, &partition, None)).collect();
            let sent: u64 = ranks.iter().map(|traffic| traffic.bytes_sent).sum();
            let received: u64 = ranks.iter().map(|traffic| traffic.bytes_received).sum();
            assert_eq!(sent, 2 * (world_size as u64 - 1) * 4 * elements as u64);
            assert_eq!(received, sent);
            let messages: u64 = ranks.iter().map(|traffic| traffic.messages_sent).sum();
            assert_eq!(messages, report.messages() as u64);
        }
    }
}

#[test]
fn worlds_and_roots_that_do_not_exist_are_refused() {
    let unsupported = |result: Result<Report, Error>| matches!(result, Err(Error::Unsupported { .. }));
    assert!(unsupported(verify::prove(&recursive_doubling::ALL_REDUCE, 0, 0)));
    assert!(unsupported(verify::prove(&halving_doubling::REDUCE_SCATTER, 0, 0)));
    assert!(unsupported(verify::prove(&recursive_doubling::ALL_GATHER, 3, 0)));
    assert!(unsupported(verify::prove(&neighbour::ALL_GATHER, 5, 0)));
    assert!(unsupported(verify::prove(&binomial::BROADCAST, 4, 4)));
    assert!(unsupported(verify::prove(&pairwise::REDUCE, 4, 9)));
    assert!(verify::check(Goal::AllReduce, 3, &[]).is_ok_and(|report| report.messages() == 0));
    for algorithm in ALGORITHMS.messages() {
        assert_eq!(algorithm.cost(0).rounds, 0);
        assert!(algorithm.keeps(Order::Uniform, 0));
        assert!(!algorithm.supports(0));
    }
}

#[test]
fn scans_are_canonical_on_every_rank() {
    for algorithm in [&scan::SCAN, &scan::EXCLUSIVE_SCAN] {
        for world_size in 2..=200 {
            let report = verify::prove(algorithm, world_size, 0).unwrap();
            assert_eq!(report.order, Some(Order::Canonical));
            assert!(report.slots_max <= 3);
        }
    }
}

#[rstest]
#[case::a_power_of_two(8, 3, 12)]
#[case::not_quite(7, 3, 9)]
#[case::one_more(9, 4, 13)]
fn bruck_takes_few_rounds_of_about_half_the_buffer(
    #[case] world_size: usize,
    #[case] rounds: usize,
    #[case] sent: usize,
) {
    let report = verify::prove(&all_to_all::BRUCK, world_size, 0).unwrap();
    assert_eq!((report.rounds, report.chunks_sent_max()), (rounds, sent));
}

#[test]
fn trees_hold_the_chunks_of_their_subtrees() {
    let rank = |index| Rank::new(index, 6).unwrap();
    let gather = [4, 0, 1, 2, 3, 5].map(|index| binomial::GATHER.held(rank(index), 4));
    let [all, none] = [Chunks::all(6), Chunks::NONE];
    assert_eq!(gather, [all, Chunks::range(0, 4), none, Chunks::range(2, 2), none, none]);
    assert_eq!(binomial::SCATTER.held(rank(4), 4), none);
    assert_eq!(binomial::SCATTER.held(rank(2), 4), Chunks::range(2, 2));
    assert_eq!(binomial::SCATTER.held(rank(5), 4), Chunks::one(5));
}

/// Lets two ranks send each other a chunk of their inputs.
#[track_caller]
fn check_swap(chunks: [usize; 2], places: [usize; 2], expected: Result<(), Error>) {
    let program = |rank: usize| {
        let send = SendHalf::input(1 - rank, Chunks::one(chunks[rank]));
        let receive = ReceiveHalf::replace(1 - rank, Chunks::one(places[rank]));
        RankProgram { steps: vec![Step::exchange(send, receive)], finish: None }
    };
    assert_eq!(verify::check(Goal::AllToAll, 2, &[0, 1].map(program)).map(drop), expected);
}

#[test]
fn chunks_that_go_to_the_wrong_rank_or_place_are_found() {
    check_swap([1, 0], [1, 0], Ok(()));
    let mismatch = |sent, expected| Error::Mismatch {
        rank: 0,
        step: 0,
        sent: Chunks::one(sent),
        peer: 1,
        peer_step: 0,
        expected: Chunks::one(expected),
    };
    check_swap([0, 0], [1, 0], Err(mismatch(0, 0)));
    check_swap([1, 0], [1, 1], Err(mismatch(1, 1)));
}

#[test]
fn windows_that_make_no_sense_are_found() {
    for (first, last) in [(0, 1), (1, 2), (2, 1)] {
        let program = RankProgram { steps: vec![Step::Window { first, last }], finish: None };
        let found = verify::check(Goal::AllToAll, 2, &[program.clone(), program]);
        assert!(matches!(found, Err(Error::NoPeer { rank: 0, step: 0, .. })), "{first} to {last}: {found:?}");
    }
    let program = RankProgram { steps: vec![Step::Window { first: 1, last: 1 }], finish: None };
    let found = verify::check(Goal::AllGather, 2, &[program.clone(), program]);
    assert!(matches!(found, Err(Error::NoChunk { parts: 0, .. })), "no input: {found:?}");
}

/// Runs one wrong program for each of two ranks that should reduce one chunk to rank 0.
#[track_caller]
fn check_fault(programs: [Vec<Step>; 2], expected: Error) {
    let programs = programs.map(|steps| RankProgram { steps, finish: None });
    assert_eq!(verify::check(Goal::Reduce { root: 0 }, 2, &programs), Err(expected));
}

/// Both chunks.
const ALL: Chunks = Chunks::all(2);

/// The correct step of rank 0.
const TAKE: Step = Step::Exchange { send: None, receive: Some(ReceiveHalf::reduce(1, ALL)) };

/// The correct step of rank 1.
const GIVE: Step = Step::send(0, ALL);

/// Into a slot of rank 0.
const HOLD: Step = Step::receive(ReceiveHalf {
    from: 1,
    chunks: Chunks::one(0),
    place: ChunkLocation::Slot(0),
    then: OnArrival::Replace,
});

#[test]
fn the_right_programs_are_right() {
    let programs = [vec![TAKE], vec![GIVE]].map(|steps| RankProgram { steps, finish: None });
    assert_eq!(verify::check(Goal::Reduce { root: 0 }, 2, &programs).unwrap().order, Some(Order::Canonical));
}

#[test]
fn peers_that_do_not_exist_are_found() {
    check_fault([vec![TAKE], vec![Step::send(2, ALL)]], Error::NoPeer { rank: 1, step: 0, peer: 2 });
    check_fault([vec![TAKE], vec![GIVE, Step::send(1, ALL)]], Error::NoPeer { rank: 1, step: 1, peer: 1 });
}

#[test]
fn chunks_that_do_not_exist_are_found() {
    let chunks = Chunks::range(1, 2);
    check_fault(
        [vec![TAKE], vec![Step::send(0, chunks)]],
        Error::NoChunk { rank: 1, step: 0, chunks, parts: 2 },
    );
}

#[test]
fn messages_of_other_chunks_are_found() {
    let (sent, expected) = (Chunks::one(1), ALL);
    check_fault(
        [vec![TAKE], vec![Step::send(0, sent)]],
        Error::Mismatch { rank: 1, step: 0, sent, peer: 0, peer_step: 0, expected },
    );
}

#[test]
fn waiting_for_ever_is_found() {
    let waits = Error::Deadlock { rank: 0, step: 0, peer: 1, peer_step: None, blocked: 1 };
    check_fault([vec![TAKE], vec![]], waits);
    let both = Error::Deadlock { rank: 0, step: 0, peer: 1, peer_step: Some(0), blocked: 2 };
    check_fault(
        [vec![Step::send(1, ALL), TAKE], vec![GIVE, Step::receive(ReceiveHalf::reduce(0, ALL))]],
        both,
    );
}

#[test]
fn an_exchange_in_place_needs_one_at_the_other_end() {
    let separate = vec![GIVE, Step::receive(ReceiveHalf::reduce(0, ALL))];
    let stuck = Error::Deadlock { rank: 0, step: 0, peer: 1, peer_step: Some(0), blocked: 2 };
    check_fault([vec![Step::exchange_in_place(1, ALL)], separate], stuck);
}

#[test]
fn contributions_that_come_twice_or_never_are_found() {
    let twice = Error::AddedTwice { rank: 0, step: 1, chunk: 0, contributor: 1 };
    check_fault([vec![TAKE, TAKE], vec![GIVE, GIVE]], twice);
    check_fault([vec![], vec![]], Error::WrongResult { rank: 0, steps: 0, chunk: 0 });
    let half = Chunks::one(0);
    let takes_half = Step::receive(ReceiveHalf::reduce(1, half));
    check_fault(
        [vec![takes_half], vec![Step::send(0, half)]],
        Error::WrongResult { rank: 0, steps: 1, chunk: 1 },
    );
    let replaces = Step::receive(ReceiveHalf::replace(1, ALL));
    check_fault([vec![replaces], vec![GIVE]], Error::WrongResult { rank: 0, steps: 1, chunk: 0 });
}

#[test]
fn misuse_of_slots_is_found() {
    let give = Step::send(0, Chunks::one(0));
    let combine = |chunk, from, into| Step::Combine { chunk, from, into };
    check_fault([vec![HOLD], vec![give]], Error::Leftover { rank: 0, slot: 0 });
    check_fault([vec![HOLD, HOLD], vec![give, give]], Error::Lost { rank: 0, step: 1, slot: 0 });
    let empty = combine(0, 0, ChunkLocation::Buffer);
    check_fault([vec![empty], vec![]], Error::Unwritten { rank: 0, step: 0, chunk: 0 });
    let other_chunk = combine(1, 0, ChunkLocation::Buffer);
    check_fault([vec![HOLD, other_chunk], vec![give]], Error::Unwritten { rank: 0, step: 1, chunk: 1 });
    let itself = combine(0, 0, ChunkLocation::Slot(0));
    check_fault([vec![HOLD, itself], vec![give]], Error::BadSlot { rank: 0, step: 1, slot: 0 });
    let copy = |from, into| Step::Copy { chunk: 0, from, into };
    let used =
        [HOLD, copy(ChunkLocation::Slot(0), ChunkLocation::Slot(1)), combine(0, 1, ChunkLocation::Buffer)];
    check_fault([used.to_vec(), vec![give]], Error::WrongResult { rank: 0, steps: 3, chunk: 1 });
    let unused = [HOLD, copy(ChunkLocation::Slot(0), ChunkLocation::Slot(1))];
    check_fault([unused.to_vec(), vec![give]], Error::Leftover { rank: 0, slot: 1 });
    let nothing = copy(ChunkLocation::Slot(0), ChunkLocation::Buffer);
    check_fault([vec![nothing], vec![]], Error::Unwritten { rank: 0, step: 0, chunk: 0 });
    let itself = copy(ChunkLocation::Buffer, ChunkLocation::Buffer);
    check_fault([vec![itself], vec![]], Error::Overlap { rank: 0, step: 0 });
    let far = combine(0, 5000, ChunkLocation::Buffer);
    check_fault([vec![far], vec![]], Error::BadSlot { rank: 0, step: 0, slot: 5000 });
}

#[test]
fn overwriting_sent_chunks_is_found() {
    let crossed = |peer| {
        let send = SendHalf::buffer(peer, Chunks::one(0));
        vec![Step::exchange(send, ReceiveHalf::reduce(peer, ALL))]
    };
    check_fault([crossed(1), crossed(0)], Error::Overlap { rank: 0, step: 0 });
}

#[test]
fn reading_unwritten_chunks_is_found() {
    let programs = [vec![GIVE_BACK], vec![Step::receive(ReceiveHalf::replace(0, ALL))]]
        .map(|steps| RankProgram { steps, finish: None });
    let expected = Err(Error::Unwritten { rank: 0, step: 0, chunk: 0 });
    assert_eq!(verify::check(Goal::Broadcast { root: 1 }, 2, &programs), expected);
}

/// A step that rank 0 could only do if it had data.
const GIVE_BACK: Step = Step::send(1, ALL);

#[test]
fn only_finished_sums_are_a_result_of_all_reduce() {
    let exchange = |peer| vec![Step::exchange_in_place(peer, Chunks::one(0))];
    let finish = |after| Some(Finish { after, owned: Chunks::one(0) });
    let programs = |finish| [1, 0].map(|peer| RankProgram { steps: exchange(peer), finish });
    assert!(verify::check(Goal::AllReduce, 1, &programs(finish(1))).is_ok());
    let unfinished = Error::WrongResult { rank: 0, steps: 1, chunk: 0 };
    assert_eq!(verify::check(Goal::AllReduce, 1, &programs(None)), Err(unfinished));
    let too_early = Error::WrongResult { rank: 0, steps: 0, chunk: 0 };
    assert_eq!(verify::check(Goal::AllReduce, 1, &programs(finish(0))), Err(too_early));
}

#[test]
fn leaving_a_barrier_early_is_found() {
    let token = |steps: &[Step]| RankProgram { steps: steps.to_vec(), finish: None };
    let take = |from| Step::receive(ReceiveHalf::replace(from, Chunks::NONE));
    let once_round = [
        token(&[Step::send(1, Chunks::NONE), take(2)]),
        token(&[take(0), Step::send(2, Chunks::NONE)]),
        token(&[take(1), Step::send(0, Chunks::NONE)]),
    ];
    let expected = Err(Error::LeavesEarly { rank: 1, absent: 2 });
    assert_eq!(verify::check(Goal::Barrier, 0, &once_round), expected);
}

#[test]
fn ranks_that_reduce_in_different_orders_are_found() {
    let whole = Chunks::one(0);
    // Rank 0 adds 1 then 2; rank 1 adds 2 then 0; rank 2 gets rank 0's sum.
    let programs = [vec![Step::send(1, whole), Step::receive(ReceiveHalf::reduce(1, whole))], vec![], vec![]];
    let [mut first, mut second, mut third] = programs;
    first.clear();
    let hold = |from, slot| {
        Step::receive(ReceiveHalf {
            from,
            chunks: whole,
            place: ChunkLocation::Slot(slot),
            then: OnArrival::Replace,
        })
    };
    let add = |slot| Step::Combine { chunk: 0, from: slot, into: ChunkLocation::Buffer };
    first.extend([Step::send(1, whole), Step::send(2, whole), hold(1, 0), hold(2, 1), add(0), add(1)]);
    second.extend([hold(0, 0), Step::send(0, whole), hold(2, 1), Step::send(2, whole), add(1), add(0)]);
    third.extend([hold(0, 0), Step::send(1, whole), hold(1, 1), Step::send(0, whole), add(0), add(1)]);
    let programs = [first, second, third]
        .map(|steps| RankProgram { finish: Some(Finish { after: steps.len(), owned: whole }), steps });
    let expected = Err(Error::Disagreement { rank: 1, chunk: 0 });
    assert_eq!(verify::check(Goal::AllReduce, 1, &programs), expected);
}
