//! The assignment of a data set's examples to the micro-batches of steps.
//!
//! A trainer calls its closure with the number of a micro-batch, among those of all ranks. The data of a micro-batch
//! must depend on this number and the step. It must not depend on the rank or on the number of calls of the closure.
//! Then no example is computed twice, and the result does not depend on the number of ranks.
//!
//! A [`Sampler`] does this for a data set with numbered examples. It is plain data and needs no communication. Its
//! result depends on its fields only. A training can therefore continue from a checkpoint at any step, on any number
//! of ranks.
//!
//! ```
//! use dist_collectives::Communicator;
//! use dist_parallel::data::Sampler;
//! # use dist_parallel::optim::{Sgd, SgdOptions};
//! # use dist_parallel::{Ddp, DdpOptions};
//! # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
//! # struct Number([ParamInfo; 1], [f32; 1]);
//! # impl Params for Number {
//! #     fn infos(&self) -> &[ParamInfo] { &self.0 }
//! #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
//! #         f(Values::F32(&self.1));
//! #         Ok(())
//! #     }
//! #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
//! #         f(ValuesMut::F32(&mut self.1));
//! #         Ok(())
//! #     }
//! # }
//! use dist_transport::sim;
//!
//! let outcome = sim::run(1, 2, |transport| {
//!     let mut comm = Communicator::new(transport);
//!     let data: Vec<f32> = (0..100).map(|i| i as f32).collect();
//!     let sampler = Sampler { len: data.len(), seed: 7, batch: 5, micro_batches: 4, ..Sampler::default() };
//!     sampler.check(&mut comm)?; // All ranks have the same sampler.
//!     # let model = Number([ParamInfo::new("mean", [1], FloatType::F32)], [0.0]);
//!     let mut ddp = Ddp::new(comm, model, DdpOptions::default())?;
//!     let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() })?;
//!     for epoch in 0..8 {
//!         for step in sampler.with_epoch(epoch).steps()? {
//!             // Right: the examples follow from the number of the micro-batch.
//!             ddp.step_with(step.micro_batches(), |model, micro_batch, ready| {
//!                 let examples = step.examples(micro_batch)?;
//!                 let error = |i: &usize| model.1[0] - data[*i];
//!                 let gradient = 2.0 * examples.iter().map(error).sum::<f32>() / examples.len() as f32;
//!                 ready(0, [gradient][..].into())?;
//!                 Ok(examples.iter().map(|i| error(i).powi(2)).sum::<f32>() / examples.len() as f32)
//!             })?;
//!             ddp.update(&mut sgd)?;
//!         }
//!     }
//!     Ok::<_, dist_parallel::Error>(ddp.model().1[0])
//! });
//! for mean in outcome.results {
//!     assert!((mean.unwrap() - 49.5).abs() < 5.0);
//! }
//! ```
//!
//! # The iterator in the closure
//!
//! This looks right, and is wrong on more than one rank:
//!
//! ```no_run
//! # use dist_parallel::{BoxError, Ddp, Params, Values};
//! # fn wrong(ddp: &mut Ddp<impl Params>, data: &[f32]) -> Result<(), Box<dyn std::error::Error>> {
//! # let gradient_of = |example: &f32| [*example];
//! let mut examples = data.iter();
//! for _ in 0..25 {
//!     // Wrong: every rank has an iterator of its own, and takes the same examples from it.
//!     ddp.step_with(4, |_, _, ready| {
//!         let example = examples.next().ok_or("no more data")?;
//!         ready(0, gradient_of(example)[..].into())?;
//!         Ok(0.0)
//!     })?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! On two ranks the closure is called twice per step on each of them, so that both compute examples 0 and 1 in the
//! first step. Half of the work is done twice, half of the data set is never used, and there is no error. If the data
//! come as an iterator, divide it into steps with [`StreamSteps`]:
//!
//! ```
//! use dist_parallel::data::{LastStep, StreamSteps};
//!
//! let lines = "one two three four five six seven".split(' ');
//! for step in StreamSteps::new(lines, 2, 2, LastStep::Keep)? {
//!     // In a training this is the closure of a step.
//!     for micro_batch in step.share(1, 2) {
//!         println!("rank 1 computes {:?}", step.examples(micro_batch)?);
//!     }
//! }
//! # Ok::<_, dist_parallel::Error>(())
//! ```
//!
//! # Continuing from a checkpoint
//!
//! A checkpoint has the number of completed steps. [`Sampler::after`] returns the sampler for the steps after them:
//!
//! ```
//! use dist_parallel::data::Sampler;
//!
//! let sampler = Sampler { len: 1000, seed: 7, batch: 8, micro_batches: 4, ..Sampler::default() };
//! let done = 40; // As `Checkpoints::load` returns it: all 32 steps of epoch 0, and 8 of epoch 1.
//! let mut steps = sampler.after(done)?.endless_steps()?;
//! let next = steps.next().unwrap();
//! assert_eq!((next.epoch(), next.examples(0)?), (1, sampler.with_epoch(1).steps()?.nth(8).unwrap().examples(0)?));
//! # Ok::<_, dist_parallel::Error>(())
//! ```
//!
//! If the following steps have another size, save `step.rest()`, which is a [`Sampler`] and implements serde's
//! traits. Change its `batch` or `micro_batches`: the rest of the epoch contains every unused example once.

mod permutation;
mod sampler;
mod stream;
#[cfg(test)]
mod tests;

pub use sampler::{LastStep, Sampler, SamplerStep, SamplerSteps};
pub use stream::{StreamStep, StreamSteps};
