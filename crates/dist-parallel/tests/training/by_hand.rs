//! An optimizer with parameter groups, and the equivalent optimizers applied by hand.

use dist_parallel::{
    AdamW, AdamWOptions, FloatType, Optimizer, ParamGroups, ParamInfo, ParamOptions, Result, SliceState,
    SliceStateMut, StateLayout, Values, ValuesMut,
};

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

/// Applies one optimizer without groups for each of the groups.
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

    fn of(&mut self, slice: usize) -> &mut AdamW {
        &mut self.optimizers[self.group_of[slice]]
    }
}

impl Optimizer for ByHand {
    fn update(&mut self, slice: usize, parameters: ValuesMut<'_>, gradients: Values<'_>) -> Result<()> {
        self.of(slice).update(slice, parameters, gradients)
    }

    fn learning_rate(&self) -> f64 {
        self.optimizers[0].learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        let rates = [1.0, 1.0, FACTOR].map(|factor| factor * learning_rate);
        self.optimizers.iter_mut().zip(rates).try_for_each(|(own, rate)| own.set_learning_rate(rate))
    }

    fn name(&self) -> &'static str {
        self.optimizers[0].name()
    }

    fn layout(&self, parameters: FloatType) -> StateLayout {
        self.optimizers[0].layout(parameters)
    }

    fn state(&self, slice: usize) -> Option<SliceState<'_>> {
        self.optimizers[self.group_of[slice]].state(slice)
    }

    fn slices_with_state(&self) -> Vec<usize> {
        self.optimizers.iter().flat_map(Optimizer::slices_with_state).collect()
    }

    fn make_state(&mut self, slice: usize, parameters: FloatType, len: usize) -> SliceStateMut<'_> {
        self.of(slice).make_state(slice, parameters, len)
    }

    fn clear_state(&mut self) {
        self.optimizers.iter_mut().for_each(AdamW::clear_state);
    }
}
