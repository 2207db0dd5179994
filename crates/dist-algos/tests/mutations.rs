//! The verifier notices when a schedule is changed: a wrong peer, a wrong chunk, a missing step …

use dist_algos::verify::mutate::{Mutation, Score};
use dist_algos::verify::{self, Goal, on_all_cores};
use dist_algos::{ALGORITHMS, CollectiveKind, Hosts, MessageAlgorithm};

#[derive(Default)]
struct Total {
    mutants: usize,
    survivors: Vec<(Mutation, String)>,
}

impl Total {
    fn add(&mut self, name: &str, score: &Score) {
        self.mutants += score.mutants;
        let survivors = score.survivors.iter();
        self.survivors.extend(survivors.map(|mutant| (mutant.mutation, format!("{name}: {mutant}"))));
    }
}

#[test]
fn mutants_are_rejected() {
    let mut total = Total::default();
    let worlds = [2, 3, 4, 5, 7, 8].into_iter();
    let tasks: Vec<(&MessageAlgorithm, usize)> = worlds
        .flat_map(|world_size| ALGORITHMS.messages().map(move |algorithm| (algorithm, world_size)))
        .filter(|&(algorithm, world_size)| algorithm.supports(world_size))
        .collect();
    let scores = on_all_cores(
        &tasks,
        |&(_, world_size)| world_size,
        |&(algorithm, world_size)| Score::of_roots(algorithm, world_size).collect::<Vec<_>>(),
    );
    for ((algorithm, world_size), scores) in tasks.into_iter().zip(scores) {
        for score in scores {
            assert!(score.mutants > 0, "{algorithm:?} of {world_size}: the original is right");
            total.add(&format!("{algorithm:?} of {world_size}"), &score);
        }
    }
    for names in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 0], &[0, 0, 1, 1, 2, 2]] {
        let hosts = Hosts::new(names);
        let all_reduces = ALGORITHMS.two_level().filter(|two| two.collective == CollectiveKind::AllReduce);
        for two in all_reduces.filter(|two| two.supports(&hosts)) {
            let (programs, chunks) = (verify::two_level_programs(two, &hosts, 0), two.chunks(&hosts));
            let proven = |programs: &[_]| verify::check(Goal::AllReduce, chunks, programs);
            let score = Score::of(chunks, &programs, proven).expect("the original is right");
            total.add(&format!("{two:?} on {names:?}"), &score);
        }
    }
    let Total { mutants, survivors } = total;
    let rejected = mutants - survivors.len();
    assert!(mutants > 40_000, "only {mutants} mutants");
    assert!(rejected * 100 >= mutants * 99, "{rejected} of {mutants} rejected: {survivors:?}");
    // Surviving mutants are as good as the original: two independent steps are swapped.
    for (mutation, survivor) in survivors {
        assert_eq!(mutation, Mutation::SwappedWithNext, "{survivor}");
    }
}
