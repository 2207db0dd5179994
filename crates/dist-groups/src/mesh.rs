//! [`Mesh`]: ranks arranged along named axes, with a group along each axis.

use dist_collectives::Communicator;

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

    /// Creates a mesh of the ranks of a [`slice`](Self::slice), with these axes in this order.
    ///
    /// # Errors
    /// As for [`slice`](Self::slice).
    #[doc(alias = "MPI_Cart_sub")]
    pub fn sub_mesh<N: AsRef<str>>(&mut self, axes: impl IntoIterator<Item = N>) -> Result<Self> {
        let (group, degrees) = self.part(axes)?;
        Self::new(group.into_communicator(), degrees)
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

/// Creates this rank's group along some axes. One call creates the groups of all ranks, which are equal or share no
/// rank.
fn along(communicator: &mut Communicator, shape: &Shape, axes: &[usize]) -> Result<Group> {
    let members = shape.along(axes, communicator.rank());
    Group::of_own(communicator, &members)
}
