//! Tables of measurements and predictions, in the format of the lab notebook in docs/lab.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::compare::size;

/// A line of `distctl sim compare --json`.
#[derive(serde::Deserialize)]
pub(super) struct Line {
    op: String,
    ranks: usize,
    bytes: usize,
    algorithm: String,
    measured_us: f64,
    predicted_us: f64,
    /// `true` if the error bounds apply to the prediction.
    bound: bool,
}

impl Line {
    fn error(&self) -> f64 {
        (self.predicted_us / self.measured_us - 1.0).abs()
    }
}

/// Returns the table of a place, and a summary.
pub(super) fn of(place: &str, lines: &[Line]) -> String {
    if lines.is_empty() {
        return format!("{place}: nothing is kept\n");
    }
    let points: BTreeSet<(usize, usize)> = lines.iter().map(|line| (line.ranks, line.bytes)).collect();
    let mut text = format!("### {place}\n\n| |");
    for (ranks, bytes) in &points {
        let _ = write!(text, " {ranks} ranks, {} |", size(*bytes));
    }
    let _ = writeln!(text, "\n|---|{}", "---|".repeat(points.len()));
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for line in lines {
        if !rows.contains(&(&line.op, &line.algorithm)) {
            rows.push((&line.op, &line.algorithm));
        }
    }
    for (op, algorithm) in rows {
        let _ = write!(text, "| {op}, {algorithm} |");
        for &(ranks, bytes) in &points {
            let is_it = |line: &&Line| {
                (line.op.as_str(), line.algorithm.as_str(), line.ranks, line.bytes)
                    == (op, algorithm, ranks, bytes)
            };
            let _ = match lines.iter().find(is_it) {
                Some(line) => write!(text, " {} |", cell(line)),
                None => write!(text, " |"),
            };
        }
        text.push('\n');
    }
    text + "\n" + &sums(place, lines)
}

/// Formats the measured and the predicted time; in parentheses if no error bound applies.
fn cell(line: &Line) -> String {
    let (measured, predicted) = (time(line.measured_us), time(line.predicted_us));
    if line.bound { format!("{measured} / {predicted}") } else { format!("({measured} / {predicted})") }
}

/// Formats a time in milliseconds, with three significant digits.
fn time(us: f64) -> String {
    let ms = us / 1e3;
    let digits = match ms {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.1.. => 3,
        0.01.. => 4,
        _ => 5,
    };
    format!("{ms:.digits$}")
}

/// Returns the errors and the quality of choices for each number of ranks, separately for points with error bounds and
/// without.
fn sums(place: &str, lines: &[Line]) -> String {
    let mut worlds: BTreeMap<(usize, bool), Vec<&Line>> = BTreeMap::new();
    for line in lines {
        worlds.entry((line.ranks, !line.bound)).or_default().push(line);
    }
    let mut text = String::new();
    for ((ranks, free), lines) in worlds {
        let mut errors: Vec<f64> = lines.iter().map(|line| line.error()).collect();
        errors.sort_by(f64::total_cmp);
        let losses = losses(&lines);
        let good = losses.iter().filter(|loss| **loss <= GOOD).count();
        let worst = losses.iter().copied().fold(0.0, f64::max);
        let choice = format!("{good} of {}, worst {:.0} %", losses.len(), 100.0 * worst);
        let held = if free { "not held" } else { "held" };
        let _ = writeln!(
            text,
            "| {place} | {ranks} | {held} | {} | {:.0} % | {:.0} % | {choice} |",
            errors.len(),
            100.0 * errors[errors.len() / 2],
            100.0 * errors[errors.len() - 1],
        );
    }
    text + "\n"
}

/// A choice is good if it is slower than the fastest algorithm by at most this factor.
const GOOD: f64 = 0.1;

/// Returns, for each point, how much slower than the fastest the algorithm was that was predicted to be the fastest.
fn losses(lines: &[&Line]) -> Vec<f64> {
    let mut points: BTreeMap<(&str, usize), Vec<&Line>> = BTreeMap::new();
    for line in lines {
        points.entry((&line.op, line.bytes)).or_default().push(line);
    }
    let several = points.values().filter(|lines| lines.len() > 1);
    let loss = several.filter_map(|lines| -> Option<f64> {
        let predicted = lines.iter().min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us))?;
        let fastest = lines.iter().map(|line| line.measured_us).fold(f64::INFINITY, f64::min);
        Some(predicted.measured_us / fastest - 1.0)
    });
    loss.collect()
}
