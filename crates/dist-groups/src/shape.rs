//! The arithmetic of a mesh: axes, coordinates, and ranks along axes.

use crate::{Error, Result};

/// Named axes with their degrees. The last axis varies fastest.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    axes: Vec<Axis>,
}

#[derive(Debug, Clone)]
struct Axis {
    name: String,
    /// The number of ranks along the axis, at least one.
    degree: usize,
    /// The difference of the numbers of neighbours along the axis.
    stride: usize,
    /// `true` if the last rank along the axis is a neighbour of the first.
    is_periodic: bool,
}

impl Shape {
    /// Creates the shape of a world. The product of the degrees must be the number of ranks.
    pub(crate) fn new(degrees: Vec<(String, usize)>, world_size: usize) -> Result<Self> {
        if degrees.is_empty() {
            return Err(Error::NoAxes);
        }
        let names: Vec<&str> = degrees.iter().map(|(name, _)| name.as_str()).collect();
        if let Some(name) = twice(&names) {
            return Err(Error::DuplicateAxis { name });
        }
        if let Some((name, _)) = degrees.iter().find(|(_, degree)| *degree == 0) {
            return Err(Error::ZeroDegree { name: name.clone() });
        }
        let product = degrees.iter().try_fold(1_usize, |product, (_, degree)| product.checked_mul(*degree));
        if product != Some(world_size) {
            return Err(Error::Degrees { degrees, world_size });
        }
        let mut stride = world_size;
        let axes = degrees.into_iter().map(|(name, degree)| {
            stride /= degree;
            Axis { name, degree, stride, is_periodic: false }
        });
        Ok(Self { axes: axes.collect() })
    }

    /// Returns the names and degrees of all axes.
    pub(crate) fn degrees(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.axes.iter().map(|axis| (axis.name.as_str(), axis.degree))
    }

    pub(crate) fn degree(&self, axis: usize) -> usize {
        self.axes[axis].degree
    }

    pub(crate) fn len(&self) -> usize {
        self.axes.len()
    }

    pub(crate) fn is_periodic(&self, axis: usize) -> bool {
        self.axes[axis].is_periodic
    }

    pub(crate) fn make_periodic(&mut self, axis: usize) {
        self.axes[axis].is_periodic = true;
    }

    /// Returns the rank at this distance from a rank along an axis. Returns `None` beyond the edge of an axis that is
    /// not periodic.
    pub(crate) fn shifted(&self, rank: usize, axis: usize, distance: isize) -> Option<usize> {
        let Axis { degree, stride, is_periodic, .. } = self.axes[axis];
        let own = rank / stride % degree;
        let length = isize::try_from(degree).expect("a mesh has fewer ranks");
        let distance = if is_periodic { distance.rem_euclid(length) } else { distance };
        let shifted = own.checked_add_signed(distance)?;
        let shifted = if is_periodic { shifted % degree } else { shifted };
        (shifted < degree).then(|| rank - own * stride + shifted * stride)
    }

    fn world_size(&self) -> usize {
        self.axes.iter().map(|axis| axis.degree).product()
    }

    /// Returns the index of the axis with this name.
    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        let found = self.axes.iter().position(|axis| axis.name == name);
        found.ok_or_else(|| Error::UnknownAxis {
            name: name.to_owned(),
            axes: self.axes.iter().map(|axis| axis.name.clone()).collect(),
        })
    }

    /// Returns the indices of the axes with these names; there must be at least one, without repetition.
    pub(crate) fn find_all(&self, names: &[&str]) -> Result<Vec<usize>> {
        if names.is_empty() {
            return Err(Error::NoAxes);
        }
        if let Some(name) = twice(names) {
            return Err(Error::DuplicateAxis { name });
        }
        names.iter().map(|name| self.find(name)).collect()
    }

    /// Returns the coordinates of a rank, one per axis, if there is such a rank.
    pub(crate) fn coordinates(&self, rank: usize) -> Option<Vec<usize>> {
        let coordinates = self.axes.iter().map(|axis| rank / axis.stride % axis.degree);
        (rank < self.world_size()).then(|| coordinates.collect())
    }

    /// Returns the rank with these coordinates, if there is one.
    pub(crate) fn rank_at(&self, coordinates: &[usize]) -> Option<usize> {
        let inside = coordinates.len() == self.axes.len()
            && coordinates.iter().zip(&self.axes).all(|(&coordinate, axis)| coordinate < axis.degree);
        let offsets = coordinates.iter().zip(&self.axes).map(|(&coordinate, axis)| coordinate * axis.stride);
        inside.then(|| offsets.sum())
    }

    /// Returns the ranks that differ from this rank only along these axes, including itself. The last of the axes
    /// varies fastest.
    pub(crate) fn along(&self, axes: &[usize], rank: usize) -> Vec<usize> {
        let own = |axis: &Axis| rank / axis.stride % axis.degree * axis.stride;
        let origin = rank - axes.iter().map(|&axis| own(&self.axes[axis])).sum::<usize>();
        axes.iter().fold(vec![origin], |ranks, &axis| {
            let Axis { degree, stride, .. } = self.axes[axis];
            ranks.iter().flat_map(|rank| (0..degree).map(move |step| rank + step * stride)).collect()
        })
    }
}

