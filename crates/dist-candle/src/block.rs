//! A candle module as a block.

use std::collections::{HashMap, HashSet};
use std::fmt;

use candle_core::{Module, Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::{
    Block, BoxError, BufferSync, Lent, Loaded, ParamInfo, Params, Ready, Saved, Unloaded, Values, ValuesMut,
};

use crate::gradient::stray_variable;
use crate::spare::Spare;
use crate::{CandleError, backward_from, slices};

/// A candle module and its variables as one [`Block`] of a model.
///
/// The module is anything with a [`Module::forward`], a closure too. It holds tensors that share the memory of
/// the variables, as candle's layers do, so that a write to a parameter is a change of the module.
///
/// Every variable that the module uses must be among the block's own: a backward pass that finds a gradient for
/// another fails with [`CandleError::UnlistedVariable`], for that gradient would be lost. What is not to be
/// trained is listed and [frozen](Self::freeze), or used detached. And a backward pass that finds no gradient for one of
/// the block's own that is trained fails with [`CandleError::NoGradient`], unless it was said that the parameter
/// [may be unused](Self::may_be_unused): an operation on the way may have no backward pass.
///
/// A variable that the module changes by itself in a forward, and that no gradient reaches, is a
/// [buffer](ParamInfo::buffer). Variables whose last name is `running_mean` or `running_var`, as those of candle's batch norm
/// are, are buffers without further words; others are [declared](Self::buffer). Ranks synchronise buffers after every step,
/// by default by giving all of them the values of rank 0, or as [said](Self::sync_buffers).
///
/// A variable of two blocks, such as the table of token vectors that is also the head's weight, is listed in
/// both. A [`SequenceBuilder`](crate::SequenceBuilder) sees that it is one parameter;
/// [`Sequence::new`](dist_parallel::Sequence::new) does not see inside its blocks and must be told with
/// [`Sequence::tie`](dist_parallel::Sequence::tie), or every update changes the variable twice.
///
/// Its parameters can be [freed](Params::unload) between their uses and loaded again, which copies them: the variables and
/// all tensors that share their memory, those in a graph that waits for its backward too, lose it and get it back. The
/// blocks of a [`SequenceBuilder`](crate::SequenceBuilder) leave the memory of one of them to each other.
///
/// Its input may be of an integer type, as token numbers are: such an input has no gradient.
pub struct CandleBlock<M> {
    name: String,
    infos: Vec<ParamInfo>,
    vars: Vec<Var>,
    /// The parameters for which a backward pass need not find a gradient.
    may_be_unused: HashSet<usize>,
    module: M,
    spare: Spare,
}

impl<M: Module + Send> CandleBlock<M> {
    /// The block called `name` with these variables, in this order, which must be the same on every rank. The
    /// parameters are named `name.variable`.
    ///
    /// A variable that comes twice is one parameter with two names.
    ///
    /// # Errors
    /// If two variables have the same name, or one has a type that cannot be trained.
    pub fn new<N: AsRef<str>>(
        name: impl Into<String>,
        variables: impl IntoIterator<Item = (N, Var)>,
        module: M,
    ) -> Result<Self, CandleError> {
        let name = name.into();
        let named =
            variables.into_iter().map(|(variable, var)| (format!("{name}.{}", variable.as_ref()), var));
        let (infos, vars) = describe(&name, named.collect())?;
        Ok(Self { name, infos, vars, may_be_unused: HashSet::new(), module, spare: Spare::default() })
    }

    /// The block called `name` with all variables of `map` whose names begin with `name.`, sorted by name: a
    /// [`VarMap`] has an order of its own in every process.
    ///
    /// # Errors
    /// If there are none, or one has a type that cannot be trained.
    pub fn from_var_map(name: impl Into<String>, map: &VarMap, module: M) -> Result<Self, CandleError> {
        let name = name.into();
        let prefix = format!("{name}.");
        let mut named: Vec<(String, Var)> = {
            let all = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let own = all.iter().filter(|(variable, _)| variable.starts_with(&prefix));
            own.map(|(variable, var)| (variable.clone(), var.clone())).collect()
        };
        if named.is_empty() {
            return Err(CandleError::NoVariables { block: name });
        }
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let (infos, vars) = describe(&name, named)?;
        Ok(Self { name, infos, vars, may_be_unused: HashSet::new(), module, spare: Spare::default() })
    }

    /// The same block, with one variable as a [buffer](ParamInfo::buffer): the module changes it by itself. The ranks make
    /// this of their values after every step.
    ///
    /// # Errors
    /// If the block has no such variable.
    #[doc(alias = "register_buffer")]
    pub fn buffer(self, variable: &str, sync: BufferSync) -> Result<Self, CandleError> {
        self.set(variable, |info| (info.trainable, info.buffer) = (false, Some(sync)))
    }

    /// The same block, of whose buffers the ranks make this after every step.
    #[must_use]
    pub fn sync_buffers(mut self, sync: BufferSync) -> Self {
        let buffers = self.infos.iter_mut().filter_map(|info| info.buffer.as_mut());
        buffers.for_each(|own| *own = sync);
        self
    }

    /// The same block, with one variable as a parameter that is trained, although it has the name of a running mean.
    ///
    /// # Errors
    /// If the block has no such variable.
    pub fn train(self, variable: &str) -> Result<Self, CandleError> {
        self.set(variable, |info| (info.trainable, info.buffer) = (true, None))
    }

    /// The same block, with one parameter that training leaves as it is. A buffer stays a buffer.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn freeze(self, parameter: &str) -> Result<Self, CandleError> {
        self.set(parameter, |info| info.trainable = false)
    }

    /// The same block, with something else set for all names of a variable.
    fn set(mut self, variable: &str, set: impl Fn(&mut ParamInfo)) -> Result<Self, CandleError> {
        let original = self.original(variable)?;
        let all = self.infos.iter_mut().enumerate();
        let names = all.filter(|(index, info)| *index == original || info.same_as == Some(original));
        names.for_each(|(_, info)| set(info));
        Ok(self)
    }

    /// The same block, with one parameter that the module does not use in every forward, as one of an expert that gets no
    /// tokens: a micro-batch without a gradient for it is none that has lost it.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn may_be_unused(mut self, parameter: &str) -> Result<Self, CandleError> {
        self.may_be_unused.insert(self.original(parameter)?);
        Ok(self)
    }

    /// The index of the first of the names that a parameter has.
    fn original(&self, parameter: &str) -> Result<usize, CandleError> {
        let unknown = || CandleError::UnknownName { block: self.name.clone(), name: parameter.to_owned() };
        let index = self.infos.iter().position(|info| info.name == parameter).ok_or_else(unknown)?;
        Ok(self.infos[index].same_as.unwrap_or(index))
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    fn failed(&self, doing: &str) -> impl Fn(candle_core::Error) -> CandleError {
        let place = format!("block {}, {doing}", self.name);
        move |source| CandleError::Candle { place: place.clone(), source }
    }

    fn run(&self, input: Tensor) -> Result<(Tensor, Kept), CandleError> {
        let failed = self.failed("forward");
        let (output, input) = if input.dtype().is_float() {
            let input = Var::from_tensor(&input.detach()).map_err(&failed)?;
            (self.module.forward(&input).map_err(&failed)?, Some(input))
        } else {
            (self.module.forward(&input).map_err(&failed)?, None)
        };
        Ok((output.detach(), Kept { input, output }))
    }

    fn run_back(
        &self,
        kept: Kept,
        gradient: Tensor,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Tensor>, BoxError> {
        let failed = self.failed("backward");
        let Kept { input, output } = kept;
        if output.shape() != gradient.shape() || output.dtype() != gradient.dtype() {
            let look = |tensor: &Tensor| (tensor.shape().clone(), tensor.dtype());
            let (output, gradient) = (look(&output), look(&gradient));
            return Err(CandleError::OutputGradient { block: self.name.clone(), output, gradient }.into());
        }
        let mut gradients = backward_from(&output, gradient).map_err(&failed)?;
        let own = self.vars.iter().chain(&input);
        if let Some(stray) = stray_variable(&output, &gradients, own) {
            return Err(CandleError::UnlistedVariable { block: self.name.clone(), shape: stray }.into());
        }
        if input.as_ref().is_some_and(|input| gradients.get(input).is_none()) {
            return Err(CandleError::NoInputGradient { block: self.name.clone() }.into());
        }
        let own = || self.infos.iter().zip(&self.vars).enumerate().rev();
        let own = || own().filter(|(_, (info, _))| info.trainable && info.same_as.is_none());
        let is_lost =
            |index: usize, var: &Var| !self.may_be_unused.contains(&index) && gradients.get(var).is_none();
        if let Some((_, (info, _))) = own().find(|&(index, (_, var))| is_lost(index, var)) {
            let (block, parameter) = (self.name.clone(), info.name.clone());
            return Err(CandleError::NoGradient { block, parameter }.into());
        }
        // The graph, and with it every activation in between.
        drop(output);
        for (index, (info, var)) in own() {
            if let Some(gradient) = gradients.remove(var) {
                let gradient = gradient.contiguous().map_err(&failed)?;
                slices::read(&info.name, &gradient, |values| ready(index, values))??;
            }
        }
        Ok(input.and_then(|input| gradients.remove(&input)))
    }
}

/// What one forward keeps: the input if it has a gradient, and the output with the graph that led to it.
struct Kept {
    input: Option<Var>,
    output: Tensor,
}

fn describe(block: &str, named: Vec<(String, Var)>) -> Result<(Vec<ParamInfo>, Vec<Var>), CandleError> {
    let mut infos: Vec<ParamInfo> = Vec::with_capacity(named.len());
    let mut vars: Vec<Var> = Vec::with_capacity(named.len());
    let (mut names, mut first) = (HashSet::new(), HashMap::new());
    for (name, var) in named {
        if !names.insert(name.clone()) {
            return Err(CandleError::DuplicateName { block: block.to_owned(), name });
        }
        let dtype = slices::float_type(&name, var.dtype())?;
        slices::read(&name, &var, |_| ())?;
        // The number of the variable's first name.
        let original = *first.entry(var.id()).or_insert(vars.len());
        let same_as = (original < vars.len()).then_some(original);
        // Whatever its further names are, a variable is what its first name says.
        let is_buffer =
            same_as.map_or_else(|| names_buffer(&name), |earlier| infos[earlier].buffer.is_some());
        let info = ParamInfo { same_as, ..ParamInfo::new(name, var.dims(), dtype) };
        infos.push(if is_buffer { info.with_sync(BufferSync::default()) } else { info });
        vars.push(var);
    }
    Ok((infos, vars))
}

/// Whether a variable of this name is one that candle's batch norm changes by itself.
fn names_buffer(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
}

impl<M: Module + Send> Params for CandleBlock<M> {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        let (info, var) = self.parameter(index)?;
        Ok(slices::read(&info.name, var, f)?)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        let (info, var) = self.parameter(index)?;
        slices::write(&info.name, var, f)
    }

    fn load(&mut self, index: usize, values: Lent) -> Result<Loaded, BoxError> {
        let (info, var) = self.parameter(index)?;
        slices::load(info, var, values.values(), &self.spare)?;
        Ok(Loaded::Copied)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        let (info, var) = self.parameter(index)?;
        slices::fill(info, var, f, &self.spare)?;
        Ok(true)
    }

    fn unload(&mut self, index: usize) -> Result<Unloaded, BoxError> {
        let (info, var) = self.parameter(index)?;
        Ok(slices::free(&info.name, var, &self.spare)?)
    }
}

