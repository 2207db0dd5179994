//! The actions of one rank in a step or in an evaluation. They are pure data.
//!
//! A schedule says in which order a rank computes its stages, and sends and receives between them. [`step_actions`]
//! divides each stage into its units, which are gathered, used and freed one by one. The strategies differ only in
//! this data:
//!
//! * Data-parallel training is one stage of one unit that is never freed. The user's own code can compute it.
//! * Local SGD is the same without reductions: each rank has gradients of its own. A step in which the user's code also
//!   updates the parameters is one action.
//! * Sharded training is one stage of several units, which are gathered for each use.
//! * A pipeline has several stages. If they are sharded, the schedule says when the units of a stage are gathered.
//!
//! The actions are the same on all ranks with the same stages, so these start their operations in one order.

use std::collections::{HashMap, HashSet};

use crate::fsdp::{Layout, Reshard};
use crate::pipeline::{Action, Item};

/// An action of one rank. Micro-batches have their numbers in the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StepAction {
    /// Starts to gather the parameters of a unit.
    Gather(UnitOf),
    /// Waits for the parameters and gives them to the model. With `keep`, the reshard group keeps them until they are
    /// gathered again.
    Materialise { unit: UnitOf, keep: bool },
    /// Frees the parameters.
    Free(UnitOf),
    /// Runs the user's own code, which computes a micro-batch with the whole model.
    Compute(UnitOf, usize),
    /// Runs the forward of the unit's blocks.
    Forward(UnitOf, usize),
    /// Computes the loss and its gradient from the output of the last stage.
    Loss(usize),
    /// Runs the backward of the unit's blocks.
    Backward(UnitOf, usize, BackwardPart),
    /// The gradients of a micro-batch are final: adds them to the sum, or starts to reduce them.
    Close(UnitOf, usize),
    /// Starts the reductions of a stage's gradients, which are summed over all micro-batches.
    Reduce(usize),
    /// Sends the stage's output to the next stage.
    SendActivation(Item),
    /// Receives the stage's input from the previous stage.
    ReceiveActivation(Item),
    /// Sends the gradient of the stage's input to the previous stage.
    SendGradient(Item),
    /// Receives the gradient of the stage's output from the next stage.
    ReceiveGradient(Item),
}

impl StepAction {
    /// Returns the micro-batch. `None` if the action concerns parameters or all micro-batches.
    pub(crate) const fn micro_batch(self) -> Option<usize> {
        match self {
            Self::Gather(_) | Self::Materialise { .. } | Self::Free(_) | Self::Reduce(_) => None,
            Self::Compute(_, micro_batch)
            | Self::Forward(_, micro_batch)
            | Self::Loss(micro_batch)
            | Self::Backward(_, micro_batch, _)
            | Self::Close(_, micro_batch) => Some(micro_batch),
            Self::SendActivation(item)
            | Self::ReceiveActivation(item)
            | Self::SendGradient(item)
            | Self::ReceiveGradient(item) => Some(item.micro_batch),
        }
    }
}

/// A unit of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct UnitOf {
    pub(crate) stage: usize,
    pub(crate) unit: usize,
}

/// The part of a micro-batch's backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BackwardPart {
    Whole,
    Input,
    Weight,
}

/// The times at which the units of a stage are gathered and freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GatherPolicy {
    /// All parameters are always there.
    Never,
    /// A unit is gathered for each use. `prefetch` units are gathered ahead of it.
    EachUse { prefetch: usize, reshard: Reshard },
    /// All units of a stage are gathered and freed together, when the schedule says so. If it never does, they are
    /// gathered during the whole list.
    WithStage,
}

/// A stage of this rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageUnits<'a> {
    pub(crate) number: usize,
    pub(crate) layout: &'a Layout,
    pub(crate) policy: GatherPolicy,
}

