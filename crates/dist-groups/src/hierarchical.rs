//! Enabling two-level algorithms.

use dist_collectives::tuning::{CostCache, CostModel, Hosts};
use dist_collectives::{Communicator, ReduceOp};

use crate::{CommunicatorExt, Result};

/// Measures the costs of messages inside hosts and between them, and enables two-level algorithms.
pub(crate) fn enable(communicator: &mut Communicator, cache: &CostCache, transport: &str) -> Result<bool> {
    let hosts = Hosts::new(&communicator.hosts());
    if hosts.count() == 1 || hosts.largest() == 1 {
        return Ok(false);
    }
    // The two levels have different names in the cache. Without them, both would have the same key if a host has as many
    // ranks as there are hosts.
    let [name_inside, name_across] = ["inside", "across"].map(|level| format!("{transport}-{level}"));
    let mut on_host = communicator.split_by_host()?;
    let inside =
        if on_host.world_size() > 1 { words(on_host.tune(Some(cache), &name_inside)?) } else { [0; 3] };
    let leaders = communicator.host_leaders()?;
    let across = leaders.map(|mut leaders| leaders.tune(Some(cache), &name_across)).transpose()?;
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
