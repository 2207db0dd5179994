//! The options of the demo.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use dist_parallel::compress::Compression;
use dist_parallel::optim::schedule::{self, Decay};
use dist_parallel::pipeline::ScheduleKind;
use dist_parallel::trainer::{Strategy, TrainerOptions};

use crate::model::Shape;

/// Trains a byte-level transformer on text files, on several processes.
///
/// The same seed, text and number of micro-batches give the same parameters, bit for bit, on any number of processes
/// that each compute the same power of two of micro-batches.
#[derive(Debug, Parser)]
#[command(name = "train_lm", args_override_self = true)]
pub(crate) struct Options {
    /// Processes to start on this machine [default: 2]. Inside a job (RANK is set), the job decides.
    #[arg(long, value_parser = at_least_one())]
    pub(crate) ranks: Option<usize>,
    /// The training strategy.
    #[arg(long, value_enum, default_value_t = StrategyName::Ddp)]
    pub(crate) strategy: StrategyName,
    /// Number of processes that shard one copy of the model, for --strategy hybrid [default: 2, or 1 if the number of
    /// processes is odd].
    #[arg(long, value_parser = at_least_one())]
    pub(crate) shard_degree: Option<usize>,
    /// Compression of gradients with --strategy ddp: none, bf16, f16, int8, topk:RATIO, powersgd:RANK. Several
    /// values, separated by commas, are trained one after the other from the same initial values, and drawn in one
    /// picture.
    #[arg(long, value_delimiter = ',', value_name = "FORM")]
    pub(crate) compress: Vec<Compression>,
    /// Schedule of the pipeline: gpipe, 1f1b, interleaved, zb1p or zbv, for --strategy pipeline.
    #[arg(long = "schedule", default_value = "1f1b", value_name = "NAME", value_parser = kind)]
    pub(crate) pipeline: ScheduleKind,
    /// Number of micro-batches of a step, which are divided among the processes.
    #[arg(long, default_value_t = 8, value_parser = at_least_one())]
    pub(crate) micro_batches: usize,
    /// Number of steps.
    #[arg(long, default_value_t = 100, value_parser = at_least_one())]
    pub(crate) steps: usize,
    /// Files or directories with the training text [default: the workspace's own sources and documents].
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub(crate) text: Vec<PathBuf>,
    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Seed of the initial values, the samples and the text at the end.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Directory for the pictures.
    #[arg(long, default_value = "out", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Directory for checkpoints, which are saved at intervals and at the end; the last two are kept.
    #[arg(long, value_name = "DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Number of steps between checkpoints.
    #[arg(long, default_value_t = 25, value_parser = at_least_one(), requires = "save")]
    pub(crate) save_every: usize,
    /// Directory with checkpoints, the newest of which is loaded, on any number of processes and with any strategy.
    /// If it has none, training starts from the beginning.
    #[arg(long, value_name = "DIR")]
    pub(crate) load: Option<PathBuf>,
    /// Number of samples in a micro-batch.
    #[arg(long, default_value_t = 4, value_parser = at_least_one())]
    pub(crate) samples: usize,
    /// Number of bytes in a sample, which is the model's context.
    #[arg(long, default_value_t = 64, value_parser = at_least_one())]
    pub(crate) context: usize,
    /// Number of layers of the model.
    #[arg(long, default_value_t = 2, value_parser = at_least_one())]
    pub(crate) layers: usize,
    /// Width of the model's layers; a multiple of the number of heads.
    #[arg(long, default_value_t = 96, value_parser = at_least_one())]
    pub(crate) width: usize,
    /// Number of attention heads per layer.
    #[arg(long, default_value_t = 4, value_parser = at_least_one())]
    pub(crate) heads: usize,
    /// Largest learning rate.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) learning_rate: f64,
    /// Process id of the parent process; this process ends with it.
    #[arg(long, hide = true)]
    pub(crate) started_by: Option<u32>,
}

/// The training strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyName {
    /// One process, without communication.
    Single,
    /// Every process has the whole model, and computes a share of the micro-batches.
    Ddp,
    /// Every process keeps a part of the parameters, the gradients and the optimizer's state.
    #[value(alias = "zero3")]
    Fsdp,
    /// Every process keeps a part of the optimizer's state, and all parameters; during a step also all gradients.
    Zero1,
    /// Every process keeps a part of the gradients and the optimizer's state, and all parameters.
    Zero2,
    /// Like fsdp, within groups of --shard-degree processes; each group has a copy of the model.
    Hybrid,
    /// Every process has one or more stages of the model, and all micro-batches pass through the stages.
    Pipeline,
}

impl Options {
    pub(crate) fn shape(&self) -> Shape {
        Shape { layers: self.layers, width: self.width, heads: self.heads, context: self.context }
    }

    /// Returns a learning rate that rises over the first steps and falls along a cosine to a tenth.
    pub(crate) fn schedule(&self) -> impl Fn(u64) -> f64 + use<> {
        schedule::cosine(Decay { peak: self.learning_rate, warmup: 5, steps: self.steps as u64, to: 0.1 })
    }

    /// Returns the number of bytes of a sample and the byte after it.
    pub(crate) fn sample_len(&self) -> usize {
        self.context + 1
    }

    /// Returns the options of a trainer.
    pub(crate) fn trainer(&self, ranks: usize, compression: Option<Compression>) -> TrainerOptions {
        TrainerOptions::new(self.strategy(ranks))
            .with_micro_batches(self.micro_batches)
            .with_compression(compression.unwrap_or_default())
    }

    fn strategy(&self, ranks: usize) -> Strategy {
        let shard_degree = self.shard_degree.unwrap_or(if ranks.is_multiple_of(2) { 2 } else { 1 });
        match self.strategy {
            StrategyName::Single => Strategy::Single,
            StrategyName::Ddp => Strategy::Ddp,
            StrategyName::Fsdp => Strategy::Fsdp,
            StrategyName::Zero1 => Strategy::Zero1,
            StrategyName::Zero2 => Strategy::Zero2,
            StrategyName::Hybrid => Strategy::Hybrid { shard_degree },
            StrategyName::Pipeline => Strategy::pipeline(self.pipeline),
        }
    }

    /// Returns `true` if the options ask for compressed gradients and the strategy does not support them.
    pub(crate) fn compresses_shards(&self) -> bool {
        !self.compress.is_empty() && !matches!(self.strategy, StrategyName::Single | StrategyName::Ddp)
    }

    /// Returns the compression of each training; a single `None` if no compression was chosen.
    pub(crate) fn trainings(&self) -> Vec<Option<Compression>> {
        let said: Vec<_> = self.compress.iter().copied().map(Some).collect();
        if said.is_empty() { vec![None] } else { said }
    }

    /// Returns the number of processes to start if there is no launcher.
    pub(crate) fn ranks_to_start(&self) -> usize {
        match self.strategy {
            StrategyName::Single => 1,
            _ => self.ranks.unwrap_or(2),
        }
    }
}

fn kind(text: &str) -> Result<ScheduleKind, String> {
    ScheduleKind::parse(text)
        .ok_or_else(|| format!("it is one of {}", ScheduleKind::ALL.map(ScheduleKind::name).join(", ")))
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 30)
}
