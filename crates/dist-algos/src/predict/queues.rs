//! Events in the order of time, for what ranks wait for because others use it.

use dist_transport::Rank;

use super::clock::Message;
use super::events::Events;
use super::links::{LinkCheck, Links, Milestone, Transmission};
use super::message_queues::MessageQueues;
use super::wavefront::{Wanted, place_after};
use super::{Method, NetworkModel, Prediction, Workload};
use crate::{Chunks, Error, Result, SendHalf, Step};

/// Steps of all ranks together that are followed at most: a ring over 10⁴ ranks has 2·10⁸.
pub const QUEUE_STEPS_MAX: u64 = 250_000_000;

/// Predicts by taking one event after the other, in the order of time. Links that are shared serve all who use them
/// at the same pace; cores serve whoever comes first, a whole piece of work at a time.
///
/// # Errors
/// If the schedules do not fit together, or have more than [`QUEUE_STEPS_MAX`] steps.
pub fn queues<F, I>(plan: &Workload<'_, F>, network: &NetworkModel) -> Result<Prediction>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    let mut queues = Queues::new(plan, network)?;
    queues.run()?;
    queues.result()
}

/// In the same way: when each rank takes up each of its steps, and when it has done the last.
///
/// # Errors
/// As for [`queues`].
pub fn timeline<F, I>(plan: &Workload<'_, F>, network: &NetworkModel) -> Result<Vec<Vec<f64>>>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    let mut queues = Queues::new(plan, network)?;
    queues.times = Some(vec![Vec::new(); network.world_size()]);
    queues.run()?;
    let times = queues.times.take().unwrap_or_default();
    queues.result().map(|_| times)
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// A rank takes up its next step.
    Ready(u32),
    /// A rank begins to read a message.
    Read(u32, Letter),
    /// A message comes to the link out of its host.
    Leaves(u32),
    /// Something happens on a link.
    LinkCheck(LinkCheck),
    /// Links are divided among those who use them now.
    Share,
    /// The first byte of a message comes to its receiver.
    Comes(u32),
    /// Its last byte has come.
    Arrived(u32),
}

/// A message, as its receiver finds it.
#[derive(Clone, Copy, Debug)]
enum Letter {
    /// It is known when it comes.
    Known(Message),
    /// It is on a link that others share.
    Flight(u32),
}

/// A message on a link that others share.
#[derive(Clone, Copy, Debug)]
struct Flight {
    transmission: Transmission,
    latency: f64,
    /// When its first byte came.
    first: f64,
    /// When its last byte came, if it has.
    last: Option<f64>,
    /// When its receiver has done the work of reading it, if only the last byte is missing.
    read: Option<f64>,
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

/// What ranks of one host share, beside its links.
#[derive(Clone, Debug)]
struct Host {
    /// When each core is free; none if there are as many as ranks.
    cores: Vec<f64>,
    left: u64,
}

struct Queues<'a, F, I> {
    plan: &'a Workload<'a, F>,
    network: &'a NetworkModel,
    lanes: Vec<Lane<I>>,
    hosts: Vec<Host>,
    message_queues: MessageQueues<Letter>,
    links: Links,
    /// Whether it is noted that links are to be divided anew.
    sharing: bool,
    flights: Vec<Flight>,
    events: Events<What>,
    /// When each rank took up each of its steps, and ended, if that is to be known.
    times: Option<Vec<Vec<f64>>>,
    steps: u64,
}

