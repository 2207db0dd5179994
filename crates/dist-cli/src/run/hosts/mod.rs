//! `distctl run --hosts`: starts the ranks of a job over ssh on several hosts.
//!
//! One process per host reads its part of the job from ssh, runs it like a job of that machine, and sends
//! reports. The first host has the coordinator. No rank is started before all hosts have answered. If a
//! connection is lost, the host ends its ranks.

mod connection;
mod list;
mod remote;
mod wire;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::process::Secret;
use dist_transport::runtime::{Mailbox, Receiver, Unavailable};
use dist_transport::{Deadline, Runtime};
use signal_hook::consts::{SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};

use self::connection::{HostConnection, HostMessage, RemoteShell};
use self::wire::{Greeting, HostReport, Order, Part, Place};
use super::child::{self, Started, check_program};
use super::cores::Bind;
use super::job::message_writer;
use super::lines::OutputSink;
use super::secret::own_name;
use super::signals::watch_signals;
use super::watch::{END_LIMIT, REPORT_GRACE};
use crate::Error;
use crate::address::Address;
use crate::outcome::{Outcome, Stop};

pub(crate) use list::Host;
pub(super) use list::{counts, read};
pub(crate) use remote::run as run_part;

/// The hidden subcommand that runs a host's part of a job.
pub(crate) const PART: &str = "run-part";

/// Time for a host to answer.
const GREETING_LIMIT: Duration = Duration::from_secs(30);

/// Variables of this machine or of this login, which have no meaning or a different one on another host. All
/// variables with the prefixes `SSH_`, `XDG_`, `DBUS_` and `DISTCTL_` are excluded too.
const LOCAL: [&str; 20] = [
    "DISPLAY",
    "DIST_HOST_ID",
    "DIST_SECRET_FILE",
    "HOME",
    "HOSTNAME",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PWD",
    "SHELL",
    "SHLVL",
    "STY",
    "TERM",
    "TMPDIR",
    "TMUX",
    "TMUX_PANE",
    "USER",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "_",
];
const LOCAL_PREFIXES: [&str; 4] = ["SSH_", "XDG_", "DBUS_", "DISTCTL_"];

/// A job on several hosts.
#[derive(Debug)]
pub(super) struct HostsJob {
    hosts: Vec<(Host, usize)>,
    reach: RemoteShell,
    program: OsString,
    arguments: Vec<OsString>,
    pub(super) grace: Duration,
    pub(super) bind: Bind,
    pub(super) restarts: u16,
    /// The address of the coordinator on the first host, if the user has set it.
    pub(super) rendezvous: Option<Address>,
}

#[derive(Debug)]
enum HostsEvent {
    Signalled(i32),
    Host(usize, HostMessage),
}

impl HostsJob {
    /// Creates a job of this program. The command that reaches a host is split at blanks.
    pub(super) fn new(
        hosts: Vec<Host>,
        counts: Vec<usize>,
        ssh: &str,
        distctl: Option<&Path>,
        command: &[OsString],
    ) -> Result<Self, Error> {
        let ssh: Vec<String> = ssh.split_ascii_whitespace().map(str::to_owned).collect();
        let Some(first) = ssh.first() else { return Err(Error::Usage("--ssh names no command".to_owned())) };
        check_program(first.as_ref(), &std::env::var_os("PATH").unwrap_or_default())?;
        let own = std::env::current_exe().map_err(Error::OwnProgram)?;
        let distctl = distctl.unwrap_or(&own).display().to_string();
        let (program, arguments) = command.split_first().expect("clap asks for a program");
        Ok(Self {
            hosts: hosts.into_iter().zip(counts).collect(),
            reach: RemoteShell { ssh, distctl },
            program: program.clone(),
            arguments: arguments.to_vec(),
            grace: Duration::from_secs(5),
            bind: Bind::Cores,
            restarts: 0,
            rendezvous: None,
        })
    }

