//! The thread that does the operations that do not block, one after the other.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dist_transport::runtime::{Deadline, Mailbox, Task};
use dist_transport::{Cause, ChannelId, Runtime, Traffic, Transport};

use crate::engine::Engine;
use crate::history::History;
use crate::pending::{Failed, Pending, RunningOperation};
use crate::{Error, Result};

/// A thread with a transport of its own, and the queue of what it is to do.
pub(crate) struct Worker {
    /// Taken when the worker is told to end.
    queue_sender: Option<Mailbox<QueuedOperation>>,
    task: Option<Task<()>>,
    /// Of this rank alone: what handles abort the job by. It leaves with the worker, however long they live.
    alone: Arc<Mutex<Box<dyn Transport>>>,
    runtime: Runtime,
    /// How often each of the two threads looks for what the other has for it before it sleeps.
    spins: u32,
    started: u64,
    /// The last deadline of what was started since all had ended.
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

/// Some 50 µs: a wake-up takes 30.
const SPINS: u32 = 2000;

/// [`SPINS`], if every rank of the group on this host has a core for the thread that calls and one for the worker. Otherwise
/// none: who looks would keep the other from running.
fn spins(transport: &dyn Transport) -> u32 {
    let hosts = transport.hosts();
    let here = hosts[transport.rank().index()];
    let ranks = hosts.iter().filter(|&&host| host == here).count();
    if 2 * ranks <= transport.cores() { SPINS } else { 0 }
}

impl Worker {
    /// Starts the thread, for the communicator with this channel. When there is none to be had, the transport comes back.
    pub(crate) fn new(
        mut transport: Box<dyn Transport>,
        channel: ChannelId,
    ) -> Result<Self, (Box<dyn Transport>, Error)> {
        let runtime = transport.runtime().clone();
        let rank = transport.rank().index();
        let alone = match transport.fork(&[rank]) {
            Ok(alone) => alone.expect("a rank is a member of the group of itself"),
            Err(source) => return Err((transport, Error::Members(source.into()))),
        };
        let (queue_sender, mut queue) = runtime.mailbox::<QueuedOperation>();
        let spins = spins(&*transport);
        // The transport goes to the thread once there is one.
        let (hand_over, mut handed_over) = runtime.mailbox();
        let work = move || {
            let Ok(transport) = handed_over.receive(None) else { return };
            let mut engine = Engine::new(transport, channel, History::of_worker());
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

    /// Puts an operation into the queue, with the memory that it works on and its deadline. If it fails, the memory goes back
    /// as the operation has left it.
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
            *completed = Completed { count: completed.count + 1, traffic: engine.transport.traffic() };
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

    /// The turn of what is started now, if it may have to wait for it beyond its deadline: where none of those before it has a
    /// later one, they end in time.
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

    /// Lets how operations are done be thought of anew in those that are started from now on.
    pub(crate) fn invalidate_plans(&self) {
        self.send(Box::new(Engine::invalidate_plans));
    }

    fn send(&self, queued: QueuedOperation) {
        self.queue_sender.as_ref().expect("the queue is open until the worker is dropped").send(queued);
    }

    /// What the operations that have ended have moved.
    pub(crate) fn traffic(&self) -> Traffic {
        self.completed().traffic
    }

    fn completed(&self) -> Completed {
        *self.completed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Worker {
    /// Waits for what was started; every operation ends by its deadline. In a panic the transports have aborted
    /// the job, and nobody waits.
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

/// What aborts the job for those who have no transport, as long as the worker has one.
#[derive(Debug)]
pub(crate) struct AbortHandle(Weak<Mutex<Box<dyn Transport>>>);

impl AbortHandle {
    pub(crate) fn abort(&self, cause: Cause) {
        if let Some(transport) = self.0.upgrade() {
            transport.lock().unwrap_or_else(PoisonError::into_inner).abort(cause);
        }
    }
}

/// The turn of an operation in the queue, which either the worker takes that comes to it, or the handle when the deadline has
/// passed before.
#[derive(Clone, Debug)]
pub(crate) struct StartClaim {
    pub(crate) deadline: Deadline,
    taken: Arc<AtomicBool>,
}

impl StartClaim {
    /// Whether it was there to be taken.
    pub(crate) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// What an operation tells that the handle has taken it from.
    pub(crate) fn missed(&self) -> Error {
        Error::NotStarted { limit: self.deadline.limit() }
    }
}
