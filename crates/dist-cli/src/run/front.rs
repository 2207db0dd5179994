//! The front process, which the user starts. It starts the launcher, which starts the ranks. It forwards
//! signals to the launcher and ends as the launcher ends.
//!
//! A killed launcher cannot end its ranks; the front process then ends the ranks and all their descendants.
//! If the front process is killed, the launcher does the same. The launcher is in a session of its own, which
//! receives no signals from a terminal or a shell.

use crate::Error;
use crate::outcome::Outcome;

/// Runs `job` in a launcher, which outlives this process for as long as it takes to end the ranks. On systems
/// other than Linux a process is not notified that its parent has ended, and this process is the launcher
/// itself.
pub(crate) fn in_launcher(job: impl FnOnce() -> Result<Outcome, Error>) -> Result<Outcome, Error> {
    #[cfg(target_os = "linux")]
    {
        if linux::become_launcher()? { job() } else { linux::start_launcher() }
    }
    #[cfg(not(target_os = "linux"))]
    {
        job()
    }
}

/// Environment variable with the id of the launcher's front process.
pub(super) const FRONT: &str = "DISTCTL_FRONT";

/// Returns `true` in the launcher. Its front process has already printed messages about the arguments.
pub(crate) fn is_launcher() -> bool {
    std::env::var_os(FRONT).is_some()
}

/// Returns `true` if this process is a launcher whose front process has ended.
pub(super) fn is_abandoned() -> bool {
    std::env::var(FRONT).is_ok_and(|front| !super::child::is_parent(&front))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Command, ExitStatus};

    use rustix::process::{
        Pid, Signal, WaitId, WaitIdOptions, kill_process, set_child_subreaper, setsid, waitid,
    };
    use signal_hook::consts::{SIGCHLD, SIGCONT, SIGKILL, SIGTSTP};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    use super::super::child::{self, Started};
    use super::super::{secret, signals};
    use super::FRONT;
    use crate::Error;
    use crate::outcome::{Outcome, Stop};
    use crate::output::say;

    /// The launcher's name in process lists. It does not contain `distctl`, so that `killall -9 distctl` does
    /// not kill the process that ends the ranks.
    const NAME: &std::ffi::CStr = c"dist-launcher";

    /// Makes this process the launcher if it was started as one. Returns `false` otherwise.
    pub(super) fn become_launcher() -> Result<bool, Error> {
        let Ok(front) = std::env::var(FRONT) else { return Ok(false) };
        // A stopped launcher must continue in order to notice that its front process has ended. SIGCONT makes
        // it continue.
        child::end_with_parent(&front, Signal::CONT)?;
        // If one of these calls fails, the launcher still works, but is not protected in this way.
        let _ = rustix::thread::set_name(NAME);
        let _ = setsid();
        adopt_orphans();
        Ok(true)
    }

    /// Makes this process adopt the orphans of its descendants.
    fn adopt_orphans() {
        // If this fails, processes outside the process group of their rank are not ended with the job.
        let _ = set_child_subreaper(Some(rustix::process::getpid()));
    }

    /// Starts the launcher with the arguments of this process, and returns its outcome.
    pub(super) fn start_launcher() -> Result<Outcome, Error> {
        let watched = signals::handled_signals().into_iter().chain([SIGCHLD]);
        let mut signals = Signals::new(watched).map_err(Error::Signals)?;
        adopt_orphans();
        let own = child::own_program().map_err(Error::OwnProgram)?;
        let mut command = Command::new(own);
        command.arg0("dist-launcher").args(std::env::args_os().skip(1));
        command.env(FRONT, std::process::id().to_string());
        let mut launcher = command.spawn().map_err(Error::Launcher)?;
        let pid = Pid::from_child(&launcher);
        for signal in signals.forever() {
            match signal {
                SIGCHLD => {}
                // Do not stop if no shell could continue this job.
                SIGTSTP if !child::can_be_continued() => {}
                // The launcher has not been reaped, so that its id is not reused.
                signal => send(pid, signal),
            }
            if let Some(status) = launcher.try_wait().map_err(Error::Wait)? {
                return Ok(end_as(status, pid));
            }
            if has_stopped(pid) {
                if child::can_be_continued() {
                    let _ = emulate_default_handler(SIGTSTP);
                }
                send(pid, SIGCONT);
            }
        }
        unreachable!("the list of signals is never closed")
    }

    fn send(launcher: Pid, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            // `kill` fails only if the launcher has ended. The caller notices that.
            let _ = kill_process(launcher, signal);
        }
    }

    fn has_stopped(launcher: Pid) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        matches!(waitid(WaitId::Pid(launcher), options), Ok(Some(status)) if status.stopped())
    }

    /// Returns the outcome of this process for the status of the launcher. If a signal ended the launcher,
    /// ends the ranks and removes the secret files that it has left behind.
    fn end_as(status: ExitStatus, launcher: Pid) -> Outcome {
        let Some(signal) = status.signal() else {
            return match child::exit_code(status) {
                0 => Outcome::Success,
                code => Outcome::Code(code),
            };
        };
        drop(Started::default().end_all());
        secret::remove_files_of(launcher);
        let by = Stop::Signal(signal);
        if signal == SIGKILL {
            say("the launcher was killed by SIGKILL");
            return Outcome::Code(by.code());
        }
        Outcome::Stopped { code: by.code(), by }
    }
}
