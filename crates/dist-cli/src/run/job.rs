//! The part of a job on this machine: start and restart of its ranks.

use std::ffi::OsString;
use std::ops::Range;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::process::Config;
use dist_transport::runtime::{Mailbox, Receiver, Task};

use super::child::{self, Started};
use super::cores::{self, Bind};
use super::files;
use super::front::in_launcher;
use super::lines::{Forward, OutputSink};
use super::rendezvous::{Nodes, Rendezvous};
use super::restart;
use super::signals::watch_signals;
use super::watch::{END_LIMIT, Ended, Event, REPORT_GRACE, RunningJob};
use crate::Error;
use crate::outcome::{Outcome, Stop};

/// The decision after a failed start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextStart {
    /// Start the job again, with this number of the start.
    Number(u16),
    /// Give up, because the first machine does not restart the job.
    Never,
    /// End, because this signal arrived.
    Stopped(i32),
}

/// One program on `ranks` processes of this machine.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ranks: usize,
    /// The world rank of the first of them.
    pub(crate) first: usize,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// Time for the other ranks to report their errors after the first failure.
    pub(crate) report_grace: Duration,
    /// Time from the signal that asks a process to end until it is killed.
    pub(crate) grace: Duration,
    pub(crate) bind: Bind,
    /// The machines of the job if there are several. Each of them runs `ranks` ranks.
    pub(crate) nodes: Option<Nodes>,
    /// Maximum number of restarts after a failure.
    pub(crate) restarts: u16,
    /// Variables of the ranks in addition to those of this process.
    pub(crate) environment: Vec<(OsString, OsString)>,
}

/// The receiver of signals, which outlives a job: a signal between two jobs ends the next one.
#[derive(Debug)]
pub(crate) struct Launcher {
    runtime: Runtime,
    events: Mailbox<Event>,
    inbox: Receiver<Event>,
    files: files::OriginalLimit,
    started: Started,
}

impl Launcher {
    /// Returns the queue for signals to the job that did not arrive at this process.
    pub(super) fn events(&self) -> &Mailbox<Event> {
        &self.events
    }

    pub(super) const fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn new() -> Result<Self, Error> {
        let runtime = Runtime::system();
        let (events, inbox) = runtime.mailbox();
        let started = Started::default();
        let signalled = events.clone();
        watch_signals(&runtime, move |signal| signalled.send(Event::Signalled(signal)), &started)?;
        Ok(Self { runtime, events, inbox, files: files::OriginalLimit::raise(), started })
    }
}

impl Job {
    /// Creates a job with the default grace period. Each rank is bound to its share of the cores.
    pub(crate) fn of(ranks: usize, program: OsString, arguments: Vec<OsString>) -> Self {
        Self {
            ranks,
            first: 0,
            program,
            arguments,
            report_grace: REPORT_GRACE,
            grace: Duration::from_secs(5),
            bind: Bind::Cores,
            nodes: None,
            restarts: 0,
            environment: Vec::new(),
        }
    }

    /// Creates a job that runs this command in each rank.
    fn of_this_command(ranks: usize) -> Result<Self, Error> {
        let own = child::own_program().map_err(Error::OwnProgram)?;
        Ok(Self::of(ranks, own.into_os_string(), std::env::args_os().skip(1).collect()))
    }

    /// Returns the ranks of this machine.
    pub(super) fn local(&self) -> Range<usize> {
        self.first..self.first + self.ranks
    }

    /// Returns the number of ranks on all machines whose coordinator is in this process.
    fn hosted(&self) -> usize {
        match &self.nodes {
            None => self.ranks,
            Some(nodes) if nodes.index == 0 => nodes.count * self.ranks,
            Some(_) => 0,
        }
    }

    /// Checks that the limit of open files suffices for the job and this number of logs.
    pub(super) fn check_files(&self, logs: usize) -> Result<(), Error> {
        files::check(self.ranks, self.hosted(), logs)
    }

    fn rendezvous(&self, restart: u16) -> Result<Rendezvous, Error> {
        match &self.nodes {
            None => Rendezvous::here(self.ranks, restart),
            Some(nodes) => Rendezvous::across(nodes, nodes.count * self.ranks, restart),
        }
    }

    /// Starts all ranks and returns when all have ended and the job is not restarted.
    pub(crate) fn run_by(
        &self,
        launcher: &mut Launcher,
        sink: Arc<dyn OutputSink>,
    ) -> Result<Outcome, Error> {
        self.check_files(0)?;
        let Launcher { runtime, events, inbox, files, started } = launcher;
        let (messages, writer) = message_writer(runtime, sink.clone())?;
        let mut restart = 0;
        let ended = loop {
            let rendezvous = self.rendezvous(restart);
            let run = |rendezvous| {
                self.run_once(rendezvous, runtime, (events, inbox), (files, started), (&messages, &sink))
            };
            match rendezvous.and_then(run).map(|ended| ended.outcome) {
                Ok(Outcome::Code(code)) if restart < self.restarts => {
                    match self.next_start(restart, runtime, inbox, &messages) {
                        NextStart::Number(next) => restart = next,
                        NextStart::Never => break Ok(Outcome::Code(code)),
                        NextStart::Stopped(signal) => {
                            break Ok(Outcome::Stopped { code, by: Stop::Signal(signal) });
                        }
                    }
                }
                ended => break ended,
            }
            messages.send(format!("starting the job again, {restart} of at most {} times", self.restarts));
        };
        drop(messages);
        // Messages that precede the error are printed before it.
        let _ = writer.join_by(runtime.deadline(END_LIMIT));
        ended
    }

