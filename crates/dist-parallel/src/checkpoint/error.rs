//! The errors of checkpoints.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disk::DiskError;

/// An error of saving or loading a checkpoint. If all ranks take part, every rank gets the same error.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointError {
    /// The file or directory.
    pub path: PathBuf,
    /// The tensor, if any: a parameter's name, or `optimizer/ARRAY/PARAMETER`.
    pub tensor: Option<String>,
    /// The first rank with the problem, by its number in the world, if all ranks take part.
    pub rank: Option<usize>,
    /// The problem.
    pub problem: CheckpointProblem,
}

/// A problem of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// There is no such file or directory.
    #[error("it does not exist")]
    Missing,
    /// The operating system returned an error.
    #[error("cannot {operation} {}: {error}", .on.display())]
    Io {
        /// The operation, such as `sync the directory`.
        operation: String,
        /// The file or directory of the operation.
        on: PathBuf,
        /// The error of the operating system.
        error: String,
    },
    /// Another job, or another trainer of this job, saves to the directory.
    #[error("{owner} saves to this directory; use another directory, or end the other job")]
    InUse {
        /// A description of the owner, with the seconds since it claimed the directory.
        owner: String,
    },
    /// A file has another size than when it was written.
    #[error("it has {got} bytes, but {expected} were written")]
    Size {
        /// The number of bytes that were written.
        expected: u64,
        /// The present number of bytes.
        got: u64,
    },
    /// The data have changed since they were written.
    #[error("it has changed since it was written: the checksum differs")]
    Corrupted,
    /// The file has another format than this crate writes, or contradicts itself.
    #[error("{0}")]
    Malformed(String),
    /// A newer version of this crate has written the checkpoint.
    #[error("it has version {0}, which this program is too old to read")]
    Version(u64),
    /// The model has a tensor that the checkpoint lacks.
    #[error("the model has it, but the checkpoint does not")]
    NotInCheckpoint,
    /// The checkpoint has a tensor that the model lacks.
    #[error("the checkpoint has it, but the model does not; to ignore it, leave it out")]
    NotInModel,
    /// The model has this parameter tied to another, and the checkpoint has separate values for it.
    #[error(
        "in the model it is tied to {same_as}, but the checkpoint has other values for it; to ignore them, leave it out"
    )]
    Tied {
        /// The parameter that it is tied to.
        same_as: String,
    },
    /// A value cannot be represented in the type of its parameter, even approximately.
    #[error("the value {value} cannot be converted to {to}")]
    Lost {
        /// The value.
        value: String,
        /// The type of the parameter.
        to: String,
    },
    /// The checkpoint has optimizer state of a parameter that the model does not train.
    #[error("the model does not train this parameter; to ignore its optimizer state, leave its state out")]
    NotTrained,
    /// The trainer has state that would not be saved.
    #[error("{0} would not be saved")]
    Unsaved(String),
    /// The optimizer has state of a slice that the trainer does not list, so it would not be saved.
    #[error(
        "the optimizer has state of slice {slice}, which the trainer does not list, so it would not be saved"
    )]
    UnlistedState {
        /// The number of the slice.
        slice: usize,
    },
    /// A tensor differs in shape or type between model and checkpoint.
    #[error("it is {model} in the model and {checkpoint} in the checkpoint")]
    MetaDiffers {
        /// The shape and type in the model.
        model: String,
        /// The shape and type in the checkpoint.
        checkpoint: String,
    },
    /// The checkpoint has the state of another kind of optimizer.
    #[error("the optimizer of this training is {training}, that of the checkpoint {checkpoint}")]
    Optimizer {
        /// The optimizer of this training, or `none`.
        training: String,
        /// The optimizer of the checkpoint, or `none`.
        checkpoint: String,
    },
    /// The ranks made different requests.
    #[error("rank {rank} {on_rank}, rank {other} {on_other}")]
    RanksDiffer {
        /// The first rank that differs from one before it, by its number in the world.
        rank: usize,
        /// Its request: the step to save or load, and the optimizer.
        on_rank: String,
        /// The rank that it differs from.
        other: usize,
        /// The request of that rank.
        on_other: String,
    },
    /// Ranks hold different values of a replicated parameter.
    #[error("ranks {other} and {rank} hold different values of it: the ranks have diverged")]
    Diverged {
        /// The first rank with other values than one before it, by its number in the world.
        rank: usize,
        /// The first rank that holds the parameter.
        other: usize,
    },
    /// Ranks hold different values of a frozen parameter, of which each would save a part.
    #[error(
        "ranks {other} and {rank} hold different values of this frozen parameter: declare state that a block changes as a \
         buffer (ParamInfo::buffer)"
    )]
    FrozenDiffers {
        /// The first rank with other values than one before it, by its number in the world.
        rank: usize,
        /// The first rank.
        other: usize,
    },
    /// Ranks have set different [state](crate::Checkpoints::set_state) of the program.
    #[error("ranks {other} and {rank} have set different values of this state; all ranks set the same")]
    StateDiffers {
        /// The first rank with another value than one before it, by its number in the world.
        rank: usize,
        /// The first rank.
        other: usize,
    },
    /// There is no [state](crate::Checkpoints::state) of this name: it was neither set nor loaded.
    #[error("there is no state of this name")]
    NoState,
    /// The state of this name has another form.
    #[error("the state is not {expected}: {found}")]
    StateForm {
        /// The form or the type that was asked for.
        expected: String,
        /// The form that was found, or why it is not of this type.
        found: String,
    },
    /// A trained parameter has a value that is not finite, and
    /// [`only_finite`](crate::Checkpoints::only_finite) refuses to save it.
    #[error("its value number {index} is {value}, and only finite values are to be saved")]
    NotFinite {
        /// The index of the first such value, in row-major order.
        index: usize,
        /// The value: `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// The trainer does not return the values that it lists.
    #[error("the trainer does not return it: {0}")]
    Trainer(String),
}

