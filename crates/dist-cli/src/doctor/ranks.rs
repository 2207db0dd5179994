//! Findings about the connections between ranks.

use std::time::{Duration, SystemTime};

use dist_collectives::Communicator;
use dist_transport::process::{Config, Medium, ProcessTransport};
use dist_transport::shm_group::Reach;
use dist_transport::{LazyDeadline, Transport};
use serde::{Deserialize, Serialize};

use super::{Finding, machine};
use crate::Error;
use crate::progress::Progress;
use crate::run::{allowed_cores, numa_nodes};

/// Time limit for opening memory to each other.
const LIMIT: Duration = Duration::from_secs(60);
/// Size of the messages that measure the speed.
const LARGE: usize = 1 << 20;
/// Maximum numbers of round trips of a small and of a large message, after some warm-up trips.
const SMALL_TRIPS: u32 = 500;
const LARGE_TRIPS: u32 = 20;
/// Number of hosts whose first ranks are measured in every pair. Pairs are measured in turn.
const HOSTS_MEASURED: usize = 8;
/// Number of round trips for the offset of a clock.
const CLOCK_TRIPS: u32 = 5;
/// Maximum offset of a clock without advice.
const CLOCK_OFFSET_MAX: Duration = Duration::from_millis(100);
/// A link between hosts is slow if it has less than this part of the speed of most.
const SLOW: f64 = 0.5;
/// Speed that a connection between hosts should be able to reach: 1 Gbit/s.
const WANTED_GB_PER_S: f64 = 0.125;
/// The most sockets per peer.
const SOCKETS_MAX: f64 = 64.0;
/// Time limit of a link's measurement with messages of one size. A single round trip may exceed it.
const BUDGET: Duration = Duration::from_millis(500);

/// The findings and the measured links of a job.
#[derive(Debug)]
pub(super) struct MachineReport {
    pub(super) findings: Vec<Finding>,
    /// The first rank of each of the first hosts.
    pub(super) leaders: Vec<usize>,
    /// The links that were measured.
    pub(super) links: Vec<MeasuredLink>,
}

/// Joins the job and examines it. Returns the findings of all ranks on rank 0, and `None` elsewhere.
pub(super) fn look_around(config: &Config) -> Result<Option<MachineReport>, Error> {
    let progress = (config.rank().index() == 0).then(Progress::start).transpose()?;
    let now = |what: &str| progress.iter().for_each(|progress| progress.doing(what));
    now("waiting for all ranks to join");
    let mut transport = ProcessTransport::join(config)?;
    now("looking at the machines");
    let hosts = transport.hosts();
    let (rank, cores) = (transport.rank().index(), transport.cores());
    let own = hosts[rank];
    let members: Vec<usize> = (0..hosts.len()).filter(|&other| hosts[other] == own).collect();
    let host = transport.fork(&members)?;
    let reach = host.map(|mut host| reach(&mut *host)).transpose()?.flatten();
    let mut comm = Communicator::new(transport);
    // Each rank waits here until all have opened their memory.
    let bound = comm.all_gather_values(&allowed_cores().unwrap_or_default())?;
    let is_first = members[0] == rank;
    let here = if is_first { here(&members, cores, reach, config, &bound) } else { Vec::new() };
    let mut findings = comm.all_gather_values(&here)?.concat();
    let way = |a: usize, b: usize| if hosts[a] == hosts[b] && reach.is_some() { "memory" } else { "TCP" };
    now("measuring the links");
    let links = links(&mut comm, &pairs(&hosts), way)?;
    let window = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").ok();
    let window = window
        .as_deref()
        .and_then(window_in)
        .map(|of_one| Window { of_one, sockets: config.sockets_per_peer() });
    findings.extend(link_findings(&links, &hosts, window));
    now("comparing the clocks");
    findings.extend(clocks(&mut comm, &hosts, system_time)?);
    let leaders = leaders(&hosts);
    let measured = leaders[..leaders.len().min(HOSTS_MEASURED)].to_vec();
    Ok((rank == 0).then_some(MachineReport { findings, leaders: measured, links }))
}

