//! The example, in real processes and on the simulated network.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_testkit::process;
use dist_transport::sim;

#[path = "../../examples/burn_loop.rs"]
#[expect(dead_code, reason = "the test has a main function of its own")]
mod example;

#[test]
fn the_example_learns_and_prints_the_same_on_any_number_of_ranks() {
    let train = |ranks| {
        let run = sim::run(1, ranks, |transport| example::train(Communicator::new(transport)));
        run.results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let alone = train(1).remove(0);
    assert!(alone[59] < 0.2 * alone[0], "{alone:?}");
    // All ranks of a simulated network share one random generator. Initial values thus differ between runs,
    // but every rank gets the values of rank 0.
    for ranks in [2, 4] {
        let all = train(ranks);
        assert!(all.iter().all(|of_rank| *of_rank == all[0]));
    }
}

#[test]
fn two_processes_print_the_losses_of_one() {
    const TEST: &str = "own_loop::two_processes_print_the_losses_of_one";
    if process::rank().is_some() {
        let losses = example::train(Communicator::from_env().unwrap()).unwrap();
        for loss in losses {
            println!("loss {loss}");
        }
        return;
    }
    let losses = |ranks| {
        let job = process::ranks(ranks, TEST, Duration::from_secs(60));
        job.assert_success();
        // The first line follows the name of the test.
        let losses = |output: &str| {
            let losses = output.lines().filter_map(|line| line.rsplit_once("loss "));
            losses.map(|(_, loss)| loss.to_owned()).collect()
        };
        let all: Vec<Vec<String>> = job.ranks.iter().map(|ended| losses(&ended.output)).collect();
        assert!(all.iter().all(|of_rank| *of_rank == all[0] && of_rank.len() == 60));
        all[0].clone()
    };
    assert_eq!(losses(2), losses(1));
}
