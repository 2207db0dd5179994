//! Shuffles a data set with numbered examples, and assigns it to the micro-batches of steps.

use std::ops::Range;

use dist_collectives::Communicator;
use serde::{Deserialize, Serialize};

use super::permutation::{Permutation, keyed};
use crate::agreement::{self, setting};
use crate::fsdp::share;
use crate::{Error, Result};

/// Shuffles the examples of a data set in each epoch, and assigns them to the micro-batches of steps.
///
/// Micro-batch m of step s has the `batch` examples of the epoch's permutation from place (s · `micro_batches` + m) ·
/// `batch` on. The permutation depends on `len`, `seed` and `epoch` only. It is the same on any number of ranks and
/// in every version of this crate. It has random access and needs no memory.
///
/// All ranks must have the same sampler: [`check`](Self::check) compares them. [The module](super) has an example.
///
/// # Shuffling
///
/// The permutation is a swap-or-not shuffle of 64 rounds with the output function of SplitMix64, keyed by `seed` and
/// `epoch`.
#[doc(alias = "DistributedSampler")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sampler {
    /// The number of examples in the data set.
    pub len: usize,
    /// Chooses the permutations. 0 by default.
    pub seed: u64,
    /// The epoch, which has a permutation of its own.
    #[doc(alias = "set_epoch")]
    pub epoch: u64,
    /// The number of examples of this epoch that earlier steps have used. 0, unless a training resumes in the middle
    /// of an epoch.
    pub taken: usize,
    /// `true` to shuffle the examples, which is the default. If not, their order is that of the data set.
    pub shuffle: bool,
    /// The number of examples in a micro-batch. 1 by default.
    pub batch: usize,
    /// The number of micro-batches in a step, on all ranks together. 1 by default.
    pub micro_batches: usize,
    /// The treatment of the last examples of an epoch, if they are fewer than a step needs.
    pub last: LastStep,
}

/// The treatment of the last examples of an epoch, or of a stream, if they are fewer than a step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum LastStep {
    /// The last step is filled with the first examples of the epoch, or of the stream's last step, repeated as often
    /// as needed. All steps have one size, and some examples count twice.
    #[default]
    Pad,
    /// They are dropped. All steps have one size. If the data set is smaller than one step, there is no step.
    #[doc(alias = "drop_last")]
    Drop,
    /// They form the last step. It has fewer micro-batches, and the last of them can have fewer examples. Every
    /// example counts once if micro-batches have [weights](crate::Loss).
    Keep,
}

impl Default for Sampler {
    fn default() -> Self {
        Self {
            len: 0,
            seed: 0,
            epoch: 0,
            taken: 0,
            shuffle: true,
            batch: 1,
            micro_batches: 1,
            last: LastStep::default(),
        }
    }
}

impl Sampler {
    /// Returns this sampler at the beginning of an epoch.
    #[must_use]
    pub const fn with_epoch(self, epoch: u64) -> Self {
        Self { epoch, taken: 0, ..self }
    }

    /// Returns the steps of this epoch, from the first unused example on.
    ///
    /// # Errors
    /// [`Error::Setting`] if `batch` or `micro_batches` is 0, or their product overflows.
    pub fn steps(self) -> Result<SamplerSteps> {
        step_len(self.batch, self.micro_batches)?;
        Ok(SamplerSteps { rest: self, last_epoch: self.epoch })
    }

    /// Returns the steps of this epoch, from the first unused example on, and of all epochs after it. There are none
    /// if no epoch has any.
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps).
    pub fn endless_steps(self) -> Result<SamplerSteps> {
        Ok(SamplerSteps { last_epoch: u64::MAX, ..self.steps()? })
    }

    /// Returns the number of steps of a whole epoch.
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps).
    pub fn steps_per_epoch(self) -> Result<usize> {
        let step_len = step_len(self.batch, self.micro_batches)?;
        Ok(match self.last {
            LastStep::Drop => self.len / step_len,
            LastStep::Pad | LastStep::Keep => self.len.div_ceil(step_len),
        })
    }

    /// Returns the sampler after `steps` steps of [`endless_steps`](Self::endless_steps). If epochs have no steps, it
    /// is this sampler.
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps).
    pub fn after(self, steps: u64) -> Result<Self> {
        let step_len = step_len(self.batch, self.micro_batches)?;
        let per_epoch = self.steps_per_epoch()? as u64;
        if per_epoch == 0 {
            return Ok(self);
        }
        let rest = Self { len: self.len.saturating_sub(self.taken), ..self }.steps_per_epoch()? as u64;
        let (epochs, steps, taken) = match steps.checked_sub(rest) {
            None | Some(0) => (0, steps, self.taken),
            Some(beyond) => (1 + (beyond - 1) / per_epoch, (beyond - 1) % per_epoch + 1, 0),
        };
        let taken_now = usize::try_from(steps).map_or(self.len, |steps| steps.saturating_mul(step_len));
        let taken = taken.saturating_add(taken_now).min(self.len);
        Ok(Self { epoch: self.epoch.saturating_add(epochs), taken, ..self })
    }

    /// Returns an error unless all ranks have the same sampler. Every rank calls this.
    ///
    /// # Errors
    /// [`Error::OptionsDiffer`] on every rank, with the first rank and field that differ from rank 0's, for example
    /// if a host has another copy of the data set. Communication fails.
    pub fn check(&self, comm: &mut Communicator) -> Result<()> {
        let Self { len, seed, epoch, taken, shuffle, batch, micro_batches, last } = self;
        let settings = [
            setting("the sampler's len", len),
            setting("the sampler's seed", seed),
            setting("the sampler's epoch", epoch),
            setting("the sampler's taken", taken),
            setting("the sampler's shuffle", shuffle),
            setting("the sampler's batch", batch),
            setting("the sampler's micro_batches", micro_batches),
            setting("the sampler's last", last),
        ];
        agreement::check(comm, &[], &settings)
    }

    /// Returns the example at a place of the epoch's order. Places after the end wrap around.
    pub(super) fn example_at(self, place: usize) -> usize {
        let place = place % self.len;
        if !self.shuffle {
            return place;
        }
        let permutation = Permutation::new(self.len as u64, self.seed, self.epoch);
        usize::try_from(permutation.at(place as u64)).expect("it is below the length, a usize")
    }
}

