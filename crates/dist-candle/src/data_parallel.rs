//! Data-parallel training in the user's own loop: a backward pass whose gradients are the mean over all ranks.

use std::fmt;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::VarMap;
use dist_parallel::checkpoint::{Checkpoints, Chunk, Saving, ShardMetadata, Shards, Slice};
use dist_parallel::internal::LoopSteps;
use dist_parallel::model::Pass;
use dist_parallel::optim::OptimizerState;
use dist_parallel::own_loop::gradient_norm;
use dist_parallel::step::StepReport;
use dist_parallel::{BoxError, Communicator, Ddp, DdpOptions, ParamInfo, Values, ValuesMut};

use crate::array::Array;
use crate::slices::Locked;
use crate::{AdamW, CandleError, TensorLoss, Variables, loss, slices};

/// Trains a candle model on several processes in a loop of your own.
///
/// Every rank runs the same program with its share of the data. A rank's backward pass is one call, and the rest of the loop
/// stays as it is, with any model, any number of inputs, and any optimizer of candle:
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
/// use dist_candle::DataParallel;
/// use dist_parallel::Communicator;
///
/// let varmap = VarMap::new();
/// let vars = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let model = candle_nn::linear(1, 1, vars.pp("line"))?;
/// let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.1)?;
///
/// // A world of one, unless `distctl run` or torchrun has started this process as one of several.
/// let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
/// for step in 0..300 {
///     // The rows of this step's batch that this rank has.
///     let rows = dp.share(8);
///     let x = Tensor::arange(rows.start as f32, rows.end as f32, &Device::Cpu)?.affine(0.125, 0.0)?.unsqueeze(1)?;
///     let target = x.affine(0.5, -1.0)?;
///     let loss = candle_nn::loss::mse(&model.forward(&x)?, &target)?;
///     let grads = dp.backward((&loss, rows.len() as u64))?;
///     optimizer.step(&grads)?;
/// }
/// assert!(dp.report().is_some_and(|report| report.loss < 0.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What every rank has
///
/// [`new`](Self::new) gives every rank the variables of rank 0. From then on all ranks change them alike, because all step
/// their optimizers with the same gradients: never with those of `loss.backward()` or `backward_step`, which are this rank's
/// alone. Whether the trained parameters are still the same is looked at in the first three steps and in every 64th; ranks
/// that have trained with different learning rates, say, then get
/// [`ParametersDiffer`](dist_parallel::Error::ParametersDiffer). Buffers are synchronised in every step, as
/// [`Variables`] says.
///
/// # Which sums are the same
///
/// A call of [`backward`](Self::backward) or [`accumulate`](Self::accumulate) computes one micro-batch on every rank. Gradients
/// are summed in the canonical order, over this rank's micro-batches first and then over the ranks, and divided once. A program
/// that computes the same micro-batches whatever the number of ranks, each rank the same power of two of neighbouring ones, so
/// trains the same bits on 1, 2 and 4 ranks; [`backward_each`](Self::backward_each) deals micro-batches like that. If the number
/// of ranks changes the micro-batches, as it does where a batch is divided by it, results are equal within rounding.
///
/// Either needs a model that computes a micro-batch alike on every rank. candle's own dropout draws from a generator that is
/// not seeded on the CPU, so that every run differs: use [`Dropout`](crate::Dropout) with [`pass`](Self::pass). Batch norm
/// mixes the samples of a micro-batch, so that the results depend on how samples are grouped.
///
/// # Errors
///
/// An error on one rank ends the job, and the other ranks' errors name it. Where ranks were asked for different things, as
/// different numbers of micro-batches ([`StepsDiffer`](dist_parallel::Error::StepsDiffer)), every rank gets the same error and
/// the job goes on: what was accumulated is forgotten, and the next step can be taken.
///
/// Variables have to be in this process's memory: training on a GPU is not supported.
pub struct DataParallel {
    ddp: Ddp<Variables>,
    report: Option<StepReport>,
    steps: LoopSteps,
    /// `true` between [`train`](Self::train) and [`eval`](Self::eval).
    trains: bool,
}

