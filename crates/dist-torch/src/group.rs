//! [`Group`]: what a process group of Python calls.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use dist_collectives::tuning::CostCache;
use dist_collectives::{Communicator, Config, DType, ReduceOp};
use dist_transport::Runtime;
use dist_transport::process::{Coordinator, Medium, Secret};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::call::{Action, Call};
use crate::error::Failure;
use crate::interrupt::abort_at_interrupt;
use crate::memory::TensorMemory;
use crate::messages::{MessageStreams, Parent};
use crate::owned_by_process::OwnedByProcess;
use crate::stream::{Operation, Stream, lock};

/// The coordinator of a group, in the process of its rank 0.
#[pyclass(frozen)]
pub(crate) struct Host(Mutex<OwnedByProcess<Coordinator>>);

#[pymethods]
impl Host {
    /// Starts the coordinator of a group at a host of this machine, at a free port.
    #[new]
    fn start(py: Python<'_>, host: &str, world_size: usize, job: &str, secret: &str) -> PyResult<Self> {
        let address = format!("{host}:0");
        let secret = parse_secret(secret).map_err(|failure| failure.raise(py))?;
        let started = py.detach(|| Coordinator::start(&address, world_size, job, secret));
        let coordinator = started.map_err(|error| Failure::from(error).raise(py))?;
        Ok(Self(Mutex::new(OwnedByProcess::new(coordinator))))
    }

    /// The port at which the ranks join.
    #[getter]
    fn port(&self) -> Option<u16> {
        lock(&self.0).get().map(|coordinator| coordinator.address().port())
    }

    /// Serves until every rank has left, and at most one second after an abort.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(coordinator) = lock(&self.0).take() else { return Ok(()) };
        let runtime = Runtime::system();
        let mut late = None;
        while coordinator.present() > 0 {
            py.detach(|| runtime.sleep(POLL));
            py.check_signals()?;
            if coordinator.aborted().is_some() {
                let limit = *late.get_or_insert_with(|| runtime.deadline(LATE_RANKS_LIMIT));
                if runtime.expired(limit) {
                    break;
                }
            }
        }
        py.detach(|| drop(coordinator));
        Ok(())
    }
}

/// One rank's end of a process group.
#[pyclass(frozen)]
pub(crate) struct Group {
    collectives: Arc<Stream>,
    messages: MessageStreams,
    parent: Arc<Parent>,
    process: u32,
}

/// A call that is in the queue, is being made, or is done.
#[pyclass(frozen)]
pub(crate) struct PendingCall {
    operation: Arc<Operation>,
    stream: Arc<Stream>,
    /// The sender of a message from any source, once the call is done.
    sender: Option<Arc<OnceLock<usize>>>,
    process: u32,
}

/// What every call has: its timeout in milliseconds, whether the program goes on before it is done, and a function
/// that copies results out, or `None`.
#[derive(FromPyObject)]
struct CallOptions(u64, bool, Option<Py<PyAny>>);

#[pymethods]
impl Group {
    /// Joins the group of these ranks at the address of its coordinator.
    #[new]
    fn join(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        address: &str,
        job: &str,
        secret: &str,
        timeout_ms: u64,
    ) -> PyResult<Self> {
        py.detach(|| join(rank, world_size, address, job, secret, Duration::from_millis(timeout_ms)))
            .map_err(|failure| failure.raise(py))
    }

