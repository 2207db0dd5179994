//! Stand-ins for the types of this module where ranks cannot share memory.

#[derive(Debug, Default)]
pub(crate) struct Heap;

impl Heap {
    pub(crate) fn age(&self) {}

    pub(crate) fn return_some(&self) -> bool {
        false
    }
}
