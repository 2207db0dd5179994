//! Data-parallel training in a loop of your own: a backward pass that returns the mean gradients over all
//! ranks.

use std::fmt;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::VarMap;
use dist_parallel::checkpoint::{Checkpoints, Saving, Shards};
use dist_parallel::internal::{LoopSteps, delegate_shards};
use dist_parallel::model::Pass;
use dist_parallel::optim::OptimizerState;
use dist_parallel::own_loop::gradient_norm;
use dist_parallel::step::StepReport;
use dist_parallel::{BoxError, Communicator, Ddp, DdpOptions};

use crate::array::Array;
use crate::slices::Locked;
use crate::{AdamW, CandleError, TensorLoss, Variables, loss, slices};

/// A trainer for a candle model on several processes, in a loop of your own.
///
/// Every rank runs the same program with its share of the data. One call computes the backward pass and the
/// mean over ranks. The rest of the loop stays as it is, with any model, any number of inputs, and any
/// optimizer of candle:
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
/// [`new`](Self::new) gives every rank the variables of rank 0. From then on the variables stay the same on
/// all ranks, because all optimizers step with the same gradients. Never step with the gradients of
/// `loss.backward()` or `backward_step`, which are those of one rank.
///
/// In the first three steps and in every 64th step, the ranks compare their trained parameters. If they
/// differ, for example because of different learning rates, every rank gets
/// [`ParametersDiffer`](dist_parallel::Error::ParametersDiffer). Buffers are synchronised in every step: see
/// [`Variables`].
///
/// # Which sums are the same
///
/// A call of [`backward`](Self::backward) or [`accumulate`](Self::accumulate) computes one micro-batch on
/// every rank. Gradients are summed in the canonical order, over a rank's micro-batches first and then over
/// the ranks, and divided once.
///
/// A program trains the same bits on 1, 2 and 4 ranks under two conditions. Its micro-batches do not depend
/// on the number of ranks, and each rank computes the same number of neighbouring micro-batches, which is a
/// power of two. For example, [`backward_each`](Self::backward_each) with 8 micro-batches gives each of 4
/// ranks 2 neighbours. If the number of ranks changes the micro-batches, for example because a batch is
/// divided by it, results are equal within rounding.
///
/// In both cases the model must compute the same result for a micro-batch on every rank. candle's own dropout
/// uses a generator that cannot be seeded on the CPU, so every run differs: use [`Dropout`](crate::Dropout)
/// with [`pass`](Self::pass). Batch norm mixes the samples of a micro-batch, so results depend on the
/// grouping of samples.
///
/// # Errors
///
/// An error on one rank ends the job, and the other ranks' errors name that rank. If the calls of the ranks
/// differ, for example in the number of micro-batches ([`StepsDiffer`](dist_parallel::Error::StepsDiffer)),
/// every rank gets the same error. Then accumulated gradients are discarded, and the job can go on with the
/// next step.
///
/// Variables must be in this process's memory: training on a GPU is not supported.
pub struct DataParallel {
    ddp: Ddp<Variables>,
    report: Option<StepReport>,
    steps: LoopSteps,
    /// `false` after [`eval`](Self::eval), until [`train`](Self::train) is called.
    trains: bool,
}

impl DataParallel {
    /// Creates a trainer of all variables of `map`, and gives every rank the values of rank 0. All ranks call
    /// it together, after all layers were created.
    ///
    /// # Errors
    /// [`ModelsDiffer`](dist_parallel::Error::ModelsDiffer) on every rank if the variables differ between
    /// ranks in name, shape or type. It names the first difference and a rank. If there are no variables, or
    /// one has a type that dist does not know. If communication fails.
    pub fn new(comm: Communicator, map: &VarMap) -> Result<Self, CandleError> {
        Self::with_variables(comm, Variables::from_var_map(map)?)
    }

