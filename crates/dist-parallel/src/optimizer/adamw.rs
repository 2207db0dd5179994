//! Adam with decoupled weight decay.

use num_traits::Float as _;

use super::groups::rate_and_decay;
use super::{
    Calculated, Kept, Optimizer, OptimizerSetting, ParamGroups, SliceState, SliceStateMut, StateLayout,
    calculated, check, entry, kept, numbers,
};
use crate::number::Number;
use crate::values::with_both;
use crate::{FloatType, Result, Values, ValuesMut};

/// Adam with decoupled weight decay ([Loshchilov and Hutter](https://arxiv.org/abs/1711.05101)), with the semantics
/// of PyTorch's `AdamW`.
///
/// At step t of a slice, with gradient g, parameter p and learning rate η: p −= η·weight_decay·p; m += (1 − β₁)(g −
/// m); v = β₂·v + (1 − β₂)·g²; p −= η/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε).
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    groups: Option<ParamGroups>,
    moments: Vec<Option<Moments>>,
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
    /// The fraction of a parameter that is subtracted each step, times η; 0.01 by default.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }
}

/// The state of one slice.
#[derive(Debug)]
struct Moments {
    mean: Kept,
    square: Kept,
    /// β₁ᵗ and β₂ᵗ, by repeated multiplication. It gives the same bits everywhere, unlike a power function.
    powers: (f64, f64),
}

impl AdamW {
    /// Returns an optimizer without state.
    ///
    /// # Errors
    /// A setting is negative or not finite, or a β is not below 1.
    pub fn new(options: AdamWOptions) -> Result<Self> {
        check("the learning rate", options.learning_rate, options.learning_rate >= 0.0)?;
        check("beta1", options.beta1, (0.0..1.0).contains(&options.beta1))?;
        check("beta2", options.beta2, (0.0..1.0).contains(&options.beta2))?;
        check("epsilon", options.epsilon, options.epsilon >= 0.0)?;
        check("the weight decay", options.weight_decay, options.weight_decay >= 0.0)?;
        Ok(Self { options, groups: None, moments: Vec::new() })
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
        let AdamWOptions { learning_rate, beta1, beta2, epsilon, weight_decay } = self.options;
        let (learning_rate, weight_decay) =
            rate_and_decay(self.groups.as_ref(), slice, learning_rate, weight_decay)?;
        let len = parameters.len();
        let moments = entry(&mut self.moments, slice).get_or_insert_with(|| Moments {
            mean: Kept::zeros(T::Math::DTYPE, len),
            square: Kept::zeros(T::Math::DTYPE, len),
            powers: (1.0, 1.0),
        });
        let mean = kept::<T::Math>(&mut moments.mean, slice, len)?;
        let square = kept::<T::Math>(&mut moments.square, slice, len)?;
        let powers = (moments.powers.0 * beta1, moments.powers.1 * beta2);
        moments.powers = powers;

        let setting = T::Math::from_setting;
        let shrink = setting(1.0 - learning_rate * weight_decay);
        let (new_mean, old_square, new_square) = (setting(1.0 - beta1), setting(beta2), setting(1.0 - beta2));
        let rate = setting(learning_rate / (1.0 - powers.0));
        let (unbias, epsilon) = (setting((1.0 - powers.1).sqrt()), setting(epsilon));
        for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(mean).zip(square) {
            let g = g.widen();
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
        check("the learning rate", learning_rate, learning_rate >= 0.0)?;
        self.options.learning_rate = learning_rate;
        Ok(())
    }

    fn settings(&self) -> Vec<OptimizerSetting> {
        let AdamWOptions { learning_rate, beta1, beta2, epsilon, weight_decay } = self.options;
        let of_all = [
            ("the learning rate", learning_rate),
            ("beta1", beta1),
            ("beta2", beta2),
            ("epsilon", epsilon),
            ("the weight decay", weight_decay),
        ];
        let of_all = of_all.into_iter().map(|(name, value)| OptimizerSetting::new(name, value));
        of_all.chain(self.groups.iter().flat_map(ParamGroups::settings)).collect()
    }

    fn name(&self) -> &'static str {
        "adamw"
    }

    fn layout(&self, parameters: FloatType) -> StateLayout {
        let dtype = calculated(parameters);
        StateLayout {
            arrays: vec![("mean", dtype), ("square", dtype)],
            scalars: vec!["beta1_power", "beta2_power"],
        }
    }

    fn state(&self, slice: usize) -> Option<SliceState<'_>> {
        let Moments { mean, square, powers } = self.moments.get(slice)?.as_ref()?;
        Some(SliceState { arrays: vec![mean.values(), square.values()], scalars: vec![powers.0, powers.1] })
    }

    fn slices_with_state(&self) -> Vec<usize> {
        numbers(&self.moments)
    }

    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_> {
        let zeros = || Kept::zeros(parameters, len);
        let moments = Moments { mean: zeros(), square: zeros(), powers: (0.0, 0.0) };
        let Moments { mean, square, powers } = entry(&mut self.moments, slice).insert(moments);
        SliceStateMut {
            arrays: vec![mean.values_mut(), square.values_mut()],
            scalars: vec![&mut powers.0, &mut powers.1],
        }
    }

    fn clear_state(&mut self) {
        self.moments.clear();
    }
}
