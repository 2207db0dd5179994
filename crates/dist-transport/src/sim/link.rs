//! Links with a latency and a bandwidth, and the path of each message.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::random::SplitMix64;

/// A time that never comes.
pub(super) const NEVER: Duration = Duration::MAX;

/// The cost of a message on one link, in each direction.
///
/// A link carries one message after the other, each direction separately. A link without cost carries
/// everything at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    latency: Duration,
    /// `None` means that a message takes no time, however long it is.
    bytes_per_second: Option<u64>,
    overhead: Duration,
    jitter: Duration,
}

impl Link {
    /// A link on which everything arrives at once.
    pub const FREE: Self = Self {
        latency: Duration::ZERO,
        bytes_per_second: None,
        overhead: Duration::ZERO,
        jitter: Duration::ZERO,
    };

    /// Creates a link. The last byte of a message arrives `latency` after it was sent. A link of 0 bytes per
    /// second carries nothing.
    #[must_use]
    pub const fn new(latency: Duration, bytes_per_second: u64) -> Self {
        Self { latency, bytes_per_second: Some(bytes_per_second), ..Self::FREE }
    }

    /// Sets the time for which every message keeps the link busy in addition to its bytes.
    #[must_use]
    pub const fn with_overhead(self, overhead: Duration) -> Self {
        Self { overhead, ..self }
    }

    /// Delays every message on this link by a random time from 0 to `jitter`, drawn by the seed. A message that
    /// crosses several links is delayed by each. Messages from one rank to another stay in order.
    #[must_use]
    pub const fn with_jitter(self, jitter: Duration) -> Self {
        Self { jitter, ..self }
    }

    /// Returns the time for which a message keeps the link busy.
    fn occupied(&self, bytes: usize) -> Duration {
        match self.bytes_per_second {
            None => self.overhead,
            Some(0) => NEVER,
            Some(rate) => {
                let nanos = (bytes as u128 * 1_000_000_000).div_ceil(rate.into());
                self.overhead.saturating_add(Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX)))
            }
        }
    }
}

/// One direction of one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wire {
    /// Between the ranks of one host; each rank has its own.
    Memory(usize),
    FromHost(u64),
    ToHost(u64),
    FromRack(u64),
    ToRack(u64),
    Between(u64, u64),
}

/// The links of a network, and their busy times.
#[derive(Debug, Clone)]
pub(super) struct Links {
    /// The host of each rank.
    pub(super) hosts: Vec<u64>,
    /// The rack of each rank.
    pub(super) racks: Vec<u64>,
    pub(super) memory: Link,
    pub(super) host: Link,
    pub(super) rack: Link,
    /// Separate links between two hosts.
    pub(super) between: HashMap<(u64, u64), Link>,
    /// Busy intervals in the order of time; past ones are removed.
    busy: HashMap<Wire, VecDeque<(Duration, Duration)>>,
}

impl Links {
    /// Creates links for ranks on one host, where nothing costs anything.
    pub(super) fn new(world_size: usize) -> Self {
        let (memory, host, rack) = (Link::FREE, Link::FREE, Link::FREE);
        let (hosts, racks) = (vec![0; world_size], vec![0; world_size]);
        Self { hosts, racks, memory, host, rack, between: HashMap::new(), busy: HashMap::new() }
    }

    /// Sends a message over these links, and returns the arrival time of its last byte.
    ///
    /// A message is not stored between the links. It occupies each link for its transfer time, from the moment
    /// when its first byte has arrived and the link is free. A link is not kept idle for a message that was
    /// sent earlier and arrives later.
    pub(super) fn carry(
        &mut self,
        (from, to): (usize, usize),
        bytes: usize,
        now: Duration,
        random: &mut SplitMix64,
    ) -> Duration {
        let (mut head, mut tail) = (now, now);
        for (wire, link) in self.path(from, to).into_iter().flatten() {
            if link == Link::FREE {
                continue;
            }
            let busy = self.busy.entry(wire).or_default();
            while busy.front().is_some_and(|&(_, end)| end <= now) {
                busy.pop_front();
            }
            let ends = |start: Duration| start.saturating_add(link.occupied(bytes)).max(tail);
            let start = first_free(busy, head, ends);
            let end = ends(start);
            let delay = link.latency.saturating_add(random.up_to(link.jitter));
            head = start.saturating_add(link.overhead).saturating_add(delay);
            tail = end.saturating_add(delay);
        }
        tail
    }

