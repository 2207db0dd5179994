//! The results of measurements, as tables with ratios and as a chart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::Value;

use super::peers::Peer;
use super::picture::{Axis, Chart, Curve, LineStyle, Scale};
use super::plan::Plan;
use crate::command::Failure;

/// One result: a line of output.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) peer: String,
    pub(super) transport: String,
    pub(super) operation: String,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    /// `None` for libraries that do not report it.
    pub(super) touch: Option<bool>,
    median_us: f64,
}

impl Line {
    /// Parses a line of output; `None` if it is not a result.
    pub(super) fn read(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let word = |name: &str| value[name].as_str().map(str::to_owned);
        let number = |name: &str| usize::try_from(value[name].as_u64()?).ok();
        Some(Self {
            peer: word("peer")?,
            transport: word("transport")?,
            operation: word("op")?,
            ranks: number("ranks")?,
            bytes: number("bytes")?,
            touch: value["touch"].as_bool(),
            median_us: value["median_us"].as_f64()?,
        })
    }
}

/// Returns the results in a program's output that the plan asks for, marked with this library and transport. If a program
/// measures several methods, only the fastest one of each size counts.
pub(super) fn wanted(text: &str, plan: &Plan, peer: Peer, transport: &str) -> String {
    let mut quickest = BTreeMap::<_, (f64, String)>::new();
    for text in text.lines() {
        let Ok(Value::Object(mut fields)) = serde_json::from_str(text) else { continue };
        // Not every program knows its name in this comparison, or its permissions in shared memory.
        fields.insert("peer".to_owned(), peer.name().into());
        fields.insert("transport".to_owned(), transport.into());
        let text = Value::Object(fields).to_string();
        let Some(line) = Line::read(&text).filter(|line| plan.includes(line)) else { continue };
        let known = quickest.entry((line.operation, line.bytes)).or_insert((f64::INFINITY, String::new()));
        if line.median_us < known.0 {
            *known = (line.median_us, text);
        }
    }
    quickest.into_values().map(|(_, text)| text + "\n").collect()
}

/// The subject of one table: transport, operation, ranks.
type Subject = (String, String, usize);
/// The times of all rounds, by size.
type Row = BTreeMap<usize, Vec<f64>>;

/// All results, by subject and library.
#[derive(Debug, Default)]
pub(super) struct Results(BTreeMap<Subject, BTreeMap<String, Row>>);

impl Results {
    /// Reads the results in a text that the plan asks for.
    pub(super) fn read(text: &str, plan: &Plan) -> Self {
        let mut results = Self::default();
        for line in text.lines().filter_map(Line::read).filter(|line| plan.includes(line)) {
            let rows = results.0.entry((line.transport, line.operation, line.ranks)).or_default();
            rows.entry(line.peer).or_default().entry(line.bytes).or_default().push(line.median_us);
        }
        results
    }

    /// Returns one Markdown table for each subject: the median of all rounds, then the lowest and the highest time.
    pub(super) fn tables(&self) -> String {
        self.0.iter().map(|(subject, rows)| table(subject, rows)).collect()
    }

    /// Returns a chart of the bus bandwidth of the first subject.
    pub(super) fn picture(&self) -> Result<String, Failure> {
        let nothing = || Failure::Check("nothing was measured that could be drawn".to_owned());
        let ((transport, operation, ranks), rows) = self.0.first_key_value().ok_or_else(nothing)?;
        let factor = bus_factor(operation, *ranks);
        let curves = rows.iter().map(|(peer, row)| Curve {
            label: peer,
            style: if peer == Peer::Ours.name() { LineStyle::Emphasised } else { LineStyle::Plain },
            points: row
                .iter()
                .filter(|(bytes, _)| **bytes > 0)
                .map(|(&bytes, times)| (bytes as f64, factor * bytes as f64 / median(times) / 1e3))
                .collect(),
        });
        let title = format!("{operation} over {transport}, {ranks} ranks");
        let x = Scale::Logarithmic { base: 8.0, text: whole_size };
        let x = Axis { label: "bytes of each rank's input", scale: x };
        let y = Scale::Logarithmic { base: 10.0, text: |bandwidth| bandwidth.to_string() };
        let y = Axis { label: "bus bandwidth in GB/s", scale: y };
        Ok(Chart { title: &title, x, y, curves: curves.collect() }.to_string())
    }
}

