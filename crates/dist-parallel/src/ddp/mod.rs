//! Training one model on several ranks, each with a copy of it and a share of the data.

mod accumulate;
mod in_flight;
mod join;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use dist_collectives::Communicator;

use self::in_flight::{InFlightBuckets, ReducedStep};
use crate::abort::or_abort;
use crate::broadcast::broadcast;
use crate::buffers::Buffers;
use crate::fsdp::{bytes_sent, share};
use crate::gradients::BucketedGradients;
use crate::hook_worker::HookWorker;
use crate::loss::WeightedLoss;
use crate::step_consensus::{STEP, StepDescriptor, TrainingCall};
use crate::unreported::{Unreported, without_gradient};
use crate::updates::Updates;
use crate::{
    Block, BoxError, BucketBytes, BucketHook, BucketPlace, BucketPlan, BucketTensor, Error, Loss, Optimizer,
    ParamInfo, Params, Ready, Result, Values, agreement, mutation_check, norm, params,
};

/// Distributed data parallel training: every rank has the whole model and computes some of a step's micro-batches;
/// the mean of their gradients is the same on every rank, and so the parameters that are trained stay the same. A
/// [buffer](crate::ParamInfo::buffer), such as a running mean, is synchronised at the end of every step. A block that changes
/// a frozen parameter, which is no buffer, changes it on its own rank only; a checkpoint has the values of rank 0.
///
/// # Which sums are the same
///
/// BucketedGradients, and losses, are summed in the canonical order: the tree T(n) = T(largest power of two below n) +
/// T(rest), over this rank's micro-batches first and then over the ranks, and divided once, by the number of micro-batches
/// or by [what they count](crate::Loss). What the ranks compute together is therefore:
///
/// * on any number of ranks, bit for bit what one process computes, if every rank's [`share`](Self::share) of the
///   micro-batches is the same power of two;
/// * for other shares, uneven and empty ones among them, the same bits on every rank and in every run;
/// * either way, independent of bucket sizes, timing and transport.
///
/// All this is said of a communicator with canonical [`ReductionOrder`](dist_collectives::ReductionOrder), which it
/// has unless told otherwise.
///
/// # What is communicated when
///
/// BucketedGradients lie in buckets, as a [`BucketPlan`] says. While the last micro-batch of a step goes backward, each
/// bucket is reduced as soon as its last gradient is final, in the order of the plan. What the backward does not
/// report has no gradient: it counts as zero where other micro-batches have one, and a parameter without any stays
/// without.
///
/// With a [hook](Self::with_hook), buckets go to a thread that compresses and sums them, in the same order.
///
/// A bucket has the communicator's timeout from when it leaves. What a rank computes afterwards, and what it is ahead
/// of the slowest rank, must fit into it.
///
/// # Errors
///
/// An error on one rank aborts the job, so that no other waits for it. Some errors harm nothing, because every rank
/// gets the same: [`StepsDiffer`](Error::StepsDiffer), when they were asked for different numbers of micro-batches, none on
/// some of them included, or for some that say how much they count, or only some [join](Self::join_with);
/// [`SettingsDiffer`](Error::SettingsDiffer), when they have updated or clipped with different settings since the step before;
/// [`AccumulatedDiffers`](Error::AccumulatedDiffers), when they accumulated different parts;
/// [`NoMicroBatches`](Error::NoMicroBatches), when all were asked for none; and
/// [`ZeroWeight`](Error::ZeroWeight). What was accumulated is then forgotten, but for what a hook keeps, and the next
/// step can be taken.
pub struct Ddp<M> {
    comm: Communicator,
    model: M,
    gradients: BucketedGradients,
    buffers: Buffers,
    /// What reduces the buckets, if they have a hook.
    hook_worker: Option<HookWorker>,
    /// Micro-batches of all ranks since the last synchronisation, and whether they say how much they count.
    micro_batches: usize,
    weighted: bool,
    updates: Updates,
    unreported: Unreported,
    /// While this rank computes. Set afterwards, too, if that has panicked.
    computes: bool,
}

/// Settings of [`Ddp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DdpOptions {
    /// How large buckets may grow.
    pub bucket_bytes: BucketBytes,
}

