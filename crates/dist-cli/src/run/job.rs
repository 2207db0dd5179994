//! A job as far as it runs on this machine: its processes here, and what is done when one of them fails.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dist_transport::runtime::{Mailbox, Receiver, Task, Unavailable};
use dist_transport::{Cause, Deadline, Runtime};
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;

use super::child::{self, Running};
use super::cores::{self, Bind};
use super::lines::{Stream, Take, read_lines};
use super::meeting::{Meeting, Nodes};
use crate::Error;

/// How long the other ranks have to say what they saw, once one has failed.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long a killed process may take to be gone, and output to arrive that is still on its way.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a thread that passes on output is looked at, once only that is missing.
const OUTPUT_POLL: Duration = Duration::from_millis(5);
/// How often the coordinator is asked for its record when only that is missing.
const RECORD_POLL: Duration = Duration::from_millis(5);
/// How long the coordinator is there for the ranks of other machines after a failure, so that they hear of it.
const FAREWELL: Duration = Duration::from_secs(1);
/// The exit code of a program whose reader has left: 128 and SIGPIPE.
const SIGPIPE_CODE: u8 = 128 + 13;

/// One program on `ranks` processes of this machine.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ranks: usize,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// How long between asking a process to end and ending it.
    pub(crate) grace: Duration,
    pub(crate) bind: Bind,
    /// The machines that it runs on, if this is not the only one; `ranks` are those of each.
    pub(crate) nodes: Option<Nodes>,
    /// How often it is started again after a failure.
    pub(crate) restarts: u16,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every rank returned 0, or the command that was asked for found nothing wrong.
    Success,
    /// The exit code to pass on.
    Code(u8),
    /// The same, where somebody wanted it to end.
    Stopped(u8),
}

#[derive(Debug)]
enum Event {
    /// The process of a rank has ended and waits to be reaped.
    Ended(usize),
    /// This process was sent a signal.
    Signalled(i32),
    /// What the ranks print cannot be passed on any more.
    Unwritable(Error),
}

/// What hears of signals, also between two jobs: the next one ends because of them.
#[derive(Debug)]
pub(crate) struct Launcher {
    runtime: Runtime,
    events: Mailbox<Event>,
    inbox: Receiver<Event>,
}

impl Launcher {
    pub(crate) fn new() -> Result<Self, Error> {
        let runtime = Runtime::system();
        let (events, inbox) = runtime.mailbox();
        watch_signals(&runtime, &events)?;
        Ok(Self { runtime, events, inbox })
    }
}

/// How far the end of the job has come.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    LastWords(Deadline),
    Terminating(Deadline),
    Killing(Deadline),
}

impl Job {
    /// A job with the usual grace, each rank bound to its share of the cores.
    pub(crate) fn of(ranks: usize, program: OsString, arguments: Vec<OsString>) -> Self {
        Self {
            ranks,
            program,
            arguments,
            grace: Duration::from_secs(5),
            bind: Bind::Cores,
            nodes: None,
            restarts: 0,
        }
    }

    /// This very command, as the program of each rank.
    pub(crate) fn of_this_command(ranks: usize) -> Result<Self, Error> {
        let own = std::env::current_exe().map_err(Error::OwnProgram)?;
        Ok(Self::of(ranks, own.into_os_string(), std::env::args_os().skip(1).collect()))
    }

    /// The ranks of this machine.
    pub(super) fn local(&self) -> Range<usize> {
        let first = self.nodes.as_ref().map_or(0, |nodes| nodes.index * self.ranks);
        first..first + self.ranks
    }

    fn meeting(&self, restart: u16) -> Result<Meeting, Error> {
        match &self.nodes {
            None => Meeting::here(self.ranks, restart),
            Some(nodes) => Meeting::across(nodes, nodes.count * self.ranks, restart),
        }
    }

    /// Runs this job only.
    pub(crate) fn run(&self, take: Arc<dyn Take>) -> Result<Outcome, Error> {
        self.run_by(&mut Launcher::new()?, take)
    }

    /// Starts all ranks and returns when none is left, and none is to be started again.
    pub(crate) fn run_by(&self, launcher: &mut Launcher, take: Arc<dyn Take>) -> Result<Outcome, Error> {
        let Launcher { runtime, events, inbox } = launcher;
        let (voice, speaker) = voice(runtime, take.clone())?;
        let mut restart = 0;
        let outcome = loop {
            match self.run_once(restart, runtime, (events, inbox), &voice, &take)? {
                Outcome::Code(_) if restart < self.restarts => restart += 1,
                outcome => break outcome,
            }
            voice.send(format!("starting the job again, {restart} of at most {} times", self.restarts));
        };
        drop(voice);
        let _ = speaker.join_by(runtime.deadline(PATIENCE));
        Ok(outcome)
    }

