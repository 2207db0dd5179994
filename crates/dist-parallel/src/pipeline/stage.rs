//! The stages of one rank of a pipeline.

use std::collections::HashMap;
use std::ops::Range;

use dist_collectives::Communicator;

use super::ties::{self, Tie};
use crate::buffers::Buffers;
use crate::engine::{GatherPolicy, Stage, StageUnits, StepAction, step_actions};
use crate::flat::Flat;
use crate::fsdp::{FlatParameter, FsdpOptions, Groups, Parameters, Plan, Precision, ShardingStrategy, Units};
use crate::gradients::{GradientLayout, GradientMemory, Gradients, Scatter};
use crate::pipeline::Action;
use crate::{Block, BufferSync, Chunk, ParamInfo, Params, Result, Sequence, params};

impl<A> Stage<Sequence<A>> {
    /// Returns the stage of these blocks, on a rank that does not share it yet. `infos` are the parameters of the whole
    /// model, of which the stage has the range `range`.
    pub(super) fn of_blocks(
        number: usize,
        blocks: Vec<Box<dyn Block<A>>>,
        infos: &[ParamInfo],
        range: Range<usize>,
        ties: &[Tie],
        precision: Precision,
        groups: &mut Groups,
    ) -> Result<Self> {
        let mut model = Sequence::new(blocks)?;
        let mut tie_of = vec![None; range.len()];
        let mut first_of = HashMap::new();
        for parameter in range.clone() {
            let original = infos[parameter].same_as.unwrap_or(parameter);
            tie_of[parameter - range.start] = ties::of(ties, original);
            // The first name in this stage represents the parameter here.
            let first = *first_of.entry(original).or_insert(parameter);
            if first < parameter && model.infos()[parameter - range.start].same_as.is_none() {
                model.tie(&infos[parameter].name, &infos[first].name)?;
            }
        }
        let own = own_infos(&model, &tie_of);
        let options = FsdpOptions::new(ShardingStrategy::FullShard)
            .with_units(Units::OneForAll)
            .with_precision(precision);
        let plan = Plan::new(&own, model.starts(), 1, &options)?;
        let fill = |model: &mut Sequence<A>, flat_param: &FlatParameter, whole: &mut Flat| {
            params::pack(model, &flat_param.places, whole)
        };
        let parameters =
            Parameters::new(&plan.layout, plan.degrees, precision, groups, &mut model, false, fill)?;
        Ok(Self {
            number,
            range,
            gradients: gradients(&own, &plan, 0),
            plan,
            parameters,
            buffers: Buffers::new(model.infos()),
            model,
            tie_of,
        })
    }

    /// Divides the parameters among the ranks of the shard group, except those of several stages. Each block is a unit.
    pub(super) fn shard_over(&mut self, groups: &mut Groups) -> Result<()> {
        let Self { plan, parameters, model, tie_of, .. } = self;
        let own = own_infos(model, tie_of);
        let options = plan.options.clone().with_units(Units::EachBlock);
        let later = Plan::new(&own, model.starts(), groups.shards.world_size(), &options)?;
        let fill = |model: &mut Sequence<A>, flat_param: &FlatParameter, whole: &mut Flat| {
            let mut places = flat_param.places.iter().filter(|place| place.len > 0);
            places.try_for_each(|place| {
                let chunk = Chunk { parameter: place.parameter, offset: 0, len: place.len };
                let Some((at, chunk)) = plan.layout.locate(chunk, 0)? else { return Ok(()) };
                let mut into = whole.slice_mut(place.offset, place.len);
                parameters.read(at, chunk, model, |values| into.convert_from(values))
            })
        };
        let divided =
            Parameters::new(&later.layout, later.degrees, options.precision, groups, model, true, fill)?;
        self.gradients = gradients(&own, &later, groups.shards.rank());
        (self.parameters, self.plan) = (divided, later);
        Ok(())
    }

    /// Copies everything that rank 0 of a group holds to its other ranks, which hold the same.
    pub(super) fn broadcast(&mut self, comm: &mut Communicator, groups: &mut Groups) -> Result<()> {
        let rank = groups.shards.rank();
        for chunk in self.plan.layout.held_chunks(rank) {
            self.change(chunk, rank, |values| values.broadcast(comm, 0))?;
        }
        self.publish(groups, |_| true)
    }
}

/// Returns the actions of a rank with these stages. `last` is the last stage of the model.
pub(super) fn actions_of<M>(list: &[Action], stages: &[Stage<M>], last: usize) -> Vec<StepAction> {
    let units = stages.iter().map(|stage| StageUnits {
        number: stage.number,
        layout: &stage.plan.layout,
        policy: if stage.plan.degrees.frees { GatherPolicy::WithStage } else { GatherPolicy::Never },
    });
    step_actions(list, &units.collect::<Vec<_>>(), last)
}

/// Returns the parameters of a stage as their division sees them. Those of several stages are described like buffers:
/// every rank has all values of them, and their ties sum the gradients.
fn own_infos<A>(model: &Sequence<A>, tie_of: &[Option<usize>]) -> Vec<ParamInfo> {
    let mut own = model.infos().to_vec();
    for (info, _) in own.iter_mut().zip(tie_of).filter(|(_, tie)| tie.is_some()) {
        (info.trainable, info.buffer) = (false, Some(BufferSync::Local));
    }
    own
}

/// Returns the gradients of a stage. Each rank of the shard group keeps a shard of them.
fn gradients(infos: &[ParamInfo], plan: &Plan, rank: usize) -> Gradients {
    let layout = GradientLayout::of_units(infos, &plan.layout, plan.options.precision);
    let scatter = if plan.degrees.shards > 1 { Scatter::EachStep } else { Scatter::Never };
    Gradients::new(layout, scatter, GradientMemory::OfEachBucket, false, rank)
}
