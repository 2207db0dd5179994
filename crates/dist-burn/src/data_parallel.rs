//! Data parallel training in the user's own loop: a backward pass whose gradients are the mean over all ranks.

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

/// Trains a burn model on several processes in a loop of your own.
///
/// Every rank runs the same program with its share of the data. Two lines of the loop change: [`new`](Self::new) before it, and
/// [`backward`](Self::backward) in place of `GradientsParams::from_grads(loss.backward(), &model)`. The model, its
/// layers and the optimizer stay as they are:
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
/// [`new`](Self::new) gives every rank's model the values of rank 0. From then on all ranks change their models alike, because
/// all step their optimizers with the same gradients: never with those of `loss.backward()`, which are this rank's alone.
/// The trained parameters are compared in the first three steps and in every 64th. Ranks that have trained with different
/// learning rates, say, then get [`ParametersDiffer`](dist_parallel::Error::ParametersDiffer).
///
/// State that a forward changes, such as the running mean of a batch norm, is synchronised in every step: all ranks get
/// rank 0's, or what [`ModuleParams::sync_buffers`] says.
///
/// # Which sums are the same
///
/// A call of [`backward`](Self::backward) or [`accumulate`](Self::accumulate) computes one micro-batch on every rank. Gradients
/// are summed in the canonical order, over this rank's micro-batches first and then over the ranks, and divided once. A program
/// that computes the same micro-batches whatever the number of ranks, each rank the same power of two of neighbouring ones, so
/// trains the same bits on 1, 2 and 4 ranks; [`backward_each`](Self::backward_each) deals micro-batches like that. If the number
/// of ranks changes the micro-batches, as it does where a batch is divided by it, results are equal within rounding.
///
/// Either needs a model that computes a micro-batch alike on every rank. Dropout draws from a generator of the device, which
/// goes on with every micro-batch, and batch norm mixes the samples of a micro-batch: with dropout the results depend on the number
/// of ranks, and with batch norm they depend on how samples are grouped.
///
/// # Errors
///
/// An error on one rank ends the job, and the other ranks' errors name it. Where ranks were asked for different things, as
/// different numbers of micro-batches ([`StepsDiffer`](dist_parallel::Error::StepsDiffer)), every rank gets the same error and
/// the job goes on: what was accumulated is forgotten, and the next step can be taken.
///
/// # Communication
///
/// Gradients travel in buckets when the backward pass is over, because burn does not say when a gradient is final. They are
/// copied to this process's memory and back, from whatever device the model is on.
pub struct DataParallel {
    pub(crate) ddp: Ddp<ModuleParams>,
    pub(crate) report: Option<StepReport>,
    pub(crate) steps: LoopSteps,
}

impl DataParallel {
    /// Begins to train `model` on all ranks. The model of every rank then has the values of rank 0.
    ///
    /// Parameters that do not require a gradient now are frozen: to freeze or thaw some later, begin anew.
    ///
    /// # Errors
    /// On every rank, if the models differ between ranks in the name, shape or type of a tensor, naming the first that does and a
    /// rank ([`ModelsDiffer`](dist_parallel::Error::ModelsDiffer)). If a tensor is of a type that cannot be trained. If
    /// communication fails.
    #[doc(alias = "DistributedDataParallel")]
    pub fn new<M: Module>(mut comm: Communicator, model: &mut M) -> Result<Self, BurnError> {
        let params = ModuleParams::new(model).inspect_err(|error| comm.abort(error))?;
        Self::with_params(comm, model, params)
    }

    /// Begins to train `model` with these [`ModuleParams`] of it, which say how buffers are synchronised.
    ///
    /// For other sizes of buckets, or for gradients that travel compressed, make a [`Ddp`] of the parameters, give the model what
    /// they have become with [`ModuleParams::install`], and turn the `Ddp` into a `DataParallel` with `from`.
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

    /// Computes the gradients of `loss` and returns their mean over all ranks, for the optimizer. Micro-batches that were
    /// [accumulated](Self::accumulate) are in the mean. All ranks call this, and as often.
    ///
    /// A parameter without a gradient in a micro-batch counts as zero there. One without a gradient on any rank has none in
    /// the result, and the optimizer leaves it as it is.
    ///
    /// # Errors
    /// If the loss is no single number or depends on no parameter; [`ModelChanged`](BurnError::ModelChanged) if the model has other
    /// tensors than the one that this was made with. If the ranks call different functions or take different steps, or if
    /// communication fails.
    pub fn backward<M: Module>(
        &mut self,
        loss: impl TensorLoss,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        let ranks = self.world_size();
        self.step(model, ranks, |_| loss::backward(&loss, model))
    }

    /// As [`backward`](Self::backward), for the gradients of a micro-batch that were computed already. The [report](Self::report)
    /// then has no loss, but NaN.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and [`ForeignGradients`](BurnError::ForeignGradients) if there are gradients of others
    /// than trained parameters of the model.
    pub fn average<M: Module>(
        &mut self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        self.average_with(f32::NAN, gradients, model)
    }