impl DataParallel {
    /// Begins to train all variables of `map` on all ranks. Every rank then has the values of rank 0. Call it when all layers
    /// are made.
    ///
    /// # Errors
    /// On every rank, if the variables differ between ranks in name, shape or type, naming the first that does and a rank
    /// ([`ModelsDiffer`](dist_parallel::Error::ModelsDiffer)). If there are no variables, or one is of a type that dist does
    /// not know. If communication fails.
    pub fn new(comm: Communicator, map: &VarMap) -> Result<Self, CandleError> {
        Self::with_variables(comm, Variables::from_var_map(map)?)
    }

    /// Begins to train these variables, of which some may be frozen, buffers, or unused.
    ///
    /// For other sizes of buckets, or for gradients that travel compressed, make a [`Ddp`] of the variables and turn it into a
    /// `DataParallel` with `from`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_variables(comm: Communicator, variables: Variables) -> Result<Self, CandleError> {
        Ok(Ddp::new(comm, variables, DdpOptions::default())?.into())
    }

    /// Computes the gradients of `loss` and returns their mean over all ranks, for the optimizer. Micro-batches that were
    /// [accumulated](Self::accumulate) are in the mean. All ranks call this, and as often.
    ///
    /// The store has a gradient, of the parameter's shape and type, for each trained parameter that had one on any rank, and
    /// nothing else.
    ///
    /// # Errors
    /// [`NoGradient`](CandleError::NoGradient) if the loss does not depend on a trained parameter that was not said to be one
    /// that [may be unused](Variables::may_be_unused); [`UnlistedVariable`](CandleError::UnlistedVariable) if it depends on a
    /// variable that was not there when this was made. If candle fails, if the ranks call different functions or take
    /// different steps, or if communication fails.
    pub fn backward<L: TensorLoss>(&mut self, loss: L) -> Result<GradStore, CandleError> {
        let ranks = self.world_size();
        self.begin()?;
        let result = self.ddp.step_with(ranks, |variables, _, ready| loss::backward(variables, &loss, ready));
        self.finish(result?)
    }

    /// Computes the mean gradients of `micro_batches` micro-batches, of which this rank computes its
    /// [`share`](Self::share): `loss_of` is called with the number of each, in order. Unlike for [`backward`](Self::backward),
    /// the number need not be a multiple of the number of ranks, and may be below it.
    ///
    /// If the data of a micro-batch depends on its number and not on the rank, the results are
    /// [the same bits](Self#which-sums-are-the-same) on any number of ranks whose shares are the same power of two.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
    /// # use dist_candle::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let varmap = VarMap::new();
    /// # let vars = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    /// # let model = candle_nn::linear(1, 1, vars.pp("line"))?;
    /// # let mut optimizer = SGD::new(varmap.all_vars(), 0.01)?;
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
    /// # let batches = Tensor::arange(0f32, 32.0, &Device::Cpu)?.reshape((4, 8, 1))?;
    /// let grads = dp.backward_each(4, |number| {
    ///     let x = batches.get(number)?;
    ///     Ok(candle_nn::loss::mse(&model.forward(&x)?, &x)?)
    /// })?;
    /// optimizer.step(&grads)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if `loss_of` fails.
    pub fn backward_each<L: TensorLoss>(
        &mut self,
        micro_batches: usize,
        mut loss_of: impl FnMut(usize) -> Result<L, BoxError>,
    ) -> Result<GradStore, CandleError> {
        self.begin()?;
        let result = self.ddp.step_with(micro_batches, |variables, number, ready| {
            loss::backward(variables, &loss_of(number)?, ready)
        });
        self.finish(result?)
    }

    /// Computes the gradients of `loss` and adds them to this rank's sum, without communicating: the next
    /// [`backward`](Self::backward), [`join`](Self::join) or [`synchronise`](Self::synchronise) has them in its mean. Before a
    /// `backward` all ranks call this equally often.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward). That ranks have accumulated different numbers of micro-batches is found by the next
    /// `backward`.
    #[doc(alias = "gradient accumulation")]
    pub fn accumulate<L: TensorLoss>(&mut self, loss: L) -> Result<(), CandleError> {
        let ranks = self.world_size();
        let compute = |variables: &mut Variables, _, ready: &mut dist_parallel::model::Ready<'_>| {
            loss::backward(variables, &loss, ready)
        };
        Ok(self.ddp.accumulate_with(ranks, compute)?)
    }

    /// Borrows this as something whose backward pass does not communicate, under the name that PyTorch has for it. Its
    /// `backward` is [`accumulate`](Self::accumulate); it returns no gradients, so that no optimizer can be stepped with those
    /// of one rank.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
    /// # use dist_candle::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let varmap = VarMap::new();
    /// # let vars = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    /// # let model = candle_nn::linear(1, 1, vars.pp("line"))?;
    /// # let mut optimizer = SGD::new(varmap.all_vars(), 0.01)?;
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
    /// # let x = Tensor::ones((2, 1), DType::F32, &Device::Cpu)?;
    /// # let loss_of = |_: usize| candle_nn::loss::mse(&model.forward(&x)?, &x);
    /// let mut no_sync = dp.no_sync();
    /// for batch in 0..3 {
    ///     no_sync.backward(&loss_of(batch)?)?;
    /// }
    /// let grads = dp.backward(&loss_of(3)?)?;
    /// optimizer.step(&grads)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn no_sync(&mut self) -> NoSync<'_> {
        NoSync(self)
    }

    /// Returns the mean gradients of what was accumulated.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if nothing was accumulated.
    pub fn synchronise(&mut self) -> Result<GradStore, CandleError> {
        self.begin()?;
        let result = self.ddp.synchronise();
        self.finish(result?)
    }

    /// As [`backward`](Self::backward), for ranks that do not have the same number of batches: a rank that has run out brings
    /// `None`, and neither keeps the others waiting nor counts. It goes on stepping its optimizer, because the parameters go on
    /// changing. Returns `None`, on every rank, once no rank has a batch any more.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
    /// # use dist_candle::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let varmap = VarMap::new();
    /// # let vars = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    /// # let model = candle_nn::linear(1, 1, vars.pp("line"))?;
    /// # let mut optimizer = SGD::new(varmap.all_vars(), 0.01)?;
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
    /// # let mut batches = vec![Tensor::ones((2, 1), DType::F32, &Device::Cpu)?].into_iter();
    /// loop {
    ///     let loss = batches.next().map(|x| candle_nn::loss::mse(&model.forward(&x)?, &x)).transpose()?;
    ///     let Some(grads) = dp.join(loss.as_ref())? else { break };
    ///     optimizer.step(&grads)?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Sums are divided by the number of micro-batches that there were, or by their weights. What a rank has accumulated since
    /// the last step counts too, so ranks may accumulate different numbers of micro-batches before a `join`.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if some ranks call `backward` instead.
    #[doc(alias = "Join")]
    pub fn join<L: TensorLoss>(&mut self, loss: Option<L>) -> Result<Option<GradStore>, CandleError> {
        self.begin()?;
        let own = usize::from(loss.is_some());
        let report = self.ddp.join_with(own, |variables, _, ready| match &loss {
            Some(loss) => loss::backward(variables, loss, ready),
            None => unreachable!("a rank without a loss has no micro-batch"),
        })?;
        report.map(|report| self.finish(report)).transpose()
    }

    /// Multiplies all gradients by one factor if their norm is above `max`, so that it becomes `max`. Returns the norm before.
    /// A norm that is infinite or NaN changes nothing: look at it before the optimizer steps.
    ///
    /// The norm is exact but for one rounding, and so the same bits on any number of ranks. All ranks clip to the same `max`;
    /// that they do is compared in the next step ([`SettingsDiffer`](dist_parallel::Error::SettingsDiffer)).
    ///
    /// # Errors
    /// If a gradient of the store is not a slice in memory.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, gradients: &mut GradStore, max: f64) -> Result<f64, CandleError> {
        let norm = self.gradient_norm(gradients)?;
        let Some(factor) = self.ddp.clipping(norm, max) else { return Ok(norm) };
        for (_, info, var) in self.ddp.model().trained() {
            let Some(gradient) = gradients.get(var) else { continue };
            // Another tensor may share this one's memory.
            let mut clipped = slices::read(&info.name, gradient, Array::copy_of)?;
            clipped.values_mut().scale(factor);
            gradients.insert(var, slices::gradient(&info.name, &info.shape, clipped)?);
        }
        Ok(norm)
    }

    /// Returns the norm of the gradients of all trained parameters together, as if they were one vector: exact but for one
    /// rounding.
    ///
    /// # Errors
    /// If a gradient of the store is not a slice in memory.
    pub fn gradient_norm(&self, gradients: &GradStore) -> Result<f64, CandleError> {
        let trained = self.ddp.model().trained();
        let found = trained.filter_map(|(_, info, var)| Some((&info.name, gradients.get(var)?)));
        let locked: Vec<Locked<'_>> =
            found.map(|(name, gradient)| Locked::new(name, gradient)).collect::<Result<_, _>>()?;
        Ok(gradient_norm(locked.iter().map(Locked::values)))
    }

    /// Returns this rank's share of `total` micro-batches, rows or samples: a range of neighbours. The shares of two ranks differ by
    /// at most one.
    pub fn share(&self, total: usize) -> Range<usize> {
        self.ddp.share(total)
    }

    /// Returns this rank's [share](Self::share) of the rows of a batch that every rank has whole: a part of it along its first
    /// dimension, without a copy.
    ///
    /// If the rows cannot be divided equally, their numbers differ by one. Give a loss that is a mean over rows together with
    /// its number of rows as weight.
    ///
    /// In the first three steps the ranks compare digests of all batches that they passed. Ranks that shuffle differently
    /// then get [`BatchesDiffer`](dist_parallel::Error::BatchesDiffer) from [`backward`](Self::backward).
    ///
    /// # Errors
    /// [`FewRows`](CandleError::FewRows) if the batch has fewer rows than there are ranks. If the batch is a single number.
    pub fn rows(&mut self, batch: &Tensor) -> Result<Tensor, CandleError> {
        let failed = |source| CandleError::Candle { place: "rows of a batch".to_owned(), source };
        let (rows, ranks) = (batch.dim(0).map_err(failed)?, self.world_size());
        if rows < ranks {
            return Err(CandleError::FewRows { rows, ranks });
        }
        if self.steps.compares_batches() {
            let digest = digest(batch).map_err(failed)?;
            self.ddp.compare_batches(digest);
        }
        let own = self.share(rows);
        batch.narrow(0, own.start, own.len()).map_err(failed)
    }

    /// Returns the description of the next forward, for [`Dropout`](crate::Dropout) and for layers that train and
    /// evaluate differently. The step is the number of steps that were taken before, and continues after
    /// [`load`](Self::load).
    ///
    /// This rank's k-th micro-batch of a step on N ranks has the number k · N + rank. A program that computes one
    /// micro-batch on each rank then drops the same values as one process that accumulates all of them. With
    /// [`backward_each`](Self::backward_each), replace the number by that of the micro-batch:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use dist_candle::{DataParallel, Dropout};
    /// # use dist_parallel::Communicator;
    /// # let varmap = VarMap::new();
    /// # let vars = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    /// # let model = candle_nn::linear(1, 1, vars.pp("line"))?;
    /// # let batches = Tensor::arange(0f32, 32.0, &Device::Cpu)?.reshape((4, 8, 1))?;
    /// use dist_parallel::model::Pass;
    ///
    /// let dropout = Dropout::new(0.1, 42, "line")?;
    /// let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
    /// let pass = dp.pass();
    /// let grads = dp.backward_each(4, |number| {
    ///     let x = batches.get(number)?;
    ///     let y = dropout.forward(&model.forward(&x)?, Pass { micro_batch: number, ..pass })?;
    ///     Ok(candle_nn::loss::mse(&y, &x)?)
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pass(&self) -> Pass {
        Pass { training: self.trains, ..self.ddp.next_pass(self.ddp.rank()) }
    }

    /// Makes [`pass`](Self::pass) describe forwards of training, as at the beginning.
    pub const fn train(&mut self) {
        self.trains = true;
    }

    /// Makes [`pass`](Self::pass) describe forwards of an evaluation.
    pub const fn eval(&mut self) {
        self.trains = false;
    }

    /// Returns the report of the last step: the mean loss over all ranks, the number of micro-batches, times, and the bytes that
    /// this rank sent. `None` before the first step.
    pub const fn report(&self) -> Option<&StepReport> {
        self.report.as_ref()
    }

    /// Returns the names of the trained parameters for which no micro-batch of the last step had a gradient, on any rank.
    pub fn without_gradient(&self) -> Vec<&str> {
        self.ddp.without_gradient()
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.ddp.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.ddp.world_size()
    }

    /// Returns the variables, sorted by name unless they were given in another order.
    pub const fn variables(&self) -> &Variables {
        self.ddp.model()
    }

    /// Returns the communicator, for other collectives between steps, such as the sum of an evaluation.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        self.ddp.communicator_mut()
    }

    /// Ends the training and gives back what it was made of.
    pub fn into_parts(mut self) -> (Communicator, Variables) {
        self.steps.end();
        self.ddp.into_parts()
    }

    /// Saves the variables, and the moments of `optimizer`, and returns when they are on the disk. All ranks call this with the
    /// same step. An optimizer without state, such as candle's `SGD`, is `None`; the state of candle's own `AdamW` cannot be
    /// reached, so that a training which goes on exactly needs [`AdamW`].
    ///
    /// # Errors
    /// As for [`Checkpoints::save`]; [`ForeignMoments`](CandleError::ForeignMoments) if the optimizer has trained a variable
    /// that is no trained parameter here.
    pub fn save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut AdamW>,
        step: u64,
    ) -> Result<(), CandleError> {
        let numbered = optimizer.map(|optimizer| optimizer.numbered(self.variables())).transpose();
        let numbered = self.or_abort(numbered)?;
        let state = numbered.as_ref().map(|numbered| -> &dyn OptimizerState { numbered });
        Ok(checkpoints.save(self, state, step)?)
    }

    /// As [`save`](Self::save), from a copy, while training goes on: see [`Checkpoints::start_save`].
    ///
    /// # Errors
    /// As for [`save`](Self::save); what fails later is told by [`Saving`].
    pub fn start_save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut AdamW>,
        step: u64,
    ) -> Result<Saving, CandleError> {
        let numbered = optimizer.map(|optimizer| optimizer.numbered(self.variables())).transpose();
        let numbered = self.or_abort(numbered)?;
        let state = numbered.as_ref().map(|numbered| -> &dyn OptimizerState { numbered });
        Ok(checkpoints.start_save(self, state, step)?)
    }

    /// Puts the newest checkpoint in place of the variables and the optimizer's moments on all ranks, and returns its step;
    /// `None` if there is no checkpoint. Training then goes on with the bits of one that was never interrupted, on the same
    /// machines, if its data and learning rate depend on the step.
    ///
    /// # Errors
    /// As for [`Checkpoints::load`] and [`save`](Self::save).
    pub fn load(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut AdamW>,
    ) -> Result<Option<u64>, CandleError> {
        self.load_by(optimizer, |training, state| checkpoints.load(training, state))
    }

    /// As [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and if there is no checkpoint of this step.
    pub fn load_step(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut AdamW>,
        step: u64,
    ) -> Result<(), CandleError> {
        let load = |training: &mut Self, state: Option<&mut dyn OptimizerState>| {
            checkpoints.load_step(step, training, state).map(|()| Some(step))
        };
        self.load_by(optimizer, load).map(drop)
    }

    fn load_by(
        &mut self,
        optimizer: Option<&mut AdamW>,
        load: impl FnOnce(&mut Self, Option<&mut dyn OptimizerState>) -> dist_parallel::Result<Option<u64>>,
    ) -> Result<Option<u64>, CandleError> {
        let Some(optimizer) = optimizer else { return Ok(load(self, None)?) };
        let numbered = optimizer.numbered(self.variables());
        let mut numbered = self.or_abort(numbered)?;
        let step = load(self, Some(&mut numbered))?;
        if step.is_some() {
            let loaded = numbered.loaded(self.variables());
            self.or_abort(loaded)?;
        }
        Ok(step)
    }

    /// Begins a call that synchronises: in some of them the ranks compare their parameters.
    fn begin(&mut self) -> Result<(), CandleError> {
        if self.steps.compares_parameters() {
            self.ddp.compare_parameters()?;
        }
        Ok(())
    }

    /// Keeps the report of a step, and returns its mean gradients.
    fn finish(&mut self, report: StepReport) -> Result<GradStore, CandleError> {
        self.report = Some(report);
        self.steps.add();
        let mut gradients = GradStore::default();
        for (index, info, var) in self.ddp.model().trained() {
            let Some(mean) = self.ddp.gradient(index) else { continue };
            gradients.insert(var, slices::gradient(&info.name, &info.shape, Array::copy_of(mean))?);
        }
        Ok(gradients)
    }

    /// Ends the job if something failed that the other ranks cannot know.
    fn or_abort<T>(&mut self, result: Result<T, CandleError>) -> Result<T, CandleError> {
        result.inspect_err(|error| self.ddp.communicator_mut().abort(error))
    }
}

