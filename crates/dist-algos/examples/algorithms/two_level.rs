//! The part of the page on schedules of two levels.

use dist_algos::hierarchical::{self, Form, LevelCosts, Plan, Steps};
use dist_algos::verify::{self, Program, draw_programs};
use dist_algos::{AllReduce, Barrier, Broadcast, Choice, CostModel, Crew, Hosts, Order, Reduce};
use dist_transport::Rank;

use super::{part, size};

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

/// Hosts of so many neighbouring ranks each.
fn hosts(count: u64, each: usize) -> Hosts {
    Hosts::new(&(0..count).flat_map(|host| vec![host; each]).collect::<Vec<u64>>())
}

struct Shown {
    name: &'static str,
    about: &'static str,
    chunks: usize,
    cost: LevelCosts,
    order: Option<Order>,
    programs: Vec<Program>,
}

pub(super) fn section() -> String {
    let hosts = hosts(3, 2);
    let mut page = INTRODUCTION.to_owned() + "| schedule | inside | across | order |\n|---|---|---|---|\n";
    let all = shown(&hosts);
    for Shown { name, chunks, cost: LevelCosts { inside, across }, order, .. } in &all {
        let order = order.map_or("–".to_owned(), |order| order.to_string());
        let [inside, across] =
            [inside, across].map(|cost| format!("{} / {}", cost.rounds, part(cost.path, *chunks)));
        page += &format!("| {name} | {inside} | {across} | {order} |\n");
    }
    page += CHOICES;
    page += &choices();
    for Shown { name, about, programs, .. } in &all {
        page += &format!("\n### {name}\n\n{about}\n\n```text\n{}```\n", draw_programs(programs));
    }
    page
}

fn shown(hosts: &Hosts) -> Vec<Shown> {
    let (broadcast, reduce, barrier) = (Broadcast::Binomial, Reduce::Binomial, Barrier::Dissemination);
    let world_size = hosts.world_size();
    vec![
        plan(
            hosts,
            Plan { form: Form::Leaders, across: AllReduce::Binomial },
            "all_reduce by two_level/leaders/binomial",
            "To the first rank of each host, among these, and back.",
        ),
        plan(
            hosts,
            Plan { form: Form::Parts, across: AllReduce::PairwiseCirculant },
            "all_reduce by two_level/parts/pairwise_circulant",
            "A reduce_scatter on each host, an all_reduce of each part across, and an all_gather on each host.",
        ),
        Shown {
            name: "reduce_scatter by two_level",
            about: "A reduce_scatter on each host, then one across.",
            chunks: world_size,
            cost: hierarchical::reduce_scatter_cost(hosts),
            order: Some(hierarchical::reduce_scatter_order(hosts)),
            programs: programs(hosts, |rank| hierarchical::reduce_scatter(rank, hosts)),
        },
        Shown {
            name: "all_gather by two_level",
            about: "An all_gather across, then one on each host.",
            chunks: world_size,
            cost: hierarchical::all_gather_cost(hosts),
            order: None,
            programs: programs(hosts, |rank| hierarchical::all_gather(rank, hosts)),
        },
        Shown {
            name: "broadcast by two_level/binomial",
            about: "To one rank of each host, then to the others.",
            chunks: broadcast.chunks(hosts.count()),
            cost: hierarchical::broadcast_cost(hosts, broadcast),
            order: None,
            programs: programs(hosts, |rank| hierarchical::broadcast(rank, hosts, broadcast, 0)),
        },
        Shown {
            name: "reduce by two_level/binomial",
            about: "To one rank of each host, then from these to the root.",
            chunks: reduce.chunks(hosts.count()),
            cost: hierarchical::reduce_cost(hosts, reduce),
            order: Some(hosts.order().min(reduce.order(hosts.count()))),
            programs: programs(hosts, |rank| hierarchical::reduce(rank, hosts, reduce, 0)),
        },
        Shown {
            name: "barrier by two_level/dissemination",
            about: "The first rank of each host hears of the others, then of the other hosts, and tells its own.",
            chunks: 1,
            cost: hierarchical::barrier_cost(hosts, barrier),
            order: None,
            programs: programs(hosts, |rank| hierarchical::barrier(rank, hosts, barrier)),
        },
    ]
}

fn plan(hosts: &Hosts, plan: Plan, name: &'static str, about: &'static str) -> Shown {
    let programs = verify::hierarchical::all_reduce_programs(plan, hosts);
    let (chunks, cost, order) = (plan.chunks(hosts), plan.cost(hosts), Some(plan.order(hosts)));
    Shown { name, about, chunks, cost, order, programs }
}

fn programs<'a>(hosts: &Hosts, steps: impl Fn(Rank) -> Option<Steps<'a>>) -> Vec<Program> {
    let program = |rank| Program { steps: steps(rank).into_iter().flatten().collect(), finish: None };
    Rank::all(hosts.world_size()).map(program).collect()
}

/// What all_reduce is done by, from the smallest buffers to the largest.
fn choices() -> String {
    let mut table = "| hosts | ranks on each | canonical order | any order |\n|---|---|---|---|\n".to_owned();
    for (count, each) in [(3, 2), (2, 4), (4, 8), (8, 3)] {
        let hosts = hosts(count, each);
        let [canonical, any] = [Order::Canonical, Order::Any].map(|order| choice(&hosts, order));
        table += &format!("| {count} | {each} | {canonical} | {any} |\n");
    }
    table
}

fn choice(hosts: &Hosts, order: Order) -> String {
    let (mut text, mut last) = (String::new(), String::new());
    for power in 3..=30 {
        let name = chosen(hosts, 1 << power, order);
        if name != last {
            let from = if last.is_empty() { String::new() } else { format!(", from {} ", size(power)) };
            text += &format!("{from}{name}");
            last = name;
        }
    }
    text
}

fn chosen(hosts: &Hosts, bytes: usize, order: Order) -> String {
    let across = CostModel::default();
    let inside = CostModel { round_ps: across.round_ps / 10, byte_ps: across.byte_ps / 10, ..across };
    let ranks = hosts.world_size();
    let flat = AllReduce::suggest(ranks, bytes, order, &across);
    let flat_time = flat.picoseconds(Crew::spacious(ranks), bytes, &across);
    let time = |plan: Plan| plan.cost(hosts).picoseconds(&inside, &across, bytes, plan.chunks(hosts));
    match Plan::suggest(hosts, bytes, order, &inside, &across).filter(|&plan| time(plan) < flat_time) {
        Some(plan) => format!("two_level/{plan}"),
        None => flat.name().to_owned(),
    }
}
