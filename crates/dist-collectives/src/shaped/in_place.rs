//! Operations on arrays in place.

use bytemuck::Pod;
use dist_algos::scan::Extent;
use ndarray::{ArrayRef, Dimension};

use super::shape;
use crate::engine::{CallOptions, Engine};
use crate::{Communicator, Element, ReduceOp, Result};

/// # Arrays in place
///
/// Feature `ndarray`. These operations work like those on slices, element by element. The shape is part of the
/// call: ranks with different shapes get an error. Any view is supported; a view whose elements are not stored in
/// index order is copied.
impl Communicator {
    /// Reduces an array like [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// use dist_collectives::ndarray::array;
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut values = array![[1.0_f32, 2.0], [3.0, 4.0]];
    ///     comm.all_reduce_array(&mut values.column_mut(0), ReduceOp::Sum).unwrap();
    ///     values
    /// });
    /// assert_eq!(outcome.results[1], array![[2.0, 2.0], [6.0, 4.0]]);
    /// ```
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Allreduce")]
    #[doc(alias = "allreduce")]
    pub fn all_reduce_array<T: Element, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_array(array, |engine, elements, options| engine.all_reduce(elements, op, options))
    }

    /// Broadcasts an array like [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    /// Those of [`broadcast`](Self::broadcast).
    #[doc(alias = "MPI_Bcast")]
    pub fn broadcast_array<T: Pod, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        root: usize,
    ) -> Result<()> {
        self.in_array(array, |engine, elements, options| engine.broadcast(elements, root, options))
    }

    /// Reduces an array like [`reduce`](Self::reduce).
    ///
    /// # Errors
    /// Those of [`reduce`](Self::reduce).
    #[doc(alias = "MPI_Reduce")]
    pub fn reduce_array<T: Element, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.in_array(array, |engine, elements, options| engine.reduce(elements, op, root, options))
    }

    /// Scans an array like [`scan`](Self::scan).
    ///
    /// # Errors
    /// Those of [`scan`](Self::scan).
    #[doc(alias = "MPI_Scan")]
    pub fn scan_array<T: Element, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_array(array, |engine, elements, options| {
            engine.scan(elements, op, Extent::Inclusive, options)
        })
    }

    /// Scans an array like [`exclusive_scan`](Self::exclusive_scan).
    ///
    /// # Errors
    /// Those of [`exclusive_scan`](Self::exclusive_scan).
    #[doc(alias = "MPI_Exscan")]
    pub fn exclusive_scan_array<T: Element, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_array(array, |engine, elements, options| {
            engine.scan(elements, op, Extent::Exclusive, options)
        })
    }

    fn in_array<T: Pod, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        operation: impl FnOnce(&mut Engine, &mut [T], &CallOptions<'_>) -> Result<()>,
    ) -> Result<()> {
        let sizes = shape::digest_of(array.shape());
        if let Some(elements) = array.as_slice_mut() {
            return self.call(|engine, options| operation(engine, elements, &options.with_sizes(sizes)));
        }
        let mut copy: Vec<T> = array.iter().copied().collect();
        self.call(|engine, options| operation(engine, &mut copy, &options.with_sizes(sizes)))?;
        array.iter_mut().zip(copy).for_each(|(place, element)| *place = element);
        Ok(())
    }
}
