//! Data-parallel training in a loop of your own: a backward pass that returns the mean gradients over all ranks.

use std::fmt;
use std::ops::Range;

use burn::module::Module;
use burn::optim::GradientsParams;
use dist_parallel::internal::LoopSteps;
use dist_parallel::model::Ready;
use dist_parallel::own_loop::gradient_norm;
use dist_parallel::step::StepReport;
use dist_parallel::{BoxError, Communicator, Ddp, DdpOptions, Loss, Params};

use crate::module::check;
use crate::{BurnError, ModuleParams, TensorLoss, gradients, loss, values};

/// A trainer for a burn model on several processes, in a loop of your own.
///
/// Every rank runs the same program with its share of the data. Two lines of the program change: call
/// [`new`](Self::new) before the loop, and [`backward`](Self::backward) in place of
/// `GradientsParams::from_grads(loss.backward(), &model)`. The model, its layers and the optimizer stay as they are:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use dist_burn::DataParallel;
/// use dist_parallel::Communicator;
///
/// let device = Device::flex().autodiff();
/// let mut model = LinearConfig::new(1, 1).init(&device);
/// let mut optimizer = SgdConfig::new().init();
///
/// // A world of one, unless `distctl run` or torchrun has started this process as one of several.
/// let mut dp = DataParallel::new(Communicator::from_env()?, &mut model)?;
/// for step in 0..100 {
///     // The rows of this step's batch that this rank has.
///     let rows: Vec<f32> = dp.share(4).map(|row| (row + step % 3) as f32 * 0.25).collect();
///     let x = Tensor::<1>::from_data(&rows[..], &device).unsqueeze_dim::<2>(1);
///     let loss = (model.forward(x.clone()) - x * 0.5).square().mean();
///     let grads = dp.backward((loss, rows.len() as u64), &model)?;
///     model = optimizer.step(0.1, model, grads);
/// }
/// assert!(dp.report().is_some_and(|report| report.loss < 0.1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What every rank has
///
/// [`new`](Self::new) gives every rank's model the values of rank 0. From then on the models stay the same on all
/// ranks, because all optimizers step with the same gradients. Never step with the gradients of `loss.backward()`,
/// which are those of one rank.
///
/// In the first three steps and in every 64th step, the ranks compare their trained parameters. If they differ, for
/// example because of different learning rates, every rank gets
/// [`ParametersDiffer`](dist_parallel::Error::ParametersDiffer).
///
/// State that a forward pass changes, such as the running mean of a batch norm, is synchronised in every step. All
/// ranks get the values of rank 0, unless [`ModuleParams::sync_buffers`] sets another rule.
///
/// # Which sums are the same
///
/// A call of [`backward`](Self::backward) or [`accumulate`](Self::accumulate) computes one micro-batch on every rank.
/// Gradients are summed in the canonical order, over a rank's micro-batches first and then over the ranks, and
/// divided once.
///
/// A program trains the same bits on 1, 2 and 4 ranks under two conditions. Its micro-batches do not depend on the
/// number of ranks, and each rank computes the same number of neighbouring micro-batches, which is a power of two.
/// For example, [`backward_each`](Self::backward_each) with 8 micro-batches gives each of 4 ranks 2 neighbours. If
/// the number of ranks changes the micro-batches, for example because a batch is divided by it, results are equal
/// within rounding.
///
/// In both cases the model must compute the same result for a micro-batch on every rank. burn's dropout uses a random
/// generator of the device, whose state advances with every micro-batch, so results depend on the number of ranks.
/// Batch norm mixes the samples of a micro-batch, so results depend on the grouping of samples.
///
/// # Errors
///
/// An error on one rank ends the job, and the other ranks' errors name that rank. If the calls of the ranks differ,
/// for example in the number of micro-batches ([`StepsDiffer`](dist_parallel::Error::StepsDiffer)), every rank gets
/// the same error. Then accumulated gradients are discarded, and the job can go on with the next step.
///
/// # Communication
///
/// Gradients are sent in buckets after the backward pass, because burn does not report when a gradient is final. They
/// are copied from the model's device to this process's memory and back.
pub struct DataParallel {
    pub(crate) ddp: Ddp<ModuleParams>,
    pub(crate) report: Option<StepReport>,
    pub(crate) steps: LoopSteps,
}

