//! A candle model as a pipeline: each rank has one stage, and micro-batches pass through the stages.
//!
//! `distctl run -n 4 -- target/release/examples/pipeline`
#![allow(clippy::print_stdout, reason = "a program prints")]

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use dist::candle::Tensors;
use dist::data::Sampler;
use dist::parallel::BoxError;
use dist::parallel::pipeline::{ScheduleKind, split_into_stages};
use dist::prelude::*;

const BLOCKS: usize = 4;
const MICRO_BATCHES: usize = 8;

/// Returns the inputs of a micro-batch as a tensor of one column. An example is a number x with the target
/// sin(x).
fn input(examples: &[usize]) -> candle_core::Result<Tensor> {
    let numbers: Vec<f32> = examples.iter().map(|&example| example as f32 / 100.0).collect();
    Tensor::from_vec(numbers, (examples.len(), 1), &Device::Cpu)
}

fn model() -> Result<Sequence<Tensor>, BoxError> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let mut model = SequenceBuilder::new();
    for block in 0..BLOCKS {
        let name = format!("block{block}");
        let (from, to) = (if block == 0 { 1 } else { 32 }, if block + 1 == BLOCKS { 1 } else { 32 });
        let linear = candle_nn::linear(from, to, vars.pp(&name))?;
        let forward = move |x: &Tensor| {
            let output = linear.forward(x)?;
            if to == 1 { Ok(output) } else { output.apply(&Activation::Silu) }
        };
        model = model.block(CandleBlock::from_var_map(name, &map, forward)?);
    }
    Ok(model.build()?)
}

fn main() -> Result<(), BoxError> {
    let mut comm = Communicator::from_env()?;
    let sampler =
        Sampler { len: 640, seed: 1, batch: 16, micro_batches: MICRO_BATCHES, ..Sampler::default() };
    sampler.check(&mut comm)?;
    // A schedule is a list of actions for each rank. It is proven when it is created.
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(comm.world_size(), MICRO_BATCHES)?;
    let stages = split_into_stages(BLOCKS, schedule.stages())?;
    let mut pipeline = Pipeline::new(comm, model()?, schedule, &stages, Tensors)?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() })?;
    for (number, step) in sampler.endless_steps()?.take(40).enumerate() {
        let report = pipeline.step(
            // On the rank of the first stage.
            |micro_batch| Ok(input(&step.examples(micro_batch)?)?),
            // On the rank of the last stage. Both use the same examples, because these depend only on the number.
            |micro_batch, output| {
                let target = input(&step.examples(micro_batch)?)?.sin()?;
                Ok(loss_and_gradient(&output, |output| candle_nn::loss::mse(output, &target))?)
            },
        )?;
        pipeline.update(&mut optimizer)?;
        if pipeline.communicator().rank() == 0 && number % 10 == 9 {
            println!(
                "step {}: loss {:.4}, at most {} activations kept",
                number + 1,
                report.loss,
                pipeline.kept()
            );
        }
    }
    Ok(())
}
