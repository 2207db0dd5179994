//! The cost of a plan: bytes that a rank holds, its peak, and the bytes that it sends.
//!
//! The numbers come from executing the plan's actions with the sizes of its buffers. They cover parameters, gradients
//! and the optimizer's state. Activations come on top, and so does the memory of blocks, transports and algorithms.
//! Gradients are counted in the type of their sums, which is `f32` for `f16`.

use super::layout::{FlatParameter, Unit};
use super::plan::Plan;
use super::step::BlockActions;
use crate::engine::{StepAction, UnitOf};
use crate::{FloatType, Materialised};

/// The memory of the rank that needs most, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// Parameters and buffers, between steps.
    pub parameters: usize,
    /// Gradients, between a step and the next.
    pub gradients: usize,
    /// The optimizer's state.
    pub optimizer: usize,
    /// The maximum of all together.
    pub peak: usize,
}

impl MemoryEstimate {
    /// Returns the bytes that are always allocated after the first step.
    pub const fn persistent(&self) -> usize {
        self.parameters + self.gradients + self.optimizer
    }
}

impl Plan {
    /// Returns the bytes that a step of `micro_batches` micro-batches needs.
    ///
    /// The optimizer has `kept` numbers per parameter: 2 for AdamW, 1 for momentum. `materialised` is the model's
    /// answer to [`Params::materialise`](crate::Params::materialise). A model that copies is assumed to free its
    /// copies. If the ranks read each other's shards in place, the memory of gathered parameters is not needed. ZeRO
    /// 1 and 2 then need one buffer of each type, as large as the largest shard that they exchange.
    ///
    /// ```
    /// use dist_parallel::fsdp::{FsdpOptions, Plan, ShardingStrategy};
    /// use dist_parallel::model::Materialised;
    /// use dist_parallel::{FloatType, ParamInfo};
    ///
    /// // Ten layers of a million parameters on 4 ranks.
    /// let layer = |index| ParamInfo::new(format!("layer{index}"), [1000, 1000], FloatType::F32);
    /// let infos: Vec<ParamInfo> = (0..10).map(layer).collect();
    /// let starts: Vec<usize> = (0..=10).collect();
    /// let options = FsdpOptions::new(ShardingStrategy::FullShard);
    /// let memory = Plan::new(&infos, &starts, 4, &options)?.memory(4, 2, Materialised::Shared);
    /// assert_eq!(memory.persistent(), 40_000_000); // a quarter of 160 MB
    /// assert_eq!(memory.peak, 48_000_000); // and one layer with its gradients
    /// # Ok::<(), dist_parallel::Error>(())
    /// ```
    pub fn memory(&self, micro_batches: usize, kept: usize, materialised: Materialised) -> MemoryEstimate {
        let precision = self.options.precision;
        let flat_params = || self.layout.flat_params().map(|(_, flat_param)| flat_param);
        let trained = || flat_params().filter(|flat_param| flat_param.trainable);
        let of_strip = |flat_param: &FlatParameter| {
            let master = flat_param.master_dtype(precision);
            let model = if self.degrees.frees { 0 } else { flat_param.len() * flat_param.dtype.size() };
            let outside = self.degrees.frees || master != flat_param.dtype;
            model + if outside { flat_param.shard_len * master.size() } else { 0 }
        };
        let state = |flat_param: &FlatParameter| {
            let own: usize = flat_param.chunks(0).map(|chunk| chunk.len).sum();
            let calculated = flat_param.master_dtype(precision).size().max(FloatType::F32.size());
            kept * own * calculated
        };
        let buffers: usize = self.layout.buffers().map(|buffer| buffer.len * buffer.dtype.size()).sum();
        let parameters = buffers + flat_params().map(of_strip).sum::<usize>();
        let optimizer = trained().map(state).sum();
        let gradients = trained().map(|flat_param| self.shard_bytes(flat_param)).sum();
        let live = parameters + optimizer + if self.cuts_each_round() { gradients } else { 0 };
        let mut meter =
            Meter { plan: self, materialised, live, peak: live, in_flight: None, pools: [None; 2] };
        meter.step(micro_batches);
        MemoryEstimate { parameters, gradients, optimizer, peak: meter.peak }
    }

