//! The verifier notices when a schedule is changed: a wrong peer, a wrong chunk, a missing step …

use dist_algos::hierarchical::Plan;
use dist_algos::verify::{self, Goal, Program, Report};
use dist_algos::{
    AllGather, AllReduce, Barrier, Broadcast, Chunks, Hosts, Place, Reduce, ReduceScatter, Step, Then,
};
use dist_transport::Rank;

/// How a step is changed, or its place among the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    SendToAnother,
    ReceiveFromAnother,
    SendAnotherChunk,
    ReceiveAnotherChunk,
    ReplaceForReduce,
    AnotherSlot,
    Missing,
    SwappedWithNext,
    Doubled,
}

const MUTATIONS: [Mutation; 9] = [
    Mutation::SendToAnother,
    Mutation::ReceiveFromAnother,
    Mutation::SendAnotherChunk,
    Mutation::ReceiveAnotherChunk,
    Mutation::ReplaceForReduce,
    Mutation::AnotherSlot,
    Mutation::Missing,
    Mutation::SwappedWithNext,
    Mutation::Doubled,
];

/// The program with one step changed, if the mutation says anything about that step.
fn mutate(program: &Program, index: usize, mutation: Mutation, rank: Rank, chunks: usize) -> Option<Program> {
    let mut program = program.clone();
    let steps = &mut program.steps;
    let before = steps.clone();
    match mutation {
        Mutation::Missing => drop(steps.remove(index)),
        Mutation::Doubled => steps.insert(index, steps[index]),
        Mutation::SwappedWithNext if index + 1 < steps.len() => steps.swap(index, index + 1),
        Mutation::SwappedWithNext => return None,
        _ => steps[index] = mutate_step(steps[index], mutation, rank, chunks),
    }
    (program.steps != before).then_some(program)
}

fn mutate_step(mut step: Step, mutation: Mutation, rank: Rank, chunks: usize) -> Step {
    let another_peer = |peer: usize| {
        let other = Rank::new(peer, rank.world_size()).expect("peers exist").right();
        if other == rank { other.right().index() } else { other.index() }
    };
    let another_chunk = |set: Chunks| Chunks::range((set.first() + 1) % chunks.max(1), set.len());
    match (&mut step, mutation) {
        (Step::Exchange { send: Some(send), .. }, Mutation::SendToAnother) => send.to = another_peer(send.to),
        (Step::Exchange { send: Some(send), .. }, Mutation::SendAnotherChunk) => {
            send.chunks = another_chunk(send.chunks);
        }
        (Step::Exchange { receive: Some(receive), .. }, mutation) => match (mutation, receive.place) {
            (Mutation::ReceiveFromAnother, _) => receive.from = another_peer(receive.from),
            (Mutation::ReceiveAnotherChunk, _) => receive.chunks = another_chunk(receive.chunks),
            (Mutation::ReplaceForReduce, _) if !receive.chunks.is_empty() => {
                receive.then = if receive.then == Then::Reduce { Then::Replace } else { Then::Reduce };
            }
            (Mutation::AnotherSlot, Place::Slot(slot)) => receive.place = Place::Slot(slot + 1),
            _ => {}
        },
        (Step::Combine { chunk, .. }, Mutation::ReceiveAnotherChunk) => *chunk = (*chunk + 1) % chunks,
        (Step::Combine { from, .. }, Mutation::AnotherSlot) => *from += 1,
        _ => {}
    }
    step
}

/// Every mutant of these schedules, and how many of them the verifier lets pass although they are not what the
/// original is.
#[derive(Default)]
struct Score {
    mutants: usize,
    survivors: Vec<String>,
}

