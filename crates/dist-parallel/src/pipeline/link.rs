//! One direction of messages between two stages on different ranks.
//!
//! A link is a communicator of its own, with a worker, so that links do not wait for each other: sending
//! returns at once, and one message is received ahead of when it is needed. The shape travels before the first message
//! of activations; both ends know it from then on, and that of the gradients, which look the same. In an evaluation every
//! message has a shape of its own, which travels before it and is all that is received ahead; its sender waits until the one
//! before it has arrived.

use std::collections::VecDeque;

use dist_collectives::{Buffer, Communicator, Pending};

use super::activations::{HEADER_LEN, Look};
use crate::flat::{self, Flat, PendingFlat};
use crate::fsdp::{bytes_sent, follow};
use crate::{Error, Result};

/// The end of a link that sends.
pub(super) struct Sender {
    comm: Communicator,
    to: usize,
    /// What has travelled, once something has.
    look: Option<Look>,
    header: Option<Pending<Buffer<u64>>>,
    under_way: VecDeque<PendingFlat>,
}

/// The end of a link that receives.
pub(super) struct Receiver {
    comm: Communicator,
    from: usize,
    look: Option<Look>,
    /// How many messages of this pass have not been received.
    left: usize,
    /// Whether each of them comes with what it looks like.
    each_described: bool,
    posted: Option<Posted>,
}

/// What is received ahead.
enum Posted {
    Header(Pending<Buffer<u64>>),
    Values(PendingFlat),
}

impl Sender {
    /// The end of a link to a rank.
    pub(super) const fn new(comm: Communicator, to: usize) -> Self {
        Self { comm, to, look: None, header: None, under_way: VecDeque::new() }
    }

    /// Sends from now on in the manner of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// What messages look like, once that is known.
    pub(super) const fn look(&self) -> Option<&Look> {
        self.look.as_ref()
    }

    /// Says what the receiver knows messages to look like.
    pub(super) fn expect(&mut self, look: Look) {
        self.look = Some(look);
    }

    /// Sends what looks like all messages before it; `None` if nothing can look like this.
    pub(super) fn send(&mut self, look: &Look, values: Flat) -> Option<()> {
        if self.look.is_none() {
            let header = look.encode()?;
            self.header = Some(self.comm.start_send(header, self.to));
            self.look = Some(look.clone());
        }
        self.under_way.push_back(values.start_send(&mut self.comm, self.to));
        Some(())
    }

    /// Sends what may look like anything, and says so; `None` if nothing can look like this.
    pub(super) fn send_any(&mut self, look: &Look, values: Flat) -> Option<()> {
        self.header = Some(self.comm.start_send(look.encode()?, self.to));
        self.under_way.push_back(values.start_send(&mut self.comm, self.to));
        Some(())
    }

    /// Gives back the memory of messages that have arrived; the error of one that failed.
    pub(super) fn collect(&mut self) -> Result<()> {
        while self.under_way.front_mut().is_some_and(PendingFlat::is_done) {
            let sent = self.under_way.pop_front().expect("there is a first one");
            sent.wait()?;
        }
        Ok(())
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        bytes_sent(&self.comm)
    }

    /// Waits until everything has been received.
    pub(super) fn finish(&mut self) -> Result<()> {
        if let Some(header) = self.header.take() {
            flat::wait(header)?;
        }
        self.under_way.drain(..).try_for_each(|sent| sent.wait().map(drop))
    }

    /// Waits for what is under way, whatever becomes of it.
    pub(super) fn forget(&mut self) {
        self.header = None;
        self.under_way.clear();
    }
}

impl Receiver {
    /// The end of a link from a rank.
    pub(super) const fn new(comm: Communicator, from: usize) -> Self {
        Self { comm, from, look: None, left: 0, each_described: false, posted: None }
    }

    /// Receives from now on in the manner of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// Says what messages look like, which the sender knows.
    pub(super) fn expect(&mut self, look: Look) {
        self.look = Some(look);
    }

    /// Begins a step of so many messages, which look alike.
    pub(super) fn begin(&mut self, messages: usize) {
        (self.left, self.each_described) = (messages, false);
    }

    /// Begins a pass of so many messages, each of which comes with what it looks like.
    pub(super) fn begin_any(&mut self, messages: usize) {
        (self.left, self.each_described) = (messages, true);
    }

    /// Whether the next message has arrived; from now on, one is received ahead.
    pub(super) fn is_ready(&mut self) -> bool {
        self.post();
        match &mut self.posted {
            Some(Posted::Values(values)) => values.is_done(),
            Some(Posted::Header(_)) | None => false,
        }
    }

    /// Waits for the next message of the pass, and begins to receive the one behind it; also what it looks like.
    pub(super) fn receive(&mut self) -> Result<(Look, Flat)> {
        self.post();
        let (look, values) = match self.posted.take().expect("no more is received than is sent") {
            Posted::Values(values) => {
                (self.look.clone().expect("it was begun by what it looks like"), values)
            }
            Posted::Header(header) => {
                let look = Look::decode(&flat::wait(header)?).ok_or(Error::NoActivation)?;
                if !self.each_described {
                    self.look = Some(look.clone());
                }
                let values = self.start(&look);
                (look, values)
            }
        };
        let values = values.wait()?;
        self.left -= 1;
        self.post();
        Ok((look, values))
    }

    /// Begins to receive the next message of the pass, if there is one and it is not yet begun.
    fn post(&mut self) {
        if self.posted.is_some() || self.left == 0 {
            return;
        }
        let known = self.look.clone().filter(|_| !self.each_described);
        self.posted = Some(match known {
            Some(look) => Posted::Values(self.start(&look)),
            None => Posted::Header(self.comm.start_recv(vec![0; HEADER_LEN], self.from)),
        });
    }

    fn start(&mut self, look: &Look) -> PendingFlat {
        let memory = Flat::zeros(look.dtype, look.len().unwrap_or(0));
        memory.start_receive(&mut self.comm, self.from)
    }

    /// Waits for what was received ahead, whatever becomes of it.
    pub(super) fn forget(&mut self) {
        self.posted = None;
    }
}
