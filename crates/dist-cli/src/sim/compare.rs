//! `distctl sim compare`: compares measurements with predictions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use dist_algos::direct::DirectCosts;
use dist_algos::{ALGORITHMS, Order};
use dist_collectives::tuning::{Algorithm, Operation};
use dist_transport::process::Medium;
use serde::{Deserialize, Serialize};

use super::candidates::{Candidate, Case};
use super::model::Model;
use super::world::World;
use super::{direct, fit, messages};
use crate::operation::Messages;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use crate::quantity::{rounded, show_bytes, show_time};
use crate::{Error, operation};

#[derive(Debug, clap::Args)]
pub(super) struct CompareArguments {
    /// Files with lines of distctl bench --json, measured by ranks that share this host
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// File with the model for the predictions [default: the best fit to the measurements]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Write the fitted model to this file
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    fit_to: Option<PathBuf>,
    /// File with the costs of work in shared memory, for predictions of direct schedules
    #[arg(long, value_name = "FILE")]
    pace: Option<PathBuf>,
    /// Write the costs of work in shared memory that fit the direct schedules best to this file
    #[arg(long, value_name = "FILE", conflicts_with = "pace")]
    pace_to: Option<PathBuf>,
    /// Speed at which a core reduces, which single messages do not show
    #[arg(long, value_name = "SPEED", conflicts_with = "model", value_parser = crate::quantity::speed)]
    reduce: Option<f64>,
    /// Number of cores that the ranks shared [default: those of this machine]
    #[arg(long, value_name = "C", value_parser = super::ranks)]
    cores: Option<usize>,
    /// Every rank ran on its own host
    #[arg(long)]
    apart: bool,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// The fields of a line of `distctl bench --json` that are used here.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Measured {
    op: String,
    ranks: usize,
    bytes: usize,
    algorithm: String,
    #[serde(default)]
    transport: String,
    #[serde(flatten)]
    conditions: Conditions,
    median_us: f64,
}

/// The conditions of a measurement, as far as its line names them. Measurements under different conditions
/// are different points.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
struct Conditions {
    dtype: String,
    order: String,
    buffers: String,
    start: String,
    touch: bool,
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, order, buffers, start, touch } = self;
        write!(f, "{dtype} {order} {buffers} {start}{}", if *touch { " touch" } else { "" })
    }
}

/// The JSON output. Its fields and their order are a stable contract.
#[derive(Debug, Clone, Serialize)]
struct ComparedLine {
    op: String,
    ranks: usize,
    bytes: usize,
    algorithm: String,
    #[serde(flatten)]
    conditions: Conditions,
    measured_us: f64,
    predicted_us: f64,
    error: f64,
    bound: bool,
}

