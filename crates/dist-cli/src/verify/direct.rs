//! What is proven of schedules for ranks that share memory.

use dist_algos::Order;
use dist_algos::direct::verify::{plans, prove};
use dist_algos::direct::{DirectAlgorithm, Task};
use dist_algos::verify::mutate::Score;
use dist_collectives::{Direct, Operation};

use super::line::{Line, Mutants};
use super::roots;

/// Proves every form of every operation in all worlds up to so many ranks.
pub(super) fn lines(max_ranks: usize) -> impl Iterator<Item = Line> {
    Operation::ALL.into_iter().flat_map(Direct::of).map(move |direct| line(direct, max_ranks))
}

fn line(direct: Direct, max_ranks: usize) -> Line {
    let (operation, algorithm) = (direct.operation().name(), direct.algorithm());
    let mut line = Line::new(operation, direct.name());
    for world_size in 1..=max_ranks {
        for task in
            tasks(&roots(world_size)).filter(|task| task.name() == operation && algorithm.serves(*task))
        {
            if let Err(error) = prove(&plans(task, algorithm, world_size)) {
                line.wrong = Some(format!("{world_size} ranks: {error}"));
                return line;
            }
            line.proofs += 1;
            line.orders.add(reduces(task).then_some(Order::Canonical));
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
pub(super) fn mutants(max_ranks: usize) -> Mutants {
    let mut mutants = Mutants::default();
    let served = |task| {
        DirectAlgorithm::ALL
            .into_iter()
            .filter(move |algorithm| algorithm.serves(task))
            .map(move |algorithm| (task, algorithm))
    };
    for world_size in MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks) {
        for (task, algorithm) in tasks(&[0, world_size - 1]).flat_map(served) {
            for mutated in CALLS {
                // A schedule that is wrong itself has its own line.
                let score = Score::of_call(&plans(task, algorithm, world_size), mutated).unwrap_or_default();
                let name = |mutant| format!("{} by {algorithm} of {world_size} ranks: {mutant}", task.name());
                mutants.add(score.mutants, score.rejected(), score.survivors.iter().map(name));
            }
        }
    }
    mutants
}

/// All tasks, those that have a root with each of these, of which the first is 0.
fn tasks(roots: &[usize]) -> impl Iterator<Item = Task> {
    let more = roots[1..].iter().flat_map(|&root| Task::all(root)).filter(|task| task.root().is_some());
    Task::all(0).into_iter().chain(more)
}

fn reduces(task: Task) -> bool {
    matches!(task, Task::AllReduce | Task::Reduce { .. } | Task::ReduceScatter { .. })
}
