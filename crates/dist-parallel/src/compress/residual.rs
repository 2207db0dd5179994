//! Residuals of compression (error feedback).

/// The gradients of each bucket that were not sent yet.
#[derive(Debug, Default)]
pub(super) struct Residuals(Vec<Vec<f32>>);

impl Residuals {
    /// Returns the residual of a bucket of this length. The initial values are −0, the neutral element of addition.
    pub(super) fn of(&mut self, bucket: usize, len: usize) -> &mut [f32] {
        if self.0.len() <= bucket {
            self.0.resize_with(bucket + 1, Vec::new);
        }
        let residual = &mut self.0[bucket];
        if residual.len() != len {
            // Another bucket has this number now, so the residual is obsolete.
            *residual = vec![-0.0; len];
        }
        residual
    }

    /// Returns the residual of a bucket, or an empty slice if there is none.
    pub(super) fn look(&self, bucket: usize) -> &[f32] {
        self.0.get(bucket).map_or(&[], Vec::as_slice)
    }
}
