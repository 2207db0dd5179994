//! Replacement for memory that ranks share on systems without it.

#[derive(Debug, Default)]
pub(crate) struct Heap;

impl Heap {
    pub(crate) fn age(&self) {}

    pub(crate) fn return_some(&self) -> bool {
        false
    }
}
