//! What went wrong on one rank is told to all, so that no rank waits for another that has given up.

use super::CheckpointError;
use crate::{Communicator, Error, Result};

/// What this rank has, if all ranks have something; otherwise the error of the first rank that has one, on all.
pub(super) fn agree<T>(comm: &mut Communicator, own: Result<T, CheckpointError>) -> Result<T> {
    let message = own.as_ref().err().map(|error| encode(error, comm.rank())).unwrap_or_default();
    let mut lens = vec![0; comm.world_size()];
    comm.all_gather(&[message.len() as u64], &mut lens).map_err(Error::communication)?;
    let Some(rank) = lens.iter().position(|&len| len > 0) else {
        return own.map_err(Error::from);
    };
    let message = broadcast(comm, message, lens[rank], rank)?;
    let error: CheckpointError = serde_json::from_slice(&message).unwrap_or_else(|error| {
        CheckpointError::malformed("", format!("rank {rank} has failed and cannot be understood: {error}"))
    });
    Err(error.into())
}

/// Rank 0's bytes, on every rank.
pub(super) fn share(comm: &mut Communicator, bytes: Vec<u8>) -> Result<Vec<u8>> {
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
