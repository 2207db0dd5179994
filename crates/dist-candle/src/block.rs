//! A candle module as a block.

use std::collections::HashSet;
use std::fmt;

use candle_core::{Module, Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::{
    Block, BoxError, Lent, Loaded, ParamInfo, Params, Ready, Saved, Unloaded, Values, ValuesMut,
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
/// trained is listed and [frozen](Self::freeze), or used detached.
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
        Ok(Self { name, infos, vars, module, spare: Spare::default() })
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
        Ok(Self { name, infos, vars, module, spare: Spare::default() })
    }

    /// The same block, with one parameter that training leaves as it is.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn freeze(mut self, parameter: &str) -> Result<Self, CandleError> {
        let Some(index) = self.infos.iter().position(|info| info.name == parameter) else {
            return Err(CandleError::UnknownName { block: self.name, name: parameter.to_owned() });
        };
        let original = self.infos[index].same_as.unwrap_or(index);
        for (index, info) in self.infos.iter_mut().enumerate() {
            info.trainable &= index != original && info.same_as != Some(original);
        }
        Ok(self)
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
        // The graph, and with it every activation in between.
        drop(output);
        for (index, (info, var)) in self.infos.iter().zip(&self.vars).enumerate().rev() {
            if !info.trainable || info.same_as.is_some() {
                continue;
            }
            if let Some(gradient) = gradients.remove(var) {
                let gradient = gradient.contiguous().map_err(&failed)?;
                slices::read(&info.name, &gradient, |values| ready(index, values))??;
            }
        }
        let Some(input) = input else { return Ok(None) };
        match gradients.remove(&input) {
            Some(gradient) => Ok(Some(gradient)),
            None => Err(CandleError::NoInputGradient { block: self.name.clone() }.into()),
        }
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
    let mut names = HashSet::new();
    for (name, var) in named {
        if !names.insert(name.clone()) {
            return Err(CandleError::DuplicateName { block: block.to_owned(), name });
        }
        let dtype = slices::float_type(&name, var.dtype())?;
        slices::read(&name, &var, |_| ())?;
        let same_as = vars.iter().position(|earlier| earlier.id() == var.id());
        infos.push(ParamInfo { same_as, ..ParamInfo::new(name, var.dims(), dtype) });
        vars.push(var);
    }
    Ok((infos, vars))
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
        let own = self.infos.iter().filter(|info| info.same_as.is_none());
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
