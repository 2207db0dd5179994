//! A step of any strategy: its agreement, its micro-batches, and the means over all ranks.

use dist_collectives::ReduceOp;

use super::interpreter::{Interpreter, PassInput};
use super::work::{AssignedMicroBatch, Work};
use super::{Agreement, Stage, StepAction, StepEngine};
use crate::evaluation::EvaluationLosses;
use crate::fsdp::{Groups, share};
use crate::gradients::RoundRole;
use crate::loss::WeightedLoss;
use crate::pipeline::{ComparedCall, PipelineState};
use crate::step_consensus::{STEP, StepConsensus, StepDescriptor, TrainingCall};
use crate::trainer::Computation;
use crate::tree::sum_of;
use crate::{BoxError, Error, Params, Result, StepReport, ValuesMut};

impl<M: Params> StepEngine<M> {
    /// Returns a rank's contiguous share of a number of micro-batches.
    pub(crate) fn share(&self, micro_batches: usize) -> std::ops::Range<usize> {
        share(micro_batches, self.world.world_size(), self.world.rank())
    }

    /// Starts to compute gradients. If an earlier computation panicked and the caller caught that, its unfinished
    /// gradients are dropped.
    pub(crate) fn begin_to_compute(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
    }

    /// Announces a call that computes micro-batches, so that a rank in another call gets an error. Calls of kind
    /// [`STEP`] compare their descriptors before an error can abort the job.
    fn announce_call(&mut self, call: TrainingCall, name: &'static str) {
        match (self.agreement, call) {
            _ if self.pipeline.is_some() => self.announce(name),
            (Agreement::AtEnd, TrainingCall::Evaluation) => self.announce(name),
            // The rank makes the call alone.
            (Agreement::OwnRank, _) | (Agreement::AtEnd, TrainingCall::Accumulate) => {}
            (Agreement::AtEnd | Agreement::BeforeRounds, _) => self.world.announce(STEP, name),
        }
    }

    /// Returns the descriptor of a call with `micro_batches` more micro-batches.
    pub(crate) const fn descriptor(
        &self,
        call: TrainingCall,
        micro_batches: usize,
        weighted: bool,
    ) -> StepDescriptor {
        StepDescriptor::new(call, self.micro_batches + micro_batches, weighted)
    }

    /// Takes a step of `micro_batches` micro-batches of all ranks.
    pub(crate) fn step<A>(&mut self, micro_batches: usize, work: Work<'_, '_, M, A>) -> Result<StepReport> {
        self.announce_call(TrainingCall::Step, "step");
        self.begin_to_compute();
        let descriptor = self.descriptor(TrainingCall::Step, micro_batches, work.weighted());
        self.step_of(descriptor, micro_batches, work)
    }

    /// Takes a step. `given` is the number of its micro-batches on all ranks or, for a join, on this rank. The caller
    /// has called [`begin_to_compute`](Self::begin_to_compute).
    pub(crate) fn step_of<A>(
        &mut self,
        descriptor: StepDescriptor,
        given: usize,
        mut work: Work<'_, '_, M, A>,
    ) -> Result<StepReport> {
        self.reported(|engine| {
            let result = engine.rounds(descriptor, given, &mut work).and_then(|()| engine.finish(descriptor));
            let totals = engine.or_forget(result)?;
            (engine.micro_batches, engine.weighted) = (0, false);
            let pass = engine.passes.end_step();
            engine.begin_forward(pass);
            Ok(totals)
        })
    }

