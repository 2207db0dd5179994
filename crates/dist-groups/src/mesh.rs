//! [`Mesh`]: ranks arranged along named axes, with a group along each axis.

use bytemuck::Pod;
use dist_collectives::{Communicator, Message};

use crate::shape::Shape;
use crate::{Error, Group, Result};

/// The ranks of a communicator arranged along named axes. For each axis there is a group of the ranks that differ
/// from this rank only along that axis.
///
/// The last axis varies fastest: consecutive ranks along it have consecutive numbers. In a mesh of `[("data", 2),
/// ("shard", 2), ("pipeline", 2)]` the rank is `4·data + 2·shard + pipeline`. Ranks of a group along an axis are
/// numbered by the coordinate. Creating a mesh or a part of one needs no communication: every rank makes the same
/// calls, with the same axes, in the same order.
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_groups::Mesh;
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 6, |transport| {
///     let mut mesh = Mesh::new(Communicator::new(transport), [("data", 2), ("shard", 3)])?;
///     let mut values = [mesh.rank() as u64; 2];
///     mesh.axis("data")?.all_reduce(&mut values[..1], ReduceOp::Sum)?;
///     mesh.axis("shard")?.all_reduce(&mut values[1..], ReduceOp::Sum)?;
///     Ok::<_, dist_groups::Error>((mesh.coordinates(), values))
/// });
/// // Rank 4 is number 1 along both axes: 1 + 4 along data, 3 + 4 + 5 along shard.
/// assert_eq!(outcome.results[4].as_ref().unwrap(), &(vec![1, 1], [5, 12]));
/// ```
#[derive(Debug)]
pub struct Mesh {
    communicator: Communicator,
    shape: Shape,
    /// The group along each axis, until it is taken.
    groups: Vec<Option<Group>>,
}

impl Mesh {
    /// Arranges the ranks of a communicator along axes with these names and degrees.
    ///
    /// # Errors
    /// If there is no axis, a name is repeated, or the product of the degrees is not the number of ranks. The
    /// communicator is then lost; every rank gets the same error.
    #[doc(alias = "MPI_Cart_create")]
    #[doc(alias = "DeviceMesh")]
    #[doc(alias = "init_device_mesh")]
    pub fn new<N: Into<String>>(
        mut communicator: Communicator,
        axes: impl IntoIterator<Item = (N, usize)>,
    ) -> Result<Self> {
        let degrees = axes.into_iter().map(|(name, degree)| (name.into(), degree)).collect();
        let shape = Shape::new(degrees, communicator.world_size())?;
        let groups =
            (0..shape.degrees().len()).map(|axis| along(&mut communicator, &shape, &[axis]).map(Some));
        let groups = groups.collect::<Result<_>>()?;
        Ok(Self { communicator, shape, groups })
    }

    /// Makes these axes periodic: the last rank along such an axis and the first are neighbours.
    ///
    /// # Errors
    /// If there is no such axis.
    #[doc(alias = "periods")]
    pub fn with_periodic<N: AsRef<str>>(mut self, axes: impl IntoIterator<Item = N>) -> Result<Self> {
        for axis in axes {
            let axis = self.shape.find(axis.as_ref())?;
            self.shape.make_periodic(axis);
        }
        Ok(self)
    }

    /// Returns this rank's number in the mesh.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Returns the number of ranks of the mesh.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Returns the names and degrees of the axes, in order.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.shape.degrees()
    }

    /// Returns the number of ranks along an axis.
    ///
    /// # Errors
    /// If there is no such axis.
    #[doc(alias = "MPI_Cart_get")]
    pub fn degree(&self, axis: &str) -> Result<usize> {
        Ok(self.shape.degree(self.shape.find(axis)?))
    }

    /// Returns the coordinates of this rank, one per axis, in the order of the axes.
    #[doc(alias = "MPI_Cart_coords")]
    #[doc(alias = "get_coordinate")]
    pub fn coordinates(&self) -> Vec<usize> {
        self.coordinates_of(self.rank()).expect("this rank is in its mesh")
    }

    /// Returns the coordinates of a rank; `None` if there is no such rank.
    #[doc(alias = "MPI_Cart_coords")]
    pub fn coordinates_of(&self, rank: usize) -> Option<Vec<usize>> {
        self.shape.coordinates(rank)
    }

    /// Returns the coordinate of this rank along one axis.
    ///
    /// # Errors
    /// If there is no such axis.
    #[doc(alias = "get_local_rank")]
    pub fn coordinate(&self, axis: &str) -> Result<usize> {
        Ok(self.coordinates()[self.shape.find(axis)?])
    }

    /// Returns the rank with these coordinates. Returns `None` if there is not one coordinate per axis, or a
    /// coordinate is not less than the degree of its axis.
    #[doc(alias = "MPI_Cart_rank")]
    pub fn rank_at(&self, coordinates: &[usize]) -> Option<usize> {
        self.shape.rank_at(coordinates)
    }

    /// Returns the ranks at this distance from this rank along an axis, in both directions.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_groups::{Mesh, Shift};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 6, |transport| {
    ///     let mesh = Mesh::new(Communicator::new(transport), [("row", 2), ("column", 3)])?;
    ///     let mesh = mesh.with_periodic(["column"])?;
    ///     Ok::<_, dist_groups::Error>((mesh.shift("row", 1)?, mesh.shift("column", 1)?))
    /// });
    /// let rank_2 = outcome.results.into_iter().nth(2).unwrap().unwrap();
    /// assert_eq!(rank_2, (Shift { from: None, to: Some(5) }, Shift { from: Some(1), to: Some(0) }));
    /// ```
    ///
    /// # Errors
    /// If there is no such axis.
    #[doc(alias = "MPI_Cart_shift")]
    pub fn shift(&self, axis: &str, distance: isize) -> Result<Shift> {
        let axis = self.shape.find(axis)?;
        let at = |distance| self.shape.shifted(self.rank(), axis, distance);
        Ok(Shift { from: distance.checked_neg().and_then(at), to: at(distance) })
    }

    /// Sends a message to each neighbour and receives one from each, all at once. `sends` and `receives` have one entry
    /// per axis, in the order of the axes: first for the neighbour with the lower coordinate, then for that with the
    /// higher one. Lengths may differ between neighbours, and two neighbours must agree about their messages. The
    /// entries beyond an open edge are neither sent nor changed. Every rank of the mesh makes the same call.
    ///
    /// The halo exchange of a periodic axis also works on two ranks, which are each other's neighbour on both sides, and
    /// on one rank, which is its own:
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_groups::Mesh;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut mesh = Mesh::new(Communicator::new(transport), [("x", 2)])?.with_periodic(["x"])?;
    ///     // Two cells of this rank, between those of its neighbours.
    ///     let first = 10 * mesh.rank() as i32;
    ///     let mut cells = [-1, first, first + 1, -1];
    ///     let [before, own @ .., after] = &mut cells;
    ///     let own = own.to_vec();
    ///     let receives = &mut [[std::slice::from_mut(before), std::slice::from_mut(after)]];
    ///     mesh.exchange_with_neighbours(&[[&own[..1], &own[1..]]], receives)?;
    ///     Ok::<_, dist_groups::Error>(cells)
    /// });
    /// let cells: Vec<_> = outcome.results.into_iter().map(|cells| cells.unwrap()).collect();
    /// assert_eq!(cells, [[11, 0, 1, 10], [1, 10, 11, 0]]);
    /// ```
    ///
    /// # Errors
    /// If there is not one entry per axis. Otherwise those of [`Communicator::batch`].
    #[doc(alias = "MPI_Neighbor_alltoall")]
    #[doc(alias = "MPI_Neighbor_alltoallv")]
    pub fn exchange_with_neighbours<T: Pod>(
        &mut self,
        sends: &[[&[T]; 2]],
        receives: &mut [[&mut [T]; 2]],
    ) -> Result<()> {
        let axes = self.shape.len();
        if [sends.len(), receives.len()] != [axes; 2] {
            return Err(Error::Neighbours { axes, sends: sends.len(), receives: receives.len() });
        }
        let rank = self.rank();
        let neighbours = |axis| [-1, 1].map(|distance| self.shape.shifted(rank, axis, distance));
        let mut messages = Vec::with_capacity(4 * axes);
        for (axis, [lower, upper]) in sends.iter().enumerate() {
            let sends = neighbours(axis).into_iter().zip([*lower, *upper]);
            messages.extend(sends.filter_map(|(to, elements)| Some(Message::send(to?, elements))));
        }
        for (axis, [lower, upper]) in receives.iter_mut().enumerate() {
            // The first message to the lower neighbour arrives there from the upper neighbour. The order
            // matters if both are the same rank.
            let receives = neighbours(axis).into_iter().zip([&mut **lower, &mut **upper]).rev();
            let receive = |(from, elements): (Option<usize>, _)| Some(Message::receive(from?, elements));
            messages.extend(receives.filter_map(receive));
        }
        Ok(self.communicator.batch(&mut messages)?)
    }

    /// Returns the group of the ranks that differ from this rank only along this axis. Its parent is the mesh.
    ///
    /// # Errors
    /// If there is no such axis, or its group was [taken](Self::take).
    #[doc(alias = "get_group")]
    pub fn axis(&mut self, axis: &str) -> Result<&mut Group> {
        let index = self.shape.find(axis)?;
        self.groups[index].as_mut().ok_or_else(|| Error::AxisTaken { name: axis.to_owned() })
    }

    /// Takes the group of an axis out of the mesh, to use it on another thread or longer than the mesh.
    ///
    /// # Errors
    /// As for [`axis`](Self::axis).
    pub fn take(&mut self, axis: &str) -> Result<Group> {
        let index = self.shape.find(axis)?;
        self.groups[index].take().ok_or_else(|| Error::AxisTaken { name: axis.to_owned() })
    }

    /// Creates a group of the ranks that differ from this rank only along these axes. The last of these axes varies
    /// fastest, and the parent is the mesh. Every rank of the mesh makes the same call.
    ///
    /// # Errors
    /// If there is no axis, a name is repeated, or an axis does not exist.
    #[doc(alias = "MPI_Cart_sub")]
    pub fn slice<N: AsRef<str>>(&mut self, axes: impl IntoIterator<Item = N>) -> Result<Group> {
        let (group, _) = self.part(axes)?;
        Ok(group)
    }

    /// Creates a mesh of the ranks of a [`slice`](Self::slice), with these axes in this order. Periodic axes stay so.
    ///
    /// # Errors
    /// As for [`slice`](Self::slice).
    #[doc(alias = "MPI_Cart_sub")]
    pub fn sub_mesh<N: AsRef<str>>(&mut self, axes: impl IntoIterator<Item = N>) -> Result<Self> {
        let (group, degrees) = self.part(axes)?;
        let is_periodic =
            |name: &&String| self.shape.find(name).is_ok_and(|axis| self.shape.is_periodic(axis));
        let periodic: Vec<String> =
            degrees.iter().map(|(name, _)| name).filter(is_periodic).cloned().collect();
        Self::new(group.into_communicator(), degrees)?.with_periodic(periodic)
    }

    /// Returns the communicator of all ranks of the mesh.
    pub fn communicator(&mut self) -> &mut Communicator {
        &mut self.communicator
    }

    /// Returns the communicator of all ranks of the mesh, without the mesh.
    pub fn into_communicator(self) -> Communicator {
        self.communicator
    }

    /// Creates the group along some axes, and returns their names and degrees too.
    fn part<N: AsRef<str>>(
        &mut self,
        axes: impl IntoIterator<Item = N>,
    ) -> Result<(Group, Vec<(String, usize)>)> {
        let names: Vec<N> = axes.into_iter().collect();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        let axes = self.shape.find_all(&names)?;
        let group = along(&mut self.communicator, &self.shape, &axes)?;
        let degrees = axes.iter().map(|&axis| self.shape.degree(axis));
        Ok((group, names.into_iter().map(str::to_owned).zip(degrees).collect()))
    }
}