    /// As [`average`](Self::average), with a loss. `(loss, count)` says that loss and gradients are sums over so many samples or
    /// tokens, and the mean is taken over all of these.
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

    /// Computes the mean gradients of `micro_batches` micro-batches, of which this rank computes its
    /// [`share`](Self::share): `loss_of` is called with the number of each, in order. Unlike for [`backward`](Self::backward),
    /// the number need not be a multiple of the number of ranks, and may be below it.
    ///
    /// If the data of a micro-batch depends on its number and not on the rank, the results are
    /// [the same bits](Self#which-sums-are-the-same) on any number of ranks whose shares are the same power of two.
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

    /// Computes the gradients of `loss` and adds them to this rank's sum, without communicating: the next
    /// [`backward`](Self::backward), [`join`](Self::join) or [`synchronise`](Self::synchronise) has them in its mean. Before a
    /// `backward` all ranks call this equally often.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward). That ranks have accumulated different numbers of micro-batches is found by the next
    /// `backward`.
    #[doc(alias = "gradient accumulation")]
    pub fn accumulate<M: Module>(&mut self, loss: impl TensorLoss, model: &M) -> Result<(), BurnError> {
        let ranks = self.world_size();
        let compute = |params: &mut ModuleParams, _, ready: &mut Ready<'_>| {
            compute(params, model, || loss::backward(&loss, model), ready)
        };
        Ok(self.ddp.accumulate_with(ranks, compute)?)
    }

    /// Borrows this as something whose backward pass does not communicate, under the name that PyTorch has for it. Its
    /// `backward` is [`accumulate`](Self::accumulate); it returns no gradients, so that no optimizer can be stepped with those
    /// of one rank.
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

    /// Returns the mean gradients of what was accumulated.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if nothing was accumulated.
    pub fn synchronise<M: Module>(&mut self, model: &M) -> Result<GradientsParams, BurnError> {
        self.begin(model)?;
        let report = self.ddp.synchronise();
        self.finish(report, model)
    }

    /// As [`backward`](Self::backward), for ranks that do not have the same number of batches: a rank that has run out brings
    /// `None`, and neither keeps the others waiting nor counts. It goes on stepping its optimizer, because the parameters go on
    /// changing. Returns `None`, on every rank, once no rank has a batch any more.
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
    /// Sums are divided by the number of micro-batches that there were, or by their weights. What a rank has accumulated since
    /// the last step counts too, so ranks may accumulate different numbers of micro-batches before a `join`.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward), and if some ranks call `backward` instead.
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

    /// Multiplies all gradients by one factor if their norm is above `max`, so that it becomes `max`. Returns the norm before.
    /// A norm that is infinite or NaN changes nothing: look at it before the optimizer steps.
    ///
    /// The norm is exact but for one rounding, and so the same bits on any number of ranks. All ranks clip to the same `max`;
    /// that they do is compared in the next step ([`SettingsDiffer`](dist_parallel::Error::SettingsDiffer)).
    ///
    /// # Errors
    /// If burn cannot hand out a gradient, or the model has other tensors than at [`new`](Self::new).
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

    /// Returns the norm of the gradients of all trained parameters together, as if they were one vector: exact but for one
    /// rounding.
    ///
    /// # Errors
    /// As for [`clip_gradients`](Self::clip_gradients).
    pub fn gradient_norm<M: Module>(&self, gradients: &GradientsParams, model: &M) -> Result<f64, BurnError> {
        self.norm_of(&self.collect(gradients, model)?)
    }

    /// The micro-batches, or rows of a batch, out of a number of them, that this rank computes: neighbours, and as equal shares
    /// as possible.
    pub fn share(&self, total: usize) -> Range<usize> {
        self.ddp.share(total)
    }

    /// Returns the report of the last step: the mean loss over all ranks, the number of micro-batches, the time and what
    /// was sent. `None` before the first step.
    pub const fn report(&self) -> Option<&StepReport> {
        self.report.as_ref()
    }

    /// The names of the trained parameters for which no micro-batch of the last step had a gradient, on any rank. After the first
    /// step they are logged as a warning.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        self.ddp.without_gradient()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.ddp.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.ddp.world_size()
    }

    /// The communicator, for what else the ranks have to say to each other between steps, such as sums of an evaluation.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        self.ddp.communicator_mut()
    }

    /// A step of these micro-batches, of which `gradients` computes one.
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

    /// Copies the values that ranks compare or synchronise. Every call that synchronises begins with this.
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

    /// Keeps what came of a step, and returns its gradients. The model's buffers become what the step made of them.
    fn finish<M: Module>(
        &mut self,
        report: dist_parallel::Result<StepReport>,
        model: &M,
    ) -> Result<GradientsParams, BurnError> {
        // A forward changes buffers through a shared module, and so does this.
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

    /// Ends the job if something failed that the other ranks cannot know.
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
