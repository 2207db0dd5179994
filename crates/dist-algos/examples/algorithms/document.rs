//! The text of docs/algorithms.md, generated from the algorithms' properties.

#[path = "direct.rs"]
mod direct;
#[path = "two_level.rs"]
mod two_level;

use dist_algos::verify::{Subject, draw};
use dist_algos::{CostModel, Order};

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

/// Returns the page.
pub(crate) fn algorithms() -> String {
    let mut page = INTRODUCTION.to_owned();
    let mut subjects: Vec<Subject> = Subject::all().collect();
    while let Some(&first) = subjects.first() {
        let of_operation = |subject: &Subject| subject.operation() == first.operation();
        let operation: Vec<Subject> = subjects.iter().copied().filter(of_operation).collect();
        subjects.retain(|subject| !of_operation(subject));
        page += &format!("\n## {}\n\n", first.operation());
        page += &costs(&operation);
        page += &choices(first);
        for subject in operation {
            let size =
                [5, 4, 6].into_iter().find(|&size| subject.supports(size)).expect("one of them is supported");
            page += &format!("\n### {} by {}\n\n", subject.operation(), subject.algorithm());
            page += &format!("{}\n\n```text\n{}```\n", wrapped(about(subject)), draw(subject, size, 0));
        }
    }
    page + &two_level::section() + &direct::section()
}

/// Returns the rounds, bytes and orders of an operation's algorithms.
fn costs(operation: &[Subject]) -> String {
    let goal = operation[0].goal(0);
    let mut table = format!("| algorithm |{}\n", RANKS.map(|ranks| format!(" {ranks} ranks |")).concat());
    table += &format!("|---|{}\n", "---|".repeat(RANKS.len()));
    for subject in operation {
        let cell = |ranks: usize| {
            if !subject.supports(ranks) {
                return " – |".to_owned();
            }
            let (cost, chunks) = (subject.cost(ranks), subject.chunks(ranks));
            let order = subject.order(ranks).map_or(String::new(), |order| format!(", {order}"));
            format!(" {} / {}{order} |", cost.rounds, part(cost.path, chunks))
        };
        table += &format!("| {} |{}\n", subject.algorithm(), RANKS.map(cell).concat());
    }
    let bound = |ranks: usize| {
        let bound = goal.lower_bound(ranks);
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
fn choices(subject: Subject) -> String {
    let reduces = subject.order(2).is_some();
    let orders: &[(Order, &str)] = match reduces {
        true => &[(Order::Canonical, "canonical order"), (Order::Any, "any order")],
        false => &[(Order::Any, "chosen")],
    };
    let mut table =
        format!("\n| ranks |{}\n", orders.iter().map(|(_, title)| format!(" {title} |")).collect::<String>());
    table += &format!("|---|{}\n", "---|".repeat(orders.len()));
    for ranks in RANKS {
        let cells = orders.iter().map(|&(order, _)| format!(" {} |", choice(subject, ranks, order)));
        table += &format!("| {ranks} |{}\n", cells.collect::<String>());
    }
    table
}

/// Formats a choice, for example `recursive_doubling, from 512 KiB halving_doubling`.
fn choice(subject: Subject, ranks: usize, order: Order) -> String {
    let mut text = String::new();
    let mut last = "";
    for power in 3..=30 {
        let name = subject.suggested(ranks, 1 << power, order, &CostModel::default());
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

/// Returns a short description of an algorithm.
fn about(subject: Subject) -> &'static str {
    match (subject.operation(), subject.algorithm()) {
        ("all_reduce", "recursive_doubling") => {
            "Ranks at distance 1, 2, 4, … exchange the whole buffer. Of a world that is no power of two, some ranks give \
             their buffers to a neighbour first and get the result last."
        }
        ("all_reduce", "halving_doubling") => {
            "A half, a quarter, an eighth, … of the buffer, and back. A world that is no power of two is divided into blocks \
             that are; smaller blocks give their sums to larger ones."
        }
        ("all_reduce", "circulant") => {
            "The reduce_scatter and the all_gather of the same name: few rounds and the fewest bytes, in every world."
        }
        ("all_reduce", "binomial") => "A reduce to rank 0 and a broadcast from it, along one tree.",
        ("all_reduce", "ring") => {
            "Chunks go once round the ring and are added up, then once more to be handed out."
        }
        ("all_reduce", "pairwise_circulant") => "The pairwise reduce_scatter, then the circulant all_gather.",
        ("reduce_scatter", "halving_doubling") => {
            "Ranks at distance 1, 2, 4, … give each other the half of their sums that the other needs."
        }
        ("reduce_scatter", "circulant") => {
            "All ranks talk over the same distances: half the world, a quarter, an eighth, …, rounded up."
        }
        ("reduce_scatter", "ring") => {
            "Every chunk sets out on its right neighbour, goes round, and comes home."
        }
        ("reduce_scatter", "pairwise") => {
            "Every rank gets its chunk from every other and adds up in the order of the canonical tree."
        }
        ("all_gather", "recursive_doubling") => "Ranks at distance 1, 2, 4, … exchange all that they have.",
        ("all_gather", "bruck") => {
            "Ranks get all that the rank at distance 1, 2, 4, … has, whatever the world."
        }
        ("all_gather", "circulant") => "The way of the circulant reduce_scatter back.",
        ("all_gather", "neighbour_exchange") => {
            "The left and the right neighbour in turn, two chunks at a time."
        }
        ("all_gather", "ring") => "Every chunk goes once round.",
        ("broadcast", "binomial") => {
            "Down the canonical tree: each rank that has the buffer sends it on, and their number doubles every round."
        }
        ("broadcast", "knomial") => {
            "Down a flatter tree, in which a rank has up to three children on a level."
        }
        ("broadcast", "chain") => "From rank to rank in 32 chunks, one behind the other.",
        ("broadcast", "scatter_circulant") => "A chunk to every rank, then a circulant all_gather.",
        ("reduce", "binomial") => "Up the canonical tree, whichever rank is the root.",
        ("reduce", "pairwise_gather") => "The pairwise reduce_scatter, then every chunk to the root.",
        ("gather", "linear") => "Every rank to the root, one after the other.",
        ("gather", "binomial") => "Up a tree whose subtrees are neighbours.",
        ("scatter", "linear") => "The root to every rank, one after the other.",
        ("scatter", "binomial") => "Down a tree whose subtrees are neighbours.",
        ("all_to_all", "windowed") => "Every chunk to its rank, four of them under way at once.",
        ("all_to_all", "pairwise") => {
            "Every chunk to its rank, one after the other; at powers of two, ranks swap."
        }
        ("all_to_all", "bruck") => {
            "Chunk j of the work buffer has j places to go, and takes the steps that the binary digits of j say."
        }
        ("scan", _) => {
            "Blocks of 1, 2, 4, … ranks tell each other their sums; what comes from the left is added."
        }
        ("exclusive_scan", _) => "The same without the rank's own part.",
        ("barrier", "ring") => "A token goes round twice.",
        ("barrier", "dissemination") => "Everybody tells ranks at distance 1, 2, 4, … what it knows.",
        (operation, algorithm) => panic!("say here what {operation} by {algorithm} does"),
    }
}
