//! Aborts the job when a rank fails alone.

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;

use crate::Result;

/// Aborts the job on an error that other ranks do not get.
pub(crate) fn or_abort<T>(comm: &mut Communicator, result: Result<T>) -> Result<T> {
    result.inspect_err(|error| {
        if !error.is_on_every_rank() {
            tracing::warn!(%error, "a failed training call aborts the job");
            comm.abort(Chain(error));
        }
    })
}
