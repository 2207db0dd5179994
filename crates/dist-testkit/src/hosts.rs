//! Hosts that are network namespaces of this machine, connected by a bridge in one more namespace.
//!
//! They need Linux, root, `ip` of iproute2 and `unshare` of util-linux. A rank that runs in one of them can cut the network itself, as it has root too.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

/// Some hosts. The namespaces are removed when the value that made them is dropped.
#[derive(Debug)]
pub struct Hosts {
    prefix: String,
    count: usize,
    is_owner: bool,
}

/// The first three numbers of the hosts' addresses.
const NETWORK: &str = "10.251.7";
/// An address of the link layer that no host has.
const NOBODY: &str = "02:00:00:00:00:77";

static MADE: AtomicU64 = AtomicU64::new(0);

impl Hosts {
    /// Makes so many hosts, each of which reaches all others.
    ///
    /// # Errors
    /// If this machine cannot have them, with the reason.
    pub fn new(count: usize) -> Result<Self, String> {
        let prefix = format!("dist-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let hosts = Self { prefix, count, is_owner: true };
        let switch = hosts.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add name switch type bridge"))?;
        ip(&format!("-n {switch} link set switch up"))?;
        for host in 0..count {
            let (name, address) = (hosts.name(host), hosts.address(host));
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link add name out type veth peer name in{host} netns {switch}"))?;
            ip(&format!("-n {name} address add {address}/24 dev out"))?;
            ip(&format!("-n {name} link set out up"))?;
            ip(&format!("-n {switch} link set in{host} up"))?;
            hosts.connect(host)?;
        }
        Ok(hosts)
    }

    /// The hosts that another process has made, by what [`prefix`](Self::prefix) says there.
    pub fn of(prefix: &str, count: usize) -> Self {
        Self { prefix: prefix.to_owned(), count, is_owner: false }
    }

    /// What names these hosts to other processes.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A host's address.
    pub fn address(&self, host: usize) -> String {
        format!("{NETWORK}.{}", host + 1)
    }

    /// The words that start a program on a host, which stand before the program's own.
    pub fn starter(&self, host: usize) -> Vec<String> {
        let (name, host_id) = (self.name(host), format!("DIST_HOST_ID={}", self.name(host)));
        let network = ["ip", "netns", "exec", &name];
        // Processes of two hosts do not see each other either.
        let processes = ["unshare", "--pid", "--fork", "--kill-child", "env", &host_id];
        network.into_iter().chain(processes).map(str::to_owned).collect()
    }

    /// Drops all that a host sends to others and they to it, without notice to anybody.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn disconnect(&self, host: usize) -> Result<(), String> {
        ip(&format!("-n {} link set in{host} nomaster", self.switch()))
    }

    /// Lets a host reach the others.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn connect(&self, host: usize) -> Result<(), String> {
        ip(&format!("-n {} link set in{host} master switch", self.switch()))
    }

    /// Drops all that two hosts send to each other, without notice to anybody.
    ///
    /// # Errors
    /// If that fails, with the reason.
    pub fn part(&self, one: usize, other: usize) -> Result<(), String> {
        for (from, to) in [(one, other), (other, one)] {
            let (name, address) = (self.name(from), self.address(to));
            ip(&format!("-n {name} neighbour replace {address} lladdr {NOBODY} nud permanent dev out"))?;
        }
        Ok(())
    }

    fn name(&self, host: usize) -> String {
        format!("{}-{host}", self.prefix)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.prefix)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if self.is_owner {
            for name in (0..self.count).map(|host| self.name(host)).chain([self.switch()]) {
                // One that was not made cannot be removed.
                let _ = ip(&format!("netns delete {name}"));
            }
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let mut command = Command::new("ip");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("ip cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
