//! Data-parallel training: every rank has a replica of the model and computes a share of the micro-batches.

mod accumulate;
mod evaluate;
mod join;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use crate::abort::or_abort;
use crate::broadcast::broadcast;
use crate::buffers::Buffers;
use crate::flat;
use crate::fsdp::{bytes_sent, share};
use crate::gradients::{GradientLayout, GradientMemory, Gradients, ReduceGroups, Role, Scatter};
use crate::hook_worker::HookWorker;
use crate::loss::WeightedLoss;
use crate::pass::Passes;
use crate::step_consensus::{STEP, StepConsensus, StepDescriptor, TrainingCall};
use crate::tree::TreeSum;
use crate::unreported::{Unreported, without_gradient};
use crate::updates::Updates;
use crate::{
    Block, BoxError, BucketBytes, BucketHook, BucketPlan, Error, Loss, Optimizer, Params, Pass, Ready,
    Result, Values, ValuesMut, agreement, mutation_check, norm, params,
};

/// Distributed data-parallel training (DDP).
///
/// Every rank has the whole model and computes a share of each step's micro-batches. All ranks then have the same
/// mean gradients, so their trained parameters stay equal. A [buffer](crate::ParamInfo::buffer), such as a running
/// mean, is synchronised at the end of every step. A block that changes a frozen parameter changes it on its own rank
/// only. A checkpoint has the frozen parameters of rank 0.
///
/// # Reproducible sums
///
/// Gradients and losses are summed in the canonical order: the tree T(n) = T(largest power of two below n) + T(rest).
/// The sum runs over this rank's micro-batches first and then over the ranks. It is divided once, by the number of
/// micro-batches or by their [weight](crate::Loss). Therefore:
///
/// * If every rank's [`share`](Self::share) is the same power of two, the result has the bits that one process
///   computes.
/// * With other shares, also uneven and empty ones, every rank and every run gives the same bits.
/// * In both cases the bits do not depend on bucket sizes, timing or transport.
///
/// This requires a communicator with canonical [`ReductionOrder`](dist_collectives::ReductionOrder), which is the
/// default.
///
/// # Overlap of communication
///
/// Gradients lie in the buckets of a [`BucketPlan`]. During the backward of a step's last micro-batch, each bucket is
/// reduced as soon as its last gradient is final, in the order of the plan. If a backward does not report a gradient,
/// it counts as zero in this micro-batch. A parameter without a gradient in any micro-batch has no mean gradient.
///
/// With a [hook](Self::with_hook), a worker thread compresses and sums the buckets, in the same order.
///
/// The communicator's timeout for a bucket begins when its reduction is launched. The rest of the backward and this
/// rank's lead over the slowest rank must fit into it.
///
/// # Errors
///
/// An error on one rank aborts the job, so that no other rank waits for it. These errors occur on every rank alike
/// and do not abort it:
///
/// * [`StepsDiffer`](Error::StepsDiffer): the ranks called for different numbers of micro-batches, only some passed
///   weights, or only some called [`join`](Self::join).
/// * [`SettingsDiffer`](Error::SettingsDiffer): the ranks have updated or clipped with different settings since the
///   last step.
/// * [`AccumulatedDiffers`](Error::AccumulatedDiffers): the ranks accumulated different micro-batches.
/// * [`NoMicroBatches`](Error::NoMicroBatches): all ranks called for no micro-batch.
/// * [`ZeroWeight`](Error::ZeroWeight): all micro-batches have weight 0.
///
/// Accumulated gradients are then dropped, but a hook keeps its residuals. The next step can follow.
pub struct Ddp<M> {
    comm: Communicator,
    model: M,
    gradients: Gradients,
    /// The sum of this rank's losses since the last synchronisation, and their total weight.
    losses: TreeSum<f32>,
    count: u64,
    buffers: Buffers,
    /// The worker that runs the communication hook, if there is a hook.
    hook_worker: Option<HookWorker>,
    /// The number of micro-batches of all ranks since the last synchronisation.
    micro_batches: usize,
    weighted: bool,
    pub(crate) passes: Passes,
    updates: Updates,
    unreported: Unreported,
    /// `true` while this rank computes gradients. It stays `true` if the computation panics.
    computes: bool,
}

