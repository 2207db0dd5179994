//! `distctl sim train`: predicts a training step for increasing numbers of ranks.
//!
//! Every rank computes for the same time on data of its own, whatever the number of ranks. Computation and
//! communication overlap; collectives follow one another. A collective starts when its data is ready and the
//! previous one has ended. Computation waits for the results that it needs. The cores' work for collectives
//! does not slow the computation down.

mod memory;
mod timeline;

use std::fs;
use std::path::PathBuf;

use dist_algos::ALGORITHMS;
use dist_collectives::ReductionOrder;
use dist_collectives::tuning::Operation;
use dist_parallel::FloatType;
use dist_parallel::internal::{Axis, Chart, Curve, LineStyle, Scale};
use serde::Serialize;

use super::candidates::Case;
use super::world::{World, WorldArguments};
use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use crate::quantity::{self, rounded, show_bytes, show_time};
use memory::TrainedModel;
use timeline::{Collectives, Rounds, Step};

#[derive(Debug, clap::Args)]
pub(super) struct TrainArguments {
    /// Number of parameters of the model, for example 100M or 7B
    #[arg(long, value_name = "P", value_parser = count)]
    params: u64,
    /// Training strategy; several to compare them
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ddp")]
    strategy: Vec<Strategy>,
    /// Numbers of ranks, for example 1,2,4, or 1..64 for the powers of two
    #[arg(long, value_name = "N", default_value = "1..1024", value_parser = ranks)]
    ranks: Ranks,
    /// Computing time of one rank in a step: one third forward, two thirds backward
    #[arg(long, value_name = "TIME", value_parser = quantity::time)]
    compute: f64,
    /// Number of micro-batches of a step
    #[arg(long, value_name = "K", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=4096))]
    micro_batches: u32,
    /// Size of a gradient bucket
    #[arg(long, value_name = "BYTES", default_value = "25M", value_parser = bucket)]
    bucket_bytes: usize,
    /// Number of units of the model, if parameters are sharded
    #[arg(long, value_name = "U", default_value = "24", value_parser = units)]
    units: usize,
    /// Bytes of a parameter and of a gradient: 2 (bf16), 4 or 8; the optimizer keeps two numbers of this size, but at least 4 bytes each
    #[arg(long = "element-bytes", value_name = "BYTES", default_value = "4", value_parser = element)]
    element: FloatType,
    /// Order of the reduction
    #[arg(long, default_value = "canonical", value_parser = crate::parse::order())]
    order: ReductionOrder,
    #[command(flatten)]
    world: WorldArguments,
    /// Draw the efficiency by number of ranks into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// The distribution of parameters, gradients and optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Strategy {
    /// Every rank has all parameters; gradients are reduced in buckets
    Ddp,
    /// The state of the optimizer is sharded
    Zero1,
    /// Gradients are sharded too
    Zero2,
    /// Parameters are sharded too, and gathered unit by unit
    Fsdp,
    /// Everything is sharded among the ranks of each host, and gradients are reduced between hosts
    Hybrid,
}

impl Strategy {
    const fn name(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Zero2 => "zero2",
            Self::Fsdp => "fsdp",
            Self::Hybrid => "hybrid",
        }
    }
}

/// Numbers of ranks in the order of the argument.
#[derive(Debug, Clone)]
struct Ranks(Vec<usize>);

/// Parses a list such as `1,2,4`, or a range such as `1..100`, which is 1, 2, 4, … 64, 100.
fn ranks(text: &str) -> Result<Ranks, String> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let Some((first, last)) = part.split_once("..") else {
            all.push(super::ranks(part)?);
            continue;
        };
        let (mut next, last) = (super::ranks(first)?, super::ranks(last)?);
        if next > last {
            return Err(format!("{next} is more than {last}"));
        }
        while next < last {
            all.push(next);
            next *= 2;
        }
        all.push(last);
    }
    Ok(Ranks(all))
}

/// Parses a number of parameters. K, M or B is a factor of 10^3, 10^6 or 10^9.
fn count(text: &str) -> Result<u64, String> {
    let (digits, scale) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 1e3),
        Some(b'M') => (&text[..text.len() - 1], 1e6),
        Some(b'B') => (&text[..text.len() - 1], 1e9),
        _ => (text, 1.0),
    };
    let number = digits.parse::<f64>().ok().map(|number| (number * scale).round());
    match number.filter(|number| (1.0..=PARAMETERS_MAX).contains(number)) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in the range")]
        Some(number) => Ok(number as u64),
        None => Err("a model has between 1 and 10^13 parameters, as in 100M or 7B".to_owned()),
    }
}

