//! The named variables of a candle model, as parameters that can be trained across processes.

use std::collections::{HashMap, HashSet};
use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::model::{BufferSync, BufferView, Materialised, Ready, Resharded};
use dist_parallel::{BoxError, ParamInfo, Params, Values, ValuesMut};

use crate::gradient::stray_variable;
use crate::spare::Spare;
use crate::{CandleError, integers, slices};

/// The named variables of a candle model: the parameters of a [`DataParallel`](crate::DataParallel).
///
/// A variable is one of three things:
///
/// | it is | which | what training does |
/// |---|---|---|
/// | a parameter | every variable of `f32`, `f64`, `f16` or `bf16` that nothing else is said of | averages its gradients over the ranks |
/// | frozen | what was [frozen](Self::freeze) | nothing |
/// | a [buffer](ParamInfo::buffer) | `running_mean` and `running_var`, which batch norm changes; all integers; what was [declared](Self::buffer) | gives all ranks the values of rank 0 after every step, or what [`BufferSync`] says |
///
/// Integers (`u8`, `u32`, `i16`, `i32`, `i64`) have no gradients. They travel as `f64`, which holds every integer up to 2⁵³
/// exactly, and are saved in checkpoints as that; [`BufferSync::Mean`] rounds their mean to the nearest integer.
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
    /// The text by which errors name the model: "block hidden", "the model".
    place: String,
    infos: Vec<ParamInfo>,
    vars: Vec<Var>,
    /// The parameters for which a backward pass need not find a gradient.
    may_be_unused: HashSet<usize>,
    spare: Spare,
}

impl Variables {
    /// Lists all variables of `map` with the names that they have there, sorted by name: a [`VarMap`] has an order of its own in
    /// every process.
    ///
    /// # Errors
    /// If there are none, or one has a type that dist does not know or is not a slice in this process's memory.
    pub fn from_var_map(map: &VarMap) -> Result<Self, CandleError> {
        Self::with_prefix(place(""), "", map)
    }

    /// Lists these variables, in this order, which must be the same on every rank. A variable that comes twice is one parameter with
    /// two names.
    ///
    /// # Errors
    /// If two variables have the same name, or one has a type that dist does not know or is not a slice in this process's
    /// memory.
    pub fn new<N: Into<String>>(variables: impl IntoIterator<Item = (N, Var)>) -> Result<Self, CandleError> {
        Self::named(place(""), variables.into_iter().map(|(name, var)| (name.into(), var)))
    }

    /// The variables of `map` whose names begin with `prefix`, with their whole names.
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

    /// These variables with their whole names.
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
            // The number of the variable's first name.
            let original = *first.entry(var.id()).or_insert(vars.len());
            let same_as = (original < vars.len()).then_some(original);
            let info = match same_as {
                // Whatever its further names are, a variable is what its first name says.
                Some(earlier) => ParamInfo { name, same_as, ..infos[earlier].clone() },
                None => describe(name, &var)?,
            };
            infos.push(info);
            vars.push(var);
        }
        Ok(Self { place, infos, vars, may_be_unused: HashSet::new(), spare: Spare::default() })
    }

    /// The same variables, with one as a [buffer](ParamInfo::buffer): the model changes it by itself in a forward. The ranks
    /// make this of their values after every step.
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "register_buffer")]
    pub fn buffer(self, name: &str, sync: BufferSync) -> Result<Self, CandleError> {
        self.set(name, |info| (info.trainable, info.buffer) = (false, Some(sync)))
    }

    /// The same variables, of whose buffers the ranks make this after every step.
    #[must_use]
    pub fn sync_buffers(mut self, sync: BufferSync) -> Self {
        let buffers = self.infos.iter_mut().filter_map(|info| info.buffer.as_mut());
        buffers.for_each(|own| *own = sync);
        self
    }

    /// The same variables, with one as a parameter that is trained, although it has the name of a running mean.
    ///
    /// # Errors
    /// If there is no such variable, or it is of a type that cannot be trained.
    pub fn train(self, name: &str) -> Result<Self, CandleError> {
        let dtype = self.vars[self.original(name)?].dtype();
        slices::float_type(name, dtype)?;
        self.set(name, |info| (info.trainable, info.buffer) = (true, None))
    }

    /// The same variables, with one parameter that training leaves as it is. A buffer stays a buffer.
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "requires_grad")]
    pub fn freeze(self, name: &str) -> Result<Self, CandleError> {
        self.set(name, |info| info.trainable = false)
    }

    /// The same variables, with one parameter that the model does not use in every forward, as one of an expert that gets no
    /// tokens. Without it, a backward pass that finds no gradient for a parameter fails with
    /// [`CandleError::NoGradient`].
    ///
    /// # Errors
    /// If there is no such variable.
    #[doc(alias = "find_unused_parameters")]
    pub fn may_be_unused(mut self, name: &str) -> Result<Self, CandleError> {
        self.may_be_unused.insert(self.original(name)?);
        Ok(self)
    }

    /// The same variables, none of which need be used in every forward.
    #[must_use]
    pub fn all_may_be_unused(mut self) -> Self {
        self.may_be_unused = (0..self.vars.len()).collect();
        self
    }

    /// The same variables, with something else set for all names of one of them.
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

    /// Returns every name with its variable, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.infos.iter().map(|info| info.name.as_str()).zip(&self.vars)
    }

    /// The same variables, which leave the memory of freed parameters to others of a model, and take theirs.
    pub(crate) fn with_spare(self, spare: Spare) -> Self {
        let own = self.infos.iter().filter(|info| info.same_as.is_none() && info.buffer.is_none());
        spare.serve(own.map(|info| info.len() * info.dtype.size()).sum());
        Self { spare, ..self }
    }

    /// The parameters that are trained, each once, the last first: index, description and variable.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &ParamInfo, &Var)> {
        let all = self.infos.iter().zip(&self.vars).enumerate().rev();
        let trained = all.filter(|(_, (info, _))| info.trainable && info.same_as.is_none());
        trained.map(|(index, (info, var))| (index, info, var))
    }

    /// Makes sure that a backward pass from `root` has found no gradient of a variable that is neither among these nor
    /// among `inputs`: that gradient would be lost.
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

    /// Makes sure that a backward pass has found the gradients of all parameters that are used in every forward.
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

    /// Gives the gradient of each parameter that has one to `ready`, the last first.
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

/// Returns the text by which errors name a block. A block without a name is the whole model.
pub(crate) fn place(block: &str) -> String {
    if block.is_empty() { "the model".to_owned() } else { format!("block {block}") }
}

/// Describes a variable by its name, shape and type.
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

/// Returns `true` if candle's batch norm changes the variable of this name by itself.
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
