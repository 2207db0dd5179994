//! Gradients as products of two thin matrices: PowerSGD (Vogels, Karimireddy, Jaggi, 2019, arXiv:1905.13727).

use std::ops::Range;

use dist_collectives::{Communicator, ReduceOp};

use super::residual::Residuals;
use super::{BucketGradients, BucketHook, BucketTensor, as_f32, narrow};
use crate::{BoxError, Error, Result};

/// A hook that sums a low-rank approximation of each matrix and keeps the rest for later steps (error feedback). The
/// approximation is one step of the power method, starting from the last step's.
///
/// A tensor of shape [n, …] with m values in each row is an n×m matrix. M is this rank's gradient plus its residual,
/// and Q the result of the last step. P is the sum of all ranks' M·Q, with orthonormal columns. Then Q is the sum of
/// all ranks' Mᵀ·P, and the result is P·Qᵀ. The new residual is M − P·(its own Mᵀ·P)ᵀ, rounded. Later steps therefore
/// send the missing part, except for the rounding of `f32`.
///
/// Gradients are sent uncompressed if the two thin matrices have at least as many values as the matrix, and for
/// tensors with fewer than two dims. Their sums are exactly those without a hook.
///
/// A NaN or an infinity makes its matrix NaN in this step, on every rank. It leaves no residual, so the next step is
/// not affected.
#[derive(Debug)]
pub struct PowerSgdHook {
    rank: usize,
    residuals: Residuals,
    /// For each bucket and each matrix in it, the result of the last step: m×rank.
    found: Vec<Vec<Vec<f32>>>,
}

impl PowerSgdHook {
    /// Returns a hook that sends matrices of this rank.
    ///
    /// # Errors
    /// The rank is 0.
    pub fn new(rank: usize) -> Result<Self> {
        if rank == 0 {
            return Err(Error::Setting { name: "the rank", value: 0.0 });
        }
        Ok(Self { rank, residuals: Residuals::default(), found: Vec::new() })
    }

    /// Returns the residual of a bucket, or an empty slice if the bucket was never sent.
    pub fn residual(&self, bucket: usize) -> &[f32] {
        self.residuals.look(bucket)
    }

    fn sum_f32(
        &mut self,
        bucket: usize,
        tensors: &[BucketTensor],
        values: &mut [f32],
        comm: &mut Communicator,
    ) -> Result<()> {
        let matrices: Vec<Matrix> =
            tensors.iter().filter_map(|tensor| Matrix::of(tensor, self.rank)).collect();
        if self.found.len() <= bucket {
            self.found.resize_with(bucket + 1, Vec::new);
        }
        let left = self.residuals.of(bucket, values.len());
        let qs = &mut self.found[bucket];
        qs.resize_with(matrices.len(), Vec::new);

        let mut ps = Vec::with_capacity(matrices.len());
        for (number, (matrix, q)) in matrices.iter().zip(&mut *qs).enumerate() {
            let left = &mut left[matrix.range()];
            left.iter_mut().zip(&values[matrix.range()]).for_each(|(left, value)| *left += value);
            matrix.prepare_basis(q, [bucket, number]);
            ps.push(matrix.times(left, q));
        }
        let mut first = whole(tensors, self.rank, values);
        first.extend(ps.iter_mut().map(Vec::as_mut_slice));
        comm.all_reduce_coalesced(&mut first, ReduceOp::Sum).map_err(Error::communication)?;
        if matrices.is_empty() {
            return Ok(());
        }

        let mut second = Vec::with_capacity(matrices.len());
        for ((matrix, p), q) in matrices.iter().zip(&mut ps).zip(qs) {
            let left = &mut left[matrix.range()];
            orthonormalise(p, matrix.rank);
            matrix.transposed_times(left, p, q);
            matrix.subtract(left, p, q);
            second.push(q.as_mut_slice());
        }
        comm.all_reduce_coalesced(&mut second, ReduceOp::Sum).map_err(Error::communication)?;
        for ((matrix, p), q) in matrices.iter().zip(&ps).zip(second) {
            matrix.multiply(p, q, &mut values[matrix.range()]);
        }
        Ok(())
    }
}

impl BucketHook for PowerSgdHook {
    fn name(&self) -> String {
        format!("powersgd:{}", self.rank)
    }

    fn keeps_residual(&self) -> bool {
        true
    }

