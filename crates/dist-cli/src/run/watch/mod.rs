//! Supervision of a job on this machine: handles ended ranks, signals and output errors until the job has
//! ended.

use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dist_collectives::error::explain;
use dist_transport::runtime::{Mailbox, Receiver, Task, Unavailable};
use dist_transport::{Abort, Cause, Deadline, Runtime};
use rustix::process::Signal;
use signal_hook::consts::{SIGTSTP, SIGUSR1, SIGUSR2};

use super::child::{self, Running, Started};
use super::lines::{OutputSink, Reader, Stream, reader};
use super::rendezvous::Rendezvous;
use crate::Error;
use crate::outcome::{Outcome, Stop};

/// Default time for the other ranks to report their errors after the first failure.
pub(super) const REPORT_GRACE: Duration = Duration::from_millis(500);
/// Time for a killed process to disappear, and for output that is still in a pipe to arrive.
pub(super) const END_LIMIT: Duration = Duration::from_secs(5);
/// Poll interval for the coordinator's record and for the end of forwarding threads, which send no event.
const POLL: Duration = Duration::from_millis(5);
/// Time at the end of a job for reporting ended ranks to the first machine.
const REPORT_AT_END: Duration = Duration::from_millis(250);
/// Time after a failure for which the coordinator stays up, so that ranks of other machines learn of the
/// failure.
const COORDINATOR_GRACE: Duration = Duration::from_secs(1);

/// The state of the running job, owned by the main thread.
pub(super) struct RunningJob {
    runtime: Runtime,
    /// The first rank of this machine.
    first: usize,
    /// The processes by rank, from `first` on; `None` if reaped.
    ranks: Vec<Option<Running>>,
    /// The threads that forward the output of the ranks.
    readers: Vec<Reader>,
    messages: Mailbox<String>,
    phase: Phase,
    report_grace: Duration,
    grace: Duration,
    pub(super) rendezvous: Rendezvous,
    /// The failed ranks, in the order in which they were reaped.
    failures: Vec<(usize, ExitStatus)>,
    /// The exit code, once the first failure is known.
    code: Option<u8>,
    /// The reason why the job was stopped, if it was.
    stopped: Option<Stop>,
    started: Started,
    /// The threads that report ended ranks to a coordinator on another machine.
    reports: Vec<Task<()>>,
}

/// The result of a job's ranks on this machine.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) outcome: Outcome,
    /// The failed ranks of this machine and their exit codes, in the order in which they were reaped.
    pub(super) failures: Vec<(usize, u8)>,
    /// The rank that caused the failure according to the coordinator, if the coordinator is in this process.
    pub(super) culprit: Option<usize>,
}

/// The progress towards the end of the job.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    Reporting(Deadline),
    Terminating(Deadline),
    Killing(Deadline),
}

impl RunningJob {
    /// Creates the state for ranks from `first` on, before any has been started.
    pub(super) fn new(
        runtime: &Runtime,
        messages: &Mailbox<String>,
        first: usize,
        [report_grace, grace]: [Duration; 2],
        rendezvous: Rendezvous,
        started: &Started,
    ) -> Self {
        Self {
            runtime: runtime.clone(),
            first,
            ranks: Vec::new(),
            readers: Vec::new(),
            messages: messages.clone(),
            phase: Phase::Running,
            report_grace,
            grace,
            rendezvous,
            failures: Vec::new(),
            code: None,
            stopped: None,
            started: started.clone(),
            reports: Vec::new(),
        }
    }

    /// Adds the next rank and starts the threads that wait for its end and forward its output.
    pub(super) fn add(
        &mut self,
        mut child: Child,
        events: &Mailbox<Event>,
        sink: &Arc<dyn OutputSink>,
    ) -> Result<(), Error> {
        let rank = self.first + self.ranks.len();
        let output = child.stdout.take().expect("the output is a pipe");
        let error = child.stderr.take().expect("the error output is a pipe");
        let running = Running::new(child);
        let pid = running.pid();
        self.ranks.push(Some(running));
        let ended = events.clone();
        let wait = move || {
            // `waitid` fails only if there is no such child. The rank then does not run either.
            let _ = child::wait_for_end(pid);
            ended.send(Event::Ended(rank));
        };
        self.runtime.spawn("wait", wait).map_err(Error::Thread)?;
        self.readers.push(reader(&self.runtime, rank, Stream::Output, output, events, sink)?);
        self.readers.push(reader(&self.runtime, rank, Stream::Error, error, events, sink)?);
        Ok(())
    }

