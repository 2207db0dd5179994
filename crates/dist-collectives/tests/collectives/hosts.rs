//! The use of hosts by a communicator.

use dist_algos::MessageAlgorithm;
use dist_collectives::tuning::{Algorithm, CostModel, Hosts, Operation};
use dist_collectives::{
    Communicator, Error, ReduceOp, ReductionOrder,
    algorithms::{halving_doubling, hierarchical, recursive_doubling, ring},
};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

const NEAR: CostModel = CostModel { round_ps: 1_000_000, byte_ps: 20, reduced_byte_ps: 0 };
const FAR: CostModel = CostModel { round_ps: 50_000_000, byte_ps: 1000, reduced_byte_ps: 0 };

fn on_two_hosts(comm: &mut Communicator) {
    comm.set_cost_model(FAR);
    comm.set_topology(Hosts::new(&[5, 5, 5, 5, 3, 3, 3, 3]), NEAR).unwrap();
}

#[test]
fn two_levels_are_chosen_where_they_are_faster_and_keep_the_order() {
    worlds::run(Network::Simulated, 8, |mut comm| {
        on_two_hosts(&mut comm);
        for operation in [Operation::AllReduce, Operation::Broadcast, Operation::Reduce, Operation::Barrier] {
            let chosen = comm.algorithm(operation, 1 << 20).unwrap().unwrap();
            assert!(matches!(chosen, Algorithm::TwoLevel(_)), "{operation}: {chosen}");
        }
        // Messages inside hosts are not faster, and two levels need more rounds.
        comm.set_topology(Hosts::new(&[5, 5, 5, 5, 3, 3, 3, 3]), FAR).unwrap();
        let chosen = comm.algorithm(Operation::AllReduce, 8).unwrap();
        assert!(!matches!(chosen, Some(Algorithm::TwoLevel(_))), "{chosen:?}");
        // If ranks alternate between hosts, canonical order is impossible with two levels.
        comm.set_topology(Hosts::new(&[0, 1, 0, 1, 0, 1, 0, 1]), NEAR).unwrap();
        let chosen = comm.algorithm(Operation::AllReduce, 1 << 20).unwrap();
        assert!(!matches!(chosen, Some(Algorithm::TwoLevel(_))), "{chosen:?}");
        comm.set_order(ReductionOrder::Any);
        let chosen = comm.algorithm(Operation::AllReduce, 1 << 20).unwrap();
        assert!(matches!(chosen, Some(Algorithm::TwoLevel(_))), "{chosen:?}");
    });
}

#[test]
fn the_chosen_algorithm_is_executed() {
    worlds::run(Network::Simulated, 8, |mut comm| {
        on_two_hosts(&mut comm);
        let plain = comm.traffic();
        comm.with_algorithm(&ring::ALL_REDUCE).with_order(ReductionOrder::Any).barrier().unwrap();
        let barrier = comm.traffic().messages_sent - plain.messages_sent;
        // A two-level barrier: only the leaders communicate with the other host.
        assert!(barrier <= if comm.rank().is_multiple_of(4) { 3 } else { 1 + 1 }, "{barrier}");
        let mut started = comm.fork().unwrap();
        let chosen = comm.algorithm(Operation::AllReduce, 4).unwrap();
        assert_eq!(started.algorithm(Operation::AllReduce, 4).unwrap(), chosen);
        let sum = started.start_all_reduce(vec![1.0_f32], ReduceOp::Sum).wait().unwrap();
        assert_eq!(*sum, [8.0]);
        let mut half = comm.subgroup(&[0, 1, 2, 3]).unwrap();
        if let Some(half) = &mut half {
            half.barrier().unwrap();
        }
    });
}

#[rstest]
fn a_cached_plan_is_not_used_after_hosts_were_set(#[values(false, true)] started: bool) {
    let sent = worlds::run(Network::Simulated, 8, move |mut comm| {
        comm.set_cost_model(FAR);
        let sent = |comm: &mut Communicator| {
            let all = |comm: &Communicator| (comm.traffic() + comm.traffic_of_started()).messages_sent;
            let before = all(comm);
            match started {
                true => comm.start_barrier().wait().unwrap(),
                false => comm.barrier().unwrap(),
            }
            all(comm) - before
        };
        let before = [sent(&mut comm), sent(&mut comm)];
        on_two_hosts(&mut comm);
        let after = [sent(&mut comm), sent(&mut comm)];
        comm.set_topology(Hosts::new(&[5, 5, 5, 5, 3, 3, 3, 3]), FAR).unwrap();
        [&before[..], &after, &[sent(&mut comm)]].concat()
    });
    let barriers = |call: usize| sent.iter().map(|sent| sent[call]).sum::<u64>();
    let [flat, again, two_levels, once_more, far] = [0, 1, 2, 3, 4].map(barriers);
    assert!(two_levels < flat, "{sent:?}");
    assert_eq!([again, once_more, far], [flat, two_levels, flat], "{sent:?}");
}

