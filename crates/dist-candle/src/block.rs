//! A candle module as a block.

use std::fmt;

use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::model::{BufferSync, BufferView, Materialised, Pass, Ready, Resharded, Saved};
use dist_parallel::{Block, BoxError, ParamInfo, Params, Values, ValuesMut};

use crate::activations::Given;
use crate::gradient::root;
use crate::spare::BufferPool;
use crate::variables::place;
use crate::{Activation, BlockModule, CandleError, Variables};

/// A candle module and its variables as one [`Block`] of a model.
///
/// The module is a [`BlockModule`]: a module of candle or a closure. It holds tensors that share the memory
/// of the variables, as candle's layers do, so a write to a parameter changes the module. A module of candle
/// receives [`Pass::training`] as the flag of its `forward_t`. A closure receives the [`Pass`] if it is
/// wrapped in a [`PassFn`](crate::PassFn).
///
/// Input and output are one tensor, a tuple or a list: the module's [`Activation`].
///
/// The block must list every variable that the module uses. If a backward pass finds a gradient for another
/// variable, that gradient would be lost, so it fails with [`CandleError::UnlistedVariable`]. To use a
/// variable without training it, list it and [freeze](Self::freeze) it, or use it detached.
///
/// If a backward pass finds no gradient for a trained parameter of the block, it fails with
/// [`CandleError::NoGradient`], because an operation may lack a backward pass. Declare parameters that are
/// not used in every forward pass with [`may_be_unused`](Self::may_be_unused).
///
/// A variable that the module itself changes in a forward pass, and that has no gradient, is a
/// [buffer](ParamInfo::buffer). Variables whose last name is `running_mean` or `running_var`, as in candle's
/// batch norm, are buffers automatically. Declare others with [`buffer`](Self::buffer). After every step all
/// ranks get the buffers of rank 0, unless [`sync_buffers`](Self::sync_buffers) sets another rule.
///
/// If two blocks share a variable, such as an embedding table that is also the head's weight, list it in
/// both. A [`SequenceBuilder`](crate::SequenceBuilder) detects that it is one parameter.
/// [`Sequence::new`](dist_parallel::Sequence::new) does not see inside its blocks: call
/// [`Sequence::tie`](dist_parallel::Sequence::tie), or every update changes the variable twice.
///
/// A sharding strategy can [free](Params::reshard) the memory of the block's parameters between uses. The
/// variables and all tensors that share their memory, also those in a graph that waits for its backward pass,
/// then have no values until the parameters are copied in again. The blocks of a
/// [`SequenceBuilder`](crate::SequenceBuilder) reuse each other's freed memory, at most as much as the
/// largest block has.
///
/// Inputs of an integer type, such as token numbers and masks, have no gradient.
pub struct CandleBlock<M> {
    name: String,
    variables: Variables,
    module: M,
    pass: Pass,
}

impl<M: Send> CandleBlock<M> {
    /// Creates the block called `name` with these variables. Their order must be the same on every rank. The
    /// parameters are named `name.variable`, or `variable` if `name` is empty.
    ///
    /// A variable that is listed twice is one parameter with two names.
    ///
    /// # Errors
    /// If two variables have the same name, or one has a type that dist does not know or is not a slice in
    /// this process's memory.
    pub fn new<N: AsRef<str>, A>(
        name: impl Into<String>,
        variables: impl IntoIterator<Item = (N, Var)>,
        module: M,
    ) -> Result<Self, CandleError>
    where
        M: BlockModule<A>,
    {
        let name = name.into();
        let prefix = prefix(&name);
        let named =
            variables.into_iter().map(|(variable, var)| (format!("{prefix}{}", variable.as_ref()), var));
        let variables = Variables::named(place(&name), named)?;
        Ok(Self { name, variables, module, pass: UNKNOWN })
    }

    /// Creates the block called `name` with all variables of `map` whose names begin with `name.`. They are
    /// sorted by name, because the order of a [`VarMap`] differs between processes.
    ///
    /// If `name` is empty, the block is a whole model: it has all variables of `map`, under unchanged names.
    /// dist and candle can then load each other's files of the model.
    ///
    /// # Errors
    /// If there are no such variables, or one has a type that dist does not know or is not a slice in this
    /// process's memory.
    pub fn from_var_map<A>(name: impl Into<String>, map: &VarMap, module: M) -> Result<Self, CandleError>
    where
        M: BlockModule<A>,
    {
        let name = name.into();
        let variables = Variables::with_prefix(place(&name), &prefix(&name), map)?;
        Ok(Self { name, variables, module, pass: UNKNOWN })
    }