    /// Waits until all ranks have ended and their output is forwarded.
    pub(super) fn until_all_have_ended(mut self, inbox: &mut Receiver<Event>) -> Result<Ended, Error> {
        if let Err(error) = self.watch(inbox) {
            self.kill_all();
            return Err(error);
        }
        self.started.end_orphans();
        self.await_record(inbox);
        self.name_cause();
        self.await_other_machines(inbox);
        self.await_output(inbox);
        let end = self.runtime.deadline(REPORT_AT_END);
        for report in self.reports.drain(..) {
            // The report fails if the job on the first machine is over or has not begun.
            let _ = report.join_by(end);
        }
        let failures = self.failures.iter().map(|&(rank, status)| (rank, child::exit_code(status))).collect();
        let culprit = self.rendezvous.aborted().map(|abort| abort.rank);
        Ok(Ended { outcome: Outcome::of_job(self.code, self.stopped), failures, culprit })
    }

    fn watch(&mut self, inbox: &mut Receiver<Event>) -> Result<(), Error> {
        while self.running().next().is_some() {
            match inbox.receive(self.deadline()) {
                Ok(Event::Ended(rank)) => self.reap(rank, inbox)?,
                Ok(event) => self.forward(event),
                Err(Unavailable::TimedOut) => self.escalate()?,
                Err(Unavailable::Closed) => {
                    unreachable!("the thread that receives signals keeps the channel open")
                }
            }
        }
        Ok(())
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.ranks.iter().flatten()
    }

    fn deadline(&self) -> Option<Deadline> {
        match self.phase {
            Phase::Running => None,
            Phase::Reporting(deadline) | Phase::Terminating(deadline) | Phase::Killing(deadline) => {
                Some(deadline)
            }
        }
    }

    /// Reaps a rank that has ended and all others that have ended meanwhile. If several have failed, a rank
    /// that was killed is recorded before ranks that exited with an error, because it is the likelier cause.
    fn reap(&mut self, rank: usize, inbox: &mut Receiver<Event>) -> Result<(), Error> {
        let mut statuses = Vec::new();
        let mut next = Some(Event::Ended(rank));
        while let Some(event) = next.take() {
            match event {
                Event::Ended(rank) => {
                    let running = self.ranks[rank - self.first].take().expect("a rank ends once");
                    statuses.push((rank, running.reap(&self.started).map_err(Error::Wait)?));
                    next = inbox.try_receive();
                }
                event => self.forward(event),
            }
        }
        self.report_ended(statuses.iter().map(|(rank, _)| *rank).collect())?;
        let (killed, ended): (Vec<_>, Vec<_>) = statuses
            .into_iter()
            .filter(|(_, status)| !status.success())
            .partition(|(_, status)| status.code().is_none());
        self.failures.extend(killed.into_iter().chain(ended));
        if self.failures.is_empty() {
            return Ok(());
        }
        if let Phase::Running = self.phase {
            self.phase = Phase::Reporting(self.runtime.deadline(self.report_grace));
        }
        if !matches!(self.phase, Phase::Reporting(_)) || self.failed_culprit().is_some() {
            self.name_cause();
        }
        if let Phase::Reporting(_) = self.phase
            && self.only_an_unresponsive_rank_runs()
        {
            self.escalate()?;
        }
        Ok(())
    }

    /// Reports ended ranks to the coordinator, so that no rank waits for them to join. An ended rank may have
    /// left a process behind that joins in its place. If such a process exists, its rank is unknown, and
    /// nothing is reported.
    fn report_ended(&mut self, ranks: Vec<usize>) -> Result<(), Error> {
        if !self.started.has_orphans() {
            self.reports.extend(self.rendezvous.report_ended(ranks, &self.runtime)?);
        }
        Ok(())
    }

    /// Returns `true` if the only running rank is one that does not respond and from which no report is
    /// expected.
    fn only_an_unresponsive_rank_runs(&self) -> bool {
        let silent = self.rendezvous.aborted().filter(|abort| abort.cause == Cause::Silent);
        let silent = silent.and_then(|abort| self.ranks.get(abort.rank.checked_sub(self.first)?));
        matches!(silent, Some(Some(_))) && self.running().count() == 1
    }

    /// Returns the failed rank of this machine that the coordinator names as the cause, with its status.
    /// Ranks that report the failure may end before that rank does.
    fn failed_culprit(&self) -> Option<(usize, ExitStatus, Abort)> {
        let abort = self.rendezvous.aborted()?;
        let failure = self.failures.iter().find(|(rank, _)| *rank == abort.rank);
        failure.map(|&(rank, status)| (rank, status, abort))
    }