    fn forget(&mut self) {
        (self.residuals, self.found) = (Residuals::default(), Vec::new());
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let BucketGradients { bucket, tensors, values } = bucket;
        as_f32(values, |values| Ok(self.sum_f32(bucket, tensors, values, comm)?))
    }
}

/// A tensor that is sent as the product of an n×rank and a rank×m matrix. Matrices are row-major.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    offset: usize,
    rows: usize,
    columns: usize,
    rank: usize,
}

impl Matrix {
    /// Returns `None` if the two matrices would have at least as many values as the tensor.
    fn of(tensor: &BucketTensor, rank: usize) -> Option<Self> {
        let &[rows, _, ..] = &tensor.shape[..] else { return None };
        let columns = tensor.len.checked_div(rows)?;
        let thin = rows.saturating_add(columns).saturating_mul(rank);
        (thin < tensor.len).then_some(Self { offset: tensor.offset, rows, columns, rank })
    }

    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.columns
    }

    /// Makes the columns of Q orthonormal. Missing columns are replaced by pseudo-random ones, equal on every rank:
    /// in the first step, or if gradients were all zero or not finite.
    fn prepare_basis(&self, q: &mut Vec<f32>, seed: [usize; 2]) {
        q.resize(self.columns * self.rank, 0.0);
        orthonormalise(q, self.rank);
        for column in 0..self.rank {
            let values = q.iter().skip(column).step_by(self.rank);
            if values.clone().any(|value| *value != 0.0) && values.clone().all(|value| value.is_finite()) {
                continue;
            }
            let mut state = seed.iter().fold(column as u64, |state, &part| mixed(state ^ part as u64));
            for value in q.iter_mut().skip(column).step_by(self.rank) {
                state = mixed(state);
                *value = between_minus_one_and_one(state);
            }
        }
    }

    /// Returns M·Q.
    fn times(&self, matrix: &[f32], q: &[f32]) -> Vec<f32> {
        let mut p = vec![0.0; self.rows * self.rank];
        for (row, p) in matrix.chunks_exact(self.columns).zip(p.chunks_exact_mut(self.rank)) {
            for (&value, q) in row.iter().zip(q.chunks_exact(self.rank)) {
                add_scaled(p, value, q);
            }
        }
        p
    }

    /// Computes Mᵀ·P into `q`.
    fn transposed_times(&self, matrix: &[f32], p: &[f32], q: &mut [f32]) {
        q.fill(0.0);
        for (row, p) in matrix.chunks_exact(self.columns).zip(p.chunks_exact(self.rank)) {
            for (&value, q) in row.iter().zip(q.chunks_exact_mut(self.rank)) {
                add_scaled(q, value, p);
            }
        }
    }

    /// Computes P·Qᵀ into `product`.
    fn multiply(&self, p: &[f32], q: &[f32], product: &mut [f32]) {
        self.each(p, q, product, |value, product| *value = product);
    }

    /// Subtracts P·Qᵀ from M. Values that are not finite become 0.
    fn subtract(&self, matrix: &mut [f32], p: &[f32], q: &[f32]) {
        self.each(p, q, matrix, |value, product| {
            let left = *value - product;
            *value = if left.is_finite() { left } else { 0.0 };
        });
    }

    fn each(&self, p: &[f32], q: &[f32], matrix: &mut [f32], change: impl Fn(&mut f32, f32)) {
        for (row, p) in matrix.chunks_exact_mut(self.columns).zip(p.chunks_exact(self.rank)) {
            for (value, q) in row.iter_mut().zip(q.chunks_exact(self.rank)) {
                change(value, p.iter().zip(q).map(|(p, q)| p * q).sum());
            }
        }
    }
}

/// Returns the tensors that are sent uncompressed.
fn whole<'a>(tensors: &[BucketTensor], rank: usize, mut values: &'a mut [f32]) -> Vec<&'a mut [f32]> {
    let mut whole = Vec::new();
    for tensor in tensors {
        let (own, rest) = values.split_at_mut(tensor.len);
        values = rest;
        if Matrix::of(tensor, rank).is_none() {
            whole.push(own);
        }
    }
    whole
}

