//! Stochastic gradient descent.

use super::groups::rate_and_decay;
use super::{
    Calculated, Optimizer, OptimizerSetting, OptimizerState, ParamGroups, SliceStates, non_negative,
};
use crate::number::Number;
use crate::values::with_both;
use crate::{Result, Values, ValuesMut};

/// Stochastic gradient descent, with the semantics of PyTorch's `SGD`.
/// Half types are computed in `f32`, with state in `f32`.
///
/// With gradient g, parameter p and learning rate η: g += weight_decay·p. With momentum µ, v = g at the first step
/// and v = µ·v + g afterwards. Then g becomes v, or g + µ·v in Nesterov's form. Finally p −= η·g.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    groups: Option<ParamGroups>,
    states: SliceStates,
}

/// Settings of [`Sgd`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdOptions {
    /// The learning rate η; 0.01 by default.
    pub learning_rate: f64,
    /// The momentum; none by default.
    pub momentum: Momentum,
    /// The factor of the parameter that is added to its gradient; 0 by default.
    pub weight_decay: f64,
}

/// The use of earlier gradients in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Momentum {
    /// No momentum.
    None,
    /// Momentum with this factor.
    Plain(f64),
    /// Nesterov momentum with this factor.
    Nesterov(f64),
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { learning_rate: 0.01, momentum: Momentum::None, weight_decay: 0.0 }
    }
}

impl Sgd {
    /// Returns an optimizer without state.
    ///
    /// # Errors
    /// A setting is negative or not finite.
    pub fn new(options: SgdOptions) -> Result<Self> {
        Self::named("sgd", options)
    }

    /// Returns an optimizer under another name, because its slices are not gradients.
    pub(crate) fn named(name: &'static str, options: SgdOptions) -> Result<Self> {
        non_negative("the learning rate", options.learning_rate)?;
        non_negative("the weight decay", options.weight_decay)?;
        let arrays: &[&str] = match options.momentum {
            Momentum::None => &[],
            Momentum::Plain(factor) | Momentum::Nesterov(factor) => {
                non_negative("the momentum", factor)?;
                &["velocity"]
            }
        };
        Ok(Self { options, groups: None, states: SliceStates::new(name, arrays, &[]) })
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
        let SgdOptions { learning_rate, momentum, weight_decay } = self.options;
        let (learning_rate, weight_decay) =
            rate_and_decay(self.groups.as_ref(), slice, learning_rate, weight_decay)?;
        let rate = T::Math::of(learning_rate);
        let decay = T::Math::of(weight_decay);
        // Without decay nothing is added, so that an infinite parameter does not make its gradient NaN.
        let decays = weight_decay > 0.0;
        let decayed = |p: T, g: T| if decays { g.widen() + decay * p.widen() } else { g.widen() };
        let (factor, nesterov) = match momentum {
            Momentum::None => {
                for (p, &g) in parameters.iter_mut().zip(gradients) {
                    *p = T::narrow(p.widen() - rate * decayed(*p, g));
                }
                return Ok(());
            }
            Momentum::Plain(factor) => (T::Math::of(factor), false),
            Momentum::Nesterov(factor) => (T::Math::of(factor), true),
        };
        let first = self.states.get(slice).is_none();
        let ([velocity], _) = self.states.step::<T::Math, 1>(slice, parameters.len())?;
        for ((p, &g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            let g = decayed(*p, g);
            *v = if first { g } else { factor * *v + g };
            let change = if nesterov { g + factor * *v } else { *v };
            *p = T::narrow(p.widen() - rate * change);
        }
        Ok(())
    }
}

impl Optimizer for Sgd {
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
        let SgdOptions { learning_rate, momentum, weight_decay } = self.options;
        let mut of_all = vec![("the learning rate", learning_rate), ("the weight decay", weight_decay)];
        match momentum {
            Momentum::None => {}
            Momentum::Plain(factor) => of_all.push(("the momentum", factor)),
            Momentum::Nesterov(factor) => of_all.push(("Nesterov's momentum", factor)),
        }
        OptimizerSetting::all(&of_all, self.groups.as_ref())
    }
}

impl OptimizerState for Sgd {
    fn states(&self) -> Option<&SliceStates> {
        Some(&self.states)
    }

    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        Some(&mut self.states)
    }
}
