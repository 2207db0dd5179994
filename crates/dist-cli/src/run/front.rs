//! The front process: the one that a user starts. It starts the launcher, which starts the ranks, passes signals on to it,
//! and ends as the launcher ends.
//!
//! A launcher that is killed cannot end its ranks, so that somebody else has to. If the front process is killed, the launcher
//! ends the ranks and all that they have started. It is in a session of its own, which no terminal and no shell signals. If the
//! launcher is killed, the front process does the same.

use crate::Error;
use crate::outcome::Outcome;

/// Runs `job` in a launcher that outlives this process for as long as it takes to end the ranks. On systems other than
/// Linux, which tell no process that its parent has ended, this process is the launcher itself.
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

/// Tells the launcher the process that has started it.
pub(super) const FRONT: &str = "DISTCTL_FRONT";

/// Returns `true` in the launcher, whose front process has said already what there is to say.
pub(crate) fn is_launcher() -> bool {
    std::env::var_os(FRONT).is_some()
}

/// Whether this process is a launcher whose front process has ended.
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

    /// The launcher's name in lists of processes. It does not contain `distctl`, so that `killall -9 distctl` leaves somebody
    /// to end the ranks.
    const NAME: &std::ffi::CStr = c"dist-launcher";

    /// Makes this process the launcher if it was started as one; `false` if it was not.
    pub(super) fn become_launcher() -> Result<bool, Error> {
        let Ok(front) = std::env::var(FRONT) else { return Ok(false) };
        // A stopped launcher has to go on to notice that its front process has ended: this signal lets it.
        child::end_with_parent(&front, Signal::CONT)?;
        // It makes the launcher safer, and it works without.
        let _ = rustix::thread::set_name(NAME);
        let _ = setsid();
        adopt_orphans();
        Ok(true)
    }

    /// Makes this process the parent of what its descendants leave behind.
    fn adopt_orphans() {
        // Without it, what leaves the process group of its rank is not ended with the job.
        let _ = set_child_subreaper(Some(rustix::process::getpid()));
    }

    /// Starts the launcher with the arguments of this process, and returns how it ended.
    pub(super) fn start_launcher() -> Result<Outcome, Error> {
        let heard = signals::heeded().into_iter().chain([SIGCHLD]);
        let mut signals = Signals::new(heard).map_err(Error::Signals)?;
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
                // Nothing stops where no shell could let it go on.
                SIGTSTP if !child::can_be_continued() => {}
                // It has not been waited for: the number is its own.
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
        unreachable!("nobody closes the list of signals")
    }

    fn send(launcher: Pid, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            // It fails only if the launcher has ended, which is noticed.
            let _ = kill_process(launcher, signal);
        }
    }

    fn has_stopped(launcher: Pid) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        matches!(waitid(WaitId::Pid(launcher), options), Ok(Some(status)) if status.stopped())
    }

    /// What this process is to end with when the launcher has ended like this. If that was not in order, ends what it has
    /// left behind.
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
