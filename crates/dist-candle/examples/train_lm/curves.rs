//! The loss curves of one training or of several.

use dist_parallel::compress::Compression;
use dist_parallel::internal::{self, Axis, Chart, LineStyle, Scale};

/// The loss curve of one training.
#[derive(Debug)]
pub(crate) struct Curve {
    /// The compression of gradients, if one was chosen.
    pub(crate) compression: Option<Compression>,
    /// The number of steps before this run.
    pub(crate) done: usize,
    /// The loss of each step.
    pub(crate) losses: Vec<f32>,
    /// The bytes that this rank has sent in all steps.
    pub(crate) bytes_sent: u64,
}

impl Curve {
    /// Returns the bytes that one rank has sent per step, if a compression was chosen.
    pub(crate) fn bytes_per_step(&self) -> Option<String> {
        let compression = self.compression?;
        let steps = self.losses.len().max(1) as u64;
        Some(format!("{compression}: {} kB per step", self.bytes_sent.div_ceil(steps).div_ceil(1000)))
    }

    fn line<'a>(&self, label: &'a str) -> internal::Curve<'a> {
        let losses = (self.done + 1..).zip(&self.losses);
        let points = losses.map(|(step, &loss)| (step as f64, f64::from(loss))).collect();
        internal::Curve { label, style: LineStyle::Plain, points }
    }
}

/// Draws all curves in one picture, with the loss of a guess from byte frequencies as the baseline.
pub(crate) fn chart(curves: &[Curve], entropy: f64) -> String {
    let labels: Vec<String> =
        curves.iter().map(|curve| curve.bytes_per_step().unwrap_or_else(|| "loss".to_owned())).collect();
    let mut lines: Vec<_> = curves.iter().zip(&labels).map(|(curve, label)| curve.line(label)).collect();
    let first = curves.iter().map(|curve| curve.done + 1).min().unwrap_or(1);
    let last = curves.iter().map(|curve| curve.done + curve.losses.len()).max().unwrap_or(1).max(first);
    lines.push(internal::Curve {
        label: "entropy of the bytes",
        style: LineStyle::Dashed("#e45756"),
        points: vec![(first as f64, entropy), (last as f64, entropy)],
    });
    let axis = |label| Axis { label, scale: Scale::Linear(&[]) };
    let (x, y) = (axis("step"), axis("loss (nats per byte)"));
    Chart { title: "Guessing the next byte", x, y, curves: lines }.to_string()
}
