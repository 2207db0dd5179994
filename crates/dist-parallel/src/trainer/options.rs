//! The options of a trainer of any strategy.

use std::ops::Range;
use std::sync::Arc;

use dist_collectives::Communicator;

use super::pipeline::{PipelineOptions, PipelineTrainer};
use super::{StageCopies, Strategy, Trainer};
use crate::agreement::{self, Setting, setting};
use crate::cast::CastActivations;
use crate::fsdp::{Fsdp, FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
use crate::local_sgd::LocalSgd;
use crate::pipeline::Activations;
use crate::{BucketBytes, Compression, Ddp, DdpOptions, Error, FloatType, Params, Result, Sequence};

/// The options of a [`Trainer`] of any strategy.
///
/// Options that are not set have the defaults of their strategy. If an option that is set does not work with the
/// strategy, [`build`](Self::build) returns [`NotWithStrategy`](Error::NotWithStrategy).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainerOptions {
    /// The strategy.
    pub strategy: Strategy,
    /// The number of micro-batches of every step, which a pipeline must know. Other strategies take any number.
    pub micro_batches: Option<usize>,
    /// The blocks of each stage of a pipeline. By default all stages have equal numbers of blocks.
    pub stages: Option<Vec<Range<usize>>>,
    /// The compression of gradients, where they are summed over replicas of the model. A hook of your own needs [`Ddp::with_hook`], which returns a [`Trainer`] too.
    pub compression: Compression,
    /// The size limits of buckets of gradients.
    pub bucket_bytes: Option<BucketBytes>,
    /// The types of master parameters and of reduced gradients.
    pub precision: Precision,
    /// The type of activations and of their gradients between blocks, see [`Sequence::with_activations`]. They travel in
    /// this type between the stages of a pipeline. `None` for the type that the blocks give.
    pub activations: Option<FloatType>,
    /// The division of blocks into units that are gathered together. By default each block is one.
    pub units: Option<Units>,
    /// The number of units that are gathered ahead of the current one; 1 by default.
    pub prefetch: Option<usize>,
    /// The resharding after the forward.
    pub reshard: Option<Reshard>,
}

impl TrainerOptions {
    /// Returns the default options of this strategy.
    pub const fn new(strategy: Strategy) -> Self {
        Self {
            strategy,
            micro_batches: None,
            stages: None,
            compression: Compression::None,
            bucket_bytes: None,
            precision: Precision { master: None, reduce: None },
            activations: None,
            units: None,
            prefetch: None,
            reshard: None,
        }
    }

    /// Returns these options with a number of micro-batches of every step.
    #[must_use]
    pub fn with_micro_batches(self, micro_batches: usize) -> Self {
        Self { micro_batches: Some(micro_batches), ..self }
    }

    /// Returns these options with the blocks of each stage.
    #[must_use]
    pub fn with_stages(self, stages: Vec<Range<usize>>) -> Self {
        Self { stages: Some(stages), ..self }
    }

    /// Returns these options with compressed gradients.
    #[must_use]
    pub fn with_compression(self, compression: Compression) -> Self {
        Self { compression, ..self }
    }

    /// Returns these options with other size limits of buckets.
    #[must_use]
    pub fn with_bucket_bytes(self, bucket_bytes: BucketBytes) -> Self {
        Self { bucket_bytes: Some(bucket_bytes), ..self }
    }

    /// Returns these options with other types.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Returns these options with activations of a type between blocks.
    #[doc(alias = "cast_forward_inputs")]
    #[doc(alias = "output_dtype")]
    #[must_use]
    pub fn with_activations(self, dtype: FloatType) -> Self {
        Self { activations: Some(dtype), ..self }
    }

    /// Returns these options with other units.
    #[must_use]
    pub fn with_units(self, units: Units) -> Self {
        Self { units: Some(units), ..self }
    }

    /// Returns these options with `prefetch` units gathered ahead.
    #[must_use]
    pub fn with_prefetch(self, prefetch: usize) -> Self {
        Self { prefetch: Some(prefetch), ..self }
    }

    /// Returns these options with other resharding.
    #[must_use]
    pub fn with_reshard(self, reshard: Reshard) -> Self {
        Self { reshard: Some(reshard), ..self }
    }

