//! One host of a job, as `distctl run --hosts` sees it: an ssh process, and what comes by it.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{ChildStderr, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use dist_transport::Runtime;
use dist_transport::runtime::Task;
use rustix::process::Signal;
use serde::Serialize;

use super::super::child::{self, Running, Started};
use super::super::lines::Take;
use super::super::watch::PATIENCE;
use super::wire::{Greeting, HostReport, receive, send};
use crate::Error;

/// Options that make ssh fail in place of asking questions or waiting for minutes.
const SSH_OPTIONS: [&str; 9] = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
];

/// How hosts are reached, and what is started there.
#[derive(Debug)]
pub(super) struct RemoteShell {
    /// `ssh`, or a command that is used like it, with its first arguments.
    pub(super) ssh: Vec<String>,
    /// The path of `distctl` on the hosts.
    pub(super) distctl: String,
}

impl RemoteShell {
    /// Returns the command as an error names it.
    pub(super) fn command(&self) -> String {
        self.ssh.join(" ")
    }

    fn arguments(&self, host: &str, subcommand: &str) -> Vec<OsString> {
        let is_ssh = Path::new(&self.ssh[0]).file_name() == Some(OsStr::new("ssh"));
        let options = SSH_OPTIONS.into_iter().filter(|_| is_ssh);
        // A shell of the host splits this into words.
        let remote = format!("'{}' {subcommand}", self.distctl.replace('\'', r"'\''"));
        let mut arguments: Vec<OsString> = self.ssh[1..].iter().map(OsString::from).collect();
        arguments.extend(options.chain([host, &remote]).map(OsString::from));
        arguments
    }
}

/// What is heard of a host.
#[derive(Debug)]
pub(super) enum HostMessage {
    Greeting(Greeting),
    HostReport(HostReport),
    /// What its ranks print cannot be passed on any more.
    Unwritable(Error),
    /// Its ssh has ended.
    Gone,
}

/// The ssh process of a host. Dropping it ends the host's part of the job.
pub(super) struct HostConnection {
    pub(super) host: String,
    running: Option<Running>,
    orders: Option<ChildStdin>,
    said: Said,
    started: Started,
}

impl HostConnection {
    /// Starts ssh, with a thread that tells what is heard.
    pub(super) fn start(
        host: &str,
        reach: &RemoteShell,
        subcommand: &str,
        (runtime, started): (&Runtime, &Started),
        take: &Arc<dyn Take>,
        tell: impl Fn(HostMessage) + Send + 'static,
    ) -> Result<Self, Error> {
        let program = OsString::from(&reach.ssh[0]);
        let failed = |source| Error::Ssh { command: reach.command(), host: host.to_owned(), source };
        let mut command = child::command(&program, &reach.arguments(host, subcommand)).map_err(failed)?;
        let mut ssh = started.spawn(command.stdin(Stdio::piped())).map_err(failed)?;
        let output = BufReader::new(ssh.stdout.take().expect("the output is a pipe"));
        let error = BufReader::new(ssh.stderr.take().expect("the error output is a pipe"));
        let orders = ssh.stdin.take();
        let running = Running::new(ssh);
        let pid = running.pid();
        let said = Said::default();
        let errors = said.clone().collect(error, host, runtime, take)?;
        let (heard, take, end) = (said.clone(), take.clone(), runtime.clone());
        let listen = move || {
            pass_on(output, &heard, &take, &tell);
            // A process that is left on the host may hold it open.
            let _ = errors.join_by(end.deadline(PATIENCE));
            let _ = child::wait_for_end(pid);
            tell(HostMessage::Gone);
        };
        let connection =
            Self { host: host.to_owned(), running: Some(running), orders, said, started: started.clone() };
        runtime.spawn("host", listen).map_err(Error::Thread)?;
        Ok(connection)
    }

    /// Sends a message, unless the host is gone, which is heard of.
    pub(super) fn send(&mut self, message: &impl Serialize) {
        if let Some(orders) = &mut self.orders {
            let _ = send(orders, message, &[]);
        }
    }

    /// Ends the messages to the host.
    pub(super) fn close(&mut self) {
        self.orders = None;
    }

    /// Returns what ssh, or a shell of the host, said before the greeting.
    pub(super) fn said(&self) -> String {
        self.said.lock().before.join("; ")
    }

    /// Kills ssh; the host notices that.
    pub(super) fn kill(&self) {
        self.running.iter().for_each(|running| running.signal(Signal::KILL));
    }

    pub(super) const fn is_open(&self) -> bool {
        self.running.is_some()
    }

    /// Takes the status of ssh, which has ended.
    pub(super) fn reap(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.orders = None;
        self.running.take().map(|running| running.reap(&self.started)).transpose().map_err(Error::Wait)
    }
}

impl Drop for HostConnection {
    fn drop(&mut self) {
        self.kill();
        // Nobody asks how it ended.
        let _ = self.reap();
    }
}

/// Passes on what a host sends until its end.
fn pass_on(
    mut output: BufReader<ChildStdout>,
    said: &Said,
    take: &Arc<dyn Take>,
    tell: &impl Fn(HostMessage),
) {
    let mut line = String::new();
    // Anything may come before the greeting.
    while output.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
        if let Some(greeting) = Greeting::parse(&line) {
            said.lock().is_greeted = true;
            tell(HostMessage::Greeting(greeting));
            return pass_reports_on(output, take, tell);
        }
        said.lock().note(&line);
        line.clear();
    }
}

fn pass_reports_on(mut output: BufReader<ChildStdout>, take: &Arc<dyn Take>, tell: &impl Fn(HostMessage)) {
    // What is no report is the end of the connection, which is told.
    while let Ok(Some(report)) = receive(&mut output) {
        let HostReport::Line { rank, stream, bytes } = report else {
            tell(HostMessage::HostReport(report));
            continue;
        };
        let mut text = vec![0; bytes];
        if output.read_exact(&mut text).is_err() {
            return;
        }
        if let Err(error) = take.take(rank, stream, &text) {
            tell(HostMessage::Unwritable(error));
            return;
        }
    }
}

/// What ssh says: kept before the greeting, where it may be the reason of a failure, and passed on after it.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Words>>);

#[derive(Default)]
struct Words {
    before: Vec<String>,
    is_greeted: bool,
}

impl Words {
    /// Keeps the last lines.
    fn note(&mut self, line: &str) {
        const KEPT: usize = 4;
        let line = line.trim_end();
        if !line.is_empty() {
            self.before.push(line.to_owned());
        }
        if self.before.len() > KEPT {
            self.before.remove(0);
        }
    }
}

impl Said {
    fn lock(&self) -> std::sync::MutexGuard<'_, Words> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that takes the error output of ssh.
    fn collect(
        self,
        mut error: BufReader<ChildStderr>,
        host: &str,
        runtime: &Runtime,
        take: &Arc<dyn Take>,
    ) -> Result<Task<()>, Error> {
        let (host, take) = (host.to_owned(), take.clone());
        let collect = move || {
            let mut line = Vec::new();
            while error.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line).into_owned();
                let mut words = self.lock();
                if words.is_greeted {
                    drop(words);
                    take.say(&format!("host {host}: {}", text.trim_end()));
                } else {
                    words.note(&text);
                }
                line.clear();
            }
        };
        runtime.spawn("ssh", collect).map_err(Error::Thread)
    }
}