    fn run_once(
        &self,
        restart: u16,
        runtime: &Runtime,
        (events, inbox): (&Mailbox<Event>, &mut Receiver<Event>),
        voice: &Mailbox<String>,
        take: &Arc<dyn Take>,
    ) -> Result<Outcome, Error> {
        let mut watch = Watch {
            runtime: runtime.clone(),
            ranks: Vec::new(),
            readers: Vec::new(),
            voice: voice.clone(),
            phase: Phase::Running,
            grace: self.grace,
            first: self.local().start,
            meeting: self.meeting(restart)?,
            failures: Vec::new(),
            code: None,
            stopped: None,
        };
        for local in 0..self.ranks {
            let started = self.start(local, &watch.meeting).and_then(|child| {
                let rank = watch.first + local;
                watch.readers.extend(watch_child(runtime, rank, child, events, take, &mut watch.ranks)?);
                Ok(())
            });
            if let Err(error) = started {
                watch.kill_all();
                return Err(error);
            }
        }
        watch.until_all_have_ended(inbox)
    }

    /// Starts one of this machine's ranks.
    fn start(&self, local: usize, meeting: &Meeting) -> Result<std::process::Child, Error> {
        let rank = self.local().start + local;
        let failed = |source| Error::Start { program: self.program.clone(), rank, source };
        let mut command = child::command(&self.program, &self.arguments).map_err(failed)?;
        meeting.tell(&mut command);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", local.to_string());
        command.env("LOCAL_WORLD_SIZE", self.ranks.to_string());
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            command.env("RAYON_NUM_THREADS", (cores / self.ranks).max(1).to_string());
        }
        if let Some(cores) = cores::of_rank(local, self.ranks).filter(|_| self.bind == Bind::Cores) {
            command.env(cores::CORES, cores);
        }
        command.spawn().map_err(failed)
    }
}

/// Threads that tell of a child's end and take what it prints.
fn watch_child(
    runtime: &Runtime,
    rank: usize,
    mut child: std::process::Child,
    events: &Mailbox<Event>,
    take: &Arc<dyn Take>,
    ranks: &mut Vec<Option<Running>>,
) -> Result<[Reader; 2], Error> {
    let output = child.stdout.take().expect("the output is a pipe");
    let error = child.stderr.take().expect("the error output is a pipe");
    let running = Running::new(child);
    let pid = running.pid();
    ranks.push(Some(running));
    let ended = events.clone();
    let wait = move || {
        // It can only fail if there is no such child, and then it is not running either.
        let _ = child::wait_for_end(pid);
        ended.send(Event::Ended(rank));
    };
    runtime.spawn("wait", wait).map_err(Error::Thread)?;
    Ok([
        reader(runtime, rank, Stream::Output, output, events, take)?,
        reader(runtime, rank, Stream::Error, error, events, take)?,
    ])
}

/// A thread that passes on what a rank prints.
struct Reader {
    task: Task<()>,
    /// Whether it has a line that is still to be taken, and does not wait for the rank.
    is_passing: Arc<AtomicBool>,
}

fn reader(
    runtime: &Runtime,
    rank: usize,
    stream: Stream,
    mut source: impl io::Read + Send + 'static,
    events: &Mailbox<Event>,
    take: &Arc<dyn Take>,
) -> Result<Reader, Error> {
    let is_passing = Arc::new(AtomicBool::new(false));
    let (events, take, passing) = (events.clone(), take.clone(), is_passing.clone());
    let read = move || {
        let pass = |line: &[u8]| {
            passing.store(true, Ordering::Relaxed);
            let passed = take.take(rank, stream, line);
            passing.store(false, Ordering::Relaxed);
            passed
        };
        // The pipe is closed after that: the rank may end because of it.
        if let Err(error) = read_lines(rank, &mut source, pass) {
            events.send(Event::Unwritable(error));
        }
    };
    let task = runtime.spawn("lines", read).map_err(Error::Thread)?;
    Ok(Reader { task, is_passing })
}

fn watch_signals(runtime: &Runtime, events: &Mailbox<Event>) -> Result<(), Error> {
    // Before any is watched for: what whoever started this process ignored.
    let ignored = child::ignored_signals();
    // Behind nohup, or in the background of a script, a job goes on as any other program does.
    let heeded = [SIGHUP, SIGINT, SIGQUIT].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    // Where that is ignored, the system itself reaps a process that has ended, and nobody learns how.
    let mut signals = Signals::new(heeded.chain([SIGTERM, SIGTSTP, SIGCHLD])).map_err(Error::Signals)?;
    let events = events.clone();
    let watch = move || {
        let told = signals.forever().filter(|&signal| signal != SIGCHLD);
        told.for_each(|signal| events.send(Event::Signalled(signal)));
    };
    runtime.spawn("signals", watch).map(drop).map_err(Error::Thread)
}

