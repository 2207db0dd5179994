//! Enabling two-level algorithms.

use dist_collectives::{Communicator, CostCache, CostModel, Hosts, ReduceOp};

use crate::{Group, Result};

/// Enables two-level algorithms for a communicator, and for the forks, groups and meshes that are created from it
/// later. If it is faster, operations communicate inside hosts first and then between hosts, so that fewer messages
/// and bytes use the slow links. Returns `false` and changes nothing if all ranks share a host, or no two ranks do.
///
/// The costs of messages are [measured](Communicator::tune) inside hosts and between their leaders, or read from
/// the cache of an earlier run. All ranks of the communicator must make this call.
///
/// ```
/// use std::time::Duration;
///
/// use dist_collectives::{Communicator, CostCache, Operation};
/// use dist_groups::{Mesh, enable_hierarchical};
/// use dist_transport::sim;
///
/// let memory = sim::Link::new(Duration::from_micros(1), 5_000_000_000);
/// let cable = sim::Link::new(Duration::from_micros(50), 100_000_000);
/// let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
/// let network = sim::Network::new(8).with_hosts(&hosts).with_memory_link(memory).with_host_link(cable);
/// let outcome = network.run(|transport| {
///     let mut world = Communicator::new(transport);
///     enable_hierarchical(&mut world, &CostCache::disabled(), "sim").unwrap();
///     world.algorithm(Operation::AllReduce, 1 << 20).unwrap().unwrap().name()
/// });
/// assert!(outcome.results[0].starts_with("two_level/"));
/// ```
///
/// # Errors
/// Those of a collective.
pub fn enable_hierarchical(
    communicator: &mut Communicator,
    kept: &CostCache,
    transport: &str,
) -> Result<bool> {
    let hosts = Hosts::new(&communicator.hosts());
    if hosts.count() == 1 || hosts.largest() == 1 {
        return Ok(false);
    }
    // The names must differ, because a host may have as many ranks as there are hosts.
    let [name_inside, name_across] = ["inside", "across"].map(|level| format!("{transport}-{level}"));
    let mut on_host = Group::on_host(communicator)?;
    let inside =
        if on_host.world_size() > 1 { words(on_host.tune(Some(kept), &name_inside)?) } else { [0; 3] };
    let leaders = Group::of_leaders(communicator)?;
    let across = leaders.map(|mut leaders| leaders.tune(Some(kept), &name_across)).transpose()?;
    // Every host has measured its own costs; the slowest host counts.
    let mut costs = [inside, across.map_or([0; 3], words)].concat();
    communicator.all_reduce(&mut costs, ReduceOp::Max)?;
    communicator.set_cost_model(model(&costs[3..]));
    communicator.set_topology(hosts, model(&costs[..3]))?;
    Ok(true)
}

fn words(CostModel { round_ps, byte_ps, reduced_byte_ps }: CostModel) -> [u64; 3] {
    [round_ps, byte_ps, reduced_byte_ps]
}

fn model(words: &[u64]) -> CostModel {
    CostModel { round_ps: words[0], byte_ps: words[1], reduced_byte_ps: words[2] }
}
