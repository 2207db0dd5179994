//! Two-level schedules: among the ranks of each host, across hosts, and among the ranks of each host again.
//!
//! Fewer messages and bytes go from host to host than in a schedule that does not know who shares one. They are made
//! of this crate's other schedules, whose ranks and chunks are renumbered. All of them give `None` to a rank of
//! another world than that of the hosts; roots outside the world are taken modulo its size.

mod level;
mod plan;

use dist_transport::Rank;

use crate::{
    AllGather, Barrier, Broadcast, Cost, CostModel, Hosts, Order, Reduce, ReduceScatter, Schedule, binomial,
};
use level::{Level, Ranks, Spread};

pub use level::Steps;
pub use plan::{Form, Plan};

/// What a two-level schedule costs at most, in its own chunks. Where hosts have different numbers of ranks, the
/// smaller ones wait for the larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LevelCosts {
    /// Inside of hosts.
    pub inside: Cost,
    /// From host to host.
    pub across: Cost,
}

impl LevelCosts {
    /// How long an operation takes on a buffer of so many bytes and chunks, if messages inside of hosts and across
    /// take different times.
    pub fn picoseconds(
        &self,
        inside: &CostModel,
        across: &CostModel,
        buffer_bytes: usize,
        chunks: usize,
    ) -> u128 {
        inside.picoseconds(self.inside, buffer_bytes, chunks).saturating_add(across.picoseconds(
            self.across,
            buffer_bytes,
            chunks,
        ))
    }
}

/// The sum of all buffers ends on `root`: first on one rank of each host, the root on its own, then across in
/// `across.chunks(hosts.count())` chunks. The order is that of [`Hosts::order`].
pub fn reduce(rank: Rank, hosts: &Hosts, across: Reduce, root: usize) -> Option<Steps<'_>> {
    let seat = Seat::of(rank, hosts, root)?;
    let [first, second] = across.parts(seat.across, hosts.of(seat.root));
    let inside = binomial::reduce(seat.inside, seat.lead);
    let whole = seat.whole(across.chunks(hosts.count()));
    Some(Steps::new([
        seat.among_members(inside, whole),
        seat.among_leaders(first),
        seat.among_leaders(second),
    ]))
}

/// What [`reduce`] costs, for the root that makes most of it.
pub fn reduce_cost(hosts: &Hosts, across: Reduce) -> LevelCosts {
    let (count, inside) = (hosts.count(), Reduce::Binomial.cost(hosts.largest()));
    LevelCosts { inside: inside.magnified(across.chunks(count)), across: across.cost(count) }
}

/// The buffer of `root` ends on every rank: first on one rank of each host, in `across.chunks(hosts.count())` chunks,
/// then on the others.
pub fn broadcast(rank: Rank, hosts: &Hosts, across: Broadcast, root: usize) -> Option<Steps<'_>> {
    let seat = Seat::of(rank, hosts, root)?;
    let [first, second] = across.parts(seat.across, hosts.of(seat.root));
    let inside = binomial::broadcast(seat.inside, seat.lead);
    let whole = seat.whole(across.chunks(hosts.count()));
    Some(Steps::new([
        seat.among_leaders(first),
        seat.among_leaders(second),
        seat.among_members(inside, whole),
    ]))
}

/// What [`broadcast`] costs, for the root that makes most of it.
pub fn broadcast_cost(hosts: &Hosts, across: Broadcast) -> LevelCosts {
    let (count, inside) = (hosts.count(), Broadcast::Binomial.cost(hosts.largest()));
    LevelCosts { inside: inside.magnified(across.chunks(count)), across: across.cost(count) }
}

/// No rank leaves before every rank has come: each tells its leader, leaders tell each other, and then their hosts.
pub fn barrier(rank: Rank, hosts: &Hosts, across: Barrier) -> Option<Steps<'_>> {
    let seat = Seat::of(rank, hosts, 0)?;
    let (up, down) = (binomial::reduce(seat.inside, 0), binomial::broadcast(seat.inside, 0));
    Some(Steps::new([
        seat.among_members(up, seat.whole(0)),
        seat.among_leaders(across.schedule(seat.across)),
        seat.among_members(down, seat.whole(0)),
    ]))
}

/// What [`barrier`] costs.
pub fn barrier_cost(hosts: &Hosts, across: Barrier) -> LevelCosts {
    let inside = crate::AllReduce::Binomial.cost(hosts.largest()).magnified(0);
    LevelCosts { inside, across: across.cost(hosts.count()) }
}

