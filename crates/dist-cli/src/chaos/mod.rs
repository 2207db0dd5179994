//! `distctl chaos`: kills, stops or delays one rank of a job and checks that the others report it correctly.

mod calls;
mod fault_result;
mod plan;
mod rank;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dist_transport::process::Config;
use serde::Serialize;

use crate::Error;
use crate::outcome::Outcome;
use crate::output::{print, say};
use crate::parse::TransportName;
use crate::progress::Progress;
use crate::run::{Job, Launcher, OutputSink, Stream, in_launcher, own_program};
use fault_result::FaultResult;
use plan::{FaultPlan, Kind};
use rank::RankReport;

#[derive(Debug, clap::Args)]
pub(crate) struct ChaosArguments {
    /// Number of processes of each job, at least 2
    #[arg(short = 'n', long, value_name = "N", default_value = "4", value_parser = crate::parse::several_ranks)]
    ranks: usize,
    /// Number of jobs, each with one fault
    #[arg(long, value_name = "N", default_value = "20")]
    faults: u64,
    /// Seed that selects the faults and their times
    #[arg(long, value_name = "SEED", default_value = "1")]
    seed: u64,
    /// Transport of messages [default: DIST_TRANSPORT, or auto]
    #[arg(long, value_enum, value_name = "NAME")]
    transport: Option<TransportName>,
    /// Print one JSON object for each fault and one for the whole run, instead of a table
    #[arg(long)]
    json: bool,
    /// The fault of the job that this process is a rank of
    #[arg(long, hide = true)]
    fault: Option<u64>,
}

/// Grace period for a rank to end after its error. Ranks that are stopped (SIGSTOP) never end by themselves.
const GRACE: Duration = Duration::from_millis(100);

/// Runs one job for each fault; inside such a job, runs one of its ranks.
pub(crate) fn run(arguments: &ChaosArguments) -> Result<Outcome, Error> {
    if let Some(fault) = arguments.fault {
        // Outside a job this process would be the victim.
        if !Config::is_in_env() {
            return Err(Error::Usage(
                "--fault is only for the ranks that distctl chaos starts; --faults sets the number of jobs"
                    .to_owned(),
            ));
        }
        let config = Config::from_env()?;
        let medium = arguments.transport.map_or(config.medium(), TransportName::medium);
        return rank::run(
            &FaultPlan::of(arguments.seed, fault, arguments.ranks),
            &config.with_medium(medium),
        );
    }
    in_launcher(|| arguments.start_all())
}

impl ChaosArguments {
    /// Runs one job for each fault.
    fn start_all(&self) -> Result<Outcome, Error> {
        let mut all = Summary::default();
        let mut launcher = Launcher::new()?;
        let progress = Progress::start()?;
        let mut stopped = None;
        for fault in 0..self.faults {
            let plan = FaultPlan::of(self.seed, fault, self.ranks);
            let output = Arc::new(JobOutput::new(self.ranks));
            progress.doing(format!("fault {} of {}, {}", fault + 1, self.faults, plan.kind.name()));
            if let Outcome::Stopped { by, .. } = self.start(fault, &mut launcher, output.clone())? {
                // The job was stopped before its fault could be judged.
                stopped = Some(Outcome::Stopped { code: by.code(), by });
                break;
            }
            let result = FaultResult::of(fault, &plan, &output.reports());
            if !result.is_right() {
                output.print_errors(&result);
            }
            if self.json {
                print(&(serde_json::to_string(&result).expect("it is text and numbers") + "\n"))?;
            }
            all.add(result);
        }
        let summary = if self.json { all.json() } else { all.table() };
        print(&(summary + "\n"))?;
        let outcome = if all.is_right() { Outcome::Success } else { Outcome::Code(1) };
        Ok(stopped.unwrap_or(outcome))
    }

    /// Runs one job to its end.
    fn start(&self, fault: u64, launcher: &mut Launcher, output: Arc<JobOutput>) -> Result<Outcome, Error> {
        let own = own_program().map_err(Error::OwnProgram)?;
        let numbers = [("--ranks", self.ranks as u64), ("--seed", self.seed), ("--fault", fault)];
        let mut arguments = vec!["chaos".to_owned()];
        arguments.extend(numbers.map(|(name, value)| format!("{name}={value}")));
        arguments.extend(self.transport.map(|name| format!("--transport={}", name.medium().name())));
        let arguments = arguments.into_iter().map(Into::into).collect();
        let job = Job::of(self.ranks, own.into_os_string(), arguments);
        Job { report_grace: rank::HANG, grace: GRACE, ..job }.run_by(launcher, output)
    }
}

