//! The blocking operations of all ranks of a group.

use bytemuck::Pod;
use dist_algos::scan::Extent;

use crate::{Buffer, Communicator, Element, ReduceOp, Result};

/// # Operations of all ranks
impl Communicator {
    /// Reduces the buffers of all ranks, element by element, into every rank's buffer.
    ///
    /// # Errors
    /// If the type does not support the reduction, if the ranks disagree about the call, or if a rank died or does
    /// not join the call in time.
    #[doc(alias = "MPI_Allreduce")]
    #[doc(alias = "allreduce")]
    #[doc(alias = "ncclAllReduce")]
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(|engine, options| engine.all_reduce(buffer, op, options))
    }

    /// Reduces one value of each rank, and returns the result.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     comm.all_reduce_value(comm.rank() as f64, ReduceOp::Max).unwrap()
    /// });
    /// assert_eq!(outcome.results, [2.0; 3]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Allreduce")]
    #[inline]
    pub fn all_reduce_value<T: Element>(&mut self, value: T, op: ReduceOp) -> Result<T> {
        let mut result = [value];
        self.all_reduce(&mut result, op)?;
        Ok(result[0])
    }

    /// Reduces like [`all_reduce`](Self::all_reduce), on memory that the operation owns while it runs. Ranks that
    /// share a host may write into each other's buffers, which is faster for large ones, and fastest for
    /// [allocated](Self::alloc) ones. All ranks must pass buffers of one kind: allocated, or made from vectors.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce). The buffer may be empty then; see [`Buffer`].
    #[doc(alias = "MPI_Allreduce")]
    pub fn all_reduce_buffer<T: Element>(&mut self, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        self.call(|engine, options| engine.all_reduce(buffer, op, options))
    }

    /// Reduces the inputs of all ranks, element by element. Rank `r` gets part `r` of the result; there are as many
    /// equal parts as ranks. The input does not change.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if the input is not `world_size` times as long as the output.
    #[doc(alias = "MPI_Reduce_scatter_block")]
    #[doc(alias = "ncclReduceScatter")]
    #[doc(alias = "reduce_scatter_tensor")]
    #[doc(alias = "reduce_scatter_base")]
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(|engine, options| engine.reduce_scatter(input.into(), None, output, op, options))
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter). Ranks that share a host may read an
    /// [allocated](Self::alloc) input directly; from 1 MiB on it is not copied for them. All ranks must pass
    /// buffers of one kind: allocated, or made from vectors.
    ///
    /// # Errors
    /// As for [`reduce_scatter`](Self::reduce_scatter).
    #[doc(alias = "MPI_Reduce_scatter_block")]
    pub fn reduce_scatter_buffer<T: Element>(
        &mut self,
        input: &Buffer<T>,
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        self.call(|engine, options| engine.reduce_scatter(input.into(), None, output, op, options))
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter), without a copy of the input. The result is this
    /// rank's part of the buffer, which is returned. The contents of the rest of the buffer are unspecified
    /// afterwards.
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
    /// As for [`all_reduce`](Self::all_reduce), and if the buffer's length is not divisible by the number of ranks.
    #[doc(alias = "MPI_IN_PLACE")]
    pub fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
    ) -> Result<&'a mut [T]> {
        self.call(|engine, options| engine.reduce_scatter_in_place(buffer, op, options))
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter), but rank `r` gets `counts[r]` elements of the result,
    /// in rank order. Every rank passes the counts of all ranks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is not one count for each rank, the input is not as
    /// long as the sum of all counts, or the output is not as long as this rank's count.
    #[doc(alias = "MPI_Reduce_scatter")]
    pub fn reduce_scatter_v<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        self.call(|engine, options| engine.reduce_scatter(input.into(), Some(counts), output, op, options))
    }

    /// Copies the inputs of all ranks to every rank, one after the other in rank order.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if the output is not `world_size` times as long as the input.
    #[doc(alias = "MPI_Allgather")]
    #[doc(alias = "allgather")]
    #[doc(alias = "ncclAllGather")]
    #[doc(alias = "all_gather_into_tensor")]
    #[doc(alias = "allgather_base")]
    pub fn all_gather<T: Pod>(&mut self, input: &[T], output: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_gather(input.into(), None, output, options))
    }

    /// Gathers like [`all_gather`](Self::all_gather). Two ranks that share a host may read an
    /// [allocated](Self::alloc) input directly; see [`reduce_scatter_buffer`](Self::reduce_scatter_buffer).
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "MPI_Allgather")]
    pub fn all_gather_buffer<T: Pod>(&mut self, input: &Buffer<T>, output: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_gather(input.into(), None, output, options))
    }

    /// Gathers like [`all_gather`](Self::all_gather), with each rank's input already at its place in the buffer.
    /// There are as many equal parts as ranks. Rank `r` contributes part `r`, and every other part is overwritten.
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
    /// As for [`all_reduce`](Self::all_reduce), and if the buffer's length is not divisible by the number of ranks.
    #[doc(alias = "MPI_IN_PLACE")]
    pub fn all_gather_in_place<T: Pod>(&mut self, buffer: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_gather_in_place(buffer, options))
    }

    /// Gathers like [`all_gather`](Self::all_gather), but the input of rank `r` has `counts[r]` elements. Every
    /// rank passes the counts of all ranks.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let counts = [2, 0, 1];
    ///     let input = vec![comm.rank() as u32; counts[comm.rank()]];
    ///     let mut output = [9; 3];
    ///     comm.all_gather_v(&input, &counts, &mut output).unwrap();
    ///     output
    /// });
    /// assert_eq!(outcome.results, [[0, 0, 2]; 3]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is not one count for each rank, the input is not as
    /// long as this rank's count, or the output is not as long as the sum of all counts.
    #[doc(alias = "MPI_Allgatherv")]
    pub fn all_gather_v<T: Pod>(&mut self, input: &[T], counts: &[usize], output: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_gather(input.into(), Some(counts), output, options))
    }

    /// Copies the root's buffer to every rank and overwrites the other buffers.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is no such root.
    #[doc(alias = "MPI_Bcast")]
    #[doc(alias = "bcast")]
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast<T: Pod>(&mut self, buffer: &mut [T], root: usize) -> Result<()> {
        self.call(|engine, options| engine.broadcast(buffer, root, options))
    }

    /// Reduces the buffers of all ranks, element by element, into the root's. The contents of the other buffers are
    /// unspecified afterwards.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if there is no such root.
    #[doc(alias = "MPI_Reduce")]
    #[doc(alias = "ncclReduce")]
    pub fn reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.call(|engine, options| engine.reduce(buffer, op, root, options))
    }

    /// Copies the inputs of all ranks to the root, one after the other in rank order. Only the root's output is
    /// used; the other ranks pass `&mut []`.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), if there is no such root, and if the root's output is not
    /// `world_size` times as long as the input.
    #[doc(alias = "MPI_Gather")]
    #[doc(alias = "ncclGather")]
    pub fn gather<T: Pod>(&mut self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.call(|engine, options| engine.gather(input, None, output, root, options))
    }

    /// Gathers like [`gather`](Self::gather), but the input of rank `r` has `counts[r]` elements. Every rank passes
    /// the counts of all ranks.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather), and if there is not one count for each rank.
    #[doc(alias = "MPI_Gatherv")]
    pub fn gather_v<T: Pod>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        self.call(|engine, options| engine.gather(input, Some(counts), output, root, options))
    }

    /// Copies part `r` of the root's input to rank `r`; there are as many equal parts as ranks. Only the root's
    /// input is used; the other ranks pass `&[]`.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), if there is no such root, and if the root's input is not
    /// `world_size` times as long as the output.
    #[doc(alias = "MPI_Scatter")]
    #[doc(alias = "ncclScatter")]
    pub fn scatter<T: Pod>(&mut self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.call(|engine, options| engine.scatter(input, None, output, root, options))
    }

    /// Scatters like [`scatter`](Self::scatter), but rank `r` gets `counts[r]` elements. Every rank passes the
    /// counts of all ranks.
    ///
    /// # Errors
    /// As for [`scatter`](Self::scatter), and if there is not one count for each rank.
    #[doc(alias = "MPI_Scatterv")]
    pub fn scatter_v<T: Pod>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        self.call(|engine, options| engine.scatter(input, Some(counts), output, root, options))
    }

    /// Copies part `d` of every rank's input to rank `d`, in rank order: part `s` of the output is from rank `s`.
    /// There are as many equal parts as ranks.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let input = [[1, 2], [3, 4]][comm.rank()];
    ///     let mut output = [0; 2];
    ///     comm.all_to_all(&input, &mut output).unwrap();
    ///     output
    /// });
    /// assert_eq!(outcome.results, [[1, 3], [2, 4]]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if the two buffers differ in length or the length is not
    /// divisible by the number of ranks.
    #[doc(alias = "MPI_Alltoall")]
    #[doc(alias = "alltoall")]
    #[doc(alias = "ncclAlltoAll")]
    #[doc(alias = "all_to_all_single")]
    pub fn all_to_all<T: Pod>(&mut self, input: &[T], output: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_to_all(input.into(), output, options))
    }

    /// Exchanges like [`all_to_all`](Self::all_to_all). Ranks that share a host may read an
    /// [allocated](Self::alloc) input directly; see [`reduce_scatter_buffer`](Self::reduce_scatter_buffer).
    ///
    /// # Errors
    /// As for [`all_to_all`](Self::all_to_all).
    #[doc(alias = "MPI_Alltoall")]
    pub fn all_to_all_buffer<T: Pod>(&mut self, input: &Buffer<T>, output: &mut [T]) -> Result<()> {
        self.call(|engine, options| engine.all_to_all(input.into(), output, options))
    }

    /// Exchanges like [`all_to_all`](Self::all_to_all), with parts of any length. This rank sends `send_counts[d]`
    /// elements to rank `d` and expects `receive_counts[s]` elements from rank `s`. The ranks first exchange and
    /// compare these counts.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Error};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let receive_counts = if comm.rank() == 0 { [1, 2] } else { [1, 5] };
    ///     let mut output = vec![0_u8; receive_counts.iter().sum()];
    ///     let send_counts = if comm.rank() == 0 { [1, 1] } else { [2, 4] };
    ///     comm.all_to_all_v(&vec![0; send_counts.iter().sum()], &send_counts, &mut output, &receive_counts)
    ///         .unwrap_err()
    ///         .to_string()
    /// });
    /// assert_eq!(outcome.results, ["all_to_all: rank 1 sends 4 elements to rank 1, which expects 5"; 2]);
    /// ```
    ///
    /// # Errors
    /// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if a rank is sent another number of
    /// elements than it expects. As for [`all_reduce`](Self::all_reduce), and if the counts are not one for each
    /// rank or do not add up to the buffers' lengths.
    #[doc(alias = "MPI_Alltoallv")]
    #[doc(alias = "all_to_all_single")]
    #[doc(alias = "alltoallv")]
    pub fn all_to_all_v<T: Pod>(
        &mut self,
        input: &[T],
        send_counts: &[usize],
        output: &mut [T],
        receive_counts: &[usize],
    ) -> Result<()> {
        self.call(|engine, options| engine.all_to_all_v(input, send_counts, output, receive_counts, options))
    }

    /// Reduces the buffers of ranks 0 to `r`, element by element, into the buffer of rank `r`.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (mut with_own, mut without) = ([10], [10]);
    ///     comm.scan(&mut with_own, ReduceOp::Sum).unwrap();
    ///     comm.exclusive_scan(&mut without, ReduceOp::Sum).unwrap();
    ///     (with_own, without)
    /// });
    /// assert_eq!(outcome.results, [([10], [0]), ([20], [10]), ([30], [20])]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and for means, which only the last rank could finish.
    #[doc(alias = "MPI_Scan")]
    #[doc(alias = "prefix_sum")]
    pub fn scan<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(|engine, options| engine.scan(buffer, op, Extent::Inclusive, options))
    }

    /// Reduces like [`scan`](Self::scan), without the rank's own contribution: rank `r` gets the reduction of ranks
    /// 0 to `r − 1`. Rank 0 gets the neutral element: zero for sums, one for products, the greatest value for
    /// minima (infinity, if there is one), the least value for maxima, all bits set for and, no bits set for or and
    /// xor.
    ///
    /// # Errors
    /// As for [`scan`](Self::scan).
    #[doc(alias = "MPI_Exscan")]
    pub fn exclusive_scan<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(|engine, options| engine.scan(buffer, op, Extent::Exclusive, options))
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Barrier")]
    pub fn barrier(&mut self) -> Result<()> {
        self.call(|engine, options| engine.barrier(options))
    }

    /// Waits for all ranks like [`barrier`](Self::barrier), and reports absent ranks. If ranks are missing after
    /// three quarters of the timeout, the ranks that came get their list, and the job ends. It takes longer than a
    /// barrier, because rank 0 exchanges messages with every rank. Use it to find the cause of a hang.
    ///
    /// If rank 0 itself does not come, the other ranks only learn that, at the end of the timeout. Only rank 0
    /// knows about the other absent ranks.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use dist_collectives::{Communicator, Error};
    /// use dist_transport::sim;
    ///
    /// sim::run(1, 4, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     if comm.rank() == 2 {
    ///         return comm.recv(&mut [0_u8], 3).unwrap_err(); // lost in another call
    ///     }
    ///     let error = comm.with_timeout(Duration::from_secs(5)).monitored_barrier().unwrap_err();
    ///     assert!(matches!(&error, Error::Absent { ranks } if *ranks == [2]));
    ///     error
    /// });
    /// ```
    ///
    /// # Errors
    /// [`Error::Absent`](crate::Error::Absent) on every rank that came, [`Error::Late`](crate::Error::Late) on a
    /// rank that comes later. As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "monitoredBarrier")]
    pub fn monitored_barrier(&mut self) -> Result<()> {
        self.call(|engine, options| engine.monitored_barrier(options))
    }
}
