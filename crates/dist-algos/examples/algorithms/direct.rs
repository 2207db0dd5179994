//! The part of docs/algorithms.md on ranks that share memory.

use dist_algos::direct::{
    Crossovers, DirectAlgorithm, DirectCase, DirectCollective, DirectPlan, Ownership, verify,
};
use dist_algos::{AlgorithmTable, Partition, Source};
use dist_transport::Rank;
use dist_transport::shm_group::{GroupLayout, Reach};

use super::{from_smallest, part};

const INTRODUCTION: &str = "
## Ranks that share memory

All ranks of one host execute these schedules at once, each in the memory of the others. A rank publishes data in slots
or exposes its own memory, signals that it has done so, and waits for the signals of others. `distctl verify` proves that
two ranks only access the same memory at the same time if both read. The proof covers consecutive calls. All sums are in
canonical order.

Each drawing shows the steps of 3 ranks. There is a column for each rank, a line for the steps before each signal, and a
line for the steps after the last signal. Memory consists of parts, and parts consist of blocks: `1.0` is block 0 of part
1. The steps are:

- `s0=1.0` publishes block 0 of part 1 in slot 0; `s0=i¬1.0` publishes all other parts of the input.
- `!` signals; `?2×1` waits until rank 2 has signalled once, and `?*×1` until all other ranks have.
- `+1.0(s0)` sums the contributions in the slots 0 of all ranks. `+1.0(s0→2)` also writes the sum back to rank 2,
  `+1.0(s0→*)` to all ranks. `+1.0(m→*)` sums the contributions in all ranks' memory and writes the sum there.
- `=1.0←2(s0)` copies it from slot 0 of rank 2; `=1.0←2(m:0)` copies part 0 of the memory of rank 2.

Two ranks alternate in the use of the slots that they have for each other alone: data of one rank may be in a slot of the
other. Drawings with slots show two blocks. A single block of at most 48 bytes is published in the flag line instead of a
slot. If the operation has a root, a single block of at most 64 KiB is published in the eager buffer (`eager`), where
other ranks may read it up to three calls later. The root is rank 0.

The table has the number of signals of each rank. After the slash it has the data that the busiest rank publishes or
writes into other ranks' memory, and the data that it reads there, in units of buffers. In all_gather, reduce_scatter and
all_to_all the buffer holds all parts.
";

const SHARED: GroupLayout = GroupLayout::on_host(Reach::Write);

/// The numbers of ranks in the table of moved data.
const RANKS: [usize; 4] = [2, 3, 4, 8];

pub(super) fn section(table: AlgorithmTable<'_>) -> String {
    let mut page = INTRODUCTION.to_owned() + &costs(table) + &choices(table);
    for (collective, algorithm) in all(table) {
        page += &format!("\n### {}: {}\n\n", name(collective), algorithm.short_name());
        page += &format!("```text\n{}```\n", verify::draw(plan(collective, algorithm, 3, 2)));
    }
    page
}

fn all(table: AlgorithmTable<'_>) -> impl Iterator<Item = (DirectCollective, &'static DirectAlgorithm)> {
    DirectCollective::all(0).into_iter().flat_map(move |collective| {
        let served = table.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        served.map(move |algorithm| (collective, algorithm))
    })
}

fn name(collective: DirectCollective) -> String {
    let place = match collective {
        DirectCollective::ReduceScatter { of: Source::Buffer }
        | DirectCollective::AllGather { of: Source::Buffer } => " in place",
        _ => "",
    };
    collective.name().to_owned() + place
}

/// Returns a plan with this many blocks in each part, if the algorithm has blocks.
fn plan(
    collective: DirectCollective,
    algorithm: &'static DirectAlgorithm,
    world_size: usize,
    blocks: usize,
) -> DirectPlan {
    let places = algorithm.places(world_size);
    DirectPlan::new((collective, algorithm), world_size, 64 * blocks, 64 * places, SHARED)
        .expect("it serves and fits")
}

/// Returns the table of signals and moved data.
fn costs(table: AlgorithmTable<'_>) -> String {
    let mut lines = format!("\n| | |{}\n", RANKS.map(|ranks| format!(" {ranks} ranks |")).concat());
    lines += &format!("|---|---|{}\n", "---|".repeat(RANKS.len()));
    for (collective, algorithm) in all(table) {
        let cells = RANKS.map(|ranks| format!(" {} |", moved(collective, algorithm, ranks)));
        lines += &format!("| {} | {} |{}\n", name(collective), algorithm.short_name(), cells.concat());
    }
    lines
}

/// Formats for example `2 / 1, 3`, for a buffer with one block in each part.
fn moved(collective: DirectCollective, algorithm: &'static DirectAlgorithm, ranks: usize) -> String {
    let (plan, parts) = (plan(collective, algorithm, ranks, 1), algorithm.parts(ranks));
    let bytes = if collective == DirectCollective::Barrier { 0 } else { 64 * parts };
    let partition = Partition::new(bytes, 1, parts).expect("it fits");
    let traffic = || Rank::all(ranks).map(|rank| plan.traffic(rank, partition, Some(partition)));
    let [sent, read] = [traffic().map(|it| it.bytes_sent).max(), traffic().map(|it| it.bytes_received).max()]
        .map(|most| usize::try_from(most.unwrap_or(0)).expect("a few bytes"));
    format!("{} / {}, {}", plan.signals(), part(sent, bytes), part(read, bytes))
}

/// Returns the chosen algorithm for each kind of memory, from the smallest buffers to the largest.
fn choices(table: AlgorithmTable<'_>) -> String {
    let mut lines = "
What is chosen, by whose memory it is: borrowed, which others may read at most; owned by the operation, which they may
write into where the system lets them; allocated in the memory that all share.

| | ranks | borrowed | owned | allocated |
|---|---|---|---|---|
"
    .to_owned();
    for collective in DirectCollective::all(0) {
        for ranks in [2, 4] {
            let cells = [Ownership::Borrowed, Ownership::Owned, Ownership::Allocated]
                .map(|ownership| format!(" {} |", choice(table, collective, ranks, ownership)));
            lines += &format!("| {} | {ranks} |{}\n", name(collective), cells.concat());
        }
    }
    lines
}

fn choice(
    table: AlgorithmTable<'_>,
    collective: DirectCollective,
    world_size: usize,
    ownership: Ownership,
) -> String {
    let crossovers = Crossovers::default();
    from_smallest(|bytes| {
        let case = DirectCase { world_size, bytes, ownership, shared: &SHARED, crossovers };
        table.suggest_direct(collective.kind(), &case).expect("there is one").short_name()
    })
}