    fn all_reduce(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffers: Vec<TensorMemory>,
        op: (&str, f64),
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let action = Action::AllReduce { buffers, op: parse_op(op)? };
        self.start(py, dtype, action, options)
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffer: TensorMemory,
        root: usize,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, dtype, Action::Broadcast { buffer, root }, options)
    }

    fn reduce(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffer: TensorMemory,
        op: (&str, f64),
        root: usize,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let action = Action::Reduce { buffer, op: parse_op(op)?, root };
        self.start(py, dtype, action, options)
    }

    fn all_gather(
        &self,
        py: Python<'_>,
        dtype: &str,
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<Vec<usize>>,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, dtype, Action::AllGather { input, output, counts }, options)
    }

    #[expect(clippy::too_many_arguments, reason = "they are those of the call")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        dtype: &str,
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<Vec<usize>>,
        op: (&str, f64),
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let action = Action::ReduceScatter { input, output, counts, op: parse_op(op)? };
        self.start(py, dtype, action, options)
    }

    fn all_to_all(
        &self,
        py: Python<'_>,
        dtype: &str,
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<[Vec<usize>; 2]>,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, dtype, Action::AllToAll { input, output, counts }, options)
    }

    fn gather(
        &self,
        py: Python<'_>,
        dtype: &str,
        input: TensorMemory,
        output: TensorMemory,
        root: usize,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, dtype, Action::Gather { input, output, root }, options)
    }

    fn scatter(
        &self,
        py: Python<'_>,
        dtype: &str,
        input: TensorMemory,
        output: TensorMemory,
        root: usize,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, dtype, Action::Scatter { input, output, root }, options)
    }

    fn barrier(&self, py: Python<'_>, options: CallOptions) -> PyResult<Option<PendingCall>> {
        self.start(py, DType::U8.name(), Action::Barrier, options)
    }

    fn monitored_barrier(
        &self,
        py: Python<'_>,
        names_all: bool,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start(py, DType::U8.name(), Action::MonitoredBarrier { names_all }, options)
    }

    fn send(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffer: TensorMemory,
        to: usize,
        tag: i64,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let action = Action::Send { buffer, tag: parse_tag(tag)? };
        self.start_on(py, self.messages.sends_to(to), dtype, action, options)
    }

    fn receive(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffer: TensorMemory,
        from: usize,
        tag: i64,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let action = Action::Receive { buffer, tag: parse_tag(tag)? };
        self.start_on(py, self.messages.receives_from(from), dtype, action, options)
    }

    /// Receives from the first rank that sends. The call that is returned has the number of the sender.
    fn receive_any(
        &self,
        py: Python<'_>,
        dtype: &str,
        buffer: TensorMemory,
        tag: i64,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        let tag = parse_tag(tag)?;
        check_process(self.process).map_err(|failure| failure.raise(py))?;
        let (stream, sources) = self.messages.receives_from_any().map_err(|failure| failure.raise(py))?;
        let sender = sources.sender();
        let options = CallOptions(options.0, true, options.2);
        let action = Action::ReceiveAny { buffer, tag, sources };
        let pending = self.start_on(py, Ok(stream), dtype, action, options)?;
        Ok(pending.map(|pending| PendingCall { sender: Some(sender), ..pending }))
    }

    /// Ends the job for every rank. Their errors contain the reason.
    fn abort(&self, py: Python<'_>, why: &str) {
        py.detach(|| {
            if let Some(communicator) = lock(&self.parent).get() {
                communicator.abort(why);
            }
        });
    }

    /// Leaves the group.
    fn close(&self, py: Python<'_>) {
        if self.process != std::process::id() {
            return;
        }
        py.detach(|| {
            self.messages.close();
            self.collectives.close();
            drop(lock(&self.parent).take());
        });
    }
}

impl Group {
    fn start(
        &self,
        py: Python<'_>,
        dtype: &str,
        action: Action,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        self.start_on(py, Ok(Arc::clone(&self.collectives)), dtype, action, options)
    }

    /// Appends a call to a stream. If the program waits for it, returns `None` once it is done.
    fn start_on(
        &self,
        py: Python<'_>,
        stream: Result<Arc<Stream>, Failure>,
        dtype: &str,
        action: Action,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        check_process(self.process).map_err(|failure| failure.raise(py))?;
        let stream = stream.map_err(|failure| failure.raise(py))?;
        let Some(dtype) = DType::parse(dtype) else {
            return Err(PyValueError::new_err(format!("{dtype} is no type of elements")));
        };
        let mut call = Call { dtype, action };
        call.check().map_err(|failure| failure.raise(py))?;
        let CallOptions(timeout, is_async, copy_out) = options;
        if is_async {
            call.hold_storages(py)?;
        }
        let operation = stream.push(call, Duration::from_millis(timeout), copy_out);
        let pending = PendingCall { operation, stream, sender: None, process: self.process };
        if is_async {
            pending.stream.wake().map_err(|failure| failure.raise(py))?;
            return Ok(Some(pending));
        }
        pending.wait(py, None)?;
        Ok(None)
    }
}

