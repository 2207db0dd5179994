//! Processes die while all of them write into each other's memory.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "a rank tells the test by its output")]

use std::time::Duration;

use dist_collectives::transport::Runtime;
use dist_collectives::tuning::Operation;
use dist_collectives::{Buffer, Communicator, Config, ReduceOp};
use dist_testkit::process;
use rustix::process::{Signal, getpid, kill_process};

const LIMIT: Duration = Duration::from_secs(60);
const VICTIM: usize = 1;
/// The time of the victim's death, in microseconds after the first barrier.
const MOMENT: &str = "DIST_TEST_MOMENT";
/// `true` if the buffers are allocated in shared memory.
const ALLOCATED: &str = "DIST_TEST_ALLOCATED";
/// Printed by a rank whose buffer was lent when the victim died.
const GIVEN_UP: &str = "the buffer was given up";
/// Several blocks of one system call.
const LEN: usize = 200_000;

/// The program of one rank. Sums in a loop until the victim is dead.
fn rank(moment: Duration, allocated: bool) {
    let mut comm = Communicator::join(&Config::from_env().unwrap()).unwrap();
    comm.set_timeout(LIMIT);
    let algorithm = Operation::AllReduce.algorithm("direct/write_to_all");
    let beside = vec![7_u8; 4 * LEN];
    let mut buffer = Buffer::from(vec![0.0_f32; LEN]);
    if allocated {
        buffer = comm.alloc(LEN).unwrap();
    }
    comm.barrier().unwrap();
    if comm.rank() == VICTIM {
        let runtime = Runtime::system();
        let die = move || {
            Runtime::system().sleep(moment);
            kill_process(getpid(), Signal::KILL).unwrap();
        };
        drop(runtime.spawn("end", die).unwrap());
    }
    let error = loop {
        buffer.fill(1.0);
        let mut comm = comm.with_algorithm(algorithm.unwrap());
        if let Err(error) = comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum) {
            break error;
        }
        assert!(buffer.iter().all(|&sum| sum == 3.0), "a sum that was given is right");
    };
    assert_eq!(error.peer(), Some(VICTIM), "{error}");
    assert!(error.to_string().contains("died"), "{error}");
    // A call that begins after the abort is known fails before the buffer is lent: the buffer is as it was.
    let is_untouched = buffer.iter().all(|&value| value == 1.0);
    assert!(buffer.is_empty() || is_untouched, "it may still be written into");
    println!("{}", if buffer.is_empty() { GIVEN_UP } else { "the buffer was not lent" });
    // New memory is not the memory that was given up.
    let fresh = vec![9_u8; 4 * LEN];
    drop(comm);
    assert!(beside.iter().all(|&byte| byte == 7) && fresh.iter().all(|&byte| byte == 9));
}

#[test]
fn whenever_a_process_dies_the_others_name_it_and_give_the_memory_up() {
    if process::rank().is_some() {
        let moment: u64 = std::env::var(MOMENT).unwrap().parse().unwrap();
        return rank(Duration::from_micros(moment), std::env::var(ALLOCATED).unwrap() == "true");
    }
    let mut given_up = 0;
    for moment in 0..10_u32 {
        for allocated in ["true", "false"] {
            let moment = (moment * 173).to_string();
            let variables = [(MOMENT, &*moment), (ALLOCATED, allocated), ("DIST_TRANSPORT", "shm")];
            let name = "whenever_a_process_dies_the_others_name_it_and_give_the_memory_up";
            let job = process::ranks_with(3, name, LIMIT, &variables);
            for ended in &job.ranks {
                let succeeded = ended.status.is_some_and(|status| status.success());
                assert_eq!(succeeded, ended.rank != VICTIM, "rank {}: {}", ended.rank, ended.output);
                given_up += usize::from(ended.output.contains(GIVEN_UP));
            }
        }
    }
    assert!(given_up > 0, "no victim died while memory was lent");
}
