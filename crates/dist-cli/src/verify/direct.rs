//! What is proven of schedules for ranks that share memory.

use dist_algos::Order;
use dist_algos::direct::verify::mutate::Score;
use dist_algos::direct::verify::{plans, prove};
use dist_algos::direct::{Form, Task};
use dist_collectives::{Direct, Operation};

use super::line::{Line, Mutants};

/// Proves every form of every operation, with the first and the last root, in all worlds up to so many ranks.
pub(super) fn lines(max_ranks: usize) -> impl Iterator<Item = Line> {
    Operation::ALL.into_iter().flat_map(Direct::of).map(move |direct| line(direct, max_ranks))
}

fn line(direct: Direct, max_ranks: usize) -> Line {
    let (operation, form) = (direct.operation().name(), direct.form());
    let mut line = Line::new(operation, direct.name());
    for world_size in 1..=max_ranks {
        for task in tasks(world_size).filter(|task| task.name() == operation && form.serves(*task)) {
            if let Err(error) = prove(&plans(task, form, world_size)) {
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
    let mut mutants = Mutants { mutants: 0, rejected: 0, survivors: Vec::new() };
    let served =
        |task| Form::ALL.into_iter().filter(move |form| form.serves(task)).map(move |form| (task, form));
    for world_size in MUTATED.into_iter().filter(|&world_size| world_size <= max_ranks) {
        for (task, form) in tasks(world_size).flat_map(served) {
            for mutated in CALLS {
                // A schedule that is wrong itself has its own line.
                let score = Score::of(&plans(task, form, world_size), mutated).unwrap_or_default();
                mutants.mutants += score.mutants;
                mutants.rejected += score.rejected();
                let name = |mutant| format!("{} by {form} of {world_size} ranks: {mutant}", task.name());
                mutants.survivors.extend(score.survivors.iter().map(name));
            }
        }
    }
    mutants
}

fn tasks(world_size: usize) -> impl Iterator<Item = Task> {
    let with_last_root = Task::all(world_size - 1).into_iter().filter(|task| task.root().is_some());
    Task::all(0).into_iter().chain(with_last_root.filter(move |_| world_size > 1))
}

fn reduces(task: Task) -> bool {
    matches!(task, Task::AllReduce | Task::Reduce { .. } | Task::ReduceScatter { .. })
}
