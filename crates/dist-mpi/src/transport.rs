//! The transport that users get: an endpoint, perhaps with shared memory, and the membership of the job.

use std::fmt;
use std::sync::Arc;

use dist_transport::forwarding::ForwardingTransport;
use dist_transport::process::WithSharedMemory;
use dist_transport::store::{StoreReply, StoreRequest, StoreService};
use dist_transport::{Abort, Deadline, LazyDeadline, Result, Store, StoreError, Transport};

use crate::endpoint::Endpoint;
use crate::store;
use crate::world::World;

/// A transport whose messages an MPI library carries.
///
/// Dropping the last transport and the last store of the process waits until all processes have done so, and finalises
/// MPI. After an abort it waits at most 5 s; then it names the culprit on stderr and calls `MPI_Abort`.
pub struct MpiTransport {
    inner: Box<dyn Transport>,
    /// Dropped after the transport, and with the last of its forks.
    job: Arc<JobMembership>,
}

/// The membership of this process in the job, which ends when it is dropped.
struct JobMembership(Arc<World>);

impl MpiTransport {
    /// Creates the transport among all ranks.
    pub(crate) fn new(world: Arc<World>) -> Self {
        let inner = Box::new(Endpoint::of_world(world.clone()));
        Self { inner, job: Arc::new(JobMembership(world)) }
    }

    /// Creates the transport among all ranks. Those of one host share memory.
    pub(crate) fn with_shared_memory(world: Arc<World>, due: &LazyDeadline<'_>) -> Result<Self> {
        let job = Arc::new(JobMembership(world.clone()));
        let inner = WithSharedMemory::join(Endpoint::of_world(world), due)?;
        Ok(Self { inner: Box::new(inner), job })
    }
}

impl ForwardingTransport for MpiTransport {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let (fork, job) = ((*self.inner).fork(members)?, &self.job);
        Ok(fork.map(|inner| -> Box<dyn Transport> { Box::new(Self { inner, job: job.clone() }) }))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        let inner = (*self.inner).fork_local(members, number)?;
        Ok(Box::new(Self { inner, job: self.job.clone() }))
    }

    fn store(&self) -> Result<Store, StoreError> {
        Ok(Store::new(self.job.clone(), &self.job.0.runtime))
    }
}

/// The store at rank 0. It keeps this rank in the job.
impl StoreService for JobMembership {
    fn request(&self, request: StoreRequest, deadline: Deadline) -> Result<Option<StoreReply>, Abort> {
        store::request(&self.0, &request, deadline)
    }
}

impl fmt::Debug for MpiTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MpiTransport").field(&self.inner).finish()
    }
}

impl Drop for JobMembership {
    fn drop(&mut self) {
        self.0.leave_job();
    }
}
