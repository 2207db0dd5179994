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
    held: Vec<SharedChunk>,
}

/// A chunk that several ranks hold, with a checksum of its values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SharedChunk {
    pub(super) tensor: TensorName,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) crc32: u32,
}

impl RankRequest {
    /// Returns the request to save a step, with the state of this kind of optimizer. `saves` is `saves` or
    /// `starts to save`.
    pub(super) fn of_save(saves: &str, step: u64, optimizer: Option<&str>, held: Vec<SharedChunk>) -> Self {
        Self { request: format!("{saves} step {step} {}", with(optimizer)), updates: 0, held }
    }

    /// Returns the request to load a step, or the newest checkpoint, with the state of this kind of optimizer and
    /// without the tensors that the user leaves out.
    pub(super) fn of_load(step: Option<u64>, optimizer: Option<&str>, allowed: &Allowed) -> Self {
        let what = step.map_or_else(|| "the newest checkpoint".to_owned(), |step| format!("step {step}"));
        let mut request = format!("loads {what} {}", with(optimizer));
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
    /// Returns this request of a rank with this hash of updates.
    pub(super) fn after(self, updates: u64) -> Self {
        Self { updates, ..self }
    }
}

fn with(optimizer: Option<&str>) -> String {
    optimizer.map_or_else(|| "without an optimizer".to_owned(), |name| format!("with {name}"))
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
    if let Some((tensor, [other, at])) = diverged(&requests) {
        let problem = CheckpointProblem::Diverged { rank: ranks[at], other: ranks[other] };
        return Err(CheckpointError::new(path, problem).about(tensor));
    }
    Ok(())
}

/// Returns the first chunk of which two ranks hold different values, and these ranks.
fn diverged(requests: &[RankRequest]) -> Option<(&TensorName, [usize; 2])> {
    let mut first = HashMap::new();
    requests.iter().enumerate().find_map(|(at, request)| {
        request.held.iter().find_map(|held| {
            let &mut (other, crc32) =
                first.entry((&held.tensor, held.offset, held.len)).or_insert((at, held.crc32));
            (crc32 != held.crc32).then_some((&held.tensor, [other, at]))
        })
    })
}
