//! candle's AdamW, with moments that can be saved.

use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::ParamsAdamW;
use dist_parallel::half::{bf16, f16};
use dist_parallel::optim::{OptimizerState, SliceStates};
use dist_parallel::{FloatType, Params as _, Values, ValuesMut};
use num_traits::Float;

use crate::{CandleError, Variables, slices};

/// A drop-in for [`candle_nn::AdamW`] whose moments can be saved.
///
/// It takes the same variables and settings as candle's optimizer. It computes the same numbers, bit for bit,
/// for `f32`, `f64`, `f16` and `bf16` on the CPU, in one pass over each parameter and without temporary
/// tensors.
///
/// The moments of candle's optimizer are private, so a training that resumes with it from a checkpoint begins
/// again with moments of zero. [`DataParallel::save`](crate::DataParallel::save) and
/// [`load`](crate::DataParallel::load) save and load the moments of this optimizer.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_nn::{Optimizer, ParamsAdamW};
///
/// let settings = || ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
/// let (ours, theirs) = (Var::new(&[1f32, -2.0], &Device::Cpu)?, Var::new(&[1f32, -2.0], &Device::Cpu)?);
/// let mut optimizer = dist_candle::AdamW::new(vec![ours.clone()], settings())?;
/// let mut of_candle = candle_nn::AdamW::new(vec![theirs.clone()], settings())?;
/// for _ in 0..3 {
///     optimizer.backward_step(&ours.sqr()?.sum_all()?)?;
///     of_candle.backward_step(&theirs.sqr()?.sum_all()?)?;
/// }
/// assert_eq!(ours.to_vec1::<f32>()?, theirs.to_vec1::<f32>()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With parameters of `f16`, set `eps` to 1e-4 or more, as with candle's optimizer. Smaller values are close
/// to the smallest positive `f16`, and the first step can then divide zero by zero.
///
/// [`dist_parallel::optim::AdamW`] trains blocks and follows PyTorch. candle's formula differs from it in
/// three points: it does its operations in another order, keeps moments in the parameter's own type, and
/// counts steps in which a parameter has no gradient. Neither optimizer can load the state of the other.
pub struct AdamW {
    params: ParamsAdamW,
    trained: Vec<(Var, FloatType)>,
    /// The moments of the variables that have had a gradient, keyed by index in `trained`.
    states: SliceStates,
    /// The number of steps, including steps in which a variable had no gradient.
    steps: f64,
}

impl AdamW {
    /// Creates an optimizer of these variables that has made no step. Variables of integers are left out, as
    /// in candle's optimizer.
    ///
    /// # Errors
    /// If a variable has a float type other than `f32`, `f64`, `f16` and `bf16`.
    pub fn new(vars: Vec<Var>, params: ParamsAdamW) -> candle_core::Result<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        let typed = floats.map(|var| Ok((slices::float_type("of the optimizer", var.dtype())?, var)));
        let trained = typed.map(|typed| typed.map(|(dtype, var)| (var, dtype)));
        let trained = trained.collect::<Result<_, CandleError>>()?;
        let states = SliceStates::new("candle_adamw", &["mean", "square"], &[("steps", 0.0)]);
        Ok(Self { params, trained, states: states.in_type_of_parameters(), steps: 0.0 })
    }

    /// Creates the optimizer as [`new`](Self::new) does, with candle's default settings except for the
    /// learning rate.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn new_lr(vars: Vec<Var>, learning_rate: f64) -> candle_core::Result<Self> {
        Self::new(vars, ParamsAdamW { lr: learning_rate, ..ParamsAdamW::default() })
    }

    /// Updates each variable that has a gradient in the store.
    ///
    /// # Errors
    /// If a gradient does not have the type and shape of its variable, or a variable is not in this process's
    /// memory.
    pub fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        self.steps += 1.0;
        for place in 0..self.trained.len() {
            if let Some(gradient) = gradients.get(&self.trained[place].0) {
                self.step_variable(place, gradient)?;
            }
        }
        self.set_steps();
        Ok(())
    }

    /// Updates one variable with its gradient.
    fn step_variable(&mut self, place: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let Self { params, trained, states, steps } = self;
        let (var, dtype) = &trained[place];
        if (gradient.dtype(), gradient.shape()) != (var.dtype(), var.shape()) {
            candle_core::bail!(
                "a gradient of {:?} {:?} cannot change a variable of {:?} {:?}",
                gradient.dtype(),
                gradient.shape(),
                var.dtype(),
                var.shape()
            );
        }
        let gradient =
            if slices::share_memory(gradient, var) { gradient.copy()? } else { gradient.contiguous()? };
        let state = states.get_or_start(place, *dtype, var.elem_count()).map_err(candle_core::Error::msg)?;
        slices::read("the gradient", &gradient, |gradient| {
            slices::write("a variable of the optimizer", var, &mut |values| {
                update(params, *steps, values, gradient, state.arrays_mut());
            })
        })?
        .map_err(candle_core::Error::msg)
    }

    /// Stores the number of steps in the state of every variable.
    fn set_steps(&mut self) {
        for (_, state) in self.states.iter_mut() {
            state.scalars_mut().fill(self.steps);
        }
    }

    /// Returns the learning rate.
    pub const fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    /// Sets the learning rate of the following steps.
    pub const fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// Returns the settings.
    pub const fn params(&self) -> &ParamsAdamW {
        &self.params
    }

    /// Replaces the settings. Moments stay as they are.
    pub const fn set_params(&mut self, params: ParamsAdamW) {
        self.params = params;
    }

    /// Keys the state by the indices of a model's parameters, which checkpoints expect, until the result is
    /// dropped.
    ///
    /// # Errors
    /// [`ForeignMoments`](CandleError::ForeignMoments) if the optimizer has moments of a variable that is no
    /// trained parameter of `variables`.
    pub(crate) fn numbered(&mut self, variables: &Variables) -> Result<Numbered<'_>, CandleError> {
        let mut places = vec![None; variables.infos().len()];
        for (index, _, var) in variables.trained() {
            places[index] = self.trained.iter().position(|(trained, _)| trained.id() == var.id());
        }
        if let Some((foreign, _)) = self.states.iter().find(|(place, _)| !places.contains(&Some(*place))) {
            return Err(CandleError::ForeignMoments { shape: self.trained[foreign].0.shape().clone() });
        }
        self.states.renumber(|place| places.iter().position(|of_parameter| *of_parameter == Some(place)));
        Ok(Numbered { optimizer: self, places })
    }
}

