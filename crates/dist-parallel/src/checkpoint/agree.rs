//! Error agreement between the ranks of a save or load, so that no rank waits for one that has failed.

use std::path::Path;
use std::time::Duration;

use super::rank_request::{self, RankRequest};
use super::{CheckpointError, Shards};
use crate::{Communicator, Error, Result};

/// The ranks that save or load one checkpoint.
pub(super) struct Ranks {
    /// The ranks that hold one replica of the model together.
    pub(super) group: Communicator,
    /// The ranks that hold the same values in the other replicas.
    replicas: Option<Communicator>,
}

impl Ranks {
    /// Creates the groups of a call with this name. A rank waits for `timeout` in each phase for a rank of its group,
    /// and for the time of all phases for ranks of other groups. All ranks call this.
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

    /// Returns `true` if this rank's group saves for all groups.
    pub(super) fn saves(&self) -> bool {
        self.replicas.as_ref().is_none_or(|replicas| replicas.rank() == 0)
    }

    /// Returns `true` if there are other groups.
    pub(super) const fn has_replicas(&self) -> bool {
        self.replicas.is_some()
    }

    /// Returns `true` on the one rank that chooses the checkpoint.
    pub(super) fn is_first(&self) -> bool {
        self.group.rank() == 0 && self.saves()
    }

    /// Returns this rank's value if all ranks have one. Otherwise returns the same error on all ranks.
    pub(super) fn agree<T>(&mut self, own: Result<T, CheckpointError>) -> Result<T> {
        let own = agree(&mut self.group, own);
        self.propagate(own)
    }

    /// Returns this group's result if no group has failed. Otherwise returns the error of the first group that has.
    pub(super) fn propagate<T>(&mut self, own: Result<T>) -> Result<T> {
        match &mut self.replicas {
            Some(replicas) => pass_on(replicas, own),
            None => own,
        }
    }

    /// Returns an error unless all ranks have made the same request and hold equal values of shared chunks.
    pub(super) fn compare(&mut self, path: &Path, own: Result<RankRequest, CheckpointError>) -> Result<()> {
        let own = self.agree(own.map_err(|error| error.at(path)))?;
        let compared = rank_request::compare(&mut self.group, path, &own);
        self.propagate(compared)?;
        let Some(replicas) = &mut self.replicas else { return Ok(()) };
        let compared = rank_request::compare(replicas, path, &own);
        pass_on(&mut self.group, compared)
    }

    /// Broadcasts the first rank's bytes to every rank.
    pub(super) fn share(&mut self, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        if let (0, Some(replicas)) = (self.group.rank(), &mut self.replicas) {
            bytes = share(replicas, bytes)?;
        }
        share(&mut self.group, bytes)
    }
}

/// Returns this rank's result if no rank has failed. Otherwise returns the first checkpoint error on all ranks.
fn pass_on<T>(comm: &mut Communicator, own: Result<T>) -> Result<T> {
    match own {
        Ok(own) => agree(comm, Ok(own)),
        Err(Error::Checkpoint(error)) => agree(comm, Err(*error)),
        Err(error) => Err(error),
    }
}

/// Returns this rank's value if all ranks have one. Otherwise returns the error of the first rank that failed, on all
/// ranks.
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
        CheckpointError::malformed(
            "",
            format!("rank {rank} has failed with an error that cannot be decoded: {error}"),
        )
    });
    Err(error.into())
}

/// Broadcasts rank 0's bytes.
fn share(comm: &mut Communicator, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let mut len = [bytes.len() as u64];
    comm.broadcast(&mut len, 0).map_err(Error::communication)?;
    broadcast(comm, bytes, len[0], 0)
}

/// Gathers the bytes of all ranks on rank 0, in rank order. Other ranks get nothing.
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
    usize::try_from(len).expect("a length in a rank's memory fits into another's address space")
}

/// The kind of all calls that begin by comparing the ranks' requests.
const KIND: &str = "checkpoint";

/// The largest number of times that the ranks of a group wait for one that writes or reads: the start of a save, the
/// rank files, the index.
const PHASES: u32 = 3;
