//! The network between ranks and the speed of ranks.

use std::collections::BTreeMap;

use smallvec::SmallVec;

/// A link between two ranks, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkModel {
    /// The time from sending a byte to its arrival, in seconds.
    pub latency: f64,
    /// The transmission time of a byte, in seconds: the inverse of the bandwidth.
    pub byte: f64,
}

/// The costs of messages for ranks, in seconds of one core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MessageCosts {
    /// The cost to send a message of any size, until its first byte leaves.
    pub send: f64,
    /// The cost to send a message after that, while it is in flight.
    pub sent: f64,
    /// The cost to receive a message.
    pub receive: f64,
    /// The cost to send or receive a byte.
    pub byte: f64,
    /// The cost to reduce or copy a byte.
    pub reduce: f64,
    /// The number of bytes at the start of each message that count twice, on links within a host and for the ranks.
    /// While these bytes are copied in, the receiver has nothing to copy out.
    pub twice: u64,
    /// `true` if messages lie in memory that ranks share. Data is then reduced from there and not copied out first.
    pub shared: bool,
}

impl MessageCosts {
    /// Costs of zero.
    pub const NONE: Self =
        Self { send: 0.0, sent: 0.0, receive: 0.0, byte: 0.0, reduce: 0.0, twice: 0, shared: false };

    /// Returns the number of bytes, with the first ones counted twice.
    pub(crate) fn weight(&self, bytes: u64) -> f64 {
        (bytes + bytes.min(self.twice)) as f64
    }

    /// Returns the time to read a message and, if `reduces`, to reduce it.
    pub(crate) fn reading(&self, bytes: u64, reduces: bool) -> f64 {
        let copied = self.byte * self.weight(bytes);
        let reduced = if reduces { self.reduce * bytes as f64 } else { 0.0 };
        if self.shared { copied.max(reduced) } else { copied + reduced }
    }
}

/// A rank that is late or slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// The delay of its start, in seconds.
    pub late: f64,
    /// The factor by which its work takes longer.
    pub slowdown: f64,
}

/// A resource that messages of several ranks may share: one direction of the link of a host, of a rack, or between
/// two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SharedWire {
    FromHost(usize),
    ToHost(usize),
    FromRack(usize),
    ToRack(usize),
    Between(usize, usize),
}

/// The wires of a message's path in order, and the time per byte on each.
pub(crate) type WirePath<W> = SmallVec<[(W, f64); 4]>;

/// The ranks of a world, their hosts and racks, and the links between them.
///
/// Each host has consecutive ranks. All hosts have the same number of ranks; the last one may have fewer. Racks
/// consist of hosts in the same way.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkModel {
    world_size: usize,
    ranks_per_host: usize,
    /// The link between ranks of different hosts.
    between: LinkModel,
    /// The link between ranks of one host.
    within: LinkModel,
    /// The links between certain pairs of hosts.
    pairs: BTreeMap<(usize, usize), LinkModel>,
    /// The number of hosts per rack, and the additional link between racks.
    racks: Option<(usize, LinkModel)>,
    work: MessageCosts,
    stragglers: Vec<Straggler>,
    shared: bool,
    window: u64,
    cores: Option<usize>,
}

impl NetworkModel {
    /// Creates a network of ranks on separate hosts with equal links.
    pub const fn new(world_size: usize, link: LinkModel, work: MessageCosts) -> Self {
        Self {
            world_size,
            ranks_per_host: 1,
            between: link,
            within: link,
            pairs: BTreeMap::new(),
            racks: None,
            work,
            stragglers: Vec::new(),
            shared: false,
            window: 0,
            cores: None,
        }
    }

    /// Places this many ranks, at least one, on each host; `within` is the link between them.
    #[must_use]
    pub fn on_hosts_of(self, ranks: usize, within: LinkModel) -> Self {
        Self { ranks_per_host: ranks.clamp(1, self.world_size.max(1)), within, ..self }
    }

    /// Places this many hosts, at least one, in each rack. Between racks, a byte has this additional latency and
    /// passes the link of either rack, which its hosts [share](Self::with_shared_uplinks).
    #[must_use]
    pub fn in_racks_of(self, hosts: usize, uplink: LinkModel) -> Self {
        Self { racks: Some((hosts.max(1), uplink)), ..self }
    }

    /// Adds a link from one host to another. Their messages use it instead of the links of the hosts and racks.
    #[must_use]
    pub fn with_pair(mut self, from: usize, to: usize, link: LinkModel) -> Self {
        self.pairs.insert((from, to), link);
        self
    }

    /// Makes a rank late or slow.
    #[must_use]
    pub fn with_straggler(mut self, straggler: Straggler) -> Self {
        self.stragglers.push(straggler);
        self
    }