impl candle_nn::Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> candle_core::Result<Self> {
        Self::new(vars, params)
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        self.step(gradients)
    }

    fn learning_rate(&self) -> f64 {
        self.learning_rate()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.set_learning_rate(lr);
    }
}

/// Applies one step of AdamW to one variable. All four slices have one type and length.
fn update(
    params: &ParamsAdamW,
    steps: f64,
    values: ValuesMut<'_>,
    gradient: Values<'_>,
    mut moments: Vec<ValuesMut<'_>>,
) {
    match (values, gradient, &mut moments[..]) {
        (ValuesMut::F32(p), Values::F32(g), [ValuesMut::F32(m), ValuesMut::F32(v)]) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::F64(p), Values::F64(g), [ValuesMut::F64(m), ValuesMut::F64(v)]) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::F16(p), Values::F16(g), [ValuesMut::F16(m), ValuesMut::F16(v)]) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::Bf16(p), Values::Bf16(g), [ValuesMut::Bf16(m), ValuesMut::Bf16(v)]) => {
            update_of(params, steps, p, g, m, v);
        }
        _ => unreachable!("moments have the type of their variable, with which the gradient was compared"),
    }
}

/// Computes candle's formula with the rounding of candle's kernels. candle computes both the product and the
/// sum of a tensor and a number with its kernel `affine`, `value * mul + add`.
fn update_of<T: Float + Setting>(
    params: &ParamsAdamW,
    steps: f64,
    values: &mut [T],
    gradient: &[T],
    mean: &mut [T],
    square: &mut [T],
) {
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
    #[expect(clippy::cast_possible_truncation, reason = "candle counts steps in an i32")]
    let steps = steps as i32;
    let affine = |mul: f64, add: f64| {
        let (mul, add) = (T::of(mul), T::of(add));
        move |value: T| value * mul + add
    };
    let (keep_mean, new_mean) = (affine(beta1, 0.0), affine(1.0 - beta1, 0.0));
    let (keep_square, new_square) = (affine(beta2, 0.0), affine(1.0 - beta2, 0.0));
    let unbias_mean = affine(1.0 / (1.0 - beta1.powi(steps)), 0.0);
    let unbias_square = affine(1.0 / (1.0 - beta2.powi(steps)), 0.0);
    let decay = affine(1.0 - lr * weight_decay, 0.0);
    let (rate, add_epsilon) = (affine(lr, 0.0), affine(1.0, eps));
    for (((p, &g), m), v) in values.iter_mut().zip(gradient).zip(mean).zip(square) {
        *m = keep_mean(*m) + new_mean(g);
        *v = keep_square(*v) + new_square(g * g);
        let adjusted = unbias_mean(*m) / add_epsilon(unbias_square(*v).sqrt());
        *p = decay(*p) - rate(adjusted);
    }
}

/// A float type to which settings are rounded before they are used.
trait Setting {
    fn of(value: f64) -> Self;
}

impl Setting for f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "settings are rounded to the type that is calculated in"
    )]
    fn of(value: f64) -> Self {
        value as Self
    }
}

impl Setting for f64 {
    fn of(value: f64) -> Self {
        value
    }
}

impl Setting for f16 {
    fn of(value: f64) -> Self {
        Self::from_f64(value)
    }
}

impl Setting for bf16 {
    fn of(value: f64) -> Self {
        Self::from_f64(value)
    }
}

/// An optimizer whose state is keyed by the indices of a model's parameters, as checkpoints expect. Dropping
/// it restores the optimizer's own indices.
pub(crate) struct Numbered<'a> {
    optimizer: &'a mut AdamW,
    /// For each parameter of the model, the index of its variable in the optimizer. `None` if the optimizer
    /// does not train it.
    places: Vec<Option<usize>>,
}

impl Numbered<'_> {
    /// Continues with the number of steps that was loaded.
    ///
    /// # Errors
    /// [`NotOptimized`](CandleError::NotOptimized) if moments were loaded for a variable that the optimizer
    /// does not train.
    pub(crate) fn loaded(&mut self, variables: &Variables) -> Result<(), CandleError> {
        let states = || self.optimizer.states.iter();
        if let Some((parameter, _)) = states().find(|(parameter, _)| self.places[*parameter].is_none()) {
            return Err(CandleError::NotOptimized { name: variables.infos()[parameter].name.clone() });
        }
        self.optimizer.steps = states().flat_map(|(_, state)| state.scalars()).copied().fold(0.0, f64::max);
        self.optimizer.set_steps();
        Ok(())
    }
}

impl OptimizerState for Numbered<'_> {
    fn states(&self) -> Option<&SliceStates> {
        Some(&self.optimizer.states)
    }

    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        Some(&mut self.optimizer.states)
    }
}

impl Drop for Numbered<'_> {
    fn drop(&mut self) {
        self.optimizer.states.renumber(|parameter| self.places[parameter]);
    }
}

impl fmt::Debug for AdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdamW({} variables, {} steps)", self.trained.len(), self.steps)
    }
}
