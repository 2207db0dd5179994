//! Times a training step with and without an exchange of gradients:
//! `distctl run -n 2 -- step_time [COMPRESSION [BUCKET_KIB]]`.
//!
//! Every rank computes one micro-batch per step and takes a step of AdamW. Side by side, all ranks do so without a word to
//! each other; under DDP they train one model. Steps of both kinds take turns, and a step lasts as long as on the
//! slowest rank. The models have the sizes of a common comparison: a perceptron of 4 layers and a transformer of 6, with
//! about ten million parameters each.

#[path = "../train_lm/model.rs"]
#[expect(dead_code, reason = "this program trains on numbers, not on text")]
mod model;
#[path = "../train_lm/random.rs"]
#[expect(dead_code, reason = "this program trains on numbers, not on text")]
mod random;

use std::io::Write;
use std::time::Duration;

use candle_core::{Device, Tensor, Var};
use candle_nn::{Linear, Module};
use dist_candle::{CandleBlock, SequenceBuilder, loss_and_gradient};
use dist_collectives::{Communicator, ReduceOp};
use dist_parallel::{
    AdamW, AdamWOptions, Block, BoxError, BucketBytes, Compression, Ddp, DdpOptions, Optimizer, Params,
    Sequence, Values,
};

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let compression: Compression = arguments.next().unwrap_or_else(|| "none".to_owned()).parse()?;
    let options = match arguments.next() {
        None => DdpOptions::default(),
        Some(kib) => {
            let bytes = kib.parse::<usize>()? << 10;
            let bucket_bytes = BucketBytes { first_max: bytes, other_max: bytes };
            DdpOptions::default().with_bucket_bytes(bucket_bytes)
        }
    };
    let mut comm = Communicator::from_env()?;
    for name in ["mlp-10M", "transformer-10M"] {
        let (alone, together, exposed) = times(&mut comm, name, options, compression)?;
        if comm.rank() == 0 {
            writeln!(
                std::io::stdout().lock(),
                "{name} {compression}: side by side {alone:.1} ms, ddp {together:.1} ms ({:+.1} %), waiting {exposed:.1} ms",
                100.0 * (together / alone - 1.0),
            )?;
        }
    }
    Ok(())
}

/// The medians of a step's time side by side and under DDP, and of the time in which the latter waits, in milliseconds.
fn times(
    comm: &mut Communicator,
    name: &str,
    options: DdpOptions,
    compression: Compression,
) -> Result<(f64, f64, f64), BoxError> {
    let mut own = Own::new(model(name)?)?;
    let mut ddp = match compression.hook()? {
        None => Ddp::new(comm.fork()?, model(name)?, options)?,
        Some(hook) => Ddp::with_hook(comm.fork()?, model(name)?, options, hook)?,
    };
    let (ranks, mut optimizer) = (comm.world_size(), adamw()?);
    let runtime = comm.runtime().clone();
    let input = input(name)?;
    let (mut alone, mut together, mut exposed) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..WARMUP + STEPS {
        comm.barrier()?;
        let started = runtime.now();
        own.step(&input)?;
        let of_own = slowest(comm, runtime.now().saturating_sub(started))?;
        comm.barrier()?;
        let started = runtime.now();
        let report = ddp.step(ranks, |_| Ok((input.clone(), |output: Tensor| loss(&output))))?;
        ddp.update(&mut optimizer)?;
        let of_ddp = slowest(comm, runtime.now().saturating_sub(started))?;
        if step >= WARMUP {
            alone.push(of_own);
            together.push(of_ddp);
            exposed.push(1e3 * report.exposed.as_secs_f64());
        }
    }
    Ok((median(alone), median(together), median(exposed)))
}

/// A model that one rank trains by itself.
struct Own {
    model: Sequence<Tensor>,
    gradients: Vec<Vec<f32>>,
    optimizer: AdamW,
}

impl Own {
    fn new(model: Sequence<Tensor>) -> Result<Self, BoxError> {
        let gradients = model.infos().iter().map(|info| vec![0.0; info.len()]).collect();
        Ok(Self { model, gradients, optimizer: adamw()? })
    }

    fn step(&mut self, input: &Tensor) -> Result<(), BoxError> {
        let Self { model, gradients, optimizer } = self;
        let (output, saved) = model.forward(input.clone())?;
        let (_, gradient) = loss(&output)?;
        let mut keep = |parameter: usize, values: Values<'_>| {
            let Values::F32(values) = values else { return Err("these models are f32".into()) };
            gradients[parameter].copy_from_slice(values);
            Ok(())
        };
        model.backward(saved, gradient, &mut keep)?;
        for (parameter, gradient) in gradients.iter().enumerate() {
            let mut updated = Ok(());
            model.write(parameter, &mut |values| {
                updated = optimizer.update(parameter, values, Values::F32(gradient));
            })?;
            updated?;
        }
        Ok(())
    }
}

fn adamw() -> Result<AdamW, BoxError> {
    Ok(AdamW::new(AdamWOptions { learning_rate: 1e-4, ..AdamWOptions::default() })?)
}

fn model(name: &str) -> Result<Sequence<Tensor>, BoxError> {
    if name.starts_with("transformer") {
        let shape = model::Shape { layers: 6, width: 384, heads: 4, context: 64 };
        return model::transformer(shape, 0);
    }
    let (mut sequence, width) = (SequenceBuilder::new(), usize::from(MLP_WIDTH));
    for layer in 0..4 {
        let weight = Var::randn(0_f32, 1.0 / f32::from(MLP_WIDTH).sqrt(), (width, width), &Device::Cpu)?;
        let bias = Var::zeros(width, candle_core::DType::F32, &Device::Cpu)?;
        let linear = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let module = candle_nn::func(move |x: &Tensor| linear.forward(x)?.relu());
        let variables = [("weight", weight), ("bias", bias)];
        sequence = sequence.block(CandleBlock::new(format!("layer{layer}"), variables, module)?);
    }
    Ok(sequence.build()?)
}

fn input(name: &str) -> Result<Tensor, BoxError> {
    Ok(if name.starts_with("transformer") {
        Tensor::zeros((4, 64), candle_core::DType::U32, &Device::Cpu)?
    } else {
        Tensor::randn(0_f32, 1.0, (64, usize::from(MLP_WIDTH)), &Device::Cpu)?
    })
}

fn loss(output: &Tensor) -> Result<(f32, Tensor), BoxError> {
    Ok(loss_and_gradient(output, |output| output.sqr()?.mean_all())?)
}

/// How long it took the slowest rank, in milliseconds.
fn slowest(comm: &mut Communicator, own: Duration) -> Result<f64, BoxError> {
    let mut time = [1e3 * own.as_secs_f64()];
    comm.all_reduce(&mut time, ReduceOp::Max)?;
    Ok(time[0])
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

const WARMUP: usize = 3;
const STEPS: usize = 21;
const MLP_WIDTH: u16 = 1600;
