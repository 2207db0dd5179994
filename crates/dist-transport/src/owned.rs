//! Memory that other processes may write into, which therefore outlives a call that failed.

use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use crate::Direct;

/// Memory that a transport gave away: the ranks of its host reach it as their own.
pub trait Allocation: Send + Sync + fmt::Debug {
    /// The bytes; they begin at a multiple of 64.
    fn bytes(&self) -> &[u8];

    /// The bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Elements that can be lent to other ranks for writing.
///
/// Between [`lend`](Owned::lend) and a successful [`reclaim`](Owned::reclaim) other processes may write into the memory
/// at any time. Dropped meanwhile it is leaked, so that a rank which wakes up late finds nothing to corrupt.
pub struct Owned<T> {
    memory: Memory<T>,
    lent: bool,
}

enum Memory<T> {
    Vec(Vec<T>),
    Allocated(Box<dyn Allocation>),
}

impl<T: Pod> Owned<T> {
    /// Elements in allocated memory, as many as there is room for. `None` if the memory does not begin where an element can.
    pub fn allocated(memory: Box<dyn Allocation>) -> Option<Self> {
        let fits = memory.bytes().as_ptr().align_offset(align_of::<T>()) == 0 && size_of::<T>() != 0;
        fits.then_some(Self { memory: Memory::Allocated(memory), lent: false })
    }

    /// The elements' bytes, for other ranks to write into.
    pub fn lend(&mut self) -> Lent<'_> {
        self.lend_first(self.len())
    }

    /// The bytes of the first elements, for other ranks to write into.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn lend_first(&mut self, len: usize) -> Lent<'_> {
        self.lent = true;
        Lent(bytemuck::cast_slice_mut(&mut self[..len]))
    }

    /// Ends the loan if the ranks to which the memory was lent are through with the call; says whether they are.
    pub fn reclaim(&mut self, direct: &dyn Direct) -> bool {
        if direct.finished() {
            self.lent = false;
        }
        !self.lent
    }
}

impl<T> Owned<T> {
    /// Whether the elements lie in memory that a transport gave.
    pub const fn is_allocated(&self) -> bool {
        matches!(self.memory, Memory::Allocated(_))
    }

    /// The vector that this was made of: the same without a copy. Otherwise, or while it is lent, this itself.
    ///
    /// # Errors
    /// Gives `self` back.
    pub fn into_vec(mut self) -> Result<Vec<T>, Self> {
        match &mut self.memory {
            Memory::Vec(elements) if !self.lent => Ok(mem::take(elements)),
            _ => Err(self),
        }
    }
}

impl<T> From<Vec<T>> for Owned<T> {
    fn from(elements: Vec<T>) -> Self {
        Self { memory: Memory::Vec(elements), lent: false }
    }
}

impl<T: Pod> Deref for Owned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Vec(elements) => elements,
            Memory::Allocated(memory) => bytemuck::cast_slice(whole::<T>(memory.bytes())),
        }
    }
}

impl<T: Pod> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Vec(elements) => elements,
            Memory::Allocated(memory) => {
                let bytes = memory.bytes_mut();
                let len = whole::<T>(bytes).len();
                bytemuck::cast_slice_mut(&mut bytes[..len])
            }
        }
    }
}

/// The bytes that are whole elements.
fn whole<T>(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()]
}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_allocated() { "allocated" } else { "private" };
        f.debug_struct("Owned").field("memory", &place).field("lent", &self.lent).finish()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.lent {
            mem::forget(mem::replace(&mut self.memory, Memory::Vec(Vec::new())));
        }
    }
}

/// Bytes of an [`Owned`] that other ranks may write into.
#[derive(Debug)]
pub struct Lent<'a>(&'a mut [u8]);

impl Lent<'_> {
    /// The same, for as long as this one is lent.
    pub fn reborrow(&mut self) -> Lent<'_> {
        Lent(self.0)
    }
}

impl Deref for Lent<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Grain;

    #[derive(Debug)]
    struct Counted {
        grains: Vec<Grain>,
        freed: Arc<AtomicUsize>,
    }

    impl Allocation for Counted {
        fn bytes(&self) -> &[u8] {
            bytemuck::cast_slice(&self.grains)
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            bytemuck::cast_slice_mut(&mut self.grains)
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.freed.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn memory_that_is_lent_is_never_freed() {
        let freed = Arc::new(AtomicUsize::new(0));
        let memory = || Box::new(Counted { grains: vec![Grain::ZERO; 2], freed: freed.clone() });
        let mut kept = Owned::<f32>::allocated(memory()).unwrap();
        kept.fill(1.0);
        assert_eq!(*kept, [1.0; 32]);
        drop(kept);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        let mut lent = Owned::<f32>::allocated(memory()).unwrap();
        lent.lend().fill(1);
        drop(lent);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_vector_comes_back_unless_it_is_lent() {
        let elements = Owned::from(vec![1_u32, 2, 3]);
        assert_eq!(elements.into_vec().unwrap(), [1, 2, 3]);
        let mut elements = Owned::from(vec![1_u32, 2, 3]);
        elements.lend()[0] = 7;
        let elements = elements.into_vec().unwrap_err();
        assert_eq!(*elements, [7, 2, 3]);
    }
}
