//! The TCP transport: rendezvous, refusal of unauthenticated clients, and detection of deaths.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod rendezvous;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use dist_testkit::process::Port;
use dist_transport::process::{Config, Coordinator, Medium, ProcessTransport, Secret};
use dist_transport::{
    Activity, Cause, Error, Fingerprint, Incoming, Outgoing, Runtime, Sink, Transport, Version,
};
use rstest::rstest;

/// A job whose ranks are threads: the test's coordinator replaces the launcher's.
struct Job {
    coordinator: Coordinator,
    configs: Vec<Config>,
}

impl Job {
    fn new(world_size: usize) -> Self {
        let coordinator = Coordinator::start("127.0.0.1:0", world_size, "test", None).unwrap();
        let address = coordinator.address().to_string();
        let config = |rank| {
            let config = Config::new(rank, world_size, &address).unwrap();
            let config =
                config.with_job("test").with_external_coordinator().with_timeout(Duration::from_secs(20));
            config.with_medium(Medium::Tcp)
        };
        Self { configs: (0..world_size).map(config).collect(), coordinator }
    }

    /// Runs `program` on every rank and returns the results in rank order.
    fn run<T: Send + 'static>(
        &self,
        program: impl Fn(ProcessTransport) -> T + Send + Sync + 'static,
    ) -> Vec<T> {
        let runtime = Runtime::system();
        let program = Arc::new(program);
        let rank = |config: &Config| {
            let (config, program) = (config.clone(), program.clone());
            runtime.spawn("rank", move || program(ProcessTransport::join(&config).unwrap())).unwrap()
        };
        let tasks: Vec<_> = self.configs.iter().map(rank).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect()
    }
}

#[rstest]
#[case::no_port("nowhere")]
#[case::port_of_nobody("127.0.0.1:0")]
#[case::trailing_blank("127.0.0.1 :29500")]
#[case::scheme("tcp://127.0.0.1:29500")]
fn a_malformed_address_is_quoted_at_once(#[case] malformed: &str) {
    let error = Config::new(1, 2, malformed).unwrap_err();
    assert!(matches!(&error, Error::InvalidAddress { address } if address == malformed), "{error:?}");
    assert!(error.to_string().contains(&format!("{malformed:?}")), "{error}");
}

#[test]
fn a_coordinator_cannot_be_started_at_a_malformed_address() {
    let error = Coordinator::start("127.0.0.1:29500\n", 2, "test", None).unwrap_err();
    assert!(matches!(&error, Error::InvalidAddress { .. }), "{error:?}");
}

#[test]
fn an_address_of_an_unknown_interface_is_an_error_at_once() {
    let error = ProcessTransport::join(&Config::new(1, 2, "[fe80::1%nowhere]:29500").unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Address { action: "resolve", .. }), "{error:?}");
}

#[rstest]
#[case::where_the_coordinator_is_hosted(0)]
#[case::elsewhere(1)]
fn an_unknown_host_name_is_retried_until_the_deadline(#[case] rank: usize) {
    let limit = Duration::from_millis(300);
    let config = Config::new(rank, 2, "name.invalid:4711").unwrap().with_timeout(limit);
    let runtime = Runtime::system();
    let begun = runtime.now();
    let error = ProcessTransport::join(&config).unwrap_err();
    assert!(error.to_string().contains("name.invalid:4711"), "{error}");
    assert!(runtime.now() - begun >= limit, "it could have come to be known");
}

/// The coordinator sends much to all ranks about all ranks, and no rank is lost over it.
#[test]
fn many_ranks_come_and_leave_together() {
    let mut job = Job::new(400);
    // With this many threads, one may not run for a long time.
    job.configs.iter_mut().for_each(|config| *config = config.clone().with_liveness(LONG));
    job.run(drop);
    assert_eq!(job.coordinator.aborted(), None);
}

