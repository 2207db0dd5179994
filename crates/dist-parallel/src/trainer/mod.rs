//! One interface of all trainers, so that a program chooses its strategy by a value.
//!
//! [`TrainerOptions::build`] returns a [`Trainer`] for any [`Strategy`].

mod batches;
mod data_parallel;
mod local;
mod methods;
mod options;
mod pipeline;
mod sharded;
mod strategy;

use std::fmt;
use std::path::Path;

pub use batches::{BatchFn, Batches, Computation, ComputeFn, Evaluation, LossFn};
pub(crate) use batches::{with_batches, with_computation, with_evaluation};
use dist_collectives::Communicator;
pub use options::TrainerOptions;
pub use strategy::{StageCopies, Strategy};

use crate::abort::or_abort;
use crate::checkpoint::{Checkpoints, Saving, Shards, WeightOptions, WeightReport, load_weights};
use crate::pipeline::Pipeline;
use crate::{
    BoxError, Error, Loss, Optimizer, OptimizerState, ParamInfo, Params, Ready, Result, Sequence, StepReport,
    Values, params,
};

/// A training of a [`Sequence`] on all ranks, by any [`Strategy`].
///
/// [`TrainerOptions::build`] returns a trainer for the strategy that a program has read from its arguments.
/// [`Ddp`](crate::Ddp) and [`Fsdp`](crate::fsdp::Fsdp) are trainers too.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::optim::{Sgd, SgdOptions};
/// use dist_parallel::pipeline::PlainVectors;
/// use dist_parallel::trainer::{Strategy, TrainerOptions};
/// # use dist_parallel::model::{Ready, Saved, Slot};
/// # use dist_parallel::{Block, BoxError, FloatType, ParamInfo, Params, Sequence, Values};
/// # struct Scale { infos: [ParamInfo; 1], slots: [Slot; 1] }
/// # impl Scale {
/// #     fn model() -> Sequence<Vec<f32>> {
/// #         let block = |name| {
/// #             let infos = [ParamInfo::new(name, [1], FloatType::F32)];
/// #             Box::new(Self { infos, slots: [Slot::from(vec![1.0_f32])] }) as Box<dyn Block<Vec<f32>>>
/// #         };
/// #         Sequence::new(vec![block("first"), block("second")]).unwrap()
/// #     }
/// #     fn factor(&self) -> Result<f32, BoxError> {
/// #         match self.slots[0].values()? {
/// #             Values::F32(values) => Ok(values[0]),
/// #             _ => unreachable!(),
/// #         }
/// #     }
/// # }
/// # impl Params for Scale {
/// #     fn infos(&self) -> &[ParamInfo] { &self.infos }
/// #     fn slots(&self) -> &[Slot] { &self.slots }
/// #     fn slots_mut(&mut self) -> &mut [Slot] { &mut self.slots }
/// # }
/// # impl Block<Vec<f32>> for Scale {
/// #     fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
/// #         let factor = self.factor()?;
/// #         Ok((input.iter().map(|x| factor * x).collect(), Saved::new(input)))
/// #     }
/// #     fn backward(
/// #         &mut self, saved: Saved, gradient: Vec<f32>, ready: &mut Ready<'_>,
/// #     ) -> Result<Option<Vec<f32>>, BoxError> {
/// #         let input: Vec<f32> = saved.take()?;
/// #         ready(0, Values::F32(&[input.iter().zip(&gradient).map(|(x, g)| x * g).sum()]))?;
/// #         let factor = self.factor()?;
/// #         Ok(Some(gradient.iter().map(|g| factor * g).collect()))
/// #     }
/// # }
///
/// fn train(strategy: Strategy, comm: Communicator) -> dist_parallel::Result<f32> {
///     // Two blocks that multiply by one number each; they shall learn 3 together.
///     let model = Scale::model();
///     let options = TrainerOptions::new(strategy).with_micro_batches(4);
///     let mut trainer = options.build(comm, model, PlainVectors)?;
///     let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() })?;
///     for _ in 0..40 {
///         trainer.step(4, |micro_batch| {
///             let x = micro_batch as f32 / 4.0 + 0.5;
///             Ok((vec![x], move |output: Vec<f32>| {
///                 let error = output[0] - 3.0 * x;
///                 Ok((error * error, vec![2.0 * error]))
///             }))
///         })?;
///         trainer.clip_gradients(10.0)?;
///         trainer.update(&mut sgd)?;
///     }
///     trainer.synchronise_parameters()?;
///     let mut product = 1.0;
///     trainer.for_each_parameter(&mut |_, values| {
///         if let dist_parallel::Values::F32(values) = values {
///             product *= values[0];
///         }
///     })?;
///     Ok(product)
/// }
///
/// for strategy in ["ddp", "fsdp", "pipeline:1f1b", "local_sgd:4"] {
///     let strategy: Strategy = strategy.parse()?;
///     // Two ranks, as threads.
///     let outcome = dist_transport::sim::run(1, 2, move |transport| {
///         train(strategy, Communicator::new(transport)).unwrap()
///     });
///     assert!(outcome.results.iter().all(|product| (product - 3.0).abs() < 1e-3), "{strategy}");
/// }
/// # Ok::<_, dist_parallel::Error>(())
/// ```
///
/// # What works with what
///
/// A call or an option that does not work with a strategy returns [`NotWithStrategy`](Error::NotWithStrategy) on every
/// rank. The page "Choose a strategy" of the guide has a table of all combinations.
///
/// # Calls of all ranks
///
/// Every rank calls the same methods in the same order, except `strategy`, `infos`, `communicator`, `rank`,
/// `world_size`, `model` and `without_gradient`, which are local.
///
/// # Implementing a trainer
///
/// The methods that take closures ([`step`](#method.step), [`evaluate`](#method.evaluate) …) are functions of
/// `dyn Trainer<A>`. They put the closures into [`Batches`], [`Evaluation`] or [`Computation`] and call the method of
/// the trait with that argument.
pub trait Trainer<A>: fmt::Debug {
    /// Returns the strategy. [`Ddp`](crate::Ddp) in a world of one is [`Strategy::Single`].
    fn strategy(&self) -> Strategy;

