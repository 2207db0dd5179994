//! Signals that are forwarded, ignored, or stop a job temporarily.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Stdio;
use std::time::Duration;

use dist_collectives::transport::Runtime;
use rstest::rstest;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

use super::{
    behind, distctl, ends, first_lines, is_ignored, lines, running, shell_code, signal, wait_until_gone,
};

#[rstest]
#[case(Signal::INT, "INT")]
#[case(Signal::TERM, "TERM")]
#[case(Signal::HUP, "HUP")]
#[case(Signal::QUIT, "QUIT")]
fn a_signal_ends_the_ranks_and_then_distctl_itself(#[case] sent: Signal, #[case] name: &str) {
    if is_ignored(sent) {
        // The signal is not forwarded then; another test covers that.
        return;
    }
    let script = format!(
        "trap 'echo got it; trap - {name}; kill -{name} $$' {name}; echo $$; while :; do sleep 0.01; done"
    );
    let (child, pids) = running(&["-n", "2"], &script);
    signal(&child, sent);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(sent.as_raw()), "{output:?}");
    assert_eq!(lines(&output.stdout), ["got it", "got it"]);
    // The shell prints a message for a `sleep` that was signalled.
    let told = format!("distctl: SIG{name}: forwarded to every rank");
    assert!(lines(&output.stderr).contains(&told), "{output:?}");
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

/// Only the program interprets these signals.
#[rstest]
#[case(Signal::USR1, "USR1")]
#[case(Signal::USR2, "USR2")]
fn signals_without_a_meaning_of_their_own_end_no_job(#[case] sent: Signal, #[case] name: &str) {
    if is_ignored(sent) {
        return;
    }
    // A signal that ends the job would kill the ranks at once.
    let script =
        format!("trap 'sleep 0.2; echo saved; exit 0' {name}; echo $$; while :; do sleep 0.01; done");
    let (child, _) = running(&["-n", "2", "--grace", "0"], &script);
    signal(&child, sent);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["saved", "saved"]);
    let told = format!("distctl: SIG{name}: forwarded to every rank");
    assert!(lines(&output.stderr).contains(&told), "{output:?}");
}