/// The ranks at some distance from a rank along an axis, as [`Mesh::shift`] returns them. `None` means that
/// the axis ends before that distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shift {
    /// The rank at the opposite distance. If all ranks shift their data by the distance, this rank receives
    /// from it.
    pub from: Option<usize>,
    /// The rank at the distance.
    pub to: Option<usize>,
}

/// Returns degrees for a mesh of this many ranks, one for each entry of `fixed`. Entries with a number keep it. The other
/// degrees are as close to each other as possible, in descending order.
///
/// ```
/// use dist_groups::dims_create;
///
/// assert_eq!(dims_create(12, &[None, None]).unwrap(), [4, 3]);
/// assert_eq!(dims_create(12, &[Some(3), None, None]).unwrap(), [3, 2, 2]);
/// assert!(dims_create(12, &[Some(5), None]).is_err());
/// ```
///
/// # Errors
/// If the fixed degrees do not divide the number of ranks, or, if all are fixed, do not multiply to it.
#[doc(alias = "MPI_Dims_create")]
pub fn dims_create(world_size: usize, fixed: &[Option<usize>]) -> Result<Vec<usize>> {
    let refused = || Error::FixedDegrees { fixed: fixed.to_vec(), world_size };
    let product = fixed.iter().flatten().try_fold(1_usize, |product, degree| product.checked_mul(*degree));
    let rest =
        product.filter(|&product| product > 0 && world_size.is_multiple_of(product)).ok_or_else(refused)?;
    let free = fixed.iter().filter(|degree| degree.is_none()).count();
    let count = world_size / rest;
    let mut degrees = balanced(count, free, count).ok_or_else(refused)?.into_iter();
    Ok(fixed
        .iter()
        .map(|degree| degree.unwrap_or_else(|| degrees.next().expect("one per free axis")))
        .collect())
}

/// Returns this many factors of a number, in descending order and none above `limit`. The first is as small as
/// possible, then the second, and so on.
fn balanced(number: usize, factors: usize, limit: usize) -> Option<Vec<usize>> {
    if factors <= 1 {
        let fits = if factors == 0 { number == 1 } else { number <= limit };
        return fits.then(|| vec![number; factors]);
    }
    let exponent = u32::try_from(factors).unwrap_or(u32::MAX);
    let is_first = |first: &usize| {
        number.is_multiple_of(*first) && first.checked_pow(exponent).is_none_or(|product| product >= number)
    };
    (1..=limit.min(number)).filter(is_first).find_map(|first| {
        balanced(number / first, factors - 1, first).map(|rest| [vec![first], rest].concat())
    })
}

/// Creates this rank's group along some axes. One call creates the groups of all ranks, which are equal or share no
/// rank.
fn along(communicator: &mut Communicator, shape: &Shape, axes: &[usize]) -> Result<Group> {
    let members = shape.along(axes, communicator.rank());
    Group::of_own(communicator, &members)
}
