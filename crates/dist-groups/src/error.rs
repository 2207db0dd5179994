//! What can be wrong with a group or a mesh.

use std::fmt::Write;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_collectives::error_enum! {
/// What can be wrong with a group or a mesh. Ranks are numbered as in the parent, but for those in
/// [`Collective`](Self::Collective), which have their numbers in the world.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A group needs at least one rank.
    #[error("a group of no ranks")]
    Empty,
    /// A member does not exist.
    #[error("rank {rank} is outside the parent, which has {world_size}")]
    UnknownRank {
        /// The rank that was given.
        rank: usize,
        /// The size of the parent.
        world_size: usize,
    },
    /// A member is named twice.
    #[error("rank {rank} is named twice")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// A mesh, or a slice of one, needs at least one axis.
    #[error("a mesh of no axes")]
    NoAxes,
    /// The mesh has no axis of this name.
    #[error("there is no axis {name:?}; the axes are {}", axes.join(", "))]
    UnknownAxis {
        /// The name that was given.
        name: String,
        /// The names of the axes that the mesh has.
        axes: Vec<String>,
    },
    /// An axis is named twice.
    #[error("the axis {name:?} is named twice")]
    DuplicateAxis {
        /// The name.
        name: String,
    },
    /// An axis has no ranks.
    #[error("the axis {name:?} has degree 0")]
    ZeroDegree {
        /// The name of the axis.
        name: String,
    },
    /// The degrees do not multiply to the number of ranks.
    #[error("the degrees {} do not make a world of {world_size}", product(degrees))]
    Degrees {
        /// The axes and their degrees.
        degrees: Vec<(String, usize)>,
        /// The ranks that there are.
        world_size: usize,
    },
    /// The axis's group was taken out of the mesh before.
    #[error("the group of the axis {name:?} was taken out of the mesh before")]
    AxisTaken {
        /// The name of the axis.
        name: String,
    },
    /// A collective failed: one by which groups are made, or one of a group.
    #[error("communication between the ranks failed")]
    Collective(#[from] dist_collectives::Error),
}
}

impl Error {
    /// Whether a deadline ran out, this rank's or another's.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Collective(source) if source.is_timeout())
    }

    /// The one rank that the error is about, if it is about one, by its number in the world.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Collective(source) => source.peer(),
            _ => None,
        }
    }
}

/// `data 2 x shard 3 = 6`.
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
