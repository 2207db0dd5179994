//! Events in the order of time, for what ranks wait for because others use it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use dist_transport::Rank;

use super::clock::Message;
use super::mail::Mail;
use super::wavefront::{Wanted, place_after};
use super::{Engine, Link, Network, Plan, Prediction};
use crate::{Chunks, Error, Result, SendHalf, Step};

/// Steps of all ranks together that are followed at most: a ring over 10⁴ ranks has 2·10⁸.
pub const QUEUE_STEPS_MAX: u64 = 250_000_000;

/// Predicts by taking one event after the other, in the order of time. Links and cores that are shared serve
/// whoever comes first, a whole message or a whole piece of work at a time.
///
/// # Errors
/// If the schedules do not fit together, or have more than [`QUEUE_STEPS_MAX`] steps.
pub fn queues<F, I>(plan: &Plan<'_, F>, network: &Network) -> Result<Prediction>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    let mut queues = Queues::new(plan, network)?;
    while let Some(Reverse(Event { time, what, .. })) = queues.events.pop() {
        match what {
            What::Ready(rank) => queues.step(rank as usize, time.0)?,
            What::Read(rank, message) => queues.read(rank as usize, time.0, message),
            What::Leaves(flight) => queues.leave(flight, time.0),
            What::Arrives(flight) => queues.arrive(flight, time.0)?,
        }
    }
    queues.result()
}

/// A point in time that can be compared.
#[derive(Clone, Copy, Debug)]
struct Time(f64);

impl PartialEq for Time {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// What happens when; of what happens at once, what was noted first.
#[derive(Clone, Copy, Debug)]
struct Event {
    time: Time,
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.time, self.number).cmp(&(other.time, other.number))
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// A rank takes up its next step.
    Ready(u32),
    /// A rank begins to read a message.
    Read(u32, Message),
    /// A message comes to the link out of its host.
    Leaves(Flight),
    /// A message comes to the link into its receiver's host.
    Arrives(Flight),
}

/// A message between hosts.
#[derive(Clone, Copy, Debug)]
struct Flight {
    from: u32,
    to: u32,
    bytes: u64,
    link: Link,
    /// How long each byte takes its sender.
    pace: f64,
    /// When its last byte arrives at the earliest.
    last: f64,
}

struct Lane<I> {
    steps: I,
    taken: u32,
    pace: f64,
    up: f64,
    down: f64,
    sent: u64,
    exchange: Option<Exchange>,
    /// When it has done all that was asked of it so far.
    now: f64,
}

/// What a rank is in.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    /// What it receives next, if there is more.
    wanted: Option<Wanted>,
    /// Whether that is here and being read.
    reading: bool,
    /// When its work so far is done.
    free: f64,
    /// Messages of which it is not known when they have left.
    leaving: usize,
    /// When the last byte, of what is known to leave and to have come, has left or been read.
    over: f64,
}

impl Exchange {
    fn leaves(&mut self, time: f64) {
        self.leaving -= 1;
        self.over = self.over.max(time);
    }
}

/// What ranks of one host share.
#[derive(Clone, Debug)]
struct Host {
    up: f64,
    down: f64,
    /// When each core is free; none if there are as many as ranks.
    cores: Vec<f64>,
    left: u64,
}

struct Queues<'a, F, I> {
    plan: &'a Plan<'a, F>,
    network: &'a Network,
    lanes: Vec<Lane<I>>,
    hosts: Vec<Host>,
    mail: Mail,
    events: BinaryHeap<Reverse<Event>>,
    numbers: u64,
    steps: u64,
}

