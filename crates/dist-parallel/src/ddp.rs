//! Training one model on several ranks, each with a copy of it and a share of the data.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Pending, ReduceOp};

use crate::flat::{self, PendingFlat};
use crate::fsdp::share;
use crate::gradients::{Gradients, Tally};
use crate::norm::{SquareRange, SumOfSquares};
use crate::{
    Block, BoxError, BucketBytes, BucketPlan, Error, Optimizer, Params, Ready, Result, Values, ValuesMut,
    agreement, norm, params,
};

/// Distributed data parallel training: every rank has the whole model and computes some of a step's micro-batches;
/// the mean of their gradients is the same on every rank, and so the parameters stay the same.
///
/// # Which sums are the same
///
/// Gradients, and losses, are summed in the canonical order: the tree T(n) = T(largest power of two below n) +
/// T(rest), over this rank's micro-batches first and then over the ranks, and divided by the number of micro-batches
/// once. What the ranks compute together is therefore:
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
/// Gradients lie in buckets, as a [`BucketPlan`] says. While the last micro-batch of a step goes backward, each
/// bucket is reduced as soon as its last gradient is final, in the order of the plan. What the backward does not
/// report has no gradient: it counts as zero where other micro-batches have one, and a parameter without any stays
/// without.
///
/// A bucket has the communicator's timeout from when it leaves. What a rank computes afterwards, and what it is ahead
/// of the slowest rank, must fit into it.
///
/// # Errors
///
/// An error on one rank aborts the job, so that no other waits for it. Two errors harm nothing, because every rank
/// gets them: [`MicroBatchesDiffer`](Error::MicroBatchesDiffer), when the ranks were asked for different numbers of
/// micro-batches, none on some of them included; and [`NoMicroBatches`](Error::NoMicroBatches), when all were asked
/// for none. What was accumulated is then forgotten, and the next step can be taken.
pub struct Ddp<M> {
    comm: Communicator,
    model: M,
    gradients: Gradients,
    /// Micro-batches of all ranks since the last synchronisation.
    micro_batches: usize,
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
    /// The mean of the losses of all micro-batches.
    pub loss: f32,
    /// How many micro-batches there were.
    pub micro_batches: usize,
    /// How long the step took.
    pub elapsed: Duration,
    /// How much of that this rank waited for communication that no computation hid.
    pub exposed: Duration,
}

impl<M: Params> Ddp<M> {
    /// Begins to train `model` on all ranks of the group. Every rank then has rank 0's parameters.
    ///
    /// # Errors
    /// On every rank, if parameters or options differ between ranks, naming the first parameter that does. If
    /// communication fails.
    pub fn new(mut comm: Communicator, mut model: M, options: DdpOptions) -> Result<Self> {
        params::validate(model.infos())?;
        let BucketBytes { first_max, other_max } = options.bucket_bytes;
        agreement::check(&mut comm, model.infos(), [first_max as u64, other_max as u64])?;
        let gradients = Gradients::new(model.infos(), BucketPlan::new(model.infos(), options.bucket_bytes));
        let told = broadcast(&mut comm, &mut model);
        if told.is_err() {
            comm.abort();
        }
        told?;
        tracing::debug!(
            parameters = model.infos().len(),
            buckets = gradients.bucket_count(),
            "training begins"
        );
        Ok(Self { comm, model, gradients, micro_batches: 0 })
    }

    /// The micro-batches, out of a number of them, that this rank computes: contiguous, and as equal shares as
    /// possible.
    pub fn share(&self, micro_batches: usize) -> Range<usize> {
        share(micro_batches, self.comm.world_size(), self.comm.rank())
    }

    /// Computes the mean gradients of `micro_batches` micro-batches, and of those that were accumulated before, on
    /// all ranks. `compute` is called for each micro-batch of this rank's share, in order: it goes forward and
    /// backward, reports each gradient to [`Ready`], and returns the loss.
    ///
    /// # Errors
    /// If `compute` fails, a gradient is reported twice or does not look like its parameter, if the ranks were not
    /// all asked for the same number of micro-batches or all for none, or if communication fails.
    pub fn step_with(
        &mut self,
        micro_batches: usize,
        mut compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<f32, BoxError>,
    ) -> Result<StepReport> {
        let total = self.micro_batches + micro_batches;
        let started = self.comm.runtime().now();
        self.gradients.begin_step();
        // Outlives the attempt: what is in flight ends by its deadline, or at once when the job is aborted.
        let mut flight = Flight::default();
        let result = self.attempt(micro_batches, total, &mut compute, &mut flight);
        let (loss, exposed) = self.or_abort(result)?;
        self.micro_batches = 0;
        let elapsed = self.comm.runtime().now().saturating_sub(started);
        Ok(StepReport { loss, micro_batches: total, elapsed, exposed })
    }