impl DdpOptions {
    /// These options with other sizes of buckets.
    #[must_use]
    pub const fn with_bucket_bytes(self, bucket_bytes: BucketBytes) -> Self {
        Self { bucket_bytes }
    }
}

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// The mean of the losses of all micro-batches, or of all that they [count](crate::Loss).
    pub loss: f32,
    /// How many micro-batches there were.
    pub micro_batches: usize,
    /// How long the step took.
    pub elapsed: Duration,
    /// How much of that this rank waited for communication that no computation hid.
    pub exposed: Duration,
    /// How many bytes this rank has sent for it.
    pub bytes_sent: u64,
}

impl<M: Params> Ddp<M> {
    /// Begins to train `model` on all ranks of the group. Every rank then has rank 0's parameters.
    ///
    /// # Errors
    /// On every rank, if parameters or options differ between ranks, naming the first parameter that does. If
    /// communication fails.
    pub fn new(comm: Communicator, model: M, options: DdpOptions) -> Result<Self> {
        Self::start(comm, model, options, None)
    }

    /// As [`new`](Self::new), where a hook sums the buckets: one that compresses them, or one of your own. It runs on a
    /// thread of its own, beside the backward pass.
    ///
    /// The parameters are still the same bits on every rank; whether they are those that one process trains, depends
    /// on the hook. Each operation of the hook has the communicator's timeout, and its order of reduction.
    ///
    /// # Errors
    /// As for [`new`](Self::new), and if the hooks of the ranks have different names.
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
        let tensors = tensors(&plan, model.infos());
        let keeps_residual = hook.as_ref().is_some_and(|hook| hook.keeps_residual());
        let gradients = BucketedGradients::new(model.infos(), plan, keeps_residual);
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
            buffers,
            hook_worker,
            micro_batches: 0,
            weighted: false,
            updates: Updates::new(),
            unreported: Unreported::default(),
            computes: false,
        })
    }

    /// The micro-batches, out of a number of them, that this rank computes: contiguous, and as equal shares as
    /// possible.
    pub fn share(&self, micro_batches: usize) -> Range<usize> {
        share(micro_batches, self.comm.world_size(), self.comm.rank())
    }

    /// Computes the mean gradients of `micro_batches` micro-batches, and of those that were accumulated before, on
    /// all ranks. `compute` is called for each micro-batch of this rank's share, in order: it goes forward and
    /// backward, reports each gradient to [`Ready`], and returns the [`Loss`], which says what the means are over.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// If `compute` fails, a gradient is reported twice or does not look like its parameter, if the ranks were not
    /// all asked for the same number of micro-batches or all for none, if only some of the step's micro-batches say how
    /// much they count or all of them count for nothing, or if communication fails.
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

    /// The mean gradient of a parameter, from a step to the next computation; `None` if no micro-batch had one.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        self.gradients.mean(parameter)
    }

    /// The names of the trained parameters for which no micro-batch of the last step had a gradient, on any rank: an update leaves
    /// them as they are. After the first step of a training they are logged as a warning, because a block may have forgotten to
    /// report them.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        without_gradient(self.model.infos(), |parameter| self.gradients.mean(parameter).is_some())
    }

    /// Changes the parameters by their gradients; those without a gradient are left as they are. A parameter's
    /// index is the number of its slice.
    ///
    /// # Errors
    /// If the model does not hand out its parameters, or the optimizer fails. [`StepPanicked`](Error::StepPanicked) if a step has
    /// panicked since the last one that ended.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    /// Calls `f` with each parameter's index and its values, in order; those that are the same as an earlier one are left out.
    /// Unlike that of [`Fsdp`](crate::Fsdp), this is no call of all ranks.
    ///
    /// # Errors
    /// If the model does not hand out its parameters.
    pub fn for_each_parameter(&self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        let own = self.model.infos().iter().enumerate().filter(|(_, info)| info.same_as.is_none());
        own.map(|(parameter, _)| parameter).try_for_each(|parameter| {
            params::read(&self.model, parameter, &mut |values| f(parameter, values))
        })
    }

    /// The norm of all gradients together, as if they were one vector: exact but for one rounding, and so the same
    /// bits however training is divided. Infinite or NaN if a gradient is.
    pub fn gradient_norm(&self) -> f64 {
        norm::gradient_norm(
            self.gradients.parameters().filter_map(|parameter| self.gradients.mean(parameter)),
        )
    }

    /// Multiplies all gradients by the same factor where their norm is above `max`, so that it becomes `max`; gives
    /// the norm before. A norm that is infinite or NaN changes nothing: look at it before the update.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, max: f64) -> f64 {
        let norm = self.gradient_norm();
        if let Some(factor) = self.clipping(norm, max) {
            self.gradients.scale(factor);
        }
        norm
    }

    /// Returns the factor by which gradients of this norm are to be [scaled](crate::ValuesMut::scale), so that their norm becomes
    /// `max`; `None` if it is not above that. For a loop that keeps the gradients itself, and clips all of them on every rank:
    /// that the ranks clip to the same norm is compared in the next step, as for [`clip_gradients`](Self::clip_gradients).
    pub fn clipping(&mut self, norm: f64, max: f64) -> Option<f64> {
        self.updates.record_clipping(max);
        norm::factor(norm, max)
    }

    /// Has the ranks compare their trained parameters in the next step, by checksums. All ranks call this before the same
    /// step. [`update`](Self::update) compares the settings of an optimizer instead, which costs nothing; this is for a loop
    /// that changes the parameters by other code.
    ///
    /// If they differ, the step fails on every rank with [`ParametersDiffer`](Error::ParametersDiffer).
    ///
    /// # Errors
    /// If the model does not hand out its parameters.
    pub fn compare_parameters(&mut self) -> Result<()> {
        let trained: Vec<usize> = self.gradients.parameters().collect();
        let checksum = |parameter| Ok((parameter, mutation_check::checksum(&self.model, parameter)?));
        let checksums = trained.into_iter().map(checksum).collect();
        let checksums = self.or_abort(checksums)?;
        self.updates.record_parameters(checksums);
        Ok(())
    }

    /// The model.
    pub const fn model(&self) -> &M {
        &self.model
    }

    /// The model, to evaluate it. Whoever changes its parameters does so on every rank alike.
    pub const fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// How many ranks train.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// The communicator, to be asked.
    pub const fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// The communicator, for what else the ranks have to say to each other.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Ends the training and gives back what it was made of.
    pub fn into_parts(self) -> (Communicator, M) {
        (self.comm, self.model)
    }

    /// Computes these micro-batches of this rank, and then the mean gradients of what all ranks have. It has [begun](Self::begin)
    /// before anything was asked for.
    fn synchronise_after(
        &mut self,
        share: Range<usize>,
        descriptor: StepDescriptor,
        compute: &mut Compute<'_, M>,
    ) -> Result<StepReport> {
        let runtime = self.comm.runtime().clone();
        let (started, sent_before) = (runtime.now(), self.bytes_sent());
        // Outlives the attempt: what is in flight ends by its deadline, or at once when the job is aborted.
        let mut in_flight = InFlightBuckets::default();
        let result = self.attempt(share, descriptor, compute, &mut in_flight);
        self.computes = false;
        let (ReducedStep { loss, micro_batches }, exposed) = self.or_abort(result)?;
        (self.micro_batches, self.weighted) = (0, false);
        let Self { unreported, model, gradients, .. } = self;
        unreported
            .warn_once(|| without_gradient(model.infos(), |parameter| gradients.mean(parameter).is_some()));
        let elapsed = runtime.now().saturating_sub(started);
        let bytes_sent = self.bytes_sent() - sent_before;
        Ok(StepReport { loss, micro_batches, elapsed, exposed, bytes_sent })
    }

    /// Begins to compute. What is there of a computation that has panicked, which the caller must have caught, is forgotten:
    /// nobody knows how much of it there is.
    fn begin(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
        self.gradients.begin_step();
    }

    /// Everything of a step that may fail, and how long this rank waited for others.
    fn attempt(
        &mut self,
        share: Range<usize>,
        descriptor: StepDescriptor,
        compute: &mut Compute<'_, M>,
        in_flight: &mut InFlightBuckets,
    ) -> Result<(ReducedStep, Duration)> {
        self.check_weighted(descriptor.weighted)?;
        for index in share.clone() {
            let last = index + 1 == share.end;
            self.run(index, compute, last.then_some(&mut *in_flight))?;
        }
        let Self { comm, model, gradients, buffers, hook_worker, updates, .. } = self;
        in_flight.launch_rest(gradients, comm, hook_worker.as_ref(), descriptor, updates)?;
        let waiting = comm.runtime().now();
        let reduced = in_flight.wait(gradients, comm, descriptor, (updates, model.infos()))?;
        updates.record_step();
        buffers.synchronise([&mut *comm], model)?;
        Ok((reduced, comm.runtime().now().saturating_sub(waiting)))
    }

    /// A number that all ranks have alike if they have updated their parameters alike.
    pub(crate) const fn updates_hash(&self) -> u64 {
        self.updates.hash()
    }

    /// Makes sure that all ranks have updated their parameters alike. Every rank calls this.
    pub(crate) fn check_updates(&mut self) -> Result<()> {
        self.updates.check(&mut [&mut self.comm], self.model.infos())
    }

    /// That what was accumulated counts in the same way.
    const fn check_weighted(&self, weighted: bool) -> Result<()> {
        if self.micro_batches > 0 && self.weighted != weighted {
            return Err(Error::PartlyWeighted);
        }
        Ok(())
    }

    /// What was sent for all steps so far.
    fn bytes_sent(&self) -> u64 {
        bytes_sent(&self.comm) + self.hook_worker.as_ref().map_or(0, HookWorker::bytes_sent)
    }

    /// Computes one micro-batch. With a flight, it is the last, and its gradients leave as they become final.
    fn run(
        &mut self,
        index: usize,
        compute: &mut Compute<'_, M>,
        mut in_flight: Option<&mut InFlightBuckets>,
    ) -> Result<()> {
        let Self { comm, model, gradients, buffers, hook_worker, .. } = self;
        buffers.record_forward();
        gradients.begin(&mut |dtype, len| in_flight::memory(comm, hook_worker.as_ref(), dtype, len))?;
        let mut ready = |parameter: usize, values: Values<'_>| {
            gradients.report(parameter, values)?;
            if let Some(in_flight) = &mut in_flight {
                in_flight.launch_final(gradients, comm, hook_worker.as_ref())?;
            }
            Ok(())
        };
        let (loss, count) = compute(model, index, &mut ready).map_err(Error::compute)?;
        gradients.end(loss, count);
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

    /// Aborts the job if something failed that the other ranks cannot know, and forgets all gradients.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.comm, result).inspect_err(|_| self.forget())
    }

    /// Forgets all gradients, but for what a hook keeps.
    fn forget(&mut self) {
        self.gradients.forget();
        (self.micro_batches, self.weighted) = (0, false);
    }

    /// Micro-batches of all ranks that were accumulated and not yet used by a step.
    pub(crate) const fn accumulated(&self) -> usize {
        self.micro_batches
    }

    /// Forgets all gradients, as if training had just begun.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.forget();
        self.updates.forget();
        self.computes = false;
        self.gradients.forget_residuals();
        self.hook_worker.as_ref().map_or(Ok(()), HookWorker::forget)
    }
}

