//! Deaths of real processes: every survivor gets an error at once, and names the same rank.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "the processes of a test tell each other by their output")]
#![allow(unsafe_code, reason = "shared memory is used without a checked plan")]

use std::time::Duration;

use dist_testkit::process;
use dist_transport::conformance::Unchecked;
use dist_transport::process::{Config, ProcessTransport};
use dist_transport::shm_group::{ExposedRegion, SlotUse};
use dist_transport::{Cause, Error, Incoming, Outgoing, Sink, Transport};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);

/// The rank that ends, and how.
const VICTIM: &str = "DIST_TEST_VICTIM";
const ENDING: &str = "DIST_TEST_ENDING";
/// The medium of the ranks.
const MEDIUM: &str = "DIST_TRANSPORT";

/// Runs one rank: sends words around a ring until an error. The victim ends at the hundredth.
fn rank(victim: usize) {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let rank = transport.rank();
    let mut round = 0_u64;
    let error = loop {
        round += 1;
        if round == 100 && rank.index() == victim {
            end(&std::env::var(ENDING).unwrap());
        }
        let mut received = [0; 8];
        let deadline = transport.runtime().deadline(LIMIT);
        let passed = transport.exchange(
            Some(Outgoing { to: rank.right().index(), parts: &[&round.to_le_bytes()] }),
            Some(Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) }),
            &deadline.into(),
        );
        if let Err(error) = passed {
            break error;
        }
        assert_eq!(u64::from_le_bytes(received), round);
    };
    let abort = transport.aborted().unwrap();
    let cause = if victim == 0 { Cause::CoordinatorLost } else { Cause::Died };
    assert_eq!((abort.rank, abort.cause), (victim, cause));
    assert!(matches!(error, Error::Aborted(_)), "{error}");
}

fn end(how: &str) {
    match how {
        "kill" => {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap()
        }
        "exit" => std::process::exit(7),
        "abort" => std::process::abort(),
        _ => unreachable!("there is no other ending"),
    }
}

#[rstest]
fn every_survivor_names_the_rank_that_died(
    #[values("kill", "exit", "abort")] ending: &str,
    #[values("0", "2")] victim: &str,
    #[values("tcp", "shm")] medium: &str,
) {
    if process::rank().is_some() {
        return rank(std::env::var(VICTIM).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(4, &name, LIMIT, &[(VICTIM, victim), (ENDING, ending), (MEDIUM, medium)]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank.to_string() != victim, "rank {}: {}", ended.rank, ended.output);
    }
}

/// Runs one rank of four. The third is killed. Rank 0, which hosts the coordinator, ends its process as soon
/// as it gets the error.
fn rank_in_a_world_whose_rank_0_ends_at_once() {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let rank = transport.rank();
    let error = (0..).find_map(|round| {
        if round == 100 && rank.index() == 2 {
            end("kill");
        }
        let mut received = [0; 8];
        let deadline = transport.runtime().deadline(LIMIT);
        let send = Outgoing { to: rank.right().index(), parts: &[&[7; 8]] };
        let receive = Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) };
        transport.exchange(Some(send), Some(receive), &deadline.into()).err()
    });
    if rank.index() == 0 {
        std::process::exit(0);
    }
    let Some(Error::Aborted(abort)) = error else { panic!("{error:?}") };
    assert_eq!((abort.rank, abort.cause), (2, Cause::Died));
}

/// It is a matter of microseconds, so one job may pass by chance.
#[rstest]
fn every_rank_names_the_dead_one_although_rank_0_ends_at_once(
    #[values("tcp", "shm")] medium: &str,
    #[values(0, 1, 2, 3)] _job: usize,
) {
    if process::rank().is_some() {
        return rank_in_a_world_whose_rank_0_ends_at_once();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(4, &name, LIMIT, &[(MEDIUM, medium)]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank != 2, "rank {}: {}", ended.rank, ended.output);
    }
}

/// Runs one rank of three. One of them aborts and ends its process.
fn rank_in_a_world_with_an_abort(who: usize) {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let deadline = transport.runtime().deadline(LIMIT);
    if transport.rank().index() == who {
        transport.abort(Cause::gave_up("no more data"));
        std::process::exit(0);
    }
    let mut received = [0; 8];
    let receive = Incoming { from: who, len: 8, sink: Sink::Into(&mut received) };
    let error = transport.exchange(None, Some(receive), &deadline.into()).unwrap_err();
    let Error::Aborted(abort) = error else { panic!("{error:?}") };
    assert_eq!(abort.to_string(), format!("rank {who} gave up: no more data"));
}

