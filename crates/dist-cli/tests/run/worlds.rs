//! Several worlds one after the other in the same processes. `distctl run` hosts the coordinator of all of
//! them.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, ReduceOp};
use dist_transport::process::{Config, ProcessTransport, Secret};
use rstest::rstest;
use rustix::process::{Signal, kill_process};

use super::machines::Machines;
use super::{END, behind, distctl, lines};

/// Joins a world and checks a call with all its ranks.
fn join() -> Communicator {
    let mut comm = Communicator::from_env().unwrap();
    let mut sum = [1_u32];
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [u32::try_from(comm.world_size()).unwrap()]);
    comm
}

/// Runs a job of three ranks that are all this test, with a task, and returns its output.
fn run_this_test(options: &[&str], task: &str) -> Output {
    let program = std::env::current_exe().unwrap().display().to_string();
    let test = std::thread::current().name().unwrap().to_owned();
    let command = ["--", &program, "--exact", &test, "--nocapture"];
    distctl(&[&["run", "-n", "3"], options, &command].concat()).env(END, task).output().unwrap()
}

#[rstest]
#[case(2)]
#[case(3)]
fn several_worlds_start_one_after_the_other(#[case] worlds: usize) {
    if std::env::var(END).is_ok() {
        return (0..worlds).for_each(|_| drop(join()));
    }
    let output = run_this_test(&[], "meet");
    assert!(output.status.success(), "{output:?}");
    for output in Machines::new().run_this_test("2", "meet") {
        assert!(output.status.success(), "{output:?}");
    }
}

#[rstest]
#[case::one_that_ends("end", 7, "rank 1 exited with code 7 (it died)")]
#[case::one_that_stops("stop", 3, " exited with code 3")]
fn a_failure_in_the_second_world_is_reported_as_in_the_first(
    #[case] task: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    if let Ok(task) = std::env::var(END) {
        drop(join());
        let mut comm = join();
        if comm.rank() != 1 {
            eprintln!("{}", comm.barrier().unwrap_err());
            std::process::exit(3);
        }
        if task == "end" {
            std::process::exit(7);
        }
        kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
        // SIGSTOP may stop this thread last.
        loop {
            std::hint::spin_loop();
        }
    }
    // A stopped rank does not end at SIGTERM.
    let output = run_this_test(&["--grace", "0"], task);
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let told = lines(&output.stderr);
    let named = format!("{words}; ending the others");
    assert!(
        told.iter().any(|line| line.starts_with("distctl: rank 1 ") && line.ends_with(&named)),
        "{told:?}"
    );
}

/// The ranks take turns on the cores of this machine. With the optimised example `start` of dist-collectives, they start in
/// seconds.
#[cfg(target_os = "linux")]
#[test]
fn ranks_of_a_world_of_256_need_no_more_than_1024_descriptors() {
    use rustix::process::{Resource, getrlimit};
    if std::env::var(END).is_ok() {
        assert_eq!(getrlimit(Resource::Nofile).current, Some(1024));
        // The costs of messages are not measured: 256 ranks of a test take long for that.
        let transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
        let mut comm = Communicator::new(transport);
        assert_eq!(comm.world_size(), 256);
        return comm.barrier().unwrap();
    }
    let program = std::env::current_exe().unwrap().display().to_string();
    let test = std::thread::current().name().unwrap().to_owned();
    let mut launcher = distctl(&["run", "-n", "256", "--", &program, "--exact", &test]);
    let limited = ["sh", "-c", "ulimit -Sn 1024; exec \"$0\" \"$@\""];
    // The launcher may get no core for seconds.
    launcher.env(END, "start").env("DIST_LIVENESS", "60");
    let output = behind(&limited, &launcher).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_job_that_fails_in_its_second_world_is_restarted() {
    if std::env::var(END).is_ok() {
        drop(join());
        let mut comm = join();
        if std::env::var("DIST_RESTART").unwrap() == "0" {
            let failing = comm.rank() == 2 || comm.barrier().is_err();
            std::process::exit(if failing { 7 } else { 0 });
        }
        return;
    }
    let output = run_this_test(&["--max-restarts", "1"], "fail once");
    assert!(output.status.success(), "{output:?}");
    let again = "distctl: starting the job again, 1 of at most 1 times".to_owned();
    assert!(lines(&output.stderr).contains(&again), "{output:?}");
}

#[rstest]
#[case::of_the_same_world("3", "the job was aborted: rank 2 ended before it joined")]
#[case::of_a_smaller_world(
    "2",
    "this process expects a world of 2, the coordinator one of 3: set the same WORLD_SIZE on every rank"
)]
fn a_part_of_the_ranks_is_not_a_world(#[case] world_size: &str, #[case] words: &str) {
    if let Ok(world_size) = std::env::var(END) {
        let rank = join().rank();
        if rank < 2 {
            let [host, port, job, secret] = ["MASTER_ADDR", "MASTER_PORT", "DIST_JOB_ID", "DIST_SECRET_FILE"]
                .map(|name| std::env::var(name).unwrap());
            let config = Config::new(rank, world_size.parse().unwrap(), &format!("{host}:{port}")).unwrap();
            let config = config.with_job(&job).with_secret(Secret::from_file(Path::new(&secret)).unwrap());
            let config = config.with_external_coordinator().with_timeout(Duration::from_secs(4));
            eprintln!("{}", Chain(&ProcessTransport::join(&config).unwrap_err()));
        }
        return;
    }
    let output = run_this_test(&[], world_size);
    let told = lines(&output.stderr);
    assert_eq!(told.iter().filter(|line| *line == words).count(), 2, "{told:?}");
    assert!(output.status.success(), "{output:?}");
}
