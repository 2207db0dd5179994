//! The predictor that follows one rank for all.

use dist_algos::{Chunks, OnArrival, Partition, ReceiveHalf, SendHalf, Step};
use dist_transport::Rank;
use smallvec::SmallVec;

use crate::clock::RankClock;
use crate::{LinkModel, MessageCosts, Method, NetworkModel, Prediction, Workload};

/// Predicts by following one rank, if every rank does the same. In each step all ranks send the same number of
/// chunks. The receiver is the same number of places further in the ring, or differs in the same bits. Then all
/// clocks agree, and a rank receives what it sends. Returns `None` if links, ranks or schedules differ.
///
/// Schedules are compared on some ranks only. A number of chunks is assumed to hold its share of the buffer,
/// rounded up to a whole element. If the buffer cannot be divided evenly, the error is at most one element per
/// chunk.
pub fn symmetric<F, I>(plan: &Workload<'_, F>, network: &NetworkModel) -> Option<Prediction>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    let link = network.uniform()?;
    let mut ranks: Vec<_> =
        samples(network.world_size()).map(|rank| SymmetricRank::new(plan, network, rank)).collect();
    loop {
        let mut exchanges = ranks.iter_mut().map(|state| state.next_exchange(link));
        let Some(first) = exchanges.next()? else {
            let all_end = exchanges.all(|other| other.is_none());
            let alike = all_end && ranks.iter().all(|state| state.alone == ranks[0].alone);
            return alike.then(|| result(&ranks, network));
        };
        exchanges.try_fold(first?, |shape, other| shape.and(other??))?;
    }
}

fn result<F, I>(ranks: &[SymmetricRank<'_, F, I>], network: &NetworkModel) -> Prediction {
    let sent_max = ranks.iter().map(|state| state.clock.sent).max().unwrap_or(0);
    let leaves = network.hosts() == network.world_size() && network.hosts() > 1;
    Prediction {
        seconds: ranks.iter().map(|state| state.clock.now).fold(0.0, f64::max),
        engine: Method::Symmetric,
        sent_max,
        sent_total: sent_max.saturating_mul(network.world_size() as u64),
        host_sent_max: if leaves { sent_max } else { 0 },
    }
}

/// Returns ranks at both ends, near powers of two, and in between.
fn samples(world_size: usize) -> impl Iterator<Item = Rank> {
    // All ranks of a small world. In a large world each additional rank costs time.
    let first = if world_size <= 8 { world_size } else { 3 };
    let mut places: Vec<_> = (0..first).chain([world_size / 3, world_size.saturating_sub(1)]).collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().filter_map(move |place| Rank::new(place, world_size))
}

struct SymmetricRank<'a, F, I> {
    plan: &'a Workload<'a, F>,
    network: &'a NetworkModel,
    rank: Rank,
    steps: I,
    clock: RankClock,
    /// The number of steps without a message since its last exchange.
    alone: usize,
}

impl<'a, F, I> SymmetricRank<'a, F, I>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    fn new(plan: &'a Workload<'a, F>, network: &'a NetworkModel, rank: Rank) -> Self {
        Self { plan, network, rank, steps: (plan.steps)(rank), clock: RankClock::new((0.0, 1.0)), alone: 0 }
    }

    /// Executes the next exchange as if the arriving message were the rank's own. Returns `None` at the end of the
    /// schedule, and `Some(None)` if not every rank can do the same.
    fn next_exchange(&mut self, link: LinkModel) -> Option<Option<ExchangeShape>> {
        let work = self.network.work();
        self.alone = 0;
        loop {
            match self.steps.next()? {
                Step::Combine { .. } | Step::Copy { .. } => {
                    self.alone += 1;
                    self.clock.combine(share(&self.plan.buffer, Chunks::one(0)), work);
                }
                Step::Exchange { send: Some(send), receive: Some(receive) } => {
                    let shape = ExchangeShape::of(self.rank, &send, &receive);
                    let shape = shape.map(|shape| ExchangeShape { alone: self.alone, ..shape });
                    let bytes = self.bytes_sent(&send);
                    if share(&self.plan.buffer, receive.chunks) != bytes {
                        return Some(None);
                    }
                    self.exchange(1, bytes, receive.then == OnArrival::Reduce, link, work);
                    return Some(shape);
                }
                Step::Exchange { .. } => return Some(None),
                Step::Window { first, last } => {
                    let count = (last + 1).saturating_sub(first);
                    let send = SendHalf::input(self.rank.plus(first).index(), Chunks::one(0));
                    self.exchange(count, self.bytes_sent(&send), false, link, work);
                    return Some(Some(ExchangeShape::window(first, count, self.alone)));
                }
            }
        }
    }

    /// Sends and receives this many messages.
    fn exchange(&mut self, messages: usize, bytes: u64, reduces: bool, link: LinkModel, work: MessageCosts) {
        let mut pending = self.clock.begin();
        let sent: SmallVec<[_; 1]> =
            (0..messages).map(|_| self.clock.send(&mut pending, bytes, link, work)).collect();
        for message in sent {
            self.clock.receive(&mut pending, message, reduces, link, work);
        }
        self.clock.now = pending.over();
    }

    fn bytes_sent(&self, send: &SendHalf) -> u64 {
        share(self.plan.cut_of(send), send.chunks)
    }
}

/// Returns the share of the buffer that these chunks hold; for consecutive chunks, the most that they can hold.
fn share(partition: &Partition<'_>, chunks: Chunks) -> u64 {
    let elements = (partition.bytes() / partition.element_size()) as u128;
    let share = (elements * chunks.len() as u128).div_ceil(partition.parts() as u128).min(elements);
    u64::try_from(share * partition.element_size() as u128).unwrap_or(u64::MAX)
}

/// An exchange as seen from any rank that does the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExchangeShape {
    /// The distance in the ring to the receiver, which equals the distance from the sender.
    places: Option<usize>,
    /// The bits in which both peers differ from the rank.
    bits: Option<usize>,
    sent: usize,
    received: usize,
    /// `true` if the arriving data is reduced.
    reduces: bool,
    /// The number of steps without a message before.
    alone: usize,
}

impl ExchangeShape {
    fn of(rank: Rank, send: &SendHalf, receive: &ReceiveHalf) -> Option<Self> {
        let (to, from) =
            (Rank::new(send.to, rank.world_size())?, Rank::new(receive.from, rank.world_size())?);
        let places = to.minus(rank.index()).index();
        let places = (rank.minus(from.index()).index() == places).then_some(places);
        let bits = (to == from).then_some(to.index() ^ rank.index());
        let (sent, received) = (send.chunks.len(), receive.chunks.len());
        Some(Self { places, bits, sent, received, reduces: receive.then == OnArrival::Reduce, alone: 0 })
    }

    fn window(first: usize, messages: usize, alone: usize) -> Self {
        Self { places: Some(first), bits: None, sent: messages, received: messages, reduces: false, alone }
    }

    /// Returns the properties that both have.
    fn and(self, other: Self) -> Option<Self> {
        let both = |ours: Option<usize>, theirs: Option<usize>| ours.filter(|_| ours == theirs);
        let (places, bits) = (both(self.places, other.places), both(self.bits, other.bits));
        let shape = Self { places, bits, ..self };
        (shape == Self { places, bits, ..other } && (places.is_some() || bits.is_some())).then_some(shape)
    }
}
