//! The order in which units are gathered, used and freed for one micro-batch. It is pure data and the same on every
//! rank, so all ranks start their operations in one order.

use super::layout::{Layout, Unit};
use super::options::Reshard;

/// An action on a unit, by the unit's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitAction {
    /// Starts to gather the parameters.
    Gather(usize),
    /// Waits for the parameters and gives them to the model.
    Materialise(usize),
    /// Like `Materialise`, and the reshard group keeps the parameters until they are gathered again.
    MaterialiseForGroup(usize),
    /// Runs the forward of the blocks.
    Forward(usize),
    /// Runs the backward of the blocks.
    Backward(usize),
    /// Frees the parameters.
    Free(usize),
    /// Reduces the gradients, which are final.
    Reduce(usize),
}

/// The options that decide when units are gathered and freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GatherPolicy {
    /// `true` if parameters are freed between their uses.
    pub(crate) frees: bool,
    pub(crate) prefetch: usize,
    pub(crate) reshard: Reshard,
}

impl GatherPolicy {
    /// Returns the actions of a forward through all blocks. If no backward follows, all units except the root unit
    /// are freed.
    pub(crate) fn forward(self, layout: &Layout, backward_follows: bool) -> Vec<UnitAction> {
        let mut actions = Vec::new();
        if let Some(root) = layout.root().filter(|_| self.frees) {
            actions.extend([UnitAction::Gather(root), UnitAction::Materialise(root)]);
        }
        let units = with_blocks(layout);
        for (place, &unit) in units.iter().enumerate() {
            self.gather_ahead(&mut actions, layout, &units, place, |_| true);
            if backward_follows && matches!(self.reshard, Reshard::ToGroup(_)) {
                actions.extend(
                    self.gathers(&layout.units[unit]).then_some(UnitAction::MaterialiseForGroup(unit)),
                );
            } else {
                self.materialise(&mut actions, layout, unit);
            }
            actions.push(UnitAction::Forward(unit));
            if !(backward_follows && self.keeps(layout, unit)) {
                self.free(&mut actions, layout, unit);
            }
        }
        if let Some(root) = layout.root().filter(|_| !backward_follows) {
            self.free(&mut actions, layout, root);
        }
        actions
    }

    /// Returns the actions of a backward through all blocks, after a forward.
    pub(crate) fn backward(self, layout: &Layout) -> Vec<UnitAction> {
        let mut actions = Vec::new();
        let mut units = with_blocks(layout);
        units.reverse();
        for (place, &unit) in units.iter().enumerate() {
            self.gather_ahead(&mut actions, layout, &units, place, |unit| !self.keeps(layout, unit));
            if !self.keeps(layout, unit) {
                self.materialise(&mut actions, layout, unit);
            }
            actions.push(UnitAction::Backward(unit));
            self.free(&mut actions, layout, unit);
            actions.push(UnitAction::Reduce(unit));
        }
        if let Some(root) = layout.root() {
            self.free(&mut actions, layout, root);
            actions.push(UnitAction::Reduce(root));
        }
        actions
    }

    /// Returns `true` if a unit's parameters stay gathered between forward and backward.
    pub(crate) fn keeps(self, layout: &Layout, unit: usize) -> bool {
        match self.reshard {
            Reshard::All | Reshard::ToGroup(_) => false,
            Reshard::AllButLast => with_blocks(layout).last() == Some(&unit),
            Reshard::Nothing => true,
        }
    }

    /// Starts to gather later units. At the first place these are all units within the prefetch distance, later the
    /// next one.
    fn gather_ahead(
        self,
        actions: &mut Vec<UnitAction>,
        layout: &Layout,
        units: &[usize],
        place: usize,
        wanted: impl Fn(usize) -> bool,
    ) {
        let first = if place == 0 { 0 } else { place.saturating_add(self.prefetch) };
        let last = place.saturating_add(self.prefetch);
        let ahead = units.iter().take(last.saturating_add(1)).skip(first);
        let gathered = ahead.filter(|&&unit| self.gathers(&layout.units[unit]) && wanted(unit));
        actions.extend(gathered.map(|&unit| UnitAction::Gather(unit)));
    }

    fn materialise(self, actions: &mut Vec<UnitAction>, layout: &Layout, unit: usize) {
        actions.extend(self.gathers(&layout.units[unit]).then_some(UnitAction::Materialise(unit)));
    }

    fn free(self, actions: &mut Vec<UnitAction>, layout: &Layout, unit: usize) {
        actions.extend(self.gathers(&layout.units[unit]).then_some(UnitAction::Free(unit)));
    }

