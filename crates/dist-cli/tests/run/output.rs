//! Output of ranks: its destination, and readers that do not take it.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};

use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::{distctl, lines, run, running, signal, wait_until_gone};

#[test]
fn the_job_ends_when_the_reader_closes_its_output() {
    let (mut child, pids) = running(&["-n", "1"], "echo $$; while echo more; do :; done");
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141), "{output:?}");
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

#[cfg(target_os = "linux")]
#[rstest]
#[case("echo $RANK; exec sleep 1000")]
#[case("exec yes")]
#[case("echo $RANK")]
fn a_full_disk_is_reported_and_the_job_not_restarted(#[case] script: &str) {
    let mut command = distctl(&["run", "-n", "2", "--max-restarts", "3", "--", "sh", "-c", script]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = command.stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told =
        "distctl: cannot write the output: No space left on device (os error 28); ending the job".to_owned();
    assert_eq!(lines(&output.stderr), [told]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_log_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("r1.log");
    std::os::unix::fs::symlink("/dev/full", &log).unwrap();
    let output =
        run(&["-n", "2", "--log-dir", folder.path().to_str().unwrap()], "echo $RANK; exec sleep 1000");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told = format!(
        "distctl: cannot write {}: No space left on device (os error 28); ending the job",
        log.display()
    );
    assert_eq!(lines(&output.stderr), [told]);
}

#[test]
fn the_job_ends_although_its_messages_are_not_read() {
    // The pipe is full from the start.
    let (_reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'\n'; 1 << 16]).unwrap();
    let script = "echo $$; test $RANK = 1 && exit 7; exec sleep 1000";
    let mut command = distctl(&["run", "-n", "2", "--", "sh", "-c", script]);
    let output = command.stderr(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
}

/// Starts a job whose only rank has ended after printing more than was read. Returns the job and the rank's
/// output.
#[cfg(target_os = "linux")]
fn waiting_for_its_reader(options: &[&str]) -> (Child, String) {
    // The output exceeds the pipes and the launcher's buffer, so that the launcher blocks while forwarding a
    // line.
    let script = "echo $$ >&2; seq 20000";
    let mut command = distctl(&[&["run", "-n", "1"], options, &["--", "sh", "-c", script]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut error = BufReader::new(child.stderr.take().unwrap());
    let mut pid = String::new();
    error.read_line(&mut pid).unwrap();
    child.stderr = Some(error.into_inner());
    // The process is gone after the launcher has reaped it.
    while std::fs::exists(format!("/proc/{}", pid.trim_end())).unwrap() {}
    (child, (1..=20000).map(|line| format!("{line}\n")).collect())
}

#[cfg(target_os = "linux")]
#[test]
fn the_reader_of_the_output_may_pause() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = waiting_for_its_reader(&["--log-dir", folder.path().to_str().unwrap()]);
    let launcher = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    // The pause is longer than the launcher waits for a process that holds the pipe open.
    let pause = Timespec { tv_sec: 6, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&launcher, PollFlags::IN)], Some(&pause)).unwrap(), 0);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap() == printed);
    let log = std::fs::read_to_string(folder.path().join("r0.log")).unwrap();
    assert_eq!(lines(log.as_bytes()).len(), 20001);
}

