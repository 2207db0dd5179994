//! What a communicator's calls are done with: the timeout, the order, the algorithms.

use std::time::Duration;

use dist_algos::{AllGather, AllReduce, Barrier, Broadcast, CostModel, Order, Reduce, ReduceScatter};

use crate::{Algorithm, Error, ReductionOrder, Result};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) order: ReductionOrder,
    /// What the choice of an algorithm goes by; every rank has the same.
    model: CostModel,
    forced: Forced,
}

/// The algorithms that were asked for; the others are chosen.
#[derive(Clone, Copy, Debug, Default)]
struct Forced {
    all_reduce: Option<AllReduce>,
    reduce_scatter: Option<ReduceScatter>,
    all_gather: Option<AllGather>,
    broadcast: Option<Broadcast>,
    reduce: Option<Reduce>,
    barrier: Option<Barrier>,
}

impl Default for Settings {
    fn default() -> Self {
        let forced = Forced::default();
        Self {
            timeout: Duration::from_secs(60),
            order: ReductionOrder::Canonical,
            model: CostModel::default(),
            forced,
        }
    }
}

impl Settings {
    /// What a child inherits: all but the algorithms.
    pub(crate) fn of_child(&self) -> Self {
        Self { forced: Forced::default(), ..*self }
    }

    pub(crate) fn force(&mut self, algorithm: Algorithm) {
        let forced = &mut self.forced;
        match algorithm {
            Algorithm::AllReduce(algorithm) => forced.all_reduce = Some(algorithm),
            Algorithm::ReduceScatter(algorithm) => forced.reduce_scatter = Some(algorithm),
            Algorithm::AllGather(algorithm) => forced.all_gather = Some(algorithm),
            Algorithm::Broadcast(algorithm) => forced.broadcast = Some(algorithm),
            Algorithm::Reduce(algorithm) => forced.reduce = Some(algorithm),
            Algorithm::Barrier(algorithm) => forced.barrier = Some(algorithm),
        }
    }

    // Every rank chooses for itself, from what all ranks have in common: the choice is in the call that they
    // compare.

    pub(crate) fn all_reduce(&self, world_size: usize, bytes: usize) -> Result<AllReduce> {
        let Some(algorithm) = self.forced.all_reduce else {
            return Ok(AllReduce::suggest(world_size, bytes, self.least_order(), &self.model));
        };
        self.check(algorithm, world_size, algorithm.supports(world_size), algorithm.order(world_size))
    }

    pub(crate) fn reduce_scatter(&self, world_size: usize, bytes: usize) -> Result<ReduceScatter> {
        let Some(algorithm) = self.forced.reduce_scatter else {
            return Ok(ReduceScatter::suggest(world_size, bytes, self.least_order(), &self.model));
        };
        self.check(algorithm, world_size, algorithm.supports(world_size), algorithm.order(world_size))
    }

    pub(crate) fn reduce(&self, world_size: usize, bytes: usize) -> Result<Reduce> {
        let Some(algorithm) = self.forced.reduce else {
            return Ok(Reduce::suggest(world_size, bytes, self.least_order(), &self.model));
        };
        self.check(algorithm, world_size, algorithm.supports(world_size), algorithm.order(world_size))
    }

    pub(crate) fn all_gather(&self, world_size: usize, bytes: usize) -> Result<AllGather> {
        let Some(algorithm) = self.forced.all_gather else {
            return Ok(AllGather::suggest(world_size, bytes, &self.model));
        };
        self.check(algorithm, world_size, algorithm.supports(world_size), Order::Canonical)
    }

    pub(crate) fn broadcast(&self, world_size: usize, bytes: usize) -> Result<Broadcast> {
        let Some(algorithm) = self.forced.broadcast else {
            return Ok(Broadcast::suggest(world_size, bytes, &self.model));
        };
        self.check(algorithm, world_size, algorithm.supports(world_size), Order::Canonical)
    }

    pub(crate) fn barrier(&self, world_size: usize) -> Result<Barrier> {
        let Some(algorithm) = self.forced.barrier else { return Ok(Barrier::suggest(world_size)) };
        self.check(algorithm, world_size, algorithm.supports(world_size), Order::Canonical)
    }

    fn least_order(&self) -> Order {
        match self.order {
            ReductionOrder::Canonical => Order::Canonical,
            ReductionOrder::Any => Order::Any,
        }
    }

    /// Gives the algorithm back if it may be used.
    fn check<A: Copy + Into<Algorithm>>(
        &self,
        algorithm: A,
        world_size: usize,
        supported: bool,
        order: Order,
    ) -> Result<A> {
        if !supported {
            return Err(Error::Unsupported { algorithm: algorithm.into(), world_size });
        }
        if order < self.least_order() {
            return Err(Error::Order { algorithm: algorithm.into(), order: self.order, world_size });
        }
        Ok(algorithm)
    }
}
