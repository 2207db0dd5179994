//! Predictions agree with results computed by hand, and methods agree with each other.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod schedules;
mod simulated;

use dist_algos::verify::prove;
use dist_algos::{
    ALGORITHMS, Chunks, CollectiveKind, Error, MessageAlgorithm, Partition, ReceiveHalf, Step, all_to_all,
    binomial, halving_doubling, linear, recursive_doubling, ring,
};
use dist_predict::{
    LinkModel, MessageCosts, Method, NetworkModel, Prediction, Straggler, predict, queues, symmetric,
    timeline, wavefront,
};
use rstest::rstest;

use schedules::{Schedules, all_schedules, plan, schedules};

/// Links and ranks with costs that are easy to add up: 8 s of latency, 2 s per byte.
const LINK: LinkModel = LinkModel { latency: 8.0, byte: 2.0 };
const NO_WORK: MessageCosts = MessageCosts::NONE;
const WORK: MessageCosts =
    MessageCosts { send: 0.5, sent: 0.75, receive: 0.5, byte: 0.25, reduce: 1.5, ..NO_WORK };

#[track_caller]
fn assert_close(left: f64, right: f64, what: &str) {
    assert!((left - right).abs() <= 1e-9 * left.abs().max(right.abs()), "{what}: {left} and {right}");
}

/// 64 bytes each, latency 8, 2 per byte: a round of k bytes takes 8 + 2k, or 2k if its data had arrived before.
#[rstest]
#[case(&recursive_doubling::ALL_REDUCE, 8, 3.0 * (8.0 + 128.0))]
#[case(&recursive_doubling::ALL_REDUCE, 5, 4.0 * 128.0 + 2.0 * 8.0)]
#[case(&halving_doubling::ALL_REDUCE, 8, 2.0 * (3.0 * 8.0 + 2.0 * 56.0))]
#[case(&ring::ALL_REDUCE, 8, 14.0 * (8.0 + 16.0))]
#[case(&binomial::ALL_REDUCE, 4, 2.0 * 2.0 * (8.0 + 128.0))]
#[case(&ring::ALL_REDUCE, 1, 0.0)]
fn links_alone_cost_what_is_computed_by_hand(
    #[case] algorithm: &'static MessageAlgorithm,
    #[case] world_size: usize,
    #[case] seconds: f64,
) {
    let schedules = schedules(algorithm, 0);
    let plan = plan(&schedules, algorithm.chunks(world_size), 64);
    let network = NetworkModel::new(world_size, LINK, NO_WORK);
    assert_close(predict(&plan, &network).unwrap().seconds, seconds, algorithm.name);
}

/// One exchange of 64 bytes between two ranks. Work of a rank adds up; data that arrives meanwhile does not.
#[rstest]
#[case(MessageCosts { send: 3.0, receive: 2.0, ..NO_WORK }, 3.0 + 8.0 + 128.0 + 2.0)]
#[case(MessageCosts { twice: 40, ..NO_WORK }, 8.0 + 128.0 + 2.0 * 40.0)]
#[case(MessageCosts { byte: 0.5, ..NO_WORK }, 8.0 + 128.0)]
#[case(MessageCosts { byte: 4.0, ..NO_WORK }, 2.0 * 256.0)]
#[case(MessageCosts { reduce: 1.0, ..NO_WORK }, 8.0 + 128.0)]
#[case(MessageCosts { reduce: 5.0, ..NO_WORK }, 8.0 + 320.0)]
#[case(MessageCosts { sent: 100.0, receive: 2.0, ..NO_WORK }, 8.0 + 128.0 + 2.0)]
#[case(MessageCosts { sent: 200.0, receive: 2.0, ..NO_WORK }, 200.0 + 2.0)]
#[case(
    MessageCosts { byte: 4.0, reduce: 5.0, send: 1.0, sent: 7.0, receive: 1.0, ..NO_WORK },
    1.0 + 7.0 + 256.0 + 1.0 + 256.0 + 320.0
)]
#[case(MessageCosts { byte: 4.0, reduce: 5.0, shared: true, ..NO_WORK }, 256.0 + 320.0)]
#[case(MessageCosts { byte: 4.0, reduce: 3.0, shared: true, ..NO_WORK }, 256.0 + 256.0)]
fn a_rank_works_while_bytes_are_on_their_way(#[case] work: MessageCosts, #[case] seconds: f64) {
    let schedules = schedules(&recursive_doubling::ALL_REDUCE, 0);
    let plan = plan(&schedules, 1, 64);
    let network = NetworkModel::new(2, LINK, work);
    assert_close(wavefront(&plan, &network).unwrap().seconds, seconds, "wavefront");
    assert_close(queues(&plan, &network).unwrap().seconds, seconds, "queues");
}