/// Rank 0 hosts the coordinator.
#[rstest]
fn a_rank_that_aborts_and_ends_at_once_has_sent_its_reason(#[values("0", "2")] who: &str) {
    if process::rank().is_some() {
        return rank_in_a_world_with_an_abort(std::env::var(VICTIM).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks_with(3, &name, LIMIT, &[(VICTIM, who)]).assert_success();
}

/// The process whose descriptors stay open in another process, as in the child of a fork.
const KEPT: &str = "DIST_TEST_KEPT";

/// Duplicates the descriptors of another process, reports that, and holds them until this test is over.
fn keep_descriptors(of: i32) {
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let process = pidfd_open(Pid::from_raw(of).unwrap(), PidfdFlags::empty()).unwrap();
    let kept: Vec<_> =
        (3..1024).filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()).collect();
    println!("kept {}", kept.len());
    let runtime = dist_transport::Runtime::system();
    runtime.sleep(2 * LIMIT);
}

/// Runs one rank of three. One of them is killed while its descriptors stay open.
#[allow(
    clippy::zombie_processes,
    reason = "the process that starts the holder is killed, and the test ends the holder"
)]
fn rank_in_a_world_with_open_descriptors(victim: usize) {
    use std::io::{BufRead, BufReader};
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let mut pass = || {
        let mut received = [0; 8];
        let send = Outgoing { to: rank.right().index(), parts: &[&[7; 8]] };
        let receive = Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) };
        transport.exchange(Some(send), Some(receive), &deadline.into())
    };
    pass().unwrap();
    if rank.index() == victim {
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
        let mut holder = std::process::Command::new(std::env::current_exe().unwrap());
        holder.args(["--exact", std::thread::current().name().unwrap(), "--nocapture"]);
        holder.env(KEPT, std::process::id().to_string());
        holder.stdin(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let mut holder = holder.stdout(std::process::Stdio::piped()).spawn().unwrap();
        println!("holder {} ", holder.id());
        let told = BufReader::new(holder.stdout.take().unwrap()).lines().map(Result::unwrap);
        let kept = { told }.find_map(|line| line.split("kept ").nth(1).map(str::to_owned));
        assert_ne!(kept, Some("0".to_owned()), "this process may not look into another one");
        end("kill");
    }
    let Some(Error::Aborted(abort)) = std::iter::repeat_with(&mut pass).find_map(Result::err) else {
        panic!("it ends by an abort")
    };
    let cause = if victim == 0 { Cause::CoordinatorLost } else { Cause::Died };
    assert_eq!((abort.rank, abort.cause), (victim, cause));
}

/// If only the end of its connections revealed its death, the rank would be reported as silent two seconds
/// later.
#[rstest]
fn a_dead_rank_whose_descriptors_stay_open_in_a_child_is_reported_at_once(
    #[values("0", "2")] victim: &str,
    #[values("tcp", "shm")] medium: &str,
) {
    if let Ok(kept) = std::env::var(KEPT) {
        return keep_descriptors(kept.parse().unwrap());
    }
    if process::rank().is_some() {
        return rank_in_a_world_with_open_descriptors(std::env::var(VICTIM).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(3, &name, LIMIT, &[(VICTIM, victim), (MEDIUM, medium)]);
    let holder =
        |ended: &process::Ended| ended.output.split("holder ").nth(1)?.split(' ').next()?.parse().ok();
    let holder =
        job.ranks.iter().find_map(holder).and_then(rustix::process::Pid::from_raw).expect("there is one");
    let _ = rustix::process::kill_process(holder, rustix::process::Signal::KILL);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank.to_string() != victim, "rank {}: {}", ended.rank, ended.output);
    }
}

/// Runs one rank: enters one barrier after the other in shared memory until an error. The victim ends at the
/// hundredth.
fn rank_in_shared_memory(victim: usize) {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let shm_group = transport.shm_group(&deadline.into()).unwrap().expect("they share memory");
    // SAFETY: all ranks enter one barrier after the other, and nothing is published.
    let mut shm_group = unsafe { Unchecked::new(shm_group) };
    let mut barrier = || -> Result<(), Error> {
        shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &deadline.into())?;
        shm_group.signal();
        (1..rank.world_size())
            .try_for_each(|distance| shm_group.wait(rank.plus(distance).index(), 1, &deadline.into()))?;
        shm_group.wake_waiters();
        Ok(())
    };
    let error = (1..).find_map(|round| {
        if round == 100 && rank.index() == victim {
            end(&std::env::var(ENDING).unwrap());
        }
        barrier().err()
    });
    assert!(matches!(error, Some(Error::Aborted(_))), "{error:?}");
    let abort = transport.aborted().unwrap();
    let cause = if victim == 0 { Cause::CoordinatorLost } else { Cause::Died };
    assert_eq!((abort.rank, abort.cause), (victim, cause));
}