    /// Returns the bytes of parameters and gradients that each rank sends in a step of `micro_batches` micro-batches.
    /// It assumes algorithms that send the minimum. If the ranks read each other's shards in place, no bytes of
    /// parameters are sent.
    pub fn wire_bytes(&self, micro_batches: usize) -> usize {
        let (shards, replicas) = (self.degrees.shards, self.degrees.replicas);
        let rounds = self.rounds(micro_batches);
        let to_others = |whole: usize, ranks: usize| whole / ranks * (ranks - 1);
        let mut bytes = 0;
        let mut gathered = vec![false; self.layout.units.len()];
        for action in self.actions() {
            let StepAction::Gather(UnitOf { unit, .. }) = action else { continue };
            let again = std::mem::replace(&mut gathered[unit], true);
            let ranks = self.reshard_group.filter(|_| again).unwrap_or(shards);
            let flat_params = &self.layout.units[unit].flat_params;
            bytes += rounds
                * flat_params
                    .iter()
                    .map(|flat_param| to_others(self.whole_bytes(flat_param), ranks))
                    .sum::<usize>();
        }
        for flat_param in self
            .layout
            .flat_params()
            .map(|(_, flat_param)| flat_param)
            .filter(|flat_param| flat_param.trainable)
        {
            let reductions = if self.degrees.each_round { rounds } else { 1 };
            bytes += reductions * to_others(self.gradient_bytes(flat_param), shards);
            bytes += (2 * (replicas - 1) * self.shard_bytes(flat_param)).div_ceil(replicas);
            if !self.degrees.frees {
                bytes += to_others(self.whole_bytes(flat_param), shards);
            }
        }
        bytes
    }

    /// Returns the largest number of rounds of any rank.
    fn rounds(&self, micro_batches: usize) -> usize {
        let ranks = 0..self.degrees.shards * self.degrees.replicas;
        ranks.map(|rank| self.assignment(rank).rounds(micro_batches)).max().unwrap_or(0)
    }

    /// Returns all actions of one micro-batch.
    fn actions(&self) -> Vec<StepAction> {
        BlockActions::new(self).step
    }

    /// Returns `true` if each round's gradients are reduce-scattered.
    const fn cuts_each_round(&self) -> bool {
        self.degrees.each_round && self.degrees.shards > 1
    }

    fn trained(&self, unit: usize) -> impl Iterator<Item = &FlatParameter> {
        self.layout.units[unit].flat_params.iter().filter(|flat_param| flat_param.trainable)
    }

    /// Returns the bytes of a gathered flat parameter.
    fn whole_bytes(&self, flat_param: &FlatParameter) -> usize {
        flat_param.padded(self.layout.shards) * flat_param.dtype.size()
    }

    /// Returns the bytes of one micro-batch's unsharded gradient of a flat parameter.
    fn gradient_bytes(&self, flat_param: &FlatParameter) -> usize {
        flat_param.padded(self.layout.shards) * flat_param.sum_dtype(self.options.precision).size()
    }

    /// Returns the bytes of one rank's shard of that gradient.
    fn shard_bytes(&self, flat_param: &FlatParameter) -> usize {
        flat_param.shard_len * flat_param.sum_dtype(self.options.precision).size()
    }
}

/// Counts bytes through a step.
struct Meter<'a> {
    plan: &'a Plan,
    materialised: Materialised,
    live: usize,
    peak: usize,
    /// The unit whose gradients are in flight.
    in_flight: Option<usize>,
    /// Pooled buffers: one that parameters were gathered into, and one of a gradient.
    pools: [Option<(FloatType, usize)>; 2],
}

/// The use of an unsharded buffer.
#[derive(Clone, Copy)]
enum GatheredUse {
    Gathered,
    Gradient,
}

/// A round, and whether it is the last.
#[derive(Clone, Copy)]
struct Round {
    number: usize,
    last: bool,
}

