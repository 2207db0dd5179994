//! A builder of sequences of candle blocks that detects shared variables.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use candle_core::{Tensor, TensorId};
use dist_parallel::{Block, Sequence};

use crate::spare::BufferPool;
use crate::{Activation, BlockModule, CandleBlock};

/// A builder of a [`Sequence`] of [`CandleBlock`]s in which a variable is one parameter even if several
/// blocks list it.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor, Var};
/// use candle_nn::{Embedding, Linear};
/// use dist_candle::{CandleBlock, SequenceBuilder};
/// use dist_parallel::Params;
///
/// let table = Var::rand(-1f32, 1.0, (256, 16), &Device::Cpu)?;
/// let embed = Embedding::new(table.as_tensor().clone(), 16);
/// let head = Linear::new(table.as_tensor().clone(), None);
/// let model = SequenceBuilder::new()
///     .block(CandleBlock::new("embed", [("weight", table.clone())], embed)?)
///     .block(CandleBlock::new("head", [("weight", table)], head)?)
///     .build()?;
/// assert_eq!(model.infos()[1].same_as, Some(0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub struct SequenceBuilder<A = Tensor> {
    blocks: Vec<Box<dyn Block<A>>>,
    /// The first name of every variable.
    first_names: HashMap<TensorId, String>,
    /// Pairs of a variable's further name and its first name.
    ties: Vec<(String, String)>,
    spare: BufferPool,
}

impl<A: Activation> SequenceBuilder<A> {
    /// Creates a builder without blocks.
    pub fn new() -> Self {
        Self {
            blocks: Vec::new(),
            first_names: HashMap::new(),
            ties: Vec::new(),
            spare: BufferPool::default(),
        }
    }

    /// Appends `block`.
    pub fn block<M: BlockModule<A> + Send + 'static>(mut self, block: CandleBlock<M>) -> Self {
        for (name, var) in block.variables().iter() {
            match self.first_names.entry(var.id()) {
                Entry::Occupied(first) => self.ties.push((name.to_owned(), first.get().clone())),
                Entry::Vacant(first) => _ = first.insert(name.to_owned()),
            }
        }
        self.blocks.push(Box::new(block.with_spare(self.spare.clone())));
        self
    }

    /// Appends a block that is no [`CandleBlock`], such as a [`SyncBatchNorm`](crate::SyncBatchNorm). Its
    /// parameters are not tied to others.
    pub fn plain_block(mut self, block: impl Block<A> + 'static) -> Self {
        self.blocks.push(Box::new(block));
        self
    }

    /// Builds the sequence and ties each variable's further names to its first name.
    ///
    /// # Errors
    /// If two parameters have the same name, or if one block trains a variable that another has frozen.
    pub fn build(self) -> dist_parallel::Result<Sequence<A>> {
        let mut sequence = Sequence::new(self.blocks)?;
        // A block may already have tied two of its own names. The last ties are made first, so that no
        // parameter is tied to one that is itself tied.
        for (name, first) in self.ties.iter().rev() {
            sequence.tie(name, first)?;
        }
        Ok(sequence)
    }
}

impl<A: Activation> Default for SequenceBuilder<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A> fmt::Debug for SequenceBuilder<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SequenceBuilder({} blocks, {} variables)", self.blocks.len(), self.first_names.len())
    }
}