/// Returns the findings about this machine, on which these ranks run.
fn here(
    members: &[usize],
    cores: usize,
    reach: Option<Reach>,
    config: &Config,
    bound: &[Vec<usize>],
) -> Vec<Finding> {
    let own: Vec<(usize, &[usize])> = members.iter().map(|&rank| (rank, bound[rank].as_slice())).collect();
    let binding = machine::binding(&numa_nodes(), &own);
    let shared = (members.len() > 1).then(|| memory(reach, config.medium()));
    let findings = [Some(ranks(members, cores)), binding, shared].into_iter().flatten();
    let world_size = config.rank().world_size();
    let hosted = if members[0] == 0 { world_size } else { 0 };
    let findings = findings.chain(machine::look_around(world_size, members.len(), hosted));
    findings.map(|finding| Finding { rank: members[0], ..finding }).collect()
}

/// Returns the access of a host's ranks to each other's memory; `None` if they share none.
fn reach(host: &mut dyn Transport) -> Result<Option<Reach>, Error> {
    let runtime = host.runtime().clone();
    Ok(host.shm_group(&LazyDeadline::within(&runtime, LIMIT))?.map(|shm_group| shm_group.shared().reach))
}

fn ranks(members: &[usize], cores: usize) -> Finding {
    let list = members.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let finding = Finding::new("ranks", format!("{list} run on this machine, on {cores} cores"));
    let advice = "they take turns, and a small call takes microseconds more: a rank for each core is faster";
    finding.but_if(cores < members.len(), advice)
}

fn memory(reach: Option<Reach>, medium: Medium) -> Finding {
    let found = match reach {
        Some(Reach::Write) => "ranks read and write each other's memory",
        Some(Reach::Read) => "ranks read each other's memory and share some",
        Some(Reach::Slots) => "ranks share some memory, and cannot reach the rest",
        None => "ranks share no memory",
    };
    let finding = Finding::new("memory", found);
    match reach {
        Some(Reach::Write) => finding,
        None if medium == Medium::Tcp => finding,
        None => {
            finding.but("DIST_LOG=dist_transport=info tells why not; the guide has a page on shared memory and containers")
        }
        Some(_) => finding.but(
            "large calls copy once more: unless DIST_SHM_CMA says so, it is the container or \
             kernel.yama.ptrace_scope that forbids process_vm_readv",
        ),
    }
}

/// Returns the first ranks of the first hosts. All pairs of these are measured.
fn leaders(hosts: &[u64]) -> Vec<usize> {
    let first = |rank: &usize| hosts.iter().position(|host| *host == hosts[*rank]) == Some(*rank);
    (0..hosts.len()).filter(first).collect()
}

/// Returns the measured pairs of ranks: rank 0 and each other rank, then the first ranks of every two hosts.
fn pairs(hosts: &[u64]) -> Vec<[usize; 2]> {
    let leaders = leaders(hosts);
    let measured = &leaders[1..leaders.len().min(HOSTS_MEASURED)];
    let between = measured.iter().enumerate();
    let between = between.flat_map(|(index, &b)| measured[..index].iter().map(move |&a| [a, b]));
    (1..hosts.len()).map(|rank| [0, rank]).chain(between).collect()
}

/// A link between two ranks, as it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct MeasuredLink {
    pub(super) low: usize,
    pub(super) high: usize,
    /// `memory` or `TCP`.
    way: String,
    /// The time of a small message one way, in microseconds.
    pub(super) us: f64,
    /// The speed of a large message in gigabytes per second.
    pub(super) gb_per_s: f64,
}

impl MeasuredLink {
    /// Returns the finding, with advice if the link is much slower than the others.
    fn finding(&self, median_gb_per_s: f64) -> Finding {
        let Self { low, high, way, us, gb_per_s } = self;
        let found = format!("to rank {low} by {way}: {us:.2} us one way, {}", speed(*gb_per_s));
        let is_slow = *gb_per_s < SLOW * median_gb_per_s;
        let advice = "less than half the speed of most links between hosts: look at its cable, its port, and other traffic";
        Finding { rank: *high, ..Finding::new("link", found) }.but_if(is_slow, advice)
    }