    /// Returns all parameters of the model.
    fn infos(&self) -> &[ParamInfo];

    /// Returns the communicator of all ranks.
    fn communicator(&self) -> &Communicator;

    /// Returns the communicator of all ranks, for other messages between them. If you set its timeout or reduction
    /// order, later calls use it.
    fn communicator_mut(&mut self) -> &mut Communicator;

    /// Returns this rank's number.
    fn rank(&self) -> usize {
        self.communicator().rank()
    }

    /// Returns the number of ranks.
    fn world_size(&self) -> usize {
        self.communicator().world_size()
    }

    /// Takes a [step](#method.step).
    ///
    /// # Errors
    /// Those of [`step`](#method.step).
    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport>;

    /// Takes a [step by the user's own code](#method.step_with).
    ///
    /// # Errors
    /// Those of [`step_with`](#method.step_with).
    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport>;

    /// [Accumulates](#method.accumulate) micro-batches.
    ///
    /// # Errors
    /// Those of [`accumulate`](#method.accumulate).
    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()>;

    /// [Joins](#method.join) with the micro-batches that this rank has.
    ///
    /// # Errors
    /// Those of [`join`](#method.join).
    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>>;

    /// [Evaluates](#method.evaluate) micro-batches.
    ///
    /// # Errors
    /// Those of [`evaluate`](#method.evaluate).
    fn evaluate_batches(&mut self, micro_batches: usize, evaluation: Evaluation<'_, A>)
    -> Result<StepReport>;

    /// Updates the parameters by their gradients. Parameters without a gradient stay unchanged. Set the learning rate
    /// of a step before: [`Optimizer::set_learning_rate`].
    ///
    /// The number of an optimizer's slice is the index of its parameter in the whole model, so that one
    /// [`ParamGroups`](crate::optim::ParamGroups) is for every strategy. With [`Strategy::LocalSgd`] each rank updates its own
    /// model, and the ranks synchronise after `inner_steps` updates.
    ///
    /// # Errors
    /// The optimizer or communication fails. [`StepPanicked`](Error::StepPanicked) if a step has panicked and no step
    /// has succeeded since.
    fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()>;

    /// Returns the Euclidean norm of all gradients as one vector. It is rounded once, so its bits do not depend on the
    /// strategy. With [`Strategy::LocalSgd`] it is that of this rank's own gradients.
    ///
    /// # Errors
    /// Communication fails.
    fn gradient_norm(&mut self) -> Result<f64>;

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. Nothing
    /// changes if the norm is infinite or NaN: check it before the update.
    ///
    /// # Errors
    /// Communication fails.
    #[doc(alias = "clip_grad_norm_")]
    fn clip_gradients(&mut self, max: f64) -> Result<f64>;

    /// Scales all gradients by a factor, for example that of a [`LossScaler`](crate::optim::LossScaler). It needs no
    /// communication. All ranks call it with the same factor, and the next step compares it.
    fn scale_gradients(&mut self, factor: f64);

    /// [Updates](Self::update) the parameters if the norm of the gradients is finite, and returns `true`. Otherwise
    /// changes nothing and returns `false`. The decision is the same on every rank, except with
    /// [`Strategy::LocalSgd`], where each rank has gradients of its own and a skipped step counts as a step.
    ///
    /// # Errors
    /// The errors of [`update`](Self::update).
    fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let is_finite = self.gradient_norm()?.is_finite();
        if is_finite {
            self.update(optimizer)?;
        }
        Ok(is_finite)
    }

