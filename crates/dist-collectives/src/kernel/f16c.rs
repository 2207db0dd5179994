//! Sums of `f16` by the processor's own conversions, several times as fast as any loop without them.
//!
//! The only module of this crate that may be unsafe: to call what is compiled for instructions that not every
//! processor has.

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::sum;

/// There is no faster way.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn sum(_into: &mut [half::f16], _from: &[half::f16]) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "instructions are used that the processor was asked for")]
mod x86_64 {
    use std::arch::x86_64::{
        __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_add_ps, _mm256_blendv_ps,
        _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_movemask_ps, _mm256_set1_ps,
    };

    use half::f16;

    use crate::kernel::halves::{round_f16, widen_f16};

    /// Numbers that one instruction converts.
    const LANES: usize = 8;

    /// Adds all of one buffer to another of the same length; `false`, and nothing done, if the processor has no
    /// conversions.
    pub(in crate::kernel) fn sum(into: &mut [f16], from: &[f16]) -> bool {
        let able = is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2");
        if able {
            // SAFETY: the processor has the instructions, as it said in the line above.
            unsafe { sum_converted(into, from) };
        }
        able
    }

    #[target_feature(enable = "avx2,f16c")]
    fn sum_converted(into: &mut [f16], from: &[f16]) {
        let (into, into_rest) = into.as_chunks_mut::<{ 2 * LANES }>();
        let (from, from_rest) = from.as_chunks::<{ 2 * LANES }>();
        for (into, from) in into.iter_mut().zip(from) {
            let ([left, right], [left_from, right_from]) = (halves(into), halves(from));
            let left = _mm256_add_ps(widened(left), widened(left_from));
            let right = _mm256_add_ps(widened(right), widened(right_from));
            let nans = _mm256_cmp_ps::<_CMP_UNORD_Q>(left, right);
            *into = bytemuck::cast(if _mm256_movemask_ps(nans) == 0 {
                [narrowed(left), narrowed(right)]
            } else {
                [narrowed(alike(left)), narrowed(alike(right))]
            });
        }
        for (into, from) in into_rest.iter_mut().zip(from_rest) {
            *into = round_f16(widen_f16(*into) + widen_f16(*from));
        }
    }

    fn halves(numbers: &[f16; 2 * LANES]) -> [[f16; LANES]; 2] {
        bytemuck::cast(*numbers)
    }

    #[target_feature(enable = "avx2,f16c")]
    fn widened(numbers: [f16; LANES]) -> __m256 {
        _mm256_cvtph_ps(bytemuck::cast(numbers))
    }

    #[target_feature(enable = "avx2,f16c")]
    fn narrowed(sums: __m256) -> __m128i {
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums)
    }

    /// With every NaN the same one.
    #[target_feature(enable = "avx2,f16c")]
    fn alike(sums: __m256) -> __m256 {
        let nans = _mm256_cmp_ps::<_CMP_UNORD_Q>(sums, sums);
        _mm256_blendv_ps(sums, _mm256_set1_ps(f32::NAN), nans)
    }
}
