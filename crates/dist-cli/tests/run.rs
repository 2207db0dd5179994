//! `distctl run` as a person uses it: real processes, their output, their exit codes, their signals.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use dist_collectives::{Communicator, Runtime};
use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

fn distctl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    command.env("DIST_COSTS", "off");
    // A launcher that is killed leaves its secret behind; let that be where tests leave things.
    command.args(arguments).stdin(Stdio::null()).env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// The command, started by another program: these words, which it is put behind.
#[cfg(target_os = "linux")]
fn behind(starter: &[&str], command: &Command) -> Command {
    let mut started = Command::new(starter[0]);
    started.args(&starter[1..]).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    started.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    started
}

/// Runs `script` with sh on every rank.
fn run(options: &[&str], script: &str) -> Output {
    distctl(&[&["run"], options, &["--", "sh", "-c", script]].concat()).output().unwrap()
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// A job that goes on until it is stopped, and the first line of each rank.
fn running(options: &[&str], script: &str) -> (Child, Vec<String>) {
    let ranks: usize = options[1].parse().unwrap();
    first_lines(distctl(&[&["run"], options, &["--", "sh", "-c", script]].concat()), ranks)
}

/// What a command has started, and the first lines that it prints.
fn first_lines(mut command: Command, count: usize) -> (Child, Vec<String>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let first = (0..count).map(|_| {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    });
    let first = first.collect();
    child.stdout = Some(output.into_inner());
    (child, first)
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Whether this process ignores a signal, as behind nohup, and so all that it starts.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let set = set.map_or(0, |set| u64::from_str_radix(set.trim(), 16).unwrap());
    set >> (signal.as_raw() - 1) & 1 == 1
}

/// Returns when the process is gone.
fn wait_until_gone(pid: &str) {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    // A process that is gone already cannot be opened.
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
        assert!(ends(&process), "process {pid} stays");
    }
}

/// Whether a process ends while there is any sense in waiting.
fn ends(process: &OwnedFd) -> bool {
    let half_a_minute = Timespec { tv_sec: 30, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&half_a_minute)).unwrap() == 1
}

#[test]
fn every_rank_learns_its_place() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $DIST_COORDINATOR";
    let output = run(&["-n", "3"], script);
    let expected = ["0 0 3 3 127.0.0.1 external", "1 1 3 3 127.0.0.1 external", "2 2 3 3 127.0.0.1 external"];
    assert_eq!(lines(&output.stdout), expected);
    assert!(output.status.success());
}

#[test]
fn the_secret_is_private_and_gone_afterwards() {
    let output =
        run(&["-n", "1"], "stat -c '%a %s' $DIST_SECRET_FILE; echo $DIST_SECRET_FILE; env | grep -c SECRET");
    let [path, count, private] = &lines(&output.stdout)[..] else { panic!("{output:?}") };
    assert_eq!((private.as_str(), count.as_str()), ("600 64", "1"), "{path}");
    assert!(!std::path::Path::new(path).exists(), "{path}");
}

#[rstest]
#[case(None, 1)]
#[case(Some("7"), 7)]
fn compute_threads_share_the_cores_unless_said_otherwise(#[case] set: Option<&str>, #[case] threads: usize) {
    let mut command = distctl(&["run", "-n", "64", "--", "sh", "-c", "echo $RAYON_NUM_THREADS"]);
    command.env_remove("RAYON_NUM_THREADS").envs(set.map(|threads| ("RAYON_NUM_THREADS", threads)));
    let cores = std::thread::available_parallelism().unwrap().get();
    let expected = if set.is_some() { threads } else { (cores / 64).max(1) };
    assert_eq!(lines(&command.output().unwrap().stdout), vec![expected.to_string(); 64]);
}

#[rstest]
#[case("exit 7", 7, "rank 2 exited with code 7")]
#[case("kill -KILL $$", 137, "rank 2 was killed by SIGKILL")]
fn the_first_failing_rank_is_named_and_the_rest_is_ended(
    #[case] end: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let output = run(&["-n", "4"], &format!("test $RANK = 2 && {end}; sleep 1000"));
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert_eq!(lines(&output.stderr), [format!("distctl: {words}; ending the others")]);
}