#[test]
fn latencies_of_messages_that_follow_one_another_are_not_added_up() {
    let schedules: Schedules = Box::new(|rank| Box::new(linear::scatter(rank, 0)));
    let network = NetworkModel::new(9, LINK, NO_WORK);
    // Eight chunks of one byte leave one after the other; the last arrives 8 s later.
    assert_close(wavefront(&plan(&schedules, 9, 9), &network).unwrap().seconds, 8.0 * 2.0 + 8.0, "scatter");
    let schedules: Schedules = Box::new(|rank| Box::new(linear::gather(rank, 0)));
    // All messages arrive at once, and the root's link receives them one after the other.
    assert_close(wavefront(&plan(&schedules, 9, 9), &network).unwrap().seconds, 8.0 * 2.0 + 8.0, "gather");
}

#[test]
fn messages_that_are_under_way_together_wait_for_each_other_only_on_the_link() {
    let network = NetworkModel::new(5, LINK, NO_WORK);
    let seconds = |algorithm| wavefront(&plan(&schedules(algorithm, 0), 5, 50), &network).unwrap().seconds;
    assert_close(seconds(&all_to_all::PAIRWISE), 4.0 * (20.0 + 8.0), "one by one");
    assert_close(seconds(&all_to_all::WINDOWED), 4.0 * 20.0 + 8.0, "together");
}

#[test]
fn one_rank_stands_for_all_only_where_that_is_what_following_all_gives() {
    let mut found = Vec::new();
    for world_size in (2..=40).chain([64, 100, 127, 128]) {
        for (name, parts, schedules) in all_schedules(world_size) {
            let plan = plan(&schedules, parts, 64 * parts);
            let network = NetworkModel::new(world_size, LINK, WORK);
            let all = wavefront(&plan, &network).unwrap();
            if let Some(one) = symmetric(&plan, &network) {
                assert_close(one.seconds, all.seconds, &format!("{name} of {world_size}"));
                assert_eq!(
                    one,
                    Prediction { engine: Method::Symmetric, seconds: one.seconds, ..all },
                    "{name}"
                );
                found.push(name);
            }
        }
    }
    for name in [
        "all_to_all windowed",
        "all_reduce ring",
        "all_reduce halving_doubling",
        "all_gather ring",
        "barrier dissemination",
    ] {
        assert!(found.iter().any(|found| found == name), "{name}");
    }
}

#[test]
fn uneven_chunks_are_predicted_to_within_an_element_per_chunk() {
    for world_size in [5, 16, 37] {
        for (name, parts, schedules) in all_schedules(world_size) {
            let plan = plan(&schedules, parts, 1000);
            let network = NetworkModel::new(world_size, LINK, NO_WORK);
            let all = wavefront(&plan, &network).unwrap().seconds;
            if let Some(one) = symmetric(&plan, &network) {
                let off = (one.seconds - all).abs();
                assert!(off <= 2.0 * parts as f64 * LINK.byte, "{name} of {world_size}: {one:?} {all}");
            }
        }
    }
}

#[test]
fn queues_that_nobody_else_waits_in_change_nothing() {
    for world_size in [1, 2, 3, 7, 12, 16, 33] {
        let within = LinkModel { latency: 1.0, byte: 0.5 };
        let straggler = Straggler { rank: world_size - 1, late: 3.0, slowdown: 2.0 };
        let network =
            NetworkModel::new(world_size, LINK, WORK).on_hosts_of(3, within).with_straggler(straggler);
        for (name, parts, schedules) in all_schedules(world_size) {
            let plan = plan(&schedules, parts, 1000);
            let one_by_one = queues(&plan, &network).unwrap();
            let all = wavefront(&plan, &network).unwrap();
            assert_close(one_by_one.seconds, all.seconds, &format!("{name} of {world_size}"));
            assert_eq!(one_by_one, Prediction { engine: Method::Queues, seconds: one_by_one.seconds, ..all });
            let network = network.clone().with_cores(world_size);
            assert_close(queues(&plan, &network).unwrap().seconds, all.seconds, &name);
        }
    }
}

#[test]
fn ranks_that_share_a_link_wait_for_one_another() {
    // Eight ranks on two hosts; in the last round every rank exchanges 64 bytes with one of the other host.
    let schedules = schedules(&recursive_doubling::ALL_REDUCE, 0);
    let plan = plan(&schedules, 1, 64);
    let within = LinkModel { latency: 0.0, byte: 0.0 };
    let network = NetworkModel::new(8, LINK, NO_WORK).on_hosts_of(4, within);
    assert_close(predict(&plan, &network).unwrap().seconds, 8.0 + 128.0, "own links");
    let shared = predict(&plan, &network.with_shared_uplinks()).unwrap();
    assert_eq!(shared.engine, Method::Queues);
    assert_close(shared.seconds, 8.0 + 4.0 * 128.0, "shared links");
    assert_eq!((shared.sent_max, shared.sent_total, shared.host_sent_max), (3 * 64, 8 * 3 * 64, 4 * 64));
}

