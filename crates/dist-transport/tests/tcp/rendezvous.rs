//! Tests of the rendezvous: which ranks join, and which errors the others get.

use std::net::TcpListener;
use std::time::Duration;

use dist_transport::process::{Config, Coordinator, ProcessTransport};
use dist_transport::{Cause, Error, Incoming, Runtime, Sink, Transport};
use rstest::rstest;
use socket2::{Domain, Socket, Type};

use super::{Job, LONG, pass_round, pass_until_error};

#[test]
fn ranks_try_again_until_the_coordinator_is_there() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let join = |rank| {
        let config = Config::new(rank, 2, &address.to_string()).unwrap().with_job("test").with_timeout(LONG);
        let config = config.with_external_coordinator();
        Runtime::system().spawn("rank", move || ProcessTransport::join(&config).map(drop)).unwrap()
    };
    let ranks = [0, 1].map(join);
    // A rank joins before there is a coordinator. Another process listens there, and hangs up.
    drop(other.accept().unwrap());
    drop(other);
    let _coordinator = Coordinator::start(&address.to_string(), 2, "test", None).unwrap();
    ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
}

/// A rank that waits for the others sends no heartbeat before all have joined. The test takes its time:
/// silence is measured by the system's clock.
#[test]
fn ranks_may_come_long_after_one_another() {
    const LONGER_THAN_SILENCE: Duration = Duration::from_millis(2500);
    let job = Job::new(2);
    let join = |rank: usize| {
        let config = job.configs[rank].clone();
        let work = move || pass_round(&mut ProcessTransport::join(&config).unwrap(), rank as u64, LONG);
        Runtime::system().spawn("rank", work).unwrap()
    };
    let first = join(0);
    Runtime::system().sleep(LONGER_THAN_SILENCE);
    let words = [first, join(1)].map(|rank| rank.join().unwrap().unwrap());
    assert_eq!(words, [1, 0]);
    assert_eq!(job.coordinator.aborted(), None);
}

/// The system accepts connections for any listener, even if its process does nothing.
#[test]
fn a_silent_coordinator_is_an_error_in_time() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let config = Config::new(1, 2, &address).unwrap().with_timeout(Duration::from_millis(300));
    let error = ProcessTransport::join(&config).unwrap_err();
    assert!(matches!(&error, Error::NoCoordinator { address: at, .. } if *at == address), "{error:?}");
    assert!(error.is_timeout());
}

#[test]
fn a_second_process_of_the_same_rank_gets_an_error() {
    let job = Job::new(2);
    let first = job.configs[0].clone().with_timeout(Duration::from_secs(2));
    let first = Runtime::system().spawn("rank", move || ProcessTransport::join(&first).unwrap_err()).unwrap();
    // The one that joins first waits for rank 1 in vain; the other is refused at once.
    let second =
        ProcessTransport::join(&job.configs[0].clone().with_timeout(Duration::from_secs(2))).unwrap_err();
    let mut both = [first.join().unwrap().to_string(), second.to_string()];
    both.sort();
    assert_eq!(both[0], "another process has already joined as rank 0: give each process a RANK of its own");
    assert!(both[1].starts_with("rendezvous: rank 1 did not join within 2s"), "{}", both[1]);
}

#[test]
fn a_rank_that_connected_and_gave_up_is_not_reported_as_missing() {
    let job = Job::new(3);
    let join = |rank: usize, patience| {
        let config = job.configs[rank].clone().with_timeout(Duration::from_millis(patience));
        Runtime::system().spawn("rank", move || ProcessTransport::join(&config).unwrap_err()).unwrap()
    };
    for error in [join(0, 300), join(1, 1000)].map(|rank| rank.join().unwrap()) {
        assert!(matches!(&error, Error::Missing { missing, .. } if missing == &[2]), "{error}");
    }
    let again: Vec<_> = job.run(|mut transport| pass_round(&mut transport, 7, LONG).unwrap());
    assert_eq!(again, [7; 3], "who gave up may come again");
}

#[test]
fn if_all_have_joined_but_never_at_once_the_ranks_that_left_are_named() {
    let job = Job::new(2);
    let join = |rank: usize| {
        ProcessTransport::join(&job.configs[rank].clone().with_timeout(Duration::from_millis(300)))
            .unwrap_err()
    };
    for (rank, other) in [(0, 1), (1, 0)] {
        let error = join(rank);
        assert!(matches!(&error, Error::Missing { missing, .. } if missing == &[other]), "{error}");
    }
}

/// This holds even if the other ranks, one of which hosts the coordinator, have not left yet.
#[rstest]
fn a_rank_that_has_left_waits_for_the_next_world(#[values(false, true)] launched: bool) {
    let (_held, free) = hold_port();
    let coordinator = launched.then(|| Coordinator::start(&free, 3, "dist", None).unwrap());
    let rank = move |rank: usize, config: &Config| {
        let runtime = Runtime::system();
        for _world in 0..3 {
            let mut transport = ProcessTransport::join(config).unwrap();
            assert_eq!(pass_round(&mut transport, 7, LONG).unwrap(), 7);
            // In turns: the hosting rank is the last.
            runtime.sleep(Duration::from_millis(200) * u32::try_from(2 - rank).unwrap());
        }
    };
    let ranks = [0, 1, 2].map(|number| {
        let config = Config::new(number, 3, &free).unwrap().with_timeout(LONG);
        let config = if launched { config.with_external_coordinator() } else { config };
        Runtime::system().spawn("rank", move || rank(number, &config)).unwrap()
    });
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
    let left = coordinator.map(|coordinator| (coordinator.aborted(), coordinator.present()));
    assert_eq!(left, launched.then_some((None, 0)));
}

