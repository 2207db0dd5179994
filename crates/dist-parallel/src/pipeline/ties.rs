//! Parameters that several stages share (ties).
//!
//! The gradients of a shared parameter are added for each micro-batch before the tree sum, from the last stage to the
//! first, as in one process. For every micro-batch a stage adds its own gradient to the sum of later stages and sends
//! it to the previous stage with the parameter. The first stage sums over micro-batches. No rank waits for these
//! messages before the end of the step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use dist_collectives::Communicator;

use super::activations::TensorMeta;
use super::link::{LinkReceiver, LinkSender};
use super::links::{self, LinkEnd};
use super::{Action, PipelineSchedule};
use crate::flat::Flat;
use crate::tree::TreeSum;
use crate::{Error, ParamInfo, Result, Values};

/// A parameter of several stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tie {
    /// The index of its first name in the model.
    pub(super) parameter: usize,
    /// Its stages, in order.
    pub(super) stages: Vec<usize>,
}

/// Returns the ties between stages of a model's parameters. `first` contains for each stage the index of its first
/// parameter, and their number at the end.
///
/// # Errors
/// A buffer is tied between stages. Stages have separate memory, so the changes of one would be missing in the
/// others.
pub(super) fn find(infos: &[ParamInfo], first: &[usize]) -> Result<Vec<Tie>> {
    let stage_of = |parameter: usize| first.partition_point(|&start| start <= parameter) - 1;
    let mut ties: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (parameter, info) in infos.iter().enumerate() {
        let Some(original) = info.same_as else { continue };
        let stages = ties.entry(original).or_insert_with(|| vec![stage_of(original)]);
        if stages.last() != Some(&stage_of(parameter)) {
            if info.buffer.is_some() {
                let reason = "it is a buffer, which stages of a pipeline cannot share";
                let (name, same_as) = (info.name.clone(), infos[original].name.clone());
                return Err(Error::CannotTie { name, same_as, reason });
            }
            stages.push(stage_of(parameter));
        }
    }
    let several = ties.into_iter().filter(|(_, stages)| stages.len() > 1);
    Ok(several.map(|(parameter, stages)| Tie { parameter, stages }).collect())
}

/// Returns the number of a parameter's tie, if it has one. `ties` is sorted by parameter.
pub(super) fn of(ties: &[Tie], parameter: usize) -> Option<usize> {
    ties.binary_search_by_key(&parameter, |tie| tie.parameter).ok()
}

impl Tie {
    /// Returns the rank of the first stage, and the other ranks that have one of its stages.
    pub(super) fn ranks(&self, schedule: &PipelineSchedule) -> (usize, Vec<usize>) {
        let root = schedule.placement()[self.stages[0]];
        let others: BTreeSet<usize> = self.stages.iter().map(|&stage| schedule.placement()[stage]).collect();
        (root, others.into_iter().filter(|&rank| rank != root).collect())
    }
}

/// Returns this rank's ends of all ties whose parameters are trained. All ranks call this. It sends nothing.
pub(super) fn nodes(
    comm: &mut Communicator,
    schedule: &PipelineSchedule,
    infos: &[ParamInfo],
    ties: &[Tie],
) -> Result<Vec<Node>> {
    let rank = comm.rank();
    let mut nodes = Vec::new();
    for (number, tie) in ties.iter().enumerate().filter(|(_, tie)| infos[tie.parameter].trainable) {
        let order = order(schedule, tie.stages[tie.stages.len() - 1]);
        let mut later = Later::Nothing;
        for (index, &stage) in tie.stages.iter().enumerate().rev() {
            let here = schedule.placement()[stage];
            let before = index.checked_sub(1).map(|index| tie.stages[index]);
            let mut next_later = Later::Nothing;
            let earlier = match before {
                None => Earlier::Sum,
                Some(before) if schedule.placement()[before] == here => {
                    next_later = Later::Here(VecDeque::new());
                    Earlier::Here(before)
                }
                Some(before) => match links::pair(comm, here, schedule.placement()[before])? {
                    Some(LinkEnd::LinkSender(link)) => Earlier::There(Box::new(link)),
                    Some(LinkEnd::LinkReceiver(link)) => {
                        next_later = Later::There(Box::new(link));
                        Earlier::Sum
                    }
                    None => Earlier::Sum,
                },
            };
            let later = std::mem::replace(&mut later, next_later);
            if here == rank {
                let info = infos[tie.parameter].clone();
                nodes.push(Node::new((number, stage), info, order.clone(), later, earlier));
            }
        }
    }
    Ok(nodes)
}