    /// Computes this rank's share of `micro_batches` micro-batches without communicating; the next step adds its
    /// own. Several calls and a step give what one step with all their micro-batches gives, if that one deals
    /// each rank the same.
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
    #[doc(alias = "no_sync")]
    pub fn accumulate_with(
        &mut self,
        micro_batches: usize,
        mut compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<f32, BoxError>,
    ) -> Result<()> {
        self.micro_batches += micro_batches;
        self.gradients.begin_step();
        let share = self.share(micro_batches);
        let result = share.into_iter().try_for_each(|index| self.run(index, &mut compute, None));
        self.or_abort(result)
    }

    /// Computes the mean gradients of what was accumulated.
    ///
    /// # Errors
    /// If nothing was accumulated, or as for [`step_with`](Self::step_with).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.step_with(0, |_, _, _| unreachable!("nobody has a share of nothing"))
    }

    /// The mean gradient of a parameter, from a step to the next computation; `None` if no micro-batch had one.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        self.gradients.mean(parameter)
    }

    /// Changes the parameters by their gradients; those without a gradient are left as they are. A parameter's
    /// index is the number of its slice.
    ///
    /// # Errors
    /// If the model does not hand out its parameters, or the optimizer fails.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    /// The norm of all gradients together, as if they were one vector: exact but for one rounding, and so the same
    /// bits however training is divided. Infinite or NaN if a gradient is.
    pub fn gradient_norm(&self) -> f64 {
        let range = SquareRange::of(self.model.infos().iter().map(|info| info.dtype));
        let mut sum = SumOfSquares::new(range);
        let means = self.gradients.parameters().filter_map(|parameter| self.gradients.mean(parameter));
        means.for_each(|mean| sum.add(mean));
        SumOfSquares::root(range, &sum.encode())
    }

    /// Multiplies all gradients by the same factor where their norm is above `max`, so that it becomes `max`; gives
    /// the norm before. A norm that is infinite or NaN changes nothing: look at it before the update.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, max: f64) -> f64 {
        let norm = self.gradient_norm();
        if let Some(factor) = norm::factor(norm, max) {
            self.gradients.scale(factor);
        }
        norm
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

    /// Everything of a step that may fail; the loss, and how long this rank waited for others.
    fn attempt(
        &mut self,
        micro_batches: usize,
        total: usize,
        compute: &mut Compute<'_, M>,
        flight: &mut Flight,
    ) -> Result<(f32, Duration)> {
        let share = self.share(micro_batches);
        for index in share.clone() {
            let last = index + 1 == share.end;
            self.run(index, compute, last.then_some(&mut *flight))?;
        }
        flight.launch_rest(&mut self.gradients, &mut self.comm, total);
        let waiting = self.comm.runtime().now();
        let loss = flight.land(&mut self.gradients, total, self.comm.world_size())?;
        Ok((loss, self.comm.runtime().now().saturating_sub(waiting)))
    }

    /// Computes one micro-batch. With a flight, it is the last, and its gradients leave as they become final.
    fn run(
        &mut self,
        index: usize,
        compute: &mut Compute<'_, M>,
        mut flight: Option<&mut Flight>,
    ) -> Result<()> {
        let Self { comm, model, gradients, .. } = self;
        gradients.begin();
        let mut ready = |parameter: usize, values: Values<'_>| {
            gradients.report(parameter, values)?;
            if let Some(flight) = &mut flight {
                flight.launch_final(gradients, comm);
            }
            Ok(())
        };
        let loss = compute(model, index, &mut ready).map_err(Error::compute)?;
        gradients.end(loss);
        Ok(())
    }

    fn try_update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        for parameter in self.gradients.parameters() {
            let Some(gradient) = self.gradients.mean(parameter) else { continue };
            params::write(&mut self.model, parameter, |values| {
                optimizer.update(parameter, values, gradient)
            })?;
        }
        Ok(())
    }

    /// Aborts the job if something failed that the other ranks cannot know.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            if !matches!(error, Error::MicroBatchesDiffer { .. } | Error::NoMicroBatches) {
                tracing::warn!(%error, "training ends the job");
                self.comm.abort();
            }
            self.forget();
        }
        result
    }

    /// Forgets all gradients.
    pub(crate) fn forget(&mut self) {
        self.gradients.forget();
        self.micro_batches = 0;
    }
}

