//! The proofs of message algorithms, and the mutants of their schedules.

use dist_algos::verify::mutate::Score;
use dist_algos::verify::{Goal, prove_world};
use dist_algos::{AlgorithmTable, MessageAlgorithm};

use super::large;
use super::line::{Bound, Mutants, Orders, ProofLine, Proven};
use super::task::{Proofs, Task};

/// Returns the proofs of an algorithm for every world up to the bound, and for larger ones.
pub(super) fn proofs(algorithm: &'static MessageAlgorithm, max_ranks: usize, larger: &[usize]) -> Proofs {
    let worlds = (1..=max_ranks).filter(|&world_size| algorithm.supports(world_size));
    let tasks = worlds.map(|world_size| task(algorithm, world_size, prove));
    let larger = larger.iter().map(|&world_size| task(algorithm, world_size, large::prove));
    Proofs {
        line: ProofLine::new(algorithm.collective.name(), algorithm.name),
        tasks: tasks.chain(larger).collect(),
    }
}

fn task(
    algorithm: &'static MessageAlgorithm,
    ranks: usize,
    prove: fn(&MessageAlgorithm, usize) -> dist_algos::Result<Proven>,
) -> Task<Result<Proven, String>> {
    Task {
        name: format!("proving {} by {} for {ranks} ranks", algorithm.collective, algorithm.name),
        ranks,
        run: Box::new(move || prove(algorithm, ranks).map_err(|error| format!("{ranks} ranks: {error}"))),
    }
}

fn prove(algorithm: &MessageAlgorithm, world_size: usize) -> dist_algos::Result<Proven> {
    let proof = prove_world(algorithm, world_size)?;
    Ok(Proven::World {
        proofs: algorithm.collective.roots(world_size).len(),
        orders: Orders::of([proof.order]),
        cost: Some(bound(algorithm, world_size)),
    })
}

/// Returns the proven cost and the lower bounds for any schedule.
fn bound(algorithm: &MessageAlgorithm, world_size: usize) -> Bound {
    let cost = algorithm.cost(world_size);
    let least = Goal::of(algorithm, world_size, 0).lower_bound(world_size);
    let part = |count: usize, of: usize| count as f64 / of.max(1) as f64;
    Bound {
        ranks: world_size,
        rounds: cost.rounds,
        rounds_min: least.rounds,
        buffers: part(cost.path, algorithm.chunks(world_size)),
        buffers_min: part(least.moved, world_size),
        sent: part(cost.sent_max, algorithm.chunks(world_size)),
    }
}

/// World sizes of the schedules that are mutated.
const MUTATED: [usize; 7] = [2, 3, 4, 5, 6, 7, 8];

/// Returns the tasks that mutate every step of every rank in small worlds, with the first and the last root.
pub(super) fn mutants(table: AlgorithmTable<'_>, max_ranks: usize) -> Vec<Task<Mutants>> {
    let sizes = MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks);
    sizes
        .flat_map(|ranks| table.messages().map(move |algorithm| (algorithm, ranks)))
        .filter(|&(algorithm, ranks)| algorithm.supports(ranks))
        .map(|(algorithm, ranks)| {
            let name = format!("{} by {} of {ranks} ranks", algorithm.collective, algorithm.name);
            Task {
                name: format!("changing {name}"),
                ranks,
                run: Box::new(move || score(algorithm, ranks, &name)),
            }
        })
        .collect()
}

fn score(algorithm: &MessageAlgorithm, ranks: usize, name: &str) -> Mutants {
    let mut mutants = Mutants::default();
    for score in Score::of_roots(algorithm, ranks) {
        mutants.add(&score, |mutant| format!("{name}: {mutant}"));
    }
    mutants
}
