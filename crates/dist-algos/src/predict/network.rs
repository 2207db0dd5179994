//! What joins the ranks, and how fast they are.

use std::collections::BTreeMap;

/// A link between two ranks, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// How long a byte is on its way, in seconds.
    pub latency: f64,
    /// How long it takes until the next byte can follow, in seconds.
    pub byte: f64,
}

/// What messages cost the ranks, in seconds of one core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// To send a message of any size.
    pub send: f64,
    /// To receive one.
    pub receive: f64,
    /// To send or to receive a byte.
    pub byte: f64,
    /// To reduce a byte into another, or to copy one.
    pub reduce: f64,
    /// So many bytes at the beginning of each message count twice, on links within a host and for the ranks: as long
    /// as these are copied in, there is nothing to copy out.
    pub twice: u64,
}

impl Work {
    /// No work at all.
    pub const NONE: Self = Self { send: 0.0, receive: 0.0, byte: 0.0, reduce: 0.0, twice: 0 };

    /// As many bytes as these count for.
    pub(super) fn weight(&self, bytes: u64) -> f64 {
        (bytes + bytes.min(self.twice)) as f64
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
    pub pace: f64,
}

/// The ranks of a world, the hosts that they are on, and the links between them.
///
/// Hosts have neighbouring ranks, all of them the same number, the last perhaps fewer.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    world_size: usize,
    ranks_per_host: usize,
    /// Between ranks of different hosts.
    between: Link,
    /// Between ranks of one host.
    within: Link,
    /// Between hosts that have links of their own.
    pairs: BTreeMap<(usize, usize), Link>,
    work: Work,
    stragglers: Vec<Straggler>,
    shared: bool,
    window: u64,
    cores: Option<usize>,
}

impl Network {
    /// Ranks on hosts of their own, with links that are alike.
    pub const fn new(world_size: usize, link: Link, work: Work) -> Self {
        Self {
            world_size,
            ranks_per_host: 1,
            between: link,
            within: link,
            pairs: BTreeMap::new(),
            work,
            stragglers: Vec::new(),
            shared: false,
            window: 0,
            cores: None,
        }
    }

    /// This many ranks share a host, at least one; `within` is the link between them.
    #[must_use]
    pub fn on_hosts_of(self, ranks: usize, within: Link) -> Self {
        Self { ranks_per_host: ranks.clamp(1, self.world_size.max(1)), within, ..self }
    }

    /// The link from one host to another.
    #[must_use]
    pub fn with_pair(mut self, from: usize, to: usize, link: Link) -> Self {
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
    /// several ranks, and those of one rank to several.
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
    pub fn with_work(self, work: Work) -> Self {
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
    pub const fn work(&self) -> Work {
        self.work
    }

    /// The host of a rank.
    pub const fn host_of(&self, rank: usize) -> usize {
        if self.ranks_per_host == 1 { rank } else { rank / self.ranks_per_host }
    }

    /// The link from one rank to another.
    pub fn link(&self, from: usize, to: usize) -> Link {
        if self.ranks_per_host == 1 && self.pairs.is_empty() {
            return self.between;
        }
        let (from, to) = (self.host_of(from), self.host_of(to));
        if from == to {
            return self.within;
        }
        match self.pairs.is_empty() {
            true => self.between,
            false => self.pairs.get(&(from, to)).copied().unwrap_or(self.between),
        }
    }

    /// How much later than others a rank begins, and how many times as long its work takes.
    pub(super) fn straggling(&self, rank: usize) -> (f64, f64) {
        let own = self.stragglers.iter().filter(|straggler| straggler.rank == rank);
        own.fold((0.0, 1.0), |(late, pace), straggler| (late + straggler.late, pace * straggler.pace))
    }

    /// The one link that there is, if every rank is like every other.
    pub(super) fn uniform(&self) -> Option<Link> {
        let alike = self.stragglers.is_empty() && self.pairs.is_empty() && !self.is_shared();
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

    pub(super) const fn cores(&self) -> Option<usize> {
        self.cores
    }
}
