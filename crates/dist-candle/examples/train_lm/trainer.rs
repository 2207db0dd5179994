//! The ways to train the model, as one.

use candle_core::Tensor;
use dist_collectives::Communicator;
use dist_parallel::{
    BoxError, Compression, Ddp, DdpOptions, Fsdp, FsdpOptions, Optimizer, Result, Sequence, ShardingStrategy,
    Shards, StepReport,
};

/// A model that is trained on all ranks.
#[derive(Debug)]
pub(crate) enum Trainer {
    /// Every rank has all of it.
    Whole(Box<Ddp<Sequence<Tensor>>>),
    /// Every rank keeps a part of something.
    Sharded(Box<Fsdp<Tensor>>),
}

impl Trainer {
    pub(crate) fn new(
        comm: Communicator,
        model: Sequence<Tensor>,
        sharding: Option<ShardingStrategy>,
        compression: Compression,
    ) -> Result<Self> {
        Ok(match sharding {
            None => Self::Whole(Box::new(match compression.hook()? {
                None => Ddp::new(comm, model, DdpOptions::default())?,
                Some(hook) => Ddp::with_hook(comm, model, DdpOptions::default(), hook)?,
            })),
            Some(strategy) => {
                let options = FsdpOptions::new(strategy).with_prefetch(1);
                Self::Sharded(Box::new(Fsdp::new(comm, model, &options)?))
            }
        })
    }

    pub(crate) fn step<L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(Tensor, L), BoxError>,
    ) -> Result<StepReport>
    where
        L: FnOnce(Tensor) -> Result<(f32, Tensor), BoxError>,
    {
        match self {
            Self::Whole(ddp) => ddp.step(micro_batches, batch),
            Self::Sharded(fsdp) => fsdp.step(micro_batches, batch),
        }
    }

    pub(crate) fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        match self {
            Self::Whole(ddp) => ddp.update(optimizer),
            Self::Sharded(fsdp) => fsdp.update(optimizer),
        }
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        match self {
            Self::Whole(ddp) => ddp.communicator(),
            Self::Sharded(fsdp) => fsdp.communicator(),
        }
    }

    pub(crate) fn communicator_mut(&mut self) -> &mut Communicator {
        match self {
            Self::Whole(ddp) => ddp.communicator_mut(),
            Self::Sharded(fsdp) => fsdp.communicator_mut(),
        }
    }

    /// What this rank holds, to be saved or loaded.
    pub(crate) fn shards(&mut self) -> &mut dyn Shards {
        match self {
            Self::Whole(ddp) => &mut **ddp,
            Self::Sharded(fsdp) => &mut **fsdp,
        }
    }

    /// The communicator, and the whole model on every rank.
    pub(crate) fn into_parts(self) -> Result<(Communicator, Sequence<Tensor>)> {
        match self {
            Self::Whole(ddp) => Ok(ddp.into_parts()),
            Self::Sharded(fsdp) => fsdp.into_parts(),
        }
    }
}
