//! Hosts that are network namespaces of this machine, connected by a bridge in one more namespace.
//!
//! They need Linux, root, `ip` and `tc` of iproute2, and `nsenter` and `unshare` of util-linux. A rank that runs in one of
//! them can cut the network itself, as it has root too.
#![allow(clippy::disallowed_methods, reason = "hosts live by the system's clock and threads")]

mod forward;

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forward::Forwarder;

/// A set of hosts. Drop removes the namespaces and ends all their processes, if this value created them.
pub struct Hosts {
    prefix: String,
    links: Links,
    /// The first process of each host's PID namespace. Empty if another process has made the hosts.
    inits: Vec<Init>,
    forwarder: Option<Forwarder>,
    is_owner: bool,
}

/// The links between hosts. Each host has one link to the switch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// The bits per second in each direction; `None` sets no limit.
    pub bandwidth: Option<u64>,
    /// The time by which a packet from one host to another one is delayed.
    pub latency: Duration,
    /// The number of packets in a million that are lost.
    pub lost_per_million: u32,
    /// The largest packet, in bytes.
    pub mtu: u32,
}

impl Links {
    /// Links without a limit, a latency or losses.
    pub const FAST: Self = Self { bandwidth: None, latency: Duration::ZERO, lost_per_million: 0, mtu: 1500 };

    /// Returns `true` if the packets take the way through the forwarder.
    fn are_forwarded(&self) -> bool {
        !self.latency.is_zero() || self.lost_per_million > 0
    }

    /// Returns the network device that carries the addresses of the hosts.
    fn device(&self) -> &'static str {
        if self.are_forwarded() { "far" } else { "out" }
    }
}

/// The first three numbers of the hosts' addresses.
const NETWORK: &str = "10.251.7";
/// The first numbers of the hosts' IPv6 addresses.
const NETWORK_V6: &str = "fd25:17:7:";
/// The first three numbers of the addresses on the second device.
const SECOND_NETWORK: &str = "10.251.8";
/// The first three numbers of the addresses of the links below the devices of VXLAN.
const LINKS_BELOW: &str = "10.251.9";
/// The last number of the switch's address there.
const SWITCH: u8 = 254;
const VXLAN_PORT: u16 = 4789;
/// The bytes that VXLAN adds to a packet.
const VXLAN_BYTES: u32 = 50;
/// A link-layer address that no host has.
const NOBODY: &str = "02:00:00:00:00:77";
/// The bytes that may leave at once at a limited rate. It must be longer than the largest packet.
const BURST: u32 = 20 << 10;
/// The maximum size of a piece that TCP passes to the device. Pieces that fit into the burst pass the limit unsplit, which
/// spares the cores.
const GSO_MAX: u32 = 16_384;
/// Keeps the congestion window of idle connections. Otherwise a connection that was idle for a retransmission time-out
/// starts with ten packets again, and results depend on the pauses between samples.
const KEEPS_WINDOWS: &str = "/proc/sys/net/ipv4/tcp_slow_start_after_idle";
/// Lets IPv6 addresses be used at once.
const NO_DUPLICATE_ADDRESS_CHECK: &str = "nodad";

/// The time in which the system removes killed processes.
const KILL_MAX: Duration = Duration::from_secs(20);

static MADE: AtomicU64 = AtomicU64::new(0);

impl Hosts {
    /// Makes hosts, each of which reaches all others.
    ///
    /// # Errors
    /// If this machine cannot have them, with the reason.
    pub fn new(count: usize) -> Result<Self, String> {
        Self::with_links(count, Links::FAST)
    }

