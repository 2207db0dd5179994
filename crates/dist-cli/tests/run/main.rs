//! `distctl run` as a user runs it: real processes, their output, exit codes and signals.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod failure;
mod hosts;
mod kubernetes;
mod launchers;
mod machines;
mod output;
mod signals;
mod slurm;
mod threads;
mod torchrun;
mod worlds;

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Variable that makes a test the program of a rank and selects its behaviour.
const END: &str = "TEST_END";

fn distctl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    command.env("DIST_COSTS", "off");
    // A folder for files that a killed test leaves behind.
    command.args(arguments).stdin(Stdio::null()).env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Returns a command that starts `command` through the program `starter`.
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

/// Starts a job that runs until it is stopped. Returns it and the first line of each rank.
fn running(options: &[&str], script: &str) -> (Child, Vec<String>) {
    let ranks: usize = options[1].parse().unwrap();
    first_lines(distctl(&[&["run"], options, &["--", "sh", "-c", script]].concat()), ranks)
}

/// Starts a command. Returns it and the first `count` lines of its output.
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

/// Returns the exit code that a shell reports: the code, or 128 + the signal.
fn shell_code(status: ExitStatus) -> Option<i32> {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal))
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Returns `true` if this process ignores a signal, as under nohup. Its children then ignore it too.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let set = set.map_or(0, |set| u64::from_str_radix(set.trim(), 16).unwrap());
    set >> (signal.as_raw() - 1) & 1 == 1
}

/// Waits until the process is gone.
fn wait_until_gone(pid: &str) {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    // A process that has already ended cannot be opened.
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
        assert!(ends(&process), "process {pid} does not end");
    }
}

/// Returns `true` if a process ends within half a minute.
fn ends(process: &OwnedFd) -> bool {
    let half_a_minute = Timespec { tv_sec: 30, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&half_a_minute)).unwrap() == 1
}

#[test]
fn every_rank_has_its_place() {
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

#[test]
fn the_secret_is_found_from_any_folder() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("own")).unwrap();
    let mut command = distctl(&["run", "-n", "1", "--", "sh", "-c", "cd / && test -f $DIST_SECRET_FILE"]);
    let output = command.current_dir(&folder).env("XDG_RUNTIME_DIR", "own").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[rstest]
