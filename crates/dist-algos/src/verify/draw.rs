//! Drawings of schedules: the actions of every rank, round by round.

use std::fmt::Write;

use dist_transport::Rank;

use super::{RankProgram, programs};
use crate::{ChunkLocation, Chunks, MessageAlgorithm, OnArrival, ReceiveHalf, SendHalf, Source, Step};

/// Maximum number of rounds of a drawing; of more rounds, the middle is left out.
const ROUNDS_MAX: usize = 12;

/// Returns a drawing of a schedule: a table with a column for each rank and a line for each round of messages.
///
/// - `→2 0-3` sends chunks 0 to 3 to rank 2, `→2 i1` sends chunk 1 of the input.
/// - `←2 =1` receives chunk 1 from rank 2 and replaces the content, `←2 +1` reduces it into the content. `←2 s0=1`
///   and `←2 s0+1` do the same in slot 0.
/// - `s1+s0` reduces slot 0 into slot 1, `b+s0` reduces it into the buffer, and `b=s0` copies it there.
///
/// ```
/// use dist_algos::{ring, verify::draw};
///
/// let drawing = draw(&ring::ALL_GATHER, 3, 0);
/// let expected = "\
/// round  rank 0       rank 1       rank 2
///     1  →1 0  ←2 =2  →2 1  ←0 =0  →0 2  ←1 =1
///     2  →1 2  ←2 =1  →2 0  ←0 =2  →0 1  ←1 =0
/// ";
/// assert_eq!(drawing, expected);
/// ```
pub fn draw(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> String {
    draw_programs(&programs(algorithm, world_size, root))
}

/// Draws programs, one for each rank, as [`draw`] does.
pub fn draw_programs(programs: &[RankProgram]) -> String {
    let (rounds, world_size) = (rounds(programs), programs.len());
    let titles = (0..world_size).map(|rank| format!("rank {rank}"));
    let mut lines = vec![("round".to_owned(), titles.collect::<Vec<String>>())];
    let hidden = rounds.len().saturating_sub(ROUNDS_MAX);
    let (before, after) = if hidden > 0 { (ROUNDS_MAX / 2, ROUNDS_MAX / 2 + hidden) } else { (0, 0) };
    for (index, cells) in rounds.into_iter().enumerate() {
        if index == before && hidden > 0 {
            lines.push(("…".to_owned(), vec![String::new(); world_size]));
        }
        if index < before || index >= after {
            lines.push(((index + 1).to_string(), cells));
        }
    }
    table(&lines)
}

/// Formats a table with columns as wide as their content.
pub(crate) fn table(lines: &[(String, Vec<String>)]) -> String {
    let columns = lines.first().map_or(0, |(_, cells)| cells.len());
    let width =
        |column: usize| lines.iter().map(|(_, cells)| cells[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let title_width = lines.iter().map(|(title, _)| title.chars().count()).max().unwrap_or(0);
    let mut table = String::new();
    for (title, cells) in lines {
        let mut line = format!("{title:>title_width$}");
        for (cell, width) in cells.iter().zip(&widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "  {cell:<width$}");
        }
        table += line.trim_end();
        table.push('\n');
    }
    table
}

/// Returns the actions of each round. Every message passes as soon as its sender and its receiver have both reached
/// it.
fn rounds(programs: &[RankProgram]) -> Vec<Vec<String>> {
    let mut ranks: Vec<DrawnRank<'_>> = Rank::all(programs.len())
        .zip(programs)
        .map(|(rank, program)| DrawnRank::new(rank, program))
        .collect();
    let mut rounds = Vec::new();
    loop {
        let mut cells = vec![String::new(); ranks.len()];
        let sends = ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, drawn)| drawn.sends.iter().map(move |send| (rank, *send)));
        let passing: Vec<(usize, SendHalf, ReceiveHalf)> = sends
            .filter_map(|(rank, send)| {
                let receive = ranks[send.to].receives.iter().find(|receive| receive.from == rank)?;
                Some((rank, send, *receive))
            })
            .collect();
        if passing.is_empty() {
            return rounds;
        }
        for &(from, send, receive) in &passing {
            ranks[from].sends.retain(|other| other != &send);
            ranks[send.to].receives.retain(|other| other != &receive);
            add(&mut cells[from], &sent(send));
        }
        for &(_, send, receive) in &passing {
            add(&mut cells[send.to], &received(receive));
        }
        for (drawn, cell) in ranks.iter_mut().zip(&mut cells) {
            drawn.go_on(cell);
        }
        rounds.push(cells);
    }
}

/// One rank and its remaining steps.
struct DrawnRank<'a> {
    rank: Rank,
    steps: std::slice::Iter<'a, Step>,
    sends: Vec<SendHalf>,
    receives: Vec<ReceiveHalf>,
    /// The local steps before its first message.
    begun: String,
}

impl<'a> DrawnRank<'a> {
    fn new(rank: Rank, program: &'a RankProgram) -> Self {
        let (sends, receives) = (Vec::new(), Vec::new());
        let mut drawn = Self { rank, steps: program.steps.iter(), sends, receives, begun: String::new() };
        let mut begun = String::new();
        drawn.go_on(&mut begun);
        drawn.begun = begun;
        drawn
    }

    /// Does the local steps up to the next step with a message.
    fn go_on(&mut self, cell: &mut String) {
        if !self.begun.is_empty() {
            *cell = format!("{}  {cell}", std::mem::take(&mut self.begun));
        }
        while self.sends.is_empty() && self.receives.is_empty() {
            let Some(step) = self.steps.next() else { return };
            match *step {
                Step::Combine { from, into, .. } => add(cell, &format!("{}+s{from}", place(into))),
                Step::Copy { from, into, .. } => add(cell, &format!("{}={}", place(into), place(from))),
                Step::Exchange { .. } | Step::Window { .. } => {
                    let (sends, receives) = step.halves(self.rank);
                    (self.sends, self.receives) = (sends.into_vec(), receives.into_vec());
                }
            }
        }
    }
}

fn add(cell: &mut String, what: &str) {
    if !cell.is_empty() {
        cell.push_str("  ");
    }
    cell.push_str(what);
}

fn sent(SendHalf { to, chunks, of }: SendHalf) -> String {
    let input = if of == Source::Input { "i" } else { "" };
    format!("→{to} {input}{}", numbers(chunks)).trim_end().to_owned()
}

fn received(ReceiveHalf { from, chunks, place, then }: ReceiveHalf) -> String {
    if chunks.is_empty() {
        return format!("←{from}");
    }
    let slot = match place {
        ChunkLocation::Buffer => String::new(),
        ChunkLocation::Slot(slot) => format!("s{slot}"),
    };
    let then = if then == OnArrival::Reduce { '+' } else { '=' };
    format!("←{from} {slot}{then}{}", numbers(chunks))
}

fn place(place: ChunkLocation) -> String {
    match place {
        ChunkLocation::Buffer => "b".to_owned(),
        ChunkLocation::Slot(slot) => format!("s{slot}"),
    }
}

/// Formats chunks, for example `0-2,4`.
fn numbers(chunks: Chunks) -> String {
    let run = |run: Chunks| match run.len() {
        1 => run.first().to_string(),
        _ => format!("{}-{}", run.first(), run.end() - 1),
    };
    chunks.contiguous().filter(|run| !run.is_empty()).map(run).collect::<Vec<_>>().join(",")
}