/// Every rank gets every chunk, where rank `r` has chunk `r` to begin with. First each rank gathers the chunks of
/// those at its place on other hosts, so that every chunk goes to every other host once. `None` unless hosts are
/// [contiguous](Hosts::contiguous).
pub fn all_gather(rank: Rank, hosts: &Hosts) -> Option<Steps<'_>> {
    let (seat, size) = (Seat::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = gathering(hosts.count()).schedule(seat.across)?;
    let inside = gathering(size).schedule(seat.inside)?;
    let repeated = Spread::Repeated { period: size, times: hosts.count() };
    Some(Steps::new([
        seat.among_places(across, Spread::Apart { first: hosts.place(rank.index()), step: size }),
        seat.among_members(inside, repeated),
        seat.nothing(),
    ]))
}

/// What [`all_gather`] costs in contiguous hosts, in chunks of which each rank has one.
pub fn all_gather_cost(hosts: &Hosts) -> LevelCosts {
    let (count, size) = (hosts.count(), hosts.largest());
    LevelCosts { inside: gathering(size).cost(size).magnified(count), across: gathering(count).cost(count) }
}

/// Chunk `r` of the sum ends on rank `r`, of as many chunks as there are ranks: [`all_gather`] backwards, so that
/// every host sends one sum of each chunk to each other host. `None` unless hosts are [contiguous](Hosts::contiguous).
pub fn reduce_scatter(rank: Rank, hosts: &Hosts) -> Option<Steps<'_>> {
    let (seat, size) = (Seat::of(rank, hosts, 0)?, hosts.contiguous()?);
    let across = scattering(hosts.count(), ReduceScatter::Pairwise).schedule(seat.across)?;
    let inside = scattering(size, ReduceScatter::Ring).schedule(seat.inside)?;
    let repeated = Spread::Repeated { period: size, times: hosts.count() };
    Some(Steps::new([
        seat.among_members(inside, repeated),
        seat.among_places(across, Spread::Apart { first: hosts.place(rank.index()), step: size }),
        seat.nothing(),
    ]))
}

/// In which order [`reduce_scatter`] reduces, or a stricter one.
pub fn reduce_scatter_order(hosts: &Hosts) -> Order {
    let size = hosts.largest();
    hosts.order().min(scattering(size, ReduceScatter::Ring).order(size))
}

/// What [`reduce_scatter`] costs in contiguous hosts, in chunks of which each rank has one.
pub fn reduce_scatter_cost(hosts: &Hosts) -> LevelCosts {
    let (count, size) = (hosts.count(), hosts.largest());
    LevelCosts {
        inside: scattering(size, ReduceScatter::Ring).cost(size).magnified(count),
        across: scattering(count, ReduceScatter::Pairwise).cost(count),
    }
}

/// How so many ranks gather, in messages whose chunks can lie apart.
const fn gathering(ranks: usize) -> AllGather {
    if ranks.is_power_of_two() { AllGather::RecursiveDoubling } else { AllGather::Ring }
}

/// How so many ranks reduce and scatter, in messages whose chunks can lie apart.
const fn scattering(ranks: usize, otherwise: ReduceScatter) -> ReduceScatter {
    if ranks.is_power_of_two() { ReduceScatter::HalvingDoubling } else { otherwise }
}

/// Where a rank is.
struct Seat<'a> {
    rank: Rank,
    hosts: &'a Hosts,
    /// The rank among those of its host.
    inside: Rank,
    /// Its host among hosts.
    across: Rank,
    root: usize,
    /// The place of the rank that leads its host.
    lead: usize,
}

impl<'a> Seat<'a> {
    fn of(rank: Rank, hosts: &'a Hosts, root: usize) -> Option<Self> {
        if rank.world_size() != hosts.world_size() {
            return None;
        }
        let (host, root) = (hosts.of(rank.index()), root % rank.world_size());
        let inside = Rank::new(hosts.place(rank.index()), hosts.members(host).len())?;
        let across = Rank::new(host, hosts.count())?;
        let lead = if hosts.of(root) == host { hosts.place(root) } else { 0 };
        Some(Self { rank, hosts, inside, across, root, lead })
    }

    /// One chunk that is all of the buffer's.
    const fn whole(&self, chunks: usize) -> Spread {
        Spread::Neighbours { first: 0, each: chunks }
    }

    fn among_members(&self, schedule: Schedule, spread: Spread) -> Level<'a> {
        let ranks = Ranks::Members(self.hosts.members(self.across.index()));
        Level { schedule, ranks, spread }
    }

    /// Only those who lead their hosts take part.
    fn among_leaders(&self, schedule: Schedule) -> Level<'a> {
        let leads = self.inside.index() == self.lead;
        let schedule = if leads { schedule } else { Schedule::nothing(self.rank) };
        Level { schedule, ranks: Ranks::Leaders { hosts: self.hosts, root: self.root }, spread: Spread::SAME }
    }

    const fn among_places(&self, schedule: Schedule, spread: Spread) -> Level<'a> {
        Level { schedule, ranks: Ranks::Places { hosts: self.hosts, place: self.inside.index() }, spread }
    }

    const fn nothing(&self) -> Level<'a> {
        self.among_places(Schedule::nothing(self.rank), Spread::SAME)
    }
}
