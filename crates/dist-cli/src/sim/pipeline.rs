//! `distctl sim pipeline`: predicts the timeline of one pipeline step.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use dist_parallel::pipeline::{
    Costs, Panel, PipelineSchedule, ScheduleKind, ScheduleProof, StageCost, Timeline, svg,
};
use serde::Serialize;

use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;
use crate::progress::Progress;
use crate::quantity;
use crate::quantity::rounded;

#[derive(Debug, clap::Args)]
pub(super) struct PipelineArguments {
    /// Schedule: gpipe, 1f1b, interleaved, zb1p or zbv; several to compare them
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "1f1b", value_parser = kind)]
    schedule: Vec<ScheduleKind>,
    /// Number of stages of the model
    #[arg(long, value_name = "S", value_parser = stages)]
    stages: usize,
    /// Number of ranks [default: the number of stages, or half of it for interleaved and zbv]
    #[arg(long, value_name = "P", value_parser = super::ranks)]
    ranks: Option<usize>,
    /// Number of micro-batches of a step
    #[arg(long, value_name = "M", value_parser = micro_batches)]
    micro_batches: usize,
    /// Time of the forward of a micro-batch in a stage
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time)]
    forward: Duration,
    /// Time of the gradient of a stage's input
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time)]
    input_gradient: Duration,
    /// Time of the gradients of a stage's parameters; a whole backward takes both times
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time)]
    weight_gradient: Duration,
    /// Time of a message from rank to rank
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = time)]
    message: Duration,
    /// Print the actions of each rank, messages included, without times
    #[arg(long)]
    actions: bool,
    /// Draw the timeline into this file; all schedules together may have 100000 pairs of a stage and a micro-batch
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object per line instead of text
    #[arg(long)]
    json: bool,
}

fn kind(text: &str) -> Result<ScheduleKind, String> {
    ScheduleKind::parse(text).ok_or_else(|| {
        format!("a schedule is one of {}", ScheduleKind::ALL.map(ScheduleKind::name).join(", "))
    })
}

fn time(text: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(quantity::time(text)?).map_err(|e| e.to_string())
}

/// Maximum number of stages and of micro-batches, for the memory and the time of the prediction.
const COUNT_MAX: usize = 10_000_000;

fn stages(text: &str) -> Result<usize, String> {
    crate::parse::count(text, "stages", 1..=COUNT_MAX)
}

fn micro_batches(text: &str) -> Result<usize, String> {
    crate::parse::count(text, "micro-batches", 1..=COUNT_MAX)
}

/// The JSON output. Its fields and their order are a stable contract.
#[derive(Debug, Serialize)]
struct ScheduleLine<'a> {
    schedule: &'static str,
    ranks: usize,
    stages: usize,
    micro_batches: usize,
    step_ms: f64,
    computing_ms: f64,
    bubble: f64,
    bubble_formula: Option<f64>,
    kept: &'a [usize],
    kept_formula: &'a [usize],
    messages: usize,
}