    /// After the end of all ranks, waits until the coordinator has received their reports.
    fn await_record(&mut self, inbox: &mut Receiver<Event>) {
        // A single failure is certainly the first.
        if self.code.is_some() || self.failures.len() < 2 || !self.rendezvous.is_hosted() {
            return;
        }
        let Phase::Reporting(deadline) = self.phase else { return };
        let deadline = deadline.earlier(self.runtime.deadline(REPORT_GRACE));
        while self.rendezvous.aborted().is_none() && !self.runtime.expired(deadline) {
            if let Ok(event) = inbox.receive(Some(self.runtime.deadline(POLL))) {
                // There are no ranks to forward a signal to.
                self.handle(event);
            }
        }
    }

    /// Keeps the coordinator up until the ranks of other machines have left, or, after a failure, until
    /// [`COORDINATOR_GRACE`] has passed.
    fn await_other_machines(&mut self, inbox: &mut Receiver<Event>) {
        if self.rendezvous.world_size() == self.ranks.len() {
            return;
        }
        let mut farewell = None;
        // If the world did not start because a rank has ended, further ranks may still be about to join.
        let is_missed = |abort: Abort| matches!(abort.cause, Cause::NotJoined | Cause::NotInTime { .. });
        while self.rendezvous.present() > 0 || self.rendezvous.aborted().is_some_and(is_missed) {
            if self.code.is_some() || self.rendezvous.aborted().is_some() {
                let end = *farewell.get_or_insert_with(|| self.runtime.deadline(COORDINATOR_GRACE));
                if self.runtime.expired(end) {
                    break;
                }
            }
            let event = inbox.receive(Some(self.runtime.deadline(POLL))).ok();
            if let Some(signal) = event.and_then(|event| self.handle(event)) {
                self.say(&format!(
                    "{}: not waiting for the ranks of other machines",
                    child::signal_name(signal)
                ));
                self.code = self.code.or(self.stop_code());
                break;
            }
        }
        // Another machine may have failed after all ranks of this machine succeeded.
        if self.code.is_none()
            && let Some(abort) = self.rendezvous.aborted()
        {
            self.say(&format!("the job failed on another machine: {}", explain(&abort)));
            self.code = Some(1);
        }
    }

    /// Waits until the output of the ranks is forwarded. The wait has no limit while a slow reader takes
    /// output and the job is not stopped. It is limited if only a process outside the rank's process group
    /// holds a pipe open.
    fn await_output(&mut self, inbox: &mut Receiver<Event>) {
        let mut idle = Duration::ZERO;
        while let Some(Reader { task, is_passing }) = self.readers.pop() {
            let unfinished = task.join_by(self.runtime.deadline(POLL)).err();
            let has_waited = unfinished.is_some();
            self.readers.extend(unfinished.map(|task| Reader { task, is_passing }));
            while let Some(event) = inbox.try_receive() {
                if self.handle(event).is_some() {
                    self.code = self.code.or(self.stop_code());
                    idle = END_LIMIT;
                }
            }
            let is_passing = self.readers.iter().any(|reader| reader.is_passing.load(Ordering::Relaxed));
            if has_waited && (!is_passing || self.stopped.is_some()) {
                idle += POLL;
            }
            if idle >= END_LIMIT {
                if is_passing {
                    self.say("discarding output, because its reader does not take it");
                    self.code = self.code.or(self.stop_code());
                }
                return;
            }
        }
    }

    /// Determines the first failure, if any: by the coordinator's record, or else by the order of reaping.
    fn name_cause(&mut self) {
        let Some(&(first, first_status)) = self.failures.first().filter(|_| self.code.is_none()) else {
            return;
        };
        let (status, text) = match self.failed_culprit() {
            Some((rank, status, abort)) => {
                let cause = match &abort.cause {
                    // The coordinator cannot know which of the ranks is wrong.
                    Cause::Mismatch { .. }
                    | Cause::Length { .. }
                    | Cause::Unreachable { .. }
                    | Cause::CircularWait { .. } => explain(&abort),
                    cause => format!("it {cause}"),
                };
                (status, format!("rank {rank} {} ({cause})", child::describe(status)))
            }
            // The rank that caused the failure may still run, or have exited with 0.
            None => {
                let cause = self.rendezvous.aborted().map(|abort| format!("{}; ", explain(&abort)));
                let failed = format!("rank {first} {}", child::describe(first_status));
                (first_status, cause.unwrap_or_default() + &failed)
            }
        };
        self.code = Some(child::exit_code(status));
        if let Phase::Reporting(_) = self.phase {
            self.say(&format!("{text}; ending the others"));
        }
    }

