//! Stages whose parameters are sharded among several ranks and gathered only while they are used.

use std::sync::Arc;

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::fsdp::{FlatParameter, ShardChunk};
use crate::mutation_check::MutationCheck;
use crate::{Bucket, Params, Result, ValuesMut, params};

/// One rank's shard of a stage's parameters. The trained parameters of each type form a flat parameter, which is
/// padded with zeros and divided into equal shards.
pub(super) struct StageShard {
    rank: usize,
    ranks: usize,
    /// One for each bucket.
    flat_params: Vec<FlatParameter>,
    /// The master values: this rank's shards, which the optimizer updates.
    masters: Vec<Flat>,
    /// The check that the stage's blocks do not change parameters.
    mutation_check: MutationCheck,
}

impl StageShard {
    /// Shards the parameters of these buckets and frees them.
    pub(super) fn new(comm: &Communicator, buckets: &[Bucket], model: &mut impl Params) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let flat_param = |bucket: &Bucket| FlatParameter {
            dtype: bucket.dtype,
            trainable: true,
            places: bucket.places.clone(),
            shard_len: bucket.len().div_ceil(ranks),
        };
        let flat_params: Vec<FlatParameter> = buckets.iter().map(flat_param).collect();
        let mut masters = Vec::with_capacity(flat_params.len());
        for flat_param in &flat_params {
            let mut whole = Flat::zeros(flat_param.dtype, flat_param.padded(ranks));
            params::pack(model, &flat_param.places, &mut whole)?;
            masters.push(whole.part(flat_param.dtype, rank * flat_param.shard_len, flat_param.shard_len));
        }
        let mut shard = Self { rank, ranks, flat_params, masters, mutation_check: MutationCheck::new(0, 1) };
        shard.free(model)?;
        Ok(shard)
    }

    /// Gathers the parameters and materialises them in the model.
    pub(super) fn gather(&mut self, comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
        let mut arriving = Vec::with_capacity(self.flat_params.len());
        for (flat_param, master) in self.flat_params.iter().zip(&self.masters) {
            let mut whole = Flat::zeros(flat_param.dtype, flat_param.padded(self.ranks));
            let own = master.slice(0, flat_param.shard_len);
            whole.slice_mut(self.rank * flat_param.shard_len, flat_param.shard_len).copy_from(own)?;
            arriving.push(whole.start_gather(comm));
        }
        for (flat_param, whole) in self.flat_params.iter().zip(arriving) {
            params::materialise(model, &flat_param.places, &Arc::new(whole.wait()?))?;
        }
        self.mutation_check.begin(model, parameters(&self.flat_params))
    }

    /// Frees the gathered parameters.
    ///
    /// # Errors
    /// The stage's blocks have changed parameters, see [`MutationCheck`].
    pub(super) fn free(&mut self, model: &mut impl Params) -> Result<()> {
        self.mutation_check.end(model, parameters(&self.flat_params))?;
        self.flat_params.iter().try_for_each(|flat_param| params::reshard(model, &flat_param.places))
    }

    /// Calls `f` for each chunk of this rank's shard, with its master values.
    pub(super) fn change(
        &mut self,
        mut f: impl FnMut(ShardChunk, ValuesMut<'_>) -> Result<()>,
    ) -> Result<()> {
        for (flat_param, master) in self.flat_params.iter().zip(&mut self.masters) {
            for chunk in flat_param.chunks(self.rank) {
                f(chunk, master.slice_mut(chunk.at, chunk.len))?;
            }
        }
        Ok(())
    }

    /// Broadcasts the shard of rank 0.
    pub(super) fn broadcast(&mut self, comm: &mut Communicator) -> Result<()> {
        self.masters.iter_mut().try_for_each(|master| {
            let len = master.len();
            master.slice_mut(0, len).broadcast(comm, 0)
        })
    }
}

fn parameters(flat_params: &[FlatParameter]) -> impl Iterator<Item = usize> {
    flat_params.iter().flat_map(|flat_param| &flat_param.places).map(|place| place.parameter)
}
