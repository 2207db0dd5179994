//! candle's AdamW, with moments that can be saved.

use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use candle_nn::ParamsAdamW;
use dist_parallel::{
    Error, FloatType, Params as _, SliceState, SliceStateMut, StateLayout, Values, ValuesMut, bf16, f16,
};
use num_traits::Float;

use crate::array::Array;
use crate::{CandleError, Variables, slices};

/// A drop-in for [`candle_nn::AdamW`] whose moments can be saved.
///
/// It takes the same variables and settings and computes the same numbers, to the bit, for `f32`, `f64`, `f16` and `bf16` on
/// the CPU; one pass over each parameter, without temporary tensors. candle's own keeps its moments to itself, so that a
/// training that goes on from a checkpoint begins again with moments of zero.
/// [`DataParallel::save`](crate::DataParallel::save) and [`load`](crate::DataParallel::load) save and load them.
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
/// With parameters of `f16`, set `eps` to 1e-4 or more, here as with candle's own: smaller values are so close to the least
/// value of the type that the first division can be of zero by zero.
///
/// It differs from [`dist_parallel::AdamW`], which trains blocks and follows PyTorch: candle's formula takes the steps in
/// another order, keeps moments in the parameter's own type, and counts steps in which a parameter has no gradient. The state
/// of the one cannot be loaded into the other.
#[derive(Debug)]
pub struct AdamW {
    params: ParamsAdamW,
    trained: Vec<Trained>,
}

/// A variable and what is kept of it.
struct Trained {
    var: Var,
    dtype: FloatType,
    mean: Array,
    square: Array,
    /// Steps of the optimizer, those included in which the variable had no gradient.
    steps: f64,
    /// `true` if it has ever had a gradient. Otherwise the moments are zero.
    has_moments: bool,
}

impl AdamW {
    /// Creates an optimizer of these variables that has made no step. Variables of integers are left out, as candle does.
    ///
    /// # Errors
    /// If a variable has a type of floats that cannot be trained.
    pub fn new(vars: Vec<Var>, params: ParamsAdamW) -> candle_core::Result<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        let trained = floats.map(Trained::new).collect::<Result<_, _>>()?;
        Ok(Self { params, trained })
    }

    /// As [`new`](Self::new), with candle's default settings but for the learning rate.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn new_lr(vars: Vec<Var>, learning_rate: f64) -> candle_core::Result<Self> {
        Self::new(vars, ParamsAdamW { lr: learning_rate, ..ParamsAdamW::default() })
    }

    /// Changes each variable that has a gradient in the store.
    ///
    /// # Errors
    /// If a gradient does not have its variable's type and number of values, or a variable is not in memory.
    pub fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        let Self { params, trained } = self;
        trained.iter_mut().try_for_each(|trained| {
            trained.steps += 1.0;
            gradients.get(&trained.var).map_or(Ok(()), |gradient| trained.step(params, gradient))
        })
    }

    /// The learning rate.
    pub const fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    /// Sets the learning rate of the following steps.
    pub const fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// The settings.
    pub const fn params(&self) -> &ParamsAdamW {
        &self.params
    }

    /// Replaces the settings; moments stay as they are.
    pub const fn set_params(&mut self, params: ParamsAdamW) {
        self.params = params;
    }

    fn place(&self, var: TensorId) -> Option<usize> {
        self.trained.iter().position(|trained| trained.var.id() == var)
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

impl Trained {
    fn new(var: Var) -> Result<Self, CandleError> {
        let dtype = slices::float_type("of the optimizer", var.dtype())?;
        let zeros = || Array::zeros(dtype, var.elem_count());
        let (mean, square) = (zeros(), zeros());
        Ok(Self { var, dtype, mean, square, steps: 0.0, has_moments: false })
    }

    /// Changes the variable by a gradient.
    fn step(&mut self, params: &ParamsAdamW, gradient: &Tensor) -> candle_core::Result<()> {
        if (gradient.dtype(), gradient.shape()) != (self.var.dtype(), self.var.shape()) {
            candle_core::bail!(
                "a gradient of {:?} {:?} cannot change a variable of {:?} {:?}",
                gradient.dtype(),
                gradient.shape(),
                self.var.dtype(),
                self.var.shape()
            );
        }
        let gradient = if slices::share_memory(gradient, &self.var) {
            gradient.copy()?
        } else {
            gradient.contiguous()?
        };
        let Self { var, mean, square, steps, has_moments, .. } = self;
        *has_moments = true;
        slices::read("the gradient", &gradient, |gradient| {
            slices::write("a variable of the optimizer", var, &mut |values| {
                update(params, *steps, values, gradient, mean.values_mut(), square.values_mut());
            })
        })?
        .map_err(candle_core::Error::msg)
    }
}

/// One step of AdamW for one variable; all four have one type and length.
fn update(
    params: &ParamsAdamW,
    steps: f64,
    values: ValuesMut<'_>,
    gradient: Values<'_>,
    mean: ValuesMut<'_>,
    square: ValuesMut<'_>,
) {
    match (values, gradient, mean, square) {
        (ValuesMut::F32(p), Values::F32(g), ValuesMut::F32(m), ValuesMut::F32(v)) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::F64(p), Values::F64(g), ValuesMut::F64(m), ValuesMut::F64(v)) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::F16(p), Values::F16(g), ValuesMut::F16(m), ValuesMut::F16(v)) => {
            update_of(params, steps, p, g, m, v);
        }
        (ValuesMut::Bf16(p), Values::Bf16(g), ValuesMut::Bf16(m), ValuesMut::Bf16(v)) => {
            update_of(params, steps, p, g, m, v);
        }
        _ => unreachable!("moments have the type of their variable, with which the gradient was compared"),
    }
}

