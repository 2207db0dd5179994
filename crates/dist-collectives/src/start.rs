//! The operations that do not block: each begins here and ends in the worker.

use crate::engine::{Engine, Manner};
use crate::pending::Pending;
use crate::{Buffer, Communicator, Element, ReduceOp, Result};

/// # Operations that do not block
///
/// Every operation has a `start_` form, which returns at once. It takes the memory that it works on as a
/// [`Buffer`], owns it while the operation runs, and gives the output from [`Pending::wait`]: the same memory if the
/// operation works in place, else new memory; if it fails, what it was given comes back. Operations that were started
/// are done one after the other in the order of their starts, beside the blocking ones. The deadline begins at the
/// start. Whatever can go wrong is reported by [`Pending::wait`].
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

    /// Begins a [`reduce_scatter`](Self::reduce_scatter); the output is this rank's part.
    #[doc(alias = "MPI_Ireduce_scatter_block")]
    pub fn start_reduce_scatter<T: Element>(
        &mut self,
        input: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = input.len() / self.world_size();
        self.start_into(input, len, move |engine, input, output, manner| {
            engine.reduce_scatter(input, output, op, manner)
        })
    }

    /// Begins a [`reduce_scatter_in_place`](Self::reduce_scatter_in_place); the whole buffer comes back, with the result
    /// as part `rank` of it.
    pub fn start_reduce_scatter_in_place<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        self.start(buffer.into(), move |engine, buffer, manner| {
            engine.reduce_scatter_in_place(buffer, op, manner).map(drop)
        })
    }

    /// Begins an [`all_gather`](Self::all_gather).
    #[doc(alias = "MPI_Iallgather")]
    pub fn start_all_gather<T: Element>(&mut self, input: impl Into<Buffer<T>>) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = input.len().saturating_mul(self.world_size());
        self.start_into(input, len, Engine::all_gather)
    }

    /// Begins an [`all_gather_in_place`](Self::all_gather_in_place).
    pub fn start_all_gather_in_place<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
    ) -> Pending<Buffer<T>> {
        self.start(buffer.into(), |engine, buffer, manner| engine.all_gather_in_place(buffer, manner))
    }

    /// Begins a [`broadcast`](Self::broadcast).
    #[doc(alias = "MPI_Ibcast")]
    pub fn start_broadcast<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        root: usize,
    ) -> Pending<Buffer<T>> {
        self.start(buffer.into(), move |engine, buffer, manner| engine.broadcast(buffer, root, manner))
    }

    /// Begins a [`reduce`](Self::reduce).
    #[doc(alias = "MPI_Ireduce")]
    pub fn start_reduce<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
        root: usize,
    ) -> Pending<Buffer<T>> {
        self.start(buffer.into(), move |engine, buffer, manner| engine.reduce(buffer, op, root, manner))
    }

    /// Begins a [`barrier`](Self::barrier).
    #[doc(alias = "MPI_Ibarrier")]
    pub fn start_barrier(&mut self) -> Pending<()> {
        self.start((), |engine, (), manner| engine.barrier(manner))
    }

    /// Begins to [`send`](Self::send) a message, for `to` to take with [`start_recv`](Self::start_recv).
    #[doc(alias = "MPI_Isend")]
    pub fn start_send<T: Element>(
        &mut self,
        elements: impl Into<Buffer<T>>,
        to: usize,
    ) -> Pending<Buffer<T>> {
        self.start(elements.into(), move |engine, elements, manner| engine.send(elements, to, manner))
    }

    /// Begins to [receive](Self::recv) a message into this memory, one that `from` sends with
    /// [`start_send`](Self::start_send).
    #[doc(alias = "MPI_Irecv")]
    pub fn start_recv<T: Element>(
        &mut self,
        elements: impl Into<Buffer<T>>,
        from: usize,
    ) -> Pending<Buffer<T>> {
        self.start(elements.into(), move |engine, elements, manner| engine.receive(elements, from, manner))
    }

    /// Begins a [`send_recv`](Self::send_recv); both memories come back.
    #[doc(alias = "MPI_Isendrecv")]
    pub fn start_send_recv<T: Element>(
        &mut self,
        sent: impl Into<Buffer<T>>,
        to: usize,
        received: impl Into<Buffer<T>>,
        from: usize,
    ) -> Pending<(Buffer<T>, Buffer<T>)> {
        self.start((sent.into(), received.into()), move |engine, (sent, received), manner| {
            engine.send_receive(sent, to, received, from, manner)
        })
    }

    /// Gives an operation to the worker, with the memory that it works on and the manner of a call that begins now.
    pub(crate) fn start<B: Send + 'static>(
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

    /// Starts an operation that reads one memory and writes another, of this length.
    fn start_into<T: Element>(
        &mut self,
        input: Buffer<T>,
        len: usize,
        operation: impl FnOnce(&mut Engine, &[T], &mut [T], Manner) -> Result<()> + Send + 'static,
    ) -> Pending<Buffer<T>> {
        self.start(input, move |engine, buffer, manner| {
            let mut output = Buffer::zeroed(len)?;
            operation(engine, buffer, &mut output, manner)?;
            *buffer = output;
            Ok(())
        })
    }
}