/// Returns both ends of a pipe that its writer has made non-blocking and has filled.
#[cfg(target_os = "linux")]
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let full = writer.write_all(&[b'\n'; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    (reader, writer)
}

#[cfg(target_os = "linux")]
#[rstest]
// The last line is longer than the pipe.
#[case::output(&["run", "-n", "1", "--", "sh", "-c", "seq 20000; printf %0200000d 20001"], false)]
#[case::error_output(&["run", "-n", "1", "--", "sh", "-c", "exec >&2; seq 20000; printf %0200000d 20001"], true)]
#[case::own_words(&["run", "-n", "1", "--", "sh", "-c", "exit 7"], true)]
#[case::help(&["run", "--help"], false)]
#[case::wrong_arguments(&["run", "--no-such-option"], true)]
#[case::results(&["sim", "all_reduce", "--ranks", "2,4,8,16", "--bytes", "1,1K,1M"], false)]
fn nothing_is_lost_if_a_full_pipe_is_non_blocking(#[case] arguments: &[&str], #[case] is_error: bool) {
    let expected = distctl(arguments).output().unwrap();
    let (mut reader, writer) = full_pipe();
    let mut command = distctl(arguments);
    if is_error {
        command.stderr(writer)
    } else {
        command.stdout(writer)
    };
    let mut child = command.spawn().unwrap();
    // The copies of the writing end in `command` would keep the pipe open.
    drop(command);
    let launcher = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let half_a_second = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    assert_eq!(poll(&mut [PollFd::new(&launcher, PollFlags::IN)], Some(&half_a_second)).unwrap(), 0);
    let mut printed = String::new();
    reader.read_to_string(&mut printed).unwrap();
    assert_eq!(child.wait().unwrap().code(), expected.status.code());
    let expected = if is_error { expected.stderr } else { expected.stdout };
    // The bytes that filled the pipe come first.
    assert!(printed.trim_start_matches('\n').as_bytes() == expected, "{} bytes", printed.len());
}

#[cfg(target_os = "linux")]
#[test]
fn a_launcher_whose_output_is_not_read_ends_by_a_signal() {
    let (mut child, _) = waiting_for_its_reader(&[]);
    // If it were dropped here, the closed pipe would end the job.
    let _output = child.stdout.take().unwrap();
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(Signal::TERM.as_raw()), "{output:?}");
    assert!(
        lines(&output.stderr)
            .contains(&"distctl: discarding output, because its reader does not take it".to_owned()),
        "{output:?}"
    );
}

#[cfg(target_os = "linux")]
#[rstest]
#[case("exec sleep 60")]
#[case("trap '' PIPE; while :; do echo more; sleep 0.1; done")]
#[case("trap '' TERM; while :; do sleep 0.1; done")]
fn a_process_that_has_left_the_group_of_its_rank_ends_with_the_job(#[case] stay: &str) {
    // The process has left the group of its rank when it no longer holds the pipe of `$(...)`.
    let script = format!("echo $(setsid -f sh -c \"echo \\$\\$; exec >&2; {}\")", stay.replace('$', "\\$"));
    let output = run(&["-n", "1"], &script);
    assert!(output.status.success(), "{output:?}");
    wait_until_gone(&lines(&output.stdout)[0]);
}

#[rstest]
#[case(&["--help"])]
#[case(&["man"])]
#[case(&["completions", "bash"])]
#[case(&["reference"])]
#[case(&["sim", "all_reduce", "--ranks", "2"])]
#[case(&["verify", "--max-ranks", "2"])]
#[case(&["chaos", "--ranks", "2", "--faults", "1", "--json"])]
fn closed_stdout_is_not_reported_as_an_error(#[case] arguments: &[&str]) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = distctl(arguments).stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    // Progress messages may appear on a busy machine.
    assert!(lines(&output.stderr).iter().all(|line| line.contains(" s: ")), "{output:?}");
}

#[test]
fn an_invalid_log_filter_is_reported_once() {
    let mut command = distctl(&["run", "-n", "2", "--", "true"]);
    let output = command.env("DIST_LOG", "dist_transport=loud").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.starts_with("distctl: DIST_LOG=\"dist_transport=loud\" is ignored: ")
            && told.lines().count() == 1,
        "{told}"
    );
}

#[test]
fn lines_are_not_mixed_however_the_ranks_write_them() {
    let script = "i=0; while [ $i -lt 300 ]; do printf \"begin-$RANK-\"; printf \"%s\" $i; echo -end-$RANK; i=$((i+1)); done";
    let output = run(&["-n", "4", "--tag"], script);
    let mut expected: Vec<_> =
        (0..4).flat_map(|r| (0..300).map(move |i| format!("[r{r}] begin-{r}-{i}-end-{r}"))).collect();
    expected.sort();
    assert_eq!(lines(&output.stdout), expected);
}

#[test]
fn logs_contain_the_output_of_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    run(&["-n", "2", "--log-dir", logs.to_str().unwrap()], "echo out $RANK; echo err $RANK >&2");
    for rank in 0..2 {
        let log = std::fs::read(logs.join(format!("r{rank}.log"))).unwrap();
        assert_eq!(lines(&log), [format!("err {rank}"), format!("out {rank}")]);
    }
}
