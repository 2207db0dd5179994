//! Memory that all ranks of a group may read in each other's processes.

use std::fmt;
use std::ops::{Deref, Range};

use bytemuck::Pod;

use crate::call::WindowStep;
use crate::engine::{WindowAccess, WindowBuffer, copy};
use crate::window_service::{ServedReads, WindowRequest, WindowService};
use crate::{Buffer, Call, Communicator, Error, Failed, Result, UpdateWindow};

/// A buffer of every rank that all ranks of a group can read, at any time. No buffer may change before all ranks have
/// [closed](Self::close) their windows. The rank that owns the memory does nothing for a read, and can compute at
/// the same time.
///
/// If the ranks share a host and can read each other's memory, a read is one copy, and a [view](Self::view) is none.
/// Otherwise, as between hosts, each read is a request and a reply: a thread of the owner serves it, and the elements are
/// copied three times. Such a window costs a thread of each rank while it is open, opening and closing it are messages
/// to all ranks, and the first request to a rank connects to it. [`can_open`](Communicator::can_open) returns
/// `true` if the ranks can read the memory directly.
///
/// While a window is open, ranks can only read. A [fence](Self::fence) turns it into an [`UpdateWindow`], through which
/// they change the buffers.
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
    memory: ReadMemory<T>,
}

/// The memory that ranks read.
enum ReadMemory<T> {
    /// Memory that all ranks can read, in this call.
    Shared(Call, WindowAccess, WindowBuffer<T>),
    /// Memory that a thread of each rank serves.
    Served(WindowService<ServedReads<T>>),
}

impl Communicator {
    /// Returns `true` if the ranks of the group can read each other's buffers of this kind directly. They must share a
    /// host, and each must have [allocated](Self::alloc) memory or be permitted by the system to read the others' memory.
    /// Every rank calls this and gets the same result.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Win_create")]
    pub fn can_open<T: Pod>(&mut self, buffer: &Buffer<T>) -> Result<bool> {
        self.call(|engine, options| engine.can_open(buffer.ownership(), options))
    }

    /// Opens a window on all ranks: every rank can read the buffers of the others, which have the same length, until
    /// all have closed their windows. Every rank calls this.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), also if ranks pass buffers of different lengths or types. The buffer is
    /// returned unchanged, and the communicator is lost.
    #[doc(alias = "MPI_Win_fence")]
    #[doc(alias = "MPI_Win_create")]
    pub fn open<T: Pod + Send + Sync>(self, buffer: Buffer<T>) -> Result<Window<T>, Failed<Buffer<T>>> {
        Window::open(self, buffer, None)
    }
}

impl<T: Pod + Send + Sync> Window<T> {
    /// Opens a window. `known` is the access to the buffers, if an earlier epoch found it.
    pub(crate) fn open(
        mut comm: Communicator,
        buffer: Buffer<T>,
        known: Option<WindowAccess>,
    ) -> Result<Self, Failed<Buffer<T>>> {
        let (epoch, memory) = ((buffer.len(), WindowStep::Open), (buffer.ownership(), known));
        let begun = comm.call(|engine, options| engine.begin_epoch::<T>(epoch, memory, options));
        let (call, access) = match begun {
            Ok((call, WindowAccess::Nothing)) => return Self::serve(comm, buffer, call),
            Ok(begun) => begun,
            Err(error) => return Err(Failed::new(buffer, error)),
        };
        let opened = comm.call(|engine, options| Ok(engine.open_window(&call, buffer, options)));
        match opened.expect("nothing is started") {
            Ok(open) => Ok(Self { comm, memory: ReadMemory::Shared(call, access, open) }),
            Err((buffer, error)) => Err(Failed::new(buffer, error)),
        }
    }

