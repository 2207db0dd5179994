//! Starts one process of this program per rank, if no launcher has done so.

use std::env;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::process::{Coordinator, Secret};
use dist_transport::runtime::Mailbox;
use rustix::process::{Pid, WaitId, WaitIdOptions};

/// An error of starting or watching the processes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessError {
    #[error("cannot start rank {rank}")]
    Start { rank: usize, source: io::Error },
    #[error("cannot start this program again with fewer threads")]
    Restart { source: io::Error },
    #[error("cannot watch rank {rank}")]
    Watch { rank: usize, source: io::Error },
    #[error("cannot make a meeting point for the ranks")]
    Coordinator(#[from] dist_transport::Error),
}

/// Starts `ranks` processes of this program with the same arguments and waits for them. If one fails, prints its
/// rank, ends the other processes, and returns its exit code.
pub(crate) fn launch(ranks: usize) -> Result<u8, ProcessError> {
    let runtime = Runtime::system();
    let (secret, secret_text) = Secret::generate()?;
    let job = format!("train_lm-{}", std::process::id());
    let coordinator = Coordinator::start("127.0.0.1:0", ranks, &job, Some(secret))?;
    let (ended, mut inbox) = runtime.mailbox();
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let mut command = this_program(ranks).map_err(|source| ProcessError::Start { rank, source })?;
        for variable in FOREIGN {
            command.env_remove(variable);
        }
        command
            .args(["--started-by", &std::process::id().to_string()])
            .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(name, value)| (name, value.to_string())))
            .envs([("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)].map(|(name, n)| (name, n.to_string())))
            .env("MASTER_ADDR", coordinator.address().ip().to_string())
            .env("MASTER_PORT", coordinator.address().port().to_string())
            .env("DIST_COORDINATOR", "external")
            .env("DIST_JOB_ID", &job)
            .env("DIST_SECRET_FILE", "fd:0");
        let child = start(command, &secret_text).map_err(|source| ProcessError::Start { rank, source })?;
        watch(&runtime, rank, &child, ended.clone())
            .map_err(|source| ProcessError::Watch { rank, source })?;
        children.0.push(child);
    }
    drop(ended);
    let mut failed = Vec::new();
    let mut last_words = None;
    while let Ok(rank) = inbox.receive(last_words) {
        let status = children.0[rank].wait().map_err(|source| ProcessError::Watch { rank, source })?;
        if !status.success() {
            failed.push((rank, status));
            last_words = last_words.or_else(|| Some(runtime.deadline(LAST_WORDS)));
        }
    }
    let Some((rank, status)) = cause(&failed) else { return Ok(0) };
    // This fails only if the receiver is gone.
    let _ = writeln!(io::stderr().lock(), "train_lm: rank {rank} failed ({status}): the rest is ended");
    Ok(exit_code(status))
}

/// Returns the rank that failed first: one that was killed, or that did not fail because of another rank. Ranks that
/// detect its failure can end before it does.
fn cause(failed: &[(usize, ExitStatus)]) -> Option<(usize, ExitStatus)> {
    let killed = |(_, status): &&(usize, ExitStatus)| status.signal().is_some();
    let own_fault = |(_, status): &&(usize, ExitStatus)| status.code() != Some(i32::from(COLLATERAL));
    let cause = failed.iter().find(killed).or_else(|| failed.iter().find(own_fault));
    cause.or_else(|| failed.first()).copied()
}

/// Executes this program again with `RAYON_NUM_THREADS` set to this process's share of the cores, unless it is set.
/// candle reads the variable when it starts to compute.
pub(crate) fn limit_threads(local_ranks: usize) -> Result<(), ProcessError> {
    if env::var_os(THREADS).is_some() {
        return Ok(());
    }
    let source = match this_program(local_ranks) {
        Ok(mut command) => command.exec(),
        Err(source) => source,
    };
    Err(ProcessError::Restart { source })
}

/// Ends this process when its parent process ends for any reason.
pub(crate) fn end_with(launcher: u32) {
    #[cfg(target_os = "linux")]
    {
        // If the kernel does not support this, the process ends when it detects that the other ranks are gone.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
    if std::os::unix::process::parent_id() != launcher {
        std::process::exit(1);
    }
}

fn this_program(local_ranks: usize) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1));
    if env::var_os(THREADS).is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        command.env(THREADS, (cores / local_ranks).max(1).to_string());
    }
    Ok(command)
}

/// Starts a child process. Passes the secret through its stdin, not through a file, an argument or a
/// variable.
fn start(mut command: Command, secret: &str) -> io::Result<Child> {
    let (reader, mut writer) = io::pipe()?;
    writer.write_all(secret.as_bytes())?;
    drop(writer);
    command.stdin(reader).stdout(Stdio::inherit()).spawn()
}

/// Reports when a child has ended. The child stays a zombie until it is waited for, so its process id is not reused.
fn watch(runtime: &Runtime, rank: usize, child: &Child, ended: Mailbox<usize>) -> io::Result<()> {
    let pid = Pid::from_child(child);
    let wait = move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), options) {}
        ended.send(rank);
    };
    runtime.spawn("wait", wait).map(drop)
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// A set of child processes. Drop kills them.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail only for a child that has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The exit code of a rank that ended because of another rank.
pub(crate) const COLLATERAL: u8 = 3;

/// The time that the other ranks have to end on their own after one has failed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Variables of a surrounding launcher's job, which would connect these processes to another job.
const FOREIGN: [&str; 4] =
    ["DIST_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"];

const THREADS: &str = "RAYON_NUM_THREADS";
