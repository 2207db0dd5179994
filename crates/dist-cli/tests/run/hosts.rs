//! Jobs that `distctl run --hosts` starts over ssh. All hosts are this machine. Most tests replace ssh by a
//! script; one uses ssh and its own sshd on loopback.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use dist_collectives::transport::Runtime;
use dist_collectives::{Communicator, ReduceOp};
use rstest::rstest;
use rustix::process::Signal;

use super::{END, distctl, first_lines, is_ignored, lines, shell_code, signal, wait_until_gone};

/// A script in place of ssh whose "hosts" are this machine. It takes options, a host and a command, as ssh
/// does. The command starts with few variables in another folder, as after a login. It sets the host's
/// address as sshd does.
pub(super) const FAKE_SSH: &str = r#"#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
case $host in
unreachable) echo 'ssh: connect to host unreachable port 22: Connection refused' >&2; exit 255;;
without) exec sh -c '/no/such/distctl run-part';;
other-version) echo 'distctl-host {"version":"9.9.9","address":null}'; exec cat >/dev/null;;
old) echo "error: unrecognized subcommand 'run-part'" >&2; exit 2;;
broken) echo 'no space left' >&2; exit 3;;
loud) echo 'Welcome to loud'; echo 'last login: never' >&2;;
far) address=192.0.2.7;;
*) ;;
esac
cd /
exec env -i PATH=/usr/bin:/bin HOME=/ SSH_CONNECTION="127.0.0.1 1 ${address:-127.0.0.1} 22" DIST_COSTS=off \
    XDG_RUNTIME_DIR="$FAKE_RUNTIME_DIR" sh -c "$*"
"#;

/// A folder with the script in place of ssh.
struct Fake(tempfile::TempDir);

impl Fake {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        write_program(&folder.path().join("ssh"), FAKE_SSH);
        Self(folder)
    }

    fn distctl(&self, options: &[&str], command: &[&str]) -> Command {
        let ssh = self.0.path().join("ssh").display().to_string();
        let mut launcher = distctl(&[&["run", "--ssh", &ssh], options, &["--"], command].concat());
        launcher.env("FAKE_RUNTIME_DIR", self.0.path());
        launcher
    }

    fn run(&self, hosts: &str, script: &str) -> Output {
        self.distctl(&["--hosts", hosts], &["sh", "-c", script]).output().unwrap()
    }

    /// Runs a job whose ranks are this test with a task, and returns its output.
    fn run_this_test(&self, hosts: &str, task: &str) -> Output {
        let program = std::env::current_exe().unwrap().display().to_string();
        let test = std::thread::current().name().unwrap().to_owned();
        let command = [&program, "--exact", &test, "--nocapture"];
        self.distctl(&["--hosts", hosts], &command).env(END, task).output().unwrap()
    }
}

pub(super) fn write_program(path: &Path, text: &str) {
    // Another thread may start a process at the same time. If it inherited a file that is open for writing,
    // the file could not be executed. Therefore a process of its own writes the file.
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
}

