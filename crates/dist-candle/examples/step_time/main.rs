//! Measures the time and memory of a training step: `distctl run -n 2 -- step_time mlp-10M fsdp`.
//!
//! Every rank computes one micro-batch per step and takes a step of AdamW. The time of a step is that of the slowest
//! rank. Memory is the peak resident size from the first step on minus the size before the model was created, on the
//! rank with the largest value. Pages that ranks share count for each of them. A run measures one strategy only, so
//! that memory of other strategies is not counted. The line that it prints has the fields of `distctl bench` and
//! `peak_MiB`.

mod models;

use std::fs;
use std::io::Write;
use std::time::Duration;

use candle_core::Tensor;
use clap::{Parser, ValueEnum};
use dist_candle::loss_and_gradient;
use dist_collectives::{Communicator, ReduceOp};
use dist_parallel::buckets::BucketBytes;
use dist_parallel::compress::Compression;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Reshard, ShardingStrategy};
use dist_parallel::optim::{AdamW, AdamWOptions, Optimizer};
use dist_parallel::step::StepReport;
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, Params, Sequence, Values};
use models::Model;

/// Times training steps.
#[derive(Debug, Parser)]
struct Options {
    /// Model to train.
    model: Model,
    /// Strategy of training.
    mode: Mode,
    /// Compression of gradients with ddp: none, bf16, f16, int8, topk:RATIO, powersgd:RANK.
    #[arg(long, default_value = "none")]
    compress: Compression,
    /// Maximum bytes of a bucket with ddp.
    #[arg(long, value_name = "KIB")]
    bucket_kib: Option<usize>,
    /// Number of units that are gathered ahead with fsdp.
    #[arg(long, default_value_t = 1)]
    prefetch: usize,
    /// Number of ranks that shard the parameters with hybrid.
    #[arg(long, default_value_t = 2)]
    shard_degree: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Each rank trains alone, without communication.
    Local,
    Ddp,
    /// Parameters, gradients and the optimizer's state are sharded.
    Fsdp,
    /// Gradients and the optimizer's state are sharded.
    Zero2,
    /// The optimizer's state is sharded.
    Zero1,
    /// Everything is sharded within groups of neighbouring ranks, and gradients are reduced between groups.
    Hybrid,
}

fn main() -> Result<(), BoxError> {
    let options = Options::parse();
    let mut comm = Communicator::from_env()?;
    let before = resident_kib("VmRSS:")?;
    let mut training = Training::new(comm.fork()?, &options)?;
    let (input, runtime) = (options.model.input()?, comm.runtime().clone());
    // Resets the peak.
    fs::write("/proc/self/clear_refs", "5")?;
    let steps = if options.model == Model::Mlp100M { STEPS_OF_LARGE } else { STEPS };
    let (mut times, mut exposed) = (Vec::new(), Vec::new());
    for step in 0..WARMUP + steps {
        comm.barrier()?;
        let started = runtime.now();
        let waited = training.step(&input)?;
        let time = runtime.now().saturating_sub(started);
        if step >= WARMUP {
            times.push(1e6 * time.as_secs_f64());
            exposed.push(1e6 * waited.as_secs_f64());
        }
    }
    comm.all_reduce(&mut times, ReduceOp::Max)?;
    let mut peak = [(resident_kib("VmHWM:")? - before) / 1024.0];
    comm.all_reduce(&mut peak, ReduceOp::Max)?;
    if comm.rank() == 0 {
        print(&options, comm.world_size(), training.bytes(), times, exposed, peak[0])?;
    }
    Ok(())
}

/// Prints the line of output for one strategy.
fn print(
    options: &Options,
    ranks: usize,
    bytes: usize,
    times: Vec<f64>,
    exposed: Vec<f64>,
    peak: f64,
) -> Result<(), BoxError> {
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    let model = options.model.to_possible_value().expect("no model is hidden");
    let mode = if ranks == 1 { "alone".to_owned() } else { name(&options.mode) };
    let least = times.iter().copied().fold(f64::INFINITY, f64::min);
    let most = times.iter().copied().fold(0.0, f64::max);
    let (samples, median_us) = (times.len(), median(times));
    let line = serde_json::json!({
        "peer": "dist",
        "transport": std::env::var("DIST_TRANSPORT").unwrap_or_else(|_| "auto".to_owned()),
        "op": format!("step-{mode}-{}", model.get_name()),
        "ranks": ranks,
        "bytes": bytes,
        "median_us": median_us,
        "min_us": least,
        "max_us": most,
        "algbw_GBps": bytes as f64 / median_us / 1e3,
        "samples": samples,
        "peak_MiB": peak,
        "waiting_us": median(exposed),
    });
    Ok(writeln!(std::io::stdout().lock(), "{line}")?)
}

