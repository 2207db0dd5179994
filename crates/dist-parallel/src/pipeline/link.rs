//! One direction of messages between two stages on different ranks.
//!
//! A link has its own communicator with a worker, so that links do not wait for each other. A send returns at once,
//! and one message is received ahead of its use. The shape of activations is sent before the first of them. Both ends
//! know it from then on, and gradients have the same shape. In an evaluation every message is preceded by its own
//! shape, and only the shape is received ahead. The sender waits there until the previous message has arrived.

use std::collections::VecDeque;

use dist_collectives::{Buffer, Communicator, Pending};

use super::activations::{HEADER_LEN, TensorMeta};
use crate::flat::{self, Flat, PendingFlat};
use crate::fsdp::{bytes_sent, follow};
use crate::{Error, Result};

/// The sending end of a link.
pub(super) struct LinkSender {
    comm: Communicator,
    to: usize,
    /// The shape and type of the messages, after the first.
    meta: Option<TensorMeta>,
    header: Option<Pending<Buffer<u64>>>,
    under_way: VecDeque<PendingFlat>,
}

/// The receiving end of a link.
pub(super) struct LinkReceiver {
    comm: Communicator,
    from: usize,
    meta: Option<TensorMeta>,
    /// The number of messages of this pass that have not been received.
    left: usize,
    /// `true` if each message is preceded by its shape and type.
    each_described: bool,
    posted: Option<Posted>,
}

/// The receive that was started ahead.
enum Posted {
    Header(Pending<Buffer<u64>>),
    Values(PendingFlat),
}

impl LinkSender {
    /// Returns the end of a link to a rank.
    pub(super) const fn new(comm: Communicator, to: usize) -> Self {
        Self { comm, to, meta: None, header: None, under_way: VecDeque::new() }
    }

    /// Inherits the timeout and the reduction order of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// Returns the shape and type of the messages, once known.
    pub(super) const fn meta(&self) -> Option<&TensorMeta> {
        self.meta.as_ref()
    }

    /// Sets the shape and type of the messages, which the receiver knows.
    pub(super) fn expect(&mut self, meta: TensorMeta) {
        self.meta = Some(meta);
    }

    /// Sends a message of the same shape as all before it. `None` if the shape cannot be encoded.
    pub(super) fn send(&mut self, meta: &TensorMeta, values: Flat) -> Option<()> {
        if self.meta.is_none() {
            let header = meta.encode()?;
            self.header = Some(self.comm.start_send(header, self.to));
            self.meta = Some(meta.clone());
        }
        self.under_way.push_back(values.start_send(&mut self.comm, self.to));
        Some(())
    }

    /// Sends a message of any shape, preceded by the shape. `None` if the shape cannot be encoded.
    pub(super) fn send_any(&mut self, meta: &TensorMeta, values: Flat) -> Option<()> {
        self.header = Some(self.comm.start_send(meta.encode()?, self.to));
        self.under_way.push_back(values.start_send(&mut self.comm, self.to));
        Some(())
    }

    /// Recycles the memory of messages that have arrived. Returns the error of a failed one.
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

    /// Waits until all messages have been received.
    pub(super) fn finish(&mut self) -> Result<()> {
        if let Some(header) = self.header.take() {
            flat::wait(header)?;
        }
        self.under_way.drain(..).try_for_each(|sent| sent.wait().map(drop))
    }

    /// Waits for messages in flight and ignores their results.
    pub(super) fn forget(&mut self) {
        self.header = None;
        self.under_way.clear();
    }
}

impl LinkReceiver {
    /// Returns the end of a link from a rank.
    pub(super) const fn new(comm: Communicator, from: usize) -> Self {
        Self { comm, from, meta: None, left: 0, each_described: false, posted: None }
    }

    /// Inherits the timeout and the reduction order of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        follow(&mut self.comm, comm);
    }

    /// Sets the shape and type of the messages, which the sender knows.
    pub(super) fn expect(&mut self, meta: TensorMeta) {
        self.meta = Some(meta);
    }

    /// Starts a step with this number of messages of one shape.
    pub(super) fn begin(&mut self, messages: usize) {
        (self.left, self.each_described) = (messages, false);
    }

    /// Starts a pass with this number of messages, each preceded by its shape.
    pub(super) fn begin_any(&mut self, messages: usize) {
        (self.left, self.each_described) = (messages, true);
    }

    /// Returns `true` if the next message has arrived. Starts to receive it if needed.
    pub(super) fn is_ready(&mut self) -> bool {
        self.post();
        match &mut self.posted {
            Some(Posted::Values(values)) => values.is_done(),
            Some(Posted::Header(_)) | None => false,
        }
    }

    /// Waits for the next message and its shape, and starts to receive the following one.
    pub(super) fn receive(&mut self) -> Result<(TensorMeta, Flat)> {
        self.post();
        let (meta, values) = match self.posted.take().expect("no more is received than is sent") {
            Posted::Values(values) => (self.meta.clone().expect("the metadata came first"), values),
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

    /// Starts to receive the next message of the pass, if there is one and no receive is in flight.
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

    /// Waits for the receive in flight and ignores its result.
    pub(super) fn forget(&mut self) {
        self.posted = None;
    }
}