impl<M> CandleBlock<M> {
    /// The parameters' names and variables.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.infos.iter().map(|info| info.name.as_str()).zip(&self.vars)
    }

    /// The same block, which leaves the memory of freed parameters to others of a model, and takes theirs.
    pub(crate) fn with_spare(self, spare: Spare) -> Self {
        let own = self.infos.iter().filter(|info| info.same_as.is_none() && info.buffer.is_none());
        spare.serve(own.map(|info| info.len() * info.dtype.size()).sum());
        Self { spare, ..self }
    }

    fn parameter(&self, index: usize) -> Result<(&ParamInfo, &Var), CandleError> {
        self.infos.get(index).zip(self.vars.get(index)).ok_or_else(|| CandleError::UnknownName {
            block: self.name.clone(),
            name: format!("number {index}"),
        })
    }
}

impl<M: Module + Send> Block<Tensor> for CandleBlock<M> {
    fn forward(&mut self, input: Tensor) -> Result<(Tensor, Saved), BoxError> {
        let (output, kept) = self.run(input)?;
        Ok((output, Saved::new(kept)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Tensor,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Tensor>, BoxError> {
        self.run_back(saved.take()?, output_gradient, ready)
    }
}

impl<M> fmt::Debug for CandleBlock<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CandleBlock({}, {} parameters)", self.name, self.infos.len())
    }
}
