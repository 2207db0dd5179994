//! How a job, or the command that was asked for, ended.

use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::output::say;

/// How it ended, if nothing went wrong in `distctl` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every rank returned 0, or nothing was found to be wrong.
    Success,
    /// The exit code to pass on.
    Code(u8),
    /// The job was stopped before its end.
    Stopped {
        /// The exit code to pass on; 0 if every rank returned 0 all the same.
        code: u8,
        /// What stopped it.
        by: Stop,
    },
}

/// What stopped a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A signal that `distctl` was sent.
    Signal(i32),
    /// Its output could not be written; the exit code that says why.
    Output(u8),
}

impl Stop {
    /// The exit code of a job that this stopped. For a signal it is the one that a shell reports.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Output(code) => code,
        }
    }
}

impl Outcome {
    /// The outcome of a job with the exit code of its first failure, if a rank failed, and what stopped it, if
    /// anything did.
    pub(crate) fn of_job(code: Option<u8>, stopped: Option<Stop>) -> Self {
        match (code, stopped) {
            (None, None) => Self::Success,
            (Some(code), None) => Self::Code(code),
            (code, Some(by)) => Self::Stopped { code: code.unwrap_or(0), by },
        }
    }

    /// Returns the exit code.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Code(code) | Self::Stopped { code, .. } => code,
        }
    }

    /// Ends this process by the signal that stopped the job, or returns its exit code.
    ///
    /// A shell ends a loop of commands only if the signal itself has ended one of them. If every rank returned 0 all the
    /// same, the signal was a request that the program has fulfilled, and the exit code is 0.
    pub(crate) fn end(self) -> ExitCode {
        match self {
            Self::Stopped { code, by: Stop::Signal(signal) } if code != 0 => {
                end_by(signal);
                ExitCode::from(Stop::Signal(signal).code())
            }
            _ => ExitCode::from(self.code()),
        }
    }
}

/// Ends this process by a signal, as if it had not been handled. Returns if that is impossible.
fn end_by(signal: i32) {
    // SIGQUIT would leave a memory image, which is of no use to anybody.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) });
    if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
        say(&format!("cannot end by signal {signal}: {error}"));
    }
}