    pub(super) fn world_size(&self) -> usize {
        self.hosts.iter().map(|(_, ranks)| ranks).sum()
    }

    /// Runs the job, restarts it after failures up to the limit, and returns when no host runs a part of it.
    pub(super) fn run(&self, sink: &Arc<dyn OutputSink>) -> Result<Outcome, Error> {
        let runtime = Runtime::system();
        let (events, mut inbox) = runtime.mailbox();
        let started = Started::default();
        let signalled = events.clone();
        watch_signals(&runtime, move |signal| signalled.send(HostsEvent::Signalled(signal)), &started)?;
        let (messages, writer) = message_writer(&runtime, sink.clone())?;
        let mut restart = 0;
        let ended = loop {
            let start = JobStart::connect(self, &runtime, (&events, &started), (&messages, sink));
            match start.and_then(|start| start.run(restart, &mut inbox)) {
                Ok(Outcome::Code(_)) if restart < self.restarts => restart += 1,
                ended => break ended,
            }
            messages.send(format!("starting the job again, {restart} of at most {} times", self.restarts));
        };
        drop(messages);
        // Messages that precede the error are printed before it.
        let _ = writer.join_by(runtime.deadline(END_LIMIT));
        ended
    }

    /// Returns the parts of all hosts for one start of the job.
    fn parts(&self, restart: u16, coordinator: &Address) -> Result<Vec<Part>, Error> {
        let (_, secret) = Secret::generate()?;
        let job = std::env::var("DIST_JOB_ID").ok().filter(|job| !job.is_empty());
        let job = format!("{}-{restart}", job.unwrap_or_else(own_name));
        let folder = std::env::current_dir();
        let folder = folder.map_err(|source| Error::Folder { folder: ".".into(), source })?;
        let mut first = 0;
        let parts = self.hosts.iter().map(|&(_, ranks)| {
            let part = Part {
                first,
                ranks,
                world_size: self.world_size(),
                program: self.program.clone(),
                arguments: self.arguments.clone(),
                environment: environment(std::env::vars_os()),
                folder: folder.clone().into_os_string(),
                grace: self.grace,
                bind: self.bind,
                restart,
                job: job.clone(),
                secret: secret.clone(),
                coordinator: Place::Here(coordinator.clone()),
            };
            first += ranks;
            part
        });
        Ok(parts.collect())
    }
}

/// Returns the variables that ranks on other hosts inherit.
fn environment(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    let is_local = |name: &OsString| {
        let name = name.to_string_lossy();
        LOCAL.contains(&&*name) || LOCAL_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    variables.filter(|(name, _)| !is_local(name)).collect()
}

/// The phase of a start.
enum JobPhase {
    Running,
    /// A rank has failed, and the others have time to report their errors.
    Reporting(Deadline),
    Ending(Deadline),
    Killed,
}

/// One start of a job on several hosts.
struct JobStart<'a> {
    job: &'a HostsJob,
    runtime: Runtime,
    connections: Vec<HostConnection>,
    messages: Mailbox<String>,
    phase: JobPhase,
    /// The parts of all hosts except the first, until the coordinator listens.
    waiting: Vec<Part>,
    /// The hosts that have reported the end of their part.
    ended: Vec<bool>,
    /// The failed ranks and their exit codes, in the order of the reports.
    failures: Vec<(usize, u8)>,
    /// The rank that the coordinator names as the cause.
    culprit: Option<usize>,
    /// The exit code of the first reported failure.
    code: Option<u8>,
    /// The first error of a host that could not run its part.
    error: Option<Error>,
    stopped: Option<Stop>,
}