    /// Joins with `own` micro-batches of this rank. Returns `None` if no rank has any.
    pub(crate) fn join<A>(&mut self, own: usize, work: Work<'_, '_, M, A>) -> Result<Option<StepReport>> {
        self.announce_call(TrainingCall::Join, "join");
        self.begin_to_compute();
        match self.step_of(StepDescriptor::new(TrainingCall::Join, 0, work.weighted()), own, work) {
            Ok(report) => Ok(Some(report)),
            Err(Error::NoMicroBatches) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Computes gradients that the next step adds to its own.
    pub(crate) fn accumulate<A>(&mut self, micro_batches: usize, mut work: Work<'_, '_, M, A>) -> Result<()> {
        self.announce_call(TrainingCall::Accumulate, "accumulate");
        self.begin_to_compute();
        let descriptor = self.descriptor(TrainingCall::Accumulate, micro_batches, work.weighted());
        let result = self.rounds(descriptor, micro_batches, &mut work);
        self.or_forget(result)?;
        (self.micro_batches, self.weighted) = (descriptor.micro_batches, descriptor.weighted);
        Ok(())
    }

    /// Ends the computation of gradients, and drops them on every error.
    fn or_forget<T>(&mut self, result: Result<T>) -> Result<T> {
        self.computes = false;
        self.or_abort(result).inspect_err(|_| self.forget())
    }

    /// Computes the mean gradients of the accumulated micro-batches.
    pub(crate) fn synchronise(&mut self) -> Result<StepReport> {
        self.announce_call(TrainingCall::Step, "synchronise");
        self.begin_to_compute();
        let descriptor = self.descriptor(TrainingCall::Step, 0, self.weighted);
        let nothing = Computation { weighted: self.weighted, compute: &mut |_, _, _| Ok((-0.0, 0)) };
        self.step_of(descriptor, 0, Work::from(nothing))
    }

    /// Runs `compute`, which returns the mean loss and the number of micro-batches, and reports its time and bytes.
    fn reported(&mut self, compute: impl FnOnce(&mut Self) -> Result<(f32, usize)>) -> Result<StepReport> {
        let (started, sent_before) = (self.world.runtime().now(), self.bytes_sent());
        self.groups.take_waited();
        let (loss, micro_batches) = compute(self)?;
        let elapsed = self.world.runtime().now().saturating_sub(started);
        let (exposed, bytes_sent) = (self.groups.take_waited(), self.bytes_sent() - sent_before);
        Ok(StepReport { loss, micro_batches, elapsed, exposed, bytes_sent })
    }

    /// Computes the micro-batches of one call.
    fn rounds<A>(
        &mut self,
        descriptor: StepDescriptor,
        given: usize,
        work: &mut Work<'_, '_, M, A>,
    ) -> Result<()> {
        if self.micro_batches > 0 && self.weighted != descriptor.weighted {
            return Err(Error::PartlyWeighted);
        }
        let joins = descriptor.call == TrainingCall::Join;
        // The ranks of a pipeline compute the same micro-batches, so they agree on them before.
        if self.agreement == Agreement::BeforeRounds || (joins && self.pipeline.is_some()) {
            self.agree(descriptor, if joins { given } else { 0 })?;
        }
        self.follow();
        self.stages.iter_mut().for_each(|stage| stage.gradients.begin_step());
        self.of_call = (0.0, 0);
        match self.pipeline {
            Some(_) => self.run_schedule(descriptor.call, given, work)?,
            None => self.run_rounds(descriptor.call, given, work)?,
        }
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| {
            stage.gradients.rest();
            stage.parameters.rest(groups)
        })
    }

    /// Runs the rounds of a rank whose model is not divided into stages.
    fn run_rounds<A>(
        &mut self,
        call: TrainingCall,
        given: usize,
        work: &mut Work<'_, '_, M, A>,
    ) -> Result<()> {
        let (joins, last) = (call == TrainingCall::Join, call != TrainingCall::Accumulate);
        let assignment = self.stage().plan.assignment(self.world.rank());
        let rounds = if joins { self.rounds_of_replica(given)? } else { assignment.rounds(given) };
        for round in 0..rounds {
            let own = Some(round).filter(|&round| round < given);
            let index = if joins { own } else { assignment.micro_batch(given, round) };
            let in_step = index.map_or(0, |index| self.number_in_step(call, index));
            let assigned = AssignedMicroBatch {
                index,
                number: self.stage().gradients.ended(),
                role: RoundRole::new(index.is_some(), last && round + 1 == rounds),
                pass: self.passes.in_step(in_step),
            };
            let loss = self.round(work, assigned)?;
            self.record_loss(index.is_some(), loss);
        }
        Ok(())
    }

    /// Records the loss of a micro-batch or of a round without one.
    pub(crate) fn record_loss(&mut self, is_computed: bool, (loss, count): WeightedLoss) {
        self.computed += usize::from(is_computed);
        self.losses.push(loss);
        self.count = self.count.saturating_add(count);
        self.of_call = (self.of_call.0 + loss, self.of_call.1.saturating_add(count));
    }

    /// Computes one round of a step.
    fn round<A>(
        &mut self,
        work: &mut Work<'_, '_, M, A>,
        assigned: AssignedMicroBatch,
    ) -> Result<WeightedLoss> {
        // After an update, only the optimizer's shard of a replicated parameter has an effect.
        let degrees = self.stage().plan.degrees;
        let keeps_parts = degrees.shards > 1 && !degrees.frees;
        if !keeps_parts {
            return self.interpret_round(work, assigned);
        }
        let Stage { parameters, plan, model, .. } = self.stage_mut();
        parameters.begin_pass(&plan.layout, model)?;
        let loss = self.interpret_round(work, assigned)?;
        let Stage { parameters, plan, model, .. } = self.stage_mut();
        parameters.end_pass(&plan.layout, model)?;
        Ok(loss)
    }

    /// Executes the actions of one micro-batch or, if this rank has none, its part in those of other ranks. Returns the
    /// loss. Without a micro-batch, it is neutral and no sum depends on it.
    fn interpret_round<A>(
        &mut self,
        work: &mut Work<'_, '_, M, A>,
        assigned: AssignedMicroBatch,
    ) -> Result<WeightedLoss> {
        let actions = self.actions.of(work);
        // A prefetch has executed the first actions.
        let prefetched = self.prefetched.take().unwrap_or(0);
        let losses = self.interpret(&actions[prefetched..], work, &|_| assigned)?;
        Ok(losses.first().map_or((-0.0, 0), |(_, loss)| *loss))
    }

    /// Executes a list of actions. Returns the losses that this rank has computed, by the numbers of their micro-batches
    /// in the list.
    pub(crate) fn interpret<A>(
        &mut self,
        actions: &[StepAction],
        work: &mut Work<'_, '_, M, A>,
        assigned: &dyn Fn(usize) -> AssignedMicroBatch,
    ) -> Result<Vec<(usize, WeightedLoss)>> {
        let Self { stages, groups, pipeline, .. } = self;
        let last = pipeline.as_ref().map_or(0, PipelineState::last_stage);
        let pipeline = pipeline.as_mut().zip(work.activations());
        let trains = work.trains();
        let pipeline = pipeline.map(|(pipeline, activations)| pipeline.pass(activations, trains));
        Interpreter::new(stages, groups, last, PassInput { work, assigned }, pipeline).run(actions)
    }

    /// Takes a step of this rank by the user's own code, which also updates the parameters. Returns the loss and its
    /// weight. The caller records whether the model has gone forward.
    pub(crate) fn own_step(
        &mut self,
        step: &mut dyn FnMut(&mut M) -> Result<WeightedLoss, BoxError>,
    ) -> Result<WeightedLoss> {
        let (index, pass) = (Some(0), self.passes.in_step(self.world.rank()));
        let number = self.stage().gradients.ended();
        let assigned = AssignedMicroBatch { index, number, role: RoundRole::Inner, pass };
        self.interpret_round::<()>(&mut Work::OwnStep(step), assigned)
    }

    /// Returns the number of a micro-batch of a call in its step.
    fn number_in_step(&self, call: TrainingCall, index: usize) -> usize {
        let in_call = match call {
            TrainingCall::Join => index * self.world.world_size() + self.world.rank(),
            _ => index,
        };
        self.micro_batches + in_call
    }

    /// Returns the number of rounds of a join of this rank's replica: the largest `own` of its ranks.
    fn rounds_of_replica(&mut self, own: usize) -> Result<usize> {
        let mut most = [own as u64];
        let degrees = self.stage().plan.degrees;
        if degrees.each_round && degrees.shards > 1 {
            self.groups.shards.all_reduce(&mut most, ReduceOp::Max).map_err(Error::communication)?;
        }
        Ok(usize::try_from(most[0]).unwrap_or(usize::MAX))
    }

    /// Ends a step. Returns the mean loss and the number of micro-batches of all ranks.
    fn finish(&mut self, descriptor: StepDescriptor) -> Result<(f32, usize)> {
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.gradients.start_reductions(&mut groups.reduce()))?;
        let ties = self.sum_ties()?;
        let (computed, count) = (std::mem::take(&mut self.computed), std::mem::take(&mut self.count));
        let is_own = self.agreement == Agreement::OwnRank;
        let descriptor = match is_own {
            true => StepDescriptor { micro_batches: computed, ..descriptor },
            false => descriptor,
        };
        let of_stages = self.stages.iter().flat_map(|stage| stage.gradients.used());
        let used: Vec<bool> = of_stages.copied().chain(ties.iter().map(|tie| tie.used)).collect();
        let mut numbers = StepConsensus::encode(computed, count, descriptor, &self.updates, &used);
        let summed = self.waiting(|engine| engine.sum_numbers(&mut numbers));
        // A failed hook has aborted the job: its own error says why.
        if summed.is_err() && self.groups.hook.is_some() {
            self.finish_gradients(1)?;
        }
        let early = summed?;
        let consensus = StepConsensus::decode(&numbers);
        let divisor = match consensus.agrees(if is_own { 1 } else { self.rank_count() }) {
            true => consensus.divisor(descriptor),
            false => Err(self.steps_differ(descriptor)),
        };
        // Without shards, the world's communicator is free while gradients are reduced.
        let early = match early {
            None if self.groups.shards.world_size() == 1 => Some(self.sum_of_losses()?),
            early => early,
        };
        self.finish_gradients(divisor.as_ref().copied().unwrap_or(1))?;
        let loss = early.map_or_else(|| self.sum_of_losses(), Ok)?;
        let divisor = divisor?;
        let mut used = consensus.used();
        for Stage { gradients, .. } in &mut self.stages {
            gradients.set_used(used.by_ref().take(gradients.used().len()));
        }
        self.finish_ties(ties, used, divisor);
        if self.agreement != Agreement::BeforeRounds {
            self.updates.record_step();
        }
        let mut loss = [loss];
        ValuesMut::F32(&mut loss).divide(divisor);
        if !is_own {
            self.waiting(Self::synchronise_buffers)?;
        }
        let mut unreported = std::mem::take(&mut self.unreported);
        unreported.warn_once(|| self.without_gradient());
        self.unreported = unreported;
        Ok((loss[0], consensus.micro_batches()))
    }

