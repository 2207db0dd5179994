//! The network of a prediction: from arguments, and from files with links and with a fitted model.

use std::path::PathBuf;

use dist_algos::{CostModel, Hosts, Placement};
use dist_predict::{LinkModel, MessageCosts, NetworkModel, QUEUE_STEPS_MAX, Straggler};

use super::links;
use super::model::Model;
use crate::{Error, quantity};

/// Arguments for the network. The default is 10 GbE and TCP.
#[derive(Debug, clap::Args)]
pub(super) struct WorldArguments {
    /// Latency between hosts
    #[arg(long, value_name = "TIME", default_value = "25us", value_parser = quantity::time)]
    latency: f64,
    /// Bandwidth between hosts
    #[arg(long, value_name = "SPEED", default_value = "10Gbps", value_parser = quantity::speed)]
    bandwidth: f64,
    /// CPU time of the sender and of the receiver for each message
    #[arg(long, value_name = "TIME", default_value = "2us", value_parser = quantity::time)]
    overhead: f64,
    /// Speed at which a core sends or receives
    #[arg(long, value_name = "SPEED", default_value = "5GB/s", value_parser = quantity::speed)]
    copy: f64,
    /// Speed at which a core reduces
    #[arg(long, value_name = "SPEED", default_value = "10GB/s", value_parser = quantity::speed)]
    reduce: f64,
    /// Number of hosts, with equally many ranks on each [default: one host per rank]
    #[arg(long, value_name = "H", value_parser = super::ranks)]
    hosts: Option<usize>,
    /// Number of ranks on each host, instead of --hosts; fewer ranks than that are on one host
    #[arg(long, value_name = "R", conflicts_with = "hosts", value_parser = super::ranks)]
    ranks_per_host: Option<usize>,
    /// Number of racks, with equally many hosts in each [default: 1]
    #[arg(long, value_name = "K", value_parser = super::ranks)]
    racks: Option<usize>,
    /// Additional latency between racks
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = quantity::time)]
    rack_latency: f64,
    /// Bandwidth from a rack to the others, which the hosts of the rack share
    #[arg(long, value_name = "SPEED", default_value = "40Gbps", value_parser = quantity::speed)]
    rack_bandwidth: f64,
    /// Latency between ranks of a host
    #[arg(long, value_name = "TIME", default_value = "5us", value_parser = quantity::time)]
    local_latency: f64,
    /// Bandwidth between ranks of a host
    #[arg(long, value_name = "SPEED", default_value = "40Gbps", value_parser = quantity::speed)]
    local_bandwidth: f64,
    /// Number of cores that the ranks of a host share [default: one per rank]
    #[arg(long, value_name = "C", value_parser = super::ranks)]
    cores: Option<usize>,
    /// Rank that begins late, for example 5:+3ms, or works slowly, for example 5:x2
    #[arg(long, value_name = "RANK:HOW", value_parser = straggler)]
    straggler: Vec<Straggler>,
    /// File with the links of single pairs of hosts
    #[arg(long, value_name = "FILE")]
    links: Option<PathBuf>,
    /// File with a fitted model, instead of --latency, --bandwidth, --overhead, --copy and --reduce
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
}

/// A number of ranks on a network.
#[derive(Debug)]
pub(super) struct World {
    /// The network with shared links, which takes long to simulate.
    exact: NetworkModel,
    /// The network with an equal share of the host's link for each rank, if ranks share links.
    parted: Option<NetworkModel>,
    /// The hosts of the ranks, if there are several hosts with several ranks.
    hosts: Option<Hosts>,
    model: Model,
    costs: CostModel,
}

/// Maximum number of ranks for which the ranks of a host share its link.
const SHARED_RANKS_MAX: usize = 10_000;

/// Maximum number of ranks on hosts of their own for which concurrent messages of a rank share its link. With
/// more ranks, its messages leave one after the other.
const ALONE_RANKS_MAX: usize = 511;

