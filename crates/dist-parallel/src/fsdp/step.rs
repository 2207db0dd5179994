//! One step of sharded training: the plan's actions for each of this rank's micro-batches.

use dist_collectives::ReduceOp;

use super::Fsdp;
use super::groups::bytes_sent;
use super::order::UnitAction;
use crate::gradients::Role;
use crate::loss::WeightedLoss;
use crate::step_consensus::{STEP, StepConsensus, StepDescriptor, TrainingCall};
use crate::tree::sum_of;
use crate::unreported::without_gradient;
use crate::{BoxError, Error, Loss, Params, Result, Saved, StepReport, Values, ValuesMut};

/// The input of a micro-batch, and the function that computes its loss and the loss's gradient.
type Batch<A> = (A, fn(A) -> Result<(f32, A), BoxError>);

/// The state of one micro-batch.
pub(super) struct MicroBatchPass<A> {
    /// The output of the last block. `None` if this rank has no micro-batch, or if the last gradient was not needed.
    pub(super) current: Option<A>,
    /// The activations that each unit's blocks save for their backward.
    pub(super) saved: Vec<Vec<Saved>>,
}

impl<A> Fsdp<A> {
    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks, accumulated ones included.
    ///
    /// `batch` receives the number of a micro-batch. It returns the input and a function that computes the [`Loss`]
    /// and its gradient from the model's output. The type of the loss decides between a mean over micro-batches and a
    /// weighted mean.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// `batch`, a block or the loss fails. A gradient is reported twice, or differs from its parameter in type or length.
    /// A block [changes a sharded parameter](Error::ChangedByBlock). The ranks call for different numbers of
    /// micro-batches, or all for none. Only some micro-batches have a weight, or the sum of weights is 0. Communication
    /// fails.
    pub fn step<C: Loss, L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        self.world.announce(STEP, "step");
        self.begin_to_compute();
        self.step_of(self.descriptor(TrainingCall::Step, micro_batches, C::WEIGHTED), micro_batches, batch)
    }

    /// Computes the mean gradients of the micro-batches that the ranks have, accumulated ones included: `own` on this
    /// rank, 0 if it has run out. Returns `None` on every rank if no rank has any: training is over.
    ///
    /// A rank that has run out has no weight. Sums are divided by the number of micro-batches that were computed, or
    /// by their [weights](Loss). The rank still takes every step, because the others need its shard of the
    /// parameters. The ranks of a replica run as many rounds as their longest rank needs. Each round sums the ranks
    /// that have a micro-batch in it. Then the rounds are summed.
    ///
    /// `batch` receives the number of a micro-batch among this rank's own. If all ranks read the same data, each must
    /// take other examples from it: [`data`](crate::data) shows how, and the mistake that gives all ranks the same.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step), and a step of another kind on some ranks.
    #[doc(alias = "Join")]
    pub fn join<C: Loss, L>(
        &mut self,
        own: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<Option<StepReport>>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        self.world.announce(STEP, "join");
        self.begin_to_compute();
        match self.step_of(StepDescriptor::new(TrainingCall::Join, 0, C::WEIGHTED), own, batch) {
            Ok(report) => Ok(Some(report)),
            Err(Error::NoMicroBatches) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes a step. The caller has called [`begin_to_compute`](Self::begin_to_compute).
    fn step_of<C: Loss, L>(
        &mut self,
        descriptor: StepDescriptor,
        given: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        let report = self.reported(|fsdp| {
            let result = fsdp.rounds(descriptor, given, &mut batch);
            let result =
                result.and_then(|micro_batches| Ok((fsdp.finish(descriptor, micro_batches)?, micro_batches)));
            fsdp.computes = false;
            fsdp.or_abort(result)
        })?;
        (self.micro_batches, self.count) = (0, 0);
        self.model.begin_forward(self.passes.end_step());
        Ok(report)
    }

    /// Runs `compute`, which returns the mean loss and the number of micro-batches, and reports its time and bytes.
    pub(super) fn reported(
        &mut self,
        compute: impl FnOnce(&mut Self) -> Result<(f32, usize)>,
    ) -> Result<StepReport> {
        let (started, sent_before) = (self.world.runtime().now(), self.bytes_sent());
        self.groups.take_waited();
        let (loss, micro_batches) = compute(self)?;
        let elapsed = self.world.runtime().now().saturating_sub(started);
        let (exposed, bytes_sent) = (self.groups.take_waited(), self.bytes_sent() - sent_before);
        Ok(StepReport { loss, micro_batches, elapsed, exposed, bytes_sent })
    }

    fn bytes_sent(&self) -> u64 {
        bytes_sent(&self.world) + self.groups.bytes_sent()
    }

    /// Computes gradients that the next step adds to its own. If gradients are sharded, each rank keeps its shard of
    /// them.
    ///
    /// Several calls and a step give the result of one step with all their micro-batches, if both assign them alike.
    /// All micro-batches of a step have a [loss](Loss) of one type.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step).
    #[doc(alias = "no_sync")]
    pub fn accumulate<C: Loss, L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        self.world.announce(STEP, "accumulate");
        self.begin_to_compute();
        let descriptor = self.descriptor(TrainingCall::Accumulate, micro_batches, C::WEIGHTED);
        let result = self.rounds(descriptor, micro_batches, &mut batch);
        self.computes = false;
        self.micro_batches = self.or_abort(result)?;
        self.weighted = descriptor.weighted;
        Ok(())
    }

    /// Computes the mean gradients of the accumulated micro-batches.
    ///
    /// # Errors
    /// Nothing was accumulated, and the errors of [`step`](Self::step).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.world.announce(STEP, "synchronise");
        self.begin_to_compute();
        let nothing = |_| -> Result<Batch<A>, BoxError> { unreachable!("the range is empty") };
        self.step_of(self.descriptor(TrainingCall::Step, 0, self.weighted), 0, nothing)
    }

    const fn descriptor(&self, call: TrainingCall, micro_batches: usize, weighted: bool) -> StepDescriptor {
        StepDescriptor::new(call, self.micro_batches + micro_batches, weighted)
    }

    /// Starts to gather the first units of the next forward. Otherwise the forward itself does. Nothing happens if
    /// this rank shares its replica with no other, as in a world of one. Every rank calls this.
    ///
    /// # Errors
    /// The strategy does not shard parameters. There is no memory. An earlier prefetch is unused: a forward uses it.
    /// An [update](Self::update), [`set_shard`](Self::set_shard), [`for_each_parameter`](Self::for_each_parameter) or
    /// loading a checkpoint frees it.
    pub fn prefetch(&mut self) -> Result<()> {
        self.announce("prefetch");
        if !self.plan.options.strategy.shards_parameters() {
            return Err(Error::Prefetch { reason: "every rank has all parameters" });
        }
        if self.prefetched.is_some() {
            return Err(Error::Prefetch { reason: "an earlier prefetch has not been used by a forward" });
        }
        self.follow();
        let mut taken = 0;
        while let Some(&UnitAction::Gather(unit)) = self.forward.get(taken) {
            let gathered = self.parameters.gather(&self.plan.layout, unit, &mut self.groups);
            self.or_abort(gathered)?;
            taken += 1;
        }
        self.prefetched = Some(taken);
        Ok(())
    }

    /// Runs all micro-batches of one call. `given` is their number on all ranks or, for a join, on this rank. Returns
    /// the number of micro-batches since the last step.
    fn rounds<C: Loss, L>(
        &mut self,
        descriptor: StepDescriptor,
        given: usize,
        batch: &mut impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<usize>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        if self.micro_batches > 0 && self.weighted != descriptor.weighted {
            return Err(Error::PartlyWeighted);
        }
        let joins = descriptor.call == TrainingCall::Join;
        let micro_batches = self.agree(descriptor, if joins { given } else { 0 })?;
        self.follow();
        let last = descriptor.call != TrainingCall::Accumulate;
        self.gradients.begin_step();
        let assignment = self.plan.assignment(self.world.rank());
        let rounds = if joins { self.rounds_of_copy(given)? } else { assignment.rounds(given) };
        for round in 0..rounds {
            let own = Some(round).filter(|&round| round < given);
            let index = if joins { own } else { assignment.micro_batch(given, round) };
            let number = self.gradients.ended();
            self.gradients.begin(number, Role::new(index.is_some(), last && round + 1 == rounds));
            let (loss, count) = match index {
                Some(index) => {
                    let in_call =
                        if joins { index * self.world.world_size() + self.world.rank() } else { index };
                    self.model.begin_forward(self.passes.in_step(self.micro_batches + in_call));
                    let (input, loss) = batch(index).map_err(Error::compute)?;
                    self.pass(Some((input, loss)))?
                }
                None => self.pass::<C, L>(None)?,
            };
            self.losses.push(loss);
            self.count = self.count.saturating_add(count);
            self.gradients.end(number, &mut self.groups.reduce())?;
        }
        self.gradients.rest();
        self.parameters.rest(&mut self.groups)?;
        Ok(micro_batches)
    }

    /// Returns the number of rounds of this rank's replica: the largest `own` of its ranks.
    fn rounds_of_copy(&mut self, own: usize) -> Result<usize> {
        let mut most = [own as u64];
        if self.plan.degrees.each_round {
            self.groups.shards.all_reduce(&mut most, ReduceOp::Max).map_err(Error::communication)?;
        }
        Ok(usize::try_from(most[0]).unwrap_or(usize::MAX))
    }

    /// Runs one micro-batch, or the part of the other ranks' micro-batches that needs this rank.
    fn pass<C: Loss, L>(&mut self, batch: Option<(A, L)>) -> Result<WeightedLoss>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        if batch.is_some() {
            self.buffers.record_forward();
        }
        // After an update, only the optimizer's shard of a replicated parameter has an effect.
        let Self { parameters, model, plan, .. } = &mut *self;
        let keeps_parts = plan.degrees.shards > 1 && !plan.degrees.frees;
        if keeps_parts {
            parameters.begin_pass(&plan.layout, model)?;
        }
        let (input, loss) = batch.unzip();
        let mut pass = MicroBatchPass { current: input, saved: Vec::new() };
        for place in self.prefetched.take().unwrap_or(0)..self.forward.len() {
            self.act(self.forward[place], &mut pass)?;
        }
        // The first units of the backward are gathered while the loss is computed.
        let ahead = self.backward.iter().take_while(|action| matches!(action, UnitAction::Gather(_))).count();
        for place in 0..ahead {
            self.act(self.backward[place], &mut pass)?;
        }
        // Without a micro-batch, the loss is neutral and the sum does not depend on it.
        let mut counted = (-0.0, 0);
        if let (Some(loss), Some(output)) = (loss, pass.current.take()) {
            let (loss, gradient) = loss(output).map_err(Error::compute)?;
            counted = loss.weighted();
            pass.current = Some(gradient);
        }
        for place in ahead..self.backward.len() {
            self.act(self.backward[place], &mut pass)?;
        }
        if keeps_parts {
            self.parameters.end_pass(&self.plan.layout, &self.model)?;
        }
        Ok(counted)
    }

    pub(super) fn act(&mut self, action: UnitAction, pass: &mut MicroBatchPass<A>) -> Result<()> {
        let Self { parameters, gradients, groups, model, plan, .. } = self;
        let layout = &plan.layout;
        match action {
            UnitAction::Gather(unit) => parameters.gather(layout, unit, groups)?,
            UnitAction::Materialise(unit) => parameters.materialise(layout, unit, groups, false, model)?,
            UnitAction::MaterialiseForGroup(unit) => {
                parameters.materialise(layout, unit, groups, true, model)?
            }
            UnitAction::Free(unit) => parameters.free(layout, unit, model)?,
            UnitAction::Forward(unit) => {
                let Some(input) = pass.current.take() else { return Ok(()) };
                let blocks = layout.units[unit].blocks.clone();
                let (output, saved) = model.forward_through(blocks, input).map_err(Error::compute)?;
                pass.saved.push(saved);
                pass.current = Some(output);
            }
            UnitAction::Backward(unit) => {
                let saved = pass.saved.pop();
                let (Some(gradient), Some(saved)) = (pass.current.take(), saved) else { return Ok(()) };
                let blocks = layout.units[unit].blocks.clone();
                let number = gradients.ended();
                let mut ready = |parameter: usize, values: Values<'_>| {
                    Ok(gradients.report(number, parameter, values, &mut groups.reduce())?)
                };
                let of_input = model.backward_through(blocks, saved, gradient, &mut ready);
                pass.current = of_input.map_err(Error::compute)?;
            }
            UnitAction::Reduce(unit) => gradients.close(gradients.ended(), unit, &mut groups.reduce())?,
        }
        Ok(())
    }

    /// Ends a step and returns the mean loss.
    fn finish(&mut self, descriptor: StepDescriptor, micro_batches: usize) -> Result<f32> {
        let mut consensus =
            StepConsensus::encode(0, self.count, descriptor, &self.updates, self.gradients.used());
        self.world.all_reduce(&mut consensus, ReduceOp::Sum).map_err(Error::communication)?;
        let consensus = StepConsensus::decode(&consensus);
        self.gradients.set_used(consensus.used());
        let count = consensus.count();
        self.gradients.finish(count, &mut self.groups.reduce())?;
        let loss = self.mean_loss(count)?;
        if count == 0 {
            return Err(Error::ZeroWeight { micro_batches });
        }
        let Self { groups, buffers, gradients, unreported, world, model, .. } = self;
        unreported.warn_once(|| without_gradient(model.infos(), |parameter| gradients.used()[parameter]));
        groups.timed(|| buffers.synchronise([world], model))?;
        Ok(loss)
    }

    /// Sums losses in the order of the gradients.
    fn mean_loss(&mut self, count: usize) -> Result<f32> {
        let mut losses = std::mem::take(&mut self.losses);
        let shards = &mut self.groups.shards;
        if self.plan.degrees.each_round {
            shards.all_reduce(&mut losses, ReduceOp::Sum).map_err(Error::communication)?;
        }
        let mut loss = [sum_of(losses)];
        let others = if self.plan.degrees.each_round { &mut self.groups.replicas } else { shards };
        others.all_reduce(&mut loss, ReduceOp::Sum).map_err(Error::communication)?;
        ValuesMut::F32(&mut loss).divide(count);
        Ok(loss[0])
    }

    /// Returns an error unless all ranks have called for the same step. Returns its number of micro-batches, with
    /// those accumulated before and those that ranks bring to a join.
    pub(super) fn agree(&mut self, descriptor: StepDescriptor, own: usize) -> Result<usize> {
        let mut consensus = StepConsensus::encode(own, 0, descriptor, &self.updates, &[]);
        self.world.all_reduce(&mut consensus, ReduceOp::Sum).map_err(Error::communication)?;
        let consensus = StepConsensus::decode(&consensus);
        if !consensus.agrees(self.world.world_size()) {
            return Err(descriptor.differ(&mut self.world, &self.updates, self.model.infos()));
        }
        self.updates.record_step();
        let micro_batches = match descriptor.call {
            TrainingCall::Join => self.micro_batches + consensus.micro_batches(),
            _ => descriptor.micro_batches,
        };
        if micro_batches == 0 && descriptor.call != TrainingCall::Accumulate {
            return Err(Error::NoMicroBatches);
        }
        Ok(micro_batches)
    }
}
