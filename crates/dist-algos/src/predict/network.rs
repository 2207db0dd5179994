//! What joins the ranks, and how fast they are.

use std::collections::BTreeMap;

use smallvec::SmallVec;

/// A link between two ranks, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkModel {
    /// How long a byte is on its way, in seconds.
    pub latency: f64,
    /// How long it takes until the next byte can follow, in seconds.
    pub byte: f64,
}

/// What messages cost the ranks, in seconds of one core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MessageCosts {
    /// To send a message of any size, until its first byte leaves.
    pub send: f64,
    /// The same after that, while the message is on its way.
    pub sent: f64,
    /// To receive one.
    pub receive: f64,
    /// To send or to receive a byte.
    pub byte: f64,
    /// To reduce a byte into another, or to copy one.
    pub reduce: f64,
    /// So many bytes at the beginning of each message count twice, on links within a host and for the ranks: as long
    /// as these are copied in, there is nothing to copy out.
    pub twice: u64,
    /// Whether messages lie in memory that ranks share: what is reduced is then reduced from there, instead of being
    /// copied out first.
    pub shared: bool,
}

impl MessageCosts {
    /// No work at all.
    pub const NONE: Self =
        Self { send: 0.0, sent: 0.0, receive: 0.0, byte: 0.0, reduce: 0.0, twice: 0, shared: false };

    /// As many bytes as these count for.
    pub(super) fn weight(&self, bytes: u64) -> f64 {
        (bytes + bytes.min(self.twice)) as f64
    }

    /// How long it takes to take a message out, and to reduce it or not.
    pub(super) fn reading(&self, bytes: u64, reduces: bool) -> f64 {
        let copied = self.byte * self.weight(bytes);
        let reduced = if reduces { self.reduce * bytes as f64 } else { 0.0 };
        if self.shared { copied.max(reduced) } else { copied + reduced }
    }
}

/// A rank that is late or slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// Which rank.
    pub rank: usize,
    /// How much later than the others it begins, in seconds.
    pub late: f64,
    /// How many times as long its work takes.
    pub slowdown: f64,
}

/// What the messages of several ranks may share: one direction of the link of a host, of a rack, or between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wire {
    FromHost(usize),
    ToHost(usize),
    FromRack(usize),
    ToRack(usize),
    Between(usize, usize),
}

/// What a message goes through, one after the other, and how long a byte takes on each.
pub(super) type WirePath<W> = SmallVec<[(W, f64); 4]>;

/// The ranks of a world, the hosts and racks that they are in, and the links between them.
///
/// Hosts have neighbouring ranks, all of them the same number, the last perhaps fewer; so racks have hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkModel {
    world_size: usize,
    ranks_per_host: usize,
    /// Between ranks of different hosts.
    between: LinkModel,
    /// Between ranks of one host.
    within: LinkModel,
    /// Between hosts that have links of their own.
    pairs: BTreeMap<(usize, usize), LinkModel>,
    /// How many hosts share a rack, and what is between racks besides.
    racks: Option<(usize, LinkModel)>,
    work: MessageCosts,
    stragglers: Vec<Straggler>,
    shared: bool,
    window: u64,
    cores: Option<usize>,
}

impl NetworkModel {
    /// Ranks on hosts of their own, with links that are alike.
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

    /// This many ranks share a host, at least one; `within` is the link between them.
    #[must_use]
    pub fn on_hosts_of(self, ranks: usize, within: LinkModel) -> Self {
        Self { ranks_per_host: ranks.clamp(1, self.world_size.max(1)), within, ..self }
    }

    /// This many hosts share a rack, at least one. From rack to rack a byte is on its way for so much longer, and goes
    /// through the link of either rack, which its hosts [share](Self::with_shared_uplinks).
    #[must_use]
    pub fn in_racks_of(self, hosts: usize, uplink: LinkModel) -> Self {
        Self { racks: Some((hosts.max(1), uplink)), ..self }
    }

