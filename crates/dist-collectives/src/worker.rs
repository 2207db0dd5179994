//! The thread that executes started operations that no thread waits for.

use std::fmt;

use dist_transport::runtime::Task;
use dist_transport::{Runtime, Transport};

use crate::{Error, Result};

/// A thread, and the queue of its operations.
pub(crate) struct Worker<Q: WorkerQueue> {
    pub(crate) queue: Q,
    task: Option<Task<()>>,
}

/// The operations of a worker. Clones are the same queue.
pub(crate) trait WorkerQueue: Clone + Send + 'static {
    /// Executes operations on the worker's thread until the queue is closed.
    fn work(&self);

    /// Tells the worker to end when no operation is left.
    fn close(&self);
}

/// About 50 µs; a wake-up takes 30 µs.
const SPINS: u32 = 2000;

/// Returns [`SPINS`] if the host has two cores for every rank of the group on it: one for the calling thread and
/// one for the worker. Otherwise returns 0, because a polling thread would keep the other one from running.
pub(crate) fn spins(hosts: &[u64], transport: &dyn Transport) -> u32 {
    let here = hosts[transport.rank().index()];
    let ranks = hosts.iter().filter(|&&host| host == here).count();
    if 2 * ranks <= transport.cores() { SPINS } else { 0 }
}

impl<Q: WorkerQueue> Worker<Q> {
    /// Starts the thread of this name for this queue.
    pub(crate) fn new(queue: Q, name: &str, runtime: &Runtime) -> Result<Self> {
        let work = queue.clone();
        let spawned = runtime.spawn(name, move || work.work());
        let task = spawned.map_err(Error::Worker)?;
        tracing::debug!(name, "started the thread for operations that do not block");
        Ok(Self { queue, task: Some(task) })
    }
}

impl<Q: WorkerQueue> Drop for Worker<Q> {
    /// Waits for the operations that are still queued; each ends by its deadline. During a panic the transports have
    /// aborted the job, and there is no wait.
    fn drop(&mut self) {
        self.queue.close();
        if let Some(task) = self.task.take().filter(|_| !std::thread::panicking()) {
            // Operations catch their panics, so the thread has none to report.
            let _ended = task.join();
        }
    }
}

impl<Q: WorkerQueue> fmt::Debug for Worker<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Worker")
    }
}
