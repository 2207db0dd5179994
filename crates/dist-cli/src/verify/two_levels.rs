//! What is proven of schedules for ranks that share hosts.

use dist_algos::verify::{Report, two_level};
use dist_algos::{AlgorithmTable, CollectiveKind, Hosts, Result};

use super::line::{Line, Orders};
use super::roots;

/// Ranks on each host.
const SIZES: [usize; 4] = [2, 3, 4, 8];

/// Proves all schedules of an operation for these hosts.
fn prove(table: AlgorithmTable<'_>, collective: CollectiveKind, hosts: &Hosts) -> Result<Vec<Report>> {
    let all = table.two_level().filter(|two| two.collective == collective).flat_map(|two| {
        let is_root = move |root: &usize| collective.roots(hosts.world_size()).contains(root);
        roots(hosts.world_size()).into_iter().filter(is_root).map(move |root| (two, root))
    });
    all.map(|(two, root)| two_level(two, hosts, root)).collect()
}

/// For every operation, proves all schedules on any number of equal hosts up to so many ranks.
pub(super) fn lines(table: AlgorithmTable<'_>, max_ranks: usize) -> impl Iterator<Item = Line> {
    let has_two_levels =
        move |&collective: &CollectiveKind| table.two_level().any(|two| two.collective == collective);
    CollectiveKind::ALL.into_iter().filter(has_two_levels).map(move |collective| {
        let mut line = Line::new(collective.name(), "two_levels");
        let mut orders = Orders::default();
        for size in SIZES {
            for count in 2..=max_ranks / size {
                let names: Vec<u64> = (0..count).flat_map(|host| vec![host as u64; size]).collect();
                match prove(table, collective, &Hosts::new(&names)) {
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
