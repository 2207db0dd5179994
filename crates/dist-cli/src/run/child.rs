//! The process of one rank: start, signals and end.

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

/// The hidden subcommand that executes a rank's program.
pub(crate) const EXEC: &str = "exec-rank";

/// Checks that a program can be started. A name without a slash is searched for in `folders`, as in `PATH`.
pub(crate) fn check_program(program: &OsStr, folders: &OsStr) -> Result<(), Error> {
    let failed = |reason| Error::Program { program: program.to_owned(), reason };
    let path = Path::new(program);
    let on_path = !program.as_encoded_bytes().contains(&b'/');
    let candidates: Vec<PathBuf> = if on_path {
        std::env::split_paths(folders).map(|folder| folder.join(path)).collect()
    } else {
        vec![path.to_owned()]
    };
    // With an empty name, each folder itself would be found.
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

/// Returns the path of this program, also if its file was replaced or removed after the start.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    // The link leads to the executable of the process that follows it. All processes that do so here run this
    // program.
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// Returns a command that starts `program` in a process group of its own. Ctrl-C on a terminal then reaches
/// only the launcher, and a signal from the launcher reaches all processes of the group.
pub(super) fn command(program: &OsString, arguments: &[OsString]) -> io::Result<Command> {
    // The program is started through `distctl exec-rank`, which makes the kernel end it if the launcher is
    // killed.
    let mut command = Command::new(own_program()?);
    command.arg(EXEC).arg("--").arg(program).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command.env(PARENT, std::process::id().to_string()).env_remove(front::FRONT);
    Ok(command)
}

/// Environment variable with the id of a rank's parent process.
const PARENT: &str = "DISTCTL_PID";

/// Replaces this process by the program. Returns only if that fails.
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

/// Makes the kernel send this process a signal when its parent ends. Fails if `parent` is no longer its
/// parent.
#[cfg(target_os = "linux")]
pub(super) fn end_with_parent(parent: &str, signal: Signal) -> Result<(), Error> {
    rustix::process::set_parent_process_death_signal(Some(signal)).map_err(|e| Error::Wait(e.into()))?;
    // The parent may have ended before the call.
    if is_parent(parent) { Ok(()) } else { Err(Error::Orphan) }
}

/// Returns `true` if this process's parent has this id.
pub(super) fn is_parent(process: &str) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().to_string() == process)
}

/// The rank processes that were started and not reaped. Until a process is reaped, the system does not reuse
/// its id, which is also the id of its process group. Any thread can end them.
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

    /// Reaps ended children that are not ranks: processes that ranks have left behind and that this process
    /// has adopted.
    pub(super) fn reap_orphans(&self) {
        reap_all_except(&self.lock());
    }

    /// Returns `true` if a process exists that a rank has left behind outside of its process group.
    pub(super) fn has_orphans(&self) -> bool {
        !reap_all_except(&self.lock()).is_empty()
    }

    /// Ends adopted processes that ranks have left behind outside of their process groups.
    pub(super) fn end_orphans(&self) {
        end_all_except(&self.lock());
    }

    /// Ends all ranks, their process groups and the adopted processes. While the guard lives, no other thread
    /// can start or reap a rank.
    pub(super) fn end_all(&self) -> MutexGuard<'_, HashSet<Pid>> {
        let started = self.lock();
        started.iter().for_each(|&rank| signal_group(rank, Signal::KILL));
        end_all_except(&HashSet::new());
        started
    }
}

/// Time for processes outside their rank's group to end after SIGTERM.
const ORPHAN_GRACE: Duration = Duration::from_millis(100);
/// Time for killed processes to disappear.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);
/// Interval between two checks for them.
const ORPHAN_POLL: Duration = Duration::from_millis(2);

/// Ends all children of this process except these. This process adopts the children of one that ends.
fn end_all_except(these: &HashSet<Pid>) {
    let runtime = Runtime::system();
    let (grace, limit) = (runtime.deadline(ORPHAN_GRACE), runtime.deadline(ORPHAN_LIMIT));
    let (mut asked, mut killed) = (HashSet::new(), HashSet::new());
    loop {
        let orphans = reap_all_except(these);
        if orphans.is_empty() || runtime.expired(limit) {
            break;
        }
        for orphan in orphans {
            // `kill` fails only if the process has ended. Its id is not reused before it is reaped here.
            if runtime.expired(grace) {
                let _ = kill_process(orphan, Signal::KILL);
                killed.insert(orphan);
            } else if asked.insert(orphan) {
                let _ = kill_process(orphan, Signal::TERM);
            }
        }
        runtime.sleep(ORPHAN_POLL);
    }
    // A killed process may have been the launcher of another job.
    killed.into_iter().for_each(secret::remove_files_of);
}

/// Reaps all ended children of this process except these, and returns the children that still run.
fn reap_all_except(these: &HashSet<Pid>) -> Vec<Pid> {
    let others = children().into_iter().filter(|child| !these.contains(child));
    others.filter(|&child| matches!(waitpid(Some(child), WaitOptions::NOHANG), Ok(None))).collect()
}

/// Returns the children of this process, or none if the system does not list them. Only the main thread
/// starts ranks and adopts processes, so that the list of the main thread is complete.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let list = std::fs::read_to_string(format!("/proc/self/task/{own}/children"));
    let list = list.unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Signals a rank's process group.