/// Predicts a step for every schedule.
pub(super) fn run(arguments: &PipelineArguments) -> Result<Outcome, Error> {
    arguments.check_picture()?;
    let progress = Progress::start()?;
    let mut drawn = Vec::new();
    for &kind in &arguments.schedule {
        let (name, stages, micro_batches) = (kind.name(), arguments.stages, arguments.micro_batches);
        progress.doing(format!("predicting {name} of {stages} stages and {micro_batches} micro-batches"));
        let (kind, schedule) = arguments.schedule(kind)?;
        let proof = schedule.validate()?;
        let costs = arguments.costs();
        let timeline = Timeline::predict(&schedule, &costs);
        let formula = kind.bubble(schedule.ranks(), schedule.micro_batches(), &costs);
        let line = ScheduleLine::new(kind, &schedule, &proof, &timeline, formula);
        let text = match (arguments.json, arguments.actions) {
            (true, _) => serde_json::to_string(&line).expect("a line has only numbers and text") + "\n",
            (false, true) => actions(&schedule),
            (false, false) => format!("{}{timeline}", line.head()),
        };
        print(&text)?;
        drawn.push((line.title(), timeline));
    }
    if let Some(path) = &arguments.svg {
        let panels: Vec<_> = drawn.iter().map(|(title, timeline)| Panel { title, timeline }).collect();
        fs::write(path, svg(&panels)).map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    Ok(Outcome::Success)
}

/// Maximum number of pairs in a picture. Each has two or three bars of about 100 bytes in the file.
const DRAWN_MAX: usize = 100_000;

impl PipelineArguments {
    /// Rejects a picture that is too large, before anything is predicted.
    fn check_picture(&self) -> Result<(), Error> {
        let pairs = self.stages.saturating_mul(self.micro_batches).saturating_mul(self.schedule.len());
        if self.svg.is_none() || pairs <= DRAWN_MAX {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "--svg draws at most {DRAWN_MAX} pairs of a stage and a micro-batch, and these are {pairs}: \
             take fewer micro-batches, stages or schedules"
        )))
    }

    fn schedule(&self, kind: ScheduleKind) -> Result<(ScheduleKind, PipelineSchedule), Error> {
        let ranks = self.ranks.unwrap_or(self.stages / kind.stages_per_rank()).max(1);
        let (kind, each) = match kind {
            ScheduleKind::Interleaved { .. } => {
                (ScheduleKind::Interleaved { stages_per_rank: self.stages / ranks }, "as many".to_owned())
            }
            kind => (kind, kind.stages_per_rank().to_string()),
        };
        if kind.stages_per_rank() * ranks != self.stages {
            let (stages, kind) = (self.stages, kind.name());
            let text = format!("{stages} stages on {ranks} ranks: {kind} has {each} on each");
            return Err(Error::Usage(text));
        }
        let schedule = kind.schedule(ranks, self.micro_batches);
        Ok((kind, schedule.map_err(|error| Error::Usage(error.to_string()))?))
    }

    fn costs(&self) -> Costs {
        let &Self { forward, input_gradient, weight_gradient, .. } = self;
        let stage = StageCost { forward, input_gradient, weight_gradient };
        Costs::uniform(self.stages, stage).with_message(self.message)
    }
}

impl<'a> ScheduleLine<'a> {
    fn new(
        kind: ScheduleKind,
        schedule: &'a PipelineSchedule,
        proof: &'a ScheduleProof,
        timeline: &Timeline,
        formula: Option<f64>,
    ) -> Self {
        let milliseconds = |time: Duration| rounded(1e3 * time.as_secs_f64(), 6);
        Self {
            schedule: kind.name(),
            ranks: schedule.ranks(),
            stages: schedule.stages(),
            micro_batches: schedule.micro_batches(),
            step_ms: milliseconds(timeline.makespan()),
            computing_ms: milliseconds(timeline.computing()),
            bubble: rounded(timeline.bubble(), 6),
            bubble_formula: formula.map(|bubble| rounded(bubble, 6)),
            kept: &proof.kept,
            kept_formula: schedule.kept_max(),
            messages: proof.messages,
        }
    }

    fn title(&self) -> String {
        let formula =
            self.bubble_formula.map_or_else(|| "no formula".to_owned(), |bubble| format!("{bubble:.4}"));
        format!(
            "{}: {} stages on {} ranks, {} micro-batches, {} ms, bubble {:.4} (formula: {formula})",
            self.schedule, self.stages, self.ranks, self.micro_batches, self.step_ms, self.bubble,
        )
    }

    fn head(&self) -> String {
        format!(
            "{}\nactivations kept, by rank: {} (formula: {}); {} messages\n",
            self.title(),
            list(self.kept),
            list(self.kept_formula),
            self.messages,
        )
    }
}

fn list(numbers: &[usize]) -> String {
    let texts: Vec<_> = numbers.iter().map(ToString::to_string).collect();
    texts.join(" ")
}

fn actions(schedule: &PipelineSchedule) -> String {
    let mut text = String::new();
    for (rank, actions) in schedule.actions().iter().enumerate() {
        let _ = write!(text, "rank {rank}:");
        for action in actions {
            let _ = write!(text, " {action}");
        }
        text.push('\n');
    }
    text
}