    /// Creates a trainer of these variables, some of which may be frozen, buffers, or unused.
    ///
    /// For other bucket sizes or compressed gradients, create a [`Ddp`] of the variables and convert it with
    /// `DataParallel::from`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_variables(comm: Communicator, variables: Variables) -> Result<Self, CandleError> {
        Ok(Ddp::new(comm, variables, DdpOptions::default())?.into())
    }

    /// Computes the gradients of `loss` and returns their mean over all ranks, for the optimizer. The mean
    /// includes [accumulated](Self::accumulate) micro-batches. All ranks call this equally often.
    ///
    /// The returned store has a gradient for each trained parameter that had one on any rank, with the
    /// parameter's shape and type. It has nothing else.
    ///
    /// # Errors
    /// [`NoGradient`](CandleError::NoGradient) if a trained parameter has no gradient and was not declared
    /// with [`may_be_unused`](Variables::may_be_unused). [`UnlistedVariable`](CandleError::UnlistedVariable)
    /// if the loss depends on a variable that this trainer does not have. If candle fails, if the calls of
    /// the ranks differ, or if communication fails.
    pub fn backward<L: TensorLoss>(&mut self, loss: L) -> Result<GradStore, CandleError> {
        let ranks = self.world_size();
        self.begin()?;
        let result = self.ddp.step_with(ranks, |variables, _, ready| loss::backward(variables, &loss, ready));
        self.finish(result?)
    }

    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks together. This rank computes
    /// its [`share`](Self::share): `loss_of` is called with the number of each micro-batch, in order.
    /// `micro_batches` need not be a multiple of the number of ranks, and may be smaller.
    ///
    /// If the data of a micro-batch depends only on its number, and all shares are the same power of two,
    /// results are [the same bits](Self#which-sums-are-the-same) on any number of ranks.
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

    /// Computes the gradients of `loss` and adds them to this rank's sum, without communication. The next
    /// [`backward`](Self::backward), [`join`](Self::join) or [`synchronise`](Self::synchronise) includes them
    /// in its mean. Before a `backward`, all ranks call this equally often.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward). If ranks have accumulated different numbers of micro-batches, the
    /// next `backward` fails.
    #[doc(alias = "gradient accumulation")]
    pub fn accumulate<L: TensorLoss>(&mut self, loss: L) -> Result<(), CandleError> {
        let ranks = self.world_size();
        let compute = |variables: &mut Variables, _, ready: &mut dist_parallel::model::Ready<'_>| {
            loss::backward(variables, &loss, ready)
        };
        Ok(self.ddp.accumulate_with(ranks, compute)?)
    }

    /// Returns a view whose `backward` is [`accumulate`](Self::accumulate) and does not communicate. The name
    /// is PyTorch's. It returns no gradients, so no optimizer can step with the gradients of one rank.
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

    /// Returns the mean gradients of the accumulated micro-batches of all ranks.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if nothing was accumulated.
    pub fn synchronise(&mut self) -> Result<GradStore, CandleError> {
        self.begin()?;
        let result = self.ddp.synchronise();
        self.finish(result?)
    }

    /// Does what [`backward`](Self::backward) does for ranks with different numbers of batches. A rank that
    /// has no batch left passes `None`, and has no weight in the mean. It must go on stepping its optimizer,
    /// because the parameters go on changing. Returns `None` on every rank when no rank has a batch left.
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
    /// Sums are divided by the actual number of micro-batches, or by the sum of their weights. Micro-batches
    /// that a rank has accumulated since the last step are included, so ranks may accumulate different
    /// numbers of micro-batches before a `join`.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if some ranks call `backward` instead of `join`.
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

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. If
    /// the norm is infinite or NaN, nothing changes: check it before the optimizer steps.
    ///
    /// The norm is exact but for one rounding, so its bits do not depend on the number of ranks. All ranks
    /// must pass the same `max`. The next step compares it
    /// ([`SettingsDiffer`](dist_parallel::Error::SettingsDiffer)).
    ///
    /// # Errors
    /// If a gradient of the store is not a slice in memory.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, gradients: &mut GradStore, max: f64) -> Result<f64, CandleError> {
        let norm = self.gradient_norm(gradients)?;
        let Some(factor) = self.ddp.clipping(norm, max) else { return Ok(norm) };
        for (_, info, var) in self.ddp.model().trained() {
            let Some(gradient) = gradients.get(var) else { continue };
            // Copy, because another tensor may share this gradient's memory.
            let mut clipped = slices::read(&info.name, gradient, Array::copy_of)?;
            clipped.values_mut().scale(factor);
            gradients.insert(var, slices::gradient(&info.name, &info.shape, clipped)?);
        }
        Ok(norm)
    }

    /// Returns the Euclidean norm of the gradients of all trained parameters as one vector. It is exact but
    /// for one rounding.
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

    /// Returns this rank's share of `total` micro-batches, rows or samples: a contiguous range. The lengths
    /// of two ranks' shares differ by at most one.
    pub fn share(&self, total: usize) -> Range<usize> {
        self.ddp.share(total)
    }

    /// Returns this rank's [share](Self::share) of the rows of a batch that every rank has as a whole. Rows
    /// are the first dimension. Nothing is copied.
    ///
    /// If the rows cannot be divided equally, the ranks' numbers of rows differ by one. If the loss is a mean
    /// over rows, pass its number of rows as its weight.
    ///
    /// In the first three steps the ranks compare digests of all batches passed to this function. If they
    /// differ, for example because ranks shuffle differently, [`backward`](Self::backward) fails with
    /// [`BatchesDiffer`](dist_parallel::Error::BatchesDiffer).
    ///
    /// # Errors
    /// [`FewRows`](CandleError::FewRows) if the batch has fewer rows than there are ranks. If the batch is a
    /// single number.
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

    /// Returns the description of the next forward pass, for [`Dropout`](crate::Dropout) and for layers that
    /// train and evaluate differently. Its step is the number of completed steps, and continues after
    /// [`load`](Self::load).
    ///
    /// In a step on N ranks, this rank's micro-batch k (from 0) has the number k · N + rank. So N ranks with
    /// one micro-batch each drop the same values as one process that accumulates N micro-batches. With
    /// [`backward_each`](Self::backward_each), use the number that it passes to the closure:
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

    /// Makes [`pass`](Self::pass) describe forward passes of training. This is the initial mode.
    pub const fn train(&mut self) {
        self.trains = true;
    }

    /// Makes [`pass`](Self::pass) describe forward passes of an evaluation.
    pub const fn eval(&mut self) {
        self.trains = false;
    }

    /// Returns the report of the last step: the mean loss over all ranks, the number of micro-batches, times,
    /// and the bytes that this rank sent. Returns `None` before the first step and after a load.
    pub const fn report(&self) -> Option<&StepReport> {
        self.report.as_ref()
    }

    /// Returns the names of the trained parameters that had no gradient in the last step, in any micro-batch
    /// of any rank.
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

    /// Returns the variables. They are sorted by name unless [`Variables::new`] was given another order.
    pub fn variables(&self) -> &Variables {
        self.ddp.model()
    }

    /// Returns the communicator, for other collectives between steps, such as the sum of evaluation losses.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        self.ddp.communicator_mut()
    }

    /// Ends the training and returns the communicator and the variables.
    pub fn into_parts(mut self) -> (Communicator, Variables) {
        self.steps.end();
        self.ddp.into_parts()
    }

    /// Saves the variables and the moments of `optimizer`, and returns when they are on disk. All ranks call
    /// this with the same step. For an optimizer without state, such as candle's `SGD`, pass `None`. The
    /// state of candle's own `AdamW` is private: use [`AdamW`] to resume exactly.
    ///
    /// # Errors
    /// As for [`Checkpoints::save`]. [`ForeignMoments`](CandleError::ForeignMoments) if the optimizer has
    /// moments of a variable that is no trained parameter of this trainer.
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

    /// Copies the state and saves the copy in the background while training goes on: see
    /// [`Checkpoints::start_save`].
    ///
    /// # Errors
    /// As for [`save`](Self::save). Later errors are returned by [`Saving`].
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

    /// Loads the newest checkpoint into the variables and the optimizer's moments on all ranks, and returns
    /// its step. Returns `None` if there is no checkpoint. On the same kind of machine, training then
    /// continues with the bits of an uninterrupted run, if its data and learning rate depend only on the
    /// step.
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

    /// Loads the newest checkpoint of this step: see [`load`](Self::load).
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

    /// Prepares a call that synchronises the ranks: in some steps they compare their parameters.
    fn begin(&mut self) -> Result<(), CandleError> {
        if self.steps.compares_parameters() {
            self.ddp.compare_parameters()?;
        }
        Ok(())
    }

    /// Stores the report of a step and returns its mean gradients.
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

    /// Ends the job on an error of this rank that the other ranks cannot know.
    fn or_abort<T>(&mut self, result: Result<T, CandleError>) -> Result<T, CandleError> {
        result.inspect_err(|error| self.ddp.communicator_mut().abort(error))
    }
}

/// Returns a digest of a tensor's shape and values. Ranks that run the same program get the same number for
/// the same tensor.
fn digest(tensor: &Tensor) -> candle_core::Result<u64> {
    let values = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let shape = tensor.dims().iter().map(|&dim| dim as u64);
    Ok(shape.chain(values.into_iter().map(f64::to_bits)).fold(0, |digest, number| {
        // The multiplier of FNV-1a, applied to words instead of bytes. The rotation moves high bits to low
        // positions.
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

impl DataParallel {
    /// Begins again after values were loaded.
    fn restart(&mut self) {
        self.report = None;
        self.steps.restart();
    }
}

delegate_shards!(
    /// For [`Checkpoints`] and [`load_weights`](dist_parallel::checkpoint::load_weights). To save and load the
    /// state of an [`AdamW`] too, use [`DataParallel::save`] and [`DataParallel::load`], which map the
    /// optimizer's variables to names.
    impl Shards for DataParallel, ddp, DataParallel::restart
);

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataParallel({:?}, {} variables)", self.ddp.communicator(), self.ddp.infos().len())
    }
}
