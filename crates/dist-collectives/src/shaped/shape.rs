//! Shapes of results, and checks of arguments.

use std::borrow::Cow;

use bytemuck::Pod;
use ndarray::{Array, ArrayRef, Dimension, ErrorKind, ShapeError};

use crate::digest::digest;
use crate::engine::Engine;
use crate::{Error, Operation, Result};

/// Returns the digest of a shape for a call.
pub(super) fn digest_of(shape: &[usize]) -> u64 {
    digest(shape.iter().map(|&len| len as u64))
}

/// Returns the digest for a call of arrays with different numbers of rows: the rows of each rank, and the shape of
/// a row.
pub(super) fn digest_of_rows(rows: &[usize], row: &[usize]) -> u64 {
    digest([rows.len(), row.len()].iter().chain(rows).chain(row).map(|&len| len as u64))
}

/// Returns the elements in index order.
pub(super) fn elements<T: Pod, D: Dimension>(array: &ArrayRef<T, D>) -> Cow<'_, [T]> {
    match array.as_slice() {
        Some(elements) => Cow::Borrowed(elements),
        None => Cow::Owned(array.iter().copied().collect()),
    }
}

/// Returns the length of dim 0, which an operation divides or concatenates, and the shape of a row.
pub(super) fn rows<T, D: Dimension>(
    operation: Operation,
    array: &ArrayRef<T, D>,
) -> Result<(usize, &[usize])> {
    array.shape().split_first().map(|(&rows, row)| (rows, row)).ok_or(Error::NoRows { operation })
}

/// Returns the number of elements of each rank's rows.
pub(super) fn counts(rows: &[usize], row: &[usize]) -> Vec<usize> {
    let row = row.iter().product();
    rows.iter().map(|rows| rows.saturating_mul(row)).collect()
}

/// Returns `dims` with dim 0 replaced by another length.
pub(super) fn with_rows<T, D: Dimension>(array: &ArrayRef<T, D>, rows: usize) -> D {
    let mut dim = array.raw_dim();
    dim[0] = rows;
    dim
}

/// Refuses an array with another number of rows than the list says.
pub(super) fn check_rows(operation: Operation, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Rows { operation, expected, got }) }
}

/// Allocates an array for an operation's output.
pub(super) fn zeroed<T: Pod, D: Dimension>(
    engine: &mut Engine,
    operation: Operation,
    dim: D,
) -> Result<Array<T, D>> {
    let too_large = |source| Error::Shape { operation, source };
    let len = dim.size_checked().ok_or_else(|| too_large(ShapeError::from_kind(ErrorKind::Overflow)))?;
    Array::from_shape_vec(dim, engine.output(len)?.into_vec()).map_err(too_large)
}