impl<'a> JobStart<'a> {
    fn connect(
        job: &'a HostsJob,
        runtime: &Runtime,
        (events, started): (&Mailbox<HostsEvent>, &Started),
        (messages, sink): (&Mailbox<String>, &Arc<dyn OutputSink>),
    ) -> Result<Self, Error> {
        let connections = job.hosts.iter().enumerate().map(|(index, (host, _))| {
            let events = events.clone();
            let tell = move |heard| events.send(HostsEvent::Host(index, heard));
            HostConnection::start(&host.name, &job.reach, PART, (runtime, started), sink, tell)
        });
        Ok(Self {
            job,
            runtime: runtime.clone(),
            connections: connections.collect::<Result<_, _>>()?,
            messages: messages.clone(),
            phase: JobPhase::Running,
            waiting: Vec::new(),
            ended: vec![false; job.hosts.len()],
            failures: Vec::new(),
            culprit: None,
            code: None,
            error: None,
            stopped: None,
        })
    }

    fn run(mut self, restart: u16, inbox: &mut Receiver<HostsEvent>) -> Result<Outcome, Error> {
        let Some(greetings) = self.greet(inbox)? else { return Ok(self.outcome()) };
        let at = self.coordinator(&greetings)?;
        let parts = self.job.parts(restart, &at)?;
        let mut parts = self.connections.iter_mut().zip(parts);
        let (first, part) = parts.next().expect("a job has a host");
        first.send(&part);
        self.waiting = parts.map(|(_, part)| part).collect();
        self.watch(inbox)?;
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(self.outcome()),
        }
    }

    fn outcome(&self) -> Outcome {
        let of_culprit = self.failures.iter().find(|(rank, _)| Some(*rank) == self.culprit);
        Outcome::of_job(of_culprit.map(|(_, code)| *code).or(self.code), self.stopped)
    }

    /// Waits until every host has answered. Returns `None` if a signal arrives first.
    fn greet(&mut self, inbox: &mut Receiver<HostsEvent>) -> Result<Option<Vec<Greeting>>, Error> {
        let limit = self.runtime.deadline(GREETING_LIMIT);
        let mut greetings = vec![None; self.connections.len()];
        while greetings.iter().any(Option::is_none) {
            match inbox.receive(Some(limit)) {
                Ok(HostsEvent::Host(host, HostMessage::Greeting(greeting))) => {
                    self.check_version(host, &greeting)?;
                    greetings[host] = Some(greeting);
                }
                Ok(HostsEvent::Host(host, _)) => return Err(self.no_greeting(host)?),
                Ok(HostsEvent::Signalled(SIGTSTP | SIGUSR1 | SIGUSR2)) => {}
                Ok(HostsEvent::Signalled(signal)) => {
                    let by = Stop::Signal(signal);
                    (self.stopped, self.code) = (Some(by), Some(by.code()));
                    return Ok(None);
                }
                Err(Unavailable::TimedOut) => {
                    let silent = greetings.iter().position(Option::is_none).expect("one is missing");
                    return Err(self.silent(silent));
                }
                Err(Unavailable::Closed) => {
                    unreachable!("the thread that receives signals keeps the channel open")
                }
            }
        }
        Ok(Some(greetings.into_iter().flatten().collect()))
    }

    fn check_version(&self, host: usize, greeting: &Greeting) -> Result<(), Error> {
        if greeting.version == env!("CARGO_PKG_VERSION") {
            return Ok(());
        }
        Err(Error::HostVersion { host: self.name(host), theirs: greeting.version.clone() })
    }

    fn name(&self, host: usize) -> String {
        self.connections[host].host.clone()
    }

    fn silent(&self, host: usize) -> Error {
        let said = self.connections[host].said();
        let said = if said.is_empty() { said } else { format!(" ({said})") };
        let command = self.job.reach.command();
        Error::HostSilent { host: self.name(host), command, limit: GREETING_LIMIT, said }
    }

    /// Returns the error of a host that is gone without a greeting.
    fn no_greeting(&mut self, host: usize) -> Result<Error, Error> {
        let status = self.connections[host].reap()?;
        let code = status.map_or(0, child::exit_code);
        let words = self.connections[host].said();
        let said = if words.is_empty() { format!("exit code {code}") } else { words };
        let (host, distctl) = (self.name(host), self.job.reach.distctl.clone());
        Ok(match code {
            255 => Error::HostUnreachable { host, command: self.job.reach.command(), said },
            // A shell returns these codes if the program does not exist or is not executable.
            126 | 127 => Error::NoDistctl { host, distctl, said },
            // Versions without the subcommand return this code.
            2 => Error::HostVersion { host, theirs: "of a version without --hosts".to_owned() },
            _ => Error::HostEnded { host, said },
        })
    }

    /// Returns the address of the coordinator: the address by which the first host was reached, unless the
    /// user has set one.
    fn coordinator(&self, greetings: &[Greeting]) -> Result<Address, Error> {
        if let Some(rendezvous) = &self.job.rendezvous {
            return Ok(rendezvous.clone());
        }
        let Some(address) = greetings[0].address else {
            let name = self.name(0);
            let host = name.rsplit_once('@').map_or(name.as_str(), |(_, host)| host);
            return Ok(Address { host: host.to_owned(), port: 0 });
        };
        let is_elsewhere = |greeting: &Greeting| greeting.address.is_some_and(|ip: IpAddr| !ip.is_loopback());
        if address.is_loopback()
            && let Some(other) = greetings.iter().position(is_elsewhere)
        {
            return Err(Error::LoopbackCoordinator { first: self.name(0), address, other: self.name(other) });
        }
        Ok(Address { host: address.to_string(), port: 0 })
    }

    /// Handles events until no connection is left. The other hosts get their parts once the coordinator
    /// listens.
    fn watch(&mut self, inbox: &mut Receiver<HostsEvent>) -> Result<(), Error> {
        while self.connections.iter().any(HostConnection::is_open) {
            match inbox.receive(self.deadline()) {
                Ok(HostsEvent::Host(_, HostMessage::HostReport(HostReport::Listening(at)))) => {
                    for (part, connection) in self.waiting.drain(..).zip(&mut self.connections[1..]) {
                        connection.send(&Part { coordinator: Place::There(at.clone()), ..part });
                    }
                }
                Ok(HostsEvent::Host(host, heard)) => self.handle(host, heard)?,
                Ok(HostsEvent::Signalled(signal)) => self.forward(signal),
                Err(Unavailable::TimedOut) => self.escalate(),
                Err(Unavailable::Closed) => {
                    unreachable!("the thread that receives signals keeps the channel open")
                }
            }
        }
        Ok(())
    }

    fn deadline(&self) -> Option<Deadline> {
        match self.phase {
            JobPhase::Reporting(deadline) | JobPhase::Ending(deadline) => Some(deadline),
            JobPhase::Running | JobPhase::Killed => None,
        }
    }

    fn handle(&mut self, host: usize, heard: HostMessage) -> Result<(), Error> {
        match heard {
            HostMessage::HostReport(HostReport::Said(text)) => self.say(host, &text),
            HostMessage::HostReport(HostReport::Failed { code, text }) => {
                self.ended[host] = true;
                let name = self.name(host);
                self.error.get_or_insert(Error::OnHost { host: name, code, text });
                self.begin_end();
            }
            HostMessage::HostReport(HostReport::Ended { code, failures, culprit }) => {
                self.ended[host] = true;
                self.culprit = self.culprit.or(culprit);
                if code != 0 {
                    self.code = self.code.or(failures.first().map(|(_, code)| *code)).or(Some(code));
                    self.begin_end();
                }
                self.failures.extend(failures);
            }
            HostMessage::Unwritable(error) => {
                if !error.is_unread() {
                    self.say(host, &error.with_causes());
                }
                let by = Stop::Output(error.exit_code());
                self.stopped = self.stopped.or(Some(by));
                self.code = self.code.or(Some(by.code()));
                self.connections[host].kill();
                self.end_with(SIGTERM);
            }
            HostMessage::Gone => self.gone(host)?,
            HostMessage::Greeting(_)
            | HostMessage::HostReport(HostReport::Listening(_) | HostReport::Line { .. }) => {}
        }
        Ok(())
    }

    /// Handles the end of a host's ssh. Without a final report the connection was lost, and the host ends its
    /// part.
    fn gone(&mut self, host: usize) -> Result<(), Error> {
        let status = self.connections[host].reap()?;
        if !std::mem::replace(&mut self.ended[host], true) {
            let how = status.map_or_else(String::new, |status| {
                format!("; {} {}", self.job.reach.ssh[0], child::describe(status))
            });
            self.say(host, &format!("the connection was lost{how}; ending the others"));
            self.code = self.code.or(Some(1));
            self.begin_end();
        }
        Ok(())
    }

    /// Closes the connections to hosts that wait for their part, because the job ends before the coordinator
    /// listens.
    fn dismiss_waiting(&mut self) {
        if !std::mem::take(&mut self.waiting).is_empty() {
            self.connections[1..].iter_mut().for_each(HostConnection::close);
            self.ended[1..].fill(true);
        }
    }

    /// Begins the end of the job after a part has failed: the other hosts have time to report, and are then
    /// ended.
    fn begin_end(&mut self) {
        self.dismiss_waiting();
        if let JobPhase::Running = self.phase {
            self.phase = JobPhase::Reporting(self.runtime.deadline(REPORT_GRACE));
        }
    }

    fn end_with(&mut self, signal: i32) {
        self.dismiss_waiting();
        self.order(signal);
        if !matches!(self.phase, JobPhase::Ending(_) | JobPhase::Killed) {
            // A host kills its ranks after the grace period, and reports that.
            self.phase = JobPhase::Ending(self.runtime.deadline(self.job.grace + 2 * END_LIMIT));
        }
    }

    fn order(&mut self, signal: i32) {
        self.connections.iter_mut().for_each(|connection| connection.send(&Order::Signal(signal)));
    }

    /// Forwards a signal to the ranks of all hosts.
    fn forward(&mut self, signal: i32) {
        match signal {
            SIGTSTP => self
                .messages
                .send("SIGTSTP is ignored: a job on several hosts cannot be stopped temporarily".to_owned()),
            SIGUSR1 | SIGUSR2 => self.order(signal),
            _ => {
                self.stopped = self.stopped.or(Some(Stop::Signal(signal)));
                self.end_with(signal);
            }
        }
    }

    /// Takes the next step of ending the job after a deadline has passed.
    fn escalate(&mut self) {
        match self.phase {
            JobPhase::Reporting(_) => self.end_with(SIGTERM),
            JobPhase::Ending(_) => {
                let open = self.connections.iter().filter(|connection| connection.is_open());
                let names =
                    open.clone().map(|connection| connection.host.as_str()).collect::<Vec<_>>().join(", ");
                open.for_each(HostConnection::kill);
                self.messages
                    .send(format!("not waiting for hosts that do not end their part of the job: {names}"));
                self.code = self.code.or(Some(1));
                self.phase = JobPhase::Killed;
            }
            JobPhase::Running | JobPhase::Killed => {}
        }
    }

    fn say(&self, host: usize, text: &str) {
        self.messages.send(format!("host {}: {text}", self.connections[host].host));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_other_hosts_inherit_only_portable_variables() {
        let variables = [
            ("PATH", true),
            ("RAYON_NUM_THREADS", true),
            ("DIST_COSTS", true),
            ("HOME", false),
            ("SSH_AUTH_SOCK", false),
            ("DISTCTL_FRONT", false),
            ("DIST_SECRET_FILE", false),
            ("DIST_HOST_ID", false),
        ];
        for (name, is_seen) in variables {
            let seen = environment([(name.into(), "x".into())].into_iter());
            assert_eq!(seen.len() == 1, is_seen, "{name}");
        }
    }
}
