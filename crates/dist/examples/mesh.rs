//! Eight ranks as a mesh of 2×2×2: two replicas of a pipeline of two stages, and each stage is sharded over two
//! ranks.
//!
//! `distctl run -n 8 -- target/release/examples/mesh`
#![allow(clippy::print_stdout, reason = "a program prints")]

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use dist::candle::Tensors;
use dist::data::Sampler;
use dist::parallel::BoxError;
use dist::parallel::pipeline::{ScheduleKind, split_into_stages};
use dist::prelude::*;

const BLOCKS: usize = 4;
/// The micro-batches of each pipeline. There are four pipelines: ranks that shard a stage compute different
/// micro-batches.
const MICRO_BATCHES: usize = 2;

fn model() -> Result<Sequence<Tensor>, BoxError> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let mut model = SequenceBuilder::new();
    for block in 0..BLOCKS {
        let name = format!("block{block}");
        let linear = candle_nn::linear(16, 16, vars.pp(&name))?;
        let forward = move |x: &Tensor| linear.forward(x)?.apply(&Activation::Silu)? + x;
        model = model.block(CandleBlock::from_var_map(name, &map, forward)?);
    }
    Ok(model.build()?)
}

/// Returns the examples: each is a row that repeats a number.
fn rows(examples: &[usize]) -> candle_core::Result<Tensor> {
    let numbers: Vec<f32> = examples.iter().map(|&example| example as f32 / 64.0).collect();
    Tensor::from_vec(numbers, (examples.len(), 1), &Device::Cpu)?
        .broadcast_as((examples.len(), 16))?
        .contiguous()
}

fn main() -> Result<(), BoxError> {
    let mut comm = Communicator::from_env()?;
    let sampler =
        Sampler { len: 64, seed: 1, batch: 4, micro_batches: 4 * MICRO_BATCHES, ..Sampler::default() };
    sampler.check(&mut comm)?;
    // The last axis varies fastest: ranks 0 and 1 shard a stage, ranks 0 and 2 are a pipeline, ranks 0 and 4 are
    // replicas.
    let mut mesh = Mesh::new(comm, [("data", 2), ("pipeline", 2), ("shard", 2)])?;
    let (rank, coordinates) = (mesh.rank(), mesh.coordinates());
    let sharded = mesh.slice(["pipeline", "shard"])?.into_communicator();
    let mut along = |axis: &str| mesh.take(axis).map(Group::into_communicator);
    // A stage's parameters are gathered before it computes, at most one stage's at a time.
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, MICRO_BATCHES)?.with_gathers(1);
    let stages = split_into_stages(BLOCKS, schedule.stages())?;
    let mut pipeline = Pipeline::new(along("pipeline")?, model()?, schedule, &stages, Tensors)?;
    pipeline.reduce_over(along("data")?)?;
    pipeline.shard_over(sharded)?;
    println!("rank {rank} is at {coordinates:?} and computes micro-batches {:?}", pipeline.share());

    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() })?;
    for (number, step) in sampler.endless_steps()?.take(8).enumerate() {
        let report = pipeline.step(
            |micro_batch| Ok(rows(&step.examples(micro_batch)?)?),
            |micro_batch, output| {
                let target = rows(&step.examples(micro_batch)?)?.affine(-1.0, 1.0)?;
                Ok(loss_and_gradient(&output, |output| candle_nn::loss::mse(output, &target))?)
            },
        )?;
        pipeline.update(&mut optimizer)?;
        if rank == 0 && number % 4 == 3 {
            println!("step {}: loss {:.4}", number + 1, report.loss);
        }
    }
    Ok(())
}
