//! Memory that all ranks of a group may change in each other's processes.

use std::fmt;
use std::sync::Mutex;

use bytemuck::Pod;
use dist_transport::shm_group::{WordSize, WordUpdate};

use crate::call::WindowStep;
use crate::engine::{UpdatedBuffer, WindowAccess, copy};
use crate::window::{EpochAfter, EpochEnd, range_in_window};
use crate::window_service::{ServedUpdates, WindowRequest, WindowService};
use crate::{Buffer, Call, Communicator, Element, Error, Failed, Result, Window};

/// A buffer of every rank that all ranks of a group can change directly: an epoch of updates of a [`Window`]. The rank
/// that owns the memory does nothing for an update, and can compute at the same time.
///
/// In this epoch no rank reads the buffers, except through the results of [`fetch_add`](Self::fetch_add) and
/// [`compare_and_swap`](Self::compare_and_swap). A [fence](Self::fence) waits until all ranks have finished their
/// updates. Then the ranks can read the buffers, and cannot change them.
///
/// If all ranks share a host and have [allocated](Communicator::alloc) their buffers, an update is a store or an atomic
/// instruction of the rank that makes it. Otherwise, as between hosts, each update is a message that a thread of the
/// owner serves:
///
/// - An atomic operation takes a round trip and a wake-up of that thread.
/// - A `put` waits for no reply. Its elements are copied three times.
/// - A fence, and the end of the window, exchange a request and a reply with every rank, and messages of a barrier.
/// - The window costs a thread of each rank, and the first request to a rank connects to it. Later windows of the
///   communicator use the same connections.
///
/// Every wait ends at the [timeout](Communicator::set_timeout) of the communicator, and the error names the rank that
/// does not answer, or that has not ended the epoch.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_transport::sim;
///
/// let outcome = sim::Network::new(3).with_shared_memory().run(|transport| {
///     let mut comm = Communicator::new(transport);
///     // A histogram of 8 bins, which rank 0 holds, and a table of one entry per rank, which every rank holds.
///     let buffer = comm.alloc::<u64>(8 + comm.world_size()).unwrap();
///     let mut updates = comm.open_updates(buffer).unwrap();
///     for value in 0..100 {
///         updates.fetch_add(0, value % 8, 1).unwrap();
///     }
///     for rank in 0..updates.world_size() {
///         updates.put(rank, 8 + updates.rank(), &[10 * updates.rank() as u64]).unwrap();
///     }
///     let window = updates.fence().unwrap();
///     assert_eq!(window.view(0).unwrap()[..2], [39, 39]);
///     let table = window[8..].to_vec();
///     window.close().unwrap();
///     table
/// });
/// assert_eq!(outcome.results, [[0, 10, 20]; 3]);
/// ```
///
/// A reading epoch has no `put`:
///
/// ```compile_fail,E0599
/// # use dist_collectives::Window;
/// fn write_while_others_read(mut window: Window<u32>) {
///     window.put(0, 0, &[1]).unwrap();
/// }
/// ```
#[doc(alias = "MPI_Win_create")]
#[must_use = "other ranks wait until it is closed"]
pub struct UpdateWindow<T> {
    comm: Communicator,
    /// The number of elements of each rank.
    len: usize,
    memory: UpdatedMemory<T>,
}

/// The memory of an epoch of updates.
enum UpdatedMemory<T> {
    /// The buffer of the only rank.
    Alone(Buffer<T>),
    /// Buffers that all ranks map, in this call.
    Shared(Call, UpdatedBuffer<T>),
    /// Buffers that a thread of each rank serves.
    Served(WindowService<ServedUpdates<T>>),
}

/// An integer that ranks change by atomic operations: `u32`, `u64`, `i32` or `i64`.
pub trait AtomicInteger: Element + sealed::Sealed {
    /// Returns the bits, zero-extended.
    #[doc(hidden)]
    fn to_word(self) -> u64;

    /// Returns the integer with these low bits.
    #[doc(hidden)]
    fn from_word(word: u64) -> Self;
}

mod sealed {
    #[allow(unnameable_types, reason = "the trait is sealed because this type cannot be named")]
    pub trait Sealed {}
}

macro_rules! atomic_integers {
    ($($integer:ty => $unsigned:ty;)*) => {$(
        impl sealed::Sealed for $integer {}

        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_lossless,
            trivial_numeric_casts,
            reason = "bits are kept"
        )]
        impl AtomicInteger for $integer {
            fn to_word(self) -> u64 {
                (self as $unsigned) as u64
            }

            fn from_word(word: u64) -> Self {
                (word as $unsigned) as Self
            }
        }
    )*};
}

