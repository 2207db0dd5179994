//! One rank's process: started, watched, signalled and ended.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dist_transport::Runtime;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getppid, kill_process, kill_process_group, waitpid,
};

use super::{cores, files, front, secret};
use crate::Error;

/// The hidden subcommand that turns into a rank's program.
pub(crate) const EXEC: &str = "exec-rank";

/// Says why a program cannot be started, before anything is. Without a slash it is looked for in these folders, as in
/// `PATH`.
pub(crate) fn check_program(program: &OsStr, folders: &OsStr) -> Result<(), Error> {
    let failed = |reason| Error::Program { program: program.to_owned(), reason };
    let path = Path::new(program);
    let on_path = !program.as_encoded_bytes().contains(&b'/');
    let candidates: Vec<PathBuf> = if on_path {
        std::env::split_paths(folders).map(|folder| folder.join(path)).collect()
    } else {
        vec![path.to_owned()]
    };
    // Without a name, each folder itself would be found.
    let candidates = if program.is_empty() { Vec::new() } else { candidates };
    let found: Vec<_> = candidates.iter().filter_map(|path| path.metadata().ok()).collect();
    match found.as_slice() {
        [] => Err(Error::NoProgram { program: program.to_owned(), on_path }),
        found if found.iter().all(std::fs::Metadata::is_dir) => Err(failed("it is a folder")),
        found if found.iter().all(|file| file.permissions().mode() & 0o111 == 0) => {
            Err(failed("it is not executable"))
        }
        _ => Ok(()),
    }
}

/// This very program, also where its file was replaced or removed after it had been started.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    // Whoever follows this link gets what it runs itself, and all that do so here run this.
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// A command that starts `program` in a process group of its own, so that a terminal's Ctrl-C reaches only us
/// and that a signal from us reaches all that the program has started.
pub(super) fn command(program: &OsString, arguments: &[OsString]) -> io::Result<Command> {
    // The program is started through this one, which asks the system to end it if we are killed.
    let mut command = Command::new(own_program()?);
    command.arg(EXEC).arg("--").arg(program).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command.env(PARENT, std::process::id().to_string()).env_remove(front::FRONT);
    Ok(command)
}

/// Tells a rank's process who started it.
const PARENT: &str = "DISTCTL_PID";

/// Becomes the program. Returns only if that is impossible.
pub(crate) fn become_program(command: &[OsString]) -> Error {
    let (program, arguments) = command.split_first().expect("clap asks for a program");
    #[cfg(target_os = "linux")]
    if let Err(error) = end_with_parent(&std::env::var(PARENT).unwrap_or_default(), Signal::KILL) {
        return error;
    }
    cores::bind();
    files::restore();
    let mut command = Command::new(program);
    command.args(arguments).env_remove(PARENT).env_remove(cores::CORES).env_remove(files::FILES);
    let source = command.exec();
    Error::Exec { program: program.clone(), source }
}

/// Asks the system to send this process a signal when its parent ends, which is to be this one.
#[cfg(target_os = "linux")]
pub(super) fn end_with_parent(parent: &str, signal: Signal) -> Result<(), Error> {
    rustix::process::set_parent_process_death_signal(Some(signal)).map_err(|e| Error::Wait(e.into()))?;
    // The parent may have ended before we asked.
    if is_parent(parent) { Ok(()) } else { Err(Error::Orphan) }
}

/// Whether the parent of this process is the one with this number.
pub(super) fn is_parent(process: &str) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().to_string() == process)
}

/// The processes of ranks that were started and not reaped. The id of each, which is that of its group, is its own until
/// then. Any thread can end them.
#[derive(Debug, Clone, Default)]
pub(super) struct Started(Arc<Mutex<HashSet<Pid>>>);

