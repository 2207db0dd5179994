//! Hosts made of network namespaces: one switch, and a link to it from each, which is slow or long.
//!
//! Slow links are held to a rate by tbf. Long ones have VXLAN devices on top, whose packets a process on the switch
//! keeps for a while.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::forward::Forwarder;
use super::private;
use crate::command::{Failure, line, output};

/// Hosts on one switch, as network namespaces. They are removed when this is dropped.
pub(super) struct Hosts {
    count: usize,
    shape: Shape,
    /// The process that delays packets, if the links have a latency.
    forwarder: Option<Child>,
}

/// The shape of links.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    /// A limited rate and the burst size, in the notation of `tc`.
    Rate(&'static str, &'static str),
    /// A latency in milliseconds.
    Latency(u64),
}

/// The prefix of all names.
const PREFIX: &str = "dist-predict";
/// The first three numbers of the addresses of links, and of the VXLAN on top of links with a latency.
const LINKS: &str = "10.213.77";
const ABOVE: &str = "10.213.78";
/// The last number of the address of the switch.
const SWITCH: u8 = 254;
const VXLAN_PORT: u16 = 4789;
const PORT: u16 = 29_777;
/// The congestion control of most systems, for comparable results.
const CONGESTION_CONTROL: &str = "congctl cubic";
/// Keeps the congestion window of idle connections. Otherwise a connection that was idle for a retransmission time-out
/// starts with ten packets again, and the result depends on the pauses between samples.
const KEEPS_WINDOWS: &str = "net.ipv4.tcp_slow_start_after_idle=0";
/// The maximum size of a piece that TCP passes to the device.
const GSO_MAX: u32 = 16_384;

impl Hosts {
    /// Returns the reason why this machine cannot create such hosts; `None` if it can.
    pub(super) fn missing() -> Option<&'static str> {
        let works = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let probe = format!("{PREFIX}-probe");
        if !works("tc", &["-Version"]) {
            return Some("there is no tc");
        }
        if !works("ip", &["netns", "add", &probe]) {
            return Some("ip cannot make network namespaces here: that needs root");
        }
        works("ip", &["netns", "delete", &probe]);
        None
    }

    /// Creates this many hosts, with links of this shape in both directions.
    pub(super) fn new(count: usize, shape: Shape) -> Result<Self, Failure> {
        let mut hosts = Self { count, shape, forwarder: None };
        hosts.remove();
        let switch = hosts.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add name switch type bridge"))?;
        ip(&format!("-n {switch} address add {LINKS}.{SWITCH}/24 dev switch"))?;
        ip(&format!("-n {switch} link set switch up"))?;
        for host in 0..count {
            hosts.connect(host)?;
        }
        if let Shape::Latency(milliseconds) = shape {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &switch]).arg(std::env::current_exe()?);
            command.args([FORWARD, &milliseconds.to_string(), &count.to_string()]);
            hosts.forwarder = Some(command.stdin(Stdio::null()).spawn()?);
        }
        Ok(hosts)
    }

    /// Creates a host and its link.
    fn connect(&self, host: usize) -> Result<(), Failure> {
        let (name, switch, number) = (self.name(host), self.switch(), host + 1);
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link add name out type veth peer name in{host} netns {switch}"))?;
        ip(&format!("-n {name} address add {LINKS}.{number}/24 dev out"))?;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("netns exec {name} sysctl -qw {KEEPS_WINDOWS}"))?;
        // Packets that fit into tbf's burst go through it in one piece; taken apart, they would keep the cores busy.
        for (space, device) in [(&name, "out".to_owned()), (&switch, format!("in{host}"))] {
            ip(&format!("-n {space} link set {device} gso_max_size {GSO_MAX}"))?;
        }
        ip(&format!("-n {name} link set out up"))?;
        ip(&format!("-n {switch} link set in{host} master switch up"))?;
        match self.shape {
            Shape::Rate(rate, burst) => {
                for (space, device) in [(&name, "out".to_owned()), (&switch, format!("in{host}"))] {
                    let shape =
                        format!("qdisc add dev {device} root tbf rate {rate} burst {burst} latency 1s");
                    run("tc", &format!("-n {space} {shape}"))?;
                }
            }
            Shape::Latency(_) => {
                let ends = format!("local {LINKS}.{number} remote {LINKS}.{SWITCH} dstport {VXLAN_PORT}");
                ip(&format!("-n {name} link add name far mtu 1400 type vxlan id 7 dev out {ends}"))?;
                ip(&format!("-n {name} address add {ABOVE}.{number}/24 dev far"))?;
                ip(&format!("-n {name} link set far up"))?;
            }
        }
        let (network, device) = self.network();
        let route = format!("{network}.0/24 dev {device} proto kernel scope link src {network}.{number}");
        ip(&format!("-n {name} route change {route} {CONGESTION_CONTROL}"))
    }

    /// Returns the address of a host for its ranks.
    fn address(&self, host: usize) -> String {
        format!("{}.{}", self.network().0, host + 1)
    }

    /// Returns the first three numbers of the addresses for ranks, and the network device.
    const fn network(&self) -> (&'static str, &'static str) {
        match self.shape {
            Shape::Rate(..) => (LINKS, "out"),
            Shape::Latency(_) => (ABOVE, "far"),
        }
    }

    /// Runs one rank of `distctl bench` on each host. Returns the output of rank 0.
    pub(super) fn run(&self, program: &Path, folder: &Path, arguments: &[&str]) -> Result<String, Failure> {
        let secret = folder.join("secret");
        private(&secret, &format!("{:032x}{:032x}", std::process::id(), PORT))?;
        let command = |rank: usize| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.name(rank)]).arg(program).arg("bench").args(arguments);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.count.to_string());
            command.env("MASTER_ADDR", self.address(0)).env("MASTER_PORT", PORT.to_string());
            command.env("DIST_SECRET_FILE", &secret).env("DIST_HOST_ID", self.name(rank));
            command.env("DIST_COSTS", "off");
            command
        };
        run_all(command, self.count)
    }

    fn switch(&self) -> String {
        format!("{PREFIX}-switch")
    }

    fn name(&self, host: usize) -> String {
        format!("{PREFIX}-{host}")
    }

    /// Removes the hosts, and with them their links.
    fn remove(&self) {
        for name in (0..self.count).map(|host| self.name(host)).chain([self.switch()]) {
            // What is not there need not be removed.
            let mut command = Command::new("ip");
            command.args(["netns", "delete", &name]).stderr(Stdio::null());
            let _ = command.status();
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if let Some(forwarder) = &mut self.forwarder {
            // It may have ended by itself.
            let _ = forwarder.kill();
            let _ = forwarder.wait();
        }
        self.remove();
    }
}