#[test]
fn every_rank_has_its_place_among_the_ranks_of_all_hosts() {
    let script =
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $DIST_COORDINATOR $DIST_RESTART";
    let output = Fake::new().run("a:1,loud:2", script);
    let places = ["0 0 3 1", "1 0 3 2", "2 1 3 2"].map(|place| format!("{place} 127.0.0.1 external 0"));
    assert_eq!(lines(&output.stdout), places);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_host_file_lists_the_hosts_and_lines_can_begin_with_their_rank() {
    let fake = Fake::new();
    let file = fake.0.path().join("hosts");
    fs::write(&file, "a slots=1\nb # as many as -n says\n").unwrap();
    let options = ["--hostfile", file.to_str().unwrap(), "-n", "2", "--tag"];
    let output = fake.distctl(&options, &["sh", "-c", "printf 'no\\377 text'"]).output().unwrap();
    let expected = (0..3).flat_map(|rank| [format!("[r{rank}] no").as_bytes(), b"\xff text\n"].concat());
    let mut printed = output.stdout.clone();
    let mut expected: Vec<u8> = expected.collect();
    printed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(printed, expected, "{output:?}");
}

#[test]
fn ranks_have_the_folder_and_the_variables_of_the_launcher() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let script = r#"pwd; echo "$WORD"; echo $RAYON_NUM_THREADS $HOME; echo "$0""#;
    let mut command = fake.distctl(&["--hosts", "a:1"], &["sh", "-c", script, "it's \"$1\""]);
    command.env("WORD", "two\nlines and 'quotes'").env("RAYON_NUM_THREADS", "7").current_dir(&folder);
    let output = command.output().unwrap();
    let here = folder.path().canonicalize().unwrap().display().to_string();
    let expected = format!("{here}\ntwo\nlines and 'quotes'\n7 /\nit's \"$1\"\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
}

#[test]
fn ranks_of_all_hosts_communicate() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        let mut ranks = [0_u64; 3];
        comm.all_gather(&[comm.rank() as u64], &mut ranks).unwrap();
        assert_eq!(ranks, [0, 1, 2]);
        return;
    }
    let output = Fake::new().run_this_test("a:2,b:1", "call");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_failed_rank_determines_the_exit_code_and_all_hosts_end() {
    if let Ok(failing) = std::env::var(END) {
        let mut comm = Communicator::from_env().unwrap();
        comm.barrier().unwrap();
        if comm.rank().to_string() == failing {
            std::process::exit(7);
        }
        eprintln!("{}", comm.barrier().unwrap_err());
        std::process::exit(3);
    }
    for failing in ["0", "1"] {
        let output = Fake::new().run_this_test("a:1,b:1", failing);
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        // The launcher of the host that ends first names the rank.
        let names = ["died", "exited with code 7"].map(|how| format!("rank {failing} {how}"));
        let told = lines(&output.stderr);
        assert!(told.iter().any(|line| names.iter().any(|name| line.contains(name))), "{told:?}");
    }
}

/// The other ranks do not communicate, and would never end.
#[test]
fn ranks_that_do_not_call_are_ended_with_the_job() {
    let script = "test $RANK = 1 && exit 7; echo $$; exec sleep 1000";
    let output = Fake::new().run("a:1,b:1,c:1", script);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
}

#[rstest]
#[case(
    "unreachable",
    1,
    "cannot reach host unreachable by \"SSH\": ssh: connect to host unreachable port 22: Connection refused"
)]
#[case("without", 1, "host without has no ")]
#[case("other-version", 1, "host other-version has distctl 9.9.9, and this is ")]
#[case("old", 1, "host old has distctl of a version without --hosts")]
#[case("broken", 1, "distctl on host broken ended at once: no space left")]
#[case("far", 1, "host a was reached at 127.0.0.1, where far cannot reach it")]
fn a_host_that_cannot_take_part_is_named_before_any_rank_starts(
    #[case] host: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let fake = Fake::new();
    let output = fake.run(&format!("a:1,{host}:1"), "echo started");
    let ssh = fake.0.path().join("ssh").display().to_string();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.starts_with(&format!("distctl: {}", words.replace("SSH", &ssh))), "{told}");
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]), "{told}");
}

#[rstest]
#[case("/no/such/program", 127, "host a: cannot start \"/no/such/program\": there is no such file")]
#[case(
    "no-such-program",
    127,
    "host a: cannot start \"no-such-program\": there is no such file in the folders of PATH"
)]
#[case("/etc/passwd", 126, "host a: cannot start \"/etc/passwd\": it is not executable")]
fn a_program_that_a_host_cannot_start_is_named(
    #[case] program: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let output = Fake::new().distctl(&["--hosts", "a:1,b:1"], &[program]).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(lines(&output.stderr).contains(&format!("distctl: {words}")), "{output:?}");
}

/// The secret is neither in a command line nor in a variable, and its file is removed afterwards.
#[test]
fn the_secret_is_sent_to_each_host_in_private() {
    let script = r#"stat -c %a "$DIST_SECRET_FILE"; echo "$DIST_SECRET_FILE"
        cat /proc/$PPID/cmdline /proc/$$/cmdline /proc/$$/environ | grep -qaF -f "$DIST_SECRET_FILE" && echo seen
        cat /proc/[0-9]*/cmdline 2>/dev/null | grep -qaF -f "$DIST_SECRET_FILE" && echo seen; true"#;
    let output = Fake::new().run("a:1,b:1", script);
    let [first, second, modes @ ..] = &lines(&output.stdout)[..] else { panic!("{output:?}") };
    assert_eq!(modes, ["600", "600"], "{output:?}");
    assert!(first != second && ![first, second].iter().any(|file| Path::new(file).exists()), "{output:?}");
}