    /// Starts to train `model` on all ranks of `comm`.
    ///
    /// Training begins with the parameters of rank 0. In a pipeline, a stage begins with those of its rank: create the
    /// model with the same values on every rank. `activations` converts activations to messages between the stages of
    /// a pipeline, and to the [type](Self::activations) that the options set: [`PlainVectors`](crate::pipeline::PlainVectors), or `dist_candle::Tensors`.
    ///
    /// # Errors
    /// [`NotWithStrategy`](Error::NotWithStrategy) for an option or a number of ranks that does not work with the
    /// strategy. Options or parameters differ between ranks. The ranks, the blocks or the micro-batches cannot be
    /// divided as the strategy says. Every rank gets these errors. Communication fails.
    pub fn build<A: 'static>(
        &self,
        mut comm: Communicator,
        model: Sequence<A>,
        activations: impl Activations<A> + 'static,
    ) -> Result<Box<dyn Trainer<A>>> {
        agreement::check(&mut comm, model.infos(), &self.settings())?;
        self.check(comm.world_size())?;
        let mut codec: Arc<dyn Activations<A>> = Arc::new(activations);
        let mut model = model;
        if let Some(dtype) = self.activations {
            model = model.with_activations(dtype, Arc::clone(&codec));
            codec = Arc::new(CastActivations { codec, dtype });
        }
        let sharding = match self.strategy {
            Strategy::Single | Strategy::Ddp => return self.data_parallel(comm, model),
            Strategy::Pipeline { kind, ranks, copies } => {
                let (stages, micro_batches) = (self.stages.clone(), self.micro_batches.unwrap_or(0));
                let precision = self.precision;
                let hook = self.compression.hook()?;
                let options = PipelineOptions { kind, ranks, copies, stages, micro_batches, precision, hook };
                return Ok(Box::new(PipelineTrainer::new(comm, model, options, codec)?));
            }
            Strategy::LocalSgd(options) => {
                return Ok(Box::new(LocalSgd::with_precision(comm, model, options, self.precision)?));
            }
            Strategy::Zero1 => ShardingStrategy::ShardOptimizer,
            Strategy::Zero2 => ShardingStrategy::ShardGradOp,
            Strategy::Fsdp => ShardingStrategy::FullShard,
            Strategy::Hybrid { shard_degree } => ShardingStrategy::HybridShard { shard_degree },
        };
        let options = FsdpOptions::new(sharding)
            .with_units(self.units.clone().unwrap_or_default())
            .with_prefetch(self.prefetch.unwrap_or(1))
            .with_reshard(self.reshard.unwrap_or_default())
            .with_precision(self.precision);
        Ok(Box::new(match self.compression.hook()? {
            None => Fsdp::new(comm, model, &options)?,
            Some(hook) => Fsdp::with_hook(comm, model, &options, hook)?,
        }))
    }

    fn data_parallel<A: 'static>(
        &self,
        comm: Communicator,
        model: Sequence<A>,
    ) -> Result<Box<dyn Trainer<A>>> {
        let options = DdpOptions::default()
            .with_bucket_bytes(self.bucket_bytes.unwrap_or_default())
            .with_precision(self.precision);
        Ok(Box::new(match self.compression.hook()? {
            None => Ddp::new(comm, model, options)?,
            Some(hook) => Ddp::with_hook(comm, model, options, hook)?,
        }))
    }

    /// Returns an error unless every option works with the strategy in a world of this size.
    fn check(&self, world_size: usize) -> Result<()> {
        use Strategy::{Ddp, Fsdp, Hybrid, Pipeline, Single, Zero1, Zero2};
        let strategy = self.strategy;
        let is_pipeline = matches!(strategy, Pipeline { .. });
        let has_whole_gradients = matches!(strategy, Single | Ddp);
        let has_replicas = match strategy {
            Pipeline { copies, .. } => copies == StageCopies::Replicated,
            _ => matches!(strategy, Single | Ddp | Hybrid { .. }),
        };
        let gathers = matches!(strategy, Fsdp | Hybrid { .. });
        let shards = gathers || matches!(strategy, Zero1 | Zero2);
        let compresses = self.compression != Compression::None;
        let alone = "it is for one process: use ddp";
        let unscheduled = "a pipeline's schedule is for a fixed number: set it with with_micro_batches";
        let whole = "only single and ddp divide gradients into buckets of a size";
        let replicas = "it is for the sum over replicas of the model, which only single, ddp, hybrid and pipelines that are not sharded have";
        let units = "only zero1, zero2, fsdp and hybrid divide the model into units";
        let gathered = "only fsdp and hybrid gather parameters";
        let staged = "only a pipeline has stages";
        let conflicts = [
            (strategy == Single && world_size > 1, "a world of several processes", alone),
            (is_pipeline && self.micro_batches.is_none(), "an open number of micro-batches", unscheduled),
            (compresses && !has_replicas, "compression of gradients", replicas),
            (self.bucket_bytes.is_some() && !has_whole_gradients, "a size of buckets", whole),
            (self.units.is_some() && !shards, "a choice of units", units),
            (self.prefetch.is_some() && !gathers, "prefetch", gathered),
            (self.reshard.is_some() && !gathers, "a choice of resharding", gathered),
            (self.stages.is_some() && !is_pipeline, "a choice of stages", staged),
        ];
        match conflicts.into_iter().find(|(conflicts, ..)| *conflicts) {
            Some((_, feature, reason)) => Err(Error::NotWithStrategy { feature, strategy, reason }),
            None => Ok(()),
        }
    }

    /// Returns all options, for the comparison between ranks.
    fn settings(&self) -> Vec<Setting> {
        let Self {
            strategy,
            micro_batches,
            stages,
            compression,
            bucket_bytes,
            precision,
            activations,
            units,
            prefetch,
            reshard,
        } = self;
        vec![
            ("the strategy".to_owned(), strategy.to_string()),
            setting("the number of micro-batches", micro_batches),
            setting("the blocks of the stages", stages),
            ("the compression".to_owned(), compression.to_string()),
            setting("the sizes of buckets", bucket_bytes),
            setting("the precision", precision),
            setting("the type of activations", activations),
            setting("units", units),
            setting("prefetch", prefetch),
            setting("reshard", reshard),
        ]
    }
}