/// Predicts every measured point.
pub(super) fn run(arguments: &CompareArguments) -> Result<Outcome, Error> {
    let progress = Progress::start()?;
    progress.doing("reading the measurements");
    let measured = read(&arguments.files)?;
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = (!arguments.apart).then(|| arguments.cores.unwrap_or(own));
    let setting = Setting { apart: arguments.apart };
    let points = setting.points(&measured)?;
    if let Some((a, b)) = differing_media(&points) {
        return Err(Error::Usage(format!(
            "some of these lines were measured over {a} and others over {b}: fit a model to each of them alone"
        )));
    }
    if arguments.fit_to.is_some() && points.is_empty() {
        return Err(Error::Usage("--fit-to: none of these lines measures messages".to_owned()));
    }
    let directs: Vec<_> = measured.iter().filter_map(direct_point).collect();
    if arguments.pace_to.is_some() && directs.is_empty() {
        return Err(Error::Usage("--pace-to: none of these lines measures a direct schedule".to_owned()));
    }
    let pace = match (&arguments.pace, &arguments.pace_to) {
        (Some(path), _) => Some(direct::read(path)?),
        (None, Some(path)) => {
            progress.doing(format!("fitting costs of shared memory to {} measured points", directs.len()));
            Some(fit_pace(&directs, path)?)
        }
        _ => None,
    };
    let directs = if pace.is_some() { directs } else { Vec::new() };
    if points.is_empty() && directs.is_empty() {
        return Err(Error::Usage("none of these lines can be predicted".to_owned()));
    }
    let model = match &arguments.model {
        Some(path) => {
            let ranks = points.first().map_or(2, |point| point.ranks);
            let model = Model::read(path, ranks)?;
            Model { cores: arguments.cores.or(model.cores).or(cores), ..model }
        }
        None if points.is_empty() => Model { cores, ..Model::default() },
        None => {
            let shared = points.iter().all(|point| point.transport.starts_with(Medium::Shm.name()));
            let known = fit::GivenParameters { cores, reduce: arguments.reduce, shared };
            progress.doing(format!("fitting a model to {} measured points", points.len()));
            fit::fit(known, |model| squares(&setting, &points, model))
        }
    };
    if let Some(path) = &arguments.fit_to {
        fs::write(path, model.json()).map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    progress.doing(format!("predicting {} measured points", points.len() + directs.len()));
    let mut lines = points.iter().map(|point| setting.line(point, &model)).collect::<Result<Vec<_>, _>>()?;
    for (point, operation) in directs {
        let us = pace.and_then(|pace| direct_us(point, operation, &pace));
        lines.extend(us.map(|us| line(point, us, model.cores.is_none_or(|cores| point.ranks <= cores))));
    }
    let text = if arguments.json {
        lines.iter().map(|line| serde_json::to_string(line).expect("numbers and text") + "\n").collect()
    } else {
        table(&lines, (!points.is_empty()).then_some(&model))
    };
    print(&text)?;
    Ok(Outcome::Success)
}

fn read(files: &[PathBuf]) -> Result<Vec<Measured>, Error> {
    let mut all = Vec::new();
    for path in files {
        let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.clone(), source })?;
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let failed = |reason| Error::Line { path: path.clone(), line: index + 1, reason };
            let measured: Measured = serde_json::from_str(line)
                .map_err(|e| failed(format!("this is not a line of distctl bench --json: {e}")))?;
            if measured.ranks > super::RANKS_MAX {
                return Err(failed(format!("more than {} ranks", super::RANKS_MAX)));
            }
            all.push(measured);
        }
    }
    Ok(medians(all))
}

/// Merges the lines of each point into one with the median of their times.
fn medians(lines: Vec<Measured>) -> Vec<Measured> {
    let mut points: Vec<(Measured, Vec<f64>)> = Vec::new();
    for line in lines {
        let key = |line: &Measured| Measured { median_us: 0.0, ..line.clone() };
        match points.iter_mut().find(|(point, _)| key(point) == key(&line)) {
            Some((_, times)) => times.push(line.median_us),
            None => points.push((line.clone(), vec![line.median_us])),
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        f64::midpoint(times[(times.len() - 1) / 2], times[times.len() / 2])
    };
    points.into_iter().map(|(point, times)| Measured { median_us: median(times), ..point }).collect()
}

/// Returns two points that were measured over different media, if there are any. The part of a transport's
/// name after `-` does not count.
fn differing_media<'a>(points: &[&'a Measured]) -> Option<(&'a str, &'a str)> {
    let medium = |point: &&'a Measured| point.transport.split('-').next().unwrap_or_default();
    let first = points.first().map(medium)?;
    points.iter().map(medium).find(|&other| other != first).map(|other| (first, other))
}

/// Returns the sum of squared relative errors. A point that cannot be predicted counts as [`FAR_OFF`].
fn squares(setting: &Setting, points: &[&Measured], model: &Model) -> f64 {
    let square = |point: &&Measured| {
        let seconds = setting.seconds(point, model).unwrap_or(f64::INFINITY);
        (seconds * 1e6 / point.median_us).ln().powi(2).min(FAR_OFF)
    };
    points.iter().map(square).sum()
}

const FAR_OFF: f64 = 1e4;

/// The placement of the ranks in the measurements.
#[derive(Debug, Clone, Copy)]
struct Setting {
    apart: bool,
}