impl Score {
    fn try_all(&mut self, name: &str, goal: Goal, chunks: usize, programs: &[Program]) {
        let original = verify::check(goal, chunks, programs).expect("the original is right");
        for rank in Rank::all(programs.len()) {
            for index in 0..programs[rank.index()].steps.len() {
                for mutation in MUTATIONS {
                    let program = &programs[rank.index()];
                    let Some(mutant) = mutate(program, index, mutation, rank, chunks) else { continue };
                    let mut programs = programs.to_vec();
                    programs[rank.index()] = mutant;
                    self.mutants += 1;
                    if passes(&original, verify::check(goal, chunks, &programs)) {
                        self.survivors.push(format!("{name}: {mutation:?} in {rank}, step {index}"));
                    }
                }
            }
        }
    }
}

/// Whether the verifier would let these schedules pass for the original ones.
fn passes(original: &Report, found: Result<Report, dist_algos::Error>) -> bool {
    found.is_ok_and(|found| {
        let same = |count: fn(&Report) -> usize| count(original) == count(&found);
        original.order == found.order
            && same(|report| report.rounds)
            && same(|report| report.path)
            && same(Report::chunks_sent_max)
    })
}

fn programs<S: IntoIterator<Item = Step>>(world_size: usize, schedule: impl Fn(Rank) -> S) -> Vec<Program> {
    let program = |rank| Program { steps: schedule(rank).into_iter().collect(), finish: None };
    Rank::all(world_size).map(program).collect()
}

#[test]
fn mutants_are_rejected() {
    let mut score = Score::default();
    for world_size in [2, 3, 4, 5, 7, 8] {
        for &algorithm in AllReduce::ALL {
            let programs = verify::all_reduce_programs(algorithm, world_size);
            let name = format!("all_reduce {algorithm} {world_size}");
            score.try_all(&name, Goal::AllReduce, algorithm.chunks(world_size), &programs);
        }
        for &algorithm in ReduceScatter::ALL {
            let programs = programs(world_size, |rank| algorithm.schedule(rank).into_iter().flatten());
            if algorithm.supports(world_size) {
                let name = format!("reduce_scatter {algorithm} {world_size}");
                score.try_all(&name, Goal::ReduceScatter, world_size, &programs);
            }
        }
        for &algorithm in AllGather::ALL {
            let programs = programs(world_size, |rank| algorithm.schedule(rank).into_iter().flatten());
            if algorithm.supports(world_size) {
                let name = format!("all_gather {algorithm} {world_size}");
                score.try_all(&name, Goal::AllGather, world_size, &programs);
            }
        }
        for root in [0, world_size - 1] {
            for &algorithm in Broadcast::ALL {
                let programs = programs(world_size, |rank| algorithm.schedule(rank, root));
                let name = format!("broadcast {algorithm} {root} of {world_size}");
                score.try_all(&name, Goal::Broadcast { root }, algorithm.chunks(world_size), &programs);
            }
            for &algorithm in Reduce::ALL {
                let programs = programs(world_size, |rank| algorithm.schedule(rank, root));
                let name = format!("reduce {algorithm} {root} of {world_size}");
                score.try_all(&name, Goal::Reduce { root }, algorithm.chunks(world_size), &programs);
            }
        }
        for &algorithm in Barrier::ALL {
            let programs = programs(world_size, |rank| algorithm.schedule(rank));
            score.try_all(&format!("barrier {algorithm} {world_size}"), Goal::Barrier, 0, &programs);
        }
    }
    for names in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 0], &[0, 0, 1, 1, 2, 2]] {
        let hosts = Hosts::new(names);
        for plan in Plan::all(&hosts) {
            let programs = verify::hierarchical::all_reduce_programs(plan, &hosts);
            let name = format!("all_reduce {plan:?} {names:?}");
            score.try_all(&name, Goal::AllReduce, plan.chunks(&hosts), &programs);
        }
    }
    let Score { mutants, survivors } = score;
    let rejected = mutants - survivors.len();
    assert!(mutants > 15_000, "only {mutants} mutants");
    assert!(rejected * 100 >= mutants * 99, "{rejected} of {mutants} rejected:\n{}", survivors.join("\n"));
    // What passes is as good as the original: two steps in the other order, where either order will do.
    for survivor in survivors {
        assert!(survivor.contains("SwappedWithNext"), "{survivor}");
    }
}
