//! Memory that all ranks of a group may read in each other's processes.

use std::fmt;
use std::ops::Deref;

use crate::engine::{CallOptions, WindowBuffer, copy};
use crate::{Buffer, Call, Communicator, Element, Error, Failed, Result};

/// A buffer that every rank of a group has for all of them to read, where it lies and whenever they like: nobody changes one
/// before all have [closed](Self::close) theirs. To read takes one copy, and the rank whose memory it is does nothing for it.
///
/// It is a collective that goes on for as long as the window is open, so it has a communicator to itself. A rank that drops
/// its window without closing it is missed by the others when they close theirs, or when they read what was in it.
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
    // Dropped first: others find out by that what they must not read any more.
    comm: Communicator,
    open: WindowBuffer<T>,
    call: Call,
}

impl Communicator {
    /// Whether the ranks of the group can read what each of them has in such a buffer: they share a host, and each has
    /// [allocated](Self::alloc) memory, or may read the others' through the system. Every rank calls this, and comes to the
    /// same.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn can_open<T: Element>(&mut self, buffer: &Buffer<T>) -> Result<bool> {
        let options = &CallOptions::new(&self.settings, &self.runtime);
        self.engine.can_open(buffer.ownership(), options)
    }

    /// Lets all ranks read what each of them has in its buffer, as many elements on each, until they close their windows.
    /// Every rank calls this, where all of them [can](Self::can_open).
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if a rank's buffer cannot be read by another one. The buffer is as it was,
    /// and the communicator gone.
    #[doc(alias = "MPI_Win_fence")]
    pub fn open<T: Element>(mut self, buffer: Buffer<T>) -> Result<Window<T>, Failed<Buffer<T>>> {
        let options = &CallOptions::new(&self.settings, &self.runtime);
        match self.engine.open_window(buffer, options) {
            Ok((call, open)) => Ok(Window { comm: self, open, call }),
            Err((buffer, error)) => Err(Failed::new(buffer, error)),
        }
    }
}

impl<T: Element> Window<T> {
    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Copies what a rank has from element `start` on.
    ///
    /// # Errors
    /// If there is no such rank or it has not so many elements, or it has dropped its window.
    #[doc(alias = "MPI_Get")]
    pub fn read(&mut self, rank: usize, start: usize, into: &mut [T]) -> Result<()> {
        let Self { comm, open, call } = self;
        let (len, world_size) = (open.len(), comm.world_size());
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let end = start.checked_add(into.len()).filter(|&end| end <= len);
        let end = end.ok_or(Error::OutsideWindow { start, elements: into.len(), len })?;
        if rank == comm.rank() {
            copy(&open[start..end], into);
            return Ok(());
        }
        let due = CallOptions::new(&comm.settings, &comm.runtime).due;
        comm.engine.read_window((call, open), (rank, start), into, &due)
    }

    /// Waits until all ranks have closed their windows, and gives back what it was made of.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`]. The buffer is as it was, and the communicator gone.
    pub fn close(mut self) -> Result<(Communicator, Buffer<T>), Failed<Buffer<T>>> {
        let due = CallOptions::new(&self.comm.settings, &self.comm.runtime).due;
        match self.comm.engine.close_window((&self.call, &mut self.open), &due) {
            Ok(()) => Ok((self.comm, self.open.into_buffer())),
            Err(error) => {
                drop(self.comm);
                Err(Failed::new(self.open.into_buffer(), error))
            }
        }
    }
}

/// This rank's own elements.
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
