//! The lists of actions of a trainer whose ranks have the whole model. A call repeats one of them for each round.

use super::actions::{GatherPolicy, StageUnits, StepAction, own_code_actions, step_actions};
use super::work::Work;
use crate::fsdp::Plan;
use crate::pipeline::{Action, Item};

/// The actions of one round: a micro-batch of this rank, or its part in those of other ranks.
pub(crate) struct RoundActions {
    /// A forward and a backward of the model's blocks.
    pub(crate) step: Vec<StepAction>,
    /// A forward alone.
    forward: Vec<StepAction>,
    /// The user's own code. Empty if parameters are freed, because that code needs all of them.
    own_code: Vec<StepAction>,
}

impl RoundActions {
    pub(crate) fn new(plan: &Plan) -> Self {
        let stage = StageUnits { number: 0, layout: &plan.layout, policy: plan.gather_policy() };
        let list = [Action::Forward(Item::new(0, 0)), Action::Backward(Item::new(0, 0))];
        Self {
            step: step_actions(&list, &[stage], 0),
            forward: step_actions(&list[..1], &[stage], 0),
            own_code: if stage.policy == GatherPolicy::Never { own_code_actions(stage) } else { Vec::new() },
        }
    }

    /// Returns the actions of a round of this work.
    pub(super) fn of<M, A>(&self, work: &Work<'_, '_, M, A>) -> &[StepAction] {
        match work {
            Work::OwnCode { .. } => &self.own_code,
            Work::OwnStep { .. } => &self.own_code[..1],
            Work::Blocks { .. } if work.trains() => &self.step,
            Work::Blocks { .. } => &self.forward,
        }
    }
}