    fn path(&self, from: usize, to: usize) -> [Option<(Wire, Link)>; 4] {
        let [a, b] = [from, to].map(|rank| self.hosts[rank]);
        let [rack_a, rack_b] = [from, to].map(|rank| self.racks[rank]);
        if from == to {
            return [None; 4];
        }
        if a == b {
            return [Some((Wire::Memory(from), self.memory)), None, None, None];
        }
        if let Some(&link) = self.between.get(&(a.min(b), a.max(b))) {
            return [Some((Wire::Between(a, b), link)), None, None, None];
        }
        let [up, down] = [Wire::FromHost(a), Wire::ToHost(b)].map(|wire| Some((wire, self.host)));
        if rack_a == rack_b {
            return [up, down, None, None];
        }
        let [out, back] = [Wire::FromRack(rack_a), Wire::ToRack(rack_b)].map(|wire| Some((wire, self.rack)));
        [up, out, back, down]
    }
}

/// Takes the first interval from `head` on at which the link is free until `ends`, and returns its start.
fn first_free(
    busy: &mut VecDeque<(Duration, Duration)>,
    head: Duration,
    ends: impl Fn(Duration) -> Duration,
) -> Duration {
    let (mut start, mut place) = (head, 0);
    for &(begins, over) in busy.iter() {
        // A message that takes no time waits behind one that begins at the same time.
        if start < begins && ends(start) <= begins {
            break;
        }
        start = start.max(over);
        place += 1;
    }
    busy.insert(place, (start, ends(start)));
    start
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Returns the links of two hosts with two ranks each in one rack, and a third host in another rack.
    fn links() -> Links {
        let mut links = Links::new(5);
        links.hosts = vec![0, 0, 1, 1, 2];
        links.racks = vec![0, 0, 0, 0, 1];
        links.memory = Link::new(Duration::ZERO, 1_000_000);
        links.host = Link::new(10 * MS, 1_000_000);
        links.rack = Link::new(100 * MS, 100_000).with_overhead(MS);
        links
    }

    fn carry(links: &mut Links, from: usize, to: usize, bytes: usize) -> Duration {
        links.carry((from, to), bytes, Duration::ZERO, &mut SplitMix64::new(0))
    }

    #[rstest]
    #[case::to_itself(0, 0, Duration::ZERO)]
    #[case::within_a_host(0, 1, MS)]
    #[case::between_hosts(0, 2, 21 * MS)]
    // The slowest link decides how long the bytes take; each link of the path adds its latency.
    #[case::between_racks(0, 4, 10 * MS + 101 * MS + 101 * MS + 10 * MS + 10 * MS)]
    fn a_message_of_a_thousand_bytes_takes(#[case] from: usize, #[case] to: usize, #[case] time: Duration) {
        assert_eq!(carry(&mut links(), from, to, 1000), time);
    }

    #[test]
    fn ranks_of_a_host_share_its_uplink_and_hosts_do_not() {
        let mut links = links();
        assert_eq!(carry(&mut links, 0, 2, 1000), 21 * MS);
        assert_eq!(carry(&mut links, 1, 3, 1000), 22 * MS, "after the other");
        assert_eq!(carry(&mut links, 2, 0, 1000), 21 * MS, "the other direction is free");
        assert_eq!(carry(&mut links, 1, 2, 0), 22 * MS, "a message of no bytes waits as well");
    }

    #[test]
    fn a_link_does_not_wait_for_a_later_message() {
        let mut links = links();
        assert_eq!(carry(&mut links, 0, 4, 1000), 10 * MS + 101 * MS + 101 * MS + 10 * MS + 10 * MS);
        // The link to the third host is free until that message arrives: here for messages of a host in its
        // own rack.
        links.racks = vec![0; 5];
        assert_eq!(carry(&mut links, 2, 4, 1000), 21 * MS);
        assert_eq!(carry(&mut links, 3, 4, 1000), 22 * MS);
    }

    #[test]
    fn a_link_between_two_hosts_replaces_theirs() {
        let mut links = links();
        links.between.insert((0, 1), Link::new(MS, 1_000));
        assert_eq!(carry(&mut links, 3, 1, 1000), 1001 * MS);
        assert_eq!(carry(&mut links, 0, 4, 0), 10 * MS + 101 * MS + 101 * MS + 10 * MS);
    }

    #[test]
    fn jitter_stays_below_its_bound_and_varies() {
        let mut links = Links::new(2);
        links.memory = Link::FREE.with_jitter(MS);
        let mut random = SplitMix64::new(1);
        let times: Vec<_> = (0..50).map(|_| links.carry((0, 1), 9, MS, &mut random)).collect();
        assert!(times.iter().all(|time| (MS..=2 * MS).contains(time)));
        assert!(times.iter().any(|time| *time != times[0]));
    }

    #[test]
    fn a_link_of_no_bandwidth_carries_nothing() {
        let mut links = Links::new(2);
        links.memory = Link::new(MS, 0);
        assert_eq!(carry(&mut links, 0, 1, 0), NEVER);
    }
}