impl Setting {
    /// Returns the lines that can be predicted.
    fn points<'a>(&self, measured: &'a [Measured]) -> Result<Vec<&'a Measured>, Error> {
        let mut points = Vec::new();
        for line in measured.iter().filter(|line| line.ranks > 1 && line.median_us > 0.0) {
            let world = World::like(line.ranks, &Model::default(), self.apart);
            if candidate(line, &world)?.is_some() {
                points.push(line);
            }
        }
        Ok(points)
    }

    /// Predicts the time of one call as it is measured: back to back, with an advancing root.
    fn seconds(&self, point: &Measured, model: &Model) -> Result<f64, Error> {
        let world = World::like(point.ranks, model, self.apart);
        let unknown = || Error::Usage(format!("{} cannot be predicted", point.op));
        let candidate = candidate(point, &world)?.ok_or_else(unknown)?;
        Ok(candidate.predict_one_of(&world, calls(point.median_us))?)
    }

    fn line(&self, point: &Measured, model: &Model) -> Result<ComparedLine, Error> {
        Ok(line(point, self.seconds(point, model)? * 1e6, self.is_bound(point, model)))
    }

    /// Returns `true` if the promised accuracy applies to the prediction. It applies if no rank waits for a
    /// core, or if the link is so slow that waiting for a core does not matter.
    fn is_bound(&self, point: &Measured, model: &Model) -> bool {
        let part = point.bytes as f64 / point.ranks as f64;
        if self.apart {
            model.link.latency + part * model.link.byte >= 10.0 * WAKE_UP
        } else {
            model.cores.is_none_or(|cores| point.ranks <= cores)
        }
    }
}

fn line(point: &Measured, predicted_us: f64, bound: bool) -> ComparedLine {
    ComparedLine {
        op: point.op.clone(),
        ranks: point.ranks,
        bytes: point.bytes,
        algorithm: point.algorithm.clone(),
        conditions: point.conditions.clone(),
        measured_us: point.median_us,
        predicted_us: rounded(predicted_us, 3),
        error: rounded(predicted_us / point.median_us - 1.0, 4),
        bound,
    }
}

/// Returns a point with its operation if it is a direct schedule that can be predicted.
fn direct_point(point: &Measured) -> Option<(&Measured, Operation)> {
    let operation = operation::parse(&point.op)?;
    let known = matches!(operation.algorithm(&point.algorithm), Some(Algorithm::Direct(_)));
    (known && (2..=direct::RANKS_MAX).contains(&point.ranks) && point.median_us > 0.0)
        .then_some((point, operation))
}

fn direct_us(point: &Measured, operation: Operation, pace: &DirectCosts) -> Option<f64> {
    let all = direct::predict(ALGORITHMS, operation, point.ranks, point.bytes, pace);
    let found = all.iter().find(|direct| direct.algorithm.name == point.algorithm);
    found.map(|direct| direct.seconds * 1e6)
}

/// Fits the costs of shared memory to the points and writes them to a file.
fn fit_pace(points: &[(&Measured, Operation)], path: &Path) -> Result<DirectCosts, Error> {
    let square = |&(point, operation): &(&Measured, Operation), pace: &DirectCosts| {
        let us = direct_us(point, operation, pace).unwrap_or(point.median_us);
        (us / point.median_us).ln().powi(2).min(FAR_OFF)
    };
    let pace = direct::fit(|pace| points.iter().map(|point| square(point, pace)).sum());
    fs::write(path, direct::json(&pace)).map_err(|source| Error::Write { path: path.to_owned(), source })?;
    Ok(pace)
}

/// Returns the candidate for a measurement, if it can be predicted.
fn candidate<'a>(point: &Measured, world: &'a World) -> Result<Option<Candidate<'a>>, Error> {
    if let Some(messages) = Messages::parse(&point.op) {
        return messages::candidate(messages, point.bytes).map(Some);
    }
    let Some(operation) = operation::parse(&point.op) else { return Ok(None) };
    let case = Case { operation, bytes: point.bytes, order: Order::Any, world };
    Ok(case.candidates(ALGORITHMS)?.into_iter().find(|candidate| candidate.name == point.algorithm))
}

/// Time to wake a thread, in seconds.
const WAKE_UP: f64 = 34e-6;

/// Returns the number of consecutive calls to simulate: as many as were in a sample of 4 ms, but only enough
/// for their overlap to become stable.
const fn calls(one_us: f64) -> usize {
    match one_us {
        us if us > 2000.0 => 1,
        us if us > 1000.0 => 2,
        us if us > 500.0 => 4,
        _ => 8,
    }
}

