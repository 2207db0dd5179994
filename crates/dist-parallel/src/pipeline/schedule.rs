//! Pipeline schedules: the ordered actions of every rank.

use super::{Action, Flaw, Item, ScheduleProof, generate, kind, validate};
use crate::{Error, Result};

/// The ordered actions of every rank in one step of training.
///
/// It is pure data. [`ScheduleKind::schedule`](super::ScheduleKind::schedule) generates it,
/// [`validate`](Self::validate) proves it, [`Timeline::predict`](super::Timeline::predict) predicts its time, and
/// [`Pipeline`](super::Pipeline) executes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PipelineSchedule {
    ranks: usize,
    micro_batches: usize,
    /// For each stage, its rank.
    placement: Vec<usize>,
    /// For each rank, the largest number of activations of a stage that it may hold at once.
    kept_max: Vec<usize>,
    /// For each rank, its actions.
    actions: Vec<Vec<Action>>,
}

impl PipelineSchedule {
    /// Returns a schedule from the computations of each rank, in order. It adds the messages and the reduction of
    /// gradients. A message is sent right after its contents are computed, and received right before they are needed.
    ///
    /// `placement` contains the rank of each stage. `kept_max` contains for each rank the largest number of
    /// activations of a stage that it may hold between their forward and backward, at least 1.
    pub fn new(
        placement: Vec<usize>,
        micro_batches: usize,
        kept_max: Vec<usize>,
        computations: Vec<Vec<Action>>,
    ) -> Self {
        let ranks = computations.len();
        let mut schedule = Self { ranks, micro_batches, placement, kept_max, actions: Vec::new() };
        schedule.actions = computations.into_iter().map(|list| schedule.with_messages(list)).collect();
        schedule
    }

    /// Returns this schedule with other actions, which include messages.
    #[must_use]
    pub fn with_actions(self, actions: Vec<Vec<Action>>) -> Self {
        Self { actions, ..self }
    }

    /// Returns this schedule for stages with sharded parameters. A rank gathers a stage before it computes and holds
    /// at most `gathered_max` gathered stages, at least 1. It frees the stage that it needs last.
    #[must_use]
    pub fn with_gathers(mut self, gathered_max: usize) -> Self {
        let lists = std::mem::take(&mut self.actions);
        self.actions = lists.into_iter().map(|list| with_gathers(&list, gathered_max.max(1))).collect();
        self
    }

