//! A stage of the model on one rank: its blocks, this rank's shard of their parameters, and the sums of their gradients.

use std::ops::Range;

use crate::buffers::Buffers;
use crate::fsdp::{FlatParameter, Groups, Parameters, Plan, ShardChunk};
use crate::gradients::Gradients;
use crate::norm::SumOfSquares;
use crate::{Chunk, Optimizer, Params, Result, Values, ValuesMut, params};

/// A stage of the model on one rank. A model that is not divided into stages is stage 0.
pub(crate) struct Stage<M> {
    pub(crate) number: usize,
    /// The indices of its parameters in the whole model.
    pub(crate) range: Range<usize>,
    pub(crate) model: M,
    pub(crate) plan: Plan,
    pub(crate) parameters: Parameters,
    pub(crate) gradients: Gradients,
    pub(crate) buffers: Buffers,
    /// For each parameter, the tie with other stages that sums its gradients. Empty if there are no other stages.
    pub(crate) tie_of: Vec<Option<usize>>,
}

impl<M: Params> Stage<M> {
    /// Returns the chunks of this rank's shard of all parameters, each with the position of its flat parameter.
    pub(crate) fn chunks(&self, rank: usize) -> Vec<((usize, usize), ShardChunk)> {
        let flat_params = self.plan.layout.flat_params();
        flat_params
            .flat_map(|(place, flat_param)| flat_param.chunks(rank).map(move |chunk| (place, chunk)))
            .collect()
    }

    /// Adds the squares of this rank's shard of the mean gradients.
    pub(crate) fn add_squares(&self, rank: usize, sum: &mut SumOfSquares) {
        for (_, chunk) in self.chunks(rank) {
            let mean = self.gradients.mean_of_chunk(chunk.parameter, chunk.offset, chunk.len);
            mean.into_iter().for_each(|mean| sum.add(mean));
        }
    }

    /// Updates this rank's shard of the parameters by their gradients, and gives the models the result.
    pub(crate) fn update(&mut self, optimizer: &mut dyn Optimizer, groups: &mut Groups) -> Result<()> {
        self.adopt(groups.shards.rank())?;
        let Self { plan, parameters, gradients, model, range, .. } = self;
        parameters.update(&plan.layout, gradients, model, range.start, optimizer)?;
        self.publish(groups, |flat_param| flat_param.trainable)
    }

    /// Gives every rank's model the changed parameters, if the models have all parameters and the changed values lie
    /// elsewhere.
    pub(crate) fn publish(
        &mut self,
        groups: &mut Groups,
        changed: impl Fn(&FlatParameter) -> bool,
    ) -> Result<()> {
        self.parameters.publish(&self.plan, groups, &mut self.model, changed)
    }

    /// Makes values that the program has written into the model the master values. A value that is still the rounded
    /// master value stays as precise as it is.
    pub(crate) fn adopt(&mut self, rank: usize) -> Result<()> {
        if self.plan.degrees.frees {
            return Ok(());
        }
        self.chunks(rank)
            .into_iter()
            .try_for_each(|(place, chunk)| self.parameters.adopt(place, chunk, &self.model))
    }

    /// Calls `f` with the values of a chunk that rank `rank` of the shard group holds, by its index in the stage.
    pub(crate) fn read(&self, chunk: Chunk, rank: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.plan.layout.locate(chunk, rank)? {
            Some((place, chunk)) if self.plan.degrees.frees => {
                self.parameters.read(place, chunk, &self.model, f)
            }
            Some((place, chunk)) => self.parameters.read_adopted(place, chunk, &self.model, f),
            None => params::read(&self.model, chunk.parameter, f),
        }
    }

    /// Calls `f` with the memory of such a chunk.
    pub(crate) fn change(
        &mut self,
        chunk: Chunk,
        rank: usize,
        f: impl FnMut(ValuesMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match self.plan.layout.locate(chunk, rank)? {
            Some((place, chunk)) => self.parameters.change(place, chunk, &mut self.model, f),
            None => params::write(&mut self.model, chunk.parameter, f),
        }
    }

    /// Gathers a unit if it is sharded, and waits for it.
    pub(crate) fn gather(&mut self, unit: usize, groups: &mut Groups) -> Result<()> {
        let Self { plan, parameters, model, .. } = self;
        if !plan.degrees.frees {
            return Ok(());
        }
        parameters.gather(&plan.layout, unit, groups)?;
        parameters.materialise(&plan.layout, unit, groups, false, model)
    }

    /// Frees a unit if it is sharded.
    pub(crate) fn free(&mut self, unit: usize) -> Result<()> {
        let Self { plan, parameters, model, .. } = self;
        if plan.degrees.frees { parameters.free(&plan.layout, unit, model) } else { Ok(()) }
    }

    /// Returns the numbers of all units.
    pub(crate) fn units(&self) -> Range<usize> {
        0..self.plan.layout.units.len()
    }

    /// Drops all gradients, gathered parameters and operations in flight.
    pub(crate) fn forget(&mut self) {
        self.parameters.forget();
        self.gradients.forget();
    }
}