/// Settings of [`Ddp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DdpOptions {
    /// The size limits of buckets.
    pub bucket_bytes: BucketBytes,
}

impl DdpOptions {
    /// Returns these options with other size limits of buckets.
    #[must_use]
    pub const fn with_bucket_bytes(self, bucket_bytes: BucketBytes) -> Self {
        Self { bucket_bytes }
    }
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// The mean loss over all micro-batches, weighted by their [weights](crate::Loss) if they have some.
    pub loss: f32,
    /// The number of micro-batches of all ranks.
    pub micro_batches: usize,
    /// The duration of the step.
    pub elapsed: Duration,
    /// The part of `elapsed` in which this rank waited for communication.
    pub exposed: Duration,
    /// The number of bytes that this rank sent in the step.
    pub bytes_sent: u64,
}

impl<M: Params> Ddp<M> {
    /// Starts to train `model` on all ranks of the group, with the parameters of rank 0.
    ///
    /// # Errors
    /// Parameters or options differ between ranks: every rank gets an error that names the first one that differs.
    /// Communication fails.
    pub fn new(comm: Communicator, model: M, options: DdpOptions) -> Result<Self> {
        Self::start(comm, model, options, None)
    }

    /// Starts training like [`new`](Self::new), with a communication hook that sums the buckets, for example
    /// compressed. The hook runs on a worker thread beside the backward pass.
    ///
    /// Parameters stay equal on all ranks. The hook decides whether their bits are those that one process would
    /// compute. Each operation of the hook has the communicator's timeout and order of reduction.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and hooks with different names on different ranks.
    pub fn with_hook(
        comm: Communicator,
        model: M,
        options: DdpOptions,
        hook: impl BucketHook + 'static,
    ) -> Result<Self> {
        Self::start(comm, model, options, Some(Box::new(hook)))
    }

    fn start(
        mut comm: Communicator,
        mut model: M,
        options: DdpOptions,
        hook: Option<Box<dyn BucketHook>>,
    ) -> Result<Self> {
        let name = hook.as_ref().map_or_else(|| "none".to_owned(), |hook| hook.name());
        let sizes = agreement::setting("the sizes of buckets", options.bucket_bytes);
        agreement::check(&mut comm, model.infos(), &[sizes, ("the hook".to_owned(), name)])?;
        params::validate(model.infos())?;
        let plan = BucketPlan::new(model.infos(), options.bucket_bytes);
        let layout = GradientLayout::of_plan(model.infos(), &plan, 1);
        let tensors = layout.tensors(model.infos());
        let keeps_residual = hook.as_ref().is_some_and(|hook| hook.keeps_residual());
        let gradients = Gradients::new(layout, Scatter::Never, GradientMemory::OfEachBucket, keeps_residual);
        let hook_worker = hook.map(|hook| HookWorker::start(&mut comm, hook, tensors)).transpose();
        let begun = broadcast(&mut comm, &mut model).and(hook_worker);
        let hook_worker = or_abort(&mut comm, begun)?;
        tracing::debug!(
            parameters = model.infos().len(),
            buckets = gradients.bucket_count(),
            "training begins"
        );
        let buffers = Buffers::new(model.infos());
        Ok(Self {
            comm,
            model,
            gradients,
            losses: TreeSum::new(),
            count: 0,
            buffers,
            hook_worker,
            micro_batches: 0,
            weighted: false,
            passes: Passes::default(),
            updates: Updates::new(),
            unreported: Unreported::default(),
            computes: false,
        })
    }

    /// Returns this rank's share of a number of micro-batches: a contiguous range. The shares of two ranks differ by
    /// one at most.
    pub fn share(&self, micro_batches: usize) -> Range<usize> {
        share(micro_batches, self.comm.world_size(), self.comm.rank())
    }

    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks, accumulated ones included.
    ///
    /// `compute` is called for each micro-batch of this rank's share, in order. It runs forward and backward, reports
    /// each gradient to [`Ready`] and returns the [`Loss`], whose type decides between a mean over micro-batches and
    /// a weighted mean.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// `compute` fails. A gradient is reported twice, or differs from its parameter in type or length. The ranks call for
    /// different numbers of micro-batches, or all for none. Only some micro-batches have a weight, or the sum of weights
    /// is 0. Communication fails.
    pub fn step_with<C: Loss>(
        &mut self,
        micro_batches: usize,
        compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        self.comm.announce(STEP, "step");
        self.begin();
        let descriptor =
            StepDescriptor::new(TrainingCall::Step, self.micro_batches + micro_batches, C::WEIGHTED);
        self.synchronise_after(self.share(micro_batches), descriptor, &mut weighted(compute))
    }

