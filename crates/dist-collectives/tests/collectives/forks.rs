//! Communicators created from communicators, used at the same time.

use std::time::Duration;

use dist_collectives::transport::Transport;
use dist_collectives::tuning::Operation;
use dist_collectives::{Communicator, ReduceOp, ReductionOrder};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

#[rstest]
fn forks_on_two_threads_are_independent(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 5)] world_size: usize,
) {
    worlds::run(network, world_size, move |mut comm| {
        let mut fork = comm.fork().unwrap();
        let task = comm.runtime().clone().spawn("other", move || {
            for round in 0..30_u64 {
                let mut sum = [round; 5];
                fork.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [round * world_size as u64; 5]);
            }
        });
        for round in 0..30_u8 {
            let mut buffer = if comm.rank() == 0 { [round; 7] } else { [255; 7] };
            comm.broadcast(&mut buffer, 0).unwrap();
            assert_eq!(buffer, [round; 7]);
        }
        task.unwrap().join().unwrap();
    });
}

#[rstest]
fn a_subgroup_counts_its_own_ranks_in_the_order_of_its_list(
    #[values(Network::Simulated, Network::Threads)] network: Network,
) {
    worlds::run(network, 5, |mut comm| {
        comm.set_timeout(Duration::from_secs(17));
        comm.set_order(ReductionOrder::Any);
        let group = comm.subgroup(&[4, 0, 3]).unwrap();
        let Some(mut group) = group else {
            assert!([1, 2].contains(&comm.rank()));
            return;
        };
        assert_eq!((group.timeout(), group.order()), (comm.timeout(), comm.order()));
        assert_eq!([4, 0, 3][group.rank()], comm.rank());
        let mut gathered = [0; 3];
        group.all_gather(&[comm.rank() as u64], &mut gathered).unwrap();
        assert_eq!(gathered, [4, 0, 3]);
        let mut inner = group.subgroup(&[2, 1]).unwrap();
        if let Some(inner) = &mut inner {
            let mut gathered = [0; 2];
            inner.all_gather(&[comm.rank() as u64], &mut gathered).unwrap();
            assert_eq!(gathered, [3, 0]);
        }
    });
}

#[test]
fn a_fork_of_a_transport_makes_a_communicator() {
    let network = sim::Network::new(3).with_shared_memory();
    let outcome = network.run(|mut transport| {
        let fork = transport.fork(&[2, 0, 1]).unwrap().unwrap();
        let mut comm = Communicator::new(fork);
        let mut sum = [1_u32; 2];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        // The boxed transport still supports shared memory.
        assert!(comm.algorithm(Operation::AllReduce, 8).unwrap().unwrap().name().starts_with("direct"));
        (comm.rank(), sum)
    });
    assert_eq!(outcome.results, [(1, [3; 2]), (2, [3; 2]), (0, [3; 2])]);
}

#[test]
fn groups_that_share_ranks_run_at_the_same_time() {
    for network in [Network::Simulated, Network::Threads] {
        worlds::run(network, 4, |mut comm| {
            let lists: [&[usize]; 4] = [&[0, 1, 2, 3], &[0, 1], &[1, 2, 3], &[3, 0]];
            let groups = lists.map(|members| comm.subgroup(members).unwrap());
            let runtime = comm.runtime().clone();
            let start = |group: Communicator| {
                runtime.spawn("group", move || {
                    let mut group = group;
                    for _ in 0..20 {
                        let mut ones = [1_u32; 33];
                        group.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
                        assert_eq!(ones, [u32::try_from(group.world_size()).unwrap(); 33]);
                    }
                })
            };
            let direct_calls: Vec<_> =
                groups.into_iter().flatten().map(|group| start(group).unwrap()).collect();
            direct_calls.into_iter().for_each(|task| task.join().unwrap());
        });
    }
}

/// Calls that were made before, and calls that are first made between two forks.
#[test]
fn calls_go_on_when_all_ranks_make_the_same_communicators() {
    let networks = [&[Network::Simulated, Network::Threads], Network::SHARING].concat();
    for (network, world_size) in
        networks.into_iter().flat_map(|network| [1, 2, 3].map(|size| (network, size)))
    {
        worlds::run(network, world_size, |mut comm| {
            let ranks = u32::try_from(comm.world_size()).unwrap();
            let calls = |comm: &mut Communicator| {
                for len in [3, 5000] {
                    for _ in 0..3 {
                        let mut ones = vec![1_u32; len];
                        comm.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
                        assert!(ones.iter().all(|&sum| sum == ranks));
                    }
                    comm.barrier().unwrap();
                }
            };
            calls(&mut comm);
            let mut fork = comm.fork().unwrap();
            calls(&mut comm);
            calls(&mut fork);
            let mut own = comm.subgroup(&[comm.rank()]).unwrap().unwrap();
            let mut inner = fork.fork().unwrap();
            for comm in [&mut comm, &mut fork, &mut inner] {
                calls(comm);
                comm.monitored_barrier().unwrap();
            }
            own.barrier().unwrap();
        });
    }
}

#[rstest]
fn messages_are_counted_for_each_pair_and_direction(
    #[values(Network::Simulated, Network::Threads)] network: Network,
) {
    worlds::run(network, 3, |mut comm| {
        let rank = comm.rank();
        // Rank 2 only takes part in the collectives.
        for round in 0..5_u32 {
            match rank {
                0 => {
                    comm.send(&[round], 1).unwrap();
                    comm.send(&[round + 100], 1).unwrap();
                    let mut answer = [0_u32];
                    comm.recv(&mut answer, 1).unwrap();
                    assert_eq!(answer, [2 * round + 100]);
                }
                1 => {
                    let (mut first, mut second) = ([0_u32], [0_u32]);
                    comm.recv(&mut first, 0).unwrap();
                    comm.recv(&mut second, 0).unwrap();
                    comm.send(&[first[0] + second[0]], 0).unwrap();
                }
                _ => {}
            }
            comm.barrier().unwrap();
        }
        // An empty message, and a message to itself.
        if rank < 2 {
            let mut nothing = [0_u8; 0];
            if rank == 0 { comm.send(&nothing, 1) } else { comm.recv(&mut nothing, 0) }.unwrap();
        }
        comm.send(&[1.5_f64; 3], rank).unwrap();
        let mut own = [0.0_f64; 3];
        comm.recv(&mut own, rank).unwrap();
        assert_eq!(own, [1.5; 3]);
    });
}

#[test]
fn members_create_groups_alone_at_different_points_among_their_calls() {
    for &network in Network::ALL {
        let sums = worlds::run(network, 4, |mut comm| {
            let me = comm.rank();
            let group = |comm: &mut Communicator| {
                let mut sums = Vec::new();
                // The second group of one list and one tag is another one, as is that of another tag.
                for tag in [5, 5, 6] {
                    let mut group = comm.subgroup_local(&[3, 1], tag).unwrap();
                    assert_eq!([3, 1][group.rank()], me);
                    let mut sum = [me as u64 + u64::from(tag)];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    sums.push(sum[0]);
                }
                sums
            };
            let before = if me == 1 { group(&mut comm) } else { Vec::new() };
            let mut fork = if me == 3 { Vec::new() } else { vec![comm.fork().unwrap()] };
            let after = if me == 3 { group(&mut comm) } else { Vec::new() };
            fork.extend((me == 3).then(|| comm.fork().unwrap()));
            fork[0].barrier().unwrap();
            comm.barrier().unwrap();
            [before, after].concat()
        });
        assert_eq!(sums, [vec![], vec![14, 14, 16], vec![], vec![14, 14, 16]], "{network:?}");
    }
}