impl Started {
    fn lock(&self) -> MutexGuard<'_, HashSet<Pid>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the process of a rank.
    pub(super) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let mut started = self.lock();
        let child = command.spawn()?;
        started.insert(Pid::from_child(&child));
        Ok(child)
    }

    /// Reaps children that are no ranks and have ended: what ranks have left behind, if this process adopts it.
    pub(super) fn reap_strays(&self) {
        reap_but(&self.lock());
    }

    /// Returns `true` if a process is there that a rank has left behind outside of its process group.
    pub(super) fn has_strays(&self) -> bool {
        !reap_but(&self.lock()).is_empty()
    }

    /// Ends what ranks have left behind outside of their process groups, if this process adopts it.
    pub(super) fn end_strays(&self) {
        end_but(&self.lock());
    }

    /// Ends all ranks and all that they have started, as far as this process adopts it. While the result is kept, no other
    /// thread can start or reap a rank.
    pub(super) fn end_all(&self) -> MutexGuard<'_, HashSet<Pid>> {
        let started = self.lock();
        started.iter().for_each(|&rank| signal_group(rank, Signal::KILL));
        end_but(&HashSet::new());
        started
    }
}

/// How long processes that have left their rank's group have to end when they are asked to.
const STRAY_GRACE: Duration = Duration::from_millis(100);
/// How long killed processes may take to be gone.
const STRAY_LIMIT: Duration = Duration::from_secs(5);
/// How often is looked whether they are.
const STRAY_POLL: Duration = Duration::from_millis(2);

/// Ends all children of this process but these. The children of one that ends become ours.
fn end_but(these: &HashSet<Pid>) {
    let runtime = Runtime::system();
    let (grace, limit) = (runtime.deadline(STRAY_GRACE), runtime.deadline(STRAY_LIMIT));
    let (mut asked, mut killed) = (HashSet::new(), HashSet::new());
    loop {
        let strays = reap_but(these);
        if strays.is_empty() || runtime.expired(limit) {
            break;
        }
        for stray in strays {
            // It fails only if the stray has ended. The number is its own until it is reaped here.
            if runtime.expired(grace) {
                let _ = kill_process(stray, Signal::KILL);
                killed.insert(stray);
            } else if asked.insert(stray) {
                let _ = kill_process(stray, Signal::TERM);
            }
        }
        runtime.sleep(STRAY_POLL);
    }
    // One of them may have been the launcher of another job.
    killed.into_iter().for_each(secret::remove_files_of);
}

/// Reaps all children of this process that have ended but these, and returns those that have not.
fn reap_but(these: &HashSet<Pid>) -> Vec<Pid> {
    let others = children().into_iter().filter(|child| !these.contains(child));
    others.filter(|&child| matches!(waitpid(Some(child), WaitOptions::NOHANG), Ok(None))).collect()
}

/// The children of this process, as far as the system tells. What it adopts belongs to its first thread, which also starts
/// the ranks.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let list = std::fs::read_to_string(format!("/proc/self/task/{own}/children"));
    let list = list.unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Signals a rank's process and all that is in its group.
fn signal_group(rank: Pid, signal: Signal) {
    // It fails only if nobody is left to be signalled.
    let _ = kill_process_group(rank, signal);
}

/// A process that has not been waited for: its id, and its group's, is its own until [`reap`](Self::reap).
#[derive(Debug)]
pub(super) struct Running(Child);

impl Running {
    pub(super) fn new(child: Child) -> Self {
        Self(child)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Signals the process and all that it has started.
    pub(super) fn signal(&self, signal: Signal) {
        signal_group(self.pid(), signal);
    }

    /// The status of the process, which has ended; what it has started and left in its group is killed.
    pub(super) fn reap(mut self, started: &Started) -> io::Result<ExitStatus> {
        let mut started = started.lock();
        self.signal(Signal::KILL);
        started.remove(&self.pid());
        self.0.wait()
    }
}

/// Waits until a process has ended and leaves it to be reaped.
pub(super) fn wait_for_end(pid: Pid) -> io::Result<()> {
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(Into::into),
        }
    }
}

/// Whether a shell can let this process go on when it is stopped: whether it, or a script that it is a part of, was
/// started as a job by a process of the same session. Otherwise its process group is orphaned, and the system itself
/// stops none of it by SIGTSTP. Where there is no /proc, a shell can.
pub(super) fn can_be_continued() -> bool {
    Kin::of("self").is_none_or(|own| own.is_in_a_job(Kin::of))
}

/// What a process belongs to. The group and the session are 0 if who leads them is out of sight, as in a container.
#[derive(Clone, Copy)]
struct Kin {
    process: u32,
    parent: u32,
    group: u32,
    session: u32,
}

