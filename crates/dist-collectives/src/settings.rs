//! What a communicator's calls are done with: the timeout, the order, the algorithms.

use std::time::Duration;

use dist_algos::{CostModel, Order};

use crate::algorithm::Choice;
use crate::{Algorithm, Error, Operation, ReductionOrder, Result};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) order: ReductionOrder,
    /// What the choice of an algorithm goes by; every rank has the same.
    pub(crate) model: CostModel,
    /// The algorithm of each operation that was asked for; the others are chosen.
    forced: [Option<Algorithm>; Operation::ALL.len()],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            order: ReductionOrder::Canonical,
            model: CostModel::default(),
            forced: [None; Operation::ALL.len()],
        }
    }
}

impl Settings {
    /// What a child inherits: all but the algorithms.
    pub(crate) fn of_child(&self) -> Self {
        Self { forced: Self::default().forced, ..*self }
    }

    pub(crate) fn force(&mut self, algorithm: Algorithm) {
        self.forced[algorithm.operation() as usize] = Some(algorithm);
    }

    /// The algorithm that was asked for.
    pub(crate) fn forced<A: Choice>(&self) -> Option<A> {
        self.forced[A::OPERATION as usize].and_then(A::of)
    }

    /// How an operation is done. Every rank chooses for itself, from what all ranks have in common: the choice is in
    /// the call that they compare.
    pub(crate) fn choose<A: Choice>(&self, world_size: usize, bytes: usize) -> Result<A> {
        let least = match self.order {
            ReductionOrder::Canonical => Order::Canonical,
            ReductionOrder::Any => Order::Any,
        };
        let Some(algorithm) = self.forced::<A>() else {
            return Ok(A::suggest(world_size, bytes, least, &self.model));
        };
        if !algorithm.supports(world_size) {
            return Err(Error::Unsupported { algorithm: algorithm.into(), world_size });
        }
        if algorithm.order(world_size) < least {
            return Err(Error::Order { algorithm: algorithm.into(), order: self.order, world_size });
        }
        Ok(algorithm)
    }
}