    /// Handles an event. Returns a signal if it ends the job.
    fn handle(&mut self, event: Event) -> Option<i32> {
        match event {
            // While ranks run, `watch` handles this event.
            Event::Ended(_) => None,
            Event::Unwritable(error) => {
                self.handle_output_error(&error);
                None
            }
            Event::Signalled(SIGTSTP) => {
                self.pause();
                None
            }
            Event::Signalled(signal @ (SIGUSR1 | SIGUSR2)) => {
                self.notify(signal);
                None
            }
            Event::Signalled(signal) => {
                self.record_stop(Stop::Signal(signal));
                Some(signal)
            }
        }
    }

    /// Records that the job was stopped, so that it is not restarted. The first reason determines the exit
    /// code.
    fn record_stop(&mut self, by: Stop) {
        self.stopped = self.stopped.or(Some(by));
    }

    /// Returns the exit code for the reason why the job was stopped.
    fn stop_code(&self) -> Option<u8> {
        self.stopped.map(Stop::code)
    }

    /// Handles an event, and forwards a signal to every rank.
    fn forward(&mut self, event: Event) {
        let Some(signal) = self.handle(event) else { return };
        self.name_cause();
        self.say_forwarded(signal);
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.end_with(signal);
        }
    }

    /// Forwards a signal that only the program interprets, such as a cluster's request to save a checkpoint.
    fn notify(&self, signal: i32) {
        if let Some(named) = Signal::from_named_raw(signal)
            && self.running().next().is_some()
        {
            self.say_forwarded(signal);
            self.running().for_each(|running| running.signal(named));
        }
    }

    fn say_forwarded(&self, signal: i32) {
        self.say(&format!("{}: forwarded to every rank", child::signal_name(signal)));
    }

    /// Stops all ranks and this process until the front process continues it. Ranks that continued alone
    /// would consider the launcher dead. The front process knows whether a shell can continue the job, and
    /// stops too.
    fn pause(&self) {
        self.running().for_each(|running| running.signal(Signal::STOP));
        let stopped = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        self.running().for_each(|running| running.signal(Signal::CONT));
        if let Err(error) = stopped {
            self.say(&format!("cannot stop: {error}"));
        }
    }

    fn handle_output_error(&mut self, error: &Error) {
        let words = match error.is_unread() {
            true => "the reader of the output has closed it".to_owned(),
            false => error.with_causes(),
        };
        if let Phase::Running = self.phase {
            // A restart would fail in the same way.
            self.record_stop(Stop::Output(error.exit_code()));
            self.code = self.stop_code();
            self.say(&format!("{words}; ending the job"));
            self.end_with(Signal::TERM);
        } else if !error.is_unread() && self.stopped.is_none() {
            // The job ends in any case, because a rank has failed.
            self.say(&words);
        }
    }

    /// Signals every rank. Ranks that still run after the grace period are killed.
    fn end_with(&mut self, signal: Signal) {
        self.running().for_each(|running| running.signal(signal));
        if !matches!(self.phase, Phase::Terminating(_) | Phase::Killing(_)) {
            self.phase = Phase::Terminating(self.runtime.deadline(self.grace));
        }
    }

    /// Takes the next step of ending the job after a deadline has passed.
    fn escalate(&mut self) -> Result<(), Error> {
        match self.phase {
            Phase::Running => {}
            Phase::Reporting(_) => {
                self.name_cause();
                self.end_with(Signal::TERM);
            }
            Phase::Terminating(_) => {
                self.kill_all();
                self.phase = Phase::Killing(self.runtime.deadline(END_LIMIT));
            }
            Phase::Killing(_) => {
                let pids = self.running().map(|running| running.pid().as_raw_nonzero().get()).collect();
                return Err(Error::Unkillable { pids });
            }
        }
        Ok(())
    }

    pub(super) fn kill_all(&self) {
        self.running().for_each(|running| running.signal(Signal::KILL));
    }

    fn say(&self, text: &str) {
        self.messages.send(text.to_owned());
    }
}

/// An event for the main thread.
#[derive(Debug)]
pub(super) enum Event {
    /// The process of a rank has ended and can be reaped.
    Ended(usize),
    /// This process received a signal.
    Signalled(i32),
    /// The output of the ranks cannot be forwarded.
    Unwritable(Error),
}

#[cfg(test)]
mod tests;