    /// Returns the names of the trained parameters on this rank for which no micro-batch of the last step had a
    /// gradient on any rank.
    #[doc(alias = "find_unused_parameters")]
    fn without_gradient(&self) -> Vec<&str>;

    /// Calls `f` on every rank with the index and all values of each parameter, buffers included. Tied parameters
    /// come once.
    ///
    /// # Errors
    /// Communication fails.
    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()>;

    /// Makes the parameters equal on all ranks. They already are, except between two synchronisation points of
    /// [`Strategy::LocalSgd`]. Call this at the end of the training.
    ///
    /// # Errors
    /// Communication fails.
    fn synchronise_parameters(&mut self) -> Result<()> {
        Ok(())
    }

    /// Sets forwards outside of steps and evaluations to training mode. A step is always in training mode, an
    /// evaluation never.
    fn train(&mut self);

    /// Sets forwards outside of steps and evaluations to evaluation mode. Every trainer begins with it.
    fn eval(&mut self);

    /// Returns the model. Its parameters may be freed.
    ///
    /// # Errors
    /// [`NotWithStrategy`](Error::NotWithStrategy): no rank of a pipeline has the whole model.
    fn model(&self) -> Result<&Sequence<A>>;

    /// Returns the model. If you change parameters, change them alike on every rank.
    ///
    /// # Errors
    /// Those of [`model`](Self::model).
    fn model_mut(&mut self) -> Result<&mut Sequence<A>>;

    /// Returns the pipeline, for example to draw its timeline. `None` for all other strategies.
    fn pipeline_mut(&mut self) -> Option<&mut Pipeline<A>> {
        None
    }

    /// Returns this rank's state, as [`Checkpoints`] save and load it.
    ///
    /// # Errors
    /// [`NotWithStrategy`](Error::NotWithStrategy): the strategy has other state too, or none that can be saved. Use
    /// [`save`](Self::save), which says more.
    fn shards(&mut self) -> Result<&mut dyn Shards>;

    /// Saves the training and returns when it is on the disk. Any strategy can load it on any number of ranks. The state
    /// of the ranks' own optimizers with [`Strategy::LocalSgd`] is only for [that strategy](crate::local_sgd::LocalSgd::load).
    ///
    /// # Errors
    /// The errors of [`Checkpoints::save`].
    fn save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<()> {
        checkpoints.save(self.shards()?, optimizer, step)
    }

    /// Copies the state and saves the copy while training continues.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::start_save`] and of [`save`](Self::save).
    fn start_save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<Saving> {
        checkpoints.start_save(self.shards()?, optimizer, step)
    }

    /// Loads the newest checkpoint of any strategy and returns its step, or `None` if there is none. Without an
    /// optimizer only the parameters are loaded. DiLoCo continues with its velocity, from a checkpoint of DiLoCo.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load`] and of [`save`](Self::save).
    fn load(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Option<u64>> {
        checkpoints.load(self.shards()?, optimizer)
    }

    /// Loads like [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load_step`] and of [`save`](Self::save).
    fn load_step(
        &mut self,
        checkpoints: &mut Checkpoints,
        step: u64,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        checkpoints.load_step(step, self.shards()?, optimizer)
    }

    /// Starts with the parameters of the newest checkpoint of any strategy, without any other state, and returns its
    /// step, or `None` if there is none.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    fn load_parameters(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        self.load(checkpoints, None)
    }

    /// Starts with the parameters of safetensors files.
    ///
    /// # Errors
    /// The errors of [`load_weights`] and of [`save`](Self::save).
    fn load_weights(&mut self, path: &Path, options: &WeightOptions) -> Result<WeightReport> {
        load_weights(path, self.shards()?, options)
    }

