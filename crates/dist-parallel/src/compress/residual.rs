//! What was not sent, kept for later.

/// For each bucket, what is left of what should have been sent: error feedback.
#[derive(Debug, Default)]
pub(super) struct Residuals(Vec<Vec<f32>>);

impl Residuals {
    /// What is left of a bucket of this length; at first the zeros that change nothing they are added to, not even -0.
    pub(super) fn of(&mut self, bucket: usize, len: usize) -> &mut [f32] {
        if self.0.len() <= bucket {
            self.0.resize_with(bucket + 1, Vec::new);
        }
        let residual = &mut self.0[bucket];
        if residual.len() != len {
            // Another bucket has this number now: what is left belongs to none of its values.
            *residual = vec![-0.0; len];
        }
        residual
    }

    /// What is left of a bucket; nothing if there never was anything.
    pub(super) fn look(&self, bucket: usize) -> &[f32] {
        self.0.get(bucket).map_or(&[], Vec::as_slice)
    }
}