/// Returns a digest of a tensor's shape and values. Ranks that run the same program get the same number for the same tensor.
fn digest(tensor: &Tensor) -> candle_core::Result<u64> {
    let values = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let shape = tensor.dims().iter().map(|&dim| dim as u64);
    Ok(shape.chain(values.into_iter().map(f64::to_bits)).fold(0, |digest, number| {
        // The multiplier of FNV-1a, on words in place of bytes; the rotation carries high bits to low ones.
        (digest.rotate_left(23) ^ number).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}

/// A [`DataParallel`] whose backward pass does not communicate: see [`DataParallel::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a>(&'a mut DataParallel);

impl NoSync<'_> {
    /// Adds the gradients of `loss` to this rank's sum, as [`DataParallel::accumulate`] does.
    ///
    /// # Errors
    /// As for [`DataParallel::accumulate`].
    pub fn backward<L: TensorLoss>(&mut self, loss: L) -> Result<(), CandleError> {
        self.0.accumulate(loss)
    }
}

impl From<Ddp<Variables>> for DataParallel {
    fn from(ddp: Ddp<Variables>) -> Self {
        let steps = LoopSteps::new(ddp.rank(), ddp.world_size());
        Self { ddp, report: None, steps, trains: true }
    }
}

/// [`Checkpoints`] save and load it, and [`load_weights`](dist_parallel::checkpoint::load_weights) fills it. The state of an
/// [`AdamW`] needs [`DataParallel::save`] and [`DataParallel::load`], which know the optimizer's variables by name.
impl Shards for DataParallel {
    fn infos(&self) -> &[ParamInfo] {
        self.ddp.infos()
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.ddp.parameters()
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        self.ddp.untrained_to_save()
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        self.ddp.slices()
    }

    fn unsaved(&self) -> Option<String> {
        self.ddp.unsaved()
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> dist_parallel::Result<()> {
        self.ddp.read(chunk, f)
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> dist_parallel::Result<()> {
        self.ddp.write(chunk, f)
    }

    fn check_alike(&mut self) -> dist_parallel::Result<()> {
        self.ddp.check_alike()
    }

    fn updates(&self) -> u64 {
        self.ddp.updates()
    }

    fn loaded(&mut self) -> dist_parallel::Result<()> {
        self.report = None;
        self.steps.restart();
        self.ddp.loaded()
    }

    fn steps(&self) -> u64 {
        self.ddp.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        self.ddp.set_steps(steps);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.ddp.communicator_mut()
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataParallel({:?}, {} variables)", self.ddp.communicator(), self.ddp.infos().len())
    }
}