    /// Returns a finding with advice if the system lets the connections of a link send so few bytes per round trip that they
    /// limit its speed.
    fn window_finding(&self, Window { of_one, sockets }: Window) -> Option<Finding> {
        let round_trip = 2.0 * self.us * 1e-6;
        let speed_of_one = of_one as f64 / round_trip / 1e9;
        let most = speed_of_one * sockets as f64;
        let needed = (WANTED_GB_PER_S * 1e9 * round_trip / sockets as f64).round();
        let found = format!(
            "to rank {}: {} bytes per round trip of {:.1} ms, {} at most",
            self.low,
            of_one * sockets as u64,
            round_trip * 1e3,
            speed(most)
        );
        let advice = format!(
            "on both machines: sysctl -w net.ipv4.tcp_wmem='4096 16384 {needed}' net.ipv4.tcp_rmem='4096 131072 {needed}'; or \
             on every rank: DIST_SOCKETS_PER_PEER={}",
            (WANTED_GB_PER_S / speed_of_one).ceil().min(SOCKETS_MAX)
        );
        let finding = || Finding { rank: self.high, ..Finding::new("window", found) }.but(advice);
        (most < WANTED_GB_PER_S).then(finding)
    }
}

/// The most bytes that a link may have in flight.
#[derive(Debug, Clone, Copy)]
struct Window {
    /// The most bytes of one connection.
    of_one: u64,
    /// The number of connections.
    sockets: usize,
}

/// Returns the most bytes that the system lets a connection have under way, by the text of
/// `/proc/sys/net/ipv4/tcp_wmem`.
fn window_in(text: &str) -> Option<u64> {
    text.split_whitespace().nth(2)?.parse().ok()
}

pub(super) fn speed(gb_per_s: f64) -> String {
    if gb_per_s < 0.1 { format!("{:.2} MB/s", gb_per_s * 1e3) } else { format!("{gb_per_s:.2} GB/s") }
}

