//! What a rank that fails tells the others.

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;

use crate::Result;

/// Aborts the job if something failed that the other ranks cannot know.
pub(crate) fn or_abort<T>(comm: &mut Communicator, result: Result<T>) -> Result<T> {
    result.inspect_err(|error| {
        if !error.is_on_every_rank() {
            tracing::warn!(%error, "training ends the job");
            comm.abort(Chain(error));
        }
    })
}
