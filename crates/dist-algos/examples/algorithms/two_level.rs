//! The part of docs/algorithms.md on two-level schedules.

use dist_algos::hierarchical::{self, LevelCosts, TwoLevelAlgorithm};
use dist_algos::verify::{draw_programs, two_level_programs};
use dist_algos::{AlgorithmTable, CollectiveKind, CostModel, Hosts, Order, Placement};

use super::{from_smallest, part};

const INTRODUCTION: &str = "
## Two levels

Where it is known which ranks share a host, an operation can go among the ranks of each host, across hosts, and among
the ranks of each host again. The drawings show 6 ranks, of which 0 and 1, 2 and 3, 4 and 5 share a host. The table
gives rounds and bytes as above, inside of hosts and from host to host, for these.

In all_reduce, broadcast, reduce and barrier, any algorithm of the operation serves across hosts: here it is the one
after the last stroke of the name. Parts need hosts of equally many ranks; reduce_scatter and all_gather need these to
be neighbours too.

";

const CHOICES: &str = "
Two levels are chosen for a call if their time, with what messages take inside of hosts and what they take across, is
less than that of the fastest schedule above with all messages going across, of those that keep the order that is
asked for. The table says what all_reduce is then done by, if a message inside of a host takes a tenth of one across,
and that takes what the default says.

";

/// Hosts with this many consecutive ranks each.
fn hosts(count: u64, each: usize) -> Hosts {
    Hosts::new(&(0..count).flat_map(|host| vec![host; each]).collect::<Vec<u64>>())
}

/// The algorithms on the page and their descriptions.
static SHOWN: [(&TwoLevelAlgorithm, &str); 7] = [
    (&hierarchical::LEADERS_BINOMIAL, "To the first rank of each host, among these, and back."),
    (
        &hierarchical::PARTS_PAIRWISE,
        "A reduce_scatter on each host, an all_reduce of each part across, and an all_gather on each host.",
    ),
    (&hierarchical::REDUCE_SCATTER, "A reduce_scatter on each host, then one across."),
    (&hierarchical::ALL_GATHER, "An all_gather across, then one on each host."),
    (&hierarchical::BROADCAST_BINOMIAL, "To one rank of each host, then to the others."),
    (&hierarchical::REDUCE_BINOMIAL, "To one rank of each host, then from these to the root."),
    (
        &hierarchical::BARRIER_DISSEMINATION,
        "The first rank of each host hears of the others, then of the other hosts, and tells its own.",
    ),
];

pub(super) fn section(table: AlgorithmTable<'_>) -> String {
    let hosts = hosts(3, 2);
    let mut page = INTRODUCTION.to_owned() + "| schedule | inside | across | order |\n|---|---|---|---|\n";
    for (two, _) in SHOWN {
        let LevelCosts { inside, across } = two.cost(&hosts);
        let order = two.order(&hosts).map_or("–".to_owned(), |order| order.to_string());
        let [inside, across] =
            [inside, across].map(|cost| format!("{} / {}", cost.rounds, part(cost.path, two.chunks(&hosts))));
        page += &format!("| {} by {} | {inside} | {across} | {order} |\n", two.collective, two.name);
    }
    page += CHOICES;
    page += &choices(table);
    for (two, about) in SHOWN {
        let drawn = draw_programs(&two_level_programs(two, &hosts, 0));
        page += &format!("\n### {} by {}\n\n{about}\n\n```text\n{drawn}```\n", two.collective, two.name);
    }
    page
}

/// Returns the chosen algorithms of all_reduce, from the smallest buffers to the largest.
fn choices(table: AlgorithmTable<'_>) -> String {
    let mut lines = "| hosts | ranks on each | canonical order | any order |\n|---|---|---|---|\n".to_owned();
    for (count, each) in [(3, 2), (2, 4), (4, 8), (8, 3)] {
        let hosts = hosts(count, each);
        let [canonical, any] = [Order::Canonical, Order::Any]
            .map(|order| from_smallest(|bytes| chosen(table, &hosts, bytes, order)));
        lines += &format!("| {count} | {each} | {canonical} | {any} |\n");
    }
    lines
}

fn chosen(table: AlgorithmTable<'_>, hosts: &Hosts, bytes: usize, order: Order) -> &'static str {
    let across = CostModel::default();
    let inside = CostModel { round_ps: across.round_ps / 10, byte_ps: across.byte_ps / 10, ..across };
    let (collective, ranks) = (CollectiveKind::AllReduce, Placement::dedicated(hosts.world_size()));
    let flat = table.suggest(collective, ranks, bytes, order, &across).expect("there is one");
    let flat_time = flat.picoseconds(ranks, bytes, &across);
    let two_level = table.suggest_two_level(collective, hosts, bytes, order, [&inside, &across]);
    two_level.filter(|&(_, time)| time < flat_time).map_or(flat.name, |(two, _)| two.name)
}