/// Returns the first repeated name.
fn twice(names: &[&str]) -> Option<String> {
    let repeated = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name));
    repeated.map(|(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(degrees: &[usize]) -> Shape {
        let named = degrees.iter().enumerate().map(|(axis, &degree)| (axis.to_string(), degree)).collect();
        Shape::new(named, degrees.iter().product()).unwrap()
    }

    #[test]
    fn the_last_axis_varies_fastest() {
        let shape = shape(&[2, 3]);
        let all: Vec<_> = (0..6).map(|rank| shape.coordinates(rank).unwrap()).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert_eq!(shape.along(&[1], 4), [3, 4, 5]);
        assert_eq!(shape.along(&[0], 4), [1, 4]);
        assert_eq!(shape.along(&[1, 0], 4), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn a_shift_ends_at_an_open_edge_and_goes_round_a_periodic_axis() {
        let mut shape = shape(&[2, 3]);
        let along =
            |shape: &Shape, distance| (0..6).map(|rank| shape.shifted(rank, 1, distance)).collect::<Vec<_>>();
        assert_eq!(along(&shape, 1), [Some(1), Some(2), None, Some(4), Some(5), None]);
        assert_eq!(along(&shape, -2), [None, None, Some(0), None, None, Some(3)]);
        assert_eq!([isize::MIN, isize::MAX].map(|distance| shape.shifted(4, 1, distance)), [None; 2]);
        shape.make_periodic(1);
        assert_eq!(along(&shape, 1), [1, 2, 0, 4, 5, 3].map(Some));
        assert_eq!(along(&shape, -5), along(&shape, 1));
        assert_eq!(along(&shape, isize::MAX), along(&shape, isize::MAX % 3));
        assert_eq!(shape.shifted(1, 0, 1), Some(4));
        assert_eq!(shape.shifted(1, 0, -1), None, "the other axis stays open");
    }

    proptest! {
        #[test]
        fn coordinates_and_ranks_translate_into_each_other(degrees in prop::collection::vec(1_usize..6, 1..6)) {
            let shape = shape(&degrees);
            let world_size = degrees.iter().product();
            for rank in 0..world_size {
                let coordinates = shape.coordinates(rank).unwrap();
                prop_assert!(coordinates.iter().zip(&degrees).all(|(coordinate, degree)| coordinate < degree));
                prop_assert_eq!(shape.rank_at(&coordinates), Some(rank));
            }
            prop_assert_eq!(shape.coordinates(world_size), None);
            prop_assert_eq!(shape.coordinates(usize::MAX), None);
        }

        #[test]
        fn places_outside_have_no_rank(degrees in prop::collection::vec(1_usize..6, 1..6), axis in 0_usize..6, beyond: usize) {
            let shape = shape(&degrees);
            let mut place = vec![0; degrees.len()];
            let axis = axis % degrees.len();
            place[axis] = degrees[axis].saturating_add(beyond);
            prop_assert_eq!(shape.rank_at(&place), None);
            prop_assert_eq!(shape.rank_at(&place[1..]), None);
            prop_assert_eq!(shape.rank_at(&vec![0; degrees.len() + 1]), None);
        }
    }
}
