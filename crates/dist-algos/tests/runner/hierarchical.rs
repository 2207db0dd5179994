//! Two-level schedules on real bytes.

use std::sync::Arc;

use dist_algos::hierarchical::{self, Plan};
use dist_algos::verify::hierarchical as verify;
use dist_algos::{Barrier, Broadcast, Hosts, Order, Reduce, Scratch};
use dist_testkit::oracle::{self, Reduction};
use rstest::rstest;

use crate::network::Network;
use crate::{assert_same, check_ranks, inputs, lengths, partition};

/// Hosts of neighbours, with a smaller one, dealt like cards, and without any rule.
const LAYOUTS: [&[u64]; 6] =
    [&[5], &[0, 0, 1, 1, 2, 2], &[0, 0, 1, 1, 2], &[0, 1, 0, 1], &[0, 1, 2], &[3, 1, 3, 3, 1, 2, 3]];

const NETWORKS: [Network; 2] = [Network::Mailboxes, Network::Simulated { seed: 11 }];

#[rstest]
fn all_reduce_is_the_oracles_to_the_last_bit(#[values(0, 1, 2, 3, 4, 5)] layout: usize) {
    let hosts = Arc::new(Hosts::new(LAYOUTS[layout]));
    for (plan, network) in Plan::all(&hosts).flat_map(|plan| NETWORKS.map(|network| (plan, network))) {
        let (report, chunks) = (verify::all_reduce(plan, &hosts).expect("it is proven"), plan.chunks(&hosts));
        for len in lengths(hosts.world_size()) {
            let all = hosts.clone();
            let inputs = inputs::<f32>(hosts.world_size(), len);
            let buffers = check_ranks(network, &inputs, &report, chunks, move |bench| {
                let phases = plan.phases(bench.rank(), &all).expect("it is supported");
                bench.run(phases.reduce.chain(phases.gather), chunks, &mut Scratch::new());
            });
            let expected = oracle::all_reduce(&inputs, Reduction::Sum);
            for buffer in &buffers {
                assert_same(&format!("{plan:?}, {len} elements, ranks agree"), buffer, &buffers[0]);
                if plan.order(&hosts) == Order::Canonical {
                    assert_same(&format!("{plan:?}, {len} elements"), buffer, &expected);
                }
            }
        }
    }
}

#[rstest]
fn integers_come_out_whatever_the_order(#[values(0, 1, 2, 3, 4, 5)] layout: usize) {
    let hosts = Arc::new(Hosts::new(LAYOUTS[layout]));
    for plan in Plan::all(&hosts) {
        let (report, chunks) = (verify::all_reduce(plan, &hosts).expect("it is proven"), plan.chunks(&hosts));
        let (all, inputs) = (hosts.clone(), inputs::<u64>(hosts.world_size(), 101));
        let buffers = check_ranks(Network::Mailboxes, &inputs, &report, chunks, move |bench| {
            let phases = plan.phases(bench.rank(), &all).expect("it is supported");
            bench.run(phases.reduce.chain(phases.gather), chunks, &mut Scratch::new());
        });
        let expected = oracle::all_reduce(&inputs, Reduction::Sum);
        buffers.iter().for_each(|buffer| assert_same(&format!("{plan:?}"), buffer, &expected));
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
        for &across in Reduce::ALL {
            let (report, chunks) = (verify::reduce(across, &hosts, root), across.chunks(hosts.count()));
            let all = hosts.clone();
            let buffers = check_ranks(Network::Mailboxes, &inputs, &report.unwrap(), chunks, move |bench| {
                let steps = hierarchical::reduce(bench.rank(), &all, across, root).expect("it exists");
                bench.run(steps, chunks, &mut Scratch::new());
            });
            assert_same(&format!("{across} to {root}"), &buffers[root], &expected);
        }
        for &across in Broadcast::ALL {
            let (report, chunks) = (verify::broadcast(across, &hosts, root), across.chunks(hosts.count()));
            let all = hosts.clone();
            let buffers = check_ranks(Network::Mailboxes, &inputs, &report.unwrap(), chunks, move |bench| {
                let steps = hierarchical::broadcast(bench.rank(), &all, across, root).expect("it exists");
                bench.run(steps, chunks, &mut Scratch::new());
            });
            for buffer in buffers {
                assert_same(&format!("{across} from {root}"), &buffer, &inputs[root]);
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
        let (sums, cut) = (oracle::all_reduce(&inputs, Reduction::Sum), partition::<u8>(len, world_size));
        let (all, report) = (hosts.clone(), verify::reduce_scatter(&hosts).unwrap());
        let scattered = check_ranks(Network::Mailboxes, &inputs, &report, world_size, move |bench| {
            let steps = hierarchical::reduce_scatter(bench.rank(), &all).expect("hosts are contiguous");
            bench.run(steps, world_size, &mut Scratch::new());
        });
        for (rank, buffer) in scattered.iter().enumerate() {
            assert_same(&format!("rank {rank}"), &buffer[cut.range(rank)], &sums[cut.range(rank)]);
        }
        let (all, report) = (hosts.clone(), verify::all_gather(&hosts).unwrap());
        let gathered = check_ranks(Network::Mailboxes, &scattered, &report, world_size, move |bench| {
            let steps = hierarchical::all_gather(bench.rank(), &all).expect("hosts are contiguous");
            bench.run(steps, world_size, &mut Scratch::new());
        });
        gathered.iter().for_each(|buffer| assert_same(&format!("{len} elements"), buffer, &sums));
    }
}

#[test]
fn barriers_send_messages_of_no_bytes() {
    for (layout, &across) in
        LAYOUTS.iter().flat_map(|layout| Barrier::ALL.iter().map(move |all| (layout, all)))
    {
        let hosts = Arc::new(Hosts::new(layout));
        let (report, inputs) = (verify::barrier(across, &hosts).unwrap(), inputs::<u64>(layout.len(), 0));
        check_ranks(Network::Mailboxes, &inputs, &report, 1, move |bench| {
            let steps = hierarchical::barrier(bench.rank(), &hosts, across).expect("it exists");
            bench.run(steps, 1, &mut Scratch::new());
        });
    }
}