/// Returns the findings of links. Those between hosts are compared with each other, and with the bytes that a connection
/// may have under way, if they are known.
fn link_findings(links: &[MeasuredLink], hosts: &[u64], window: Option<Window>) -> Vec<Finding> {
    let is_between = |link: &&MeasuredLink| hosts[link.low] != hosts[link.high];
    let mut speeds: Vec<f64> = links.iter().filter(is_between).map(|link| link.gb_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    let median = speeds.get(speeds.len() / 2).copied().unwrap_or(0.0);
    let findings = links.iter().map(|link| link.finding(if is_between(&link) { median } else { 0.0 }));
    let between = links.iter().filter(is_between);
    findings.chain(between.filter_map(|link| link.window_finding(window?))).collect()
}

/// Measures the time of a small and of a large message in one direction between the ranks of each pair.
fn links(
    comm: &mut Communicator,
    pairs: &[[usize; 2]],
    way: impl Fn(usize, usize) -> &'static str,
) -> Result<Vec<MeasuredLink>, Error> {
    let mut links = Vec::new();
    for &[low, high] in pairs {
        let us = one_way(comm, [low, high], &mut [0; 8], SMALL_TRIPS)?.as_secs_f64() * 1e6;
        let large = one_way(comm, [low, high], &mut vec![0; LARGE], LARGE_TRIPS)?;
        if comm.rank() == low {
            let gb_per_s = LARGE as f64 / large.as_secs_f64() / 1e9;
            links.push(MeasuredLink { low, high, way: way(low, high).to_owned(), us, gb_per_s });
        }
    }
    Ok(comm.all_gather_values(&links)?.concat())
}

/// Returns half a round trip between the ranks of a pair, averaged over as many trips as fit into the budget,
/// as measured by each of the two.
fn one_way(
    comm: &mut Communicator,
    [low, high]: [usize; 2],
    buffer: &mut [u8],
    most: u32,
) -> Result<Duration, Error> {
    let half = match comm.rank() {
        rank if rank == low => half_of_trips(comm, (low, high), buffer, most)?,
        rank if rank == high => half_of_trips(comm, (high, low), buffer, most)?,
        _ => Duration::ZERO,
    };
    // The other ranks wait for this barrier, so that only one pair is measured at a time.
    comm.barrier()?;
    Ok(half)
}

fn half_of_trips(
    comm: &mut Communicator,
    (rank, peer): (usize, usize),
    buffer: &mut [u8],
    most: u32,
) -> Result<Duration, Error> {
    let runtime = comm.runtime().clone();
    round_trips(comm, (rank, peer), buffer, 1)?;
    let start = runtime.now();
    round_trips(comm, (rank, peer), buffer, 1)?;
    let single = runtime.now().saturating_sub(start);
    let room = BUDGET.as_nanos() / single.as_nanos().max(1);
    let mut trips = [most.min(u32::try_from(room).unwrap_or(most))];
    // The lower rank decides how many trips fit into the budget.
    if peer < rank {
        comm.recv(&mut trips, peer)?;
    } else {
        comm.send(&trips, peer)?;
    }
    let [trips] = trips;
    if trips == 0 {
        return Ok(single / 2);
    }
    round_trips(comm, (rank, peer), buffer, trips / 4)?;
    let start = runtime.now();
    round_trips(comm, (rank, peer), buffer, trips)?;
    Ok(runtime.now().saturating_sub(start) / (2 * trips))
}

fn round_trips(
    comm: &mut Communicator,
    (rank, peer): (usize, usize),
    buffer: &mut [u8],
    trips: u32,
) -> Result<(), Error> {
    for _ in 0..trips {
        if peer < rank {
            comm.recv(buffer, peer)?;
            comm.send(buffer, peer)?;
        } else {
            comm.send(buffer, peer)?;
            comm.recv(buffer, peer)?;
        }
    }
    Ok(())
}

/// Returns the time of day by this machine's clock.
fn system_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the offset of each other host's clock from rank 0's. Of several round trips to its first rank, the
/// fastest is the most exact. Only rank 0 gets the result.
fn clocks(
    comm: &mut Communicator,
    hosts: &[u64],
    clock: impl Fn() -> Duration,
) -> Result<Vec<Finding>, Error> {
    let mut findings = Vec::new();
    for &leader in &leaders(hosts)[1..] {
        if comm.rank() == 0 {
            let trips = (0..CLOCK_TRIPS).map(|_| clock_trip(comm, leader, &clock));
            let trips = trips.collect::<Result<Vec<_>, Error>>()?;
            let best = trips.into_iter().min_by_key(|(_, trip)| *trip).expect("there are some");
            findings.push(Finding { rank: leader, ..clock_finding(best) });
        } else if comm.rank() == leader {
            for _ in 0..CLOCK_TRIPS {
                comm.recv(&mut [0_u8], 0)?;
                let now = clock();
                comm.send(&[now.as_secs(), u64::from(now.subsec_nanos())], 0)?;
            }
        }
        comm.barrier()?;
    }
    Ok(findings)
}

/// Returns the lead of a rank's clock over this one's in seconds, and the time of the round trip.
fn clock_trip(
    comm: &mut Communicator,
    peer: usize,
    clock: &impl Fn() -> Duration,
) -> Result<(f64, Duration), Error> {
    let start = clock();
    comm.send(&[0_u8], peer)?;
    let mut theirs = [0_u64; 2];
    comm.recv(&mut theirs, peer)?;
    let trip = clock().saturating_sub(start);
    let [seconds, nanoseconds] = theirs;
    let theirs = Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds);
    let middle = start + trip / 2;
    Ok((theirs.as_secs_f64() - middle.as_secs_f64(), trip))
}

fn clock_finding((ahead, trip): (f64, Duration)) -> Finding {
    let within = trip.as_secs_f64() / 2.0;
    let way = if ahead < 0.0 { "behind" } else { "ahead of" };
    let found = format!("{:.3} ms {way} rank 0's, give or take {:.3} ms", ahead.abs() * 1e3, within * 1e3);
    let is_off = ahead.abs() - within > CLOCK_OFFSET_MAX.as_secs_f64();
    let advice = "times in the logs of these machines cannot be compared: let chrony or ntpd set the clocks";
    Finding::new("clock", found).but_if(is_off, advice)
}

#[cfg(test)]
mod tests {
    use dist_transport::sim::{Link, Network};

    use super::*;