/// One stage's end of a tie.
pub(super) struct Node {
    /// The number of the tie.
    pub(super) tie: usize,
    pub(super) stage: usize,
    info: ParamInfo,
    later: Later,
    earlier: Earlier,
    /// The order of the micro-batches, equal on all stages of the tie.
    order: Vec<usize>,
    /// The number of micro-batches of earlier calls since the last step.
    accumulated: usize,
    /// The number of micro-batches of this call: the first ones of the schedule.
    count: usize,
    /// The number of micro-batches in `order` that were passed on.
    passed: usize,
    /// This stage's gradients by micro-batch, for each of its parameters that reported, in order.
    own: BTreeMap<usize, BTreeMap<usize, Flat>>,
    ended: Vec<bool>,
    /// The first stage's sum, and whether it has any gradient.
    sum: TreeSum<Flat>,
    used: bool,
}

/// The source of the sums of later stages.
pub(super) enum Later {
    /// There are no later stages.
    Nothing,
    /// The next one is on this rank and puts its sums here.
    Here(VecDeque<Option<Flat>>),
    There(Box<LinkReceiver>),
}

/// The destination of the sums.
pub(super) enum Earlier {
    /// This is the first stage, which sums over micro-batches.
    Sum,
    /// The stage with this number, on this rank.
    Here(usize),
    There(Box<LinkSender>),
}

impl Node {
    pub(super) fn new(
        (tie, stage): (usize, usize),
        info: ParamInfo,
        order: Vec<usize>,
        later: Later,
        earlier: Earlier,
    ) -> Self {
        let meta = meta_of_sum(&info);
        let mut node = Self {
            tie,
            stage,
            info,
            later,
            earlier,
            ended: vec![false; order.len()],
            order,
            accumulated: 0,
            count: 0,
            passed: 0,
            own: BTreeMap::new(),
            sum: TreeSum::new(),
            used: false,
        };
        if let Later::There(link) = &mut node.later {
            link.expect(meta.clone());
        }
        if let Earlier::There(link) = &mut node.earlier {
            link.expect(meta);
        }
        node
    }

    /// Stores the gradient of a parameter of this stage.
    pub(super) fn report(&mut self, micro_batch: usize, parameter: usize, values: Values<'_>) -> Result<()> {
        let (dtype, len) = (self.info.dtype, self.info.len());
        let mut own = Flat::zeros(dtype.sum_dtype(), len);
        let taken = own.slice_mut(0, len).take_gradients(values, dtype, true);
        taken.map_err(|source| Error::WrongGradient {
            parameter: self.info.name.clone(),
            source: source.into(),
        })?;
        self.own.entry(micro_batch).or_default().insert(parameter, own);
        Ok(())
    }

    /// Ends the backward of a micro-batch in this stage.
    pub(super) fn end(&mut self, micro_batch: usize) {
        self.ended[micro_batch] = true;
    }

    /// Returns the sum of all micro-batches, and whether any had a gradient. This must be the first stage.
    pub(super) fn take(&mut self) -> (Flat, bool) {
        let sum = self.sum.finish(add).unwrap_or_else(|| {
            let mut nothing = Flat::zeros(self.info.dtype.sum_dtype(), self.info.len());
            nothing.slice_mut(0, self.info.len()).fill_neutral();
            nothing
        });
        (sum, std::mem::take(&mut self.used))
    }

    /// Returns `true` if this is the tie's first stage.
    pub(super) const fn is_first(&self) -> bool {
        matches!(self.earlier, Earlier::Sum)
    }

    /// Starts the first `count` micro-batches of the schedule, after `accumulated` others since the last step.
    pub(super) fn begin(&mut self, accumulated: usize, count: usize) {
        (self.accumulated, self.passed, self.count) = (accumulated, 0, count);
        self.ended.fill(false);
        if let Later::There(link) = &mut self.later {
            link.begin(count);
        }
    }

