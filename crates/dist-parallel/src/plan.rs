//! The grouping of gradients into buckets.
//!
//! A plan needs no communication: every rank computes it from the same list of parameters.

use crate::{FloatType, ParamInfo};

/// The gradients of a model, grouped into buckets that are reduced one by one.
///
/// Parameters are taken last to first, which is roughly the order in which a backward finishes their gradients.
/// Frozen and tied parameters have no place. Buckets are sorted by the expected time of their last gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Bucket>,
}

/// Gradients of one type that are contiguous in one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bucket {
    /// The type of all its parameters. Their gradients are summed in its [`sum_dtype`](FloatType::sum_dtype).
    pub dtype: FloatType,
    /// Its parameters, in the order of the buffer.
    pub places: Vec<BucketPlace>,
}

/// The place of a parameter's gradient in its bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketPlace {
    /// The parameter's index in the model.
    pub parameter: usize,
    /// The index of its first value in the bucket.
    pub offset: usize,
    /// The number of its values.
    pub len: usize,
}

/// Size limits of buckets in bytes on the wire: 4 for each value of an `f16` parameter, whose gradients are [summed
/// as `f32`](FloatType::sum_dtype). A larger parameter has its own bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketBytes {
    /// The limit of the first bucket; 1 MiB by default. It is small, so that communication begins early.
    pub first_max: usize,
    /// The limit of every other bucket; 25 MiB by default.
    pub other_max: usize,
}

impl Default for BucketBytes {
    fn default() -> Self {
        Self { first_max: 1 << 20, other_max: 25 << 20 }
    }
}

impl BucketPlan {
    /// Returns the plan for these parameters.
    pub fn new(infos: &[ParamInfo], bytes: BucketBytes) -> Self {
        Self::of(infos, bytes, |info| info.trainable && info.same_as.is_none())
    }

    /// Returns the plan for the parameters that `has_place` selects.
    pub(crate) fn of(
        infos: &[ParamInfo],
        bytes: BucketBytes,
        has_place: impl Fn(&ParamInfo) -> bool,
    ) -> Self {
        let mut buckets: Vec<Bucket> = Vec::new();
        for (parameter, info) in infos.iter().enumerate().rev().filter(|(_, info)| has_place(info)) {
            let latest = buckets.iter().rposition(|bucket| bucket.dtype == info.dtype);
            let max = if latest == Some(0) { bytes.first_max } else { bytes.other_max };
            let open = latest.map(|index| &mut buckets[index]);
            let len = info.len();
            match open.filter(|bucket| (bucket.len() + len) * bucket.dtype.sum_dtype().size() <= max) {
                Some(bucket) => {
                    bucket.places.push(BucketPlace { parameter, offset: bucket.len(), len });
                }
                None => {
                    let first = BucketPlace { parameter, offset: 0, len };
                    buckets.push(Bucket { dtype: info.dtype, places: vec![first] });
                }
            }
        }
        buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.places.last().map(|place| place.parameter)));
        Self { buckets }
    }

    /// Returns the bytes of gradients that a rank of [`Ddp`](crate::Ddp) holds if it computes this many micro-batches in
    /// a step: one buffer for each bucket, and one more for each power of two from 2 to `micro_batches`. The buffers
    /// are kept between steps.
    pub fn memory(&self, micro_batches: usize) -> usize {
        let buffers = 1 + micro_batches.max(1).ilog2() as usize;
        buffers * self.buckets.iter().map(Bucket::bytes).sum::<usize>()
    }

    /// The buckets, in the order in which they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }
}

impl Bucket {
    /// Number of values.
    #[expect(clippy::len_without_is_empty, reason = "a bucket has at least one parameter")]
    pub fn len(&self) -> usize {
        self.places.last().map_or(0, |place| place.offset + place.len)
    }

    /// Returns the bytes of a sum of its gradients.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype.sum_dtype().size()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn model(parameters: &[(usize, FloatType)]) -> Vec<ParamInfo> {
        let info = |(index, &(len, dtype))| ParamInfo::new(format!("p{index}"), [len], dtype);
        parameters.iter().enumerate().map(info).collect()
    }

    fn parameters(plan: &BucketPlan) -> Vec<Vec<usize>> {
        let of_bucket = |bucket: &Bucket| bucket.places.iter().map(|place| place.parameter).collect();
        plan.buckets().iter().map(of_bucket).collect()
    }

    #[rstest]
    #[case::nothing_fits_together(0, 0, vec![vec![4], vec![3], vec![2], vec![1], vec![0]])]
    #[case::the_others_grow_larger(16, 40, vec![vec![4], vec![3, 2, 1], vec![0]])]
    #[case::a_small_first(32, 80, vec![vec![4, 3], vec![2, 1, 0]])]
    #[case::a_larger_parameter_is_alone(8, 24, vec![vec![4], vec![3, 2], vec![1], vec![0]])]
    #[case::everything_fits(1 << 20, 25 << 20, vec![vec![4, 3, 2, 1, 0]])]
    fn parameters_are_grouped_last_to_first(
        #[case] first_max: usize,
        #[case] other_max: usize,
        #[case] expected: Vec<Vec<usize>>,
    ) {
        let infos = model(&[(1, FloatType::F32), (7, FloatType::F32), (2, FloatType::F32)].repeat(2)[..5]);
        let plan = BucketPlan::new(&infos, BucketBytes { first_max, other_max });
        assert_eq!(parameters(&plan), expected);
    }

    #[test]
    fn frozen_and_repeated_parameters_have_no_place() {
        let mut infos = model(&[(3, FloatType::F32); 4]);
        infos[1].trainable = false;
        infos[3].same_as = Some(0);
        let plan = BucketPlan::new(&infos, BucketBytes::default());
        assert_eq!(parameters(&plan), [[2, 0]]);
        assert_eq!(parameters(&BucketPlan::new(&[], BucketBytes::default())), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn types_do_not_mix_and_buckets_are_ordered_by_their_last_gradient() {
        use FloatType::{Bf16, F32};
        let infos = model(&[(1, Bf16), (1, F32), (1, Bf16), (1, F32), (1, Bf16)]);
        let plan = BucketPlan::new(&infos, BucketBytes::default());
        assert_eq!(parameters(&plan), [vec![3, 1], vec![4, 2, 0]]);
    }

    fn any_dtype() -> impl Strategy<Value = FloatType> {
        use FloatType::{Bf16, F16, F32, F64};
        prop::sample::select(vec![F32, F64, F16, Bf16])
    }

    proptest! {
        #[test]
        fn every_parameter_has_one_place_and_no_bucket_is_too_large(
            parameters in prop::collection::vec((0..40_usize, any_dtype()), 0..30),
            first_max in 0..300_usize,
            other_max in 0..300_usize,
        ) {
            let infos = model(&parameters);
            let plan = BucketPlan::new(&infos, BucketBytes { first_max, other_max });
            let mut seen = vec![0; infos.len()];
            for bucket in plan.buckets() {
                let mut end = 0;
                for place in &bucket.places {
                    seen[place.parameter] += 1;
                    prop_assert_eq!((place.offset, place.len), (end, infos[place.parameter].len()));
                    prop_assert_eq!(bucket.dtype, infos[place.parameter].dtype);
                    end += place.len;
                }
                prop_assert_eq!(bucket.len(), end);
                let bytes = bucket.len() * bucket.dtype.sum_dtype().size();
                prop_assert!(bytes <= first_max.max(other_max) || bucket.places.len() == 1);
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }
}
