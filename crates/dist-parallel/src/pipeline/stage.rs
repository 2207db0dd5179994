//! One stage of a model: its blocks, saved activations and pending messages.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use dist_collectives::Communicator;

use super::ties::{self, Node, Tie};
use crate::buffers::Buffers;
use crate::flat::{Flat, PendingFlat};
use crate::fsdp::{FlatParameter, FsdpOptions, Groups, Parameters, Plan, Precision, ShardingStrategy, Units};
use crate::gradients::{GradientLayout, GradientMemory, Gradients, RoundRole, Scatter};
use crate::{
    Block, BoxError, BufferSync, Chunk, Error, Optimizer, ParamInfo, Params, Result, Saved, Sequence, Values,
    ValuesMut, params,
};

pub(super) struct Stage<A> {
    pub(super) number: usize,
    /// The indices of its parameters in the whole model.
    pub(super) parameters: Range<usize>,
    pub(super) model: Sequence<A>,
    /// The parameters, as their division sees them. Those of several stages are described like buffers: every rank
    /// has all values of them, and their ties sum the gradients.
    own: Vec<ParamInfo>,
    /// The division of the other parameters. All blocks are one unit.
    plan: Plan,
    /// This rank's shard of them.
    shard: Parameters,
    /// The sums of their gradients.
    pub(super) gradients: Gradients,
    pub(super) buffers: Buffers,
    /// For each parameter, the tie with other stages that sums its gradients.
    pub(super) tie_of: Vec<Option<usize>>,
    /// Pending inputs, outputs and their gradients, by micro-batch.
    pub(super) inputs: BTreeMap<usize, A>,
    pub(super) outputs: BTreeMap<usize, A>,
    pub(super) output_gradients: BTreeMap<usize, A>,
    pub(super) input_gradients: BTreeMap<usize, A>,
    /// Saved activations of forwards and of first halves of backwards.
    saved: BTreeMap<usize, Saved>,
    halves: BTreeMap<usize, Saved>,
}

/// A sum whose reduction may be in flight.
pub(super) enum Reducing {
    Here(Flat),
    There(PendingFlat),
}

impl Reducing {
    pub(super) fn wait(self) -> Result<Flat> {
        match self {
            Self::Here(sum) => Ok(sum),
            Self::There(pending) => pending.wait(),
        }
    }
}

/// The part of a micro-batch's backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardPart {
    Whole,
    Input,
    Weight,
}

impl<A> Stage<A> {
    /// Returns the stage of these blocks, on a rank that does not share it yet. `infos` are the parameters of the whole
    /// model, of which the stage has the range `parameters`.
    pub(super) fn new(
        number: usize,
        blocks: Vec<Box<dyn Block<A>>>,
        infos: &[ParamInfo],
        parameters: Range<usize>,
        ties: &[Tie],
        precision: Precision,
        groups: &mut Groups,
    ) -> Result<Self> {
        let mut model = Sequence::new(blocks)?;
        let mut tie_of = vec![None; parameters.len()];
        let mut first_of = HashMap::new();
        for parameter in parameters.clone() {
            let original = infos[parameter].same_as.unwrap_or(parameter);
            tie_of[parameter - parameters.start] = ties::of(ties, original);
            // The first name in this stage represents the parameter here.
            let first = *first_of.entry(original).or_insert(parameter);
            if first < parameter && model.infos()[parameter - parameters.start].same_as.is_none() {
                model.tie(&infos[parameter].name, &infos[first].name)?;
            }
        }
        let mut own = model.infos().to_vec();
        for (info, _) in own.iter_mut().zip(&tie_of).filter(|(_, tie)| tie.is_some()) {
            (info.trainable, info.buffer) = (false, Some(BufferSync::Local));
        }
        let options = FsdpOptions::new(ShardingStrategy::FullShard)
            .with_units(Units::OneForAll)
            .with_precision(precision);
        let plan = Plan::new(&own, model.starts(), 1, &options)?;
        let fill = |model: &mut Sequence<A>, flat_param: &FlatParameter, whole: &mut Flat| {
            params::pack(model, &flat_param.places, whole)
        };
        let shard = Parameters::new(&plan.layout, plan.degrees, precision, groups, &mut model, false, fill)?;
        Ok(Self {
            number,
            parameters,
            gradients: gradients(&own, &plan, 0),
            plan,
            own,
            shard,
            buffers: Buffers::new(model.infos()),
            model,
            tie_of,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            output_gradients: BTreeMap::new(),
            input_gradients: BTreeMap::new(),
            saved: BTreeMap::new(),
            halves: BTreeMap::new(),
        })
    }