const PARAMETERS_MAX: f64 = 1e13;

/// Parses the size of a bucket, which is at least one byte.
fn bucket(text: &str) -> Result<usize, String> {
    let bytes = crate::parse::bytes(text)?;
    if bytes > 0 { Ok(bytes) } else { Err("a bucket has at least one byte".to_owned()) }
}

/// Parses a number of units.
fn units(text: &str) -> Result<usize, String> {
    crate::parse::count(text, "units", 1..=10_000)
}

/// Returns a type with this number of bytes; all types of one size are predicted alike.
fn element(text: &str) -> Result<FloatType, String> {
    match text {
        "2" => Ok(FloatType::Bf16),
        "4" => Ok(FloatType::F32),
        "8" => Ok(FloatType::F64),
        _ => Err("a parameter has 2, 4 or 8 bytes".to_owned()),
    }
}

/// Maximum number of units times micro-batches in a step whose memory is predicted, which executes the step's actions.
const UNIT_PASSES_MAX: u64 = 10_000_000;

/// Maximum number of collectives in a predicted step.
const COLLECTIVES_MAX: u64 = 10_000_000;

/// The JSON output. Its fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
struct StrategyLine {
    strategy: &'static str,
    ranks: usize,
    hosts: usize,
    params: u64,
    collectives: usize,
    compute_ms: f64,
    step_ms: Option<f64>,
    exposed_ms: Option<f64>,
    communication_ms: Option<f64>,
    efficiency: Option<f64>,
    memory_bytes: Option<u64>,
    sent_max_bytes: Option<u64>,
    skipped: Option<String>,
}