atomic_integers! {
    u32 => u32;
    u64 => u64;
    i32 => u32;
    i64 => u64;
}

impl Communicator {
    /// Opens a window for updates on all ranks: every rank can change the buffers of the others, which have the same
    /// length, until the next [fence](UpdateWindow::fence). Every rank calls this.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce). The buffer may then be empty, because other ranks may still write into its
    /// memory. The communicator is lost.
    #[doc(alias = "MPI_Win_create")]
    #[doc(alias = "MPI_Win_fence")]
    pub fn open_updates<T: Pod + Send + Sync>(
        self,
        buffer: Buffer<T>,
    ) -> Result<UpdateWindow<T>, Failed<Buffer<T>>> {
        UpdateWindow::open(self, buffer, None)
    }
}

impl<T: Pod + Send + Sync> UpdateWindow<T> {
    /// Opens a window for updates. `least` is an access to the buffers that an earlier epoch found.
    pub(crate) fn open(
        mut comm: Communicator,
        mut buffer: Buffer<T>,
        least: Option<WindowAccess>,
    ) -> Result<Self, Failed<Buffer<T>>> {
        let len = buffer.len();
        if comm.world_size() == 1 {
            return Ok(Self { comm, len, memory: UpdatedMemory::Alone(buffer) });
        }
        // Ranks that can read each other's memory may not be able to write it.
        let known = least.filter(|&least| least == WindowAccess::Mapped);
        let (epoch, memory) = ((len, WindowStep::OpenUpdates), (buffer.ownership(), known));
        match comm.call(|engine, options| engine.begin_epoch::<T>(epoch, memory, options)) {
            Ok((call, WindowAccess::Mapped)) => {
                match comm.call(|engine, options| engine.open_updates(&call, &mut buffer, options)) {
                    Ok(open) => Ok(Self { comm, len, memory: UpdatedMemory::Shared(call, open) }),
                    Err(error) => Err(Failed::new(buffer, error)),
                }
            }
            Ok((call, WindowAccess::Nothing | WindowAccess::Read)) => Self::serve(comm, buffer, call),
            Err(error) => Err(Failed::new(buffer, error)),
        }
    }

