//! Optimizer options for single parameters.

use crate::{Error, ParamInfo, Result, params};

use super::{OptimizerSetting, non_negative};

/// Optimizer options by parameter. Parameters with equal options form a parameter group.
///
/// [`Sgd::with_groups`](super::Sgd::with_groups), [`AdamW::with_groups`](super::AdamW::with_groups) and
/// [`Lion::with_groups`](super::Lion::with_groups) take it. Create it from `model.infos()` before you give the model
/// to a trainer. Every trainer numbers an optimizer's slices by this list, under every strategy. A tied parameter has
/// the options of the parameter that it is tied to.
///
/// In this example parameters with fewer than two dims, such as biases and norm scales, do not decay. The embedding
/// learns more slowly:
///
/// ```
/// use dist_parallel::optim::{AdamW, AdamWOptions, Optimizer, ParamGroups};
/// use dist_parallel::{FloatType, ParamInfo};
///
/// # let info = |name: &str, shape: &[usize]| ParamInfo::new(name, shape, FloatType::F32);
/// # let infos = [info("embed.weight", &[256, 8]), info("norm.weight", &[8]), info("head.bias", &[256])];
/// let mut groups = ParamGroups::new(&infos)?;
/// for (info, options) in groups.iter_mut() {
///     if info.shape.len() < 2 {
///         options.weight_decay = Some(0.0);
///     }
/// }
/// groups.named("embed.weight")?.learning_rate_factor = 0.1;
///
/// let mut adamw = AdamW::new(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() })?.with_groups(groups)?;
/// // A schedule sets one learning rate; the embedding has a tenth of it, whatever it is.
/// adamw.set_learning_rate(0.003)?;
/// # Ok::<_, dist_parallel::Error>(())
/// ```
#[doc(alias = "param_groups")]
#[derive(Debug, Clone, PartialEq)]
pub struct ParamGroups {
    infos: Vec<ParamInfo>,
    /// One entry per parameter. The entries of tied parameters are not used.
    options: Vec<ParamOptions>,
}

/// The options of one parameter. The defaults change nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamOptions {
    /// The factor of the optimizer's learning rate; 1 by default.
    pub learning_rate_factor: f64,
    /// The weight decay instead of the optimizer's; `None`, the default, for the optimizer's.
    pub weight_decay: Option<f64>,
}

impl Default for ParamOptions {
    fn default() -> Self {
        Self { learning_rate_factor: 1.0, weight_decay: None }
    }
}

impl ParamGroups {
    /// Returns default options for all parameters of a model.
    ///
    /// # Errors
    /// Two parameters have the same name, or a tie is invalid.
    pub fn new(infos: &[ParamInfo]) -> Result<Self> {
        params::validate(infos)?;
        Ok(Self { infos: infos.to_vec(), options: vec![ParamOptions::default(); infos.len()] })
    }

    /// Returns the parameters and their options, to change them. Tied parameters are left out.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&ParamInfo, &mut ParamOptions)> {
        self.infos.iter().zip(&mut self.options).filter(|(info, _)| info.same_as.is_none())
    }

    /// Returns the options of the parameter with this name, to change them.
    ///
    /// # Errors
    /// [`UnknownName`](Error::UnknownName) if there is none.
    pub fn named(&mut self, name: &str) -> Result<&mut ParamOptions> {
        let index = self.infos.iter().position(|info| info.name == name);
        let index = index.ok_or_else(|| Error::UnknownName { name: name.to_owned() })?;
        let original = self.original(index);
        Ok(&mut self.options[original])
    }

    /// Returns the parameter that this one is tied to, or itself.
    fn original(&self, parameter: usize) -> usize {
        self.infos[parameter].same_as.unwrap_or(parameter)
    }

    /// Returns the settings that differ from the optimizer's.
    pub(super) fn settings(&self) -> impl Iterator<Item = OptimizerSetting> {
        let own =
            self.options.iter().enumerate().filter(|(parameter, _)| self.original(*parameter) == *parameter);
        own.flat_map(|(parameter, options)| {
            let factor = Some(options.learning_rate_factor).filter(|factor| *factor != 1.0);
            let settings =
                [("the factor of the learning rate", factor), ("the weight decay", options.weight_decay)];
            let of_parameter = move |(name, value): (_, Option<f64>)| {
                Some(OptimizerSetting { name, parameter: Some(parameter), value: value? })
            };
            settings.into_iter().filter_map(of_parameter)
        })
    }

    /// Returns these groups if all options are in range.
    pub(super) fn checked(mut self) -> Result<Self> {
        for (info, &mut ParamOptions { learning_rate_factor, weight_decay }) in self.iter_mut() {
            let settings = [
                ("the factor of the learning rate", learning_rate_factor),
                ("the weight decay", weight_decay.unwrap_or(0.0)),
            ];
            for (name, value) in settings {
                let parameter = || info.name.clone();
                non_negative(name, value).map_err(|_| Error::ParamSetting {
                    parameter: parameter(),
                    name,
                    value,
                })?;
            }
        }
        Ok(self)
    }
}

/// Returns the learning rate and the weight decay of a slice, given those of the optimizer.
pub(super) fn rate_and_decay(
    groups: Option<&ParamGroups>,
    slice: usize,
    learning_rate: f64,
    weight_decay: f64,
) -> Result<(f64, f64)> {
    let Some(groups) = groups else { return Ok((learning_rate, weight_decay)) };
    let parameters = groups.infos.len();
    if slice >= parameters {
        return Err(Error::SliceWithoutGroup { slice, parameters });
    }
    let own = groups.options[groups.original(slice)];
    Ok((learning_rate * own.learning_rate_factor, own.weight_decay.unwrap_or(weight_decay)))
}