fn signal_group(rank: Pid, signal: Signal) {
    // `kill` fails only if no process is left in the group.
    let _ = kill_process_group(rank, signal);
}

/// A process that has not been reaped. Until [`reap`](Self::reap), the system reuses neither its id nor the
/// id of its group.
#[derive(Debug)]
pub(super) struct Running(Child);

impl Running {
    pub(super) fn new(child: Child) -> Self {
        Self(child)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Signals the process and its group.
    pub(super) fn signal(&self, signal: Signal) {
        signal_group(self.pid(), signal);
    }

    /// Reaps the process, which has ended, and returns its status. Kills the processes that are left in its
    /// group.
    pub(super) fn reap(mut self, started: &Started) -> io::Result<ExitStatus> {
        let mut started = started.lock();
        self.signal(Signal::KILL);
        started.remove(&self.pid());
        self.0.wait()
    }
}

/// Waits until a process has ended, without reaping it.
pub(super) fn wait_for_end(pid: Pid) -> io::Result<()> {
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(Into::into),
        }
    }
}

/// Returns `true` if a shell can continue this process after a stop. That is the case if this process, or a
/// script that it belongs to, was started as a job by a process of the same session. Otherwise its process
/// group is orphaned, and the kernel ignores SIGTSTP for it. Without /proc, this returns `true`.
pub(super) fn can_be_continued() -> bool {
    ProcessRelations::of("self").is_none_or(|own| own.is_in_a_job(ProcessRelations::of))
}

/// The relations of a process. The group and the session are 0 if their leader is invisible, as in a
/// container.
#[derive(Clone, Copy)]
struct ProcessRelations {
    process: u32,
    parent: u32,
    group: u32,
    session: u32,
}

impl ProcessRelations {
    /// Reads the relations of a process from /proc.
    fn of(process: impl Display) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The command name in parentheses may contain any character.
        let (process, rest) = (stat.split(' ').next()?, stat.rsplit_once(") ")?.1);
        let mut numbers = rest.split(' ').skip(1).map_while(|word| word.parse().ok());
        Some(Self {
            process: process.parse().ok()?,
            parent: numbers.next()?,
            group: numbers.next()?,
            session: numbers.next()?,
        })
    }

    /// Returns `true` if an ancestor of this process has the same session but another group.
    fn is_in_a_job(self, relations_of: impl Fn(u32) -> Option<Self>) -> bool {
        let mut relations = self;
        // The parent of the session leader is in another session.
        while relations.process != self.session {
            relations = match relations_of(relations.parent) {
                Some(parent) if parent.session != self.session => return false,
                Some(parent) if parent.group != self.group => return true,
                Some(parent) => parent,
                // The parent may be hidden because another user owns it, as with sudo. The session leader is
                // then still further up. Init, and the first process of a container, have no jobs.
                None => return relations.parent > 1,
            };
        }
        false
    }
}

/// Returns the signals that this process ignores as a bit mask, with bit 0 for signal 1; 0 if the system does
/// not tell.
pub(super) fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

/// Returns the exit code that a shell would report: the code, or 128 + the signal.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Describes a status.
pub(super) fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("was killed by {}", signal_name(signal)),
        None => format!("exited with code {}", exit_code(status)),
    }
}

/// Returns the name of a signal, such as `SIGTERM`.
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

    /// Each process is given by its id and those of its parent, its group and its session. The first one is
    /// tested.
    #[rstest]
    #[case::a_shell(&[[30, 20, 30, 20], [20, 10, 20, 20]], true)]
    #[case::a_script_of_a_shell(&[[40, 30, 30, 20], [30, 20, 30, 20], [20, 10, 20, 20]], true)]
    #[case::somebody_hidden(&[[40, 30, 30, 20]], true)]
    #[case::a_session_of_its_own(&[[30, 20, 30, 30], [20, 10, 20, 20]], false)]
    #[case::a_session_that_somebody_hidden_started(&[[40, 30, 30, 30], [30, 20, 30, 30]], false)]
    #[case::an_orphan(&[[30, 1, 30, 20], [1, 0, 1, 1]], false)]
    #[case::an_orphan_where_init_is_hidden(&[[30, 1, 30, 20]], false)]
    #[case::a_container(&[[2, 1, 0, 0], [1, 0, 0, 0]], false)]
    fn a_job_can_be_continued_by_the_shell_that_started_it(
        #[case] processes: &[[u32; 4]],
        #[case] can: bool,
    ) {
        let relations_of = |id| {
            let &[process, parent, group, session] = processes.iter().find(|[process, ..]| *process == id)?;
            Some(ProcessRelations { process, parent, group, session })
        };
        assert_eq!(relations_of(processes[0][0]).unwrap().is_in_a_job(relations_of), can);
    }

    #[rstest]
    #[case(ExitStatus::from_raw(3 << 8), 3, "exited with code 3")]
    #[case(ExitStatus::from_raw(9), 137, "was killed by SIGKILL")]
    fn a_status_is_reported_as_by_a_shell(#[case] status: ExitStatus, #[case] code: u8, #[case] words: &str) {
        assert_eq!((exit_code(status), describe(status).as_str()), (code, words));
    }
}
