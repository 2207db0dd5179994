//! Jobs on several machines, all of which are this one.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use dist_collectives::Communicator;
use dist_collectives::transport::{Chain, Runtime};
use dist_testkit::process::{Port, free_ports};
use dist_transport::process::{Config, ProcessTransport};
use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use super::{END, behind, distctl, lines};

/// The largest number of starts of a job in these tests. Each start uses the next port.
const STARTS_MAX: u16 = 9;

/// A job on two machines, both of which are this one.
pub(super) struct Machines {
    /// The folder of its secret.
    folder: tempfile::TempDir,
    rendezvous: String,
    options: Vec<&'static str>,
}

impl Machines {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut secret = OpenOptions::new();
        let mut secret =
            secret.write(true).create_new(true).mode(0o600).open(folder.path().join("secret")).unwrap();
        secret.write_all(b"known to the ranks of this job").unwrap();
        Self { folder, rendezvous: format!("127.0.0.1:{}", free_ports(STARTS_MAX)), options: Vec::new() }
    }

    /// Returns the command of one machine with this number of ranks.
    fn start(&self, machine: usize, ranks: &str, command: &[&str]) -> Command {
        let machine = machine.to_string();
        let place = ["--nnodes", "2", "--node-rank", &machine, "--rdzv", &self.rendezvous];
        let mut launcher =
            distctl(&[&["run", "-n", ranks], &place[..], &self.options, &["--"], command].concat());
        launcher.env("DIST_SECRET_FILE", self.folder.path().join("secret"));
        launcher.stdout(Stdio::piped()).stderr(Stdio::piped());
        launcher
    }

    /// Runs both machines with this test as the program of all ranks, with a task, and returns their output.
    pub(super) fn run_this_test(&self, ranks: &str, task: &str) -> [Output; 2] {
        let program = std::env::current_exe().unwrap().display().to_string();
        let test = std::thread::current().name().unwrap().to_owned();
        let launched = [0, 1].map(|machine| {
            let command = [&program, "--exact", &test, "--nocapture"];
            self.start(machine, ranks, &command).env(END, task).spawn().unwrap()
        });
        launched.map(|launcher| launcher.wait_with_output().unwrap())
    }
}

/// The ranks of the two machines have different host ids.
#[cfg(target_os = "linux")]
#[test]
fn doctor_examines_all_machines_of_a_job() {
    let doctor = |options: &[&str]| -> String {
        let machines = Machines::new();
        let launched = ["one", "other"].into_iter().enumerate().map(|(machine, host)| {
            let command = [&[env!("CARGO_BIN_EXE_distctl"), "doctor"], options].concat();
            machines.start(machine, "2", &command).env("DIST_HOST_ID", host).spawn().unwrap()
        });
        let launched: Vec<_> = launched.collect();
        let outputs: Vec<Output> =
            launched.into_iter().map(|launcher| launcher.wait_with_output().unwrap()).collect();
        assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
        assert!(outputs[1].stdout.is_empty(), "rank 0 prints all");
        String::from_utf8(outputs[0].stdout.clone()).unwrap()
    };
    let findings: Vec<Value> =
        doctor(&["--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found = |check: &str| -> Vec<(u64, &str)> {
        let of_check = findings.iter().filter(|finding| finding["check"] == check);
        of_check.map(|line| (line["rank"].as_u64().unwrap(), line["found"].as_str().unwrap())).collect()
    };
    let [(0, first), (2, second)] = found("ranks")[..] else { panic!("{findings:?}") };
    assert!(first.starts_with("0, 1 run on this machine") && second.starts_with("2, 3 run"), "{findings:?}");
    for check in ["interfaces", "coordinator", "numa", "name", "files"] {
        let ranks: Vec<u64> = found(check).iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 2], "{check}: {findings:?}");
    }
    assert!(
        found("coordinator").iter().all(|(_, found)| found.starts_with("127.0.0.1 is 127.0.0.1, looked up"))
    );
    let mut links = found("link");
    links.sort_unstable();
    let ways = links.iter().map(|(rank, found)| (*rank, found.split(':').next().unwrap()));
    let expected = [(1, "to rank 0 by memory"), (2, "to rank 0 by TCP"), (3, "to rank 0 by TCP")];
    assert_eq!(ways.collect::<Vec<_>>(), expected);
    let [(2, clock)] = found("clock")[..] else { panic!("{findings:?}") };
    let ahead: f64 = clock.split(' ').next().unwrap().parse().unwrap();
    assert!(clock.contains(" ms ") && ahead < 5000.0, "both machines are this one: {clock}");
    let text = doctor(&[]);
    let (_, matrix) = text.split_once("between hosts: one way for 8 bytes").unwrap();
    let rows: Vec<Vec<&str>> = matrix.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["rank", "0", "rank", "2"]);
    let ([first, second], [speeds, others]) = ([&rows[1], &rows[2]], [&rows[1][3..], &rows[2][2..6]]);
    assert_eq!((&first[..3], &second[..2], second[6]), (&["rank", "0", "-"][..], &["rank", "2"][..], "-"));
    assert_eq!(speeds, others, "the link between both is in both rows");
}