    /// Makes hosts with these links.
    ///
    /// # Errors
    /// If this machine cannot have them, with the reason.
    pub fn with_links(count: usize, links: Links) -> Result<Self, String> {
        let prefix = format!("dist-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let mut hosts = Self { prefix, links, inits: Vec::new(), forwarder: None, is_owner: true };
        remove_abandoned()?;
        let switch = hosts.switch();
        run("ip", &["netns", "add", &switch])?;
        ip_in(
            &switch,
            &format!(
                "link add name switch mtu {mtu} type bridge\naddress add {LINKS_BELOW}.{SWITCH}/24 dev switch\n\
                 link set switch up",
                mtu = hosts.link_mtu(),
            ),
        )?;
        for host in 0..count {
            hosts.add(host)?;
        }
        if links.are_forwarded() {
            let hosts_below = (1..=count).map(|host| below(&host.to_string())).collect();
            let socket = in_namespace(&switch, || UdpSocket::bind(below(&SWITCH.to_string())))?;
            let forwarder = Forwarder::start(socket, (links.latency, links.lost_per_million), hosts_below);
            hosts.forwarder =
                Some(forwarder.map_err(|error| format!("the forwarder cannot start: {error}"))?);
        }
        Ok(hosts)
    }

    /// Makes a host, its link, and the first process in it.
    fn add(&mut self, host: usize) -> Result<(), String> {
        let (name, switch, number) = (self.name(host), self.switch(), host + 1);
        let (mtu, device) = (self.link_mtu(), self.links.device());
        run("ip", &["netns", "add", &name])?;
        let link =
            format!("link add name out mtu {mtu} type veth peer name in{host} mtu {mtu} netns {switch}");
        let gso = format!("gso_max_size {GSO_MAX}");
        let mut own = format!("link set lo up\n{link}\nlink set out {gso} up\n");
        if self.links.are_forwarded() {
            let ends =
                format!("local {LINKS_BELOW}.{number} remote {LINKS_BELOW}.{SWITCH} dstport {VXLAN_PORT}");
            own += &format!("address add {LINKS_BELOW}.{number}/24 dev out\n");
            own += &format!("link add name far mtu {} type vxlan id 7 dev out {ends}\n", self.links.mtu);
            own += &format!("link set far {gso} up\n");
        } else {
            own += &format!("address add {NETWORK_V6}:{number}/64 dev out {NO_DUPLICATE_ADDRESS_CHECK}\n");
        }
        own += &format!("address add {NETWORK}.{number}/24 dev {device}\n");
        // The congestion control of most systems makes results comparable.
        let route = format!("{NETWORK}.0/24 dev {device} proto kernel scope link src {NETWORK}.{number}");
        own += &format!("route change {route} congctl cubic\n");
        ip_in(&name, &own)?;
        ip_in(&switch, &format!("link set in{host} {gso} master switch up"))?;
        if let Some(bandwidth) = self.links.bandwidth {
            for (space, device) in [(&name, "out".to_owned()), (&switch, format!("in{host}"))] {
                let burst = BURST.max(2 * mtu);
                let shape = format!("root tbf rate {bandwidth}bit burst {burst}b latency 1s");
                let words = ["-n", space, "qdisc", "add", "dev", &device].into_iter();
                run("tc", &words.chain(shape.split(' ')).collect::<Vec<_>>())?;
            }
        }
        in_namespace(&name, || std::fs::write(KEEPS_WINDOWS, "0"))?;
        self.inits.push(Init::start(&name)?);
        Ok(())
    }

    /// Returns the largest packet of a link.
    fn link_mtu(&self) -> u32 {
        self.links.mtu + if self.links.are_forwarded() { VXLAN_BYTES } else { 0 }
    }

    /// Gives each host a second device, `side`, on a second network.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn add_second_network(&self) -> Result<(), String> {
        let switch = self.switch();
        ip_in(&switch, "link add name second type bridge\nlink set second up")?;
        for host in 0..self.inits.len() {
            let (name, number) = (self.name(host), host + 1);
            let link = format!("link add name side type veth peer name side{host} netns {switch}");
            ip_in(
                &name,
                &format!("{link}\naddress add {SECOND_NETWORK}.{number}/24 dev side\nlink set side up"),
            )?;
            ip_in(&switch, &format!("link set side{host} master second up"))?;
        }
        Ok(())
    }

    /// Returns hosts that another process has made, by its [`prefix`](Self::prefix). Their links have default values.
    pub fn of(prefix: &str) -> Self {
        let links = Links::FAST;
        Self { prefix: prefix.to_owned(), links, inits: Vec::new(), forwarder: None, is_owner: false }
    }

