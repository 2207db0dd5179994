//! What is proven of schedules for ranks that share hosts.

use dist_algos::hierarchical::TwoLevel;
use dist_algos::verify::{Report, two_level};
use dist_algos::{AllGather, AllReduce, Barrier, Broadcast, Hosts, Reduce, ReduceScatter, Result};

use super::line::{Line, Orders};
use super::roots;

/// Ranks on each host.
const SIZES: [usize; 4] = [2, 3, 4, 8];

const OPERATIONS: [&str; 6] = [
    AllReduce::OPERATION,
    ReduceScatter::OPERATION,
    AllGather::OPERATION,
    Broadcast::OPERATION,
    Reduce::OPERATION,
    Barrier::OPERATION,
];

/// Proves all schedules of an operation for these hosts.
fn prove(operation: &str, hosts: &Hosts) -> Result<Vec<Report>> {
    let all = TwoLevel::of(operation).flat_map(|two| {
        let is_root = move |root: &usize| two.roots(hosts).contains(root);
        roots(hosts.world_size()).into_iter().filter(is_root).map(move |root| (two, root))
    });
    all.map(|(two, root)| two_level(two, hosts, root)).collect()
}

/// For every operation, proves all schedules on any number of equal hosts up to so many ranks.
pub(super) fn lines(max_ranks: usize) -> impl Iterator<Item = Line> {
    OPERATIONS.into_iter().map(move |operation| {
        let mut line = Line::new(operation, "two_levels");
        let mut orders = Orders::default();
        for size in SIZES {
            for count in 2..=max_ranks / size {
                let names: Vec<u64> = (0..count).flat_map(|host| vec![host as u64; size]).collect();
                match prove(operation, &Hosts::new(&names)) {
                    Ok(reports) => {
                        line.worlds += 1;
                        line.proofs += reports.len();
                        reports.iter().for_each(|report| orders.add(report.order));
                    }
                    Err(error) => {
                        line.wrong = Some(format!("{count} hosts of {size} ranks: {error}"));
                        return line;
                    }
                }
            }
        }
        line.orders = orders;
        line
    })
}
