//! The parameters of a pipeline between steps: update, broadcast of ties, and access.

use dist_collectives::Communicator;

use super::{Pipeline, PipelineState};
use crate::engine::{Stage, StepEngine};
use crate::flat::Flat;
use crate::{Optimizer, Params, Result, Values, params};

impl<A> Pipeline<A> {
    /// Calls `f` on every rank with every parameter of the whole model, in order, wherever it lies. Tied parameters
    /// come once.
    ///
    /// # Errors
    /// A model does not hand out its parameters, or communication fails.
    pub fn for_each_parameter(&mut self, f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        self.engine.for_each_parameter(f)
    }
}

impl<M: Params> StepEngine<M> {
    /// Updates the parameters of several stages whose first stage this rank has. If stages are sharded, the first
    /// shard has the optimizer's state.
    pub(crate) fn update_ties(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let Self { stages, pipeline, groups, .. } = self;
        let ties = pipeline.iter().flat_map(|PipelineState { ties, means, .. }| ties.iter().zip(means));
        for (tie, mean) in ties.filter(|_| groups.shards.rank() == 0) {
            let Some(mean) = mean else { continue };
            let stage = stages.iter_mut().find(|stage| stage.number == tie.stages[0]);
            let stage = stage.expect("the rank of the first stage has the mean");
            params::write(&mut stage.model, tie.parameter - stage.range.start, |values| {
                optimizer.update(tie.parameter, values, mean.slice(0, mean.len()))
            })?;
        }
        Ok(())
    }

    /// Calls `f` on every rank with every parameter of the whole model.
    pub(crate) fn for_each_of_stages(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        let Self { stages, groups, pipeline: Some(pipeline), world, model_infos: infos, .. } = self else {
            return Ok(());
        };
        stages
            .iter_mut()
            .try_for_each(|stage| stage.units().try_for_each(|unit| stage.gather(unit, groups)))?;
        for (parameter, info) in infos.iter().enumerate().filter(|(_, info)| info.same_as.is_none()) {
            let mut values = Flat::zeros(info.dtype, info.len());
            let stage = pipeline.stage_of(parameter);
            if let Some(own) = stages.iter().find(|own| own.number == stage) {
                params::read(&own.model, parameter - own.range.start, &mut |read| {
                    values.slice_mut(0, read.len()).convert_from(read);
                })?;
            }
            let len = values.len();
            values.slice_mut(0, len).broadcast(world, pipeline.schedule.placement()[stage])?;
            f(parameter, values.slice(0, len));
        }
        stages.iter_mut().try_for_each(|stage| {
            stage.units().try_for_each(|unit| stage.free(unit))?;
            stage.parameters.rest(groups)
        })
    }

    /// Copies the values of each tied parameter from its first stage, and there from the first shard, to the others.
    pub(crate) fn broadcast_ties(&mut self) -> Result<()> {
        let Self { stages, groups, pipeline: Some(pipeline), world, model_infos: infos, .. } = self else {
            return Ok(());
        };
        let rank = world.rank();
        for tie in &pipeline.ties {
            let info = &infos[tie.parameter];
            let (root, others) = tie.ranks(&pipeline.schedule);
            if rank != root && !others.contains(&rank) {
                continue;
            }
            let of_tie = |stage: &&mut Stage<M>| tie.stages.contains(&stage.number);
            let stage = stages.iter_mut().find(of_tie).expect("this rank has one of the tie's stages");
            let same = |&parameter: &usize| infos[parameter].same_as.unwrap_or(parameter) == tie.parameter;
            let parameter = stage.range.clone().find(same).expect("the stage has the parameter");
            let parameter = parameter - stage.range.start;
            if rank == root && groups.shards.world_size() > 1 {
                let shards = &mut groups.shards;
                params::write(&mut stage.model, parameter, |values| values.broadcast(shards, 0))?;
            }
            let mut values = Flat::zeros(info.dtype, info.len());
            if rank == root {
                params::read(&stage.model, parameter, &mut |read| {
                    values.slice_mut(0, read.len()).convert_from(read);
                })?;
            }
            pass_around(world, &mut values, root, &others)?;
            if rank != root {
                params::write(&mut stage.model, parameter, |mut own| {
                    own.copy_from(values.slice(0, info.len()))
                })?;
            }
        }
        Ok(())
    }
}

/// Sends values from one rank to others, one after the other.
fn pass_around(comm: &mut Communicator, values: &mut Flat, from: usize, to: &[usize]) -> Result<()> {
    if comm.rank() == from {
        return to.iter().try_for_each(|&rank| values.send(comm, rank));
    }
    values.receive(comm, from)
}