impl CheckpointError {
    /// Returns the rank that the error is about, by its number in the world, if all ranks take part: the rank that
    /// differs from others, or the first rank with the problem.
    pub const fn peer(&self) -> Option<usize> {
        match self.problem {
            CheckpointProblem::RanksDiffer { rank, .. }
            | CheckpointProblem::Diverged { rank, .. }
            | CheckpointProblem::FrozenDiffers { rank, .. }
            | CheckpointProblem::StateDiffers { rank, .. } => Some(rank),
            _ => self.rank,
        }
    }

    /// Returns `false`: a file has no deadline. A rank that does not come to a save or a load in time is an
    /// [`Error::Communication`](crate::Error::Communication).
    pub const fn is_timeout(&self) -> bool {
        false
    }

    pub(super) fn new(path: impl Into<PathBuf>, problem: CheckpointProblem) -> Self {
        Self { path: path.into(), tensor: None, rank: None, problem }
    }

    /// Returns the error of a file or directory that cannot be read.
    pub(super) fn unread(path: &Path, error: &DiskError) -> Self {
        match error.error.kind() {
            io::ErrorKind::NotFound => Self::new(path, CheckpointProblem::Missing),
            _ => Self::unwritten(path, error),
        }
    }

    /// Returns the error of a file or directory that cannot be written.
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

    /// Adds this path, if the error has none yet.
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

/// Formats the message and then the fields, because `unwrap` prints this.
impl fmt::Debug for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, tensor, rank, problem } = self;
        let fields: [(&str, &dyn fmt::Debug); 4] =
            [("path", path), ("tensor", tensor), ("rank", rank), ("problem", problem)];
        dist_transport::show_error(f, self, "CheckpointError", &fields)
    }
}

// The problem is part of the message, so it is not a source.
impl std::error::Error for CheckpointError {}
