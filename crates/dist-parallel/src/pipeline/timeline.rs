//! When everything of a schedule happens.

use std::collections::HashMap;
use std::time::Duration;

use super::{Action, Item, PipelineSchedule};

/// How long things take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    stages: Vec<StageCost>,
    message: Duration,
}

/// How long one micro-batch takes in one stage. A whole backward takes as long as its two parts.
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
    /// Every stage of its own; messages take no time.
    pub const fn new(stages: Vec<StageCost>) -> Self {
        Self { stages, message: Duration::ZERO }
    }

    /// This many stages alike; messages take no time.
    pub fn uniform(stages: usize, stage: StageCost) -> Self {
        Self::new(vec![stage; stages])
    }

    /// The same, with messages that arrive this long after they were sent.
    #[must_use]
    pub fn with_message(self, message: Duration) -> Self {
        Self { message, ..self }
    }

    /// How long a computation takes; anything else, and what is in no stage, takes no time.
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

    /// The cost of every stage, if they are alike and messages take no time.
    pub(super) fn uniform_stage(&self) -> Option<StageCost> {
        let first = *self.stages.first()?;
        let alike = self.message.is_zero() && self.stages.iter().all(|stage| *stage == first);
        alike.then_some(first)
    }
}

/// When a computation happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The computation.
    pub action: Action,
    /// When it began, since the step did.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

/// When every computation of a step happened, by a prediction or by measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// For each rank, its computations in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// What a schedule without flaw takes. A rank does one thing after the other, and waits only for messages.
    ///
    /// Of a schedule that would never end, only what happens is told.
    pub fn predict(schedule: &PipelineSchedule, costs: &Costs) -> Self {
        let mut clocks = vec![Duration::ZERO; schedule.ranks()];
        let mut next = vec![0; schedule.ranks()];
        let mut ranks = vec![Vec::new(); schedule.ranks()];
        // When what was sent arrives.
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

    /// From the beginning to the end of the last computation.
    pub fn makespan(&self) -> Duration {
        self.spans().map(|span| span.end).max().unwrap_or_default()
    }

    /// What all ranks compute, added up.
    pub fn computing(&self) -> Duration {
        self.spans().map(|span| span.end.saturating_sub(span.start)).sum()
    }

    /// The time in which ranks wait over the time in which they compute; 0 if nothing is computed.
    pub fn bubble(&self) -> f64 {
        let computing = self.computing().as_secs_f64();
        if computing == 0.0 {
            return 0.0;
        }
        (self.makespan().as_secs_f64() * self.ranks.len() as f64 - computing).max(0.0) / computing
    }

    /// What a computation took on average, for each of so many stages: what another step may be predicted from. A whole
    /// backward counts as one of its input, whose halves cannot be told apart.
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

/// What the receiver does with what was sent.
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