/// candle's formula, each operation rounded as its kernels round it. `affine` is what candle makes of a product with a number
/// and of a sum with one.
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

/// A type that settings are rounded to.
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

/// An optimizer whose variables have the numbers of a training's parameters, as checkpoints want it.
pub(crate) struct Numbered<'a> {
    optimizer: Access<'a>,
    /// For each parameter of the training that it trains: the place of its variable in the optimizer, if it is there.
    places: Vec<Option<usize>>,
}

/// The access that a caller has to the optimizer's state.
enum Access<'a> {
    Save(&'a AdamW),
    Load(&'a mut AdamW),
}

impl<'a> Numbered<'a> {
    pub(crate) fn to_save(optimizer: &'a AdamW, variables: &Variables) -> Result<Self, CandleError> {
        let places = places(optimizer, variables)?;
        Ok(Self { optimizer: Access::Save(optimizer), places })
    }

    pub(crate) fn to_load(optimizer: &'a mut AdamW, variables: &Variables) -> Result<Self, CandleError> {
        let places = places(optimizer, variables)?;
        Ok(Self { optimizer: Access::Load(optimizer), places })
    }

    fn adamw(&self) -> &AdamW {
        match &self.optimizer {
            Access::Save(optimizer) => optimizer,
            Access::Load(optimizer) => optimizer,
        }
    }

    fn trained(&self, slice: usize) -> Option<&Trained> {
        let place = (*self.places.get(slice)?)?;
        Some(&self.adamw().trained[place]).filter(|trained| trained.steps > 0.0)
    }
}

/// For each parameter that the training trains, the place of its variable in the optimizer.
///
/// # Errors
/// If the optimizer has trained something else.
fn places(optimizer: &AdamW, variables: &Variables) -> Result<Vec<Option<usize>>, CandleError> {
    let mut places = vec![None; variables.infos().len()];
    for (index, _, var) in variables.trained() {
        places[index] = optimizer.place(var.id());
    }
    let is_foreign =
        |(place, trained): &(usize, &Trained)| trained.has_moments && !places.contains(&Some(*place));
    match optimizer.trained.iter().enumerate().find(is_foreign) {
        Some((_, trained)) => Err(CandleError::ForeignMoments { shape: trained.var.shape().clone() }),
        None => Ok(places),
    }
}

impl Numbered<'_> {
    /// Gives variables of which nothing was loaded, because they never have a gradient, the steps of the others.
    pub(crate) fn level_steps(&mut self) {
        let steps = self.adamw().trained.iter().map(|trained| trained.steps).fold(0.0, f64::max);
        if let Access::Load(optimizer) = &mut self.optimizer {
            optimizer.trained.iter_mut().for_each(|trained| trained.steps = steps);
        }
    }

    /// Returns the state of a slice for writing; `None` if it is only read, or absent.
    fn trained_mut(&mut self, slice: usize) -> Option<(&ParamsAdamW, &mut Trained)> {
        let place = (*self.places.get(slice)?)?;
        match &mut self.optimizer {
            Access::Load(AdamW { params, trained }) => Some((params, &mut trained[place])),
            Access::Save(_) => None,
        }
    }
}

