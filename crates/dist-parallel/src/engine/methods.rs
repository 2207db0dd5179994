//! The methods that trainers pass on to their [`StepEngine`](super::StepEngine), written once.

/// Defines methods that pass a call on to the engine: those of a type, with `pub`, or those of its implementation of
/// [`Trainer`](crate::trainer::Trainer), without.
///
/// The engine is the field `engine`, unless two expressions of `this` return it. All types use `mode`. Types with mean
/// gradients use `gradients`, and `update` if all ranks update together. Types with the whole model use `model`, with the
/// model's type.
macro_rules! engine_methods {
    ($visibility:vis gradients) => {
        $crate::engine::engine_methods!($visibility gradients, |this| this.engine, this.engine);
    };
    ($visibility:vis gradients, |$this:ident| $engine:expr, $engine_mut:expr) => {
        /// Returns the names of the trained parameters on this rank for which no micro-batch of the last step had a
        /// gradient on any rank. An update leaves them unchanged. After the first step they are logged as a warning,
        /// because a block may have forgotten to report them.
        #[doc(alias = "find_unused_parameters")]
        $visibility fn without_gradient(&self) -> Vec<&str> {
            let $this = self;
            $engine.without_gradient()
        }

        /// Returns the Euclidean norm of all gradients as one vector. It is rounded once, so its bits do not depend on
        /// how training is distributed. It is infinite or NaN if a gradient is. Every rank calls this.
        ///
        /// # Errors
        /// [`StepPanicked`](crate::Error::StepPanicked) if a step has panicked and no step has succeeded since.
        /// Communication fails.
        $visibility fn gradient_norm(&mut self) -> $crate::Result<f64> {
            let $this = self;
            $engine_mut.gradient_norm()
        }

        /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. Nothing
        /// changes if the norm is infinite or NaN: check it before the update. Every rank calls this.
        ///
        /// # Errors
        /// The errors of [`gradient_norm`](Self::gradient_norm).
        #[doc(alias = "clip_grad_norm_")]
        $visibility fn clip_gradients(&mut self, max: f64) -> $crate::Result<f64> {
            let $this = self;
            $engine_mut.clip_gradients(max)
        }

        /// Scales all gradients by a factor, for example that of a [`LossScaler`](crate::optim::LossScaler). It needs no
        /// communication. All ranks call it with the same factor, and the next step compares it.
        $visibility fn scale_gradients(&mut self, factor: f64) {
            let $this = self;
            $engine_mut.scale_gradients(factor);
        }
    };
    ($visibility:vis update) => {
        /// Updates the parameters by their gradients. Parameters without a gradient stay unchanged. Every rank calls
        /// this. The optimizer receives this rank's shard of each parameter as a slice, whose number is the parameter's
        /// index in the whole model, and keeps state for the shard only.
        ///
        /// # Errors
        /// The model does not hand out its parameters, or the optimizer or communication fails.
        /// [`StepPanicked`](crate::Error::StepPanicked) if a step has panicked and no step has succeeded since.
        $visibility fn update(&mut self, optimizer: &mut dyn $crate::Optimizer) -> $crate::Result<()> {
            self.engine.update(optimizer)
        }

        /// [Updates](Self::update) the parameters if the norm of the gradients is finite, and returns `true`. Otherwise
        /// changes nothing and returns `false`. The decision is the same on every rank. Every rank calls this.
        ///
        /// After [`clip_gradients`](Self::clip_gradients), which returns the norm, compare that instead.
        ///
        /// # Errors
        /// The errors of [`update`](Self::update).
        #[doc(alias = "skip_nan")]
        $visibility fn update_if_finite(&mut self, optimizer: &mut dyn $crate::Optimizer) -> $crate::Result<bool> {
            self.engine.update_if_finite(optimizer)
        }
    };
    ($visibility:vis mode) => {
        $crate::engine::engine_methods!($visibility mode, |this| this.engine);
    };
    ($visibility:vis mode, |$this:ident| $engine_mut:expr) => {
        /// Sets forwards outside of steps and evaluations to training mode, which blocks receive as a
        /// [`Pass`](crate::model::Pass). A step is always in training mode, an evaluation never.
        $visibility fn train(&mut self) {
            let $this = self;
            $engine_mut.set_training(true);
        }

        /// Sets forwards outside of steps and evaluations to evaluation mode. Every trainer begins with it.
        $visibility fn eval(&mut self) {
            let $this = self;
            $engine_mut.set_training(false);
        }
    };
    (pub communicator) => {
        /// Returns the communicator. In a pipeline, it is that between the stages.
        pub const fn communicator(&self) -> &dist_collectives::Communicator {
            &self.engine.world
        }

        /// Returns the communicator, for other messages between the ranks. If you set its timeout or reduction order,
        /// every later call of this training uses it.
        pub const fn communicator_mut(&mut self) -> &mut dist_collectives::Communicator {
            &mut self.engine.world
        }
    };
    (pub model $model:ty) => {
        /// Returns the model. Its parameters may be freed if the strategy shards them.
        pub fn model(&self) -> &$model {
            &self.engine.stage().model
        }

        /// Returns the model, for example to evaluate it or to change a setting of its blocks. If you change
        /// parameters, change them alike on every rank, and only those that the strategy does not shard.
        pub fn model_mut(&mut self) -> &mut $model {
            &mut self.engine.stage_mut().model
        }

        /// Returns this rank's number.
        pub fn rank(&self) -> usize {
            self.engine.world.rank()
        }

        /// Returns the number of ranks.
        pub fn world_size(&self) -> usize {
            self.engine.world.world_size()
        }
    };
}

pub(crate) use engine_methods;
