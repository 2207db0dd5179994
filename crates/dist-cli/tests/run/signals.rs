//! Signals: passed on, ignored, and those that stop a job for a while.

use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use dist_collectives::Runtime;
use rstest::rstest;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

use super::{behind, distctl, ends, first_lines, lines, running, signal, wait_until_gone};

/// Whether this process ignores a signal, as behind nohup, and so all that it starts.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let set = set.map_or(0, |set| u64::from_str_radix(set.trim(), 16).unwrap());
    set >> (signal.as_raw() - 1) & 1 == 1
}

#[rstest]
#[case(Signal::INT, "INT", 130)]
#[case(Signal::TERM, "TERM", 143)]
#[case(Signal::HUP, "HUP", 129)]
#[case(Signal::QUIT, "QUIT", 131)]
fn signals_are_passed_on(#[case] sent: Signal, #[case] name: &str, #[case] code: i32) {
    if is_ignored(sent) {
        // Then it is not passed on, which another test is about.
        return;
    }
    let script = format!(
        "trap 'echo got it; trap - {name}; kill -{name} $$' {name}; echo $$; while :; do sleep 0.01; done"
    );
    let (child, pids) = running(&["-n", "2"], &script);
    signal(&child, sent);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert_eq!(lines(&output.stdout), ["got it", "got it"]);
    // The shell itself has a word for a sleep that was signalled.
    let told = format!("distctl: SIG{name}: passed on to every rank");
    assert!(lines(&output.stderr).contains(&told), "{output:?}");
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

/// They mean what the program makes of them.
#[rstest]
#[case(Signal::USR1, "USR1")]
#[case(Signal::USR2, "USR2")]
fn signals_without_a_meaning_of_their_own_end_no_job(#[case] sent: Signal, #[case] name: &str) {
    if is_ignored(sent) {
        return;
    }
    // Whoever ends the job has no grace.
    let script =
        format!("trap 'sleep 0.2; echo saved; exit 0' {name}; echo $$; while :; do sleep 0.01; done");
    let (child, _) = running(&["-n", "2", "--grace", "0"], &script);
    signal(&child, sent);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["saved", "saved"]);
    let told = format!("distctl: SIG{name}: passed on to every rank");
    assert!(lines(&output.stderr).contains(&told), "{output:?}");
}

#[cfg(target_os = "linux")]
#[rstest]
#[case(Signal::HUP, "HUP")]
#[case(Signal::INT, "INT")]
#[case(Signal::QUIT, "QUIT")]
#[case(Signal::USR1, "USR1")]
fn signals_that_were_ignored_from_the_start_stay_so(#[case] sent: Signal, #[case] name: &str) {
    let launcher = distctl(&["run", "-n", "1", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let ignoring = ["sh", "-c", &format!("trap '' {name}; exec \"$0\" \"$@\"")];
    let (child, _) = first_lines(behind(&ignoring, &launcher), 1);
    signal(&child, sent);
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    assert_eq!(lines(&output.stderr), ["distctl: SIGTERM: passed on to every rank"]);
}

/// Where a starter does not want to hear of its children, neither would who it starts.
#[test]
fn ranks_that_end_are_heard_of_whatever_the_starter_ignores() {
    let launcher = distctl(&["run", "-n", "2", "--", "sh", "-c", "sleep 0.$RANK; exit $((RANK * 7))"]);
    let output = behind(&["sh", "-c", "trap '' CHLD; exec \"$0\" \"$@\""], &launcher).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(lines(&output.stderr), ["distctl: rank 1 exited with code 7; ending the others"]);
}

/// Waits until a process stands still, or no longer does.
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

/// A script that starts the launcher, and stays.
#[cfg(target_os = "linux")]
const SCRIPT: [&str; 3] = ["sh", "-c", "\"$0\" \"$@\"; exit $?"];

/// Where there are only the processes of what it starts.
#[cfg(target_os = "linux")]
const CONTAINER: [&str; 5] = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

#[cfg(target_os = "linux")]
#[rstest]
#[case(&["env"])]
#[case(&SCRIPT)]
fn ranks_stop_and_go_on_with_the_launcher(#[case] starter: &[&str]) {
    let ranks = ["run", "-n", "2", "--", "sh", "-c", "echo $PPID $$; exec sleep 1000"];
    let mut command = behind(starter, &distctl(&ranks));
    // As a shell starts a job.
    command.process_group(0);
    let (child, pids) = first_lines(command, 2);
    let processes: Vec<&str> = pids.iter().flat_map(|pids| pids.split(' ')).collect();
    let launcher = Pid::from_raw(processes[0].parse().unwrap()).unwrap();
    for (sent, stopped) in [(Signal::TSTP, true), (Signal::CONT, false), (Signal::TSTP, true)] {
        kill_process(launcher, sent).unwrap();
        processes.iter().for_each(|pid| wait_until_stopped(pid, stopped));
    }
    kill_process(launcher, Signal::CONT).unwrap();
    kill_process(launcher, Signal::TERM).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
}

#[cfg(target_os = "linux")]
#[rstest]
#[case::a_session_of_its_own(&["setsid"])]
#[case::a_script(&[&["setsid"], &SCRIPT[..]].concat())]
#[case::out_of_sight_of_who_leads_it(&[&["setsid"], &CONTAINER[..], &SCRIPT[..]].concat())]
fn what_no_shell_can_let_go_on_is_not_stopped(#[case] starter: &[&str]) {
    let script = "kill -TSTP $PPID; kill -TERM $PPID; exec sleep 1000";
    let mut command = behind(starter, &distctl(&["run", "-n", "1", "--", "sh", "-c", script]));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let ended = ends(&started);
    // One that is stopped would stay.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    assert_eq!((ended, child.wait().unwrap().code()), (true, Some(143)));
}

#[test]
fn a_rank_that_will_not_end_is_killed() {
    let (child, pids) =
        running(&["-n", "2", "--grace", "0.1"], "trap '' TERM; echo $$; while :; do sleep 1; done");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(137));
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_end_when_the_launcher_is_killed() {
    let (mut child, pids) = running(&["-n", "3"], "echo $$; exec sleep 1000");
    child.kill().unwrap();
    child.wait().unwrap();
    pids.iter().for_each(|pid| wait_until_gone(pid));
}
