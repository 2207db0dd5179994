//! [`OwnedByProcess`]: a value that a child of `fork` does not drop.

use std::mem;

/// A value that belongs to the process which made it.
///
/// A child of `fork` has the memory of its parent, not its threads, and shares its sockets. If it dropped a
/// communicator, it would leave the group in its parent's name. So it never reaches the value, and forgets it.
pub(crate) struct OwnedByProcess<T> {
    value: Option<T>,
    process: u32,
}

impl<T> OwnedByProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Returns the value, unless it was taken or belongs to another process.
    pub(crate) fn get(&mut self) -> Option<&mut T> {
        self.is_own().then_some(self.value.as_mut()).flatten()
    }

    /// Takes the value, unless it was taken or belongs to another process.
    pub(crate) fn take(&mut self) -> Option<T> {
        self.is_own().then(|| self.value.take()).flatten()
    }

    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for OwnedByProcess<T> {
    fn drop(&mut self) {
        if !self.is_own() {
            mem::forget(self.value.take());
        }
    }
}
