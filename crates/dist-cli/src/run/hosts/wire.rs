//! The messages between `distctl run --hosts` and its part on a host, through the stdin and stdout of ssh:
//! JSON, with a message on each line. The secret is sent in this way too, so that it is in no command line
//! and no variable.

use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::address::Address;
use crate::run::Bind;
use crate::run::lines::Stream;

/// Prefix of the first line of a host. Start files of its shell may print other lines before.
const GREETING: &str = "distctl-host ";

/// The first message of a host. It is the same in every version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) version: String,
    /// The address of the host by which ssh reached it, if sshd reports it.
    pub(super) address: Option<IpAddr>,
}

impl Greeting {
    pub(super) fn line(&self) -> String {
        format!("{GREETING}{}\n", to_json(self))
    }

    /// Returns the greeting on this line, if it has one.
    pub(super) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line.strip_prefix(GREETING)?).ok()
    }
}

/// The part of a job that a host runs: the first message to it.
#[derive(Serialize, Deserialize)]
pub(super) struct Part {
    /// The world rank of its first rank.
    pub(super) first: usize,
    pub(super) ranks: usize,
    pub(super) world_size: usize,
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(OsString, OsString)>,
    /// The working directory.
    pub(super) folder: OsString,
    pub(super) grace: Duration,
    pub(super) bind: Bind,
    /// Number of restarts before this start.
    pub(super) restart: u16,
    pub(super) job: String,
    pub(super) secret: String,
    pub(super) coordinator: Place,
}

/// The address of the coordinator for one host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Place {
    /// The coordinator is started on this host; port 0 selects a free port.
    Here(Address),
    There(Address),
}

/// A later message to a host. When the stream of messages is closed, the host ends its part of the job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    Signal(i32),
}

/// A message from a host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HostReport {
    /// The coordinator listens on this host.
    Listening(Address),
    /// A rank has printed a line with this number of bytes, which follow.
    Line { rank: usize, stream: Stream, bytes: usize },
    /// A message of `distctl` on the host.
    Said(String),
    /// The host cannot run its part.
    Failed { code: u8, text: String },
    /// All ranks of the host have ended.
    Ended {
        code: u8,
        /// The failed ranks and their exit codes, in the order in which they were reaped.
        failures: Vec<(usize, u8)>,
        /// The rank that the coordinator names as the cause, if the coordinator is on this host.
        culprit: Option<usize>,
    },
}

fn to_json(message: &impl Serialize) -> String {
    serde_json::to_string(message).expect("messages contain only text and numbers")
}

/// Writes a message and the bytes that follow it.
pub(super) fn send(to: &mut impl Write, message: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&[to_json(message).as_bytes(), b"\n", bytes].concat())?;
    to.flush()
}

/// Reads the next message. Returns `None` at the end, also in the middle of a message.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    if !line.ends_with('\n') {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(Into::into)
}