impl Meter<'_> {
    fn step(&mut self, micro_batches: usize) {
        let plan = self.plan;
        let rounds = plan.rounds(micro_batches);
        let actions = plan.actions();
        for number in 0..rounds {
            let round = Round { number, last: number + 1 == rounds };
            if let Some(root) = plan.layout.root() {
                self.open(root);
            }
            let mut kept = vec![false; plan.layout.units.len()];
            actions.iter().for_each(|&action| self.act(action, &mut kept, round));
            self.finish_in_flight(round);
        }
        self.rest();
        if !plan.degrees.each_round && rounds > 0 {
            let reduced = actions.iter().filter_map(|action| match action {
                StepAction::Close(unit, _) => Some(unit.unit),
                _ => None,
            });
            for flat_param in reduced.flat_map(|unit| plan.trained(unit)) {
                self.allocate(plan.shard_bytes(flat_param));
                self.free(plan.gradient_bytes(flat_param));
            }
        }
        self.all_gather_updates();
        self.rest();
    }

    fn act(&mut self, action: StepAction, kept: &mut [bool], round: Round) {
        let plan = self.plan;
        let unit = |unit: usize| &plan.layout.units[unit];
        match action {
            StepAction::Gather(UnitOf { unit: number, .. }) => {
                let was_kept = std::mem::take(&mut kept[number]);
                for flat_param in &unit(number).flat_params {
                    self.take(GatheredUse::Gathered, flat_param);
                    self.free(if was_kept { self.kept_bytes(flat_param) } else { 0 });
                }
            }
            StepAction::Materialise { unit: UnitOf { unit: number, .. }, keep } => {
                kept[number] = keep;
                self.materialise(unit(number), keep);
            }
            StepAction::Free(UnitOf { unit: number, .. }) => {
                unit(number).flat_params.iter().for_each(|flat_param| match self.materialised {
                    Materialised::Shared => self.give(GatheredUse::Gathered, flat_param),
                    Materialised::Copied => self.free(flat_param.len() * flat_param.dtype.size()),
                })
            }
            StepAction::Backward(UnitOf { unit: number, .. }, ..) if unit(number).reporters > 0 => {
                self.finish_in_flight(round);
                self.open(number);
                self.close(number, round);
            }
            StepAction::Close(UnitOf { unit: number, .. }, _) if unit(number).is_root() => {
                self.finish_in_flight(round);
                self.close(number, round);
            }
            _ => {}
        }
    }

    fn materialise(&mut self, unit: &Unit, keep: bool) {
        for flat_param in &unit.flat_params {
            self.allocate(if keep { self.kept_bytes(flat_param) } else { 0 });
            if self.materialised == Materialised::Copied {
                self.allocate(flat_param.len() * flat_param.dtype.size());
                self.give(GatheredUse::Gathered, flat_param);
            }
        }
    }

    fn open(&mut self, unit: usize) {
        let plan = self.plan;
        plan.trained(unit).for_each(|flat_param| self.take(GatheredUse::Gradient, flat_param));
    }

    fn close(&mut self, unit: usize, round: Round) {
        let plan = self.plan;
        if plan.cuts_each_round() {
            self.in_flight = Some(unit);
        } else {
            for flat_param in plan.trained(unit) {
                self.sum(plan.gradient_bytes(flat_param), round);
            }
        }
    }

    fn finish_in_flight(&mut self, round: Round) {
        let plan = self.plan;
        let Some(unit) = self.in_flight.take() else { return };
        for flat_param in plan.trained(unit) {
            // The first round uses the memory of the last step's mean.
            self.allocate(if round.number > 0 { plan.shard_bytes(flat_param) } else { 0 });
            self.sum(plan.shard_bytes(flat_param), round);
            self.give(GatheredUse::Gradient, flat_param);
        }
    }

    /// Adds a buffer to the tree sum of earlier rounds. The binary digits of the round's number say how many partial
    /// sums exist.
    fn sum(&mut self, bytes: usize, Round { number, last }: Round) {
        let buffers = |rounds: usize| rounds.count_ones() as usize;
        let after = if last { 1 } else { buffers(number + 1) };
        self.free((buffers(number) + 1 - after) * bytes);
    }

    /// Counts the all-gather of updated parameters: two flat parameters at a time.
    fn all_gather_updates(&mut self) {
        let plan = self.plan;
        let changed = plan.degrees.shards > 1 || plan.options.precision.master.is_some();
        if plan.degrees.frees || !changed {
            return;
        }
        let mut before = None;
        for (_, flat_param) in plan.layout.flat_params().filter(|(_, flat_param)| flat_param.trainable) {
            self.take(GatheredUse::Gathered, flat_param);
            before
                .replace(flat_param)
                .into_iter()
                .for_each(|before| self.give(GatheredUse::Gathered, before));
        }
        before.into_iter().for_each(|last| self.give(GatheredUse::Gathered, last));
    }

    /// Takes a buffer from the pool if it fits. Otherwise the pooled one is freed and a new one allocated.
    fn take(&mut self, whole: GatheredUse, flat_param: &FlatParameter) {
        let wanted = self.size(whole, flat_param);
        let pool = self.pools[whole as usize].take();
        if pool != Some(wanted) {
            self.free(pool.map_or(0, bytes));
            self.allocate(bytes(wanted));
        }
    }

    /// Returns a buffer to the pool, in place of the pooled one.
    fn give(&mut self, whole: GatheredUse, flat_param: &FlatParameter) {
        let before = self.pools[whole as usize].replace(self.size(whole, flat_param));
        self.free(before.map_or(0, bytes));
    }

    /// Frees the pooled buffers.
    fn rest(&mut self) {
        let pools = std::mem::take(&mut self.pools);
        self.free(pools.into_iter().flatten().map(bytes).sum());
    }

    fn size(&self, whole: GatheredUse, flat_param: &FlatParameter) -> (FloatType, usize) {
        let dtype = match whole {
            GatheredUse::Gathered => flat_param.dtype,
            GatheredUse::Gradient => flat_param.sum_dtype(self.plan.options.precision),
        };
        (dtype, flat_param.padded(self.plan.layout.shards))
    }

    /// Returns the bytes of a reshard group's shard between forward and backward.
    fn kept_bytes(&self, flat_param: &FlatParameter) -> usize {
        self.plan.reshard_group.map_or(0, |reshard_group| self.plan.whole_bytes(flat_param) / reshard_group)
    }

    fn allocate(&mut self, bytes: usize) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    fn free(&mut self, bytes: usize) {
        self.live -= bytes;
    }
}

