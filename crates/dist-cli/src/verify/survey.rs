//! What is proven of one algorithm, and how the verifier fares against changed schedules.

use dist_algos::verify::mutate::Score;
use dist_algos::verify::{Goal, prove_world};
use dist_algos::{AlgorithmTable, MessageAlgorithm};

use super::large;
use super::line::{Bound, Line, Mutants};

/// Proves an algorithm for every world up to the bound, and for the larger ones that are not too much.
pub(super) fn line(algorithm: &MessageAlgorithm, max_ranks: usize, larger: &[usize]) -> Line {
    let mut line = Line::new(algorithm.collective.name(), algorithm.name);
    for world_size in (1..=max_ranks).filter(|&world_size| algorithm.supports(world_size)) {
        match prove_world(algorithm, world_size) {
            Ok(proof) => {
                line.worlds += 1;
                line.proofs += algorithm.collective.roots(world_size).len();
                line.orders.add(proof.order);
                line.largest = Some(bound(algorithm, world_size));
            }
            Err(error) => return Line { wrong: Some(format!("{world_size} ranks: {error}")), ..line },
        }
    }
    for &world_size in larger {
        match large::prove(algorithm, world_size) {
            Ok(true) => line.larger.push(world_size),
            Ok(false) => {}
            Err(error) => return Line { wrong: Some(format!("{world_size} ranks: {error}")), ..line },
        }
    }
    line
}

/// What was proven to be the cost, beside what no schedule can do better.
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

/// Worlds whose schedules are changed.
const MUTATED: [usize; 7] = [2, 3, 4, 5, 6, 7, 8];

/// Changes every step of every rank in small worlds, with the first and the last root.
pub(super) fn mutants(table: AlgorithmTable<'_>, max_ranks: usize) -> Mutants {
    let mut mutants = Mutants::default();
    // A schedule that is wrong itself has its own line.
    let sizes = MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks);
    for (algorithm, world_size, score) in Score::of_all(table, sizes) {
        let (operation, algorithm) = (algorithm.collective, algorithm.name);
        let name = |mutant| format!("{operation} by {algorithm} of {world_size} ranks: {mutant}");
        mutants.add(score.mutants, score.rejected(), score.survivors.iter().map(name));
    }
    mutants
}
