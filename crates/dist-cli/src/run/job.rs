//! A job as far as it runs on this machine: how its processes are started, and started again.

use std::ffi::OsString;
use std::ops::Range;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::process::Config;
use dist_transport::runtime::{Mailbox, Receiver, Task};

use super::again;
use super::child::{self, Started};
use super::cores::{self, Bind};
use super::files;
use super::front::in_launcher;
use super::lines::{Forward, Take};
use super::meeting::{Meeting, Nodes};
use super::signals::watch_signals;
use super::watch::{Ended, Event, LAST_WORDS, PATIENCE, Watch};
use crate::Error;
use crate::outcome::{Outcome, Stop};

/// What follows a start that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextStart {
    /// The start of this number.
    Number(u16),
    /// None, because the first machine starts the job no more.
    Never,
    /// None, because this signal has come.
    Stopped(i32),
}

/// One program on `ranks` processes of this machine.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ranks: usize,
    /// The number of the first of them in the world.
    pub(crate) first: usize,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// How long the other ranks have to say what they saw, once one has failed.
    pub(crate) last_words: Duration,
    /// How long between asking a process to end and ending it.
    pub(crate) grace: Duration,
    pub(crate) bind: Bind,
    /// The machines that it runs on, if this is not the only one; `ranks` are those of each.
    pub(crate) nodes: Option<Nodes>,
    /// How often it is started again after a failure.
    pub(crate) restarts: u16,
    /// Variables that ranks see beside those of this process.
    pub(crate) environment: Vec<(OsString, OsString)>,
}

/// What hears of signals, also between two jobs: the next one ends because of them.
#[derive(Debug)]
pub(crate) struct Launcher {
    runtime: Runtime,
    events: Mailbox<Event>,
    inbox: Receiver<Event>,
    files: files::Before,
    started: Started,
}

impl Launcher {
    /// Where a signal to the job can be sent that did not come to this process itself.
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
        Ok(Self { runtime, events, inbox, files: files::Before::raise(), started })
    }
}

impl Job {
    /// A job with the usual grace, each rank bound to its share of the cores.
    pub(crate) fn of(ranks: usize, program: OsString, arguments: Vec<OsString>) -> Self {
        Self {
            ranks,
            first: 0,
            program,
            arguments,
            last_words: LAST_WORDS,
            grace: Duration::from_secs(5),
            bind: Bind::Cores,
            nodes: None,
            restarts: 0,
            environment: Vec::new(),
        }
    }

    /// This very command, as the program of each rank.
    fn of_this_command(ranks: usize) -> Result<Self, Error> {
        let own = child::own_program().map_err(Error::OwnProgram)?;
        Ok(Self::of(ranks, own.into_os_string(), std::env::args_os().skip(1).collect()))
    }

    /// The ranks of this machine.
    pub(super) fn local(&self) -> Range<usize> {
        self.first..self.first + self.ranks
    }

    /// How many ranks, on any machine, have their coordinator here.
    fn hosted(&self) -> usize {
        match &self.nodes {
            None => self.ranks,
            Some(nodes) if nodes.index == 0 => nodes.count * self.ranks,
            Some(_) => 0,
        }
    }

    /// Says that this process may not have as many files open as the job takes, with so many that keep output.
    pub(super) fn check_files(&self, logs: usize) -> Result<(), Error> {
        files::check(self.ranks, self.hosted(), logs)
    }

    fn meeting(&self, restart: u16) -> Result<Meeting, Error> {
        match &self.nodes {
            None => Meeting::here(self.ranks, restart),
            Some(nodes) => Meeting::across(nodes, nodes.count * self.ranks, restart),
        }
    }

    /// Starts all ranks and returns when none is left, and none is to be started again.
    pub(crate) fn run_by(&self, launcher: &mut Launcher, take: Arc<dyn Take>) -> Result<Outcome, Error> {
        self.check_files(0)?;
        let Launcher { runtime, events, inbox, files, started } = launcher;
        let (voice, speaker) = voice(runtime, take.clone())?;
        let mut restart = 0;
        let ended = loop {
            let meeting = self.meeting(restart);
            let run =
                |meeting| self.run_once(meeting, runtime, (events, inbox), (files, started), (&voice, &take));
            match meeting.and_then(run).map(|ended| ended.outcome) {
                Ok(Outcome::Code(code)) if restart < self.restarts => {
                    match self.next_start(restart, runtime, inbox, &voice) {
                        NextStart::Number(next) => restart = next,
                        NextStart::Never => break Ok(Outcome::Code(code)),
                        NextStart::Stopped(signal) => {
                            break Ok(Outcome::Stopped { code, by: Stop::Signal(signal) });
                        }
                    }
                }
                ended => break ended,
            }
            voice.send(format!("starting the job again, {restart} of at most {} times", self.restarts));
        };
        drop(voice);
        // What was said before an error comes before it.
        let _ = speaker.join_by(runtime.deadline(PATIENCE));
        ended
    }

