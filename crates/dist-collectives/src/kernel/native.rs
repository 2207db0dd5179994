//! Sums and conversions of half types by processor instructions, which are faster than any portable loop.
//!
//! This module uses `unsafe` to call code for optional instructions, to reinterpret vectors as words, and to
//! prefetch memory.

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{fetch, narrow_f16, sum_bf16, sum_f16, sum_many_bf16, sum_many_f16, widen_f16};

#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::pairs::{sum as sum_bf16, sum_many as sum_many_bf16};

/// Does nothing, because no prefetch is implemented for this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn fetch<T>(_soon: &T) {}

/// There is no faster implementation on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn sum_f16(_into: &mut [half::f16], _from: &[half::f16]) -> bool {
    false
}

/// There is no faster implementation on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn widen_f16(_from: &[half::f16], _into: &mut [f32]) -> bool {
    false
}

/// There is no faster implementation on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn narrow_f16(_from: &[f32], _into: &mut [half::f16]) -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn sum_many_f16<const COUNT: usize>(rows: impl super::all::Rows<half::f16, COUNT>) {
    super::all::sum_by_rule::<_, _, 16, _>(rows);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "instructions are used that the processor was asked for")]
mod x86_64 {
    use std::arch::x86_64::{
        __m256, __m256i, __m512, __m512i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_prefetch,
        _mm256_add_ps, _mm256_blendv_ps, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_movemask_ps,
        _mm256_set_m128i, _mm256_set1_ps, _mm512_add_ps, _mm512_castsi256_si512, _mm512_cmp_ps_mask,
        _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_inserti64x4, _mm512_mask_mov_ps, _mm512_set1_ps,
    };
    use std::{mem, ptr};

    use half::{bf16, f16};

    use crate::kernel::all::{Rows, sum_by_rule};
    use crate::kernel::halves::{round_f16, widen_f16 as widen_one};
    use crate::kernel::{Scalar, pairs};

    /// Prefetches the cache line of a value that is read soon.
    #[inline(always)]
    pub(in crate::kernel) fn fetch<T>(soon: &T) {
        // SAFETY: every processor of this architecture has the instruction, and it has no visible effect.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr::from_ref(soon).cast()) }
    }

