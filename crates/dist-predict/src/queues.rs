//! The predictor with events in the order of time, for resources that ranks share.

use dist_algos::{Chunks, Error as ScheduleError, SendHalf, Step};
use dist_transport::Rank;

use crate::clock::TimedMessage;
use crate::events::EventQueue;
use crate::links::{LinkCheck, Milestone, SharedLinks, Transmission};
use crate::message_queues::MessageQueues;
use crate::wavefront::{ExpectedMessages, place_after};
use crate::{Error, Method, NetworkModel, Prediction, Result, Workload};

/// Maximum number of steps of all ranks together; a ring over 10⁴ ranks has 2·10⁸.
pub const QUEUE_STEPS_MAX: u64 = 250_000_000;

/// Predicts by processing one event after the other, in the order of time. Shared links serve all users at the same
/// rate. Cores serve work in the order in which it comes, one piece at a time.
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

/// Predicts as [`queues`] does, and returns for each rank the start of each of its steps and the end of the last.
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
enum EventKind {
    /// A rank begins its next step.
    Ready(u32),
    /// A rank begins to read a message.
    Read(u32, ReceivedMessage),
    /// A message reaches the link out of its host.
    Leaves(u32),
    /// A connection may have reached a milestone.
    LinkCheck(LinkCheck),
    /// The capacity of links is divided among their users.
    Share,
    /// The first byte of a message reaches its receiver.
    Comes(u32),
    /// The last byte of a message has arrived.
    Arrived(u32),
}

/// A message as its receiver gets it.
#[derive(Clone, Copy, Debug)]
enum ReceivedMessage {
    /// All its times are known when it is sent.
    Known(TimedMessage),
    /// It is on a shared link.
    Transfer(u32),
}

/// A message on a shared link.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    transmission: Transmission,
    latency: f64,
    /// The time at which its first byte arrived.
    first: f64,
    /// The time at which its last byte arrived, if it has.
    last: Option<f64>,
    /// The time at which its receiver has finished the work of reading it, if only the last byte is missing.
    read: Option<f64>,
}

struct QueueRank<I> {
    steps: I,
    taken: u32,
    slowdown: f64,
    up: f64,
    down: f64,
    sent: u64,
    exchange: Option<ActiveExchange>,
    /// The time at which it has done everything so far.
    now: f64,
}

/// The exchange that a rank is in.
#[derive(Clone, Copy, Debug)]
struct ActiveExchange {
    /// The next message that it receives, if there is one.
    expected: Option<ExpectedMessages>,
    /// `true` if that message is here and being read.
    reading: bool,
    /// The time at which its work so far is done.
    free: f64,
    /// The number of messages whose last byte has not left yet.
    leaving: usize,
    /// The latest time at which a known last byte has left or has been read.
    over: f64,
}

impl ActiveExchange {
    fn leaves(&mut self, time: f64) {
        self.leaving -= 1;
        self.over = self.over.max(time);
    }
}

/// The resources that the ranks of one host share, beside its links.
#[derive(Clone, Debug)]
struct Host {
    /// The time from which each core is free; empty if there is a core for each rank.
    cores: Vec<f64>,
    left: u64,
}

