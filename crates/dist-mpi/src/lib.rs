#![doc = include_str!("../README.md")]

#[cfg(test)]
mod conformance_tests;
mod endpoint;
mod library;
mod native;
#[cfg(test)]
mod process_tests;
mod records;
mod store;
mod transport;
mod wait;
mod wire;
mod world;

use std::io;
use std::time::Duration;

use dist_collectives::Communicator;
use dist_collectives::tuning::CostCache;
use dist_transport::{ErrorSource, LazyDeadline};

pub use transport::MpiTransport;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_transport::error_enum! {
/// An error of joining the job through MPI.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library allows too few threads.
    #[error(
        "the MPI library grants the thread level {level}, and this program needs {needed}: use a build of the library with threads"
    )]
    ThreadLevel {
        /// The level that the library grants.
        level: String,
        /// The level that the options need.
        needed: String,
    },
    /// A rank has other options than rank 0.
    #[error(
        "rank {rank} gives other options than rank 0: all ranks must call MpiOptions::with_native_collectives with the same number of bytes, or none"
    )]
    Options {
        /// The rank.
        rank: usize,
    },
    /// MPI was initialised in this process already.
    #[error(
        "MPI was initialised before in this process: call dist_mpi::init once, before any other use of MPI, and fork \
         its communicator"
    )]
    AlreadyInitialized,
    /// The thread that owns MPI could not be started.
    #[error("the thread that owns MPI cannot be started")]
    Thread(#[source] io::Error),
    /// The thread that owns MPI has ended before it was ready.
    #[error("MPI could not be initialised: its own output tells why")]
    Ended,
    /// A call of the library failed.
    #[error("the MPI library cannot be used")]
    Library(#[source] io::Error),
    /// The ranks of a host did not meet in shared memory.
    #[error("the ranks of a host cannot share memory; MpiOptions::without_shared_memory needs none")]
    SharedMemory(#[source] ErrorSource<dist_transport::Error>),
    /// Measuring the costs of messages failed.
    #[error("measuring the costs of messages failed")]
    Costs(#[source] ErrorSource<dist_collectives::Error>),
}
}

impl Error {
    /// Returns `true` if a deadline passed, on this rank or on another.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::SharedMemory(source) => source.is_timeout(),
            Self::Costs(source) => source.is_timeout(),
            _ => false,
        }
    }

    /// Returns the rank that the error is about, if it is about one.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::SharedMemory(source) => source.peer(),
            Self::Costs(source) => source.peer(),
            Self::Options { rank } => Some(*rank),
            _ => None,
        }
    }
}

/// Joins the job that `mpirun`, `mpiexec` or `srun` has started, with the default [`MpiOptions`].
///
/// # Errors
/// See [`MpiOptions::init`].
#[doc(alias = "MPI_Init")]
pub fn init() -> Result<Communicator> {
    MpiOptions::new().init()
}

/// Joins the job, and returns the transport among all ranks, with the default [`MpiOptions`].
///
/// # Errors
/// See [`MpiOptions::init_transport`].
pub fn init_transport() -> Result<MpiTransport> {
    MpiOptions::new().init_transport()
}

/// The options for joining a job through MPI. All ranks use the same options.
///
/// ```no_run
/// use std::time::Duration;
///
/// let comm = dist_mpi::MpiOptions::new().with_timeout(Duration::from_secs(600)).init()?;
/// # Ok::<_, dist_mpi::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MpiOptions {
    has_shared_memory: bool,
    native_from: Option<usize>,
    timeout: Duration,
}

impl Default for MpiOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MpiOptions {
    /// Returns the default: ranks of one host share memory, and a call may take 60 s.
    pub const fn new() -> Self {
        Self { has_shared_memory: true, native_from: None, timeout: Duration::from_secs(60) }
    }

    /// Lets all collectives use messages of MPI, also among ranks of one host.
    #[must_use]
    pub const fn without_shared_memory(mut self) -> Self {
        self.has_shared_memory = false;
        self
    }

    /// Gives collectives of at least this many bytes to the MPI library, if it has them. The bytes are those of the
    /// buffer, or of the parts of all ranks together. In an all_to_all of parts of different sizes they are the mean of all
    /// ranks.
    ///
    /// These are all_reduce, reduce and reduce_scatter in [any order](dist_collectives::ReductionOrder::Any), of numbers
    /// of 8, 32 and 64 bits with sums, products, means, minima or maxima. Complex numbers have sums, products and means.
    /// Broadcast, all_gather and all_to_all of any type are others. Parts may have different sizes. Calls with a forced
    /// algorithm, and ranks that share memory stay with this crate.
    ///
    /// The calls of all ranks are compared first, and deadlines hold. The library needs the thread level
    /// `MPI_THREAD_MULTIPLE`.
    ///
    /// The library decides what this crate promises otherwise:
    /// - The order of a reduction, which may be another in each run.
    /// - Whether all ranks get the same bits.
    /// - Whether a NaN anywhere gives a NaN in minima and maxima, and the sign of zeros in them.
    /// - The product of complex numbers if one of them is infinite or NaN.
    /// - The number of bytes on the network.
    #[must_use]
    pub const fn with_native_collectives(mut self, from_bytes: usize) -> Self {
        self.native_from = Some(from_bytes);
        self
    }

    /// Sets the timeout of joining and of each call of the communicator. MPI itself waits in its initialisation
    /// for all ranks without a limit.
    #[must_use]
    pub const fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Joins the job, and returns a communicator among all ranks. As with [`Communicator::from_env`], the
    /// costs of messages are measured once and stored.
    ///
    /// # Errors
    /// If the process has joined before, the library does not allow calls of several threads, or the ranks of a host
    /// cannot share memory.
    pub fn init(&self) -> Result<Communicator> {
        let mut comm = Communicator::new(self.init_transport()?);
        comm.set_timeout(self.timeout);
        if comm.world_size() > 1 {
            let medium = if self.has_shared_memory { "mpi-shm" } else { "mpi" };
            comm.tune(CostCache::for_user().as_ref(), medium)
                .map_err(|source| Error::Costs(source.into()))?;
        }
        Ok(comm)
    }

    /// Joins the job, and returns the transport among all ranks.
    ///
    /// # Errors
    /// As for [`init`](Self::init).
    pub fn init_transport(&self) -> Result<MpiTransport> {
        let world = library::start(self.native_from)?;
        if !self.has_shared_memory {
            return Ok(MpiTransport::new(world));
        }
        let due = LazyDeadline::from(world.runtime.deadline(self.timeout));
        MpiTransport::with_shared_memory(world.clone(), &due)
            .map_err(|source| Error::SharedMemory(source.into()))
    }
}
