//! Worlds above the bound.

use dist_algos::verify::{self, symmetry};
use dist_algos::{MessageAlgorithm, Result};

use super::line::Proven;

/// The largest proven world.
const RANKS_MAX: usize = 4096;

/// Maximum number of steps, or of moved chunks, of all ranks together. Worlds with more are left out.
const WORK_MAX: usize = 1 << 20;

/// Returns the largest power of two and some other sizes between the bound and the largest world.
pub(super) fn worlds(bound: usize, seed: u64) -> Vec<usize> {
    let Some(room) = RANKS_MAX.checked_sub(bound).filter(|&room| room > 0) else { return Vec::new() };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sizes: Vec<usize> = (0..4).map(|_| bound + 1 + random.usize(..room)).collect();
    sizes.push(RANKS_MAX);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Proves a larger world: by symmetry if all ranks do the same, otherwise for one root.
pub(super) fn prove(algorithm: &MessageAlgorithm, world_size: usize) -> Result<Proven> {
    if !algorithm.supports(world_size) {
        return Ok(Proven::LeftOut);
    }
    let cost = algorithm.cost(world_size);
    let steps = cost.rounds.saturating_mul(world_size);
    if steps <= WORK_MAX && symmetry::prove(algorithm, world_size)?.is_some() {
        return Ok(Proven::Larger(world_size));
    }
    let moved = cost.path.max(algorithm.chunks(world_size)).saturating_mul(world_size);
    if steps > WORK_MAX || moved > WORK_MAX {
        return Ok(Proven::LeftOut);
    }
    let root = algorithm.collective.roots(world_size).end / 3;
    verify::prove(algorithm, world_size, root).map(|_| Proven::Larger(world_size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_worlds_are_above_the_bound_and_depend_on_the_seed() {
        for bound in [1, 128, 4000, 4095] {
            let sizes = worlds(bound, 7);
            assert!(sizes.is_sorted() && sizes[0] > bound && sizes.last() == Some(&4096), "{sizes:?}");
            assert_eq!(sizes, worlds(bound, 7));
        }
        assert_ne!(worlds(128, 7), worlds(128, 8));
        assert!(worlds(4096, 7).is_empty());
    }
}
