//! The operations that do not block: each begins here and ends in the worker.

use crate::engine::{Engine, Manner};
use crate::pending::Pending;
use crate::{Buffer, Communicator, Element, ReduceOp, Result};

/// # Operations that do not block
///
/// Every operation has a `start_` form, which returns at once. It takes the memory that it works on as a
/// [`Buffer`], owns it while the operation runs, and gives what became of it from [`Pending::wait`]. Operations that
/// were started are done one after the other in the order of their starts, beside the blocking ones. The deadline
/// begins at the start. What can go wrong is reported by [`Pending::wait`].
impl Communicator {
    /// Begins an [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let pending = comm.start_all_reduce(vec![1.0_f32; 4], ReduceOp::Sum);
    ///     // … compute …
    ///     pending.wait().unwrap().into_vec()
    /// });
    /// assert_eq!(outcome.results, [[2.0; 4]; 2]);
    /// ```
    #[doc(alias = "MPI_Iallreduce")]
    pub fn start_all_reduce<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        self.start(buffer.into(), move |engine, buffer, manner| engine.all_reduce(buffer, op, manner))
    }

    /// Gives an operation to the worker, with the memory that it works on and the manner of a call that begins now.
    fn start<B: Send + 'static>(
        &mut self,
        buffer: B,
        operation: impl FnOnce(&mut Engine, &mut B, Manner) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        let manner = self.engine.manner(&self.settings);
        match self.worker() {
            Ok(worker) => worker.start(buffer, move |engine, buffer| operation(engine, buffer, manner)),
            Err(error) => Pending::failed(buffer, error),
        }
    }
}
