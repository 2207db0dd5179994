//! Worlds for tests of groups.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_groups::Group;
use dist_testkit::process;
use dist_transport::{Runtime, sim};

/// Runs the program on every rank and returns the results in rank order.
pub(crate) fn run<T: Send + 'static>(
    world_size: usize,
    program: impl Fn(&mut Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    run_seeded(4, world_size, program)
}

/// Runs the program on every rank, with the interleaving of this seed.
pub(crate) fn run_seeded<T: Send + 'static>(
    seed: u64,
    world_size: usize,
    program: impl Fn(&mut Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    sim::run(seed, world_size, move |transport| program(&mut Communicator::new(transport))).results
}

/// Runs the program in one process per rank. The test of this name calls it and is run again in each process.
pub(crate) fn in_processes(world_size: usize, test_name: &str, program: impl FnOnce(&mut Communicator)) {
    match process::rank() {
        None => process::ranks(world_size, test_name, PROCESS_LIMIT).assert_success(),
        Some(_) => program(&mut Communicator::from_env().expect("the ranks meet")),
    }
}

/// The time limit of a test's processes.
pub(crate) const PROCESS_LIMIT: Duration = Duration::from_secs(120);

/// Returns the communicators of all ranks, on one thread, for tests without communication.
pub(crate) fn still(world_size: usize) -> Vec<Communicator> {
    sim::network(&Runtime::system(), world_size).into_iter().map(Communicator::new).collect()
}

/// Returns the members' numbers in the parent, gathered in the group, which shows that the group works and its
/// order.
pub(crate) fn gathered(group: &mut Group) -> Vec<u64> {
    let own = group.to_parent(group.rank()).expect("a member has a number") as u64;
    let mut all = vec![0; group.world_size()];
    group.all_gather(&[own], &mut all).expect("every member calls it");
    all
}

/// A deterministic random number generator.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// Returns a number below this one.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((word ^ (word >> 31)) % limit as u64).expect("less than a usize")
    }

    /// Shuffles the items.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }

    /// Returns some of these ranks, at least one, in any order.
    pub(crate) fn members(&mut self, world_size: usize) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..world_size).collect();
        self.shuffle(&mut ranks);
        ranks.truncate(1 + self.below(world_size));
        ranks
    }
}
