//! The process groups of sharded training, and the time that a rank has waited for them.

use std::time::Duration;

use dist_collectives::Communicator;

use super::options::Degrees;
use crate::flat::{Flat, PendingFlat};
use crate::flat_storage::Allocator;
use crate::gradients::ReduceGroups;
use crate::hook_worker::HookWorker;
use crate::{Error, FloatType, Result};

#[derive(Debug)]
pub(crate) struct Groups {
    /// The ranks that share one replica of the model.
    pub(crate) shards: Communicator,
    /// The ranks with the same shard in each replica.
    pub(crate) replicas: Communicator,
    /// Forks of `shards` and `replicas` for started operations, which are a stream of their own: a blocking call does not
    /// wait for them. `None` if they use `shards` and `replicas`.
    started: Option<StartedGroups>,
    /// The ranks that keep a shard each between forward and backward.
    pub(crate) reshard_group: Option<Communicator>,
    /// The worker that sums over the replicas in place of an all-reduce.
    pub(crate) hook: Option<HookWorker>,
    /// The source of the storage of parameters and gradients.
    pub(crate) allocator: Allocator,
    /// The time that this rank has waited since the last [`take_waited`](Self::take_waited).
    waited: Duration,
}

#[derive(Debug)]
struct StartedGroups {
    shards: Communicator,
    replicas: Communicator,
}

impl Groups {
    /// Creates the groups without communication.
    pub(crate) fn new(
        world: &mut Communicator,
        degrees: Degrees,
        reshard_group: Option<usize>,
    ) -> Result<Self> {
        let (rank, shards) = (world.rank(), degrees.shards);
        let neighbours = |rank: usize, count: usize| {
            let first = rank - rank % count;
            Vec::from_iter(first..first + count)
        };
        let first = rank - rank % (degrees.replicas * shards) + rank % shards;
        let copies: Vec<usize> = (0..degrees.replicas).map(|replica| first + replica * shards).collect();
        let (mut shards, mut replicas) = (group(world, &neighbours(rank, shards))?, group(world, &copies)?);
        let fork = |group: &mut Communicator| group.fork().map_err(Error::communication);
        let started = Some(StartedGroups { shards: fork(&mut shards)?, replicas: fork(&mut replicas)? });
        Ok(Self {
            shards,
            replicas,
            started,
            reshard_group: reshard_group.map(|count| group(world, &neighbours(rank, count))).transpose()?,
            hook: None,
            allocator: Allocator::Memory,
            waited: Duration::ZERO,
        })
    }

    /// Returns the groups of a rank that has all shards of the only replica.
    pub(crate) fn alone(world: &mut Communicator) -> Result<Self> {
        let rank = world.rank();
        let (shards, replicas) = (group(world, &[rank])?, group(world, &[rank])?);
        Ok(Self {
            shards,
            replicas,
            started: None,
            reshard_group: None,
            hook: None,
            allocator: Allocator::Memory,
            waited: Duration::ZERO,
        })
    }

    /// Allocates zeros that the ranks of a replica on one host share.
    pub(crate) fn allocate(&mut self, dtype: FloatType, len: usize) -> Result<Flat> {
        self.allocator.shared_zeros(&mut self.shards, dtype, len)
    }

    /// Inherits the timeout and the reduction order of the world's communicator.
    pub(crate) fn follow(&mut self, world: &Communicator) {
        let groups = [Some(&mut self.shards), Some(&mut self.replicas), self.reshard_group.as_mut()];
        groups.into_iter().flatten().for_each(|group| follow(group, world));
        if let Some(StartedGroups { shards, replicas }) = &mut self.started {
            [shards, replicas].into_iter().for_each(|group| follow(group, world));
        }
        if let Some(hook) = &mut self.hook {
            hook.follow(world);
        }
    }

    pub(crate) fn wait(&mut self, pending: PendingFlat) -> Result<Flat> {
        self.timed(|| pending.wait())
    }

    /// Runs `wait` and adds its duration to the waiting time.
    pub(crate) fn timed<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = self.shards.runtime().now();
        let done = wait();
        self.waited += self.shards.runtime().now().saturating_sub(began);
        done
    }

    /// Adds to the waiting time.
    pub(crate) fn add_waited(&mut self, waited: Duration) {
        self.waited += waited;
    }

    /// Returns the groups that gradients are reduced over.
    pub(crate) fn reduce(&mut self) -> ReduceGroups<'_> {
        let Self { shards, replicas, started, hook, allocator, waited, .. } = self;
        let (shards, replicas) = match started {
            Some(started) => (&mut started.shards, &mut started.replicas),
            None => (shards, replicas),
        };
        ReduceGroups::new(Some(shards), Some(replicas), hook.as_ref(), allocator, waited)
    }

    /// Returns the group of the shards for gathers, and the reshard group.
    pub(crate) fn gathering(&mut self) -> (&mut Communicator, Option<&mut Communicator>) {
        let shards = match &mut self.started {
            Some(started) => &mut started.shards,
            None => &mut self.shards,
        };
        (shards, self.reshard_group.as_mut())
    }

    /// Returns the number of bytes that this rank has sent to its groups.
    pub(crate) fn bytes_sent(&self) -> u64 {
        let of_hook = self.hook.as_ref().map_or(0, HookWorker::bytes_sent);
        self.all().map(bytes_sent).sum::<u64>() + of_hook
    }

    /// Returns the number of these bytes that belong to asynchronous operations: parameters and gradients.
    pub(crate) fn tensor_bytes_sent(&self) -> u64 {
        self.all().map(|group| group.traffic_of_started().bytes_sent).sum()
    }

    fn all(&self) -> impl Iterator<Item = &Communicator> {
        let started = self.started.iter().flat_map(|started| [&started.shards, &started.replicas]);
        [&self.shards, &self.replicas].into_iter().chain(&self.reshard_group).chain(started)
    }

    /// Returns the time that this rank has waited since the last call.
    pub(crate) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

/// Copies the timeout and the reduction order of `parent`, which can have changed since `comm` was made from it.
pub(crate) fn follow(comm: &mut Communicator, parent: &Communicator) {
    comm.set_timeout(parent.timeout());
    comm.set_order(parent.order());
}

/// Returns the number of bytes that this rank has sent with one communicator.
pub(crate) fn bytes_sent(comm: &Communicator) -> u64 {
    comm.traffic().bytes_sent + comm.traffic_of_started().bytes_sent
}

fn group(world: &mut Communicator, members: &[usize]) -> Result<Communicator> {
    let group = world.subgroup(members).map_err(Error::communication)?;
    Ok(group.expect("every rank names a group that it is in"))
}
