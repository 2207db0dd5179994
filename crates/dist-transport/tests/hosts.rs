//! Ranks on several hosts, which are network namespaces: the network that they use, and what they tell when it fails.
#![cfg(all(feature = "tcp", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says why")]

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dist_testkit::hosts::{Hosts, Links, sent_bytes};
use dist_testkit::process;
use dist_transport::process::{Config, ProcessTransport};
use dist_transport::{Cause, Error, Incoming, Outgoing, Runtime, Sink, Transport};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// The names of the hosts.
const HOSTS: &str = "TEST_HOSTS";
/// The time for which the network is silent, in milliseconds.
const OUTAGE: &str = "TEST_OUTAGE";
const LIVENESS: &str = "DIST_LIVENESS";
/// The network device that large messages between hosts take.
const DEVICE: &str = "TEST_DEVICE";
const SECRET: &str = "DIST_SECRET_FILE";

/// Makes hosts, or says why the test is skipped.
fn made(count: usize) -> Option<Hosts> {
    let skipped = |reason| println!("skipped, as this machine cannot have hosts of its own: {reason}");
    Hosts::new(count).map_err(skipped).ok()
}

/// A job on several hosts. Its ranks run the current test once more.
struct Job {
    hosts: Hosts,
    ranks_per_host: usize,
    master_address: String,
    folder: tempfile::TempDir,
}

impl Job {
    /// Prepares a job whose coordinator is reached at the first address of the first host.
    fn new(hosts: Hosts, ranks_per_host: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
        file.write_all(b"known to the ranks of this job").unwrap();
        Self { master_address: hosts.address(0), hosts, ranks_per_host, folder }
    }

    fn run(&self, variables: &[(&str, &str)]) -> process::Job {
        let secret = self.folder.path().join("secret");
        let secret = secret.to_str().unwrap();
        let own = [(HOSTS, self.hosts.prefix()), (SECRET, secret), ("MASTER_ADDR", &self.master_address)];
        let name = std::thread::current().name().unwrap().to_owned();
        let variables = [&own[..], variables].concat();
        let count = self.hosts.count() * self.ranks_per_host;
        let starter = |rank| self.hosts.starter(rank / self.ranks_per_host);
        process::ranks_through(count, &name, LIMIT, &variables, starter)
    }
}

/// Runs this test once more on each of `count` hosts, if this machine can have them.
fn run_on_hosts(count: usize, variables: &[(&str, &str)]) {
    if let Some(hosts) = made(count) {
        Job::new(hosts, 1).run(variables).assert_success();
    }
}

fn hosts() -> Hosts {
    Hosts::of(&std::env::var(HOSTS).unwrap())
}

/// Returns a file that all processes of the job see.
fn shared_file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os(SECRET).unwrap()).with_file_name(name)
}

fn join() -> ProcessTransport {
    ProcessTransport::join(&Config::from_env().unwrap()).unwrap()
}

/// Exchanges this many bytes with a peer.
fn exchange(transport: &mut ProcessTransport, peer: usize, len: usize) -> Result<(), Error> {
    let (deadline, mut received) = (transport.runtime().deadline(LIMIT), vec![0; len]);
    let receive = Incoming { from: peer, len, sink: Sink::Into(&mut received) };
    let send = Outgoing { to: peer, parts: &[&vec![7; len]] };
    transport.exchange(Some(send), Some(receive), &deadline.into())?;
    assert!(received.iter().all(|byte| *byte == 7), "rank {peer} has sent other bytes");
    Ok(())
}

/// Sends a word to the right while receiving one from the left.
fn pass_round(transport: &mut ProcessTransport) -> Result<(), Error> {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let mut received = [0; 8];
    let send = Outgoing { to: rank.right().index(), parts: &[&[7; 8]] };
    let receive = Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) };
    transport.exchange(Some(send), Some(receive), &deadline.into())
}

/// One rank of three. The network of the last one's host is silent for a while.
fn rank_on_a_silent_network() {
    let mut transport = join();
    let outage = Duration::from_millis(std::env::var(OUTAGE).unwrap().parse().unwrap());
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    if transport.rank().index() == 0 {
        let hosts = hosts();
        hosts.disconnect(2).unwrap();
        transport.runtime().sleep(outage);
        hosts.connect(2).unwrap();
    }
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
}