/// A thread that says what this process has to say: whoever takes it may do so slowly or not at all, and the end of
/// the job must not wait for that.
fn voice(runtime: &Runtime, take: Arc<dyn Take>) -> Result<(Mailbox<String>, Task<()>), Error> {
    let (voice, mut words) = runtime.mailbox::<String>();
    let speak = move || {
        while let Ok(text) = words.receive(None) {
            take.say(&text);
        }
    };
    let speaker = runtime.spawn("voice", speak).map_err(Error::Thread)?;
    Ok((voice, speaker))
}

/// Everything that the main thread knows about the running job.
struct Watch {
    runtime: Runtime,
    /// The first rank of this machine.
    first: usize,
    /// The processes that have not been reaped, from it on.
    ranks: Vec<Option<Running>>,
    /// The threads that pass on what the ranks print.
    readers: Vec<Reader>,
    voice: Mailbox<String>,
    phase: Phase,
    grace: Duration,
    meeting: Meeting,
    /// The ranks that failed, in the order in which that was seen.
    failures: Vec<(usize, ExitStatus)>,
    /// The code to pass on, once it is settled which failure was the first.
    code: Option<u8>,
    /// If somebody wanted the job to end, the code for that.
    stopped: Option<u8>,
}

impl Watch {
    fn until_all_have_ended(mut self, inbox: &mut Receiver<Event>) -> Result<Outcome, Error> {
        if let Err(error) = self.watch(inbox) {
            self.kill_all();
            return Err(error);
        }
        self.await_record(inbox);
        self.name_cause();
        self.await_other_machines(inbox);
        self.await_output(inbox);
        Ok(match self.code {
            None => Outcome::Success,
            Some(code) if self.stopped.is_some() => Outcome::Stopped(code),
            Some(code) => Outcome::Code(code),
        })
    }

