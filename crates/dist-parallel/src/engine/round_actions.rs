//! The lists of actions of a trainer whose ranks have the whole model. A call repeats one of them for each round.

use std::sync::Arc;

use super::actions::{GatherPolicy, StageUnits, StepAction, own_code_actions, step_actions};
use super::work::Work;
use crate::fsdp::Plan;
use crate::pipeline::{Action, Item};

/// The actions of one round: a micro-batch of this rank, or its part in those of other ranks. In a pipeline, those of a
/// step.
pub(crate) struct RoundActions {
    /// A forward and a backward of the model's blocks.
    pub(crate) step: Arc<[StepAction]>,
    /// A forward alone. Empty in a pipeline, whose list depends on the number of micro-batches.
    forward: Arc<[StepAction]>,
    /// The user's own code. Empty if parameters are freed, because that code needs all of them.
    own_code: Arc<[StepAction]>,
}

impl RoundActions {
    pub(crate) fn new(plan: &Plan) -> Self {
        let stage = StageUnits { number: 0, layout: &plan.layout, policy: plan.gather_policy() };
        let list = [Action::Forward(Item::new(0, 0)), Action::Backward(Item::new(0, 0))];
        Self {
            step: step_actions(&list, &[stage], 0).into(),
            forward: step_actions(&list[..1], &[stage], 0).into(),
            own_code: match stage.policy {
                GatherPolicy::Never => own_code_actions(stage).into(),
                _ => Arc::new([]),
            },
        }
    }

    /// Returns the actions of a rank in a step of a pipeline.
    pub(crate) fn of_schedule(step: Vec<StepAction>) -> Self {
        Self { step: step.into(), forward: Arc::new([]), own_code: Arc::new([]) }
    }

    /// Returns the actions of a round of this work.
    pub(super) fn of<M, A>(&self, work: &Work<'_, '_, M, A>) -> Arc<[StepAction]> {
        match work {
            Work::OwnCode { .. } => Arc::clone(&self.own_code),
            // The gradients are never closed.
            Work::OwnStep { .. } => self.own_code[..1].into(),
            Work::Blocks { .. } if work.trains() => Arc::clone(&self.step),
            Work::Blocks { .. } => Arc::clone(&self.forward),
        }
    }
}
