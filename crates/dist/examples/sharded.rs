//! Sharded training of a candle model: each rank keeps a part of the parameters, gradients and optimizer state.
//!
//! `distctl run -n 2 -- target/release/examples/sharded`
#![allow(clippy::print_stdout, reason = "a program prints")]

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use dist::data::Sampler;
use dist::parallel::BoxError;
use dist::prelude::*;

const WIDTH: usize = 64;
const LAYERS: usize = 4;

fn model() -> Result<Sequence<Tensor>, BoxError> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let mut model = SequenceBuilder::new();
    for layer in 0..LAYERS {
        let name = format!("layer{layer}");
        let linear = candle_nn::linear(WIDTH, WIDTH, vars.pp(&name))?;
        let forward = move |x: &Tensor| linear.forward(x)?.apply(&Activation::Silu)? + x;
        model = model.block(CandleBlock::from_var_map(name, &map, forward)?);
    }
    Ok(model.build()?)
}

/// Returns rows: row i of an input repeats the number i, and its target is the previous row.
fn rows(examples: &[usize], offset: f64) -> candle_core::Result<Tensor> {
    let numbers: Vec<f32> = examples.iter().map(|&example| example as f32 / 256.0).collect();
    let column = Tensor::from_vec(numbers, (examples.len(), 1), &Device::Cpu)?;
    column.broadcast_as((examples.len(), WIDTH))?.affine(1.0, offset)?.contiguous()
}

fn main() -> Result<(), BoxError> {
    let mut comm = Communicator::from_env()?;
    let sampler = Sampler { len: 256, seed: 3, batch: 8, micro_batches: 4, ..Sampler::default() };
    sampler.check(&mut comm)?;
    // The parameters of a block are gathered before it computes. During its computation those of the next
    // block are gathered.
    let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(1);
    let mut fsdp = Fsdp::new(comm, model()?, &options)?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.003, ..AdamWOptions::default() })?;
    let all: usize = fsdp.model().infos().iter().map(|info| info.shape.iter().product::<usize>()).sum();
    println!("rank {} keeps {} of {all} parameters", fsdp.rank(), fsdp.shard_len());
    for (number, step) in sampler.endless_steps()?.take(24).enumerate() {
        let report = fsdp.step(step.micro_batches(), |micro_batch| {
            let examples = step.examples(micro_batch)?;
            let target = rows(&examples, -0.1)?;
            let loss = move |output: Tensor| {
                Ok(loss_and_gradient(&output, |output| candle_nn::loss::mse(output, &target))?)
            };
            Ok((rows(&examples, 0.0)?, loss))
        })?;
        // This is the norm of the whole gradient. Every rank must call it.
        let norm = fsdp.clip_gradients(1.0)?;
        fsdp.update(&mut optimizer)?;
        if fsdp.rank() == 0 && number % 8 == 7 {
            println!("step {}: loss {:.4}, norm of the gradient {norm:.3}", number + 1, report.loss);
        }
    }
    Ok(())
}