/// Makes the columns of a matrix orthonormal (modified Gram–Schmidt, sums in `f64`). A column that depends on those
/// before it becomes zero, one that is not finite becomes NaN.
fn orthonormalise(matrix: &mut [f32], columns: usize) {
    for column in 0..columns {
        let before = dot(matrix, columns, [column, column]).sqrt();
        for earlier in 0..column {
            let along = dot(matrix, columns, [column, earlier]);
            for row in matrix.chunks_exact_mut(columns) {
                row[column] = narrow(f64::from(row[column]) - along * f64::from(row[earlier]));
            }
        }
        let norm = dot(matrix, columns, [column, column]).sqrt();
        let factor = match norm {
            norm if !norm.is_finite() => f64::NAN,
            norm if norm > DEPENDENT_BELOW * before => 1.0 / norm,
            _ => 0.0,
        };
        for row in matrix.chunks_exact_mut(columns) {
            row[column] = narrow(f64::from(row[column]) * factor);
        }
    }
}

/// Returns the scalar product of two columns.
fn dot(matrix: &[f32], columns: usize, [left, right]: [usize; 2]) -> f64 {
    matrix.chunks_exact(columns).map(|row| f64::from(row[left]) * f64::from(row[right])).sum()
}

fn add_scaled(into: &mut [f32], factor: f32, from: &[f32]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into += factor * from;
    }
}

/// Returns the next state of a pseudo-random generator (splitmix64).
const fn mixed(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn between_minus_one_and_one(state: u64) -> f32 {
    let [.., low, high] = state.to_le_bytes();
    f32::from(i16::from_le_bytes([low, high])) / 32_768.0
}

/// A column whose norm shrinks below this fraction is regarded as rounding error only.
const DEPENDENT_BELOW: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matrix(shape: [usize; 2], rank: usize) -> Option<Matrix> {
        Matrix::of(&BucketTensor::row([shape.to_vec()])[0], rank)
    }

    #[test]
    fn only_a_tensor_that_becomes_smaller_is_a_matrix() {
        assert!(matrix([10, 10], 4).is_some());
        assert!(matrix([10, 10], 5).is_none(), "two matrices of 50 values are no gain");
        assert!(matrix([3, 100], 3).is_none(), "full rank");
        assert!(matrix([0, 5], 1).is_none() && matrix([5, 0], 1).is_none() && matrix([1, 1], 1).is_none());
        let shapes = [vec![], vec![50], vec![10, 5, 2]];
        let rank_1 = BucketTensor::row(shapes).iter().map(|tensor| Matrix::of(tensor, 1)).collect::<Vec<_>>();
        assert!(rank_1[0].is_none() && rank_1[1].is_none());
        assert!(matches!(rank_1[2], Some(Matrix { offset: 51, rows: 10, columns: 10, rank: 1 })));
    }

    #[test]
    fn a_rank_of_nothing_is_refused() {
        assert!(matches!(PowerSgdHook::new(0), Err(Error::Setting { name: "the rank", .. })));
    }

    #[test]
    fn columns_without_direction_are_zero_or_nan() {
        let mut values = [1.0, 2.0, 0.0, f32::NAN, 0.0, 0.0, 0.0, 1.0];
        orthonormalise(&mut values, 4);
        assert_eq!(values[..3], [1.0, 0.0, 0.0]);
        assert!(values[3].is_nan() && values[7].is_nan());
        assert_eq!(values[4..7], [0.0; 3]);
    }

    proptest! {
        #[test]
        fn columns_become_orthonormal(
            values in prop::collection::vec(-1.0_f32..1.0, 60),
            magnitude in prop::sample::select(vec![1e-30_f32, 1.0, 1e30]),
        ) {
            let mut values: Vec<f32> = values.into_iter().map(|value| value * magnitude).collect();
            orthonormalise(&mut values, 3);
            for (left, right) in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)] {
                let expected = f64::from(u8::from(left == right));
                prop_assert!((dot(&values, 3, [left, right]) - expected).abs() < 1e-4);
            }
        }

        #[test]
        fn columns_that_are_missing_are_replaced(rank in 1..4_usize, columns in 1..9_usize) {
            let matrix = Matrix { offset: 0, rows: 9, columns, rank };
            let (mut first, mut again) = (Vec::new(), vec![f32::NAN; columns * rank]);
            matrix.prepare_basis(&mut first, [0, 1]);
            matrix.prepare_basis(&mut again, [0, 1]);
            prop_assert_eq!(&first, &again);
            prop_assert!(first.iter().all(|value| value.is_finite()));
            let mut other = Vec::new();
            matrix.prepare_basis(&mut other, [1, 0]);
            prop_assert_ne!(first, other);
        }
    }
}