    /// The start that follows one that failed, once it can be.
    fn next_start(
        &self,
        failed: u16,
        runtime: &Runtime,
        inbox: &mut Receiver<Event>,
        voice: &Mailbox<String>,
    ) -> NextStart {
        match &self.nodes {
            Some(nodes) if nodes.index > 0 => {
                again::follow(nodes, failed, self.restarts, runtime, inbox, |words| voice.send(words))
            }
            _ => NextStart::Number(failed + 1),
        }
    }

    /// Starts the ranks, which meet as they are told, and returns when none is left.
    pub(super) fn run_at(
        &self,
        meeting: Meeting,
        launcher: &mut Launcher,
        take: &Arc<dyn Take>,
    ) -> Result<Ended, Error> {
        let hosted = if meeting.is_hosted() { meeting.world_size() } else { 0 };
        files::check(self.ranks, hosted, 0)?;
        let Launcher { runtime, events, inbox, files, started } = launcher;
        let (voice, speaker) = voice(runtime, take.clone())?;
        let ended = self.run_once(meeting, runtime, (events, inbox), (files, started), (&voice, take));
        drop(voice);
        let _ = speaker.join_by(runtime.deadline(PATIENCE));
        ended
    }

    fn run_once(
        &self,
        meeting: Meeting,
        runtime: &Runtime,
        (events, inbox): (&Mailbox<Event>, &mut Receiver<Event>),
        (files, started): (&files::Before, &Started),
        (voice, take): (&Mailbox<String>, &Arc<dyn Take>),
    ) -> Result<Ended, Error> {
        let limits = [self.last_words, self.grace];
        let mut watch = Watch::new(runtime, voice, self.first, limits, meeting, started);
        for local in 0..self.ranks {
            let child = self.start(local, &watch.meeting, files, started);
            let added = child.and_then(|child| watch.add(child, events, take));
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
        meeting: &Meeting,
        files: &files::Before,
        started: &Started,
    ) -> Result<Child, Error> {
        let rank = self.first + local;
        let failed = |source| Error::Start { program: self.program.clone(), rank, source };
        let mut command = child::command(&self.program, &self.arguments).map_err(failed)?;
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        meeting.tell(&mut command);
        files.tell(&mut command);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", local.to_string());
        command.env("LOCAL_WORLD_SIZE", self.ranks.to_string());
        cores::tell_threads(&mut command, self.ranks);
        if let Some(cores) = cores::of_rank(self.bind, local, self.ranks) {
            command.env(cores::CORES, cores);
        }
        started.spawn(&mut command).map_err(failed)
    }
}

/// What a command does as a rank of a job, once it is prepared for that number of ranks. Where this process is no rank,
/// the same command is started as the program of a job of its own.
pub(crate) fn in_a_job<T>(
    ranks: Option<usize>,
    prepare: impl FnOnce(usize) -> Result<T, Error>,
    be_a_rank: impl FnOnce(&Config, T) -> Result<Outcome, Error>,
) -> Result<Outcome, Error> {
    if !Config::is_in_env() {
        let ranks = ranks.unwrap_or(RANKS_DEFAULT);
        return in_launcher(|| {
            // What makes no sense is said once.
            prepare(ranks)?;
            Job::of_this_command(ranks)?.run_by(&mut Launcher::new()?, Arc::new(Forward::untagged()))
        });
    }
    let config = Config::from_env()?;
    let world_size = config.rank().world_size();
    if let Some(ranks) = ranks.filter(|&ranks| ranks != world_size) {
        return Err(Error::Usage(format!("--ranks {ranks} inside a job of {world_size}")));
    }
    be_a_rank(&config, prepare(world_size)?)
}

/// How many processes are started when nothing is said.
const RANKS_DEFAULT: usize = 2;

/// A thread that says what this process has to say: whoever takes it may do so slowly or not at all, and the end of
/// the job must not wait for that.
pub(super) fn voice(runtime: &Runtime, take: Arc<dyn Take>) -> Result<(Mailbox<String>, Task<()>), Error> {
    let (voice, mut words) = runtime.mailbox::<String>();
    let speak = move || {
        while let Ok(text) = words.receive(None) {
            take.say(&text);
        }
    };
    let speaker = runtime.spawn("voice", speak).map_err(Error::Thread)?;
    Ok((voice, speaker))
}
