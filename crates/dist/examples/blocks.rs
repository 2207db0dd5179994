//! Data-parallel training of a candle model made of blocks: gradients are summed during the backward pass.
//!
//! `distctl run -n 2 -- target/release/examples/blocks`
#![allow(clippy::print_stdout, reason = "a program prints")]

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use dist::data::Sampler;
use dist::parallel::BoxError;
use dist::prelude::*;

/// Returns the inputs of a micro-batch as a tensor of one column. An example is a number x with the target
/// sin(x).
fn input(examples: &[usize]) -> candle_core::Result<Tensor> {
    let numbers: Vec<f32> = examples.iter().map(|&example| example as f32 / 100.0).collect();
    Tensor::from_vec(numbers, (examples.len(), 1), &Device::Cpu)
}

fn main() -> Result<(), BoxError> {
    let mut comm = Communicator::from_env()?;
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let first = candle_nn::linear(1, 64, vars.pp("first"))?;
    let second = candle_nn::linear(64, 64, vars.pp("second"))?;
    let head = candle_nn::linear(64, 1, vars.pp("head"))?;
    // A block is a module with its variables: those whose names begin with the block's name.
    let silu = |layer: candle_nn::Linear| move |x: &Tensor| layer.forward(x)?.apply(&Activation::Silu);
    let model = SequenceBuilder::new()
        .block(CandleBlock::from_var_map("first", &map, silu(first))?)
        .block(CandleBlock::from_var_map("second", &map, silu(second))?)
        .block(CandleBlock::from_var_map("head", &map, head)?)
        .build()?;

    let sampler = Sampler { len: 640, seed: 1, batch: 16, micro_batches: 4, ..Sampler::default() };
    sampler.check(&mut comm)?;
    // Every rank begins with the values of rank 0.
    let mut ddp = Ddp::new(comm, model, DdpOptions::default())?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() })?;
    for epoch in 0..10 {
        let mut losses = 0.0;
        for step in sampler.with_epoch(epoch).steps()? {
            // The closure is called for each micro-batch of this rank. The examples of a micro-batch do not depend on
            // the rank.
            let report = ddp.step(step.micro_batches(), |micro_batch| {
                let x = input(&step.examples(micro_batch)?)?;
                let target = x.sin()?;
                let loss = move |output: Tensor| {
                    Ok(loss_and_gradient(&output, |output| candle_nn::loss::mse(output, &target))?)
                };
                Ok((x, loss))
            })?;
            // `report.exposed` is the time that this rank waited for communication.
            losses += report.loss;
            ddp.update(&mut optimizer)?;
        }
        if ddp.rank() == 0 {
            println!("epoch {epoch}: loss {:.4}", losses / sampler.steps_per_epoch()? as f32);
        }
    }
    Ok(())
}
