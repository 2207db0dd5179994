//! The division of a model's layers into stages.

use std::cmp::Reverse;
use std::ops::Range;
use std::time::Duration;

use crate::shard_tensor::range_of_part;
use crate::{Error, Result};

/// Divides layers into contiguous stages of equal length. The first stages have one more if the layers do not divide
/// evenly.
///
/// ```
/// use dist_parallel::pipeline::split_into_stages;
///
/// assert_eq!(split_into_stages(7, 3)?, [0..3, 3..5, 5..7]);
/// # Ok::<_, dist_parallel::Error>(())
/// ```
///
/// # Errors
/// There are no stages, or more stages than layers.
pub fn split_into_stages(layers: usize, stages: usize) -> Result<Vec<Range<usize>>> {
    check(layers, stages)?;
    Ok((0..stages).map(|stage| range_of_part(layers, stages, stage)).collect())
}

/// Divides layers into stages so that the cost of the most expensive stage is minimal. Among these divisions it
/// chooses the most even, and among those the one with longer first stages.
///
/// All ranks of a pipeline must use the same division: measure on one rank and broadcast the result.
///
/// # Errors
/// There are no stages, or more stages than layers.
pub fn split_by_cost(costs: &[Duration], stages: usize) -> Result<Vec<Range<usize>>> {
    check(costs.len(), stages)?;
    let mut before = vec![0_u128];
    for cost in costs {
        before.push(before[before.len() - 1] + cost.as_nanos());
    }
    let bound = cheapest_bound(&before, stages);
    // For each number of stages and first layer: the smallest sum of squared costs from there on, and the end of its
    // first stage.
    let layers = costs.len();
    let square = |start: usize, end: usize| (before[end] - before[start]).pow(2);
    let mut best = vec![vec![None; layers + 1]; stages + 1];
    best[0][layers] = Some((0_u128, layers));
    for left in 1..=stages {
        for start in 0..layers {
            let ends = (start + 1..=layers).take_while(|&end| before[end] - before[start] <= bound);
            let whole = |end: usize| {
                let (rest, _) = best[left - 1][end]?;
                Some((rest.saturating_add(square(start, end)), end))
            };
            best[left][start] = ends.filter_map(whole).min_by_key(|&(sum, end)| (sum, Reverse(end)));
        }
    }
    let mut start = 0;
    let stage = |left: usize| {
        let (_, end) = best[left][start].expect("the bound leaves room for every stage");
        std::mem::replace(&mut start, end)..end
    };
    Ok((1..=stages).rev().map(stage).collect())
}

/// Returns the smallest possible cost of the most expensive of `stages` stages.
fn cheapest_bound(before: &[u128], stages: usize) -> u128 {
    let layers = before.len() - 1;
    let dearest = (0..layers).map(|layer| before[layer + 1] - before[layer]).max().unwrap_or(0);
    let fits = |bound: u128| {
        let (mut used, mut start) = (0, 0);
        while start < layers {
            start = before.partition_point(|&sum| sum <= before[start] + bound) - 1;
            used += 1;
        }
        used <= stages
    };
    let (mut low, mut high) = (dearest, before[layers].max(dearest));
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

const fn check(layers: usize, stages: usize) -> Result<()> {
    if stages == 0 || stages > layers {
        return Err(Error::CannotSplit { layers, stages });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn lens(stages: &[Range<usize>]) -> Vec<usize> {
        stages.iter().map(ExactSizeIterator::len).collect()
    }

    fn by_cost(costs: &[u64], stages: usize) -> Vec<usize> {
        let costs: Vec<Duration> = costs.iter().map(|&cost| Duration::from_micros(cost)).collect();
        lens(&split_by_cost(&costs, stages).unwrap())
    }

    #[rstest]
    #[case(0, 0)]
    #[case(3, 0)]
    #[case(0, 1)]
    #[case(3, 4)]
    fn there_is_no_cut_into_no_stages_or_more_than_layers(#[case] layers: usize, #[case] stages: usize) {
        let refused = |result: Result<_>| matches!(result, Err(Error::CannotSplit { layers: l, stages: s }) if (l, s) == (layers, stages));
        assert!(refused(split_into_stages(layers, stages)));
        assert!(refused(split_by_cost(&vec![Duration::ZERO; layers], stages)));
    }

    #[rstest]
    #[case(&[1, 1, 1, 5], 2, &[3, 1])]
    #[case(&[5, 1, 1, 1], 2, &[1, 3])]
    #[case(&[9, 1, 1, 1, 1], 3, &[1, 2, 2])]
    #[case(&[2, 2, 2, 2, 1], 3, &[2, 1, 2])]
    #[case(&[0, 0, 0], 3, &[1, 1, 1])]
    #[case(&[0, 0, 0], 2, &[2, 1])]
    fn costly_layers_have_few_beside_them(
        #[case] costs: &[u64],
        #[case] stages: usize,
        #[case] expected: &[usize],
    ) {
        assert_eq!(by_cost(costs, stages), expected);
    }

    #[test]
    fn equal_costs_are_cut_by_count() {
        for (layers, stages) in (1..=12).flat_map(|layers| (1..=layers).map(move |stages| (layers, stages))) {
            assert_eq!(by_cost(&vec![7; layers], stages), lens(&split_into_stages(layers, stages).unwrap()));
        }
    }

    /// Returns the cost of the most expensive stage of the best division, by trying all.
    fn by_trying(costs: &[u64], stages: usize) -> u64 {
        if stages == 1 {
            return costs.iter().sum();
        }
        let cuts = 1..=costs.len() + 1 - stages;
        cuts.map(|cut| costs[..cut].iter().sum::<u64>().max(by_trying(&costs[cut..], stages - 1)))
            .min()
            .unwrap()
    }

    proptest! {
        #[test]
        fn no_cut_has_a_cheaper_worst_stage(
            (costs, stages) in prop::collection::vec(0..100_u64, 1..9)
                .prop_flat_map(|costs| { let len = costs.len(); (Just(costs), 1..=len) }),
        ) {
            let lens = by_cost(&costs, stages);
            prop_assert_eq!((lens.len(), lens.iter().sum::<usize>()), (stages, costs.len()));
            let mut rest = &costs[..];
            let mut worst = 0;
            for len in lens {
                prop_assert!(len > 0);
                worst = worst.max(rest[..len].iter().sum());
                rest = &rest[len..];
            }
            prop_assert_eq!(worst, by_trying(&costs, stages));
        }
    }
}
