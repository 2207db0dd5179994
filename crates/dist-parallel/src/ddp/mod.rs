//! Data-parallel training: every rank has a replica of the model and computes a share of the micro-batches.

mod accumulate;
mod evaluate;
mod join;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use dist_collectives::Communicator;

use crate::block_range::whole;
use crate::engine::{Agreement, StepEngine, Work, delegate_shards, engine_methods};
use crate::fsdp::Precision;
use crate::trainer::{with_batches, with_computation};
use crate::{
    Block, BoxError, BucketBytes, BucketHook, Error, Loss, Params, Pass, Ready, Result, Values, agreement,
    mutation_check, norm, params,
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
/// Gradients lie in the buckets of a [`BucketPlan`](crate::buckets::BucketPlan). During the backward of a step's last
/// micro-batch, each bucket is reduced as soon as its last gradient is final, in the order of the plan. If a backward does
/// not report a gradient, it counts as zero in this micro-batch. A parameter without a gradient in any micro-batch has no
/// mean gradient.
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
    pub(crate) engine: StepEngine<M>,
}

/// Settings of [`Ddp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DdpOptions {
    /// The size limits of buckets.
    pub bucket_bytes: BucketBytes,
    /// The types of master parameters and reduced gradients. [`update`](Ddp::update) changes master parameters and
    /// rounds them into the model. A value that the program has written into the model before becomes the master value.
    /// The types do not change the division into buckets.
    pub precision: Precision,
}

impl DdpOptions {
    /// Returns these options with other size limits of buckets.
    #[must_use]
    pub const fn with_bucket_bytes(self, bucket_bytes: BucketBytes) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// Returns these options with other types.
    #[must_use]
    pub const fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
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

impl StepReport {
    /// Returns the report of a rank without micro-batches.
    pub(crate) const fn without_micro_batches() -> Self {
        let nothing = Duration::ZERO;
        Self { loss: 0.0, micro_batches: 0, elapsed: nothing, exposed: nothing, bytes_sent: 0 }
    }
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
        model: M,
        options: DdpOptions,
        hook: Option<Box<dyn BucketHook>>,
    ) -> Result<Self> {
        let name = hook.as_ref().map_or_else(|| "none".to_owned(), |hook| hook.name());
        let sizes = agreement::setting("the sizes of buckets", options.bucket_bytes);
        let types = agreement::setting("the precision", options.precision);
        agreement::check(&mut comm, model.infos(), &[sizes, types, ("the hook".to_owned(), name)])?;
        let engine = StepEngine::replicated(comm, model, options, hook, Agreement::AtEnd)?;
        Ok(Self { engine })
    }

    /// Returns this rank's share of a number of micro-batches: a contiguous range. The shares of two ranks differ by
    /// one at most.
    pub fn share(&self, micro_batches: usize) -> Range<usize> {
        self.engine.share(micro_batches)
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
        with_computation(compute, |computation| self.engine.step::<()>(micro_batches, computation.into()))
    }

    /// Returns the mean gradient of a parameter, until the next computation begins. `None` if no micro-batch had one.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        self.engine.stage().gradients.mean(parameter)
    }

    /// Calls `f` with the index and the values of each parameter, in order. Tied parameters come once, under their
    /// first index. This is a local call, unlike that of [`Fsdp`](crate::fsdp::Fsdp).
    ///
    /// # Errors
    /// The model does not hand out its parameters.
    pub fn for_each_parameter(&self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        let own =
            self.engine.stage().model.infos().iter().enumerate().filter(|(_, info)| info.same_as.is_none());
        own.map(|(parameter, _)| parameter).try_for_each(|parameter| {
            params::read(&self.engine.stage().model, parameter, &mut |values| f(parameter, values))
        })
    }

    /// Returns the factor by which gradients of this norm must be [scaled](crate::ValuesMut::scale) so that their
    /// norm becomes `max`. `None` if the norm is not above `max`.
    ///
    /// Use this in a loop that holds the gradients itself and clips all of them on every rank. The next step compares
    /// `max` between ranks, as after [`clip_gradients`](Self::clip_gradients).
    pub fn clipping(&mut self, norm: f64, max: f64) -> Option<f64> {
        self.engine.updates.record_clipping(max);
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
        let trained: Vec<usize> = self.engine.stage().gradients.parameters().collect();
        let checksum =
            |parameter| Ok((parameter, mutation_check::checksum(&self.engine.stage().model, parameter)?));
        let checksums = trained.into_iter().map(checksum).collect();
        let checksums = self.engine.or_abort(checksums)?;
        self.engine.updates.record_parameters(checksums);
        Ok(())
    }

    /// Makes the next step compare a digest of data that all ranks must hold alike, such as a batch of which each rank
    /// takes its [share](Self::share). All ranks call this equally often before the same step. If digests differ, the
    /// step fails on every rank with [`BatchesDiffer`](Error::BatchesDiffer).
    pub fn compare_batches(&mut self, digest: u64) {
        self.engine.updates.record_batch(digest);
    }

    /// Returns the description of the forward of a micro-batch that the next call computes, for a loop that runs
    /// forwards before it calls [`step_with`](Self::step_with).
    pub const fn next_pass(&self, micro_batch: usize) -> Pass {
        self.engine.passes.in_step(self.engine.micro_batches + micro_batch)
    }

    engine_methods!(pub gradients);
    engine_methods!(pub update);
    engine_methods!(pub mode);
    engine_methods!(pub communicator);
    engine_methods!(pub model M);

    /// Ends the training and returns the communicator and the model.
    pub fn into_parts(self) -> (Communicator, M) {
        self.engine.into_parts()
    }
}

delegate_shards!(impl<M: Params> Shards for Ddp<M>, engine);

impl<M: Params> Ddp<M> {
    /// Takes a step like [`step_with`](Self::step_with), for a model that is a [`Block`]. `batch` returns the input
    /// of a micro-batch and a function that computes the loss and its gradient from the model's output.
    ///
    /// # Errors
    /// The errors of [`step_with`](Self::step_with).
    pub fn step<A, C: Loss, L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| self.engine.step(micro_batches, Work::of_batches(whole, batches)))
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
        self.engine.begin_forward(self.engine.passes.outside());
        let (output, _) = self.engine.stage_mut().model.forward(input).map_err(Error::compute)?;
        Ok(output)
    }
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({:?}, {} buckets)", self.engine.world, self.engine.stage().gradients.bucket_count())
    }
}