    /// Returns the number of hosts; 0 if another process has made them.
    pub fn count(&self) -> usize {
        self.inits.len()
    }

    /// Returns the name of these hosts for other processes.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns a host's address.
    pub fn address(&self, host: usize) -> String {
        format!("{NETWORK}.{}", host + 1)
    }

    /// Returns a host's IPv6 address on the same device. Links with a latency or losses have none.
    pub fn address_v6(&self, host: usize) -> String {
        format!("{NETWORK_V6}:{}", host + 1)
    }

    /// Returns the address of a host's second device, if [`add_second_network`](Self::add_second_network) was called.
    pub fn second_address(&self, host: usize) -> String {
        format!("{SECOND_NETWORK}.{}", host + 1)
    }

    /// Returns the words that start a program on a host. They come before the program's own.
    pub fn starter(&self, host: usize) -> Vec<String> {
        let (init, host_id) = (self.inits[host].pid.to_string(), format!("DIST_HOST_ID={}", self.name(host)));
        // Processes of two hosts do not see each other.
        let folder = std::env::current_dir().map_or("/".into(), |folder| folder.display().to_string());
        let folder = format!("--wd={folder}");
        let enter = ["nsenter", "--target", &init, "--net", "--pid", "--mount", &folder];
        // A process that is killed takes the program with it, since it stands for the program.
        let dies_with_parent = ["setpriv", "--pdeathsig", "KILL", "env", &host_id];
        enter.into_iter().chain(dies_with_parent).map(str::to_owned).collect()
    }

    /// Drops all packets from and to a host, without an error on either side.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn disconnect(&self, host: usize) -> Result<(), String> {
        ip_in(&self.switch(), &format!("link set in{host} nomaster"))
    }

    /// Takes down the network device of a host. The host's system reports that the network is unreachable; the others get no
    /// error.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn take_down(&self, host: usize) -> Result<(), String> {
        ip_in(&self.name(host), &format!("link set {} down", self.links.device()))
    }

    /// Lets a host reach the others.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn connect(&self, host: usize) -> Result<(), String> {
        ip_in(&self.switch(), &format!("link set in{host} master switch"))
    }

    /// Cuts a host's link and kills all its processes, as if it lost its power: no packet reports their end.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn power_off(&self, host: usize) -> Result<(), String> {
        self.disconnect(host)?;
        let limit = Instant::now() + KILL_MAX;
        loop {
            let pids = run("ip", &["netns", "pids", &self.name(host)])?;
            let pids: Vec<&str> = pids.split_whitespace().collect();
            if pids.is_empty() {
                return Ok(());
            }
            // A process may end by itself before it is killed, or start another one.
            let killed = run("kill", &[&["-KILL"], &pids[..]].concat());
            if Instant::now() > limit {
                return Err(format!("processes {pids:?} of host {host} are still there: {killed:?}"));
            }
        }
    }

    /// Drops all packets between two hosts, without an error on either side.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn part(&self, one: usize, other: usize) -> Result<(), String> {
        for (from, to) in [(one, other), (other, one)] {
            let (address, device) = (self.address(to), self.links.device());
            let neighbour = format!("neighbour replace {address} lladdr {NOBODY} nud permanent dev {device}");
            ip_in(&self.name(from), &neighbour)?;
        }
        Ok(())
    }

    /// Splits the network: these hosts reach each other, and not the others.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn split_off(&self, hosts: &[usize]) -> Result<(), String> {
        let moves = hosts.iter().map(|host| format!("link set in{host} master island\n"));
        let lines: String = moves.collect();
        ip_in(&self.switch(), &format!("link add name island type bridge\nlink set island up\n{lines}"))
    }

    fn name(&self, host: usize) -> String {
        format!("{}-{host}", self.prefix)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.prefix)
    }
}

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hosts")
            .field("prefix", &self.prefix)
            .field("links", &self.links)
            .finish_non_exhaustive()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if !self.is_owner {
            return;
        }
        self.forwarder = None;
        let count = self.inits.len();
        self.inits.clear();
        // One more, in case its first process could not start.
        for name in (0..=count).map(|host| self.name(host)).chain([self.switch()]) {
            // One that was not made cannot be removed.
            let _ = run("ip", &["netns", "delete", &name]);
        }
    }
}