impl WorldArguments {
    /// Creates the network of a number of ranks.
    pub(super) fn of(&self, ranks: usize) -> Result<World, Error> {
        let hosts = match self.ranks_per_host {
            Some(each) => ranks.div_ceil(each),
            None => self.hosts.unwrap_or(ranks),
        };
        let uneven = |each: usize| hosts > 1 && !ranks.is_multiple_of(each);
        if !ranks.is_multiple_of(hosts) || self.ranks_per_host.is_some_and(uneven) {
            return Err(Error::Usage(format!("{ranks} ranks cannot be divided equally over {hosts} hosts")));
        }
        let model = self.model(ranks)?;
        let each = ranks / hosts;
        let hosts_per_rack = self.hosts_per_rack(hosts)?;
        let pairs = match &self.links {
            None => Vec::new(),
            Some(path) => links::read(path, hosts)?,
        };
        if let Some(stranger) = self.straggler.iter().find(|straggler| straggler.rank >= ranks) {
            return Err(Error::Usage(format!(
                "there is no rank {}: the {ranks} ranks are numbered from 0",
                stranger.rank
            )));
        }
        let cores = self.cores.or(model.cores);
        let within = self.within(&model, hosts);
        // Links are either shared, or every rank has an equal share of each link that it may use.
        let network = |shared: bool| {
            let part = |link, users| if shared { link } else { part_of(link, users) };
            let host = part(model.link, each);
            let mut network = NetworkModel::new(ranks, host, model.work).on_hosts_of(each, within);
            if let Some(count) = hosts_per_rack {
                network = network.in_racks_of(count, part(self.rack(), each * count));
            }
            for pair in &pairs {
                network = network.with_pair(pair.from, pair.to, part(pair.link, each));
            }
            for &straggler in &self.straggler {
                network = network.with_straggler(straggler);
            }
            network
        };
        let several = each > 1 && hosts > 1;
        let shares = hosts > 1 && ranks <= if several { SHARED_RANKS_MAX } else { ALONE_RANKS_MAX };
        let exact = network(shares);
        let exact = if shares { exact.with_shared_uplinks().with_window(model.window) } else { exact };
        let exact = cores.filter(|&cores| cores < each).into_iter().fold(exact, NetworkModel::with_cores);
        let name = |rank: usize| (rank / each) as u64;
        let hosts = several.then(|| Hosts::new(&(0..ranks).map(name).collect::<Vec<_>>()));
        let parted = (shares && cores.is_none()).then(|| network(false));
        // If there is only one host, messages do not take the link between hosts.
        let link = if each == ranks { within } else { model.link };
        Ok(World { exact, parted, hosts, model, costs: costs(&Model { link, ..model }) })
    }
}

impl WorldArguments {
    /// Returns the model of each rank and of each link between hosts.
    fn model(&self, ranks: usize) -> Result<Model, Error> {
        match &self.model {
            Some(path) => Model::read(path, ranks),
            None => Ok(Model {
                link: LinkModel { latency: self.latency, byte: self.bandwidth },
                work: MessageCosts {
                    send: self.overhead,
                    sent: 0.0,
                    receive: self.overhead,
                    byte: self.copy,
                    reduce: self.reduce,
                    ..MessageCosts::NONE
                },
                ..Model::default()
            }),
        }
    }

    /// Returns the number of hosts in a rack, if there are several racks.
    fn hosts_per_rack(&self, hosts: usize) -> Result<Option<usize>, Error> {
        let Some(racks) = self.racks else { return Ok(None) };
        if !hosts.is_multiple_of(racks) {
            return Err(Error::Usage(format!("{hosts} hosts cannot be divided equally over {racks} racks")));
        }
        Ok((racks > 1).then_some(hosts / racks))
    }

    /// Returns the link between racks in addition to the links of hosts.
    const fn rack(&self) -> LinkModel {
        LinkModel { latency: self.rack_latency, byte: self.rack_bandwidth }
    }

    /// Returns the link between ranks of one host. A fitted model of a single host describes this link.
    const fn within(&self, model: &Model, hosts: usize) -> LinkModel {
        if self.model.is_some() && hosts == 1 {
            return model.link;
        }
        LinkModel { latency: self.local_latency, byte: self.local_bandwidth }
    }

    /// Returns the network of one host's ranks, and the network of one rank of every host with its share of
    /// each link.
    ///
    /// # Errors
    /// The errors of [`of`](Self::of), and an error if an option describes single ranks or hosts, or cores,
    /// because one rank stands for all.
    pub(super) fn levels(&self, ranks: usize) -> Result<(World, World), Error> {
        let said = [
            ("--straggler", !self.straggler.is_empty()),
            ("--links", self.links.is_some()),
            ("--cores", self.cores.is_some()),
        ];
        if let Some((option, _)) = said.into_iter().find(|(_, is_said)| *is_said) {
            return Err(Error::Usage(format!("{option} is not predicted for hybrid training")));
        }
        let world = self.of(ranks)?;
        let (model, hosts) = (self.model(ranks)?, world.hosts());
        let each = ranks / hosts;
        let single = |exact: NetworkModel, link: LinkModel| {
            let model = Model { link, ..model };
            World { exact, parted: None, hosts: None, model, costs: costs(&model) }
        };
        let (within, part) = (self.within(&model, hosts), part_of(model.link, each));
        let inside = NetworkModel::new(each, within, model.work);
        let mut across = NetworkModel::new(hosts, part, model.work);
        if let Some(count) = self.hosts_per_rack(hosts)? {
            across = across.in_racks_of(count, part_of(self.rack(), each * count));
        }
        Ok((single(inside, within), single(across, part)))
    }
}

/// Returns the share of a link that each of `users` users has.
fn part_of(link: LinkModel, users: usize) -> LinkModel {
    LinkModel { byte: link.byte * users as f64, ..link }
}