    /// Begins an epoch in which a thread of each rank serves its memory. This call of all ranks precedes it.
    pub(crate) fn serve(
        mut comm: Communicator,
        buffer: Buffer<T>,
        call: Call,
    ) -> Result<Self, Failed<Buffer<T>>> {
        match WindowService::start(call, ServedReads(buffer), &mut comm) {
            Ok(service) => Ok(Self { comm, memory: ReadMemory::Served(service) }),
            Err((ServedReads(buffer), error)) => Err(Failed::new(buffer, error)),
        }
    }

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
        if rank == self.rank() {
            copy(&self[range], into);
            return Ok(());
        }
        let Self { comm, memory } = self;
        match memory {
            ReadMemory::Shared(call, _, open) => comm
                .call(|engine, options| engine.read_window((call, open), (rank, start), into, &options.due)),
            ReadMemory::Served(service) => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
                let start = (start * size_of::<T>()) as u64;
                let request = WindowRequest::Read { start, bytes: bytes.len() as u64 };
                let read = service.request(rank, request, &[], comm)?;
                if read.len() != bytes.len() {
                    return Err(Error::Request { from: rank });
                }
                copy(&read, bytes);
                Ok(())
            }
        }
    }

    /// Returns the elements of a rank's buffer, in the memory that the rank has [allocated](Communicator::alloc). Nothing
    /// is copied. The elements do not change while the window is open, even if the rank drops its window.
    ///
    /// ```
    /// # use dist_collectives::Communicator;
    /// # use dist_transport::sim;
    /// # let outcome = sim::Network::new(2).with_shared_memory().run(|transport| {
    /// # let mut comm = Communicator::new(transport);
    /// let mut part = comm.alloc::<u32>(1000).unwrap();
    /// part.fill(1 + comm.rank() as u32);
    /// let window = comm.open(part).unwrap();
    /// let (left, right) = (window.view(0).unwrap(), window.view(1).unwrap());
    /// let product: u32 = left.iter().zip(right).map(|(left, right)| left * right).sum();
    /// assert_eq!(product, 2000);
    /// # window.close().unwrap();
    /// # });
    /// ```
    ///
    /// The elements cannot be used after the window is closed, or in an epoch of updates:
    ///
    /// ```compile_fail,E0505
    /// # use dist_collectives::Window;
    /// fn read_late(window: Window<u32>) -> u32 {
    ///     let elements = window.view(0).unwrap();
    ///     let updates = window.fence().unwrap();
    ///     elements[0] // other ranks may write it at this moment
    /// }
    /// ```
    ///
    /// # Errors
    /// If there is no such rank, or [`Error::NotMapped`] if its memory is ordinary memory or on another host.
    /// [`read`](Self::read) copies from any memory.
    #[doc(alias = "MPI_Win_shared_query")]
    pub fn view(&self, rank: usize) -> Result<&[T]> {
        self.range(rank, 0, 0)?;
        if rank == self.rank() {
            return Ok(self);
        }
        match &self.memory {
            ReadMemory::Shared(_, _, open) => open.view(rank).ok_or(Error::NotMapped { rank }),
            ReadMemory::Served(_) => Err(Error::NotMapped { rank }),
        }
    }

    /// Returns the range of these elements, if the rank's buffer has them.
    fn range(&self, rank: usize, start: usize, elements: usize) -> Result<Range<usize>> {
        range_in_window((rank, self.comm.world_size()), (start, elements), self.len())
    }

    /// Ends the epoch in which ranks read, and begins an epoch of updates of the same buffers. Every rank calls this. It
    /// waits until all ranks have called it, so that no rank writes what another one still reads.
    ///
    /// # Errors
    /// As for [`close`](Self::close) and [`Communicator::open_updates`].
    #[doc(alias = "MPI_Win_fence")]
    pub fn fence(self) -> Result<UpdateWindow<T>, Failed<Buffer<T>>> {
        match self.end(WindowStep::Fence)? {
            (comm, buffer, EpochAfter::Served(call)) => UpdateWindow::serve(comm, buffer, call),
            (comm, buffer, EpochAfter::Shared(access)) => UpdateWindow::open(comm, buffer, Some(access)),
        }
    }

    /// Waits until all ranks have closed their windows, and returns the communicator and the buffer.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`]. The buffer is returned unchanged, or empty if a thread served it. The
    /// communicator is lost.
    #[doc(alias = "MPI_Win_free")]
    pub fn close(self) -> Result<(Communicator, Buffer<T>), Failed<Buffer<T>>> {
        self.end(WindowStep::Close).map(|(comm, buffer, _)| (comm, buffer))
    }

    /// Waits until all ranks have ended the epoch.
    fn end(self, step: WindowStep) -> EpochEnd<T> {
        let len = self.len();
        let Self { mut comm, memory } = self;
        match memory {
            ReadMemory::Shared(call, access, mut open) => {
                let window = (&call, &mut open);
                match comm.call(|engine, options| engine.close_window(window, &options.due)) {
                    Ok(()) => Ok((comm, open.into_buffer(), EpochAfter::Shared(access))),
                    Err(error) => {
                        drop(comm);
                        Err(Failed::new(open.into_buffer(), error))
                    }
                }
            }
            ReadMemory::Served(service) => match service.end::<T>((len, step), &mut comm) {
                Ok((call, ServedReads(buffer))) => Ok((comm, buffer, EpochAfter::Served(call))),
                Err(error) => Err(Failed::new(Buffer::from(Vec::new()), error)),
            },
        }
    }
}

/// The communicator and the buffer after an epoch, and how the next epoch can begin.
pub(crate) type EpochEnd<T> = Result<(Communicator, Buffer<T>, EpochAfter), Failed<Buffer<T>>>;

/// The beginning of the epoch after another one.
pub(crate) enum EpochAfter {
    /// Threads serve the memory again. This call of all ranks has ended the last epoch.
    Served(Call),
    /// The ranks have at least this access to each other's buffers.
    Shared(WindowAccess),
}

/// Returns the range of these elements, if there is such a rank and windows are that long.
pub(crate) fn range_in_window(
    (rank, world_size): (usize, usize),
    (start, elements): (usize, usize),
    len: usize,
) -> Result<Range<usize>> {
    if rank >= world_size {
        return Err(Error::RankOutOfRange { rank, world_size });
    }
    let end = start.checked_add(elements).filter(|&end| end <= len);
    Ok(start..end.ok_or(Error::OutsideWindow { start, elements, len })?)
}

/// Dereferences to this rank's own elements.
impl<T: Pod + Send + Sync> Deref for Window<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            ReadMemory::Shared(_, _, open) => open,
            ReadMemory::Served(service) => &service.memory().0,
        }
    }
}

impl<T> fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.memory {
            ReadMemory::Shared(call, ..) => write!(f, "Window({:?}, {call})", self.comm),
            ReadMemory::Served(service) => {
                write!(f, "Window({:?}, {}, served by threads)", self.comm, service.call)
            }
        }
    }
}