/// The reports of a job's ranks, and all other output.
#[derive(Debug)]
struct JobOutput {
    reports: Mutex<Vec<Vec<RankReport>>>,
    /// Output that is not a report.
    other_lines: Mutex<Vec<String>>,
}

impl JobOutput {
    fn new(ranks: usize) -> Self {
        Self { reports: Mutex::new(vec![Vec::new(); ranks]), other_lines: Mutex::default() }
    }

    fn reports(&self) -> Vec<Vec<RankReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn keep(&self, text: String) {
        self.other_lines.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    /// Prints the errors of a job and its other output.
    fn print_errors(&self, FaultResult { fault, kind, victim, wrong, .. }: &FaultResult) {
        let mut text = format!("fault {fault}, {} of rank {victim}: {}", kind.name(), wrong.join("; "));
        for line in &*self.other_lines.lock().unwrap_or_else(PoisonError::into_inner) {
            text.push_str(&format!("\n    {line}"));
        }
        say(&text);
    }
}

impl OutputSink for JobOutput {
    fn write_line(&self, rank: usize, stream: Stream, line: &[u8]) -> Result<(), Error> {
        match serde_json::from_slice(line) {
            Ok(report) if stream == Stream::Output => {
                self.reports.lock().unwrap_or_else(PoisonError::into_inner)[rank].push(report);
            }
            _ => self.keep(format!("[r{rank}] {}", String::from_utf8_lossy(line).trim_end())),
        }
        Ok(())
    }

    fn say(&self, text: &str) {
        self.keep(text.to_owned());
    }
}

/// The last line of JSON. The fields and their order are a stable contract.
#[derive(Debug, Serialize)]
struct Totals {
    faults: usize,
    right: usize,
    calls: usize,
}

/// The results of all faults of a run.
#[derive(Debug, Default)]
struct Summary(Vec<FaultResult>);

impl Summary {
    fn add(&mut self, result: FaultResult) {
        self.0.push(result);
    }

    fn is_right(&self) -> bool {
        self.0.iter().all(FaultResult::is_right)
    }

    fn json(&self) -> String {
        let right = self.0.iter().filter(|result| result.is_right()).count();
        let calls: usize = self.0.iter().map(|result| result.calls).sum();
        serde_json::to_string(&Totals { faults: self.0.len(), right, calls }).expect("these are numbers")
    }

    /// Returns a table with one row for each kind of fault that occurred.
    fn table(&self) -> String {
        let head = format!(
            "{:<10} {:>7} {:>7} {:>9} {:>12} {:>9} {:>9}",
            "fault", "jobs", "right", "calls", "error ms p50", "p99", "max"
        );
        let rows = Kind::ALL.into_iter().filter_map(|kind| self.row(kind));
        std::iter::once(head).chain(rows).collect::<Vec<_>>().join("\n")
    }

    fn row(&self, kind: Kind) -> Option<String> {
        let these: Vec<_> = self.0.iter().filter(|result| result.kind == kind).collect();
        let (jobs, right) = (these.len(), these.iter().filter(|result| result.is_right()).count());
        let calls: usize = these.iter().map(|result| result.calls).sum();
        let mut delays: Vec<f64> = these.iter().flat_map(|result| result.heard_ms.iter().copied()).collect();
        delays.sort_by(f64::total_cmp);
        // The nearest-rank percentile.
        let at = |percent: usize| delays.get((delays.len() * percent).div_ceil(100).max(1) - 1);
        let [p50, p99, max] =
            [50, 99, 100].map(|percent| at(percent).map_or("-".to_owned(), |ms| format!("{ms:.1}")));
        (jobs > 0).then(|| {
            format!("{:<10} {jobs:>7} {right:>7} {calls:>9} {p50:>12} {p99:>9} {max:>9}", kind.name())
        })
    }
}
