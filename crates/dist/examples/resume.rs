//! Trains up to a step and saves. When started again, it continues from there, on any number of ranks:
//!
//! ```console
//! $ distctl run -n 4 -- target/release/examples/resume checkpoints 15
//! $ distctl run -n 2 -- target/release/examples/resume checkpoints 30
//! ```
//!
//! The parameters then have the bits of an uninterrupted training.
#![allow(clippy::print_stdout, reason = "a program prints")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use dist::data::Sampler;
use dist::parallel::{BoxError, Values};
use dist::prelude::*;

fn model() -> Result<Sequence<Tensor>, BoxError> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let head = candle_nn::linear(8, 1, vars.pp("head"))?;
    for var in map.all_vars() {
        // candle's initial weights are random. These are the same in every run.
        let weights = Tensor::arange(0f32, var.elem_count() as f32, &Device::Cpu)?;
        var.set(&weights.affine(2.0, 0.0)?.sin()?.reshape(var.shape())?)?;
    }
    Ok(SequenceBuilder::new().block(CandleBlock::from_var_map("head", &map, head)?).build()?)
}

/// Rows x, x², …, each divided by a power, where x is the number of an example.
fn powers(examples: &[usize]) -> candle_core::Result<Tensor> {
    let x = |example: &usize| *example as f32 / 100.0;
    let rows = examples.iter().flat_map(|example| (1..=8).map(move |power| x(example).powi(power)));
    Tensor::from_vec(rows.collect::<Vec<_>>(), (examples.len(), 8), &Device::Cpu)
}

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let (Some(directory), Some(until)) = (arguments.next(), arguments.next()) else {
        return Err("usage: resume DIRECTORY STEPS".into());
    };
    let until: u64 = until.parse()?;
    let mut comm = Communicator::from_env()?;
    let sampler = Sampler { len: 100, seed: 5, batch: 4, micro_batches: 4, ..Sampler::default() };
    sampler.check(&mut comm)?;
    let mut ddp = Ddp::new(comm, model()?, DdpOptions::default())?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() })?;
    let mut checkpoints = Checkpoints::at(directory);
    // The newest checkpoint, or none at the first start.
    let done = checkpoints.load(&mut ddp, Some(&mut optimizer))?.unwrap_or(0);
    // An epoch has 7 steps, so a training can stop in the middle of an epoch.
    for (_, step) in (done..until).zip(sampler.after(done)?.endless_steps()?) {
        ddp.step(step.micro_batches(), |micro_batch| {
            let x = powers(&step.examples(micro_batch)?)?;
            let target = x.narrow(1, 0, 1)?.affine(3.0, 0.0)?.cos()?;
            let loss = move |output: Tensor| {
                Ok(loss_and_gradient(&output, |output| candle_nn::loss::mse(output, &target))?)
            };
            Ok((x, loss))
        })?;
        ddp.update(&mut optimizer)?;
    }
    checkpoints.save(&mut ddp, Some(&optimizer), until)?;
    if ddp.rank() == 0 {
        let mut bits = Vec::new();
        ddp.for_each_parameter(|_, values| {
            if let Values::F32(values) = values {
                bits.extend(values.iter().map(|value| value.to_bits()));
            }
        })?;
        println!("from step {done} to {until}: {bits:x?}");
    }
    Ok(())
}