    /// The link from one host to another, by which their messages go instead of those of the hosts and their racks.
    #[must_use]
    pub fn with_pair(mut self, from: usize, to: usize, link: LinkModel) -> Self {
        self.pairs.insert((from, to), link);
        self
    }

    /// A rank that is late or slow.
    #[must_use]
    pub fn with_straggler(mut self, straggler: Straggler) -> Self {
        self.stragglers.push(straggler);
        self
    }

    /// All that goes from a host to others shares one link, and all that comes shares the link back: messages of
    /// several ranks, and those of one rank to several. So it is with racks, and with the link of a pair of hosts.
    #[must_use]
    pub fn with_shared_uplinks(self) -> Self {
        Self { shared: true, ..self }
    }

    /// A send on a shared link is over when no more than so many bytes have yet to leave for the same rank: as many as
    /// a socket takes.
    #[must_use]
    pub fn with_window(self, bytes: u64) -> Self {
        Self { window: bytes, ..self }
    }

    /// The same with other work.
    #[must_use]
    pub fn with_work(self, work: MessageCosts) -> Self {
        Self { work, ..self }
    }

    /// The ranks of a host share this many cores, at least one.
    #[must_use]
    pub fn with_cores(self, cores: usize) -> Self {
        Self { cores: Some(cores.max(1)), ..self }
    }

    /// How many ranks there are.
    pub const fn world_size(&self) -> usize {
        self.world_size
    }

    /// How many hosts there are.
    pub const fn hosts(&self) -> usize {
        self.world_size.div_ceil(self.ranks_per_host)
    }

    /// What messages cost the ranks.
    pub const fn work(&self) -> MessageCosts {
        self.work
    }

    /// The host of a rank.
    pub(super) const fn host_of(&self, rank: usize) -> usize {
        if self.ranks_per_host == 1 { rank } else { rank / self.ranks_per_host }
    }

    /// The rack of a host.
    const fn rack_of(&self, host: usize) -> usize {
        match self.racks {
            Some((hosts, _)) => host / hosts,
            None => 0,
        }
    }

    /// How many racks there are.
    pub const fn racks(&self) -> usize {
        match self.racks {
            Some((hosts, _)) => self.hosts().div_ceil(hosts),
            None => 1,
        }
    }

    /// The link from one rank to another.
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

    /// What a message from one host to another goes through.
    pub(super) fn path(&self, from: usize, to: usize) -> WirePath<Wire> {
        let mut path = WirePath::new();
        if let Some(link) = self.pairs.get(&(from, to)) {
            path.push((Wire::Between(from, to), link.byte));
            return path;
        }
        path.push((Wire::FromHost(from), self.between.byte));
        let (out, into) = (self.rack_of(from), self.rack_of(to));
        if let Some((_, uplink)) = self.racks.filter(|_| out != into) {
            path.extend([Wire::FromRack(out), Wire::ToRack(into)].map(|wire| (wire, uplink.byte)));
        }
        path.push((Wire::ToHost(to), self.between.byte));
        path
    }

    /// How much later than others a rank begins, and how many times as long its work takes.
    pub(super) fn straggling(&self, rank: usize) -> (f64, f64) {
        let own = self.stragglers.iter().filter(|straggler| straggler.rank == rank);
        own.fold((0.0, 1.0), |(late, slowdown), straggler| {
            (late + straggler.late, slowdown * straggler.slowdown)
        })
    }

    /// The one link that there is, if every rank is like every other.
    pub(super) fn uniform(&self) -> Option<LinkModel> {
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

    /// Whether ranks may have to wait for others that use the same.
    pub(super) const fn is_shared(&self) -> bool {
        self.shared || self.cores.is_some()
    }

    /// Whether a message from one rank to another takes a link that others use too.
    pub(super) const fn shares_link(&self, from: usize, to: usize) -> bool {
        self.shared && self.host_of(from) != self.host_of(to)
    }

    pub(super) const fn window(&self) -> u64 {
        self.window
    }

    /// How many cores the ranks of a host share, if they have fewer than they are.
    pub const fn cores(&self) -> Option<usize> {
        self.cores
    }
}
