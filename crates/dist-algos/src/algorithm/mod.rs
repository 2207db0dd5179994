//! The algorithms of each operation.
//!
//! An algorithm knows the worlds that it supports, the order in which it reduces and its cost, and creates the
//! schedules.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod choice;
mod gather;
mod reduce;
mod reduce_scatter;
mod scan;
mod scatter;

pub use all_gather::AllGather;
pub use all_reduce::{AllReduce, Phases};
pub use all_to_all::AllToAll;
pub use barrier::Barrier;
pub use broadcast::Broadcast;
pub use choice::Choice;
pub use gather::Gather;
pub use reduce::Reduce;
pub use reduce_scatter::ReduceScatter;
pub use scan::Scan;
pub use scatter::Scatter;

/// Implements the names of an operation's algorithms and parsing them.
macro_rules! named {
    ($operation:literal, $algorithm:ident { $($variant:ident => $name:literal),+ $(,)? }) => {
        impl $algorithm {
            /// All algorithms of the operation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The operation.
            pub const OPERATION: &str = $operation;

            /// Returns the name, which [`FromStr`](std::str::FromStr) parses.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }

        impl std::fmt::Display for $algorithm {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $algorithm {
            type Err = crate::Error;

            fn from_str(name: &str) -> crate::Result<Self> {
                Self::ALL.iter().copied().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
                    crate::Error::UnknownAlgorithm {
                        operation: $operation,
                        name: name.to_owned(),
                        known: [$($name),+].join(", "),
                    }
                })
            }
        }
    };
}
use named;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostModel, Error, Order, Placement};

    #[test]
    fn every_name_reads_as_its_algorithm() {
        for &algorithm in AllReduce::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        for &algorithm in ReduceScatter::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        for &algorithm in Broadcast::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!(format!("{:>6}", AllReduce::Ring), "  ring");
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = "star".parse::<Barrier>().unwrap_err();
        assert_eq!(
            error,
            Error::UnknownAlgorithm {
                operation: "barrier",
                name: "star".into(),
                known: "ring, dissemination".into()
            }
        );
        assert_eq!(error.to_string(), "\"star\" is no algorithm of barrier: there are ring, dissemination");
    }

    #[test]
    fn small_messages_get_few_rounds_and_large_ones_few_bytes() {
        let (small, large, model) = (8, 64 << 20, CostModel::default());
        let table = [
            (2, Order::Canonical, AllReduce::RecursiveDoubling, AllReduce::RecursiveDoubling),
            (3, Order::Canonical, AllReduce::RecursiveDoubling, AllReduce::PairwiseCirculant),
            (4, Order::Canonical, AllReduce::RecursiveDoubling, AllReduce::HalvingDoubling),
            (5, Order::Canonical, AllReduce::Binomial, AllReduce::PairwiseCirculant),
            (5, Order::Uniform, AllReduce::RecursiveDoubling, AllReduce::PairwiseCirculant),
            (5, Order::Any, AllReduce::RecursiveDoubling, AllReduce::Circulant),
            (12, Order::Canonical, AllReduce::RecursiveDoubling, AllReduce::PairwiseCirculant),
            (64, Order::Any, AllReduce::RecursiveDoubling, AllReduce::HalvingDoubling),
        ];
        for (world_size, order, few_rounds, few_bytes) in table {
            assert_eq!(
                AllReduce::suggest(world_size, small, order, &model),
                few_rounds,
                "{world_size} {order}"
            );
            assert_eq!(
                AllReduce::suggest(world_size, large, order, &model),
                few_bytes,
                "{world_size} {order}"
            );
        }
        assert_eq!(AllReduce::suggest(4, 256 << 10, Order::Canonical, &model), AllReduce::RecursiveDoubling);
        assert_eq!(AllReduce::suggest(4, 257 << 10, Order::Canonical, &model), AllReduce::HalvingDoubling);
    }

    #[test]
    fn halving_in_blocks_is_chosen_where_blocks_are_of_like_sizes() {
        let suggest = |world_size| {
            let order = Order::Canonical;
            (
                AllReduce::suggest(world_size, 512 << 10, order, &CostModel::default()),
                ReduceScatter::suggest(world_size, 512 << 10, order, &CostModel::default()),
            )
        };
        let (halving, scattering) = (AllReduce::HalvingDoubling, ReduceScatter::HalvingDoubling);
        assert_eq!(suggest(12), (halving, scattering));
        assert_eq!(suggest(24), (halving, scattering));
        assert_eq!(suggest(9), (AllReduce::PairwiseCirculant, ReduceScatter::Pairwise));
    }

    #[test]
    fn large_buffers_are_broadcast_in_chunks_and_the_largest_down_a_chain() {
        let suggest =
            |world_size, bytes| Broadcast::suggest(world_size, bytes, Order::Any, &CostModel::default());
        assert_eq!(suggest(8, 1 << 10), Broadcast::Binomial);
        assert_eq!(suggest(8, 1 << 20), Broadcast::ScatterCirculant);
        assert_eq!(suggest(8, 64 << 20), Broadcast::Chain);
        assert_eq!(suggest(64, 64 << 20), Broadcast::ScatterCirculant);
        assert_eq!(suggest(2, 64 << 20), Broadcast::Binomial);
    }

    #[test]
    fn any_order_and_gathering_take_a_logarithm_of_rounds_in_every_world() {
        let model = CostModel::default();
        for (world_size, bytes) in [(6, 8), (6, 1 << 18), (13, 1 << 20), (63, 8 << 20)] {
            assert_eq!(AllGather::suggest(world_size, bytes, Order::Any, &model), AllGather::Bruck);
            let scatter = ReduceScatter::suggest(world_size, bytes, Order::Any, &model);
            assert_eq!(scatter, ReduceScatter::Circulant, "{world_size}");
        }
        assert_eq!(AllGather::suggest(16, 1 << 20, Order::Any, &model), AllGather::RecursiveDoubling);
        assert_eq!(ReduceScatter::suggest(16, 8, Order::Any, &model), ReduceScatter::HalvingDoubling);
        assert_eq!(Reduce::suggest(8, 8, Order::Canonical, &model), Reduce::Binomial);
        assert_eq!(Reduce::suggest(8, 64 << 20, Order::Canonical, &model), Reduce::PairwiseGather);
    }

    #[test]
    fn scattered_data_is_not_copied_if_copying_takes_longer_than_a_few_rounds() {
        let suggest = |world_size, bytes| {
            ReduceScatter::suggest(world_size, bytes, Order::Canonical, &CostModel::default())
        };
        assert_eq!(
            (suggest(4, 1 << 16), suggest(4, 1 << 20)),
            (ReduceScatter::HalvingDoubling, ReduceScatter::Pairwise)
        );
        assert_eq!(
            (suggest(8, 1 << 19), suggest(8, 4 << 20)),
            (ReduceScatter::HalvingDoubling, ReduceScatter::Pairwise)
        );
    }

    #[test]
    fn on_oversubscribed_hosts_the_work_of_all_ranks_counts() {
        fn suggest<A: Choice>(ranks: usize, bytes: usize) -> A {
            let placement = Placement { ranks, cores: 2 };
            A::suggest_for(placement, bytes, Order::Canonical, &CostModel::default())
        }
        // As measured over loopback. With one core per rank it is a binomial tree, and a scatter from 256 KiB on.
        for ranks in [3, 4, 8] {
            for bytes in [8, 64 << 10, 1 << 20] {
                assert_eq!(suggest::<Broadcast>(ranks, bytes), Broadcast::Knomial, "{ranks} {bytes}");
                assert_eq!(suggest::<Reduce>(ranks, bytes), Reduce::Binomial, "{ranks} {bytes}");
                assert_eq!(suggest::<Gather>(ranks, bytes), Gather::Linear, "{ranks} {bytes}");
            }
        }
        assert_eq!((suggest(4, 16 << 10), suggest(4, 256 << 10)), (AllToAll::Bruck, AllToAll::Windowed));
        assert_eq!((suggest(8, 64 << 10), suggest(8, 256 << 10)), (AllToAll::Bruck, AllToAll::Windowed));
        let (doubling, halving) = (AllReduce::RecursiveDoubling, AllReduce::HalvingDoubling);
        assert_eq!((suggest(4, 64 << 10), suggest(4, 1 << 20)), (doubling, halving));
        assert_eq!((suggest(8, 64 << 10), suggest(8, 1 << 20)), (AllReduce::Binomial, halving));
    }

    #[test]
    fn on_oversubscribed_hosts_fewer_waits_are_worth_more_work() {
        // As measured over loopback. A binomial tree has fewer messages, reduces less, and waits twice as often.
        let model = CostModel { reduced_byte_ps: 50, ..CostModel::default() };
        for (ranks, bytes, expected) in [
            (4, 8, AllReduce::RecursiveDoubling),
            (4, 64 << 10, AllReduce::RecursiveDoubling),
            (6, 1 << 20, AllReduce::HalvingDoubling),
            (8, 1 << 20, AllReduce::HalvingDoubling),
            (8, 64 << 10, AllReduce::Binomial),
        ] {
            let placement = Placement { ranks, cores: 2 };
            let suggested = AllReduce::suggest_for(placement, bytes, Order::Canonical, &model);
            assert_eq!(suggested, expected, "{ranks} {bytes}");
        }
    }

    #[test]
    fn a_schedule_in_which_all_ranks_do_the_same_costs_the_same_wherever_they_run() {
        let model = CostModel { reduced_byte_ps: 50, ..CostModel::default() };
        for ranks in 3..=16 {
            let bytes = ranks << 16;
            let with_a_core_each = AllReduce::Ring.picoseconds(Placement::dedicated(ranks), bytes, &model);
            for cores in 1..ranks {
                let shared = AllReduce::Ring.picoseconds(Placement { ranks, cores }, bytes, &model);
                assert_eq!(shared, with_a_core_each, "{ranks} ranks, {cores} cores");
            }
        }
    }

    #[test]
    fn two_ranks_choose_alike_on_two_cores_and_on_one() {
        for bytes in [8, 1 << 16, 1 << 20, 64 << 20] {
            let order = Order::Canonical;
            let suggest = |cores| {
                let (placement, model) = (Placement { ranks: 2, cores }, CostModel::default());
                (
                    AllReduce::suggest_for(placement, bytes, order, &model),
                    Broadcast::suggest_for(placement, bytes, order, &model),
                    Reduce::suggest_for(placement, bytes, order, &model),
                )
            };
            assert_eq!(suggest(1), suggest(2), "{bytes}");
        }
    }

    #[test]
    fn reducing_less_is_worth_a_round_where_reducing_is_slow() {
        let fast = CostModel::default();
        let slow = CostModel { reduced_byte_ps: 100 * fast.byte_ps, ..fast };
        let suggest = |model| AllReduce::suggest(4, 16 << 10, Order::Canonical, model);
        assert_eq!(suggest(&fast), AllReduce::RecursiveDoubling);
        assert_eq!(suggest(&slow), AllReduce::HalvingDoubling);
    }

    #[test]
    fn suggested_algorithms_are_supported_and_keep_the_requested_order() {
        let model = CostModel { reduced_byte_ps: 100, ..CostModel::default() };
        for world_size in 1..=64 {
            for bytes in [0, 1 << 10, 1 << 16, 1 << 20, 1 << 27] {
                for order in [Order::Any, Order::Uniform, Order::Canonical] {
                    let all_reduce = AllReduce::suggest(world_size, bytes, order, &model);
                    assert!(all_reduce.supports(world_size) && all_reduce.order(world_size) >= order);
                    let reduce_scatter = ReduceScatter::suggest(world_size, bytes, order, &model);
                    assert!(reduce_scatter.supports(world_size) && reduce_scatter.order(world_size) >= order);
                    let reduce = Reduce::suggest(world_size, bytes, order, &model);
                    assert!(reduce.order(world_size) >= order);
                    assert!(AllGather::suggest(world_size, bytes, Order::Any, &model).supports(world_size));
                }
            }
        }
    }
}