    /// Returns the mean gradient of a parameter, until the next computation begins. `None` if no micro-batch had one.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        self.gradients.mean(parameter)
    }

    /// Returns the names of the trained parameters for which no micro-batch of the last step had a gradient on any
    /// rank. An update leaves them unchanged. After the first step they are logged as a warning, because a block may
    /// have forgotten to report them.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        without_gradient(self.model.infos(), |parameter| self.gradients.mean(parameter).is_some())
    }

    /// Updates the parameters by their gradients. Parameters without a gradient stay unchanged. The number of a slice
    /// is the index of its parameter.
    ///
    /// # Errors
    /// The model does not hand out its parameters, or the optimizer fails. [`StepPanicked`](Error::StepPanicked) if a
    /// step has panicked and no step has succeeded since.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    /// [Updates](Self::update) the parameters if the norm of the gradients is finite, and returns `true`. Otherwise
    /// changes nothing and returns `false`. The decision is the same on every rank.
    ///
    /// After [`clip_gradients`](Self::clip_gradients), which returns the norm, compare that instead.
    ///
    /// # Errors
    /// The errors of [`update`](Self::update).
    #[doc(alias = "skip_nan")]
    pub fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let is_finite = self.gradient_norm().is_finite();
        if is_finite {
            self.update(optimizer)?;
        }
        Ok(is_finite)
    }

    /// Calls `f` with the index and the values of each parameter, in order. Tied parameters come once, under their
    /// first index. This is a local call, unlike that of [`Fsdp`](crate::fsdp::Fsdp).
    ///
    /// # Errors
    /// The model does not hand out its parameters.
    pub fn for_each_parameter(&self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        let own = self.model.infos().iter().enumerate().filter(|(_, info)| info.same_as.is_none());
        own.map(|(parameter, _)| parameter).try_for_each(|parameter| {
            params::read(&self.model, parameter, &mut |values| f(parameter, values))
        })
    }

    /// Returns the Euclidean norm of all gradients as one vector. It is rounded once, so its bits do not depend on
    /// how training is distributed. It is infinite or NaN if a gradient is.
    pub fn gradient_norm(&self) -> f64 {
        norm::gradient_norm(
            self.gradients.parameters().filter_map(|parameter| self.gradients.mean(parameter)),
        )
    }

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. Nothing
    /// changes if the norm is infinite or NaN: check it before the update.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, max: f64) -> f64 {
        let norm = self.gradient_norm();
        if let Some(factor) = self.clipping(norm, max) {
            self.gradients.scale(factor);
        }
        norm
    }

    /// Scales all gradients by a factor, for example that of a [`LossScaler`](crate::optim::LossScaler). It needs no
    /// communication. All ranks call it with the same factor, and the next step compares it.
    pub fn scale_gradients(&mut self, factor: f64) {
        self.updates.record_scaling(factor);
        self.gradients.scale(factor);
    }

    /// Returns the factor by which gradients of this norm must be [scaled](crate::ValuesMut::scale) so that their
    /// norm becomes `max`. `None` if the norm is not above `max`.
    ///
    /// Use this in a loop that holds the gradients itself and clips all of them on every rank. The next step compares
    /// `max` between ranks, as after [`clip_gradients`](Self::clip_gradients).
    pub fn clipping(&mut self, norm: f64, max: f64) -> Option<f64> {
        self.updates.record_clipping(max);
        norm::factor(norm, max)
    }

    /// Makes the next step compare the checksums of the ranks' trained parameters. All ranks call this before the
    /// same step.
    ///
    /// Use it if other code than [`update`](Self::update) changes the parameters. `update` compares the settings of
    /// the optimizer instead, which costs nothing. If checksums differ, the step fails on every rank with
    /// [`ParametersDiffer`](Error::ParametersDiffer).
    ///
    /// # Errors
    /// The model does not hand out its parameters.
    pub fn compare_parameters(&mut self) -> Result<()> {
        let trained: Vec<usize> = self.gradients.parameters().collect();
        let checksum = |parameter| Ok((parameter, mutation_check::checksum(&self.model, parameter)?));
        let checksums = trained.into_iter().map(checksum).collect();
        let checksums = self.or_abort(checksums)?;
        self.updates.record_parameters(checksums);
        Ok(())
    }

    /// Makes the next step compare a digest of data that all ranks must hold alike, such as a batch of which each rank
    /// takes its [share](Self::share). All ranks call this equally often before the same step. If digests differ, the
    /// step fails on every rank with [`BatchesDiffer`](Error::BatchesDiffer).
    pub fn compare_batches(&mut self, digest: u64) {
        self.updates.record_batch(digest);
    }

    /// Returns the description of the forward of a micro-batch that the next call computes, for a loop that runs
    /// forwards before it calls [`step_with`](Self::step_with).
    pub const fn next_pass(&self, micro_batch: usize) -> Pass {
        self.passes.in_step(self.micro_batches + micro_batch)
    }

    /// Sets forwards outside of steps and evaluations to training mode, which blocks receive as a [`Pass`]. A step
    /// is always in training mode, an evaluation never.
    pub fn train(&mut self) {
        let pass = self.passes.set_training(true);
        self.model.begin_forward(pass);
    }

    /// Sets forwards outside of steps and evaluations to evaluation mode. Every trainer begins with it.
    pub fn eval(&mut self) {
        let pass = self.passes.set_training(false);
        self.model.begin_forward(pass);
    }

    /// Returns the model.
    pub const fn model(&self) -> &M {
        &self.model
    }

    /// Returns the model, for example to evaluate it. If you change its parameters, change them alike on every rank.
    pub const fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns the communicator.
    pub const fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the communicator, for other messages between the ranks.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Ends the training and returns the communicator and the model.
    pub fn into_parts(self) -> (Communicator, M) {
        (self.comm, self.model)
    }

    /// Computes these micro-batches of this rank, and then the mean gradients of all ranks. The caller has called
    /// [`begin`](Self::begin).
    fn synchronise_after(
        &mut self,
        share: Range<usize>,
        descriptor: StepDescriptor,
        compute: &mut Compute<'_, M>,
    ) -> Result<StepReport> {
        let runtime = self.comm.runtime().clone();
        let (started, sent_before) = (runtime.now(), self.bytes_sent());
        let result = self.attempt(share, descriptor, compute);
        self.computes = false;
        let (ReducedStep { loss, micro_batches }, exposed) = self.or_abort(result)?;
        (self.micro_batches, self.weighted) = (0, false);
        let Self { unreported, model, gradients, passes, .. } = self;
        model.begin_forward(passes.end_step());
        unreported
            .warn_once(|| without_gradient(model.infos(), |parameter| gradients.mean(parameter).is_some()));
        let elapsed = runtime.now().saturating_sub(started);
        let bytes_sent = self.bytes_sent() - sent_before;
        Ok(StepReport { loss, micro_batches, elapsed, exposed, bytes_sent })
    }

    /// Starts to compute gradients. If an earlier computation panicked and the caller caught that, its unfinished
    /// gradients are dropped.
    fn begin(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
        self.gradients.begin_step();
        if let Some(hook_worker) = &mut self.hook_worker {
            hook_worker.follow(&self.comm);
        }
    }

    /// Runs the part of a step that can fail. Returns the result and the time that this rank waited for others.
    fn attempt(
        &mut self,
        share: Range<usize>,
        descriptor: StepDescriptor,
        compute: &mut Compute<'_, M>,
    ) -> Result<(ReducedStep, Duration)> {
        self.check_weighted(descriptor.weighted)?;
        for index in share.clone() {
            let pass = self.passes.in_step(self.number_in_step(descriptor.call, index));
            self.run((index, pass), compute, Role::new(true, index + 1 == share.end))?;
        }
        let mut waited = Duration::ZERO;
        let mut groups = reduce(&mut self.comm, self.hook_worker.as_ref(), &mut waited);
        self.gradients.start_reductions(&mut groups)?;
        let waiting = self.comm.runtime().now();
        let reduced = self.finish(descriptor)?;
        self.updates.record_step();
        self.buffers.synchronise([&mut self.comm], &mut self.model)?;
        Ok((reduced, self.comm.runtime().now().saturating_sub(waiting)))
    }

    /// Waits for the reductions and divides the sums by the total weight.
    fn finish(&mut self, descriptor: StepDescriptor) -> Result<ReducedStep> {
        let Self { comm, model, gradients, hook_worker, updates, .. } = self;
        let loss = self.losses.finish(|left, right| *left += right).unwrap_or(0.0);
        let (computed, count) = (gradients.ended(), std::mem::take(&mut self.count));
        let numbers = StepConsensus::encode(computed, count, descriptor, updates, gradients.used());
        let loss = comm.start_all_reduce(vec![loss], ReduceOp::Sum);
        let numbers = comm.start_all_reduce(numbers, ReduceOp::Sum);
        // If the ranks agree on an unweighted step, the divisor is known before the counts arrive.
        let mut waited = Duration::ZERO;
        let known = descriptor.call == TrainingCall::Step && !descriptor.weighted;
        let known = Some(descriptor.micro_batches).filter(|_| known);
        if let Some(count) = known {
            gradients.finish(count, &mut reduce(comm, hook_worker.as_ref(), &mut waited))?;
        }
        let mut loss = [flat::wait(loss)?[0]];
        let numbers = flat::wait(numbers)?;
        let consensus = StepConsensus::decode(&numbers);
        if !consensus.agrees(comm.world_size()) {
            return Err(descriptor.differ(comm, updates, model.infos()));
        }
        let counted = consensus.divisor(descriptor)?;
        if known.is_none() {
            gradients.finish(counted, &mut reduce(comm, hook_worker.as_ref(), &mut waited))?;
        }
        gradients.set_used(consensus.used());
        ValuesMut::F32(&mut loss).divide(counted);
        Ok(ReducedStep { loss: loss[0], micro_batches: consensus.micro_batches() })
    }

    /// Returns the number of a micro-batch of a call in its step.
    fn number_in_step(&self, call: TrainingCall, index: usize) -> usize {
        let in_call = match call {
            TrainingCall::Join => index * self.world_size() + self.rank(),
            _ => index,
        };
        self.micro_batches + in_call
    }

    /// Returns a hash of this rank's updates, which is equal on all ranks that have updated alike.
    pub(crate) const fn updates_hash(&self) -> u64 {
        self.updates.hash()
    }

    /// Returns an error unless all ranks have updated their parameters alike. Every rank calls this.
    pub(crate) fn check_updates(&mut self) -> Result<()> {
        self.updates.check(&mut [&mut self.comm], self.model.infos())
    }

    /// Returns an error unless all accumulated micro-batches have a weight, or none has.
    const fn check_weighted(&self, weighted: bool) -> Result<()> {
        if self.micro_batches > 0 && self.weighted != weighted {
            return Err(Error::PartlyWeighted);
        }
        Ok(())
    }

    /// Returns the number of bytes that were sent for all steps so far.
    fn bytes_sent(&self) -> u64 {
        bytes_sent(&self.comm) + self.hook_worker.as_ref().map_or(0, HookWorker::bytes_sent)
    }

    /// Computes one micro-batch. If it is the last one, its buckets are reduced as they become final.
    fn run(&mut self, (index, pass): (usize, Pass), compute: &mut Compute<'_, M>, role: Role) -> Result<()> {
        let Self { comm, model, gradients, buffers, hook_worker, .. } = self;
        let mut waited = Duration::ZERO;
        let mut groups = reduce(comm, hook_worker.as_ref(), &mut waited);
        let number = gradients.ended();
        buffers.record_forward();
        model.begin_forward(pass);
        gradients.begin(number, role);
        let mut ready = |parameter: usize, values: Values<'_>| {
            Ok(gradients.report(number, parameter, values, &mut groups)?)
        };
        let (loss, count) = compute(model, index, &mut ready).map_err(Error::compute)?;
        gradients.end(number, &mut groups)?;
        self.losses.add(number, loss, |left, right| *left += right);
        self.count = self.count.saturating_add(count);
        Ok(())
    }

    fn try_update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        if self.computes {
            return Err(Error::StepPanicked);
        }
        self.updates.record_update(optimizer);
        for parameter in self.gradients.parameters() {
            let Some(gradient) = self.gradients.mean(parameter) else { continue };
            params::write(&mut self.model, parameter, |values| {
                optimizer.update(parameter, values, gradient)
            })?;
        }
        Ok(())
    }

    /// On an error that other ranks do not get, aborts the job and drops all gradients.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.comm, result).inspect_err(|_| self.forget())
    }

    /// Drops all gradients. A hook keeps its residuals.
    fn forget(&mut self) {
        self.gradients.forget();
        (self.losses, self.count) = (TreeSum::new(), 0);
        (self.micro_batches, self.weighted) = (0, false);
    }

    /// Returns the number of micro-batches of all ranks that were accumulated and that no step has used.
    pub(crate) const fn accumulated(&self) -> usize {
        self.micro_batches
    }

    /// Drops all gradients and residuals, as at the start of the training.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.forget();
        self.updates.forget();
        self.computes = false;
        self.gradients.forget_residuals();
        self.hook_worker.as_ref().map_or(Ok(()), HookWorker::forget)
    }
}