/// How rank 1 ends, for [`be_a_rank`].
const END: &str = "TEST_END";

/// What the ranks of the next test do: this test binary is their program.
fn be_a_rank(end: &str) {
    let mut comm = Communicator::from_env().unwrap();
    let mut pids = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut pids).unwrap();
    if comm.rank() != 1 {
        comm.barrier().unwrap_err();
        std::process::exit(3);
    }
    // It cannot end before this rank does or gives up.
    let pid = Pid::from_raw(pids[0].try_into().unwrap()).unwrap();
    let victim = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    if end == "at once" {
        std::process::exit(7);
    }
    let panicked = std::panic::catch_unwind(AssertUnwindSafe(move || {
        let _comm = comm;
        panic!("rank 1 gives up");
    }));
    panicked.unwrap_err();
    // The launcher sees this end second.
    assert!(ends(&victim));
    std::process::exit(7);
}

#[rstest]
#[case("at once", "died")]
#[case("after a victim", "panicked or gave up")]
fn the_rank_that_began_is_named_whoever_ends_first(#[case] end: &str, #[case] words: &str) {
    if let Ok(end) = std::env::var(END) {
        return be_a_rank(&end);
    }
    let program = std::env::current_exe().unwrap();
    let test = std::thread::current().name().unwrap().to_owned();
    for _ in 0..5 {
        let mut command = distctl(&["run", "-n", "3", "--", program.to_str().unwrap(), "--exact", &test]);
        let output = command.arg("--nocapture").env(END, end).env("DIST_LOG", "off").output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let told = format!("distctl: rank 1 exited with code 7 (it {words}); ending the others");
        assert!(lines(&output.stderr).contains(&told), "{output:?}");
    }
}

#[test]
fn the_cause_is_named_though_it_ended_as_if_all_were_well() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        let alone = comm.rank() == 0 && comm.barrier().is_ok() && comm.barrier().is_err();
        if comm.rank() == 1 {
            comm.barrier().unwrap();
        }
        std::process::exit(if alone { 3 } else { 0 });
    }
    let program = std::env::current_exe().unwrap();
    let test = std::thread::current().name().unwrap().to_owned();
    let mut command = distctl(&["run", "-n", "2", "--", program.to_str().unwrap(), "--exact", &test]);
    let output = command.arg("--nocapture").env(END, "early").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let told = lines(&output.stderr);
    let begins = |line: &String| line.starts_with("distctl: rank 0 exited with code 3 (rank 1 ");
    assert!(told.iter().any(begins) && told.iter().all(|line| line.starts_with("distctl: ")), "{told:?}");
}

#[cfg(target_os = "linux")]
#[rstest]
#[case(&["--ranks", "2"], true)]
#[case(&["--ranks", "2", "--bind", "none"], false)]
#[case(&["--ranks", "1"], false)]
fn each_rank_is_bound_to_its_share_of_the_cores(#[case] options: &[&str], #[case] bound: bool) {
    let cores = std::thread::available_parallelism().unwrap().get();
    let ran = run(options, "nproc; test -z \"$DISTCTL_CORES\" && grep Cpus_allowed: /proc/self/status");
    assert!(ran.status.success(), "{ran:?}");
    let lines = lines(&ran.stdout);
    let (sets, counts): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.starts_with("Cpus"));
    let counts: Vec<usize> = counts.iter().map(|count| count.parse().unwrap()).collect();
    match (bound, cores) {
        (false, _) => assert!(counts.iter().all(|&count| count == cores), "{lines:?}"),
        (true, 1) => assert_eq!(counts, [1, 1]),
        (true, _) => {
            assert_eq!(counts.iter().sum::<usize>(), cores, "{lines:?}");
            assert_ne!(sets[0], sets[1]);
        }
    }
}

