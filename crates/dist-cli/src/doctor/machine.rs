//! Findings about a machine that need no other machine.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::time::Duration;

use dist_collectives::tuning::CostCache;
use dist_transport::Runtime;
use rustix::process::{Resource, Rlimit, getrlimit};

use super::Finding;
use crate::run::{NumaNode, files_needed};
use crate::variables::VARIABLES;

/// Generous estimate of a process's open files besides those of its job.
const OTHER_FILES: u64 = 64;
/// Maximum time to look up a name without advice.
const LOOKUP_MAX: Duration = Duration::from_secs(1);

/// Returns the findings about this machine for a job of `world_size` ranks. The machine runs `ranks` of them,
/// and hosts the coordinator of `hosted` of them.
pub(super) fn look_around(world_size: usize, ranks: usize, hosted: usize) -> impl Iterator<Item = Finding> {
    let found = [
        files(world_size, ranks, hosted),
        file_size(),
        quota(),
        pages(),
        name(),
        coordinator(),
        congestion(),
        variables(),
        costs(),
    ];
    found.into_iter().flatten().chain(interfaces(Path::new("/sys/class/net")))
}

/// Returns the NUMA nodes of this machine, if the system lists them, and the cores and nodes that each rank may run on.
/// Returns `None` if the system lists neither.
pub(super) fn binding(nodes: &[NumaNode], ranks: &[(usize, &[usize])]) -> Option<Finding> {
    if nodes.is_empty() && ranks.iter().all(|(_, cores)| cores.is_empty()) {
        return None;
    }
    let nodes_of = |cores: &[usize]| -> Vec<usize> {
        let has_some = |node: &&NumaNode| node.cores.iter().any(|core| cores.contains(core));
        nodes.iter().filter(has_some).map(|node| node.number).collect()
    };
    let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let places = ranks.iter().map(|(rank, cores)| {
        let of_nodes = match &nodes_of(cores)[..] {
            [] => String::new(),
            numbers => format!(" of node {}", list(numbers)),
        };
        format!("rank {rank} on cores {}{of_nodes}", list(cores))
    });
    let places = places.collect::<Vec<_>>().join("; ");
    let is_spread = ranks.iter().any(|(_, cores)| nodes_of(cores).len() > 1);
    let advice = "memory of another node is slower: distctl run --bind numa keeps each rank within one";
    let count = match nodes.len() {
        0 => "the system lists no nodes".to_owned(),
        1 => "1 node".to_owned(),
        count => format!("{count} nodes"),
    };
    let is_wrong = is_spread && ranks.len() >= nodes.len();
    Some(Finding::new("numa", format!("{count}: {places}")).but_if(is_wrong, advice))
}

/// Returns the setting for huge pages.
fn pages() -> Option<Finding> {
    let chosen = |name: &str| {
        let text = fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?;
        chosen_in(&text)
    };
    Some(pages_of(&chosen("enabled")?, &chosen("shmem_enabled").unwrap_or_else(|| "never".to_owned())))
}

/// Returns the finding for these settings of memory and of shared memory.
fn pages_of(own: &str, shared: &str) -> Finding {
    let finding = Finding::new("huge pages", format!("{own} for memory, {shared} for shared memory"));
    let settings = [
        (own == "never", "madvise", "enabled"),
        (["never", "deny"].contains(&shared), "within_size", "shmem_enabled"),
    ];
    let wanted = settings.iter().filter(|(is_off, ..)| *is_off);
    let commands: Vec<String> = wanted
        .map(|(_, value, name)| format!("echo {value} > /sys/kernel/mm/transparent_hugepage/{name}"))
        .collect();
    let advice =
        format!("large buffers consist of pages of 4 KiB, which take longer: {}", commands.join("; "));
    finding.but_if(!commands.is_empty(), advice)
}

