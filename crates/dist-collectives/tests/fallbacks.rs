//! Ranks of one host on a system that forbids the fastest mechanism. They agree on another one, log it, and
//! compute right sums.
//!
//! Each case really forbids the mechanism for one of the ranks. A machine that cannot do that skips the case
//! with a message.
//! case and says so.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "processes are tried, and skips are told"
)]

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Config, Error, ReduceOp, algorithms::binomial};
use dist_testkit::process;
use dist_transport::shm_group::Reach;
use rstest::rstest;
use tracing_subscriber::filter::LevelFilter;

const LIMIT: Duration = Duration::from_secs(60);
const WORLD: usize = 3;
const ALL_SHARE: &str = "the ranks of the group share memory";
const NOT_ALL_SHARE: &str = "not all ranks of the group share memory";

/// Runs one rank. Sums by messages and by the library's choice, in all kinds of memory. Also exchanges large
/// ordinary memory, which is read in place if possible, with all ranks and with a neighbour.
fn rank() {
    tracing_subscriber::fmt().with_ansi(false).with_max_level(LevelFilter::INFO).init();
    let mut comm = Communicator::join(&Config::from_env().unwrap()).unwrap();
    comm.set_timeout(LIMIT);
    comm.set_crossovers("read_ordinary=64K".parse().unwrap());
    let me = u32::try_from(comm.rank()).unwrap();
    for len in [1, 100_000] {
        let (one, sum) = (vec![1.0_f32; len], vec![3.0; len]);
        let mut borrowed = one.clone();
        comm.with_algorithm(&binomial::ALL_REDUCE).all_reduce(&mut borrowed, ReduceOp::Sum).unwrap();
        assert_eq!(borrowed, sum);
        let mut borrowed = one.clone();
        comm.all_reduce(&mut borrowed, ReduceOp::Sum).unwrap();
        assert_eq!(borrowed, sum);
        let mut allocated = comm.alloc(len).unwrap();
        allocated.copy_from_slice(&one);
        for mut buffer in [Buffer::from(one), allocated] {
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(*buffer, sum);
        }
        let mut exchanged = vec![0; WORLD * len];
        comm.all_to_all(&vec![me; WORLD * len], &mut exchanged).unwrap();
        assert!(exchanged.chunks(len).zip(0..).all(|(part, from)| part.iter().all(|&value| value == from)));
    }
    // A single-copy send if that is faster and possible, otherwise through the ring, like the following message.
    let (left, right) = ((comm.rank() + WORLD - 1) % WORLD, (comm.rank() + 1) % WORLD);
    for round in 0..3 {
        let sent = vec![[me, round]; 200_000];
        let mut received = vec![[0; 2]; sent.len()];
        comm.send_recv(sent.as_flattened(), right, received.as_flattened_mut(), left).unwrap();
        let from = u32::try_from(left).unwrap();
        assert!(received.iter().all(|&value| value == [from, round]));
    }
    comm.barrier().unwrap();
}

/// Files, and therefore shared memory, are limited to 100 MiB: a signal kills a process that makes a longer one.
const OWN_MEMORY_ONLY: &str = "ulimit -f 204800";

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Runs the following command after this one in a shell.
fn shell(first: &str) -> Vec<String> {
    words(&["sh", "-c", &format!("{first} && exec \"$@\""), "sh"])
}

/// Returns `true` if the system can start a program like this.
fn can_start(starter: &[String]) -> bool {
    let mut command = Command::new(&starter[0]);
    command.args(&starter[1..]).arg("true").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[rstest]
#[case::nothing(&["env"], Some("reach=Write"))]
#[case::reading_and_writing_others(&["python3", "-c", process::FORBID_ATTACH, "read,write"], Some("reach=Slots"))]
#[case::writing_into_others(&["python3", "-c", process::FORBID_ATTACH, "write"], Some("reach=Read"))]
#[case::seeing_their_processes(&["unshare", "--pid", "--fork", "--kill-child"], Some("reach=Slots"))]
#[case::their_users(&["unshare", "--user"], None)]
#[case::their_users_as_root(&["unshare", "--user", "--map-root-user"], None)]
fn a_mechanism_that_one_rank_lacks_is_used_by_none(
    #[case] starter: &[&str],
    #[case] expected: Option<&str>,
    #[values(0, 1)] whom: usize,
) {
    let starter = words(starter);
    check(&starter, whom, |output| match expected {
        Some(expected) => output.contains(expected),
        // The access between ranks of different user namespaces depends on the capabilities of the process that
        // starts them.
        None => output.contains("reach=") || output.contains(NOT_ALL_SHARE),
    });
}

/// A container has a small /dev/shm, which is not used for shared memory.
#[test]
fn a_small_dev_shm_changes_nothing() {
    let mut starter = words(&["unshare", "--mount"]);
    starter.extend(shell("mount -t tmpfs -o size=64k small /dev/shm"));
    check(&starter, 0, |output| output.contains("reach=Write"));
}

#[rstest]
#[case::of_the_group("ulimit -f 2048", 0, &[NOT_ALL_SHARE, "through=\"shared memory\""])]
#[case::to_give_away(OWN_MEMORY_ONLY, 1, &["reach=Write", "through=\"shared memory\""])]
#[case::of_its_messages("ulimit -f 16", 2, &[NOT_ALL_SHARE, "through=\"tcp\""])]
fn ranks_use_messages_if_one_gets_no_shared_memory(
    #[case] limit: &str,
    #[case] whom: usize,
    #[case] expected: &'static [&'static str],
) {
    let starter = shell(limit);
    check(&starter, whom, |output| expected.iter().all(|expected| output.contains(expected)));
}

/// Limits of open files with which a rank cannot join, cannot share memory, can share memory, and has enough.
/// Also too small address spaces for its own shared memory, for the memory of any other rank, and for the
/// memory of both others.
#[rstest]
fn a_rank_with_low_limits_falls_back_or_returns_an_error(
    #[values(
        "-n 6",
        "-n 10",
        "-n 14",
        "-n 18",
        "-n 22",
        "-n 26",
        ENOUGH,
        "-v 256000",
        "-v 900000",
        "-v 1300000"
    )]
    limit: &str,
) {
    if process::rank().is_some() {
        let end = match sum_if_possible() {
            Ok(()) => "summed".to_owned(),
            Err(error @ Error::Mismatch { .. }) => panic!("{error:?}"),
            Err(error) => format!("{error:?}"),
        };
        println!("\nended: {end}");
        return;
    }
    let starter = shell(&format!("ulimit {limit}"));
    let name = std::thread::current().name().unwrap().to_owned();
    let start = |rank: usize| if rank == 1 { starter.clone() } else { Vec::new() };
    let job = process::ranks_through(WORLD, &name, LIMIT, &[], start);
    assert!(job.ranks.iter().all(|ended| ended.output.contains("\nended: ")), "all come to an end: {job:?}");
    let summed = job.ranks.iter().filter(|ended| ended.output.contains("\nended: summed")).count();
    assert!(summed == 0 || summed == WORLD, "all of them or none: {job:?}");
    assert!(limit != ENOUGH || summed == WORLD, "{job:?}");
}

