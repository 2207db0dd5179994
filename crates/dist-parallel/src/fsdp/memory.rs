//! The cost of a plan: bytes that a rank holds, its peak, and the bytes that it sends.
//!
//! The engine executes the plan's actions with buffers that only count their bytes, as [`CountedTraining`] says. The
//! numbers cover parameters, gradients and the optimizer's state. Activations come on top, and so does the memory of blocks, transports and algorithms.
//! Gradients are counted in the type of their sums, which is `f32` for `f16`.

use super::counted::{CountedBytes, CountedTraining};
use super::layout::FlatParameter;
use super::plan::Plan;
use crate::engine::{RoundActions, StepAction, UnitOf};
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
        let state = |flat_param: &FlatParameter| {
            let own: usize = flat_param.chunks(0).map(|chunk| chunk.len).sum();
            kept * own * flat_param.master_dtype(precision).size().max(FloatType::F32.size())
        };
        let optimizer = self.trained().map(state).sum();
        let CountedBytes { parameters, gradients, peak } =
            CountedTraining::bytes(self, self.rounds(micro_batches), materialised).expect(NOTHING_SENT);
        MemoryEstimate { parameters, gradients, optimizer, peak: peak + optimizer }
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
        for flat_param in self.trained() {
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
        RoundActions::new(self).step.to_vec()
    }

    fn trained(&self) -> impl Iterator<Item = &FlatParameter> {
        let flat_params = self.layout.flat_params().map(|(_, flat_param)| flat_param);
        flat_params.filter(|flat_param| flat_param.trainable)
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

/// A prediction sends nothing and allocates nothing, so it cannot fail.
const NOTHING_SENT: &str = "counting bytes does not fail";

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
