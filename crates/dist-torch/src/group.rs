//! [`Group`]: what a process group of Python calls.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use dist_collectives::tuning::CostCache;
use dist_collectives::{Communicator, Config, ReduceOp};
use dist_transport::Runtime;
use dist_transport::process::{Coordinator, Secret};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyTuple;

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
        let secret = parse_secret(secret)?;
        let started = py.detach(|| Coordinator::start(&address, world_size, job, secret));
        let coordinator = started.map_err(Failure::from)?;
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
        let timeout = Duration::from_millis(timeout_ms);
        Ok(py.detach(|| join(rank, world_size, address, job, secret, timeout))?)
    }

    /// Makes or starts a call. Returns `None` if the program waits for it and it is done.
    fn call(
        &self,
        py: Python<'_>,
        name: &str,
        arguments: &Bound<'_, PyTuple>,
        dtype: &str,
        tensors: Vec<TensorMemory>,
        options: CallOptions,
    ) -> PyResult<Option<PendingCall>> {
        check_process(self.process)?;
        let (action, stream) = self.parse(name, arguments)?;
        let sender = action.sender();
        let mut call = Call::new(action, dtype, tensors)?;
        let CallOptions(timeout, is_async, copy_out) = options;
        if is_async {
            call.hold_storages(py)?;
        }
        let operation = stream.push(call, Duration::from_millis(timeout), copy_out);
        let pending = PendingCall { operation, stream, sender, process: self.process };
        if is_async {
            pending.stream.wake()?;
            return Ok(Some(pending));
        }
        pending.wait(py, None)?;
        Ok(None)
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
    /// Returns what a call of this name does, and the stream on which it is made.
    fn parse(&self, name: &str, arguments: &Bound<'_, PyTuple>) -> PyResult<(Action, Arc<Stream>)> {
        let action = match name {
            "all_reduce" => {
                let (Op(op),) = arguments.extract()?;
                Action::AllReduce { op }
            }
            "broadcast" => {
                let (root,) = arguments.extract()?;
                Action::Broadcast { root }
            }
            "reduce" => {
                let (Op(op), root) = arguments.extract()?;
                Action::Reduce { op, root }
            }
            "all_gather" => {
                let (counts,) = arguments.extract()?;
                Action::AllGather { counts }
            }
            "reduce_scatter" => {
                let (Op(op), counts) = arguments.extract()?;
                Action::ReduceScatter { op, counts }
            }
            "all_to_all" => {
                let (counts,) = arguments.extract()?;
                Action::AllToAll { counts }
            }
            "gather" => {
                let (root,) = arguments.extract()?;
                Action::Gather { root }
            }
            "scatter" => {
                let (root,) = arguments.extract()?;
                Action::Scatter { root }
            }
            "barrier" => Action::Barrier,
            "monitored_barrier" => {
                let (names_all,) = arguments.extract()?;
                Action::MonitoredBarrier { names_all }
            }
            "send" => {
                let (to, Tag(tag)) = arguments.extract()?;
                return Ok((Action::Send { tag }, self.messages.sends_to(to)?));
            }
            "receive" => {
                let (from, Tag(tag)) = arguments.extract()?;
                return Ok((Action::Receive { tag }, self.messages.receives_from(from)?));
            }
            "receive_any" => {
                let (Tag(tag),) = arguments.extract()?;
                let (stream, sources) = self.messages.receives_from_any()?;
                return Ok((Action::ReceiveAny { tag, sources }, stream));
            }
            name => return Err(PyValueError::new_err(format!("{name} is no call of a group"))),
        };
        Ok((action, Arc::clone(&self.collectives)))
    }
}

#[pymethods]
impl PendingCall {
    /// Waits until the call is done, or at most this many milliseconds, and raises its error.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<()> {
        check_process(self.process)?;
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
                Err(failure.clone().into())
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
    fn exception(&self) -> Option<PyErr> {
        let outcome = self.operation.outcome()?;
        outcome.as_ref().err().map(|failure| failure.clone().into())
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
        self.stream.wake()?;
        while !py.detach(|| self.stream.watch(&self.operation, SIGNAL_CHECK.min(runtime.remaining(deadline))))
        {
            py.check_signals()?;
            if runtime.expired(deadline) {
                let text =
                    format!("wait: the call did not end within {limit:?}: Timed out. The call goes on");
                return Err(Failure::timed_out(text).into());
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
    // PyTorch computes with threads of its own.
    config = config.with_thread_warning(false);
    if world_size > 1 {
        config = config.with_external_coordinator();
    }
    if let Some(secret) = parse_secret(secret)? {
        config = config.with_secret(secret);
    }
    let config = config.with_env_settings()?;
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

/// Parses the secret of the group. An empty text is none.
fn parse_secret(text: &str) -> Result<Option<Secret>, Failure> {
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(Secret::from_bytes(text.as_bytes())?))
}

/// A reduction, which Python gives as its name and its factor.
struct Op(ReduceOp);

impl<'py> FromPyObject<'_, 'py> for Op {
    type Error = PyErr;

    fn extract(op: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (name, factor): (PyBackedStr, f64) = op.extract()?;
        let parsed =
            if &*name == "pre_mul_sum" { Some(ReduceOp::PreMulSum(factor)) } else { ReduceOp::parse(&name) };
        parsed.map(Self).ok_or_else(|| PyValueError::new_err(format!("{name} is no reduction")))
    }
}

/// The tag of a message.
struct Tag(u32);

impl<'py> FromPyObject<'_, 'py> for Tag {
    type Error = PyErr;

    fn extract(tag: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let tag: i64 = tag.extract()?;
        let parsed = u32::try_from(tag).map(Self);
        parsed.map_err(|_| PyValueError::new_err(format!("the tag {tag} is not between 0 and {}", u32::MAX)))
    }
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
