//! What the demo can be told.

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
/// The same seed, text and number of micro-batches give the same parameters, bit for bit, on any number of
/// processes that deals each a power of two of the micro-batches.
#[derive(Debug, Parser)]
#[command(name = "train_lm", args_override_self = true)]
pub(crate) struct Options {
    /// Processes to start on this machine [default: 2]. Inside a job (RANK is set), the job decides.
    #[arg(long, value_parser = at_least_one())]
    pub(crate) ranks: Option<usize>,
    /// How the work is shared.
    #[arg(long, value_enum, default_value_t = StrategyName::Ddp)]
    pub(crate) strategy: StrategyName,
    /// Processes that share one copy of the model, for --strategy hybrid [default: 2, or 1 of an odd number].
    #[arg(long, value_parser = at_least_one())]
    pub(crate) shard_degree: Option<usize>,
    /// How gradients travel with --strategy ddp: none, bf16, f16, int8, topk:RATIO, powersgd:RANK. Several, with commas
    /// between them, are trained one after the other from the same start, and drawn in one picture.
    #[arg(long, value_delimiter = ',', value_name = "FORM")]
    pub(crate) compress: Vec<Compression>,
    /// How a pipeline orders its work: gpipe, 1f1b, interleaved, zb1p or zbv, for --strategy pipeline.
    #[arg(long = "schedule", default_value = "1f1b", value_name = "NAME", value_parser = kind)]
    pub(crate) pipeline: ScheduleKind,
    /// Parts of a step, each with samples of its own, that are dealt to the processes.
    #[arg(long, default_value_t = 8, value_parser = at_least_one())]
    pub(crate) micro_batches: usize,
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 100, value_parser = at_least_one())]
    pub(crate) steps: usize,
    /// Files to learn, or directories of them [default: the workspace's own sources and documents].
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub(crate) text: Vec<PathBuf>,
    /// One JSON object per line instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Of the initial values, the samples and the text at the end.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Where the pictures go.
    #[arg(long, default_value = "out", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Where a checkpoint of the training is saved now and then, and at its end; the last two are kept.
    #[arg(long, value_name = "DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Steps from one checkpoint to the next.
    #[arg(long, default_value_t = 25, value_parser = at_least_one(), requires = "save")]
    pub(crate) save_every: usize,
    /// Where the newest checkpoint lies that training goes on from, on as many processes and by whatever strategy. Without
    /// one there, training begins.
    #[arg(long, value_name = "DIR")]
    pub(crate) load: Option<PathBuf>,
    /// Samples of a micro-batch.
    #[arg(long, default_value_t = 4, value_parser = at_least_one())]
    pub(crate) samples: usize,
    /// Bytes of a sample, all of which the model sees at once.
    #[arg(long, default_value_t = 64, value_parser = at_least_one())]
    pub(crate) context: usize,
    /// Layers of the model.
    #[arg(long, default_value_t = 2, value_parser = at_least_one())]
    pub(crate) layers: usize,
    /// Numbers per byte inside the model; a multiple of the heads.
    #[arg(long, default_value_t = 96, value_parser = at_least_one())]
    pub(crate) width: usize,
    /// Heads of each layer's attention.
    #[arg(long, default_value_t = 4, value_parser = at_least_one())]
    pub(crate) heads: usize,
    /// The largest learning rate.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) learning_rate: f64,
    /// The process that started this one, without which it has no purpose.
    #[arg(long, hide = true)]
    pub(crate) started_by: Option<u32>,
}

/// How the work is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyName {
    /// One process does everything.
    Single,
    /// Every process has the whole model, and its share of the micro-batches.
    Ddp,
    /// Every process keeps a part of the parameters, the gradients and the optimizer's state.
    #[value(alias = "zero3")]
    Fsdp,
    /// Every process keeps a part of the optimizer's state, and all else.
    Zero1,
    /// Every process keeps a part of the gradients and the optimizer's state, and all parameters.
    Zero2,
    /// As fsdp, in groups of --shard-degree processes, each of which has a copy of the model.
    Hybrid,
    /// Every process has some stages of the model, and all micro-batches pass through them.
    Pipeline,
}

impl Options {
    pub(crate) fn shape(&self) -> Shape {
        Shape { layers: self.layers, width: self.width, heads: self.heads, context: self.context }
    }

    /// Rises over the first steps and falls along a cosine to a tenth.
    pub(crate) fn schedule(&self) -> impl Fn(u64) -> f64 + use<> {
        schedule::cosine(Decay { peak: self.learning_rate, warmup: 5, steps: self.steps as u64, to: 0.1 })
    }

    /// A sample, and the byte after it.
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

    /// Returns `true` if gradients are compressed and the strategy has no whole gradients.
    pub(crate) fn compresses_shards(&self) -> bool {
        !self.compress.is_empty() && !matches!(self.strategy, StrategyName::Single | StrategyName::Ddp)
    }

    /// How gradients travel, in each training after the other; `None` if nothing was said.
    pub(crate) fn trainings(&self) -> Vec<Option<Compression>> {
        let said: Vec<_> = self.compress.iter().copied().map(Some).collect();
        if said.is_empty() { vec![None] } else { said }
    }

    /// How many processes to start when nobody else has.
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
