//! The connection of `distctl run --hosts` to one host: an ssh process and its messages.

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
use super::super::lines::OutputSink;
use super::super::watch::END_LIMIT;
use super::wire::{Greeting, HostReport, receive, send};
use crate::Error;

/// Options that make ssh fail instead of asking questions or waiting for minutes.
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

/// The command that reaches a host, and the program that it starts there.
#[derive(Debug)]
pub(super) struct RemoteShell {
    /// `ssh`, or a command with the same arguments, and its first arguments.
    pub(super) ssh: Vec<String>,
    /// The path of `distctl` on the hosts.
    pub(super) distctl: String,
}

impl RemoteShell {
    /// Returns the command for error messages.
    pub(super) fn command(&self) -> String {
        self.ssh.join(" ")
    }

    fn arguments(&self, host: &str, subcommand: &str) -> Vec<OsString> {
        let is_ssh = Path::new(&self.ssh[0]).file_name() == Some(OsStr::new("ssh"));
        let options = SSH_OPTIONS.into_iter().filter(|_| is_ssh);
        // A shell on the host splits this into words.
        let remote = format!("'{}' {subcommand}", self.distctl.replace('\'', r"'\''"));
        let mut arguments: Vec<OsString> = self.ssh[1..].iter().map(OsString::from).collect();
        arguments.extend(options.chain([host, &remote]).map(OsString::from));
        arguments
    }
}

/// A message from a host.
#[derive(Debug)]
pub(super) enum HostMessage {
    Greeting(Greeting),
    HostReport(HostReport),
    /// The output of its ranks cannot be forwarded any more.
    Unwritable(Error),
    /// Its ssh has ended.
    Gone,
}

/// The ssh process of a host. Drop ends the host's part of the job.
pub(super) struct HostConnection {
    pub(super) host: String,
    running: Option<Running>,
    orders: Option<ChildStdin>,
    said: Said,
    started: Started,
}

impl HostConnection {
    /// Starts ssh, and a thread that passes its messages to `tell`.
    pub(super) fn start(
        host: &str,
        reach: &RemoteShell,
        subcommand: &str,
        (runtime, started): (&Runtime, &Started),
        sink: &Arc<dyn OutputSink>,
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
        let errors = said.clone().collect(error, host, runtime, sink)?;
        let (heard, sink, end) = (said.clone(), sink.clone(), runtime.clone());
        let listen = move || {
            forward(output, &heard, &sink, &tell);
            // A process that is left on the host may hold the pipe open.
            let _ = errors.join_by(end.deadline(END_LIMIT));
            let _ = child::wait_for_end(pid);
            tell(HostMessage::Gone);
        };
        let connection =
            Self { host: host.to_owned(), running: Some(running), orders, said, started: started.clone() };
        runtime.spawn("host", listen).map_err(Error::Thread)?;
        Ok(connection)
    }

    /// Sends a message. If the host is gone, the message is lost; [`HostMessage::Gone`] reports that.
    pub(super) fn send(&mut self, message: &impl Serialize) {
        if let Some(orders) = &mut self.orders {
            let _ = send(orders, message, &[]);
        }
    }

    /// Closes the stream of messages to the host.
    pub(super) fn close(&mut self) {
        self.orders = None;
    }

    /// Returns the output of ssh, or of a shell on the host, before the greeting.
    pub(super) fn said(&self) -> String {
        self.said.lock().before.join("; ")
    }

    /// Kills ssh. The host detects the closed connection.
    pub(super) fn kill(&self) {
        self.running.iter().for_each(|running| running.signal(Signal::KILL));
    }

    pub(super) const fn is_open(&self) -> bool {
        self.running.is_some()
    }

    /// Reaps ssh, which has ended, and returns its status.
    pub(super) fn reap(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.orders = None;
        self.running.take().map(|running| running.reap(&self.started)).transpose().map_err(Error::Wait)
    }
}

impl Drop for HostConnection {
    fn drop(&mut self) {
        self.kill();
        // The status is not needed.
        let _ = self.reap();
    }
}

/// Forwards the messages of a host until its end.
fn forward(
    mut output: BufReader<ChildStdout>,
    said: &Said,
    sink: &Arc<dyn OutputSink>,
    tell: &impl Fn(HostMessage),
) {
    let mut line = String::new();
    // A shell on the host may print anything before the greeting.
    while output.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
        if let Some(greeting) = Greeting::parse(&line) {
            said.lock().is_greeted = true;
            tell(HostMessage::Greeting(greeting));
            return forward_reports(output, sink, tell);
        }
        said.lock().note(&line);
        line.clear();
    }
}

fn forward_reports(
    mut output: BufReader<ChildStdout>,
    sink: &Arc<dyn OutputSink>,
    tell: &impl Fn(HostMessage),
) {
    // Anything other than a report is treated as the end of the connection, which is reported.
    while let Ok(Some(report)) = receive(&mut output) {
        let HostReport::Line { rank, stream, bytes } = report else {
            tell(HostMessage::HostReport(report));
            continue;
        };
        let mut text = vec![0; bytes];
        if output.read_exact(&mut text).is_err() {
            return;
        }
        if let Err(error) = sink.write_line(rank, stream, &text) {
            tell(HostMessage::Unwritable(error));
            return;
        }
    }
}

/// The stderr of ssh. Before the greeting it is stored, because it may be the reason of a failure; afterwards
/// it is forwarded.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Words>>);

#[derive(Default)]
struct Words {
    before: Vec<String>,
    is_greeted: bool,
}

impl Words {
    /// Stores a line, and drops all but the last ones.
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

    /// Starts a thread that reads the stderr of ssh.
    fn collect(
        self,
        mut error: BufReader<ChildStderr>,
        host: &str,
        runtime: &Runtime,
        sink: &Arc<dyn OutputSink>,
    ) -> Result<Task<()>, Error> {
        let (host, sink) = (host.to_owned(), sink.clone());
        let collect = move || {
            let mut line = Vec::new();
            while error.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line).into_owned();
                let mut words = self.lock();
                if words.is_greeted {
                    drop(words);
                    sink.say(&format!("host {host}: {}", text.trim_end()));
                } else {
                    words.note(&text);
                }
                line.clear();
            }
        };
        runtime.spawn("ssh", collect).map_err(Error::Thread)
    }
}
