//! One direction of messages between two stages on different ranks.
//!
//! A link is a communicator of its own, with a worker, so that links do not wait for each other: sending
//! returns at once, and one message is received ahead of when it is needed. The shape travels before the first message
//! of activations; both ends know it from then on, and that of the gradients, which look the same. In an evaluation every
//! message has a shape of its own, which travels before it and is all that is received ahead; its sender waits until the one
//! before it has arrived.

use std::collections::VecDeque;

use dist_collectives::{Buffer, Communicator, Pending};

use super::activations::{HEADER_LEN, TensorMeta};
use crate::flat::{self, Flat, PendingFlat};
use crate::fsdp::{bytes_sent, follow};
use crate::{Error, Result};

/// The end of a link that sends.
pub(super) struct LinkSender {
    comm: Communicator,
    to: usize,
    /// What has travelled, once something has.
    meta: Option<TensorMeta>,
    header: Option<Pending<Buffer<u64>>>,
    under_way: VecDeque<PendingFlat>,
}

/// The end of a link that receives.
pub(super) struct LinkReceiver {
    comm: Communicator,
    from: usize,
    meta: Option<TensorMeta>,
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

impl LinkSender {
    /// The end of a link to a rank.
    pub(super) const fn new(comm: Communicator, to: usize) -> Self {
        Self { comm, to, meta: None, header: None, under_way: VecDeque::new() }
    }

    /// Sends from now on in the manner of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// What messages look like, once that is known.
    pub(super) const fn meta(&self) -> Option<&TensorMeta> {
        self.meta.as_ref()
    }

    /// Says what the receiver knows messages to look like.
    pub(super) fn expect(&mut self, meta: TensorMeta) {
        self.meta = Some(meta);
    }

    /// Sends what looks like all messages before it; `None` if nothing can look like this.
    pub(super) fn send(&mut self, meta: &TensorMeta, values: Flat) -> Option<()> {
        if self.meta.is_none() {
            let header = meta.encode()?;
            self.header = Some(self.comm.start_send(header, self.to));
            self.meta = Some(meta.clone());
        }
        self.under_way.push_back(values.start_send(&mut self.comm, self.to));
        Some(())
    }

    /// Sends what may look like anything, and says so; `None` if nothing can look like this.
    pub(super) fn send_any(&mut self, meta: &TensorMeta, values: Flat) -> Option<()> {
        self.header = Some(self.comm.start_send(meta.encode()?, self.to));
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

impl LinkReceiver {
    /// The end of a link from a rank.
    pub(super) const fn new(comm: Communicator, from: usize) -> Self {
        Self { comm, from, meta: None, left: 0, each_described: false, posted: None }
    }

    /// Receives from now on in the manner of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// Says what messages look like, which the sender knows.
    pub(super) fn expect(&mut self, meta: TensorMeta) {
        self.meta = Some(meta);
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
    pub(super) fn receive(&mut self) -> Result<(TensorMeta, Flat)> {
        self.post();
        let (meta, values) = match self.posted.take().expect("no more is received than is sent") {
            Posted::Values(values) => {
                (self.meta.clone().expect("it was begun by what it looks like"), values)
            }
            Posted::Header(header) => {
                let meta = TensorMeta::decode(&flat::wait(header)?).ok_or(Error::NoActivation)?;
                if !self.each_described {
                    self.meta = Some(meta.clone());
                }
                let values = self.start(&meta);
                (meta, values)
            }
        };
        let values = values.wait()?;
        self.left -= 1;
        self.post();
        Ok((meta, values))
    }

    /// Begins to receive the next message of the pass, if there is one and it is not yet begun.
    fn post(&mut self) {
        if self.posted.is_some() || self.left == 0 {
            return;
        }
        let known = self.meta.clone().filter(|_| !self.each_described);
        self.posted = Some(match known {
            Some(meta) => Posted::Values(self.start(&meta)),
            None => Posted::Header(self.comm.start_recv(vec![0; HEADER_LEN], self.from)),
        });
    }

    fn start(&mut self, meta: &TensorMeta) -> PendingFlat {
        let memory = Flat::zeros(meta.dtype, meta.len().unwrap_or(0));
        memory.start_receive(&mut self.comm, self.from)
    }

    /// Waits for what was received ahead, whatever becomes of it.
    pub(super) fn forget(&mut self) {
        self.posted = None;
    }
}