/// Sends a word to the right while receiving one from the left.
fn pass_round(transport: &mut ProcessTransport, word: u64, limit: Duration) -> Result<u64, Error> {
    let rank = transport.rank();
    let deadline = transport.runtime().deadline(limit);
    let mut received = [0; 8];
    transport.exchange(
        Some(Outgoing { to: rank.right().index(), parts: &[&word.to_le_bytes()] }),
        Some(Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) }),
        &deadline.into(),
    )?;
    Ok(u64::from_le_bytes(received))
}

/// Passes words round until an error.
fn pass_until_error(transport: &mut ProcessTransport) -> Error {
    loop {
        if let Err(error) = pass_round(transport, 0, LONG) {
            return error;
        }
    }
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn words_go_round_a_ring_of_five() {
    let sums = Job::new(5).run(|mut transport| {
        let mut word = transport.rank().index() as u64;
        let mut sum = word;
        for _ in 1..5 {
            word = pass_round(&mut transport, word, LONG).unwrap();
            sum += word;
        }
        sum
    });
    assert_eq!(sums, [10; 5]);
}

#[test]
fn large_messages_meet_in_place() {
    let sums = Job::new(2).run(|mut transport| {
        let mine = u8::try_from(transport.rank().index()).unwrap() + 1;
        let mut buffer = vec![mine; 5_000_003];
        let deadline = transport.runtime().deadline(LONG);
        let peer = 1 - transport.rank().index();
        let mut combine = |ours: &mut [u8], theirs: &[u8]| {
            ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours += theirs);
        };
        transport.exchange_in_place(peer, &mut buffer, &mut combine, &deadline.into()).unwrap();
        buffer.iter().all(|&byte| byte == 3)
    });
    assert_eq!(sums, [true; 2]);
}

#[test]
fn rank_zero_hosts_the_coordinator_where_no_launcher_does() {
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    let runtime = Runtime::system();
    let tasks: Vec<_> = (0..3)
        .map(|rank| {
            let config = Config::new(rank, 3, &address).unwrap().with_timeout(LONG);
            let work =
                move || pass_round(&mut ProcessTransport::join(&config).unwrap(), rank as u64, LONG).unwrap();
            runtime.spawn("rank", work).unwrap()
        })
        .collect();
    let words: Vec<_> = tasks.into_iter().map(|task| task.join().unwrap()).collect();
    assert_eq!(words, [2, 0, 1]);
}

#[test]
fn unauthenticated_clients_do_not_disturb_a_job() {
    let job = Job::new(3);
    let address = job.coordinator.address();
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(address).unwrap());
        let mut rude = TcpStream::connect(address).unwrap();
        let _ = rude.write_all(
            b"GET / HTTP/1.1\r\nHost: coordinator\r\nAccept: everything, please, and more\r\n\r\n",
        );
        drop(TcpStream::connect(address).unwrap());
    }
    assert_eq!(job.run(|mut transport| pass_round(&mut transport, 7, LONG).unwrap()), [7; 3]);
    drop(silent);
}

#[test]
fn a_wrong_secret_is_rejected_and_the_others_name_the_missing_rank() {
    let secret = Secret::from_bytes(b"sixteen bytes or more").unwrap();
    let coordinator = Coordinator::start("127.0.0.1:0", 2, "dist", Some(secret.clone())).unwrap();
    let address = coordinator.address().to_string();
    let config = |rank, secret| {
        let config = Config::new(rank, 2, &address).unwrap().with_external_coordinator();
        config.with_secret(secret).with_timeout(Duration::from_millis(1500))
    };
    let right = config(0, secret);
    let wrong = config(1, Secret::from_bytes(b"another secret of theirs").unwrap());
    let waiting =
        Runtime::system().spawn("rank", move || ProcessTransport::join(&right).unwrap_err()).unwrap();
    let refused = ProcessTransport::join(&wrong).unwrap_err();
    assert!(matches!(&refused, Error::Refused { address: whose, .. } if *whose == address), "{refused}");
    let missing = waiting.join().unwrap();
    assert!(matches!(&missing, Error::Missing { missing, .. } if missing == &[1]), "{missing}");
}

