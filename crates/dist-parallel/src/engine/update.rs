//! The calls between two steps: the norm of the gradients, clipping, and updates of the parameters.

use std::ops::Range;

use dist_collectives::ReduceOp;

use super::{Agreement, Stage, StepEngine};
use crate::flat::Flat;
use crate::fsdp::Plan;
use crate::norm::{self, SquareRange, SumOfSquares};
use crate::pipeline::PipelineState;
use crate::unreported::without_gradient;
use crate::{Bucket, BucketPlace, Chunk, Error, Optimizer, Params, Result, Shards, Values, ValuesMut};

impl<M: Params> StepEngine<M> {
    /// Returns this rank's shard of a parameter's mean gradient, with its range in the parameter.
    pub(crate) fn gradient(&self, parameter: usize) -> Option<(Range<usize>, Values<'_>)> {
        let Stage { plan, gradients, .. } = self.stage();
        let location = (*plan.layout.locations.get(parameter)?)?;
        let flat_param = &plan.layout.units[location.unit].flat_params[location.flat_param];
        let chunk = flat_param.chunk(location.place, self.groups.shards.rank())?;
        let values = gradients.mean_of_chunk(chunk.parameter, chunk.offset, chunk.len)?;
        Some((chunk.offset..chunk.offset + chunk.len, values))
    }

    /// Returns the names of the trained parameters of this rank's stages for which no micro-batch of the last step had a
    /// gradient.
    pub(crate) fn without_gradient(&self) -> Vec<&str> {
        without_gradient(&self.model_infos, |parameter| {
            let Some(stage) = self.stages.iter().find(|stage| stage.range.contains(&parameter)) else {
                return true;
            };
            let of_tie = self.pipeline.as_ref().and_then(|pipeline| pipeline.has_tied_gradient(parameter));
            of_tie.unwrap_or_else(|| stage.gradients.used()[parameter - stage.range.start])
        })
    }

    /// Begins a call between two steps that all ranks make. The ranks of a pipeline compare it, because they use one
    /// communicator for all of these calls.
    pub(super) fn begin_call(&mut self, name: &'static str) -> Result<()> {
        match self.agreement {
            _ if self.pipeline.is_some() => self.agree_to_call(name),
            // A rank with all gradients and parameters makes the call alone.
            Agreement::AtEnd | Agreement::OwnRank => Ok(()),
            Agreement::BeforeRounds => {
                self.announce(name);
                Ok(())
            }
        }
    }

    /// Returns the Euclidean norm of all gradients.
    pub(crate) fn gradient_norm(&mut self) -> Result<f64> {
        self.begin_call("gradient_norm")?;
        self.norm()
    }

    fn norm(&mut self) -> Result<f64> {
        let norm = self.try_gradient_norm();
        self.or_abort(norm)
    }