#[rstest]
#[case(Signal::TERM, "echo $$; exec sleep 1000", 143)]
#[case(Signal::INT, "trap 'exit 0' INT; echo $$; while :; do sleep 0.01; done", 0)]
fn a_signal_reaches_the_ranks_of_all_hosts(#[case] sent: Signal, #[case] script: &str, #[case] code: i32) {
    if is_ignored(sent) {
        // The signal is not forwarded then, and a shell cannot trap it.
        return;
    }
    let fake = Fake::new();
    let command = fake.distctl(&["--hosts", "a:1,b:1"], &["sh", "-c", script]);
    let (mut child, pids) = first_lines(command, 2);
    signal(&child, sent);
    let status = child.wait().unwrap();
    assert_eq!(shell_code(status), Some(code), "{status:?}");
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

#[test]
fn sigusr1_reaches_the_ranks_of_all_hosts_and_the_job_continues() {
    if is_ignored(Signal::USR1) {
        return;
    }
    let fake = Fake::new();
    let script = "trap 'exit 0' USR1; echo ready; while :; do sleep 0.01; done";
    let (mut child, _) = first_lines(fake.distctl(&["--hosts", "a:1,b:1"], &["sh", "-c", script]), 2);
    signal(&child, Signal::USR1);
    assert!(child.wait().unwrap().success());
}

/// The launcher is killed. The hosts notice that their connection is closed.
#[test]
fn no_rank_outlives_a_launcher_that_is_killed() {
    let fake = Fake::new();
    let command = fake.distctl(&["--hosts", "a:1,b:1"], &["sh", "-c", "echo $$; exec sleep 1000"]);
    let (mut child, pids) = first_lines(command, 2);
    signal(&child, Signal::KILL);
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    pids.iter().for_each(|pid| wait_until_gone(pid));
}

/// The network fails: ssh ends, and with it the host's part of the job.
#[test]
fn a_connection_that_is_lost_ends_the_job_and_names_the_host() {
    let fake = Fake::new();
    // In place of ssh, this command is the front process of the host; the launcher has its process id.
    let front = r"tr '\0' '\n' < /proc/$PPID/environ | sed -n 's/^DISTCTL_FRONT=//p'";
    let script = &format!("test $RANK = 1 && kill -9 $({front}); echo $$; exec sleep 1000");
    let output = fake.run("a:1,b:1", script);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let lost = lines(&output.stderr).into_iter().find(|line| line.contains("the connection was lost"));
    assert!(lost.is_some_and(|line| line.starts_with("distctl: host b: ")), "{output:?}");
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
}

#[test]
fn a_failed_job_on_several_hosts_is_restarted() {
    let fake = Fake::new();
    let script = "echo $DIST_RESTART $MASTER_PORT; exit $((1 - DIST_RESTART))";
    let options = ["--hosts", "a:1,b:1", "--max-restarts", "1"];
    let output = fake.distctl(&options, &["sh", "-c", script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let again = "distctl: starting the job again, 1 of at most 1 times".to_owned();
    assert!(lines(&output.stderr).contains(&again), "{output:?}");
    let starts = lines(&output.stdout);
    assert!(starts.iter().filter(|line| line.starts_with("1 ")).count() == 2, "{starts:?}");
}

#[test]
fn logs_of_all_hosts_are_written_here() {
    let fake = Fake::new();
    let logs = fake.0.path().join("logs");
    let options = ["--hosts", "a:1,b:1", "--log-dir", logs.to_str().unwrap()];
    assert!(fake.distctl(&options, &["sh", "-c", "echo $RANK"]).output().unwrap().status.success());
    let kept = ["r0.log", "r1.log"].map(|log| fs::read_to_string(logs.join(log)).unwrap());
    assert_eq!(kept, ["0\n", "1\n"]);
}

/// The configuration of ssh in addition to the port and the key.
const SSH_CONFIG: &str =
    "IdentitiesOnly yes\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n";

/// An sshd on loopback with keys of its own, for the user who runs the tests.
struct Sshd {
    folder: tempfile::TempDir,
    process: Child,
}

impl Sshd {
    /// Starts sshd. Returns `None` and prints the reason if the test must be skipped.
    fn start() -> Option<Self> {
        let program =
            ["/usr/sbin/sshd", "/usr/local/sbin/sshd"].map(PathBuf::from).into_iter().find(|p| p.exists());
        let Some(program) = program else {
            eprintln!("skipped: there is no sshd (apt-get install openssh-server openssh-client)");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host_key", "user_key"] {
            let mut keygen = Command::new("ssh-keygen");
            let made = keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &at(key)]).status().unwrap();
            assert!(made.success());
        }
        fs::copy(at("user_key.pub"), at("authorized_keys")).unwrap();
        // If root starts sshd, its unprivileged part needs this folder.
        if rustix::process::geteuid().is_root() {
            fs::create_dir_all("/run/sshd").unwrap();
        }
        // Another process may take a port that was free.
        let process =
            std::iter::repeat_with(|| Self::listen(&program, &at)).find_map(|process| process).unwrap();
        Some(Self { folder, process })
    }

    /// Starts sshd at a free port. Returns `None` if another process has taken the port.
    fn listen(program: &Path, at: &impl Fn(&str) -> String) -> Option<Child> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\n\
             PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nMaxStartups 100\n",
            at("host_key"),
            at("authorized_keys"),
        );
        fs::write(at("sshd_config"), server).unwrap();
        let client = format!("Port {port}\nIdentityFile {}\n{SSH_CONFIG}", at("user_key"));
        fs::write(at("ssh_config"), client).unwrap();
        let mut command = Command::new(program);
        command.args(["-D", "-e", "-f", &at("sshd_config")]).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut said = Vec::new();
        let listens = log
            .by_ref()
            .inspect(|line| said.push(line.clone()))
            .any(|line| line.starts_with("Server listening"));
        if listens {
            // The log is read to the end, so that sshd never blocks on a full pipe.
            let read_log = move || log.for_each(drop);
            Runtime::system().spawn("log of sshd", read_log).unwrap();
            return Some(process);
        }
        process.wait().unwrap();
        assert!(
            said.iter().any(|line| line.contains("Address already in use")),
            "sshd does not start: {said:?}"
        );
        None
    }

    fn run(&self, hosts: &str, script: &str) -> Output {
        let ssh = format!("ssh -F {}", self.folder.path().join("ssh_config").display());
        let mut command = distctl(&["run", "--ssh", &ssh, "--hosts", hosts, "--", "sh", "-c", script]);
        command.output().unwrap()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn a_job_runs_over_ssh() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        let mut sum = [comm.rank() as u64 + 1];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let hosts = comm.hosts();
        assert!(sum == [6] && hosts[0] != hosts[1] && hosts[1] == hosts[2], "{sum:?} on {hosts:?}");
        return;
    }
    let Some(sshd) = Sshd::start() else { return };
    let script = "echo $RANK $WORLD_SIZE $MASTER_ADDR; test -n \"$SSH_CONNECTION\"";
    let output = sshd.run("127.0.0.1:1,localhost:2", script);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["0 3 127.0.0.1", "1 3 127.0.0.1", "2 3 127.0.0.1"]);
    let program = std::env::current_exe().unwrap().display().to_string();
    let test = std::thread::current().name().unwrap().to_owned();
    // Both hosts are this machine. The first one has one rank, the second one two: their names differ.
    let script =
        format!("DIST_HOST_ID=$LOCAL_WORLD_SIZE {END}=join exec {program} --exact {test} --nocapture");
    let output = sshd.run("127.0.0.1:1,localhost:2", &script);
    assert!(output.status.success(), "{output:?}");
    let output = sshd.run("127.0.0.1:1,localhost:2", "test $RANK = 2 && exit 7; echo $$; exec sleep 1000");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    lines(&output.stdout).iter().for_each(|pid| wait_until_gone(pid));
}

/// No process listens at port 1.
#[test]
fn a_host_that_ssh_does_not_reach_is_named() {
    if Command::new("ssh").arg("-V").output().is_err() {
        eprintln!("skipped: there is no ssh (apt-get install openssh-client)");
        return;
    }
    let options = ["run", "--ssh", "ssh -F none -p 1", "--hosts", "127.0.0.1:1", "--", "echo", "started"];
    let output = distctl(&options).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.starts_with("distctl: cannot reach host 127.0.0.1 by \"ssh -F none -p 1\": "), "{told}");
    assert!(told.contains("Connection refused"), "{told}");
}
