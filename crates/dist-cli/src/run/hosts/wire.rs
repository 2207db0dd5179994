//! What `distctl run --hosts` and its part on a host write to each other, through the input and output of ssh: JSON, a
//! message on each line. The secret goes this way too, so that no command line and no variable has it.

use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::address::Address;
use crate::run::Bind;
use crate::run::lines::Stream;

/// Begins the first line of a host. What the start files of its shell print comes before.
const GREETING: &str = "distctl-host ";

/// The first message of a host. It is the same in every version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) version: String,
    /// The address of the host by which ssh reached it, if ssh tells.
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
    /// The number of its first rank.
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
    /// How often the job was started before.
    pub(super) restart: u16,
    pub(super) job: String,
    pub(super) secret: String,
    pub(super) coordinator: Place,
}

/// Where the coordinator is, for one host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Place {
    /// It is to be started on this host; port 0 is any that is free.
    Here(Address),
    There(Address),
}

/// A later message to a host. The end of the messages ends its part of the job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    Signal(i32),
}

/// A message of a host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HostReport {
    /// The coordinator was started here.
    Listening(Address),
    /// A rank has printed a line of so many bytes, which follow.
    Line { rank: usize, stream: Stream, bytes: usize },
    /// Its `distctl` has something to say.
    Said(String),
    /// Its part cannot be run.
    Failed { code: u8, text: String },
    /// No rank is left.
    Ended {
        code: u8,
        /// The ranks that failed and their exit codes, in the order in which that was seen.
        failures: Vec<(usize, u8)>,
        /// The rank that the coordinator names as the cause, if the coordinator is on this host.
        culprit: Option<usize>,
    },
}

fn to_json(message: &impl Serialize) -> String {
    serde_json::to_string(message).expect("messages have nothing that JSON has not")
}

/// Writes a message and the bytes that follow it.
pub(super) fn send(to: &mut impl Write, message: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&[to_json(message).as_bytes(), b"\n", bytes].concat())?;
    to.flush()
}

/// Reads the next message; `None` at the end, also in the middle of one.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    if !line.ends_with('\n') {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(Into::into)
}