/// Returns the number of examples of a step.
pub(super) fn step_len(batch: usize, micro_batches: usize) -> Result<usize> {
    let wrong = |name, value: usize| Err(Error::Setting { name, value: value as f64 });
    match (batch, micro_batches) {
        (0, _) => wrong("the number of examples of a micro-batch", 0),
        (_, 0) => wrong("the number of micro-batches of a step", 0),
        _ => batch
            .checked_mul(micro_batches)
            .map_or_else(|| wrong("the number of micro-batches of a step", micro_batches), Ok),
    }
}

/// The steps of one epoch, or of all epochs from one on.
#[derive(Debug, Clone)]
pub struct SamplerSteps {
    rest: Sampler,
    last_epoch: u64,
}

impl Iterator for SamplerSteps {
    type Item = SamplerStep;

    fn next(&mut self) -> Option<SamplerStep> {
        let sampler = self.rest;
        let left = sampler.len.saturating_sub(sampler.taken);
        let whole = sampler.batch * sampler.micro_batches;
        let len = match sampler.last {
            LastStep::Drop if left < whole => 0,
            LastStep::Keep => left.min(whole),
            LastStep::Pad if left == 0 => 0,
            LastStep::Pad | LastStep::Drop => whole,
        };
        if len > 0 {
            let step = SamplerStep { sampler, len };
            self.rest = step.rest();
            return Some(step);
        }
        // An epoch without any step is followed by more such epochs.
        let is_last = sampler.epoch >= self.last_epoch || sampler.taken == 0;
        if is_last {
            return None;
        }
        self.rest = sampler.with_epoch(sampler.epoch + 1);
        self.next()
    }
}

/// One step: the examples of its micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SamplerStep {
    /// The sampler after all earlier steps.
    sampler: Sampler,
    /// The number of examples in it.
    len: usize,
}

impl SamplerStep {
    /// Returns the epoch.
    pub const fn epoch(&self) -> u64 {
        self.sampler.epoch
    }

    /// Returns the number of micro-batches of this step on all ranks together, which is the argument of a trainer's
    /// `step`.
    pub const fn micro_batches(&self) -> usize {
        self.len.div_ceil(self.sampler.batch)
    }

    /// Returns the micro-batches of a rank: a contiguous share, as equal as possible. Trainers assign micro-batches
    /// themselves. Use this in a loop without a trainer.
    pub fn share(&self, rank: usize, world_size: usize) -> Range<usize> {
        share_of(self.micro_batches(), rank, world_size)
    }

    /// Returns the numbers of the examples of a micro-batch, equal on every rank.
    ///
    /// # Errors
    /// [`Error::NoSuchMicroBatch`] if the step has no such micro-batch, for example because a trainer was called with
    /// another number than [`micro_batches`](Self::micro_batches).
    pub fn examples(&self, micro_batch: usize) -> Result<Vec<usize>> {
        let places = places(self.len, self.sampler.batch, micro_batch)?;
        // The places of a filled step can exceed the largest number.
        let place = |place: usize| (self.sampler.taken as u128 + place as u128) % self.sampler.len as u128;
        let example = |at| {
            self.sampler.example_at(usize::try_from(place(at)).expect("it is below the length, a usize"))
        };
        Ok(places.map(example).collect())
    }

    /// Returns a seed for other random decisions in a micro-batch, such as augmentation and dropout. It depends on
    /// the sampler's seed, the epoch, the step and the micro-batch, not on the rank.
    pub fn seed(&self, micro_batch: usize) -> u64 {
        let Sampler { seed, epoch, taken, .. } = self.sampler;
        keyed([seed, epoch, taken as u64, micro_batch as u64])
    }

    /// Returns the sampler after this step. Save it if the training continues with steps of another size.
    pub fn rest(&self) -> Sampler {
        let taken = self.sampler.taken.saturating_add(self.len).min(self.sampler.len);
        Sampler { taken, ..self.sampler }
    }
}

/// Returns the micro-batches of a rank, or none if there is no such rank.
pub(super) fn share_of(micro_batches: usize, rank: usize, world_size: usize) -> Range<usize> {
    if rank < world_size { share(micro_batches, world_size, rank) } else { 0..0 }
}

/// Returns the places of a micro-batch's examples in a step of `len` examples.
pub(super) fn places(len: usize, batch: usize, micro_batch: usize) -> Result<Range<usize>> {
    let count = len.div_ceil(batch);
    if micro_batch >= count {
        return Err(Error::NoSuchMicroBatch { index: micro_batch, count });
    }
    let start = micro_batch * batch;
    Ok(start..len.min(start + batch))
}