#[test]
fn ranks_do_not_see_what_a_surrounding_job_has_set() {
    let mut command =
        distctl(&["run", "-n", "1", "--", "sh", "-c", "env | grep -E '^(TORCHELASTIC|DIST_PORT)'"]);
    for name in
        ["DIST_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"]
    {
        command.env(name, "1");
    }
    assert_eq!(lines(&command.output().unwrap().stdout), [""; 0]);
}

#[test]
fn the_others_may_say_what_they_saw() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo").display().to_string();
    // A process that has ended can be signalled until it is reaped.
    let see =
        format!("read pid < {fifo}; while kill -0 $pid 2>&-; do :; done; echo rank 0 is gone >&2; exit 1");
    let script = format!("mkfifo {fifo} 2>&-; case $RANK in 0) echo $$ > {fifo}; exit 3;; 1) {see};; esac");
    let output = run(&["-n", "2"], &script);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(lines(&output.stderr).contains(&"rank 0 is gone".to_owned()), "{output:?}");
}

#[test]
fn what_a_rank_leaves_behind_is_ended() {
    let output = run(&["-n", "2"], "sleep 1000 & echo $!");
    assert!(output.status.success());
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
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

#[cfg(target_os = "linux")]
#[rstest]
#[case(Signal::HUP, "HUP")]
#[case(Signal::INT, "INT")]
#[case(Signal::QUIT, "QUIT")]
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

#[test]
fn the_job_ends_when_nobody_reads_its_output() {
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
fn a_full_disk_is_said_and_the_job_not_started_again(#[case] script: &str) {
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
fn the_job_ends_when_nobody_takes_its_words() {
    // The pipe is full from the beginning.
    let (_reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'\n'; 1 << 16]).unwrap();
    let script = "echo $$; test $RANK = 1 && exit 7; exec sleep 1000";
    let mut command = distctl(&["run", "-n", "2", "--", "sh", "-c", script]);
    let output = command.stderr(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
}

/// A job whose only rank has printed more than this process has taken, and is gone; and what it printed.
#[cfg(target_os = "linux")]
fn waiting_for_its_reader(options: &[&str]) -> (Child, String) {
    // More than the pipes and the launcher hold leaves the launcher with a line that it cannot pass on.
    let script = "echo $$ >&2; seq 20000";
    let mut command = distctl(&[&["run", "-n", "1"], options, &["--", "sh", "-c", script]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut error = BufReader::new(child.stderr.take().unwrap());
    let mut pid = String::new();
    error.read_line(&mut pid).unwrap();
    child.stderr = Some(error.into_inner());
    // It is gone when the launcher has seen its end.
    while std::fs::exists(format!("/proc/{}", pid.trim_end())).unwrap() {}
    (child, (1..=20000).map(|line| format!("{line}\n")).collect())
}

#[cfg(target_os = "linux")]
#[test]
fn who_takes_the_output_may_pause() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = waiting_for_its_reader(&["--log-dir", folder.path().to_str().unwrap()]);
    let launcher = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    // Longer than the launcher waits for a process that holds the pipe and says nothing.
    let pause = Timespec { tv_sec: 6, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&launcher, PollFlags::IN)], Some(&pause)).unwrap(), 0);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap() == printed);
    let log = std::fs::read_to_string(folder.path().join("r0.log")).unwrap();
    assert_eq!(lines(log.as_bytes()).len(), 20001);
}

/// What is left of a pipe when its writer has made it non-blocking and written as much as it takes: both ends.
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
#[case::results(&["sim", "all_reduce", "--ranks", "2,4,8,16", "--bytes", "1,1K,1M"], false)]
fn nothing_is_lost_where_a_full_pipe_does_not_block(#[case] arguments: &[&str], #[case] is_error: bool) {
    let expected = distctl(arguments).output().unwrap();
    let (mut reader, writer) = full_pipe();
    let mut command = distctl(arguments);
    if is_error {
        command.stderr(writer)
    } else {
        command.stdout(writer)
    };
    let mut child = command.spawn().unwrap();
    // Its copies of the pipe's end would keep the pipe open.
    drop(command);
    let launcher = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let half_a_second = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    assert_eq!(poll(&mut [PollFd::new(&launcher, PollFlags::IN)], Some(&half_a_second)).unwrap(), 0);
    let mut printed = String::new();
    reader.read_to_string(&mut printed).unwrap();
    assert_eq!(child.wait().unwrap().code(), expected.status.code());
    let expected = if is_error { expected.stderr } else { expected.stdout };
    // What it was full of comes first.
    assert!(printed.trim_start_matches('\n').as_bytes() == expected, "{} bytes", printed.len());
}

