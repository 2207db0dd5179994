//! Predictions for schedules on hosts and racks compared with the simulated network.
//!
//! On the simulated network a link carries one message after the other. Predictions give all messages equal shares,
//! as TCP does. Both use the full capacity, so they agree whenever only the last message matters.

use std::time::Duration;

use dist_algos::{Memory, Partition, Scratch, run};
use dist_predict::{LinkModel, MessageCosts, NetworkModel, queues};
use dist_transport::Transport;
use dist_transport::sim::{self, SimTransport};
use rstest::rstest;

use crate::schedules::{Schedules, all_schedules, plan};

/// A layout of hosts in racks: ranks per host, hosts per rack, and `true` if links have a latency.
#[derive(Clone, Copy, Debug)]
struct Shape {
    ranks_per_host: usize,
    hosts_per_rack: usize,
    latency: bool,
}

impl Shape {
    const fn new(ranks_per_host: usize, hosts_per_rack: usize) -> Self {
        Self { ranks_per_host, hosts_per_rack, latency: true }
    }

    /// Returns the latencies of a host and of a rack.
    const fn ns(self) -> [u64; 2] {
        if self.latency { [HOST_NS, RACK_NS] } else { [0, 0] }
    }
}

const NS: f64 = 1e-9;

/// A byte takes 2 ns on the link of a host and 5 on that of a rack; each is passed twice, at 300 and 1000 ns.
const HOST_NS: u64 = 300;
const RACK_NS: u64 = 1000;

fn predicted(schedules: &Schedules, parts: usize, bytes: usize, world_size: usize, shape: Shape) -> Duration {
    let link = |ns: u64, byte: f64| LinkModel { latency: 2.0 * ns as f64 * NS, byte: byte * NS };
    let [host_ns, rack_ns] = shape.ns();
    let network = NetworkModel::new(world_size, link(host_ns, 2.0), MessageCosts::NONE)
        .on_hosts_of(shape.ranks_per_host, LinkModel { latency: 0.0, byte: 0.0 })
        .in_racks_of(shape.hosts_per_rack, link(rack_ns, 5.0))
        .with_shared_uplinks();
    let prediction = queues(&plan(schedules, parts, bytes), &network).unwrap();
    Duration::from_secs_f64((prediction.seconds / NS).round() * NS)
}

/// Returns the time on the simulated network.
fn simulated(
    schedules: Schedules,
    parts: usize,
    bytes: usize,
    world_size: usize,
    shape: Shape,
    seed: u64,
) -> Duration {
    let hosts: Vec<u64> = (0..world_size).map(|rank| (rank / shape.ranks_per_host) as u64).collect();
    let racks: Vec<u64> = hosts.iter().map(|host| host / shape.hosts_per_rack as u64).collect();
    let link = |ns: u64, byte_ns: u64| sim::Link::new(Duration::from_nanos(ns), 1_000_000_000 / byte_ns);
    let [host_ns, rack_ns] = shape.ns();
    let network = sim::Network::new(world_size)
        .with_hosts(&hosts)
        .with_racks(&racks)
        .with_host_link(link(host_ns, 2))
        .with_rack_link(link(rack_ns, 5))
        .with_seed(seed);
    let program = move |mut transport: SimTransport| {
        let (rank, deadline) = (transport.rank(), transport.runtime().deadline(Duration::from_secs(60)));
        let mut buffer = vec![0; bytes];
        let input = buffer.clone();
        let partition = Partition::new(bytes, 1, parts).unwrap();
        let memory = Memory { buffer: &mut buffer, partition, input: Some((&input, partition)) };
        let (steps, scratch) = (schedules(rank), &mut Scratch::new());
        run(&mut transport, steps, memory, &mut |_, _| (), scratch, &deadline.into()).unwrap();
    };
    network.run(program).elapsed
}

/// Returns both times for every algorithm.
fn both(world_size: usize, shape: Shape, seed: u64) -> Vec<(String, Duration, Duration)> {
    let all = all_schedules(world_size).into_iter().map(|(name, parts, schedules)| {
        let bytes = 960 * parts;
        let predicted = predicted(&schedules, parts, bytes, world_size, shape);
        (name, predicted, simulated(schedules, parts, bytes, world_size, shape, seed))
    });
    all.collect()
}

/// The root finishes the scatter first, and its messages of the all_gather reach ranks that others still scatter
/// to. Predictions let arrived messages share the link to a rank. The simulated network reserves that link from the
/// time of sending, so a message that is sent later and arrives slightly earlier waits for all of it. Without
/// latency the two cases do not meet.
const SCATTERED: &str = "broadcast scatter_circulant";

#[rstest]
fn ranks_with_links_of_their_own_take_as_long_as_predicted(
    #[values(2, 4, 8)] world_size: usize,
    #[values(1, 8)] hosts_per_rack: usize,
    #[values(0, 1)] seed: u64,
) {
    for latency in [true, false] {
        let shape = Shape { latency, ..Shape::new(1, hosts_per_rack) };
        for (name, predicted, simulated) in both(world_size, shape, seed) {
            let alike = predicted == simulated || (name == SCATTERED && latency);
            assert!(alike, "{name}: {predicted:?} for {simulated:?}");
        }
    }
}

/// Algorithms in which messages that share a link are needed together, or by one rank only.
const NEEDED_TOGETHER: [&str; 9] = [
    "all_reduce ring",
    "all_reduce binomial",
    "reduce_scatter ring",
    "all_gather ring",
    "broadcast chain",
    "broadcast binomial",
    "reduce binomial",
    "barrier ring",
    "barrier dissemination",
];

#[rstest]
#[case(1, 2)]
#[case(2, 1)]
#[case(2, 2)]
#[case(4, 1)]
#[case(4, 2)]
fn ranks_that_share_links_take_as_long_as_predicted_or_about(
    #[case] ranks_per_host: usize,
    #[case] hosts_per_rack: usize,
    #[values(3, 8, 12)] world_size: usize,
) {
    let shape = Shape::new(ranks_per_host, hosts_per_rack);
    let mut equal = 0;
    for (name, predicted, simulated) in both(world_size, shape, 7) {
        if NEEDED_TOGETHER.contains(&&*name) {
            assert_eq!(predicted, simulated, "{name}");
            equal += 1;
        }
        let ratio = (predicted.as_secs_f64() + NS) / (simulated.as_secs_f64() + NS);
        assert!((0.6..1.7).contains(&ratio), "{name}: {predicted:?} for {simulated:?}");
    }
    assert_eq!(equal, NEEDED_TOGETHER.len());
}
