//! Schedules with one mistake: the proof must reject all that are not equivalent.

use dist_parallel::pipeline::{Action, Item, PipelineSchedule, ScheduleKind};

use crate::interpreter::interpret;

/// Returns all schedules that differ from this one by one drop, repetition, swap, or change of an action.
fn mutants(schedule: &PipelineSchedule) -> Vec<(String, PipelineSchedule)> {
    let mut mutants = Vec::new();
    for (rank, list) in schedule.actions().iter().enumerate() {
        let mut add = |what: String, changed: Vec<Action>| {
            let mut actions = schedule.actions().to_vec();
            actions[rank] = changed;
            mutants.push((format!("rank {rank}: {what}"), schedule.clone().with_actions(actions)));
        };
        for (index, &action) in list.iter().enumerate() {
            let with = |change: &dyn Fn(&mut Vec<Action>)| {
                let mut list = list.clone();
                change(&mut list);
                list
            };
            add(format!("drop {action}"), with(&|list| _ = list.remove(index)));
            add(format!("repeat {action}"), with(&|list| list.insert(index, action)));
            add(format!("repeat {action} at the end"), with(&|list| list.push(action)));
            for other in changed(action) {
                add(format!("{other} for {action}"), with(&|list| list[index] = other));
            }
            for other in index + 1..list.len() {
                add(format!("swap {action} and {}", list[other]), with(&|list| list.swap(index, other)));
            }
        }
    }
    mutants
}

/// Returns the same action for other items, and other actions for the same item.
fn changed(action: Action) -> Vec<Action> {
    let of = |item: Item| {
        [
            Action::Forward(item),
            Action::Backward(item),
            Action::InputGradient(item),
            Action::WeightGradient(item),
            Action::SendActivation(item),
            Action::ReceiveActivation(item),
            Action::SendGradient(item),
            Action::ReceiveGradient(item),
        ]
    };
    let stage = action.stage();
    let mut others = vec![Action::ReduceGradients(stage), Action::ReduceGradients(stage + 1)];
    if let Some(micro_batch) = action.micro_batch() {
        others.extend(of(Item::new(stage, micro_batch)));
        let items = [(stage, micro_batch + 1), (stage + 1, micro_batch), (stage, usize::MAX)];
        let same_kind = |other: &Action| other.abbreviation() == action.abbreviation();
        others.extend(
            items.into_iter().flat_map(|(stage, batch)| of(Item::new(stage, batch))).filter(same_kind),
        );
    }
    others.retain(|other| *other != action);
    others
}

/// The proof must reject every mutant with another result. For accepted mutants, an independent interpreter must find
/// the same result within the same memory.
#[test]
fn mutants_are_rejected_or_compute_the_same() {
    let (mut made, mut accepted, mut survived) = (0, 0, Vec::new());
    let kinds = ScheduleKind::ALL.into_iter().chain([ScheduleKind::Interleaved { stages_per_rank: 3 }]);
    for kind in kinds {
        for (ranks, micro_batches) in [(1, 2), (2, 2), (2, 3), (3, 2), (3, 4), (4, 3)] {
            let schedule = kind.schedule(ranks, micro_batches).unwrap();
            let original = interpret(&schedule).unwrap();
            for (what, mutant) in mutants(&schedule) {
                made += 1;
                if mutant.validate().is_ok() {
                    accepted += 1;
                    if interpret(&mutant).as_ref() != Ok(&original) {
                        survived.push(format!("{kind} on {ranks} ranks, {micro_batches}: {what}"));
                    }
                }
            }
        }
    }
    assert!(made > 50_000 && accepted < made / 50, "{accepted} of {made}");
    assert!(survived.is_empty(), "{} of {made}: {:?}", survived.len(), &survived[..survived.len().min(10)]);
}

/// Every rejected schedule must be wrong, not only unusual.
#[test]
fn the_interpreter_fails_for_mutants_that_the_proof_rejects() {
    for kind in ScheduleKind::ALL {
        let schedule = kind.schedule(3, 4).unwrap();
        let original = interpret(&schedule).unwrap();
        for (what, mutant) in mutants(&schedule) {
            if let Err(flaw) = mutant.validate() {
                assert!(interpret(&mutant).as_ref() != Ok(&original), "{kind}, {what}: {flaw}");
            }
        }
    }
}

#[test]
fn mutants_of_gathers_are_rejected() {
    let schedule = ScheduleKind::Interleaved { stages_per_rank: 2 }.schedule(2, 4).unwrap().with_gathers(1);
    schedule.validate().unwrap();
    for (rank, list) in schedule.actions().iter().enumerate() {
        for (index, action) in list.iter().enumerate() {
            if matches!(action, Action::Gather(_) | Action::Free(_)) {
                let mut actions = schedule.actions().to_vec();
                actions[rank].remove(index);
                assert!(schedule.clone().with_actions(actions).validate().is_err(), "rank {rank}, {index}");
            }
        }
    }
}
