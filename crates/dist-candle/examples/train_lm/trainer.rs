//! The ways to train the model, as one.

use std::cell::RefCell;

use candle_core::Tensor;
use dist_candle::Tensors;
use dist_collectives::Communicator;
use dist_parallel::checkpoint::Shards;
use dist_parallel::compress::Compression;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::optim::Optimizer;
use dist_parallel::pipeline::{Costs, Panel, Pipeline, ScheduleKind, Timeline, split_into_stages, svg};
use dist_parallel::step::StepReport;
use dist_parallel::{BoxError, Ddp, DdpOptions, Error, Params, Result, Sequence};

/// A model that is trained on all ranks.
#[derive(Debug)]
pub(crate) enum Trainer {
    /// Every rank has all of it.
    Whole(Box<Ddp<Sequence<Tensor>>>),
    /// Every rank keeps a part of something.
    Sharded(Box<Fsdp<Tensor>>),
    /// Every rank has some stages.
    Staged(Box<Staged>),
}

/// A pipeline, and what becomes the whole model at the end.
#[derive(Debug)]
pub(crate) struct Staged {
    pipeline: Pipeline<Tensor>,
    whole: Sequence<Tensor>,
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

    /// A pipeline of the model, which is made twice.
    pub(crate) fn staged(
        comm: Communicator,
        make: impl Fn() -> Result<Sequence<Tensor>, BoxError>,
        kind: ScheduleKind,
        micro_batches: usize,
    ) -> Result<Self> {
        let make = || make().map_err(Error::Compute);
        let (model, whole) = (make()?, make()?);
        let schedule = kind.schedule(comm.world_size(), micro_batches)?;
        let stages = split_into_stages(model.blocks().len(), schedule.stages())?;
        let pipeline = Pipeline::new(comm, model, schedule, &stages, Tensors)?;
        Ok(Self::Staged(Box::new(Staged { pipeline, whole })))
    }

    pub(crate) fn step<L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(Tensor, L), BoxError>,
    ) -> Result<StepReport>
    where
        L: FnOnce(Tensor) -> Result<(f32, Tensor), BoxError>,
    {
        match self {
            Self::Whole(ddp) => ddp.step(micro_batches, batch),
            Self::Sharded(fsdp) => fsdp.step(micro_batches, batch),
            Self::Staged(staged) => {
                let batch = RefCell::new(&mut batch);
                let input = |index| Ok(batch.borrow_mut()(index)?.0);
                let loss = |index, output| batch.borrow_mut()(index)?.1(output);
                staged.pipeline.step(input, loss)
            }
        }
    }

    pub(crate) fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        match self {
            Self::Whole(ddp) => ddp.update(optimizer),
            Self::Sharded(fsdp) => fsdp.update(optimizer),
            Self::Staged(staged) => staged.pipeline.update(optimizer),
        }
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        match self {
            Self::Whole(ddp) => ddp.communicator(),
            Self::Sharded(fsdp) => fsdp.communicator(),
            Self::Staged(staged) => staged.pipeline.communicator(),
        }
    }

    pub(crate) fn communicator_mut(&mut self) -> &mut Communicator {
        match self {
            Self::Whole(ddp) => ddp.communicator_mut(),
            Self::Sharded(fsdp) => fsdp.communicator_mut(),
            Self::Staged(staged) => staged.pipeline.communicator_mut(),
        }
    }

    /// What this rank holds, to be saved or loaded.
    pub(crate) fn shards(&mut self) -> &mut dyn Shards {
        match self {
            Self::Whole(ddp) => &mut **ddp,
            Self::Sharded(fsdp) => &mut **fsdp,
            Self::Staged(staged) => &mut staged.pipeline,
        }
    }

    /// For a pipeline, the last step as it was and as it is predicted from what the computations took, as a picture.
    pub(crate) fn picture(&mut self) -> Result<Option<String>> {
        let Self::Staged(staged) = self else { return Ok(None) };
        let measured = staged.pipeline.timeline()?;
        let schedule = staged.pipeline.schedule();
        let costs = Costs::new(measured.stage_costs(schedule.stages()));
        let predicted = Timeline::predict(schedule, &costs);
        let title = |what: &str, timeline: &Timeline| {
            let milliseconds = 1e3 * timeline.makespan().as_secs_f64();
            format!("{what}: {milliseconds:.1} ms, bubble {:.2}", timeline.bubble())
        };
        let titles = [title("as measured", &measured), title("as predicted", &predicted)];
        let panels = [
            Panel { title: &titles[0], timeline: &measured },
            Panel { title: &titles[1], timeline: &predicted },
        ];
        Ok(Some(svg(&panels)))
    }

    /// The communicator, and the whole model on every rank.
    pub(crate) fn into_parts(self) -> Result<(Communicator, Sequence<Tensor>)> {
        match self {
            Self::Whole(ddp) => Ok(ddp.into_parts()),
            Self::Sharded(fsdp) => fsdp.into_parts(),
            Self::Staged(staged) => {
                let Staged { mut pipeline, mut whole } = *staged;
                let mut written = Ok(());
                pipeline.for_each_parameter(|index, values| {
                    let mut copied = Ok(());
                    let reached = whole.write(index, &mut |mut own| copied = own.copy_from(values));
                    if written.is_ok() {
                        written = reached.map_err(Error::Compute).and(copied);
                    }
                })?;
                written?;
                Ok((pipeline.into_parts()?.0, whole))
            }
        }
    }
}
