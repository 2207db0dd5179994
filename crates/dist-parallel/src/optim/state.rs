//! The state of an optimizer: arrays and scalars for each slice, which checkpoints save.

use std::collections::BTreeMap;

use super::{Calculated, calculated};
use crate::flat::Flat;
use crate::number::Number;
use crate::values::with_both;
use crate::{Error, FloatType, Result, Values, ValuesMut};

/// State that checkpoints save and load. An optimizer without state implements no method.
///
/// An optimizer with state implements both methods and returns the same [`SliceStates`] from both.
pub trait OptimizerState {
    /// Returns the state of all slices. `None`, the default, if the optimizer has no state.
    fn states(&self) -> Option<&SliceStates> {
        None
    }

    /// Returns the same state, to be replaced.
    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        None
    }
}

/// Returns the name of this kind of optimizer.
pub(crate) fn name_of(optimizer: &(impl OptimizerState + ?Sized)) -> &'static str {
    optimizer.states().map_or("stateless", SliceStates::optimizer)
}

/// The arrays and scalars of an optimizer, by the numbers of its slices.
///
/// Every slice has the same arrays and scalars. An array has one value per value of the slice: `f64` for parameters of
/// `f64`, `f32` for all others.
#[derive(Debug)]
pub struct SliceStates {
    optimizer: &'static str,
    arrays: &'static [&'static str],
    scalars: &'static [(&'static str, f64)],
    array_type: ArrayType,
    slices: BTreeMap<usize, SliceState>,
}

/// The type of the arrays of an optimizer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArrayType {
    /// The type in which updates are computed: `f64` for parameters of `f64`, `f32` for all others.
    Computation,
    Parameters,
}

/// The state of one slice.
#[derive(Debug)]
pub struct SliceState {
    arrays: Vec<Flat>,
    scalars: Vec<f64>,
}