#[test]
fn every_rank_has_its_place_among_the_ranks_of_all_machines() {
    let machines = Machines::new();
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
    for (machine, places) in [["0 0 4 2", "1 1 4 2"], ["2 0 4 2", "3 1 4 2"]].into_iter().enumerate() {
        let output = machines.start(machine, "2", &["sh", "-c", script]).output().unwrap();
        assert_eq!(lines(&output.stdout), places.map(|place| format!("{place} {}", machines.rendezvous)));
        assert!(output.status.success(), "{output:?}");
    }
    assert!(machines.folder.path().join("secret").exists());
}

#[rstest]
#[case(None, "dist-0")]
#[case(Some(""), "dist-0")]
#[case(Some("mine"), "mine-0")]
fn a_job_on_several_machines_has_the_given_name(#[case] name: Option<&str>, #[case] job: &str) {
    let machines = Machines::new();
    let mut command = machines.start(0, "1", &["sh", "-c", "echo $DIST_JOB_ID"]);
    let output = command.env_remove("DIST_JOB_ID").envs(name.map(|name| ("DIST_JOB_ID", name))).output();
    assert_eq!(lines(&output.unwrap().stdout), [job]);
}

#[cfg(target_os = "linux")]
#[test]
fn the_coordinator_outlives_the_ranks_of_all_machines() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        let mut launchers = [0; 4];
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        comm.all_gather(&[parent], &mut launchers).unwrap();
        if comm.rank() >= 2 {
            let first = pidfd_open(Pid::from_raw(launchers[0]).unwrap(), PidfdFlags::empty()).unwrap();
            let half_a_second = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
            // The ranks of the first machine end at once.
            assert_eq!(poll(&mut [PollFd::new(&first, PollFlags::IN)], Some(&half_a_second)).unwrap(), 0);
        }
        return;
    }
    for output in Machines::new().run_this_test("2", "leave") {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn ranks_of_all_machines_name_the_failed_rank() {
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
        let heard = |line: &String| {
            line.starts_with("barrier (call 2)") && line.contains(&format!("rank {failing} died"))
        };
        assert!(told.iter().any(heard), "{told:?}");
        if machine == 1 {
            let named = "distctl: rank 1 died; rank 0 exited with code 3; ending the others";
            assert!(told.contains(&named.to_owned()), "{told:?}");
        }
    }
}

#[test]
fn a_failure_on_another_machine_fails_the_job() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            // This rank does not wait, and the other has ended.
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
#[case::the_first_machine(0)]
#[case::another_machine(1)]
fn ranks_of_all_machines_name_a_rank_that_ended_before_it_joined(#[case] machine: usize) {
    if let Ok(task) = std::env::var(END) {
        let (machine, folder) = task.split_once(' ').unwrap();
        let rank = std::env::var("RANK").unwrap();
        // The second rank of this machine does not join. It ends when the other ranks are about to join.
        if rank == (2 * machine.parse::<usize>().unwrap() + 1).to_string() {
            while std::fs::read_dir(folder).unwrap().count() < 3 {
                Runtime::system().yield_now();
            }
            return;
        }
        std::fs::write(Path::new(folder).join(rank), []).unwrap();
        eprintln!("{}", Chain(&Communicator::from_env().unwrap_err()));
        std::process::exit(3);
    }
    let rank = 2 * machine + 1;
    let folder = tempfile::tempdir().unwrap();
    let task = format!("{machine} {}", folder.path().display());
    for output in Machines::new().run_this_test("2", &task) {
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let told = lines(&output.stderr);
        let named = format!("rank {rank} ended before it joined");
        assert!(told.iter().any(|line| line.starts_with("cannot join") && line.contains(&named)), "{told:?}");
    }
}

