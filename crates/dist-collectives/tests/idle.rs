//! The processor time of a process whose communicators are idle or wait is close to zero. These tests have their
//! own binary, because processor time belongs to the process.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_testkit::process;
use rstest::rstest;

const IDLE: Duration = Duration::from_secs(1);
/// Maximum number of ticks during [`IDLE`], which has a hundred. A spinning thread would use all of them.
const TICKS_MAX: u64 = 10;

/// Returns the processor time of all threads of this process, in ticks of 10 ms.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    // User and system time are the 14th and 15th field; the first field after the name is the third.
    after_name.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

/// Waits for a message that never comes.
fn rest(comm: &Communicator) {
    let (_sender, mut receiver) = comm.runtime().mailbox::<()>();
    receiver.receive(Some(comm.runtime().deadline(IDLE))).unwrap_err();
}

#[rstest]
fn a_process_burns_nothing_while_communicators_rest_or_wait(#[values("shm", "tcp")] transport: &str) {
    if process::rank().is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        let limit = Duration::from_secs(60);
        process::ranks_with(2, &name, limit, &[("DIST_TRANSPORT", transport)]).assert_success();
        return;
    }
    let mut comm = Communicator::from_env().unwrap();
    let mut fork = comm.fork().unwrap();
    // Connections, memory and the worker thread exist and have just been used.
    let started = comm.start_all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum);
    assert_eq!(*started.wait().unwrap(), [2.0; 1000]);
    fork.barrier().unwrap();
    let before = ticks();
    rest(&comm);
    let resting = ticks() - before;
    assert!(resting <= TICKS_MAX, "{resting} ticks with nothing to do");
    // One rank comes a second later: the other one waits in a blocking operation, and its worker in a started one.
    let before = ticks();
    if comm.rank() == 1 {
        rest(&comm);
    }
    let started = comm.start_all_reduce(vec![1.0_f32], ReduceOp::Sum);
    fork.barrier().unwrap();
    started.wait().unwrap();
    let waiting = ticks() - before;
    assert!(waiting <= TICKS_MAX, "{waiting} ticks of waiting");
}