    fn watch(&mut self, inbox: &mut Receiver<Event>) -> Result<(), Error> {
        while self.running().next().is_some() {
            match inbox.receive(self.deadline()) {
                Ok(Event::Ended(rank)) => self.reap(rank, inbox)?,
                Ok(Event::Signalled(signal)) => self.forward(signal),
                Ok(Event::Unwritable(error)) => self.output_is_gone(&error),
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
                    statuses.push((rank, running.reap().map_err(Error::Wait)?));
                    next = inbox.try_receive();
                }
                Event::Signalled(signal) => self.forward(signal),
                Event::Unwritable(error) => self.output_is_gone(&error),
            }
        }
        let (killed, ended): (Vec<_>, Vec<_>) = statuses
            .into_iter()
            .filter(|(_, status)| !status.success())
            .partition(|(_, status)| status.code().is_none());
        self.failures.extend(killed.into_iter().chain(ended));
        if self.failures.is_empty() {
            return Ok(());
        }
        if let Phase::Running = self.phase {
            self.phase = Phase::LastWords(self.runtime.deadline(LAST_WORDS));
        }
        if !matches!(self.phase, Phase::LastWords(_)) || self.blamed().is_some() {
            self.name_cause();
        }
        Ok(())
    }

    /// The rank that the coordinator's record names, if it is one of those that failed, and what it did. The ranks
    /// that noticed can be gone before it is.
    fn blamed(&self) -> Option<(usize, ExitStatus, Cause)> {
        let abort = self.meeting.aborted()?;
        let failure = self.failures.iter().find(|(rank, _)| *rank == abort.rank);
        failure.map(|&(rank, status)| (rank, status, abort.cause))
    }

    /// Gives the coordinator, when no rank is left, the time to hear what they have told it.
    fn await_record(&mut self, inbox: &mut Receiver<Event>) {
        // With one failure there is no doubt about the first.
        if self.code.is_some() || self.failures.len() < 2 {
            return;
        }
        let Phase::LastWords(deadline) = self.phase else { return };
        while self.meeting.aborted().is_none() && !self.runtime.expired(deadline) {
            match inbox.receive(Some(self.runtime.deadline(RECORD_POLL))) {
                Ok(Event::Signalled(SIGTSTP)) => self.pause(),
                // Nobody is left whom it could be passed on to, but the job is not to be started again.
                Ok(Event::Signalled(signal)) => self.stopped = child::signal_code(signal),
                _ => {}
            }
        }
    }

    /// Hosts the coordinator for the ranks of other machines: until they have left, or, after a failure, could hear of it.
    fn await_other_machines(&mut self, inbox: &mut Receiver<Event>) {
        if self.meeting.world_size() == self.ranks.len() {
            return;
        }
        let mut farewell = None;
        while self.meeting.present() > 0 {
            if self.code.is_some() || self.meeting.aborted().is_some() {
                let end = *farewell.get_or_insert_with(|| self.runtime.deadline(FAREWELL));
                if self.runtime.expired(end) {
                    break;
                }
            }
            match inbox.receive(Some(self.runtime.deadline(RECORD_POLL))) {
                Ok(Event::Signalled(SIGTSTP)) => self.pause(),
                Ok(Event::Signalled(signal)) => {
                    self.say(&format!("{}: leaving the ranks of other machines", child::signal_name(signal)));
                    self.stopped = child::signal_code(signal);
                    self.code = self.code.or(self.stopped);
                    break;
                }
                Ok(Event::Unwritable(error)) => self.output_is_gone(&error),
                _ => {}
            }
        }
        // The ranks of this machine may have ended before.
        if self.code.is_none()
            && let Some(abort) = self.meeting.aborted()
        {
            self.say(&format!("the job failed on another machine: {abort}"));
            self.code = Some(1);
        }
    }

    /// Waits until all that the ranks have printed is passed on. Whoever takes it may do so slowly, unless somebody wants
    /// the job to end; but a process that has left its group may hold a pipe open for as long as it likes.
    fn await_output(&mut self, inbox: &mut Receiver<Event>) {
        let mut idle = Duration::ZERO;
        while let Some(Reader { task, is_passing }) = self.readers.pop() {
            let unfinished = task.join_by(self.runtime.deadline(OUTPUT_POLL)).err();
            let has_waited = unfinished.is_some();
            self.readers.extend(unfinished.map(|task| Reader { task, is_passing }));
            while let Some(event) = inbox.try_receive() {
                match event {
                    Event::Ended(_) => {}
                    Event::Unwritable(error) => self.output_is_gone(&error),
                    Event::Signalled(SIGTSTP) => self.pause(),
                    Event::Signalled(signal) => {
                        self.stopped = self.stopped.or(child::signal_code(signal));
                        self.code = self.code.or(self.stopped);
                        idle = PATIENCE;
                    }
                }
            }
            let is_passing = self.readers.iter().any(|reader| reader.is_passing.load(Ordering::Relaxed));
            if has_waited && (!is_passing || self.stopped.is_some()) {
                idle += OUTPUT_POLL;
            }
            if idle >= PATIENCE {
                if is_passing {
                    self.say("leaving output that nobody takes");
                    self.code = self.code.or(self.stopped);
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
        let (rank, status, cause) = match self.blamed() {
            Some((rank, status, cause)) => (rank, status, format!(" (it {cause})")),
            // Who is the cause may go on, or have ended as if all were well.
            None => {
                let cause = self.meeting.aborted().map(|abort| format!(" ({abort})"));
                (first, first_status, cause.unwrap_or_default())
            }
        };
        self.code = Some(child::exit_code(status));
        if let Phase::LastWords(_) = self.phase {
            self.say(&format!("rank {rank} {}{cause}; ending the others", child::describe(status)));
        }
    }

    /// Passes a signal on to every rank.
    fn forward(&mut self, signal: i32) {
        if signal == SIGTSTP {
            return self.pause();
        }
        self.name_cause();
        self.stopped = self.stopped.or(child::signal_code(signal));
        self.say(&format!("{}: passed on to every rank", child::signal_name(signal)));
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.end_with(signal);
        }
    }

    /// Stops until a shell lets this process go on, and every rank with it: ranks that went on alone would take the
    /// launcher for dead. Where no shell can, nothing stops.
    fn pause(&self) {
        if !child::can_be_continued() {
            return;
        }
        self.running().for_each(|running| running.signal(Signal::STOP));
        let stopped = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        self.running().for_each(|running| running.signal(Signal::CONT));
        if let Err(error) = stopped {
            self.say(&format!("cannot stop: {error}"));
        }
    }

    fn output_is_gone(&mut self, error: &Error) {
        let (code, words) = match error {
            Error::Forward { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
                (SIGPIPE_CODE, "nobody reads the output any more".to_owned())
            }
            // Another start would meet it too.
            error => (error.exit_code(), error.with_causes()),
        };
        if let Phase::Running = self.phase {
            self.code = Some(code);
            self.stopped = self.code;
            self.say(&format!("{words}; ending the job"));
            self.end_with(Signal::TERM);
        } else if code != SIGPIPE_CODE && self.stopped.is_none() {
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

    fn kill_all(&self) {
        self.running().for_each(|running| running.signal(Signal::KILL));
    }

    fn say(&self, text: &str) {
        self.voice.send(text.to_owned());
    }
}
