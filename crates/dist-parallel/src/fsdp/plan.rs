//! The decisions about a sharded training before it begins.

use super::assignment::MicroBatchAssignment;
use super::layout::Layout;
use super::options::{Degrees, FsdpOptions};
use crate::engine::GatherPolicy;
use crate::{Error, ParamInfo, Result, params};

/// The sharding of a model and the order in which units are gathered and freed. It is pure data, which every rank
/// computes alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub(crate) options: FsdpOptions,
    pub(crate) degrees: Degrees,
    pub(crate) layout: Layout,
    pub(crate) reshard_group: Option<usize>,
    pub(super) infos: Vec<ParamInfo>,
    /// For each block, the index of its first parameter, and the number of parameters at the end.
    pub(super) starts: Vec<usize>,
}

impl Plan {
    /// Returns the plan for a model with these parameters on `world_size` ranks. Block `i` has the parameters from
    /// `starts[i]` up to `starts[i + 1]`. The last start is the number of parameters.
    ///
    /// # Errors
    /// Two parameters have the same name; tied parameters differ in shape or type; `starts` does not match the
    /// parameters; the strategy cannot divide the ranks; the units do not cover all blocks.
    pub fn new(
        infos: &[ParamInfo],
        starts: &[usize],
        world_size: usize,
        options: &FsdpOptions,
    ) -> Result<Self> {
        params::validate(infos)?;
        if starts.first() != Some(&0) || starts.last() != Some(&infos.len()) || !starts.is_sorted() {
            return Err(Error::Starts { starts: starts.to_vec(), parameters: infos.len() });
        }
        let degrees = options.strategy.degrees(world_size)?;
        let layout = Layout::new(infos, starts, &options.units, degrees.shards)?;
        let reshard_group = options.reshard.group(degrees)?;
        let (infos, starts) = (infos.to_vec(), starts.to_vec());
        Ok(Self { options: options.clone(), degrees, layout, reshard_group, infos, starts })
    }

    /// Returns a rank's position in the assignment of micro-batches.
    pub(crate) fn assignment(&self, rank: usize) -> MicroBatchAssignment {
        let Degrees { shards, replicas, each_round, .. } = self.degrees;
        if each_round {
            MicroBatchAssignment { replicas, replica: rank / shards, shards, shard: rank % shards }
        } else {
            MicroBatchAssignment { replicas: shards, replica: rank, shards: 1, shard: 0 }
        }
    }

    /// Returns the times at which units are gathered and freed.
    pub(crate) const fn gather_policy(&self) -> GatherPolicy {
        let FsdpOptions { prefetch, reshard, .. } = self.options;
        if self.degrees.frees { GatherPolicy::EachUse { prefetch, reshard } } else { GatherPolicy::Never }
    }
}
