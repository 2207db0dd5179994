//! A table with an algorithm more: a star, which this file defines, is chosen, proven and drawn like the others.

use dist_algos::direct::{Crossovers, DirectAlgorithm, DirectCase, Ownership, one_shot};
use dist_algos::hierarchical::{self, TwoLevelAlgorithm};
use dist_algos::verify;
use dist_algos::verify::mutate::{Mutant, Mutation, Score};
use dist_algos::{
    ALGORITHMS, Algorithm, AlgorithmTable, Chunks, CollectiveKind, Cost, CostModel, Hosts, MessageAlgorithm,
    Messages, Order, Phases, Placement, ReceiveHalf, Schedule, Step,
};
use dist_transport::Rank;
use dist_transport::shm_group::{GroupLayout, Reach};

#[path = "../examples/algorithms/document.rs"]
mod document;

const WHOLE: Chunks = Chunks::one(0);

/// An all_reduce by rank 0: it receives every buffer, one after the other, and sends the sum to every rank.
static STAR: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "star",
    about: "Rank 0 receives every buffer and sends the sum to every rank.",
    order: |world_size| Some(if world_size <= 3 { Order::Canonical } else { Order::Uniform }),
    cost: |world_size| {
        let peers = world_size - 1;
        Cost {
            rounds: 2 * peers,
            path: 2 * peers,
            sent_max: peers,
            reduced_max: peers,
            all: Messages::new(2 * peers, 2 * peers),
            depth: Messages::new(2, 2),
            reduced: peers,
        }
    },
    phases: |rank, _| Phases {
        first: Schedule::new(rank, rank.world_size() - 1, |rank, _, index| match rank.index() {
            0 => Some(Step::receive(ReceiveHalf::reduce(index + 1, WHOLE))),
            own => (own == index + 1).then_some(Step::send(0, WHOLE)),
        }),
        owned: if rank.index() == 0 { WHOLE } else { Chunks::NONE },
        second: Schedule::new(rank, rank.world_size() - 1, |rank, _, index| match rank.index() {
            0 => Some(Step::send(index + 1, WHOLE)),
            own => (own == index + 1).then_some(Step::receive(ReceiveHalf::replace(0, WHOLE))),
        }),
    },
    ..MessageAlgorithm::NOTHING
};

static LEADERS_STAR: TwoLevelAlgorithm = hierarchical::by_leaders("two_level/leaders/star", &STAR);

/// One-shot under another name, for a few ranks and short buffers.
static DIRECT_STAR: DirectAlgorithm =
    DirectAlgorithm { name: "direct/star", fits: |case| case.bytes == 8, ..one_shot::ALL_REDUCE };

/// Calls a function with the table of all algorithms and of those in this file.
fn with_star<T>(use_table: impl FnOnce(AlgorithmTable<'_>) -> T) -> T {
    let stars: [Algorithm; 3] = [(&STAR).into(), (&LEADERS_STAR).into(), (&DIRECT_STAR).into()];
    let algorithms = [&ALGORITHMS[..], &stars].concat();
    use_table(AlgorithmTable::new(&algorithms))
}

/// A model with free reductions.
const MODEL: CostModel = CostModel { round_ps: 1, byte_ps: 1, reduced_byte_ps: 0 };

#[test]
fn the_new_algorithm_is_chosen() {
    let collective = CollectiveKind::AllReduce;
    // If ranks share cores, the work of all ranks counts. A star has as few messages as a tree, and shorter chains.
    let placement = Placement { ranks: 5, cores: 4 };
    let chosen = |table: AlgorithmTable<'_>| {
        table.suggest(collective, placement, 8, Order::Uniform, &MODEL).unwrap().name
    };
    assert_eq!((chosen(ALGORITHMS) == "star", with_star(chosen)), (false, "star"));

    let (ownership, shared) = (Ownership::Borrowed, &GroupLayout::on_host(Reach::Slots));
    let case = DirectCase { world_size: 2, bytes: 8, ownership, shared, crossovers: Crossovers::default() };
    let chosen = |table: AlgorithmTable<'_>| table.suggest_direct(collective, &case).unwrap().name;
    assert_eq!([chosen(ALGORITHMS), with_star(chosen)], ["direct/one_shot", "direct/star"]);
}

#[test]
fn the_new_algorithm_is_proven() {
    with_star(|table| {
        let star = table.messages().find(|algorithm| algorithm.name == "star").unwrap();
        for world_size in 1..=9 {
            verify::prove_world(star, world_size).unwrap();
        }
        for score in Score::of_roots(star, 4) {
            // The order in which rank 0 sends and receives does not matter.
            let is_swap = |mutant: &Mutant| mutant.mutation == Mutation::SwappedWithNext;
            assert!(score.rejected() > 0 && score.survivors.iter().all(is_swap), "{:?}", score.survivors);
        }
    });
    let hosts = Hosts::new(&[0, 0, 1, 1, 2, 2]);
    verify::two_level(&LEADERS_STAR, &hosts, 0).unwrap();
}

#[test]
fn a_wrong_declaration_of_the_new_algorithm_is_noticed() {
    static BOASTING: MessageAlgorithm =
        MessageAlgorithm { cost: |world_size| Cost::alike(world_size, 1, 1, 1), ..STAR };
    static SILENT: MessageAlgorithm = MessageAlgorithm { order: |_| None, ..STAR };
    assert!(verify::prove(&BOASTING, 4, 0).is_err());
    assert!(verify::prove(&SILENT, 4, 0).is_err(), "no order is as much as the canonical one");
}

#[test]
fn the_new_algorithm_is_drawn_and_described() {
    let page = with_star(document::algorithms);
    let drawing = verify::draw(&STAR, 5, 0);
    let section = format!("\n### all_reduce by star\n\n{}\n\n```text\n{drawing}```\n", STAR.about);
    assert!(page.contains(&section), "{section}");
    assert!(page.contains("| star | 2 / 2, canonical |"));
    assert!(page.contains("\n### all_reduce: star\n"));
}

#[cfg(feature = "conformance")]
#[test]
fn the_new_algorithm_is_executed_by_the_conformance_suite() {
    static STARS: [Algorithm; 1] = [Algorithm::Messages(&STAR)];
    let runtime = dist_transport::Runtime::system();
    let connect = |world_size| dist_transport::sim::network(&runtime, world_size);
    dist_algos::conformance::check(AlgorithmTable::new(&STARS), &runtime, connect);
}

#[test]
fn the_new_algorithm_is_found_by_its_name() {
    with_star(|table| assert_eq!(table.find(CollectiveKind::AllReduce, "star"), Ok((&STAR).into())));
    let steps = STAR.steps(Rank::new(0, 3).unwrap(), 0);
    assert_eq!(steps.count(), 4);
}
