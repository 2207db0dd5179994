//! The state of a rank that only pipelines have: the schedule, the messages between stages, and parameters of several
//! stages.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use super::activations::Activations;
use super::consensus::CallGroups;
use super::links::StageLinks;
use super::pass::PipelinePass;
use super::ties::{self, Node, Tie};
use super::{PipelineSchedule, Span};
use crate::engine::StepEngine;
use crate::flat::Flat;
use crate::fsdp::{Groups, bytes_sent, follow};
use crate::mean::Mean;
use crate::{ParamInfo, Params, Result};

pub(crate) struct PipelineState {
    pub(super) schedule: PipelineSchedule,
    pub(super) links: StageLinks,
    pub(super) ties: Vec<Tie>,
    /// This rank's ends of the ties whose parameters have gradients.
    pub(super) nodes: Vec<Node>,
    /// For each tie, the mean gradient, if this rank has the first stage and a micro-batch had a gradient.
    pub(super) means: Vec<Option<Mean>>,
    /// All ranks that hold one replica of the model, if stages are sharded.
    pub(crate) sharded: Option<Communicator>,
    pub(super) call_groups: CallGroups,
    /// For each stage, the index of its first parameter, and the number of parameters at the end.
    pub(super) first: Vec<usize>,
    /// The times of the computations of the last call.
    pub(super) spans: Vec<Span>,
    pub(super) kept_most: usize,
    runtime: dist_collectives::transport::Runtime,
    /// The time at which the last call began.
    began: Duration,
}

/// The sum of the gradients of a parameter of several stages, on the rank of the first one.
pub(crate) struct TiedSum {
    tie: usize,
    sum: Flat,
    /// `true` if a micro-batch had a gradient.
    pub(crate) used: bool,
}

impl PipelineState {
    /// Returns `true` if a parameter belongs to several stages.
    pub(crate) const fn has_ties(&self) -> bool {
        !self.ties.is_empty()
    }

    pub(super) fn new(
        comm: &mut Communicator,
        schedule: PipelineSchedule,
        infos: &[ParamInfo],
        first: Vec<usize>,
        ties: Vec<Tie>,
    ) -> Result<Self> {
        Ok(Self {
            links: StageLinks::new(comm, &schedule)?,
            nodes: ties::nodes(comm, &schedule, infos, &ties)?,
            schedule,
            means: ties.iter().map(|_| None).collect(),
            ties,
            sharded: None,
            call_groups: CallGroups::default(),
            first,
            spans: Vec::new(),
            kept_most: 0,
            runtime: comm.runtime().clone(),
            began: Duration::ZERO,
        })
    }

    /// Starts the first `count` micro-batches of the schedule, after `before` others since the last step.
    pub(super) fn begin(&mut self, before: usize, count: usize) {
        self.began = self.runtime.now();
        self.spans.clear();
        self.kept_most = 0;
        self.links.begin(count);
        self.nodes.iter_mut().for_each(|node| node.begin(before, count));
        self.means.iter_mut().for_each(|mean| *mean = None);
    }

    /// Returns the messages, ties and times of one pass. `trains` is `false` in an evaluation.
    pub(crate) fn pass<'a, A>(
        &'a mut self,
        activations: &'a dyn Activations<A>,
        trains: bool,
    ) -> PipelinePass<'a, A> {
        let Self { links, nodes, spans, kept_most, runtime, began, .. } = self;
        PipelinePass { links, nodes, activations, trains, runtime, began: *began, spans, kept_most }
    }

    /// Returns the number of the model's last stage.
    pub(crate) const fn last_stage(&self) -> usize {
        self.schedule.stages() - 1
    }

    /// Returns the rank of the last stage.
    pub(super) fn last_rank(&self) -> usize {
        self.schedule.placement()[self.last_stage()]
    }

    /// Returns the stage that has a parameter.
    pub(super) fn stage_of(&self, parameter: usize) -> usize {
        self.first.partition_point(|&start| start <= parameter) - 1
    }

    /// Returns `true` if several stages have a parameter.
    pub(crate) fn is_tied(&self, parameter: usize) -> bool {
        ties::of(&self.ties, parameter).is_some()
    }

    /// Returns `true` if a micro-batch had a gradient of a parameter of several stages. `None` for other parameters.
    pub(crate) fn has_tied_gradient(&self, parameter: usize) -> Option<bool> {
        ties::of(&self.ties, parameter).map(|tie| self.means[tie].is_some())
    }

    /// Returns the mean gradients of parameters whose first stage is on this rank.
    pub(crate) fn tied_means(&self) -> impl Iterator<Item = &Mean> {
        self.means.iter().flatten()
    }

    /// Scales these means.
    pub(crate) fn scale(&mut self, factor: f64) {
        self.means.iter_mut().flatten().for_each(|mean| mean.scale(factor));
    }

    /// Passes on the timeout and the reduction order of the communicator between the stages.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        let Self { sharded, call_groups, links, nodes, .. } = self;
        let groups = [sharded, &mut call_groups.shards, &mut call_groups.data];
        groups.into_iter().flatten().for_each(|group| follow(group, comm));
        links.follow(comm);
        nodes.iter_mut().for_each(|node| node.follow(comm));
    }

    pub(crate) fn bytes_sent(&self) -> u64 {
        let ties = self.nodes.iter().map(Node::bytes_sent).sum::<u64>();
        let CallGroups { shards, data } = &self.call_groups;
        [shards, data].into_iter().flatten().map(bytes_sent).sum::<u64>() + self.links.bytes_sent() + ties
    }

    /// Drops gradients and messages.
    pub(crate) fn forget(&mut self) {
        self.links.forget();
        self.nodes.iter_mut().for_each(Node::forget);
        self.means.iter_mut().for_each(|mean| *mean = None);
    }
}

/// The gradients of parameters of several stages. A model that is not divided into stages has none.
impl<M: Params> StepEngine<M> {
    /// Sums the gradients of parameters whose first stage is on this rank, over the ranks that have this stage.
    pub(crate) fn sum_ties(&mut self) -> Result<Vec<TiedSum>> {
        let Self { pipeline, groups: Groups { shards, replicas, .. }, .. } = self;
        let nodes = pipeline.iter_mut().flat_map(|pipeline| &mut pipeline.nodes);
        let sums = nodes.filter(|node| node.is_first()).map(|node| {
            let (mut sum, used) = node.take();
            for group in [&mut *shards, &mut *replicas].into_iter().filter(|group| group.world_size() > 1) {
                sum.all_reduce(group, ReduceOp::Sum)?;
            }
            Ok(TiedSum { tie: node.tie, sum, used })
        });
        sums.collect()
    }

    /// Divides these sums. `used` tells for each whether any rank had a gradient.
    pub(crate) fn finish_ties(
        &mut self,
        sums: Vec<TiedSum>,
        used: impl Iterator<Item = bool>,
        divisor: usize,
    ) {
        let Some(PipelineState { ties, means, .. }) = &mut self.pipeline else { return };
        for (TiedSum { tie, sum, .. }, used) in sums.into_iter().zip(used) {
            let dtype = self.model_infos[ties[tie].parameter].dtype;
            means[tie] = Some(Mean::of(sum, dtype, divisor)).filter(|_| used);
        }
    }

    /// Waits until all messages of a call between stages were received.
    pub(crate) fn finish_messages(&mut self) -> Result<()> {
        let Some(PipelineState { links, nodes, .. }) = &mut self.pipeline else { return Ok(()) };
        links.finish()?;
        nodes.iter_mut().try_for_each(Node::finish)
    }
}
