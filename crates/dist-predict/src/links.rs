//! Links between hosts that the messages of several connections share at the same time.
//!
//! A connection goes from one rank to another and carries its messages in order. On every wire of its path, the
//! connections that have data to send get equal shares. Each connection is as fast as the smallest of its shares,
//! or as its sender if that is slower. A share that a connection cannot use is not given to others.

use std::collections::{BTreeMap, VecDeque};

use crate::network::{SharedWire, WirePath};

/// All connections that were used so far.
#[derive(Debug)]
pub(crate) struct SharedLinks {
    /// The index in `users` of each wire that was ever used.
    wires: BTreeMap<SharedWire, usize>,
    /// For each wire, the connections that have data to send on it.
    users: Vec<Vec<usize>>,
    /// The wires whose users have changed since their capacity was last divided.
    changed: Vec<usize>,
    connections: Vec<Connection>,
    /// The connection from one rank to another.
    between: BTreeMap<(u32, u32), usize>,
    /// Bytes of a connection that may still be queued when a send is over.
    window: f64,
}

#[derive(Debug)]
struct Connection {
    /// The wires of its path, and the time per byte on each.
    path: WirePath<usize>,
    /// The time per byte of the sender.
    slowdown: f64,
    /// The number of bytes that have left so far, the time of that number, and the time per byte from then on.
    left: f64,
    since: f64,
    byte: f64,
    /// The number of bytes that were given to the connection.
    given: f64,
    /// The events after certain numbers of bytes, in this order.
    milestones: VecDeque<(f64, Milestone)>,
    /// The version of the only scheduled check that is still valid.
    version: u32,
}

/// The progress of a message on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Milestone {
    /// The first byte of this transmission leaves.
    First(u32),
    /// The sender of this transmission may continue.
    Accepted(u32),
    /// The last byte of this transmission has left.
    Last(u32),
}

/// A scheduled check of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkCheck {
    pub(crate) connection: u32,
    version: u32,
}

/// A message that is given to a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transmission {
    pub(crate) message: u32,
    pub(crate) ends: (u32, u32),
    pub(crate) bytes: u64,
    /// The time per byte of the sender.
    pub(crate) slowdown: f64,
}

impl SharedLinks {
    pub(crate) fn new(window: u64) -> Self {
        Self {
            wires: BTreeMap::new(),
            users: Vec::new(),
            changed: Vec::new(),
            connections: Vec::new(),
            between: BTreeMap::new(),
            window: window as f64,
        }
    }

    /// Gives a message to the connection between its ranks, which has this path. Schedules checks of connections.
    pub(crate) fn give(
        &mut self,
        transmission: Transmission,
        path: impl FnOnce() -> WirePath<SharedWire>,
        time: f64,
        note: &mut impl FnMut(f64, LinkCheck),
    ) {
        let at = self.connection(&transmission, path);
        self.settle(at, time);
        let connection = &mut self.connections[at];
        let begins = connection.given;
        let ends = begins + transmission.bytes as f64;
        let was_idle = connection.milestones.is_empty();
        connection.given = ends;
        connection.slowdown = transmission.slowdown;
        connection.milestone(begins, Milestone::First(transmission.message));
        connection
            .milestone((ends - self.window).max(connection.left), Milestone::Accepted(transmission.message));
        connection.milestone(ends, Milestone::Last(transmission.message));
        if was_idle {
            for &(wire, _) in &connection.path {
                self.users[wire].push(at);
                self.changed.push(wire);
            }
        }
        self.look_next(at, note);
    }

    /// Returns the milestones of a connection up to now, if this check is still valid. Schedules the next check.
    pub(crate) fn look(
        &mut self,
        look: LinkCheck,
        time: f64,
        note: &mut impl FnMut(f64, LinkCheck),
    ) -> Vec<Milestone> {
        let at = look.connection as usize;
        let connection = &mut self.connections[at];
        if connection.version != look.version {
            return Vec::new();
        }
        let Some(&(target, _)) = connection.milestones.front() else { return Vec::new() };
        (connection.left, connection.since) = (target, time);
        let mut happened = Vec::new();
        while let Some((_, milestone)) = connection.milestones.pop_front_if(|milestone| milestone.0 <= target)
        {
            happened.push(milestone);
        }
        if connection.milestones.is_empty() {
            for &(wire, _) in &connection.path {
                self.users[wire].retain(|&other| other != at);
                self.changed.push(wire);
            }
        } else {
            self.look_next(at, note);
        }
        happened
    }

    /// Returns `true` if the capacity of wires has to be divided again after all events of this time.
    pub(crate) fn have_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Divides the capacity of the wires whose users have changed. Schedules checks of connections.
    pub(crate) fn share(&mut self, time: f64, note: &mut impl FnMut(f64, LinkCheck)) {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        changed.dedup();
        let mut concerned: Vec<usize> = changed.iter().flat_map(|&wire| &self.users[wire]).copied().collect();
        concerned.sort_unstable();
        concerned.dedup();
        for at in concerned {
            let connection = &self.connections[at];
            let part = |&(wire, byte): &(usize, f64)| byte * self.users[wire].len() as f64;
            let byte = connection.path.iter().map(part).fold(connection.slowdown, f64::max);
            if byte != connection.byte {
                self.settle(at, time);
                self.connections[at].byte = byte;
                self.look_next(at, note);
            }
        }
    }

    /// Returns the connection of a message.
    fn connection(
        &mut self,
        transmission: &Transmission,
        path: impl FnOnce() -> WirePath<SharedWire>,
    ) -> usize {
        if let Some(&at) = self.between.get(&transmission.ends) {
            return at;
        }
        let path: WirePath<usize> = path().into_iter().map(|(wire, byte)| (self.place(wire), byte)).collect();
        let byte = path.iter().map(|&(_, byte)| byte).fold(transmission.slowdown, f64::max);
        let (slowdown, milestones) = (transmission.slowdown, VecDeque::new());
        let connection =
            Connection { path, slowdown, left: 0.0, since: 0.0, byte, given: 0.0, milestones, version: 0 };
        self.connections.push(connection);
        let at = self.connections.len() - 1;
        self.between.insert(transmission.ends, at);
        at
    }

    /// Returns the index of a wire in `users`.
    fn place(&mut self, wire: SharedWire) -> usize {
        *self.wires.entry(wire).or_insert_with(|| {
            self.users.push(Vec::new());
            self.users.len() - 1
        })
    }

    /// Updates the number of bytes that have left.
    fn settle(&mut self, at: usize, time: f64) {
        let connection = &mut self.connections[at];
        if !connection.milestones.is_empty() && connection.byte > 0.0 {
            connection.left += (time - connection.since) / connection.byte;
        }
        connection.since = time;
    }

    /// Schedules a check at the next milestone of a connection.
    fn look_next(&mut self, at: usize, note: &mut impl FnMut(f64, LinkCheck)) {
        let connection = &mut self.connections[at];
        let Some(&(target, _)) = connection.milestones.front() else { return };
        connection.version = connection.version.wrapping_add(1);
        let time = connection.since + (target - connection.left).max(0.0) * connection.byte;
        let number = u32::try_from(at).expect("there are fewer connections than messages");
        note(time, LinkCheck { connection: number, version: connection.version });
    }
}

impl Connection {
    /// Inserts a milestone after those with smaller targets.
    fn milestone(&mut self, target: f64, milestone: Milestone) {
        let place = self.milestones.iter().rposition(|other| other.0 <= target).map_or(0, |place| place + 1);
        self.milestones.insert(place, (target, milestone));
    }
}
