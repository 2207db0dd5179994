//! One step of a pipeline: forward, backward, and the final reductions.

use std::sync::Arc;

use dist_collectives::{Communicator, ReduceOp};

use super::consensus::{CallGroups, PipelineCall};
use super::pass::Clock;
use super::stage::Reducing;
use super::{Pipeline, ties};
use crate::engine::{BatchSource, StepAction, Work};
use crate::flat::Flat;
use crate::fsdp::{Groups, bytes_sent};
use crate::loss::WeightedLoss;
use crate::mean::Mean;
use crate::step_consensus::StepConsensus;
use crate::tree::TreeSum;
use crate::{BoxError, Error, Loss, Result, Sequence, StepDescriptor, StepReport, TrainingCall, ValuesMut};

impl<A> Pipeline<A> {
    /// Computes the mean gradients of the schedule's micro-batches, over all pipelines.
    ///
    /// `input` returns the input of a micro-batch, on the rank of the first stage. `loss` computes the [`Loss`] and
    /// its gradient from the model's output, on the rank of the last stage. The type of the loss decides between a
    /// mean over micro-batches and a weighted mean. Both receive the number of a micro-batch of this pipeline's
    /// [`share`](Self::share).
    ///
    /// `input` and `loss` run on different ranks. Take the data of a micro-batch from its number in both: iterators
    /// that advance by themselves give pipelines the same examples. [`data`](crate::data) shows that mistake and the
    /// correct form.
    ///
    /// # Errors
    /// The total weight is 0, or only some pipelines have weights: every rank gets this error, and the next step can
    /// follow. `input`, `loss`, a block or communication fails; a gradient is reported twice or differs from its
    /// parameter in type or length; an activation or its gradient has another shape than those before: the job is
    /// aborted.
    pub fn step<C: Loss>(
        &mut self,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    ) -> Result<StepReport> {
        let mut loss =
            |index, output| loss(index, output).map(|(loss, gradient)| (loss.weighted(), gradient));
        self.step_micro_batches(C::WEIGHTED, &mut input, &mut loss)
    }

    /// Takes a [step](Self::step). `weighted` is `true` if the losses have weights.
    pub(crate) fn step_micro_batches(
        &mut self,
        weighted: bool,
        input: &mut dyn FnMut(usize) -> Result<A, BoxError>,
        loss: &mut dyn FnMut(usize, A) -> Result<(WeightedLoss, A), BoxError>,
    ) -> Result<StepReport> {
        self.announce("step");
        let mut clock = Clock::new(&self.comm);
        let sent_before = self.bytes_sent();
        let actions = Arc::clone(&self.actions);
        let passed = self.compute(&actions, weighted, BatchSource::Stages { input, loss }, &mut clock);
        let micro_batches = self.calls * self.total();
        let descriptor = StepDescriptor::new(TrainingCall::Step, micro_batches, weighted);
        let result = passed.and_then(|()| clock.waiting(|| self.finish(descriptor)));
        self.computes = false;
        let loss = self.or_forget(result)?;
        self.calls = 0;
        let pass = self.passes.end_step();
        self.begin_forward(pass);
        Ok(self.report(loss, micro_batches, &clock, sent_before))
    }

    /// Computes gradients that the next step adds to its own, of as many micro-batches as the schedule has.
    ///
    /// Several calls and a step give the result of one step with all their micro-batches. If there are several
    /// pipelines, each computes its [`share`](Self::share) of each call. All micro-batches of a step have a [loss](Loss)
    /// of one type. `input` and `loss` are as in [`step`](Self::step). Their numbers begin at 0 in each call.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step). [`PartlyWeighted`](Error::PartlyWeighted) if only some micro-batches since
    /// the last step have weights.
    #[doc(alias = "no_sync")]
    pub fn accumulate<C: Loss>(
        &mut self,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    ) -> Result<()> {
        let mut loss =
            |index, output| loss(index, output).map(|(loss, gradient)| (loss.weighted(), gradient));
        self.accumulate_micro_batches(C::WEIGHTED, &mut input, &mut loss)
    }