impl<M: Params> Ddp<M> {
    /// As [`step_with`](Self::step_with), for a model that is a [`Block`]: `batch` gives a micro-batch's input, and
    /// the function that computes the loss, and its gradient, from the model's output.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
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

    /// Goes forward only, to evaluate the model, on this rank alone and with an input of its own. If that changes
    /// [buffers](crate::ParamInfo::buffer), the change is this rank's alone.
    ///
    /// # Errors
    /// If the model fails, which does not end the job: nobody waits for this rank.
    pub fn forward<A>(&mut self, input: A) -> Result<A>
    where
        M: Block<A>,
    {
        let (output, _) = self.model.forward(input).map_err(Error::compute)?;
        Ok(output)
    }
}

/// Goes forward and backward.
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

/// What `compute` computes, and how much it counts.
fn weighted<M, C: Loss>(
    mut compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
) -> impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<WeightedLoss, BoxError> {
    move |model, index, ready| Ok(compute(model, index, ready)?.weighted())
}

/// Computes a micro-batch and reports its gradients.
type Compute<'a, M> = dyn FnMut(&mut M, usize, &mut Ready<'_>) -> Result<WeightedLoss, BoxError> + 'a;

/// For each bucket, the tensors in it.
fn tensors(plan: &BucketPlan, infos: &[ParamInfo]) -> Vec<Vec<BucketTensor>> {
    let shape = |place: &BucketPlace| infos[place.parameter].shape.clone();
    plan.buckets().iter().map(|bucket| BucketTensor::row(bucket.places.iter().map(shape))).collect()
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({:?}, {} buckets)", self.comm, self.gradients.bucket_count())
    }
}
