//! Stochastic gradient descent.

use super::groups::rate_and_decay;
use super::{
    Calculated, Kept, Optimizer, OptimizerSetting, ParamGroups, SliceState, SliceStateMut, StateLayout,
    calculated, check, entry, kept, numbers,
};
use crate::number::Number;
use crate::values::with_both;
use crate::{FloatType, Result, Values, ValuesMut};

/// Stochastic gradient descent, with the semantics of PyTorch's `SGD`.
///
/// With gradient g, parameter p and learning rate η: g += weight_decay·p. With momentum µ, v = g at the first step
/// and v = µ·v + g afterwards. Then g becomes v, or g + µ·v in Nesterov's form. Finally p −= η·g.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    groups: Option<ParamGroups>,
    velocities: Vec<Option<Kept>>,
    name: &'static str,
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
        check("the learning rate", options.learning_rate, options.learning_rate >= 0.0)?;
        check("the weight decay", options.weight_decay, options.weight_decay >= 0.0)?;
        if let Momentum::Plain(factor) | Momentum::Nesterov(factor) = options.momentum {
            check("the momentum", factor, factor >= 0.0)?;
        }
        Ok(Self { options, groups: None, velocities: Vec::new(), name: "sgd" })
    }

    /// Returns this optimizer under another name, because its slices are not gradients.
    pub(crate) const fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
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
        let rate = T::Math::from_setting(learning_rate);
        let decay = T::Math::from_setting(weight_decay);
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
            Momentum::Plain(factor) => (T::Math::from_setting(factor), false),
            Momentum::Nesterov(factor) => (T::Math::from_setting(factor), true),
        };
        let velocity = entry(&mut self.velocities, slice);
        let first = velocity.is_none();
        let velocity = velocity.get_or_insert_with(|| Kept::zeros(T::Math::DTYPE, parameters.len()));
        let velocity = kept::<T::Math>(velocity, slice, parameters.len())?;
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
        check("the learning rate", learning_rate, learning_rate >= 0.0)?;
        self.options.learning_rate = learning_rate;
        Ok(())
    }

    fn settings(&self) -> Vec<OptimizerSetting> {
        let SgdOptions { learning_rate, momentum, weight_decay } = self.options;
        let momentum = match momentum {
            Momentum::None => None,
            Momentum::Plain(factor) => Some(("the momentum", factor)),
            Momentum::Nesterov(factor) => Some(("Nesterov's momentum", factor)),
        };
        let of_all = [("the learning rate", learning_rate), ("the weight decay", weight_decay)];
        let of_all = of_all.into_iter().chain(momentum);
        let of_all = of_all.map(|(name, value)| OptimizerSetting::new(name, value));
        of_all.chain(self.groups.iter().flat_map(ParamGroups::settings)).collect()
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn layout(&self, parameters: FloatType) -> StateLayout {
        match self.options.momentum {
            Momentum::None => StateLayout::default(),
            Momentum::Plain(_) | Momentum::Nesterov(_) => {
                StateLayout { arrays: vec![("velocity", calculated(parameters))], scalars: Vec::new() }
            }
        }
    }

    fn state(&self, slice: usize) -> Option<SliceState<'_>> {
        let velocity = self.velocities.get(slice)?.as_ref()?;
        Some(SliceState { arrays: vec![velocity.values()], scalars: Vec::new() })
    }

    fn slices_with_state(&self) -> Vec<usize> {
        numbers(&self.velocities)
    }

    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_> {
        if self.options.momentum == Momentum::None {
            return SliceStateMut { arrays: Vec::new(), scalars: Vec::new() };
        }
        let velocity = entry(&mut self.velocities, slice).insert(Kept::zeros(parameters, len));
        SliceStateMut { arrays: vec![velocity.values_mut()], scalars: Vec::new() }
    }

    fn clear_state(&mut self) {
        self.velocities.clear();
    }
}
