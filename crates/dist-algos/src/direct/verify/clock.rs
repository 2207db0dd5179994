//! The vector clock of a rank: the number of signals of each rank that it knows of.
//!
//! Ranks that wait for all others know the same number of signals of nearly every rank. This number is stored
//! once. The time to learn from a signal is therefore proportional to the number of differences, not to the
//! number of ranks.

/// The number of signals of each rank that a rank knows of.
#[derive(Clone, Debug)]
pub(super) struct SignalClock {
    /// The number of signals that are known of every rank, at least.
    floor: usize,
    /// The number of signals of each rank; only those above the floor are up to date.
    signals: Vec<usize>,
}

/// The clock of a rank at one of its signals.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownSignals {
    floor: usize,
    /// The ranks with more known signals than the floor, and their numbers of signals.
    above: Vec<(usize, usize)>,
}

impl SignalClock {
    pub(super) fn new(world_size: usize) -> Self {
        Self { floor: 0, signals: vec![0; world_size] }
    }

    /// Returns the number of signals that are known of a rank.
    pub(super) fn of(&self, rank: usize) -> usize {
        self.signals[rank].max(self.floor)
    }

    /// Counts one more signal of a rank.
    pub(super) fn signal(&mut self, rank: usize) {
        self.signals[rank] = self.of(rank) + 1;
    }

    /// Adds that a rank has signalled this many times.
    pub(super) fn learn_of(&mut self, rank: usize, signals: usize) {
        self.signals[rank] = self.signals[rank].max(signals);
    }

    /// Merges the signals that another rank knew.
    pub(super) fn learn(&mut self, known: &KnownSignals) {
        self.floor = self.floor.max(known.floor);
        known.above.iter().for_each(|&(rank, signals)| self.learn_of(rank, signals));
    }

    /// Returns the signals that this rank knows now.
    pub(super) fn known(&self) -> KnownSignals {
        let floor = self.floor.max(self.signals.iter().copied().min().unwrap_or(0));
        let above = self.signals.iter().copied().enumerate().filter(|&(_, signals)| signals > floor);
        KnownSignals { floor, above: above.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_knows_the_larger_number_of_each_rank_and_of_the_floor() {
        let mut all = SignalClock::new(3);
        [0, 1, 2, 2].into_iter().for_each(|rank| all.signal(rank));
        let known = all.known();
        assert_eq!((known.floor, known.above.as_slice()), (1, &[(2, 2)][..]));
        let mut clock = SignalClock::new(3);
        clock.learn_of(0, 5);
        clock.learn(&known);
        assert_eq!([0, 1, 2].map(|rank| clock.of(rank)), [5, 1, 2]);
        clock.signal(1);
        assert_eq!(clock.known().above, [(0, 5)]);
        assert_eq!(clock.known().floor, 2);
    }
}
