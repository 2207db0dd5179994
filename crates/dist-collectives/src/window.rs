//! Memory that all ranks of a group may read in each other's processes.

use std::fmt;
use std::ops::{Deref, Range};

use crate::engine::{WindowBuffer, copy};
use crate::{Buffer, Call, Communicator, Element, Error, Failed, Result};

/// A buffer of every rank that all ranks of a group can read directly, at any time. No buffer may change before all
/// ranks have [closed](Self::close) their windows. A read is one copy, and the rank that owns the memory takes no
/// part in it.
///
/// A window is a collective that lasts as long as the window is open, so it uses a communicator exclusively. If a
/// rank drops its window without closing it, the others get an error when they close their windows or read its
/// memory.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_transport::sim;
///
/// let outcome = sim::Network::new(2).with_shared_memory().run(|transport| {
///     let mut comm = Communicator::new(transport);
///     let mut part = comm.alloc::<f32>(3).unwrap();
///     part.fill(comm.rank() as f32);
///     assert!(comm.can_open(&part).unwrap());
///     let mut window = comm.open(part).unwrap();
///     let mut read = [9.0; 2];
///     window.read(1 - window.rank(), 1, &mut read).unwrap();
///     let (mut comm, mut part) = window.close().unwrap();
///     part.fill(7.0);
///     comm.barrier().unwrap();
///     read
/// });
/// assert_eq!(outcome.results, [[1.0; 2], [0.0; 2]]);
/// ```
#[doc(alias = "MPI_Win_create")]
#[doc(alias = "symmetric memory")]
#[must_use = "other ranks wait until it is closed"]
pub struct Window<T> {
    // Dropped first, which tells other ranks that they must not read any more.
    comm: Communicator,
    open: WindowBuffer<T>,
    call: Call,
}

impl Communicator {
    /// Returns `true` if the ranks of the group can read each other's buffers of this kind. They must share a host,
    /// and each must have [allocated](Self::alloc) memory or be permitted by the system to read the others' memory.
    /// Every rank calls this and gets the same result.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Win_create")]
    pub fn can_open<T: Element>(&mut self, buffer: &Buffer<T>) -> Result<bool> {
        self.call(|engine, options| engine.can_open(buffer.ownership(), &options))
    }

    /// Opens a window on all ranks: every rank can read the buffers of the others, which have the same length, until
    /// all have closed their windows. Every rank calls this, if [`can_open`](Self::can_open) returned `true`.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if a rank's buffer cannot be read by another one. The buffer is
    /// returned unchanged, and the communicator is lost.
    #[doc(alias = "MPI_Win_fence")]
    #[doc(alias = "MPI_Win_create")]
    pub fn open<T: Element>(mut self, buffer: Buffer<T>) -> Result<Window<T>, Failed<Buffer<T>>> {
        if let Err(error) = self.engine() {
            return Err(Failed::new(buffer, error));
        }
        let opened = self.call(|engine, options| Ok(engine.open_window(buffer, &options)));
        match opened.expect("nothing is started") {
            Ok((call, open)) => Ok(Window { comm: self, open, call }),
            Err((buffer, error)) => Err(Failed::new(buffer, error)),
        }
    }
}

impl<T: Element> Window<T> {
    /// Returns this rank's number in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Copies elements of a rank's buffer, from element `start` on.
    ///
    /// # Errors
    /// If there is no such rank, if its buffer is too short, or if it has dropped its window.
    #[doc(alias = "MPI_Get")]
    pub fn read(&mut self, rank: usize, start: usize, into: &mut [T]) -> Result<()> {
        let range = self.range(rank, start, into.len())?;
        let Self { comm, open, call } = self;
        if rank == comm.rank() {
            copy(&open[range], into);
            return Ok(());
        }
        comm.call(|engine, options| engine.read_window((call, open), (rank, start), into, &options.due))
    }

    /// Calls `look` with `elements` elements of a rank's buffer, from element `start` on, and returns its result. Memory
    /// that the rank has [allocated](Communicator::alloc) is read in place; other memory is copied first. No rank can
    /// change the elements while its window is open.
    ///
    /// ```
    /// # use dist_collectives::Communicator;
    /// # use dist_transport::sim;
    /// # let outcome = sim::Network::new(2).with_shared_memory().run(|transport| {
    /// # let mut comm = Communicator::new(transport);
    /// let mut part = comm.alloc::<u32>(1000).unwrap();
    /// part.fill(comm.rank() as u32);
    /// let mut window = comm.open(part).unwrap();
    /// let sum: u32 = window.view(1, 0, 1000, |there| there.iter().sum()).unwrap();
    /// assert_eq!(sum, 1000);
    /// # window.close().unwrap();
    /// # });
    /// ```
    ///
    /// # Errors
    /// As for [`read`](Self::read). If the rank drops its window meanwhile, `look` was called with the old elements.
    #[doc(alias = "MPI_Win_shared_query")]
    pub fn view<R>(
        &mut self,
        rank: usize,
        start: usize,
        elements: usize,
        look: impl FnOnce(&[T]) -> R,
    ) -> Result<R> {
        let range = self.range(rank, start, elements)?;
        let Self { comm, open, call } = self;
        if rank == comm.rank() {
            return Ok(look(&open[range]));
        }
        let (mut look, mut result) = (Some(look), None);
        let mut look_once = |elements: &[T]| {
            if let Some(look) = look.take() {
                result = Some(look(elements));
            }
        };
        comm.call(|engine, options| {
            engine.view_window((call, open), (rank, range), &mut look_once, &options.due)
        })?;
        Ok(result.expect("a view that succeeds calls the function"))
    }

    /// Returns the range of these elements, if the rank's buffer has them.
    fn range(&self, rank: usize, start: usize, elements: usize) -> Result<Range<usize>> {
        let (len, world_size) = (self.open.len(), self.comm.world_size());
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let end = start.checked_add(elements).filter(|&end| end <= len);
        Ok(start..end.ok_or(Error::OutsideWindow { start, elements, len })?)
    }

    /// Waits until all ranks have closed their windows, and returns the communicator and the buffer.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`]. The buffer is returned unchanged, and the communicator is lost.
    #[doc(alias = "MPI_Win_free")]
    pub fn close(mut self) -> Result<(Communicator, Buffer<T>), Failed<Buffer<T>>> {
        let window = (&self.call, &mut self.open);
        match self.comm.call(|engine, options| engine.close_window(window, &options.due)) {
            Ok(()) => Ok((self.comm, self.open.into_buffer())),
            Err(error) => {
                drop(self.comm);
                Err(Failed::new(self.open.into_buffer(), error))
            }
        }
    }
}

/// Dereferences to this rank's own elements.
impl<T: Element> Deref for Window<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.open
    }
}

impl<T> fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({:?}, {})", self.comm, self.call)
    }
}
