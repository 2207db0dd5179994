//! The plan of a comparison: the points to measure or to show.

use std::path::PathBuf;

use lexopt::Arg::{Long, Short};
use lexopt::ValueExt;

use super::peers::Peer;
use super::results::Line;
use crate::command::Failure;

/// The kind of work that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// Single operations.
    Operations,
    /// Steps of training.
    Training,
    /// Small programs.
    Programs,
}

/// The points to measure, and the options.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) operations: Vec<String>,
    pub(super) ranks: Vec<usize>,
    pub(super) transports: Vec<String>,
    pub(super) bytes: Vec<usize>,
    pub(super) rounds: usize,
    pub(super) touch: bool,
    pub(super) hogs: usize,
    pub(super) only: Vec<String>,
    pub(super) peers: Option<PathBuf>,
    pub(super) out: Option<PathBuf>,
    pub(super) picture: Option<PathBuf>,
    pub(super) show: bool,
    pub(super) subject: Subject,
    pub(super) models: Vec<String>,
}

/// Minimum size at which `--touch` applies.
pub(super) const TOUCH_BYTES_MIN: usize = 64 << 10;

/// The libraries whose steps of training are measured.
const TRAINERS: [&str; 2] = ["dist", "torch"];

/// The names of models, as the example `step_time` of dist-candle accepts them.
const MODELS: [&str; 5] = ["mlp-1M", "transformer-1M", "mlp-10M", "transformer-10M", "mlp-100M"];

impl Plan {
    fn new() -> Self {
        Self {
            operations: vec!["all_reduce".to_owned()],
            ranks: vec![2, 4],
            transports: vec!["tcp".to_owned()],
            bytes: vec![8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20],
            rounds: 3,
            touch: false,
            hogs: 0,
            only: Vec::new(),
            peers: std::env::var_os("PEERS_BUILD").map(PathBuf::from),
            out: None,
            picture: None,
            show: false,
            subject: Subject::Operations,
            models: MODELS.map(str::to_owned).to_vec(),
        }
    }

    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// Returns an error if `--only` names an unknown library.
    fn check_names(&self) -> Result<(), Failure> {
        let known = match self.subject {
            Subject::Training => TRAINERS.to_vec(),
            _ => Peer::ALL.map(Peer::name).to_vec(),
        };
        match self.only.iter().find(|name| !known.contains(&name.as_str())) {
            Some(name) => Err(Failure::Usage(format!("--only: {name:?} is none of {}", known.join(", ")))),
            None => Ok(()),
        }
    }

    /// Returns the transports and world sizes to measure.
    pub(super) fn worlds(&self) -> impl Iterator<Item = (&str, usize)> {
        self.transports
            .iter()
            .flat_map(|transport| self.ranks.iter().map(move |&ranks| (&**transport, ranks)))
    }

    /// Returns `true` if a result belongs to the plan.
    pub(super) fn includes(&self, line: &Line) -> bool {
        let touch = self.touch && line.bytes >= TOUCH_BYTES_MIN;
        self.operations.contains(&line.operation)
            && self.ranks.contains(&line.ranks)
            && self.transports.contains(&line.transport)
            && (line.bytes == 0 || self.bytes.contains(&line.bytes))
            && line.touch.unwrap_or(touch) == touch
            && self.wants(&line.peer)
    }
}

/// Parses the arguments; `None` if help was requested.
pub(super) fn parse(mut arguments: lexopt::Parser) -> Result<Option<Plan>, Failure> {
    let (mut plan, mut ranks, mut transports) = (Plan::new(), None, None);
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("help") | Short('h') => return Ok(None),
            Long("ops") => plan.operations = list(&mut arguments, word)?,
            Long("ranks") => ranks = Some(list(&mut arguments, |text| text.parse().ok())?),
            Long("transport") => transports = Some(list(&mut arguments, word)?),
            Long("bytes") => plan.bytes = list(&mut arguments, bytes)?,
            Long("rounds") => plan.rounds = arguments.value()?.parse()?,
            Long("touch") => plan.touch = true,
            Long("hogs") => plan.hogs = arguments.value()?.parse()?,
            Long("only") => plan.only = list(&mut arguments, word)?,
            Long("peers") => plan.peers = Some(arguments.value()?.into()),
            Long("out") => plan.out = Some(arguments.value()?.into()),
            Long("picture") => plan.picture = Some(arguments.value()?.into()),
            Long("show") => plan.show = true,
            Long("training") => plan.subject = Subject::Training,
            Long("programs") => plan.subject = Subject::Programs,
            Long("models") => plan.models = list(&mut arguments, word)?,
            other => return Err(other.unexpected().into()),
        }
    }
    let both = || vec!["shm".to_owned(), "tcp".to_owned()];
    plan.check_names()?;
    plan.ranks = ranks.unwrap_or(match plan.subject {
        Subject::Operations => plan.ranks,
        Subject::Training | Subject::Programs => vec![2],
    });
    plan.transports = transports.unwrap_or(match plan.subject {
        Subject::Operations => plan.transports,
        Subject::Training => both(),
        Subject::Programs => vec!["shm".to_owned()],
    });
    Ok(Some(plan))
}

fn list<T>(arguments: &mut lexopt::Parser, read: fn(&str) -> Option<T>) -> Result<Vec<T>, Failure> {
    let text = arguments.value()?.string()?;
    let items: Option<Vec<T>> = text.split(',').map(read).collect();
    items.ok_or_else(|| Failure::Usage(format!("{text:?} is not a comma-separated list of these values")))
}

fn word(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Parses a size, for example `64K`.
fn bytes(text: &str) -> Option<usize> {
    let (number, shift) = match text.strip_suffix(['K', 'M']) {
        Some(number) if text.ends_with('K') => (number, 10),
        Some(number) => (number, 20),
        None => (text, 0),
    };
    number.parse::<usize>().ok()?.checked_shl(shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_lists_are_read() {
        let arguments =
            ["--bytes", "8,64K,2M", "--ranks", "3", "--ops", "broadcast,barrier", "--touch", "--hogs", "2"];
        let plan = parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        assert_eq!((plan.bytes, plan.ranks, plan.hogs), (vec![8, 64 << 10, 2 << 20], vec![3], 2));
        assert_eq!((plan.operations, plan.touch), (vec!["broadcast".to_owned(), "barrier".to_owned()], true));
        for wrong in [["--bytes", "8k"], ["--ranks", "two"], ["--ops", "a,,b"], ["--sizes", "8"]] {
            assert!(parse(lexopt::Parser::from_args(wrong)).is_err(), "{wrong:?}");
        }
        assert!(parse(lexopt::Parser::from_args(["--training", "--only", "torch"])).is_ok());
        for wrong in ["--only=dist,glo", "--only=torch"] {
            assert!(matches!(parse(lexopt::Parser::from_args([wrong])), Err(Failure::Usage(_))), "{wrong}");
        }
        assert!(parse(lexopt::Parser::from_args(["--help"])).unwrap().is_none());
    }
}
