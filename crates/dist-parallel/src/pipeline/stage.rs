//! One stage of a model: its blocks, saved activations and pending messages.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use dist_collectives::Communicator;

use super::shard::StageShard;
use super::ties::{self, Node, Tie};
use crate::buffers::Buffers;
use crate::flat::{Flat, PendingFlat};
use crate::gradients::{GradientLayout, GradientMemory, Gradients, ReduceGroups, RoundRole, Scatter};
use crate::{
    Block, BoxError, BucketBytes, BucketPlan, Error, ParamInfo, Params, Result, Saved, Sequence, Values,
};

pub(super) struct Stage<A> {
    pub(super) number: usize,
    /// The indices of its parameters in the whole model.
    pub(super) parameters: Range<usize>,
    pub(super) model: Sequence<A>,
    /// The sums of the parameters' gradients, except those that ties sum.
    pub(super) gradients: Gradients,
    /// The buckets of these parameters: one per type.
    pub(super) plan: BucketPlan,
    /// The parameters. Tied parameters are not marked as trainable.
    summed: Vec<ParamInfo>,
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
    /// This rank's shard of the parameters, if they are sharded.
    pub(super) shard: Option<StageShard>,
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
    /// Returns the stage of these blocks. `infos` are the parameters of the whole model, of which the stage has the
    /// range `parameters`.
    pub(super) fn new(
        number: usize,
        blocks: Vec<Box<dyn Block<A>>>,
        infos: &[ParamInfo],
        parameters: Range<usize>,
        ties: &[Tie],
    ) -> Result<Self> {
        let mut model = Sequence::new(blocks)?;
        let mut tie_of = vec![None; parameters.len()];
        let mut first_of = HashMap::new();
        for parameter in parameters.clone() {
            let original = infos[parameter].same_as.unwrap_or(parameter);
            let tie = ties::of(ties, original).filter(|&tie| ties[tie].stages.contains(&number));
            tie_of[parameter - parameters.start] = tie.filter(|_| infos[parameter].trainable);
            // The first name in this stage represents the parameter here.
            let first = *first_of.entry(original).or_insert(parameter);
            if first < parameter && model.infos()[parameter - parameters.start].same_as.is_none() {
                model.tie(&infos[parameter].name, &infos[first].name)?;
            }
        }
        // Gradients of tied parameters are summed by their tie.
        let mut summed = model.infos().to_vec();
        summed.iter_mut().zip(&tie_of).for_each(|(info, tie)| info.trainable &= tie.is_none());
        let plan = BucketPlan::new(&summed, BucketBytes { first_max: usize::MAX, other_max: usize::MAX });
        Ok(Self {
            number,
            parameters,
            gradients: gradients(&summed, &plan, (0, 1)),
            plan,
            summed,
            buffers: Buffers::new(model.infos()),
            model,
            tie_of,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            output_gradients: BTreeMap::new(),
            input_gradients: BTreeMap::new(),
            saved: BTreeMap::new(),
            halves: BTreeMap::new(),
            shard: None,
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
        groups: &mut ReduceGroups<'_>,
    ) -> Result<()> {
        let Self { model, gradients, tie_of, parameters, number, saved, halves, .. } = self;
        if !gradients.is_open(micro_batch) {
            gradients.begin(micro_batch, RoundRole::Inner);
        }
        let mut ready = |parameter: usize, values: Values<'_>| -> Result<(), BoxError> {
            gradients.report(micro_batch, parameter, values, groups)?;
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
            self.gradients.end(micro_batch, groups)?;
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

    /// Returns `true` if this parameter of the stage is sharded and therefore freed between its uses.
    pub(super) fn is_sharded(&self, parameter: usize) -> bool {
        self.shard.is_some() && self.gradients.has(parameter)
    }

    /// Shards the parameters, except those that ties sum, and their gradients.
    pub(super) fn shard_over(&mut self, shards: &Communicator) -> Result<()> {
        self.shard = Some(StageShard::new(shards, self.plan.buckets(), &mut self.model)?);
        self.gradients = gradients(&self.summed, &self.plan, (shards.rank(), shards.world_size()));
        Ok(())
    }

    /// Gathers the parameters if they are sharded.
    pub(super) fn gather(&mut self, shards: Option<&mut Communicator>) -> Result<()> {
        match (&mut self.shard, shards) {
            (Some(shard), Some(shards)) => shard.gather(shards, &mut self.model),
            _ => Ok(()),
        }
    }

    /// Frees the parameters if they are sharded.
    pub(super) fn free(&mut self) -> Result<()> {
        match &mut self.shard {
            Some(shard) => shard.free(&mut self.model),
            None => Ok(()),
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
    }
}

/// Returns the gradients of a stage. Each of `shards` ranks keeps a shard of them.
fn gradients(infos: &[ParamInfo], plan: &BucketPlan, (rank, shards): (usize, usize)) -> Gradients {
    let layout = GradientLayout::of_plan(infos, plan, None, shards);
    let scatter = if shards > 1 { Scatter::EachStep } else { Scatter::Never };
    Gradients::new(layout, scatter, GradientMemory::OfEachBucket, false, rank)
}

/// The schedule was proven, so an action's inputs exist.
pub(super) const PROVEN: &str = "a proven schedule has made it";
