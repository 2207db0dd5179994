//! What a communicator's calls are done with: the timeout, the order, the algorithms.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use dist_algos::direct::Crossovers;
use dist_algos::{CostModel, Placement};

use crate::algorithm::OneOf;
use crate::two_level::{ChosenAlgorithm, HostLevels};
use crate::{Algorithm, Error, Operation, ReductionOrder, Result};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) order: ReductionOrder,
    /// What the choice of an algorithm goes by; every rank has the same.
    pub(crate) model: CostModel,
    /// And that of a form, where ranks share memory.
    pub(crate) crossovers: Crossovers,
    /// The algorithm of each operation that was asked for; the others are chosen.
    forced: [Option<Algorithm>; Operation::ALL.len()],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            order: ReductionOrder::Canonical,
            model: CostModel::default(),
            crossovers: Crossovers::default(),
            forced: [None; Operation::ALL.len()],
        }
    }
}

impl Settings {
    /// What a child inherits: all but the algorithms.
    pub(crate) fn of_child(&self) -> Self {
        Self { forced: Self::default().forced, ..*self }
    }

    /// Asks for an algorithm of this operation, or for none; gives back what was asked for before.
    pub(crate) const fn force(
        &mut self,
        operation: Operation,
        algorithm: Option<Algorithm>,
    ) -> Option<Algorithm> {
        mem::replace(&mut self.forced[operation as usize], algorithm)
    }

    /// The algorithm that was asked for.
    pub(crate) fn forced(&self, operation: Operation) -> Option<Algorithm> {
        self.forced[operation as usize]
    }

    /// How an operation is done on so many bytes. Every rank chooses for itself, from what all ranks have in common: the
    /// choice is in the call that they compare.
    pub(crate) fn choose<A: OneOf>(
        &self,
        placement: Placement,
        bytes: usize,
        levels: Option<&Arc<HostLevels>>,
    ) -> Result<ChosenAlgorithm<A>> {
        let Self { order, ref model, .. } = *self;
        let (world_size, least) = (placement.ranks, order.least());
        let Some(algorithm) = self.forced(A::SERVES) else {
            let flat = A::suggest_for(placement, bytes, least, model);
            let two_level = levels.and_then(|levels| {
                let (two, time) = levels.suggest(A::SERVES, bytes, least, model)?;
                let faster = time < flat.picoseconds(placement, bytes, model);
                faster.then(|| ChosenAlgorithm::TwoLevel(two, Arc::clone(levels)))
            });
            return Ok(two_level.unwrap_or(ChosenAlgorithm::Flat(flat)));
        };
        let (supported, keeps, chosen) = match (A::of(algorithm), algorithm) {
            (Some(flat), _) => {
                (flat.supports(world_size), flat.keeps(least, world_size), ChosenAlgorithm::Flat(flat))
            }
            (None, Algorithm::TwoLevel(two)) => {
                let levels = levels.ok_or(Error::NoHosts { algorithm })?;
                let chosen = ChosenAlgorithm::TwoLevel(two, Arc::clone(levels));
                (two.supports(&levels.hosts), two.keeps(least, &levels.hosts), chosen)
            }
            (None, Algorithm::Direct(_)) => return Err(Error::NotShared { algorithm }),
            (None, _) => unreachable!("every algorithm is forced for its operation"),
        };
        if !supported {
            return Err(Error::Unsupported { algorithm, world_size });
        }
        if !keeps {
            return Err(Error::Order { algorithm, order, world_size });
        }
        Ok(chosen)
    }
}