    /// Returns the start that follows a failed one. Waits for the first machine if necessary.
    fn next_start(
        &self,
        failed: u16,
        runtime: &Runtime,
        inbox: &mut Receiver<Event>,
        messages: &Mailbox<String>,
    ) -> NextStart {
        match &self.nodes {
            Some(nodes) if nodes.index > 0 => {
                restart::follow_first_machine(nodes, failed, self.restarts, runtime, inbox, |words| {
                    messages.send(words)
                })
            }
            _ => NextStart::Number(failed + 1),
        }
    }

    /// Starts the ranks with the given rendezvous, and returns when all have ended.
    pub(super) fn run_at(
        &self,
        rendezvous: Rendezvous,
        launcher: &mut Launcher,
        sink: &Arc<dyn OutputSink>,
    ) -> Result<Ended, Error> {
        let hosted = if rendezvous.is_hosted() { rendezvous.world_size() } else { 0 };
        files::check(self.ranks, hosted, 0)?;
        let Launcher { runtime, events, inbox, files, started } = launcher;
        let (messages, writer) = message_writer(runtime, sink.clone())?;
        let ended = self.run_once(rendezvous, runtime, (events, inbox), (files, started), (&messages, sink));
        drop(messages);
        let _ = writer.join_by(runtime.deadline(END_LIMIT));
        ended
    }

    fn run_once(
        &self,
        rendezvous: Rendezvous,
        runtime: &Runtime,
        (events, inbox): (&Mailbox<Event>, &mut Receiver<Event>),
        (files, started): (&files::OriginalLimit, &Started),
        (messages, sink): (&Mailbox<String>, &Arc<dyn OutputSink>),
    ) -> Result<Ended, Error> {
        let limits = [self.report_grace, self.grace];
        let mut watch = RunningJob::new(runtime, messages, self.first, limits, rendezvous, started);
        for local in 0..self.ranks {
            let child = self.start(local, &watch.rendezvous, files, started);
            let added = child.and_then(|child| watch.add(child, events, sink));
            if let Err(error) = added {
                watch.kill_all();
                return Err(error);
            }
        }
        watch.until_all_have_ended(inbox)
    }

    /// Starts one of this machine's ranks.
    fn start(
        &self,
        local: usize,
        rendezvous: &Rendezvous,
        files: &files::OriginalLimit,
        started: &Started,
    ) -> Result<Child, Error> {
        let rank = self.first + local;
        let failed = |source| Error::Start { program: self.program.clone(), rank, source };
        let mut command = child::command(&self.program, &self.arguments).map_err(failed)?;
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        rendezvous.set_env(&mut command);
        files.set_env(&mut command);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", local.to_string());
        command.env("LOCAL_WORLD_SIZE", self.ranks.to_string());
        cores::set_threads(&mut command, self.ranks);
        if let Some(cores) = cores::of_rank(self.bind, local, self.ranks) {
            command.env(cores::CORES, cores);
        }
        started.spawn(&mut command).map_err(failed)
    }
}

/// Prepares a command for a number of ranks and runs it as a rank of the current job. If this process is not
/// a rank, starts the same command as the program of a job of its own.
pub(crate) fn in_a_job<T>(
    ranks: Option<usize>,
    prepare: impl FnOnce(usize) -> Result<T, Error>,
    be_a_rank: impl FnOnce(&Config, T) -> Result<Outcome, Error>,
) -> Result<Outcome, Error> {
    if !Config::is_in_env() {
        let ranks = ranks.unwrap_or(RANKS_DEFAULT);
        return in_launcher(|| {
            // Errors in the arguments are reported once, not by each rank.
            prepare(ranks)?;
            Job::of_this_command(ranks)?.run_by(&mut Launcher::new()?, Arc::new(Forward::untagged()))
        });
    }
    let config = Config::from_env()?;
    let world_size = config.rank().world_size();
    if let Some(ranks) = ranks.filter(|&ranks| ranks != world_size) {
        return Err(Error::Usage(format!(
            "--ranks {ranks} contradicts the size of the current job, {world_size}"
        )));
    }
    be_a_rank(&config, prepare(world_size)?)
}

/// Default number of processes.
const RANKS_DEFAULT: usize = 2;

/// Starts a thread that writes this process's messages. `sink` may block for any time, and the end of the job
/// must not wait for it.
pub(super) fn message_writer(
    runtime: &Runtime,
    sink: Arc<dyn OutputSink>,
) -> Result<(Mailbox<String>, Task<()>), Error> {
    let (messages, mut words) = runtime.mailbox::<String>();
    let speak = move || {
        while let Ok(text) = words.receive(None) {
            sink.say(&text);
        }
    };
    let writer = runtime.spawn("messages", speak).map_err(Error::Thread)?;
    Ok((messages, writer))
}