#[pymethods]
impl PendingCall {
    /// Waits until the call is done, or at most this many milliseconds, and raises its error.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<()> {
        check_process(self.process).map_err(|failure| failure.raise(py))?;
        let Self { operation, stream, .. } = self;
        match timeout_ms {
            None => {
                while !py.detach(|| stream.advance(operation, SIGNAL_CHECK)) {
                    py.check_signals()?;
                }
            }
            Some(timeout) => self.wait_at_most(py, Duration::from_millis(timeout))?,
        }
        match operation.outcome() {
            Some(Err(failure)) => {
                // An interrupted call has failed: the signal is its cause.
                py.check_signals()?;
                Err(failure.raise(py))
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if the call is done.
    fn is_done(&self) -> bool {
        self.operation.outcome().is_some()
    }

    /// Returns the sender of a message that was received from any source.
    fn sender(&self) -> Option<usize> {
        self.sender.as_ref()?.get().copied()
    }

    /// Returns the exception of a call that has failed.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        let outcome = self.operation.outcome()?;
        outcome.as_ref().err().map(|failure| failure.raise(py))
    }

    /// Calls the function without arguments once the call is done.
    fn on_done(&self, callback: Py<PyAny>) {
        self.operation.on_done(callback);
    }
}

impl PendingCall {
    fn wait_at_most(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        let runtime = Runtime::system();
        let deadline = runtime.deadline(limit);
        self.stream.wake().map_err(|failure| failure.raise(py))?;
        while !py.detach(|| self.stream.watch(&self.operation, SIGNAL_CHECK.min(runtime.remaining(deadline))))
        {
            py.check_signals()?;
            if runtime.expired(deadline) {
                let text =
                    format!("wait: the call did not end within {limit:?}: Timed out. The call goes on");
                return Err(Failure::timed_out(text).raise(py));
            }
        }
        Ok(())
    }
}

/// The interval in which a waiting thread lets Python handle signals.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// How often the host of a coordinator looks whether all ranks have left.
const POLL: Duration = Duration::from_millis(2);

/// How long a coordinator serves after its job was aborted, so that all ranks learn why.
const LATE_RANKS_LIMIT: Duration = Duration::from_secs(1);

fn join(
    rank: usize,
    world_size: usize,
    address: &str,
    job: &str,
    secret: &str,
    timeout: Duration,
) -> Result<Group, Failure> {
    let mut config = Config::new(rank, world_size, address)?.with_job(job).with_timeout(timeout);
    if world_size > 1 {
        config = config.with_external_coordinator();
    }
    if let Some(secret) = parse_secret(secret)? {
        config = config.with_secret(secret);
    }
    let config = with_environment(config)?;
    let mut world = Communicator::join(&config)?;
    world.set_timeout(timeout);
    if world_size > 1 {
        world.tune(CostCache::for_user().as_ref(), config.medium().name())?;
    }
    let parent = Arc::new(Mutex::new(OwnedByProcess::new(world.fork()?)));
    abort_at_interrupt(&parent);
    let messages = MessageStreams::new(Arc::clone(&parent), rank, world_size);
    Ok(Group { collectives: Stream::new(world), messages, parent, process: std::process::id() })
}

/// Applies `DIST_TRANSPORT` and `DIST_HOST_ID`.
fn with_environment(config: Config) -> Result<Config, Failure> {
    let config = match std::env::var("DIST_TRANSPORT").as_deref() {
        Err(_) | Ok("" | "auto") => config,
        Ok("tcp") => config.with_medium(Medium::Tcp),
        Ok("shm") => config.with_medium(Medium::Shm),
        Ok(other) => {
            return Err(Failure::arguments(format!("DIST_TRANSPORT={other:?} is not auto, tcp or shm")));
        }
    };
    Ok(match std::env::var("DIST_HOST_ID") {
        Ok(host) if !host.is_empty() => config.with_host_id(&host),
        _ => config,
    })
}

/// Parses the secret of the group. An empty text is none.
fn parse_secret(text: &str) -> Result<Option<Secret>, Failure> {
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(Secret::from_bytes(text.as_bytes())?))
}

fn parse_op((name, factor): (&str, f64)) -> PyResult<ReduceOp> {
    let op = match name {
        "pre_mul_sum" => Some(ReduceOp::PreMulSum(factor)),
        _ => ReduceOp::parse(name),
    };
    op.ok_or_else(|| PyValueError::new_err(format!("{name} is no reduction")))
}

fn parse_tag(tag: i64) -> PyResult<u32> {
    u32::try_from(tag)
        .map_err(|_| PyValueError::new_err(format!("the tag {tag} is not between 0 and {}", u32::MAX)))
}

/// A child of `fork` has no connections of its own, and those of the parent belong to the parent.
fn check_process(owner: u32) -> Result<(), Failure> {
    let own = std::process::id();
    if own == owner {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "this process ({own}) was forked from process {owner} after the process group was made, and a group works \
         only in the process that made it: start processes with `spawn`, or make the group after the fork"
    )))
}