/// A trainer of any strategy.
enum Training {
    Local(Box<Own>),
    Ddp(Box<Ddp<Sequence<Tensor>>>, AdamW),
    Fsdp(Box<Fsdp<Tensor>>, AdamW),
}

impl Training {
    fn new(comm: Communicator, options: &Options) -> Result<Self, BoxError> {
        let model = options.model.build()?;
        let fsdp = |comm, model, strategy| {
            let how = FsdpOptions::new(strategy).with_prefetch(options.prefetch);
            Ok::<_, BoxError>(Self::Fsdp(
                Box::new(Fsdp::new(comm, model, &how.with_reshard(Reshard::AllButLast))?),
                adamw()?,
            ))
        };
        Ok(match options.mode {
            Mode::Local => Self::Local(Box::new(Own::new(model)?)),
            Mode::Ddp => Self::Ddp(Box::new(ddp(comm, model, options)?), adamw()?),
            Mode::Fsdp => fsdp(comm, model, ShardingStrategy::FullShard)?,
            Mode::Zero2 => fsdp(comm, model, ShardingStrategy::ShardGradOp)?,
            Mode::Zero1 => fsdp(comm, model, ShardingStrategy::ShardOptimizer)?,
            Mode::Hybrid => {
                let shard_degree = options.shard_degree;
                fsdp(comm, model, ShardingStrategy::HybridShard { shard_degree })?
            }
        })
    }

    /// Takes one step. Returns the time that this rank waited for communication.
    fn step(&mut self, input: &Tensor) -> Result<Duration, BoxError> {
        let batch = |_: usize| Ok((input.clone(), |output: Tensor| loss(&output)));
        let exposed = |report: StepReport| report.exposed;
        match self {
            Self::Local(own) => own.step(input).map(|()| Duration::ZERO),
            Self::Ddp(ddp, optimizer) => {
                let report = ddp.step(ddp.world_size(), batch)?;
                ddp.update(optimizer)?;
                Ok(exposed(report))
            }
            Self::Fsdp(fsdp, optimizer) => {
                let report = fsdp.step(fsdp.world_size(), batch)?;
                fsdp.update(optimizer)?;
                Ok(exposed(report))
            }
        }
    }

    /// Returns the bytes of all gradients.
    fn bytes(&self) -> usize {
        let infos = match self {
            Self::Local(own) => own.model.infos(),
            Self::Ddp(ddp, _) => ddp.model().infos(),
            Self::Fsdp(fsdp, _) => fsdp.model().infos(),
        };
        infos.iter().map(|info| info.len() * info.dtype.size()).sum()
    }
}

fn ddp(
    comm: Communicator,
    model: Sequence<Tensor>,
    options: &Options,
) -> Result<Ddp<Sequence<Tensor>>, BoxError> {
    let mut how = DdpOptions::default();
    if let Some(kib) = options.bucket_kib {
        how = how.with_bucket_bytes(BucketBytes { first_max: kib << 10, other_max: kib << 10 });
    }
    Ok(match options.compress.hook()? {
        None => Ddp::new(comm, model, how)?,
        Some(hook) => Ddp::with_hook(comm, model, how, hook)?,
    })
}

/// A trainer without communication.
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

fn loss(output: &Tensor) -> Result<(f32, Tensor), BoxError> {
    Ok(loss_and_gradient(output, |output| output.sqr()?.mean_all())?)
}

/// Returns a value of this process's memory that the system reports.
fn resident_kib(key: &str) -> Result<f64, BoxError> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("no such line")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

const WARMUP: usize = 3;
const STEPS: usize = 30;
const STEPS_OF_LARGE: usize = 10;