impl Kin {
    /// What Linux says of a process.
    fn of(process: impl Display) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name between may hold anything.
        let (process, rest) = (stat.split(' ').next()?, stat.rsplit_once(") ")?.1);
        let mut numbers = rest.split(' ').skip(1).map_while(|word| word.parse().ok());
        Some(Self {
            process: process.parse().ok()?,
            parent: numbers.next()?,
            group: numbers.next()?,
            session: numbers.next()?,
        })
    }

    /// Whether a process of the same session, but of another group, is one that it descends from.
    fn is_in_a_job(self, kin_of: impl Fn(u32) -> Option<Self>) -> bool {
        let mut kin = self;
        // Who leads the session was started by a process of another.
        while kin.process != self.session {
            kin = match kin_of(kin.parent) {
                Some(parent) if parent.session != self.session => return false,
                Some(parent) if parent.group != self.group => return true,
                Some(parent) => parent,
                // It can be hidden as another user's, such as sudo; who leads the session is still further on. But
                // init, and what a container was started by, have no jobs.
                None => return kin.parent > 1,
            };
        }
        false
    }
}

/// The signals that this process ignores, a bit for each from 1 on, if the system tells.
pub(super) fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

/// What a shell would make of a status: the code, or 128 and the signal.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// A status in words.
pub(super) fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("was killed by {}", signal_name(signal)),
        None => format!("exited with code {}", exit_code(status)),
    }
}

/// The usual name of a signal.
pub(super) fn signal_name(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal);
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("/nowhere/at-all", "there is no such file")]
    #[case("no-such-program-on-any-path", "there is no such file in the folders of PATH")]
    #[case("", "there is no such file in the folders of PATH")]
    #[case("/", "it is a folder")]
    #[case("./Cargo.toml", "it is not executable")]
    fn a_program_that_cannot_be_started_is_named_with_the_reason(
        #[case] program: &str,
        #[case] reason: &str,
    ) {
        let message =
            check_program(OsStr::new(program), OsStr::new("/bin:/usr/bin")).unwrap_err().to_string();
        assert_eq!(message, format!("cannot start {program:?}: {reason}"));
    }

    #[rstest]
    #[case("sh")]
    #[case("/bin/sh")]
    fn a_program_is_found_by_path_and_by_name(#[case] program: &str) {
        check_program(OsStr::new(program), OsStr::new("/bin:/usr/bin")).unwrap();
    }

    /// Each process is given by its id, and those of its parent, its group and its session; the first one is asked for.
    #[rstest]
    #[case::a_shell(&[[30, 20, 30, 20], [20, 10, 20, 20]], true)]
    #[case::a_script_of_a_shell(&[[40, 30, 30, 20], [30, 20, 30, 20], [20, 10, 20, 20]], true)]
    #[case::somebody_hidden(&[[40, 30, 30, 20]], true)]
    #[case::a_session_of_its_own(&[[30, 20, 30, 30], [20, 10, 20, 20]], false)]
    #[case::a_session_that_somebody_hidden_started(&[[40, 30, 30, 30], [30, 20, 30, 30]], false)]
    #[case::an_orphan(&[[30, 1, 30, 20], [1, 0, 1, 1]], false)]
    #[case::an_orphan_where_init_is_hidden(&[[30, 1, 30, 20]], false)]
    #[case::a_container(&[[2, 1, 0, 0], [1, 0, 0, 0]], false)]
    fn a_job_can_be_continued_by_whoever_started_it(#[case] processes: &[[u32; 4]], #[case] can: bool) {
        let kin_of = |id| {
            let &[process, parent, group, session] = processes.iter().find(|[process, ..]| *process == id)?;
            Some(Kin { process, parent, group, session })
        };
        assert_eq!(kin_of(processes[0][0]).unwrap().is_in_a_job(kin_of), can);
    }

    #[rstest]
    #[case(ExitStatus::from_raw(3 << 8), 3, "exited with code 3")]
    #[case(ExitStatus::from_raw(9), 137, "was killed by SIGKILL")]
    fn a_status_is_told_as_a_shell_tells_it(
        #[case] status: ExitStatus,
        #[case] code: u8,
        #[case] words: &str,
    ) {
        assert_eq!((exit_code(status), describe(status).as_str()), (code, words));
    }
}