    /// Returns `true` if a unit has parameters to gather.
    fn gathers(self, unit: &Unit) -> bool {
        self.frees && !unit.flat_params.is_empty()
    }
}

/// Returns the units with blocks, in order.
fn with_blocks(layout: &Layout) -> Vec<usize> {
    (0..layout.units.len()).filter(|&unit| !layout.units[unit].is_root()).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::UnitAction::{Backward, Forward, Free, Gather, Materialise, MaterialiseForGroup, Reduce};
    use super::*;
    use crate::fsdp::options::Units;
    use crate::{FloatType, ParamInfo};

    /// Returns a layout with blocks of one parameter each. If `tied`, the last block has the parameter of the first.
    fn layout(blocks: usize, tied: bool) -> Layout {
        let mut infos: Vec<ParamInfo> =
            (0..blocks).map(|index| ParamInfo::new(format!("p{index}"), [3], FloatType::F32)).collect();
        if tied {
            infos[blocks - 1].same_as = Some(0);
        }
        Layout::new(&infos, &Vec::from_iter(0..=blocks), &Units::EachBlock, 2).unwrap()
    }

    #[test]
    fn without_prefetch_a_unit_is_gathered_when_it_is_needed() {
        let plain = GatherPolicy { frees: true, prefetch: 0, reshard: Reshard::All };
        let layout = layout(2, false);
        let forward =
            [Gather(0), Materialise(0), Forward(0), Free(0), Gather(1), Materialise(1), Forward(1), Free(1)];
        assert_eq!(plain.forward(&layout, true), forward);
        let backward = [Gather(1), Materialise(1), Backward(1), Free(1), Reduce(1)];
        assert_eq!(plain.backward(&layout)[..5], backward);
        let whole = GatherPolicy { frees: false, ..plain };
        assert_eq!(whole.forward(&layout, true), [Forward(0), Forward(1)]);
        assert_eq!(whole.backward(&layout), [Backward(1), Reduce(1), Backward(0), Reduce(0)]);
    }

    #[rstest]
    fn units_are_gathered_when_used_and_never_more_than_prefetch_allows(
        #[values(1, 2, 3, 6)] blocks: usize,
        #[values(0, 1, 2, 3, 9, usize::MAX)] prefetch: usize,
        #[values(Reshard::All, Reshard::AllButLast, Reshard::Nothing, Reshard::ToGroup(1))] reshard: Reshard,
        #[values(false, true)] tied: bool,
    ) {
        let (layout, plan) = (layout(blocks.max(2), tied), GatherPolicy { frees: true, prefetch, reshard });
        let forward = plan.forward(&layout, true);
        let (mut gathering, mut loaded) = (Vec::new(), Vec::new());
        let (mut gathers, mut reduced) = (0, Vec::new());
        for (index, action) in forward.iter().copied().chain(plan.backward(&layout)).enumerate() {
            match action {
                Gather(unit) => {
                    assert!(!gathering.contains(&unit) && !loaded.contains(&unit));
                    gathering.push(unit);
                    gathers += 1;
                }
                Materialise(unit) | MaterialiseForGroup(unit) => {
                    gathering.retain(|&other| other != unit);
                    loaded.push(unit);
                }
                Forward(unit) | Backward(unit) => {
                    // A block whose only parameter is tied to another unit has no flat parameter.
                    let own = !layout.units[unit].flat_params.is_empty();
                    assert!(!own || loaded.contains(&unit), "{unit} is not there");
                }
                Free(unit) => loaded.retain(|&other| other != unit),
                Reduce(unit) => reduced.push(unit),
            }
            let kept = |unit: &usize| plan.keeps(&layout, *unit) || layout.units[*unit].is_root();
            let passing = gathering.iter().chain(loaded.iter().filter(|unit| !kept(unit))).count();
            assert!(passing <= prefetch.saturating_add(1), "after action {index}");
        }
        assert!(gathering.is_empty() && loaded.is_empty());
        let with_parameters = layout.units.iter().filter(|unit| !unit.flat_params.is_empty()).count();
        let once = usize::from(tied)
            + (0..layout.units.len())
                .filter(|&unit| {
                    !layout.units[unit].is_root()
                        && !layout.units[unit].flat_params.is_empty()
                        && plan.keeps(&layout, unit)
                })
                .count();
        assert_eq!(gathers, 2 * with_parameters - once);
        assert_eq!(reduced.len(), layout.units.len());
        let alone = plan.forward(&layout, false);
        let count = |wanted: fn(&UnitAction) -> bool| alone.iter().filter(|action| wanted(action)).count();
        assert_eq!(count(|action| matches!(action, Gather(_))), with_parameters);
        assert_eq!(count(|action| matches!(action, Free(_))), with_parameters);
    }
}
