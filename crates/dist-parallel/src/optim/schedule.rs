//! Learning rates as functions of the step number. The first step has number 1.
//!
//! Any `Fn(u64) -> f64` is a schedule. It has no state, so a training can continue from any step.
//!
//! ```
//! use dist_parallel::optim::schedule::{self, Decay};
//!
//! let linear = schedule::linear(Decay { peak: 0.1, warmup: 2, steps: 8, to: 0.5 });
//! assert_eq!([1, 5, 9, 100].map(linear), [0.05, 0.1 * 0.75, 0.05, 0.05]);
//! ```

use std::f64::consts::PI;

/// A learning rate that rises linearly from 0 to a peak and decays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decay {
    /// The learning rate after the warmup and before any decay.
    pub peak: f64,
    /// The number of steps in which the rate rises.
    pub warmup: u64,
    /// The number of steps of the decay, from the first step on, also during the warmup.
    pub steps: u64,
    /// The fraction of the peak after these steps; 1 for no decay.
    pub to: f64,
}

/// Returns a constant learning rate.
pub const fn constant(rate: f64) -> impl Fn(u64) -> f64 + Copy {
    move |_| rate
}

/// Returns a learning rate with a linear decay.
pub const fn linear(decay: Decay) -> impl Fn(u64) -> f64 + Copy {
    move |step| decay.peak * decay.rise(step) * (1.0 - (1.0 - decay.to) * decay.passed(step))
}

/// Returns a learning rate with a cosine decay, half a period.
pub const fn cosine(decay: Decay) -> impl Fn(u64) -> f64 + Copy {
    move |step| {
        let left = 0.5 * (1.0 + (PI * decay.passed(step)).cos());
        decay.peak * decay.rise(step) * (decay.to + (1.0 - decay.to) * left)
    }
}

impl Decay {
    /// Returns the fraction of the warmup that is done.
    fn rise(&self, step: u64) -> f64 {
        if step < self.warmup { step as f64 / self.warmup as f64 } else { 1.0 }
    }

    /// Returns the fraction of the decay's steps before this step.
    fn passed(&self, step: u64) -> f64 {
        match step.saturating_sub(1) {
            before if before < self.steps => before as f64 / self.steps as f64,
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A schedule, and its rates at some steps.
    type Row<'a> = (&'a dyn Fn(u64) -> f64, &'a [(u64, f64)]);

    #[test]
    fn rates_are_a_function_of_the_step() {
        let decay = |peak, warmup, steps, to| Decay { peak, warmup, steps, to };
        let rows: [Row<'_>; 5] = [
            (&constant(0.5), &[(0, 0.5), (1, 0.5), (1000, 0.5)]),
            (&linear(decay(1.0, 4, 9, 1.0)), &[(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (5, 1.0)]),
            (
                &linear(decay(2.0, 0, 4, 0.0)),
                &[(1, 2.0), (2, 1.5), (4, 0.5), (5, 0.0), (6, 0.0), (u64::MAX, 0.0)],
            ),
            (&cosine(decay(1.0, 0, 4, 0.5)), &[(1, 1.0), (3, 0.75), (5, 0.5), (50, 0.5)]),
            (&linear(decay(1.0, 1, 0, 0.25)), &[(1, 0.25), (2, 0.25)]),
        ];
        for (schedule, expected) in rows {
            for &(step, rate) in expected {
                assert!((schedule(step) - rate).abs() < 1e-12, "{rate} at {step}: {}", schedule(step));
            }
        }
    }
}
