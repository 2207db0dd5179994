//! The text of docs/algorithms.md, generated from the algorithms' properties.

#[path = "direct.rs"]
mod direct;
#[path = "two_level.rs"]
mod two_level;

use dist_algos::verify::{Goal, draw};
use dist_algos::{AlgorithmTable, CollectiveKind, CostModel, MessageAlgorithm, Order, Placement};

const INTRODUCTION: &str = "\
# Algorithms

This page is made by `cargo xtask docs` from the schedules themselves; a test compares the two.

Each drawing shows what 5 ranks do, or 4 or 6 where there is no schedule for 5: a column for each rank, a line for each
round. `→2 0-3` sends chunks 0 to 3 to rank 2, and `→2 i1` chunk 1 of the input. `←2 =1` receives chunk 1 from rank 2 in
the place of what was there; `←2 +1` reduces it into what is there. Slots hold one chunk each beside the buffer:
`←2 s0=1` receives into slot 0, `s1+s0` reduces slot 0 into slot 1, `b+s0` into the buffer, and `b=s0` copies it there.
The root is rank 0. Of more than 12 rounds the middle is left out.

The tables give rounds (messages that follow one another) and, after the stroke, bytes that follow one another, in
buffers: the whole buffer is 1; in gather, scatter and all_to_all that is all that one rank has to send or to get. The
last line is what no schedule can do better, though maybe not both at once, nor if several messages are under way at
once. `distctl verify` proves it. Canonical orders give the same bits whatever the algorithm.

Which algorithm is chosen depends on a cost model: what a round, a byte and the reduction of a byte take. The choices
below are those of the default, for which a round takes as long as 64 KiB; a machine measures its own.
";

/// The numbers of ranks in the tables of costs.
const RANKS: [usize; 5] = [2, 5, 8, 12, 64];

/// Returns the page on the algorithms of a table.
pub(crate) fn algorithms(table: AlgorithmTable<'_>) -> String {
    let mut page = INTRODUCTION.to_owned();
    for collective in CollectiveKind::ALL {
        let of_operation = || table.messages().filter(move |algorithm| algorithm.collective == collective);
        page += &format!("\n## {collective}\n\n");
        page += &costs(collective, of_operation());
        page += &choices(table, collective);
        for algorithm in of_operation() {
            let size = [5, 4, 6].into_iter().find(|&size| algorithm.supports(size));
            let size = size.expect("one of them is supported");
            page += &format!("\n### {collective} by {}\n\n", algorithm.name);
            page += &format!("{}\n\n```text\n{}```\n", wrapped(algorithm.about), draw(algorithm, size, 0));
        }
    }
    page + &two_level::section(table) + &direct::section(table)
}

/// Returns the rounds, bytes and orders of an operation's algorithms.
fn costs(collective: CollectiveKind, algorithms: impl Iterator<Item = &'static MessageAlgorithm>) -> String {
    let mut table = format!("| algorithm |{}\n", RANKS.map(|ranks| format!(" {ranks} ranks |")).concat());
    table += &format!("|---|{}\n", "---|".repeat(RANKS.len()));
    for algorithm in algorithms {
        let cell = |ranks: usize| {
            if !algorithm.supports(ranks) {
                return " – |".to_owned();
            }
            let (cost, chunks) = (algorithm.cost(ranks), algorithm.chunks(ranks));
            let order = algorithm.order(ranks).map_or(String::new(), |order| format!(", {order}"));
            format!(" {} / {}{order} |", cost.rounds, part(cost.path, chunks))
        };
        table += &format!("| {} |{}\n", algorithm.name, RANKS.map(cell).concat());
    }
    let bound = |ranks: usize| {
        let bound = Goal::of_collective(collective, 0).lower_bound(ranks);
        format!(" {} / {} |", bound.rounds, part(bound.moved, ranks))
    };
    table + &format!("| least |{}\n", RANKS.map(bound).concat())
}

/// Wraps the text in lines of at most 120 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= 120 {
            *line += &format!(" {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}

fn part(count: usize, of: usize) -> String {
    let text = format!("{:.2}", count as f64 / of.max(1) as f64);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Returns the chosen algorithms, in canonical order and in any order, from the smallest buffers to the largest.
fn choices(table: AlgorithmTable<'_>, collective: CollectiveKind) -> String {
    let orders: &[(Order, &str)] = match Goal::of_collective(collective, 0).reduces() {
        true => &[(Order::Canonical, "canonical order"), (Order::Any, "any order")],
        false => &[(Order::Any, "chosen")],
    };
    let mut lines =
        format!("\n| ranks |{}\n", orders.iter().map(|(_, title)| format!(" {title} |")).collect::<String>());
    lines += &format!("|---|{}\n", "---|".repeat(orders.len()));
    for ranks in RANKS {
        let chosen = |order| {
            let (placement, model) = (Placement::dedicated(ranks), CostModel::default());
            from_smallest(|bytes| {
                table.suggest(collective, placement, bytes, order, &model).expect("there is one").name
            })
        };
        let cells = orders.iter().map(|&(order, _)| format!(" {} |", chosen(order)));
        lines += &format!("| {ranks} |{}\n", cells.collect::<String>());
    }
    lines
}

/// Formats a choice by size, for example `recursive_doubling, from 512 KiB halving_doubling`.
fn from_smallest(chosen: impl Fn(usize) -> &'static str) -> String {
    let mut text = String::new();
    let mut last = "";
    for power in 3..=30 {
        let name = chosen(1 << power);
        if name != last {
            let from = if last.is_empty() { String::new() } else { format!(", from {} ", size(power)) };
            text += &format!("{from}{name}");
            last = name;
        }
    }
    text
}

fn size(power: u32) -> String {
    match power {
        0..10 => format!("{} B", 1_usize << power),
        10..20 => format!("{} KiB", 1_usize << (power - 10)),
        _ => format!("{} MiB", 1_usize << (power - 20)),
    }
}