#[cfg(target_os = "linux")]
#[test]
fn a_launcher_whose_output_nobody_takes_ends_by_a_signal() {
    let (mut child, _) = waiting_for_its_reader(&[]);
    // Dropped here, it would end the job by itself.
    let _output = child.stdout.take().unwrap();
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    assert!(
        lines(&output.stderr).contains(&"distctl: leaving output that nobody takes".to_owned()),
        "{output:?}"
    );
}

#[cfg(target_os = "linux")]
#[rstest]
#[case("exec sleep 60")]
#[case("trap '' PIPE; i=0; while [ $((i += 1)) -lt 600 ]; do echo more; sleep 0.1; done")]
fn a_process_that_keeps_the_output_is_not_waited_for(#[case] stay: &str) {
    // It has left the group of the rank, which is killed, when it no longer holds the pipe of `$(...)`.
    let script = format!("echo $(setsid -f sh -c \"echo \\$\\$; exec >&2; {}\")", stay.replace('$', "\\$"));
    let output = run(&["-n", "1"], &script);
    assert!(output.status.success(), "{output:?}");
    let stray = Pid::from_raw(lines(&output.stdout)[0].parse().unwrap()).unwrap();
    kill_process(stray, Signal::KILL).expect("it is still there");
}

#[test]
fn whole_lines_come_out_however_the_ranks_write_them() {
    let script = "i=0; while [ $i -lt 300 ]; do printf \"begin-$RANK-\"; printf \"%s\" $i; echo -end-$RANK; i=$((i+1)); done";
    let output = run(&["-n", "4", "--tag"], script);
    let mut expected: Vec<_> =
        (0..4).flat_map(|r| (0..300).map(move |i| format!("[r{r}] begin-{r}-{i}-end-{r}"))).collect();
    expected.sort();
    assert_eq!(lines(&output.stdout), expected);
}

#[test]
fn logs_hold_what_each_rank_printed() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    run(&["-n", "2", "--log-dir", logs.to_str().unwrap()], "echo out $RANK; echo err $RANK >&2");
    for rank in 0..2 {
        let log = std::fs::read(logs.join(format!("r{rank}.log"))).unwrap();
        assert_eq!(lines(&log), [format!("err {rank}"), format!("out {rank}")]);
    }
}

/// A job on two machines, which are both this one.
struct Machines {
    /// Where its secret is.
    folder: tempfile::TempDir,
    rendezvous: String,
    options: Vec<&'static str>,
}

impl Machines {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut secret = OpenOptions::new();
        let mut secret =
            secret.write(true).create_new(true).mode(0o600).open(folder.path().join("secret")).unwrap();
        secret.write_all(b"known to the ranks of this job").unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        Self { folder, rendezvous: free.local_addr().unwrap().to_string(), options: Vec::new() }
    }

    /// What one of them starts, so many times.
    fn start(&self, machine: usize, ranks: &str, command: &[&str]) -> Command {
        let machine = machine.to_string();
        let place = ["--nnodes", "2", "--node-rank", &machine, "--rdzv", &self.rendezvous];
        let mut launcher =
            distctl(&[&["run", "-n", ranks], &place[..], &self.options, &["--"], command].concat());
        launcher.env("DIST_SECRET_FILE", self.folder.path().join("secret"));
        launcher.stdout(Stdio::piped()).stderr(Stdio::piped());
        launcher
    }

    /// What becomes of both if all ranks are this test, told what to do.
    fn run_this_test(&self, ranks: &str, task: &str) -> [Output; 2] {
        let program = std::env::current_exe().unwrap().display().to_string();
        let test = std::thread::current().name().unwrap().to_owned();
        let launched = [0, 1].map(|machine| {
            let command = [&program, "--exact", &test, "--nocapture"];
            self.start(machine, ranks, &command).env(END, task).spawn().unwrap()
        });
        launched.map(|launcher| launcher.wait_with_output().unwrap())
    }
}