/// Returns the word in brackets.
fn chosen_in(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Returns the network interfaces that are up, with their speed if they report it.
fn interfaces(folder: &Path) -> Option<Finding> {
    let mut up: Vec<String> =
        fs::read_dir(folder).ok()?.flatten().filter_map(|entry| interface(&entry.path())).collect();
    up.sort();
    let found = if up.is_empty() { "none but loopback".to_owned() } else { up.join("; ") };
    Some(Finding::new("interfaces", found))
}

fn interface(folder: &Path) -> Option<String> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok().map(|text| text.trim().to_owned());
    let name = folder.file_name()?.to_str()?;
    if name == "lo" || read("operstate")? == "down" {
        return None;
    }
    let speed = read("speed").and_then(|speed| speed.parse::<u32>().ok());
    let speed = speed.map_or_else(String::new, |speed| format!(", {speed} Mbit/s"));
    Some(format!("{name} with packets of {} bytes{speed}", read("mtu")?))
}

/// Returns the limit of open files. A rank has a connection and shared memory with each peer. A launcher
/// raises its limit to the maximum.
fn files(world_size: usize, ranks: usize, hosted: usize) -> Option<Finding> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    files_within(current?, maximum, (world_size, ranks, hosted))
}

/// Returns the finding for these limits; `most` is `None` if there is no maximum.
fn files_within(
    current: u64,
    most: Option<u64>,
    (world_size, ranks, hosted): (usize, usize, usize),
) -> Option<Finding> {
    let at_most = most.map_or("as many as it likes".to_owned(), |most| most.to_string());
    let finding =
        Finding::new("files", format!("a process may have {current} open, and {at_most} if it asks"));
    let (enough, launcher) = (2 * world_size as u64 + OTHER_FILES, files_needed(ranks, hosted, 0));
    if most.is_some_and(|most| most < launcher) {
        return Some(
            finding.but(format!("distctl may need {launcher} for {ranks} ranks: ulimit -Hn {launcher}")),
        );
    }
    Some(
        finding.but_if(current < enough, format!("{world_size} ranks may need {enough}: ulimit -n {enough}")),
    )
}

fn file_size() -> Option<Finding> {
    let limit = getrlimit(Resource::Fsize).current?;
    let finding =
        Finding::new("file size", format!("a file may have {limit} bytes, and so may shared memory"));
    Some(finding.but("lift it, or messages may have to go over TCP: ulimit -f unlimited"))
}

/// Returns the limit of the processors for a container.
fn quota() -> Option<Finding> {
    quota_in(&fs::read_to_string("/sys/fs/cgroup/cpu.max").ok()?)
}

fn quota_in(text: &str) -> Option<Finding> {
    let (quota, period) = text.trim().split_once(' ')?;
    let cores = quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?;
    let finding = Finding::new("quota", format!("processes of this container use {cores:.1} cores at most"));
    let advice =
        "who waits busily spends of it: give each rank a whole core, or calls stand still now and then";
    Some(finding.but_if(cores.fract() != 0.0, advice))
}

/// Returns the name and the address by which others reach this machine.
fn name() -> Option<Finding> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    let addresses: Vec<IpAddr> =
        (name, 0).to_socket_addrs().map_or_else(|_| Vec::new(), |all| all.map(|at| at.ip()).collect());
    Some(name_finding(name, &addresses))
}

/// Returns the finding about the name of this machine, which has these addresses here.
fn name_finding(name: &str, addresses: &[IpAddr]) -> Finding {
    let advice = "if it is the first machine of a job, give --rdzv or MASTER_ADDR its IP address, or mend /etc/hosts or DNS";
    match addresses {
        [] => Finding::new("name", format!("{name} has no address")).but(advice),
        [first, ..] => match addresses.iter().find(|address| !address.is_loopback()) {
            Some(address) => Finding::new("name", format!("{name} is {address}")),
            None => {
                Finding::new("name", format!("{name} is {first}, which no other machine reaches")).but(advice)
            }
        },
    }
}