fn table((transport, operation, ranks): &Subject, rows: &BTreeMap<String, Row>) -> String {
    let sizes: BTreeSet<usize> = rows.values().flat_map(|row| row.keys().copied()).collect();
    let mut text = format!("\n{operation} over {transport}, {ranks} ranks, microseconds\n\n|  |");
    sizes.iter().for_each(|&bytes| _ = write!(text, " {} |", size(bytes)));
    let _ = write!(text, "\n|---|{}", "---|".repeat(sizes.len()));
    let ours = rows.get(Peer::Ours.name());
    let peers = rows.iter().filter(|(peer, _)| *peer != Peer::Ours.name());
    for (peer, row) in
        ours.map(|row| (Peer::Ours.name(), row)).into_iter().chain(peers.map(|(p, r)| (&**p, r)))
    {
        let _ = write!(text, "\n| {peer} |");
        sizes
            .iter()
            .for_each(|bytes| _ = write!(text, " {} |", row.get(bytes).map_or("-".to_owned(), |t| cell(t))));
    }
    for whose in [Peer::Ours, Peer::OursShared] {
        let Some(ours) = rows.get(whose.name()) else { continue };
        for of in [Of::Median, Of::Lowest] {
            text += &ratios(("best peer", whose, of), &sizes, ours, |bytes| best_peer(rows, bytes, of));
            for other in [Peer::Burn, Peer::Limit] {
                if let Some(times) = rows.get(other.name()) {
                    let other_time = |bytes| Some(("", of.times(times.get(&bytes)?)));
                    text += &ratios((other.name(), whose, of), &sizes, ours, other_time);
                }
            }
        }
    }
    text + "\n"
}

/// Returns a row with the ratio of another library's time to ours for each size, and the name of that library.
fn ratios<'a>(
    (what, whose, of): (&str, Peer, Of),
    sizes: &BTreeSet<usize>,
    ours: &Row,
    other: impl Fn(usize) -> Option<(&'a str, f64)>,
) -> String {
    let cells = sizes.iter().map(|bytes| match other(*bytes).zip(ours.get(bytes)) {
        Some(((name, time), ours)) => format!("{:.2} {name}", time / of.times(ours)).trim_end().to_owned(),
        None => "-".to_owned(),
    });
    let note = if of == Of::Lowest { ", lowest" } else { "" };
    format!("\n| {what} / {}{note} | {} |", whose.name(), cells.collect::<Vec<_>>().join(" | "))
}

/// The statistic that represents the times of all rounds.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    Median,
    /// The lowest time. If the speed of the machine changes between rounds, it compares the libraries at the best speed.
    Lowest,
}

impl Of {
    fn times(self, times: &[f64]) -> f64 {
        match self {
            Self::Median => median(times),
            Self::Lowest => lowest(times),
        }
    }
}

/// Returns the fastest other library at a size, among those whose ranks are processes.
fn best_peer(rows: &BTreeMap<String, Row>, bytes: usize, of: Of) -> Option<(&str, f64)> {
    let no_peers = [Peer::Ours, Peer::OursShared, Peer::Burn, Peer::Limit].map(Peer::name);
    let peers = rows.iter().filter(|(peer, _)| !no_peers.contains(&&***peer));
    let times = peers.filter_map(|(peer, row)| Some((&**peer, of.times(row.get(&bytes)?))));
    times.min_by(|(_, left), (_, right)| left.total_cmp(right))
}

fn cell(times: &[f64]) -> String {
    let highest = times.iter().copied().fold(0.0, f64::max);
    match times.len() {
        1 => number(median(times)),
        _ => format!("{} [{}–{}]", number(median(times)), number(lowest(times)), number(highest)),
    }
}

/// Formats a number with three significant digits.
pub(super) fn number(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn lowest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Returns the median; the lower of the two middle times if their number is even.
pub(super) fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

/// Formats a number of bytes with a unit.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// The text of a whole number of bytes.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is a power of 8, and not large"
)]
fn whole_size(bytes: f64) -> String {
    size(bytes.round() as usize)
}