impl DataParallel {
    /// Creates a trainer of `model`, and gives the model of every rank the values of rank 0. All ranks call it
    /// together.
    ///
    /// Parameters that do not require a gradient at this time are frozen. To change this later, create a new trainer.
    ///
    /// # Errors
    /// [`ModelsDiffer`](dist_parallel::Error::ModelsDiffer) on every rank if the models differ between ranks in the
    /// name, shape or type of a tensor. It names the first difference and a rank. If a tensor has a type that cannot
    /// be trained. If communication fails.
    #[doc(alias = "DistributedDataParallel")]
    pub fn new<M: Module>(mut comm: Communicator, model: &mut M) -> Result<Self, BurnError> {
        let params = ModuleParams::new(model).inspect_err(|error| comm.abort(error))?;
        Self::with_params(comm, model, params)
    }

    /// Creates a trainer of `model` with these [`ModuleParams`] of it, which say how buffers are synchronised.
    ///
    /// For other bucket sizes or compressed gradients, create a [`Ddp`] of the parameters, write its initial values
    /// to the model with [`ModuleParams::install`], and convert the `Ddp` with `DataParallel::from`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_params<M: Module>(
        comm: Communicator,
        model: &mut M,
        params: ModuleParams,
    ) -> Result<Self, BurnError> {
        let mut ddp = Ddp::new(comm, params, DdpOptions::default())?;
        let installed = ddp.model().install(model.clone());
        *model = installed.inspect_err(|error| ddp.communicator_mut().abort(error))?;
        Ok(ddp.into())
    }

    /// Computes the gradients of `loss` and returns their mean over all ranks, for the optimizer. The mean includes
    /// [accumulated](Self::accumulate) micro-batches. All ranks call this equally often.
    ///
    /// If a parameter has no gradient in a micro-batch, its gradient counts as zero there. If it has no gradient on
    /// any rank, it has none in the result, and the optimizer does not change it.
    ///
    /// # Errors
    /// If the loss is no single number or depends on no parameter. [`ModelChanged`](BurnError::ModelChanged) if the
    /// model has other tensors than the one that this trainer was created with. If the calls of the ranks differ, or
    /// if communication fails.
    pub fn backward<M: Module>(
        &mut self,
        loss: impl TensorLoss,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        let ranks = self.world_size();
        self.step(model, ranks, |_| loss::backward(&loss, model))
    }

    /// Does what [`backward`](Self::backward) does, with gradients of a micro-batch that you have already computed.
    /// The loss of the [report](Self::report) is then NaN.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and [`ForeignGradients`](BurnError::ForeignGradients) if a gradient
    /// belongs to no trained parameter of the model.
    pub fn average<M: Module>(
        &mut self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        self.average_with(f32::NAN, gradients, model)
    }

    /// Does what [`average`](Self::average) does, with a loss for the report. With `(loss, count)`, loss and
    /// gradients are sums over `count` samples or tokens, and the result is the mean over the samples or tokens of
    /// all ranks.
    ///
    /// # Errors
    /// As for [`average`](Self::average).
    pub fn average_with<M: Module>(
        &mut self,
        loss: impl Loss,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        let ranks = self.world_size();
        let mut computed = Some((loss, gradients));
        self.step(model, ranks, |_| {
            Ok(computed.take().ok_or("a rank has one micro-batch of as many as ranks")?)
        })
    }

    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks together. This rank computes its
    /// [`share`](Self::share): `loss_of` is called with the number of each micro-batch, in order. `micro_batches`
    /// need not be a multiple of the number of ranks, and may be smaller.
    ///
    /// If the data of a micro-batch depends only on its number, and all shares are the same power of two, results are
    /// [the same bits](Self#which-sums-are-the-same) on any number of ranks.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use dist_burn::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let device = Device::flex().autodiff();
    /// # let mut model = LinearConfig::new(1, 1).init(&device);
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &mut model)?;
    /// let grads = dp.backward_each(4, &model, |number| {
    ///     let x = Tensor::<2>::from_data([[number as f32]], &device);
    ///     Ok(model.forward(x).square().mean())
    /// })?;
    /// model = optimizer.step(0.01, model, grads);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if `loss_of` fails.
    pub fn backward_each<M: Module, L: TensorLoss>(
        &mut self,
        micro_batches: usize,
        model: &M,
        mut loss_of: impl FnMut(usize) -> Result<L, BoxError>,
    ) -> Result<GradientsParams, BurnError> {
        self.step(model, micro_batches, |number| loss::backward(&loss_of(number)?, model))
    }

    /// Computes the gradients of `loss` and adds them to this rank's sum, without communication. The next
    /// [`backward`](Self::backward), [`join`](Self::join) or [`synchronise`](Self::synchronise) includes them in its
    /// mean. Before a `backward`, all ranks call this equally often.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward). If ranks have accumulated different numbers of micro-batches, the next
    /// `backward` fails.
    #[doc(alias = "gradient accumulation")]
    pub fn accumulate<M: Module>(&mut self, loss: impl TensorLoss, model: &M) -> Result<(), BurnError> {
        let ranks = self.world_size();
        let compute = |params: &mut ModuleParams, _, ready: &mut Ready<'_>| {
            compute(params, model, || loss::backward(&loss, model), ready)
        };
        Ok(self.ddp.accumulate_with(ranks, compute)?)
    }

    /// Returns a view whose `backward` is [`accumulate`](Self::accumulate) and does not communicate. The name is
    /// PyTorch's. It returns no gradients, so no optimizer can step with the gradients of one rank.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use dist_burn::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let device = Device::flex().autodiff();
    /// # let mut model = LinearConfig::new(1, 1).init(&device);
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &mut model)?;
    /// # let x = Tensor::<2>::ones([1, 1], &device);
    /// # let loss_of = |_: usize, model: &burn::nn::Linear| model.forward(x.clone()).square().mean();
    /// let mut no_sync = dp.no_sync();
    /// for batch in 0..3 {
    ///     no_sync.backward(loss_of(batch, &model), &model)?;
    /// }
    /// let grads = dp.backward(loss_of(3, &model), &model)?;
    /// model = optimizer.step(0.01, model, grads);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn no_sync(&mut self) -> NoSync<'_> {
        NoSync(self)
    }

    /// Returns the mean gradients of the accumulated micro-batches of all ranks.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if nothing was accumulated.
    pub fn synchronise<M: Module>(&mut self, model: &M) -> Result<GradientsParams, BurnError> {
        self.begin(model)?;
        let report = self.ddp.synchronise();
        self.finish(report, model)
    }

    /// Does what [`backward`](Self::backward) does for ranks with different numbers of batches. A rank that has no
    /// batch left passes `None`, and has no weight in the mean. It must go on stepping its optimizer, because the
    /// parameters go on changing. Returns `None` on every rank when no rank has a batch left.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use dist_burn::DataParallel;
    /// # use dist_parallel::Communicator;
    /// # let device = Device::flex().autodiff();
    /// # let mut model = LinearConfig::new(1, 1).init(&device);
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let mut dp = DataParallel::new(Communicator::from_env()?, &mut model)?;
    /// # let mut batches = vec![Tensor::<2>::ones([1, 1], &device)].into_iter();
    /// loop {
    ///     let loss = batches.next().map(|x| model.forward(x).square().mean());
    ///     let Some(grads) = dp.join(loss, &model)? else { break };
    ///     model = optimizer.step(0.01, model, grads);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Sums are divided by the actual number of micro-batches, or by the sum of their weights. Micro-batches that a
    /// rank has accumulated since the last step are included, so ranks may accumulate different numbers of
    /// micro-batches before a `join`.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if some ranks call `backward` instead of `join`.
    #[doc(alias = "Join")]
    pub fn join<M: Module, L: TensorLoss>(
        &mut self,
        loss: Option<L>,
        model: &M,
    ) -> Result<Option<GradientsParams>, BurnError> {
        self.begin(model)?;
        let own = usize::from(loss.is_some());
        let report = self.ddp.join_with(own, |params, _, ready| match &loss {
            Some(loss) => compute(params, model, || loss::backward(loss, model), ready),
            None => unreachable!("a rank without a loss has no micro-batch"),
        });
        match report {
            Ok(None) => {
                self.ddp.model_mut().release();
                Ok(None)
            }
            Ok(Some(report)) => self.finish(Ok(report), model).map(Some),
            Err(error) => self.finish(Err(error), model).map(Some),
        }
    }

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. If the norm
    /// is infinite or NaN, nothing changes: check it before the optimizer steps.
    ///
    /// The norm is exact but for one rounding, so its bits do not depend on the number of ranks. All ranks must pass
    /// the same `max`. The next step compares it ([`SettingsDiffer`](dist_parallel::Error::SettingsDiffer)).
    ///
    /// # Errors
    /// If burn cannot return a gradient, or the model has other tensors than at [`new`](Self::new).
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients<M: Module>(
        &mut self,
        gradients: &mut GradientsParams,
        model: &M,
        max: f64,
    ) -> Result<f64, BurnError> {
        let mut data = self.collect(gradients, model)?;
        let norm = self.norm_of(&data)?;
        let Some(factor) = self.ddp.clipping(norm, max) else { return Ok(norm) };
        let infos = self.ddp.model().infos();
        for (index, data) in &mut data {
            values::values_mut(&infos[*index].name, data)?.scale(factor);
        }
        let mut data = data.into_iter().peekable();
        gradients::register(model, gradients, |index| {
            data.next_if(|(of, _)| *of == index).map(|(_, data)| data)
        });
        Ok(norm)
    }

    /// Returns the Euclidean norm of the gradients of all trained parameters as one vector. It is exact but for one
    /// rounding.
    ///
    /// # Errors
    /// As for [`clip_gradients`](Self::clip_gradients).
    pub fn gradient_norm<M: Module>(&self, gradients: &GradientsParams, model: &M) -> Result<f64, BurnError> {
        self.norm_of(&self.collect(gradients, model)?)
    }

    /// Returns this rank's share of `total` micro-batches or rows: a contiguous range. The lengths of two ranks'
    /// shares differ by at most one.
    pub fn share(&self, total: usize) -> Range<usize> {
        self.ddp.share(total)
    }

    /// Returns the report of the last step: the mean loss over all ranks, the number of micro-batches, times, and the
    /// bytes that this rank sent. Returns `None` before the first step.
    pub const fn report(&self) -> Option<&StepReport> {
        self.report.as_ref()
    }

    /// Returns the names of the trained parameters that had no gradient in the last step, in any micro-batch of any
    /// rank. After the first step they are logged as a warning.
    #[doc(alias = "find_unused_parameters")]
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

    /// Returns the communicator, for other collectives between steps, such as the sum of evaluation losses.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        self.ddp.communicator_mut()
    }

    /// Takes a step. `gradients` computes one micro-batch.
    fn step<M: Module, C: Loss>(
        &mut self,
        model: &M,
        micro_batches: usize,
        mut gradients: impl FnMut(usize) -> Result<(C, GradientsParams), BoxError>,
    ) -> Result<GradientsParams, BurnError> {
        self.begin(model)?;
        let report = self.ddp.step_with(micro_batches, |params, number, ready| {
            compute(params, model, || gradients(number), ready)
        });
        self.finish(report, model)
    }

    /// Prepares a call that synchronises the ranks: takes handles to the tensors that ranks compare or synchronise.
    fn begin<M: Module>(&mut self, model: &M) -> Result<(), BurnError> {
        let compares = self.steps.compares_parameters();
        let held = if compares || self.ddp.model().has_synchronised_buffers() {
            self.ddp.model_mut().hold(model)
        } else {
            check(self.ddp.model().infos(), model)
        };
        self.or_abort(held)?;
        if compares {
            self.ddp.compare_parameters()?;
        }
        Ok(())
    }

    /// Stores the report of a step and returns its mean gradients. Writes the synchronised buffers to the model.
    fn finish<M: Module>(
        &mut self,
        report: dist_parallel::Result<StepReport>,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        // Like a forward pass, this changes the buffers of all clones of the module.
        let installed = report.as_ref().map_or(Ok(()), |_| self.ddp.model().install(model.clone()).map(drop));
        self.ddp.model_mut().release();
        self.report = Some(report?);
        self.or_abort(installed)?;
        self.steps.add();
        let mut gradients = GradientsParams::new();
        let (infos, ddp) = (self.ddp.model().infos(), &self.ddp);
        gradients::register(model, &mut gradients, |index| {
            ddp.gradient(index).map(|mean| values::data(mean, &infos[index].shape))
        });
        Ok(gradients)
    }

    fn collect<M: Module>(
        &self,
        gradients: &GradientsParams,
        model: &M,
    ) -> Result<Vec<(usize, burn::tensor::TensorData)>, BurnError> {
        check(self.ddp.model().infos(), model)?;
        gradients::collect(self.ddp.model().infos(), model, gradients)
    }

    fn norm_of(&self, data: &[(usize, burn::tensor::TensorData)]) -> Result<f64, BurnError> {
        let infos = self.ddp.model().infos();
        let values = data.iter().map(|(index, data)| values::values(&infos[*index].name, data));
        let values: Vec<_> = values.collect::<Result<_, _>>()?;
        Ok(gradient_norm(values.iter().copied()))
    }

    /// Ends the job on an error of this rank that the other ranks cannot know.
    pub(crate) fn or_abort<T>(&mut self, result: Result<T, BurnError>) -> Result<T, BurnError> {
        result.inspect_err(|error| self.ddp.communicator_mut().abort(error))
    }
}

