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

/// The signals that a job heeds: those that end it, those that are passed on, and the one that stops it for a while.
pub(super) fn heeded() -> Vec<i32> {
    // What the process that started this one ignored stays ignored: behind nohup, or in the background of a script, a job
    // goes on as any other program does.
    let ignored = child::ignored_signals();
    let heeded = [SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2].into_iter();
    let heeded = heeded.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    heeded.chain([SIGTERM, SIGTSTP]).collect()
}

/// Starts a thread that tells of signals, and ends everything if the front process has ended.
pub(super) fn watch_signals(
    runtime: &Runtime,
    tell: impl Fn(i32) + Send + 'static,
    started: &Started,
) -> Result<(), Error> {
    // Where SIGCHLD is ignored, the system itself reaps a process that has ended, and nobody learns how.
    let heard = heeded().into_iter().chain([SIGCHLD, SIGCONT]);
    let mut signals = Signals::new(heard).map_err(Error::Signals)?;
    let started = started.clone();
    let watch = move || {
        // It may have ended before the signals were watched for.
        end_if_abandoned(&started);
        for signal in signals.forever() {
            match signal {
                SIGCHLD => started.reap_strays(),
                // The system sends it when the front process ends.
                SIGCONT => end_if_abandoned(&started),
                signal => tell(signal),
            }
        }
    };
    runtime.spawn("signals", watch).map(drop).map_err(Error::Thread)
}

/// If the front process has ended, ends all ranks and all that they have started, and this process.
fn end_if_abandoned(started: &Started) {
    if front::is_abandoned() {
        let _ended = started.end_all();
        secret::remove_files_of(rustix::process::getpid());
        std::process::exit(Stop::Signal(SIGKILL).code().into());
    }
}
