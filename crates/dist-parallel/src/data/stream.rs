//! Cuts a stream of examples into the micro-batches of steps.

use std::ops::Range;

use super::LastStep;
use super::sampler::{places, share_of, step_len};
use crate::Result;

/// Cuts an iterator into steps, whose examples are dealt to micro-batches as those of a [`Sampler`](super::Sampler) are. Every
/// rank reads the same stream and computes some of it; a step is read at a time.
///
/// Because every rank reads all of the stream, its items should be cheap, such as lines or names of files, and be prepared in the
/// closure that computes the micro-batch. If every rank has a stream of its own instead, ranks call
/// [`join`](crate::Ddp::join) with what they have.
///
/// To go on from a checkpoint, skip the steps that are done: `StreamSteps::new(…)?.skip(done)`.
///
/// [The module](super) has an example.
#[derive(Debug, Clone)]
pub struct StreamSteps<I> {
    stream: I,
    batch: usize,
    step_len: usize,
    last: LastStep,
    ended: bool,
}

impl<I: Iterator> StreamSteps<I> {
    /// Cuts `stream` into steps of `micro_batches` micro-batches, on all ranks together, of `batch` examples each.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) if `batch` or `micro_batches` is 0, or a step has too many examples to be counted.
    pub fn new(
        stream: impl IntoIterator<IntoIter = I>,
        batch: usize,
        micro_batches: usize,
        last: LastStep,
    ) -> Result<Self> {
        let step_len = step_len(batch, micro_batches)?;
        Ok(Self { stream: stream.into_iter(), batch, step_len, last, ended: false })
    }
}

impl<I: Iterator<Item: Clone>> Iterator for StreamSteps<I> {
    type Item = StreamStep<I::Item>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let mut examples: Vec<_> = self.stream.by_ref().take(self.step_len).collect();
        self.ended = examples.len() < self.step_len;
        if self.ended && self.last == LastStep::Drop || examples.is_empty() {
            return None;
        }
        if self.last == LastStep::Pad {
            let given = examples.len();
            (given..self.step_len).for_each(|at| examples.push(examples[at - given].clone()));
        }
        Some(StreamStep { examples, batch: self.batch })
    }
}

/// One step of a stream: which examples each of its micro-batches has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamStep<T> {
    examples: Vec<T>,
    batch: usize,
}

impl<T> StreamStep<T> {
    /// Returns how many micro-batches this step has, on all ranks together: what a trainer's `step` is called with.
    pub const fn micro_batches(&self) -> usize {
        self.examples.len().div_ceil(self.batch)
    }

    /// Returns the micro-batches that a rank computes: contiguous, and as equal shares as possible. Trainers deal micro-batches
    /// themselves; this is for a loop that has none.
    pub fn share(&self, rank: usize, world_size: usize) -> Range<usize> {
        share_of(self.micro_batches(), rank, world_size)
    }

    /// Returns the examples of a micro-batch.
    ///
    /// # Errors
    /// [`Error::NoSuchMicroBatch`](crate::Error::NoSuchMicroBatch) if the step has no such micro-batch.
    pub fn examples(&self, micro_batch: usize) -> Result<&[T]> {
        Ok(&self.examples[places(self.examples.len(), self.batch, micro_batch)?])
    }
}
