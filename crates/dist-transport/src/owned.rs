//! Memory that other ranks may write into. It belongs to the call that it is lent to, and outlives a failed
//! call.

use std::any::Any;
use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use crate::cpu::CacheLine;

/// A region of memory that a [transport](crate::Transport::allocate) has allocated. If the transport supports
/// it, the ranks of its host can map it.
pub struct Allocation(Box<dyn Bytes>);

/// A region of bytes at a fixed address. Only types of this crate implement it, so that the address does not
/// depend on other code.
pub(crate) trait Bytes: Send + Sync + fmt::Debug {
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];
}

impl Allocation {
    /// Allocates zeroed memory of this process only, for transports without shared memory. Returns `None` if
    /// there is not enough memory.
    pub fn private(len: usize) -> Option<Self> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(len.div_ceil(CacheLine::BYTES)).ok()?;
        lines.resize(len.div_ceil(CacheLine::BYTES), CacheLine::ZERO);
        Some(Self(Box::new(PrivateMemory { lines, len })))
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn new(bytes: Box<dyn Bytes>) -> Self {
        Self(bytes)
    }

    /// Returns `true` if the bytes are aligned for elements of this type.
    fn takes<T>(&self) -> bool {
        self.bytes().as_ptr().align_offset(align_of::<T>()) == 0 && size_of::<T>() != 0
    }

    /// Returns the bytes, which are aligned to 64.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Returns the bytes, mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:?})", self.0)
    }
}

/// A region of memory of this process alone.
struct PrivateMemory {
    lines: Vec<CacheLine>,
    len: usize,
}

impl Bytes for PrivateMemory {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl fmt::Debug for PrivateMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

/// A vector of elements that can be lent to other ranks for writing.
///
/// [`lend`](Owned::lend) takes it by value, so that the owner has no access while other ranks may write.
///
/// ```compile_fail,E0382
/// # use dist_transport::Owned;
/// let elements = Owned::from(vec![1_u32, 2]);
/// let lent = elements.lend();
/// let first = elements[0]; // other ranks may write it at this moment
/// ```
pub struct Owned<T> {
    memory: OwnedMemory<T>,
}

enum OwnedMemory<T> {
    Vec(Vec<T>),
    Allocated(Allocation),
}

impl<T: Pod> Owned<T> {
    /// Creates elements in allocated memory, as many as fit. Returns `None` if the memory is not aligned for
    /// them.
    pub fn allocated(memory: Allocation) -> Option<Self> {
        memory.takes::<T>().then_some(Self { memory: OwnedMemory::Allocated(memory) })
    }
}

impl<T: Pod + Send> Owned<T> {
    /// Lends all elements to other ranks.
    pub fn lend(self) -> Lent {
        let len = self.len();
        self.lend_first(len)
    }

    /// Lends the first `len` elements to other ranks. The call owns the whole memory.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn lend_first(self, len: usize) -> Lent {
        let bytes = size_of_val(&self[..len]);
        let memory = match self.memory {
            OwnedMemory::Vec(elements) => LentMemory::Vec(Box::new(elements)),
            OwnedMemory::Allocated(memory) => LentMemory::Allocated(memory),
        };
        Lent { memory: Some(memory), len: bytes }
    }
}

impl<T> Owned<T> {
    /// Returns `true` if the elements are in memory that a transport has allocated.
    pub const fn is_allocated(&self) -> bool {
        matches!(self.memory, OwnedMemory::Allocated(_))
    }

    /// Returns the vector that this was made of, without a copy.
    ///
    /// # Errors
    /// Returns `self` if it was made of allocated memory.
    pub fn into_vec(self) -> Result<Vec<T>, Self> {
        match self.memory {
            OwnedMemory::Vec(elements) => Ok(elements),
            OwnedMemory::Allocated(_) => Err(self),
        }
    }
}

impl<T> From<Vec<T>> for Owned<T> {
    fn from(elements: Vec<T>) -> Self {
        Self { memory: OwnedMemory::Vec(elements) }
    }
}

impl<T: Pod> Deref for Owned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            OwnedMemory::Vec(elements) => elements,
            OwnedMemory::Allocated(memory) => bytemuck::cast_slice(whole::<T>(memory.bytes())),
        }
    }
}

impl<T: Pod> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            OwnedMemory::Vec(elements) => elements,
            OwnedMemory::Allocated(memory) => {
                let bytes = memory.bytes_mut();
                let len = whole::<T>(bytes).len();
                bytemuck::cast_slice_mut(&mut bytes[..len])
            }
        }
    }
}

