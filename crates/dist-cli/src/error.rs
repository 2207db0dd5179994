//! Errors of `distctl` itself.

use std::collections::TryReserveError;
use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::run::Stream;

/// An error of `distctl` itself. The failure of a rank is not an error but an exit code.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// There is no such program.
    #[error("cannot start {program:?}: there is no such file{}", if *.on_path { " in the folders of PATH" } else { "" })]
    NoProgram { program: OsString, on_path: bool },
    /// The file cannot be executed.
    #[error("cannot start {program:?}: {reason}")]
    Program { program: OsString, reason: &'static str },
    /// The operating system failed to create the process of a rank.
    #[error("cannot start {program:?} as rank {rank}")]
    Start { program: OsString, rank: usize, source: io::Error },
    /// `exec` of the program failed.
    #[error("cannot start {program:?}")]
    Exec { program: OsString, source: io::Error },
    /// The parent process ended before this process could register to be notified of its death.
    #[error("the parent process has ended")]
    Orphan,
    /// The operating system failed to create the launcher process.
    #[error("cannot start the launcher")]
    Launcher(#[source] io::Error),
    /// The launcher needs more file descriptors than its limit allows.
    #[error(
        "distctl needs {needed} open files for {ranks} ranks, and its limit is {limit}: raise the limit (ulimit -Hn {needed})"
    )]
    Files { ranks: usize, needed: u64, limit: u64 },
    /// The operating system failed to create a thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The signal handlers could not be installed.
    #[error("cannot watch for signals")]
    Signals(#[source] io::Error),
    /// `wait` for a process failed.
    #[error("cannot wait for a process")]
    Wait(#[source] io::Error),
    /// Processes still exist after SIGKILL.
    #[error("these processes did not end after SIGKILL: {pids:?}")]
    Unkillable { pids: Vec<i32> },
    /// The file for the job's secret cannot be written.
    #[error("cannot write the job's secret to {}", path.display())]
    SecretFile { path: PathBuf, source: io::Error },
    /// The log files cannot be written.
    #[error("cannot write logs to {}", folder.display())]
    LogFolder { folder: PathBuf, source: io::Error },
    /// The output of a rank cannot be read.
    #[error("cannot read the output of rank {rank}")]
    Printed { rank: usize, source: io::Error },
    /// The output of the ranks cannot be forwarded.
    #[error("cannot write the {stream}")]
    Forward { stream: Stream, source: io::Error },
    /// The operating system failed to start ssh.
    #[error("cannot start {command:?} for host {host}")]
    Ssh { command: String, host: String, source: io::Error },
    /// ssh could not connect to a host.
    #[error(
        "cannot reach host {host} by {command:?}: {said}. Check that this command works without a password: {command} {host} true"
    )]
    HostUnreachable { host: String, command: String, said: String },
    /// A host has no `distctl` at the expected path.
    #[error("host {host} has no {distctl}: {said}. Install distctl {} there, or give its path with --remote-distctl", env!("CARGO_PKG_VERSION"))]
    NoDistctl { host: String, distctl: String, said: String },
    /// A host has another version of `distctl`.
    #[error("host {host} has distctl {theirs}, and this is {}: install the same version on all hosts", env!("CARGO_PKG_VERSION"))]
    HostVersion { host: String, theirs: String },
    /// `distctl` on a host did not answer, although ssh may have connected.
    #[error("host {host} did not answer within {} s{said}. Check that {command:?} does not ask a question there", limit.as_secs())]
    HostSilent { host: String, command: String, limit: Duration, said: String },
    /// `distctl` on a host ended before it joined the job.
    #[error("distctl on host {host} ended at once: {said}")]
    HostEnded { host: String, said: String },
    /// The address by which this host reached the first host does not work from another host.
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
    /// The instructions for a host cannot be read.
    #[error("cannot read the instructions for this host")]
    Orders(#[source] io::Error),
    /// Arguments that contradict each other, or that the operation does not support.
    #[error("{0}")]
    Usage(String),
    /// An input file cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// An output file cannot be written.
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// A line of an input file cannot be parsed.
    #[error("{}, line {line}: {reason}", path.display())]
    Line { path: PathBuf, line: usize, reason: String },
    /// The file is not a model of a network.
    #[error("{} is not a model of a network: {reason}", path.display())]
    Model { path: PathBuf, reason: String },
    /// The path of this program cannot be determined.
    #[error("cannot find the file of this program")]
    OwnProgram(#[source] io::Error),
    /// There is not enough memory for a measurement.
    #[error("cannot allocate {bytes} bytes")]
    Memory { bytes: usize, source: TryReserveError },
    /// The results cannot be written.
    #[error("cannot write the results")]
    Output(#[source] io::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] dist_collectives::Error),
    /// The schedules cannot be predicted.
    #[error(transparent)]
    Prediction(#[from] dist_predict::Error),
    /// The pipeline schedule cannot be executed.
    #[error(transparent)]
    Pipeline(#[from] dist_parallel::pipeline::Flaw),
    /// The job could not be joined: coordinator, secret or connections.
    #[error(transparent)]
    Transport(#[from] dist_transport::Error),
}

impl Error {
    /// Returns the error and its causes on one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        text
    }

    /// Returns `true` if the reader of the output has closed it, as `head` does. That is not reported.
    pub(crate) fn is_unread(&self) -> bool {
        let (Self::Output(source) | Self::Forward { source, .. }) = self else { return false };
        source.kind() == io::ErrorKind::BrokenPipe
    }

    /// Returns the exit code, by the conventions of shells: 127 if the program does not exist, 126 if it
    /// cannot be started, 128 + SIGPIPE if the reader of the output has closed it.
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
