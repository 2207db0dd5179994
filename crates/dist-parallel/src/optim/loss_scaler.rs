//! Dynamic scaling of losses for gradients in `f16`.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A dynamic loss scaler: it chooses the factor by which losses are multiplied so that gradients in `f16` neither
/// vanish nor become infinite.
///
/// `f16` holds numbers from 2⁻²⁴ to 65504. Gradients are often smaller, and would be 0. The gradient of the loss is
/// therefore multiplied by [`scale`](Self::scale) before the backward pass. After the step,
/// [`end_step`](Self::end_step) returns the factor that undoes the scaling, or `None` if a gradient is not finite.
/// Then skip the update; the scale shrinks. After a number of good steps it grows.
///
/// Every rank makes the same decisions, because the [norm](crate::Ddp::gradient_norm) has the same bits on every
/// rank, except in local SGD. All factors are powers of two. So scaling is exact while a gradient stays in the range
/// of its type, and training in `f32` has the same bits with and without it.
///
/// Undo the scaling in `f32`: train an `f16` model with [`Precision`](crate::fsdp::Precision) of `f32` for `master`
/// and `reduce`. If the mean gradients are rounded to `f16`, they can become 0 when the scaling is undone.
///
/// Save the scaler as [state of the program](crate::checkpoint::Checkpoints::set_state):
/// `checkpoints.set_state("loss scaler", &scaler)`.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::optim::{LossScaler, LossScalerOptions, Sgd, SgdOptions};
/// use dist_parallel::{Ddp, DdpOptions};
/// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
/// # struct Number([ParamInfo; 1], [f32; 1]);
/// # impl Params for Number {
/// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
/// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
/// #         f(Values::F32(&self.1));
/// #         Ok(())
/// #     }
/// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
/// #         f(ValuesMut::F32(&mut self.1));
/// #         Ok(())
/// #     }
/// # }
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 2, |transport| {
///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [0.0]);
///     let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
///     let mut sgd = Sgd::new(SgdOptions { learning_rate: 1.0, ..SgdOptions::default() }).unwrap();
///     let mut scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
///     for gradient in [1.0, f32::MAX, 2.0] {
///         let scale = scaler.scale() as f32;
///         ddp.step_with(2, |_, _, ready| {
///             ready(0, [gradient * scale][..].into())?;
///             Ok(0.0_f32)
///         })
///         .unwrap();
///         if let Some(factor) = scaler.end_step(ddp.gradient_norm().unwrap()) {
///             ddp.scale_gradients(factor);
///             ddp.clip_gradients(1.5).unwrap();
///             ddp.update(&mut sgd).unwrap();
///         }
///     }
///     (ddp.model().1[0], scaler.scale())
/// });
/// // The second step is skipped on both ranks.
/// assert_eq!(outcome.results, [(-2.5, 32768.0); 2]);
/// ```
#[doc(alias = "GradScaler")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScaler {
    options: LossScalerOptions,
    scale: f64,
    /// The number of good steps since the scale changed.
    good_steps: u64,
}

/// Settings of [`LossScaler`]. The factors are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerOptions {
    /// The first scale; 65536 by default.
    pub scale: f64,
    /// The factor by which the scale grows, at least 1; 2 by default.
    pub growth: f64,
    /// The number of good steps in a row after which it grows, at least 1; 2000 by default.
    pub growth_interval: u64,
    /// The factor by which the scale shrinks after a step whose gradients are not finite, below 1; 0.5 by default.
    pub backoff: f64,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        Self { scale: 65536.0, growth: 2.0, growth_interval: 2000, backoff: 0.5 }
    }
}

impl LossScaler {
    /// Returns a scaler with the first scale.
    ///
    /// # Errors
    /// A factor is no power of two or out of range, or the interval is 0.
    pub fn new(options: LossScalerOptions) -> Result<Self> {
        let LossScalerOptions { scale, growth, growth_interval, backoff } = options;
        let check = |name, value: f64, is_valid: bool| {
            if is_valid { Ok(()) } else { Err(Error::Setting { name, value }) }
        };
        check("the scale of the loss", scale, is_power_of_two(scale) && SCALES.contains(&scale))?;
        check("the growth of the scale", growth, is_power_of_two(growth) && growth >= 1.0)?;
        check("the number of steps until the scale grows", growth_interval as f64, growth_interval > 0)?;
        check("the backoff of the scale", backoff, is_power_of_two(backoff) && backoff < 1.0)?;
        Ok(Self { options, scale, good_steps: 0 })
    }