    /// Declares one variable as a [buffer](ParamInfo::buffer), which the module itself changes in a forward
    /// pass. `sync` says how the ranks synchronise it after every step.
    ///
    /// # Errors
    /// If the block has no such variable.
    #[doc(alias = "register_buffer")]
    pub fn buffer(self, variable: &str, sync: BufferSync) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.buffer(variable, sync)?, ..self })
    }

    /// Sets how the ranks synchronise all buffers of the block after every step.
    #[must_use]
    pub fn sync_buffers(self, sync: BufferSync) -> Self {
        Self { variables: self.variables.sync_buffers(sync), ..self }
    }

    /// Declares one variable as a trained parameter although it has the name of a buffer, such as
    /// `running_mean`.
    ///
    /// # Errors
    /// If the block has no such variable, or it is of a type that cannot be trained.
    pub fn train(self, variable: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.train(variable)?, ..self })
    }

    /// Excludes one parameter from training. A buffer stays a buffer.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn freeze(self, parameter: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.freeze(parameter)?, ..self })
    }

    /// Declares that the module does not use one parameter in every forward pass, for example the weight of
    /// an expert that may get no tokens. A micro-batch without a gradient for it is then no error.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn may_be_unused(self, parameter: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.may_be_unused(parameter)?, ..self })
    }

    /// Returns the module.
    pub fn module(&self) -> &M {
        &self.module
    }

    fn failed(&self, doing: &str) -> impl Fn(candle_core::Error) -> CandleError {
        let place = format!("{}, {doing}", place(&self.name));
        move |source| CandleError::Candle { place: place.clone(), source }
    }

    fn run<A: Activation>(&self, input: A) -> Result<(A, SavedTensors), CandleError>
    where
        M: BlockModule<A>,
    {
        let failed = self.failed("forward");
        let given = Given::all(input).map_err(&failed)?;
        let output = self.module.forward(&given.activation()?, self.pass).map_err(&failed)?;
        let outputs = output.into_tensors();
        let detached = outputs.iter().map(Tensor::detach).collect();
        Ok((A::from_tensors(detached)?, SavedTensors { given, outputs }))
    }

    fn run_back<A: Activation>(
        &self,
        kept: SavedTensors,
        gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let failed = self.failed("backward");
        let SavedTensors { given, outputs } = kept;
        let root = root(self.seeds(outputs, gradient.into_tensors())?).map_err(&failed)?;
        let mut gradients = root.backward().map_err(&failed)?;
        self.variables.check_listed(&root, &gradients, given.vars())?;
        let of_input = given.take_gradients(&place(&self.name), &mut gradients)?;
        self.variables.check_found(&gradients)?;
        // Frees the graph, and with it every intermediate activation.
        drop(root);
        self.variables.report(&mut gradients, ready)?;
        Ok(of_input)
    }

    /// Returns the outputs of a float type, each with its gradient, which is converted to the type of the output.
    fn seeds(
        &self,
        outputs: Vec<Tensor>,
        gradients: Vec<Tensor>,
    ) -> Result<Vec<(Tensor, Tensor)>, CandleError> {
        let (expected, got) = (outputs.len(), gradients.len());
        if expected != got {
            return Err(CandleError::TensorCount { expected, got });
        }
        let look = |tensor: &Tensor| (tensor.shape().clone(), tensor.dtype());
        let floats = outputs.into_iter().zip(gradients).filter(|(output, _)| output.dtype().is_float());
        let check = |(output, gradient): (Tensor, Tensor)| {
            if output.shape() == gradient.shape() && gradient.dtype().is_float() {
                let gradient = gradient.to_dtype(output.dtype()).map_err(self.failed("backward"))?;
                return Ok((output, gradient));
            }
            let (output, gradient) = (look(&output), look(&gradient));
            Err(CandleError::OutputGradient { place: place(&self.name), output, gradient })
        };
        floats.map(check).collect()
    }
}

/// The data that a forward pass keeps for its backward pass: inputs, and outputs with their graph.
struct SavedTensors {
    given: Given,
    outputs: Vec<Tensor>,
}

/// The [`Pass`] of a forward pass that no trainer has announced.
const UNKNOWN: Pass = Pass { training: true, step: 0, micro_batch: 0 };

/// Returns the prefix of the names of a block's variables.
fn prefix(block: &str) -> String {
    if block.is_empty() { String::new() } else { format!("{block}.") }
}

impl<M: Send> Params for CandleBlock<M> {
    fn infos(&self) -> &[ParamInfo] {
        self.variables.infos()
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.pass = pass;
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        self.variables.read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.variables.write(index, f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        self.variables.materialise(index, values)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        self.variables.fill(index, f)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        self.variables.reshard(index)
    }
}

impl<M> CandleBlock<M> {
    /// Returns the block's variables.
    pub fn variables(&self) -> &Variables {
        &self.variables
    }

    /// Shares the memory of freed parameters with the other blocks of a model.
    pub(crate) fn with_spare(self, spare: BufferPool) -> Self {
        Self { variables: self.variables.with_spare(spare), ..self }
    }
}

impl<A: Activation, M: BlockModule<A> + Send> Block<A> for CandleBlock<M> {
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError> {
        let (output, kept) = self.run(input)?;
        Ok((output, Saved::new(kept)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        self.run_back(saved.take()?, output_gradient, ready)
    }
}

impl<M> fmt::Debug for CandleBlock<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CandleBlock({}, {} parameters)", self.name, self.variables.infos().len())
    }
}
