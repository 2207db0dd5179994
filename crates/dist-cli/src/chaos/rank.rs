//! One rank of a job with a fault.

use std::time::Duration;

use dist_collectives::{Communicator, Error as CallError};
use dist_transport::Runtime;
use dist_transport::process::{Config, ProcessTransport};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::calls::Calls;
use super::plan::{FaultPlan, Kind};
use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;

/// Deadline of a call: much longer than any rank should need to detect a fault.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time after which a rank that still runs counts as hung. Rank 0 ends the calls after one [`TIMEOUT`], and
/// the last call takes at most another.
pub(super) const HANG: Duration = TIMEOUT.saturating_mul(2).saturating_add(Duration::from_secs(10));
/// Duration of calls after a fault that must not end them.
const AFTERWARDS: Duration = Duration::from_millis(200);
/// Number of calls between two decisions of rank 0 whether to go on.
const CALLS_AT_ONCE: usize = 8;

/// Exit code of a rank whose last call failed, as expected.
const FAILED: u8 = 3;
/// Exit code of a victim that exits from a second thread.
const GONE: i32 = 7;

/// A report of a rank to the process that started it, as a line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum RankReport {
    /// The fault happens now.
    Fault { at: Duration },
    /// The calls have ended.
    End(End),
    /// A call has exceeded its deadline.
    Hang,
}

/// The end of a rank's calls.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct End {
    pub(super) at: Duration,
    /// Number of successful calls, and number of wrong results among them.
    pub(super) calls: usize,
    pub(super) wrong: usize,
    /// The error that ended the calls, if any.
    pub(super) error: Option<ReportedError>,
}

/// An error of a call.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ReportedError {
    /// The rank that the error names.
    pub(super) rank: Option<usize>,
    pub(super) text: String,
    pub(super) timed_out: bool,
}

/// Joins the job and makes calls until an error or the end. The victim also fails.
pub(super) fn run(plan: &FaultPlan, config: &Config) -> Result<Outcome, Error> {
    let mut comm = Communicator::new(ProcessTransport::join(config)?);
    comm.set_timeout(TIMEOUT);
    let runtime = Runtime::system();
    let mut pids = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut pids)?;
    comm.barrier()?;
    let start = now();
    prepare(plan, &runtime, comm.rank(), &pids)?;
    let mut calls = Calls::new(plan.calls);
    let mut end = End { at: start, calls: 0, wrong: 0, error: None };
    let lasts = if plan.kind == Kind::Stall { plan.after + plan.stall + AFTERWARDS } else { TIMEOUT };
    let ended = make_calls(plan, &mut comm, &mut calls, (start, lasts), &mut end);
    end.at = now();
    end.error = ended.err().map(|error| ReportedError {
        rank: error.peer(),
        timed_out: error.is_timeout(),
        text: error.to_string(),
    });
    let outcome = if end.error.is_some() { Outcome::Code(FAILED) } else { Outcome::Success };
    send_report(&RankReport::End(end));
    Ok(outcome)
}

/// Makes calls until one fails or rank 0 ends them.
fn make_calls(
    plan: &FaultPlan,
    comm: &mut Communicator,
    calls: &mut Calls,
    (start, lasts): (Duration, Duration),
    end: &mut End,
) -> Result<(), CallError> {
    let panics = plan.kind == Kind::Panic && comm.rank() == plan.victim;
    let mut goes_on = [1_u8];
    while goes_on == [1] {
        for _ in 0..CALLS_AT_ONCE {
            let passed = now().saturating_sub(start);
            if panics && passed >= plan.after {
                send_report(&RankReport::Fault { at: now() });
                // As a panic does, but without its message.
                std::panic::resume_unwind(Box::new(()));
            }
            end.wrong += usize::from(!calls.next(comm)?);
            end.calls += 1;
        }
        goes_on = [u8::from(now().saturating_sub(start) < lasts)];
        comm.broadcast(&mut goes_on, 0)?;
    }
    Ok(())
}

/// Starts the thread that causes the fault, if this rank has to, and the thread that detects a hang.
fn prepare(plan: &FaultPlan, runtime: &Runtime, rank: usize, pids: &[u32]) -> Result<(), Error> {
    let (kind, after, stall) = (plan.kind, plan.after, plan.stall);
    let exits = kind == Kind::Exit;
    let is_victim = rank == plan.victim;
    let does = match kind {
        Kind::Exit => is_victim,
        Kind::Panic => false,
        _ => rank == plan.signaller(pids.len()),
    };
    let waiting = runtime.clone();
    let watch = move || {
        wait(&waiting, HANG);
        send_report(&RankReport::Hang);
        std::process::exit(1);
    };
    runtime.spawn("watch", watch).map_err(Error::Thread)?;
    if !does {
        return Ok(());
    }
    let pid = i32::try_from(pids[plan.victim]).ok().and_then(Pid::from_raw).expect("a process has an id");
    let waiting = runtime.clone();
    let fault = move || {
        wait(&waiting, after);
        send_report(&RankReport::Fault { at: now() });
        if exits {
            std::process::exit(GONE);
        }
        let signal = match kind {
            Kind::Kill => Signal::KILL,
            Kind::Terminate => Signal::TERM,
            _ => Signal::STOP,
        };
        // `kill` fails if the victim has already ended. The result reports that.
        let _ = kill_process(pid, signal);
        if kind == Kind::Stall {
            wait(&waiting, stall);
            let _ = kill_process(pid, Signal::CONT);
        }
    };
    runtime.spawn("fault", fault).map(drop).map_err(Error::Thread)
}

fn wait(runtime: &Runtime, time: Duration) {
    let deadline = runtime.deadline(time);
    while !runtime.expired(deadline) {
        runtime.park(Some(deadline));
    }
}

/// Returns the monotonic time, which all processes of a machine share.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::try_from(time).unwrap_or_default()
}

fn send_report(report: &RankReport) {
    let line = serde_json::to_string(report).expect("it is text and numbers") + "\n";
    // If the report is lost, the result says that this rank sent none.
    let _ = print(&line);
}
