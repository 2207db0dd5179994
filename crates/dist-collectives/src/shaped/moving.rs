//! Operations that concatenate the arrays of all ranks or divide an array among them.

use bytemuck::Pod;
use ndarray::{Array, Array1, ArrayD, ArrayRef, Dimension, Ix1, IxDyn};

use super::shape;
use crate::{Communicator, Element, Error, Operation, ReduceOp, Result};

/// # Arrays, concatenated and divided
///
/// Feature `ndarray`. Arrays are concatenated or divided along dim 0: a rank's part is a number of rows. Results
/// are in standard layout. The shape is part of the call: ranks with different shapes get an error.
impl Communicator {
    /// Concatenates the arrays of all ranks along dim 0: shape `[4, 8]` on 3 ranks gives `[12, 8]`. Arrays without
    /// dims give an array of shape `[world_size]`.
    ///
    /// ```
    /// use dist_collectives::ndarray::array;
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let rank = comm.rank() as i32;
    ///     let all = comm.all_gather_array(&array![[rank, 10 * rank]])?;
    ///     let own = comm.reduce_scatter_array(&all, ReduceOp::Sum)?;
    ///     Ok::<_, dist_collectives::Error>((all, own))
    /// });
    /// let (all, own) = outcome.results[1].as_ref().unwrap();
    /// assert_eq!(*all, array![[0, 0], [1, 10], [2, 20]].into_dyn());
    /// assert_eq!(*own, array![[3, 30]].into_dyn());
    /// ```
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    #[doc(alias = "all_gather_into_tensor")]
    #[doc(alias = "MPI_Allgather")]
    pub fn all_gather_array<T: Pod, D: Dimension>(&mut self, input: &ArrayRef<T, D>) -> Result<ArrayD<T>> {
        let mut dims = input.shape().to_vec();
        match dims.first_mut() {
            Some(rows) => *rows = rows.saturating_mul(self.world_size()),
            None => dims.push(self.world_size()),
        }
        let mut output = shape::zeroed(self.engine()?, Operation::AllGather, IxDyn(&dims))?;
        let sizes = shape::digest_of(input.shape());
        let (elements, slice) = (shape::elements(input), slice(&mut output));
        self.call(|engine, options| {
            engine.all_gather((&*elements).into(), None, slice, &options.with_sizes(sizes))
        })?;
        Ok(output)
    }

    /// Concatenates arrays as [`all_gather_array`](Self::all_gather_array) does, with different lengths of dim 0:
    /// `rows` has the length of every rank.
    ///
    /// # Errors
    /// Those of [`all_gather_v`](Self::all_gather_v), and if the array has no dims or another number of rows than
    /// the list says.
    #[doc(alias = "MPI_Allgatherv")]
    pub fn all_gather_v_array<T: Pod, D: Dimension>(
        &mut self,
        input: &ArrayRef<T, D>,
        rows: &[usize],
    ) -> Result<Array<T, D>> {
        let operation = Operation::AllGather;
        let (own, row) = shape::rows(operation, input)?;
        let all = self.engine()?.total(operation, rows)?;
        shape::check_rows(operation, rows[self.rank()], own)?;
        let mut output = shape::zeroed(self.engine()?, operation, shape::with_rows(input, all))?;
        let sizes = shape::digest_of_rows(rows, row);
        let (elements, counts) = (shape::elements(input), shape::counts(rows, row));
        let slice = slice(&mut output);
        self.call(|engine, options| {
            engine.all_gather((&*elements).into(), Some(&counts), slice, &options.with_sizes(sizes))
        })?;
        Ok(output)
    }

