//! Shapes of what comes out, and what is wrong with what goes in.

use std::borrow::Cow;

use ndarray::{Array, ArrayRef, Dimension, ErrorKind, ShapeError};

use crate::digest::digest;
use crate::engine::Engine;
use crate::{Element, Error, Operation, Result};

/// What stands for a shape in a call.
pub(super) fn digest_of(shape: &[usize]) -> u64 {
    digest(shape.iter().map(|&len| len as u64))
}

/// What stands in a call for arrays that differ in their rows: how many each rank has, and of what.
pub(super) fn digest_of_rows(rows: &[usize], row: &[usize]) -> u64 {
    digest([rows.len(), row.len()].iter().chain(rows).chain(row).map(|&len| len as u64))
}

/// The elements in the order of their indices.
pub(super) fn elements<T: Element, D: Dimension>(array: &ArrayRef<T, D>) -> Cow<'_, [T]> {
    match array.as_slice() {
        Some(elements) => Cow::Borrowed(elements),
        None => Cow::Owned(array.iter().copied().collect()),
    }
}

/// The length of dim 0, which an operation divides or puts together, and the shape of a row.
pub(super) fn rows<T, D: Dimension>(
    operation: Operation,
    array: &ArrayRef<T, D>,
) -> Result<(usize, &[usize])> {
    array.shape().split_first().map(|(&rows, row)| (rows, row)).ok_or(Error::NoRows { operation })
}

/// All rows together.
pub(super) fn total_rows(operation: Operation, rows: &[usize]) -> Result<usize> {
    let total = rows.iter().try_fold(0_usize, |total, &rows| total.checked_add(rows));
    total.ok_or(Error::TotalCount { operation })
}

/// As many elements as these rows have, for each rank.
pub(super) fn counts(rows: &[usize], row: &[usize]) -> Vec<usize> {
    let row = row.iter().product();
    rows.iter().map(|rows| rows.saturating_mul(row)).collect()
}

/// The same dims, but for the first.
pub(super) fn with_rows<T, D: Dimension>(array: &ArrayRef<T, D>, rows: usize) -> D {
    let mut dim = array.raw_dim();
    dim[0] = rows;
    dim
}

/// Refuses a list of rows that does not fit the ranks, or of which this part is not as long as it should be.
pub(super) fn check_rows(
    operation: Operation,
    rows: &[usize],
    world_size: usize,
    (expected, got): (impl FnOnce(&[usize]) -> usize, usize),
) -> Result<()> {
    if rows.len() != world_size {
        return Err(Error::Counts { operation, counts: rows.len(), world_size });
    }
    let expected = expected(rows);
    if expected == got { Ok(()) } else { Err(Error::Rows { operation, expected, got }) }
}

/// An array for an operation's output.
pub(super) fn zeroed<T: Element, D: Dimension>(
    engine: &mut Engine,
    operation: Operation,
    dim: D,
) -> Result<Array<T, D>> {
    let too_large = |source| Error::Shape { operation, source };
    let len = dim.size_checked().ok_or_else(|| too_large(ShapeError::from_kind(ErrorKind::Overflow)))?;
    Array::from_shape_vec(dim, engine.output(len)?.into_vec()).map_err(too_large)
}