#[case("")]
#[case(".")]
fn no_secret_is_left_in_the_working_directory(#[case] nowhere: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = distctl(&["run", "-n", "1", "--", "sh", "-c", "test -f $DIST_SECRET_FILE; ls -A"]);
    command.envs(["XDG_RUNTIME_DIR", "TMPDIR"].map(|variable| (variable, nowhere)));
    let output = command.current_dir(&folder).output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[rstest]
#[case(None, 1)]
#[case(Some("7"), 7)]
fn compute_threads_share_the_cores_unless_the_user_sets_them(
    #[case] set: Option<&str>,
    #[case] threads: usize,
) {
    let mut command = distctl(&["run", "-n", "64", "--", "sh", "-c", "echo $RAYON_NUM_THREADS"]);
    command.env_remove("RAYON_NUM_THREADS").envs(set.map(|threads| ("RAYON_NUM_THREADS", threads)));
    let cores = std::thread::available_parallelism().unwrap().get();
    let expected = if set.is_some() { threads } else { (cores / 64).max(1) };
    assert_eq!(lines(&command.output().unwrap().stdout), vec![expected.to_string(); 64]);
}

/// The rank that starts the inner job has all cores.
#[test]
fn compute_threads_of_a_job_inside_a_rank_share_the_cores_too() {
    let inner = "exec \"$0\" run -n 64 -- sh -c 'echo $RAYON_NUM_THREADS'";
    let threads = |set: &str| {
        let mut command = distctl(&["run", "-n", "1", "--", "sh", "-c", &format!("{set} {inner}")]);
        let output = command.arg(env!("CARGO_BIN_EXE_distctl")).env_remove("RAYON_NUM_THREADS").output();
        lines(&output.unwrap().stdout)
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads(""), vec![(cores / 64).max(1).to_string(); 64]);
    assert_eq!(threads("export RAYON_NUM_THREADS=7;"), ["7"; 64]);
}

/// An unbound rank may use all cores, but was given a number of threads.
#[test]
fn a_job_inside_an_unbound_rank_uses_the_threads_of_that_rank() {
    let inner = "exec \"$0\" run -n 1 -- sh -c 'echo $RAYON_NUM_THREADS'";
    let mut command = distctl(&["run", "-n", "2", "--bind", "none", "--", "sh", "-c", inner]);
    let output = command.arg(env!("CARGO_BIN_EXE_distctl")).env_remove("RAYON_NUM_THREADS").output();
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(lines(&output.unwrap().stdout), vec![(cores / 2).max(1).to_string(); 2]);
}

/// The file disappears, as when a new version is installed during the job.
#[cfg(target_os = "linux")]
#[rstest]
#[case(&["run", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", "exit $((1 - DIST_RESTART))"])]
#[case(&["chaos", "-n", "2", "--faults", "2"])]
#[case(&["doctor"])]
fn jobs_continue_after_the_file_of_distctl_is_removed(#[case] arguments: &[&str]) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("distctl");
    std::fs::hard_link(env!("CARGO_BIN_EXE_distctl"), &file).unwrap();
    let like = distctl(arguments);
    let mut command = Command::new(&file);
    command.args(arguments).envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::fs::remove_file(&file).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// These launchers use other names for `RANK` and `WORLD_SIZE`, and set no address of a coordinator.
#[rstest]
#[case(&["bench", "barrier"], "OMPI_COMM_WORLD")]
#[case(&["doctor"], "PMI")]
#[case(&["tune"], "PMI")]
fn a_rank_of_another_launcher_starts_no_job(#[case] arguments: &[&str], #[case] launcher: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [rank, size] = ["RANK", "SIZE"].map(|name| format!("{launcher}_{name}"));
    let mut command = distctl(arguments);
    command.env("DIST_COSTS", folder.path().join("costs")).envs([(&rank, "0"), (&size, "2")]);
    let output = command.output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(lines(&output.stderr)[0].starts_with("distctl: MASTER_ADDR is not set"), "{output:?}");
    // `distctl run` sets the rank of the inner `distctl`.
    let mut inside = distctl(&["run", "-n", "2", "--", env!("CARGO_BIN_EXE_distctl"), "doctor"]);
    assert!(inside.envs([(&rank, "0"), (&size, "2")]).output().unwrap().status.success());
}

#[rstest]
#[case(&[("RANK", ""), ("WORLD_SIZE", "")], "\"ranks\":2", "")]
#[case(&[("WORLD_SIZE", "2")], "", "distctl: RANK is not set: ")]
fn a_process_with_a_rank_or_a_world_size_is_a_rank(
    #[case] variables: &[(&str, &str)],
    #[case] measured: &str,
    #[case] told: &str,
) {
    let mut command = distctl(&["bench", "barrier", "--samples", "1", "--json"]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    assert_eq!(output.status.success(), told.is_empty(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).starts_with(told), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains(measured), "{output:?}");
}

#[cfg(target_os = "linux")]
#[rstest]
#[case(&["--ranks", "2"], true)]
#[case(&["--ranks", "2", "--bind", "none"], false)]
#[case(&["--ranks", "2", "--bind", "numa"], true)]
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

#[cfg(target_os = "linux")]
#[test]
fn a_launcher_may_have_more_files_open_than_its_ranks() {
    let launcher = distctl(&["run", "-n", "30", "--", "sh", "-c", "ulimit -n; test -z \"$DISTCTL_FILES\""]);
    let limited = |option| format!("ulimit {option} 64; exec \"$0\" \"$@\"");
    let output = behind(&["sh", "-c", &limited("-Sn")], &launcher).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["64"; 30]);
    let output = behind(&["sh", "-c", &limited("-n")], &launcher).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told = "distctl: distctl needs 122 open files for 30 ranks, and its limit is 64: raise the limit (ulimit -Hn 122)";
    assert_eq!(lines(&output.stderr), [told]);
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    let options = ["run", "-n", "30", "--log-dir", logs.to_str().unwrap(), "--", "true"];
    let output =
        behind(&["sh", "-c", "ulimit -n 130; exec \"$0\" \"$@\""], &distctl(&options)).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(lines(&output.stderr)[0].contains("distctl needs 152 open files for 30 ranks"), "{output:?}");
    assert!(!logs.exists());
}

#[test]
fn ranks_do_not_inherit_the_variables_of_a_surrounding_job() {
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
fn processes_that_a_rank_leaves_behind_are_ended() {
    let output = run(&["-n", "2"], "sleep 1000 & echo $!");
    assert!(output.status.success());
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
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
#[case(&["run", "--", "true"], 2, "--ranks <N>")]
#[case(&["run", "--hosts", "a", "--", "true"], 2, "how many ranks are on host a? Write a:N, or give -n N")]
#[case(&["run", "--hosts", "a:2,a:2", "--", "true"], 2, "host a is listed twice")]
#[case(&["run", "--hosts", "a:x", "--", "true"], 2, "not a number of ranks")]
#[case(&["run", "--hosts", "a:2", "--ssh", " ", "--", "true"], 2, "--ssh names no command")]
#[case(&["run", "--hosts", "a:2", "--ssh", "/no/such/ssh", "--", "true"], 127, "cannot start \"/no/such/ssh\"")]
#[case(&["run", "--hosts", "a:2", "--nnodes", "2", "--", "true"], 2, "--nnodes")]
#[case(&["run", "--hostfile", "/no/such/file", "--", "true"], 1, "cannot read /no/such/file")]
#[case(&["run", "-n", "2", "--rdzv", "h:1", "--", "true"], 2, "--rdzv is for a job with --nnodes or --hosts")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--", "true"], 2, "--rdzv <HOST:PORT>")]
#[case(&["run", "-n", "2", "--node-rank", "1", "--", "true"], 2, "--nnodes <N>")]
#[case(&["run", "-n", "2", "--nnodes", "0", "--", "true"], 2, "not a number of machines from 1 to")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv", "::1:1", "--", "true"], 2, "not a host and a port")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv", "h:1", "--", "true"], 2, "--node-rank 2 is not below --nnodes 2")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "1", "--rdzv", "h:1", "--", "true"], 2, "DIST_SECRET_FILE")]
#[case(&["run", "-n", "2", "--nnodes", "2", "--node-rank", "1", "--rdzv", "h:65533", "--max-restarts", "3", "--", "true"], 2, "port 65533 plus 3 restarts exceeds the largest port")]
fn a_job_that_cannot_start_is_reported_with_the_reason(
    #[case] arguments: &[&str],
    #[case] code: i32,
    #[case] words: &str,
) {
    let output = distctl(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(code));
    assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{output:?}");
}