/// Runs the commands of all ranks, and waits for all that could be started. Returns the output of rank 0.
fn run_all(command: impl Fn(usize) -> Command, count: usize) -> Result<String, Failure> {
    let mut others = Vec::new();
    let started = (1..count).try_for_each(|rank| -> Result<(), Failure> {
        others.push((rank, command(rank).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?));
        Ok(())
    });
    // Without one of them, the others wait for it until their deadlines.
    let lines = started.and_then(|()| output(&mut command(0)));
    let ended: Vec<_> = others.into_iter().map(|(rank, mut other)| (rank, other.wait())).collect();
    let lines = lines?;
    for (rank, status) in ended {
        if !status?.success() {
            return Err(Failure::Program(line(&command(rank))));
        }
    }
    Ok(lines)
}

/// The command by which this program delays packets.
pub(crate) const FORWARD: &str = "forward-packets";

/// Delays the packets between hosts. The arguments are the number of hosts and the delay in milliseconds. It runs on the
/// switch.
pub(crate) fn forward(mut arguments: lexopt::Parser) -> Result<(), Failure> {
    let mut number = || -> Result<u64, Failure> {
        let value = arguments.value()?.to_string_lossy().into_owned();
        value.parse().map_err(|_| Failure::Usage(format!("{value:?} is no number")))
    };
    let (delay, count) = (Duration::from_millis(number()?), number()?);
    let at = |last: u64| -> Result<SocketAddr, Failure> {
        let address = format!("{LINKS}.{last}:{VXLAN_PORT}");
        address.parse().map_err(|_| Failure::Usage(format!("{address:?} is no address")))
    };
    let socket = UdpSocket::bind(at(SWITCH.into())?)?;
    let ports = (1..=count).map(at).collect::<Result<_, _>>()?;
    Ok(Forwarder::new(socket, delay, ports).run()?)
}

fn ip(arguments: &str) -> Result<(), Failure> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &str) -> Result<(), Failure> {
    output(Command::new(program).args(arguments.split_whitespace())).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank writes a file when it ends.
    #[test]
    fn the_rank_that_failed_is_named_when_all_have_ended() {
        let folder = std::env::temp_dir().join(format!("{PREFIX}-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("no other process has this number");
        let of = |failing: usize| {
            let folder = &folder;
            move |rank: usize| {
                let script = "sleep 0.$0; touch $1; echo lines of $0; exit $2";
                let mut command = Command::new("sh");
                command.args(["-c", script, &rank.to_string()]).arg(folder.join(format!("{failing}-{rank}")));
                command.arg(if rank == failing { "7" } else { "0" });
                command
            }
        };
        let ended =
            |failing: usize| (0..4).filter(|rank| folder.join(format!("{failing}-{rank}")).exists()).count();
        assert_eq!(run_all(of(4), 4).ok().as_deref(), Some("lines of 0\n"));
        for failing in 0..4 {
            let failed = run_all(of(failing), 4).map_err(|failure| failure.to_string());
            let named = format!("{failing}-{failing} 7");
            assert!(failed.as_ref().is_err_and(|text| text.ends_with(&named)), "{failed:?}");
            assert_eq!(ended(failing), 4);
        }
        let missing = |rank: usize| if rank == 2 { Command::new("/no/such/program") } else { of(5)(rank) };
        assert!(matches!(run_all(missing, 3), Err(Failure::System(_))));
        assert_eq!(ended(5), 1);
        std::fs::remove_dir_all(&folder).expect("it is there");
    }
}
