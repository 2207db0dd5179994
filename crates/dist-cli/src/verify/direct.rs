//! What is proven of schedules for ranks that share memory.

use dist_algos::direct::verify::{plans, prove};
use dist_algos::direct::{DirectAlgorithm, DirectCollective};
use dist_algos::verify::mutate::Score;
use dist_algos::{AlgorithmTable, Order};

use super::line::{Line, Mutants};
use super::roots;

/// Proves every algorithm in all worlds up to so many ranks.
pub(super) fn lines(table: AlgorithmTable<'_>, max_ranks: usize) -> impl Iterator<Item = Line> {
    table.direct().map(move |algorithm| line(algorithm, max_ranks))
}

fn line(algorithm: &'static DirectAlgorithm, max_ranks: usize) -> Line {
    let mut line = Line::new(algorithm.collective.name(), algorithm.name);
    for world_size in 1..=max_ranks {
        for collective in
            collectives(&roots(world_size)).filter(|collective| collective.kind() == algorithm.collective)
        {
            if let Err(error) = prove(&plans(collective, algorithm, world_size)) {
                line.wrong = Some(format!("{world_size} ranks: {error}"));
                return line;
            }
            line.proofs += 1;
            line.orders.add(reduces(collective).then_some(Order::Canonical));
        }
        line.worlds += 1;
    }
    line
}

/// Worlds whose schedules are changed.
const MUTATED: [usize; 3] = [2, 3, 4];

/// Calls of the plans that are changed: of a pipeline that is longer than there are slots, of one block, in a line.
const CALLS: [usize; 3] = [0, 1, 2];

/// Changes every step of every rank in small worlds, of one call among others.
pub(super) fn mutants(table: AlgorithmTable<'_>, max_ranks: usize) -> Mutants {
    let mut mutants = Mutants::default();
    let served = |collective: DirectCollective| {
        let of_operation = table.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        of_operation.map(move |algorithm| (collective, algorithm))
    };
    for world_size in MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks) {
        for (collective, algorithm) in collectives(&[0, world_size - 1]).flat_map(served) {
            for mutated in CALLS {
                // A schedule that is wrong itself has its own line.
                let score =
                    Score::of_call(&plans(collective, algorithm, world_size), mutated).unwrap_or_default();
                let (operation, name) = (collective.name(), algorithm.short_name());
                let name = |mutant| format!("{operation} by {name} of {world_size} ranks: {mutant}");
                mutants.add(score.mutants, score.rejected(), score.survivors.iter().map(name));
            }
        }
    }
    mutants
}

/// All tasks, those that have a root with each of these, of which the first is 0.
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