    /// Runs `wait` and adds its duration to the waiting time.
    pub(crate) fn waiting<T>(&mut self, wait: impl FnOnce(&mut Self) -> T) -> T {
        let began = self.world.runtime().now();
        let done = wait(self);
        self.groups.add_waited(self.world.runtime().now().saturating_sub(began));
        done
    }

    /// Sums the numbers of a step over all ranks. Returns the sum of the losses of all ranks if a pipeline has sent it
    /// along.
    fn sum_numbers(&mut self, numbers: &mut [i64]) -> Result<Option<f32>> {
        match (&self.pipeline, self.agreement) {
            (Some(_), _) => return self.sum_over_pipelines(numbers).map(Some),
            (None, Agreement::OwnRank) => {}
            (None, Agreement::BeforeRounds | Agreement::AtEnd) => {
                self.world.all_reduce(numbers, ReduceOp::Sum).map_err(Error::communication)?;
            }
        }
        Ok(None)
    }

    /// Waits for the means of all gradients, and for the messages between stages.
    fn finish_gradients(&mut self, divisor: usize) -> Result<()> {
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.gradients.finish(divisor, &mut groups.reduce()))?;
        self.waiting(Self::finish_messages)
    }

    /// Synchronises the buffers of this rank's stages with those of the ranks that have the same stages.
    fn synchronise_buffers(&mut self) -> Result<()> {
        let Self { stages, world, groups: Groups { shards, replicas, .. }, pipeline, .. } = self;
        let is_pipeline = pipeline.is_some();
        stages.iter_mut().try_for_each(|Stage { buffers, model, .. }| match is_pipeline {
            true => buffers.synchronise([&mut *shards, &mut *replicas], model),
            false => buffers.synchronise([&mut *world], model),
        })
    }

    /// Returns the number of ranks that take a step together.
    fn rank_count(&self) -> usize {
        let Groups { shards, replicas, .. } = &self.groups;
        match self.pipeline {
            Some(_) => self.world.world_size() * shards.world_size() * replicas.world_size(),
            None => self.world.world_size(),
        }
    }

    /// Returns the error of ranks that have called for different steps or have updated their parameters differently.
    fn steps_differ(&mut self, descriptor: StepDescriptor) -> Error {
        self.calls_differ(ComparedCall { name: "step", descriptor: Some(descriptor) })
    }

    /// Sums the losses of all ranks in the order of the gradients.
    fn sum_of_losses(&mut self) -> Result<f32> {
        let mut losses = std::mem::take(&mut self.losses);
        let degrees = self.stage().plan.degrees;
        let sharded = degrees.shards > 1;
        let shards = &mut self.groups.shards;
        if sharded && degrees.each_round {
            shards.all_reduce(&mut losses, ReduceOp::Sum).map_err(Error::communication)?;
        }
        let mut loss = [sum_of(losses)];
        let others = match (sharded, degrees.each_round) {
            (false, _) if self.agreement == Agreement::OwnRank => &mut self.groups.replicas,
            (false, _) => &mut self.world,
            (true, true) => &mut self.groups.replicas,
            (true, false) => shards,
        };
        others.all_reduce(&mut loss, ReduceOp::Sum).map_err(Error::communication)?;
        Ok(loss[0])
    }

    /// Returns an error unless all ranks have called for the same step, and have any micro-batches.
    fn agree(&mut self, descriptor: StepDescriptor, own: usize) -> Result<()> {
        if self.pipeline.is_some() {
            return self.agree_in_pipelines(descriptor, own);
        }
        let mut consensus = StepConsensus::encode(own, 0, descriptor, &self.updates, &[]);
        let group = match self.agreement {
            Agreement::BeforeRounds | Agreement::OwnRank => &mut self.world,
            // A rank that takes a step instead waits in the world's communicator. Both then wait, and their
            // announced calls are compared.
            Agreement::AtEnd => &mut self.groups.replicas,
        };
        group.all_reduce(&mut consensus, ReduceOp::Sum).map_err(Error::communication)?;
        let consensus = StepConsensus::decode(&consensus);
        if !consensus.agrees(self.world.world_size()) {
            return Err(self.steps_differ(descriptor));
        }
        self.updates.record_step();
        let micro_batches = match descriptor.call {
            TrainingCall::Join => self.micro_batches + consensus.micro_batches(),
            _ => descriptor.micro_batches,
        };
        match micro_batches {
            0 if descriptor.call != TrainingCall::Accumulate => Err(Error::NoMicroBatches),
            _ => Ok(()),
        }
    }

    /// Runs one forward of an evaluation on every rank, outside of the calls that are counted.
    pub(crate) fn forward<A>(&mut self, mut work: Work<'_, '_, M, A>) -> Result<()> {
        let (index, role, pass) = (Some(0), RoundRole::Inner, self.passes.outside());
        let assigned = AssignedMicroBatch { index, number: 0, role, pass };
        self.interpret_round(&mut work, assigned)?;
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.parameters.rest(groups))
    }

    /// Evaluates micro-batches and returns their mean loss, on all ranks.
    pub(crate) fn evaluate<A>(
        &mut self,
        micro_batches: usize,
        mut work: Work<'_, '_, M, A>,
    ) -> Result<StepReport> {
        self.announce_call(TrainingCall::Evaluation, "evaluate");
        let descriptor = StepDescriptor::new(TrainingCall::Evaluation, micro_batches, work.weighted());
        self.reported(|engine| {
            // If every rank gets the error, nothing has changed.
            let result = engine.try_evaluate(descriptor, &mut work);
            engine.or_abort(result).map(|loss| (loss, micro_batches))
        })
    }

    fn try_evaluate<A>(&mut self, descriptor: StepDescriptor, work: &mut Work<'_, '_, M, A>) -> Result<f32> {
        let micro_batches = descriptor.micro_batches;
        self.follow();
        self.agree(descriptor, 0)?;
        let losses = match self.pipeline {
            Some(_) => self.run_forwards(work, micro_batches)?,
            None => self.evaluate_rounds(work, micro_batches)?,
        };
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.parameters.rest(groups))?;
        self.begin_forward(self.passes.outside());
        self.waiting(|engine| match engine.pipeline {
            Some(_) => engine.mean_of_evaluation(losses),
            None => losses.mean(&mut engine.world),
        })
    }

    /// Computes this rank's losses of an evaluation in rounds.
    fn evaluate_rounds<A>(
        &mut self,
        work: &mut Work<'_, '_, M, A>,
        micro_batches: usize,
    ) -> Result<EvaluationLosses> {
        let mut losses = EvaluationLosses::new(micro_batches);
        let assignment = self.stage().plan.assignment(self.world.rank());
        for round in 0..assignment.rounds(micro_batches) {
            let index = assignment.micro_batch(micro_batches, round);
            let pass = self.passes.in_evaluation(index.unwrap_or(0));
            let assigned = AssignedMicroBatch { index, number: 0, role: RoundRole::Inner, pass };
            let loss = self.interpret_round(work, assigned)?;
            index.into_iter().for_each(|index| losses.add(index, loss));
        }
        Ok(losses)
    }
}
