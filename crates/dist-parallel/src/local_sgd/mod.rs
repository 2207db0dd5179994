//! Local SGD (Stich, 2018, arXiv:1805.09767) and DiLoCo (Douillard et al., 2023, arXiv:2311.08105): ranks train
//! independently between synchronisation points.
//!
//! Use it on links that need longer for a step's gradients than the step takes.

mod checkpoint;
mod weight;

use std::fmt;

use dist_collectives::{Communicator, ReduceOp};

pub(crate) use checkpoint::SyncedModel;

use self::weight::{RankWeight, StepWeights};
use crate::block_range::whole;
use crate::engine::{Agreement, StepEngine, Work, engine_methods};
use crate::flat::Flat;
use crate::fsdp::Precision;
use crate::loss::WeightedLoss;
use crate::trainer::{Evaluation, with_evaluation};
use crate::{
    Block, BoxError, BucketBytes, BucketPlace, BucketPlan, DdpOptions, Error, Loss, Momentum, Optimizer,
    Params, Result, Sgd, SgdOptions, Shards, StepDescriptor, StepReport, TrainingCall, ValuesMut, agreement,
};

/// A trainer in which every rank steps on its own data with its own optimizer, and all ranks synchronise after a
/// number of steps.
///
/// The trained parameters are then equal on all ranks, to the last bit. [Buffers](crate::ParamInfo::buffer), such as
/// the running means of a batch norm, are synchronised too, by the ranks with a weight. A frozen parameter that a
/// block changes keeps each rank's own values.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
/// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
/// # struct Number([ParamInfo; 1], [f32; 1]);
/// # impl Params for Number {
/// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
/// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
/// #         f(Values::F32(&self.1));
/// #         Ok(())
/// #     }
/// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
/// #         f(ValuesMut::F32(&mut self.1));
/// #         Ok(())
/// #     }
/// # }
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 2, |transport| {
///     let comm = Communicator::new(transport);
///     let target = comm.rank() as f32;
///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [5.0]);
///     let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(4)).unwrap();
///     for _ in 0..20 {
///         // Any computation and any optimizer.
///         let inner_step = |model: &mut Number| {
///             let error = model.1[0] - target;
///             model.1[0] -= 0.3 * error;
///             Ok(error * error)
///         };
///         local.step_with(inner_step).unwrap();
///     }
///     let traffic = local.traffic();
///     assert_eq!((traffic.steps, traffic.sync_points), (20, 5));
///     assert_eq!(traffic.bytes_saved(), 3 * traffic.bytes_sent);
///     local.model().1[0]
/// });
/// assert!(outcome.results.iter().all(|weight| (weight - 0.5).abs() < 0.02));
/// ```
///
/// Without weights, every rank takes the same number of steps and has the same weight. If the steps have weights by
/// their [`Loss`], the mean of the ranks' parameters, or of their changes, is weighted. A rank's weight is that of
/// its steps since the last synchronisation point. Ranks can then take different numbers of steps, and a rank that
/// has run out of data can continue to [synchronise](Self::synchronise).
///
/// An error on one rank aborts the job, so that no other rank waits for it.
///
/// # Checkpoints
///
/// The state that all ranks share right after a synchronisation point can be [saved](Self::save): the parameters, and
/// with DiLoCo the velocity. Each rank can save the state of its own optimizer with it.
pub struct LocalSgd<M> {
    /// The model and this rank's own gradients and updates.
    pub(crate) engine: StepEngine<M>,
    options: LocalSgdOptions,
    plan: BucketPlan,
    /// For each bucket, the parameters of the last synchronisation point (DiLoCo only).
    start: Vec<Flat>,
    outer: Option<Sgd>,
    /// The number of this rank's updates since the last synchronisation.
    steps: usize,
    /// The number of steps up to the last synchronisation, as if all periods were complete.
    steps_before: u64,
    losses: f32,
    count: u64,
    weights: StepWeights,
    traffic: LocalTraffic,
}

/// Settings of [`LocalSgd`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSgdOptions {
    /// The number of steps between two synchronisation points, at least 1.
    pub inner_steps: usize,
    /// The combination of the ranks' parameters.
    pub outer: OuterStep,
}