#[rstest]
fn every_survivor_in_shared_memory_names_the_rank_that_died(
    #[values("kill", "exit")] ending: &str,
    #[values("0", "2")] victim: &str,
) {
    if process::rank().is_some() {
        return rank_in_shared_memory(std::env::var(VICTIM).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(4, &name, LIMIT, &[(VICTIM, victim), (ENDING, ending), (MEDIUM, "shm")]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank.to_string() != victim, "rank {}: {}", ended.rank, ended.output);
    }
}

/// Runs one rank of three. The second stops without ending.
fn rank_in_a_world_with_a_stopped_rank() {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let rank = transport.rank();
    if rank.index() == 1 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP).unwrap();
        // The signal may reach another thread first. This thread must do nothing more in that time.
        loop {
            transport.runtime().park(None);
        }
    }
    let mut received = [0; 8];
    let deadline = transport.runtime().deadline(LIMIT);
    let error = transport
        .exchange(None, Some(Incoming { from: 1, len: 8, sink: Sink::Into(&mut received) }), &deadline.into())
        .unwrap_err();
    assert!(
        matches!(&error, Error::Aborted(abort) if abort.rank == 1 && abort.cause == Cause::Silent),
        "{error:?}"
    );
}

/// Runs one rank of two. One of them is stopped and continues when the other lets it.
fn rank_in_a_world_with_a_temporary_stop(whom: usize) {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (me, other) = (transport.rank().index(), transport.rank().right().index());
    let deadline = transport.runtime().deadline(LIMIT);
    let mut pid = [0; 4];
    let own = std::process::id().to_ne_bytes();
    let swap = |transport: &mut ProcessTransport, pid: &mut [u8]| {
        let send = Outgoing { to: other, parts: &[&own] };
        let receive = Incoming { from: other, len: 4, sink: Sink::Into(pid) };
        transport.exchange(Some(send), Some(receive), &deadline.into()).unwrap();
    };
    swap(&mut transport, &mut pid);
    if me == whom {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP).unwrap();
    } else {
        transport.runtime().sleep(Duration::from_secs(3));
        let pid = rustix::process::Pid::from_raw(i32::from_ne_bytes(pid)).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    }
    swap(&mut transport, &mut pid);
    assert!(transport.aborted().is_none());
}

