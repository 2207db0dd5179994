//! The named variables of a candle model as parameters of dist-parallel.

use std::collections::{HashMap, HashSet};
use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::model::{BufferSync, BufferView, Materialised, Ready, Resharded};
use dist_parallel::{BoxError, ParamInfo, Params, Values, ValuesMut};

use crate::gradient::stray_variable;
use crate::spare::BufferPool;
use crate::{CandleError, integers, slices};

/// The named variables of a candle model: the parameters of a [`DataParallel`](crate::DataParallel).
///
/// A variable is one of three kinds:
///
/// - A parameter: every other variable of `f32`, `f64`, `f16` or `bf16`. Training averages its gradients over
///   the ranks.
/// - A frozen parameter: declared with [`freeze`](Self::freeze). Training leaves it unchanged.
/// - A [buffer](ParamInfo::buffer): `running_mean` and `running_var`, which batch norm changes, all integers, and
///   variables declared with [`buffer`](Self::buffer). After every step all ranks get the values of rank 0, or
///   what [`BufferSync`] says.
///
/// Integers (`u8`, `u32`, `i16`, `i32`, `i64`) have no gradients. They are sent and saved in checkpoints as
/// `f64`, which represents every integer up to 2⁵³ exactly. [`BufferSync::Mean`] rounds their mean to the
/// nearest integer.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use dist_candle::Variables;
/// use dist_parallel::Params;
///
/// let map = VarMap::new();
/// let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
/// let _norm = candle_nn::batch_norm(8, 1e-5, vars.pp("norm"))?;
/// let _head = candle_nn::linear(8, 2, vars.pp("head"))?;
/// let variables = Variables::from_var_map(&map)?.freeze("head.bias")?;
/// let trained: Vec<&str> =
///     variables.infos().iter().filter(|info| info.trainable).map(|info| &*info.name).collect();
/// assert_eq!(trained, ["head.weight", "norm.bias", "norm.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Variables {
    /// The name of the block or model in errors: "block hidden" or "the model".
    place: String,
    infos: Vec<ParamInfo>,
    vars: Vec<Var>,
    /// The indices of parameters that need not have a gradient after every backward pass.
    may_be_unused: HashSet<usize>,
    spare: BufferPool,
}

impl Variables {
    /// Lists all variables of `map` under their names, sorted by name, because the order of a [`VarMap`]
    /// differs between processes.
    ///
    /// # Errors
    /// If `map` is empty, or a variable has a type that dist does not know or is not a slice in this
    /// process's memory.
    pub fn from_var_map(map: &VarMap) -> Result<Self, CandleError> {
        Self::with_prefix(place(""), "", map)
    }

    /// Lists these variables in this order, which must be the same on every rank. A variable that is listed
    /// twice is one parameter with two names.
    ///
    /// # Errors
    /// If two variables have the same name, or one has a type that dist does not know or is not a slice in
    /// this process's memory.
    pub fn new<N: Into<String>>(variables: impl IntoIterator<Item = (N, Var)>) -> Result<Self, CandleError> {
        Self::named(place(""), variables.into_iter().map(|(name, var)| (name.into(), var)))
    }

    /// Lists the variables of `map` whose names begin with `prefix`, under their whole names.
    pub(crate) fn with_prefix(place: String, prefix: &str, map: &VarMap) -> Result<Self, CandleError> {
        let mut named: Vec<(String, Var)> = {
            let all = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let own = all.iter().filter(|(variable, _)| variable.starts_with(prefix));
            own.map(|(variable, var)| (variable.clone(), var.clone())).collect()
        };
        if named.is_empty() {
            return Err(CandleError::NoVariables { place, prefix: prefix.to_owned() });
        }
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self::named(place, named)
    }