/// The combination of the ranks' parameters at a synchronisation point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OuterStep {
    /// Their mean, weighted by the ranks' weights: local SGD.
    Average,
    /// A step with Nesterov momentum from the parameters of the last synchronisation point along the mean of the
    /// ranks' changes: DiLoCo. It stores these parameters and a velocity of the same size.
    Nesterov {
        /// The learning rate; 0.7 in the paper.
        learning_rate: f64,
        /// The momentum; 0.9 in the paper.
        momentum: f64,
    },
}

impl LocalSgdOptions {
    /// Returns local SGD with `inner_steps` steps between synchronisation points.
    pub const fn average(inner_steps: usize) -> Self {
        Self { inner_steps, outer: OuterStep::Average }
    }

    /// Returns DiLoCo with `inner_steps` steps between synchronisation points, and the paper's outer step.
    #[doc(alias = "DiLoCo")]
    pub const fn diloco(inner_steps: usize) -> Self {
        Self { inner_steps, outer: OuterStep::Nesterov { learning_rate: 0.7, momentum: 0.9 } }
    }
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LocalStep {
    /// This rank's loss or sum of losses.
    pub loss: f32,
    /// The result of the synchronisation, if the step ended with one.
    pub sync_point: Option<SyncPoint>,
}

/// The result of a synchronisation.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SyncPoint {
    /// The mean loss of all ranks' steps since the last synchronisation point, [weighted](crate::Loss) if they have
    /// weights.
    pub loss: f32,
    /// The number of bytes that this rank sent.
    pub bytes_sent: u64,
}

/// The bytes that were sent, and those that were avoided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalTraffic {
    /// The number of this rank's steps.
    pub steps: u64,
    /// The number of synchronisation points.
    pub sync_points: u64,
    /// The bytes that this rank has sent for all synchronisations, counted by the transport.
    pub bytes_sent: u64,
    /// The bytes that it would have sent with a synchronisation after each of these steps. All synchronisations send
    /// the same.
    pub bytes_without: u64,
}

impl LocalTraffic {
    /// Returns the bytes that were avoided, compared with a synchronisation after each step.
    pub const fn bytes_saved(&self) -> u64 {
        self.bytes_without - self.bytes_sent
    }
}

impl OuterStep {
    fn optimizer(self) -> Result<Option<Sgd>> {
        let Self::Nesterov { learning_rate, momentum } = self else { return Ok(None) };
        let momentum = Momentum::Nesterov(momentum);
        let options = SgdOptions { learning_rate, momentum, weight_decay: 0.0 };
        Sgd::named("diloco", options).map(Some)
    }
}

impl<M: Params> LocalSgd<M> {
    /// Starts to train `model` on all ranks of the group, with the parameters of rank 0.
    ///
    /// # Errors
    /// A setting is out of range, or parameters or options differ between ranks: every rank gets the error.
    /// Communication fails.
    pub fn new(comm: Communicator, model: M, options: LocalSgdOptions) -> Result<Self> {
        Self::with_precision(comm, model, options, Precision::default())
    }