    /// Returns this rank's part of the reduction of all ranks' arrays. Dim 0 is divided into as many equal parts as
    /// there are ranks.
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter), and if the array has no dims or dim 0 is not divisible by
    /// the number of ranks.
    #[doc(alias = "reduce_scatter_tensor")]
    #[doc(alias = "MPI_Reduce_scatter_block")]
    pub fn reduce_scatter_array<T: Element, D: Dimension>(
        &mut self,
        input: &ArrayRef<T, D>,
        op: ReduceOp,
    ) -> Result<Array<T, D>> {
        let (operation, world_size) = (Operation::ReduceScatter, self.world_size());
        let (rows, _) = shape::rows(operation, input)?;
        if !rows.is_multiple_of(world_size) {
            return Err(Error::IndivisibleRows { operation, rows, world_size });
        }
        let mut output =
            shape::zeroed(self.engine()?, operation, shape::with_rows(input, rows / world_size))?;
        let sizes = shape::digest_of(input.shape());
        let (elements, slice) = (shape::elements(input), slice(&mut output));
        self.call(|engine, options| {
            engine.reduce_scatter((&*elements).into(), None, slice, op, &options.with_sizes(sizes))
        })?;
        Ok(output)
    }

    /// Reduces arrays as [`reduce_scatter_array`](Self::reduce_scatter_array) does, with parts of any sizes: rank
    /// `r` gets `rows[r]` rows, after those of the ranks before it.
    ///
    /// # Errors
    /// Those of [`reduce_scatter_v`](Self::reduce_scatter_v), and if the array has no dims or another number of
    /// rows than the list says.
    #[doc(alias = "MPI_Reduce_scatter")]
    pub fn reduce_scatter_v_array<T: Element, D: Dimension>(
        &mut self,
        input: &ArrayRef<T, D>,
        rows: &[usize],
        op: ReduceOp,
    ) -> Result<Array<T, D>> {
        let operation = Operation::ReduceScatter;
        let (all, row) = shape::rows(operation, input)?;
        shape::check_rows(operation, self.engine()?.total(operation, rows)?, all)?;
        let rank = self.rank();
        let mut output = shape::zeroed(self.engine()?, operation, shape::with_rows(input, rows[rank]))?;
        let sizes = shape::digest_of_rows(rows, row);
        let (elements, counts) = (shape::elements(input), shape::counts(rows, row));
        let slice = slice(&mut output);
        self.call(|engine, options| {
            engine.reduce_scatter((&*elements).into(), Some(&counts), slice, op, &options.with_sizes(sizes))
        })?;
        Ok(output)
    }

    /// Divides the elements into as many equal parts as there are ranks, and sends part `r` to rank `r`. Returns
    /// the received parts in rank order, in the same shape. Only the number of elements must be divisible: `[3, 2]`
    /// on 2 ranks works.
    ///
    /// # Errors
    /// Those of [`all_to_all`](Self::all_to_all).
    #[doc(alias = "all_to_all_single")]
    #[doc(alias = "MPI_Alltoall")]
    pub fn all_to_all_array<T: Pod, D: Dimension>(&mut self, input: &ArrayRef<T, D>) -> Result<Array<T, D>> {
        let mut output = shape::zeroed(self.engine()?, Operation::AllToAll, input.raw_dim())?;
        let sizes = shape::digest_of(input.shape());
        let (elements, slice) = (shape::elements(input), slice(&mut output));
        self.call(|engine, options| {
            engine.all_to_all((&*elements).into(), slice, &options.with_sizes(sizes))
        })?;
        Ok(output)
    }

    /// Exchanges elements as [`all_to_all_v`](Self::all_to_all_v) does. The elements are sent as one list of any
    /// shape, and the result is one list too, in rank order.
    ///
    /// # Errors
    /// Those of [`all_to_all_v`](Self::all_to_all_v).
    #[doc(alias = "MPI_Alltoallv")]
    pub fn all_to_all_v_array<T: Pod, D: Dimension>(
        &mut self,
        input: &ArrayRef<T, D>,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Array1<T>> {
        let received = self.engine()?.check_part_counts(input.len(), send_counts, receive_counts)?;
        let mut output = shape::zeroed(self.engine()?, Operation::AllToAll, Ix1(received))?;
        let (elements, slice) = (shape::elements(input), slice(&mut output));
        self.call(|engine, options| {
            engine.all_to_all_v(&elements, send_counts, slice, receive_counts, options)
        })?;
        Ok(output)
    }
}

fn slice<T, D: Dimension>(output: &mut Array<T, D>) -> &mut [T] {
    output.as_slice_mut().expect("a new array lies in the order of its indices")
}