const ENOUGH: &str = "-n 64";

/// Sums in allocated memory and by messages.
fn sum_if_possible() -> Result<(), Error> {
    let config = Config::from_env().unwrap().with_timeout(LIMIT / 4);
    let mut comm = Communicator::join(&config)?;
    comm.set_timeout(LIMIT / 4);
    let mut buffer = comm.alloc(100_000)?;
    buffer.fill(1.0_f32);
    comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum)?;
    assert_eq!(*buffer, [3.0; 100_000]);
    let mut borrowed = [1.0_f32; 1000];
    comm.with_algorithm(&binomial::ALL_REDUCE).all_reduce(&mut borrowed, ReduceOp::Sum)?;
    assert_eq!(borrowed, [3.0; 1000]);
    comm.barrier()
}

/// The memory for messages exists, but one rank cannot allocate shared memory, and other ranks may not access its
/// ordinary memory.
#[test]
fn a_rank_with_inaccessible_memory_returns_an_error_and_ends_the_job() {
    const WHOM: usize = 1;
    if let Some(rank) = process::rank() {
        let mut comm = Communicator::join(&Config::from_env().unwrap()).unwrap();
        let mut buffer = comm.alloc::<f32>(100_000).unwrap();
        let error = comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap_err();
        match rank {
            WHOM => assert!(matches!(error, Error::OutOfReach { bytes: 400_000, .. }), "{error:?}"),
            _ => assert_eq!(error.peer(), Some(WHOM), "{error:?}"),
        }
        return;
    }
    let starter = shell(OWN_MEMORY_ONLY);
    let name = std::thread::current().name().unwrap().to_owned();
    let start = |rank: usize| if rank == WHOM { starter.clone() } else { Vec::new() };
    process::ranks_through(WORLD, &name, LIMIT, &[("DIST_SHM_CMA", "off")], start).assert_success();
}

/// One rank has memory of an earlier job, which the other ranks cannot map.
#[test]
fn a_rank_with_memory_of_another_job_ends_this_one() {
    const WHOM: usize = 1;
    if let Some(rank) = process::rank() {
        let mut before = Communicator::join(&Config::from_env().unwrap()).unwrap();
        let mut buffer = before.alloc::<f32>(100_000).unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut port = [u32::from(free.local_addr().unwrap().port())];
        before.broadcast(&mut port, 0).unwrap();
        drop(free);
        drop(before);
        let coordinator = format!("127.0.0.1:{}", port[0]);
        let config = Config::new(rank, WORLD, &coordinator).unwrap().with_reach(Reach::Slots);
        let mut comm = Communicator::join(&config).unwrap();
        if rank != WHOM {
            buffer = comm.alloc(100_000).unwrap();
        }
        let error = comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap_err();
        assert!(!error.is_timeout(), "{error:?}");
        let after = comm.with_timeout(LIMIT / 12).barrier().unwrap_err();
        assert!(matches!(after, Error::Aborted { .. }), "{after:?} after {error:?}");
        return;
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks(WORLD, &name, LIMIT).assert_success();
}

/// Runs the ranks, one of them started like this.
#[track_caller]
fn check(starter: &[String], whom: usize, is_said: impl Fn(&str) -> bool) {
    if process::rank().is_some() {
        return rank();
    }
    if !can_start(starter) {
        // Namespaces need a privilege, and filters need Python: some machines have neither.
        eprintln!("skipped: nothing can be started by {}", starter[0]);
        return;
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let start = |rank: usize| if rank == whom { starter.to_vec() } else { Vec::new() };
    let job = process::ranks_through(WORLD, &name, LIMIT, &[], start);
    job.assert_success();
    for ended in &job.ranks {
        assert!(is_said(&ended.output), "rank {} of a job with {starter:?}: {}", ended.rank, ended.output);
    }
    let agreed = |output: &str| {
        let line = output.lines().find(|line| line.contains(ALL_SHARE) || line.contains(NOT_ALL_SHARE));
        line.and_then(|line| line.split("reach=").nth(1)).map(|reach| reach.trim().to_owned())
    };
    let first = agreed(&job.ranks[0].output);
    assert!(job.ranks.iter().all(|ended| agreed(&ended.output) == first), "they agree");
}