    /// Starts training like [`new`](Self::new), with other types of master parameters and gradients. The ranks combine
    /// their master parameters. Values that a [step](Self::step_with) writes into the model become master values.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_precision(
        mut comm: Communicator,
        model: M,
        options: LocalSgdOptions,
        precision: Precision,
    ) -> Result<Self> {
        let settings = [
            agreement::setting("the number of inner steps", options.inner_steps),
            agreement::setting("the outer step", options.outer),
            agreement::setting("the precision", precision),
        ];
        agreement::check(&mut comm, model.infos(), &settings)?;
        if options.inner_steps == 0 {
            return Err(Error::Setting { name: "the number of inner steps", value: 0.0 });
        }
        let outer = options.outer.optimizer()?;
        let of_engine = DdpOptions::default().with_precision(precision);
        let engine = StepEngine::replicated(comm, model, of_engine, None, Agreement::OwnRank)?;
        let mut local = Self {
            plan: BucketPlan::new(engine.infos(), BucketBytes::default()),
            engine,
            options,
            start: Vec::new(),
            outer,
            steps: 0,
            steps_before: 0,
            losses: 0.0,
            count: 0,
            weights: StepWeights::Equal,
            traffic: LocalTraffic::default(),
        };
        let begun = local.start_here();
        local.engine.or_abort(begun)?;
        Ok(local)
    }

    /// Takes a step on this rank alone. `inner` computes, updates the parameters and returns the [`Loss`] with its
    /// weight. After `inner_steps` steps the ranks synchronise.
    ///
    /// Each rank must use other examples, otherwise all compute the same: [`data`](crate::data) shows how to assign
    /// them.
    ///
    /// # Errors
    /// `inner` fails; only some of the steps since the last synchronisation point have weights; the errors of
    /// [`synchronise`](Self::synchronise).
    pub fn step_with<C: Loss>(
        &mut self,
        inner: impl FnOnce(&mut M) -> Result<C, BoxError>,
    ) -> Result<LocalStep> {
        let weights = if C::WEIGHTED { StepWeights::Given } else { StepWeights::Equal };
        let mut inner = Some(inner);
        let mut step = |model: &mut M| {
            let inner = inner.take().ok_or("a step is computed once")?;
            inner(model).map(Loss::weighted)
        };
        let computed = self.begin(weights).and_then(|()| {
            let computed = self.engine.own_step(&mut step)?;
            self.engine.adopt_model_values()?;
            Ok(computed)
        });
        let (loss, count) = self.engine.or_abort(computed)?;
        self.engine.end_step_outside(count > 0);
        self.record((loss, count));
        Ok(LocalStep { loss, sync_point: self.end_step()? })
    }

    /// Returns an error if only some of the steps since the last synchronisation point have weights.
    fn begin(&mut self, weights: StepWeights) -> Result<()> {
        if self.weights != weights && (self.steps > 0 || self.count > 0) {
            return Err(Error::PartlyWeighted);
        }
        self.weights = weights;
        Ok(())
    }

    fn record(&mut self, (loss, count): WeightedLoss) {
        self.losses += loss;
        self.count = self.count.saturating_add(count);
    }

    /// Counts an update of this rank's parameters. The ranks then synchronise if it is the last one of its period.
    fn end_step(&mut self) -> Result<Option<SyncPoint>> {
        self.steps += 1;
        self.traffic.steps += 1;
        if self.steps < self.options.inner_steps {
            return Ok(None);
        }
        self.synchronise().map(Some)
    }

    /// Synchronises the ranks now, for example after the last step of a training. Every rank calls this, after the
    /// same number of steps unless they have weights.
    ///
    /// With weights, a rank without a step, or with weight 0, only receives the parameters of the others. A rank that
    /// has run out of data therefore calls this until it returns [`ZeroWeight`](Error::ZeroWeight) without steps,
    /// which all ranks get. It waits for the others' next synchronisation, at most for the communicator's timeout.
    ///
    /// ```
    /// # use dist_collectives::Communicator;
    /// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
    /// # struct Number([ParamInfo; 1], [f32; 1]);
    /// # impl Params for Number {
    /// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
    /// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
    /// #         f(Values::F32(&self.1));
    /// #         Ok(())
    /// #     }
    /// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
    /// #         f(ValuesMut::F32(&mut self.1));
    /// #         Ok(())
    /// #     }
    /// # }
    /// use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
    /// use dist_parallel::Error;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let comm = Communicator::new(transport);
    ///     // Rank 0 has five texts, rank 1 has one: of so many tokens.
    ///     let mut texts = if comm.rank() == 0 { vec![1, 2, 0, 0, 3] } else { vec![6] }.into_iter();
    ///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [0.0]);
    ///     let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(2)).unwrap();
    ///     loop {
    ///         let with_synced_model = match texts.next() {
    ///             Some(tokens) => local.step_with(|model| Ok((model.1[0], tokens))).map(drop),
    ///             None => local.synchronise().map(drop),
    ///         };
    ///         match with_synced_model {
    ///             // Somebody has taken steps, though they may count for nothing.
    ///             Ok(()) | Err(Error::ZeroWeight { micro_batches: 1.. }) => {}
    ///             Err(Error::ZeroWeight { .. }) => break,
    ///             Err(error) => panic!("{error}"),
    ///         }
    ///     }
    ///     local.traffic().sync_points
    /// });
    /// // After two steps, and after rank 0's last one. It is none where nothing counts, or nothing is left.
    /// assert_eq!(outcome.results, [2; 2]);
    /// ```
    ///
    /// # Errors
    /// [`ZeroWeight`](Error::ZeroWeight) on every rank if the steps have weights and their sum is 0. It contains the
    /// number of steps. Training can continue. Parameters stay unchanged and can differ between ranks until the next
    /// synchronisation with a weight.
    ///
    /// [`InnerStepsDiffer`](Error::InnerStepsDiffer) if the ranks have taken different numbers of steps without
    /// weights, and [`PartlyWeighted`](Error::PartlyWeighted) if only some ranks' steps have weights. Every rank gets
    /// this error, and the job is aborted.
    ///
    /// The model does not hand out its parameters, or communication fails.
    pub fn synchronise(&mut self) -> Result<SyncPoint> {
        self.engine.announce("synchronise");
        let sent_before = self.engine.world.traffic().bytes_sent;
        let combined = self.try_synchronise();
        // The count restarts even if the total weight is 0.
        let steps = std::mem::take(&mut self.steps);
        self.set_steps(self.steps_before + self.options.inner_steps as u64);
        (self.losses, self.count) = (0.0, 0);
        if let Err(Error::InnerStepsDiffer { .. } | Error::PartlyWeighted) = combined {
            // No rank aborts the job before all have found the error. If the barrier fails, the job is already
            // aborted.
            let _all_know = self.engine.world.barrier();
        }
        let loss = self.engine.or_abort(combined)?;
        let bytes_sent = self.engine.world.traffic().bytes_sent - sent_before;
        self.traffic.sync_points += 1;
        self.traffic.bytes_sent += bytes_sent;
        self.traffic.bytes_without += bytes_sent * (steps as u64).max(1);
        Ok(SyncPoint { loss, bytes_sent })
    }

    /// Evaluates `micro_batches` micro-batches right after a synchronisation point and returns their mean loss, on all
    /// ranks. Every rank calls this with the same number, and computes a contiguous share.
    ///
    /// It works like [`Ddp::evaluate`](crate::Ddp::evaluate).
    ///
    /// # Errors
    /// [`NotSynchronised`](Error::NotSynchronised) on every rank if there were steps since the last synchronisation
    /// point. The errors of [`Ddp::evaluate`](crate::Ddp::evaluate).
    pub fn evaluate<A, C: Loss>(
        &mut self,
        micro_batches: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
    {
        with_evaluation(input, loss, |evaluation| self.evaluate_batches(micro_batches, evaluation))
    }

    /// [Evaluates](Self::evaluate) micro-batches.
    pub(crate) fn evaluate_batches<A>(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
    {
        self.engine.announce("evaluate");
        let since = agreement::gather(&mut self.engine.world, [self.steps as u64]);
        let since = self.engine.or_abort(since)?;
        match since.iter().map(|[steps]| *steps).max() {
            None | Some(0) => {
                // The ranks may have updated and clipped differently.
                self.engine.updates.forget();
                self.engine.evaluate(micro_batches, Work::of_evaluation(whole, evaluation))
            }
            Some(steps) => {
                Err(Error::NotSynchronised { steps: usize::try_from(steps).unwrap_or(usize::MAX) })
            }
        }
    }

    /// Computes this rank's gradients of its share of `micro_batches` micro-batches, accumulated ones included.
    pub(crate) fn step_work<A>(
        &mut self,
        micro_batches: usize,
        work: Work<'_, '_, M, A>,
    ) -> Result<StepReport> {
        let descriptor = self.engine.descriptor(TrainingCall::Step, micro_batches, work.weighted());
        if descriptor.micro_batches == 0 {
            return Err(Error::NoMicroBatches);
        }
        self.step_of(descriptor, micro_batches, work)
    }

    /// Computes this rank's gradients of its own micro-batches. Returns `None` on every rank if no rank has any.
    ///
    /// The ranks add up their numbers of micro-batches, because a rank does not know otherwise that training is over.
    pub(crate) fn join_work<A>(
        &mut self,
        own: usize,
        work: Work<'_, '_, M, A>,
    ) -> Result<Option<StepReport>> {
        let mut all = [(own + self.engine.micro_batches) as u64];
        self.engine.announce("join");
        let added = self.engine.world.all_reduce(&mut all, ReduceOp::Sum).map_err(Error::communication);
        self.engine.or_abort(added)?;
        if all == [0] {
            return Ok(None);
        }
        self.step_of(StepDescriptor::new(TrainingCall::Join, 0, work.weighted()), own, work).map(Some)
    }

    /// Accumulates this rank's gradients of its share of `micro_batches` micro-batches.
    pub(crate) fn accumulate_work<A>(
        &mut self,
        micro_batches: usize,
        work: Work<'_, '_, M, A>,
    ) -> Result<()> {
        let begun = self.begin(StepWeights::of_micro_batches(work.weighted()));
        self.or_abort(begun)?;
        let accumulated = self.engine.accumulate(micro_batches, work);
        self.record(self.engine.of_call);
        self.or_abort(accumulated)
    }

    fn step_of<A>(
        &mut self,
        descriptor: StepDescriptor,
        given: usize,
        work: Work<'_, '_, M, A>,
    ) -> Result<StepReport> {
        let begun = self.begin(StepWeights::of_micro_batches(descriptor.weighted));
        self.or_abort(begun)?;
        self.engine.begin_to_compute();
        let report = self.engine.step_of(descriptor, given, work);
        self.record(self.engine.of_call);
        match report {
            // Other ranks have some.
            Err(Error::NoMicroBatches) => {
                self.engine.end_step_outside(false);
                Ok(StepReport::without_micro_batches())
            }
            report => self.or_abort(report),
        }
    }

    /// Aborts the job if this rank's own computation fails. Every error concerns this rank alone,
    /// also one that other trainers return on all ranks alike.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        self.engine.or_abort(result.map_err(|error| Error::compute(error.into())))
    }

    /// Updates this rank's parameters. The ranks may then synchronise.
    pub(crate) fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.engine.update(optimizer)?;
        self.end_step().map(drop)
    }

    /// Updates this rank's parameters if the norm of its gradients is finite. A step that is skipped counts all the
    /// same, so that all ranks synchronise together.
    pub(crate) fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let is_finite = self.engine.gradient_norm()?.is_finite();
        if is_finite {
            self.engine.update(optimizer)?;
        }
        self.end_step()?;
        Ok(is_finite)
    }

    pub(crate) const fn options(&self) -> LocalSgdOptions {
        self.options
    }

    /// Returns the number of this rank's steps since the last synchronisation.
    pub(crate) const fn steps(&self) -> usize {
        self.steps
    }

    /// Restarts from the present parameters, which are equal on all ranks.
    pub(crate) fn start_here(&mut self) -> Result<()> {
        (self.steps, self.losses, self.count) = (0, 0.0, 0);
        if matches!(self.options.outer, OuterStep::Average) {
            return Ok(());
        }
        let buckets = self.plan.buckets().iter();
        self.start = buckets.map(|bucket| self.engine.pack(bucket)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Returns the bytes that were sent, and those that were avoided.
    pub const fn traffic(&self) -> LocalTraffic {
        self.traffic
    }

    engine_methods!(pub mode);
    engine_methods!(pub communicator);
    engine_methods!(pub model M);

    /// Continues after this number of steps.
    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.steps_before = steps;
        Shards::set_steps(&mut self.engine, steps);
    }

    /// Ends the training and returns the communicator and the model.
    pub fn into_parts(self) -> (Communicator, M) {
        self.engine.into_parts()
    }

    /// Combines the ranks' parameters and returns the mean loss.
    fn try_synchronise(&mut self) -> Result<f32> {
        let Self { engine, plan, start, outer, steps, losses, count, weights, .. } = self;
        let weight = RankWeight::agree(&mut engine.world, *steps, *count, *weights)?;
        let mut loss = [*losses];
        let op = if weight.total.is_some() { ReduceOp::Sum } else { ReduceOp::Mean };
        engine.world.all_reduce(&mut loss, op).map_err(Error::communication)?;
        ValuesMut::F32(&mut loss).divide(weight.total.unwrap_or((*steps).max(1)));
        for (number, bucket) in plan.buckets().iter().enumerate() {
            let mut own = engine.pack(bucket)?;
            let Some(optimizer) = outer else {
                weight.mean(&mut own, &mut engine.world)?;
                engine.unpack(bucket, &own)?;
                continue;
            };
            let start = &mut start[number];
            own.subtract_from(start);
            weight.mean(&mut own, &mut engine.world)?;
            for &BucketPlace { parameter, offset, len } in &bucket.places {
                optimizer.update(parameter, start.slice_mut(offset, len), own.slice(offset, len))?;
            }
            engine.unpack(bucket, start)?;
        }
        engine.finish_outer_step()?;
        Ok(loss[0])
    }
}

impl<M> fmt::Debug for LocalSgd<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalSgd({:?}, {} of {} steps)", self.engine.world, self.steps, self.options.inner_steps)
    }
}
