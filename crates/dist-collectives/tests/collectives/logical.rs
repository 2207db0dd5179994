//! Logical reductions compared with folds of all ranks' values.

use dist_collectives::LogicalOp;
use rstest::rstest;

use crate::worlds::{self, Network};

#[rstest]
fn booleans_are_combined_as_a_fold_does(
    #[values(LogicalOp::And, LogicalOp::Or, LogicalOp::Xor)] op: LogicalOp,
    #[values(1, 2, 3, 4)] world_size: usize,
) {
    // One value for each combination of the ranks' values.
    let inputs = move |rank: usize| (0..1_usize << world_size).map(move |values| values >> rank & 1 == 1);
    let combine = |one: bool, other: bool| match op {
        LogicalOp::And => one & other,
        LogicalOp::Or => one | other,
        LogicalOp::Xor => one ^ other,
    };
    let fold = |all: Vec<bool>, rank| {
        all.into_iter().zip(inputs(rank)).map(|(one, other)| combine(one, other)).collect()
    };
    let expected = (1..world_size).fold(inputs(0).collect::<Vec<_>>(), fold);
    for &network in Network::ALL {
        let results = worlds::run(network, world_size, move |mut comm| {
            let mut values: Vec<bool> = inputs(comm.rank()).collect();
            comm.all_reduce_logical(&mut values, op).unwrap();
            values
        });
        assert!(results.iter().all(|values| *values == expected), "{network:?}: {results:?}");
    }
}