/// Returns the address by which this machine reaches the coordinator. Other machines reach it by the same
/// address.
fn coordinator() -> Option<Finding> {
    let name = std::env::var("MASTER_ADDR").ok()?;
    let runtime = Runtime::system();
    let start = runtime.now();
    let resolved = (name.as_str(), 9).to_socket_addrs().and_then(|mut all| all.next().ok_or_else(no_address));
    let took = runtime.now().saturating_sub(start);
    let own = resolved.and_then(|address| Ok((address, own_address(address)?)));
    Some(coordinator_finding(&name, own, took))
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the name has no address")
}

/// Returns this machine's source address for packets to another machine. The system chooses it, and nothing is sent.
fn own_address(other: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if other.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(other)?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the finding about the coordinator's name. `found` is the coordinator's address and this machine's own address.
fn coordinator_finding(name: &str, found: io::Result<(SocketAddr, IpAddr)>, took: Duration) -> Finding {
    let (address, own) = match found {
        Ok(found) => found,
        Err(error) => {
            let found = format!("{name} cannot be reached from this machine: {error}");
            let advice = "set MASTER_ADDR to an IP address that this machine reaches, or mend /etc/hosts, DNS or the routes";
            return Finding::new("coordinator", found).but(advice);
        }
    };
    let [routes, addresses_v6] =
        ["/proc/net/route", "/proc/net/if_inet6"].map(|file| fs::read_to_string(file).unwrap_or_default());
    let device = match own {
        IpAddr::V4(own) => device_of(own, &routes),
        IpAddr::V6(own) => device_of_v6(own, &addresses_v6),
    };
    let device = device.map_or(String::new(), |device| format!(", by {device}"));
    let found = format!(
        "{name} is {}, looked up in {:.1} ms; this machine is {own} for the others{device}",
        address.ip(),
        took.as_secs_f64() * 1e3
    );
    let advice = "names are looked up slowly, at each start: set MASTER_ADDR to an IP address, or mend DNS";
    Finding::new("coordinator", found).but_if(took > LOOKUP_MAX, advice)
}

/// Returns the network device whose network an address is in, by the text of `/proc/net/route`.
fn device_of(address: Ipv4Addr, routes: &str) -> Option<String> {
    let address = u32::from_ne_bytes(address.octets());
    let hexadecimal = |text: &str| u32::from_str_radix(text, 16).ok();
    let route = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [destination, mask] = [columns.get(1)?, columns.get(7)?].map(|column| hexadecimal(column));
        let (destination, mask) = (destination?, mask?);
        (mask != 0 && address & mask == destination).then(|| (mask.count_ones(), columns[0].to_owned()))
    };
    routes.lines().filter_map(route).max().map(|(_, device)| device)
}

/// Returns the network device that has an address, by the text of `/proc/net/if_inet6`.
fn device_of_v6(address: Ipv6Addr, devices: &str) -> Option<String> {
    let address = format!("{:032x}", u128::from(address));
    let line = devices.lines().find(|line| line.starts_with(&address))?;
    Some(line.split_whitespace().last()?.to_owned())
}

fn congestion() -> Option<Finding> {
    let control = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").ok()?;
    Some(Finding::new("tcp", format!("{} controls congestion between machines", control.trim())))
}

fn variables() -> Option<Finding> {
    let known = VARIABLES.map(|variable| variable.name);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let unknown: Vec<String> =
        names.filter(|name| name.starts_with("DIST_") && !known.contains(&name.as_str())).collect();
    let finding = || Finding::new("variables", format!("{} mean nothing here", unknown.join(", ")));
    (!unknown.is_empty()).then(|| finding().but(format!("what does: {}", known.join(", "))))
}

