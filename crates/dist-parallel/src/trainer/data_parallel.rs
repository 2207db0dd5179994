//! Data-parallel training as a [`Trainer`].

use dist_collectives::Communicator;

use super::methods::trainer_methods;
use super::{Computation, Strategy, Trainer};
use crate::block_range::whole;
use crate::engine::Work;
use crate::{Ddp, Result, Sequence, StepReport, Values};

impl<A: 'static> Trainer<A> for Ddp<Sequence<A>> {
    trainer_methods!(model);
    trainer_methods!(rounds whole);

    fn strategy(&self) -> Strategy {
        if self.world_size() == 1 { Strategy::Single } else { Strategy::Ddp }
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        self.engine.step::<()>(micro_batches, computation.into())
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        (*self).for_each_parameter(f)
    }

    fn into_parts(self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        let (comm, model) = (*self).into_parts();
        Ok((comm, vec![model]))
    }
}