    /// Begins an epoch of updates, which a thread of each rank executes in its memory. `call` is the call of all ranks that
    /// opened the epoch.
    pub(crate) fn serve(
        mut comm: Communicator,
        buffer: Buffer<T>,
        call: Call,
    ) -> Result<Self, Failed<Buffer<T>>> {
        let len = buffer.len();
        match WindowService::start(call, ServedUpdates(Mutex::new(buffer)), &mut comm) {
            Ok(service) => Ok(Self { comm, len, memory: UpdatedMemory::Served(service) }),
            Err((memory, error)) => Err(Failed::new(memory.into_buffer(), error)),
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

    /// Returns the number of elements of each rank.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the ranks have no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies elements into a rank's buffer, from element `start` on. Other ranks see them after the next fence. If
    /// several ranks write one element, it is one of their values, or a mixture of the halves of their values if the element
    /// has more than 8 bytes, as `Complex<f64>` does.
    ///
    /// # Errors
    /// If there is no such rank, if its buffer is too short, or if it has died or dropped its window.
    #[doc(alias = "MPI_Put")]
    #[doc(alias = "MPI_Rput")]
    pub fn put(&mut self, rank: usize, start: usize, elements: &[T]) -> Result<()> {
        let range = range_in_window((rank, self.world_size()), (start, elements.len()), self.len)?;
        match &mut self.memory {
            UpdatedMemory::Alone(buffer) => copy(elements, &mut buffer[range]),
            UpdatedMemory::Shared(call, open) => self
                .comm
                .call(|engine, options| engine.put((call, open), (rank, start), elements, &options.due))?,
            UpdatedMemory::Served(service) => {
                let request = WindowRequest::Put { start: (start * size_of::<T>()) as u64 };
                service.request(rank, request, bytemuck::cast_slice(elements), &self.comm)?;
            }
        }
        Ok(())
    }

    /// Waits until all ranks have finished their updates. Then all ranks can read the buffers, and cannot change them. Every
    /// rank calls this.
    ///
    /// # Errors
    /// As for [`close`](Self::close).
    #[doc(alias = "MPI_Win_fence")]
    pub fn fence(self) -> Result<Window<T>, Failed<Buffer<T>>> {
        match self.end(WindowStep::Fence)? {
            (comm, buffer, EpochAfter::Served(call)) => Window::serve(comm, buffer, call),
            (comm, buffer, EpochAfter::Shared(access)) => Window::open(comm, buffer, Some(access)),
        }
    }

    /// Waits until all ranks have finished their updates, and returns the communicator and the buffer.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`]. The buffer is then empty, because other ranks may still write into its
    /// memory, and the communicator is lost.
    #[doc(alias = "MPI_Win_free")]
    pub fn close(self) -> Result<(Communicator, Buffer<T>), Failed<Buffer<T>>> {
        self.end(WindowStep::Close).map(|(comm, buffer, _)| (comm, buffer))
    }

    /// Waits until all ranks have ended the epoch.
    fn end(self, step: WindowStep) -> EpochEnd<T> {
        let Self { mut comm, len, memory } = self;
        let lost = |error| Failed::new(Buffer::from(Vec::new()), error);
        match memory {
            UpdatedMemory::Alone(buffer) => Ok((comm, buffer, EpochAfter::Shared(WindowAccess::Mapped))),
            UpdatedMemory::Shared(call, open) => {
                let closed = comm.call(|engine, options| engine.close_updates((&call, open), &options.due));
                Ok((comm, closed.map_err(lost)?, EpochAfter::Shared(WindowAccess::Mapped)))
            }
            UpdatedMemory::Served(service) => {
                let (call, memory) = service.end::<T>((len, step), &mut comm).map_err(lost)?;
                Ok((comm, memory.into_buffer(), EpochAfter::Served(call)))
            }
        }
    }
}

impl<T: AtomicInteger> UpdateWindow<T> {
    /// Adds to an element of a rank's buffer, and returns its value from before. No addition is lost, and each rank sees
    /// the additions to one element in the same order. The sum wraps around.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// // Dynamic scheduling: each rank takes the next index of a loop when it is ready for it.
    /// let outcome = sim::Network::new(2).with_shared_memory().run(|transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let buffer = comm.alloc::<u64>(1).unwrap();
    ///     let mut counter = comm.open_updates(buffer).unwrap();
    ///     let mut taken = Vec::new();
    ///     loop {
    ///         let index = counter.fetch_add(0, 0, 1).unwrap();
    ///         if index >= 10 {
    ///             break;
    ///         }
    ///         taken.push(index);
    ///     }
    ///     counter.close().unwrap();
    ///     taken
    /// });
    /// let mut all = outcome.results.concat();
    /// all.sort_unstable();
    /// assert_eq!(all, (0..10).collect::<Vec<u64>>());
    /// ```
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    #[doc(alias = "MPI_Fetch_and_op")]
    #[doc(alias = "MPI_Accumulate")]
    pub fn fetch_add(&mut self, rank: usize, element: usize, amount: T) -> Result<T> {
        self.update(rank, element, WordUpdate::Add(amount.to_word()))
    }

    /// Replaces an element of a rank's buffer by `new` if it is `expected`. Returns its value from before, which is
    /// `expected` if it was replaced.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    #[doc(alias = "MPI_Compare_and_swap")]
    pub fn compare_and_swap(&mut self, rank: usize, element: usize, expected: T, new: T) -> Result<T> {
        let (expected, new) = (expected.to_word(), new.to_word());
        self.update(rank, element, WordUpdate::CompareAndSwap { expected, new })
    }

    fn update(&mut self, rank: usize, element: usize, update: WordUpdate) -> Result<T> {
        range_in_window((rank, self.world_size()), (element, 1), self.len)?;
        let before = match &mut self.memory {
            UpdatedMemory::Alone(buffer) => {
                let before = buffer[element].to_word();
                buffer[element] = T::from_word(update.apply(before, WordSize::of_element(size_of::<T>())));
                before
            }
            UpdatedMemory::Shared(call, open) => self
                .comm
                .call(|engine, options| engine.update((call, open), (rank, element), update, &options.due))?,
            UpdatedMemory::Served(service) => {
                let request = WindowRequest::Update { start: (element * size_of::<T>()) as u64, update };
                let reply = service.request(rank, request, &[], &self.comm)?;
                reply.try_into().map(u64::from_le_bytes).map_err(|_| Error::Request { from: rank })?
            }
        };
        Ok(T::from_word(before))
    }
}

impl<T> fmt::Debug for UpdateWindow<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UpdateWindow({:?}, {} elements)", self.comm, self.len)
    }
}