#[rstest]
#[case::that_is_longer_between_hosts("800", None)]
#[case::of_a_job("800", Some("2"))]
// TCP retransmits a lost packet after six seconds, and then after twelve.
#[case::for_longer_than_tcp_pauses("8000", None)]
fn a_network_that_is_silent_for_less_than_the_limit_ends_no_job(
    #[case] outage: &str,
    #[case] liveness: Option<&str>,
) {
    if process::rank().is_some() {
        return rank_on_a_silent_network();
    }
    let liveness = liveness.map(|liveness| (LIVENESS, liveness));
    run_on_hosts(3, &[(OUTAGE, outage)].into_iter().chain(liveness).collect::<Vec<_>>());
}

/// Passes words round until that fails, as it must after the time without heartbeats between hosts. Returns the rank that is
/// named, and the cause.
fn fail_after_the_cut(transport: &mut ProcessTransport) -> (usize, Cause) {
    let error = std::iter::repeat_with(|| pass_round(transport)).find_map(Result::err).unwrap();
    // All ranks measure from the same moment. The limit is ten seconds; the rest is for a busy machine.
    let lasted = shared_file("cut").metadata().unwrap().modified().unwrap().elapsed().unwrap();
    let abort = transport.aborted().unwrap();
    assert!(matches!(error, Error::Aborted(_)), "{error:?}");
    assert!((9 * SECOND..20 * SECOND).contains(&lasted), "{lasted:?}");
    (abort.rank, abort.cause)
}

/// How a host loses its network, `drop` or `down`.
const CUT: &str = "TEST_CUT";

/// One rank of three. The last one loses its network for good.
fn rank_of_which_one_is_cut_off() {
    let mut transport = join();
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    let rank = transport.rank().index();
    if rank == 0 {
        let cut = if std::env::var(CUT).unwrap() == "down" { Hosts::take_down } else { Hosts::disconnect };
        cut(&hosts(), 2).unwrap();
        std::fs::write(shared_file("cut"), b"").unwrap();
    }
    let lost = |host| Cause::HostLost { host: host_address(host), hosts: 1, ranks: 1 };
    let expected = if rank == 2 { (0, lost(0)) } else { (2, lost(2)) };
    assert_eq!(fail_after_the_cut(&mut transport), expected);
}

fn host_address(host: usize) -> std::net::IpAddr {
    hosts().address(host).parse().unwrap()
}

#[rstest]
#[case::without_an_error("drop")]
#[case::with_its_device_down("down")]
fn a_host_that_loses_its_network_is_named_after_ten_seconds(#[case] cut: &str) {
    if process::rank().is_some() {
        return rank_of_which_one_is_cut_off();
    }
    run_on_hosts(3, &[(CUT, cut)]);
}

/// One rank of six on three hosts. The last host loses its power.
fn rank_of_which_a_host_loses_power() {
    let mut transport = join();
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    if transport.rank().index() == 0 {
        std::fs::write(shared_file("ready"), b"").unwrap();
    }
    let lost = Cause::HostLost { host: host_address(2), hosts: 1, ranks: 2 };
    assert_eq!(fail_after_the_cut(&mut transport), (4, lost));
}

#[test]
fn a_host_that_loses_power_is_named_with_all_its_ranks() {
    if process::rank().is_some() {
        return rank_of_which_a_host_loses_power();
    }
    let Some(hosts) = made(3) else { return };
    let job = Job::new(hosts, 2);
    let (folder, runtime) = (job.folder.path(), Runtime::system());
    let cut = || {
        let limit = runtime.deadline(LIMIT);
        while !folder.join("ready").exists() && !runtime.expired(limit) {
            runtime.sleep(Duration::from_millis(5));
        }
        job.hosts.power_off(2).unwrap();
        std::fs::write(folder.join("cut"), b"").unwrap();
    };
    let mut ended = std::thread::scope(|scope| {
        scope.spawn(cut);
        job.run(&[])
    });
    ended.ranks.truncate(4);
    ended.assert_success();
}