impl dist_parallel::Optimizer for Numbered<'_> {
    fn update(
        &mut self,
        slice: usize,
        parameters: ValuesMut<'_>,
        gradients: Values<'_>,
    ) -> dist_parallel::Result<()> {
        let unlike = || Error::SliceChanged { slice };
        let (params, trained) = self.trained_mut(slice).ok_or_else(unlike)?;
        let expected = (trained.dtype, trained.mean.values().len());
        let given = [parameters.as_values(), gradients].map(|values| (values.dtype(), values.len()));
        if given != [expected; 2] {
            return Err(unlike());
        }
        trained.steps += 1.0;
        trained.has_moments = true;
        let (mean, square) = (trained.mean.values_mut(), trained.square.values_mut());
        update(params, trained.steps, parameters, gradients, mean, square);
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.adamw().learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) -> dist_parallel::Result<()> {
        match &mut self.optimizer {
            Access::Load(optimizer) if learning_rate.is_finite() && learning_rate >= 0.0 => {
                optimizer.set_learning_rate(learning_rate);
                Ok(())
            }
            _ => Err(Error::Setting { name: "the learning rate", value: learning_rate }),
        }
    }

    fn name(&self) -> &'static str {
        "candle_adamw"
    }

    fn layout(&self, parameters: FloatType) -> StateLayout {
        StateLayout { arrays: vec![("mean", parameters), ("square", parameters)], scalars: vec!["steps"] }
    }

    fn state(&self, slice: usize) -> Option<SliceState<'_>> {
        let Trained { mean, square, steps, .. } = self.trained(slice)?;
        Some(SliceState { arrays: vec![mean.values(), square.values()], scalars: vec![*steps] })
    }

    fn slices_with_state(&self) -> Vec<usize> {
        (0..self.places.len()).filter(|&slice| self.trained(slice).is_some()).collect()
    }

    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_> {
        // A checkpoint's load refuses a state without arrays.
        let Some((_, trained)) = self.trained_mut(slice) else {
            return SliceStateMut { arrays: Vec::new(), scalars: Vec::new() };
        };
        let zeros = || Array::zeros(parameters, len);
        (trained.mean, trained.square, trained.has_moments) = (zeros(), zeros(), true);
        SliceStateMut {
            arrays: vec![trained.mean.values_mut(), trained.square.values_mut()],
            scalars: vec![&mut trained.steps],
        }
    }

    fn clear_state(&mut self) {
        let Access::Load(optimizer) = &mut self.optimizer else { return };
        for trained in &mut optimizer.trained {
            trained.mean.values_mut().clear();
            trained.square.values_mut().clear();
            (trained.steps, trained.has_moments) = (0.0, false);
        }
    }
}

impl fmt::Debug for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trained({:?} {:?}, {} steps)", self.var.shape(), self.var.dtype(), self.steps)
    }
}