    fn try_gradient_norm(&mut self) -> Result<f64> {
        self.check_ended()?;
        self.follow();
        let reduced = self.stages[0].plan.options.precision.reduce;
        let summed = self.model_infos.iter().filter(|info| info.buffer.is_none());
        let range = SquareRange::of(summed.map(|info| reduced.unwrap_or(info.dtype)));
        let (mut sum, rank) = (SumOfSquares::new(range), self.groups.shards.rank());
        self.stages.iter().for_each(|stage| stage.add_squares(rank, &mut sum));
        // Every shard has the parameters of several stages; the first one counts them.
        let ties = self.pipeline.iter().filter(|_| rank == 0).flat_map(PipelineState::tied_means);
        ties.for_each(|mean| sum.add(mean.slice(0, mean.len())));
        let mut encoded = sum.encode();
        let stages = self.pipeline.is_some().then_some(&mut self.world);
        for group in stages.into_iter().chain([&mut self.groups.shards]) {
            group.all_reduce(&mut encoded, ReduceOp::Sum).map_err(Error::communication)?;
        }
        Ok(SumOfSquares::root(range, &encoded))
    }

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before.
    pub(crate) fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        self.begin_call("clip_gradients")?;
        let norm = self.norm()?;
        self.updates.record_clipping(max);
        if let Some(factor) = norm::factor(norm, max) {
            self.scale(factor);
        }
        Ok(norm)
    }

    /// Scales all gradients by a factor, which the next step compares.
    pub(crate) fn scale_gradients(&mut self, factor: f64) {
        self.updates.record_scaling(factor);
        self.scale(factor);
    }

    fn scale(&mut self, factor: f64) {
        self.stages.iter_mut().for_each(|stage| stage.gradients.scale(factor));
        self.pipeline.iter_mut().for_each(|pipeline| pipeline.scale(factor));
    }

    /// Updates the parameters by their gradients.
    pub(crate) fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        // Without ties, the update of a pipeline needs no other rank. The next step then compares the updates.
        match &self.pipeline {
            Some(pipeline) if !pipeline.has_ties() => self.announce("update"),
            _ => self.begin_call("update")?,
        }
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    /// Updates the parameters if the norm of the gradients is finite, and returns `true`.
    pub(crate) fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        self.begin_call("update_if_finite")?;
        let is_finite = self.norm()?.is_finite();
        if is_finite {
            let result = self.try_update(optimizer);
            self.or_abort(result)?;
        }
        Ok(is_finite)
    }

    fn try_update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.check_ended()?;
        self.updates.record_update(optimizer);
        self.follow();
        // Prefetched parameters are outdated after the update.
        self.prefetched = None;
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.update(optimizer, groups))?;
        self.update_ties(optimizer)?;
        self.broadcast_ties()
    }

    /// Sets this rank's shard of all parameters from one flat slice.
    pub(crate) fn set_shard(&mut self, values: Values<'_>) -> Result<()> {
        let result = self.try_set_shard(values).and_then(|()| self.all_gather_updates(|_| true));
        self.or_abort(result)
    }

    fn try_set_shard(&mut self, values: Values<'_>) -> Result<()> {
        let (expected_len, Plan { options, layout, .. }) = (self.shard_len(), &self.stage().plan);
        let (got_len, got) = (values.len(), values.dtype());
        let mut dtypes =
            layout.flat_params().map(|(_, flat_param)| flat_param.master_dtype(options.precision));
        let expected = dtypes.find(|dtype| *dtype != got).unwrap_or(got);
        drop(dtypes);
        if (expected, expected_len) != (got, got_len) {
            return Err(Error::ValuesDiffer { expected_len, expected, got_len, got });
        }
        let mut rest = values;
        for (place, chunk) in self.chunks() {
            let Stage { parameters, model, .. } = self.stage_mut();
            parameters.change(place, chunk, model, |mut own| own.copy_from(rest.part(0..chunk.len)))?;
            rest = rest.part(chunk.len..rest.len());
        }
        Ok(())
    }

    /// Returns the values of the replicated parameters in a bucket: master values if there are any.
    pub(crate) fn pack(&self, bucket: &Bucket) -> Result<Flat> {
        let mut flat = Flat::zeros(bucket.dtype, bucket.len());
        for &BucketPlace { parameter, offset, len } in bucket.places.iter().filter(|place| place.len > 0) {
            let mut copy = |values: Values<'_>| flat.slice_mut(offset, len).convert_from(values);
            Shards::read(self, Chunk { parameter, offset: 0, len }, &mut copy)?;
        }
        Ok(flat)
    }

    /// Sets the values of a bucket's parameters. [`finish_outer_step`](Self::finish_outer_step) follows.
    pub(crate) fn unpack(&mut self, bucket: &Bucket, flat: &Flat) -> Result<()> {
        for &BucketPlace { parameter, offset, len } in bucket.places.iter().filter(|place| place.len > 0) {
            let mut copy = |mut values: ValuesMut<'_>| values.convert_from(flat.slice(offset, len));
            Shards::write(self, Chunk { parameter, offset: 0, len }, &mut copy)?;
        }
        Ok(())
    }

    /// Copies new master values into the model, and synchronises the buffers of all ranks.
    pub(crate) fn finish_outer_step(&mut self) -> Result<()> {
        self.all_gather_updates(|flat_param| flat_param.trainable)?;
        let Self { stages, world, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.buffers.synchronise([&mut *world], &mut stage.model))
    }
}
