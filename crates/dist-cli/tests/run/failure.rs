//! Failure of a rank: the reported cause, the end of the other ranks, and restarts.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::panic::AssertUnwindSafe;
use std::process::Stdio;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, ReduceOp};
use rstest::rstest;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::{END, distctl, ends, lines, run, running, signal};

#[rstest]
#[case("exit 7", 7, "rank 2 exited with code 7")]
#[case("kill -KILL $$", 137, "rank 2 was killed by SIGKILL")]
fn the_first_failed_rank_is_named_and_the_others_are_ended(
    #[case] end: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let output = run(&["-n", "4"], &format!("test $RANK = 2 && {end}; sleep 1000"));
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert_eq!(lines(&output.stderr), [format!("distctl: {words}; ending the others")]);
}

/// The program of the ranks in the next test.
fn be_a_rank(end: &str) {
    let mut comm = Communicator::from_env().unwrap();
    let mut pids = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut pids).unwrap();
    if comm.rank() != 1 {
        comm.barrier().unwrap_err();
        std::process::exit(3);
    }
    // Rank 0 cannot end before this rank ends or aborts.
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
    // The launcher reaps this rank second.
    assert!(ends(&victim));
    std::process::exit(7);
}

#[rstest]
#[case("at once", "died")]
#[case("after a victim", "panicked")]
fn the_rank_that_failed_first_is_named_in_any_order_of_ends(#[case] end: &str, #[case] words: &str) {
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

#[rstest]
#[case::in_different_calls("calls", "ranks 0 and 1 are in different calls: calls differ: ")]
#[case::of_different_lengths("lengths", "rank 1 sends 8 bytes where rank 0 expects 16")]
fn neither_of_two_ranks_that_disagree_is_blamed(#[case] task: &str, #[case] words: &str) {
    if let Ok(task) = std::env::var(END) {
        let mut comm = Communicator::from_env().unwrap();
        let differs = match (task.as_str(), comm.rank()) {
            ("calls", 0) => comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
            ("calls", _) => comm.broadcast(&mut [1.0_f32], 0),
            (_, 0) => comm.recv(&mut [0.0_f32; 4], 1),
            _ => comm.send(&[1.0_f32; 2], 0).and_then(|()| comm.barrier()),
        };
        differs.unwrap_err();
        // Drop waits until the coordinator has received the report.
        drop(comm);
        std::process::exit(3);
    }
    let program = std::env::current_exe().unwrap();
    let test = std::thread::current().name().unwrap().to_owned();
    let mut command = distctl(&["run", "-n", "2", "--", program.to_str().unwrap(), "--exact", &test]);
    let output = command.arg("--nocapture").env(END, task).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let told = lines(&output.stderr);
    let named = format!(" exited with code 3 ({words}");
    let is_named = |line: &String| line.contains(&named) && line.ends_with("; ending the others");
    assert!(told.iter().any(is_named), "{told:?}");
}

#[test]
fn the_cause_is_named_although_it_exited_with_0() {
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
    let begins = |line: &String| {
        line.starts_with("distctl: rank 1 ") && line.contains("; rank 0 exited with code 3; ")
    };
    assert!(told.iter().any(begins) && told.iter().all(|line| line.starts_with("distctl: ")), "{told:?}");
}

#[test]
fn the_other_ranks_have_time_to_report() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo").display().to_string();
    // A process that has ended can still be signalled until it is reaped.
    let see =
        format!("read pid < {fifo}; while kill -0 $pid 2>&-; do :; done; echo rank 0 is gone >&2; exit 1");
    let script = format!("mkfifo {fifo} 2>&-; case $RANK in 0) echo $$ > {fifo}; exit 3;; 1) {see};; esac");
    let output = run(&["-n", "2"], &script);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(lines(&output.stderr).contains(&"rank 0 is gone".to_owned()), "{output:?}");
}

#[rstest]
#[case(2, 0, 1)]
#[case(1, 8, 2)]
#[case(0, 7, 1)]
fn a_failed_job_is_restarted(#[case] restarts: usize, #[case] code: i32, #[case] failures: usize) {
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
fn a_job_that_is_stopped_by_a_signal_is_not_restarted() {
    let script = "trap 'exit 9' TERM; echo $$; while :; do sleep 0.01; done";
    let (child, _) = running(&["-n", "2", "--max-restarts", "3"], script);
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(Signal::TERM.as_raw()), "{output:?}");
    // The shell prints a message for a `sleep` that was signalled.
    let told: Vec<_> = lines(&output.stderr).into_iter().filter(|line| line.starts_with("distctl")).collect();
    assert_eq!(told, ["distctl: SIGTERM: forwarded to every rank"]);
}

/// The launcher spends most of the time waiting for the coordinator's record.
#[test]
fn a_signal_between_two_starts_ends_the_job() {
    let mut command = distctl(&["run", "-n", "2", "--max-restarts", "20", "--", "false"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines();
    let again = |line: &String| line.contains("starting the job again");
    assert!(told.any(|line| again(&line.unwrap())));
    signal(&child, Signal::TERM);
    let more = told.filter(|line| again(line.as_ref().unwrap())).count();
    assert!(more <= 2, "started {more} times more");
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
}

/// Joins a job that rank 1 does not join, and prints the error.
fn join_in_vain() -> ! {
    if std::env::var("RANK").unwrap() == "1" {
        std::process::exit(0);
    }
    eprintln!("{}", Chain(&Communicator::from_env().unwrap_err()));
    std::process::exit(3);
}

#[test]
fn a_rank_that_ends_before_it_joined_is_named_at_once() {
    if std::env::var(END).is_ok() {
        join_in_vain();
    }
    let program = std::env::current_exe().unwrap();
    let test = std::thread::current().name().unwrap().to_owned();
    let mut command = distctl(&["run", "-n", "3", "--", program.to_str().unwrap(), "--exact", &test]);
    let output = command.arg("--nocapture").env(END, "absent").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let told = lines(&output.stderr);
    let by_ranks = told
        .iter()
        .filter(|line| line.starts_with("cannot join") && line.contains("rank 1 ended before it joined"));
    assert_eq!(by_ranks.count(), 2, "{told:?}");
    let named = |line: &String| {
        line.starts_with("distctl: rank 1 ended before it joined; rank ")
            && line.ends_with(" exited with code 3; ending the others")
    };
    assert!(told.iter().any(named), "{told:?}");
}

/// The rank's process has ended, and a process that it has left behind joins.
#[cfg(target_os = "linux")]
#[test]
fn a_process_that_outlives_its_wrapper_can_join() {
    if std::env::var(END).is_ok() {
        let mut comm = Communicator::from_env().unwrap();
        return comm.barrier().unwrap();
    }
    let program = std::env::current_exe().unwrap();
    let test = std::thread::current().name().unwrap().to_owned();
    // The wrapper ends when the process has left its group and closes the pipe. The other ranks have joined
    // long before.
    let wrapper = r#"test $RANK = 1 || exec "$0" "$@"
        : $(setsid -f sh -c 'exec >&2; sleep 0.5; exec "$0" "$@"' "$0" "$@")"#;
    let mut command = distctl(&["run", "-n", "3", "--", "sh", "-c", wrapper, program.to_str().unwrap()]);
    let output = command.args(["--exact", &test, "--nocapture"]).env(END, "late").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
