//! An optimizer with parameter groups, and the equivalent optimizers applied by hand.

use dist_parallel::optim::{
    AdamW, AdamWOptions, Optimizer, OptimizerState, ParamGroups, ParamOptions, SliceStates,
};
use dist_parallel::{ParamInfo, Result, Values, ValuesMut};

const FACTOR: f64 = 0.3;
const DECAYS: [f64; 3] = [0.1, 0.0, 0.2];

fn adamw(weight_decay: f64) -> AdamW {
    AdamW::new(AdamWOptions { learning_rate: 0.03, weight_decay, ..AdamWOptions::default() }).unwrap()
}

/// Parameters with fewer than two dims do not decay. The parameter `other` learns more slowly and decays more.
pub(crate) fn grouped(infos: &[ParamInfo], other: &str) -> AdamW {
    let mut groups = ParamGroups::new(infos).unwrap();
    for (info, options) in groups.iter_mut() {
        if info.shape.len() < 2 {
            options.weight_decay = Some(DECAYS[1]);
        }
    }
    *groups.named(other).unwrap() =
        ParamOptions { learning_rate_factor: FACTOR, weight_decay: Some(DECAYS[2]) };
    adamw(DECAYS[0]).with_groups(groups).unwrap()
}

/// An optimizer of groups that applies one optimizer without groups for each of them. The first has the state
/// of all slices.
pub(crate) struct ByHand {
    group_of: Vec<usize>,
    optimizers: [AdamW; 3],
}

impl ByHand {
    pub(crate) fn new(infos: &[ParamInfo], other: &str) -> Self {
        let other = infos.iter().position(|info| info.name == other).unwrap();
        let other = infos[other].same_as.unwrap_or(other);
        let group_of = |(index, info): (usize, &ParamInfo)| match info.shape.len() {
            _ if index == other => 2,
            0 | 1 => 1,
            _ => 0,
        };
        let mut by_hand = Self {
            group_of: infos.iter().enumerate().map(group_of).collect(),
            optimizers: DECAYS.map(adamw),
        };
        by_hand.set_learning_rate(by_hand.learning_rate()).unwrap();
        by_hand
    }

    /// Exchanges the states of the first optimizer with those of a group's optimizer.
    fn swap_states(&mut self, group: usize) {
        if let Ok([first, own]) = self.optimizers.get_disjoint_mut([0, group]) {
            std::mem::swap(first.states_mut().unwrap(), own.states_mut().unwrap());
        }
    }
}

impl Optimizer for ByHand {
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()> {
        let group = self.group_of[slice];
        self.swap_states(group);
        let updated = self.optimizers[group].update(slice, parameters, gradients);
        self.swap_states(group);
        updated
    }

    fn learning_rate(&self) -> f64 {
        self.optimizers[0].learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        let rates = [1.0, 1.0, FACTOR].map(|factor| factor * learning_rate);
        self.optimizers.iter_mut().zip(rates).try_for_each(|(own, rate)| own.set_learning_rate(rate))
    }
}

impl OptimizerState for ByHand {
    fn states(&self) -> Option<&SliceStates> {
        self.optimizers[0].states()
    }

    fn states_mut(&mut self) -> Option<&mut SliceStates> {
        self.optimizers[0].states_mut()
    }
}
