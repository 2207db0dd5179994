//! Forks leave nothing behind. A separate binary, because the counts belong to the process.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_transport::process::{Config, Coordinator, Medium, ProcessTransport};
use dist_transport::{Incoming, Outgoing, Runtime, Sink, Transport};

const LONG: Duration = Duration::from_secs(60);

/// Sends a byte from each of the two ranks to the other.
fn exchange_a_byte(transport: &mut dyn Transport) {
    let (peer, deadline) = (transport.rank().right().index(), transport.runtime().deadline(LONG));
    let mut byte = [0];
    let incoming = Incoming { from: peer, len: 1, sink: Sink::Into(&mut byte) };
    transport
        .exchange(Some(Outgoing { to: peer, parts: &[&[1]] }), Some(incoming), &deadline.into())
        .unwrap();
}

/// Returns the shared memory that this process has mapped, and its open files, at a time when no rank opens
/// or closes files.
fn held(transport: &mut dyn Transport) -> (usize, usize) {
    exchange_a_byte(transport);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:dist")).count();
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = files.filter(|file| !file.as_ref().is_ok_and(is_of_proc)).count();
    exchange_a_byte(transport);
    (mapped, open)
}

/// Returns `true` for a file of /proc, which the other rank may have open while it counts.
fn is_of_proc(file: &std::fs::DirEntry) -> bool {
    std::fs::read_link(file.path()).map_or(true, |path| path.starts_with("/proc"))
}

fn fork_5_000_times(transport: &mut dyn Transport) {
    for number in 0..5_000 {
        let mut fork = transport.fork(&[0, 1]).unwrap().unwrap();
        // Groups that are never used cost nothing.
        if number % 5 == 0 {
            exchange_a_byte(&mut *fork);
        }
    }
}

#[test]
fn ten_thousand_forks_leave_nothing_behind() {
    let coordinator = Coordinator::start("127.0.0.1:0", 2, "test", None).unwrap();
    let address = coordinator.address().to_string();
    let rank = |rank| {
        let config = Config::new(rank, 2, &address).unwrap().with_job("test").with_medium(Medium::Shm);
        let config = config.with_external_coordinator().with_timeout(LONG);
        let work = move || {
            let mut transport = ProcessTransport::join(&config).unwrap();
            // The threads of this process open their own files some time after it has joined.
            fork_5_000_times(&mut transport);
            let before = held(&mut transport);
            fork_5_000_times(&mut transport);
            (before, held(&mut transport))
        };
        Runtime::system().spawn("rank", work).unwrap()
    };
    for rank in [0, 1].map(rank) {
        let (before, after) = rank.join().unwrap();
        assert_eq!(before.0, 2, "each rank has mapped the shared segment");
        assert_eq!(after.0, before.0, "nothing stays mapped");
        assert!(after.1 <= before.1, "{after:?} after {before:?}");
    }
}
