//! The algorithms of two levels, ready to be predicted: among the ranks of each host, and across hosts.

use dist_algos::hierarchical::{self, Form, LevelCosts, Plan};
use dist_algos::{Barrier, Broadcast, Choice, Hosts, Order, Reduce, Step};
use dist_transport::Rank;

use super::candidates::{Candidate, Case, Traits};
use crate::Error;

type Found<'a> = Result<Vec<Candidate<'a>>, Error>;

const SUPPORTED: &str = "these hosts were seen to be supported";

pub(super) fn all_reduce<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    let candidate = |plan: Plan| {
        let order = Some(plan.order(hosts));
        let traits = traits(plan.form, &plan.across, order, plan.cost(hosts), plan.chunks(hosts));
        case.candidate(traits, move |rank, _| {
            let phases = plan.phases(rank, hosts).expect(SUPPORTED);
            phases.reduce.chain(phases.gather)
        })
    };
    Plan::all(hosts).map(candidate).collect()
}

pub(super) fn reduce_scatter<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    let order = Some(hierarchical::reduce_scatter_order(hosts));
    let cost = hierarchical::reduce_scatter_cost;
    parts(case, hosts, order, cost, |rank| hierarchical::reduce_scatter(rank, hosts).expect(SUPPORTED))
}

pub(super) fn all_gather<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    let cost = hierarchical::all_gather_cost;
    parts(case, hosts, None, cost, |rank| hierarchical::all_gather(rank, hosts).expect(SUPPORTED))
}

/// What all ranks of hosts of equally many neighbours do, each for its part.
fn parts<'a, I: Iterator<Item = Step> + 'a>(
    case: &Case<'a>,
    hosts: &'a Hosts,
    order: Option<Order>,
    cost: fn(&Hosts) -> LevelCosts,
    steps: impl Fn(Rank) -> I + Copy + 'a,
) -> Found<'a> {
    if hosts.contiguous().is_none() {
        return Ok(Vec::new());
    }
    let traits = traits(Form::Parts, &"two_level", order, cost(hosts), hosts.world_size());
    Ok(vec![case.candidate(traits, move |rank, _| steps(rank))?])
}

pub(super) fn broadcast<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    leaders(
        case,
        hosts,
        |_: Broadcast| None,
        hierarchical::broadcast_cost,
        |rank, root, across| hierarchical::broadcast(rank, hosts, across, root).expect(SUPPORTED),
    )
}

pub(super) fn reduce<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    let order = |across: Reduce| Some(hosts.order().min(across.order(hosts.count())));
    leaders(case, hosts, order, hierarchical::reduce_cost, |rank, root, across| {
        hierarchical::reduce(rank, hosts, across, root).expect(SUPPORTED)
    })
}

pub(super) fn barrier<'a>(case: &Case<'a>, hosts: &'a Hosts) -> Found<'a> {
    leaders(
        case,
        hosts,
        |_: Barrier| None,
        hierarchical::barrier_cost,
        |rank, _, across| hierarchical::barrier(rank, hosts, across).expect(SUPPORTED),
    )
}

/// What the leaders of hosts do by any algorithm.
fn leaders<'a, A: Choice, I: Iterator<Item = Step> + 'a>(
    case: &Case<'a>,
    hosts: &'a Hosts,
    order: impl Fn(A) -> Option<Order>,
    cost: fn(&Hosts, A) -> LevelCosts,
    steps: impl Fn(Rank, usize, A) -> I + Copy + 'a,
) -> Found<'a> {
    let count = hosts.count();
    let candidate = |across: A| {
        let traits = traits(Form::Leaders, &across, order(across), cost(hosts, across), across.chunks(count));
        case.candidate(traits, move |rank, root| steps(rank, root, across))
    };
    A::ALL.iter().copied().filter(|across| across.supports(count)).map(candidate).collect()
}

/// What is said beside a prediction. None of two levels is chosen by costs that are the same everywhere.
fn traits(
    form: Form,
    across: &dyn std::fmt::Display,
    order: Option<Order>,
    cost: LevelCosts,
    chunks: usize,
) -> Traits {
    let rounds = cost.inside.rounds + cost.across.rounds;
    let name = format!("{}+{across}", form.name());
    Traits { name, order, rounds, two_levels: true, chunks, chosen: false }
}
