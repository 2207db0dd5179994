//! What ranks find out about each other.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_transport::process::{Config, Medium, ProcessTransport};
use dist_transport::shm_group::Reach;
use dist_transport::{LazyDeadline, Transport};

use super::{Finding, machine};
use crate::Error;
use crate::progress::Progress;

/// How long ranks may take to open memory to each other.
const LIMIT: Duration = Duration::from_secs(60);
/// Messages of this size tell how fast data moves.
const LARGE: usize = 1 << 20;
/// Round trips of a small and of a large message at the most, after some that only make them warm.
const SMALL_TRIPS: u32 = 500;
const LARGE_TRIPS: u32 = 20;
/// How long a link is measured with messages of one size, unless a single round trip takes longer.
const BUDGET: Duration = Duration::from_millis(500);

/// Joins the job and finds out what there is; rank 0 gets the findings of all.
pub(super) fn look_around(config: &Config) -> Result<Vec<Finding>, Error> {
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
    // Until all have opened their memory.
    comm.barrier()?;
    let is_first = members[0] == rank;
    let here = if is_first { here(&members, cores, reach, config) } else { Vec::new() };
    let mut findings = comm.all_gather_values(&here)?.concat();
    let way = |peer: usize| if hosts[peer] == hosts[0] && reach.is_some() { "memory" } else { "TCP" };
    now("measuring the links to rank 0");
    findings.extend(links(&mut comm, way)?);
    Ok(if rank == 0 { findings } else { Vec::new() })
}

/// What there is to say of this machine, on which these ranks run.
fn here(members: &[usize], cores: usize, reach: Option<Reach>, config: &Config) -> Vec<Finding> {
    let shared = (members.len() > 1).then(|| memory(reach, config.medium()));
    let findings = [Some(ranks(members, cores)), shared].into_iter().flatten();
    let world_size = config.rank().world_size();
    let hosted = if members[0] == 0 { world_size } else { 0 };
    let findings = findings.chain(machine::look_around(world_size, members.len(), hosted));
    findings.map(|finding| Finding { rank: members[0], ..finding }).collect()
}

/// How far the ranks of a host reach into each other's memory; `None` if they share none.
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

/// How long a small and a large message take one way between rank 0 and each other rank, for rank 0.
fn links(comm: &mut Communicator, way: impl Fn(usize) -> &'static str) -> Result<Vec<Finding>, Error> {
    let mut findings = Vec::new();
    for peer in 1..comm.world_size() {
        let small = one_way(comm, peer, &mut [0; 8], SMALL_TRIPS)?.as_secs_f64() * 1e6;
        let large = LARGE as f64 / one_way(comm, peer, &mut vec![0; LARGE], LARGE_TRIPS)?.as_secs_f64() / 1e9;
        let speed = if large < 0.1 { format!("{:.2} MB/s", large * 1e3) } else { format!("{large:.2} GB/s") };
        let found = format!("to rank 0 by {}: {small:.2} us one way, {speed}", way(peer));
        findings.push(Finding { rank: peer, ..Finding::new("link", found) });
    }
    Ok(if comm.rank() == 0 { findings } else { Vec::new() })
}

/// Half a round trip between rank 0 and a peer, on average over so many as there is time for, as each of the two sees it.
fn one_way(comm: &mut Communicator, peer: usize, buffer: &mut [u8], most: u32) -> Result<Duration, Error> {
    let half = match comm.rank() {
        0 => half_of_trips(comm, peer, buffer, most)?,
        rank if rank == peer => half_of_trips(comm, 0, buffer, most)?,
        _ => Duration::ZERO,
    };
    // The others wait for this, and for no more at once.
    comm.barrier()?;
    Ok(half)
}

fn half_of_trips(
    comm: &mut Communicator,
    towards: usize,
    buffer: &mut [u8],
    most: u32,
) -> Result<Duration, Error> {
    let runtime = comm.runtime().clone();
    round_trips(comm, towards, buffer, 1)?;
    let start = runtime.now();
    round_trips(comm, towards, buffer, 1)?;
    let single = runtime.now().saturating_sub(start);
    let room = BUDGET.as_nanos() / single.as_nanos().max(1);
    let mut trips = [most.min(u32::try_from(room).unwrap_or(most))];
    // Rank 0 says how many there is time for.
    if towards == 0 {
        comm.recv(&mut trips, towards)?;
    } else {
        comm.send(&trips, towards)?;
    }
    let [trips] = trips;
    if trips == 0 {
        return Ok(single / 2);
    }
    round_trips(comm, towards, buffer, trips / 4)?;
    let start = runtime.now();
    round_trips(comm, towards, buffer, trips)?;
    Ok(runtime.now().saturating_sub(start) / (2 * trips))
}

fn round_trips(comm: &mut Communicator, towards: usize, buffer: &mut [u8], trips: u32) -> Result<(), Error> {
    for _ in 0..trips {
        if towards == 0 {
            comm.recv(buffer, towards)?;
            comm.send(buffer, towards)?;
        } else {
            comm.send(buffer, towards)?;
            comm.recv(buffer, towards)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dist_transport::sim::{Link, Network};

    use super::*;

    #[test]
    fn slow_links_are_told_before_those_who_wait_give_up() {
        let slow = Link::new(Duration::from_secs(1), 1_000_000);
        let outcome = Network::new(4).with_hosts(&[0, 1, 2, 3]).with_host_link(slow).run(|transport| {
            let mut comm = Communicator::new(transport);
            let findings = links(&mut comm, |_| "TCP").unwrap();
            findings.into_iter().map(|finding| finding.found).collect::<Vec<_>>()
        });
        let found = "to rank 0 by TCP: 2000008.00 us one way, 0.34 MB/s".to_owned();
        assert_eq!(outcome.results[0], [found.clone(), found.clone(), found]);
        assert!(outcome.results[1..].iter().all(Vec::is_empty));
    }
}