impl SliceStates {
    /// Returns a store without slices. `optimizer` is the name of this kind of optimizer in checkpoints. `arrays` are
    /// the names of the arrays, which begin as zeros. `scalars` are the names and first values of the scalars.
    pub const fn new(
        optimizer: &'static str,
        arrays: &'static [&'static str],
        scalars: &'static [(&'static str, f64)],
    ) -> Self {
        Self { optimizer, arrays, scalars, array_type: ArrayType::Computation, slices: BTreeMap::new() }
    }

    /// Gives the arrays the type of the parameters, also for half types.
    #[must_use]
    pub fn in_type_of_parameters(self) -> Self {
        Self { array_type: ArrayType::Parameters, ..self }
    }

    /// Returns the name of the kind of optimizer.
    pub const fn optimizer(&self) -> &'static str {
        self.optimizer
    }

    /// Returns the state of a slice. `None` if the slice has made no step.
    pub fn get(&self, slice: usize) -> Option<&SliceState> {
        self.slices.get(&slice)
    }

    /// Returns the state of a slice of `len` parameters. Its first step begins with zeros and the first values of the
    /// scalars.
    ///
    /// # Errors
    /// The slice had another type or length before.
    pub fn get_or_start(
        &mut self,
        slice: usize,
        parameters: FloatType,
        len: usize,
    ) -> Result<&mut SliceState> {
        let dtype = self.array_type.of(parameters);
        let first = || SliceState::new(self.arrays, self.scalars, dtype, len);
        let state = self.slices.entry(slice).or_insert_with(first);
        let fits = state.arrays.iter().all(|array| (array.dtype(), array.len()) == (dtype, len));
        if fits { Ok(state) } else { Err(Error::SliceChanged { slice }) }
    }

    /// Makes one step for one slice: calls `rule` for every value of the slice, with the parameter, its gradient and
    /// its value in each of the `N` arrays. All are `f64`, and the values that `rule` has changed are rounded once.
    ///
    /// # Errors
    /// Parameters and gradients differ in type or length, or differ from the last step. The optimizer does not have
    /// `N` arrays.
    pub fn update<const N: usize>(
        &mut self,
        slice: usize,
        parameters: ValuesMut<'_>,
        gradients: Values<'_>,
        rule: impl FnMut(&mut f64, f64, [&mut f64; N]),
    ) -> Result<()> {
        with_both!(parameters, gradients, |parameters, gradients| {
            self.update_each(slice, parameters, gradients, rule)
        })
    }

    fn update_each<T: Number<Math: Calculated>, const N: usize>(
        &mut self,
        slice: usize,
        parameters: &mut [T],
        gradients: &[T],
        mut rule: impl FnMut(&mut f64, f64, [&mut f64; N]),
    ) -> Result<()> {
        let (mut arrays, _) = self.step::<T::Math, N>(slice, parameters.len())?;
        for (index, (parameter, gradient)) in parameters.iter_mut().zip(gradients).enumerate() {
            let mut value = Number::to_f64(*parameter);
            let mut state = arrays.each_ref().map(|array| Number::to_f64(array[index]));
            rule(&mut value, Number::to_f64(*gradient), state.each_mut());
            *parameter = T::of(value);
            for (array, value) in arrays.iter_mut().zip(state) {
                array[index] = Number::of(value);
            }
        }
        Ok(())
    }

    /// Returns the arrays and the scalars of a slice in the type of the computation.
    pub(super) fn step<M: Calculated, const N: usize>(
        &mut self,
        slice: usize,
        len: usize,
    ) -> Result<([&mut [M]; N], &mut [f64])> {
        let (optimizer, has) = (self.optimizer, self.arrays.len());
        let SliceState { arrays, scalars } = self.get_or_start(slice, M::DTYPE, len)?;
        let arrays: Vec<&mut [M]> = arrays.iter_mut().filter_map(M::of_flat).collect();
        match arrays.try_into() {
            Ok(arrays) => Ok((arrays, scalars)),
            Err(_) => Err(Error::StateArrays { optimizer, has, needs: N }),
        }
    }

    /// Replaces the state of a slice by zeros and the first values of the scalars, and returns it to be filled.
    pub fn restart(&mut self, slice: usize, parameters: FloatType, len: usize) -> &mut SliceState {
        let first = SliceState::new(self.arrays, self.scalars, self.array_type.of(parameters), len);
        self.slices.entry(slice).insert_entry(first).into_mut()
    }

    /// Returns the numbers and states of the slices with state.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &SliceState)> {
        self.slices.iter().map(|(&slice, state)| (slice, state))
    }

    /// Returns the numbers and states of the slices with state, to change the states.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut SliceState)> {
        self.slices.iter_mut().map(|(&slice, state)| (slice, state))
    }

    /// Replaces the number of every slice by the result of `number`, and drops the state of slices for which it
    /// returns `None`.
    pub fn renumber(&mut self, number: impl Fn(usize) -> Option<usize>) {
        let slices = std::mem::take(&mut self.slices).into_iter();
        self.slices = slices.filter_map(|(slice, state)| Some((number(slice)?, state))).collect();
    }

    /// Drops the state of all slices.
    pub fn clear(&mut self) {
        self.slices.clear();
    }

    /// Returns the names and types of the arrays for parameters of this type.
    pub(crate) fn arrays(&self, parameters: FloatType) -> impl Iterator<Item = (&'static str, FloatType)> {
        let dtype = self.array_type.of(parameters);
        self.arrays.iter().map(move |&name| (name, dtype))
    }

    /// Returns the names of the scalars.
    pub(crate) fn scalars(&self) -> impl Iterator<Item = &'static str> {
        self.scalars.iter().map(|&(name, _)| name)
    }
}

impl SliceState {
    fn new(arrays: &[&str], scalars: &[(&str, f64)], dtype: FloatType, len: usize) -> Self {
        Self {
            arrays: arrays.iter().map(|_| Flat::zeros(dtype, len)).collect(),
            scalars: scalars.iter().map(|&(_, first)| first).collect(),
        }
    }

    /// Returns the arrays, in the order of their names.
    pub fn arrays(&self) -> Vec<Values<'_>> {
        self.arrays.iter().map(|array| array.slice(0, array.len())).collect()
    }

    /// Returns the arrays, to be changed.
    pub fn arrays_mut(&mut self) -> Vec<ValuesMut<'_>> {
        self.arrays.iter_mut().map(|array| array.slice_mut(0, array.len())).collect()
    }

    /// Returns the scalars, in the order of their names.
    pub fn scalars(&self) -> &[f64] {
        &self.scalars
    }

    /// Returns the scalars, to be changed.
    pub fn scalars_mut(&mut self) -> &mut [f64] {
        &mut self.scalars
    }
}

impl ArrayType {
    const fn of(self, parameters: FloatType) -> FloatType {
        match self {
            Self::Computation => calculated(parameters),
            Self::Parameters => parameters,
        }
    }
}
