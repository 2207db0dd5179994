//! The algorithms of direct schedules.

use std::fmt;

use super::DirectCollective;

/// An algorithm for ranks that share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectAlgorithm {
    /// Every rank publishes its data, and then every rank computes its own result from all of it. With more than
    /// one block it is a pipeline: the next block is published before a block is used.
    OneShot,
    /// One rank reduces each part of the published data and writes the sum back, from where the other ranks copy
    /// it.
    Staged,
    /// Like `Staged`, but reads the other ranks' own memory, and nothing is published. If no work is divided among
    /// ranks, there is only one phase.
    ReadFromAll,
    /// One rank reduces each part from the other ranks' own memory and writes the sum into that memory.
    WriteToAll,
}

/// The access that other ranks need to a rank's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    /// None.
    Nothing,
    /// They read it.
    Read,
    /// They read and write it.
    Write,
}

impl DirectAlgorithm {
    /// All algorithms.
    pub const ALL: [Self; 4] = [Self::OneShot, Self::Staged, Self::ReadFromAll, Self::WriteToAll];

    /// Returns `true` if the algorithm supports this operation.
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

    /// Returns the access that the algorithm needs to the ranks' own memory.
    #[inline]
    pub const fn remote_access(self) -> RemoteAccess {
        match self {
            Self::OneShot | Self::Staged => RemoteAccess::Nothing,
            Self::ReadFromAll => RemoteAccess::Read,
            Self::WriteToAll => RemoteAccess::Write,
        }
    }

    /// Returns the name.
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
