//! The methods of [`Trainer`](super::Trainer) that trainers pass on to their step engine, written once.

/// Defines methods of an implementation of [`Trainer`](super::Trainer). An expression of `this` has the engine.
///
/// All trainers use `gradients`. Trainers with the whole model use `model`. Trainers use `rounds` if their ranks compute the
/// micro-batches of a step together.
macro_rules! trainer_methods {
    (gradients, |$this:ident| $engine:expr, $engine_mut:expr) => {
        fn infos(&self) -> &[$crate::ParamInfo] {
            let $this = self;
            &$engine.model_infos
        }

        fn gradient_norm(&mut self) -> $crate::Result<f64> {
            let $this = self;
            $engine_mut.gradient_norm()
        }

        fn clip_gradients(&mut self, max: f64) -> $crate::Result<f64> {
            let $this = self;
            $engine_mut.clip_gradients(max)
        }

        fn scale_gradients(&mut self, factor: f64) {
            let $this = self;
            $engine_mut.scale_gradients(factor);
        }

        fn without_gradient(&self) -> Vec<&str> {
            let $this = self;
            $engine.without_gradient()
        }

        fn train(&mut self) {
            let $this = self;
            $engine_mut.set_training(true);
        }

        fn eval(&mut self) {
            let $this = self;
            $engine_mut.set_training(false);
        }
    };
    (model) => {
        $crate::trainer::methods::trainer_methods!(gradients, |this| this.engine, this.engine);

        fn communicator(&self) -> &dist_collectives::Communicator {
            &self.engine.world
        }

        fn communicator_mut(&mut self) -> &mut dist_collectives::Communicator {
            &mut self.engine.world
        }

        fn model(&self) -> $crate::Result<&$crate::Sequence<A>> {
            Ok(&self.engine.stage().model)
        }

        fn model_mut(&mut self) -> $crate::Result<&mut $crate::Sequence<A>> {
            Ok(&mut self.engine.stage_mut().model)
        }
    };
    (rounds $block:path) => {
        fn step_batches(
            &mut self,
            micro_batches: usize,
            batches: $crate::trainer::Batches<'_, A>,
        ) -> $crate::Result<$crate::StepReport> {
            self.engine.step(micro_batches, Work::of_batches($block, batches))
        }

        fn accumulate_batches(
            &mut self,
            micro_batches: usize,
            batches: $crate::trainer::Batches<'_, A>,
        ) -> $crate::Result<()> {
            self.engine.accumulate(micro_batches, Work::of_batches($block, batches))
        }

        fn join_batches(
            &mut self,
            own: usize,
            batches: $crate::trainer::Batches<'_, A>,
        ) -> $crate::Result<Option<$crate::StepReport>> {
            self.engine.join(own, Work::of_batches($block, batches))
        }

        fn evaluate_batches(
            &mut self,
            micro_batches: usize,
            evaluation: $crate::trainer::Evaluation<'_, A>,
        ) -> $crate::Result<$crate::StepReport> {
            self.engine.evaluate(micro_batches, Work::of_evaluation($block, evaluation))
        }

        fn update(&mut self, optimizer: &mut dyn $crate::Optimizer) -> $crate::Result<()> {
            self.engine.update(optimizer)
        }

        fn update_if_finite(&mut self, optimizer: &mut dyn $crate::Optimizer) -> $crate::Result<bool> {
            self.engine.update_if_finite(optimizer)
        }

        fn shards(&mut self) -> $crate::Result<&mut dyn $crate::checkpoint::Shards> {
            Ok(self)
        }
    };
}

pub(super) use trainer_methods;