/// One rank of four. The network between the first two and the last two fails.
fn rank_of_a_half() {
    let mut transport = join();
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    let rank = transport.rank().index();
    if rank == 0 {
        hosts().split_off(&[2, 3]).unwrap();
        std::fs::write(shared_file("cut"), b"").unwrap();
    }
    let expected = if rank < 2 {
        (2, Cause::HostLost { host: host_address(2), hosts: 2, ranks: 2 })
    } else {
        (0, Cause::HostLost { host: host_address(0), hosts: 1, ranks: 1 })
    };
    assert_eq!(fail_after_the_cut(&mut transport), expected);
}

#[test]
fn each_half_of_a_network_that_parts_names_a_host_of_the_other() {
    if process::rank().is_some() {
        return rank_of_a_half();
    }
    run_on_hosts(4, &[]);
}

/// Bytes of a large message.
const LARGE: usize = 4 << 20;
/// More than heartbeats and small messages send in this time.
const LITTLE: u64 = 500_000;

/// One rank of four on two hosts.
fn rank_that_counts_bytes() {
    let mut transport = join();
    let (used, rank) = (std::env::var(DEVICE).unwrap(), transport.rank().index());
    let sent = || ["out", "side", "lo"].map(|device| (device, sent_bytes(device)));
    // All ranks have come as far when each has heard of all others.
    let barrier = |transport: &mut ProcessTransport| (0..3).for_each(|_| pass_round(transport).unwrap());
    barrier(&mut transport);
    let before = sent();
    barrier(&mut transport);
    exchange(&mut transport, rank ^ 1, LARGE).unwrap();
    barrier(&mut transport);
    let inside = sent();
    barrier(&mut transport);
    exchange(&mut transport, (rank + 2) % 4, LARGE).unwrap();
    barrier(&mut transport);
    let across = sent();
    for (((device, before), (_, inside)), (_, across)) in before.into_iter().zip(inside).zip(across) {
        assert!(
            inside - before < LITTLE,
            "ranks of a host share memory, and {device} sent {}",
            inside - before
        );
        let sent = across - inside;
        let expected = if device == used { 2 * LARGE as u64 } else { 0 };
        assert!((expected..expected + LITTLE).contains(&sent), "{device} sent {sent}");
    }
    barrier(&mut transport);
}

#[rstest]
#[case::ipv4(Hosts::address, "out")]
#[case::ipv6(Hosts::address_v6, "out")]
#[case::a_second_interface(Hosts::second_address, "side")]
fn ranks_use_the_network_by_which_they_reached_the_coordinator_and_memory_inside_a_host(
    #[case] address: fn(&Hosts, usize) -> String,
    #[case] device: &str,
) {
    if process::rank().is_some() {
        return rank_that_counts_bytes();
    }
    let Some(hosts) = made(2) else { return };
    hosts.add_second_network().unwrap();
    let job = Job { master_address: address(&hosts, 0), ..Job::new(hosts, 2) };
    job.run(&[(DEVICE, device)]).assert_success();
}

/// One rank of four, of which ranks 1 and 3 cannot reach each other: from the start, or after they are
/// connected.
fn rank_of_which_two_are_parted(from_the_start: bool) {
    let mut transport = join();
    let (runtime, rank) = (transport.runtime().clone(), transport.rank().index());
    let mut exchange = |peer: usize| exchange(&mut transport, peer, 8);
    // Both pairs: 0 and 2, 1 and 3.
    let across = (rank + 2) % 4;
    if !from_the_start {
        exchange(across).unwrap();
    }
    // The ranks of both pairs learn through other ranks that the others have come as far.
    exchange(rank ^ 1).unwrap();
    if rank == 1 {
        hosts().part(1, 3).unwrap();
    }
    exchange(rank ^ 1).unwrap();
    let parted = runtime.now();
    let error = std::iter::repeat_with(|| exchange(across)).find_map(Result::err).unwrap();
    let Error::Aborted(abort) = error else { panic!("{error:?}") };
    let [one, other] = [1, 3].map(host_address);
    let expected = format!("rank 1 on host {one} and rank 3 on host {other} cannot reach each other");
    assert_eq!(abort.to_string(), expected);
    let lasted = runtime.now() - parted;
    assert!((9 * SECOND..20 * SECOND).contains(&lasted), "{lasted:?}");
}