/// Returns the table for people, with a summary.
fn table(lines: &[ComparedLine], model: Option<&Model>) -> String {
    let mut text = format!(
        "{:<16} {:>6} {:>10} {:<22} {:>12} {:>12} {:>8}\n",
        "operation", "ranks", "bytes", "algorithm", "measured", "predicted", "error"
    );
    let distinct: BTreeSet<&Conditions> = lines.iter().map(|line| &line.conditions).collect();
    for line in lines {
        let conditions = if distinct.len() > 1 { format!("  {}", line.conditions) } else { String::new() };
        text.push_str(&format!(
            "{:<16} {:>6} {:>10} {:<22} {:>12} {:>12} {:>+7.0} %{conditions}\n",
            line.op,
            line.ranks,
            show_bytes(line.bytes as u64),
            line.algorithm,
            show_time(line.measured_us / 1e6),
            show_time(line.predicted_us / 1e6),
            100.0 * line.error,
        ));
    }
    text.push('\n');
    text.extend(model.map(|model| format!("model: {}", model.json())));
    let mut worlds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for line in lines {
        worlds.entry(line.ranks).or_default().push(line.error.abs());
    }
    for (ranks, mut errors) in worlds {
        errors.sort_by(f64::total_cmp);
        text.push_str(&format!(
            "{ranks} ranks: {} points, median error {:.0} %, worst {:.0} %{}\n",
            errors.len(),
            100.0 * errors[errors.len() / 2],
            100.0 * errors[errors.len() - 1],
            choices(lines.iter().filter(|line| line.ranks == ranks)),
        ));
    }
    text
}