/// Returns the bytes of `len` values of a type.
const fn bytes((dtype, len): (FloatType, usize)) -> usize {
    dtype.size() * len
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::fsdp::{FsdpOptions, Reshard, ShardingStrategy};
    use crate::{Error, ParamInfo};

    const BLOCKS: usize = 5;
    const LEN: usize = 6000;
    /// The bytes of all parameters, of all gradients, and of each of AdamW's two numbers.
    const P: usize = BLOCKS * LEN * 4;

    fn plan(ranks: usize, options: &FsdpOptions) -> Plan {
        let infos: Vec<ParamInfo> =
            (0..BLOCKS).map(|index| ParamInfo::new(format!("p{index}"), [LEN], FloatType::F32)).collect();
        Plan::new(&infos, &Vec::from_iter(0..=BLOCKS), ranks, options).unwrap()
    }

    #[rstest]
    #[case::no_end(&[])]
    #[case::not_all(&[0, 1])]
    #[case::too_many(&[0, 3])]
    #[case::not_from_the_first(&[1, 2])]
    #[case::backwards(&[0, 2, 1, 2])]
    fn blocks_have_all_parameters_in_order(#[case] starts: &[usize]) {
        let infos = ["a", "b"].map(|name| ParamInfo::new(name, [LEN], FloatType::F32));
        let refused = Plan::new(&infos, starts, 2, &FsdpOptions::default()).unwrap_err();
        assert!(matches!(refused, Error::Starts { parameters: 2, .. }), "{refused}");
    }

    #[test]
    fn a_tie_to_a_missing_parameter_is_refused() {
        let nothing = ParamInfo { same_as: Some(7), ..ParamInfo::new("a", [LEN], FloatType::F32) };
        let refused = Plan::new(&[nothing], &[0, 1], 2, &FsdpOptions::default()).unwrap_err();
        assert!(matches!(refused, Error::CannotTie { .. }), "{refused}");
    }

    #[rstest]
    #[case(ShardingStrategy::FullShard, 4 * P / 4)]
    #[case(ShardingStrategy::ShardGradOp, P + 3 * P / 4)]
    #[case(ShardingStrategy::ShardOptimizer, P + 3 * P / 4)]
    #[case(ShardingStrategy::NoShard, 4 * P)]
    #[case(ShardingStrategy::HybridShard { shard_degree: 2 }, 4 * P / 2)]
    fn sharded_state_is_divided_by_the_ranks(#[case] strategy: ShardingStrategy, #[case] expected: usize) {
        let memory = plan(4, &FsdpOptions::new(strategy)).memory(4, 2, Materialised::Shared);
        assert_eq!(memory.persistent(), expected);
        assert!(memory.peak >= expected);
    }

    #[rstest]
    fn full_sharding_needs_at_most_the_memory_of_its_formula(
        #[values(2, 4, 5)] ranks: usize,
        #[values(0, 1, 2, 3)] prefetch: usize,
        #[values(1, 2, 3, 8)] rounds: usize,
    ) {
        let options = FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(prefetch);
        let peak = plan(ranks, &options).memory(rounds * ranks, 2, Materialised::Shared).peak;
        let (unit, sums) = (LEN * 4, rounds.next_power_of_two().ilog2() as usize + 1);
        assert!(peak <= (3 + sums) * P / ranks + (1 + prefetch) * unit + unit, "{peak}");
        assert!(peak >= 3 * P / ranks + unit + unit);
    }

    /// Gradients are counted as f32. Parameters are counted in their own type.
    #[test]
    fn gradients_of_f16_need_the_bytes_of_f32() {
        let infos = [ParamInfo::new("p", [LEN], FloatType::F16)];
        for (strategy, shards) in [(ShardingStrategy::FullShard, 4), (ShardingStrategy::NoShard, 1)] {
            let plan = Plan::new(&infos, &[0, 1], 4, &FsdpOptions::new(strategy)).unwrap();
            let memory = plan.memory(4, 2, Materialised::Shared);
            assert_eq!(memory.parameters, 2 * LEN / shards);
            assert_eq!(memory.gradients, 4 * LEN / shards);
            assert_eq!(memory.optimizer, 2 * 4 * LEN / shards);
            let gathered = if shards == 1 { 0 } else { 2 * LEN };
            assert!(memory.peak >= memory.parameters + memory.optimizer + gathered + 4 * LEN, "{strategy:?}");
        }
    }

    #[rstest]
    fn bytes_on_the_wire_follow_the_formulas(
        #[values(2, 4, 8)] ranks: usize,
        #[values(1, 2, 3)] rounds: usize,
    ) {
        let bytes = |strategy, reshard| {
            let options = FsdpOptions::new(strategy).with_reshard(reshard);
            plan(ranks, &options).wire_bytes(rounds * ranks)
        };
        let once = (ranks - 1) * P / ranks;
        assert_eq!(bytes(ShardingStrategy::NoShard, Reshard::All), 2 * once);
        assert_eq!(bytes(ShardingStrategy::ShardOptimizer, Reshard::All), 2 * once);
        assert_eq!(bytes(ShardingStrategy::ShardGradOp, Reshard::All), (1 + rounds) * once);
        assert_eq!(bytes(ShardingStrategy::FullShard, Reshard::All), 3 * rounds * once);
        assert_eq!(bytes(ShardingStrategy::FullShard, Reshard::Nothing), 2 * rounds * once);
        assert_eq!(bytes(ShardingStrategy::FullShard, Reshard::ToGroup(2)), rounds * (2 * once + P / 2));
        let hybrid = ShardingStrategy::HybridShard { shard_degree: 2 };
        let between = 2 * (ranks / 2 - 1) * (P / 2) / (ranks / 2);
        assert_eq!(bytes(hybrid, Reshard::All), 3 * rounds * P / 2 + between);
    }
}