impl<M: Params> Ddp<M> {
    /// As [`step_with`](Self::step_with), for a model that is a [`Block`]: `batch` gives a micro-batch's input, and
    /// the function that computes the loss, and its gradient, from the model's output.
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
    pub fn step<A, L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(f32, A), BoxError>,
    {
        self.step_with(micro_batches, |model, index, ready| there_and_back(model, batch(index)?, ready))
    }

    /// As [`accumulate_with`](Self::accumulate_with), for a model that is a [`Block`].
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
    pub fn accumulate<A, L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(f32, A), BoxError>,
    {
        self.accumulate_with(micro_batches, |model, index, ready| there_and_back(model, batch(index)?, ready))
    }
}

/// Goes forward and backward.
fn there_and_back<A, L>(
    model: &mut (impl Block<A> + ?Sized),
    (input, loss): (A, L),
    ready: &mut Ready<'_>,
) -> Result<f32, BoxError>
where
    L: FnOnce(A) -> Result<(f32, A), BoxError>,
{
    let (output, saved) = model.forward(input)?;
    let (loss, output_gradient) = loss(output)?;
    model.backward(saved, output_gradient, ready)?;
    Ok(loss)
}

/// Computes a micro-batch and reports its gradients.
type Compute<'a, M> = dyn FnMut(&mut M, usize, &mut Ready<'_>) -> Result<f32, BoxError> + 'a;

/// What is being reduced.
#[derive(Debug, Default)]
struct Flight {
    /// The first buckets of the plan.
    buckets: Vec<PendingFlat>,
    loss: Option<Pending<Buffer<f32>>>,
    tally: Option<Pending<Buffer<i64>>>,
}

impl Flight {
    /// Launches the buckets that are final and whose predecessors are launched.
    fn launch_final(&mut self, gradients: &mut Gradients, comm: &mut Communicator) {
        while self.buckets.len() < gradients.bucket_count() && gradients.is_final(self.buckets.len()) {
            self.buckets.push(gradients.take_sum(self.buckets.len()).start_sum(comm));
        }
    }

    /// Launches the buckets that are left, and what says what all of them contain.
    fn launch_rest(&mut self, gradients: &mut Gradients, comm: &mut Communicator, micro_batches: usize) {
        for bucket in self.buckets.len()..gradients.bucket_count() {
            self.buckets.push(gradients.take_sum(bucket).start_sum(comm));
        }
        let (loss, tally) = gradients.take_tally(micro_batches);
        self.loss = Some(comm.start_all_reduce(vec![loss], ReduceOp::Sum));
        self.tally = Some(comm.start_all_reduce(tally, ReduceOp::Sum));
    }

    /// Waits for everything, divides by the number of micro-batches, and gives the mean loss.
    fn land(&mut self, gradients: &mut Gradients, micro_batches: usize, world_size: usize) -> Result<f32> {
        let mut means = Vec::with_capacity(self.buckets.len());
        for bucket in self.buckets.drain(..) {
            let mut mean = bucket.wait()?;
            mean.slice_mut(0, mean.len()).divide(micro_batches);
            means.push(mean);
        }
        let mut loss = [0.0];
        if let Some(sum) = self.loss.take() {
            loss.copy_from_slice(&flat::wait(sum)?);
            ValuesMut::F32(&mut loss).divide(micro_batches);
        }
        let sums = self.tally.take().map_or_else(|| Ok(Vec::new().into()), flat::wait)?;
        let tally = Tally::decode(&sums);
        if !tally.agrees(world_size) {
            return Err(Error::MicroBatchesDiffer { expected: micro_batches, computed: tally.computed });
        }
        if micro_batches == 0 {
            return Err(Error::NoMicroBatches);
        }
        gradients.synchronised(means, tally.used());
        Ok(loss[0])
    }
}

/// Gives every rank rank 0's parameters.
fn broadcast(comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
    for parameter in 0..model.infos().len() {
        if model.infos()[parameter].same_as.is_none() {
            params::write(model, parameter, |values| {
                match values {
                    ValuesMut::F32(values) => comm.broadcast(values, 0),
                    ValuesMut::F64(values) => comm.broadcast(values, 0),
                    ValuesMut::F16(values) => comm.broadcast(values, 0),
                    ValuesMut::Bf16(values) => comm.broadcast(values, 0),
                }
                .map_err(Error::communication)
            })?;
        }
    }
    Ok(())
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({:?}, {} buckets)", self.comm, self.gradients.bucket_count())
    }
}
