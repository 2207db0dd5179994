//! Divides a stream of examples into the micro-batches of steps.

use std::ops::Range;

use super::LastStep;
use super::sampler::{places, share_of, step_len};
use crate::Result;

/// Divides an iterator into steps, whose examples are assigned to micro-batches as by a [`Sampler`](super::Sampler).
/// Every rank reads the same stream, one step at a time, and computes a part of it.
///
/// Because every rank reads the whole stream, its items should be cheap, such as lines or file names. Prepare the
/// data in the closure that computes the micro-batch. If every rank has its own stream instead, call
/// [`join`](crate::Ddp::join).
///
/// To continue from a checkpoint, skip the finished steps: `StreamSteps::new(…)?.skip(done)`.
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
    /// Divides `stream` into steps of `micro_batches` micro-batches, on all ranks together, of `batch` examples each.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) if `batch` or `micro_batches` is 0, or their product overflows.
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

/// One step of a stream: the examples of its micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamStep<T> {
    examples: Vec<T>,
    batch: usize,
}

impl<T> StreamStep<T> {
    /// Returns the number of micro-batches of this step on all ranks together, which is the argument of a trainer's
    /// `step`.
    pub const fn micro_batches(&self) -> usize {
        self.examples.len().div_ceil(self.batch)
    }

    /// Returns the micro-batches of a rank: a contiguous share, as equal as possible. Trainers assign micro-batches
    /// themselves. Use this in a loop without a trainer.
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
