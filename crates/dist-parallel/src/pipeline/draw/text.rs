//! A timeline as text: a row per rank, time from left to right.

use std::fmt;
use std::time::Duration;

use crate::pipeline::{Span, Timeline};

/// Formats a row per rank and a column per unit of time. Computations begin and end at a column if there is space. A
/// computation has its abbreviation and its micro-batch, after its stage if a rank has several. `.` is a bubble.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several = self
            .ranks
            .iter()
            .any(|spans| spans.windows(2).any(|pair| pair[0].action.stage() != pair[1].action.stage()));
        let labels = || self.ranks.iter().flatten().map(|span| label(span, several).len());
        let cell = labels().max().unwrap_or(1) + 1;
        let makespan = self.makespan();
        let columns_max = (LINE_MAX / cell).max(1) as u128;
        let unit = match self.unit() {
            0 => return Ok(()),
            unit if makespan.as_nanos() / unit <= columns_max => unit,
            _ => makespan.as_nanos().div_ceil(columns_max),
        };
        let column =
            |time: Duration| usize::try_from((time.as_nanos() + unit / 2) / unit).unwrap_or(usize::MAX);
        let columns = column(makespan);
        let width = self.ranks.len().saturating_sub(1).to_string().len();
        for (rank, spans) in self.ranks.iter().enumerate() {
            let mut row = String::new();
            for span in spans {
                let (start, end) = (column(span.start), column(span.end));
                bubbles(&mut row, start, cell);
                let room = (cell * end.saturating_sub(start)).saturating_sub(1);
                let label = label(span, several);
                if room > 0 && row.len() <= cell * start {
                    row.push_str(&format!("{label:-<room$.room$} "));
                }
            }
            bubbles(&mut row, columns, cell);
            writeln!(f, "rank {rank:>width$}  {}", row.trim_end())?;
        }
        Ok(())
    }
}

/// Fills a row with bubbles up to a column.
fn bubbles(row: &mut String, column: usize, cell: usize) {
    while row.len() < column * cell {
        row.push_str(&format!("{:<cell$}", "."));
    }
}

fn label(span: &Span, several: bool) -> String {
    if several {
        return span.action.to_string();
    }
    let micro_batch = span.action.micro_batch().map_or_else(String::new, |index| index.to_string());
    format!("{}{micro_batch}", span.action.abbreviation())
}

impl Timeline {
    /// Returns the greatest common divisor of all times in nanoseconds, or 0 if all are 0.
    fn unit(&self) -> u128 {
        let times = self.ranks.iter().flatten().flat_map(|span| [span.start, span.end]);
        times.map(|time| time.as_nanos()).fold(0, greatest_common_divisor)
    }
}

const fn greatest_common_divisor(mut a: u128, mut b: u128) -> u128 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The maximum length of a line.
const LINE_MAX: usize = 320;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Costs, ScheduleKind, StageCost};

    fn text(
        kind: ScheduleKind,
        ranks: usize,
        micro_batches: usize,
        [forward, input, weight]: [u32; 3],
    ) -> String {
        let time = |units| units * Duration::from_micros(7);
        let stage =
            StageCost { forward: time(forward), input_gradient: time(input), weight_gradient: time(weight) };
        let schedule = kind.schedule(ranks, micro_batches).unwrap();
        Timeline::predict(&schedule, &Costs::uniform(schedule.stages(), stage)).to_string()
    }

    #[test]
    fn ranks_are_rows_and_bubbles_are_dots() {
        let drawn = text(ScheduleKind::OneForwardOneBackward, 2, 3, [1, 1, 1]);
        let expected = "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n\
                        rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn stages_are_named_if_a_rank_has_several() {
        let drawn = text(ScheduleKind::Zbv, 1, 1, [1, 1, 1]);
        assert_eq!(drawn, "rank 0  0F0 1F0 1I0 1W0 0I0 0W0\n");
    }

    #[test]
    fn lines_do_not_grow_without_end() {
        for line in text(ScheduleKind::Gpipe, 3, 500, [3, 5, 7]).lines() {
            assert!(line.len() <= LINE_MAX + 10 && line.contains('F'), "{line}");
        }
        assert_eq!(text(ScheduleKind::Gpipe, 2, 2, [0, 0, 0]), "");
    }
}
