//! Proofs of [two-level](crate::hierarchical) schedules, for given hosts.

use super::{Finish, Goal, Program, Report, check};
use crate::hierarchical::{self, LevelCosts, Plan};
use crate::{
    AllGather, AllReduce, Barrier, Broadcast, Error, Hosts, Order, Reduce, ReduceScatter, Result, Step,
};
use dist_transport::Rank;

/// The programs of a two-level all_reduce: one for each rank, or none if the hosts are not supported.
pub fn all_reduce_programs(plan: Plan, hosts: &Hosts) -> Vec<Program> {
    Rank::all(hosts.world_size())
        .filter_map(|rank| plan.phases(rank, hosts))
        .map(|phases| {
            let mut steps: Vec<Step> = phases.reduce.collect();
            let finish = Some(Finish { after: steps.len(), owned: phases.owned });
            steps.extend(phases.gather);
            Program { steps, finish }
        })
        .collect()
}

/// Proves a two-level all_reduce.
///
/// # Errors
/// As for [`check`], if the hosts are not supported, or if it costs more or has less order than is said.
pub fn all_reduce(plan: Plan, hosts: &Hosts) -> Result<Report> {
    exists(plan.supports(hosts), AllReduce::OPERATION, hosts)?;
    let report = check(Goal::AllReduce, plan.chunks(hosts), &all_reduce_programs(plan, hosts))?;
    claims(report, plan.cost(hosts), Some(plan.order(hosts)))
}

/// Proves a two-level reduce_scatter.
///
/// # Errors
/// As for [`all_reduce`].
pub fn reduce_scatter(hosts: &Hosts) -> Result<Report> {
    exists(hosts.contiguous().is_some(), ReduceScatter::OPERATION, hosts)?;
    let steps = |rank| hierarchical::reduce_scatter(rank, hosts).into_iter().flatten();
    let report = check(Goal::ReduceScatter, hosts.world_size(), &programs(hosts.world_size(), steps))?;
    let order = hierarchical::reduce_scatter_order(hosts);
    claims(report, hierarchical::reduce_scatter_cost(hosts), Some(order))
}

/// Proves a two-level all_gather.
///
/// # Errors
/// As for [`all_reduce`].
pub fn all_gather(hosts: &Hosts) -> Result<Report> {
    exists(hosts.contiguous().is_some(), AllGather::OPERATION, hosts)?;
    let steps = |rank| hierarchical::all_gather(rank, hosts).into_iter().flatten();
    let report = check(Goal::AllGather, hosts.world_size(), &programs(hosts.world_size(), steps))?;
    claims(report, hierarchical::all_gather_cost(hosts), None)
}

/// Proves a two-level broadcast from a root.
///
/// # Errors
/// As for [`all_reduce`].
pub fn broadcast(across: Broadcast, hosts: &Hosts, root: usize) -> Result<Report> {
    exists(root < hosts.world_size(), Broadcast::OPERATION, hosts)?;
    let steps = |rank| hierarchical::broadcast(rank, hosts, across, root).into_iter().flatten();
    let chunks = across.chunks(hosts.count());
    let report = check(Goal::Broadcast { root }, chunks, &programs(hosts.world_size(), steps))?;
    claims(report, hierarchical::broadcast_cost(hosts, across), None)
}

/// Proves a two-level reduce to a root.
///
/// # Errors
/// As for [`all_reduce`].
pub fn reduce(across: Reduce, hosts: &Hosts, root: usize) -> Result<Report> {
    exists(root < hosts.world_size(), Reduce::OPERATION, hosts)?;
    let steps = |rank| hierarchical::reduce(rank, hosts, across, root).into_iter().flatten();
    let chunks = across.chunks(hosts.count());
    let report = check(Goal::Reduce { root }, chunks, &programs(hosts.world_size(), steps))?;
    claims(report, hierarchical::reduce_cost(hosts, across), Some(hosts.order()))
}

/// Proves a two-level barrier.
///
/// # Errors
/// As for [`all_reduce`].
pub fn barrier(across: Barrier, hosts: &Hosts) -> Result<Report> {
    exists(hosts.world_size() > 0, Barrier::OPERATION, hosts)?;
    let steps = |rank| hierarchical::barrier(rank, hosts, across).into_iter().flatten();
    let report = check(Goal::Barrier, 0, &programs(hosts.world_size(), steps))?;
    claims(report, hierarchical::barrier_cost(hosts, across), None)
}

fn exists(supports: bool, operation: &'static str, hosts: &Hosts) -> Result<()> {
    let (algorithm, world_size) = ("two levels", hosts.world_size());
    if supports { Ok(()) } else { Err(Error::Unsupported { operation, algorithm, world_size }) }
}

/// One program for each rank, without a finish.
fn programs<S: Iterator<Item = Step>>(world_size: usize, schedule: impl Fn(Rank) -> S) -> Vec<Program> {
    Rank::all(world_size).map(|rank| Program { steps: schedule(rank).collect(), finish: None }).collect()
}

/// Compares what is said about the schedules with what was found, which may be better.
fn claims(report: Report, LevelCosts { inside, across }: LevelCosts, order: Option<Order>) -> Result<Report> {
    let claimed = inside.then(across);
    let table = [
        ("rounds", claimed.rounds, report.rounds),
        ("chunks on the longest path", claimed.path, report.path),
        ("chunks sent", claimed.sent_max, report.chunks_sent_max()),
        ("chunks reduced", claimed.reduced_max, report.reductions_max()),
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
