//! The worker thread of a communication hook.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, ReductionOrder};
use dist_transport::Runtime;
use dist_transport::runtime::{Mailbox, Receiver, Task};

use crate::flat::Flat;
use crate::{BoxError, BucketGradients, BucketHook, BucketTensor, Error, Result, fsdp};

/// A worker thread that sums buckets over all ranks with a hook, one after the other.
pub(crate) struct HookWorker {
    /// The job queue. `None` once the thread must end.
    jobs: Option<Mailbox<Job>>,
    task: Option<Task<()>>,
    runtime: Runtime,
    /// The timeout and the reduction order of the hook's operations.
    timeout: Duration,
    order: ReductionOrder,
    /// The bytes that finished jobs have sent.
    bytes_sent: Arc<AtomicU64>,
}

enum Job {
    Sum(BucketJob),
    /// Drops the residuals of the hook, and replaces the tensors of its buckets if there are others.
    Forget(Option<Vec<Vec<BucketTensor>>>, Mailbox<Result<()>>),
}

struct BucketJob {
    bucket: usize,
    sum: Flat,
    timeout: Duration,
    order: ReductionOrder,
    reply: Mailbox<Result<Flat>>,
}

/// The handle of a bucket's reduction.
pub(crate) struct WorkHandle(Receiver<Result<Flat>>);

impl HookWorker {
    /// Starts the thread, with a fork of the communicator. `tensors` contains the tensors of each bucket.
    pub(crate) fn start(
        comm: &mut Communicator,
        mut hook: Box<dyn BucketHook>,
        mut tensors: Vec<Vec<BucketTensor>>,
    ) -> Result<Self> {
        let mut forked = comm.fork().map_err(Error::communication)?;
        let runtime = comm.runtime().clone();
        let bytes_sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&bytes_sent);
        let (jobs, mut queue) = runtime.mailbox::<Job>();
        let work = move || {
            while let Ok(job) = queue.receive(None) {
                let BucketJob { bucket, mut sum, timeout, order, reply } = match job {
                    Job::Sum(bucket) => bucket,
                    Job::Forget(others, reply) => {
                        tensors = others.unwrap_or(tensors);
                        reply.send(forgotten(&mut *hook));
                        continue;
                    }
                };
                forked.set_timeout(timeout);
                forked.set_order(order);
                let len = sum.len();
                let gradients =
                    BucketGradients { bucket, tensors: &tensors[bucket], values: sum.slice_mut(0, len) };
                let done = summed(&mut *hook, gradients, &mut forked);
                counter.store(fsdp::bytes_sent(&forked), Ordering::Relaxed);
                if let Err(error) = &done {
                    forked.abort(Chain(error));
                }
                reply.send(done.map(|()| sum));
            }
        };
        let task = runtime.spawn(&format!("dist-hook-{}", comm.rank()), work).map_err(Error::HookThread)?;
        let (timeout, order) = (comm.timeout(), comm.order());
        Ok(Self { jobs: Some(jobs), task: Some(task), runtime, timeout, order, bytes_sent })
    }

    /// Inherits the timeout and the reduction order of this communicator.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        (self.timeout, self.order) = (comm.timeout(), comm.order());
    }

    /// Passes a bucket to the hook.
    pub(crate) fn send(&self, bucket: usize, sum: Flat) -> WorkHandle {
        let (reply, delivery) = self.runtime.mailbox();
        self.ask(Job::Sum(BucketJob { bucket, sum, timeout: self.timeout, order: self.order, reply }));
        WorkHandle(delivery)
    }

    /// Drops the residuals of the hook, and waits for that.
    pub(crate) fn forget(&self) -> Result<()> {
        self.reset(None)
    }

    /// Replaces the tensors of each bucket, and drops the residuals of the hook.
    pub(crate) fn set_tensors(&self, tensors: Vec<Vec<BucketTensor>>) -> Result<()> {
        self.reset(Some(tensors))
    }

    fn reset(&self, tensors: Option<Vec<Vec<BucketTensor>>>) -> Result<()> {
        let (reply, mut forgotten) = self.runtime.mailbox();
        self.ask(Job::Forget(tensors, reply));
        forgotten.receive(None).expect(ANSWERED)
    }

    fn ask(&self, job: Job) {
        self.jobs.as_ref().expect("the queue is open until the hook worker is dropped").send(job);
    }

    /// Returns the bytes that the hook has sent so far.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }
}

impl WorkHandle {
    /// Waits for the sum over all ranks.
    pub(crate) fn wait(mut self) -> Result<Flat> {
        self.0.receive(None).expect(ANSWERED)
    }
}

impl Drop for HookWorker {
    /// Waits for running jobs, whose operations end by their deadline. During a panic it aborts the job and does not
    /// wait.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(task) = self.task.take().filter(|_| !std::thread::panicking()) {
            // A panic of a hook is caught, so the thread returns no result.
            let _ended = task.join();
        }
    }
}

impl fmt::Debug for HookWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HookWorker")
    }
}

impl fmt::Debug for WorkHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkHandle")
    }
}

/// Runs the hook and catches its panic.
fn summed(hook: &mut dyn BucketHook, gradients: BucketGradients<'_>, comm: &mut Communicator) -> Result<()> {
    let done = catch_unwind(AssertUnwindSafe(|| hook.sum(gradients, comm)));
    match done {
        Ok(Ok(())) => Ok(()),
        Ok(Err(source)) => Err(failed(source, || name(hook))),
        Err(_) => Err(Error::HookPanicked { hook: name(hook) }),
    }
}

/// Drops the hook's residuals and catches its panic.
fn forgotten(hook: &mut dyn BucketHook) -> Result<()> {
    catch_unwind(AssertUnwindSafe(|| hook.forget())).map_err(|_| Error::HookPanicked { hook: name(hook) })
}

fn name(hook: &dyn BucketHook) -> String {
    catch_unwind(AssertUnwindSafe(|| hook.name())).unwrap_or_default()
}

/// Converts the error of a hook. Errors of this crate or of communication that it passes on stay themselves.
fn failed(source: BoxError, hook: impl FnOnce() -> String) -> Error {
    match Error::passed_on(source) {
        Ok(error) => error,
        Err(source) => match source.downcast() {
            Ok(error) => Error::communication(*error),
            Err(source) => Error::Hook { hook: hook(), source },
        },
    }
}

const ANSWERED: &str = "the worker answers every job before it ends";
