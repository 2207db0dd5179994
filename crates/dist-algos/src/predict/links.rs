//! Links between hosts, which the messages of several connections share at the same time.
//!
//! A connection goes from one rank to another and carries its messages in order. The connections out of a host, and
//! those into one, get equal parts of its link; a connection is as fast as the smaller of its two parts, or as its
//! sender. What one cannot use is not given to others.

use std::collections::{BTreeMap, VecDeque};

use super::Link;

/// All connections that there have been.
#[derive(Debug)]
pub(super) struct Links {
    sides: Vec<Side>,
    connections: Vec<Connection>,
    /// Which connection goes from one rank to another.
    between: BTreeMap<(u32, u32), usize>,
    /// Bytes of a connection that may wait to leave when a send is over.
    window: f64,
}

/// The connections of a host that have something to send.
#[derive(Clone, Debug, Default)]
struct Side {
    out: Vec<usize>,
    into: Vec<usize>,
}

#[derive(Debug)]
struct Connection {
    /// The host that it goes out of, and the one that it goes into.
    hosts: [usize; 2],
    link: Link,
    /// How long each byte takes the sender.
    pace: f64,
    /// How many of all bytes have left, when, and how long the next ones take.
    left: f64,
    since: f64,
    byte: f64,
    /// How many are to leave.
    given: f64,
    /// What happens when so many have left, in this order.
    marks: VecDeque<(f64, Mark)>,
    /// Which of the times that were noted holds.
    version: u32,
}

/// What happens to a message when enough has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// Its first byte leaves.
    First(u32),
    /// Its sender may go on.
    Accepted(u32),
    /// Its last byte has left.
    Last(u32),
}

/// When a connection is to be looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) connection: u32,
    version: u32,
}

/// A message that is given to a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parcel {
    pub(super) message: u32,
    pub(super) ends: (u32, u32),
    pub(super) hosts: [usize; 2],
    pub(super) bytes: u64,
    pub(super) link: Link,
    pub(super) pace: f64,
}

impl Links {
    pub(super) fn new(hosts: usize, window: u64) -> Self {
        let sides = vec![Side::default(); hosts];
        Self { sides, connections: Vec::new(), between: BTreeMap::new(), window: window as f64 }
    }

    /// Gives a message to the connection of its ends; notes when to look at connections.
    pub(super) fn give(&mut self, parcel: Parcel, time: f64, note: &mut impl FnMut(f64, Look)) {
        let at = self.connection(&parcel);
        self.settle(at, time);
        let connection = &mut self.connections[at];
        let begins = connection.given;
        let ends = begins + parcel.bytes as f64;
        let was_idle = connection.marks.is_empty();
        connection.given = ends;
        connection.pace = parcel.pace;
        connection.mark(begins, Mark::First(parcel.message));
        connection.mark((ends - self.window).max(connection.left), Mark::Accepted(parcel.message));
        connection.mark(ends, Mark::Last(parcel.message));
        let [from, to] = connection.hosts;
        if was_idle {
            self.sides[from].out.push(at);
            self.sides[to].into.push(at);
            self.share(from, to, time, note);
        }
        self.look_next(at, note);
    }

    /// What has happened on a connection by now, if this is when to look at it; notes when to look again.
    pub(super) fn look(&mut self, look: Look, time: f64, note: &mut impl FnMut(f64, Look)) -> Vec<Mark> {
        let at = look.connection as usize;
        let connection = &mut self.connections[at];
        if connection.version != look.version {
            return Vec::new();
        }
        let Some(&(target, _)) = connection.marks.front() else { return Vec::new() };
        (connection.left, connection.since) = (target, time);
        let mut happened = Vec::new();
        while let Some((_, mark)) = connection.marks.pop_front_if(|mark| mark.0 <= target) {
            happened.push(mark);
        }
        if connection.marks.is_empty() {
            let [from, to] = connection.hosts;
            self.sides[from].out.retain(|&other| other != at);
            self.sides[to].into.retain(|&other| other != at);
            self.share(from, to, time, note);
        } else {
            self.look_next(at, note);
        }
        happened
    }

    /// The connection that a message goes by.
    fn connection(&mut self, parcel: &Parcel) -> usize {
        *self.between.entry(parcel.ends).or_insert_with(|| {
            self.connections.push(Connection {
                hosts: parcel.hosts,
                link: parcel.link,
                pace: parcel.pace,
                left: 0.0,
                since: 0.0,
                byte: parcel.link.byte,
                given: 0.0,
                marks: VecDeque::new(),
                version: 0,
            });
            self.connections.len() - 1
        })
    }

    /// Brings what has left up to date.
    fn settle(&mut self, at: usize, time: f64) {
        let connection = &mut self.connections[at];
        if !connection.marks.is_empty() && connection.byte > 0.0 {
            connection.left += (time - connection.since) / connection.byte;
        }
        connection.since = time;
    }

    /// Divides the links of two hosts anew among those who use them.
    fn share(&mut self, from: usize, to: usize, time: f64, note: &mut impl FnMut(f64, Look)) {
        let mut changed: Vec<usize> = self.sides[from].out.clone();
        changed.extend(self.sides[to].into.iter().filter(|at| self.connections[**at].hosts[0] != from));
        for at in changed {
            let connection = &self.connections[at];
            let [from, to] = connection.hosts;
            let sharers = self.sides[from].out.len().max(self.sides[to].into.len());
            let byte = (connection.link.byte * sharers as f64).max(connection.pace);
            if byte != connection.byte {
                self.settle(at, time);
                self.connections[at].byte = byte;
                self.look_next(at, note);
            }
        }
    }

    /// Notes when the next mark of a connection is come to.
    fn look_next(&mut self, at: usize, note: &mut impl FnMut(f64, Look)) {
        let connection = &mut self.connections[at];
        let Some(&(target, _)) = connection.marks.front() else { return };
        connection.version = connection.version.wrapping_add(1);
        let time = connection.since + (target - connection.left).max(0.0) * connection.byte;
        let number = u32::try_from(at).expect("there are fewer connections than messages");
        note(time, Look { connection: number, version: connection.version });
    }
}

impl Connection {
    /// Puts a mark after those that are come to sooner.
    fn mark(&mut self, target: f64, mark: Mark) {
        let place = self.marks.iter().rposition(|other| other.0 <= target).map_or(0, |place| place + 1);
        self.marks.insert(place, (target, mark));
    }
}
