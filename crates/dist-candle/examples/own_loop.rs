//! A training loop of your own on any number of processes, with candle's layers, clipping, checkpoints and an
//! evaluation.
//!
//! `distctl run -n 2 -- cargo run --release -p dist-candle --example own_loop -- [STEPS] [DIRECTORY]`
#![allow(clippy::print_stdout, reason = "the example prints its progress")]

use std::error::Error;
use std::num::NonZeroUsize;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, ParamsAdamW, VarBuilder, VarMap};
use dist_candle::{AdamW, DataParallel};
use dist_collectives::ReduceOp;
use dist_parallel::Communicator;
use dist_parallel::checkpoint::Checkpoints;

/// An example of a model, with two inputs and a residual connection.
struct Model {
    left: Linear,
    right: Linear,
    head: Linear,
}

impl Model {
    fn new(vars: &VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            left: candle_nn::linear(1, 32, vars.pp("left"))?,
            right: candle_nn::linear(1, 32, vars.pp("right"))?,
            head: candle_nn::linear(32, 1, vars.pp("head"))?,
        })
    }

    fn loss(&self, (x, y): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
        let hidden = (self.left.forward(x)?.silu()? + self.right.forward(y)?.silu()?)?;
        let output = (self.head.forward(&hidden)? + x)?;
        candle_nn::loss::mse(&output, &(x.sin()? + y.cos()?)?)
    }
}

/// Returns a micro-batch. It depends only on its number, not on the rank, so any number of ranks trains on the same
/// data.
fn micro_batch(number: u64) -> candle_core::Result<(Tensor, Tensor)> {
    let values = |step: f64| {
        let indices = Tensor::arange(0f32, 16.0, &Device::Cpu)?;
        indices.affine(step, number as f64 * 7.3)?.sin()?.affine(2.0, 0.0)?.unsqueeze(1)
    };
    Ok((values(0.9)?, values(2.3)?))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let steps: u64 = arguments.next().map_or(Ok(200), |steps| steps.parse())?;
    let directory = arguments.next();

    let varmap = VarMap::new();
    let model = Model::new(&VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    let mut optimizer = AdamW::new(varmap.all_vars(), ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })?;
    let mut dp = DataParallel::new(Communicator::from_env()?, &varmap)?;
    let keep = NonZeroUsize::new(2).ok_or("two checkpoints are kept")?;
    let mut checkpoints = directory.map(|directory| Checkpoints::at(directory).keep_last(keep));
    let loaded =
        checkpoints.as_mut().map(|checkpoints| dp.load(checkpoints, Some(&mut optimizer))).transpose()?;
    for step in loaded.flatten().unwrap_or(0)..steps {
        // Each step has 4 micro-batches, which are assigned to the ranks.
        let mut grads =
            dp.backward_each(4, |number| Ok(model.loss(&micro_batch(4 * step + number as u64)?)?))?;
        dp.clip_gradients(&mut grads, 1.0)?;
        optimizer.step(&grads)?;
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| (step + 1) % 100 == 0) {
            dp.save(checkpoints, Some(&mut optimizer), step + 1)?;
        }
    }
    // Each rank evaluates its share, and the sums are added.
    let own =
        dp.share(32).map(|number| model.loss(&micro_batch(1_000_000 + number as u64)?)?.to_scalar::<f32>());
    let mut sum = [own.sum::<candle_core::Result<f32>>()?];
    dp.communicator_mut().all_reduce(&mut sum, ReduceOp::Sum)?;
    if dp.rank() == 0 {
        println!("loss {:.5} after {steps} steps on {} ranks", sum[0] / 32.0, dp.world_size());
    }
    Ok(())
}
