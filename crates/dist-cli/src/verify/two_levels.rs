//! The proofs of schedules for ranks that share hosts.

use dist_algos::hierarchical::TwoLevelAlgorithm;
use dist_algos::verify::{Report, two_level};
use dist_algos::{CollectiveKind, Hosts, Result};

use super::line::{Orders, ProofLine, Proven};
use super::roots;
use super::task::{Proofs, Task};

/// The numbers of ranks on each host.
const SIZES: [usize; 4] = [2, 3, 4, 8];

/// Returns the proofs of all two-level schedules of an operation, on any number of equal hosts up to this many ranks.
pub(super) fn proofs(
    collective: CollectiveKind,
    algorithms: &[&'static TwoLevelAlgorithm],
    max_ranks: usize,
) -> Proofs {
    let layouts = SIZES.into_iter().flat_map(|size| (2..=max_ranks / size).map(move |count| (size, count)));
    let tasks = layouts.map(|layout| task(collective, algorithms.to_vec(), layout)).collect();
    Proofs { line: ProofLine::new(collective.name(), "two_levels"), tasks }
}

fn task(
    collective: CollectiveKind,
    algorithms: Vec<&'static TwoLevelAlgorithm>,
    (size, count): (usize, usize),
) -> Task<Result<Proven, String>> {
    let hosts = format!("{count} hosts of {size} ranks");
    let name = format!("proving {collective} on {hosts}");
    let run = move || prove(&algorithms, (size, count)).map_err(|error| format!("{hosts}: {error}"));
    Task { name, ranks: size * count, run: Box::new(run) }
}

/// Proves all schedules of an operation on this many hosts of this many ranks.
fn prove(algorithms: &[&'static TwoLevelAlgorithm], (size, count): (usize, usize)) -> Result<Proven> {
    let names: Vec<u64> = (0..count).flat_map(|host| vec![host as u64; size]).collect();
    let hosts = Hosts::new(&names);
    let all = algorithms.iter().flat_map(|two| {
        let roots = roots(hosts.world_size()).into_iter();
        let is_root = |root: &usize| two.collective.roots(hosts.world_size()).contains(root);
        roots.filter(is_root).map(|root| two_level(two, &hosts, root))
    });
    let reports: Vec<Report> = all.collect::<Result<_>>()?;
    let orders = Orders::of(reports.iter().map(|report| report.order));
    Ok(Proven::World { proofs: reports.len(), orders, cost: None })
}
