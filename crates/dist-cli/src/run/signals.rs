//! Signals to this process, as events.

use dist_transport::Runtime;
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::Signals;

use super::child::{self, Started};
use super::{front, secret};
use crate::Error;
use crate::outcome::Stop;

/// Returns the signals that a job handles: those that end it, those that are forwarded, and the one that
/// stops it temporarily.
pub(super) fn handled_signals() -> Vec<i32> {
    // Signals that the parent process ignored stay ignored. A job under nohup or in the background of a
    // script thus continues as any other program does.
    let ignored = child::ignored_signals();
    let handled_signals = [SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2].into_iter();
    let handled_signals = handled_signals.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    handled_signals.chain([SIGTERM, SIGTSTP]).collect()
}

/// Starts a thread that passes signals to `tell`, and ends all processes of the job if the front process has
/// ended.
pub(super) fn watch_signals(
    runtime: &Runtime,
    tell: impl Fn(i32) + Send + 'static,
    started: &Started,
) -> Result<(), Error> {
    // If SIGCHLD were ignored, the kernel would reap ended processes and discard their status.
    let watched = handled_signals().into_iter().chain([SIGCHLD, SIGCONT]);
    let mut signals = Signals::new(watched).map_err(Error::Signals)?;
    let started = started.clone();
    let watch = move || {
        // The front process may have ended before the handlers were installed.
        end_if_abandoned(&started);
        for signal in signals.forever() {
            match signal {
                SIGCHLD => started.reap_orphans(),
                // The kernel sends SIGCONT when the front process ends.
                SIGCONT => end_if_abandoned(&started),
                signal => tell(signal),
            }
        }
    };
    runtime.spawn("signals", watch).map(drop).map_err(Error::Thread)
}

/// If the front process has ended, ends all ranks, their descendants, and this process.
fn end_if_abandoned(started: &Started) {
    if front::is_abandoned() {
        let _ended = started.end_all();
        secret::remove_files_of(rustix::process::getpid());
        std::process::exit(Stop::Signal(SIGKILL).code().into());
    }
}
