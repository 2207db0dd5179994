//! One step of sharded training: the plan's actions for each of this rank's micro-batches.

use super::order::UnitAction;
use super::{Fsdp, Plan};
use crate::engine::StepEngine;
use crate::loss::WeightedLoss;
use crate::step_consensus::{STEP, TrainingCall};
use crate::trainer::{BatchFn, Batches, with_batches};
use crate::{BoxError, Error, Loss, Result, Saved, Sequence, StepReport, Values};

/// The actions of a micro-batch on the units of a model.
pub(super) struct BlockActions {
    forward: Vec<UnitAction>,
    backward: Vec<UnitAction>,
    /// The actions of a forward without a backward.
    forward_alone: Vec<UnitAction>,
}

/// The state of one micro-batch.
struct MicroBatchPass<A> {
    /// The output of the last block. `None` if this rank has no micro-batch, or if the last gradient was not needed.
    current: Option<A>,
    /// The activations that each unit's blocks save for their backward.
    saved: Vec<Vec<Saved>>,
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
        with_batches(batch, |batches| self.step_batches(micro_batches, batches))
    }

    /// Takes a [step](Self::step).
    pub(crate) fn step_batches(
        &mut self,
        micro_batches: usize,
        Batches { weighted, next }: Batches<'_, A>,
    ) -> Result<StepReport> {
        self.engine.world.announce(STEP, "step");
        let Self { engine, actions } = self;
        engine.begin_to_compute();
        let descriptor = engine.descriptor(TrainingCall::Step, micro_batches, weighted);
        engine.step(descriptor, micro_batches, &mut |engine, index| actions.round(engine, index, next))
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
        with_batches(batch, |batches| self.join_batches(own, batches))
    }

    /// [Joins](Self::join) with this rank's own micro-batches.
    pub(crate) fn join_batches(
        &mut self,
        own: usize,
        Batches { weighted, next }: Batches<'_, A>,
    ) -> Result<Option<StepReport>> {
        self.engine.world.announce(STEP, "join");
        let Self { engine, actions } = self;
        engine.join(own, weighted, &mut |engine, index| actions.round(engine, index, next))
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
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| self.accumulate_batches(micro_batches, batches))
    }

    /// [Accumulates](Self::accumulate) micro-batches.
    pub(crate) fn accumulate_batches(
        &mut self,
        micro_batches: usize,
        Batches { weighted, next }: Batches<'_, A>,
    ) -> Result<()> {
        self.engine.world.announce(STEP, "accumulate");
        let Self { engine, actions } = self;
        engine.accumulate(micro_batches, weighted, &mut |engine, index| actions.round(engine, index, next))
    }

    /// Computes the mean gradients of the accumulated micro-batches.
    ///
    /// # Errors
    /// Nothing was accumulated, and the errors of [`step`](Self::step).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.engine.world.announce(STEP, "synchronise");
        self.engine.synchronise()
    }

    /// Starts to gather the first units of the next forward. Otherwise the forward itself does. Nothing happens if
    /// this rank shares its replica with no other, as in a world of one. Every rank calls this.
    ///
    /// # Errors
    /// The strategy does not shard parameters. There is no memory. An earlier prefetch is unused: a forward uses it.
    /// An [update](Self::update), [`set_shard`](Self::set_shard), [`for_each_parameter`](Self::for_each_parameter) or
    /// loading a checkpoint frees it.
    pub fn prefetch(&mut self) -> Result<()> {
        self.engine.announce("prefetch");
        let Self { engine, actions } = self;
        if !engine.plan.options.strategy.shards_parameters() {
            return Err(Error::Prefetch { reason: "every rank has all parameters" });
        }
        if engine.prefetched.is_some() {
            return Err(Error::Prefetch { reason: "an earlier prefetch has not been used by a forward" });
        }
        engine.follow();
        let mut taken = 0;
        while let Some(&UnitAction::Gather(unit)) = actions.forward.get(taken) {
            let gathered = engine.parameters.gather(&engine.plan.layout, unit, &mut engine.groups);
            engine.or_abort(gathered)?;
            taken += 1;
        }
        engine.prefetched = Some(taken);
        Ok(())
    }
}

