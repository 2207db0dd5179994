//! How the loss fell, in one training or in several side by side.

use dist_parallel::compress::Compression;

use crate::picture::{Chart, Line};

/// One training.
#[derive(Debug)]
pub(crate) struct Curve {
    /// How gradients travelled, if anybody asked.
    pub(crate) compression: Option<Compression>,
    /// Steps that were done before this run.
    pub(crate) done: usize,
    /// Of each step.
    pub(crate) losses: Vec<f32>,
    /// By this rank, in all steps.
    pub(crate) bytes_sent: u64,
}

impl Curve {
    /// What one rank has sent for a step, if anybody asked how gradients travel.
    pub(crate) fn bytes_per_step(&self) -> Option<String> {
        let compression = self.compression?;
        let steps = self.losses.len().max(1) as u64;
        Some(format!("{compression}: {} kB per step", self.bytes_sent.div_ceil(steps).div_ceil(1000)))
    }

    fn line<'a>(&self, label: &'a str, colour: &'a str) -> Line<'a> {
        let losses = (self.done + 1..).zip(&self.losses);
        let points = losses.map(|(step, &loss)| (step as f64, f64::from(loss))).collect();
        Line { label, colour, dashed: false, points }
    }
}

/// All of them in one picture, above what the bytes would give without a model.
pub(crate) fn chart(curves: &[Curve], entropy: f64) -> String {
    let labels: Vec<String> =
        curves.iter().map(|curve| curve.bytes_per_step().unwrap_or_else(|| "loss".to_owned())).collect();
    let coloured = labels.iter().zip(COLOURS.into_iter().cycle());
    let mut lines: Vec<Line<'_>> =
        curves.iter().zip(coloured).map(|(curve, (label, colour))| curve.line(label, colour)).collect();
    let first = curves.iter().map(|curve| curve.done + 1).min().unwrap_or(1);
    let last = curves.iter().map(|curve| curve.done + curve.losses.len()).max().unwrap_or(1).max(first);
    lines.push(Line {
        label: "entropy of the bytes",
        colour: "#e45756",
        dashed: true,
        points: vec![(first as f64, entropy), (last as f64, entropy)],
    });
    let (x_label, y_label) = ("step", "loss (nats per byte)");
    Chart { title: "Guessing the next byte", x_label, y_label, lines }.to_string()
}

const COLOURS: [&str; 6] = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2"];
