//! Costs are measured together, agreed on and stored, and determine the chosen algorithm.

use std::fs;
use std::path::Path;

use dist_collectives::tuning::{Algorithm, CostCache, CostModel, Operation};
use dist_collectives::{
    Communicator, ReduceOp,
    algorithms::{halving_doubling, recursive_doubling},
};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{Network, run};

#[test]
fn every_rank_measures_the_same() {
    for world_size in [1, 2, 3] {
        let measured = run(Network::Threads, world_size, |mut comm| {
            let before = comm.cost_model();
            let measured = comm.measure_costs().unwrap();
            assert_eq!(comm.cost_model(), before, "measuring changes nothing");
            measured
        });
        assert!(measured.iter().all(|costs| *costs == measured[0]), "{measured:?}");
        let CostModel { round_ps, byte_ps, reduced_byte_ps } = measured[0];
        assert!(round_ps > 1 && byte_ps > 0 && reduced_byte_ps > 1, "{measured:?}");
    }
}

/// Measures the costs with a separate file for each rank, as on separate hosts. Some files contain these
/// costs.
fn tune(directory: &Path, lines: &[&str]) -> Vec<CostModel> {
    for (rank, line) in lines.iter().enumerate() {
        fs::write(directory.join(format!("costs-{rank}")), line).unwrap();
    }
    let directory = directory.to_owned();
    let tuned = run(Network::Threads, 3, move |mut comm| {
        let kept = CostCache::at(directory.join(format!("costs-{}", comm.rank())));
        let costs = comm.tune(Some(&kept), "sim").unwrap();
        assert_eq!(comm.cost_model(), costs);
        costs
    });
    assert!(tuned.iter().all(|costs| *costs == tuned[0]), "{tuned:?}");
    tuned
}

#[test]
fn costs_that_are_not_stored_are_measured_and_stored_by_rank_0() {
    let directory = tempfile::tempdir().unwrap();
    let measured = tune(directory.path(), &[]);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    let kept = CostCache::at(directory.path().join("costs-0")).read().unwrap();
    assert_eq!(kept.into_values().collect::<Vec<_>>(), measured[..1]);
}

#[test]
fn stored_costs_of_rank_0_are_used_by_the_next_run() {
    let directory = tempfile::tempdir().unwrap();
    // No measurement is faster than these costs.
    let tuned = tune(directory.path(), &["sim 3 1 1 2 3", "sim 3 1 4 5 6"]);
    assert_eq!(tuned[0], CostModel { round_ps: 1, byte_ps: 2, reduced_byte_ps: 3 });
}

#[rstest]
#[case::rank_0_has_no_file([false, true], true)]
#[case::the_other_has_none([true, false], false)]
fn rank_0_decides_whether_anything_is_measured(#[case] measures: [bool; 2], #[case] fixed: bool) {
    let costs = run(Network::Threads, 2, move |mut comm| {
        let kept = measures[comm.rank()].then(CostCache::disabled);
        comm.tune(kept.as_ref(), "sim").unwrap();
        comm.all_reduce(&mut [1.0_f32; 1024], ReduceOp::Sum).unwrap();
        comm.cost_model()
    });
    assert_eq!(costs[0], costs[1]);
    assert_eq!(costs[0] == CostModel::default(), fixed);
}

#[test]
fn costs_that_are_too_high_are_measured_again() {
    let directory = tempfile::tempdir().unwrap();
    let kept = || fs::read_to_string(directory.path().join("costs-0")).unwrap();
    tune(directory.path(), &[]);
    let header: String = kept().split_inclusive('\n').filter(|line| line.starts_with('#')).collect();
    // One second for each message, or for a few thousand bytes, or costs whose sum overflows.
    let most = format!("{0} {0} 1", u64::MAX);
    for slow in ["1000000000000 1 1", "1 100000000 1", "1 1 100000000", &most] {
        let costs = tune(directory.path(), &[&format!("{header}sim 3 1 {slow}\n")])[0];
        let CostModel { round_ps, byte_ps, reduced_byte_ps } = costs;
        assert!(round_ps < 1_000_000_000_000 && byte_ps.max(reduced_byte_ps) < 100_000_000, "{costs:?}");
        assert_eq!(kept(), format!("{header}sim 3 1 {round_ps} {byte_ps} {reduced_byte_ps}\n"));
    }
}

#[test]
fn a_file_that_cannot_be_used_harms_nothing() {
    let costs = run(Network::Threads, 2, |mut comm| {
        comm.tune(Some(&CostCache::at("/dev/null/costs")), "sim").unwrap()
    });
    assert_eq!(costs[0], costs[1]);
}