/// Returns the bytes that are whole elements.
fn whole<T>(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()]
}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_allocated() { "allocated" } else { "private" };
        f.debug_struct("Owned").field("memory", &place).finish()
    }
}

/// An [`Owned`] that is lent to other ranks.
///
/// If it is dropped, its memory is never freed, so a rank that writes late cannot corrupt other memory. Only
/// [`into_owned`](Lent::into_owned) returns the memory. A `Lent` has one owner: while a call [has
/// it](crate::shm_group::ExposedRegion::Write), only the [end of that call](crate::shm_group::ShmGroup::reclaim) returns it.
pub struct Lent {
    /// `None` after it was returned.
    memory: Option<LentMemory>,
    /// Bytes that other ranks may write.
    len: usize,
}

enum LentMemory {
    Vec(Box<dyn Elements>),
    Allocated(Allocation),
}

/// A vector of some element type.
trait Elements: Any + Send {
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];
}

impl<T: Pod + Send> Elements for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

impl Lent {
    /// Returns the bytes that other ranks may write.
    pub fn bytes(&self) -> &[u8] {
        let bytes = match &self.memory {
            Some(LentMemory::Vec(elements)) => elements.bytes(),
            Some(LentMemory::Allocated(memory)) => memory.bytes(),
            None => &[],
        };
        &bytes[..self.len]
    }

    /// Returns the bytes that other ranks may write, mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.memory {
            Some(LentMemory::Vec(elements)) => elements.bytes_mut(),
            Some(LentMemory::Allocated(memory)) => memory.bytes_mut(),
            None => &mut [],
        };
        &mut bytes[..self.len]
    }

    /// Ends the loan, and returns the memory.
    ///
    /// # Errors
    /// Returns `self` if the elements have another type.
    pub fn into_owned<T: Pod + Send>(mut self) -> Result<Owned<T>, Self> {
        match self.memory.take() {
            Some(LentMemory::Vec(elements)) if (&*elements as &dyn Any).is::<Vec<T>>() => {
                let elements: Box<dyn Any> = elements;
                let elements = elements.downcast::<Vec<T>>().unwrap_or_else(|_| unreachable!("as just seen"));
                Ok(Owned::from(*elements))
            }
            Some(LentMemory::Allocated(memory)) if memory.takes::<T>() => {
                Ok(Owned { memory: OwnedMemory::Allocated(memory) })
            }
            other => {
                self.memory = other;
                Err(self)
            }
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        mem::forget(self.memory.take());
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A memory that counts how often it was freed.
    #[derive(Debug)]
    struct Counted {
        memory: Allocation,
        freed: Arc<AtomicUsize>,
    }

    impl Bytes for Counted {
        fn bytes(&self) -> &[u8] {
            self.memory.bytes()
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            self.memory.bytes_mut()
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.freed.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn lent_memory_is_never_freed() {
        let freed = Arc::new(AtomicUsize::new(0));
        let memory = || {
            let memory = Allocation::private(128).unwrap();
            Allocation(Box::new(Counted { memory, freed: freed.clone() }))
        };
        let mut kept = Owned::<f32>::allocated(memory()).unwrap();
        kept.fill(1.0);
        assert_eq!(*kept, [1.0; 32]);
        drop(kept);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        let mut lent = Owned::<f32>::allocated(memory()).unwrap().lend();
        lent.bytes_mut().fill(1);
        drop(lent);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        drop(Owned::<f32>::allocated(memory()).unwrap().lend().into_owned::<f32>().unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn lent_memory_comes_back_with_the_written_bytes() {
        let mut lent = Owned::from(vec![1_u32, 2, 3]).lend_first(2);
        assert_eq!(lent.bytes().len(), 8);
        lent.bytes_mut()[0] = 7;
        let lent = lent.into_owned::<i32>().unwrap_err();
        assert_eq!(lent.into_owned::<u32>().unwrap().into_vec().unwrap(), [7, 2, 3]);
    }

    #[test]
    fn elements_of_a_larger_allocation_are_lent_with_it() {
        let lent = Owned::<u64>::allocated(Allocation::private(100).unwrap()).unwrap().lend_first(3);
        assert_eq!(lent.bytes(), [0; 24]);
        assert_eq!(*lent.into_owned::<u64>().unwrap(), [0; 12]);
    }
}
