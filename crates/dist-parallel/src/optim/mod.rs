//! Optimizers on flat slices: their state belongs to a slice, not to a model.
//!
//! The same slices, gradients and settings give the same bits, on any number of ranks.

mod adamw;
mod groups;
mod lion;
mod loss_scaler;
pub mod schedule;
mod sgd;
mod state;
#[cfg(test)]
mod tests;

pub use adamw::{AdamW, AdamWOptions, WeightDecay};
pub use groups::{ParamGroups, ParamOptions};
pub use lion::{Lion, LionOptions};
pub use loss_scaler::{LossScaler, LossScalerOptions};
pub use sgd::{Momentum, Sgd, SgdOptions};
pub(crate) use state::name_of;
pub use state::{OptimizerState, SliceState, SliceStates};

use crate::flat::Flat;
use crate::number::Number;
use crate::{Error, FloatType, Result, Values, ValuesMut};

/// An algorithm that updates parameters by their gradients.
///
/// An optimizer of your own updates slices in [`update`](Self::update) and has its state in a [`SliceStates`], which
/// checkpoints save and load. This is [`Lion`]:
///
/// ```
/// use dist_parallel::optim::{Optimizer, OptimizerState, SliceStates};
/// use dist_parallel::{Result, Values, ValuesMut};
///
/// struct Lion { learning_rate: f64, states: SliceStates }
///
/// impl Optimizer for Lion {
///     fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()> {
///         self.states.update(slice, parameters, gradients, |parameter, gradient, [momentum]| {
///             let direction = 0.9 * *momentum + 0.1 * gradient;
///             if direction != 0.0 {
///                 *parameter -= self.learning_rate * direction.signum();
///             }
///             *momentum = 0.99 * *momentum + 0.01 * gradient;
///         })
///     }
///     fn learning_rate(&self) -> f64 { self.learning_rate }
/// }
///
/// impl OptimizerState for Lion {
///     fn states(&self) -> Option<&SliceStates> { Some(&self.states) }
///     fn states_mut(&mut self) -> Option<&mut SliceStates> { Some(&mut self.states) }
/// }
///
/// let new_lion = || Lion { learning_rate: 1e-3, states: SliceStates::new("my lion", &["momentum"], &[]) };
/// # use dist_parallel::checkpoint::Checkpoints;
/// # use dist_parallel::{BoxError, Communicator, Ddp, DdpOptions, FloatType, ParamInfo, Params};
/// # struct Number([ParamInfo; 1], [f32; 1]);
/// # impl Params for Number {
/// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
/// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
/// #         Ok(f(Values::F32(&self.1)))
/// #     }
/// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
/// #         Ok(f(ValuesMut::F32(&mut self.1)))
/// #     }
/// # }
/// # let directory = std::env::temp_dir().join(format!("dist-lion-{}", std::process::id()));
/// # let path = directory.clone();
/// # let outcome = dist_transport::sim::run(1, 2, move |transport| {
/// #     let model = Number([ParamInfo::new("weight", [1], FloatType::F32)], [1.0]);
/// #     let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
/// #     let mut lion = new_lion();
/// #     let step = |ddp: &mut Ddp<Number>, lion: &mut Lion, target: f32| {
/// #         let gradient = |model: &mut Number, _, ready: &mut dist_parallel::model::Ready<'_>| {
/// #             let error = model.1[0] - target;
/// #             ready(0, Values::F32(&[error]))?;
/// #             Ok(error * error)
/// #         };
/// #         ddp.step_with(2, gradient).unwrap();
/// #         ddp.update(lion).unwrap();
/// #     };
/// #     for _ in 0..10 { step(&mut ddp, &mut lion, -3.0); }
/// #     let mut checkpoints = Checkpoints::at(&path);
/// #     checkpoints.save(&mut ddp, Some(&lion), 10).unwrap();
/// #     step(&mut ddp, &mut lion, 1.5);
/// #     let uninterrupted = ddp.model().1[0];
/// #     let mut loaded = new_lion();
/// #     assert_eq!(checkpoints.load(&mut ddp, Some(&mut loaded)).unwrap(), Some(10));
/// #     assert_ne!(ddp.model().1[0], uninterrupted);
/// #     step(&mut ddp, &mut loaded, 1.5);
/// #     (ddp.model().1[0], uninterrupted)
/// # });
/// # std::fs::remove_dir_all(directory).unwrap();
/// # // The momentum of the first ten steps outweighs the gradient of the last one, which has the other sign.
/// # assert!(outcome.results.iter().all(|&(loaded, expected)| loaded == expected && loaded < 1.0 - 0.0105));
/// ```
pub trait Optimizer: OptimizerState {
    /// Makes one step for one slice of parameters. The caller numbers its slices, and the state of earlier steps is
    /// stored by this number. A slice without a gradient is skipped, and its state does not change.
    ///
    /// # Errors
    /// Parameters and gradients differ in type or length, or differ from the last step.
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()>;