#[test]
fn the_choice_goes_by_the_costs_that_were_set() {
    let outcome = sim::run(3, 4, |transport| {
        let mut comm = Communicator::new(transport);
        let quick_rounds = CostModel { round_ps: 1, ..CostModel::default() };
        let chosen = |comm: &Communicator| comm.algorithm(Operation::AllReduce, 4096).unwrap();
        let by_default = chosen(&comm);
        comm.set_cost_model(quick_rounds);
        comm.all_reduce(&mut [1.0_f32; 1024], ReduceOp::Sum).unwrap();
        let (child, sent) = (comm.fork().unwrap(), comm.traffic().bytes_sent);
        (by_default, chosen(&comm), chosen(&child), sent)
    });
    let few_rounds = Algorithm::from(&recursive_doubling::ALL_REDUCE);
    let few_bytes = Algorithm::from(&halving_doubling::ALL_REDUCE);
    // Halving-doubling sends 2·3/4 of the buffer, recursive doubling twice the buffer.
    assert!(
        outcome
            .results
            .iter()
            .all(|chosen| { *chosen == (Some(few_rounds), Some(few_bytes), Some(few_bytes), 6144) })
    );
}

/// The worker has plans for calls of this kind from before.
#[test]
fn operations_that_are_started_after_crossovers_were_set_use_them() {
    let moved = run(Network::SharedMemory(5), 3, |mut comm| {
        let moved = |comm: &mut Communicator| {
            let before = comm.traffic_of_started();
            let _sum = comm.start_all_reduce(vec![1.0_f32; 1024], ReduceOp::Sum).wait().unwrap();
            let after = comm.traffic_of_started();
            [after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received]
        };
        let before = [moved(&mut comm), moved(&mut comm)];
        comm.set_crossovers("staged=1K".parse().unwrap());
        let after = moved(&mut comm);
        let mut fork = comm.fork().unwrap();
        (before, after, [moved(&mut fork), moved(&mut fork)])
    });
    for (before, after, of_fork) in moved {
        assert_ne!(before[1], after);
        assert_eq!(after, of_fork[1]);
    }
}

#[test]
fn a_cached_plan_is_not_used_after_a_setting_has_changed() {
    let outcome = sim::run(3, 4, |transport| {
        let mut comm = Communicator::new(transport);
        let sent = |comm: &mut Communicator, elements| {
            let before = comm.traffic().bytes_sent;
            comm.all_reduce(&mut vec![1.0_f32; elements], ReduceOp::Sum).unwrap();
            comm.traffic().bytes_sent - before
        };
        let first = [sent(&mut comm, 1024), sent(&mut comm, 1024), sent(&mut comm, 1 << 20)];
        comm.set_cost_model(CostModel { round_ps: 1, ..CostModel::default() });
        let quick = sent(&mut comm, 1024);
        comm.set_cost_model(CostModel::default());
        let forced = sent(&mut comm.with_algorithm(&halving_doubling::ALL_REDUCE), 1024);
        (first, quick, [forced, sent(&mut comm, 1024)])
    });
    // Halving-doubling sends 2·3/4 of the buffer, recursive doubling twice the buffer.
    assert_eq!(outcome.results, [([8192, 8192, 6 << 20], 6144, [6144, 8192]); 4]);
}

#[rstest]
fn more_kinds_of_calls_than_are_kept_are_done_as_well(
    #[values(Network::Simulated, Network::SHARING[0])] network: Network,
) {
    run(network, 3, |mut comm| {
        let own = u32::try_from(comm.rank()).unwrap() + 1;
        for _ in 0..2 {
            for len in 1..40 {
                let mut sums = vec![1; len];
                comm.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
                assert_eq!(sums, vec![3; len]);
                let mut of_root = vec![own; len];
                comm.broadcast(&mut of_root, len % 3).unwrap();
                assert_eq!(of_root, vec![u32::try_from(len % 3).unwrap() + 1; len]);
                // This call always uses messages.
                let mut all = vec![0; 3 * len];
                comm.gather(&vec![own; len], &mut all, len % 3).unwrap();
                let gathered = [vec![1; len], vec![2; len], vec![3; len]].concat();
                assert!(comm.rank() != len % 3 || all == gathered, "{all:?}");
                let mut before = vec![own; len];
                comm.scan(&mut before, ReduceOp::Sum).unwrap();
                assert_eq!(before, vec![own * (own + 1) / 2; len]);
            }
        }
    });
}

#[test]
fn ranks_with_different_costs_find_out_before_they_get_wrong_sums() {
    let outcome = sim::run(3, 4, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 2 {
            comm.set_cost_model(CostModel { round_ps: 1, ..CostModel::default() });
        }
        comm.all_reduce(&mut [1.0_f32; 1024], ReduceOp::Sum).is_err()
    });
    assert_eq!(outcome.results, [true; 4]);
}

#[test]
fn operations_without_a_choice_have_no_algorithm() {
    let outcome =
        sim::run(0, 1, |transport| Communicator::new(transport).algorithm(Operation::Message, 8).unwrap());
    assert_eq!(outcome.results, [None]);
}
