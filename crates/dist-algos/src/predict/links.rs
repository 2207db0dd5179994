//! Links between hosts, which the messages of several connections share at the same time.
//!
//! A connection goes from one rank to another and carries its messages in order. On every wire of its way the
//! connections that have something to send get equal parts; each is as fast as the smallest of its parts, or as its
//! sender. What one cannot use is not given to others.

use std::collections::{BTreeMap, VecDeque};

use super::network::{Wire, WirePath};

/// All connections that there have been.
#[derive(Debug)]
pub(super) struct Links {
    /// Where each wire that was ever used is among the users.
    wires: BTreeMap<Wire, usize>,
    /// Of each wire, the connections that have something to send on it.
    users: Vec<Vec<usize>>,
    /// The wires that others use than when they were last divided.
    changed: Vec<usize>,
    connections: Vec<Connection>,
    /// Which connection goes from one rank to another.
    between: BTreeMap<(u32, u32), usize>,
    /// Bytes of a connection that may wait to leave when a send is over.
    window: f64,
}

#[derive(Debug)]
struct Connection {
    /// The wires that it goes through, and how long a byte takes on each.
    path: WirePath<usize>,
    /// How long each byte takes the sender.
    slowdown: f64,
    /// How many of all bytes have left, when, and how long the next ones take.
    left: f64,
    since: f64,
    byte: f64,
    /// How many are to leave.
    given: f64,
    /// What happens when so many have left, in this order.
    milestones: VecDeque<(f64, Milestone)>,
    /// Which of the times that were noted holds.
    version: u32,
}

/// What happens to a message when enough has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Milestone {
    /// Its first byte leaves.
    First(u32),
    /// Its sender may go on.
    Accepted(u32),
    /// Its last byte has left.
    Last(u32),
}

/// When a connection is to be looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkCheck {
    pub(super) connection: u32,
    version: u32,
}

/// A message that is given to a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transmission {
    pub(super) message: u32,
    pub(super) ends: (u32, u32),
    pub(super) bytes: u64,
    /// How long each byte takes the sender.
    pub(super) slowdown: f64,
}

impl Links {
    pub(super) fn new(window: u64) -> Self {
        Self {
            wires: BTreeMap::new(),
            users: Vec::new(),
            changed: Vec::new(),
            connections: Vec::new(),
            between: BTreeMap::new(),
            window: window as f64,
        }
    }

    /// Gives a message to the connection of its ends, which goes this way; notes when to look at connections.
    pub(super) fn give(
        &mut self,
        transmission: Transmission,
        path: impl FnOnce() -> WirePath<Wire>,
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

    /// What has happened on a connection by now, if this is when to look at it; notes when to look again.
    pub(super) fn look(
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

    /// Whether wires are to be divided anew, once everything has happened that happens now.
    pub(super) fn have_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Divides the wires anew that others use than before; notes when to look at connections.
    pub(super) fn share(&mut self, time: f64, note: &mut impl FnMut(f64, LinkCheck)) {
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

    /// The connection that a message goes by.
    fn connection(&mut self, transmission: &Transmission, path: impl FnOnce() -> WirePath<Wire>) -> usize {
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

    /// Where a wire is among the users.
    fn place(&mut self, wire: Wire) -> usize {
        *self.wires.entry(wire).or_insert_with(|| {
            self.users.push(Vec::new());
            self.users.len() - 1
        })
    }

    /// Brings what has left up to date.
    fn settle(&mut self, at: usize, time: f64) {
        let connection = &mut self.connections[at];
        if !connection.milestones.is_empty() && connection.byte > 0.0 {
            connection.left += (time - connection.since) / connection.byte;
        }
        connection.since = time;
    }

    /// Notes when the next mark of a connection is come to.
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
    /// Puts a mark after those that are come to sooner.
    fn milestone(&mut self, target: f64, milestone: Milestone) {
        let place = self.milestones.iter().rposition(|other| other.0 <= target).map_or(0, |place| place + 1);
        self.milestones.insert(place, (target, milestone));
    }
}
