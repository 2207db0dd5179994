//! A fault at each message of each call: every survivor has the right result or names the culprit.

use std::time::Duration;

use dist_collectives::{Communicator, Error, ReductionOrder};
use dist_transport::sim::{Fault, Network, Outcome, When};
use rstest::rstest;

use crate::calls::{CallForm, call, every};
use crate::faults::culprit;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes a call and then barriers until something fails. Messages take no time.
fn run(
    network: &Network,
    what: (dist_collectives::tuning::Operation, CallForm),
    barriers: usize,
) -> Outcome<Option<Result<(), Error>>> {
    let outcome = network.try_run(move |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(TIMEOUT);
        comm.set_order(ReductionOrder::Any);
        call(&mut comm, what)?;
        (0..barriers).try_for_each(|_| comm.barrier())
    });
    outcome.unwrap_or_else(|failed| panic!("{what:?}: {failed}"))
}

#[rstest]
fn wherever_a_rank_dies_each_survivor_has_the_right_result_or_names_it_at_once(
    #[values(2, 3, 4, 5)] world_size: usize,
) {
    let network = Network::new(world_size).with_external_coordinator();
    for what in every(world_size) {
        let operations = run(&network, what, 1).operations.into_iter().enumerate();
        let moments = operations.flat_map(|(rank, count)| (1..=count).map(move |number| (rank, number)));
        for ((rank, number), victim) in moments.flat_map(|at| (0..world_size).map(move |rank| (at, rank))) {
            let when = When::Operation { rank, number };
            let outcome = run(&network.clone().with_fault(when, Fault::Kill { rank: victim }), what, 1);
            assert_eq!((outcome.faults.len(), outcome.elapsed), (1, Duration::ZERO), "{what:?} {when}");
            for (rank, result) in outcome.results.iter().enumerate() {
                let Some(Err(error)) = result else {
                    assert!(result.is_some() || rank == victim, "{what:?} {when}: rank {rank} has no result");
                    continue;
                };
                assert_eq!(culprit(error), (victim, "died"), "{what:?} {when}: rank {rank} of {world_size}");
            }
        }
    }
}

#[test]
fn a_corrupt_byte_in_any_header_is_rejected_and_all_ranks_name_the_sender() {
    const SENDER: usize = 1;
    for (what, byte) in every(3).flat_map(|what| (0..64).map(move |byte| (what, byte))) {
        let changed = Fault::Corrupt { from: SENDER, to: 2, byte };
        let first = When::Operation { rank: SENDER, number: 1 };
        let outcome = run(&Network::new(3).with_fault(first, changed), what, 2);
        for (rank, result) in outcome.results.iter().enumerate() {
            let Some(Err(error)) = result else {
                panic!("{what:?}: rank {rank} has not noticed byte {byte}")
            };
            let (named, cause) = culprit(error);
            let expected = if byte < 8 { "protocol" } else { "mismatch" };
            assert_eq!((named, cause), (SENDER, expected), "{what:?}, byte {byte}: rank {rank}: {error}");
        }
    }
}

/// Returns `true` if this rank was delayed by a fault.
fn is_late(rank: usize, faults: &[String]) -> bool {
    let own = [format!("rank {rank} stands still"), format!("rank {rank} pauses")];
    faults.iter().any(|fault| own.iter().any(|words| fault.contains(words)))
}

/// Returns `true` if ranks may report different causes, because some rank has lost the coordinator.
fn is_divided(faults: &[String]) -> bool {
    let words = ["nothing gets", "the coordinator dies"];
    faults.iter().any(|fault| words.iter().any(|words| fault.contains(words)))
}

#[rstest]
fn no_call_outlives_its_deadline_and_all_ranks_name_the_same_rank(
    #[values(1, 2, 3)] faults: usize,
    #[values(false, true)] shares: bool,
) {
    let mut ended_early = 0;
    for seed in 0..40 {
        let world_size = 2 + usize::try_from(seed).unwrap() % 15;
        let network = Network::new(world_size).with_external_coordinator().with_seed(seed);
        let network = if shares { network.with_shared_memory() } else { network };
        let outcome = network.with_random_faults(faults).try_run(move |transport| {
            let mut comm = Communicator::new(transport);
            comm.set_timeout(TIMEOUT);
            comm.set_order(ReductionOrder::Any);
            // The order differs by seed, so that faults hit different calls.
            let ways: Vec<_> = every(world_size).collect();
            let first = usize::try_from(seed).unwrap() * 7 % ways.len();
            let (mut longest, runtime) = (Duration::ZERO, comm.runtime().clone());
            let told = ways[first..].iter().chain(&ways[..first]).find_map(|&what| {
                let began = runtime.now();
                let done = call(&mut comm, what);
                longest = longest.max(runtime.now() - began);
                done.err().map(|error| culprit(&error))
            });
            (longest, told)
        });
        let outcome = outcome.unwrap_or_else(|failed| panic!("{failed}"));
        let ends: Vec<_> = outcome.results.iter().enumerate().collect();
        let mut told: Vec<_> = ends.iter().filter_map(|(_, end)| end.as_ref()?.1).collect();
        told.dedup();
        ended_early += usize::from(!told.is_empty());
        assert!(told.len() < 2 || is_divided(&outcome.faults), "seed {seed}: {told:?}, {:?}", outcome.faults);
        for (rank, end) in ends {
            let Some((longest, _)) = end else { continue };
            let late = is_late(rank, &outcome.faults);
            assert!(late || *longest <= TIMEOUT, "seed {seed}: a call of rank {rank} took {longest:?}");
        }
    }
    assert!(ended_early > 5, "only {ended_early} of 40 runs ended early");
}