/// Returns the bytes that this process's host has sent on a network device: `out`, `side` or `lo`. Headers count.
///
/// # Panics
/// If the host has no such device.
pub fn sent_bytes(device: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").expect("Linux lists its network devices");
    let of_device = |line: &str| Some(line.trim_start().strip_prefix(device)?.strip_prefix(':')?.to_owned());
    let line = text.lines().find_map(of_device).expect("the host has this device");
    // The ninth column.
    line.split_whitespace().nth(8).and_then(|bytes| bytes.parse().ok()).expect("Linux counts the bytes sent")
}

/// The first process of a host's PID namespace. All others end with it.
#[derive(Debug)]
struct Init {
    parent: Child,
    pid: u32,
}

impl Init {
    fn start(name: &str) -> Result<Self, String> {
        // All end with the thread that made the hosts, even if it is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", name]);
        command.args(["unshare", "--pid", "--fork", "--kill-child"]);
        command.args(["sleep", "infinity"]);
        let parent = command
            .stdin(Stdio::null())
            .spawn()
            .map_err(|error| format!("setpriv cannot be started: {error}"))?;
        let mut init = Self { parent, pid: 0 };
        let children = format!("/proc/{0}/task/{0}/children", init.parent.id());
        let limit = Instant::now() + Duration::from_secs(20);
        while Instant::now() < limit && matches!(init.parent.try_wait(), Ok(None)) {
            // It is ready when it has become the program that sleeps, in namespaces of its own.
            let pid = std::fs::read_to_string(&children).unwrap_or_default();
            if let Ok(pid) = pid.trim().parse()
                && std::fs::read_to_string(format!("/proc/{pid}/comm"))
                    .is_ok_and(|name| name.trim() == "sleep")
            {
                init.pid = pid;
                return Ok(init);
            }
            thread::sleep(Duration::from_millis(2));
        }
        Err("unshare --pid does not work here: that needs root and util-linux".to_owned())
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        // Kills the first process, and so all of the namespace.
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

/// Removes the namespaces of processes that were killed.
fn remove_abandoned() -> Result<(), String> {
    let list = run("ip", &["netns", "list"])?;
    for name in list.lines().filter_map(|line| line.split(' ').next()) {
        let process = name.strip_prefix("dist-").and_then(|rest| rest.split('-').next());
        let is_process = |number: &&str| number.parse::<u32>().is_ok();
        if process.filter(is_process).is_some_and(|number| !Path::new("/proc").join(number).exists()) {
            // Another process may have done it meanwhile.
            let _ = run("ip", &["netns", "delete", name]);
        }
    }
    Ok(())
}

/// Runs a function on a thread in the network namespace of this name.
fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> io::Result<T> + Send) -> Result<T, String> {
    let enter_and_work = || {
        enter(&File::open(format!("/run/netns/{name}"))?)?;
        work()
    };
    let result = thread::scope(|scope| scope.spawn(enter_and_work).join());
    result
        .expect("the work does not panic")
        .map_err(|error| format!("in the network namespace {name}: {error}"))
}

/// Moves this thread into a network namespace.
#[cfg(target_os = "linux")]
fn enter(namespace: &File) -> io::Result<()> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

#[cfg(not(target_os = "linux"))]
fn enter(_: &File) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns an address below the devices of VXLAN.
fn below(last_number: &str) -> SocketAddr {
    format!("{LINKS_BELOW}.{last_number}:{VXLAN_PORT}").parse().expect("these are numbers of an address")
}

/// Runs lines of `ip` in a namespace.
fn ip_in(name: &str, lines: &str) -> Result<(), String> {
    let mut command = Command::new("ip");
    command
        .args(["-n", name, "-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("ip cannot be started: {error}"))?;
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(lines.as_bytes()));
    let output = written.and_then(|()| child.wait_with_output()).map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip -n {name} {lines}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Runs a program and returns its output.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program} cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}", arguments.join(" "), told.trim()))
}