    /// [Accumulates](Self::accumulate) micro-batches. `weighted` is `true` if the losses have weights.
    pub(crate) fn accumulate_micro_batches(
        &mut self,
        weighted: bool,
        input: &mut dyn FnMut(usize) -> Result<A, BoxError>,
        loss: &mut dyn FnMut(usize, A) -> Result<(WeightedLoss, A), BoxError>,
    ) -> Result<()> {
        self.announce("accumulate");
        let mut clock = Clock::new(&self.comm);
        let reduces = |action: &StepAction| matches!(action, StepAction::Reduce(_));
        let actions: Vec<_> = self.actions.iter().copied().filter(|action| !reduces(action)).collect();
        let passed = self.compute(&actions, weighted, BatchSource::Stages { input, loss }, &mut clock);
        let result = passed.and_then(|()| self.finish_messages());
        self.computes = false;
        self.or_forget(result)
    }

    /// Computes the micro-batches of a call, in addition to those since the last step.
    fn compute(
        &mut self,
        actions: &[StepAction],
        weighted: bool,
        source: BatchSource<'_, A>,
        clock: &mut Clock,
    ) -> Result<()> {
        self.begin();
        if self.calls > 0 && self.weighted != weighted {
            return Err(Error::PartlyWeighted);
        }
        let before = self.calls * self.schedule.micro_batches();
        let (first, block) = (self.share().start, Sequence::block as _);
        let losses = self.run(actions, first, &mut Work::Blocks { weighted, block, source }, clock)?;
        self.losses.extend(losses.into_iter().map(|(index, loss)| (before + index, loss)));
        (self.calls, self.weighted) = (self.calls + 1, weighted);
        ties::pass_on(&mut self.nodes, true)
    }

    /// Waits until the messages of a call were received.
    fn finish_messages(&mut self) -> Result<()> {
        self.links.finish()?;
        self.nodes.iter_mut().try_for_each(ties::Node::finish)
    }

    /// [Aborts](Self::or_abort) the job on an error that other ranks do not get, and drops the step on every error.
    fn or_forget<T>(&mut self, result: Result<T>) -> Result<T> {
        let ended = self.or_abort(result);
        if ended.is_err() {
            self.forget();
        }
        ended
    }

    pub(super) fn report(
        &self,
        loss: f32,
        micro_batches: usize,
        clock: &Clock,
        sent_before: u64,
    ) -> StepReport {
        StepReport {
            loss,
            micro_batches,
            elapsed: clock.now(),
            exposed: clock.waited,
            bytes_sent: self.bytes_sent() - sent_before,
        }
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        let ties = self.nodes.iter().map(ties::Node::bytes_sent).sum::<u64>();
        let CallGroups { shards, data } = &self.call_groups;
        let comms = [Some(&self.comm), shards.as_ref(), data.as_ref()].into_iter().flatten();
        comms.map(bytes_sent).sum::<u64>() + self.groups.bytes_sent() + self.links.bytes_sent() + ties
    }

    /// Starts the micro-batches of a call. If an earlier call panicked and the caller caught that, its unfinished state
    /// is dropped.
    fn begin(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
        self.spans.clear();
        self.kept_most = 0;
        self.links.begin(self.schedule.micro_batches());
        for stage in &mut self.stages {
            stage.gradients.begin_step();
            stage.buffers.record_forward();
        }
        let before = self.calls * self.schedule.micro_batches();
        self.nodes.iter_mut().for_each(|node| node.begin(before));
        self.tied_means.iter_mut().for_each(|mean| *mean = None);
    }

    /// Returns the number of micro-batches of all pipelines in a call.
    pub(super) fn total(&self) -> usize {
        self.schedule.micro_batches() * self.replica_position().1
    }

    /// Finishes a step after all actions: means of ties, gradients and losses. Returns the mean loss.
    fn finish(&mut self, descriptor: StepDescriptor) -> Result<f32> {
        let mut tied = self.start_ties()?;
        let own = sum(std::mem::take(&mut self.losses));
        let (loss, count) = self.agree_on_step(own, descriptor, &mut tied)?;
        self.updates.record_step();
        let groups = &mut self.groups;
        self.stages.iter_mut().try_for_each(|stage| stage.gradients.finish(count, &mut groups.reduce()))?;
        for (tie, sum) in tied.into_iter().enumerate() {
            if let Some((sum, used)) = sum {
                let dtype = self.infos[self.ties[tie].parameter].dtype;
                self.tied_means[tie] = Some(Mean::of(sum.wait()?, dtype, count)).filter(|_| used);
            }
        }
        self.finish_messages()?;
        self.synchronise_buffers()?;
        let mut unreported = std::mem::take(&mut self.unreported);
        unreported.warn_once(|| self.without_gradient());
        self.unreported = unreported;
        Ok(loss)
    }