#[test]
fn every_rank_learns_its_place_among_those_of_all_machines() {
    let machines = Machines::new();
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
    for (machine, places) in [["0 0 4 2", "1 1 4 2"], ["2 0 4 2", "3 1 4 2"]].into_iter().enumerate() {
        let output = machines.start(machine, "2", &["sh", "-c", script]).output().unwrap();
        assert_eq!(lines(&output.stdout), places.map(|place| format!("{place} {}", machines.rendezvous)));
        assert!(output.status.success(), "{output:?}");
    }
    assert!(machines.folder.path().join("secret").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn the_coordinator_is_there_for_as_long_as_a_rank_of_any_machine_is() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        let mut launchers = [0; 4];
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        comm.all_gather(&[parent], &mut launchers).unwrap();
        if comm.rank() >= 2 {
            let first = pidfd_open(Pid::from_raw(launchers[0]).unwrap(), PidfdFlags::empty()).unwrap();
            let half_a_second = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
            // Its ranks end at once.
            assert_eq!(poll(&mut [PollFd::new(&first, PollFlags::IN)], Some(&half_a_second)).unwrap(), 0);
        }
        return;
    }
    for output in Machines::new().run_this_test("2", "leave") {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn ranks_of_all_machines_hear_which_one_failed() {
    if let Ok(failing) = std::env::var(END) {
        let mut comm = Communicator::from_env().unwrap();
        comm.barrier().unwrap();
        if comm.rank().to_string() == failing {
            std::process::exit(7);
        }
        eprintln!("{}", comm.barrier().unwrap_err());
        std::process::exit(3);
    }
    for (failing, machine) in [("0", 0), ("1", 1)] {
        let outputs = Machines::new().run_this_test("1", failing);
        assert_eq!(outputs[machine].status.code(), Some(7), "{outputs:?}");
        let other = &outputs[1 - machine];
        assert_eq!(other.status.code(), Some(3), "{outputs:?}");
        let told = lines(&other.stderr);
        let heard =
            |line: &String| line.starts_with("barrier #1") && line.contains(&format!("rank {failing} died"));
        assert!(told.iter().any(heard), "{told:?}");
        if machine == 1 {
            let named = "distctl: rank 0 exited with code 3 (rank 1 died); ending the others";
            assert!(told.contains(&named.to_owned()), "{told:?}");
        }
    }
}

#[test]
fn a_failure_on_another_machine_is_one_of_the_job() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            // It waits for nobody, and the other has left.
            std::process::exit(7);
        }
        return;
    }
    let [first, second] = Machines::new().run_this_test("1", "fail");
    assert_eq!((first.status.code(), second.status.code()), (Some(1), Some(7)), "{first:?} {second:?}");
    assert!(
        lines(&first.stderr).contains(&"distctl: the job failed on another machine: rank 1 died".to_owned()),
        "{first:?}"
    );
}

#[rstest]
#[case(2, 0, 1)]
#[case(1, 8, 2)]
#[case(0, 7, 1)]
fn a_job_that_fails_is_started_again(#[case] restarts: usize, #[case] code: i32, #[case] failures: usize) {
    let folder = tempfile::tempdir().unwrap();
    // Fails at the first start, and at the second if there is no third.
    let fail = if failures == 2 { "test $DIST_RESTART = 1 && exit 8;" } else { "" };
    let script = format!("echo $RANK $DIST_RESTART; test $DIST_RESTART$RANK = 01 && exit 7; {fail} exit 0");
    let options = ["-n", "2", "--max-restarts", &restarts.to_string(), "--log-dir"];
    let output = run(&[&options[..], &[folder.path().to_str().unwrap()]].concat(), &script);
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let starts = restarts.min(1);
    let expected: Vec<_> = (0..=starts).map(|start| format!("1 {start}")).collect();
    assert_eq!(lines(&std::fs::read(folder.path().join("r1.log")).unwrap()), expected);
    let again = format!("distctl: starting the job again, 1 of at most {restarts} times");
    assert_eq!(lines(&output.stderr).iter().filter(|line| **line == again).count(), starts, "{output:?}");
}