/// Reports the gradients of one micro-batch.
fn compute<M: Module, C: Loss>(
    params: &ModuleParams,
    model: &M,
    gradients: impl FnOnce() -> Result<(C, GradientsParams), BoxError>,
    ready: &mut Ready<'_>,
) -> Result<C, BoxError> {
    check(params.infos(), model)?;
    let (loss, gradients) = gradients()?;
    gradients::report(params.infos(), model, gradients, ready)?;
    Ok(loss)
}

/// A [`DataParallel`] whose backward pass does not communicate: see [`DataParallel::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a>(&'a mut DataParallel);

impl NoSync<'_> {
    /// Adds the gradients of `loss` to this rank's sum, as [`DataParallel::accumulate`] does.
    ///
    /// # Errors
    /// As for [`DataParallel::accumulate`].
    pub fn backward<M: Module>(&mut self, loss: impl TensorLoss, model: &M) -> Result<(), BurnError> {
        self.0.accumulate(loss, model)
    }
}

impl From<Ddp<ModuleParams>> for DataParallel {
    fn from(mut ddp: Ddp<ModuleParams>) -> Self {
        ddp.model_mut().release();
        let steps = LoopSteps::new(ddp.rank(), ddp.world_size());
        Self { ddp, report: None, steps }
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.ddp.model().infos().len();
        write!(f, "DataParallel({:?}, {tensors} tensors)", self.ddp.communicator())
    }
}