    /// Synchronises the buffers of this rank's stages with those of the ranks that have the same stages.
    fn synchronise_buffers(&mut self) -> Result<()> {
        let Self { stages, groups: Groups { shards, replicas, .. }, .. } = self;
        stages
            .iter_mut()
            .try_for_each(|stage| stage.buffers.synchronise([&mut *shards, &mut *replicas], &mut stage.model))
    }

    /// Starts to reduce the sums of ties whose first stage is on this rank. Returns for each tie whether a
    /// micro-batch had a gradient.
    fn start_ties(&mut self) -> Result<Vec<Option<(Reducing, bool)>>> {
        let mut tied: Vec<_> = (0..self.tied_means.len()).map(|_| None).collect();
        for node in self.nodes.iter_mut().filter(|node| node.is_first()) {
            if let Some((sum, used)) = node.take() {
                let Groups { shards, replicas, .. } = &mut self.groups;
                let sum = Reducing::start(sum, shards).wait()?;
                tied[node.tie] = Some((Reducing::start(sum, replicas), used));
            }
        }
        Ok(tied)
    }

    /// Agrees with all ranks of all pipelines on the step. Returns the mean loss of all micro-batches and their total
    /// weight, and combines which parameters have had a gradient.
    ///
    /// Only the ranks of the last stage have losses. Those of all pipelines are added first, and the sums then in the
    /// canonical order.
    fn agree_on_step(
        &mut self,
        (loss, count): WeightedLoss,
        descriptor: StepDescriptor,
        tied: &mut [Option<(Reducing, bool)>],
    ) -> Result<(f32, usize)> {
        let is_last = self.comm.rank() == self.last_rank();
        let of_ties = tied.iter_mut().flatten().map(|(_, used)| used);
        let of_stages = self.stages.iter_mut().flat_map(|stage| stage.gradients.used_mut());
        let flags: Vec<&mut bool> = of_stages.chain(of_ties).collect();
        let used: Vec<bool> = flags.iter().map(|used| **used).collect();
        let computed = if is_last { self.calls * self.schedule.micro_batches() } else { 0 };
        let mut numbers = StepConsensus::encode(computed, count, descriptor, &self.updates, &used);
        let mut loss = [loss];
        let Groups { shards, replicas, .. } = &mut self.groups;
        for group in [shards, replicas] {
            if is_last {
                group.all_reduce(&mut loss, ReduceOp::Sum).map_err(Error::communication)?;
            }
            group.all_reduce(&mut numbers, ReduceOp::Sum).map_err(Error::communication)?;
        }
        flags.into_iter().zip(StepConsensus::decode(&numbers).used()).for_each(|(own, used)| *own = used);
        // One rank of each pipeline has the loss, so a sum of its bits passes it on.
        numbers.truncate(StepConsensus::TOTALS);
        numbers.push(if is_last { loss[0].to_bits().into() } else { 0 });
        self.comm.all_reduce(&mut numbers, ReduceOp::Sum).map_err(Error::communication)?;
        let bits =
            numbers.pop().and_then(|bits| u32::try_from(bits).ok()).expect("it was made of as many bits");
        let consensus = StepConsensus::decode(&numbers);
        if !consensus.agrees(self.schedule.ranks() * self.replica_position().1) {
            return Err(self.calls_differ(PipelineCall { name: "step", descriptor: Some(descriptor) }));
        }
        let count = consensus.divisor(descriptor)?;
        let mut loss = [f32::from_bits(bits)];
        ValuesMut::F32(&mut loss).divide(count);
        Ok((loss[0], count))
    }

    /// Returns the rank of the last stage.
    pub(super) fn last_rank(&self) -> usize {
        self.schedule.placement()[self.schedule.stages() - 1]
    }
}

/// Returns the sum of the losses of all micro-batches in the canonical order, and their total weight.
fn sum(losses: Vec<(usize, WeightedLoss)>) -> WeightedLoss {
    let mut sum = TreeSum::new();
    let add = |left: &mut WeightedLoss, right: WeightedLoss| {
        *left = (left.0 + right.0, left.1.saturating_add(right.1));
    };
    losses.into_iter().for_each(|(index, loss)| sum.add(index, loss, add));
    sum.finish(add).unwrap_or_default()
}

impl Reducing {
    fn start(sum: Flat, group: &mut Communicator) -> Self {
        if group.world_size() > 1 { Self::There(sum.start_sum(group)) } else { Self::Here(sum) }
    }
}