/// Returns the actions of a rank with these stages, from its list in a schedule. `last` is the last stage of the model.
pub(crate) fn step_actions(list: &[Action], stages: &[StageUnits<'_>], last: usize) -> Vec<StepAction> {
    let trains = |action: &Action| matches!(action, Action::Backward(_) | Action::InputGradient(_));
    let trains = list.iter().any(trains);
    let mut expansion = Expansion { stages, trains, actions: Vec::new(), arriving: HashSet::new() };
    let throughout = || stages.iter().filter(|stage| !list.contains(&Action::Gather(stage.number)));
    throughout().for_each(|stage| expansion.gather_stage(stage));
    let mut loss_due = None;
    for (index, &action) in list.iter().enumerate() {
        let start = expansion.actions.len();
        expansion.expand(action);
        if let Some(micro_batch) = loss_due.take() {
            // The first units of the backward are gathered while the loss is computed.
            let gather = |action: &&StepAction| matches!(action, StepAction::Gather(_));
            let ahead = expansion.actions[start..].iter().take_while(gather).count();
            expansion.actions.insert(start + ahead, StepAction::Loss(micro_batch));
        }
        let Action::Forward(item) = action else { continue };
        if item.stage == last {
            match list.get(index + 1) {
                Some(&(Action::Backward(next) | Action::InputGradient(next))) if next == item => {
                    loss_due = Some(item.micro_batch);
                }
                _ => expansion.actions.push(StepAction::Loss(item.micro_batch)),
            }
        }
    }
    throughout().for_each(|stage| expansion.free_stage(stage));
    debug_assert_eq!(validate(&expansion.actions, stages), Ok(()));
    expansion.actions
}

/// Returns the actions of a rank whose user computes a micro-batch by own code, with the whole model of one stage.
pub(crate) fn own_code_actions(stage: StageUnits<'_>) -> Vec<StepAction> {
    let units = stage.with_blocks().into_iter().rev().chain(stage.root());
    let compute = StepAction::Compute(UnitOf { stage: stage.number, unit: 0 }, 0);
    let closes = units.map(|unit| StepAction::Close(unit, 0));
    let actions: Vec<_> = [compute].into_iter().chain(closes).collect();
    debug_assert_eq!(validate(&actions, &[stage]), Ok(()));
    actions
}

/// The actions so far.
struct Expansion<'a> {
    stages: &'a [StageUnits<'a>],
    /// `true` if a backward follows each forward.
    trains: bool,
    actions: Vec<StepAction>,
    /// The units that are gathered with their stage and have not been used since.
    arriving: HashSet<UnitOf>,
}