impl World {
    /// Creates the network of `ranks` ranks of a model, on one host or each on a host of its own.
    pub(super) fn like(ranks: usize, model: &Model, apart: bool) -> Self {
        let network = NetworkModel::new(ranks, model.link, model.work);
        let network = if apart {
            network.with_shared_uplinks().with_window(model.window)
        } else {
            network.on_hosts_of(ranks, model.link)
        };
        let cores = model.cores.filter(|&cores| !apart && cores < ranks);
        let exact = cores.into_iter().fold(network, NetworkModel::with_cores);
        Self { exact, parted: None, hosts: None, model: *model, costs: costs(model) }
    }

    pub(super) fn ranks(&self) -> usize {
        self.exact.world_size()
    }

    pub(super) fn hosts(&self) -> usize {
        self.exact.hosts()
    }

    /// Returns the number of racks.
    pub(super) const fn racks(&self) -> usize {
        self.exact.racks()
    }

    /// Returns the hosts of the ranks, if there are several with several ranks.
    pub(super) const fn shared_hosts(&self) -> Option<&Hosts> {
        self.hosts.as_ref()
    }

    /// Returns the costs for the choice of algorithms.
    pub(super) const fn costs(&self) -> &CostModel {
        &self.costs
    }

    /// Returns the ranks and the cores that they share. On several hosts the choice ignores the number of
    /// cores.
    pub(super) fn placement(&self) -> Placement {
        let shared = self.exact.cores().filter(|_| self.hosts() == 1);
        shared.map_or(Placement::dedicated(self.ranks()), |cores| Placement { ranks: self.ranks(), cores })
    }

    /// Returns a network on which `steps` steps can be simulated, with a working set of `memory` bytes on
    /// each rank.
    pub(super) fn network(&self, steps: u64, memory: usize) -> NetworkModel {
        let network = match &self.parted {
            Some(parted) if steps > QUEUE_STEPS_MAX / 10 => parted,
            _ => &self.exact,
        };
        network.clone().with_work(self.model.work_with(memory, self.ranks_per_host()))
    }

    /// Returns the time in which a rank with a working set of `memory` bytes copies `bytes` bytes of it.
    pub(super) fn copy_time(&self, bytes: u64, memory: usize) -> f64 {
        let byte = self.model.work.reduce + self.model.byte_fetch_time(memory, self.ranks_per_host());
        bytes as f64 * byte
    }

    /// Returns the time in which a rank loads a working set of `bytes` bytes into a cache with other
    /// contents, and writes it back.
    pub(super) fn fetch_time(&self, bytes: usize) -> f64 {
        2.0 * bytes as f64 * self.model.byte_fetch_time(bytes, self.ranks_per_host())
    }

    /// Returns the time of a collective on every rank in addition to its messages.
    pub(super) const fn call_cost(&self) -> f64 {
        self.model.call
    }

    fn ranks_per_host(&self) -> usize {
        self.ranks().div_ceil(self.hosts())
    }
}

/// Returns the costs for the choice of algorithms on this network.
fn costs(model: &Model) -> CostModel {
    let Model { link, work, .. } = model;
    CostModel {
        round_ps: picoseconds(work.send + link.latency.max(work.sent) + work.receive),
        byte_ps: picoseconds(link.byte.max(2.0 * work.byte)),
        reduced_byte_ps: picoseconds(work.reduce),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are neither negative nor long, and the conversion saturates"
)]
fn picoseconds(seconds: f64) -> u64 {
    (seconds * 1e12).round() as u64
}

/// Parses a straggler: `5:+3ms` is rank 5, which starts 3 ms late; the work of `5:x2` takes twice as long.
fn straggler(text: &str) -> Result<Straggler, String> {
    let wrong = || "a straggler is a rank with a delay or a factor, as in 5:+3ms or 5:x2".to_owned();
    let (rank, how) = text.split_once(':').ok_or_else(wrong)?;
    let rank = rank.parse().map_err(|_| wrong())?;
    if let Some(late) = how.strip_prefix('+') {
        return Ok(Straggler { rank, late: quantity::time(late)?, slowdown: 1.0 });
    }
    let slowdown: f64 = how.strip_prefix('x').ok_or_else(wrong)?.parse().map_err(|_| wrong())?;
    if !(slowdown.is_finite() && slowdown > 0.0 && slowdown <= PACE_MAX) {
        return Err(format!("the factor is more than 0 and at most {PACE_MAX}"));
    }
    Ok(Straggler { rank, late: 0.0, slowdown })
}

const PACE_MAX: f64 = 1e6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stragglers_are_late_or_slow() {
        assert_eq!(straggler("5:+3ms"), Ok(Straggler { rank: 5, late: 3e-3, slowdown: 1.0 }));
        assert_eq!(straggler("0:x1.5"), Ok(Straggler { rank: 0, late: 0.0, slowdown: 1.5 }));
        for wrong in ["5", "5:3ms", "a:x2", "5:x0", "5:x-1", "5:xnan", "5:+3"] {
            assert!(straggler(wrong).is_err(), "{wrong}");
        }
    }
}