    /// Lists these variables under their whole names.
    pub(crate) fn named(
        place: String,
        named: impl IntoIterator<Item = (String, Var)>,
    ) -> Result<Self, CandleError> {
        let (mut infos, mut vars): (Vec<ParamInfo>, Vec<Var>) = (Vec::new(), Vec::new());
        let (mut names, mut first) = (HashSet::new(), HashMap::new());
        for (name, var) in named {
            if !names.insert(name.clone()) {
                return Err(CandleError::DuplicateName { place, name });
            }
            // The index of the variable's first name.
            let original = *first.entry(var.id()).or_insert(vars.len());
            let same_as = (original < vars.len()).then_some(original);
            let info = match same_as {
                // The first name of a variable decides whether it is a buffer.
                Some(earlier) => ParamInfo { name, same_as, ..infos[earlier].clone() },
                None => describe(name, &var)?,
            };
            infos.push(info);
            vars.push(var);
        }
        Ok(Self { place, infos, vars, may_be_unused: HashSet::new(), spare: BufferPool::default() })
    }

    /// Declares one variable as a [buffer](ParamInfo::buffer), which the model itself changes in a forward
    /// pass. `sync` says how the ranks synchronise it after every step.
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "register_buffer")]
    pub fn buffer(self, name: &str, sync: BufferSync) -> Result<Self, CandleError> {
        self.set(name, |info| (info.trainable, info.buffer) = (false, Some(sync)))
    }

    /// Sets how the ranks synchronise all buffers after every step.
    #[must_use]
    pub fn sync_buffers(mut self, sync: BufferSync) -> Self {
        let buffers = self.infos.iter_mut().filter_map(|info| info.buffer.as_mut());
        buffers.for_each(|own| *own = sync);
        self
    }

    /// Declares one variable as a trained parameter although it has the name of a buffer, such as
    /// `running_mean`.
    ///
    /// # Errors
    /// If there is no such variable, or it is of a type that cannot be trained.
    pub fn train(self, name: &str) -> Result<Self, CandleError> {
        let dtype = self.vars[self.original(name)?].dtype();
        slices::float_type(name, dtype)?;
        self.set(name, |info| (info.trainable, info.buffer) = (true, None))
    }

    /// Excludes one parameter from training. A buffer stays a buffer.
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "requires_grad")]
    pub fn freeze(self, name: &str) -> Result<Self, CandleError> {
        self.set(name, |info| info.trainable = false)
    }

    /// Declares that the model does not use one parameter in every forward pass, for example the weight of an
    /// expert that may get no tokens. For any other trained parameter, a backward pass without a gradient
    /// fails with [`CandleError::NoGradient`].
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "find_unused_parameters")]
    pub fn may_be_unused(mut self, name: &str) -> Result<Self, CandleError> {
        self.may_be_unused.insert(self.original(name)?);
        Ok(self)
    }

    /// Declares that the model need not use any of its parameters in every forward pass.
    #[must_use]
    pub fn all_may_be_unused(mut self) -> Self {
        self.may_be_unused = (0..self.vars.len()).collect();
        self
    }

    /// Changes the description of one variable under all of its names.
    fn set(mut self, name: &str, set: impl Fn(&mut ParamInfo)) -> Result<Self, CandleError> {
        let original = self.original(name)?;
        let all = self.infos.iter_mut().enumerate();
        let names = all.filter(|(index, info)| *index == original || info.same_as == Some(original));
        names.for_each(|(_, info)| set(info));
        Ok(self)
    }

    /// Returns the index of a variable's first name.
    fn original(&self, name: &str) -> Result<usize, CandleError> {
        let unknown = || CandleError::UnknownName { place: self.place.clone(), name: name.to_owned() };
        let index = self.infos.iter().position(|info| info.name == name).ok_or_else(unknown)?;
        Ok(self.infos[index].same_as.unwrap_or(index))
    }

    /// Iterates over all names and their variables, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.infos.iter().map(|info| info.name.as_str()).zip(&self.vars)
    }

    /// Shares the memory of freed parameters with the other blocks of a model.
    pub(crate) fn with_spare(self, spare: BufferPool) -> Self {
        let own = self.infos.iter().filter(|info| info.same_as.is_none() && info.buffer.is_none());
        spare.serve(own.map(|info| info.len() * info.dtype.size()).sum());
        Self { spare, ..self }
    }

    /// Iterates over the trained parameters, each once, in reverse order: index, description and variable.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &ParamInfo, &Var)> {
        let all = self.infos.iter().zip(&self.vars).enumerate().rev();
        let trained = all.filter(|(_, (info, _))| info.trainable && info.same_as.is_none());
        trained.map(|(index, (info, var))| (index, info, var))
    }

    /// Fails if a backward pass from `root` has found a gradient of a variable that is neither listed here
    /// nor in `inputs`. That gradient would be lost.
    pub(crate) fn check_listed<'v>(
        &'v self,
        root: &Tensor,
        gradients: &GradStore,
        inputs: impl Iterator<Item = &'v Var>,
    ) -> Result<(), CandleError> {
        match stray_variable(root, gradients, self.vars.iter().chain(inputs)) {
            Some(shape) => Err(CandleError::UnlistedVariable { place: self.place.clone(), shape }),
            None => Ok(()),
        }
    }

    /// Fails if a backward pass has found no gradient for a trained parameter that must be used in every
    /// forward pass.
    pub(crate) fn check_found(&self, gradients: &GradStore) -> Result<(), CandleError> {
        let is_lost =
            |index: usize, var: &Var| !self.may_be_unused.contains(&index) && gradients.get(var).is_none();
        let lost = self.trained().filter(|&(index, _, var)| is_lost(index, var));
        let mut parameters: Vec<String> = lost.map(|(_, info, _)| info.name.clone()).collect();
        parameters.reverse();
        if parameters.is_empty() {
            return Ok(());
        }
        Err(CandleError::NoGradient { place: self.place.clone(), parameters })
    }

    /// Passes the gradient of each parameter that has one to `ready`, in reverse order of the parameters.
    pub(crate) fn report(&self, gradients: &mut GradStore, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        for (index, info, var) in self.trained() {
            let Some(gradient) = gradients.remove(var) else { continue };
            let gradient = gradient.contiguous().map_err(|source| self.failed(&info.name, source))?;
            slices::read(&info.name, &gradient, |values| ready(index, values))??;
        }
        Ok(())
    }

    fn failed(&self, name: &str, source: candle_core::Error) -> CandleError {
        CandleError::Candle { place: format!("{}, the gradient of {name}", self.place), source }
    }

    fn parameter(&self, index: usize) -> Result<(&ParamInfo, &Var), CandleError> {
        self.infos.get(index).zip(self.vars.get(index)).ok_or_else(|| CandleError::UnknownName {
            place: self.place.clone(),
            name: format!("number {index}"),
        })
    }
}