/// Rank 0 hosts the coordinator.
#[rstest]
fn a_rank_that_may_be_stopped_for_a_while_goes_on_afterwards(#[values(0, 1)] whom: usize) {
    if process::rank().is_some() {
        return rank_in_a_world_with_a_temporary_stop(whom);
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks_with(2, &name, LIMIT, &[("DIST_LIVENESS", "20")]).assert_success();
}

#[rstest]
fn a_stopped_rank_is_named_long_before_the_deadline(#[values("tcp", "shm")] medium: &str) {
    if process::rank().is_some() {
        return rank_in_a_world_with_a_stopped_rank();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(3, &name, Duration::from_secs(6), &[(MEDIUM, medium)]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank != 1, "rank {}: {}", ended.rank, ended.output);
    }
}

/// Runs one rank of six. The last of them has too few descriptors to watch all connections in a wait.
fn rank_in_a_world_with_a_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let peers = || (0..rank.world_size()).filter(|&peer| peer != rank.index());
    let sends: Vec<_> = peers().map(|to| Outgoing { to, parts: &[&[7]] }).collect();
    let mut exchange = |sends: &[Outgoing<'_>]| {
        let mut bytes = vec![0; rank.world_size()];
        let mut receives: Vec<_> = peers()
            .zip(bytes.chunks_mut(1))
            .map(|(from, byte)| Incoming { from, len: 1, sink: Sink::Into(byte) })
            .collect();
        transport.exchange_all(sends, &mut receives, &deadline.into())
    };
    exchange(&sends).unwrap();
    let is_limited = rank.index() == rank.world_size() - 1;
    if is_limited {
        // The service thread watches three: its waker, its listener and its connection to the coordinator.
        let limit = Rlimit { current: Some(4), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    let error = exchange(&[]).unwrap_err();
    let abort = transport.aborted().unwrap();
    let gave_up = matches!(&abort.cause, Cause::GaveUp { why } if why.starts_with("receiving: "));
    assert!(abort.rank == rank.world_size() - 1 && gave_up, "{abort}");
    match error {
        Error::System { .. } => assert!(is_limited),
        Error::Aborted(_) => assert!(!is_limited),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_with_a_system_error_blames_no_other() {
    if process::rank().is_some() {
        return rank_in_a_world_with_a_descriptor_limit();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks_with(6, &name, LIMIT, &[(MEDIUM, "tcp")]).assert_success();
}

/// Runs one rank of two. The second may not watch the descriptors of its service thread.
fn rank_in_a_world_without_a_service_thread() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (me, deadline) = (transport.rank().index(), transport.runtime().deadline(LIMIT));
    if me == 1 {
        // The least that it watches is its waker and its connection to the coordinator. This thread watches
        // nothing.
        let limit = Rlimit { current: Some(1), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    } else {
        let mut byte = [0];
        let receive = Incoming { from: 1, len: 1, sink: Sink::Into(&mut byte) };
        transport.exchange(None, Some(receive), &deadline.into()).unwrap_err();
    }
    let abort = loop {
        if let Some(abort) = transport.aborted() {
            break abort;
        }
        assert!(!transport.runtime().expired(deadline));
        transport.runtime().sleep(Duration::from_millis(1));
    };
    // If a connection wakes the thread before it waits again, it is the connection that it cannot accept.
    let calls = ["waiting: ", "accepting a connection: "];
    let gave_up =
        matches!(&abort.cause, Cause::GaveUp { why } if calls.iter().any(|call| why.starts_with(call)));
    assert!(abort.rank == 1 && gave_up, "{abort}");
}

#[test]
fn a_rank_with_a_failed_service_thread_blames_no_other() {
    if process::rank().is_some() {
        return rank_in_a_world_without_a_service_thread();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks_with(2, &name, LIMIT, &[(MEDIUM, "tcp")]).assert_success();
}

/// Runs one rank of three. The second cannot open files while it waits for the connection of the third.
fn rank_in_a_world_with_a_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd;
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let rank = transport.rank();
    let long = transport.runtime().deadline(LIMIT).into();
    if rank.index() == 1 {
        let before = getrlimit(Resource::Nofile);
        let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
        let none = Rlimit { current: Some(next.try_into().unwrap()), ..before };
        setrlimit(Resource::Nofile, none).unwrap();
        std::fs::File::open("/dev/null").unwrap_err();
        let short = transport.runtime().deadline(Duration::from_millis(50)).into();
        assert_eq!(transport.wait_any_peer(&[2], &short).unwrap(), [2]);
        setrlimit(Resource::Nofile, before).unwrap();
    }
    let mut byte = [0];
    let incoming = Incoming { from: rank.right().index(), len: 1, sink: Sink::Into(&mut byte) };
    let outgoing = Outgoing { to: rank.left().index(), parts: &[&[7]] };
    let (send, receive) = (Some(outgoing), Some(incoming));
    // The message goes from 1 to 0, to 2, and back to 1. No rank connects to rank 1 before.
    if rank.index() == 1 {
        transport.exchange(send, None, &long).unwrap();
        transport.exchange(None, receive, &long).unwrap();
    } else {
        transport.exchange(None, receive, &long).unwrap();
        transport.exchange(send, None, &long).unwrap();
    }
}

#[test]
fn a_rank_without_files_waits_for_connections_all_the_same() {
    if process::rank().is_some() {
        return rank_in_a_world_with_a_file_limit();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    process::ranks_with(3, &name, LIMIT, &[(MEDIUM, "tcp")]).assert_success();
}

/// Runs one rank of two. The second dies in the middle of a message larger than any window.
fn rank_in_a_world_with_half_a_message() {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let deadline = transport.runtime().deadline(LIMIT);
    let victim = transport.rank().index() == 1;
    let mut pieces = 0;
    let mut combine = |_: &mut [u8], _: &[u8]| {
        pieces += 1;
        if victim && pieces == 20 {
            end("kill");
        }
    };
    let error = transport
        .exchange_in_place(usize::from(!victim), &mut vec![1; 64 << 20], &mut combine, &deadline.into())
        .unwrap_err();
    assert!(
        matches!(&error, Error::Aborted(abort) if abort.rank == 1 && abort.cause == Cause::Died),
        "{error:?}"
    );
}

#[rstest]
#[case::over_one_socket("tcp", "1")]
#[case::over_three_sockets("tcp", "3")]
#[case::through_shared_memory("shm", "1")]
fn a_rank_that_dies_in_the_middle_of_a_message_is_named(#[case] medium: &str, #[case] sockets: &str) {
    if process::rank().is_some() {
        return rank_in_a_world_with_half_a_message();
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let job = process::ranks_with(2, &name, LIMIT, &[(MEDIUM, medium), ("DIST_SOCKETS_PER_PEER", sockets)]);
    for ended in &job.ranks {
        let succeeded = ended.status.is_some_and(|status| status.success());
        assert_eq!(succeeded, ended.rank == 0, "rank {}: {}", ended.rank, ended.output);
    }
}
