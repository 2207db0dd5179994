//! [`Failure`]: why a call failed, as a Python exception.

use dist_collectives::Error;
use dist_transport::Chain;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// An error of a call. It can be raised several times, for every thread that waits for the call.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    kind: FailureKind,
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureKind {
    /// The arguments were refused: `ValueError`.
    Arguments,
    /// The library cannot do this yet: `NotImplementedError`.
    Unsupported,
    /// A deadline passed: `torch.distributed.DistBackendError`, a `RuntimeError`.
    TimedOut,
    /// Any other error: `torch.distributed.DistBackendError`.
    Failed,
}

impl Failure {
    pub(crate) fn arguments(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Arguments, message: message.into() }
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Unsupported, message: message.into() }
    }

    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::TimedOut, message: message.into() }
    }

    /// Returns the error of a call of a group that was destroyed.
    pub(crate) fn destroyed() -> Self {
        Self::failed("the process group was destroyed before this call was made")
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Failed, message: message.into() }
    }

    /// Converts an error of a monitored barrier. Programs know the sentences of PyTorch by heart.
    pub(crate) fn of_monitored_barrier(error: Error, rank: usize, names_all: bool) -> Self {
        let Error::Absent { ranks } = &error else { return error.into() };
        let sentence = match ranks.as_slice() {
            _ if rank != 0 => format!(
                "Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            ),
            [first, ..] if !names_all => format!("Rank {first} failed to pass monitoredBarrier"),
            ranks => {
                let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                format!("Ranks {} failed to pass monitoredBarrier", ranks.join(", "))
            }
        };
        Self::timed_out(format!("{sentence}: {}", Chain(&error)))
    }

    /// Converts an error of the callback that Python gave.
    pub(crate) fn from_python(error: &PyErr) -> Self {
        Self::failed(error.to_string())
    }
}

/// An exception is made by a thread that is attached to Python, or attaches itself meanwhile.
impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let message = failure.message;
        match failure.kind {
            FailureKind::Arguments => PyValueError::new_err(message),
            FailureKind::Unsupported => PyNotImplementedError::new_err(message),
            FailureKind::TimedOut | FailureKind::Failed => Python::attach(|py| match backend_error(py) {
                Ok(class) => Self::from_type(class.clone(), (message,)),
                Err(_) => PyRuntimeError::new_err(message),
            }),
        }
    }
}

/// Returns the class `torch.distributed.DistBackendError`.
fn backend_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "torch.distributed", "DistBackendError")
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = Chain(&error).to_string();
        if error.is_timeout() {
            return Self::timed_out(format!("dist: Timed out waiting: {message}"));
        }
        match error {
            Error::RootOutOfRange { .. }
            | Error::RankOutOfRange { .. }
            | Error::Parts { .. }
            | Error::Indivisible { .. }
            | Error::Unreducible { .. }
            | Error::Counts { .. }
            | Error::Length { .. }
            | Error::Disagreement { .. } => Self::arguments(message),
            _ => Self::failed(message),
        }
    }
}

impl From<dist_transport::Error> for Failure {
    fn from(error: dist_transport::Error) -> Self {
        let message = Chain(&error).to_string();
        match error {
            dist_transport::Error::InvalidVariable { .. } => Self::arguments(message),
            _ => Self::failed(message),
        }
    }
}