#[test]
fn all_machines_restart_a_failed_job() {
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

/// The ranks of one machine fail before all ranks have joined.
#[rstest]
#[case::the_first_machine("0")]
#[case::another_machine("1")]
fn all_machines_restart_after_a_failure_of_one(#[case] failing: &str) {
    if let Ok(task) = std::env::var(END) {
        let (failing, folder) = task.split_once(' ').unwrap();
        let config = Config::from_env().unwrap();
        if config.rank().index().to_string() == failing {
            let times = ["once", "twice", "thrice"].map(|times| Path::new(folder).join(times));
            let mut options = OpenOptions::new();
            if times.iter().any(|times| options.write(true).create_new(true).open(times).is_ok()) {
                std::process::exit(7);
            }
        }
        // A machine may begin its next start before a rank of the other machine has joined this one.
        let config = config.with_timeout(Duration::from_secs(2));
        let mut comm = Communicator::new(ProcessTransport::join(&config).unwrap());
        let mut starts = [0_u32; 2];
        let start = std::env::var("DIST_RESTART").unwrap().parse().unwrap();
        comm.all_gather(&[start], &mut starts).unwrap();
        assert_eq!(starts, [start; 2]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let machines = Machines { options: vec!["--max-restarts", "8"], ..Machines::new() };
    for output in machines.run_this_test("1", &format!("{failing} {}", folder.path().display())) {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn a_signal_ends_the_wait_for_the_first_machine() {
    let machines = Machines { options: vec!["--max-restarts", "5"], ..Machines::new() };
    let mut child = machines.start(1, "1", &["sh", "-c", "exit 7"]).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines();
    let waits = |line: &String| line == "distctl: waiting until machine 0 restarts the job";
    assert!(told.any(|line| waits(&line.unwrap())));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
    let rest: Vec<String> = told.map(Result::unwrap).collect();
    assert_eq!(rest, ["distctl: SIGTERM: the job is not restarted"]);
}

/// A pipe can be read only once, but every rank needs its content in every start.
#[test]
fn a_secret_can_come_from_a_pipe() {
    let machines = Machines { options: vec!["--max-restarts", "1"], ..Machines::new() };
    let script = "cat $DIST_SECRET_FILE; echo; echo $DIST_SECRET_FILE >&2; exit $((1 - DIST_RESTART))";
    let job = machines.start(0, "2", &["sh", "-c", script]);
    let given = r#"printf 0123456789abcdef | DIST_SECRET_FILE=fd:0 "$0" "$@""#;
    let mut command = behind(&["sh", "-c", given], &job);
    command.env_remove("DIST_SECRET_FILE").env("DIST_LOG", "off");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["0123456789abcdef"; 4]);
    let told = lines(&output.stderr);
    let files: Vec<_> = told.iter().filter(|line| line.ends_with(".secret")).collect();
    assert!(files.len() == 4 && !files.iter().any(|file| Path::new(file).exists()), "{told:?}");
}

#[test]
fn the_cause_of_a_restart_is_printed_before_its_error() {
    // The next port, which the second start needs, is taken.
    let first = Port::reserve();
    let rendezvous = format!("127.0.0.1:{}", first.number());
    let options = vec!["--max-restarts", "1"];
    let machines = Machines { rendezvous, options, ..Machines::new() };
    let mut command = machines.start(0, "1", &["sh", "-c", "exit 7"]);
    // No rank of the other machine joins.
    let output = command.env("DIST_LOG", "off").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told = String::from_utf8(output.stderr).unwrap();
    let [failed, again, error] = told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert_eq!(failed, "distctl: rank 0 exited with code 7; ending the others");
    assert_eq!(again, "distctl: starting the job again, 1 of at most 1 times");
    assert!(error.contains("cannot listen"), "{told}");
}
