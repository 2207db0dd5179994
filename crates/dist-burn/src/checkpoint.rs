//! Checkpoints of a model and its optimizer.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use dist_parallel::checkpoint::{Checkpoints, Chunk, Saving, ShardMetadata, Shards, Slice};
use dist_parallel::{BoxError, Communicator, Error, ParamInfo, Params, Values, ValuesMut};

use crate::module::check;
use crate::optimizer::{OptimizerTensors, PREFIX};
use crate::{BurnError, DataParallel, ModuleParams};

impl DataParallel {
    /// Saves the model and the optimizer's state as one checkpoint that any number of ranks can load. All ranks call
    /// this with the same step.
    ///
    /// The optimizer's state is saved under the names of the parameters, since burn's own identifiers are random in
    /// every process. All of burn's optimizers and groups of them can be saved. An optimizer of your own can be saved
    /// if its state has the same tensors after every step. Learning rates are not saved: the loop passes them.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::LinearConfig;
    /// use burn::optim::AdamWConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use dist_burn::DataParallel;
    /// use dist_parallel::checkpoint::Checkpoints;
    /// use dist_parallel::Communicator;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// let device = Device::flex().autodiff();
    /// let mut model = LinearConfig::new(1, 1).init(&device);
    /// let mut dp = DataParallel::new(Communicator::from_env()?, &mut model)?;
    /// let mut optimizer = AdamWConfig::new().init();
    /// let mut checkpoints = Checkpoints::at(folder);
    /// let done = dp.load(&mut checkpoints, &mut model, Some(&mut optimizer))?.unwrap_or(0);
    /// for step in done + 1..=4 {
    ///     let loss = model.forward(Tensor::<2>::ones([1, 1], &device)).square().mean();
    ///     let grads = dp.backward(loss, &model)?;
    ///     model = optimizer.step(0.1, model, grads);
    ///     if step % 2 == 0 {
    ///         dp.save(&mut checkpoints, &model, Some(&optimizer), step)?;
    ///     }
    /// }
    /// # Ok::<(), dist_parallel::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Checkpoints::save`], and if the optimizer has state of parameters that the model does not have.
    pub fn save<M: Module>(
        &mut self,
        checkpoints: &mut Checkpoints,
        model: &M,
        optimizer: Option<&ModuleOptimizer>,
        step: u64,
    ) -> Result<(), BurnError> {
        let tensors = Tensors::of(self, model, optimizer);
        let params = self.or_abort(tensors)?.params;
        let mut replica = Replica { dp: self, params, with_optimizer: optimizer.is_some() };
        Ok(checkpoints.save(&mut replica, None, step)?)
    }

    /// Copies the state and saves the copy in the background while training goes on: see [`Checkpoints::start_save`].
    ///
    /// # Errors
    /// As for [`save`](Self::save). Later errors are returned by [`Saving`].
    pub fn start_save<M: Module>(
        &mut self,
        checkpoints: &mut Checkpoints,
        model: &M,
        optimizer: Option<&ModuleOptimizer>,
        step: u64,
    ) -> Result<Saving, BurnError> {
        let tensors = Tensors::of(self, model, optimizer);
        let params = self.or_abort(tensors)?.params;
        let mut replica = Replica { dp: self, params, with_optimizer: optimizer.is_some() };
        Ok(checkpoints.start_save(&mut replica, None, step)?)
    }

    /// Loads the newest checkpoint into the model, and into the optimizer if there is one, and returns its step.
    /// Returns `None` and changes nothing if there is no checkpoint. All ranks call this.
    ///
    /// # Errors
    /// As for [`Checkpoints::load`]. After an error nothing has changed on any rank.
    pub fn load<M: Module>(
        &mut self,
        checkpoints: &mut Checkpoints,
        model: &mut M,
        optimizer: Option<&mut ModuleOptimizer>,
    ) -> Result<Option<u64>, BurnError> {
        self.load_by(model, optimizer, |replica| checkpoints.load(replica, None))
    }

    /// Loads the newest checkpoint of this step: see [`load`](Self::load).
    ///
    /// # Errors
    /// As for [`load`](Self::load), and if there is no checkpoint of this step.
    pub fn load_step<M: Module>(
        &mut self,
        checkpoints: &mut Checkpoints,
        model: &mut M,
        optimizer: Option<&mut ModuleOptimizer>,
        step: u64,
    ) -> Result<(), BurnError> {
        let load =
            |replica: &mut Replica<'_>| checkpoints.load_step(step, replica, None).map(|()| Some(step));
        self.load_by(model, optimizer, load).map(drop)
    }