#[rstest]
fn two_ranks_that_cannot_reach_each_other_are_both_named(#[values("true", "false")] from_the_start: &str) {
    const FROM_THE_START: &str = "TEST_FROM_THE_START";
    if process::rank().is_some() {
        return rank_of_which_two_are_parted(std::env::var(FROM_THE_START).unwrap() == "true");
    }
    run_on_hosts(4, &[(FROM_THE_START, from_the_start)]);
}

/// The sockets of each rank for the other one.
const SOCKETS: usize = 4;
const SOCKETS_PER_PEER: &str = "DIST_SOCKETS_PER_PEER";

/// The bytes that a TCP connection has sent.
struct SentBytes {
    /// Bytes that were sent twice count once.
    once: u64,
    again: u64,
}

/// Returns the bytes that each TCP connection of this host has sent, the largest number first.
fn bytes_of_connections() -> Vec<SentBytes> {
    let listed = Command::new("ss").args(["--tcp", "--info", "--oneline", "--no-header"]).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let field = |line: &str, name: &str| {
        line.split_whitespace().find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok()).unwrap_or(0)
    };
    let sent = |line| {
        let again = field(line, "bytes_retrans:");
        SentBytes { once: field(line, "bytes_sent:") - again, again }
    };
    let mut sent: Vec<SentBytes> = listed.lines().map(sent).collect();
    sent.sort_unstable_by_key(|sent| std::cmp::Reverse(sent.once));
    sent
}

/// One rank of two that have several sockets for each other.
fn rank_that_counts_bytes_of_sockets() {
    let mut transport = join();
    let peer = 1 - transport.rank().index();
    exchange(&mut transport, peer, LARGE).unwrap();
    let sent: Vec<u64> = bytes_of_connections().iter().map(|sent| sent.once).collect();
    let share = (LARGE / SOCKETS) as u64;
    assert!(sent[..SOCKETS].iter().all(|sent| (share..share + LITTLE).contains(sent)), "{sent:?}");
    assert!(sent[SOCKETS..].iter().all(|sent| *sent < LITTLE), "{sent:?}");
    pass_round(&mut transport).unwrap();
}

#[test]
fn each_socket_for_a_peer_carries_an_equal_part_of_a_large_message() {
    if process::rank().is_some() {
        return rank_that_counts_bytes_of_sockets();
    }
    run_on_hosts(2, &[(SOCKETS_PER_PEER, &SOCKETS.to_string())]);
}

/// Links of 10 ms in each direction that lose one packet in a thousand.
const SLOW_LINKS: Links = Links { latency: Duration::from_millis(10), lost_per_million: 1000, ..Links::FAST };
const ROUND_TRIPS: u32 = 10;

/// One rank of two. It notes the bytes that its system had to send again.
fn rank_over_slow_links() {
    let mut transport = join();
    let (runtime, rank) = (transport.runtime().clone(), transport.rank().index());
    pass_round(&mut transport).unwrap();
    let start = runtime.now();
    // A rank of two sends its next word when it has the other one's.
    (0..ROUND_TRIPS).for_each(|_| pass_round(&mut transport).unwrap());
    let lasted = runtime.now() - start;
    assert!(lasted >= (ROUND_TRIPS - 1) * SLOW_LINKS.latency, "the links delay no packets: {lasted:?}");
    exchange(&mut transport, 1 - rank, 2 * LARGE).unwrap();
    pass_round(&mut transport).unwrap();
    let again: u64 = bytes_of_connections().iter().map(|sent| sent.again).sum();
    std::fs::write(shared_file(&format!("again-{rank}")), again.to_string()).unwrap();
    pass_round(&mut transport).unwrap();
}

#[test]
fn a_job_runs_over_links_that_delay_and_lose_packets() {
    if process::rank().is_some() {
        return rank_over_slow_links();
    }
    let skipped = |reason| println!("skipped, as this machine cannot have hosts of its own: {reason}");
    let Ok(hosts) = Hosts::with_links(2, SLOW_LINKS).map_err(skipped) else { return };
    let job = Job::new(hosts, 1);
    job.run(&[]).assert_success();
    let again = |rank| std::fs::read_to_string(job.folder.path().join(format!("again-{rank}"))).unwrap();
    let again = [0, 1].map(|rank| again(rank).parse::<u64>().unwrap());
    assert!(again.iter().sum::<u64>() > 0, "no packet was lost");
}
