//! The predictor with one clock per rank.

use dist_algos::{Chunks, Error as ScheduleError, OnArrival, ReceiveHalf, SendHalf, Step};
use dist_transport::Rank;

use crate::clock::{PendingStep, RankClock, TimedMessage};
use crate::message_queues::MessageQueues;
use crate::{Error, Method, NetworkModel, Prediction, Result, STEPS_MAX, Workload};

/// Predicts by following every rank, each without interruption from one message that it has to wait for to the
/// next.
///
/// # Errors
/// If the schedules do not fit together, or have more than [`STEPS_MAX`] steps.
pub fn wavefront<F, I>(plan: &Workload<'_, F>, network: &NetworkModel) -> Result<Prediction>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    let mut wavefront = Wavefront::new(plan, network)?;
    let ranks = u32::try_from(network.world_size()).map_err(|_| too_many())?;
    let (mut ready, mut woken): (Vec<u32>, Vec<u32>) = ((0..ranks).collect(), Vec::new());
    while !ready.is_empty() {
        for rank in ready.drain(..) {
            wavefront.advance(rank, &mut woken)?;
        }
        std::mem::swap(&mut ready, &mut woken);
        // Sorts ranks into the order of memory, which halves the time for a million ranks.
        ready.sort_unstable();
        ready.dedup();
    }
    wavefront.result()
}

/// Returns the error for schedules with too many steps.
pub(crate) const fn too_many() -> Error {
    Error::TooManySteps { limit: STEPS_MAX }
}

/// The state of a rank.
struct WavefrontRank<I> {
    steps: I,
    /// The number of steps that it has begun.
    taken: u32,
    clock: RankClock,
    waits: Option<WaitingStep>,
}

/// The step in which a rank waits, and the messages that it waits for.
#[derive(Clone, Copy)]
struct WaitingStep {
    pending: PendingStep,
    expected: ExpectedMessages,
}

struct Wavefront<'a, F, I> {
    plan: &'a Workload<'a, F>,
    network: &'a NetworkModel,
    ranks: Vec<WavefrontRank<I>>,
    message_queues: MessageQueues<TimedMessage>,
    /// The rank that each rank waits for. Every sender looks this up, so it is stored as compactly as possible.
    awaited: Vec<u32>,
    /// Bytes that have left each host for others, if there are hosts with several ranks.
    left_host: Vec<u64>,
    steps: u64,
}

