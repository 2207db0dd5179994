//! What can go wrong in `distctl` itself.

use std::collections::TryReserveError;
use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::run::Stream;

/// What can go wrong in `distctl` itself; what happens to a rank is in its exit code.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// The program is not there.
    #[error("cannot start {program:?}: there is no such file{}", if *.on_path { " in the folders of PATH" } else { "" })]
    NoProgram { program: OsString, on_path: bool },
    /// The program is no program.
    #[error("cannot start {program:?}: {reason}")]
    Program { program: OsString, reason: &'static str },
    /// The system would not start the process of a rank.
    #[error("cannot start {program:?} as rank {rank}")]
    Start { program: OsString, rank: usize, source: io::Error },
    /// A rank's process could not become the program.
    #[error("cannot start {program:?}")]
    Exec { program: OsString, source: io::Error },
    /// The process that has started this one was gone before this one could ask to be told of that.
    #[error("the process that has started this one is gone")]
    Orphan,
    /// The system would not start the launcher.
    #[error("cannot start the launcher")]
    Launcher(#[source] io::Error),
    /// The launcher would run out of descriptors.
    #[error(
        "{ranks} ranks take {needed} open files of distctl, which may have {limit}: raise the limit (ulimit -Hn {needed})"
    )]
    Files { ranks: usize, needed: u64, limit: u64 },
    /// No thread to watch a process with.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// Signals cannot be caught.
    #[error("cannot watch for signals")]
    Signals(#[source] io::Error),
    /// A process cannot be waited for.
    #[error("cannot wait for a process")]
    Wait(#[source] io::Error),
    /// Processes are still there after SIGKILL.
    #[error("these processes do not end, even when killed: {pids:?}")]
    Unkillable { pids: Vec<i32> },
    /// The file with the job's secret cannot be made.
    #[error("cannot write the job's secret to {}", path.display())]
    SecretFile { path: PathBuf, source: io::Error },
    /// The logs cannot be written.
    #[error("cannot keep logs in {}", folder.display())]
    LogFolder { folder: PathBuf, source: io::Error },
    /// What a rank prints cannot be read.
    #[error("cannot read what rank {rank} prints")]
    Printed { rank: usize, source: io::Error },
    /// What the ranks print cannot be passed on.
    #[error("cannot write the {stream}")]
    Forward { stream: Stream, source: io::Error },
    /// The system would not start ssh.
    #[error("cannot start {command:?} for host {host}")]
    Ssh { command: String, host: String, source: io::Error },
    /// A host was not reached.
    #[error(
        "cannot reach host {host} by {command:?}: {said}. Check that this command works without a password: {command} {host} true"
    )]
    HostUnreachable { host: String, command: String, said: String },
    /// A host has no `distctl` where it is looked for.
    #[error("host {host} has no {distctl}: {said}. Install distctl {} there, or say with --remote-distctl where it is", env!("CARGO_PKG_VERSION"))]
    NoDistctl { host: String, distctl: String, said: String },
    /// A host has another version of `distctl`.
    #[error("host {host} has distctl {theirs}, and this is {}: install the same version on all hosts", env!("CARGO_PKG_VERSION"))]
    HostVersion { host: String, theirs: String },
    /// A host was reached and did not answer.
    #[error("host {host} did not answer within {} s{said}. Check that {command:?} asks no question there", limit.as_secs())]
    HostSilent { host: String, command: String, limit: Duration, said: String },
    /// A host was reached, and `distctl` ended there before it could take part.
    #[error("distctl on host {host} ended at once: {said}")]
    HostEnded { host: String, said: String },
    /// The first host was reached by an address that other hosts do not reach.
    #[error(
        "host {first} was reached at {address}, where {other} cannot reach it: name it by an address of its network, or give one with --rdzv"
    )]
    LoopbackCoordinator { first: String, address: IpAddr, other: String },
    /// A host cannot run its part of the job.
    #[error("host {host}: {text}")]
    OnHost { host: String, code: u8, text: String },
    /// A host cannot change to the working directory.
    #[error("cannot change to the folder {}", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    /// What a host is told is unreadable.
    #[error("cannot read what this host is to do")]
    Orders(#[source] io::Error),
    /// Arguments that make no sense together.
    #[error("{0}")]
    Usage(String),
    /// A file that was named cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file that was named cannot be written.
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// A line of a file with links is none.
    #[error("{}, line {line}: {reason}", path.display())]
    Line { path: PathBuf, line: usize, reason: String },
    /// A file with what was measured has something else in it.
    #[error("{} is no model of a network: {reason}", path.display())]
    Model { path: PathBuf, reason: String },
    /// Where this program is cannot be found out.
    #[error("cannot find the file of this program")]
    OwnProgram(#[source] io::Error),
    /// What is to be measured needs more than there is.
    #[error("there is no memory for {bytes} bytes")]
    Memory { bytes: usize, source: TryReserveError },
    /// Nobody takes the results.
    #[error("cannot write the results")]
    Output(#[source] io::Error),
    /// A collective.
    #[error(transparent)]
    Collective(#[from] dist_collectives::Error),
    /// Schedules that cannot be predicted.
    #[error(transparent)]
    Prediction(#[from] dist_predict::Error),
    /// A pipeline schedule that cannot be done.
    #[error(transparent)]
    Pipeline(#[from] dist_parallel::pipeline::Flaw),
    /// Coordinator, secret or connections.
    #[error(transparent)]
    Transport(#[from] dist_transport::Error),
}

impl Error {
    /// The error and what led to it, on one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        text
    }

    /// Whether nobody reads what is printed, as behind `head`: no failure, and nothing to say.
    pub(crate) fn is_unread(&self) -> bool {
        let (Self::Output(source) | Self::Forward { source, .. }) = self else { return false };
        source.kind() == io::ErrorKind::BrokenPipe
    }

    /// As shells have it: 127 for a program that is not there, 126 for one that cannot be started, 128 and SIGPIPE for one
    /// whose reader has left.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            _ if self.is_unread() => 128 + 13,
            Self::NoProgram { .. } => 127,
            Self::Usage(_) => 2,
            Self::OnHost { code, .. } => *code,
            Self::Program { .. } | Self::Start { .. } | Self::Exec { .. } => 126,
            _ => 1,
        }
    }
}
