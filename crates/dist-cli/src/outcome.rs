//! How a job, or the command that was asked for, ended.

use std::process::ExitCode;

/// How it ended, if nothing went wrong in `distctl` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every rank returned 0, or nothing was found to be wrong.
    Success,
    /// The exit code to pass on.
    Code(u8),
    /// Somebody wanted it to end.
    Stopped {
        /// The exit code to pass on; 0 if every rank returned 0 all the same.
        code: u8,
        /// The one that says who wanted it.
        by: u8,
    },
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Success => Self::SUCCESS,
            Outcome::Code(code) | Outcome::Stopped { code, .. } => Self::from(code),
        }
    }
}