    /// Returns the actions of `rank` for an evaluation: forwards only. If all stages take the same time, ranks wait
    /// only while the pipeline fills. The order has no deadlock if a stage's output waits until the one before it was
    /// received. If the schedule gathers sharded parameters, these actions gather the same number of stages at once.
    ///
    /// # Errors
    /// There are no micro-batches, or more than a schedule supports, or a stage is on a rank that does not exist.
    pub fn forwards(&self, rank: usize, micro_batches: usize) -> Result<Vec<Action>> {
        validate::shape(self)?;
        let (ranks, stages) = (self.ranks, self.stages());
        if !kind::can_be_made(stages, micro_batches) {
            return Err(Error::NoSchedule { ranks, stages, micro_batches });
        }
        let list = self.with_messages(generate::forwards(&self.placement, ranks, micro_batches, rank));
        Ok(match self.actions.get(rank).map_or(0, |training| gathered_most(training)) {
            0 => list,
            gathered_max => with_gathers(&list, gathered_max),
        })
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of stages.
    pub const fn stages(&self) -> usize {
        self.placement.len()
    }

    /// Returns the number of micro-batches.
    pub const fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Returns the rank of each stage.
    pub fn placement(&self) -> &[usize] {
        &self.placement
    }

    /// Returns for each rank the largest number of activations of a stage that it may hold at once.
    pub fn kept_max(&self) -> &[usize] {
        &self.kept_max
    }

    /// Returns the actions of each rank.
    pub fn actions(&self) -> &[Vec<Action>] {
        &self.actions
    }

    /// Returns `true` if the output of this stage and its gradient are sent between ranks.
    pub fn is_sent(&self, stage: usize) -> bool {
        self.placement.get(stage.saturating_add(1)).is_some_and(|&next| next != self.placement[stage])
    }

    /// Proves that the schedule is complete, ordered, free of deadlock, and within its bound of activations.
    ///
    /// # Errors
    /// The first flaw.
    pub fn validate(&self) -> Result<ScheduleProof, Flaw> {
        validate::validate(self)
    }

    fn with_messages(&self, computations: Vec<Action>) -> Vec<Action> {
        let mut list = Vec::with_capacity(3 * computations.len());
        let last = |action: &Action| {
            let ends = |other: &Action| {
                matches!(other, Action::Backward(_) | Action::WeightGradient(_))
                    && other.stage() == action.stage()
            };
            computations.iter().rposition(ends)
        };
        for (index, &action) in computations.iter().enumerate() {
            let (before, after) = self.messages(action);
            list.extend(before);
            list.push(action);
            list.extend(after);
            if last(&action) == Some(index) {
                list.push(Action::ReduceGradients(action.stage()));
            }
        }
        list
    }

    /// Returns the receive before a computation and the send after it.
    fn messages(&self, action: Action) -> (Option<Action>, Option<Action>) {
        match action {
            Action::Forward(item) => {
                let receives = item.stage > 0 && self.is_sent(item.stage - 1);
                let sends = item.stage < self.stages() && self.is_sent(item.stage);
                (
                    receives.then_some(Action::ReceiveActivation(item)),
                    sends.then_some(Action::SendActivation(item)),
                )
            }
            Action::Backward(item) | Action::InputGradient(item) => {
                let receives = item.stage < self.stages() && self.is_sent(item.stage);
                let sends = item.stage > 0 && self.is_sent(item.stage - 1);
                (
                    receives.then_some(Action::ReceiveGradient(item)),
                    sends.then_some(Action::SendGradient(item)),
                )
            }
            _ => (None, None),
        }
    }
}

fn with_gathers(list: &[Action], gathered_max: usize) -> Vec<Action> {
    let mut with = Vec::with_capacity(list.len());
    let mut gathered: Vec<usize> = Vec::new();
    for (index, &action) in list.iter().enumerate() {
        let stage = action.stage();
        if action.is_computation() && !gathered.contains(&stage) {
            if gathered.len() == gathered_max {
                let next_use = |stage: &usize| {
                    let uses = |other: &Action| other.is_computation() && other.stage() == *stage;
                    list[index..].iter().position(uses).unwrap_or(usize::MAX)
                };
                let latest = (0..gathered.len()).max_by_key(|&at| next_use(&gathered[at]));
                with.push(Action::Free(gathered.remove(latest.expect("at least one is gathered"))));
            }
            with.push(Action::Gather(stage));
            gathered.push(stage);
        }
        with.push(action);
    }
    with.extend(gathered.into_iter().map(Action::Free));
    with
}

/// Returns the largest number of stages that a list has gathered at once.
fn gathered_most(list: &[Action]) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for action in list {
        match action {
            Action::Gather(_) => now += 1,
            Action::Free(_) => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// Returns the placement of stage s on rank s modulo the number of ranks.
pub(super) fn round_robin(ranks: usize, stages_per_rank: usize) -> Vec<usize> {
    (0..ranks * stages_per_rank).map(|stage| stage % ranks).collect()
}

/// Returns the placement from the first rank to the last and back.
pub(super) fn v_shaped(ranks: usize) -> Vec<usize> {
    (0..ranks).chain((0..ranks).rev()).collect()
}

/// Returns the computations by their abbreviations, for generators.
pub(super) const fn forward(stage: usize, micro_batch: usize) -> Action {
    Action::Forward(Item::new(stage, micro_batch))
}

pub(super) const fn backward(stage: usize, micro_batch: usize) -> Action {
    Action::Backward(Item::new(stage, micro_batch))
}

pub(super) const fn input_gradient(stage: usize, micro_batch: usize) -> Action {
    Action::InputGradient(Item::new(stage, micro_batch))
}

pub(super) const fn weight_gradient(stage: usize, micro_batch: usize) -> Action {
    Action::WeightGradient(Item::new(stage, micro_batch))
}