    /// Returns the factor for the gradient of the loss in the next step: a power of two that `f32` can hold.
    pub const fn scale(&self) -> f64 {
        self.scale
    }

    /// Ends a step whose scaled gradients have this norm. Returns the factor that undoes the scaling, for
    /// [`scale_gradients`](crate::Ddp::scale_gradients). Returns `None` if the norm is infinite or NaN: skip the
    /// update. Then adapts the scale for the next step.
    pub fn end_step(&mut self, norm: f64) -> Option<f64> {
        if !norm.is_finite() {
            self.scale = (self.scale * self.options.backoff).max(*SCALES.start());
            self.good_steps = 0;
            return None;
        }
        let factor = self.scale.recip();
        self.good_steps += 1;
        if self.good_steps >= self.options.growth_interval {
            self.scale = (self.scale * self.options.growth).min(*SCALES.end());
            self.good_steps = 0;
        }
        Some(factor)
    }
}

/// The scales whose inverse `f32` can hold as a normal number, like themselves: 2⁻¹²⁶ to 2¹²⁶.
const SCALES: std::ops::RangeInclusive<f64> = f32::MIN_POSITIVE as f64..=1.0 / f32::MIN_POSITIVE as f64;

const FRACTION_BITS: u32 = f64::MANTISSA_DIGITS - 1;

fn is_power_of_two(value: f64) -> bool {
    value.is_normal() && value > 0.0 && value.to_bits().trailing_zeros() >= FRACTION_BITS
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Each step is whether its gradients are finite, with the scale after it. The interval is 3.
    #[rstest]
    #[case::as_by_hand(
        &[(true, 16.0), (true, 16.0), (true, 32.0), (false, 16.0), (true, 16.0), (true, 16.0), (false, 8.0), (false, 4.0),
          (true, 4.0), (true, 4.0), (true, 8.0), (true, 8.0), (true, 8.0), (true, 16.0)],
    )]
    fn the_scale_grows_after_good_steps_and_shrinks_after_each_bad_one(#[case] steps: &[(bool, f64)]) {
        let options = LossScalerOptions { scale: 16.0, growth_interval: 3, ..LossScalerOptions::default() };
        let mut scaler = LossScaler::new(options).unwrap();
        for (number, &(is_good, after)) in steps.iter().enumerate() {
            let before = scaler.scale();
            let norm = if is_good { f64::MAX } else { [f64::NAN, f64::INFINITY][number % 2] };
            assert_eq!(scaler.end_step(norm), is_good.then_some(1.0 / before), "step {number}");
            assert_eq!(scaler.scale(), after, "step {number}");
        }
    }

    #[test]
    fn the_scale_and_its_inverse_stay_in_the_range_of_f32() {
        let options = LossScalerOptions { growth_interval: 1, ..LossScalerOptions::default() };
        for norm in [1.0, f64::NAN] {
            let mut scaler = LossScaler::new(options).unwrap();
            assert_eq!(
                (0..400).filter_map(|_| scaler.end_step(norm)).count(),
                if norm == 1.0 { 400 } else { 0 }
            );
            assert!(scaler.scale().log2().abs() == 126.0, "{}", scaler.scale());
        }
    }

    #[rstest]
    #[case(|options: &mut LossScalerOptions| options.scale = 3.0, "the scale of the loss cannot be 3")]
    #[case(|options: &mut LossScalerOptions| options.scale = 0.0, "the scale of the loss cannot be 0")]
    #[case(|options: &mut LossScalerOptions| options.scale = f64::INFINITY, "the scale of the loss cannot be inf")]
    #[case(|options: &mut LossScalerOptions| options.scale = -2.0, "the scale of the loss cannot be -2")]
    #[case(|options: &mut LossScalerOptions| options.growth = 0.5, "the growth of the scale cannot be 0.5")]
    #[case(|options: &mut LossScalerOptions| options.growth = f64::NAN, "the growth of the scale cannot be NaN")]
    #[case(|options: &mut LossScalerOptions| options.growth_interval = 0, "the number of steps until the scale grows cannot be 0")]
    #[case(|options: &mut LossScalerOptions| options.backoff = 1.0, "the backoff of the scale cannot be 1")]
    fn options_out_of_range_are_refused(#[case] change: fn(&mut LossScalerOptions), #[case] expected: &str) {
        let mut options = LossScalerOptions::default();
        change(&mut options);
        assert_eq!(LossScaler::new(options).unwrap_err().to_string(), expected);
    }
}
