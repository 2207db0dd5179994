//! Watching over a job of this machine until its end: what is done when a rank ends, a signal comes, or output cannot go on.

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
use super::lines::{Reader, Stream, Take, reader};
use super::meeting::Meeting;
use crate::Error;
use crate::outcome::{Outcome, Stop};

/// How long the other ranks usually have to say what they saw, once one has failed.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long a killed process may take to be gone, and output to arrive that is still on its way.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How often is looked for what no event tells of: the coordinator's record, and the end of a thread that passes on output.
const POLL: Duration = Duration::from_millis(5);
/// How long the end of a job waits until the first machine has heard of the ranks that have ended here.
const TELL_AT_END: Duration = Duration::from_millis(250);
/// How long the coordinator is there for the ranks of other machines after a failure, so that they hear of it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Everything that the main thread knows about the running job.
pub(super) struct Watch {
    runtime: Runtime,
    /// The first rank of this machine.
    first: usize,
    /// The processes that have not been reaped, from it on.
    ranks: Vec<Option<Running>>,
    /// The threads that pass on what the ranks print.
    readers: Vec<Reader>,
    voice: Mailbox<String>,
    phase: Phase,
    last_words: Duration,
    grace: Duration,
    pub(super) meeting: Meeting,
    /// The ranks that failed, in the order in which that was seen.
    failures: Vec<(usize, ExitStatus)>,
    /// The code to pass on, once it is settled which failure was the first.
    code: Option<u8>,
    /// What has stopped the job, if anything has.
    stopped: Option<Stop>,
    started: Started,
    /// The threads that tell a coordinator on another machine of ranks that have ended.
    telling: Vec<Task<()>>,
}

/// The end of a job's ranks on this machine.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) outcome: Outcome,
    /// The ranks of this machine that failed, and their exit codes, in the order in which that was seen.
    pub(super) failures: Vec<(usize, u8)>,
    /// The rank that the coordinator names as the cause, if the coordinator is here.
    pub(super) culprit: Option<usize>,
}

/// How far the end of the job has come.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    LastWords(Deadline),
    Terminating(Deadline),
    Killing(Deadline),
}

impl Watch {
    /// For ranks from `first` on, none of which has been started.
    pub(super) fn new(
        runtime: &Runtime,
        voice: &Mailbox<String>,
        first: usize,
        [last_words, grace]: [Duration; 2],
        meeting: Meeting,
        started: &Started,
    ) -> Self {
        Self {
            runtime: runtime.clone(),
            first,
            ranks: Vec::new(),
            readers: Vec::new(),
            voice: voice.clone(),
            phase: Phase::Running,
            last_words,
            grace,
            meeting,
            failures: Vec::new(),
            code: None,
            stopped: None,
            started: started.clone(),
            telling: Vec::new(),
        }
    }

    /// Adds the next rank, with threads that tell of its end and take what it prints.
    pub(super) fn add(
        &mut self,
        mut child: Child,
        events: &Mailbox<Event>,
        take: &Arc<dyn Take>,
    ) -> Result<(), Error> {
        let rank = self.first + self.ranks.len();
        let output = child.stdout.take().expect("the output is a pipe");
        let error = child.stderr.take().expect("the error output is a pipe");
        let running = Running::new(child);
        let pid = running.pid();
        self.ranks.push(Some(running));
        let ended = events.clone();
        let wait = move || {
            // It can only fail if there is no such child, and then it is not running either.
            let _ = child::wait_for_end(pid);
            ended.send(Event::Ended(rank));
        };
        self.runtime.spawn("wait", wait).map_err(Error::Thread)?;
        self.readers.push(reader(&self.runtime, rank, Stream::Output, output, events, take)?);
        self.readers.push(reader(&self.runtime, rank, Stream::Error, error, events, take)?);
        Ok(())
    }

