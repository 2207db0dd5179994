//! Two-level schedules on real bytes.

use std::sync::Arc;

use dist_algos::hierarchical::{self, TwoLevelAlgorithm};
use dist_algos::{ALGORITHMS, CollectiveKind, Hosts, Order, Scratch, verify};
use dist_testkit::oracle::{self, Number, Reduction};
use rstest::rstest;

use crate::network::Network;
use crate::{assert_same, check_ranks, inputs, lengths, partition};

/// Hosts of consecutive ranks, with a smaller host, assigned in turn, and irregular.
const LAYOUTS: [&[u64]; 6] =
    [&[5], &[0, 0, 1, 1, 2, 2], &[0, 0, 1, 1, 2], &[0, 1, 0, 1], &[0, 1, 2], &[3, 1, 3, 3, 1, 2, 3]];

const NETWORKS: [Network; 2] = [Network::Mailboxes, Network::Simulated { seed: 11 }];

/// Returns the algorithms of an operation that support these hosts.
fn supported(collective: CollectiveKind, hosts: &Hosts) -> impl Iterator<Item = &'static TwoLevelAlgorithm> {
    ALGORITHMS.two_level().filter(move |two| two.collective == collective && two.supports(hosts))
}

/// Returns the results for these inputs.
#[track_caller]
fn run<N: Number + bytemuck::Pod + Send + Sync>(
    network: Network,
    inputs: &[Vec<N>],
    two: &'static TwoLevelAlgorithm,
    hosts: &Arc<Hosts>,
    root: usize,
) -> Vec<Vec<N>> {
    let report = verify::two_level(two, hosts, root).expect("it is proven");
    let (all, chunks) = (Arc::clone(hosts), two.chunks(hosts));
    check_ranks(network, inputs, &report, chunks, move |bench| {
        let steps = two.steps(bench.rank(), &all, root).expect("it is supported");
        bench.run(steps, chunks, &mut Scratch::new());
    })
}

#[rstest]
fn all_reduce_is_the_oracles_to_the_last_bit(#[values(0, 1, 2, 3, 4, 5)] layout: usize) {
    let hosts = Arc::new(Hosts::new(LAYOUTS[layout]));
    let all = supported(CollectiveKind::AllReduce, &hosts);
    for (two, network) in all.flat_map(|two| NETWORKS.map(|network| (two, network))) {
        for len in lengths(hosts.world_size()) {
            let inputs = inputs::<f32>(hosts.world_size(), len);
            let buffers = run(network, &inputs, two, &hosts, 0);
            let expected = oracle::all_reduce(&inputs, Reduction::Sum);
            for buffer in &buffers {
                assert_same(&format!("{two:?}, {len} elements, ranks agree"), buffer, &buffers[0]);
                if two.order(&hosts) == Some(Order::Canonical) {
                    assert_same(&format!("{two:?}, {len} elements"), buffer, &expected);
                }
            }
        }
    }
}

#[rstest]
fn integers_are_right_in_any_order(#[values(0, 1, 2, 3, 4, 5)] layout: usize) {
    let hosts = Arc::new(Hosts::new(LAYOUTS[layout]));
    for two in supported(CollectiveKind::AllReduce, &hosts) {
        let inputs = inputs::<u64>(hosts.world_size(), 101);
        let buffers = run(Network::Mailboxes, &inputs, two, &hosts, 0);
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        buffers.iter().for_each(|buffer| assert_same(two.name, buffer, &expected));
    }
}

#[rstest]
fn reduce_and_broadcast_work_with_every_root(
    #[values(0, 1, 2, 3, 4, 5)] layout: usize,
    #[values(0, 1, 13)] len: usize,
) {
    let hosts = Arc::new(Hosts::new(LAYOUTS[layout]));
    let inputs = inputs::<u64>(hosts.world_size(), len);
    let expected = oracle::all_reduce(&inputs, Reduction::Sum);
    for root in 0..hosts.world_size() {
        for two in supported(CollectiveKind::Reduce, &hosts) {
            let buffers = run(Network::Mailboxes, &inputs, two, &hosts, root);
            assert_same(&format!("{two:?} to {root}"), &buffers[root], &expected);
        }
        for two in supported(CollectiveKind::Broadcast, &hosts) {
            for buffer in run(Network::Mailboxes, &inputs, two, &hosts, root) {
                assert_same(&format!("{two:?} from {root}"), &buffer, &inputs[root]);
            }
        }
    }
}

#[rstest]
fn all_gather_and_reduce_scatter_work_on_contiguous_hosts(
    #[values(&[4], &[1, 1, 1], &[2, 2, 2], &[3, 3], &[4, 4])] sizes: &[u64],
) {
    let names = (0..).zip(sizes).flat_map(|(host, &size)| (0..size).map(move |_| host));
    let hosts = Arc::new(Hosts::new(&names.collect::<Vec<u64>>()));
    let world_size = hosts.world_size();
    for len in lengths(world_size) {
        let inputs = inputs::<u64>(world_size, len);
        let (sums, partition) =
            (oracle::all_reduce(&inputs, Reduction::Sum), partition::<u8>(len, world_size));
        let scattered = run(Network::Mailboxes, &inputs, &hierarchical::REDUCE_SCATTER, &hosts, 0);
        for (rank, buffer) in scattered.iter().enumerate() {
            assert_same(
                &format!("rank {rank}"),
                &buffer[partition.range(rank)],
                &sums[partition.range(rank)],
            );
        }
        let gathered = run(Network::Mailboxes, &scattered, &hierarchical::ALL_GATHER, &hosts, 0);
        gathered.iter().for_each(|buffer| assert_same(&format!("{len} elements"), buffer, &sums));
    }
}

#[test]
fn barriers_send_messages_of_no_bytes() {
    for layout in LAYOUTS {
        let hosts = Arc::new(Hosts::new(layout));
        for two in supported(CollectiveKind::Barrier, &hosts) {
            run(Network::Mailboxes, &inputs::<u64>(layout.len(), 0), two, &hosts, 0);
        }
    }
}
