//! The operations that all ranks of a group do together and wait for.

use crate::{Communicator, Element, ReduceOp, Result};

/// # Operations of all ranks
impl Communicator {
    /// Reduces the buffers of all ranks, element by element, into every rank's buffer.
    ///
    /// # Errors
    /// If the type has no such reduction, if the ranks disagree about the call, if a rank died or does not come
    /// in time.
    #[doc(alias = "MPI_Allreduce")]
    #[doc(alias = "allreduce")]
    #[doc(alias = "ncclAllReduce")]
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.all_reduce(buffer, op, manner)
    }

    /// Reduces the inputs of all ranks, element by element; rank `r` gets part `r` of the result, of as many
    /// equal parts as there are ranks. The input stays as it is.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and unless the input is `world_size` times as long as the output.
    #[doc(alias = "MPI_Reduce_scatter_block")]
    #[doc(alias = "ncclReduceScatter")]
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.reduce_scatter(input, output, op, manner)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), without a copy of the input: the result is the own part of the
    /// buffer, which is given back. What the rest of the buffer holds afterwards is unspecified.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut buffer = [1, 2, 3, 4];
    ///     comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum).unwrap().to_vec()
    /// });
    /// assert_eq!(outcome.results, [[2, 4], [6, 8]]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and unless the ranks divide the buffer's length.
    pub fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
    ) -> Result<&'a mut [T]> {
        let manner = self.engine.manner(&self.settings);
        self.engine.reduce_scatter_in_place(buffer, op, manner)
    }

    /// Gives every rank the inputs of all ranks, one after the other in rank order.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and unless the output is `world_size` times as long as the input.
    #[doc(alias = "MPI_Allgather")]
    #[doc(alias = "allgather")]
    #[doc(alias = "ncclAllGather")]
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T]) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.all_gather(input, output, manner)
    }

    /// As [`all_gather`](Self::all_gather), where each rank's input already lies at its place in the buffer: of as many
    /// equal parts as there are ranks, rank `r` brings part `r`, and every other part is overwritten.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut buffer = if comm.rank() == 0 { [5, 6, 0, 0] } else { [0, 0, 7, 8] };
    ///     comm.all_gather_in_place(&mut buffer).unwrap();
    ///     buffer
    /// });
    /// assert_eq!(outcome.results, [[5, 6, 7, 8]; 2]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and unless the ranks divide the buffer's length.
    pub fn all_gather_in_place<T: Element>(&mut self, buffer: &mut [T]) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.all_gather_in_place(buffer, manner)
    }

    /// Gives every rank the root's buffer. What the other buffers held is lost.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is no such root.
    #[doc(alias = "MPI_Bcast")]
    #[doc(alias = "bcast")]
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: usize) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.broadcast(buffer, root, manner)
    }

    /// Reduces the buffers of all ranks, element by element, into the root's. What the other buffers hold
    /// afterwards is unspecified.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is no such root.
    #[doc(alias = "MPI_Reduce")]
    #[doc(alias = "ncclReduce")]
    pub fn reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.reduce(buffer, op, root, manner)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Barrier")]
    pub fn barrier(&mut self) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.barrier(manner)
    }
}
