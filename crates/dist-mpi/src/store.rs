//! The key-value store of the job, which rank 0 serves. Requests and replies are packets.

use std::collections::HashMap;
use std::time::Duration;

use dist_transport::store::{StoreInbox, StoreReply, StoreRequest, StoreTable};
use dist_transport::{Abort, Deadline, LazyDeadline};

use crate::wait::Wait;
use crate::wire::{HEADER, Packet};
use crate::world::World;

/// The requests of this rank, and on rank 0 the values.
#[derive(Debug)]
pub(crate) struct StoreState {
    /// The number of requests of this rank so far.
    made: u64,
    /// The replies that have arrived, by the number of the request; `None` for those that have not.
    replies: HashMap<u64, Option<StoreReply>>,
    /// The pieces of the next reply.
    reply: StoreInbox,
    /// On rank 0: the values. A caller is a rank and the number of its request.
    table: StoreTable<(usize, u64)>,
    /// On rank 0: the pieces of the next request of each rank.
    requests: Vec<StoreInbox>,
    /// On rank 0: the time of the last request.
    served_at: Option<Duration>,
}

/// Replies, each with the rank and the number of its request.
pub(crate) type Replies = Vec<((usize, u64), StoreReply)>;

/// The time after a request for which rank 0 expects more of them.
const BUSY: Duration = Duration::from_millis(20);

/// The offset of the mark of a message's last piece in a header, which begins with the number of the request.
const IS_LAST: usize = 8;

impl StoreState {
    /// Creates the state in a world of this many ranks.
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            made: 0,
            replies: HashMap::new(),
            reply: StoreInbox::default(),
            table: StoreTable::default(),
            requests: (0..world_size).map(|_| StoreInbox::default()).collect(),
            served_at: None,
        }
    }

    /// Registers a request and returns its number.
    fn begin(&mut self) -> u64 {
        self.made += 1;
        self.replies.insert(self.made, None);
        self.made
    }

    /// Takes a piece of a request to rank 0. Returns the replies that it causes, or `None` if it is no request.
    pub(crate) fn take_request(&mut self, from: usize, packet: &Packet, now: Duration) -> Option<Replies> {
        self.served_at = Some(now);
        let is_last = packet.header_number(IS_LAST) != 0;
        let Some(message) = self.requests[from].add(packet.payload(), is_last).ok()? else {
            return Some(Vec::new());
        };
        let request = StoreRequest::decode(&message)?;
        Some(self.table.serve((from, packet.header_number(0)), request))
    }

    /// Takes a piece of a reply of rank 0, unless its caller no longer waits. Returns `None` if it is no reply.
    pub(crate) fn take_reply(&mut self, packet: &Packet) -> Option<()> {
        let is_last = packet.header_number(IS_LAST) != 0;
        if let Some(message) = self.reply.add(packet.payload(), is_last).ok()? {
            let reply = StoreReply::decode(&message)?;
            if let Some(place) = self.replies.get_mut(&packet.header_number(0)) {
                *place = Some(reply);
            }
        }
        Some(())
    }

    /// Cancels a wait of another rank for a key.
    pub(crate) fn cancel(&mut self, caller: (usize, u64)) {
        self.table.cancel(|other| *other == caller);
    }

    /// Cancels all waits of a rank that has left.
    pub(crate) fn forget_rank(&mut self, rank: usize) {
        self.table.cancel(|(other, _)| *other == rank);
    }

    /// Returns `true` if rank 0 has served a request a short time ago.
    pub(crate) fn is_busy(&self, now: Duration) -> bool {
        self.served_at.is_some_and(|served_at| now.saturating_sub(served_at) < BUSY)
    }
}

/// Returns the header of a piece of a message that belongs to this request.
pub(crate) fn header(number: u64, is_last: bool) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&number.to_le_bytes());
    header[IS_LAST] = u8::from(is_last);
    header
}

/// Sends a request to rank 0 and waits for the reply. Returns `None` at the deadline.
pub(crate) fn request(
    world: &World,
    request: &StoreRequest,
    deadline: Deadline,
) -> Result<Option<StoreReply>, Abort> {
    let (message, due) = (request.encode(), LazyDeadline::from(deadline));
    let (mut sent, mut wait) = (None, Wait::NEW);
    let result = loop {
        let mut state = world.lock();
        world.progress(&mut state);
        if world.aborted().is_some() {
            drop(state);
            break Err(world.await_decision());
        }
        match sent {
            Some(number) => {
                if let Some(reply) = state.store.replies.get_mut(&number).and_then(Option::take) {
                    break Ok(Some(reply));
                }
            }
            None if state.has_room_for(0) => {
                let number = *sent.insert(state.store.begin());
                world.send_request(&mut state, number, &message);
                continue;
            }
            None => {}
        }
        drop(state);
        if wait.pause(&world.runtime, world.is_oversubscribed, &due).is_none() {
            break Ok(None);
        }
    };
    if let Some(number) = sent {
        let mut state = world.lock();
        state.store.replies.remove(&number);
        if let Ok(None) = result {
            world.cancel_request(&mut state, number);
        }
    }
    result
}