#[cfg(target_os = "linux")]
#[rstest]
#[case(Signal::HUP, "HUP")]
#[case(Signal::INT, "INT")]
#[case(Signal::QUIT, "QUIT")]
#[case(Signal::USR1, "USR1")]
fn signals_that_the_parent_ignored_stay_ignored(#[case] sent: Signal, #[case] name: &str) {
    let launcher = distctl(&["run", "-n", "1", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let ignoring = ["sh", "-c", &format!("trap '' {name}; exec \"$0\" \"$@\"")];
    let (child, _) = first_lines(behind(&ignoring, &launcher), 1);
    signal(&child, sent);
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(Signal::TERM.as_raw()), "{output:?}");
    assert_eq!(lines(&output.stderr), ["distctl: SIGTERM: forwarded to every rank"]);
}

/// A child of a process that ignores SIGCHLD inherits that.
#[test]
fn ended_ranks_are_reaped_although_the_parent_ignores_sigchld() {
    let launcher = distctl(&["run", "-n", "2", "--", "sh", "-c", "sleep 0.$RANK; exit $((RANK * 7))"]);
    let output = behind(&["sh", "-c", "trap '' CHLD; exec \"$0\" \"$@\""], &launcher).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(lines(&output.stderr), ["distctl: rank 1 exited with code 7; ending the others"]);
}

/// Waits until a process is stopped, or is no longer stopped.
#[cfg(target_os = "linux")]
fn wait_until_stopped(pid: &str, stopped: bool) {
    let state = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        status.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    let (runtime, millisecond) = (Runtime::system(), Duration::from_millis(1));
    let in_time = (0..30_000).any(|_| {
        runtime.sleep(millisecond);
        state() == stopped
    });
    assert!(in_time, "process {pid}: stopped is not {stopped}");
}

/// Returns the parent of a process.
#[cfg(target_os = "linux")]
fn parent(pid: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    status.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap().to_owned()
}

/// A script that starts distctl and waits for it.
#[cfg(target_os = "linux")]
const SCRIPT: [&str; 3] = ["sh", "-c", "\"$0\" \"$@\"; exit $?"];

/// A PID namespace, in which only the started processes are visible.
#[cfg(target_os = "linux")]
const CONTAINER: [&str; 5] = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

#[cfg(target_os = "linux")]
#[rstest]
#[case(&["env"])]
#[case(&SCRIPT)]
fn ranks_stop_and_continue_with_the_launcher(#[case] starter: &[&str]) {
    let ranks = ["run", "-n", "2", "--", "sh", "-c", "echo $PPID $$; exec sleep 1000"];
    let mut command = behind(starter, &distctl(&ranks));
    // A shell starts a job in this way.
    command.process_group(0);
    let (child, pids) = first_lines(command, 2);
    let mut processes: Vec<&str> = pids.iter().flat_map(|pids| pids.split(' ')).collect();
    let front = parent(processes[0]);
    processes.push(&front);
    let distctl = Pid::from_raw(front.parse().unwrap()).unwrap();
    for (sent, stopped) in [(Signal::TSTP, true), (Signal::CONT, false), (Signal::TSTP, true)] {
        kill_process(distctl, sent).unwrap();
        processes.iter().for_each(|pid| wait_until_stopped(pid, stopped));
    }
    kill_process(distctl, Signal::CONT).unwrap();
    kill_process(distctl, Signal::TERM).unwrap();
    assert_eq!(shell_code(child.wait_with_output().unwrap().status), Some(143));
}

#[cfg(target_os = "linux")]
#[rstest]
#[case::a_session_of_its_own(&["setsid"])]
#[case::a_script(&[&["setsid"], &SCRIPT[..]].concat())]
#[case::with_an_invisible_session_leader(&[&["setsid"], &CONTAINER[..], &SCRIPT[..]].concat())]
fn a_job_that_no_shell_can_continue_is_not_stopped(#[case] starter: &[&str]) {
    let script =
        "read -r _ _ _ front _ < /proc/$PPID/stat; kill -TSTP $front; kill -TERM $front; exec sleep 1000";
    let mut command = behind(starter, &distctl(&["run", "-n", "1", "--", "sh", "-c", script]));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let ended = ends(&started);
    // A stopped process would never end.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    assert_eq!((ended, shell_code(child.wait().unwrap())), (true, Some(143)));
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed() {
    let (child, pids) =
        running(&["-n", "2", "--grace", "0.1"], "trap '' TERM; echo $$; while :; do sleep 1; done");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait_with_output().unwrap().status.signal(), Some(Signal::TERM.as_raw()));
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

/// A terminal sends Ctrl-C to all foreground processes.
#[test]
fn ctrl_c_ends_a_loop_of_jobs_in_a_shell() {
    if is_ignored(Signal::INT) {
        return;
    }
    let jobs = r#"for i in 1 2 3; do "$0" "$@"; echo job $i has ended >&2; done"#;
    let mut command = behind(
        &["bash", "-c", jobs],
        &distctl(&["run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep 1000"]),
    );
    command.process_group(0);
    let (child, pids) = first_lines(command, 2);
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(lines(&output.stderr), ["distctl: SIGINT: forwarded to every rank"], "{output:?}");
    assert_eq!(output.status.signal(), Some(Signal::INT.as_raw()), "{output:?}");
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

/// The program has handled the signal as a request.
#[test]
fn a_job_whose_ranks_all_return_0_after_a_signal_has_succeeded() {
    let (child, _) = running(&["-n", "2"], "trap 'exit 0' TERM; echo $$; while :; do sleep 0.01; done");
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// The process that is killed.
#[cfg(target_os = "linux")]
#[derive(Debug, Clone, Copy)]
enum Killed {
    Front,
    Launcher,
    /// The front process, while all processes are stopped.
    Stopped,
}

#[cfg(target_os = "linux")]
const WRAPPER: &str = "sleep 1000 & echo $PPID $$ $!; wait; true";

#[cfg(target_os = "linux")]
#[rstest]
#[case::a_program("echo $PPID $$; exec sleep 1000")]
#[case::a_wrapper(WRAPPER)]
#[case::a_wrapper_that_ignores_signals("trap '' TERM HUP INT; sleep 1000 & echo $PPID $$ $!; wait; true")]
#[case::a_session_of_its_own(
    "echo $PPID $$ $(setsid -f sh -c 'echo $$; exec >&2; exec sleep 1000'); wait; exec sleep 1000"
)]
#[case::a_stubborn_session_of_its_own(
    "echo $PPID $$ $(setsid -f sh -c 'trap \"\" TERM; echo $$; exec >&2; while :; do sleep 0.1; done'); exec sleep 1000"
)]
fn no_process_of_a_job_outlives_distctl(
    #[case] script: &str,
    #[values(Killed::Front, Killed::Launcher, Killed::Stopped)] killed: Killed,
) {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("{script}; exit 0");
    let mut command = distctl(&["run", "-n", "3", "--", "sh", "-c", &script]);
    command.env("XDG_RUNTIME_DIR", folder.path()).process_group(0);
    let (mut child, pids) = first_lines(command, 3);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "the secret");
    let processes: Vec<&str> = pids.iter().flat_map(|pids| pids.split(' ')).collect();
    let launcher = Pid::from_raw(processes[0].parse().unwrap()).unwrap();
    match killed {
        Killed::Front => child.kill().unwrap(),
        Killed::Launcher => kill_process(launcher, Signal::KILL).unwrap(),
        Killed::Stopped => {
            signal(&child, Signal::TSTP);
            wait_until_stopped(&child.id().to_string(), true);
            child.kill().unwrap();
        }
    }
    assert_eq!(shell_code(child.wait().unwrap()), Some(137));
    processes.iter().for_each(|pid| wait_until_gone(pid));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "the secret");
}

/// Tests all subcommands that start jobs.
#[cfg(target_os = "linux")]
#[rstest]
#[case(&["chaos", "--ranks", "2", "--faults", "1000"])]
#[case(&["bench", "all_reduce", "--bytes", "64M", "--samples", "1000"])]
#[case(&["run", "-n", "1", "--", env!("CARGO_BIN_EXE_distctl"), "run", "-n", "2", "--", "sleep", "1000"])]
fn no_command_leaves_a_secret_or_a_launcher(#[case] arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = distctl(arguments);
    let mut child = command.env("XDG_RUNTIME_DIR", folder.path()).stdout(Stdio::null()).spawn().unwrap();
    let files = || std::fs::read_dir(&folder).unwrap().count();
    let runtime = Runtime::system();
    let jobs = if arguments.contains(&"sleep") { 2 } else { 1 };
    assert!((0..30_000).any(|_| {
        runtime.sleep(Duration::from_millis(1));
        files() == jobs
    }));
    let front = child.id().to_string();
    let launcher = std::fs::read_to_string(format!("/proc/{front}/task/{front}/children")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until_gone(launcher.trim_end());
    assert_eq!(files(), 0);
}
