//! Reduction of a list of slices, for a training loop of your own.

use std::ops::Range;

use dist_collectives::{Communicator, Element, ReduceOp};

use crate::{Error, Result};

/// Reduces each slice with the slices at its place in the other ranks' lists, like [`Communicator::all_reduce`]: in
/// canonical order unless the communicator is set to another.
///
/// Neighbouring slices are coalesced up to 25 MiB, so that many small slices cost little more than one large one. A
/// slice that is sent alone is not copied. The result does not depend on coalescing.
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 2, |transport| {
///     let mut comm = Communicator::new(transport);
///     let (mut weights, mut bias) = ([1.0_f32, 2.0], [comm.rank() as f32]);
///     dist_parallel::own_loop::reduce(&mut comm, &mut [&mut weights, &mut bias], ReduceOp::Mean).unwrap();
///     (weights, bias)
/// });
/// assert_eq!(outcome.results, [([1.0, 2.0], [0.5]); 2]);
/// ```
///
/// # Errors
/// The lists differ, or communication fails. The slices' contents are then unspecified.
pub fn reduce<T: Element>(comm: &mut Communicator, slices: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
    let lens: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
    for group in groups(&lens, BUCKET_BYTES_MAX / op.partial_dtype(T::DTYPE).size()) {
        comm.all_reduce_coalesced(&mut slices[group], op).map_err(Error::communication)?;
    }
    Ok(())
}

/// Divides a list of lengths into runs of at most `max` together, or of one.
pub(crate) fn groups(lens: &[usize], max: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut total = 0;
    for (index, &len) in lens.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if total + len <= max => group.end = index + 1,
            _ => {
                groups.push(index..index + 1);
                total = 0;
            }
        }
        total += len;
    }
    groups
}

/// The largest size of coalesced slices.
pub(crate) const BUCKET_BYTES_MAX: usize = 25 << 20;

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing(&[], 10, &[])]
    #[case::all_fit(&[1, 2, 3], 10, &[3])]
    #[case::exactly(&[5, 5, 1], 10, &[2, 1])]
    #[case::a_large_one_is_alone(&[1, 20, 1, 1], 10, &[1, 1, 2])]
    #[case::empty_ones_fit_anywhere(&[0, 10, 0, 1], 10, &[3, 1])]
    #[case::no_room(&[1, 1], 0, &[1, 1])]
    fn neighbours_travel_together(#[case] lens: &[usize], #[case] max: usize, #[case] expected: &[usize]) {
        let groups = groups(lens, max);
        assert_eq!(groups.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(), expected);
        let in_order: Vec<usize> = groups.into_iter().flatten().collect();
        assert_eq!(in_order, Vec::from_iter(0..lens.len()));
    }
}