/// Returns the factor from algorithm bandwidth to bus bandwidth, as in `distctl bench`.
fn bus_factor(operation: &str, ranks: usize) -> f64 {
    let n = ranks as f64;
    match operation {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "reduce_scatter" | "scatter" | "all_to_all" => (n - 1.0) / n,
        "all_gather" | "gather" => n - 1.0,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::plan;

    fn line(peer: &str, bytes: usize, median_us: f64) -> String {
        format!(
            r#"{{"peer":"{peer}","transport":"tcp","op":"all_reduce","ranks":2,"bytes":{bytes},"median_us":{median_us}}}"#
        )
    }

    fn results(arguments: &[&str], lines: &[String]) -> Results {
        let plan = plan::parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        Results::read(&lines.join("\n"), &plan)
    }

    #[test]
    fn the_best_peer_is_put_beside_the_median_of_our_rounds() {
        let lines = [
            line("dist", 8, 2.0),
            line("slow", 8, 90.0),
            line("fast", 8, 5.0),
            line("dist", 8, 4.0),
            "noise".to_owned(),
            line("fast", 8, 7.0),
            line("dist", 8, 2.5),
            line("dist", 1024, 3.0),
            line("duplex-limit", 1024, 1.5),
            line("dist-shared", 8, 1.0),
            line("burn", 8, 1.5),
        ];
        let expected = "
all_reduce over tcp, 2 ranks, microseconds

|  | 8 B | 1 KiB |
|---|---|---|
| dist | 2.50 [2.00–4.00] | 3.00 |
| burn | 1.50 | - |
| dist-shared | 1.00 | - |
| duplex-limit | - | 1.50 |
| fast | 5.00 [5.00–7.00] | - |
| slow | 90.0 | - |
| best peer / dist | 2.00 fast | - |
| burn / dist | 0.60 | - |
| duplex-limit / dist | - | 0.50 |
| best peer / dist, lowest | 2.50 fast | - |
| burn / dist, lowest | 0.75 | - |
| duplex-limit / dist, lowest | - | 0.50 |
| best peer / dist-shared | 5.00 fast | - |
| burn / dist-shared | 1.50 | - |
| duplex-limit / dist-shared | - | - |
| best peer / dist-shared, lowest | 5.00 fast | - |
| burn / dist-shared, lowest | 1.50 | - |
| duplex-limit / dist-shared, lowest | - | - |
";
        assert_eq!(results(&[], &lines).tables(), expected);
    }

    #[test]
    fn a_peer_with_several_variants_has_the_fastest_of_each_size() {
        let plan = plan::parse(lexopt::Parser::from_args(["--transport", "shm"])).unwrap().unwrap();
        let lines = [
            line("burn-collective", 8, 3.0),
            line("burn-collective", 8, 2.0),
            line("x", 7, 1.0),
            "3".to_owned(),
        ];
        let wanted = wanted(&lines.join("\n"), &plan, Peer::Burn, "shm");
        let line = Line::read(wanted.trim_end()).unwrap();
        assert_eq!((&*line.peer, &*line.transport, line.median_us), ("burn", "shm", 2.0));
    }

    #[test]
    fn results_outside_of_the_plan_are_left_out() {
        let lines = [line("dist", 8, 2.0), line("fast", 1024, 5.0)];
        assert_eq!(results(&["--bytes", "64K"], &lines).tables(), "");
        assert_eq!(results(&["--ranks", "4"], &lines).tables(), "");
        assert!(!results(&["--only", "dist"], &lines).tables().contains("fast"));
        assert!(results(&["--ops", "broadcast"], &lines).picture().is_err());
    }

    #[test]
    fn a_picture_has_a_line_and_a_name_for_each_library() {
        let lines =
            [line("dist", 8, 2.0), line("dist", 1024, 2.0), line("fast", 8, 5.0), line("fast", 1024, 6.0)];
        let picture = results(&[], &lines).picture().unwrap();
        assert_eq!(picture.matches("<polyline").count(), 2);
        assert!(picture.contains(">dist<") && picture.contains(">fast<"), "{picture}");
    }
}
