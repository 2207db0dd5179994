//! One prediction, as a line of JSON and as a row of a table. docs/book/src/distctl-output.md describes the fields.

use std::fmt;

use dist_algos::Order;
use dist_collectives::tuning::Operation;
use serde::Serialize;

use super::candidates::{Candidate, Case};
use super::direct::Prediction;
use super::world::World;
use crate::Error;
use crate::operation::bus_factor;
use crate::quantity::{rounded, show_bytes, show_time};

/// The JSON output. Its fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PredictedLine {
    op: &'static str,
    ranks: usize,
    hosts: usize,
    bytes: usize,
    pub(super) algorithm: String,
    order: Option<String>,
    chosen: bool,
    fastest: bool,
    engine: Option<&'static str>,
    pub(super) predicted_us: Option<f64>,
    #[serde(rename = "algbw_GBps")]
    algbw: Option<f64>,
    #[serde(rename = "busbw_GBps")]
    busbw: Option<f64>,
    rounds: Option<usize>,
    sent_max_bytes: Option<u64>,
    sent_total_bytes: Option<u64>,
    host_sent_max_bytes: Option<u64>,
    skipped: Option<String>,
}

impl PredictedLine {
    pub(super) fn of(case: &Case<'_>, candidate: &Candidate<'_>) -> Result<Self, Error> {
        let found = match candidate.predict(case.world) {
            Ok(prediction) => Ok(prediction),
            Err(e @ dist_predict::Error::TooManySteps { .. }) => Err(e.to_string()),
            Err(e) => return Err(e.into()),
        };
        let done = found.as_ref().ok();
        let algbw = done.filter(|done| done.seconds > 0.0).map(|done| case.bytes as f64 / done.seconds / 1e9);
        let bus_factor = bus_factor(case.operation, case.world.ranks());
        Ok(Self {
            op: case.operation.name(),
            ranks: case.world.ranks(),
            hosts: case.world.hosts(),
            bytes: case.bytes,
            algorithm: candidate.name.clone(),
            order: candidate.order.map(|order| order.to_string()),
            chosen: candidate.chosen,
            fastest: false,
            engine: done.map(|done| done.engine.name()),
            predicted_us: done.map(|done| rounded(done.seconds * 1e6, 3)),
            algbw: algbw.map(|algbw| rounded(algbw, 4)),
            busbw: algbw.map(|algbw| rounded(algbw * bus_factor, 4)),
            rounds: candidate.rounds,
            sent_max_bytes: done.map(|done| done.sent_max),
            sent_total_bytes: done.map(|done| done.sent_total),
            host_sent_max_bytes: done.map(|done| done.host_sent_max),
            skipped: found.as_ref().err().cloned(),
        })
    }

    /// Creates the line of a direct schedule, which sends no messages.
    pub(super) fn of_direct(case: &Case<'_>, direct: &Prediction) -> Self {
        let reduces =
            matches!(case.operation, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter);
        let (ranks, hosts) = (case.world.ranks(), case.world.hosts());
        let algbw = (direct.seconds > 0.0).then(|| case.bytes as f64 / direct.seconds / 1e9);
        Self {
            op: case.operation.name(),
            ranks,
            hosts,
            bytes: case.bytes,
            algorithm: direct.algorithm.name.to_owned(),
            order: reduces.then(|| Order::Canonical.to_string()),
            chosen: direct.chosen,
            fastest: false,
            engine: Some("direct"),
            predicted_us: Some(rounded(direct.seconds * 1e6, 3)),
            algbw: algbw.map(|algbw| rounded(algbw, 4)),
            busbw: algbw.map(|algbw| rounded(algbw * bus_factor(case.operation, ranks), 4)),
            rounds: None,
            sent_max_bytes: Some(0),
            sent_total_bytes: Some(0),
            host_sent_max_bytes: Some(0),
            skipped: None,
        }
    }

    /// Returns the line of JSON with its newline.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and text") + "\n"
    }
}

/// Marks the fastest line; of several equal ones the first.
pub(super) fn mark_fastest(lines: &mut [PredictedLine]) {
    let timed = lines.iter_mut().filter(|line| line.predicted_us.is_some());
    let key = |line: &&mut PredictedLine| line.predicted_us.unwrap_or(f64::INFINITY);
    if let Some(line) = timed.min_by(|a, b| key(a).total_cmp(&key(b))) {
        line.fastest = true;
    }
}

/// A table of predictions for people.
#[derive(Debug)]
pub(super) struct PredictedTable<'a> {
    pub(super) world: &'a World,
    pub(super) lines: &'a [PredictedLine],
}

impl fmt::Display for PredictedTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.lines.first() else { return Ok(()) };
        let hosts = if self.world.hosts() == 1 {
            "1 host".to_owned()
        } else {
            format!("{} hosts", self.world.hosts())
        };
        let racks = match self.world.racks() {
            1 => String::new(),
            racks => format!(" in {racks} racks"),
        };
        let size = show_bytes(first.bytes as u64);
        writeln!(f, "{} of {size}, {} ranks on {hosts}{racks}", first.op, self.world.ranks())?;
        writeln!(
            f,
            "{:<38} {:>10} {:>12} {:>9} {:>12} {:>12}  {:<9} engine",
            "algorithm", "time", "busbw GB/s", "rounds", "rank sends", "host sends", "order"
        )?;
        for line in self.lines {
            self.row(f, line)?;
        }
        writeln!(f)
    }
}

impl PredictedTable<'_> {
    fn row(&self, f: &mut fmt::Formatter<'_>, line: &PredictedLine) -> fmt::Result {
        let mut name = line.algorithm.clone();
        if line.fastest {
            name.push_str(" *");
        }
        if line.chosen {
            name.push_str(" (auto)");
        }
        let Some(us) = line.predicted_us else {
            return writeln!(f, "{name:<38} {:>10}", line.skipped.as_deref().unwrap_or("-"));
        };
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        let bytes = |value: Option<u64>| value.map_or("-".to_owned(), show_bytes);
        writeln!(
            f,
            "{name:<38} {:>10} {:>12} {:>9} {:>12} {:>12}  {:<9} {}",
            show_time(us / 1e6),
            number(line.busbw),
            line.rounds.map_or("-".to_owned(), |rounds| rounds.to_string()),
            bytes(line.sent_max_bytes),
            bytes(line.host_sent_max_bytes),
            line.order.as_deref().unwrap_or("-"),
            line.engine.unwrap_or("-"),
        )
    }
}