impl Expansion<'_> {
    fn expand(&mut self, action: Action) {
        let stage = self.stages.iter().find(|stage| stage.number == action.stage());
        let stage = *stage.expect("a rank's list has its own stages only");
        match action {
            Action::Forward(item) => self.forward(&stage, item.micro_batch),
            Action::Backward(item) => self.backward(&stage, item.micro_batch, BackwardPart::Whole),
            Action::InputGradient(item) => self.backward(&stage, item.micro_batch, BackwardPart::Input),
            Action::WeightGradient(item) => self.backward(&stage, item.micro_batch, BackwardPart::Weight),
            Action::SendActivation(item) => self.actions.push(StepAction::SendActivation(item)),
            Action::ReceiveActivation(item) => self.actions.push(StepAction::ReceiveActivation(item)),
            Action::SendGradient(item) => self.actions.push(StepAction::SendGradient(item)),
            Action::ReceiveGradient(item) => self.actions.push(StepAction::ReceiveGradient(item)),
            Action::Gather(_) => self.gather_stage(&stage),
            Action::Free(_) => self.free_stage(&stage),
            Action::ReduceGradients(number) => self.actions.push(StepAction::Reduce(number)),
        }
    }

    /// Appends the forward of a micro-batch through all units. If no backward follows, all units except the root unit
    /// are freed.
    fn forward(&mut self, stage: &StageUnits<'_>, micro_batch: usize) {
        if let Some(root) = stage.root().filter(|_| stage.gathers_each_use()) {
            self.actions.push(StepAction::Gather(root));
            self.actions.push(StepAction::Materialise { unit: root, keep: false });
        }
        let units = stage.with_blocks();
        let keep = self.trains && stage.reshards_to_group();
        for (place, &unit) in units.iter().enumerate() {
            self.gather_ahead(stage, &units, place, |_| true);
            self.materialise(stage, unit, keep);
            self.actions.push(StepAction::Forward(unit, micro_batch));
            if !(self.trains && stage.keeps(unit)) {
                self.free(stage, unit);
            }
        }
        if let Some(root) = stage.root().filter(|_| !self.trains) {
            self.free(stage, root);
        }
    }

    /// Appends the backward of a micro-batch through all units, after a forward.
    fn backward(&mut self, stage: &StageUnits<'_>, micro_batch: usize, part: BackwardPart) {
        let mut units = stage.with_blocks();
        units.reverse();
        let close = (part != BackwardPart::Input).then_some(micro_batch);
        for (place, &unit) in units.iter().enumerate() {
            self.gather_ahead(stage, &units, place, |unit| !stage.keeps(unit));
            if !stage.keeps(unit) {
                self.materialise(stage, unit, false);
            }
            self.actions.push(StepAction::Backward(unit, micro_batch, part));
            self.free(stage, unit);
            self.actions.extend(close.map(|micro_batch| StepAction::Close(unit, micro_batch)));
        }
        if let Some(root) = stage.root() {
            self.free(stage, root);
            self.actions.extend(close.map(|micro_batch| StepAction::Close(root, micro_batch)));
        }
    }

    /// Starts to gather later units. At the first place these are all units within the prefetch distance, later the
    /// next one.
    fn gather_ahead(
        &mut self,
        stage: &StageUnits<'_>,
        units: &[UnitOf],
        place: usize,
        wanted: impl Fn(UnitOf) -> bool,
    ) {
        let GatherPolicy::EachUse { prefetch, .. } = stage.policy else { return };
        let last = place.saturating_add(prefetch);
        let first = if place == 0 { 0 } else { last };
        let ahead = units.iter().take(last.saturating_add(1)).skip(first);
        let gathered = ahead.filter(|&&unit| stage.has_parameters(unit) && wanted(unit));
        self.actions.extend(gathered.map(|&unit| StepAction::Gather(unit)));
    }

    /// Materialises a unit before its use, and the root unit before the first use of its stage.
    fn materialise(&mut self, stage: &StageUnits<'_>, unit: UnitOf, keep: bool) {
        let with_stage = stage.root().into_iter().chain([unit]).filter(|unit| self.arriving.remove(unit));
        self.actions.extend(with_stage.map(|unit| StepAction::Materialise { unit, keep: false }));
        if stage.gathers_each_use() && stage.has_parameters(unit) {
            self.actions.push(StepAction::Materialise { unit, keep });
        }
    }

    /// Frees a unit after its use, if it was gathered for that.
    fn free(&mut self, stage: &StageUnits<'_>, unit: UnitOf) {
        if stage.gathers_each_use() && stage.has_parameters(unit) {
            self.actions.push(StepAction::Free(unit));
        }
    }

    /// Gathers all units of a stage that are gathered with it.
    fn gather_stage(&mut self, stage: &StageUnits<'_>) {
        for unit in stage.gathered_with_stage() {
            self.actions.push(StepAction::Gather(unit));
            self.arriving.insert(unit);
        }
    }

    /// Frees all units of a stage that are gathered with it.
    fn free_stage(&mut self, stage: &StageUnits<'_>) {
        for unit in stage.gathered_with_stage() {
            if self.arriving.remove(&unit) {
                self.actions.push(StepAction::Materialise { unit, keep: false });
            }
            self.actions.push(StepAction::Free(unit));
        }
    }
}