impl<M: Params> Ddp<M> {
    /// Takes a step like [`step_with`](Self::step_with), for a model that is a [`Block`]. `batch` returns the input
    /// of a micro-batch and a function that computes the loss and its gradient from the model's output.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// The errors of [`step_with`](Self::step_with).
    pub fn step<A, C: Loss, L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        self.step_with(micro_batches, |model, index, ready| forward_backward(model, batch(index)?, ready))
    }

    /// Runs the model forward on this rank's own input, without the other ranks, to evaluate it. Blocks are in
    /// evaluation mode unless [`train`](Self::train) was called. Changed [buffers](crate::ParamInfo::buffer) change
    /// on this rank only.
    ///
    /// # Errors
    /// The model fails. The job goes on, because no rank waits for this one.
    pub fn forward<A>(&mut self, input: A) -> Result<A>
    where
        M: Block<A>,
    {
        self.model.begin_forward(self.passes.outside());
        let (output, _) = self.model.forward(input).map_err(Error::compute)?;
        Ok(output)
    }
}

/// Runs a model forward and backward.
fn forward_backward<A, C, L>(
    model: &mut (impl Block<A> + ?Sized),
    (input, loss): (A, L),
    ready: &mut Ready<'_>,
) -> Result<C, BoxError>
where
    L: FnOnce(A) -> Result<(C, A), BoxError>,
{
    let (output, saved) = model.forward(input)?;
    let (loss, output_gradient) = loss(output)?;
    model.backward(saved, output_gradient, ready)?;
    Ok(loss)
}

/// Wraps `compute` so that it returns the loss with its weight.
fn weighted<M, C: Loss>(
    mut compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
) -> impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<WeightedLoss, BoxError> {
    move |model, index, ready| Ok(compute(model, index, ready)?.weighted())
}

/// Computes a micro-batch and reports its gradients.
type Compute<'a, M> = dyn FnMut(&mut M, usize, &mut Ready<'_>) -> Result<WeightedLoss, BoxError> + 'a;

/// The result of the reductions of a step.
#[derive(Debug, Clone, Copy)]
struct ReducedStep {
    /// The mean loss.
    loss: f32,
    /// The number of micro-batches that all ranks have computed.
    micro_batches: usize,
}

/// Returns the groups that gradients are reduced over: every rank has a replica of the model.
fn reduce<'a>(
    comm: &'a mut Communicator,
    hook_worker: Option<&'a HookWorker>,
    waited: &'a mut Duration,
) -> ReduceGroups<'a> {
    ReduceGroups::new(None, Some(comm), hook_worker, waited)
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({:?}, {} buckets)", self.comm, self.gradients.bucket_count())
    }
}