#[test]
fn hosts_of_another_world_and_algorithms_without_hosts_are_refused() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let error = comm.set_topology(Hosts::new(&[0, 0, 1]), NEAR).unwrap_err();
        assert_eq!(error.to_string(), "these are the hosts of 3 ranks, not of 2");
        let two = &hierarchical::BROADCAST_BINOMIAL;
        let error = comm.with_algorithm(two).broadcast(&mut [1_u8], 0).unwrap_err();
        assert!(matches!(error, Error::NoHosts { .. }), "{error:?}");
        assert_eq!(
            error.to_string(),
            "broadcast by two_level/binomial needs to know which ranks share a host: call set_topology first"
        );
        comm.set_topology(Hosts::new(&[0, 1]), NEAR).unwrap();
        comm.with_algorithm(two).broadcast(&mut [1_u8], 0).unwrap();
        comm.with_algorithm(&hierarchical::LEADERS_RING).all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap();
    });
}

#[test]
fn ranks_of_one_host_use_its_costs_and_share_its_memory() {
    worlds::run(Network::SharedMemory(1), 4, |mut comm| {
        comm.set_topology(Hosts::new(&[7; 4]), NEAR).unwrap();
        comm.barrier().unwrap();
        let algorithm = comm.algorithm(Operation::AllReduce, 4096).unwrap().unwrap();
        assert!(algorithm.name().starts_with("direct/"), "{algorithm:?}");
        assert_eq!(comm.cost_model(), NEAR);
    });
}

#[test]
fn ranks_with_different_hosts_get_an_error() {
    let errors = worlds::run(Network::Simulated, 4, |mut comm| {
        let hosts: &[u64] = if comm.rank() == 2 { &[0, 0, 0, 1] } else { &[0, 0, 1, 1] };
        comm.set_topology(Hosts::new(hosts), NEAR).unwrap();
        comm.set_order(ReductionOrder::Any);
        let two = &hierarchical::LEADERS_RECURSIVE_DOUBLING;
        let done = comm.with_algorithm(two).all_reduce(&mut [1_u8], ReduceOp::Sum);
        done.and_then(|()| comm.barrier()).unwrap_err()
    });
    for error in errors {
        assert!(!error.is_timeout() && error.to_string().contains("sizes"), "{error}");
    }
}

/// Returns the sum and the mean of this many elements with these hosts, and the number of messages of rank 0 for
/// the sum.
fn reduced(
    hosts: &[u64],
    algorithm: &'static MessageAlgorithm,
    len: usize,
) -> Vec<(Vec<u32>, Vec<u32>, u64)> {
    let outcome = sim::Network::new(hosts.len()).with_hosts(hosts).run(move |transport| {
        let mut comm = Communicator::new(transport);
        let rank = comm.rank();
        let input = |index: usize| (index * 31 + rank * 17) as f32 / 7.0;
        let mut sums: Vec<f32> = (0..len).map(input).collect();
        let mut means = sums.clone();
        comm.with_algorithm(algorithm).all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        let sent = comm.traffic().messages_sent;
        comm.with_algorithm(algorithm).all_reduce(&mut means, ReduceOp::Mean).unwrap();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        (bits(sums), bits(means), sent)
    });
    outcome.results
}

#[rstest]
fn ranks_of_one_host_reduce_large_buffers_in_blocks_to_the_same_bits(
    #[values(2, 3, 4)] ranks: usize,
    #[values(&recursive_doubling::ALL_REDUCE, &halving_doubling::ALL_REDUCE)]
    algorithm: &'static MessageAlgorithm,
) {
    // Three blocks of 128 Ki elements for every rank; the last one is short.
    let len = 2 * ranks * (128 << 10) + 5;
    let together = reduced(&vec![3; ranks], algorithm, len);
    let apart = reduced(&(0..ranks as u64).collect::<Vec<_>>(), algorithm, len);
    for (together, apart) in together.into_iter().zip(apart) {
        assert!(together.0 == apart.0 && together.1 == apart.1, "bits differ");
        assert_eq!(together.2, 3 * apart.2);
    }
}