    /// Runs the forward of a micro-batch.
    pub(super) fn forward(&mut self, micro_batch: usize, input: A) -> Result<A> {
        self.buffers.record_forward();
        let (output, saved) = self.model.forward(input).map_err(Error::compute)?;
        self.saved.insert(micro_batch, saved);
        Ok(output)
    }

    /// Runs a forward without saving activations.
    pub(super) fn evaluate(&mut self, input: A) -> Result<A> {
        let blocks = 0..self.model.blocks().len();
        self.model.forward_with(blocks, input, drop).map_err(Error::compute)
    }

    /// Runs a backward or a half of it. Gradients go to the sums, and those of tied parameters to the nodes.
    pub(super) fn backward(
        &mut self,
        micro_batch: usize,
        part: BackwardPart,
        output_gradient: Option<A>,
        nodes: &mut [Node],
        groups: &mut Groups,
    ) -> Result<()> {
        let Self { model, gradients, tie_of, parameters, number, saved, halves, .. } = self;
        if !gradients.is_open(micro_batch) {
            gradients.begin(micro_batch, RoundRole::Inner);
        }
        let mut ready = |parameter: usize, values: Values<'_>| -> Result<(), BoxError> {
            gradients.report(micro_batch, parameter, values, &mut groups.reduce())?;
            let Some(tie) = tie_of[parameter] else { return Ok(()) };
            let node = nodes.iter_mut().find(|node| (node.tie, node.stage) == (tie, *number));
            node.map_or(Ok(()), |node| node.report(micro_batch, parameters.start + parameter, values))?;
            Ok(())
        };
        let input_gradient = match part {
            BackwardPart::Weight => {
                let half = halves.remove(&micro_batch).expect(PROVEN);
                model.weight_gradient(half, &mut ready).map_err(Error::compute)?;
                None
            }
            BackwardPart::Whole => {
                let saved = saved.remove(&micro_batch).expect(PROVEN);
                model.backward(saved, output_gradient.expect(PROVEN), &mut ready).map_err(Error::compute)?
            }
            BackwardPart::Input => {
                let saved = saved.remove(&micro_batch).expect(PROVEN);
                let halved = model.input_gradient(saved, output_gradient.expect(PROVEN), &mut ready);
                let (input_gradient, half) = halved.map_err(Error::compute)?;
                halves.insert(micro_batch, half);
                input_gradient
            }
        };
        if part != BackwardPart::Weight && *number > 0 {
            let gradient = input_gradient.ok_or(Error::NoInputGradient { stage: *number })?;
            self.input_gradients.insert(micro_batch, gradient);
        }
        if part != BackwardPart::Input {
            self.gradients.end(micro_batch, &mut groups.reduce())?;
            nodes.iter_mut().filter(|node| node.stage == *number).for_each(|node| node.end(micro_batch));
        }
        Ok(())
    }

    /// Returns the number of micro-batches between their forward and the end of their backward.
    pub(super) fn kept(&self) -> usize {
        self.saved.len() + self.halves.len()
    }

    /// Drops the result of the last step.
    pub(super) fn begin(&mut self) {
        self.gradients.begin_step();
    }

    /// Returns `true` if each rank of the shard group keeps a part of the parameters between their uses.
    pub(super) const fn is_sharded(&self) -> bool {
        self.plan.degrees.frees
    }

    /// Divides the parameters among the ranks of the shard group, except those of several stages.
    pub(super) fn shard_over(&mut self, groups: &mut Groups) -> Result<()> {
        let Self { own, plan, shard, model, .. } = self;
        let later = Plan::new(own, model.starts(), groups.shards.world_size(), &plan.options)?;
        let fill = |model: &mut Sequence<A>, flat_param: &FlatParameter, whole: &mut Flat| {
            let mut places = flat_param.places.iter().filter(|place| place.len > 0);
            places.try_for_each(|place| {
                let chunk = Chunk { parameter: place.parameter, offset: 0, len: place.len };
                let Some((at, chunk)) = plan.layout.locate(chunk, 0)? else { return Ok(()) };
                let mut into = whole.slice_mut(place.offset, place.len);
                shard.read(at, chunk, model, |values| into.convert_from(values))
            })
        };
        let precision = plan.options.precision;
        let divided = Parameters::new(&later.layout, later.degrees, precision, groups, model, true, fill)?;
        self.gradients = gradients(&self.own, &later, groups.shards.rank());
        (self.shard, self.plan) = (divided, later);
        Ok(())
    }

    /// Gathers the parameters if they are sharded.
    pub(super) fn gather(&mut self, groups: &mut Groups) -> Result<()> {
        let Self { plan, shard, model, .. } = self;
        if !plan.degrees.frees {
            return Ok(());
        }
        (0..plan.layout.units.len()).try_for_each(|unit| {
            shard.gather(&plan.layout, unit, groups)?;
            shard.materialise(&plan.layout, unit, groups, false, model)
        })
    }

    /// Frees the parameters if they are sharded.
    pub(super) fn free(&mut self) -> Result<()> {
        let Self { plan, shard, model, .. } = self;
        if !plan.degrees.frees {
            return Ok(());
        }
        (0..plan.layout.units.len()).try_for_each(|unit| shard.free(&plan.layout, unit, model))?;
        shard.clear_pool();
        Ok(())
    }

    /// Waits until no rank reads this rank's shard, after a pass.
    pub(super) fn rest(&mut self, groups: &mut Groups) -> Result<()> {
        self.shard.rest(groups)
    }

    /// Inherits the timeout and the reduction order of a communicator.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        self.shard.follow(comm);
    }

    /// Updates this rank's shard of the parameters by their gradients.
    pub(super) fn update(&mut self, optimizer: &mut dyn Optimizer, groups: &mut Groups) -> Result<()> {
        let Self { plan, shard, gradients, model, parameters, .. } = self;
        shard.update(&plan.layout, gradients, model, parameters.start, optimizer)?;
        self.publish(groups)
    }

    /// Gives the model the master values, if they lie outside it.
    pub(super) fn publish(&mut self, groups: &mut Groups) -> Result<()> {
        self.shard.publish(&self.plan, groups, &mut self.model, |_| true)
    }

    /// Copies everything that rank 0 of a group holds to its other ranks, which hold the same.
    pub(super) fn broadcast(&mut self, comm: &mut Communicator, groups: &mut Groups) -> Result<()> {
        let rank = groups.shards.rank();
        for chunk in self.plan.layout.held_chunks(rank) {
            self.change(chunk, rank, |values| values.broadcast(comm, 0))?;
        }
        self.publish(groups)
    }

    /// Returns what this rank holds of the parameters, by their indices in the stage.
    pub(super) fn held_chunks(&self, rank: usize) -> Vec<Chunk> {
        self.plan.layout.held_chunks(rank)
    }

    /// Calls `f` with the values of a chunk that rank `rank` of the shard group holds.
    pub(super) fn read(&self, chunk: Chunk, rank: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.plan.layout.locate(chunk, rank)? {
            Some((place, chunk)) => self.shard.read(place, chunk, &self.model, f),
            None => params::read(&self.model, chunk.parameter, f),
        }
    }

    /// Calls `f` with the memory of such a chunk.
    pub(super) fn change(
        &mut self,
        chunk: Chunk,
        rank: usize,
        f: impl FnMut(ValuesMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match self.plan.layout.locate(chunk, rank)? {
            Some((place, chunk)) => self.shard.change(place, chunk, &mut self.model, f),
            None => params::write(&mut self.model, chunk.parameter, f),
        }
    }

    /// Drops everything except the parameters.
    pub(super) fn forget(&mut self) {
        for waiting in
            [&mut self.inputs, &mut self.outputs, &mut self.output_gradients, &mut self.input_gradients]
        {
            waiting.clear();
        }
        self.saved.clear();
        self.halves.clear();
        self.gradients.forget();
        self.shard.forget();
    }
}

/// Returns the gradients of a stage. Each rank of the shard group keeps a shard of them.
fn gradients(infos: &[ParamInfo], plan: &Plan, rank: usize) -> Gradients {
    let layout = GradientLayout::of_units(infos, &plan.layout, plan.options.precision);
    let scatter = if plan.degrees.shards > 1 { Scatter::EachStep } else { Scatter::Never };
    Gradients::new(layout, scatter, GradientMemory::OfEachBucket, false, rank)
}

/// The schedule was proven, so an action's inputs exist.
pub(super) const PROVEN: &str = "a proven schedule has made it";
