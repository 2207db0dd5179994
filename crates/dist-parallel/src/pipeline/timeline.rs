//! The times of a schedule's computations.

use std::collections::HashMap;
use std::time::Duration;

use super::{Action, Item, PipelineSchedule};

/// The durations of computations and messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    stages: Vec<StageCost>,
    message: Duration,
}

/// The durations of one micro-batch in one stage. A whole backward takes as long as its two parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// The forward.
    pub forward: Duration,
    /// The gradient of the input.
    pub input_gradient: Duration,
    /// The gradients of the parameters.
    pub weight_gradient: Duration,
}

impl Costs {
    /// Returns costs with one entry per stage. Messages take no time.
    pub const fn new(stages: Vec<StageCost>) -> Self {
        Self { stages, message: Duration::ZERO }
    }

    /// Returns equal costs for this many stages. Messages take no time.
    pub fn uniform(stages: usize, stage: StageCost) -> Self {
        Self::new(vec![stage; stages])
    }

    /// Returns these costs with messages that arrive this long after they were sent.
    #[must_use]
    pub fn with_message(self, message: Duration) -> Self {
        Self { message, ..self }
    }

    /// Returns the duration of a computation. Other actions and unknown stages take no time.
    pub fn of(&self, action: Action) -> Duration {
        let stage = self.stages.get(action.stage()).copied().unwrap_or_default();
        match action {
            Action::Forward(_) => stage.forward,
            Action::Backward(_) => stage.input_gradient + stage.weight_gradient,
            Action::InputGradient(_) => stage.input_gradient,
            Action::WeightGradient(_) => stage.weight_gradient,
            _ => Duration::ZERO,
        }
    }

    /// Returns the cost of every stage, if all are equal and messages take no time.
    pub(super) fn uniform_stage(&self) -> Option<StageCost> {
        let first = *self.stages.first()?;
        let alike = self.message.is_zero() && self.stages.iter().all(|stage| *stage == first);
        alike.then_some(first)
    }
}

/// The time span of a computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The computation.
    pub action: Action,
    /// The start, relative to the start of the step.
    pub start: Duration,
    /// The end, relative to the start of the step.
    pub end: Duration,
}

/// The time spans of all computations of a step, predicted or measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// For each rank, its computations in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// Predicts the timeline of a valid schedule. A rank executes one action at a time and waits only for messages.
    ///
    /// For a schedule with a deadlock, it contains the computations before the deadlock.
    pub fn predict(schedule: &PipelineSchedule, costs: &Costs) -> Self {
        let mut clocks = vec![Duration::ZERO; schedule.ranks()];
        let mut next = vec![0; schedule.ranks()];
        let mut ranks = vec![Vec::new(); schedule.ranks()];
        // The arrival times of messages.
        let mut arrivals: HashMap<Action, Duration> = HashMap::new();
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (rank, list) in schedule.actions().iter().enumerate() {
                while let Some(&action) = list.get(next[rank]) {
                    if matches!(action, Action::ReceiveActivation(_) | Action::ReceiveGradient(_)) {
                        let Some(arrival) = arrivals.remove(&action) else { break };
                        clocks[rank] = clocks[rank].max(arrival);
                    } else if let Some(received) = received(action) {
                        arrivals.insert(received, clocks[rank] + costs.message);
                    } else if action.is_computation() {
                        let start = clocks[rank];
                        clocks[rank] += costs.of(action);
                        ranks[rank].push(Span { action, start, end: clocks[rank] });
                    }
                    next[rank] += 1;
                    moved = true;
                }
            }
        }
        Self { ranks }
    }

    /// Returns the time from the start to the end of the last computation.
    pub fn makespan(&self) -> Duration {
        self.spans().map(|span| span.end).max().unwrap_or_default()
    }

    /// Returns the sum of all computation times.
    pub fn computing(&self) -> Duration {
        self.spans().map(|span| span.end.saturating_sub(span.start)).sum()
    }

    /// Returns the bubble: the waiting time of all ranks over their computation time, or 0 without computations.
    pub fn bubble(&self) -> f64 {
        let computing = self.computing().as_secs_f64();
        if computing == 0.0 {
            return 0.0;
        }
        (self.makespan().as_secs_f64() * self.ranks.len() as f64 - computing).max(0.0) / computing
    }

    /// Returns the mean duration of the computations of each of `stages` stages, to predict another step. A whole
    /// backward counts as an input gradient, because its halves were not measured separately.
    pub fn stage_costs(&self, stages: usize) -> Vec<StageCost> {
        let mean = |stage: usize, is_kind: fn(Action) -> bool| {
            let spans = self.spans().filter(|span| span.action.stage() == stage && is_kind(span.action));
            let (count, total) = spans.fold((0_u32, Duration::ZERO), |(count, total), span| {
                (count + 1, total + span.end.saturating_sub(span.start))
            });
            total.checked_div(count).unwrap_or_default()
        };
        let cost = |stage| StageCost {
            forward: mean(stage, |action| matches!(action, Action::Forward(_))),
            input_gradient: mean(stage, |action| {
                matches!(action, Action::Backward(_) | Action::InputGradient(_))
            }),
            weight_gradient: mean(stage, |action| matches!(action, Action::WeightGradient(_))),
        };
        (0..stages).map(cost).collect()
    }

    fn spans(&self) -> impl Iterator<Item = &Span> {
        self.ranks.iter().flatten()
    }
}

/// Returns the receive that matches a send.
pub(super) const fn received(action: Action) -> Option<Action> {
    match action {
        Action::SendActivation(Item { stage, micro_batch }) => {
            Some(Action::ReceiveActivation(Item::new(stage + 1, micro_batch)))
        }
        Action::SendGradient(Item { stage, micro_batch }) => {
            Some(Action::ReceiveGradient(Item::new(stage - 1, micro_batch)))
        }
        _ => None,
    }
}
