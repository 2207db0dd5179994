//! The parameters of a pipeline between steps: update, broadcast of ties, and access.

use dist_collectives::Communicator;

use super::Pipeline;
use super::stage::Stage;
use super::ties;
use crate::flat::Flat;
use crate::fsdp::ShardChunk;
use crate::{Optimizer, Result, Sequence, Values, params};

impl<A> Pipeline<A> {
    /// Updates this rank's parameters by their gradients. Parameters without a gradient stay unchanged. The number of
    /// a slice is the parameter's index in the whole model. A parameter of several stages is updated by the rank of
    /// the first stage, which sends it to the others.
    ///
    /// # Errors
    /// The model does not hand out its parameters, or the optimizer or communication fails.
    /// [`StepPanicked`](crate::Error::StepPanicked) if a step has panicked and no step has succeeded since.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        // Without ties, an update needs no other rank. The next step then compares the updates.
        if self.ties.is_empty() {
            self.announce("update")
        } else {
            self.agree_to_call("update")?
        }
        self.apply(optimizer)
    }

    /// [Updates](Self::update) the parameters if the norm of the gradients is finite, and returns `true`. Otherwise
    /// changes nothing and returns `false`. The decision is the same on every rank. Every rank of
    /// all pipelines calls this.
    ///
    /// After [`clip_gradients`](Self::clip_gradients), which returns the norm, compare that instead.
    ///
    /// # Errors
    /// The errors of [`update`](Self::update).
    #[doc(alias = "skip_nan")]
    pub fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        self.agree_to_call("update_if_finite")?;
        let is_finite = self.norm()?.is_finite();
        if is_finite {
            self.apply(optimizer)?;
        }
        Ok(is_finite)
    }

    fn apply(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let ended = self.check_ended();
        self.or_abort(ended)?;
        self.updates.record_update(optimizer);
        let result = self.each_own(|model, parameter, original, mean| {
            let Some(mean) = mean else { return Ok(()) };
            params::write(model, parameter, |values| optimizer.update(original, values, mean))
        });
        let result = result.and_then(|()| self.update_shards(optimizer)).and_then(|()| self.broadcast_ties());
        self.or_abort(result)
    }

    /// Calls `f` on every rank with every parameter of the whole model, in order, wherever it lies. Tied parameters
    /// come once.
    ///
    /// # Errors
    /// A model does not hand out its parameters, or communication fails.
    pub fn for_each_parameter(&mut self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        self.agree_to_call("for_each")?;
        let result = self.try_for_each_parameter(&mut f);
        self.or_abort(result)
    }

    /// Updates this rank's shards of sharded parameters.
    fn update_shards(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        for stage in &mut self.stages {
            let Stage { shard: Some(shard), gradients, parameters, .. } = stage else { continue };
            shard.change(|ShardChunk { parameter, offset, len, .. }, values| {
                let Some(mean) = gradients.mean_of_chunk(parameter, offset, len) else { return Ok(()) };
                optimizer.update(parameters.start + parameter, values, mean)
            })?;
        }
        Ok(())
    }

    fn try_for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.stages.iter_mut().try_for_each(|stage| stage.gather(self.shards.as_mut()))?;
        for parameter in 0..self.infos.len() {
            let info = &self.infos[parameter];
            if info.same_as.is_some() {
                continue;
            }
            let mut values = Flat::zeros(info.dtype, info.len());
            let stage = self.stage_of(parameter);
            if let Some(own) = self.stages.iter().find(|own| own.number == stage) {
                params::read(&own.model, parameter - own.parameters.start, &mut |read| {
                    values.slice_mut(0, read.len()).convert_from(read);
                })?;
            }
            let len = values.len();
            values.slice_mut(0, len).broadcast(&mut self.comm, self.schedule.placement()[stage])?;
            f(parameter, values.slice(0, len));
        }
        self.stages.iter_mut().try_for_each(Stage::free)
    }

    /// Copies the values of each tied parameter from its first stage to the others.
    pub(super) fn broadcast_ties(&mut self) -> Result<()> {
        let rank = self.comm.rank();
        for tie in &self.ties {
            let info = &self.infos[tie.parameter];
            let (root, others) = tie.ranks(&self.schedule);
            if rank != root && !others.contains(&rank) {
                continue;
            }
            let of_tie = |stage: &&mut Stage<A>| tie.stages.contains(&stage.number);
            let stage = self.stages.iter_mut().find(of_tie).expect("this rank has one of the tie's stages");
            let same =
                |&parameter: &usize| self.infos[parameter].same_as.unwrap_or(parameter) == tie.parameter;
            let parameter = stage.parameters.clone().find(same).expect("the stage has the parameter");
            let parameter = parameter - stage.parameters.start;
            let mut values = Flat::zeros(info.dtype, info.len());
            if rank == root {
                params::read(&stage.model, parameter, &mut |read| {
                    values.slice_mut(0, read.len()).convert_from(read);
                })?;
            }
            pass_around(&mut self.comm, &mut values, root, &others)?;
            if rank != root {
                params::write(&mut stage.model, parameter, |mut own| {
                    own.copy_from(values.slice(0, info.len()))
                })?;
            }
        }
        Ok(())
    }

    /// Calls `f` for each parameter that this rank updates and that is not sharded. It receives the stage's model,
    /// the parameter's index there and in the whole model, and the mean gradient. Tied parameters on this rank share
    /// memory and come once, under their first index.
    pub(super) fn each_own(
        &mut self,
        mut f: impl FnMut(&mut Sequence<A>, usize, usize, Option<Values<'_>>) -> Result<()>,
    ) -> Result<()> {
        let Self { stages, infos, ties, tied_means, .. } = self;
        let mut changed = vec![false; infos.len()];
        for stage in stages {
            let stage_is_divided = stage.shard.is_some();
            let Stage { model, parameters, gradients, .. } = stage;
            for number in parameters.clone() {
                let original = infos[number].same_as.unwrap_or(number);
                let divided = stage_is_divided && gradients.has(number - parameters.start);
                if std::mem::replace(&mut changed[original], true) || divided {
                    continue;
                }
                let parameter = number - parameters.start;
                let mean = match ties::of(ties, original) {
                    Some(tie) => tied_means[tie].as_ref().map(|mean| mean.slice(0, mean.len())),
                    None => gradients.mean(parameter),
                };
                f(model, parameter, original, mean)?;
            }
        }
        Ok(())
    }

    fn stage_of(&self, parameter: usize) -> usize {
        self.first.partition_point(|&start| start <= parameter) - 1
    }
}

/// Sends values from one rank to others, one after the other.
fn pass_around(comm: &mut Communicator, values: &mut Flat, from: usize, to: &[usize]) -> Result<()> {
    if comm.rank() == from {
        return to.iter().try_for_each(|&rank| values.send(comm, rank));
    }
    values.receive(comm, from)
}