#[test]
fn a_job_that_is_told_to_end_is_not_started_again() {
    let script = "trap 'exit 9' TERM; echo $$; while :; do sleep 0.01; done";
    let (child, _) = running(&["-n", "2", "--max-restarts", "3"], script);
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    // The shell itself has a word for a sleep that was signalled.
    let told: Vec<_> = lines(&output.stderr).into_iter().filter(|line| line.starts_with("distctl")).collect();
    assert_eq!(told, ["distctl: SIGTERM: passed on to every rank"]);
}

/// The launcher looks for the cause in vain for most of the time.
#[test]
fn a_signal_between_the_end_of_all_ranks_and_their_next_start_is_heard() {
    let mut command = distctl(&["run", "-n", "2", "--max-restarts", "20", "--", "false"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines();
    let again = |line: &String| line.contains("starting the job again");
    assert!(told.any(|line| again(&line.unwrap())));
    signal(&child, Signal::TERM);
    let more = told.filter(|line| again(line.as_ref().unwrap())).count();
    assert!(more <= 2, "started {more} times more");
    // The code of a rank, which may have been running after all.
    let code = child.wait().unwrap().code();
    assert!(matches!(code, Some(1 | 143)), "{code:?}");
}

#[test]
fn all_machines_start_a_job_again() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        comm.barrier().unwrap();
        if std::env::var("DIST_RESTART").unwrap() == "0" {
            let failing = comm.rank() == 3 || comm.barrier().is_err();
            std::process::exit(if failing { 7 } else { 0 });
        }
        comm.barrier().unwrap();
        return;
    }
    let machines = Machines { options: vec!["--max-restarts", "1"], ..Machines::new() };
    for output in machines.run_this_test("2", "fail once") {
        assert!(output.status.success(), "{output:?}");
        let again = "distctl: starting the job again, 1 of at most 1 times".to_owned();
        assert!(lines(&output.stderr).contains(&again), "{output:?}");
    }
}

#[rstest]
#[case(&["run", "-n", "2", "--", "/no/such/program"], 127, "cannot start \"/no/such/program\": there is no such file")]
#[case(&["run", "-n", "2", "--", "/etc/passwd"], 126, "cannot start \"/etc/passwd\": it is not executable")]
#[case(&["run", "-n", "2", "--", "/etc"], 126, "cannot start \"/etc\": it is a folder")]
#[case(&["run", "-n", "2", "--grace", "-3", "--", "true"], 2, "not a number of seconds")]
#[case(&["tune", "-n", "0"], 2, "not a number of ranks from 1 to")]
#[case(&["run", "-n", "0", "--", "true"], 2, "not a number of ranks from 1 to")]
#[case(&["run", "-n", "two", "--", "true"], 2, "not a number of ranks")]
#[case(&["run", "-n", "2"], 2, "PROGRAM")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--", "true"], 2, "--rdzv <HOST:PORT>")]
#[case(&["run", "-n", "2", "--node-rank", "1", "--", "true"], 2, "--nnodes <N>")]
#[case(&["run", "-n", "2", "--nnodes", "0", "--", "true"], 2, "not a number of machines from 1 to")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv", "::1:1", "--", "true"], 2, "not a host and a port")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv", "h:1", "--", "true"], 2, "no machine 2 of 2")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "1", "--rdzv", "h:1", "--", "true"], 2, "DIST_SECRET_FILE")]
fn what_cannot_be_started_is_said(#[case] arguments: &[&str], #[case] code: i32, #[case] words: &str) {
    let output = distctl(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(code));
    assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{output:?}");
}