/// Predicts a step for every strategy and number of ranks.
pub(super) fn run(arguments: &TrainArguments) -> Result<Outcome, Error> {
    let mut curves = Vec::new();
    if !arguments.json {
        print(&head(arguments))?;
    }
    let progress = Progress::start()?;
    for &strategy in &arguments.strategy {
        let mut points = Vec::new();
        for &ranks in &arguments.ranks.0 {
            progress.doing(format!("predicting a step of {} on {ranks} ranks", strategy.name()));
            let line = arguments.line(strategy, ranks)?;
            points.extend(line.efficiency.map(|efficiency| (ranks as f64, 100.0 * efficiency)));
            let text = if arguments.json {
                serde_json::to_string(&line).expect("a line has only numbers and text") + "\n"
            } else {
                row(&line)
            };
            print(&text)?;
        }
        curves.push(Curve { label: strategy.name(), style: LineStyle::Plain, points });
    }
    if let Some(path) = &arguments.svg {
        let title = format!(
            "{} parameters, {} of computing per step",
            arguments.params,
            show_time(arguments.compute)
        );
        let ranks = Scale::Logarithmic { base: 2.0, text: |ranks| ranks.to_string() };
        let x = Axis { label: "ranks", scale: ranks };
        let y = Axis { label: "efficiency in %", scale: Scale::Linear(&[0.0, 100.0]) };
        let chart = Chart { title: &title, x, y, curves };
        fs::write(path, chart.to_string()).map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    Ok(Outcome::Success)
}

impl TrainArguments {
    fn line(&self, strategy: Strategy, ranks: usize) -> Result<StrategyLine, Error> {
        let world = self.world.of(ranks)?;
        let each = ranks / world.hosts();
        let model = TrainedModel { params: self.params, element: self.element, units: self.units as u64 };
        let passes = model.units.saturating_mul(u64::from(self.micro_batches));
        let predicts_memory = strategy == Strategy::Ddp || passes <= UNIT_PASSES_MAX;
        let peak = || model.peak(strategy, (ranks, each), self.micro_batches as usize);
        let line = StrategyLine {
            strategy: strategy.name(),
            ranks,
            hosts: world.hosts(),
            params: self.params,
            collectives: 0,
            compute_ms: rounded(self.compute * 1e3, 6),
            step_ms: None,
            exposed_ms: None,
            communication_ms: None,
            efficiency: None,
            memory_bytes: predicts_memory.then(peak),
            sent_max_bytes: None,
            skipped: None,
        };
        let collectives =
            timeline::collectives(strategy, &model, self.bucket_bytes as u64, self.micro_batches);
        if collectives > COLLECTIVES_MAX {
            return Ok(StrategyLine {
                skipped: Some(format!("more than {COLLECTIVES_MAX} collectives")),
                ..line
            });
        }
        match self.step(strategy, ranks, &world, &model) {
            Ok(step) => Ok(StrategyLine {
                collectives: step.collectives,
                step_ms: Some(rounded(step.seconds * 1e3, 6)),
                exposed_ms: Some(rounded((step.seconds - self.compute).max(0.0) * 1e3, 6)),
                communication_ms: Some(rounded(step.communication * 1e3, 6)),
                efficiency: Some(if step.seconds > 0.0 {
                    rounded(self.compute / step.seconds, 4)
                } else {
                    1.0
                }),
                sent_max_bytes: Some(step.sent_max),
                ..line
            }),
            Err(Error::Prediction(e @ dist_predict::Error::TooManySteps { .. })) => {
                Ok(StrategyLine { skipped: Some(e.to_string()), ..line })
            }
            Err(e) => Err(e),
        }
    }

    fn step(
        &self,
        strategy: Strategy,
        ranks: usize,
        world: &World,
        model: &TrainedModel,
    ) -> Result<Step, Error> {
        let (inside, across);
        let levels = match strategy {
            Strategy::Hybrid => {
                (inside, across) = self.world.levels(ranks)?;
                (&inside, Some(&across))
            }
            _ => (world, None),
        };
        let order = self.order.least();
        let seconds = |world: &World, operation: Operation, bytes: usize| {
            let candidates = Case { operation, bytes, order, world }.candidates(ALGORITHMS)?;
            let chosen = candidates.iter().find(|candidate| candidate.chosen);
            let chosen = chosen.expect("one of the algorithms is chosen");
            Ok(chosen.predict(world)?)
        };
        let collectives = Collectives::new(&seconds, levels);
        let rounds =
            Rounds { count: self.micro_batches, compute: self.compute / f64::from(self.micro_batches) };
        timeline::step(strategy, model, self.bucket_bytes as u64, rounds, collectives)
    }
}

fn head(arguments: &TrainArguments) -> String {
    format!(
        "{} parameters of {} bytes, {} of computing per step and rank\n{:<8} {:>8} {:>7} {:>11} {:>11} {:>11} {:>10} {:>12} {:>12}\n",
        arguments.params,
        arguments.element.size(),
        show_time(arguments.compute),
        "strategy",
        "ranks",
        "hosts",
        "step",
        "exposed",
        "sending",
        "efficiency",
        "memory",
        "rank sends",
    )
}

fn row(line: &StrategyLine) -> String {
    let StrategyLine { strategy, ranks, hosts, .. } = line;
    let start = format!("{strategy:<8} {ranks:>8} {hosts:>7}");
    let time = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| show_time(ms / 1e3));
    let (Some(efficiency), Some(sent)) = (line.efficiency, line.sent_max_bytes) else {
        return format!("{start} {}\n", line.skipped.as_deref().unwrap_or("-"));
    };
    format!(
        "{start} {:>11} {:>11} {:>11} {:>8.1} % {:>12} {:>12}\n",
        time(line.step_ms),
        time(line.exposed_ms),
        time(line.communication_ms),
        100.0 * efficiency,
        line.memory_bytes.map_or("-".to_owned(), show_bytes),
        show_bytes(sent),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_ranks_are_listed_or_double() {
        assert_eq!(ranks("3,1..8").unwrap().0, [3, 1, 2, 4, 8]);
        assert_eq!(ranks("1..100").unwrap().0, [1, 2, 4, 8, 16, 32, 64, 100]);
        assert!(ranks("8..4").is_err() && ranks("0..4").is_err() && ranks("").is_err());
    }

    #[test]
    fn parameters_are_counted_in_powers_of_ten() {
        assert_eq!((count("100M"), count("1.5B"), count("12")), (Ok(100_000_000), Ok(1_500_000_000), Ok(12)));
        assert!(count("0").is_err() && count("-1M").is_err() && count("many").is_err());
    }
}