#[test]
fn a_process_of_another_version_gets_an_error() {
    // The other version follows eight bytes that all versions begin with.
    let of_the_next = |hello: &[u8]| {
        let mut bytes = hello.to_vec();
        bytes[12..16].copy_from_slice(&(Version::OURS.minor + 1).to_le_bytes());
        bytes
    };
    let newer = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = newer.local_addr().unwrap().to_string();
    let config = Config::new(1, 2, &address).unwrap().with_timeout(LONG);
    let rank = Runtime::system().spawn("rank", move || ProcessTransport::join(&config).unwrap_err()).unwrap();
    let (mut stream, _) = newer.accept().unwrap();
    let mut hello = [0; 80];
    stream.read_exact(&mut hello).unwrap();
    let refusal = [&of_the_next(&hello[..16])[..], &[0; 48]].concat();
    stream.write_all(&refusal).unwrap();
    let expected = Version { minor: Version::OURS.minor + 1, ..Version::OURS };
    let error = rank.join().unwrap();
    assert!(
        matches!(&error, Error::Version { address: whose, theirs, .. } if *whose == address && *theirs == expected),
        "{error}"
    );

    let job = Job::new(2);
    let mut stream = TcpStream::connect(job.coordinator.address()).unwrap();
    stream.write_all(&of_the_next(&hello)).unwrap();
    let mut answer = [0; 64];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..], [&hello[..16], &[0; 48]].concat(), "a refusal begins as our hello does");
    assert_eq!(stream.read(&mut answer).unwrap(), 0, "the coordinator closes the connection");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = ProcessTransport::join(&Config::new(0, 2, &address).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::PortInUse { address: named, .. } if *named == address), "{error}");
}

#[test]
fn listening_beyond_loopback_needs_a_secret() {
    let error = Coordinator::start("0.0.0.0:0", 2, "dist", None).unwrap_err();
    assert!(matches!(&error, Error::SecretNeeded { .. }), "{error}");
}