impl<'a, F, I> Queues<'a, F, I>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    fn new(plan: &'a Workload<'a, F>, network: &'a NetworkModel) -> Result<Self> {
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
            hosts: vec![Host { cores, left: 0 }; network.hosts()],
            message_queues: MessageQueues::new(world_size),
            links: Links::new(network.window()),
            sharing: false,
            flights: Vec::new(),
            events: Events::new(),
            times: None,
            steps: 0,
        };
        for rank in 0..ranks {
            queues.note(queues.lanes[rank as usize].now, What::Ready(rank));
        }
        Ok(queues)
    }

    fn note(&mut self, time: f64, what: What) {
        self.events.note(time, what);
    }

    /// Lets everything happen.
    fn run(&mut self) -> Result<()> {
        while let Some((time, what)) = self.events.next() {
            match what {
                What::Ready(rank) => self.step(rank as usize, time)?,
                What::Read(rank, letter) => self.read(rank as usize, time, letter),
                What::Leaves(flight) => self.leave(flight, time),
                What::LinkCheck(look) => self.look_at_link(look, time),
                What::Share => self.share(time),
                What::Comes(flight) => self.come(flight, time)?,
                What::Arrived(flight) => self.arrived(flight, time),
            }
        }
        Ok(())
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
        if let Some(times) = &mut self.times {
            times[rank].push(time);
        }
        let Some(step) = lane.steps.next() else { return Ok(()) };
        lane.taken += 1;
        self.steps += 1;
        if self.steps > QUEUE_STEPS_MAX {
            return Err(too_many());
        }
        match step {
            Step::Combine { chunk, .. } | Step::Copy { chunk, .. } => {
                let work = self.network.work().reduce * self.plan.bytes(Chunks::one(chunk)) as f64;
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
        let size = work.weight(bytes);
        let (begins, free) = self.serve(rank, time, work.send + work.sent + work.byte * size);
        let begins = begins + work.send * self.lanes[rank].pace;
        let lane = &mut self.lanes[rank];
        let pace = link.byte.max(work.byte * lane.pace);
        lane.sent += bytes;
        if let Some(exchange) = &mut lane.exchange {
            exchange.free = free;
            exchange.over = exchange.over.max(free);
            exchange.leaving += 1;
        }
        let hosts = [rank, send.to].map(|rank| self.network.host_of(rank));
        if hosts[0] != hosts[1] {
            self.hosts[hosts[0]].left += bytes;
        }
        let ends = (number(rank), number(send.to));
        if self.network.shares_link(rank, send.to) {
            let message = u32::try_from(self.flights.len()).map_err(|_| too_many())?;
            let transmission = Transmission { message, ends, bytes, pace: work.byte * lane.pace };
            let latency = link.latency;
            self.flights.push(Flight { transmission, latency, first: 0.0, last: None, read: None });
            self.note(begins, What::Leaves(message));
            return Ok(());
        }
        let lane = &mut self.lanes[rank];
        let begins = begins.max(lane.up);
        let left = begins + size * pace;
        lane.up = left;
        if let Some(exchange) = &mut lane.exchange {
            exchange.leaves(left);
        }
        let message = Message { first: begins + link.latency, last: left + link.latency, bytes };
        self.deliver(ends, Letter::Known(message))
    }

    /// A message gets to the link out of its host.
    fn leave(&mut self, flight: u32, time: f64) {
        let transmission = self.flights[flight as usize].transmission;
        let host = |rank: u32| self.network.host_of(rank as usize);
        let (from, to) = (host(transmission.ends.0), host(transmission.ends.1));
        let mut looks = Vec::new();
        self.links.give(transmission, || self.network.path(from, to), time, &mut |time, look| {
            looks.push((time, look));
        });
        self.note_looks(looks, time);
    }

    /// All that now begins to leave, or has left, has done so.
    fn share(&mut self, time: f64) {
        self.sharing = false;
        let mut looks = Vec::new();
        self.links.share(time, &mut |time, look| looks.push((time, look)));
        self.note_looks(looks, time);
    }

    /// Notes when to look at connections, and that links are to be divided anew now.
    fn note_looks(&mut self, looks: Vec<(f64, LinkCheck)>, now: f64) {
        for (time, look) in looks {
            self.note(time, What::LinkCheck(look));
        }
        if self.links.have_changed() && !self.sharing {
            self.sharing = true;
            self.note(now, What::Share);
        }
    }

    /// Messages begin to leave, or have left.
    fn look_at_link(&mut self, look: LinkCheck, time: f64) {
        let mut looks = Vec::new();
        for milestone in self.links.look(look, time, &mut |time, look| looks.push((time, look))) {
            let latency = |flights: &[Flight], flight: u32| flights[flight as usize].latency;
            match milestone {
                Milestone::First(flight) => {
                    self.note(time + latency(&self.flights, flight), What::Comes(flight))
                }
                Milestone::Last(flight) => {
                    self.note(time + latency(&self.flights, flight), What::Arrived(flight))
                }
                Milestone::Accepted(flight) => {
                    let rank = self.flights[flight as usize].transmission.ends.0 as usize;
                    if let Some(exchange) = &mut self.lanes[rank].exchange {
                        exchange.leaves(time);
                    }
                    self.go_on(rank);
                }
            }
        }
        self.note_looks(looks, time);
    }

    /// The first byte of a message is here.
    fn come(&mut self, flight: u32, time: f64) -> Result<()> {
        self.flights[flight as usize].first = time;
        self.deliver(self.flights[flight as usize].transmission.ends, Letter::Flight(flight))
    }

    /// The last byte of a message is here.
    fn arrived(&mut self, flight: u32, time: f64) {
        let Flight { transmission, last, read, .. } = &mut self.flights[flight as usize];
        *last = Some(time);
        if let Some(read) = *read {
            let rank = transmission.ends.1 as usize;
            let opens = self.network.work().receive * self.lanes[rank].pace;
            self.has_read(rank, read, read.max(time + opens));
        }
    }

    fn deliver(&mut self, (from, to): (u32, u32), letter: Letter) -> Result<()> {
        if !self.message_queues.post(from, to as usize, letter) {
            return Err(too_many());
        }
        self.look(to as usize);
        Ok(())
    }

    /// If what a rank waits for has come, it reads it as soon as it can.
    fn look(&mut self, rank: usize) {
        let Some(exchange) = &mut self.lanes[rank].exchange else { return };
        let Some(Wanted { from, .. }) = exchange.wanted.filter(|_| !exchange.reading) else { return };
        let Some(mut letter) = self.message_queues.take(from, rank) else { return };
        exchange.reading = true;
        let first = match &mut letter {
            Letter::Flight(flight) => self.flights[*flight as usize].first,
            Letter::Known(message) => {
                let (link, lane) = (self.network.link(from as usize, rank), &mut self.lanes[rank]);
                let size = self.network.work().weight(message.bytes);
                let comes = message.first.max(lane.down) + size * link.byte;
                message.last = message.last.max(comes);
                lane.down = message.last;
                message.first
            }
        };
        let free = self.lanes[rank].exchange.map_or(first, |exchange| exchange.free);
        self.note(first.max(free), What::Read(number(rank), letter));
    }

    fn read(&mut self, rank: usize, time: f64, letter: Letter) {
        let Some(Exchange { wanted: Some(wanted), .. }) = self.lanes[rank].exchange else { return };
        let work = self.network.work();
        let (bytes, last) = match letter {
            Letter::Known(message) => (message.bytes, Some(message.last)),
            Letter::Flight(flight) => {
                let Flight { transmission, last, .. } = self.flights[flight as usize];
                (transmission.bytes, last)
            }
        };
        let reads = work.reading(bytes, wanted.reduces);
        let (_, ends) = self.serve(rank, time, work.receive + reads);
        match (last, letter) {
            (Some(last), _) => {
                let opens = work.receive * self.lanes[rank].pace;
                self.has_read(rank, ends, ends.max(last + opens));
            }
            (None, Letter::Flight(flight)) => self.flights[flight as usize].read = Some(ends),
            (None, Letter::Known(_)) => unreachable!("it is known when this message comes"),
        }
    }

    /// A rank that did the work of reading a message at `free` had all of it at `read`.
    fn has_read(&mut self, rank: usize, free: f64, read: f64) {
        let world_size = self.lanes.len();
        if let Some(exchange) = &mut self.lanes[rank].exchange
            && let Some(mut wanted) = exchange.wanted
        {
            exchange.over = exchange.over.max(read);
            exchange.free = exchange.free.max(free);
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
            engine: Method::Queues,
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
