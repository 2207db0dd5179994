//! The peak memory of a rank, as `dist_parallel` plans it for the same model and strategy.

use dist_parallel::buckets::{BucketBytes, BucketPlan};
use dist_parallel::fsdp::{FsdpOptions, Plan, Reshard, ShardingStrategy};
use dist_parallel::model::Materialised;
use dist_parallel::{FloatType, ParamInfo};

use super::Strategy;

/// A model of equal units with an optimizer that stores two numbers per parameter, as Adam does.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainedModel {
    pub(super) params: u64,
    /// Type of parameters and gradients.
    pub(super) element: FloatType,
    /// Number of units that are gathered one by one.
    pub(super) units: u64,
}

impl TrainedModel {
    /// Returns the bytes of a parameter.
    pub(super) const fn element_bytes(&self) -> u64 {
        self.element.size() as u64
    }

    /// Returns the bytes of all parameters.
    pub(super) const fn bytes(&self) -> u64 {
        self.params * self.element_bytes()
    }

    /// Returns the bytes of the largest unit.
    pub(super) const fn unit_bytes(&self) -> u64 {
        self.params.div_ceil(self.units) * self.element_bytes()
    }

    /// Returns the bytes of the optimizer's state of all parameters. Each number has at least 4 bytes.
    fn optimizer_bytes(&self) -> u64 {
        self.params * self.element_bytes().max(FloatType::F32.size() as u64) * OPTIMIZER_NUMBERS as u64
    }

    /// Returns the peak memory of a rank in bytes for parameters, gradients and optimizer state. The
    /// arguments are the numbers of ranks and of ranks per host, and of micro-batches on each rank.
    /// Activations and the transport's memory are not included.
    ///
    /// Sharded parameters are gathered as in [`step`](super::timeline::step): one unit ahead, and the last
    /// unit stays.
    pub(super) fn peak(
        &self,
        strategy: Strategy,
        (ranks, ranks_per_host): (usize, usize),
        micro_batches: usize,
    ) -> u64 {
        let units = usize::try_from(self.units.min(self.params)).expect("units have been counted");
        let start =
            |unit: u64| self.params / self.units * unit + self.params % self.units * unit / self.units;
        let info = |unit: u64| {
            let len = usize::try_from(start(unit + 1) - start(unit)).unwrap_or(usize::MAX);
            ParamInfo::new(format!("unit{unit}"), [len], self.element)
        };
        let infos: Vec<_> = (0..self.units).map(info).filter(|info| info.shape != [0]).collect();
        let Some(sharding) = strategy.sharding(ranks_per_host) else {
            let gradients = BucketPlan::new(&infos, BucketBytes::default()).memory(micro_batches);
            return self.bytes() + self.optimizer_bytes() + gradients as u64;
        };
        let starts: Vec<_> = (0..=units).collect();
        let options = FsdpOptions::new(sharding).with_prefetch(1);
        let options = options.with_reshard(Reshard::AllButLast);
        let plan = Plan::new(&infos, &starts, ranks, &options).expect("hosts have equally many ranks");
        plan.memory(ranks.saturating_mul(micro_batches), OPTIMIZER_NUMBERS, Materialised::Shared).peak as u64
    }
}

/// Numbers that Adam stores for each parameter.
const OPTIMIZER_NUMBERS: usize = 2;

impl Strategy {
    /// Returns the strategy of the library; `None` for [`Ddp`](dist_parallel::Ddp), which shards nothing.
    fn sharding(self, ranks_per_host: usize) -> Option<ShardingStrategy> {
        Some(match self {
            Self::Ddp => return None,
            Self::Zero1 => ShardingStrategy::ShardOptimizer,
            Self::Zero2 => ShardingStrategy::ShardGradOp,
            Self::Fsdp => ShardingStrategy::FullShard,
            Self::Hybrid => ShardingStrategy::HybridShard { shard_degree: ranks_per_host },
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn sharded_tensors_are_held_once_by_all_ranks_together() {
        let model = TrainedModel { params: 800, element: FloatType::F32, units: 10 };
        let peak = |strategy, ranks| model.peak(strategy, (ranks, ranks), 1);
        let (all, unit) = (4 * 800, 4 * 80);
        assert_eq!(peak(Strategy::Ddp, 8), 4 * all);
        // A shard of everything, the parameters of two units, and the gradients of one.
        assert_eq!(peak(Strategy::Fsdp, 8), 4 * all / 8 + 3 * unit);
        assert_eq!(peak(Strategy::Hybrid, 8), peak(Strategy::Fsdp, 8));
        assert_eq!(model.peak(Strategy::Hybrid, (8, 2), 1), 4 * all / 2 + 3 * unit);
        for strategy in [Strategy::Zero2, Strategy::Fsdp, Strategy::Hybrid] {
            assert_eq!(peak(strategy, 1), 4 * all);
        }
    }

    #[rstest]
    #[case::one_sum(1, 1)]
    #[case::a_sum_and_the_second_micro_batch(2, 2)]
    #[case::a_sum_of_two_and_the_third(3, 2)]
    #[case::sums_of_two_and_of_one_and_the_fourth(4, 3)]
    #[case::eight(8, 4)]
    fn data_parallel_training_holds_more_gradients_for_more_micro_batches(
        #[case] micro_batches: usize,
        #[case] gradients: u64,
    ) {
        let model = TrainedModel { params: 800, element: FloatType::F32, units: 10 };
        assert_eq!(model.peak(Strategy::Ddp, (4, 1), micro_batches), (3 + gradients) * model.bytes());
    }

    #[test]
    fn units_without_a_parameter_do_not_exist() {
        let model = TrainedModel { params: 3, element: FloatType::Bf16, units: 24 };
        // The optimizer's numbers have at least 4 bytes.
        assert_eq!(model.peak(Strategy::Ddp, (2, 1), 1), 3 * (2 + 2 + 2 * 4));
    }
}