#[test]
fn no_rank_is_blamed_when_the_launcher_ends() {
    let Job { coordinator, configs } = Job::new(2);
    let (joined, coming) = std::sync::mpsc::channel();
    let join = |config: Config| {
        let joined = joined.clone();
        let work = move || {
            let mut transport = ProcessTransport::join(&config).unwrap();
            joined.send(()).unwrap();
            pass_until_error(&mut transport);
            (transport.rank().index(), transport.aborted().unwrap())
        };
        Runtime::system().spawn("rank", work).unwrap()
    };
    let ranks: Vec<_> = configs.into_iter().map(join).collect();
    coming.iter().take(ranks.len()).for_each(drop);
    drop(coordinator);
    for (rank, abort) in ranks.into_iter().map(|rank| rank.join().unwrap()) {
        assert_eq!((&abort.cause, abort.rank), (&Cause::LauncherLost, rank), "{abort}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_all_waiting_ranks() {
    let errors = Job::new(3).run(|mut transport| {
        // A slow rank may hear of the departure in its first round.
        let met = pass_round(&mut transport, 1, LONG);
        if transport.rank().index() == 1 {
            met.unwrap();
            return None;
        }
        let error = met.err().unwrap_or_else(|| pass_until_error(&mut transport));
        Some((error.peer(), transport.aborted().unwrap()))
    });
    for (peer, abort) in errors.into_iter().flatten() {
        assert_eq!((peer, abort.rank, abort.cause), (Some(1), 1, Cause::Left));
    }
}

#[test]
fn a_rank_that_panics_is_the_cause_everywhere() {
    let job = Job::new(3);
    let configs = job.configs.clone();
    let runtime = Runtime::system();
    let tasks: Vec<_> = configs
        .into_iter()
        .map(|config| {
            let work = move || {
                let mut transport = ProcessTransport::join(&config).unwrap();
                // A slow rank may hear of the panic in its first round.
                let met = pass_round(&mut transport, 1, LONG);
                assert_ne!(transport.rank().index(), 2, "planted");
                met.err().unwrap_or_else(|| pass_until_error(&mut transport));
                // The first rank to notice may be faster than the coordinator's record.
                while transport.aborted().is_none_or(|abort| abort.cause != Cause::Panicked) {
                    transport.runtime().yield_now();
                }
                transport.aborted().unwrap().rank
            };
            runtime.spawn("rank", work).unwrap()
        })
        .collect();
    let ranks: Vec<_> = tasks.into_iter().map(|task| task.join().ok()).collect();
    assert_eq!(ranks, [Some(2), Some(2), None]);
}

#[test]
fn a_wait_ends_at_its_deadline_and_names_the_peer() {
    let limit = Duration::from_millis(50);
    let errors = Job::new(2).run(move |mut transport| {
        if transport.rank().index() == 1 {
            while transport.aborted().is_none() {
                transport.runtime().yield_now();
            }
            return pass_round(&mut transport, 0, LONG).unwrap_err();
        }
        pass_round(&mut transport, 0, limit).unwrap_err()
    });
    let Error::Timeout { activity: Activity::Connect, peer: 1, elapsed, limit: named, .. } = errors[0] else {
        panic!("{}", errors[0])
    };
    assert!(elapsed >= limit && named == limit);
    assert!(
        matches!(&errors[1], Error::Aborted(abort) if abort.rank == 1 && matches!(abort.cause, Cause::TimedOut { .. }))
    );
}

/// Rank 1 sends no faster than it combines, which takes far longer than rank 0 may wait; but some bytes
/// always arrive.
#[test]
fn a_peer_that_trickles_does_not_outlive_the_deadline() {
    let limit = Duration::from_millis(100);
    let errors = Job::new(2).run(move |mut transport| {
        let slow = transport.rank().index() == 1;
        let runtime = transport.runtime().clone();
        let mut combine = |_: &mut [u8], _: &[u8]| {
            let until = runtime.deadline(limit / 10);
            while slow && !runtime.expired(until) {
                runtime.park(Some(until));
            }
        };
        let deadline = runtime.deadline(if slow { LONG } else { limit });
        let peer = 1 - transport.rank().index();
        transport.exchange_in_place(peer, &mut vec![0; 32 << 20], &mut combine, &deadline.into()).unwrap_err()
    });
    assert!(matches!(&errors[0], Error::Timeout { peer: 1, .. }), "{}", errors[0]);
    assert!(
        matches!(&errors[1], Error::Aborted(abort) if matches!(abort.cause, Cause::TimedOut { .. }) && abort.rank == 1),
        "{}",
        errors[1]
    );
}

#[test]
fn a_peer_in_another_call_is_reported_on_every_rank() {
    let aborts = Job::new(4).run(|mut transport| {
        let odd = transport.rank().index() == 2;
        transport.begin(&Fingerprint([u8::from(odd) + 1; Fingerprint::SIZE]));
        let error = pass_until_error(&mut transport);
        while transport.aborted().is_none() {
            transport.runtime().yield_now();
        }
        assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted(_)), "{error}");
        let abort = transport.aborted().unwrap();
        let Cause::Mismatch { theirs } = abort.cause else { panic!("{abort}") };
        [theirs.0[0], abort.call.0[0]].iter().map(|&call| u32::from(call)).sum::<u32>()
    });
    assert_eq!(aborts, [3; 4]);
}

#[test]
fn more_ranks_than_half_open_connections_may_come_at_once() {
    let job = Job::new(150);
    let words = job.run(|mut transport| pass_round(&mut transport, 5, LONG).unwrap());
    assert_eq!(words, [5; 150]);
}

#[test]
fn hosts_are_those_of_the_job_description() {
    let mut job = Job::new(4);
    for (config, id) in job.configs.iter_mut().zip(["left", "right", "right", "left"]) {
        *config = config.clone().with_host_id(id);
    }
    let hosts = job.run(|transport| transport.hosts());
    assert!(hosts.iter().all(|seen| *seen == hosts[0]));
    let [a, b, c, d] = hosts[0][..] else { panic!("{hosts:?}") };
    assert_eq!((a, b), (d, c));
    assert_ne!(a, b);
}