impl StageUnits<'_> {
    /// Returns the units with blocks, in order.
    fn with_blocks(&self) -> Vec<UnitOf> {
        let units = (0..self.layout.units.len()).filter(|&unit| !self.layout.units[unit].is_root());
        units.map(|unit| UnitOf { stage: self.number, unit }).collect()
    }

    fn root(&self) -> Option<UnitOf> {
        self.layout.root().map(|unit| UnitOf { stage: self.number, unit })
    }

    fn has_parameters(&self, unit: UnitOf) -> bool {
        !self.layout.units[unit.unit].flat_params.is_empty()
    }

    const fn gathers_each_use(&self) -> bool {
        matches!(self.policy, GatherPolicy::EachUse { .. })
    }

    /// Returns the units that are gathered and freed with the stage.
    fn gathered_with_stage(&self) -> Vec<UnitOf> {
        match self.policy {
            GatherPolicy::WithStage => {
                let units = self.with_blocks().into_iter().chain(self.root());
                units.filter(|&unit| self.has_parameters(unit)).collect()
            }
            GatherPolicy::Never | GatherPolicy::EachUse { .. } => Vec::new(),
        }
    }

    /// Returns `true` if a reshard group keeps the parameters between forward and backward.
    const fn reshards_to_group(&self) -> bool {
        matches!(self.policy, GatherPolicy::EachUse { reshard: Reshard::ToGroup(_), .. })
    }

    /// Returns `true` if a unit's parameters stay gathered between forward and backward, whatever the schedule says.
    fn keeps(&self, unit: UnitOf) -> bool {
        match self.policy {
            GatherPolicy::Never => true,
            GatherPolicy::WithStage => false,
            GatherPolicy::EachUse { reshard: Reshard::All | Reshard::ToGroup(_), .. } => false,
            GatherPolicy::EachUse { reshard: Reshard::AllButLast, .. } => {
                self.with_blocks().last() == Some(&unit)
            }
            GatherPolicy::EachUse { reshard: Reshard::Nothing, .. } => true,
        }
    }
}

/// The first action of a list that cannot be executed, and the reason.
pub(crate) type ActionFlaw = (Option<StepAction>, &'static str);

/// Returns a flaw unless the list can be executed: each unit is gathered, materialised, used and freed in this order, its
/// forward comes before its backward, and no unit stays gathered.
pub(crate) fn validate(actions: &[StepAction], stages: &[StageUnits<'_>]) -> Result<(), ActionFlaw> {
    let mut units: HashMap<UnitOf, UnitState> = HashMap::new();
    let mut done = HashSet::new();
    let stage_of = |unit: UnitOf| stages.iter().find(|stage| stage.number == unit.stage);
    for &action in actions {
        let mut change =
            |unit: UnitOf, from: UnitState, to: UnitState| units.insert(unit, to).unwrap_or_default() == from;
        let fits = match action {
            StepAction::Gather(unit) => change(unit, UnitState::Sharded, UnitState::Arriving),
            StepAction::Materialise { unit, .. } => change(unit, UnitState::Arriving, UnitState::Whole),
            StepAction::Free(unit) => change(unit, UnitState::Whole, UnitState::Sharded),
            _ => true,
        };
        if !fits {
            return Err((Some(action), "the unit is not in the state for this"));
        }
        if let StepAction::Compute(unit, _) | StepAction::Forward(unit, _) | StepAction::Backward(unit, ..) =
            action
        {
            let stage = stage_of(unit).ok_or((Some(action), "it is a stage of another rank"))?;
            let used = stage.root().into_iter().chain([unit]);
            let is_missing = |unit: &UnitOf| {
                stage.policy != GatherPolicy::Never
                    && stage.has_parameters(*unit)
                    && units.get(unit) != Some(&UnitState::Whole)
            };
            if used.into_iter().any(|unit| is_missing(&unit)) {
                return Err((Some(action), "the parameters are not there"));
            }
        }
        let needed = match action {
            StepAction::Backward(unit, micro_batch, BackwardPart::Whole | BackwardPart::Input) => {
                vec![StepAction::Forward(unit, micro_batch)]
            }
            StepAction::Backward(unit, micro_batch, BackwardPart::Weight) => {
                vec![StepAction::Backward(unit, micro_batch, BackwardPart::Input)]
            }
            _ => Vec::new(),
        };
        if !needed.iter().all(|needed| done.contains(needed)) {
            return Err((Some(action), "it comes before the action that it needs"));
        }
        let repeats =
            matches!(action, StepAction::Gather(_) | StepAction::Materialise { .. } | StepAction::Free(_));
        if !done.insert(action) && !repeats {
            return Err((Some(action), "it comes twice"));
        }
    }
    match units.values().all(|state| *state == UnitState::Sharded) {
        true => Ok(()),
        false => Err((None, "a unit is never freed")),
    }
}

/// The state of a unit's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum UnitState {
    #[default]
    Sharded,
    Arriving,
    Whole,
}

#[cfg(test)]
mod tests;
