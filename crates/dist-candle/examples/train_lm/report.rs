//! The output of the demo during training.

use std::io::{self, IsTerminal, Write};

use dist_parallel::compress::Compression;
use dist_parallel::step::StepReport;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// The output for the steps of one rank. Only rank 0 prints.
pub(crate) enum Reporter {
    Silent,
    /// One JSON object per line on the standard output.
    Json,
    /// A bar on the terminal.
    Bar(ProgressBar),
    /// A line at intervals, if there is no terminal.
    Lines {
        every: usize,
    },
}

/// The report of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    /// The number of the step, from 1.
    pub(crate) step: usize,
    pub(crate) steps: usize,
    pub(crate) report: StepReport,
    /// The compression of gradients, if one was chosen.
    pub(crate) compression: Option<Compression>,
    pub(crate) tokens_per_s: f64,
    /// The part of the time since the start that was spent waiting for other ranks.
    pub(crate) waiting: f64,
}

impl Reporter {
    pub(crate) fn new(rank: usize, steps: usize, json: bool) -> Self {
        match (rank, json) {
            (0, true) => Self::Json,
            (0, false) if io::stderr().is_terminal() => {
                let style = "{bar:30} {pos}/{len} {msg}  {eta} left";
                let style =
                    ProgressStyle::with_template(style).expect("a template that indicatif understands");
                Self::Bar(ProgressBar::new(steps as u64).with_style(style))
            }
            (0, false) => Self::Lines { every: steps.div_ceil(10) },
            _ => Self::Silent,
        }
    }

    /// Returns a line of text for users.
    pub(crate) fn say(&self, line: &str) -> io::Result<()> {
        match self {
            Self::Silent | Self::Json => Ok(()),
            Self::Bar(bar) => bar.suspend(|| writeln!(io::stdout().lock(), "{line}")),
            Self::Lines { .. } => writeln!(io::stdout().lock(), "{line}"),
        }
    }

    pub(crate) fn step(&self, progress: &Progress) -> io::Result<()> {
        let Progress { step, steps, report, compression, tokens_per_s, waiting } = *progress;
        let loss = report.loss;
        match self {
            Self::Silent => Ok(()),
            Self::Json => {
                let tokens_per_s = tokens_per_s.round();
                let compress = compression.map(|compression| compression.to_string());
                let bytes_sent = compression.map(|_| report.bytes_sent);
                print(&StepLine { step, loss, loss_bits: loss.to_bits(), tokens_per_s, compress, bytes_sent })
            }
            Self::Bar(bar) => {
                bar.set_message(format!(
                    "loss {loss:.3}  {tokens_per_s:.0} tokens/s  {:.1} % waiting for communication",
                    100.0 * waiting
                ));
                bar.inc(1);
                Ok(())
            }
            Self::Lines { every } if step % every == 0 || step == 1 || step == steps => writeln!(
                io::stdout().lock(),
                "step {step:>4} of {steps}  loss {loss:.4}  {tokens_per_s:>8.0} tokens/s  {:>4.1} % waiting for \
                 communication",
                100.0 * waiting
            ),
            Self::Lines { .. } => Ok(()),
        }
    }

    /// Ends the progress bar after the last step.
    pub(crate) fn end_steps(&mut self) {
        if let Self::Bar(bar) = self {
            bar.finish();
            *self = Self::Lines { every: 1 };
        }
    }

    /// Prints the last line of a training.
    pub(crate) fn end(&self, params_crc32: u32, compression: Option<Compression>) -> io::Result<()> {
        let compress = compression.map(|compression| compression.to_string());
        match self {
            Self::Json => print(&EndLine { params_crc32, compress }),
            _ => self.say(&format!("params_crc32 {params_crc32}")),
        }
    }

    /// Returns `true` if [`say`](Self::say) prints.
    pub(crate) fn has_readers(&self) -> bool {
        matches!(self, Self::Bar(_) | Self::Lines { .. })
    }
}

#[derive(Serialize)]
struct StepLine {
    step: usize,
    loss: f32,
    loss_bits: u32,
    tokens_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    compress: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_sent: Option<u64>,
}

#[derive(Serialize)]
struct EndLine {
    params_crc32: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    compress: Option<String>,
}

fn print(line: &impl Serialize) -> io::Result<()> {
    let line = serde_json::to_string(line)?;
    writeln!(io::stdout().lock(), "{line}")
}