#[test]
fn hosts_of_a_rack_share_its_link_and_a_pair_of_hosts_its_own() {
    // Two racks of two hosts; in the last round every rank exchanges 64 bytes with one of the other rack.
    let schedules = schedules(&recursive_doubling::ALL_REDUCE, 0);
    let plan = plan(&schedules, 1, 64);
    let racks = NetworkModel::new(4, LINK, NO_WORK).in_racks_of(2, LinkModel { latency: 100.0, byte: 3.0 });
    assert_eq!((racks.racks(), racks.link(0, 1), racks.link(1, 2).latency), (2, LINK, 108.0));
    let seconds = |network: &NetworkModel| predict(&plan, network).unwrap().seconds;
    let within = 8.0 + 128.0;
    assert_close(seconds(&racks), within + 108.0 + 3.0 * 64.0, "each rank its own");
    let shared = racks.with_shared_uplinks();
    assert_close(seconds(&shared), within + 108.0 + 2.0 * 3.0 * 64.0, "one for both");
    // Ranks 0 and 2 have the link between racks to themselves when 1 and 3 do not use it.
    let direct = LinkModel { latency: 0.0, byte: 1.0 };
    let paired = shared.with_pair(1, 3, direct).with_pair(3, 1, direct);
    assert_close(seconds(&paired), within + 108.0 + 3.0 * 64.0, "one past it");
}

/// Returns the end of each rank's last step.
fn ends(schedules: &Schedules, parts: usize, bytes: usize, network: &NetworkModel) -> Vec<f64> {
    let times = timeline(&plan(schedules, parts, bytes), network).unwrap();
    times.iter().map(|times| *times.last().unwrap()).collect()
}

/// Rank 0 has ten bytes for each of two others, 20 s on the link; a message has a latency of 8 s.
#[rstest]
#[case::one_after_the_other(0, [40.0, 28.0, 48.0])]
#[case::both_at_once(10, [0.0, 48.0, 48.0])]
#[case::the_last_four_bytes_at_once(4, [32.0, 36.0, 48.0])]
fn messages_of_one_rank_to_others_share_its_link_as_far_as_sockets_take_them(
    #[case] window: u64,
    #[case] expected: [f64; 3],
) {
    let schedules: Schedules = Box::new(|rank| Box::new(linear::scatter(rank, 0)));
    let network = NetworkModel::new(3, LINK, NO_WORK).with_shared_uplinks().with_window(window);
    for (end, expected) in ends(&schedules, 3, 30, &network).into_iter().zip(expected) {
        assert_close(end, expected, "a rank's end");
    }
}

#[test]
fn messages_to_one_rank_share_the_link_to_it_and_those_of_a_connection_keep_their_order() {
    let gather: Schedules = Box::new(|rank| Box::new(linear::gather(rank, 0)));
    let network = NetworkModel::new(3, LINK, NO_WORK).with_shared_uplinks();
    assert_eq!(ends(&gather, 3, 30, &network), [48.0, 40.0, 40.0]);
    // Two messages to the same rank: the second one's first byte follows the first one's last.
    let twice: Schedules = Box::new(|rank| match rank.index() {
        0 => Box::new([1, 2].map(|chunk| Step::send(1, Chunks::one(chunk))).into_iter()),
        1 => {
            let receive = |chunk| Step::receive(ReceiveHalf::replace(0, Chunks::one(chunk)));
            Box::new([1, 2].map(receive).into_iter())
        }
        _ => Box::new(std::iter::empty()),
    });
    let windowed = network.with_window(100);
    let times = timeline(&plan(&twice, 3, 30), &windowed).unwrap();
    assert_eq!(times, [vec![0.0, 0.0, 0.0], vec![0.0, 28.0, 48.0], vec![0.0]]);
}

#[test]
fn ranks_that_share_a_core_take_turns() {
    let schedules = schedules(&recursive_doubling::ALL_REDUCE, 0);
    let plan = plan(&schedules, 1, 64);
    let free = LinkModel { latency: 0.0, byte: 0.0 };
    let network = NetworkModel::new(2, free, MessageCosts { byte: 1.0, ..NO_WORK }).on_hosts_of(2, free);
    assert_close(wavefront(&plan, &network).unwrap().seconds, 128.0, "a core each");
    assert_close(predict(&plan, &network.with_cores(1)).unwrap().seconds, 256.0, "one core");
}