#[rstest]
#[case::one_stays_in_the_world_before(true)]
#[case::one_does_not_come_again(false)]
fn ranks_that_join_again_without_the_others_name_the_missing_rank(#[case] stays: bool) {
    let job = Job::new(3);
    let configs = job.configs.clone();
    let (told, telling) = crossbeam::channel::unbounded::<()>();
    let errors = job.run(move |transport| {
        let rank = transport.rank().index();
        let stays = stays && rank == 2;
        if stays {
            // Waits until the others have got their errors.
            assert_eq!(telling.iter().take(2).count(), 2);
        }
        drop(transport);
        if rank == 2 {
            return None;
        }
        let short = configs[rank].clone().with_timeout(Duration::from_secs(2));
        let error = ProcessTransport::join(&short).unwrap_err();
        told.send(()).unwrap();
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(&error, Error::Missing { missing, .. } if missing == &[2]), "{error}");
    }
    let again = job.run(|mut transport| pass_round(&mut transport, 7, LONG).unwrap());
    assert_eq!(again, [7; 3], "all of them may");
}

#[test]
fn after_a_world_that_was_aborted_no_other_meets() {
    let job = Job::new(2);
    let aborts = job.run(|mut transport| {
        if transport.rank().index() == 1 {
            transport.abort(Cause::gave_up("enough"));
        }
        pass_until_error(&mut transport);
        transport.aborted().map(|abort| (abort.cause, abort.rank))
    });
    assert_eq!(aborts, vec![Some((Cause::gave_up("enough"), 1)); 2]);
    for config in &job.configs {
        let error = ProcessTransport::join(config).unwrap_err();
        let told =
            matches!(&error, Error::Aborted(abort) if Some(abort) == job.coordinator.aborted().as_ref());
        assert!(told, "{error}");
    }
}

#[test]
fn another_world_size_is_an_error_with_both_numbers() {
    let job = Job::new(3);
    let (sender, receiver) = std::sync::mpsc::channel();
    for config in &job.configs[..2] {
        let (sender, config) = (sender.clone(), config.clone());
        let join = move || sender.send(ProcessTransport::join(&config).unwrap_err()).unwrap();
        drop(Runtime::system().spawn("rank", join).unwrap());
    }
    // Ranks that have not joined by then get their errors when rank 0 joins again.
    let mut errors = Vec::new();
    while errors.len() < 2 {
        errors.extend(receiver.try_iter());
        let config = Config::new(2, 4, &job.coordinator.address().to_string()).unwrap();
        let error = ProcessTransport::join(&config.with_job("test").with_external_coordinator()).unwrap_err();
        assert!(matches!(error, Error::WorldSize { ours: 4, theirs: 3 }), "{error}");
    }
    for error in errors {
        assert!(matches!(error, Error::OtherWorldSize { rank: 2, ours: 3, theirs: 4 }), "{error}");
        assert_eq!(error.peer(), Some(2));
    }
}

#[test]
fn a_coordinator_that_never_comes_is_an_error_in_time() {
    // No other process gets the port while it is held, and no process listens there.
    let (_held, address) = hold_port();
    let limit = Duration::from_millis(100);
    let config = Config::new(1, 2, &address).unwrap().with_timeout(limit);
    let runtime = Runtime::system();
    let begun = runtime.now();
    let error = ProcessTransport::join(&config).unwrap_err();
    assert!(matches!(&error, Error::NoCoordinator { address: at, .. } if *at == address), "{error}");
    assert!(runtime.now() - begun >= limit, "it could have come");
}

#[rstest]
#[case::rank_0_hosts_the_coordinator(false)]
#[case::the_launcher_does(true)]
fn a_rank_waits_for_the_others_for_all_of_its_time(#[case] launched: bool) {
    let (_held, address) = hold_port();
    let coordinator = launched.then(|| Coordinator::start(&address, 2, "dist", None).unwrap());
    let limit = Duration::from_millis(400);
    let config = Config::new(0, 2, &address).unwrap().with_timeout(limit);
    let config = if launched { config.with_external_coordinator() } else { config };
    let runtime = Runtime::system();
    let begun = runtime.now();
    let error = ProcessTransport::join(&config).unwrap_err();
    assert!(runtime.now() - begun >= limit, "the last one could have come");
    assert!(matches!(&error, Error::Missing { limit: said, .. } if *said == limit), "{error}");
    drop(coordinator);
}

