//! The thread that executes the operations that do not block, one after the other.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dist_algos::AlgorithmTable;
use dist_transport::runtime::{Deadline, Mailbox, Task};
use dist_transport::{Cause, ChannelId, Runtime, Traffic, Transport};

use crate::engine::Engine;
use crate::history::History;
use crate::pending::{Failed, Pending, RunningOperation};
use crate::{Error, Result};

/// A thread with its own transport, and the queue of its operations.
pub(crate) struct Worker {
    /// The sending end of the queue. Taking and dropping it ends the worker.
    queue_sender: Option<Mailbox<QueuedOperation>>,
    task: Option<Task<()>>,
    /// A transport of this rank alone, through which handles abort the job. It is dropped with the worker, even if
    /// handles live longer.
    alone: Arc<Mutex<Box<dyn Transport>>>,
    runtime: Runtime,
    /// The number of polls of each of the two threads before it sleeps.
    spins: u32,
    started: u64,
    /// The latest deadline of the operations that were started since all had ended.
    latest_deadline: Option<Deadline>,
    completed: Arc<Mutex<Completed>>,
}

/// The operations that have ended.
#[derive(Clone, Copy, Debug, Default)]
struct Completed {
    count: u64,
    traffic: Traffic,
}

type QueuedOperation = Box<dyn FnOnce(&mut Engine) + Send>;

/// About 50 µs; a wake-up takes 30 µs.
const SPINS: u32 = 2000;

/// Returns [`SPINS`] if the host has two cores for every rank of the group on it: one for the calling thread and
/// one for the worker. Otherwise returns 0, because a polling thread would keep the other one from running.
fn spins(transport: &dyn Transport) -> u32 {
    let hosts = transport.hosts();
    let here = hosts[transport.rank().index()];
    let ranks = hosts.iter().filter(|&&host| host == here).count();
    if 2 * ranks <= transport.cores() { SPINS } else { 0 }
}

impl Worker {
    /// Starts the thread for the communicator with this channel and this table of algorithms. If that fails, the
    /// transport is returned.
    pub(crate) fn new(
        mut transport: Box<dyn Transport>,
        channel: ChannelId,
        algorithms: AlgorithmTable<'static>,
    ) -> Result<Self, (Box<dyn Transport>, Error)> {
        let runtime = transport.runtime().clone();
        let rank = transport.rank().index();
        let alone = match transport.fork(&[rank]) {
            Ok(alone) => alone.expect("a rank is a member of the group of itself"),
            Err(source) => return Err((transport, Error::Members(source.into()))),
        };
        let (queue_sender, mut queue) = runtime.mailbox::<QueuedOperation>();
        let spins = spins(&*transport);
        // The transport is passed to the thread after the thread was started.
        let (hand_over, mut handed_over) = runtime.mailbox();
        let work = move || {
            let Ok(transport) = handed_over.receive(None) else { return };
            let mut engine = Engine::new(transport, channel, History::of_worker(), algorithms);
            while let Ok(queued) = queue.receive_after_looks(spins, None) {
                queued(&mut engine);
            }
        };
        let name = format!("dist-worker-{rank}");
        let task = match runtime.spawn(&name, work) {
            Ok(task) => task,
            Err(error) => return Err((transport, Error::Worker(error))),
        };
        hand_over.send(transport);
        tracing::debug!(rank, "started the thread for operations that do not block");
        let alone = Arc::new(Mutex::new(alone));
        let (queue_sender, task, completed) = (Some(queue_sender), Some(task), Arc::default());
        Ok(Self { queue_sender, task, alone, runtime, spins, started: 0, latest_deadline: None, completed })
    }

    /// Adds an operation to the queue, with its memory and its deadline. If the operation fails, the memory is
    /// returned as the operation left it.
    pub(crate) fn start<B: Send + 'static>(
        &mut self,
        mut buffer: B,
        deadline: Deadline,
        operation: impl FnOnce(&mut Engine, &mut B) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        let (reply, result) = self.runtime.mailbox();
        let completed = Arc::clone(&self.completed);
        let claim = self.claim(deadline);
        let own = claim.clone();
        let queued = move |engine: &mut Engine| {
            let work = || match own {
                Some(claim) if !claim.take() => Err(claim.missed()),
                _ => operation(engine, &mut buffer),
            };
            let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                engine.transport.abort(Cause::Panicked);
                Err(Error::Panicked)
            });
            let mut completed = completed.lock().unwrap_or_else(PoisonError::into_inner);
            *completed = Completed { count: completed.count + 1, traffic: engine.traffic() };
            drop(completed);
            reply.send(match done {
                Ok(()) => Ok(buffer),
                Err(error) => Err(Failed::new(buffer, error)),
            });
        };
        self.send(Box::new(queued));
        let (runtime, abort_handle) = (self.runtime.clone(), AbortHandle(Arc::downgrade(&self.alone)));
        Pending::running(RunningOperation { result, spins: self.spins, runtime, abort_handle, claim })
    }

    /// Returns a claim for an operation that is started now, if it might not begin before its deadline. No claim is
    /// needed if no earlier operation has a later deadline, because all of them end in time.
    fn claim(&mut self, deadline: Deadline) -> Option<StartClaim> {
        let all_have_ended = self.completed().count == self.started;
        self.started += 1;
        let before = self.latest_deadline.filter(|_| !all_have_ended);
        if before.is_some_and(|before| before.earlier(deadline) != before) {
            return Some(StartClaim { deadline, taken: Arc::default() });
        }
        self.latest_deadline = Some(deadline);
        None
    }

    /// Removes the cached plans for operations that are started from now on.
    pub(crate) fn invalidate_plans(&self) {
        self.send(Box::new(Engine::invalidate_plans));
    }

    fn send(&self, queued: QueuedOperation) {
        self.queue_sender.as_ref().expect("the queue is open until the worker is dropped").send(queued);
    }

    /// Returns the traffic of the operations that have ended.
    pub(crate) fn traffic(&self) -> Traffic {
        self.completed().traffic
    }

    fn completed(&self) -> Completed {
        *self.completed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Worker {
    /// Waits for the started operations; each ends by its deadline. During a panic the transports have aborted the
    /// job, and there is no wait.
    fn drop(&mut self) {
        drop(self.queue_sender.take());
        if let Some(task) = self.task.take().filter(|_| !std::thread::panicking()) {
            // Operations catch their panics, so the thread has none to report.
            let _ended = task.join();
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Worker")
    }
}

/// A handle that aborts the job without a transport, as long as the worker lives.
#[derive(Debug)]
pub(crate) struct AbortHandle(Weak<Mutex<Box<dyn Transport>>>);

impl AbortHandle {
    pub(crate) fn abort(&self, cause: Cause) {
        if let Some(transport) = self.0.upgrade() {
            transport.lock().unwrap_or_else(PoisonError::into_inner).abort(cause);
        }
    }
}

/// The right to begin or to end a queued operation. Either the worker takes it when it reaches the operation, or
/// the handle takes it after the deadline.
#[derive(Clone, Debug)]
pub(crate) struct StartClaim {
    pub(crate) deadline: Deadline,
    taken: Arc<AtomicBool>,
}

impl StartClaim {
    /// Takes the claim. Returns `false` if it was already taken.
    pub(crate) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Returns the error of an operation whose handle has taken the claim.
    pub(crate) fn missed(&self) -> Error {
        Error::NotStarted { limit: self.deadline.limit() }
    }
}
