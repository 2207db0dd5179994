//! What went wrong on one rank is told to all, so that no rank waits for another that has given up.

use std::path::Path;
use std::time::Duration;

use super::rank_request::{self, RankRequest};
use super::{CheckpointError, Shards};
use crate::{Communicator, Error, Result};

/// All ranks of a training, for one checkpoint.
pub(super) struct Ranks {
    /// Those that hold one copy of the model together.
    pub(super) group: Communicator,
    /// Those that hold what this one does in other such groups.
    replicas: Option<Communicator>,
}

impl Ranks {
    /// Ranks that wait for each other so long in each phase. Those of other groups wait for all phases at once.
    /// All of them make this call, of this name.
    pub(super) fn of(shards: &mut dyn Shards, timeout: Duration, name: &str) -> Result<Self> {
        let fork = |comm: &mut Communicator, timeout| -> Result<Communicator> {
            let mut fork = comm.fork().map_err(Error::communication)?;
            fork.set_timeout(timeout);
            Ok(fork)
        };
        shards.communicator_mut().announce(KIND, name);
        let group = fork(shards.communicator_mut(), timeout)?;
        let of_all_phases = timeout.saturating_mul(PHASES);
        let mut replicas = shards.replicas_mut().filter(|replicas| replicas.world_size() > 1);
        if let Some(replicas) = &mut replicas {
            replicas.announce(KIND, name);
        }
        let replicas = replicas.map(|replicas| fork(replicas, of_all_phases)).transpose()?;
        Ok(Self { group, replicas })
    }

    /// Whether this rank's group is the one of all that saves.
    pub(super) fn saves(&self) -> bool {
        self.replicas.as_ref().is_none_or(|replicas| replicas.rank() == 0)
    }

    /// Whether there are other groups beside this rank's.
    pub(super) const fn has_replicas(&self) -> bool {
        self.replicas.is_some()
    }

    /// Whether this is the one rank that says what is loaded.
    pub(super) fn is_first(&self) -> bool {
        self.group.rank() == 0 && self.saves()
    }

    /// What this rank has, if all ranks have something; otherwise one and the same error on all.
    pub(super) fn agree<T>(&mut self, own: Result<T, CheckpointError>) -> Result<T> {
        let own = agree(&mut self.group, own);
        self.tell(own)
    }

    /// What came of something that all ranks of this group know of, if it came to nothing bad in any group; otherwise the
    /// error of the first.
    pub(super) fn tell<T>(&mut self, own: Result<T>) -> Result<T> {
        match &mut self.replicas {
            Some(replicas) => pass_on(replicas, own),
            None => own,
        }
    }

    /// Makes sure that all ranks were asked for the same, and hold the same where they should.
    pub(super) fn compare(&mut self, path: &Path, own: Result<RankRequest, CheckpointError>) -> Result<()> {
        let own = self.agree(own.map_err(|error| error.at(path)))?;
        let compared = rank_request::compare(&mut self.group, path, &own);
        self.tell(compared)?;
        let Some(replicas) = &mut self.replicas else { return Ok(()) };
        let compared = rank_request::compare(replicas, path, &own);
        pass_on(&mut self.group, compared)
    }

    /// The first rank's bytes, on every rank.
    pub(super) fn share(&mut self, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        if let (0, Some(replicas)) = (self.group.rank(), &mut self.replicas) {
            bytes = share(replicas, bytes)?;
        }
        share(&mut self.group, bytes)
    }
}

/// What came of something, if nothing bad came of it on any rank; otherwise the first such error, on all.
fn pass_on<T>(comm: &mut Communicator, own: Result<T>) -> Result<T> {
    match own {
        Ok(own) => agree(comm, Ok(own)),
        Err(Error::Checkpoint(error)) => agree(comm, Err(*error)),
        Err(error) => Err(error),
    }
}

/// What this rank has, if all ranks have something; otherwise the error of the first rank that has one, on all.
pub(super) fn agree<T>(comm: &mut Communicator, own: Result<T, CheckpointError>) -> Result<T> {
    let number = comm.members_in_world()[comm.rank()];
    let message = own.as_ref().err().map(|error| encode(error, number)).unwrap_or_default();
    let mut lens = vec![0; comm.world_size()];
    comm.all_gather(&[message.len() as u64], &mut lens).map_err(Error::communication)?;
    let Some(rank) = lens.iter().position(|&len| len > 0) else {
        return own.map_err(Error::from);
    };
    let message = broadcast(comm, message, lens[rank], rank)?;
    let rank = comm.members_in_world()[rank];
    let error: CheckpointError = serde_json::from_slice(&message).unwrap_or_else(|error| {
        CheckpointError::malformed("", format!("rank {rank} has failed and cannot be understood: {error}"))
    });
    Err(error.into())
}

/// Rank 0's bytes, on every rank.
fn share(comm: &mut Communicator, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let mut len = [bytes.len() as u64];
    comm.broadcast(&mut len, 0).map_err(Error::communication)?;
    broadcast(comm, bytes, len[0], 0)
}

/// The bytes of all ranks on rank 0, in rank order; nothing elsewhere.
pub(super) fn collect(comm: &mut Communicator, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut lens = vec![0; comm.world_size()];
    comm.all_gather(&[bytes.len() as u64], &mut lens).map_err(Error::communication)?;
    let lens: Vec<usize> = lens.into_iter().map(in_memory).collect();
    let mut all = vec![0_u8; if comm.rank() == 0 { lens.iter().sum() } else { 0 }];
    comm.gather_v(bytes, &lens, &mut all, 0).map_err(Error::communication)?;
    let mut rest = &*all;
    let mut parts = Vec::new();
    if comm.rank() == 0 {
        for len in lens {
            let (part, others) = rest.split_at(len);
            parts.push(part.to_vec());
            rest = others;
        }
    }
    Ok(parts)
}

fn broadcast(comm: &mut Communicator, mut bytes: Vec<u8>, len: u64, root: usize) -> Result<Vec<u8>> {
    bytes.resize(in_memory(len), 0);
    comm.broadcast(&mut bytes, root).map_err(Error::communication)?;
    Ok(bytes)
}

fn encode(error: &CheckpointError, rank: usize) -> Vec<u8> {
    let found = CheckpointError { rank: Some(error.rank.unwrap_or(rank)), ..error.clone() };
    serde_json::to_vec(&found).unwrap_or_else(|error| format!("{error:?}").into_bytes())
}

fn in_memory(len: u64) -> usize {
    usize::try_from(len).expect("what lies in a rank's memory fits into another's")
}

/// The kind of all calls that begin by comparing what the ranks were asked for.
const KIND: &str = "checkpoint";

/// How often the ranks of a group wait for one of them that writes or reads, at most: a save begins, parts are written, and
/// the index.
const PHASES: u32 = 3;