/// Rank 1 may connect before rank 0 hosts the coordinator.
#[test]
fn different_world_sizes_are_an_error_on_both_ranks_in_either_order() {
    for _ in 0..20 {
        let (_held, address) = hold_port();
        let ranks = [(0, 2), (1, 3)].map(|(rank, world_size)| {
            let config = Config::new(rank, world_size, &address).unwrap().with_timeout(LONG);
            Runtime::system().spawn("rank", move || ProcessTransport::join(&config).unwrap_err()).unwrap()
        });
        let [first, second] = ranks.map(|rank| rank.join().unwrap());
        assert!(matches!(first, Error::OtherWorldSize { rank: 1, ours: 2, theirs: 3 }), "{first}");
        assert!(matches!(second, Error::OtherWorldSize { rank: 0, ours: 3, theirs: 2 }), "{second}");
    }
}

#[rstest]
fn another_number_of_sockets_per_peer_is_an_error_with_both_numbers_on_every_rank(
    #[values(true, false)] launched: bool,
) {
    let (_held, address) = hold_port();
    let coordinator = launched.then(|| Coordinator::start(&address, 3, "dist", None).unwrap());
    let ranks = [(0, 2), (1, 2), (2, 4)].map(|(rank, sockets)| {
        let config = Config::new(rank, 3, &address).unwrap().with_timeout(LONG);
        let config = if launched { config.with_external_coordinator() } else { config };
        let config = config.with_sockets_per_peer(sockets);
        Runtime::system().spawn("rank", move || ProcessTransport::join(&config).unwrap_err()).unwrap()
    });
    let expected = [(2, 2, 4), (2, 2, 4), (0, 4, 2)];
    for (rank, (other, ours, theirs)) in ranks.into_iter().zip(expected) {
        let error = rank.join().unwrap();
        let told = (error.peer(), error.to_string());
        let text = format!(
            "rank {other} uses {theirs} sockets per peer, this process {ours}: set the same DIST_SOCKETS_PER_PEER on every rank"
        );
        assert_eq!(told, (Some(other), text));
    }
    drop(coordinator);
}

/// One thread may hold all ranks of a test.
#[test]
fn one_thread_may_drop_rank_0_first() {
    let (_held, address) = hold_port();
    let ranks = [0, 1, 2].map(|rank| {
        let config = Config::new(rank, 3, &address).unwrap().with_timeout(LONG);
        Runtime::system().spawn("rank", move || ProcessTransport::join(&config).unwrap()).unwrap()
    });
    let [first, mut second, third] = ranks.map(|rank| rank.join().unwrap());
    drop(first);
    // The coordinator still runs: it reports that rank 0 has left.
    let deadline = second.runtime().deadline(LONG);
    let mut word = [0];
    let receive = Incoming { from: 0, len: 1, sink: Sink::Into(&mut word) };
    let error = second.exchange(None, Some(receive), &deadline.into()).unwrap_err();
    assert!(matches!(error, Error::Closed { peer: 0, .. }), "{error}");
    drop((second, third));
}

/// Without a secret, the kernel distinguishes the processes of a job from those of other users.
#[cfg(target_os = "linux")]
#[test]
fn a_process_of_another_user_gets_the_advice_to_set_a_secret() {
    use rustix::process::{Uid, geteuid};
    // Only root can become another user.
    if !geteuid().is_root() {
        return;
    }
    let (_held, address) = hold_port();
    let config = |rank| Config::new(rank, 2, &address).unwrap().with_timeout(Duration::from_secs(2));
    let (ours, theirs) = (config(0), config(1));
    let ours = Runtime::system().spawn("rank 0", move || ProcessTransport::join(&ours).unwrap_err()).unwrap();
    let theirs = move || {
        let nobody = Uid::from_raw(65534);
        // Changes the user of this thread, and of threads that it starts.
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        ProcessTransport::join(&theirs).unwrap_err()
    };
    let theirs = Runtime::system().spawn("rank 1", theirs).unwrap().join().unwrap();
    assert!(
        matches!(&theirs, Error::OtherUser { user: Some(0), address: at, .. } if *at == address),
        "{theirs}"
    );
    assert!(theirs.to_string().contains("DIST_SECRET_FILE"), "{theirs}");
    let missing = ours.join().unwrap();
    assert!(matches!(&missing, Error::Missing { missing, .. } if missing == &[1]), "{missing}");
}

/// Returns a port that the system gives to no other process while this is held. A coordinator can still
/// listen there.
fn hold_port() -> (Socket, String) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap().to_string();
    (socket, address)
}

#[test]
fn ranks_name_the_missing_rank_although_the_host_of_the_coordinator_gives_up_first() {
    let (_held, address) = hold_port();
    let runtime = Runtime::system();
    let join = |rank, timeout| {
        let config = Config::new(rank, 3, &address).unwrap().with_timeout(timeout);
        runtime.spawn("rank", move || ProcessTransport::join(&config).unwrap_err()).unwrap()
    };
    let (host, other) = (join(0, Duration::from_millis(1500)), join(1, LONG));
    for error in [host.join().unwrap(), other.join().unwrap()] {
        // The host may give up before the other has joined.
        assert!(matches!(&error, Error::Missing { missing, .. } if missing.ends_with(&[2])), "{error:?}");
    }
}
