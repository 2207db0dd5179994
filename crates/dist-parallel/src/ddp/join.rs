//! Steps of ranks with different numbers of micro-batches.

use super::{Ddp, StepReport};
use crate::block_range::whole;
use crate::engine::Work;
use crate::trainer::{with_batches, with_computation};
use crate::{Block, BoxError, Loss, Params, Ready, Result};

impl<M: Params> Ddp<M> {
    /// Computes the mean gradients of the micro-batches that the ranks have: `own` on this rank, 0 if it has run out.
    /// Returns `None` on every rank if no rank has any: training is over.
    ///
    /// A rank that has run out does not delay the others and has no weight. Sums are divided by the number of
    /// micro-batches that were computed, or by their [weights](Loss). The rank still takes every step, because the
    /// parameters keep changing.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_parallel::optim::{Sgd, SgdOptions};
    /// use dist_parallel::{Ddp, DdpOptions};
    /// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
    /// # struct Number([ParamInfo; 1], [f32; 1]);
    /// # impl Params for Number {
    /// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
    /// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
    /// #         f(Values::F32(&self.1));
    /// #         Ok(())
    /// #     }
    /// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
    /// #         f(ValuesMut::F32(&mut self.1));
    /// #         Ok(())
    /// #     }
    /// # }
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let comm = Communicator::new(transport);
    ///     // Rank 0 has three batches, rank 1 has one.
    ///     let mut batches = if comm.rank() == 0 { vec![1.0, 2.0, 3.0] } else { vec![5.0] }.into_iter();
    ///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [0.0]);
    ///     let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
    ///     let mut sgd = Sgd::new(SgdOptions { learning_rate: 1.0, ..SgdOptions::default() }).unwrap();
    ///     loop {
    ///         let batch = batches.next();
    ///         let report = ddp.join_with(usize::from(batch.is_some()), |_, _, ready| {
    ///             let batch = batch.ok_or("no micro-batch was promised")?;
    ///             ready(0, [batch][..].into())?;
    ///             Ok(batch)
    ///         });
    ///         let Some(report) = report.unwrap() else { break };
    ///         assert!([3.0, 2.0].contains(&report.loss));
    ///         ddp.update(&mut sgd).unwrap();
    ///     }
    ///     ddp.model().1[0]
    /// });
    /// // (1 + 5) / 2, 2 and 3.
    /// assert_eq!(outcome.results, [-8.0; 2]);
    /// ```
    ///
    /// The closure receives the number of a micro-batch among this rank's own. If all ranks read the same data, each
    /// must take other examples from it: [`data`](crate::data) shows how, and the mistake that gives all ranks the
    /// same.
    ///
    /// # Errors
    /// The errors of [`step_with`](Self::step_with), and a step of another kind on some ranks.
    #[doc(alias = "Join")]
    pub fn join_with<C: Loss>(
        &mut self,
        own: usize,
        compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    ) -> Result<Option<StepReport>> {
        with_computation(compute, |computation| self.engine.join::<()>(own, computation.into()))
    }

    /// Joins like [`join_with`](Self::join_with), for a model that is a [`Block`], with a `batch` like that of
    /// [`step`](Self::step).
    ///
    /// # Errors
    /// The errors of [`join_with`](Self::join_with).
    pub fn join<A, C: Loss, L>(
        &mut self,
        own: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<Option<StepReport>>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| self.engine.join(own, Work::of_batches(whole, batches)))
    }
}
