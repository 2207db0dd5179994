//! What can go wrong with a checkpoint.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disk::DiskError;

/// Why a checkpoint could not be saved or loaded. Where all ranks take part, every rank gets the same.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointError {
    /// The file or directory concerned.
    pub path: PathBuf,
    /// The tensor concerned, if it is about one: a parameter's name, or `optimizer/ARRAY/PARAMETER`.
    pub tensor: Option<String>,
    /// The first rank that met the problem, by its number in the world, where all ranks take part.
    pub rank: Option<usize>,
    /// What it is.
    pub problem: CheckpointProblem,
}

/// What can be wrong with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// There is no such file or directory.
    #[error("there is none")]
    Missing,
    /// The operating system refuses.
    #[error("cannot {operation} {}: {error}", .on.display())]
    Io {
        /// What it was asked to do, such as `sync the directory`.
        operation: String,
        /// With which file or directory.
        on: PathBuf,
        /// What it says.
        error: String,
    },
    /// Another job saves to the directory, or another trainer of this job.
    #[error("{owner} saves to this directory; give this one a directory of its own, or end the other")]
    InUse {
        /// Who it is, and since when.
        owner: String,
    },
    /// A file is shorter or longer than when it was written.
    #[error("it has {got} bytes where {expected} were written")]
    Size {
        /// How many bytes were written.
        expected: u64,
        /// How many there are.
        got: u64,
    },
    /// What is read is not what was written.
    #[error("a checksum shows that it has changed since it was written")]
    Corrupted,
    /// It is not in a form that this crate writes, or contradicts itself.
    #[error("{0}")]
    Malformed(String),
    /// It was written by a newer version.
    #[error("it is of version {0}, which this program is too old for")]
    Version(u64),
    /// The model has a tensor that the checkpoint has not.
    #[error("the model has it and the checkpoint has not")]
    NotInCheckpoint,
    /// The checkpoint has a tensor that the model has not.
    #[error("the checkpoint has it and the model has not; to drop it, leave it out")]
    NotInModel,
    /// The model has it as another name of a parameter, and the checkpoint has values of its own for it.
    #[error(
        "in the model it is another name of {same_as}, and the checkpoint has other values for it; to drop them, leave it out"
    )]
    Tied {
        /// The parameter whose memory it shares.
        same_as: String,
    },
    /// A value has no equal, or none that is near, in the type of its parameter.
    #[error("the value {value} cannot be converted to {to}")]
    Lost {
        /// The value.
        value: String,
        /// The type of the parameter.
        to: String,
    },
    /// The checkpoint has an optimizer's state of a parameter that the model does not train.
    #[error(
        "the model does not train this parameter; to drop what an optimizer has kept of it, leave its state out"
    )]
    NotTrained,
    /// The trainer has something that would not be saved.
    #[error("{0} would not be saved")]
    Unsaved(String),
    /// The optimizer has state of a slice that the trainer does not list, so that it would not be saved.
    #[error(
        "the optimizer has kept state of slice {slice}, which is none of the trainer's and would not be saved"
    )]
    UnlistedState {
        /// The number of the slice.
        slice: usize,
    },
    /// A tensor has another shape or type in the model than in the checkpoint.
    #[error("it is {model} in the model and {checkpoint} in the checkpoint")]
    MetaDiffers {
        /// Shape and type in the model.
        model: String,
        /// Shape and type in the checkpoint.
        checkpoint: String,
    },
    /// The state of one kind of optimizer cannot be that of another.
    #[error("the optimizer is {training} here and {checkpoint} in the checkpoint")]
    Optimizer {
        /// What the optimizer is here, or `none`.
        training: String,
        /// Whose state the checkpoint has, or `none`.
        checkpoint: String,
    },
    /// The ranks were not asked for the same.
    #[error("rank {rank} {on_rank}, rank {other} {on_other}")]
    RanksDiffer {
        /// The first rank that disagrees with one before it, by its number in the world.
        rank: usize,
        /// What it does: saves or loads which step, with which optimizer.
        on_rank: String,
        /// The rank that it disagrees with.
        other: usize,
        /// What that one does.
        on_other: String,
    },
    /// Ranks that should hold the same values of a parameter do not.
    #[error("ranks {other} and {rank} hold different values of it: their trainings have diverged")]
    Diverged {
        /// The first rank that holds other values than one before it, by its number in the world.
        rank: usize,
        /// The first rank that holds it.
        other: usize,
    },
    /// The trainer does not hand out what it is said to hold.
    #[error("the trainer does not hand it out: {0}")]
    Trainer(String),
}

impl CheckpointError {
    pub(super) fn new(path: impl Into<PathBuf>, problem: CheckpointProblem) -> Self {
        Self { path: path.into(), tensor: None, rank: None, problem }
    }

    /// Of a file or directory that cannot be read.
    pub(super) fn unread(path: &Path, error: &DiskError) -> Self {
        match error.error.kind() {
            io::ErrorKind::NotFound => Self::new(path, CheckpointProblem::Missing),
            _ => Self::unwritten(path, error),
        }
    }

    /// Of a file or directory that cannot be written.
    pub(super) fn unwritten(path: &Path, error: &DiskError) -> Self {
        Self::io(path, &error.act.to_string(), &error.path, &error.error)
    }

    pub(super) fn io(path: &Path, operation: &str, on: &Path, error: &io::Error) -> Self {
        let (operation, on, error) = (operation.to_owned(), on.to_owned(), error.to_string());
        Self::new(path, CheckpointProblem::Io { operation, on, error })
    }

    pub(super) fn malformed(path: impl Into<PathBuf>, reason: impl fmt::Display) -> Self {
        Self::new(path, CheckpointProblem::Malformed(reason.to_string()))
    }

    /// With this path, if it has none yet.
    #[must_use]
    pub(super) fn at(self, path: &Path) -> Self {
        if self.path.as_os_str().is_empty() { Self { path: path.to_owned(), ..self } } else { self }
    }

    #[must_use]
    pub(super) fn about(self, tensor: impl fmt::Display) -> Self {
        Self { tensor: Some(tensor.to_string()), ..self }
    }
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "checkpoint {}", self.path.display())?;
        if let Some(tensor) = &self.tensor {
            write!(f, ", tensor {tensor}")?;
        }
        if let Some(rank) = self.rank {
            write!(f, ", on rank {rank}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// The message, and then the fields: `unwrap` prints it.
impl fmt::Debug for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, tensor, rank, problem } = self;
        let fields: [(&str, &dyn fmt::Debug); 4] =
            [("path", path), ("tensor", tensor), ("rank", rank), ("problem", problem)];
        dist_transport::show_error(f, self, "CheckpointError", &fields)
    }
}

// The problem is part of the message, so that it is no source.
impl std::error::Error for CheckpointError {}