struct Queues<'a, F, I> {
    plan: &'a Workload<'a, F>,
    network: &'a NetworkModel,
    ranks: Vec<QueueRank<I>>,
    hosts: Vec<Host>,
    message_queues: MessageQueues<ReceivedMessage>,
    links: SharedLinks,
    /// `true` if a division of the links is already scheduled.
    sharing: bool,
    transfers: Vec<Transfer>,
    events: EventQueue<EventKind>,
    /// The start of each step of each rank and its end, if they are recorded.
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
        let state = |rank: Rank| {
            let (late, slowdown) = network.straggling(rank.index());
            let steps = (plan.steps)(rank);
            QueueRank { steps, taken: 0, slowdown, up: late, down: 0.0, sent: 0, exchange: None, now: late }
        };
        let cores = vec![0.0; network.cores().unwrap_or(0)];
        let mut queues = Self {
            plan,
            network,
            ranks: Rank::all(world_size).map(state).collect(),
            hosts: vec![Host { cores, left: 0 }; network.hosts()],
            message_queues: MessageQueues::new(world_size),
            links: SharedLinks::new(network.window()),
            sharing: false,
            transfers: Vec::new(),
            events: EventQueue::new(),
            times: None,
            steps: 0,
        };
        for rank in 0..ranks {
            queues.push(queues.ranks[rank as usize].now, EventKind::Ready(rank));
        }
        Ok(queues)
    }

    fn push(&mut self, time: f64, what: EventKind) {
        self.events.push(time, what);
    }

    /// Processes all events.
    fn run(&mut self) -> Result<()> {
        while let Some((time, what)) = self.events.next() {
            match what {
                EventKind::Ready(rank) => self.step(rank as usize, time)?,
                EventKind::Read(rank, received) => self.read(rank as usize, time, received),
                EventKind::Leaves(transfer) => self.leave(transfer, time),
                EventKind::LinkCheck(look) => self.look_at_link(look, time),
                EventKind::Share => self.share(time),
                EventKind::Comes(transfer) => self.come(transfer, time)?,
                EventKind::Arrived(transfer) => self.arrived(transfer, time),
            }
        }
        Ok(())
    }

    /// Executes work on a core of the rank's host. Returns its start and its end.
    fn serve(&mut self, rank: usize, time: f64, work: f64) -> (f64, f64) {
        let work = work * self.ranks[rank].slowdown;
        let cores = &mut self.hosts[self.network.host_of(rank)].cores;
        // Chooses the core that has been idle for the shortest time, so that consecutive work stays on one core.
        let idle = (0..cores.len()).filter(|&core| cores[core] <= time);
        let idle = idle.max_by(|&a, &b| cores[a].total_cmp(&cores[b]));
        let next = || (0..cores.len()).min_by(|&a, &b| cores[a].total_cmp(&cores[b]));
        let Some(core) = idle.or_else(next) else { return (time, time + work) };
        let core = &mut cores[core];
        let begins = time.max(*core);
        *core = begins + work;
        (begins, *core)
    }

    /// Begins the next step of a rank.
    fn step(&mut self, rank: usize, time: f64) -> Result<()> {
        let state = &mut self.ranks[rank];
        state.now = time;
        if let Some(times) = &mut self.times {
            times[rank].push(time);
        }
        let Some(step) = state.steps.next() else { return Ok(()) };
        state.taken += 1;
        self.steps += 1;
        if self.steps > QUEUE_STEPS_MAX {
            return Err(too_many());
        }
        match step {
            Step::Combine { chunk, .. } | Step::Copy { chunk, .. } => {
                let work = self.network.work().reduce * self.plan.bytes(Chunks::one(chunk)) as f64;
                let (_, ends) = self.serve(rank, time, work);
                self.push(ends, EventKind::Ready(number(rank)));
                Ok(())
            }
            Step::Exchange { send, receive } => {
                let expected = receive.map(|receive| ExpectedMessages::one(&receive)).transpose()?;
                self.exchange(rank, time, send.into_iter(), expected)
            }
            Step::Window { first, last } => {
                self.steps += last.saturating_sub(first) as u64;
                let world_size = self.ranks.len();
                let to = |distance| place_after(number(rank), distance, world_size);
                let sends =
                    (first..=last).map(|distance| SendHalf::input(to(distance), Chunks::one(to(distance))));
                self.exchange(
                    rank,
                    time,
                    sends,
                    ExpectedMessages::window(number(rank), first, last, world_size),
                )
            }
        }
    }

    fn exchange(
        &mut self,
        rank: usize,
        time: f64,
        sends: impl Iterator<Item = SendHalf>,
        expected: Option<ExpectedMessages>,
    ) -> Result<()> {
        if let Some(expected) = expected {
            self.check_peer(rank, expected.from as usize)?;
        }
        let exchange = ActiveExchange { expected, reading: false, free: time, leaving: 0, over: time };
        self.ranks[rank].exchange = Some(exchange);
        for send in sends {
            self.check_peer(rank, send.to)?;
            self.send(rank, &send)?;
        }
        self.look(rank);
        self.go_on(rank);
        Ok(())
    }

    fn send(&mut self, rank: usize, send: &SendHalf) -> Result<()> {
        let time = self.ranks[rank].exchange.map_or(0.0, |exchange| exchange.free);
        let (work, link) = (self.network.work(), self.network.link(rank, send.to));
        let bytes = self.plan.bytes_sent(send);
        let size = work.weight(bytes);
        let (begins, free) = self.serve(rank, time, work.send + work.sent + work.byte * size);
        let begins = begins + work.send * self.ranks[rank].slowdown;
        let state = &mut self.ranks[rank];
        let slowdown = link.byte.max(work.byte * state.slowdown);
        state.sent += bytes;
        if let Some(exchange) = &mut state.exchange {
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
            let message = u32::try_from(self.transfers.len()).map_err(|_| too_many())?;
            let transmission = Transmission { message, ends, bytes, slowdown: work.byte * state.slowdown };
            let latency = link.latency;
            self.transfers.push(Transfer { transmission, latency, first: 0.0, last: None, read: None });
            self.push(begins, EventKind::Leaves(message));
            return Ok(());
        }
        let state = &mut self.ranks[rank];
        let begins = begins.max(state.up);
        let left = begins + size * slowdown;
        state.up = left;
        if let Some(exchange) = &mut state.exchange {
            exchange.leaves(left);
        }
        let message = TimedMessage { first: begins + link.latency, last: left + link.latency, bytes };
        self.deliver(ends, ReceivedMessage::Known(message))
    }

    /// Sends a message over the link out of its host.
    fn leave(&mut self, transfer: u32, time: f64) {
        let transmission = self.transfers[transfer as usize].transmission;
        let host = |rank: u32| self.network.host_of(rank as usize);
        let (from, to) = (host(transmission.ends.0), host(transmission.ends.1));
        let mut looks = Vec::new();
        self.links.give(transmission, || self.network.path(from, to), time, &mut |time, look| {
            looks.push((time, look));
        });
        self.push_link_checks(looks, time);
    }

    /// Divides the capacity of links after all messages of this time have begun or ended.
    fn share(&mut self, time: f64) {
        self.sharing = false;
        let mut looks = Vec::new();
        self.links.share(time, &mut |time, look| looks.push((time, look)));
        self.push_link_checks(looks, time);
    }

    /// Schedules checks of connections, and a division of the links at this time.
    fn push_link_checks(&mut self, looks: Vec<(f64, LinkCheck)>, now: f64) {
        for (time, look) in looks {
            self.push(time, EventKind::LinkCheck(look));
        }
        if self.links.have_changed() && !self.sharing {
            self.sharing = true;
            self.push(now, EventKind::Share);
        }
    }

    /// Processes the milestones of a connection.
    fn look_at_link(&mut self, look: LinkCheck, time: f64) {
        let mut looks = Vec::new();
        for milestone in self.links.look(look, time, &mut |time, look| looks.push((time, look))) {
            let latency = |transfers: &[Transfer], transfer: u32| transfers[transfer as usize].latency;
            match milestone {
                Milestone::First(transfer) => {
                    self.push(time + latency(&self.transfers, transfer), EventKind::Comes(transfer))
                }
                Milestone::Last(transfer) => {
                    self.push(time + latency(&self.transfers, transfer), EventKind::Arrived(transfer))
                }
                Milestone::Accepted(transfer) => {
                    let rank = self.transfers[transfer as usize].transmission.ends.0 as usize;
                    if let Some(exchange) = &mut self.ranks[rank].exchange {
                        exchange.leaves(time);
                    }
                    self.go_on(rank);
                }
            }
        }
        self.push_link_checks(looks, time);
    }

    /// Processes the arrival of a message's first byte.
    fn come(&mut self, transfer: u32, time: f64) -> Result<()> {
        self.transfers[transfer as usize].first = time;
        self.deliver(self.transfers[transfer as usize].transmission.ends, ReceivedMessage::Transfer(transfer))
    }

    /// Processes the arrival of a message's last byte.
    fn arrived(&mut self, transfer: u32, time: f64) {
        let Transfer { transmission, last, read, .. } = &mut self.transfers[transfer as usize];
        *last = Some(time);
        if let Some(read) = *read {
            let rank = transmission.ends.1 as usize;
            let opens = self.network.work().receive * self.ranks[rank].slowdown;
            self.has_read(rank, read, read.max(time + opens));
        }
    }

    fn deliver(&mut self, (from, to): (u32, u32), received: ReceivedMessage) -> Result<()> {
        if !self.message_queues.push(from, to as usize, received) {
            return Err(too_many());
        }
        self.look(to as usize);
        Ok(())
    }

    /// Begins to read the message that a rank waits for, if it has arrived.
    fn look(&mut self, rank: usize) {
        let Some(exchange) = &mut self.ranks[rank].exchange else { return };
        let Some(ExpectedMessages { from, .. }) = exchange.expected.filter(|_| !exchange.reading) else {
            return;
        };
        let Some(mut received) = self.message_queues.take(from, rank) else { return };
        exchange.reading = true;
        let first = match &mut received {
            ReceivedMessage::Transfer(transfer) => self.transfers[*transfer as usize].first,
            ReceivedMessage::Known(message) => {
                let (link, state) = (self.network.link(from as usize, rank), &mut self.ranks[rank]);
                let size = self.network.work().weight(message.bytes);
                let comes = message.first.max(state.down) + size * link.byte;
                message.last = message.last.max(comes);
                state.down = message.last;
                message.first
            }
        };
        let free = self.ranks[rank].exchange.map_or(first, |exchange| exchange.free);
        self.push(first.max(free), EventKind::Read(number(rank), received));
    }

    fn read(&mut self, rank: usize, time: f64, received: ReceivedMessage) {
        let Some(ActiveExchange { expected: Some(expected), .. }) = self.ranks[rank].exchange else { return };
        let work = self.network.work();
        let (bytes, last) = match received {
            ReceivedMessage::Known(message) => (message.bytes, Some(message.last)),
            ReceivedMessage::Transfer(transfer) => {
                let Transfer { transmission, last, .. } = self.transfers[transfer as usize];
                (transmission.bytes, last)
            }
        };
        let reads = work.reading(bytes, expected.reduces);
        let (_, ends) = self.serve(rank, time, work.receive + reads);
        match (last, received) {
            (Some(last), _) => {
                let opens = work.receive * self.ranks[rank].slowdown;
                self.has_read(rank, ends, ends.max(last + opens));
            }
            (None, ReceivedMessage::Transfer(transfer)) => {
                self.transfers[transfer as usize].read = Some(ends)
            }
            (None, ReceivedMessage::Known(_)) => unreachable!("it is known when this message comes"),
        }
    }

    /// Ends the reading of a message. The rank did its work until `free` and had all bytes at `read`.
    fn has_read(&mut self, rank: usize, free: f64, read: f64) {
        let world_size = self.ranks.len();
        if let Some(exchange) = &mut self.ranks[rank].exchange
            && let Some(mut expected) = exchange.expected
        {
            exchange.over = exchange.over.max(read);
            exchange.free = exchange.free.max(free);
            exchange.reading = false;
            exchange.expected = expected.next(number(rank), world_size).then_some(expected);
        }
        self.look(rank);
        self.go_on(rank);
    }

    /// Begins the next step when everything has left and arrived.
    fn go_on(&mut self, rank: usize) {
        let done = |exchange: &ActiveExchange| exchange.leaving == 0 && exchange.expected.is_none();
        let Some(exchange) = self.ranks[rank].exchange.filter(done) else { return };
        self.ranks[rank].exchange = None;
        self.push(exchange.over, EventKind::Ready(number(rank)));
    }

    fn check_peer(&self, rank: usize, peer: usize) -> Result<()> {
        if peer < self.ranks.len() && peer != rank {
            return Ok(());
        }
        Err(ScheduleError::NoPeer { rank, step: self.ranks[rank].taken as usize - 1, peer }.into())
    }

    fn result(self) -> Result<Prediction> {
        let step = |state: &QueueRank<I>| state.taken as usize - 1;
        let waits = |state: &QueueRank<I>| Some(state.exchange?.expected?.from as usize);
        if let Some((rank, peer)) =
            self.ranks.iter().enumerate().find_map(|(rank, state)| Some((rank, waits(state)?)))
        {
            return Err(ScheduleError::Deadlock {
                rank,
                step: step(&self.ranks[rank]),
                peer,
                peer_step: waits(&self.ranks[peer]).map(|_| step(&self.ranks[peer])),
                blocked: self.ranks.iter().filter(|state| waits(state).is_some()).count(),
            }
            .into());
        }
        let sent = || self.ranks.iter().map(|state| state.sent);
        Ok(Prediction {
            seconds: self.ranks.iter().map(|state| state.now).fold(0.0, f64::max),
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

/// Converts a rank of a world whose size was checked.
fn number(rank: usize) -> u32 {
    u32::try_from(rank).expect("the world has been seen to be small enough")
}
