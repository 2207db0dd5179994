//! A sequence of blocks as one block.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cast::CastBlock;
use crate::pipeline::Activations;
use crate::{
    Block, BoxError, BufferView, Error, FloatType, Materialised, ParamInfo, Params, Pass, Ready, Resharded,
    Result, Saved, Values, ValuesMut, params,
};

/// Blocks one after another. The parameters are those of the first block, then those of the second, and so on.
pub struct Sequence<A> {
    blocks: Vec<Box<dyn Block<A>>>,
    infos: Vec<ParamInfo>,
    /// For each block, the index of its first parameter, and the number of parameters at the end.
    starts: Vec<usize>,
    /// The index of the parameter with each name.
    numbers: HashMap<String, usize>,
    /// Parameters that others are tied to.
    originals: HashSet<usize>,
}

impl<A> Sequence<A> {
    /// Returns the sequence of these blocks.
    ///
    /// # Errors
    /// Two parameters have the same name, or a block has an invalid tie.
    pub fn new(blocks: Vec<Box<dyn Block<A>>>) -> Result<Self> {
        let mut infos: Vec<ParamInfo> = Vec::new();
        let mut starts = vec![0];
        for block in &blocks {
            let start = infos.len();
            infos.extend(
                block
                    .infos()
                    .iter()
                    .cloned()
                    .map(|info| ParamInfo { same_as: info.same_as.map(|index| start + index), ..info }),
            );
            starts.push(infos.len());
        }
        params::validate(&infos)?;
        let numbers = infos.iter().enumerate().map(|(number, info)| (info.name.clone(), number)).collect();
        let originals = infos.iter().filter_map(|info| info.same_as).collect();
        Ok(Self { blocks, infos, starts, numbers, originals })
    }

    /// Ties parameter `name` of a later block to parameter `same_as` of an earlier one: they share memory.
    ///
    /// # Errors
    /// There are no such parameters, or they cannot be tied.
    pub fn tie(&mut self, name: &str, same_as: &str) -> Result<()> {
        let (later, earlier) = (self.index(name)?, self.index(same_as)?);
        let before = self.infos[later].same_as.replace(earlier);
        // Parameters that are tied to the later one would be tied to a tied parameter.
        let checked = match self.originals.contains(&later) {
            true => params::validate(&self.infos),
            false => params::validate_tie(&self.infos, later),
        };
        checked.inspect_err(|_| self.infos[later].same_as = before)?;
        self.originals.insert(earlier);
        Ok(())
    }

