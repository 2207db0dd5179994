//! Which form is chosen, by what was measured on two cores of one host.

use super::{Form, Task};

/// Whose the memory is that an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// The caller's: others may read it at most.
    Borrowed,
    /// The operation's, ordinary memory: others may write into it if the system lets them.
    Owned,
    /// The operation's, in memory that the ranks of a host share.
    Allocated,
}

impl Form {
    /// The fastest form for a buffer of so many bytes, and how many bytes of it a slot should take.
    ///
    /// Calls of the system that copy from one process to another are slower than slots at every size.
    pub const fn suggest(task: Task, world_size: usize, bytes: usize, ownership: Ownership) -> (Self, usize) {
        match (task, ownership) {
            (Task::AllReduce, Ownership::Allocated) if bytes >= 4 << 10 => (Self::WriteToAll, 0),
            (Task::AllReduce | Task::Reduce { .. }, _) if bytes >= staged_from(world_size) => {
                (Self::Staged, 256 << 10)
            }
            _ => (Self::OneShot, 256 << 10),
        }
    }
}

/// From how many bytes on it is faster that one rank reduces each part than that everybody reduces all.
const fn staged_from(world_size: usize) -> usize {
    if world_size == 2 { 4 << 10 } else { 16 << 10 }
}
