//! Proofs of [two-level](crate::hierarchical) schedules for given hosts.

use super::{Goal, RankProgram, Report, check};
use crate::hierarchical::{LevelCosts, TwoLevelAlgorithm};
use crate::{Error, Hosts, Order, Result};
use dist_transport::Rank;

/// Proves a two-level algorithm for these hosts and one root. The root is ignored if the operation has none.
///
/// # Errors
/// As for [`check`], if the hosts are not supported or have no such root, or if the cost or the order is worse than
/// declared.
pub fn two_level(two: &TwoLevelAlgorithm, hosts: &Hosts, root: usize) -> Result<Report> {
    if !two.supports(hosts) || !two.collective.roots(hosts.world_size()).contains(&root) {
        let (operation, algorithm) = (two.collective.name(), two.name);
        return Err(Error::Unsupported { operation, algorithm, world_size: hosts.world_size() });
    }
    let goal = Goal::of_collective(two.collective, root);
    let report = check(goal, two.chunks(hosts), &two_level_programs(two, hosts, root))?;
    claims(report, two.cost(hosts), two.order(hosts))
}

/// Returns the programs of a two-level algorithm, one for each rank; none if the hosts are not supported.
pub fn two_level_programs(two: &TwoLevelAlgorithm, hosts: &Hosts, root: usize) -> Vec<RankProgram> {
    let program = |rank| Some(RankProgram::new(two.collective, two.phases(rank, hosts, root)?));
    Rank::all(hosts.world_size()).filter_map(program).collect()
}

/// Compares the declared properties of the schedules with the proven ones, which may be better.
fn claims(report: Report, LevelCosts { inside, across }: LevelCosts, order: Option<Order>) -> Result<Report> {
    let (claimed, found) = (inside.then(across), report.cost());
    let table = [
        ("rounds", claimed.rounds, found.rounds),
        ("chunks on the longest path", claimed.path, found.path),
        ("chunks sent", claimed.sent_max, found.sent_max),
        ("chunks reduced", claimed.reduced_max, found.reduced_max),
    ];
    for (what, claimed, found) in table {
        if found > claimed {
            return Err(Error::Claim { what, claimed, found });
        }
    }
    match (order, report.order) {
        (Some(claimed), Some(found)) if claimed > found => Err(Error::OrderClaim { claimed, found }),
        _ => Ok(report),
    }
}
