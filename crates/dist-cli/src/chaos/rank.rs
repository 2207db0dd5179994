//! A rank of a job that meets a fault.

use std::time::Duration;

use dist_collectives::{Communicator, Error as CallError};
use dist_transport::Runtime;
use dist_transport::process::{Config, ProcessTransport};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::calls::Calls;
use super::plan::{Kind, Plan};
use crate::Error;
use crate::outcome::Outcome;
use crate::output::print;

/// How long a call may take: much longer than anybody is to need to hear of a fault.
const TIMEOUT: Duration = Duration::from_secs(20);
/// When a rank that goes on still stands in a call that it should have left: rank 0 has all stop after one [`TIMEOUT`], and
/// no call takes longer than another.
pub(super) const HANG: Duration = TIMEOUT.saturating_mul(2).saturating_add(Duration::from_secs(10));
/// How long calls go on after a fault that must not end them.
const AFTERWARDS: Duration = Duration::from_millis(200);
/// How many calls are made between two questions whether to go on.
const CALLS_AT_ONCE: usize = 8;

/// The exit code of a rank whose last call failed, as it should.
const FAILED: u8 = 3;
/// That of the victim which exits or panics.
const GONE: i32 = 7;

/// What a rank tells whoever started it, as a line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Word {
    /// The fault happens now.
    Fault { at: Duration },
    /// The last call is over.
    End(End),
    /// A call has outlived its deadline.
    Hang,
}

/// How a rank ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct End {
    pub(super) at: Duration,
    /// Calls that succeeded, and those of them whose results were wrong.
    pub(super) calls: usize,
    pub(super) wrong: usize,
    /// The error, if that is what ended it.
    pub(super) error: Option<Told>,
}

/// What an error says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Told {
    /// Whom it names.
    pub(super) rank: Option<usize>,
    pub(super) text: String,
    pub(super) timed_out: bool,
}

/// Joins the job, makes calls, and is the victim, or hears of it.
pub(super) fn run(plan: &Plan, config: &Config) -> Result<Outcome, Error> {
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
    end.error = ended.err().map(|error| Told {
        rank: error.peer(),
        timed_out: error.is_timeout(),
        text: error.to_string(),
    });
    let outcome = if end.error.is_some() { Outcome::Code(FAILED) } else { Outcome::Success };
    tell(&Word::End(end));
    Ok(outcome)
}

/// Makes calls until one fails, or rank 0 says that it is enough.
fn make_calls(
    plan: &Plan,
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
                tell(&Word::Fault { at: now() });
                // As a panic does, but for its message.
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

/// Starts what does the fault, if it is for this rank to do, and what notices a call that does not end.
fn prepare(plan: &Plan, runtime: &Runtime, rank: usize, pids: &[u32]) -> Result<(), Error> {
    let (kind, after, stall) = (plan.kind, plan.after, plan.stall);
    let exits = kind == Kind::Exit;
    let is_victim = rank == plan.victim;
    let does = match kind {
        Kind::Exit => is_victim,
        Kind::Panic => false,
        _ => rank == plan.doer(pids.len()),
    };
    let waiting = runtime.clone();
    let watch = move || {
        wait(&waiting, HANG);
        tell(&Word::Hang);
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
        tell(&Word::Fault { at: now() });
        if exits {
            std::process::exit(GONE);
        }
        let signal = match kind {
            Kind::Kill => Signal::KILL,
            Kind::Terminate => Signal::TERM,
            _ => Signal::STOP,
        };
        // It fails if the victim is gone already, which will be seen.
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

/// The time that all processes of a machine have.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::try_from(time).unwrap_or_default()
}

fn tell(word: &Word) {
    let line = serde_json::to_string(word).expect("it is text and numbers") + "\n";
    // Whoever does not hear it takes this rank for one that said nothing.
    let _ = print(&line);
}