impl<'a, F, I> Wavefront<'a, F, I>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    fn new(plan: &'a Workload<'a, F>, network: &'a NetworkModel) -> Result<Self> {
        let world_size = network.world_size();
        if u32::try_from(world_size).is_err() {
            return Err(too_many());
        }
        let state = |rank: Rank| WavefrontRank {
            steps: (plan.steps)(rank),
            taken: 0,
            clock: RankClock::new(network.straggling(rank.index())),
            waits: None,
        };
        Ok(Self {
            plan,
            network,
            ranks: Rank::all(world_size).map(state).collect(),
            message_queues: MessageQueues::new(world_size),
            awaited: vec![NOBODY; world_size],
            left_host: vec![0; if network.hosts() < world_size { network.hosts() } else { 0 }],
            steps: 0,
        })
    }

    /// Advances a rank as far as possible. Adds the ranks that waited for its messages to `woken`.
    fn advance(&mut self, rank: u32, woken: &mut Vec<u32>) -> Result<()> {
        let index = rank as usize;
        loop {
            let state = &mut self.ranks[index];
            if let Some(WaitingStep { mut pending, mut expected }) = state.waits {
                let from = expected.from;
                let Some(message) = self.message_queues.take(from, index) else { return Ok(()) };
                let link = self.network.link(from as usize, index);
                state.clock.receive(&mut pending, message, expected.reduces, link, self.network.work());
                let more = expected.next(rank, self.network.world_size());
                if !more {
                    state.clock.now = pending.over();
                }
                state.waits = more.then_some(WaitingStep { pending, expected });
                self.awaited[index] = if more { expected.from } else { NOBODY };
                continue;
            }
            let Some(step) = state.steps.next() else { return Ok(()) };
            state.taken += 1;
            self.take_up(rank, step, woken)?;
        }
    }

    fn take_up(&mut self, rank: u32, step: Step, woken: &mut Vec<u32>) -> Result<()> {
        let index = rank as usize;
        let work = self.network.work();
        self.steps += 1;
        let clock = &mut self.ranks[index].clock;
        let mut pending = clock.begin();
        let expected = match step {
            Step::Combine { chunk, .. } | Step::Copy { chunk, .. } => {
                clock.combine(self.plan.bytes(Chunks::one(chunk)), work);
                return Ok(());
            }
            Step::Exchange { send, receive } => {
                if let Some(send) = send {
                    self.send(rank, &mut pending, send, woken)?;
                }
                receive.map(|receive| ExpectedMessages::one(&receive)).transpose()?
            }
            Step::Window { first, last } => {
                self.steps += last.saturating_sub(first) as u64;
                for distance in first..=last {
                    let to = place_after(rank, distance, self.ranks.len());
                    self.send(rank, &mut pending, SendHalf::input(to, Chunks::one(to)), woken)?;
                }
                ExpectedMessages::window(rank, first, last, self.ranks.len())
            }
        };
        if self.steps > STEPS_MAX {
            return Err(too_many());
        }
        match expected {
            None => self.ranks[index].clock.now = pending.over(),
            Some(expected) => {
                self.check_peer(index, expected.from as usize)?;
                self.ranks[index].waits = Some(WaitingStep { pending, expected });
                self.awaited[index] = expected.from;
            }
        }
        Ok(())
    }

    fn send(
        &mut self,
        rank: u32,
        pending: &mut PendingStep,
        send: SendHalf,
        woken: &mut Vec<u32>,
    ) -> Result<()> {
        let index = rank as usize;
        self.check_peer(index, send.to)?;
        let (bytes, link) = (self.plan.bytes_sent(&send), self.network.link(index, send.to));
        let message = self.ranks[index].clock.send(pending, bytes, link, self.network.work());
        self.count(index, send.to, bytes);
        if !self.message_queues.push(rank, send.to, message) {
            return Err(too_many());
        }
        if self.awaited[send.to] == rank {
            woken.push(number(send.to));
        }
        Ok(())
    }

    fn count(&mut self, from: usize, to: usize, bytes: u64) {
        if self.left_host.is_empty() {
            return;
        }
        let (ours, theirs) = (self.network.host_of(from), self.network.host_of(to));
        if ours != theirs {
            self.left_host[ours] += bytes;
        }
    }

    fn check_peer(&self, rank: usize, peer: usize) -> Result<()> {
        if peer < self.ranks.len() && peer != rank {
            return Ok(());
        }
        Err(ScheduleError::NoPeer { rank, step: self.ranks[rank].taken as usize - 1, peer }.into())
    }

    fn result(self) -> Result<Prediction> {
        let waits = |state: &WavefrontRank<I>| state.waits.map(|waits| waits.expected.from as usize);
        let step = |state: &WavefrontRank<I>| state.taken as usize - 1;
        if let Some(rank) = self.ranks.iter().position(|state| state.waits.is_some()) {
            let peer = waits(&self.ranks[rank]).expect("this rank waits");
            return Err(ScheduleError::Deadlock {
                rank,
                step: step(&self.ranks[rank]),
                peer,
                peer_step: waits(&self.ranks[peer]).map(|_| step(&self.ranks[peer])),
                blocked: self.ranks.iter().filter(|state| state.waits.is_some()).count(),
            }
            .into());
        }
        let sent = || self.ranks.iter().map(|state| state.clock.sent);
        Ok(Prediction {
            seconds: self.ranks.iter().map(|state| state.clock.now).fold(0.0, f64::max),
            engine: Method::Wavefront,
            sent_max: sent().max().unwrap_or(0),
            sent_total: sent().sum(),
            host_sent_max: self.left_host.iter().copied().max().or(sent().max()).unwrap_or(0),
        })
    }
}

/// No rank.
const NOBODY: u32 = u32::MAX;

/// Converts a rank of a world whose size was checked.
fn number(rank: usize) -> u32 {
    u32::try_from(rank).expect("the world has been seen to be small enough")
}

/// The messages that a step still has to receive: one, or several from ranks at increasing distances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpectedMessages {
    pub(crate) from: u32,
    pub(crate) reduces: bool,
    distance: u32,
    last: u32,
}

impl ExpectedMessages {
    /// Returns the message of an exchange; an error if no world has such a rank.
    pub(crate) fn one(receive: &ReceiveHalf) -> Result<Self> {
        let from = u32::try_from(receive.from).map_err(|_| too_many())?;
        Ok(Self { from, reduces: receive.then == OnArrival::Reduce, distance: 0, last: 0 })
    }

    /// Returns the messages of a window.
    pub(crate) fn window(rank: u32, first: usize, last: usize, world_size: usize) -> Option<Self> {
        let (distance, last) = (u32::try_from(first).ok()?, u32::try_from(last).ok()?);
        let from = place_before(rank, distance, world_size);
        (distance <= last).then_some(Self { from, reduces: false, distance, last })
    }

    /// Moves on to the next message. Returns `false` if there is none.
    pub(crate) fn next(&mut self, rank: u32, world_size: usize) -> bool {
        let more = self.distance < self.last;
        if more {
            self.distance += 1;
            self.from = place_before(rank, self.distance, world_size);
        }
        more
    }
}

/// Returns the rank at this distance further in the ring.
pub(crate) const fn place_after(rank: u32, distance: usize, world_size: usize) -> usize {
    (rank as usize + distance % world_size) % world_size
}

fn place_before(rank: u32, distance: u32, world_size: usize) -> u32 {
    number((rank as usize + world_size - distance as usize % world_size) % world_size)
}