    /// Returns the current learning rate, to which [groups](ParamGroups) apply a factor.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the following steps. A [schedule] is a function of the step:
    /// `optimizer.set_learning_rate(schedule(step))`.
    ///
    /// # Errors
    /// It is negative or not finite. The default is an error: the optimizer does not implement this method.
    fn set_learning_rate(&mut self, _learning_rate: f64) -> Result<()> {
        Err(Error::FixedLearningRate { optimizer: name_of(self) })
    }

    /// Returns the settings of an update, in an order that depends only on the kind of the optimizer. All ranks of a
    /// training must have the same settings: trainers compare them, and the error names the one that differs. The
    /// default is the learning rate.
    fn settings(&self) -> Vec<OptimizerSetting> {
        vec![OptimizerSetting::new("the learning rate", self.learning_rate())]
    }
}

/// A setting of an optimizer, for all parameters or for one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSetting {
    /// The name in errors, such as "the learning rate".
    pub name: &'static str,
    /// The index of the parameter in the model. `None` if the setting is for all parameters.
    pub parameter: Option<usize>,
    /// The value.
    pub value: f64,
}

impl OptimizerSetting {
    /// Returns a setting for all parameters.
    pub const fn new(name: &'static str, value: f64) -> Self {
        Self { name, parameter: None, value }
    }

    /// Returns settings for all parameters, and those of the groups that differ from them.
    fn all(settings: &[(&'static str, f64)], groups: Option<&ParamGroups>) -> Vec<Self> {
        let of_all = settings.iter().map(|&(name, value)| Self::new(name, value));
        of_all.chain(groups.into_iter().flat_map(ParamGroups::settings)).collect()
    }
}

/// Returns the type in which updates of parameters of this type are computed.
const fn calculated(parameters: FloatType) -> FloatType {
    match parameters {
        FloatType::F64 => FloatType::F64,
        FloatType::F32 | FloatType::F16 | FloatType::Bf16 => FloatType::F32,
    }
}

/// A type in which updates are computed: `f32` or `f64`.
trait Calculated: Number + num_traits::Float {
    const DTYPE: FloatType;
    /// Returns `None` if the array has another type.
    fn of_flat(array: &mut Flat) -> Option<&mut [Self]>;
}

impl Calculated for f32 {
    const DTYPE: FloatType = FloatType::F32;

    fn of_flat(array: &mut Flat) -> Option<&mut [Self]> {
        if let Flat::F32(values) = array { Some(values) } else { None }
    }
}

impl Calculated for f64 {
    const DTYPE: FloatType = FloatType::F64;

    fn of_flat(array: &mut Flat) -> Option<&mut [Self]> {
        if let Flat::F64(values) = array { Some(values) } else { None }
    }
}

/// Returns a setting, which must not be negative.
fn non_negative(name: &'static str, value: f64) -> Result<f64> {
    if value >= 0.0 && value.is_finite() { Ok(value) } else { Err(Error::Setting { name, value }) }
}

/// Returns a factor of a moving mean, which must be at least 0 and below 1.
fn mean_factor(name: &'static str, value: f64) -> Result<f64> {
    if (0.0..1.0).contains(&value) { Ok(value) } else { Err(Error::Setting { name, value }) }
}
