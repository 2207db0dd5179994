//! The simulated store of the coordinator.
//!
//! A request travels over the links to the coordinator's rank, and its reply back. If the coordinator does not run or
//! is not reached, the request waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::clock::{self, Skew};
use super::world::World;
use crate::bookkeeping::HEARTBEAT;
use crate::runtime::Unparker;
use crate::store::{StoreReply, StoreRequest, StoreService, StoreTable};
use crate::{Abort, Deadline, Runtime};

/// Bytes of a request or a reply on the links.
pub(super) const MESSAGE_BYTES: usize = 256;

/// The store at the coordinator, and the requests whose senders wait.
#[derive(Debug, Default)]
pub(super) struct StoreState {
    /// The number of requests so far.
    made: u64,
    table: StoreTable<u64>,
    calls: BTreeMap<u64, StoreCall>,
}

/// A request whose sender waits for the reply.
#[derive(Debug)]
struct StoreCall {
    world_rank: usize,
    progress: StoreProgress,
    unparker: Unparker,
}

#[derive(Debug)]
enum StoreProgress {
    /// The request arrives at the coordinator at this time.
    Sent(Duration, StoreRequest),
    /// The coordinator has the request, which waits for a key.
    Waiting,
    /// The reply arrives at this time.
    Replied(Duration, StoreReply),
}

/// The result of polling for a reply.
pub(super) enum StorePoll {
    Reply(StoreReply),
    /// The caller should look again when it is woken, and at this time.
    Nothing {
        look_again: Duration,
    },
    Aborted(Abort),
}

impl StoreState {
    /// Registers a request that arrives at the coordinator at this time. Returns its number.
    pub(super) fn begin(
        &mut self,
        world_rank: usize,
        request: StoreRequest,
        arrives: Duration,
        unparker: Unparker,
    ) -> u64 {
        self.made += 1;
        let progress = StoreProgress::Sent(arrives, request);
        self.calls.insert(self.made, StoreCall { world_rank, progress, unparker });
        self.made
    }

    /// Removes a request whose caller no longer waits.
    pub(super) fn end(&mut self, number: u64) {
        self.calls.remove(&number);
        self.table.cancel(|caller| *caller == number);
    }

    /// Returns `true` if the request has arrived at the coordinator and was not served yet.
    pub(super) fn has_arrived(&self, number: u64, now: Duration) -> bool {
        matches!(&self.calls[&number].progress, StoreProgress::Sent(arrives, _) if *arrives <= now)
    }

    /// Serves a request that has arrived. Returns the callers that get a reply, with their ranks.
    pub(super) fn serve(&mut self, number: u64) -> Vec<(u64, usize, StoreReply)> {
        let call = self.calls.get_mut(&number).expect("its sender waits");
        match std::mem::replace(&mut call.progress, StoreProgress::Waiting) {
            StoreProgress::Sent(_, request) => {
                let replies = self.table.serve(number, request).into_iter();
                replies.map(|(number, reply)| (number, self.calls[&number].world_rank, reply)).collect()
            }
            progress => {
                call.progress = progress;
                Vec::new()
            }
        }
    }

    /// Sends a reply that arrives at this time, and returns the waker of its receiver.
    pub(super) fn reply(&mut self, number: u64, arrives: Duration, reply: StoreReply) -> Unparker {
        let call = self.calls.get_mut(&number).expect("its sender waits");
        call.progress = StoreProgress::Replied(arrives, reply);
        call.unparker.clone()
    }

    /// Takes the reply to a request, if it has arrived. Nothing wakes the caller at the end of the job, so it looks
    /// again with every heartbeat.
    pub(super) fn poll(&mut self, number: u64, now: Duration) -> StorePoll {
        let next_heartbeat = now.saturating_add(HEARTBEAT);
        let look_again = match &self.calls[&number].progress {
            StoreProgress::Replied(arrives, reply) if *arrives <= now => {
                return StorePoll::Reply(reply.clone());
            }
            StoreProgress::Sent(arrives, _) | StoreProgress::Replied(arrives, _) if *arrives > now => {
                *arrives
            }
            _ => next_heartbeat,
        };
        StorePoll::Nothing { look_again: look_again.min(next_heartbeat) }
    }
}

/// A rank's access to the simulated store.
pub(super) struct SimStore {
    pub(super) world: Arc<World>,
    pub(super) world_rank: usize,
    pub(super) runtime: Runtime,
    pub(super) skew: Skew,
}

impl StoreService for SimStore {
    fn request(&self, request: StoreRequest, deadline: Deadline) -> Result<Option<StoreReply>, Abort> {
        let (fabric, clock) = (&self.world.fabric, &self.world.clock);
        self.runtime.interleave();
        let number = fabric.begin_store(self.world_rank, request, clock.now(), self.runtime.unparker());
        let result = loop {
            match fabric.poll_store(number, self.world_rank, clock.now()) {
                StorePoll::Reply(reply) => break Ok(Some(reply)),
                StorePoll::Aborted(abort) => break Err(abort),
                StorePoll::Nothing { .. } if self.runtime.expired(deadline) => break Ok(None),
                StorePoll::Nothing { look_again } => {
                    clock::park(&self.runtime, self.skew, deadline, Some(look_again));
                }
            }
        };
        fabric.end_store(number);
        result
    }
}