/// Compares the predicted fastest algorithm with the measured fastest one. Reports the largest loss.
fn choices<'a>(lines: impl Iterator<Item = &'a ComparedLine>) -> String {
    let mut points: BTreeMap<(&str, usize, &Conditions), Vec<&ComparedLine>> = BTreeMap::new();
    for line in lines {
        points.entry((&line.op, line.bytes, &line.conditions)).or_default().push(line);
    }
    let several = points.values().filter(|lines| lines.len() > 1);
    let worst = several
        .filter_map(|lines| {
            let predicted = lines.iter().min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us))?;
            let fastest = lines.iter().map(|line| line.measured_us).fold(f64::INFINITY, f64::min);
            Some(predicted.measured_us / fastest - 1.0)
        })
        .fold(None, |worst: Option<f64>, loss| Some(worst.map_or(loss, |worst| worst.max(loss))));
    worst.map_or(String::new(), |worst| {
        format!("; the algorithm with the best prediction is within {:.0} % of the fastest", 100.0 * worst)
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn measured(op: &str, algorithm: &str, ranks: usize, bytes: usize, median_us: f64) -> Measured {
        let (op, algorithm, transport) = (op.to_owned(), algorithm.to_owned(), String::new());
        Measured { op, ranks, bytes, algorithm, transport, conditions: Conditions::default(), median_us }
    }

    #[test]
    fn times_of_a_known_network_are_predicted_from_a_fit() {
        let truth = Model { cores: Some(2), call: 7e-6, ..Model::default() };
        let setting = Setting { apart: false };
        let mut points = Vec::new();
        let messages = ["pingpong", "sendrecv", "stream"].map(|op| (op, "message", &[2][..]));
        let collectives = [("all_reduce", "ring"), ("broadcast", "binomial"), ("all_gather", "ring")]
            .map(|(op, algorithm)| (op, algorithm, &[2, 4][..]));
        let barrier = [("barrier", "dissemination", &[2][..])];
        for (op, algorithm, worlds) in messages.into_iter().chain(barrier).chain(collectives) {
            for &ranks in worlds {
                for bytes in
                    [8, 65_536, 1 << 22].into_iter().map(|bytes| if op == "barrier" { 0 } else { bytes })
                {
                    let mut point = measured(op, algorithm, ranks, bytes, 1.0);
                    // The number of calls depends on the time of one. The first estimate assumes a short
                    // call.
                    point.median_us = 1e6 * setting.seconds(&point, &truth).unwrap();
                    point.median_us = 1e6 * setting.seconds(&point, &truth).unwrap();
                    points.push(point);
                }
            }
        }
        let points: Vec<_> = points.iter().collect();
        let found = fit::fit(fit::GivenParameters { cores: truth.cores, ..Default::default() }, |model| {
            squares(&setting, &points, model)
        });
        for point in points {
            let line = setting.line(point, &found).unwrap();
            assert!(line.error.abs() < 0.1, "{line:?}");
        }
        assert!((found.call / truth.call - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn repeated_measurements_are_merged_to_their_median() {
        let line = |algorithm: &str, us: f64| measured("all_reduce", algorithm, 2, 8, us);
        let lines = vec![line("ring", 9.0), line("binomial", 1.0), line("ring", 2.0), line("ring", 4.0)];
        assert_eq!(medians(lines), [line("ring", 4.0), line("binomial", 1.0)]);
    }

    #[test]
    fn measurements_over_different_transports_are_not_merged() {
        let line = |transport: &str, us: f64| Measured {
            transport: transport.to_owned(),
            ..measured("all_reduce", "ring", 2, 8, us)
        };
        let lines = [line("tcp", 9.0), line("tcp-any", 8.0), line("shm", 1.0)];
        assert_eq!(medians(lines.to_vec()), lines);
        assert_eq!(differing_media(&[&lines[0], &lines[1]]), None);
        assert_eq!(differing_media(&[&lines[0], &lines[1], &lines[2]]), Some(("tcp", "shm")));
    }

    #[rstest]
    #[case(r#""dtype":"f64""#)]
    #[case(r#""order":"any""#)]
    #[case(r#""buffers":"shared""#)]
    #[case(r#""start":"clock""#)]
    #[case(r#""touch":true"#)]
    fn measurements_under_different_conditions_are_not_merged(#[case] other: &str) {
        let call = r#""op":"all_reduce","ranks":2,"bytes":8,"algorithm":"ring""#;
        let usual =
            r#""dtype":"f32","order":"canonical","buffers":"private","start":"barrier","touch":false"#;
        let (name, _) = other.split_once(':').unwrap();
        let others = usual.split(',').map(|field| if field.starts_with(name) { other } else { field });
        let others = others.collect::<Vec<_>>().join(",");
        let line = |conditions: &str, us: f64| -> Measured {
            serde_json::from_str(&format!("{{{call},{conditions},\"median_us\":{us}}}")).unwrap()
        };
        let lines = [line(usual, 9.0), line(&others, 1.0), line(usual, 9.0)];
        assert_eq!(medians(lines.to_vec()), lines[..2]);
        // Algorithms are compared only under the same conditions, and the table names the conditions.
        let beside = [&lines[0], &lines[1]].map(|point| super::line(point, point.median_us, true));
        assert_eq!(choices(beside.iter()), "");
        let table = table(&beside, None);
        let told = |line: &ComparedLine| {
            table.lines().filter(|row| row.ends_with(&line.conditions.to_string())).count()
        };
        assert_eq!(beside.each_ref().map(told), [1, 1], "{table}");
    }

    #[test]
    fn lines_without_a_schedule_are_left_out() {
        let lines = [
            measured("all_reduce", "ring", 2, 8, 1.0),
            measured("pingpong", "message", 2, 8, 1.0),
            measured("walk", "message", 2, 8, 1.0),
            measured("stream", "message", 5, 8, 1.0),
            measured("all_reduce", "ring", 1, 8, 1.0),
            measured("all_reduce", "star", 2, 8, 1.0),
        ];
        assert_eq!(Setting { apart: false }.points(&lines).unwrap(), [&lines[0], &lines[1], &lines[3]]);
    }

    #[test]
    fn the_loss_of_the_predicted_choice_is_that_of_its_measurement() {
        let line = |algorithm: &str, measured_us: f64, predicted_us: f64| ComparedLine {
            op: "all_reduce".to_owned(),
            ranks: 2,
            bytes: 8,
            algorithm: algorithm.to_owned(),
            conditions: Conditions::default(),
            measured_us,
            predicted_us,
            error: 0.0,
            bound: true,
        };
        let lines = [line("a", 12.0, 9.0), line("b", 10.0, 10.0)];
        assert!(choices(lines.iter()).ends_with("within 20 % of the fastest"));
        assert_eq!(choices(lines[..1].iter()), "");
    }
}
