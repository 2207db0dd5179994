//! The result of a job or command.

use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::output::say;

/// The result of a job or command, if no error occurred in `distctl` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every rank returned 0, or no fault was found.
    Success,
    /// The exit code of `distctl`.
    Code(u8),
    /// The job was stopped before its end.
    Stopped {
        /// The exit code of `distctl`; 0 if every rank returned 0 although the job was stopped.
        code: u8,
        /// The reason.
        by: Stop,
    },
}

/// The reason why a job was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// `distctl` received this signal.
    Signal(i32),
    /// The output could not be written; the exit code that reports this.
    Output(u8),
}

impl Stop {
    /// Returns the exit code of a job that was stopped for this reason. For a signal it is the one that a
    /// shell reports.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Output(code) => code,
        }
    }
}

impl Outcome {
    /// Returns the outcome of a job, from the exit code of the first failed rank and the reason why the job
    /// was stopped.
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
    /// A shell ends a loop of commands only if a signal ended one of them. If every rank returned 0, the
    /// program has handled the signal as a request, and the exit code is 0.
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

/// Ends this process by a signal with its default action. Returns if that is impossible.
fn end_by(signal: i32) {
    // SIGQUIT would write a core dump, which is of no use.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) });
    if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
        say(&format!("cannot end by signal {signal}: {error}"));
    }
}
