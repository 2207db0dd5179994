//! Errors of groups and meshes.

use std::fmt::Write;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_collectives::transport::error_enum! {
/// An error of a group or a mesh. Ranks have their numbers in the parent, except in
/// [`Collective`](Self::Collective), where they have their numbers in the world.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of ranks is empty.
    #[error("a group needs at least one rank")]
    Empty,
    /// A member does not exist.
    #[error("rank {rank} is outside the parent, which has {world_size} ranks")]
    UnknownRank {
        /// The given rank.
        rank: usize,
        /// The size of the parent.
        world_size: usize,
    },
    /// A member is repeated.
    #[error("rank {rank} is named twice in the list of members")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// The list of axes is empty; a mesh, or a slice of one, needs at least one axis.
    #[error("a mesh, or a slice of one, needs at least one axis")]
    NoAxes,
    /// The mesh has no axis of this name.
    #[error("the mesh has no axis {name:?}: its axes are {}", axes.join(", "))]
    UnknownAxis {
        /// The given name.
        name: String,
        /// The names of the axes of the mesh.
        axes: Vec<String>,
    },
    /// An axis is repeated.
    #[error("the axis {name:?} is named twice")]
    DuplicateAxis {
        /// The name.
        name: String,
    },
    /// An axis has degree zero.
    #[error("the axis {name:?} has degree 0: give it at least 1")]
    ZeroDegree {
        /// The name of the axis.
        name: String,
    },
    /// The product of the degrees is not the number of ranks.
    #[error("the degrees {} do not multiply to the {world_size} ranks of the parent", product(degrees))]
    Degrees {
        /// The axes and their degrees.
        degrees: Vec<(String, usize)>,
        /// The number of ranks.
        world_size: usize,
    },
    /// The fixed degrees of a mesh do not fit its number of ranks.
    #[error("the degrees {} do not divide {world_size} ranks into a mesh", fixed_degrees(fixed))]
    FixedDegrees {
        /// The degree of each axis; `None` for those that were to be chosen.
        fixed: Vec<Option<usize>>,
        /// The number of ranks.
        world_size: usize,
    },
    /// A neighbour exchange has not one entry per axis.
    #[error("a neighbour exchange of {axes} axes needs {axes} pairs of messages to send and to receive, and got {sends} and {receives}")]
    Neighbours {
        /// The number of axes of the mesh.
        axes: usize,
        /// The number of entries to send.
        sends: usize,
        /// The number of entries to receive.
        receives: usize,
    },
    /// The group of the axis was already taken out of the mesh.
    #[error("the group of the axis {name:?} was already taken out of the mesh")]
    AxisTaken {
        /// The name of the axis.
        name: String,
    },
    /// A collective failed: during the creation of groups, or in a group.
    #[error("communication between the ranks failed")]
    Collective(#[from] dist_collectives::Error),
}
}

impl Error {
    /// Returns `true` if a deadline passed, on this rank or on another.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Collective(source) if source.is_timeout())
    }

    /// Returns the world rank that the error is about, if it is about one rank.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Collective(source) => source.peer(),
            _ => None,
        }
    }
}

/// Formats degrees, for example `data 2 x shard 3 = 6`.
fn product(degrees: &[(String, usize)]) -> String {
    let mut text = String::new();
    for (name, degree) in degrees {
        let times = if text.is_empty() { "" } else { " x " };
        write!(text, "{times}{name} {degree}").expect("a string takes any text");
    }
    let product = degrees.iter().try_fold(1_usize, |product, (_, degree)| product.checked_mul(*degree));
    let product = product.map_or_else(|| "too many".to_owned(), |product| product.to_string());
    text + " = " + &product
}

/// Formats degrees, for example `2 x any x 3`. A degree that is not fixed is `any`.
fn fixed_degrees(fixed: &[Option<usize>]) -> String {
    let degrees =
        fixed.iter().map(|degree| degree.map_or_else(|| "any".to_owned(), |degree| degree.to_string()));
    degrees.collect::<Vec<_>>().join(" x ")
}
