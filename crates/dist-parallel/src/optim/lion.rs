//! Lion: the sign of a momentum.

use super::groups::rate_and_decay;
use super::{
    Optimizer, OptimizerSetting, OptimizerState, ParamGroups, SliceStates, mean_factor, non_negative,
};
use crate::{Result, Values, ValuesMut};

/// Lion ([Chen et al., 2023](https://arxiv.org/abs/2302.06675)).
///
/// With gradient g, parameter p and learning rate η: p −= η·(sign(β₁·m + (1 − β₁)·g) + weight_decay·p), then m =
/// β₂·m + (1 − β₂)·g. The sign of 0 is 0. Each value is computed in `f64` and rounded once.
#[derive(Debug)]
pub struct Lion {
    options: LionOptions,
    groups: Option<ParamGroups>,
    states: SliceStates,
}

/// Settings of [`Lion`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionOptions {
    /// The learning rate η; 0.0001 by default.
    pub learning_rate: f64,
    /// The share β₁ of the momentum in the direction of a step; 0.9 by default.
    pub beta1: f64,
    /// The decay β₂ of the momentum; 0.99 by default.
    pub beta2: f64,
    /// The fraction of a parameter that is subtracted each step, times η; 0 by default.
    pub weight_decay: f64,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

impl Lion {
    /// Returns an optimizer without state.
    ///
    /// # Errors
    /// A setting is negative or not finite, or a β is not below 1.
    pub fn new(options: LionOptions) -> Result<Self> {
        non_negative("the learning rate", options.learning_rate)?;
        mean_factor("beta1", options.beta1)?;
        mean_factor("beta2", options.beta2)?;
        non_negative("the weight decay", options.weight_decay)?;
        Ok(Self { options, groups: None, states: SliceStates::new("lion", &["momentum"], &[]) })
    }

    /// Returns this optimizer with options for some parameters, as [`AdamW::with_groups`](super::AdamW::with_groups).
    ///
    /// # Errors
    /// An option is negative or not finite. The error names the parameter.
    pub fn with_groups(self, groups: ParamGroups) -> Result<Self> {
        Ok(Self { groups: Some(groups.checked()?), ..self })
    }
}

impl Optimizer for Lion {
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()> {
        let LionOptions { learning_rate, beta1, beta2, weight_decay } = self.options;
        let (rate, decay) = rate_and_decay(self.groups.as_ref(), slice, learning_rate, weight_decay)?;
        self.states.update(slice, parameters, gradients, |parameter, gradient, [momentum]| {
            let direction = beta1 * *momentum + (1.0 - beta1) * gradient;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *parameter -= rate * (sign + decay * *parameter);
            *momentum = beta2 * *momentum + (1.0 - beta2) * gradient;
        })
    }

    fn learning_rate(&self) -> f64 {
        self.options.learning_rate
    }

    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.options.learning_rate = non_negative("the learning rate", learning_rate)?;
        Ok(())
    }

    fn settings(&self) -> Vec<OptimizerSetting> {
        let LionOptions { learning_rate, beta1, beta2, weight_decay } = self.options;
        let of_all = [
            ("the learning rate", learning_rate),
            ("beta1", beta1),
            ("beta2", beta2),
            ("the weight decay", weight_decay),
        ];
        OptimizerSetting::all(&of_all, self.groups.as_ref())
    }
}

impl OptimizerState for Lion {
    fn states(&self) -> Option<&SliceStates> {
        Some(&self.states)
    }

    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        Some(&mut self.states)
    }
}
