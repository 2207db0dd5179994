//! Adam, with decoupled weight decay or without.

use num_traits::Float as _;

use super::groups::rate_and_decay;
use super::{
    Calculated, Optimizer, OptimizerSetting, OptimizerState, ParamGroups, SliceStates, mean_factor,
    non_negative,
};
use crate::number::Number;
use crate::values::with_both;
use crate::{Result, Values, ValuesMut};

/// Adam with decoupled weight decay ([Loshchilov and Hutter](https://arxiv.org/abs/1711.05101)), with the semantics
/// of PyTorch's `AdamW`. With [`AdamWOptions::adam`] it is Adam, with the semantics of PyTorch's `Adam`. Half types are
/// computed in `f32`, with state in `f32`.
///
/// At step t of a slice, with gradient g, parameter p and learning rate η: p −= η·weight_decay·p; m += (1 − β₁)(g −
/// m); v = β₂·v + (1 − β₂)·g²; p −= η/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε). Adam begins with
/// g += weight_decay·p instead of p −= η·weight_decay·p.
#[doc(alias = "Adam")]
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    groups: Option<ParamGroups>,
    states: SliceStates,
}

/// Settings of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// The learning rate η; 0.001 by default.
    pub learning_rate: f64,
    /// The decay β₁ of the mean of gradients; 0.9 by default.
    pub beta1: f64,
    /// The decay β₂ of the mean of squared gradients; 0.999 by default.
    pub beta2: f64,
    /// The ε in the denominator, which prevents a division by zero; 1e-8 by default.
    pub epsilon: f64,
    /// The factor of the weight decay; 0.01 by default.
    pub weight_decay: f64,
    /// The place of the weight decay; decoupled by default.
    pub decay: WeightDecay,
}

/// The place of a weight decay in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDecay {
    /// The fraction η·weight_decay of the parameter is subtracted from it: AdamW.
    Decoupled,
    /// The fraction weight_decay of the parameter is added to its gradient: Adam.
    InGradient,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            decay: WeightDecay::Decoupled,
        }
    }
}

impl AdamWOptions {
    /// Returns the default settings of Adam, which has no weight decay.
    pub fn adam() -> Self {
        Self { weight_decay: 0.0, decay: WeightDecay::InGradient, ..Self::default() }
    }
}

impl AdamW {
    /// Returns an optimizer without state.
    ///
    /// # Errors
    /// A setting is negative or not finite, or a β is not below 1.
    pub fn new(options: AdamWOptions) -> Result<Self> {
        non_negative("the learning rate", options.learning_rate)?;
        mean_factor("beta1", options.beta1)?;
        mean_factor("beta2", options.beta2)?;
        non_negative("epsilon", options.epsilon)?;
        non_negative("the weight decay", options.weight_decay)?;
        let name = match options.decay {
            WeightDecay::Decoupled => "adamw",
            WeightDecay::InGradient => "adam",
        };
        // The powers β₁ᵗ and β₂ᵗ by repeated multiplication. It gives the same bits everywhere, unlike a power
        // function.
        let scalars = &[("beta1_power", 1.0), ("beta2_power", 1.0)];
        Ok(Self { options, groups: None, states: SliceStates::new(name, &["mean", "square"], scalars) })
    }

    /// Returns this optimizer with options for some parameters. The number of a slice must be the index of its
    /// parameter in the list of the groups, as for every trainer. The state of a slice does not depend on its group.
    ///
    /// # Errors
    /// An option is negative or not finite. The error names the parameter.
    pub fn with_groups(self, groups: ParamGroups) -> Result<Self> {
        Ok(Self { groups: Some(groups.checked()?), ..self })
    }

    fn step<T: Number<Math: Calculated>>(
        &mut self,
        slice: usize,
        parameters: &mut [T],
        gradients: &[T],
    ) -> Result<()> {
        let AdamWOptions { learning_rate, beta1, beta2, epsilon, weight_decay, decay } = self.options;
        let (learning_rate, weight_decay) =
            rate_and_decay(self.groups.as_ref(), slice, learning_rate, weight_decay)?;
        let ([mean, square], powers) = self.states.step::<T::Math, 2>(slice, parameters.len())?;
        powers[0] *= beta1;
        powers[1] *= beta2;

        let setting = T::Math::of;
        let (shrink, add) = match decay {
            WeightDecay::Decoupled => (setting(1.0 - learning_rate * weight_decay), None),
            // Without decay nothing is added, so that an infinite parameter does not make its gradient NaN.
            WeightDecay::InGradient => {
                (setting(1.0), Some(setting(weight_decay)).filter(|_| weight_decay > 0.0))
            }
        };
        let (new_mean, old_square, new_square) = (setting(1.0 - beta1), setting(beta2), setting(1.0 - beta2));
        let rate = setting(learning_rate / (1.0 - powers[0]));
        let (unbias, epsilon) = (setting((1.0 - powers[1]).sqrt()), setting(epsilon));
        for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(mean).zip(square) {
            let g = add.map_or(g.widen(), |decay| g.widen() + decay * p.widen());
            *m = *m + new_mean * (g - *m);
            *v = old_square * *v + new_square * g * g;
            let divisor = v.sqrt() / unbias + epsilon;
            *p = T::narrow(p.widen() * shrink - rate * (*m / divisor));
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()> {
        with_both!(parameters, gradients, |parameters, gradients| self.step(slice, parameters, gradients))
    }

    fn learning_rate(&self) -> f64 {
        self.options.learning_rate
    }

    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.options.learning_rate = non_negative("the learning rate", learning_rate)?;
        Ok(())
    }

    fn settings(&self) -> Vec<OptimizerSetting> {
        let AdamWOptions { learning_rate, beta1, beta2, epsilon, weight_decay, .. } = self.options;
        let of_all = [
            ("the learning rate", learning_rate),
            ("beta1", beta1),
            ("beta2", beta2),
            ("epsilon", epsilon),
            ("the weight decay", weight_decay),
        ];
        OptimizerSetting::all(&of_all, self.groups.as_ref())
    }
}

impl OptimizerState for AdamW {
    fn states(&self) -> Option<&SliceStates> {
        Some(&self.states)
    }

    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        Some(&mut self.states)
    }
}
