//! The operations that do not block: each starts here and is executed later.

use bytemuck::Pod;
use dist_algos::scan::Extent;

use crate::engine::{CallInput, CallOptions, Engine, check_counts, check_part_counts, check_parts};
use crate::pending::Pending;
use crate::{Buffer, Communicator, Element, Operation, ReduceOp, Result};

/// # Operations that do not block
///
/// These operations have a `start_` form: the collectives on slices, `send`, `recv`, `recv_vec`, `recv_any`,
/// `recv_any_vec`, `send_recv`, `batch`, `broadcast_value`, `gather_values` and `all_gather_values`. Others block, such as
/// reductions by a [`CustomOp`](crate::CustomOp), `all_to_all_vec`, and messages of [`Strided`](crate::Strided) elements.
///
/// A `start_` method returns at once. It takes its memory as a [`Buffer`], which the operation owns while it runs.
/// [`Pending::wait`] returns the output: the same memory if the operation works in place, otherwise new memory. After an
/// error it returns the input.
///
/// Collectives are executed one after the other, in the order of starts and calls. A blocking collective, a fork and a
/// subgroup first complete the collectives that were started before them. All ranks must start or call the same
/// collectives in the same order; one rank may start a collective that another calls.
///
/// Messages are independent: each waits for its own peer only, and goes on while collectives run.
///
/// The thread that waits for an operation executes it if it has not begun. Operations that no thread waits for are
/// executed by threads of the communicator, one for collectives and one for messages, which begin about 50 µs after the
/// start. The deadline begins at the start, even if a collective has to wait for earlier ones. If a collective could not
/// begin before its deadline, the rank that waits for it gets [`Error::NotStarted`](crate::Error::NotStarted) and the job is aborted. [`Pending::wait`]
/// reports all errors.
///
/// Ranks of a host access [allocated](Self::alloc) buffers directly. All ranks must pass buffers of one kind:
/// allocated, or made from vectors.
impl Communicator {
    /// Starts an [`all_reduce`](Self::all_reduce).
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
    #[doc(alias = "async_op")]
    #[doc(alias = "iallreduce")]
    pub fn start_all_reduce<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer: &mut Buffer<T>, options| {
            engine.all_reduce(buffer, op, options)
        })
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter); the output is this rank's part.
    #[doc(alias = "MPI_Ireduce_scatter_block")]
    #[doc(alias = "async_op")]
    pub fn start_reduce_scatter<T: Element>(
        &mut self,
        input: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = input.len() / self.world_size();
        self.start_into(input, Ok(len), move |engine, input, output, options| {
            engine.reduce_scatter(input, None, output, op, options)
        })
    }

    /// Starts a [`reduce_scatter_in_place`](Self::reduce_scatter_in_place). The whole buffer is returned, with the
    /// result as part `rank` of it.
    #[doc(alias = "MPI_IN_PLACE")]
    #[doc(alias = "async_op")]
    pub fn start_reduce_scatter_in_place<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer, options| {
            engine.reduce_scatter_in_place(buffer, op, options).map(drop)
        })
    }

    /// Starts a [`reduce_scatter_v`](Self::reduce_scatter_v); the output is this rank's part.
    #[doc(alias = "MPI_Ireduce_scatter")]
    #[doc(alias = "async_op")]
    pub fn start_reduce_scatter_v<T: Element>(
        &mut self,
        input: impl Into<Buffer<T>>,
        counts: Vec<usize>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = self.own_part(Operation::ReduceScatter, &counts, Some(("input", input.len())));
        self.start_into(input, len, move |engine, input, output, options| {
            engine.reduce_scatter(input, Some(&counts), output, op, options)
        })
    }

    /// Starts an [`all_gather`](Self::all_gather).
    #[doc(alias = "MPI_Iallgather")]
    #[doc(alias = "async_op")]
    pub fn start_all_gather<T: Pod + Send>(&mut self, input: impl Into<Buffer<T>>) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = input.len().saturating_mul(self.world_size());
        self.start_into(input, Ok(len), |engine, input, output, options| {
            engine.all_gather(input, None, output, options)
        })
    }

    /// Starts an [`all_gather_in_place`](Self::all_gather_in_place).
    #[doc(alias = "MPI_IN_PLACE")]
    #[doc(alias = "async_op")]
    pub fn start_all_gather_in_place<T: Pod + Send>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, |engine, buffer, options| engine.all_gather_in_place(buffer, options))
    }

    /// Starts an [`all_gather_v`](Self::all_gather_v).
    #[doc(alias = "MPI_Iallgatherv")]
    #[doc(alias = "async_op")]
    pub fn start_all_gather_v<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        counts: Vec<usize>,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = self.all_parts(Operation::AllGather, &counts, input.len());
        self.start_into(input, len, move |engine, input, output, options| {
            engine.all_gather(input, Some(&counts), output, options)
        })
    }

    /// Starts a [`gather`](Self::gather); the output is empty except on the root.
    #[doc(alias = "MPI_Igather")]
    #[doc(alias = "async_op")]
    pub fn start_gather<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = if self.rank() == root { input.len().saturating_mul(self.world_size()) } else { 0 };
        self.start_into(input, Ok(len), move |engine, input, output, options| {
            engine.gather(input.elements, None, output, root, options)
        })
    }

    /// Starts a [`gather_v`](Self::gather_v); the output is empty except on the root.
    #[doc(alias = "MPI_Igatherv")]
    #[doc(alias = "async_op")]
    pub fn start_gather_v<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        counts: Vec<usize>,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let (input, is_root) = (input.into(), self.rank() == root);
        let len = if is_root { self.all_parts(Operation::Gather, &counts, input.len()) } else { Ok(0) };
        self.start_into(input, len, move |engine, input, output, options| {
            engine.gather(input.elements, Some(&counts), output, root, options)
        })
    }

    /// Starts a [`scatter`](Self::scatter) of parts of this length. The input is empty except on the root.
    #[doc(alias = "MPI_Iscatter")]
    #[doc(alias = "async_op")]
    pub fn start_scatter<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        part: usize,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let is_root = self.rank() == root;
        let checked = check_parts(self.world_size(), Operation::Scatter, input.len(), part);
        let len = if is_root { checked.map(|()| part) } else { Ok(part) };
        self.start_into(input, len, move |engine, input, output, options| {
            engine.scatter(input.elements, None, output, root, options)
        })
    }

    /// Starts a [`scatter_v`](Self::scatter_v). The input is empty except on the root.
    #[doc(alias = "MPI_Iscatterv")]
    #[doc(alias = "async_op")]
    pub fn start_scatter_v<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        counts: Vec<usize>,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let whole = (self.rank() == root).then_some(("input", input.len()));
        let len = self.own_part(Operation::Scatter, &counts, whole);
        self.start_into(input, len, move |engine, input, output, options| {
            engine.scatter(input.elements, Some(&counts), output, root, options)
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all).
    #[doc(alias = "MPI_Ialltoall")]
    #[doc(alias = "async_op")]
    pub fn start_all_to_all<T: Pod + Send>(&mut self, input: impl Into<Buffer<T>>) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = input.len();
        self.start_into(input, Ok(len), Engine::all_to_all)
    }

    /// Starts an [`all_to_all_v`](Self::all_to_all_v).
    #[doc(alias = "MPI_Ialltoallv")]
    #[doc(alias = "async_op")]
    pub fn start_all_to_all_v<T: Pod + Send>(
        &mut self,
        input: impl Into<Buffer<T>>,
        send_counts: Vec<usize>,
        receive_counts: Vec<usize>,
    ) -> Pending<Buffer<T>> {
        let input = input.into();
        let len = check_part_counts(self.world_size(), input.len(), &send_counts, &receive_counts);
        self.start_into(input, len, move |engine, input, output, options| {
            engine.all_to_all_v(input.elements, &send_counts, output, &receive_counts, options)
        })
    }

    /// Starts a [`scan`](Self::scan).
    #[doc(alias = "MPI_Iscan")]
    #[doc(alias = "async_op")]
    pub fn start_scan<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer, options| engine.scan(buffer, op, Extent::Inclusive, options))
    }

    /// Starts an [`exclusive_scan`](Self::exclusive_scan).
    #[doc(alias = "MPI_Iexscan")]
    #[doc(alias = "async_op")]
    pub fn start_exclusive_scan<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer, options| engine.scan(buffer, op, Extent::Exclusive, options))
    }

    /// Starts a [`broadcast`](Self::broadcast).
    #[doc(alias = "MPI_Ibcast")]
    #[doc(alias = "async_op")]
    #[doc(alias = "ibcast")]
    pub fn start_broadcast<T: Pod + Send>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer, options| engine.broadcast(buffer, root, options))
    }

    /// Starts a [`reduce`](Self::reduce).
    #[doc(alias = "MPI_Ireduce")]
    #[doc(alias = "async_op")]
    pub fn start_reduce<T: Element>(
        &mut self,
        buffer: impl Into<Buffer<T>>,
        op: ReduceOp,
        root: usize,
    ) -> Pending<Buffer<T>> {
        let buffer: Buffer<T> = buffer.into();
        self.start(buffer, move |engine, buffer, options| engine.reduce(buffer, op, root, options))
    }

    /// Starts a [`barrier`](Self::barrier).
    #[doc(alias = "MPI_Ibarrier")]
    #[doc(alias = "async_op")]
    pub fn start_barrier(&mut self) -> Pending<()> {
        self.start((), |engine, (), options| engine.barrier(options))
    }

    /// Starts a [`monitored_barrier`](Self::monitored_barrier).
    #[doc(alias = "monitored_barrier")]
    pub fn start_monitored_barrier(&mut self) -> Pending<()> {
        self.start((), |engine, (), options| engine.monitored_barrier(options))
    }

    /// Returns the length of this rank's part, if the counts and the whole buffer, where this rank has it, are
    /// valid.
    fn own_part(
        &self,
        operation: Operation,
        counts: &[usize],
        whole: Option<(&'static str, usize)>,
    ) -> Result<usize> {
        let own = counts.get(self.rank()).copied().unwrap_or(0);
        check_counts(self.group.rank, operation, counts, ("output", own), whole).map(|_| own)
    }

    /// Returns the length of all parts together, if the counts and this rank's part are valid.
    fn all_parts(&self, operation: Operation, counts: &[usize], own: usize) -> Result<usize> {
        check_counts(self.group.rank, operation, counts, ("input", own), None)
    }

    /// Starts an operation that reads one buffer and writes another. `len` is the length of the output, or the
    /// error of invalid arguments: then no memory is allocated.
    fn start_into<T: Pod + Send>(
        &mut self,
        input: Buffer<T>,
        len: Result<usize>,
        work: impl FnOnce(&mut Engine, CallInput<'_, T>, &mut [T], &CallOptions<'_>) -> Result<()>
        + Send
        + 'static,
    ) -> Pending<Buffer<T>> {
        self.start(input, move |engine, buffer, options| {
            let mut output = engine.output(len?)?;
            work(engine, (&*buffer).into(), &mut output, options)?;
            *buffer = output;
            Ok(())
        })
    }
}