    /// Adds all of one buffer to another of the same length. Returns `false` and does nothing if the processor
    /// cannot convert `f16`.
    pub(in crate::kernel) fn sum_f16(into: &mut [f16], from: &[f16]) -> bool {
        match Width::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers16) => unsafe { by_16::sum(into, from) },
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers8) => unsafe { by_8::sum(into, from) },
            None => return false,
        }
        true
    }

    /// Converts `f16` to `f32`, exactly. Returns `false` and does nothing if the processor cannot convert `f16`.
    pub(in crate::kernel) fn widen_f16(from: &[f16], into: &mut [f32]) -> bool {
        match Width::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers16) => unsafe { by_16::widen(from, into) },
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers8) => unsafe { by_8::widen(from, into) },
            None => return false,
        }
        true
    }

    /// Rounds `f32` to `f16`. Returns `false` and does nothing if the processor cannot convert `f16`.
    pub(in crate::kernel) fn narrow_f16(from: &[f32], into: &mut [f16]) -> bool {
        match Width::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers16) => unsafe { by_16::narrow(from, into) },
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers8) => unsafe { by_8::narrow(from, into) },
            None => return false,
        }
        true
    }

    /// Sums the rows of `COUNT` ranks.
    pub(in crate::kernel) fn sum_many_f16<const COUNT: usize>(rows: impl Rows<f16, COUNT>) {
        match Width::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers16) => unsafe { by_16::sum_many(rows) },
            // SAFETY: the processor has the instructions, as `Width` says.
            Some(Width::Numbers8) => unsafe { by_8::sum_many(rows) },
            None => sum_by_rule::<_, _, 16, _>(rows),
        }
    }

    /// Adds all of one buffer to another of the same length.
    pub(in crate::kernel) fn sum_bf16(into: &mut [bf16], from: &[bf16]) -> bool {
        match Narrowing::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Narrowing` says.
            Narrowing::Instruction => unsafe { narrowed::sum(into, from) },
            // SAFETY: the processor has the instructions, as `Narrowing` says.
            Narrowing::Halves => unsafe { halves::sum(into, from) },
            Narrowing::Rule => return pairs::sum(into, from),
        }
        true
    }

    /// Sums the rows of `COUNT` ranks.
    pub(in crate::kernel) fn sum_many_bf16<const COUNT: usize>(rows: impl Rows<bf16, COUNT>) {
        match Narrowing::of_this_processor() {
            // SAFETY: the processor has the instructions, as `Narrowing` says.
            Narrowing::Instruction => unsafe { narrowed::sum_many(rows) },
            // SAFETY: the processor has the instructions, as `Narrowing` says.
            Narrowing::Halves => unsafe { halves::sum_many(rows) },
            Narrowing::Rule => pairs::sum_many(rows),
        }
    }

    /// The method of rounding sums to `bf16`.
    #[derive(PartialEq, Eq)]
    enum Narrowing {
        /// An instruction for this conversion.
        Instruction,
        /// Instructions for 16-bit numbers.
        Halves,
        /// The scalar rule, in the widest vectors.
        Rule,
    }

    impl Narrowing {
        fn of_this_processor() -> Self {
            let is_wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq");
            if is_wide && is_x86_feature_detected!("avx512bf16") {
                Self::Instruction
            } else if !is_wide && is_x86_feature_detected!("avx2") {
                Self::Halves
            } else {
                Self::Rule
            }
        }
    }

    /// The number of values that an instruction converts.
    enum Width {
        Numbers8,
        Numbers16,
    }

    impl Width {
        fn of_this_processor() -> Option<Self> {
            if is_x86_feature_detected!("avx512f") {
                Some(Self::Numbers16)
            } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2") {
                Some(Self::Numbers8)
            } else {
                None
            }
        }
    }

    /// Defines loops of sums of this type with an `add` that needs these features.
    macro_rules! sums_of {
        ($number:ty, by $features:literal) => {
            #[target_feature(enable = $features)]
            pub(super) fn sum(into: &mut [$number], from: &[$number]) {
                let (into, into_rest) = into.as_chunks_mut();
                let (from, from_rest) = from.as_chunks();
                for (into, from) in into.iter_mut().zip(from) {
                    *into = add(*into, *from);
                }
                for (into, from) in into_rest.iter_mut().zip(from_rest) {
                    *into = into.reduce_sum(*from);
                }
            }

            #[target_feature(enable = $features)]
            pub(super) fn sum_many<const COUNT: usize>(rows: impl Rows<$number, COUNT>) {
                rows.sum_by(|left, right| add(left, right));
            }
        };
    }

    /// Sums of `bf16`, two in a word. The kept halves and the dropped halves are combined to vectors of 16-bit
    /// numbers before rounding, because an instruction processes twice as many of those.
    mod halves {
        use std::arch::x86_64::{
            _mm256_adds_epi16, _mm256_and_si256, _mm256_blend_epi16, _mm256_castps_si256,
            _mm256_castsi256_ps, _mm256_cmpgt_epi16, _mm256_or_ps, _mm256_set1_epi16, _mm256_set1_epi32,
            _mm256_setzero_si256, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_sub_epi16, _mm256_xor_si256,
        };

        use super::*;

        const LANES: usize = pairs::LANES;
        /// The 16-bit lanes that are the upper halves of words.
        const UPPER_HALVES: i32 = 0b1010_1010;

        sums_of!(bf16, by "avx2");

        #[inline]
        #[target_feature(enable = "avx2")]
        fn add(left: [bf16; LANES], right: [bf16; LANES]) -> [bf16; LANES] {
            let (words, others): ([__m256i; 2], [__m256i; 2]) = (bytemuck::cast(left), bytemuck::cast(right));
            let (first, second) = (Sums::of(words[0], others[0]), Sums::of(words[1], others[1]));
            if _mm256_movemask_ps(_mm256_or_ps(first.nan(), second.nan())) != 0 {
                return pairs::add(left, right);
            }
            bytemuck::cast([first.rounded(), second.rounded()])
        }

        /// The sums of the lower and of the upper halves of words.
        struct Sums {
            lower: __m256,
            upper: __m256,
        }

        impl Sums {
            #[inline]
            #[target_feature(enable = "avx2")]
            fn of(left: __m256i, right: __m256i) -> Self {
                let lower = |words| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
                let upper = |words| _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(UPPER)));
                Self {
                    lower: _mm256_add_ps(lower(left), lower(right)),
                    upper: _mm256_add_ps(upper(left), upper(right)),
                }
            }

            /// Returns a mask of the words in which either sum is NaN.
            #[inline]
            #[target_feature(enable = "avx2")]
            fn nan(&self) -> __m256 {
                _mm256_cmp_ps::<_CMP_UNORD_Q>(self.lower, self.upper)
            }

            /// Rounds to the nearest value, and ties to even. The comparison uses signed numbers, because the
            /// processor has no instruction for unsigned ones.
            #[inline]
            #[target_feature(enable = "avx2")]
            fn rounded(&self) -> __m256i {
                let (lower, upper) = (_mm256_castps_si256(self.lower), _mm256_castps_si256(self.upper));
                let kept = _mm256_blend_epi16::<UPPER_HALVES>(_mm256_srli_epi32::<16>(lower), upper);
                let cut = _mm256_blend_epi16::<UPPER_HALVES>(lower, _mm256_slli_epi32::<16>(upper));
                let beyond_half = _mm256_xor_si256(cut, _mm256_set1_epi16(i16::MIN));
                let odd = _mm256_and_si256(kept, _mm256_set1_epi16(1));
                let up = _mm256_cmpgt_epi16(_mm256_adds_epi16(beyond_half, odd), _mm256_setzero_si256());
                // All bits of a lane that is rounded up are ones, which is -1.
                _mm256_sub_epi16(kept, up)
            }
        }
    }

    /// The mask of the upper half of a word.
    const UPPER: i32 = 0xffff_0000_u32.cast_signed();

    /// Sums of `bf16`, two in a word, rounded by an instruction. The instruction treats subnormal numbers as 0 and
    /// keeps the NaN payload. If such a number is among the sums, all of them are rounded by the scalar rule.
    mod narrowed {
        use std::arch::x86_64::{
            __m512bh, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh,
            _mm512_fpclass_ps_mask, _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_slli_epi32,
        };

        use super::*;

        const LANES: usize = pairs::LANES;
        /// The classes: either kind of NaN, or subnormal.
        const SPECIAL: i32 = 0x01 | 0x80 | 0x20;
        /// The indices that interleave 16 sums of lower halves and 16 sums of upper halves.
        const IN_TURNS: [u16; LANES] = {
            let (mut order, mut word) = ([0; LANES], 0);
            while 2 * word < LANES {
                [order[2 * word], order[2 * word + 1]] = [LOWER[word], LOWER[word] + 16];
                word += 1;
            }
            order
        };
        const LOWER: [u16; LANES / 2] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

        sums_of!(bf16, by "avx512f,avx512bw,avx512dq,avx512bf16");

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
        fn add(left: [bf16; LANES], right: [bf16; LANES]) -> [bf16; LANES] {
            let words: [__m512i; 2] = [bytemuck::cast(left), bytemuck::cast(right)];
            let [lower, upper] = [
                words.map(|words| _mm512_slli_epi32::<16>(words)),
                words.map(|words| _mm512_and_si512(words, _mm512_set1_epi32(UPPER))),
            ]
            .map(|[left, right]| _mm512_add_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right)));
            if _mm512_fpclass_ps_mask::<SPECIAL>(lower) | _mm512_fpclass_ps_mask::<SPECIAL>(upper) != 0 {
                return pairs::add(left, right);
            }
            let sums = _mm512_cvtne2ps_pbh(upper, lower);
            // SAFETY: both types have the same length, and any bits are valid.
            let sums = unsafe { mem::transmute::<__m512bh, __m512i>(sums) };
            bytemuck::cast(_mm512_permutexvar_epi16(bytemuck::cast(IN_TURNS), sums))
        }
    }

    /// Defines loops over two vectors of this width at a time. Both sums are checked for NaN together; all NaN
    /// become the same one. They are combined before they are written, because separate stores would make the
    /// narrowing happen again for every rank that gets the sum.
    macro_rules! by_vectors {
        (
            $module:ident of $vector:ty: $lanes:literal, $all:ty, by $features:literal;
            $add:ident, $widened:expr, $narrowed:expr, $joined:expr, $any_nan:expr, $alike:expr
        ) => {
            mod $module {
                use super::*;

                const LANES: usize = 2 * $lanes;

                sums_of!(f16, by $features);

                #[inline]
                #[target_feature(enable = $features)]
                fn add(left: [f16; LANES], right: [f16; LANES]) -> [f16; LANES] {
                    let (left, right): ([_; 2], [_; 2]) = (bytemuck::cast(left), bytemuck::cast(right));
                    let sums = [widened_sum(left[0], right[0]), widened_sum(left[1], right[1])];
                    let sums = if $any_nan(sums[0], sums[1]) { sums.map($alike) } else { sums };
                    let [low, high] = sums.map($narrowed);
                    bytemuck::cast::<$all, [f16; LANES]>($joined(low, high))
                }

                #[target_feature(enable = $features)]
                pub(super) fn widen(from: &[f16], into: &mut [f32]) {
                    let (from, from_rest) = from.as_chunks::<$lanes>();
                    let (into, into_rest) = into.as_chunks_mut::<$lanes>();
                    for (from, into) in from.iter().zip(into) {
                        *into = bytemuck::cast::<$vector, _>($widened(bytemuck::cast(*from)));
                    }
                    for (from, into) in from_rest.iter().zip(into_rest) {
                        *into = widen_one(*from);
                    }
                }

                #[target_feature(enable = $features)]
                pub(super) fn narrow(from: &[f32], into: &mut [f16]) {
                    let (from, from_rest) = from.as_chunks::<$lanes>();
                    let (into, into_rest) = into.as_chunks_mut::<$lanes>();
                    for (from, into) in from.iter().zip(into) {
                        let wide: $vector = bytemuck::cast(*from);
                        let wide = if $any_nan(wide, wide) { $alike(wide) } else { wide };
                        *into = bytemuck::cast($narrowed(wide));
                    }
                    for (from, into) in from_rest.iter().zip(into_rest) {
                        *into = round_f16(*from);
                    }
                }

                #[inline]
                #[target_feature(enable = $features)]
                fn widened_sum(left: [f16; $lanes], right: [f16; $lanes]) -> $vector {
                    $add($widened(bytemuck::cast(left)), $widened(bytemuck::cast(right)))
                }
            }
        };
    }

    by_vectors! {
        by_8 of __m256: 8, __m256i, by "avx2,f16c";
        _mm256_add_ps,
        _mm256_cvtph_ps,
        |sums| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums),
        |low, high| _mm256_set_m128i(high, low),
        |left, right| _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(left, right)) != 0,
        |sums| _mm256_blendv_ps(sums, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(sums, sums))
    }

    by_vectors! {
        by_16 of __m512: 16, __m512i, by "avx512f";
        _mm512_add_ps,
        _mm512_cvtph_ps,
        |sums| _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums),
        |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high),
        |left, right| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(left, right) != 0,
        |sums| {
            _mm512_mask_mov_ps(sums, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums), _mm512_set1_ps(f32::NAN))
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Checks that vector sums of every half have the bits of the scalar rule. It covers all vector widths that
        /// this processor supports, not only the chosen one. The last numbers fill a part of a loop iteration only.
        fn has_the_bits_of_the_rule<T: Scalar + bytemuck::Pod>(
            half: fn(u16) -> T,
            sum: impl Fn(&mut [T], &[T]),
            sum_many: impl Fn(&mut [&mut [T]; 2]),
        ) {
            let all: Vec<T> = (0..=u16::MAX).chain(0..61).map(half).collect();
            for shift in (0..all.len()).step_by(4099) {
                let mut others = all.clone();
                others.rotate_left(shift);
                let rule: Vec<T> =
                    all.iter().zip(&others).map(|(left, right)| left.reduce_sum(*right)).collect();
                let (mut sums, mut left, mut right) = (all.clone(), all.clone(), others.clone());
                sum(&mut sums, &others);
                sum_many(&mut [&mut left, &mut right]);
                for sums in [&sums, &left, &right] {
                    assert!(
                        bytemuck::cast_slice::<_, u16>(sums) == bytemuck::cast_slice::<_, u16>(&rule),
                        "{shift}"
                    );
                }
            }
        }

        #[test]
        fn sums_of_f16_of_each_width_have_the_bits_of_the_rule() {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has the instructions.
                has_the_bits_of_the_rule(
                    f16::from_bits,
                    |into, from| unsafe { by_16::sum(into, from) },
                    |all| unsafe { by_16::sum_many(all) },
                );
            }
            if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instructions.
                has_the_bits_of_the_rule(
                    f16::from_bits,
                    |into, from| unsafe { by_8::sum(into, from) },
                    |all| unsafe { by_8::sum_many(all) },
                );
            }
        }

        /// Checks that every half is widened as by the rule, and that `f32` values near halves are narrowed as by
        /// the rule.
        fn converts_as_the_rule(widen: impl Fn(&[f16], &mut [f32]), narrow: impl Fn(&[f32], &mut [f16])) {
            let all: Vec<f16> = (0..=u16::MAX).chain(0..5).map(f16::from_bits).collect();
            let mut wide = vec![0.0; all.len()];
            widen(&all, &mut wide);
            for (half, wide) in all.iter().zip(&wide) {
                let rule = widen_one(*half);
                assert!(wide.to_bits() == rule.to_bits() || (wide.is_nan() && rule.is_nan()), "{half:?}");
            }
            // The values: halves, midpoints between halves, values next to midpoints, and values that are far from
            // any half.
            let between = wide.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) / 2.0);
            let mut numbers: Vec<f32> =
                between.flat_map(|middle| [middle, middle.next_up(), middle.next_down()]).collect();
            numbers.extend(&wide);
            numbers.extend([f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, -f32::NAN, 65_519.996, 65_520.0]);
            let mut narrowed = vec![f16::ONE; numbers.len()];
            narrow(&numbers, &mut narrowed);
            for (number, narrowed) in numbers.iter().zip(narrowed) {
                assert_eq!(narrowed.to_bits(), round_f16(*number).to_bits(), "{number:e}");
            }
        }

        #[test]
        fn conversions_of_each_width_have_the_bits_of_the_rule() {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has the instructions.
                converts_as_the_rule(
                    |from, into| unsafe { by_16::widen(from, into) },
                    |from, into| unsafe { by_16::narrow(from, into) },
                );
            }
            if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instructions.
                converts_as_the_rule(
                    |from, into| unsafe { by_8::widen(from, into) },
                    |from, into| unsafe { by_8::narrow(from, into) },
                );
            }
            converts_as_the_rule(crate::kernel::widen_by_rule, crate::kernel::narrow_by_rule);
        }

        #[test]
        fn sums_of_bf16_of_each_narrowing_have_the_bits_of_the_rule() {
            has_the_bits_of_the_rule(
                bf16::from_bits,
                |into, from| assert!(pairs::sum(into, from)),
                |all| pairs::sum_many(all),
            );
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instructions.
                has_the_bits_of_the_rule(
                    bf16::from_bits,
                    |into, from| unsafe { halves::sum(into, from) },
                    |all| unsafe { halves::sum_many(all) },
                );
            }
            if Narrowing::of_this_processor() == Narrowing::Instruction {
                // SAFETY: the processor has the instructions.
                has_the_bits_of_the_rule(
                    bf16::from_bits,
                    |into, from| unsafe { narrowed::sum(into, from) },
                    |all| unsafe { narrowed::sum_many(all) },
                );
            }
        }
    }
}
