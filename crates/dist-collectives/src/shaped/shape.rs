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

/// Refuses an array that does not have as many rows as the list says.
pub(super) fn check_rows(operation: Operation, expected: usize, got: usize) -> Result<()> {
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
