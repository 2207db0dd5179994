//! What is proven of schedules for ranks that share hosts.

use dist_algos::hierarchical::Plan;
use dist_algos::verify::{Report, hierarchical};
use dist_algos::{AllGather, AllReduce, Barrier, Broadcast, Hosts, Reduce, ReduceScatter, Result};

use super::line::{Line, Orders};
use super::roots;

/// Ranks on each host.
const SIZES: [usize; 4] = [2, 3, 4, 8];

/// One operation, and how it proves all its schedules for given hosts.
type Proofs = (&'static str, fn(&Hosts) -> Vec<Result<Report>>);

const OPERATIONS: [Proofs; 6] = [
    (AllReduce::OPERATION, |hosts| {
        Plan::all(hosts).map(|plan| hierarchical::all_reduce(plan, hosts)).collect()
    }),
    (ReduceScatter::OPERATION, |hosts| vec![hierarchical::reduce_scatter(hosts)]),
    (AllGather::OPERATION, |hosts| vec![hierarchical::all_gather(hosts)]),
    (Broadcast::OPERATION, |hosts| {
        let proofs =
            |root| Broadcast::ALL.iter().map(move |&across| hierarchical::broadcast(across, hosts, root));
        roots(hosts.world_size()).into_iter().flat_map(proofs).collect()
    }),
    (Reduce::OPERATION, |hosts| {
        let proofs = |root| Reduce::ALL.iter().map(move |&across| hierarchical::reduce(across, hosts, root));
        roots(hosts.world_size()).into_iter().flat_map(proofs).collect()
    }),
    (Barrier::OPERATION, |hosts| {
        Barrier::ALL.iter().map(|&across| hierarchical::barrier(across, hosts)).collect()
    }),
];

/// For every operation, proves all schedules on any number of equal hosts up to so many ranks.
pub(super) fn lines(max_ranks: usize) -> impl Iterator<Item = Line> {
    OPERATIONS.into_iter().map(move |(operation, proofs)| {
        let mut line = Line::new(operation, "two_levels");
        let mut orders = Orders::default();
        for size in SIZES {
            for count in 2..=max_ranks / size {
                let names: Vec<u64> = (0..count).flat_map(|host| vec![host as u64; size]).collect();
                let reports: Result<Vec<Report>> = proofs(&Hosts::new(&names)).into_iter().collect();
                match reports {
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