/// Returns the name of a block in errors. A block without a name is the whole model.
pub(crate) fn place(block: &str) -> String {
    if block.is_empty() { "the model".to_owned() } else { format!("block {block}") }
}

/// Returns the description of a variable: name, shape, type, and whether it is a buffer.
fn describe(name: String, var: &Var) -> Result<ParamInfo, CandleError> {
    let is_integer = integers::are_carried(var.dtype());
    let dtype = if is_integer { integers::CARRIED } else { slices::float_type(&name, var.dtype())? };
    if is_integer {
        integers::read(&name, var)?;
    } else {
        slices::read(&name, var, |_| ())?;
    }
    let is_buffer = is_integer || names_buffer(&name);
    let info = ParamInfo::new(name, var.dims(), dtype);
    Ok(if is_buffer { info.with_sync(BufferSync::default()) } else { info })
}

/// Returns `true` if a variable of this name is a buffer of candle's batch norm.
fn names_buffer(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
}

impl Params for Variables {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        let (info, var) = self.parameter(index)?;
        if integers::are_carried(var.dtype()) {
            f(Values::F64(&integers::read(&info.name, var)?));
            return Ok(());
        }
        Ok(slices::read(&info.name, var, f)?)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        let (info, var) = self.parameter(index)?;
        if integers::are_carried(var.dtype()) {
            let mut values = integers::read(&info.name, var)?;
            f(ValuesMut::F64(&mut values));
            return Ok(integers::write(&info.name, var, &values)?);
        }
        slices::write(&info.name, var, f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        let (info, var) = self.parameter(index)?;
        slices::materialise(info, var, values.values(), &self.spare)?;
        Ok(Materialised::Copied)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        let (info, var) = self.parameter(index)?;
        slices::fill(info, var, f, &self.spare)?;
        Ok(true)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        let (info, var) = self.parameter(index)?;
        Ok(slices::free(&info.name, var, &self.spare)?)
    }
}

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Variables({}, {} variables)", self.place, self.vars.len())
    }
}
