//! The comparison of the ranks' requests and shared values before a save or load.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::index::TensorName;
use super::load::Allowed;
use super::{CheckpointError, CheckpointProblem, agree};
use crate::{Communicator, Result};

/// The request of one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankRequest {
    /// The request as errors describe it to other ranks.
    request: String,
    /// The hash of [`Shards::updates`](super::Shards::updates).
    updates: u64,
    held: Vec<ComparedChunk>,
}

/// A chunk that several ranks hold, with a checksum of its values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ComparedChunk {
    pub(super) tensor: TensorName,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) crc32: u32,
    pub(super) values: ComparedValues,
}

/// The kind of values that ranks compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum ComparedValues {
    Trained,
    /// A frozen parameter that each rank holds in full and saves in part.
    Frozen,
    /// State of the program.
    State,
}

impl ComparedValues {
    /// Returns the problem of two ranks with different values.
    const fn differ(self, rank: usize, other: usize) -> CheckpointProblem {
        match self {
            Self::Trained => CheckpointProblem::Diverged { rank, other },
            Self::Frozen => CheckpointProblem::FrozenDiffers { rank, other },
            Self::State => CheckpointProblem::StateDiffers { rank, other },
        }
    }
}

impl RankRequest {
    /// Returns the request to save a step, with the states of these kinds of optimizers. `saves` is `saves` or
    /// `starts to save`, `what` describes other parts of the checkpoint.
    pub(super) fn of_save(saves: &str, step: u64, optimizers: [Option<&str>; 2], what: &str) -> Self {
        Self {
            request: format!("{saves} step {step} {}{what}", with(optimizers)),
            updates: 0,
            held: Vec::new(),
        }
    }

    /// Returns the request to load a step, or the newest checkpoint, with the state of this kind of optimizer and
    /// without the tensors that the user leaves out.
    pub(super) fn of_load(step: Option<u64>, optimizers: [Option<&str>; 2], allowed: &Allowed) -> Self {
        let what = step.map_or_else(|| "the newest checkpoint".to_owned(), |step| format!("step {step}"));
        let mut request = format!("loads {what} {}", with(optimizers));
        if allowed.only_trained {
            request += ONLY_TRAINED;
        }
        let left_out = [("", &allowed.left_out), ("the optimizer's state of ", &allowed.states_left_out)];
        for (what, names) in left_out {
            if !names.is_empty() {
                request += &format!(", leaving out {what}{names:?}");
            }
        }
        Self { request, updates: 0, held: Vec::new() }
    }

    /// Returns the request to load weights.
    pub(super) fn of_weights(how: &str) -> Self {
        Self { request: format!("loads weights{how}"), updates: 0, held: Vec::new() }
    }
}

impl RankRequest {
    /// Adds the hash of updates, and the values that other ranks hold too.
    pub(super) fn after(self, updates: u64, held: Vec<ComparedChunk>) -> Self {
        Self { updates, held, ..self }
    }
}

/// The part of a request without frozen parameters.
pub(super) const ONLY_TRAINED: &str = ", only what is trained";

/// Describes the kinds of the shared optimizer and of each rank's own.
fn with(optimizers: [Option<&str>; 2]) -> String {
    match optimizers {
        [None, None] => "without an optimizer".to_owned(),
        [Some(shared), None] => format!("with {shared}"),
        [None, Some(own)] => format!("with {own} of each rank"),
        [Some(shared), Some(own)] => format!("with {shared} and {own} of each rank"),
    }
}

/// Compares the requests of the ranks of a group. A difference is the same error on all ranks.
pub(super) fn compare(comm: &mut Communicator, path: &Path, own: &RankRequest) -> Result<()> {
    let bytes = serde_json::to_vec(own).expect("it is made of numbers and text");
    let all = agree::collect(comm, &bytes)?;
    let compared = if comm.rank() == 0 { check(path, &all, comm.members_in_world()) } else { Ok(()) };
    agree::agree(comm, compared)
}

/// Returns an error unless the requests of these ranks are compatible.
fn check(path: &Path, requests: &[Vec<u8>], ranks: &[usize]) -> Result<(), CheckpointError> {
    let read = |bytes: &Vec<u8>| {
        serde_json::from_slice(bytes).map_err(|error| CheckpointError::malformed(path, error))
    };
    let requests: Vec<RankRequest> = requests.iter().map(read).collect::<Result<_, _>>()?;
    if let Some(at) = requests.iter().position(|request| request.request != requests[0].request) {
        let (rank, on_rank) = (ranks[at], requests[at].request.clone());
        let (other, on_other) = (ranks[0], requests[0].request.clone());
        let problem = CheckpointProblem::RanksDiffer { rank, on_rank, other, on_other };
        return Err(CheckpointError::new(path, problem));
    }
    if let Some(at) = requests.iter().position(|request| request.updates != requests[0].updates) {
        let request =
            |at: usize, how: &str| format!("{}, after {how} of its parameters", requests[at].request);
        let (rank, on_rank) = (ranks[at], request(at, "other updates"));
        let (other, on_other) = (ranks[0], request(0, "its updates"));
        let problem = CheckpointProblem::RanksDiffer { rank, on_rank, other, on_other };
        return Err(CheckpointError::new(path, problem));
    }
    if let Some((chunk, [other, at])) = diverged(&requests) {
        let problem = chunk.values.differ(ranks[at], ranks[other]);
        return Err(CheckpointError::new(path, problem).about(&chunk.tensor));
    }
    Ok(())
}

/// Returns the first chunk of which two ranks hold different values, and these ranks.
fn diverged(requests: &[RankRequest]) -> Option<(&ComparedChunk, [usize; 2])> {
    let mut first = HashMap::new();
    requests.iter().enumerate().find_map(|(at, request)| {
        request.held.iter().find_map(|held| {
            // The lengths of a state's values can differ between ranks.
            let len = if held.values == ComparedValues::State { 0 } else { held.len };
            let key = (held.values, &held.tensor, held.offset, len);
            let &mut (other, crc32) = first.entry(key).or_insert((at, held.crc32));
            (crc32 != held.crc32).then_some((held, [other, at]))
        })
    })
}