    #[test]
    fn slow_links_are_reported_before_waiting_ranks_time_out() {
        let slow = Link::new(Duration::from_secs(1), 1_000_000);
        let outcome = Network::new(4).with_hosts(&[0, 1, 2, 3]).with_host_link(slow).run(|transport| {
            let mut comm = Communicator::new(transport);
            let links = links(&mut comm, &pairs(&[0, 1, 2, 3]), |_, _| "TCP").unwrap();
            let findings = link_findings(&links, &[0, 1, 2, 3], None);
            assert!(findings.iter().all(|finding| finding.advice.is_none()), "{findings:?}");
            findings.into_iter().map(|finding| (finding.rank, finding.found)).collect::<Vec<_>>()
        });
        let found = |to: usize| format!("to rank {to} by TCP: 2000008.00 us one way, 0.34 MB/s");
        let expected = [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2)].map(|(rank, to)| (rank, found(to)));
        let mut results = outcome.results[0].clone();
        results.sort_by_key(|(rank, found)| (found.clone(), *rank));
        assert_eq!(results, expected);
    }

    #[test]
    fn a_link_that_is_slower_than_the_others_between_hosts_has_advice() {
        let link =
            |low, high, gb_per_s| MeasuredLink { low, high, way: "TCP".to_owned(), us: 30.0, gb_per_s };
        let links = [link(0, 1, 9.0), link(0, 2, 1.0), link(0, 4, 0.3), link(2, 4, 1.1)];
        let findings = link_findings(&links, &[7, 7, 8, 8, 9], Some(Window { of_one: 4 << 20, sockets: 1 }));
        let advised: Vec<bool> = findings.iter().map(|finding| finding.advice.is_some()).collect();
        assert_eq!(advised, [false, false, true, false]);
    }

    #[test]
    fn a_connection_that_the_system_limits_on_a_long_link_has_advice() {
        let link = |high, us| MeasuredLink { low: 0, high, way: "TCP".to_owned(), us, gb_per_s: 0.01 };
        let of_one = window_in("4096\t16384\t4194304\n").unwrap();
        let windows = |sockets| -> Vec<Finding> {
            let links = [link(1, 0.3), link(2, 5000.0), link(3, 50_000.0)];
            let findings = link_findings(&links, &[0, 0, 1, 2], Some(Window { of_one, sockets }));
            findings.into_iter().filter(|finding| finding.check == "window").collect()
        };
        let [finding] = &windows(1)[..] else { panic!("{:?}", windows(1)) };
        assert_eq!(finding.rank, 3);
        assert_eq!(finding.found, "to rank 0: 4194304 bytes per round trip of 100.0 ms, 41.94 MB/s at most");
        let advice = finding.advice.as_deref().unwrap_or_default();
        assert!(
            advice.contains("'4096 16384 12500000'") && advice.ends_with("DIST_SOCKETS_PER_PEER=3"),
            "{advice}"
        );
        assert!(windows(3).is_empty(), "three connections are enough");
    }

    #[test]
    fn every_pair_of_hosts_and_every_rank_to_rank_0_are_measured() {
        let hosts = [7, 7, 8, 8, 9];
        assert_eq!(pairs(&hosts), [[0, 1], [0, 2], [0, 3], [0, 4], [2, 4]]);
        let many: Vec<u64> = (0..20).collect();
        assert_eq!(pairs(&many).len(), 19 + 7 * 6 / 2);
        assert!(pairs(&[7]).is_empty());
    }

    #[test]
    fn clocks_that_differ_are_reported_with_advice() {
        let outcome = Network::new(3).with_hosts(&[0, 1, 2]).run(|transport| {
            let (rank, runtime) = (transport.rank().index(), transport.runtime().clone());
            let epoch = Duration::from_secs(1000) - Duration::from_secs(2) * u32::try_from(rank / 2).unwrap();
            let mut comm = Communicator::new(transport);
            clocks(&mut comm, &[0, 1, 2], || epoch + runtime.now()).unwrap()
        });
        let [same, behind] = &outcome.results[0][..] else { panic!("{:?}", outcome.results) };
        assert!(same.rank == 1 && same.advice.is_none(), "{same:?}");
        assert!(
            behind.found.starts_with("2000.000 ms behind rank 0's") && behind.advice.is_some(),
            "{behind:?}"
        );
        assert!(outcome.results[1..].iter().all(Vec::is_empty));
    }
}
