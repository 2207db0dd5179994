//! The requests of this process to the store of the coordinator.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::bootstrap::control::{Frame, store_frames};
use crate::bootstrap::session::{Membership, Session, lock};
use crate::store::{StoreReply, StoreRequest, StoreService, StoreTable};
use crate::{Abort, Deadline};

/// The requests that wait for their replies.
#[derive(Debug, Default)]
pub(crate) struct StoreCalls(Mutex<Calls>);

#[derive(Debug, Default)]
struct Calls {
    /// The number of requests so far.
    made: u64,
    /// The replies that have arrived, by the number of the request; `None` for those that have not.
    replies: HashMap<u64, Option<StoreReply>>,
    /// The store of a world of one rank, which has no coordinator.
    alone: StoreTable<u64>,
}

impl StoreCalls {
    /// Registers a request and returns its number.
    fn begin(&self) -> u64 {
        let mut calls = lock(&self.0);
        calls.made += 1;
        let number = calls.made;
        calls.replies.insert(number, None);
        number
    }

    /// Takes the reply to a request, if it has arrived.
    fn take(&self, number: u64) -> Option<StoreReply> {
        lock(&self.0).replies.get_mut(&number)?.take()
    }

    /// Removes a request whose caller no longer waits.
    fn end(&self, number: u64) {
        let mut calls = lock(&self.0);
        calls.replies.remove(&number);
        calls.alone.cancel(|caller| *caller == number);
    }

    /// Stores the reply to a request, unless its caller no longer waits.
    fn deliver(&self, number: u64, reply: StoreReply) {
        if let Some(place) = lock(&self.0).replies.get_mut(&number) {
            *place = Some(reply);
        }
    }

    /// Serves a request in a world of one rank.
    fn serve_alone(&self, number: u64, request: StoreRequest) {
        let replies = lock(&self.0).alone.serve(number, request);
        replies.into_iter().for_each(|(number, reply)| self.deliver(number, reply));
    }
}

impl Session {
    /// Stores a reply that has arrived, and wakes the thread that waits for it.
    pub(crate) fn deliver_reply(&self, number: u64, reply: StoreReply) {
        self.store_calls.deliver(number, reply);
        self.abort_state.wake_waiters();
    }

    fn send_request(&self, number: u64, request: StoreRequest) {
        if self.rank.world_size() == 1 {
            self.store_calls.serve_alone(number, request);
            self.abort_state.wake_waiters();
        } else {
            self.outgoing.push_all(store_frames(number, &request.encode()));
            self.service_waker.notify();
        }
    }

    /// Ends a request without its reply.
    fn cancel_request(&self, number: u64) {
        if self.rank.world_size() > 1 {
            self.outgoing.push(Frame::CancelStore { number });
            self.service_waker.notify();
        }
    }
}

/// The store of the coordinator. It keeps this rank in the job.
pub(crate) struct CoordinatorStore(pub(crate) Arc<Membership>);

impl StoreService for CoordinatorStore {
    fn request(&self, request: StoreRequest, deadline: Deadline) -> Result<Option<StoreReply>, Abort> {
        let session = &*self.0.session;
        let number = session.store_calls.begin();
        session.send_request(number, request);
        let look = || {
            let is_over = session.abort_state.is_reached();
            if is_over { Some(None) } else { session.store_calls.take(number).map(Some) }
        };
        let ended = session.abort_state.wait_until(&session.runtime, deadline, look);
        session.store_calls.end(number);
        match ended {
            Some(Some(reply)) => Ok(Some(reply)),
            Some(None) => session.why_ended().map_or(Ok(None), Err),
            None => {
                session.cancel_request(number);
                Ok(None)
            }
        }
    }
}