    /// Returns when no rank is left, and what they printed is passed on.
    pub(super) fn until_all_have_ended(mut self, inbox: &mut Receiver<Event>) -> Result<Ended, Error> {
        if let Err(error) = self.watch(inbox) {
            self.kill_all();
            return Err(error);
        }
        self.started.end_strays();
        self.await_record(inbox);
        self.name_cause();
        self.await_other_machines(inbox);
        self.await_output(inbox);
        let end = self.runtime.deadline(TELL_AT_END);
        for telling in self.telling.drain(..) {
            // It tells nobody if the job is over on the first machine, or has not begun there.
            let _ = telling.join_by(end);
        }
        let failures = self.failures.iter().map(|&(rank, status)| (rank, child::exit_code(status))).collect();
        let culprit = self.meeting.aborted().map(|abort| abort.rank);
        Ok(Ended { outcome: Outcome::of_job(self.code, self.stopped), failures, culprit })
    }

    fn watch(&mut self, inbox: &mut Receiver<Event>) -> Result<(), Error> {
        while self.running().next().is_some() {
            match inbox.receive(self.deadline()) {
                Ok(Event::Ended(rank)) => self.reap(rank, inbox)?,
                Ok(event) => self.pass_on(event),
                Err(Unavailable::TimedOut) => self.escalate()?,
                Err(Unavailable::Closed) => unreachable!("the thread that watches signals keeps it open"),
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
            Phase::LastWords(deadline) | Phase::Terminating(deadline) | Phase::Killing(deadline) => {
                Some(deadline)
            }
        }
    }

    /// Takes the status of a rank that has ended, and of all others that have ended meanwhile. If several have
    /// failed, one that was killed is the likelier cause than one that gave up.
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
                event => self.pass_on(event),
            }
        }
        self.tell_ended(statuses.iter().map(|(rank, _)| *rank).collect())?;
        let (killed, ended): (Vec<_>, Vec<_>) = statuses
            .into_iter()
            .filter(|(_, status)| !status.success())
            .partition(|(_, status)| status.code().is_none());
        self.failures.extend(killed.into_iter().chain(ended));
        if self.failures.is_empty() {
            return Ok(());
        }
        if let Phase::Running = self.phase {
            self.phase = Phase::LastWords(self.runtime.deadline(self.last_words));
        }
        if !matches!(self.phase, Phase::LastWords(_)) || self.blamed().is_some() {
            self.name_cause();
        }
        if let Phase::LastWords(_) = self.phase
            && self.only_the_silent_are_left()
        {
            self.escalate()?;
        }
        Ok(())
    }

    /// Tells the coordinator of ranks whose processes have ended, so that nobody waits for them to join. A rank may have left a
    /// process behind that joins in its place: nobody knows of which rank it is, and nothing is told then.
    fn tell_ended(&mut self, ranks: Vec<usize>) -> Result<(), Error> {
        if !self.started.has_strays() {
            self.telling.extend(self.meeting.tell_ended(ranks, &self.runtime)?);
        }
        Ok(())
    }

    /// Whether nobody is left but a rank that has stopped responding, of which no word is to be expected.
    fn only_the_silent_are_left(&self) -> bool {
        let silent = self.meeting.aborted().filter(|abort| abort.cause == Cause::Silent);
        let silent = silent.and_then(|abort| self.ranks.get(abort.rank.checked_sub(self.first)?));
        matches!(silent, Some(Some(_))) && self.running().count() == 1
    }

    /// The rank that the coordinator's record names, if it is one of those that failed, and what it did. The ranks
    /// that noticed can be gone before it is.
    fn blamed(&self) -> Option<(usize, ExitStatus, Abort)> {
        let abort = self.meeting.aborted()?;
        let failure = self.failures.iter().find(|(rank, _)| *rank == abort.rank);
        failure.map(|&(rank, status)| (rank, status, abort))
    }

    /// Gives the coordinator, when no rank is left, the time to hear what they have told it.
    fn await_record(&mut self, inbox: &mut Receiver<Event>) {
        // With one failure there is no doubt about the first.
        if self.code.is_some() || self.failures.len() < 2 || !self.meeting.is_hosted() {
            return;
        }
        let Phase::LastWords(deadline) = self.phase else { return };
        let deadline = deadline.earlier(self.runtime.deadline(LAST_WORDS));
        while self.meeting.aborted().is_none() && !self.runtime.expired(deadline) {
            if let Ok(event) = inbox.receive(Some(self.runtime.deadline(POLL))) {
                // Nobody is left whom a signal could be passed on to.
                self.hear(event);
            }
        }
    }

    /// Hosts the coordinator for the ranks of other machines: until they have left, or, after a failure, could hear of it.
    fn await_other_machines(&mut self, inbox: &mut Receiver<Event>) {
        if self.meeting.world_size() == self.ranks.len() {
            return;
        }
        let mut farewell = None;
        // Ranks that nobody counts yet may be about to come, if one that has ended is why no world has started.
        let is_missed = |abort: Abort| matches!(abort.cause, Cause::NotJoined | Cause::NotInTime { .. });
        while self.meeting.present() > 0 || self.meeting.aborted().is_some_and(is_missed) {
            if self.code.is_some() || self.meeting.aborted().is_some() {
                let end = *farewell.get_or_insert_with(|| self.runtime.deadline(FAREWELL));
                if self.runtime.expired(end) {
                    break;
                }
            }
            let event = inbox.receive(Some(self.runtime.deadline(POLL))).ok();
            if let Some(signal) = event.and_then(|event| self.hear(event)) {
                self.say(&format!("{}: leaving the ranks of other machines", child::signal_name(signal)));
                self.code = self.code.or(self.stop_code());
                break;
            }
        }
        // The ranks of this machine may have ended before.
        if self.code.is_none()
            && let Some(abort) = self.meeting.aborted()
        {
            self.say(&format!("the job failed on another machine: {}", explain(&abort)));
            self.code = Some(1);
        }
    }

    /// Waits until all that the ranks have printed is passed on. Whoever takes it may do so slowly, unless somebody wants
    /// the job to end; but a process that has left its group may hold a pipe open for as long as it likes.
    fn await_output(&mut self, inbox: &mut Receiver<Event>) {
        let mut idle = Duration::ZERO;
        while let Some(Reader { task, is_passing }) = self.readers.pop() {
            let unfinished = task.join_by(self.runtime.deadline(POLL)).err();
            let has_waited = unfinished.is_some();
            self.readers.extend(unfinished.map(|task| Reader { task, is_passing }));
            while let Some(event) = inbox.try_receive() {
                if self.hear(event).is_some() {
                    self.code = self.code.or(self.stop_code());
                    idle = PATIENCE;
                }
            }
            let is_passing = self.readers.iter().any(|reader| reader.is_passing.load(Ordering::Relaxed));
            if has_waited && (!is_passing || self.stopped.is_some()) {
                idle += POLL;
            }
            if idle >= PATIENCE {
                if is_passing {
                    self.say("leaving output that nobody takes");
                    self.code = self.code.or(self.stop_code());
                }
                return;
            }
        }
    }

    /// Settles which failure was the first, if there is one: what the coordinator says, else what was seen.
    fn name_cause(&mut self) {
        let Some(&(first, first_status)) = self.failures.first().filter(|_| self.code.is_none()) else {
            return;
        };
        let (status, text) = match self.blamed() {
            Some((rank, status, abort)) => {
                let cause = match &abort.cause {
                    // Nobody knows which of the two is wrong.
                    Cause::Mismatch { .. } | Cause::Length { .. } | Cause::Unreachable => explain(&abort),
                    cause => format!("it {cause}"),
                };
                (status, format!("rank {rank} {} ({cause})", child::describe(status)))
            }
            // The rank that is the cause may still run, or have ended without an error.
            None => {
                let cause = self.meeting.aborted().map(|abort| format!("{}; ", explain(&abort)));
                let failed = format!("rank {first} {}", child::describe(first_status));
                (first_status, cause.unwrap_or_default() + &failed)
            }
        };
        self.code = Some(child::exit_code(status));
        if let Phase::LastWords(_) = self.phase {
            self.say(&format!("{text}; ending the others"));
        }
    }

    /// Takes an event; gives back a signal that wants the job to end.
    fn hear(&mut self, event: Event) -> Option<i32> {
        match event {
            // Where ranks are left, that is heard by who reaps them.
            Event::Ended(_) => None,
            Event::Unwritable(error) => {
                self.output_is_gone(&error);
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

    /// Somebody wants the job to end, by a signal or by taking no output: it is not started again. Whoever wanted it first
    /// decides about the code.
    fn record_stop(&mut self, by: Stop) {
        self.stopped = self.stopped.or(Some(by));
    }

    /// The exit code that says what has stopped the job.
    fn stop_code(&self) -> Option<u8> {
        self.stopped.map(Stop::code)
    }

    /// Takes an event, and passes a signal on to every rank.
    fn pass_on(&mut self, event: Event) {
        let Some(signal) = self.hear(event) else { return };
        self.name_cause();
        self.say_passed_on(signal);
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.end_with(signal);
        }
    }

    /// Passes on a signal that means what the program makes of it, as a warning of a cluster that it is time to save.
    fn notify(&self, signal: i32) {
        if let Some(named) = Signal::from_named_raw(signal)
            && self.running().next().is_some()
        {
            self.say_passed_on(signal);
            self.running().for_each(|running| running.signal(named));
        }
    }

    fn say_passed_on(&self, signal: i32) {
        self.say(&format!("{}: passed on to every rank", child::signal_name(signal)));
    }

    /// Stops until the front process lets this process go on, and every rank with it: ranks that went on alone would take
    /// the launcher for dead. The front process knows whether a shell can let the job go on, and stops with it.
    fn pause(&self) {
        self.running().for_each(|running| running.signal(Signal::STOP));
        let stopped = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        self.running().for_each(|running| running.signal(Signal::CONT));
        if let Err(error) = stopped {
            self.say(&format!("cannot stop: {error}"));
        }
    }

    fn output_is_gone(&mut self, error: &Error) {
        let words = match error.is_unread() {
            true => "nobody reads the output any more".to_owned(),
            false => error.with_causes(),
        };
        if let Phase::Running = self.phase {
            // Another start would meet it too.
            self.record_stop(Stop::Output(error.exit_code()));
            self.code = self.stop_code();
            self.say(&format!("{words}; ending the job"));
            self.end_with(Signal::TERM);
        } else if !error.is_unread() && self.stopped.is_none() {
            // The job ends in any case, because a rank has failed.
            self.say(&words);
        }
    }

    /// Signals every rank; those who are still there after the grace period are killed.
    fn end_with(&mut self, signal: Signal) {
        self.running().for_each(|running| running.signal(signal));
        if !matches!(self.phase, Phase::Terminating(_) | Phase::Killing(_)) {
            self.phase = Phase::Terminating(self.runtime.deadline(self.grace));
        }
    }

    /// A deadline has passed: the next harder measure.
    fn escalate(&mut self) -> Result<(), Error> {
        match self.phase {
            Phase::Running => {}
            Phase::LastWords(_) => {
                self.name_cause();
                self.end_with(Signal::TERM);
            }
            Phase::Terminating(_) => {
                self.kill_all();
                self.phase = Phase::Killing(self.runtime.deadline(PATIENCE));
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
        self.voice.send(text.to_owned());
    }
}

#[derive(Debug)]
pub(super) enum Event {
    /// The process of a rank has ended and waits to be reaped.
    Ended(usize),
    /// This process was sent a signal.
    Signalled(i32),
    /// What the ranks print cannot be passed on any more.
    Unwritable(Error),
}

#[cfg(test)]
mod tests;
