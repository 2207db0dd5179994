//! Learning-rate schedules.

use std::f64::consts::PI;

/// The learning rate as a function of the number of the step. It has no state, so a training can continue from any
/// step.
///
/// ```
/// use dist_parallel::{Decay, LearningRateSchedule};
///
/// let schedule = LearningRateSchedule { peak: 0.1, warmup: 2, decay: Decay::Linear { steps: 8, to: 0.5 } };
/// let rates = [1, 5, 9, 100].map(|step| schedule.at(step));
/// assert_eq!(rates, [0.05, 0.1 * 0.75, 0.05, 0.05]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRateSchedule {
    /// The learning rate after the warmup and before any decay.
    pub peak: f64,
    /// The number of steps in which the rate rises linearly from 0.
    pub warmup: u64,
    /// The decay from the first step on, also during the warmup.
    pub decay: Decay,
}

/// The decay of a learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// No decay.
    None,
    /// Linear decay to a fraction of the peak.
    Linear {
        /// The number of steps.
        steps: u64,
        /// The fraction of the peak after these steps.
        to: f64,
    },
    /// Cosine decay, half a period, to a fraction of the peak.
    Cosine {
        /// The number of steps.
        steps: u64,
        /// The fraction of the peak after these steps.
        to: f64,
    },
}

impl LearningRateSchedule {
    /// Returns a constant learning rate.
    pub const fn constant(rate: f64) -> Self {
        Self { peak: rate, warmup: 0, decay: Decay::None }
    }

    /// Returns the learning rate of a step. The first is step 1.
    pub fn at(&self, step: u64) -> f64 {
        let rise = if step < self.warmup { step as f64 / self.warmup as f64 } else { 1.0 };
        let passed = |steps: u64| match step.saturating_sub(1) {
            before if before < steps => before as f64 / steps as f64,
            _ => 1.0,
        };
        let left = match self.decay {
            Decay::None => 1.0,
            Decay::Linear { steps, to } => 1.0 - (1.0 - to) * passed(steps),
            Decay::Cosine { steps, to } => to + (1.0 - to) * 0.5 * (1.0 + (PI * passed(steps)).cos()),
        };
        self.peak * rise * left
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::constant(LearningRateSchedule::constant(0.5), &[(0, 0.5), (1, 0.5), (1000, 0.5)])]
    #[case::rising(LearningRateSchedule { peak: 1.0, warmup: 4, decay: Decay::None }, &[(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (5, 1.0)])]
    #[case::falling(
        LearningRateSchedule { peak: 2.0, warmup: 0, decay: Decay::Linear { steps: 4, to: 0.0 } },
        &[(1, 2.0), (2, 1.5), (4, 0.5), (5, 0.0), (6, 0.0), (u64::MAX, 0.0)]
    )]
    #[case::along_a_cosine(
        LearningRateSchedule { peak: 1.0, warmup: 0, decay: Decay::Cosine { steps: 4, to: 0.5 } },
        &[(1, 1.0), (3, 0.75), (5, 0.5), (50, 0.5)]
    )]
    #[case::at_once(LearningRateSchedule { peak: 1.0, warmup: 1, decay: Decay::Linear { steps: 0, to: 0.25 } }, &[(1, 0.25), (2, 0.25)])]
    fn rates_are_a_function_of_the_step(
        #[case] schedule: LearningRateSchedule,
        #[case] expected: &[(u64, f64)],
    ) {
        for &(step, rate) in expected {
            assert!((schedule.at(step) - rate).abs() < 1e-12, "{rate} at {step}: {}", schedule.at(step));
        }
    }
}