    /// Inherits the timeout and the reduction order of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        if let Later::There(link) = &mut self.later {
            link.follow(comm);
        }
        if let Earlier::There(link) = &mut self.earlier {
            link.follow(comm);
        }
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        match &self.earlier {
            Earlier::There(link) => link.bytes_sent(),
            Earlier::Sum | Earlier::Here(_) => 0,
        }
    }

    /// Waits until all messages were received.
    pub(super) fn finish(&mut self) -> Result<()> {
        match &mut self.earlier {
            Earlier::There(link) => link.finish(),
            Earlier::Sum | Earlier::Here(_) => Ok(()),
        }
    }

    pub(super) fn forget(&mut self) {
        self.own.clear();
        self.sum = TreeSum::new();
        self.used = false;
        match &mut self.later {
            Later::Nothing => {}
            Later::Here(queue) => queue.clear(),
            Later::There(link) => link.forget(),
        }
        if let Earlier::There(link) = &mut self.earlier {
            link.forget();
        }
    }

    /// Returns the next sum for the previous stage, if all its terms have arrived. With `wait`, waits for them.
    fn next(&mut self, wait: bool) -> Result<Option<Option<Flat>>> {
        let is_absent = |micro_batch: &usize| *micro_batch >= self.count;
        self.passed += self.order[self.passed..].iter().take_while(|next| is_absent(next)).count();
        let Some(&micro_batch) = self.order.get(self.passed) else { return Ok(None) };
        if !self.ended[micro_batch] {
            return Ok(None);
        }
        let later = match &mut self.later {
            Later::Nothing => None,
            Later::Here(queue) => match queue.pop_front() {
                Some(sum) => sum,
                None => return Ok(None),
            },
            Later::There(link) => {
                if !wait && !link.is_ready() {
                    return Ok(None);
                }
                unpack(&self.info, &link.receive()?.1)
            }
        };
        self.passed += 1;
        let own = self.own.remove(&micro_batch).unwrap_or_default();
        // Last to first, the order in which a backward reports.
        let sum = own.into_values().rev().fold(later, |sum, own| {
            Some(match sum {
                None => own,
                Some(mut sum) => {
                    sum.add(&own);
                    sum
                }
            })
        });
        Ok(Some(sum))
    }

    /// Adds the sum of a micro-batch, on the first stage.
    fn add(&mut self, sum: Option<Flat>) {
        let micro_batch = self.accumulated + self.order[self.passed - 1];
        self.used |= sum.is_some();
        let gradient = sum.unwrap_or_else(|| Flat::zeros(self.info.dtype.sum_dtype(), self.info.len()));
        self.sum.add(micro_batch, gradient, add);
    }
}

/// Passes on the sums that are complete. With `wait`, waits for all.
///
/// Nodes are in the order of their ties, and those of one tie from its last stage to its first. Every rank waits in
/// this order, so there is no deadlock.
pub(super) fn pass_on(nodes: &mut [Node], wait: bool) -> Result<()> {
    for index in 0..nodes.len() {
        while let Some(sum) = nodes[index].next(wait)? {
            match &mut nodes[index].earlier {
                Earlier::Sum => nodes[index].add(sum),
                Earlier::There(link) => {
                    let info = &nodes[index].info;
                    let meta = meta_of_sum(info);
                    link.collect()?;
                    link.send(&meta, pack(info, sum.as_ref())).expect("both ends know what it looks like");
                }
                &mut Earlier::Here(stage) => {
                    let tie = nodes[index].tie;
                    let earlier = nodes.iter_mut().find(|node| (node.tie, node.stage) == (tie, stage));
                    if let Some(Node { later: Later::Here(queue), .. }) = earlier {
                        queue.push_back(sum);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Adds the right sum to the left one and frees the right one's memory: other stages' messages bring as much.
fn add(left: &mut Flat, right: Flat) {
    left.add(&right);
}

/// Returns the shape and type of a message with a sum. One additional value is 1 if there is a sum.
fn meta_of_sum(info: &ParamInfo) -> TensorMeta {
    TensorMeta { dtype: info.dtype.sum_dtype(), shape: vec![info.len() + 1] }
}

/// Encodes a sum as a message.
fn pack(info: &ParamInfo, sum: Option<&Flat>) -> Flat {
    let mut message = Flat::zeros(info.dtype.sum_dtype(), info.len() + 1);
    if let Some(sum) = sum {
        let same = "a sum is as long as its parameter, of the type for sums of it";
        message.slice_mut(0, info.len()).copy_from(sum.slice(0, info.len())).expect(same);
        message.set_one(info.len());
    }
    message
}

/// Decodes the result of [`pack`].
fn unpack(info: &ParamInfo, message: &Flat) -> Option<Flat> {
    message.is_one(info.len()).then(|| message.part(info.dtype.sum_dtype(), 0, info.len()))
}

/// Returns the order in which micro-batches go backward through a stage.
pub(super) fn order(schedule: &PipelineSchedule, stage: usize) -> Vec<usize> {
    let list = &schedule.actions()[schedule.placement()[stage]];
    let ends = |action: &&Action| {
        matches!(action, Action::Backward(_) | Action::WeightGradient(_)) && action.stage() == stage
    };
    list.iter().filter(ends).filter_map(|action| action.micro_batch()).collect()
}
