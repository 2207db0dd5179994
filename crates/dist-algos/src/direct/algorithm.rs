//! The forms of direct schedules.

use std::fmt;

use super::DirectCollective;

/// How ranks that share memory get at each other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectAlgorithm {
    /// Everybody publishes all that others need, and then does by itself all that it needs. In more than one block it is
    /// a pipeline: a block is published before the one before is used.
    OneShot,
    /// One rank reduces each part of what the others have published, and puts the sum back there, whence they copy it.
    Staged,
    /// As staged, or in one go where nothing is shared out, from the others' own memory: nothing is published.
    ReadFromAll,
    /// One rank reduces each part, from the others' own memory, and writes the sum into it.
    WriteToAll,
}

/// What a rank exposes of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    /// Nothing.
    Nothing,
    /// Others read it.
    Read,
    /// Others read and write it.
    Write,
}

impl DirectAlgorithm {
    /// Every form.
    pub const ALL: [Self; 4] = [Self::OneShot, Self::Staged, Self::ReadFromAll, Self::WriteToAll];

    /// Whether an operation can be done like this.
    pub const fn serves(self, collective: DirectCollective) -> bool {
        match self {
            Self::OneShot => true,
            Self::Staged => {
                matches!(collective, DirectCollective::AllReduce | DirectCollective::Reduce { .. })
            }
            Self::ReadFromAll => !matches!(collective, DirectCollective::Barrier),
            Self::WriteToAll => matches!(collective, DirectCollective::AllReduce),
        }
    }

    /// What it needs of the ranks' own memory.
    #[inline]
    pub const fn remote_access(self) -> RemoteAccess {
        match self {
            Self::OneShot | Self::Staged => RemoteAccess::Nothing,
            Self::ReadFromAll => RemoteAccess::Read,
            Self::WriteToAll => RemoteAccess::Write,
        }
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one_shot",
            Self::Staged => "staged",
            Self::ReadFromAll => "read_from_all",
            Self::WriteToAll => "write_to_all",
        }
    }
}

impl fmt::Display for DirectAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