impl<'a, F, I> Queues<'a, F, I>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    fn new(plan: &'a Plan<'a, F>, network: &'a Network) -> Result<Self> {
        let world_size = network.world_size();
        let ranks = u32::try_from(world_size).map_err(|_| too_many())?;
        let lane = |rank: Rank| {
            let (late, pace) = network.straggling(rank.index());
            let steps = (plan.steps)(rank);
            Lane { steps, taken: 0, pace, up: late, down: 0.0, sent: 0, exchange: None, now: late }
        };
        let cores = vec![0.0; network.cores().unwrap_or(0)];
        let mut queues = Self {
            plan,
            network,
            lanes: Rank::all(world_size).map(lane).collect(),
            hosts: vec![Host { up: 0.0, down: 0.0, cores, left: 0 }; network.hosts()],
            mail: Mail::new(world_size),
            events: BinaryHeap::new(),
            numbers: 0,
            steps: 0,
        };
        for rank in 0..ranks {
            queues.note(queues.lanes[rank as usize].now, What::Ready(rank));
        }
        Ok(queues)
    }

    fn note(&mut self, time: f64, what: What) {
        self.numbers += 1;
        self.events.push(Reverse(Event { time: Time(time), number: self.numbers, what }));
    }

    /// Does so much work on a core of the rank's host: when it begins and when it ends.
    fn serve(&mut self, rank: usize, time: f64, work: f64) -> (f64, f64) {
        let work = work * self.lanes[rank].pace;
        let cores = &mut self.hosts[self.network.host_of(rank)].cores;
        // The one that has been idle for the shortest time, so that work that follows on finds its own core again.
        let idle = (0..cores.len()).filter(|&core| cores[core] <= time);
        let idle = idle.max_by(|&a, &b| cores[a].total_cmp(&cores[b]));
        let next = || (0..cores.len()).min_by(|&a, &b| cores[a].total_cmp(&cores[b]));
        let Some(core) = idle.or_else(next) else { return (time, time + work) };
        let core = &mut cores[core];
        let begins = time.max(*core);
        *core = begins + work;
        (begins, *core)
    }

    /// Takes up the next step of a rank.
    fn step(&mut self, rank: usize, time: f64) -> Result<()> {
        let lane = &mut self.lanes[rank];
        lane.now = time;
        let Some(step) = lane.steps.next() else { return Ok(()) };
        lane.taken += 1;
        self.steps += 1;
        if self.steps > QUEUE_STEPS_MAX {
            return Err(too_many());
        }
        match step {
            Step::Combine { chunk, .. } => {
                let work = self.network.work().reduce * self.plan.bytes(Chunks::one(chunk)) as f64;
                let (_, ends) = self.serve(rank, time, work);
                self.note(ends, What::Ready(number(rank)));
                Ok(())
            }
            Step::Copy { chunk, .. } => {
                let work = self.network.work().byte * self.plan.bytes(Chunks::one(chunk)) as f64;
                let (_, ends) = self.serve(rank, time, work);
                self.note(ends, What::Ready(number(rank)));
                Ok(())
            }
            Step::Exchange { send, receive } => {
                let wanted = receive.map(|receive| Wanted::one(&receive)).transpose()?;
                self.exchange(rank, time, send.into_iter(), wanted)
            }
            Step::Window { first, last } => {
                self.steps += last.saturating_sub(first) as u64;
                let world_size = self.lanes.len();
                let to = |distance| place_after(number(rank), distance, world_size);
                let sends =
                    (first..=last).map(|distance| SendHalf::input(to(distance), Chunks::one(to(distance))));
                self.exchange(rank, time, sends, Wanted::window(number(rank), first, last, world_size))
            }
        }
    }

    fn exchange(
        &mut self,
        rank: usize,
        time: f64,
        sends: impl Iterator<Item = SendHalf>,
        wanted: Option<Wanted>,
    ) -> Result<()> {
        if let Some(wanted) = wanted {
            self.check_peer(rank, wanted.from as usize)?;
        }
        let exchange = Exchange { wanted, reading: false, free: time, leaving: 0, over: time };
        self.lanes[rank].exchange = Some(exchange);
        for send in sends {
            self.check_peer(rank, send.to)?;
            self.send(rank, &send)?;
        }
        self.look(rank);
        self.go_on(rank);
        Ok(())
    }

    fn send(&mut self, rank: usize, send: &SendHalf) -> Result<()> {
        let time = self.lanes[rank].exchange.map_or(0.0, |exchange| exchange.free);
        let (work, link) = (self.network.work(), self.network.link(rank, send.to));
        let bytes = self.plan.bytes_sent(send);
        let (begins, free) = self.serve(rank, time, work.message + work.byte * bytes as f64);
        let begins = begins + work.message * self.lanes[rank].pace;
        let lane = &mut self.lanes[rank];
        let pace = link.byte.max(work.byte * lane.pace);
        lane.sent += bytes;
        if let Some(exchange) = &mut lane.exchange {
            exchange.free = free;
            exchange.leaving += 1;
        }
        let ours = self.network.host_of(rank);
        if ours != self.network.host_of(send.to) {
            self.hosts[ours].left += bytes;
        }
        let (from, to) = (number(rank), number(send.to));
        if self.network.shares_link(rank, send.to) {
            self.note(begins, What::Leaves(Flight { from, to, bytes, link, pace, last: 0.0 }));
            return Ok(());
        }
        let lane = &mut self.lanes[rank];
        let begins = begins.max(lane.up);
        let left = begins + bytes as f64 * pace;
        lane.up = left;
        if let Some(exchange) = &mut lane.exchange {
            exchange.leaves(left);
        }
        let message = Message { first: begins + link.latency, last: left + link.latency, bytes };
        self.deliver(from, to, message)
    }

    /// A message gets the link out of its host.
    fn leave(&mut self, flight: Flight, time: f64) {
        let (rank, size) = (flight.from as usize, flight.bytes as f64);
        let host = &mut self.hosts[self.network.host_of(rank)];
        let begins = time.max(host.up);
        host.up = begins + size * flight.link.byte;
        let left = begins + size * flight.pace;
        if let Some(exchange) = &mut self.lanes[rank].exchange {
            exchange.leaves(left);
        }
        let last = left + flight.link.latency;
        self.note(begins + flight.link.latency, What::Arrives(Flight { last, ..flight }));
        self.go_on(rank);
    }

    /// A message gets the link into its receiver's host.
    fn arrive(&mut self, flight: Flight, time: f64) -> Result<()> {
        let host = &mut self.hosts[self.network.host_of(flight.to as usize)];
        let first = time.max(host.down);
        host.down = first + flight.bytes as f64 * flight.link.byte;
        let message = Message { first, last: flight.last.max(host.down), bytes: flight.bytes };
        self.deliver(flight.from, flight.to, message)
    }

    fn deliver(&mut self, from: u32, to: u32, message: Message) -> Result<()> {
        if !self.mail.post(from, to as usize, message) {
            return Err(too_many());
        }
        self.look(to as usize);
        Ok(())
    }

    /// If what a rank waits for has come, it reads it as soon as it can.
    fn look(&mut self, rank: usize) {
        let Some(exchange) = &mut self.lanes[rank].exchange else { return };
        let Some(Wanted { from, .. }) = exchange.wanted.filter(|_| !exchange.reading) else { return };
        let Some(mut message) = self.mail.take(from, rank) else { return };
        exchange.reading = true;
        let time = message.first.max(exchange.free);
        let (network, lane) = (self.network, &mut self.lanes[rank]);
        if !network.shares_link(from as usize, rank) {
            let link = network.link(from as usize, rank);
            message.last = message.last.max(message.first.max(lane.down) + message.bytes as f64 * link.byte);
            lane.down = message.last;
        }
        self.note(time, What::Read(number(rank), message));
    }

    fn read(&mut self, rank: usize, time: f64, message: Message) {
        let Some(Exchange { wanted: Some(mut wanted), .. }) = self.lanes[rank].exchange else { return };
        let work = self.network.work();
        let each = work.byte + if wanted.reduces { work.reduce } else { 0.0 };
        let (_, ends) = self.serve(rank, time, work.message + each * message.bytes as f64);
        let world_size = self.lanes.len();
        let lane = &mut self.lanes[rank];
        let read = ends.max(message.last + work.message * lane.pace);
        if let Some(exchange) = &mut lane.exchange {
            exchange.over = exchange.over.max(read);
            exchange.free = ends;
            exchange.reading = false;
            exchange.wanted = wanted.next(number(rank), world_size).then_some(wanted);
        }
        self.look(rank);
        self.go_on(rank);
    }

    /// Goes on with the next step once everything has left and come.
    fn go_on(&mut self, rank: usize) {
        let done = |exchange: &Exchange| exchange.leaving == 0 && exchange.wanted.is_none();
        let Some(exchange) = self.lanes[rank].exchange.filter(done) else { return };
        self.lanes[rank].exchange = None;
        self.note(exchange.over, What::Ready(number(rank)));
    }

    fn check_peer(&self, rank: usize, peer: usize) -> Result<()> {
        if peer < self.lanes.len() && peer != rank {
            return Ok(());
        }
        Err(Error::NoPeer { rank, step: self.lanes[rank].taken as usize - 1, peer })
    }

    fn result(self) -> Result<Prediction> {
        let step = |lane: &Lane<I>| lane.taken as usize - 1;
        let waits = |lane: &Lane<I>| Some(lane.exchange?.wanted?.from as usize);
        if let Some((rank, peer)) =
            self.lanes.iter().enumerate().find_map(|(rank, lane)| Some((rank, waits(lane)?)))
        {
            return Err(Error::Deadlock {
                rank,
                step: step(&self.lanes[rank]),
                peer,
                peer_step: waits(&self.lanes[peer]).map(|_| step(&self.lanes[peer])),
                blocked: self.lanes.iter().filter(|lane| waits(lane).is_some()).count(),
            });
        }
        let sent = || self.lanes.iter().map(|lane| lane.sent);
        Ok(Prediction {
            seconds: self.lanes.iter().map(|lane| lane.now).fold(0.0, f64::max),
            engine: Engine::Queues,
            sent_max: sent().max().unwrap_or(0),
            sent_total: sent().sum(),
            host_sent_max: self.hosts.iter().map(|host| host.left).max().unwrap_or(0),
        })
    }
}

const fn too_many() -> Error {
    Error::TooManySteps { limit: QUEUE_STEPS_MAX }
}

/// A rank of a world that was found to be small enough.
fn number(rank: usize) -> u32 {
    u32::try_from(rank).expect("the world has been seen to be small enough")
}