    /// Returns the sequence with activations of a type: the output of each block, and the gradient of each block's input,
    /// are rounded to it. A block gets its input and the gradient of its output in the type of its parameters, if all of
    /// them have one. The loss gets the model's output in type `dtype`. `codec` converts activations, as between the
    /// stages of a pipeline.
    ///
    /// Activations that have a type of their own, such as `Vec<f32>`, keep it: their values are rounded. Integers, such as
    /// token numbers, stay as they are.
    ///
    /// ```
    /// use dist_parallel::pipeline::PlainVectors;
    /// use dist_parallel::{Block, FloatType, Sequence};
    ///
    /// let model = Sequence::<Vec<f32>>::new(Vec::new())?.with_activations(FloatType::Bf16, PlainVectors);
    /// # Ok::<_, dist_parallel::Error>(())
    /// ```
    #[doc(alias = "cast_forward_inputs")]
    #[doc(alias = "output_dtype")]
    #[must_use]
    pub fn with_activations(self, dtype: FloatType, codec: impl Activations<A> + 'static) -> Self
    where
        A: 'static,
    {
        let codec: Arc<dyn Activations<A>> = Arc::new(codec);
        let cast =
            |block| -> Box<dyn Block<A>> { Box::new(CastBlock::new(block, Arc::clone(&codec), dtype)) };
        Self { blocks: self.blocks.into_iter().map(cast).collect(), ..self }
    }

    /// Returns the blocks, in order.
    pub fn blocks(&self) -> &[Box<dyn Block<A>>] {
        &self.blocks
    }

    /// Returns for each block the index of its first parameter, and the number of parameters at the end.
    pub(crate) fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Runs the forward of some blocks. Returns the output and the activations that each block saves, in order.
    pub(crate) fn forward_through(
        &mut self,
        blocks: Range<usize>,
        input: A,
    ) -> Result<(A, Vec<Saved>), BoxError> {
        let mut saved = Vec::with_capacity(blocks.len());
        let output = self.forward_with(blocks, input, |kept| saved.push(kept))?;
        Ok((output, saved))
    }

    /// Runs the forward of some blocks. `keep` receives the activations that each block saves, before the next block
    /// begins.
    pub(crate) fn forward_with(
        &mut self,
        blocks: Range<usize>,
        input: A,
        mut keep: impl FnMut(Saved),
    ) -> Result<A, BoxError> {
        let mut activation = input;
        for block in &mut self.blocks[blocks] {
            let (output, kept) = block.forward(activation)?;
            keep(kept);
            activation = output;
        }
        Ok(activation)
    }

    /// Runs the backward of some blocks.
    pub(crate) fn backward_through(
        &mut self,
        blocks: Range<usize>,
        saved: Vec<Saved>,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let mut gradient = Some(output_gradient);
        for ((block, index), kept) in self.blocks[blocks.clone()].iter_mut().zip(blocks).zip(saved).rev() {
            // If a block's input has no gradient, earlier blocks have none either.
            let Some(output_gradient) = gradient else { break };
            gradient = block.backward(kept, output_gradient, &mut of_block(&self.starts, index, ready))?;
        }
        Ok(gradient)
    }

    /// Computes the gradients of the inputs of some blocks. Returns the data for the weight gradients too.
    pub(crate) fn input_gradient_through(
        &mut self,
        blocks: Range<usize>,
        saved: Vec<Saved>,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        let mut halves = SplitBackward::with_capacity(saved.len());
        let mut gradient = Some(output_gradient);
        for ((block, index), kept) in self.blocks[blocks.clone()].iter_mut().zip(blocks).zip(saved).rev() {
            let Some(output_gradient) = gradient else { break };
            let mut ready = of_block(&self.starts, index, ready);
            let (of_input, left) = block.input_gradient(kept, output_gradient, &mut ready)?;
            halves.push((index, left));
            gradient = of_input;
        }
        Ok((gradient, Saved::new(halves)))
    }

    /// Returns the blocks, without the ties between them.
    pub(crate) fn into_blocks(self) -> Vec<Box<dyn Block<A>>> {
        self.blocks
    }

    pub(crate) fn blocks_mut(&mut self) -> &mut [Box<dyn Block<A>>] {
        &mut self.blocks
    }

    fn index(&self, name: &str) -> Result<usize> {
        self.numbers.get(name).copied().ok_or_else(|| Error::UnknownName { name: name.to_owned() })
    }

    /// Returns the block of parameter `index`, and the index there.
    fn locate(&self, index: usize) -> Result<(usize, usize), BoxError> {
        if index >= self.infos.len() {
            return Err(format!("the model has {} parameters and no number {index}", self.infos.len()).into());
        }
        let block = self.starts.partition_point(|&start| start <= index) - 1;
        Ok((block, index - self.starts[block]))
    }
}

impl<A> Params for Sequence<A> {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.blocks.iter_mut().for_each(|block| block.begin_forward(pass));
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        let (block, index) = self.locate(index)?;
        self.blocks[block].read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        let (block, index) = self.locate(index)?;
        self.blocks[block].write(index, f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        let (block, index) = self.locate(index)?;
        self.blocks[block].materialise(index, values)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        let (block, index) = self.locate(index)?;
        self.blocks[block].fill(index, f)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        let (block, index) = self.locate(index)?;
        self.blocks[block].reshard(index)
    }
}

impl<A> Block<A> for Sequence<A> {
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError> {
        let (output, saved) = self.forward_through(0..self.blocks.len(), input)?;
        Ok((output, Saved::new(saved)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let saved: Vec<Saved> = saved.take()?;
        if saved.len() != self.blocks.len() {
            return Err(Error::ForeignSaved.into());
        }
        self.backward_through(0..self.blocks.len(), saved, output_gradient, ready)
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        let saved: Vec<Saved> = saved.take()?;
        if saved.len() != self.blocks.len() {
            return Err(Error::ForeignSaved.into());
        }
        self.input_gradient_through(0..self.blocks.len(), saved, output_gradient, ready)
    }

    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        for (index, left) in saved.take::<SplitBackward>()? {
            let block = self.blocks.get_mut(index).ok_or(Error::ForeignSaved)?;
            block.weight_gradient(left, &mut of_block(&self.starts, index, ready))?;
        }
        Ok(())
    }
}

/// Returns a callback for the gradients of one block, which checks that the block has the parameter.
fn of_block(
    starts: &[usize],
    block: usize,
    ready: &mut Ready<'_>,
) -> impl FnMut(usize, Values<'_>) -> Result<(), BoxError> {
    let (start, count) = (starts[block], starts[block + 1] - starts[block]);
    move |index, values| {
        if index >= count {
            return Err(Error::NoSuchParameter { index, count }.into());
        }
        ready(start + index, values)
    }
}

/// For each block that has computed its input gradient, last to first: its number, and the data for its weight
/// gradients.
type SplitBackward = Vec<(usize, Saved)>;

impl<A> fmt::Debug for Sequence<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequence({} blocks, {} parameters)", self.blocks.len(), self.infos.len())
    }
}
