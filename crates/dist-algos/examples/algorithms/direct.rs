//! The part of docs/algorithms.md on ranks that share memory.

use dist_algos::direct::{Crossovers, DirectAlgorithm, DirectCollective, DirectPlan, Ownership, verify};
use dist_algos::{Partition, Source};
use dist_transport::{GroupLayout, Rank, Reach};

use super::{part, size};

const INTRODUCTION: &str = "
## Ranks that share memory

All ranks of one host do these at once, each in the memory of the others. A rank publishes what others need in slots of
its own, or exposes its memory, says so by a post, and waits for the posts of others. `distctl verify` proves that no
two ranks are ever at the same memory at the same time unless both read, in calls that follow one another; all sums are
in canonical order.

Each drawing shows what 3 ranks do: a column for each rank, a line for what leads to each post, and one for what comes
after the last. DirectMemory is partition into parts, and parts into blocks: `1.0` is block 0 of part 1. `s0=1.0` publishes it in slot
0, and `s0=i¬1.0` all parts of the input but that. `!` posts; `?2×1` waits until rank 2 has posted once, and `?*×1` until
all have. `+1.0(s0)` adds up what all ranks have in slots 0, `+1.0(s0→2)` puts the sum back into that of rank 2 too,
`+1.0(s0→*)` into all of them, and `+1.0(m→*)` adds up all ranks' memory and puts the sum there. `=1.0←2(s0)` copies what
rank 2 has in slot 0, and `=1.0←2(m:0)` what is part 0 of its memory. Two ranks take turns with what
they have for each other alone: what one has published for the other may be in the other's slot. Drawings with slots show two
blocks. Of one block that fits a line of 48 bytes, the line takes the place of the slot, and of up to 64 KiB that have a
root the sheet, where others may read them up to three calls later. The root is rank 0.

The table gives the posts of each rank and, after the stroke, what the busiest rank publishes or writes into others'
memory, and what it reads there, in buffers; in all_gather, reduce_scatter and all_to_all the buffer is that of all parts.
";

const SHARED: GroupLayout = GroupLayout::on_host(Reach::Write);

/// Numbers of ranks in the table of what is moved.
const RANKS: [usize; 4] = [2, 3, 4, 8];

pub(super) fn section() -> String {
    let mut page = INTRODUCTION.to_owned() + &table() + &choices();
    for (collective, algorithm) in all() {
        page += &format!("\n### {}: {algorithm}\n\n", name(collective));
        page += &format!("```text\n{}```\n", verify::draw(plan(collective, algorithm, 3, 2)));
    }
    page
}

fn all() -> impl Iterator<Item = (DirectCollective, DirectAlgorithm)> {
    let forms = |collective| DirectAlgorithm::ALL.map(|algorithm| (collective, algorithm));
    DirectCollective::all(0)
        .into_iter()
        .flat_map(forms)
        .filter(|(collective, algorithm)| algorithm.serves(*collective))
}

fn name(collective: DirectCollective) -> String {
    let place = match collective {
        DirectCollective::ReduceScatter { of: Source::Buffer }
        | DirectCollective::AllGather { of: Source::Buffer } => " in place",
        _ => "",
    };
    collective.name().to_owned() + place
}

/// With parts of so many blocks, where the form has blocks.
fn plan(
    collective: DirectCollective,
    algorithm: DirectAlgorithm,
    world_size: usize,
    blocks: usize,
) -> DirectPlan {
    let places = collective.places(algorithm, world_size);
    DirectPlan::new((collective, algorithm), world_size, 64 * blocks, 64 * places, SHARED)
        .expect("it serves and fits")
}

/// Posts and what is moved.
fn table() -> String {
    let mut table = format!("\n| | |{}\n", RANKS.map(|ranks| format!(" {ranks} ranks |")).concat());
    table += &format!("|---|---|{}\n", "---|".repeat(RANKS.len()));
    for (collective, algorithm) in all() {
        let cells = RANKS.map(|ranks| format!(" {} |", moved(collective, algorithm, ranks)));
        table += &format!("| {} | {algorithm} |{}\n", name(collective), cells.concat());
    }
    table
}

/// Such as `2 / 1, 3`: of a buffer that is one block of each part.
fn moved(collective: DirectCollective, algorithm: DirectAlgorithm, ranks: usize) -> String {
    let (plan, parts) = (plan(collective, algorithm, ranks, 1), collective.parts(algorithm, ranks));
    let bytes = if collective == DirectCollective::Barrier { 0 } else { 64 * parts };
    let partition = Partition::new(bytes, 1, parts).expect("it fits");
    let traffic = || Rank::all(ranks).map(|rank| plan.traffic(rank, partition, Some(partition)));
    let [sent, read] = [traffic().map(|it| it.bytes_sent).max(), traffic().map(|it| it.bytes_received).max()]
        .map(|most| usize::try_from(most.unwrap_or(0)).expect("a few bytes"));
    format!("{} / {}, {}", plan.posts(), part(sent, bytes), part(read, bytes))
}

/// What is chosen for each kind of memory, from the smallest buffers to the largest.
fn choices() -> String {
    let mut table = "
What is chosen, by whose memory it is: borrowed, which others may read at most; owned by the operation, which they may
write into where the system lets them; allocated in the memory that all share.

| | ranks | borrowed | owned | allocated |
|---|---|---|---|---|
"
    .to_owned();
    for collective in DirectCollective::all(0) {
        for ranks in [2, 4] {
            let cells = [Ownership::Borrowed, Ownership::Owned, Ownership::Allocated]
                .map(|ownership| format!(" {} |", choice(collective, ranks, ownership)));
            table += &format!("| {} | {ranks} |{}\n", name(collective), cells.concat());
        }
    }
    table
}

fn choice(collective: DirectCollective, ranks: usize, ownership: Ownership) -> String {
    let (mut text, mut last) = (String::new(), None);
    for power in 3..=30 {
        let algorithm = DirectAlgorithm::suggest(
            collective,
            ranks,
            1 << power,
            (ownership, &SHARED),
            Crossovers::default(),
        );
        if last != Some(algorithm) {
            let from = if last.is_none() { String::new() } else { format!(", from {} ", size(power)) };
            text += &format!("{from}{algorithm}");
            last = Some(algorithm);
        }
    }
    text
}
