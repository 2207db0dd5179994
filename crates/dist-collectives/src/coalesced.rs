//! Operations on many small buffers at once.

use bytemuck::Pod;

use crate::pending::Pending;
use crate::{Buffer, Communicator, Element, ReduceOp, Result};

/// # Many buffers as one operation
///
/// The cost of small buffers is the cost of their messages, not of their elements. These operations copy many
/// buffers into memory that the communicator keeps and process them in one call. Every rank passes the same number
/// of buffers of the same lengths, or all ranks get [`Error::Mismatch`](crate::Error::Mismatch). A list may be empty,
/// and so may a buffer.
impl Communicator {
    /// Reduces each buffer like [`all_reduce`](Self::all_reduce), in one operation. In canonical order it gives the
    /// same bits.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (mut weights, mut bias) = ([1.0_f32, 2.0], [comm.rank() as f32]);
    ///     comm.all_reduce_coalesced(&mut [&mut weights, &mut bias], ReduceOp::Mean).unwrap();
    ///     (weights, bias)
    /// });
    /// assert_eq!(outcome.results, [([1.0, 2.0], [0.5]); 2]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce). The lengths of the buffers are part of the call.
    #[doc(alias = "allreduce_coalesced")]
    #[doc(alias = "ncclGroupStart")]
    #[doc(alias = "_coalescing_manager")]
    pub fn all_reduce_coalesced<T: Element>(&mut self, buffers: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        self.call(|engine, options| {
            engine
                .coalesced(buffers, options, |engine, packed, options| engine.all_reduce(packed, op, options))
        })
    }

    /// Broadcasts each buffer like [`broadcast`](Self::broadcast), in one operation.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast). The lengths of the buffers are part of the call.
    #[doc(alias = "_broadcast_coalesced")]
    pub fn broadcast_coalesced<T: Pod>(&mut self, buffers: &mut [&mut [T]], root: usize) -> Result<()> {
        self.call(|engine, options| {
            engine.coalesced(buffers, options, |engine, packed, options| {
                engine.broadcast(packed, root, options)
            })
        })
    }

    /// Starts an [`all_reduce_coalesced`](Self::all_reduce_coalesced), which owns the buffers until it ends.
    #[doc(alias = "allreduce_coalesced")]
    #[doc(alias = "async_op")]
    pub fn start_all_reduce_coalesced<T: Element>(
        &mut self,
        buffers: Vec<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Vec<Buffer<T>>> {
        self.start(buffers, move |engine, buffers, options| {
            engine
                .coalesced(buffers, options, |engine, packed, options| engine.all_reduce(packed, op, options))
        })
    }

    /// Starts a [`broadcast_coalesced`](Self::broadcast_coalesced), which owns the buffers until it ends.
    #[doc(alias = "_broadcast_coalesced")]
    #[doc(alias = "async_op")]
    pub fn start_broadcast_coalesced<T: Pod + Send>(
        &mut self,
        buffers: Vec<Buffer<T>>,
        root: usize,
    ) -> Pending<Vec<Buffer<T>>> {
        self.start(buffers, move |engine, buffers, options| {
            engine.coalesced(buffers, options, |engine, packed, options| {
                engine.broadcast(packed, root, options)
            })
        })
    }
}