/// Returns the file of measured costs.
fn costs() -> Option<Finding> {
    let kept = CostCache::for_user();
    let place = kept.as_ref().and_then(|kept| Some((kept, kept.path()?)));
    Some(match place {
        None => Finding::new("costs", "measured costs are kept nowhere"),
        Some((kept, path)) => match kept.read() {
            Ok(worlds) => {
                Finding::new("costs", format!("{} kinds of world in {}", worlds.len(), path.display()))
            }
            Err(error) => Finding::new("costs", format!("{} cannot be read: {error}", path.display()))
                .but("remove it, or have DIST_COSTS name another file"),
        },
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1024, Some(4096), "1024 open, and 4096 if it asks", None)]
    #[case(1024, None, "1024 open, and as many as it likes if it asks", None)]
    #[case(
        64,
        None,
        "64 open, and as many as it likes if it asks",
        Some("8 ranks may need 80: ulimit -n 80")
    )]
    #[case(
        16,
        Some(16),
        "16 open, and 16 if it asks",
        Some("distctl may need 56 for 8 ranks: ulimit -Hn 56")
    )]
    fn the_limits_of_open_files_are_reported(
        #[case] current: u64,
        #[case] most: Option<u64>,
        #[case] found: &str,
        #[case] advice: Option<&str>,
    ) {
        let finding = files_within(current, most, (8, 8, 8)).unwrap();
        assert_eq!(finding.found, format!("a process may have {found}"));
        assert_eq!(finding.advice.as_deref(), advice);
    }

    #[rstest]
    #[case(&[&[0][..], &[1]], "2 nodes: rank 3 on cores 0 of node 0; rank 4 on cores 1 of node 1", false)]
    #[case(&[&[0, 1][..], &[0, 1]], "2 nodes: rank 3 on cores 0,1 of node 0,1; rank 4 on cores 0,1 of node 0,1", true)]
    #[case::one_rank_has_all(&[&[0, 1][..]], "2 nodes: rank 3 on cores 0,1 of node 0,1", false)]
    fn ranks_that_are_spread_over_nodes_are_reported(
        #[case] cores: &[&[usize]],
        #[case] found: &str,
        #[case] is_wrong: bool,
    ) {
        let nodes = [0, 1].map(|number| NumaNode { number, cores: vec![number] });
        let ranks: Vec<(usize, &[usize])> =
            cores.iter().enumerate().map(|(at, cores)| (3 + at, *cores)).collect();
        let finding = binding(&nodes, &ranks).unwrap();
        assert_eq!((finding.found.as_str(), finding.advice.is_some()), (found, is_wrong));
    }

    #[test]
    fn the_cores_of_each_rank_are_reported_without_nodes() {
        let finding = binding(&[], &[(3, &[0, 1]), (4, &[2])]).unwrap();
        assert_eq!(finding.found, "the system lists no nodes: rank 3 on cores 0,1; rank 4 on cores 2");
        assert_eq!(finding.advice, None);
        assert_eq!(binding(&[], &[(3, &[])]), None);
    }

    #[rstest]
    #[case(&[[127, 0, 1, 1], [10, 0, 0, 4]], "node3 is 10.0.0.4", false)]
    #[case(&[[127, 0, 1, 1]], "node3 is 127.0.1.1, which no other machine reaches", true)]
    #[case(&[], "node3 has no address", true)]
    fn a_name_that_no_other_machine_reaches_has_advice(
        #[case] addresses: &[[u8; 4]],
        #[case] found: &str,
        #[case] is_wrong: bool,
    ) {
        let addresses: Vec<IpAddr> = addresses.iter().map(|&octets| octets.into()).collect();
        let finding = name_finding("node3", &addresses);
        assert_eq!((finding.found.as_str(), finding.advice.is_some()), (found, is_wrong));
    }

    #[test]
    fn a_coordinator_that_cannot_be_reached_has_advice() {
        let finding = coordinator_finding("node0", Err(no_address()), Duration::ZERO);
        assert_eq!(finding.found, "node0 cannot be reached from this machine: the name has no address");
        assert!(finding.advice.is_some_and(|advice| advice.contains("MASTER_ADDR")));
        let local = (SocketAddr::from(([127, 0, 0, 1], 9)), IpAddr::from([127, 0, 0, 1]));
        let finding = coordinator_finding("node0", Ok(local), Duration::ZERO);
        assert!(finding.found.starts_with("node0 is 127.0.0.1, looked up in 0.0 ms"), "{finding:?}");
        assert_eq!(finding.advice, None);
        assert!(coordinator_finding("node0", Ok(local), 2 * LOOKUP_MAX).advice.is_some());
    }

    #[test]
    fn the_device_of_an_ipv6_address_is_reported() {
        let devices = "00000000000000000000000000000001 01 80 10 80       lo\n\
                       fd250017000700000000000000000002 05 40 00 80      ib0\n";
        let device = |address: &str| device_of_v6(address.parse().unwrap(), devices);
        assert_eq!(device("fd25:17:7::2").as_deref(), Some("ib0"));
        assert_eq!(device("::1").as_deref(), Some("lo"));
        assert_eq!(device("fd25:17:7::3"), None);
    }

    #[test]
    fn interfaces_that_are_up_are_reported_with_their_speed() {
        let folder = tempfile::tempdir().unwrap();
        for (name, state, speed) in
            [("lo", "unknown", ""), ("eth0", "up", "25000"), ("eth1", "down", ""), ("veth", "up", "-1")]
        {
            let own = folder.path().join(name);
            fs::create_dir(&own).unwrap();
            for (file, text) in [("operstate", state), ("mtu", "9000"), ("speed", speed)] {
                fs::write(own.join(file), format!("{text}\n")).unwrap();
            }
        }
        let found = interfaces(folder.path()).unwrap().found;
        assert_eq!(found, "eth0 with packets of 9000 bytes, 25000 Mbit/s; veth with packets of 9000 bytes");
        assert_eq!(chosen_in("always [madvise] never\n").as_deref(), Some("madvise"));
    }

    #[rstest]
    #[case("always", "within_size", &[])]
    #[case("madvise", "advise", &[])]
    #[case("madvise", "never", &["echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled"])]
    #[case("never", "force", &["echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"])]
    #[case("never", "deny", &["/enabled", "/shmem_enabled"])]
    fn huge_pages_that_are_off_have_advice(#[case] own: &str, #[case] shared: &str, #[case] told: &[&str]) {
        let Finding { found, advice, .. } = pages_of(own, shared);
        assert_eq!(found, format!("{own} for memory, {shared} for shared memory"));
        assert_eq!(advice.is_some(), !told.is_empty());
        let advice = advice.unwrap_or_default();
        assert!(told.iter().all(|words| advice.contains(words)), "{advice}");
    }

    #[rstest]
    #[case([10, 1, 0, 2], Some("ib0"))]
    #[case([10, 2, 0, 2], Some("eth0"))]
    #[case([192, 0, 2, 1], None)]
    fn the_device_of_an_address_has_the_smallest_network_with_it(
        #[case] address: [u8; 4],
        #[case] device: Option<&str>,
    ) {
        let word = |octets: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(octets));
        let line = |device: &str, destination: [u8; 4], mask: [u8; 4]| {
            format!("{device}\t{}\t00000000\t0001\t0\t0\t0\t{}\t0\t0\t0\n", word(destination), word(mask))
        };
        let routes = [
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n".to_owned(),
            line("eth0", [0; 4], [0; 4]),
            line("eth0", [10, 0, 0, 0], [255, 0, 0, 0]),
            line("ib0", [10, 1, 0, 0], [255, 255, 0, 0]),
        ];
        assert_eq!(device_of(address.into(), &routes.concat()).as_deref(), device);
    }

    #[rstest]
    #[case("max 100000\n", None)]
    #[case("200000 100000\n", Some(("processes of this container use 2.0 cores at most", false)))]
    #[case("150000 100000\n", Some(("processes of this container use 1.5 cores at most", true)))]
    #[case("", None)]
    fn a_quota_with_a_fraction_of_a_core_has_advice(
        #[case] text: &str,
        #[case] expected: Option<(&str, bool)>,
    ) {
        let found = quota_in(text).map(|finding| (finding.found, finding.advice.is_some()));
        assert_eq!(found, expected.map(|(found, wrong)| (found.to_owned(), wrong)));
    }
}
