//! The number of calls in a sample and the number of samples.

/// Returns the number of calls in one sample: as many as take about 4 ms, given the time of one call in
/// microseconds.
pub(super) fn calls_per_sample(one_us: f64) -> u32 {
    whole((4000.0 / one_us.max(0.01)).clamp(1.0, 20_000.0))
}

/// Returns the number of samples: `most`, or as many as take 3 s if that is less, but at least 7.
pub(super) fn samples(one_us: f64, calls: u32, most: u32) -> u32 {
    whole((3e6 / (one_us.max(0.01) * f64::from(calls))).max(7.0)).min(most)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "both callers clamp to small numbers"
)]
fn whole(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0.0, 20_000, 21)]
    #[case(1.0, 4_000, 21)]
    #[case(100.0, 40, 21)]
    #[case(3_999.0, 1, 21)]
    #[case(200_000.0, 1, 15)]
    #[case(10_000_000.0, 1, 7)]
    fn fast_calls_are_made_often_and_slow_ones_seldom(
        #[case] one_us: f64,
        #[case] calls: u32,
        #[case] count: u32,
    ) {
        assert_eq!(calls_per_sample(one_us), calls);
        assert_eq!(samples(one_us, calls, 21), count);
        assert_eq!(samples(one_us, calls, 3), 3);
    }
}
