//! A candle module as a block.

use std::fmt;

use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use dist_parallel::model::{BufferSync, BufferView, Materialised, Pass, Ready, Resharded, Saved};
use dist_parallel::{Block, BoxError, ParamInfo, Params, Values, ValuesMut};

use crate::activations::Given;
use crate::gradient::root;
use crate::spare::Spare;
use crate::variables::place;
use crate::{Activation, BlockModule, CandleError, Variables};

/// A candle module and its variables as one [`Block`] of a model.
///
/// The module is a [`BlockModule`]: a module of candle or a closure. It holds tensors that share the memory of
/// the variables, as candle's layers do, so that a write to a parameter is a change of the module. A module of candle
/// trains in steps and not in evaluations, as [`Pass::training`] says; a closure receives the [`Pass`] if it is wrapped
/// in a [`PassFn`](crate::PassFn).
///
/// Input and output are one tensor, a tuple or a list, as the module's [`Activation`].
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
/// Its parameters can be [freed](Params::reshard) between their uses and loaded again, which copies them: the variables and
/// all tensors that share their memory, those in a graph that waits for its backward too, lose it and get it back. The
/// blocks of a [`SequenceBuilder`](crate::SequenceBuilder) leave the memory of one of them to each other.
///
/// Inputs may be of an integer type, as token numbers and masks are: such inputs have no gradient.
pub struct CandleBlock<M> {
    name: String,
    variables: Variables,
    module: M,
    pass: Pass,
}

impl<M: Send> CandleBlock<M> {
    /// Creates the block called `name` with these variables, in this order, which must be the same on every rank. The
    /// parameters are named `name.variable`; if `name` is empty, `variable`.
    ///
    /// A variable that comes twice is one parameter with two names.
    ///
    /// # Errors
    /// If two variables have the same name, or one has a type that dist does not know or is not a slice in this process's
    /// memory.
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

    /// Creates the block called `name` with all variables of `map` whose names begin with `name.`, sorted by name: a
    /// [`VarMap`] has an order of its own in every process.
    ///
    /// If `name` is empty, the block is a whole model: it has all variables of `map`, with the names that they have there.
    /// Files that candle has saved of the model can be loaded, and candle loads those that dist saves.
    ///
    /// # Errors
    /// If there are none, or one has a type that dist does not know or is not a slice in this process's memory.
    pub fn from_var_map<A>(name: impl Into<String>, map: &VarMap, module: M) -> Result<Self, CandleError>
    where
        M: BlockModule<A>,
    {
        let name = name.into();
        let variables = Variables::with_prefix(place(&name), &prefix(&name), map)?;
        Ok(Self { name, variables, module, pass: UNKNOWN })
    }

    /// The same block, with one variable as a [buffer](ParamInfo::buffer): the module changes it by itself. The ranks make
    /// this of their values after every step.
    ///
    /// # Errors
    /// If the block has no such variable.
    #[doc(alias = "register_buffer")]
    pub fn buffer(self, variable: &str, sync: BufferSync) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.buffer(variable, sync)?, ..self })
    }

    /// The same block, of whose buffers the ranks make this after every step.
    #[must_use]
    pub fn sync_buffers(self, sync: BufferSync) -> Self {
        Self { variables: self.variables.sync_buffers(sync), ..self }
    }

    /// The same block, with one variable as a parameter that is trained, although it has the name of a running mean.
    ///
    /// # Errors
    /// If the block has no such variable, or it is of a type that cannot be trained.
    pub fn train(self, variable: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.train(variable)?, ..self })
    }

    /// The same block, with one parameter that training leaves as it is. A buffer stays a buffer.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn freeze(self, parameter: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.freeze(parameter)?, ..self })
    }

    /// The same block, with one parameter that the module does not use in every forward, as one of an expert that gets no
    /// tokens. A micro-batch without a gradient for it is then no error.
    ///
    /// # Errors
    /// If the block has no such parameter.
    pub fn may_be_unused(self, parameter: &str) -> Result<Self, CandleError> {
        Ok(Self { variables: self.variables.may_be_unused(parameter)?, ..self })
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    fn failed(&self, doing: &str) -> impl Fn(candle_core::Error) -> CandleError {
        let place = format!("{}, {doing}", place(&self.name));
        move |source| CandleError::Candle { place: place.clone(), source }
    }

    fn run<A: Activation>(&self, input: A) -> Result<(A, Kept), CandleError>
    where
        M: BlockModule<A>,
    {
        let failed = self.failed("forward");
        let given = Given::all(input).map_err(&failed)?;
        let output = self.module.forward(&given.activation()?, self.pass).map_err(&failed)?;
        let outputs = output.into_tensors();
        let detached = outputs.iter().map(Tensor::detach).collect();
        Ok((A::from_tensors(detached)?, Kept { given, outputs }))
    }

    fn run_back<A: Activation>(
        &self,
        kept: Kept,
        gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let failed = self.failed("backward");
        let Kept { given, outputs } = kept;
        let root = root(self.seeds(outputs, gradient.into_tensors())?).map_err(&failed)?;
        let mut gradients = root.backward().map_err(&failed)?;
        self.variables.check_listed(&root, &gradients, given.vars())?;
        let of_input = given.take_gradients(&place(&self.name), &mut gradients)?;
        self.variables.check_found(&gradients)?;
        // The graph, and with it every activation in between.
        drop(root);
        self.variables.report(&mut gradients, ready)?;
        Ok(of_input)
    }

    /// Returns the outputs that have gradients, each with its gradient.
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
            if look(&output) == look(&gradient) {
                return Ok((output, gradient));
            }
            let (output, gradient) = (look(&output), look(&gradient));
            Err(CandleError::OutputGradient { place: place(&self.name), output, gradient })
        };
        floats.map(check).collect()
    }
}

/// The data that one forward keeps: its inputs, and the outputs with the graph that led to them.
struct Kept {
    given: Given,
    outputs: Vec<Tensor>,
}

/// The pass of forwards that no trainer has described.
const UNKNOWN: Pass = Pass { training: true, step: 0, micro_batch: 0 };

/// Returns the beginning of the names of a block's variables.
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
    /// The block's variables.
    pub fn variables(&self) -> &Variables {
        &self.variables
    }

    /// The same block, which leaves the memory of freed parameters to others of a model, and takes theirs.
    pub(crate) fn with_spare(self, spare: Spare) -> Self {
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
