//! A rank in a world.

use std::fmt;

/// One of `world_size` ranks, numbered from 0. A `Rank` that exists is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    index: usize,
    world_size: usize,
}

impl Rank {
    /// Returns `None` unless `index < world_size`. A world of 0 has no ranks.
    pub const fn new(index: usize, world_size: usize) -> Option<Self> {
        if index < world_size { Some(Self { index, world_size }) } else { None }
    }

    /// Returns every rank of a world, in order.
    pub fn all(world_size: usize) -> impl ExactSizeIterator<Item = Self> + Clone {
        (0..world_size).map(move |index| Self { index, world_size })
    }

    /// Returns the number of the rank, in `0..world_size`.
    pub const fn index(self) -> usize {
        self.index
    }

    /// Returns the number of ranks, at least 1.
    pub const fn world_size(self) -> usize {
        self.world_size
    }

    /// Returns the rank `distance` places further round the ring.
    #[must_use]
    pub const fn plus(self, distance: usize) -> Self {
        let index = (self.index + distance % self.world_size) % self.world_size;
        Self { index, world_size: self.world_size }
    }

    /// Returns the rank `distance` places back round the ring.
    #[must_use]
    pub const fn minus(self, distance: usize) -> Self {
        self.plus(self.world_size - distance % self.world_size)
    }

    /// Returns the right neighbour in the ring.
    #[must_use]
    pub const fn right(self) -> Self {
        let next = self.index + 1;
        Self { index: if next < self.world_size { next } else { 0 }, ..self }
    }

    /// Returns the left neighbour in the ring.
    #[must_use]
    pub const fn left(self) -> Self {
        self.minus(1)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.index, self.world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_outside_its_world_does_not_exist() {
        assert_eq!(Rank::new(0, 0), None);
        assert_eq!(Rank::new(3, 3), None);
        assert!(Rank::new(2, 3).is_some());
    }

    #[test]
    fn neighbours_wrap_around() {
        for rank in Rank::all(5) {
            assert_eq!(rank.right().left(), rank);
            assert_eq!(rank.plus(13), rank.plus(3));
            assert_eq!(rank.minus(5), rank);
        }
        let alone = Rank::new(0, 1).unwrap();
        assert_eq!((alone.left(), alone.right()), (alone, alone));
    }
}
