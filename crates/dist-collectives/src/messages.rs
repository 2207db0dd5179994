//! Messages between two ranks.

use bytemuck::Pod;

use crate::{Buffer, Communicator, Pending, Result};

/// One message of a [`batch`](Communicator::batch).
#[derive(Debug)]
pub enum Message<'a, T> {
    /// A message that is sent.
    Send {
        /// The receiving rank.
        to: usize,
        /// The elements to send.
        elements: &'a [T],
    },
    /// A message that is received.
    Receive {
        /// The sending rank.
        from: usize,
        /// The destination, which has the length of the message.
        elements: &'a mut [T],
    },
}

/// One message of a [`start_batch`](Communicator::start_batch), with its memory.
#[derive(Debug)]
pub enum OwnedMessage<T> {
    /// A message that is sent.
    Send {
        /// The receiving rank.
        to: usize,
        /// The elements to send.
        elements: Buffer<T>,
    },
    /// A message that is received.
    Receive {
        /// The sending rank.
        from: usize,
        /// The destination, which has the length of the message.
        elements: Buffer<T>,
    },
}

impl<T: Pod> OwnedMessage<T> {
    /// Returns the memory of the message.
    pub fn into_elements(self) -> Buffer<T> {
        let (Self::Send { elements, .. } | Self::Receive { elements, .. }) = self;
        elements
    }

    fn borrow(&mut self) -> Message<'_, T> {
        match self {
            Self::Send { to, elements } => Message::Send { to: *to, elements },
            Self::Receive { from, elements } => Message::Receive { from: *from, elements },
        }
    }
}

/// # Messages between two ranks
impl Communicator {
    /// Sends a message, which `to` receives with [`recv`](Self::recv). The call may return before `to` receives it,
    /// or wait for it. Long messages wait. Between processes, the first message to a rank with a higher number
    /// waits too: that rank opens the connection when it sends to this rank or receives from it. A rank may send to
    /// itself.
    ///
    /// # Errors
    /// If there is no such rank, or if it died or does not receive the message in time.
    #[doc(alias = "MPI_Send")]
    #[doc(alias = "ncclSend")]
    pub fn send<T: Pod>(&mut self, elements: &[T], to: usize) -> Result<()> {
        self.call(|engine, options| engine.send(elements, to, &options))
    }

    /// Receives the oldest message from `from` that this rank has not received yet. It must have the same type and
    /// the same number of elements.
    ///
    /// # Errors
    /// If there is no such rank, or if it sends something else, died, or sends nothing in time.
    #[doc(alias = "MPI_Recv")]
    #[doc(alias = "ncclRecv")]
    #[doc(alias = "receive")]
    pub fn recv<T: Pod>(&mut self, elements: &mut [T], from: usize) -> Result<()> {
        self.call(|engine, options| engine.receive(elements, from, &options))
    }

    /// Sends a message to one rank while receiving one from another, or the same: [`send`](Self::send) and
    /// [`recv`](Self::recv) at once. Ranks that all call it in a ring do not block each other.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (rank, world_size) = (comm.rank(), comm.world_size());
    ///     let mut received = [0];
    ///     comm.send_recv(&[rank as u32], (rank + 1) % world_size, &mut received, (rank + 2) % world_size).unwrap();
    ///     received[0]
    /// });
    /// assert_eq!(outcome.results, [2, 0, 1]);
    /// ```
    ///
    /// # Errors
    /// Those of the two.
    #[doc(alias = "MPI_Sendrecv")]
    #[doc(alias = "sendrecv")]
    pub fn send_recv<T: Pod>(
        &mut self,
        sent: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
    ) -> Result<()> {
        self.call(|engine, options| engine.send_receive(sent, to, received, from, &options))
    }

    /// Sends and receives all of these messages at once, in any order of the peers. Messages between two ranks keep
    /// the order of the lists. The peer can use another batch, or [`send`](Self::send), [`recv`](Self::recv) and
    /// [`send_recv`](Self::send_recv).
    ///
    /// ```
    /// use dist_collectives::{Communicator, Message};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
    ///     let (own, mut halo) = ([comm.rank() as i32], [[-1]; 2]);
    ///     let [before, after] = &mut halo;
    ///     comm.batch(&mut [
    ///         Message::Receive { from: left, elements: before },
    ///         Message::Receive { from: right, elements: after },
    ///         Message::Send { to: left, elements: &own },
    ///         Message::Send { to: right, elements: &own },
    ///     ])
    ///     .unwrap();
    ///     halo
    /// });
    /// assert_eq!(outcome.results[0], [[2], [1]]);
    /// ```
    ///
    /// # Errors
    /// Those of [`send`](Self::send) and [`recv`](Self::recv).
    #[doc(alias = "batch_isend_irecv")]
    #[doc(alias = "ncclGroupStart")]
    #[doc(alias = "MPI_Waitall")]
    pub fn batch<T: Pod>(&mut self, messages: &mut [Message<'_, T>]) -> Result<()> {
        self.call(|engine, options| engine.batch(messages, &options))
    }

    /// Starts a [`batch`](Self::batch) of messages that own their memory. They are returned with the received
    /// elements. The peers must start their operations too.
    #[doc(alias = "batch_isend_irecv")]
    #[doc(alias = "MPI_Startall")]
    pub fn start_batch<T: Pod + Send>(
        &mut self,
        messages: Vec<OwnedMessage<T>>,
    ) -> Pending<Vec<OwnedMessage<T>>> {
        self.start_messages(messages, |engine, messages, options| {
            let mut borrowed: Vec<_> = messages.iter_mut().map(OwnedMessage::borrow).collect();
            engine.batch(&mut borrowed, options)
        })
    }
}