    fn load_by<M: Module>(
        &mut self,
        model: &mut M,
        optimizer: Option<&mut ModuleOptimizer>,
        load: impl FnOnce(&mut Replica<'_>) -> dist_parallel::Result<Option<u64>>,
    ) -> Result<Option<u64>, BurnError> {
        let tensors = Tensors::of(self, model, optimizer.as_deref());
        let Tensors { params, state } = self.or_abort(tensors)?;
        let own = self.ddp.model().infos().len();
        let mut replica = Replica { dp: self, params, with_optimizer: optimizer.is_some() };
        let loaded = load(&mut replica)?;
        if loaded.is_some() {
            let (params, tensors) = replica.params.split_off(own);
            let installed = params.install(model.clone());
            let restored = optimizer.zip(state).map(|(optimizer, state)| {
                let restored = state.restore(optimizer, tensors);
                restored.map(|restored| (optimizer, restored))
            });
            // The other ranks already have the new values.
            let restored = self.or_abort(restored.transpose())?;
            *model = self.or_abort(installed)?;
            if let Some((optimizer, restored)) = restored {
                *optimizer = restored;
            }
        }
        Ok(loaded)
    }
}

/// The tensors of a checkpoint.
struct Tensors {
    params: ModuleParams,
    state: Option<OptimizerTensors>,
}

impl Tensors {
    fn of<M: Module>(
        dp: &DataParallel,
        model: &M,
        optimizer: Option<&ModuleOptimizer>,
    ) -> Result<Self, BurnError> {
        check(dp.ddp.model().infos(), model)?;
        let params = ModuleParams::new(model)?;
        let state = optimizer.map(|optimizer| OptimizerTensors::of(optimizer, model)).transpose()?;
        let tensors = state.as_ref().map(OptimizerTensors::tensors).transpose()?;
        Ok(Self { params: params.with_tensors(tensors.into_iter().flatten()), state })
    }
}

/// A rank of the training with the tensors that it saves. Every rank holds all of them.
struct Replica<'a> {
    dp: &'a mut DataParallel,
    params: ModuleParams,
    with_optimizer: bool,
}

impl Shards for Replica<'_> {
    fn infos(&self) -> &[ParamInfo] {
        self.params.infos()
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        let all = self.params.infos().iter().enumerate();
        let chunks = all.map(|(parameter, info)| Chunk { parameter, offset: 0, len: info.len() }).collect();
        ShardMetadata { chunks, copy: self.dp.rank(), copies: self.dp.world_size() }
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        ShardMetadata { chunks: Vec::new(), copy: self.dp.rank(), copies: self.dp.world_size() }
    }

    fn leaves_out(&self, tensor: &str) -> bool {
        !self.with_optimizer && tensor.starts_with(PREFIX)
    }

    fn unsaved(&self) -> Option<String> {
        self.dp.ddp.unsaved()
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> dist_parallel::Result<()> {
        self.params.read(chunk.parameter, f).map_err(|source| self.failed(chunk, source))
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> dist_parallel::Result<()> {
        let written = self.params.write(chunk.parameter, f);
        written.map_err(|source| self.failed(chunk, source))
    }

    fn check_alike(&mut self) -> dist_parallel::Result<()> {
        self.dp.ddp.check_alike()
    }

    fn updates(&self) -> u64 {
        self.dp.ddp.updates()
    }

    fn loaded(&mut self) -> dist_parallel::Result<()> {
        self.dp.report = None;
        self.dp.steps.restart();
        self.dp.ddp.loaded()
    }

    fn steps(&self) -> u64 {
        self.dp.ddp.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        self.dp.ddp.set_steps(steps);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.dp.communicator_mut()
    }
}

impl Replica<'_> {
    fn failed(&self, chunk: Chunk, source: BoxError) -> Error {
        let index = chunk.parameter;
        match self.params.infos().get(index) {
            Some(info) => Error::Model { parameter: info.name.clone(), source },
            None => Error::NoSlot { index },
        }
    }
}