    /// Lets all messages that leave a host share one link, and all messages that arrive share the link back. This
    /// includes messages of several ranks and messages of one rank to several others. The same holds for racks, and
    /// for the link of a pair of hosts.
    #[must_use]
    pub fn with_shared_uplinks(self) -> Self {
        Self { shared: true, ..self }
    }

    /// Sets the number of bytes that may still be queued for the same rank when a send on a shared link is over. It
    /// corresponds to the socket buffer.
    #[must_use]
    pub fn with_window(self, bytes: u64) -> Self {
        Self { window: bytes, ..self }
    }

    /// Sets the costs of messages.
    #[must_use]
    pub fn with_work(self, work: MessageCosts) -> Self {
        Self { work, ..self }
    }

    /// Lets the ranks of a host share this many cores, at least one.
    #[must_use]
    pub fn with_cores(self, cores: usize) -> Self {
        Self { cores: Some(cores.max(1)), ..self }
    }

    /// Returns the number of ranks.
    pub const fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of hosts.
    pub const fn hosts(&self) -> usize {
        self.world_size.div_ceil(self.ranks_per_host)
    }

    /// Returns the costs of messages for the ranks.
    pub const fn work(&self) -> MessageCosts {
        self.work
    }

    /// Returns the host of a rank.
    pub(crate) const fn host_of(&self, rank: usize) -> usize {
        if self.ranks_per_host == 1 { rank } else { rank / self.ranks_per_host }
    }

    /// Returns the rack of a host.
    const fn rack_of(&self, host: usize) -> usize {
        match self.racks {
            Some((hosts, _)) => host / hosts,
            None => 0,
        }
    }

    /// Returns the number of racks.
    pub const fn racks(&self) -> usize {
        match self.racks {
            Some((hosts, _)) => self.hosts().div_ceil(hosts),
            None => 1,
        }
    }

    /// Returns the link from one rank to another.
    pub fn link(&self, from: usize, to: usize) -> LinkModel {
        if self.ranks_per_host == 1 && self.pairs.is_empty() && self.racks.is_none() {
            return self.between;
        }
        let (from, to) = (self.host_of(from), self.host_of(to));
        if from == to {
            return self.within;
        }
        if !self.pairs.is_empty()
            && let Some(&link) = self.pairs.get(&(from, to))
        {
            return link;
        }
        match self.racks {
            Some((_, uplink)) if self.rack_of(from) != self.rack_of(to) => LinkModel {
                latency: self.between.latency + uplink.latency,
                byte: self.between.byte.max(uplink.byte),
            },
            _ => self.between,
        }
    }

    /// Returns the path of a message from one host to another.
    pub(crate) fn path(&self, from: usize, to: usize) -> WirePath<SharedWire> {
        let mut path = WirePath::new();
        if let Some(link) = self.pairs.get(&(from, to)) {
            path.push((SharedWire::Between(from, to), link.byte));
            return path;
        }
        path.push((SharedWire::FromHost(from), self.between.byte));
        let (out, into) = (self.rack_of(from), self.rack_of(to));
        if let Some((_, uplink)) = self.racks.filter(|_| out != into) {
            path.extend(
                [SharedWire::FromRack(out), SharedWire::ToRack(into)].map(|wire| (wire, uplink.byte)),
            );
        }
        path.push((SharedWire::ToHost(to), self.between.byte));
        path
    }

    /// Returns the delay of a rank's start and the factor by which its work takes longer.
    pub(crate) fn straggling(&self, rank: usize) -> (f64, f64) {
        let own = self.stragglers.iter().filter(|straggler| straggler.rank == rank);
        own.fold((0.0, 1.0), |(late, slowdown), straggler| {
            (late + straggler.late, slowdown * straggler.slowdown)
        })
    }

    /// Returns the only kind of link, if all ranks are alike.
    pub(crate) fn uniform(&self) -> Option<LinkModel> {
        let alike =
            self.stragglers.is_empty() && self.pairs.is_empty() && self.racks() == 1 && !self.is_shared();
        if !alike {
            return None;
        }
        match self.ranks_per_host {
            1 => Some(self.between),
            ranks if ranks == self.world_size => Some(self.within),
            _ => None,
        }
    }

    /// Returns `true` if ranks may have to wait for others that use the same resource.
    pub(crate) const fn is_shared(&self) -> bool {
        self.shared || self.cores.is_some()
    }

    /// Returns `true` if a message from one rank to another uses a shared link.
    pub(crate) const fn shares_link(&self, from: usize, to: usize) -> bool {
        self.shared && self.host_of(from) != self.host_of(to)
    }

    pub(crate) const fn window(&self) -> u64 {
        self.window
    }

    /// Returns the number of cores that the ranks of a host share, if there are fewer cores than ranks.
    pub const fn cores(&self) -> Option<usize> {
        self.cores
    }
}
