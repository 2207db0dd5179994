//! Proofs of [two-level](crate::hierarchical) schedules for given hosts.

use super::{Finish, Goal, RankProgram, Report, check};
use crate::hierarchical::{LevelCosts, TwoLevel};
use crate::{Error, Hosts, Order, Result, Step};
use dist_transport::Rank;

/// Proves a two-level algorithm for these hosts and one root. The root is ignored if the operation has none.
///
/// # Errors
/// As for [`check`], if the hosts are not supported or have no such root, or if the cost or the order is worse than
/// declared.
pub fn two_level(two: TwoLevel, hosts: &Hosts, root: usize) -> Result<Report> {
    if !two.supports(hosts) || !two.roots(hosts).contains(&root) {
        let (operation, algorithm) = (two.operation(), two.name());
        return Err(Error::Unsupported { operation, algorithm, world_size: hosts.world_size() });
    }
    let report = check(goal(two, root), two.chunks(hosts), &two_level_programs(two, hosts, root))?;
    claims(report, two.cost(hosts), two.order(hosts))
}

/// Returns the programs of a two-level algorithm, one for each rank; none if the hosts are not supported.
pub fn two_level_programs(two: TwoLevel, hosts: &Hosts, root: usize) -> Vec<RankProgram> {
    let program = |rank| {
        let steps: Vec<Step> = two.steps(rank, hosts, root)?.collect();
        let finish = match two {
            TwoLevel::AllReduce(plan) => {
                let phases = plan.phases(rank, hosts)?;
                Some(Finish { after: phases.reduce.count(), owned: phases.owned })
            }
            _ => None,
        };
        Some(RankProgram { steps, finish })
    };
    Rank::all(hosts.world_size()).filter_map(program).collect()
}

/// Returns the goal.
const fn goal(two: TwoLevel, root: usize) -> Goal {
    match two {
        TwoLevel::AllReduce(_) => Goal::AllReduce,
        TwoLevel::ReduceScatter => Goal::ReduceScatter,
        TwoLevel::AllGather => Goal::AllGather,
        TwoLevel::Broadcast(_) => Goal::Broadcast { root },
        TwoLevel::Reduce(_) => Goal::Reduce { root },
        TwoLevel::Barrier(_) => Goal::Barrier,
    }
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
