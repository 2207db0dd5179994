//! The methods of [`Trainer`](super::Trainer) that trainers of a whole model have in common.

/// Defines methods of an implementation of [`Trainer`](super::Trainer) by a type with the field `engine`.
///
/// Trainers with the whole model use `model`. Trainers use `rounds` if their ranks compute the micro-batches of a step
/// together.
macro_rules! trainer_methods {
    (model) => {
        $crate::engine::engine_methods!(gradients);
        $crate::engine::engine_methods!(mode);

        fn infos(&self) -> &[$crate::ParamInfo] {
            &self.engine.model_infos
        }

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
        $crate::engine::engine_methods!(update);

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

        fn shards(&mut self) -> $crate::Result<&mut dyn $crate::checkpoint::Shards> {
            Ok(self)
        }
    };
}

pub(super) use trainer_methods;
