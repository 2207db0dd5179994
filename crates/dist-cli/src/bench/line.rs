//! One measured point, as a line of JSON and as a row of a table. docs/book/src/distctl-output.md describes the fields.

use serde::Serialize;

use crate::quantity::{rounded, show_bytes};

/// One measured point. The fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
pub(super) struct MeasuredLine {
    pub(super) peer: &'static str,
    pub(super) transport: String,
    pub(super) op: &'static str,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    #[serde(flatten)]
    pub(super) times: Times,
    pub(super) dtype: &'static str,
    pub(super) algorithm: &'static str,
    pub(super) order: &'static str,
    pub(super) buffers: &'static str,
    pub(super) start: &'static str,
    pub(super) touch: bool,
    pub(super) checked: bool,
}

/// The statistics of a point's times, as a part of its [`MeasuredLine`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Times {
    median_us: f64,
    min_us: f64,
    max_us: f64,
    #[serde(rename = "algbw_GBps")]
    algbw: f64,
    samples: usize,
    #[serde(rename = "busbw_GBps")]
    busbw: f64,
}

impl Times {
    /// Computes the statistics of the times in microseconds of a call with `bytes` bytes of input.
    pub(super) fn of(mut times: Vec<f64>, bytes: usize, bus_factor: f64) -> Self {
        times.sort_by(f64::total_cmp);
        let median = median(&times);
        let algbw = if median > 0.0 { bytes as f64 / median / 1e3 } else { 0.0 };
        Self {
            median_us: rounded(median, 3),
            min_us: rounded(times[0], 3),
            max_us: rounded(times[times.len() - 1], 3),
            algbw: rounded(algbw, 4),
            samples: times.len(),
            busbw: rounded(algbw * bus_factor, 4),
        }
    }
}

impl MeasuredLine {
    /// Returns the line of JSON with its newline.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a line has only numbers and text") + "\n"
    }
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    }
}

/// A table of measured points for people. It prints its head once.
#[derive(Debug, Default)]
pub(super) struct Table {
    begun: bool,
}

impl Table {
    /// Returns the row of a point, after the head if it is the first.
    pub(super) fn rows(&mut self, line: &MeasuredLine) -> String {
        let mut text = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            let variant = if line.touch { ", touched" } else { "" };
            text.push_str(&format!(
                "{}, {} ranks, {}, {}, {} order{variant}\n{:>10} {:>12} {:>12} {:>12} {:>11} {:>11} {:>8}  {}\n",
                line.op, line.ranks, line.transport, line.dtype, line.order,
                "bytes", "median us", "min us", "max us", "algbw GB/s", "busbw GB/s", "samples", "algorithm",
            ));
        }
        let times = &line.times;
        let checked = if line.checked { ", checked" } else { "" };
        text.push_str(&format!(
            "{:>10} {:>12.2} {:>12.2} {:>12.2} {:>11.3} {:>11.3} {:>8}  {}{checked}\n",
            show_bytes(line.bytes as u64),
            times.median_us,
            times.min_us,
            times.max_us,
            times.algbw,
            times.busbw,
            times.samples,
            line.algorithm,
        ));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> MeasuredLine {
        let times = vec![512.0, 524.288, 498.123_456, 600.0];
        MeasuredLine {
            peer: "dist",
            transport: "tcp".to_owned(),
            op: "all_reduce",
            ranks: 4,
            bytes: 1 << 20,
            times: Times::of(times, 1 << 20, 1.5),
            dtype: "f32",
            algorithm: "halving_doubling",
            order: "canonical",
            buffers: "private",
            start: "barrier",
            touch: false,
            checked: true,
        }
    }

    #[test]
    fn every_field_of_a_line_is_documented() {
        insta::assert_snapshot!(line().json(), @r#"{"peer":"dist","transport":"tcp","op":"all_reduce","ranks":4,"bytes":1048576,"median_us":518.144,"min_us":498.123,"max_us":600.0,"algbw_GBps":2.0237,"samples":4,"busbw_GBps":3.0356,"dtype":"f32","algorithm":"halving_doubling","order":"canonical","buffers":"private","start":"barrier","touch":false,"checked":true}"#);
        let documented = include_str!("../../../../docs/book/src/distctl-output.md");
        let line: serde_json::Value = serde_json::from_str(&line().json()).unwrap();
        for field in line.as_object().unwrap().keys() {
            assert!(
                documented.contains(&format!("| `{field}` |")),
                "distctl-output.md does not have {field}"
            );
        }
    }

    #[test]
    fn the_table_has_one_head() {
        let mut table = Table::default();
        insta::assert_snapshot!(table.rows(&line()) + &table.rows(&line()), @r"
        all_reduce, 4 ranks, tcp, f32, canonical order
             bytes    median us       min us       max us  algbw GB/s  busbw GB/s  samples  algorithm
             1 MiB       518.14       498.12       600.00       2.024       3.036        4  halving_doubling, checked
             1 MiB       518.14       498.12       600.00       2.024       3.036        4  halving_doubling, checked
        ");
    }

    #[test]
    fn a_barrier_moves_no_bytes() {
        let barrier = Times::of(vec![10.0], 0, 1.0);
        assert_eq!((barrier.algbw, barrier.busbw, barrier.median_us), (0.0, 0.0, 10.0));
    }
}
