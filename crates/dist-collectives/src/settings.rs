//! The settings of a communicator's calls: timeout, order and algorithms.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use dist_algos::direct::Crossovers;
use dist_algos::{Algorithm, AlgorithmTable, CollectiveKind, CostModel, Placement};

use crate::two_level::{ChosenAlgorithm, HostLevels};
use crate::{Error, Operation, ReductionOrder, Result};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) order: ReductionOrder,
    /// The tag of messages.
    pub(crate) tag: u32,
    /// The cost model for the choice of algorithms; the same on every rank.
    pub(crate) model: CostModel,
    /// The sizes from which ranks that share memory use each direct algorithm.
    pub(crate) crossovers: Crossovers,
    /// The forced algorithm of each operation; the others are chosen.
    forced: [Option<Algorithm>; Operation::ALL.len()],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            order: ReductionOrder::Canonical,
            tag: 0,
            model: CostModel::default(),
            crossovers: Crossovers::default(),
            forced: [None; Operation::ALL.len()],
        }
    }
}

impl Settings {
    /// Returns the settings that a child inherits: all but the forced algorithms and the tag.
    pub(crate) fn of_child(&self) -> Self {
        Self { forced: Self::default().forced, tag: 0, ..*self }
    }

    /// Sets the tag of messages.
    #[must_use]
    pub(crate) const fn with_tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// Sets the timeout.
    #[must_use]
    pub(crate) const fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Forces an algorithm of this operation, or none. Returns the previous one.
    pub(crate) const fn force(
        &mut self,
        operation: Operation,
        algorithm: Option<Algorithm>,
    ) -> Option<Algorithm> {
        mem::replace(&mut self.forced[operation as usize], algorithm)
    }

    /// Returns the forced algorithm of an operation.
    pub(crate) fn forced(&self, operation: Operation) -> Option<Algorithm> {
        self.forced[operation as usize]
    }

    /// Chooses the algorithm of an operation on this many bytes from a table. Every rank chooses for itself, from
    /// values that all ranks have in common. The choice is part of the call, which the ranks compare.
    pub(crate) fn choose(
        &self,
        table: AlgorithmTable<'_>,
        collective: CollectiveKind,
        placement: Placement,
        bytes: usize,
        levels: Option<&Arc<HostLevels>>,
    ) -> Result<ChosenAlgorithm> {
        match self.forced(collective.into()) {
            Some(algorithm) => self.check_forced(algorithm, placement.ranks, levels),
            None => Ok(self.suggest(table, collective, placement, bytes, levels)),
        }
    }

    fn suggest(
        &self,
        table: AlgorithmTable<'_>,
        collective: CollectiveKind,
        placement: Placement,
        bytes: usize,
        levels: Option<&Arc<HostLevels>>,
    ) -> ChosenAlgorithm {
        let least = self.order.least();
        let of_flat = levels.map_or(self.model, |levels| levels.of_flat_algorithms(self.model));
        let flat = table.suggest(collective, placement, bytes, least, &of_flat);
        let flat = flat.expect("every operation has a canonical algorithm for every world");
        let two_level = levels.and_then(|levels| {
            let (two, time) = levels.suggest(table, collective, bytes, least, &self.model)?;
            let faster = time < flat.picoseconds(placement, bytes, &of_flat);
            faster.then(|| ChosenAlgorithm::TwoLevel(two, Arc::clone(levels)))
        });
        two_level.unwrap_or(ChosenAlgorithm::Flat(flat))
    }

    fn check_forced(
        &self,
        algorithm: Algorithm,
        world_size: usize,
        levels: Option<&Arc<HostLevels>>,
    ) -> Result<ChosenAlgorithm> {
        let (order, least) = (self.order, self.order.least());
        let (supported, keeps, chosen) = match algorithm {
            Algorithm::Messages(flat) => {
                (flat.supports(world_size), flat.keeps(least, world_size), ChosenAlgorithm::Flat(flat))
            }
            Algorithm::TwoLevel(two) => {
                let levels = levels.ok_or(Error::NoHosts { algorithm })?;
                let chosen = ChosenAlgorithm::TwoLevel(two, Arc::clone(levels));
                (two.supports(&levels.hosts), two.keeps(least, &levels.hosts), chosen)
            }
            Algorithm::Direct(_) => return Err(Error::NotShared { algorithm }),
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
