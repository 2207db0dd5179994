//! A sequence of blocks as one block.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::block_range::{BlockRange, SplitBackward, weight_gradients};
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

    /// Returns a block, with the range of its parameters.
    pub(crate) fn block(&mut self, index: usize) -> (&mut dyn Block<A>, Range<usize>) {
        (&mut *self.blocks[index], self.starts[index]..self.starts[index + 1])
    }

    /// Returns the values that a forward has saved, one per block.
    fn saved_by_all(&self, saved: Saved) -> Result<Vec<Saved>> {
        let saved: Vec<Saved> = saved.take()?;
        if saved.len() == self.blocks.len() { Ok(saved) } else { Err(Error::ForeignSaved) }
    }

    /// Returns all blocks.
    fn all(&mut self) -> BlockRange<'_, Self, A> {
        let range = 0..self.blocks.len();
        BlockRange { model: self, block: Self::block, range }
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
        let mut saved = Vec::with_capacity(self.blocks.len());
        let output = self.all().forward(input, |kept| saved.push(kept))?;
        Ok((output, Saved::new(saved)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let saved = self.saved_by_all(saved)?;
        self.all().backward(saved, output_gradient, ready)
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        let saved = self.saved_by_all(saved)?;
        let (gradient, halves) = self.all().input_gradient(saved, output_gradient, ready)?;
        Ok((gradient, Saved::new(halves)))
    }

    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        let halves: SplitBackward = saved.take()?;
        if halves.iter().any(|(index, _)| *index >= self.blocks.len()) {
            return Err(Error::ForeignSaved.into());
        }
        weight_gradients(self, Self::block, halves, ready)
    }
}

impl<A> fmt::Debug for Sequence<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequence({} blocks, {} parameters)", self.blocks.len(), self.infos.len())
    }
}