#[test]
fn a_late_rank_delays_those_who_need_it_and_a_slow_one_does_more_work() {
    let schedules = schedules(&ring::ALL_REDUCE, 0);
    let plan = plan(&schedules, 16, 1600);
    let network = NetworkModel::new(16, LINK, WORK);
    let on_time = wavefront(&plan, &network).unwrap().seconds;
    let straggler = |late, slowdown| network.clone().with_straggler(Straggler { rank: 5, late, slowdown });
    assert_close(wavefront(&plan, &straggler(1e6, 1.0)).unwrap().seconds, 1e6 + on_time, "late");
    let slow = wavefront(&plan, &straggler(0.0, 100.0)).unwrap().seconds;
    let work = 100.0 * 2.0 * 15.0 * (2.0 * 0.5 + 0.75 + 2.0 * 25.0) + 100.0 * 15.0 * 150.0;
    assert!(slow >= work && slow <= work + on_time, "{slow} for {work}");
}

#[test]
fn a_pair_of_hosts_may_have_its_own_link() {
    let schedules = schedules(&recursive_doubling::ALL_REDUCE, 0);
    let plan = plan(&schedules, 1, 64);
    let network =
        NetworkModel::new(4, LINK, NO_WORK).with_pair(1, 0, LinkModel { latency: 100.0, byte: 2.0 });
    // Ranks 0 and 1 exchange first, and only one direction is long.
    assert_close(wavefront(&plan, &network).unwrap().seconds, 100.0 + 128.0 + 8.0 + 128.0, "one way");
}

#[test]
fn as_many_bytes_are_predicted_as_the_verifier_counts() {
    for world_size in [2, 5, 8, 21] {
        for algorithm in ALGORITHMS.messages().filter(|it| it.collective == CollectiveKind::AllReduce) {
            let schedules = schedules(algorithm, 0);
            let parts = algorithm.chunks(world_size);
            let predicted =
                wavefront(&plan(&schedules, parts, 1000), &NetworkModel::new(world_size, LINK, WORK))
                    .unwrap();
            let report = prove(algorithm, world_size, 0).unwrap();
            let partition = Partition::new(1000, 1, parts).unwrap();
            let sent = (0..world_size).map(|rank| report.traffic(rank, &partition, None).bytes_sent);
            assert_eq!(predicted.sent_total, sent.clone().sum::<u64>(), "{algorithm:?} {world_size}");
            assert_eq!(predicted.sent_max, sent.max().unwrap(), "{algorithm:?} {world_size}");
        }
    }
}

#[test]
fn schedules_that_do_not_fit_together_are_refused() {
    let network = NetworkModel::new(3, LINK, WORK);
    let waits: Schedules = Box::new(|rank| {
        let receive = ReceiveHalf::replace(rank.left().index(), Chunks::one(0));
        Box::new(std::iter::once(Step::receive(receive)))
    });
    let deadlock: dist_predict::Error =
        Error::Deadlock { rank: 0, step: 0, peer: 2, peer_step: Some(0), blocked: 3 }.into();
    assert_eq!(wavefront(&plan(&waits, 1, 8), &network), Err(deadlock.clone()));
    assert_eq!(queues(&plan(&waits, 1, 8), &network), Err(deadlock));
    let stranger: Schedules = Box::new(|_| Box::new(std::iter::once(Step::send(7, Chunks::one(0)))));
    let no_peer: dist_predict::Error = Error::NoPeer { rank: 0, step: 0, peer: 7 }.into();
    assert_eq!(wavefront(&plan(&stranger, 1, 8), &network), Err(no_peer.clone()));
    assert_eq!(queues(&plan(&stranger, 1, 8), &network), Err(no_peer));
}

#[test]
fn a_ring_of_a_hundred_thousand_ranks_is_followed_on_one() {
    let world_size = 100_000;
    let schedules = schedules(&ring::ALL_REDUCE, 0);
    let plan = plan(&schedules, world_size, 10 * world_size);
    let prediction = predict(&plan, &NetworkModel::new(world_size, LINK, NO_WORK)).unwrap();
    assert_eq!(prediction.engine, Method::Symmetric);
    assert_close(prediction.seconds, 2.0 * 99_999.0 * 28.0, "ring");
}

#[test]
fn a_tree_of_thirty_thousand_ranks_is_followed_on_all() {
    let world_size = 30_000;
    let schedules: Schedules = schedules(&binomial::BROADCAST, 0);
    let prediction =
        predict(&plan(&schedules, 1, 10), &NetworkModel::new(world_size, LINK, NO_WORK)).unwrap();
    assert_eq!(prediction.engine, Method::Wavefront);
    // The deepest rank receives after 14 messages, and one message had to wait for another to leave.
    assert_close(prediction.seconds, 14.0 * 28.0 + 20.0, "binomial");
}