    /// Ends the training and returns the communicator of all ranks and this rank's part of the model: the whole model,
    /// or the stages of a pipeline in order. [`copy_parameters`](#method.copy_parameters) gives the whole model also
    /// for a pipeline. Local SGD synchronises first.
    ///
    /// # Errors
    /// Communication fails.
    fn into_parts(self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)>;
}

impl<A> dyn Trainer<A> + '_ {
    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks, accumulated ones included.
    ///
    /// `batch` receives the number of a micro-batch. It returns the input and a function that computes the [`Loss`]
    /// and its gradient from the model's output. The type of the loss decides between a mean over micro-batches and a
    /// weighted mean.
    ///
    /// Take the data of a micro-batch from its number: the strategy decides which rank computes it. A pipeline calls
    /// `batch` on two ranks, once for the input and once for the loss. With [`Strategy::LocalSgd`] gradients and loss
    /// are those of this rank's share.
    ///
    /// # Errors
    /// `batch`, a block or the loss fails. The ranks call for different numbers of micro-batches, or all for none.
    /// Only some micro-batches have a weight, or the sum of weights is 0. A pipeline's schedule is for
    /// [another number](Error::ScheduledMicroBatches) of micro-batches. Communication fails.
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

    /// Takes a step like [`step`](#method.step) for which `compute` runs forward and backward, reports each gradient
    /// and returns the [`Loss`] of a micro-batch.
    ///
    /// # Errors
    /// Those of [`step`](#method.step). [`NotWithStrategy`](Error::NotWithStrategy) if the strategy gathers parameters
    /// block by block, or if no rank has the whole model.
    pub fn step_with<C: Loss>(
        &mut self,
        micro_batches: usize,
        compute: impl FnMut(&mut Sequence<A>, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        with_computation(compute, |computation| self.step_computation(micro_batches, computation))
    }

    /// Computes gradients that the next step adds to its own. All micro-batches of a step have a loss of one type. A
    /// pipeline accumulates as many micro-batches as its schedule has.
    ///
    /// # Errors
    /// Those of [`step`](#method.step).
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

    /// Computes the mean gradients of the micro-batches that the ranks have, accumulated ones included: `own` on this
    /// rank, 0 if it has run out. Returns `None` on every rank if no rank has any: training is over.
    ///
    /// `batch` receives the number of a micro-batch among this rank's own. A rank that has run out still takes every
    /// step and has no weight in the means. The ranks of a pipeline compute the same micro-batches: all of them pass the
    /// number of the pipeline's own, at most as many as its schedule has.
    ///
    /// # Errors
    /// Those of [`step`](#method.step), and those of [`Pipeline::join`].
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

    /// Evaluates `micro_batches` micro-batches and returns their mean loss, on all ranks. Parameters and gradients
    /// stay unchanged. The mean has the bits of one process, with any strategy and any number of ranks.
    ///
    /// `input` returns the input of a micro-batch. `loss` receives the model's output and can compute other metrics
    /// too. Both receive the number of the micro-batch, and can run on different ranks.
    ///
    /// # Errors
    /// There are no micro-batches or their weight is 0. The ranks called for different evaluations. Local SGD is
    /// [between two synchronisation points](Error::NotSynchronised). `input`, `loss`, a block or communication fails.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        with_evaluation(input, loss, |evaluation| self.evaluate_batches(micro_batches, evaluation))
    }

    /// Copies all parameters and buffers into another model with the same parameters, on every rank.
    ///
    /// # Errors
    /// `model` has other parameters. Communication fails.
    pub fn copy_parameters(&mut self, model: &mut impl Params) -> Result<()> {
        let compared = same_parameters(self.infos(), model.infos());
        or_abort(self.communicator_mut(), compared)?;
        let mut copied = Ok(());
        self.for_each_parameter(&mut |index, values| {
            if copied.is_ok() {
                copied = params::write(model, index, |mut own| own.copy_from(values));
            }
        })?;
        or_abort(self.communicator_mut(), copied)
    }
}

/// Returns an error unless a model has these parameters.
fn same_parameters(expected: &[ParamInfo], found: &[ParamInfo]) -> Result<()> {
    let differs = (0..expected.len()).find(|&index| found.get(index) != Some(&expected[index]));
    differs.map_or(Ok(()), |index| {
        let there = found.get(index).map_or_else(|| "nothing".to_owned(), ToString::to_string);
        let source = format!("the model to copy to has {there} instead of {}", expected[index]).into();
        Err(Error::Model { parameter: expected[index].name.clone(), source })
    })
}
