//! The proofs of schedules for ranks that share memory, and the mutants of these schedules.

use dist_algos::direct::verify::{plans, prove};
use dist_algos::direct::{DirectAlgorithm, DirectCollective, DirectPlan};
use dist_algos::verify::mutate::Score;
use dist_algos::{AlgorithmTable, Order, Result};

use super::line::{Mutants, Orders, ProofLine, Proven};
use super::roots;
use super::task::{Proofs, Task};

/// Returns the proofs of an algorithm in all worlds up to this many ranks.
pub(super) fn proofs(algorithm: &'static DirectAlgorithm, max_ranks: usize) -> Proofs {
    let name = format!("{} by {}", algorithm.collective.name(), algorithm.name);
    let task = |ranks: usize| Task {
        name: format!("proving {name} for {ranks} ranks"),
        ranks,
        run: Box::new(move || world(algorithm, ranks).map_err(|error| format!("{ranks} ranks: {error}"))),
    };
    Proofs {
        line: ProofLine::new(algorithm.collective.name(), algorithm.name),
        tasks: (1..=max_ranks).map(task).collect(),
    }
}

fn world(algorithm: &'static DirectAlgorithm, world_size: usize) -> Result<Proven> {
    let roots = roots(world_size);
    let collectives: Vec<DirectCollective> =
        collectives(&roots).filter(|collective| collective.kind() == algorithm.collective).collect();
    for &collective in &collectives {
        prove(&plans(collective, algorithm, world_size))?;
    }
    let order = |&collective| reduces(collective).then_some(Order::Canonical);
    let orders = Orders::of(collectives.iter().map(order));
    Ok(Proven::World { proofs: collectives.len(), orders, cost: None })
}

/// World sizes of the schedules that are mutated.
const MUTATED: [usize; 3] = [2, 3, 4];

/// Calls of the plans that are mutated: a pipeline that is longer than the number of slots, a single block,
/// and a block within the flag line.
const CALLS: [usize; 3] = [0, 1, 2];

/// Returns the tasks that mutate every step of every rank in small worlds, in one of several calls.
pub(super) fn mutants(table: AlgorithmTable<'_>, max_ranks: usize) -> Vec<Task<Mutants>> {
    let served = |collective: DirectCollective| {
        let of_operation = table.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        of_operation.map(move |algorithm| (collective, algorithm))
    };
    let worlds = MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks);
    let all = worlds.flat_map(|ranks| {
        let collectives: Vec<_> = collectives(&[0, ranks - 1]).collect();
        collectives
            .into_iter()
            .flat_map(served)
            .map(move |(collective, algorithm)| (ranks, collective, algorithm))
    });
    all.map(|(ranks, collective, algorithm)| {
        let name = format!("{} by {} of {ranks} ranks", collective.name(), algorithm.short_name());
        let run = move |name: &str| score(&plans(collective, algorithm, ranks), name);
        Task { name: format!("changing {name}"), ranks, run: Box::new(move || run(&name)) }
    })
    .collect()
}

fn score(plans: &[DirectPlan], name: &str) -> Mutants {
    let mut mutants = Mutants::default();
    for mutated in CALLS {
        // The proof reports a schedule that is wrong without a mutation.
        let score = Score::of_call(plans, mutated).unwrap_or_default();
        mutants.add(&score, |mutant| format!("{name}: {mutant}"));
    }
    mutants
}

/// Returns all operations. Those with a root appear with each of these roots, the first of which is 0.
fn collectives(roots: &[usize]) -> impl Iterator<Item = DirectCollective> {
    let more = roots[1..]
        .iter()
        .flat_map(|&root| DirectCollective::all(root))
        .filter(|collective| collective.root().is_some());
    DirectCollective::all(0).into_iter().chain(more)
}

fn reduces(collective: DirectCollective) -> bool {
    matches!(
        collective,
        DirectCollective::AllReduce
            | DirectCollective::Reduce { .. }
            | DirectCollective::ReduceScatter { .. }
    )
}