impl BlockActions {
    pub(super) fn new(plan: &Plan) -> Self {
        let (policy, layout) = (plan.uses(), &plan.layout);
        Self {
            forward: policy.forward(layout, true),
            backward: policy.backward(layout),
            forward_alone: policy.forward(layout, false),
        }
    }

    /// Runs one micro-batch, or the part of the other ranks' micro-batches that needs this rank.
    fn round<A>(
        &self,
        engine: &mut StepEngine<Sequence<A>>,
        index: Option<usize>,
        batch: &mut BatchFn<'_, A>,
    ) -> Result<WeightedLoss> {
        let (input, loss) = index.map(batch).transpose().map_err(Error::compute)?.unzip();
        // After an update, only the optimizer's shard of a replicated parameter has an effect.
        let keeps_parts = engine.plan.degrees.shards > 1 && !engine.plan.degrees.frees;
        if keeps_parts {
            engine.parameters.begin_pass(&engine.plan.layout, &engine.model)?;
        }
        let mut pass = MicroBatchPass { current: input, saved: Vec::new() };
        let prefetched = engine.prefetched.take().unwrap_or(0);
        self.forward[prefetched..].iter().try_for_each(|&action| pass.act(action, engine))?;
        // The first units of the backward are gathered while the loss is computed.
        let ahead = self.backward.iter().take_while(|action| matches!(action, UnitAction::Gather(_))).count();
        self.backward[..ahead].iter().try_for_each(|&action| pass.act(action, engine))?;
        // Without a micro-batch, the loss is neutral and the sum does not depend on it.
        let mut counted = (-0.0, 0);
        if let (Some(loss), Some(output)) = (loss, pass.current.take()) {
            let (loss, gradient) = loss(output).map_err(Error::compute)?;
            (counted, pass.current) = (loss, Some(gradient));
        }
        self.backward[ahead..].iter().try_for_each(|&action| pass.act(action, engine))?;
        if keeps_parts {
            engine.parameters.end_pass(&engine.plan.layout, &engine.model)?;
        }
        Ok(counted)
    }

    /// Runs a forward with an input, or the part of the other ranks' forward that needs this rank.
    pub(super) fn forward_alone<A>(
        &self,
        engine: &mut StepEngine<Sequence<A>>,
        input: Option<A>,
    ) -> Result<Option<A>> {
        let mut pass = MicroBatchPass { current: input, saved: Vec::new() };
        let prefetched = engine.prefetched.take().unwrap_or(0);
        for &action in &self.forward_alone[prefetched..] {
            pass.act(action, engine)?;
            pass.saved.clear();
        }
        Ok(pass.current)
    }
}

impl<A> MicroBatchPass<A> {
    /// Executes one action.
    fn act(&mut self, action: UnitAction, engine: &mut StepEngine<Sequence<A>>) -> Result<()> {
        let StepEngine { parameters, gradients, groups, model, plan, .. } = engine;
        let layout = &plan.layout;
        match action {
            UnitAction::Gather(unit) => parameters.gather(layout, unit, groups)?,
            UnitAction::Materialise(unit) => parameters.materialise(layout, unit, groups, false, model)?,
            UnitAction::MaterialiseForGroup(unit) => {
                parameters.materialise(layout, unit, groups, true, model)?
            }
            UnitAction::Free(unit) => parameters.free(layout, unit, model)?,
            UnitAction::Forward(unit) => {
                let Some(input) = self.current.take() else { return Ok(()) };
                let blocks = layout.units[unit].blocks.clone();
                let (output, saved) = model.forward_through(blocks, input).map_err(Error::compute)?;
                self.saved.push(saved);
                self.current = Some(output);
            }
            UnitAction::Backward(unit) => {
                let saved = self.saved.pop();
                let (Some(gradient), Some(saved)) = (self.current.take(), saved) else { return Ok(()) };
                let blocks = layout.units[unit].blocks.clone();
                let number = gradients.ended();
                let mut ready = |parameter: usize, values: Values<'_>| {
                    Ok(gradients.report(number, parameter, values, &mut groups.reduce())?)
                };
                let of_input = model.backward_through(blocks, saved, gradient, &mut ready);
                self.current = of_input.map_err(Error::compute)?;
            }
            UnitAction::Reduce(unit) => gradients.close(gradients.ended(), unit, &mut groups.reduce())?,
        }
        Ok(())
    }
}
