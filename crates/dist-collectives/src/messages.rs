//! Messages between two ranks.

use bytemuck::Pod;

use crate::engine::{Direction, FoundMessage, MessageMemory, NewMessage, into_memory};
use crate::{Buffer, Communicator, ElementType, Pending, Result};

/// One message of a [`batch`](Communicator::batch).
#[derive(Debug)]
pub enum Message<'a, T> {
    /// A message that is sent.
    Send {
        /// The receiving rank. The message is not sent if there is none.
        to: Option<usize>,
        /// The tag.
        tag: u32,
        /// The elements to send.
        elements: &'a [T],
    },
    /// A message that is received.
    Receive {
        /// The sending rank. Nothing is received if there is none.
        from: Option<usize>,
        /// The tag.
        tag: u32,
        /// The destination, which has the length of the message.
        elements: &'a mut [T],
    },
}

impl<'a, T> Message<'a, T> {
    /// Creates a message to this rank, or to none, with tag 0.
    pub fn send(to: impl Into<Option<usize>>, elements: &'a [T]) -> Self {
        Self::Send { to: to.into(), tag: 0, elements }
    }

    /// Creates a message that is received from this rank, or from none, with tag 0.
    pub fn receive(from: impl Into<Option<usize>>, elements: &'a mut [T]) -> Self {
        Self::Receive { from: from.into(), tag: 0, elements }
    }

    /// Sets the tag.
    #[must_use]
    pub fn with_tag(mut self, new: u32) -> Self {
        let (Self::Send { tag, .. } | Self::Receive { tag, .. }) = &mut self;
        *tag = new;
        self
    }

    /// Returns the other rank.
    pub(crate) const fn peer(&self) -> Option<usize> {
        let (Self::Send { to: peer, .. } | Self::Receive { from: peer, .. }) = self;
        *peer
    }
}

/// One message of a [`start_batch`](Communicator::start_batch), with its memory.
#[derive(Debug)]
pub enum OwnedMessage<T> {
    /// A message that is sent.
    Send {
        /// The receiving rank. The message is not sent if there is none.
        to: Option<usize>,
        /// The tag.
        tag: u32,
        /// The elements to send.
        elements: Buffer<T>,
    },
    /// A message that is received.
    Receive {
        /// The sending rank. Nothing is received if there is none.
        from: Option<usize>,
        /// The tag.
        tag: u32,
        /// The destination, which has the length of the message.
        elements: Buffer<T>,
    },
}

impl<T: Pod> OwnedMessage<T> {
    /// Creates a message to this rank, or to none, with tag 0.
    pub fn send(to: impl Into<Option<usize>>, elements: impl Into<Buffer<T>>) -> Self {
        Self::Send { to: to.into(), tag: 0, elements: elements.into() }
    }

    /// Creates a message that is received from this rank, or from none, with tag 0.
    pub fn receive(from: impl Into<Option<usize>>, elements: impl Into<Buffer<T>>) -> Self {
        Self::Receive { from: from.into(), tag: 0, elements: elements.into() }
    }

    /// Sets the tag.
    #[must_use]
    pub fn with_tag(mut self, new: u32) -> Self {
        let (Self::Send { tag, .. } | Self::Receive { tag, .. }) = &mut self;
        *tag = new;
        self
    }

    /// Returns the memory of the message.
    pub fn into_elements(self) -> Buffer<T> {
        let (Self::Send { elements, .. } | Self::Receive { elements, .. }) = self;
        elements
    }
}

impl<T: Pod + Send> OwnedMessage<T> {
    /// Returns the message to start, unless there is no other rank, and this message without its memory.
    fn into_new(mut self) -> (Option<NewMessage>, Self) {
        let (direction, tag, elements) = match &mut self {
            Self::Send { to: Some(to), tag, elements } => (Direction::To(*to), *tag, elements),
            Self::Receive { from: Some(from), tag, elements } => (Direction::From(*from), *tag, elements),
            Self::Send { to: None, .. } | Self::Receive { from: None, .. } => return (None, self),
        };
        let message =
            NewMessage::new::<T>(direction, tag, std::mem::replace(elements, Buffer::from(Vec::new())));
        (Some(message), self)
    }

    /// Sets the memory of the message.
    fn set_elements(&mut self, new: Buffer<T>) {
        let (Self::Send { elements, .. } | Self::Receive { elements, .. }) = self;
        *elements = new;
    }
}

/// The memory of a started receive from any rank: a [`Buffer`] or a vector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReceivedMessage<B> {
    /// The sender. `None` if no message has matched the receive, because it failed or was cancelled.
    pub from: Option<usize>,
    /// The elements of the message.
    pub elements: B,
}

/// A message that has arrived and was not received, from [`Communicator::probe`]. Only this message satisfies its
/// receives. Dropping it leaves the message to later receives.
#[derive(Debug)]
#[must_use = "the message is received by recv or recv_vec"]
pub struct ProbedMessage<'a> {
    communicator: &'a mut Communicator,
    found: FoundMessage,
}

impl ProbedMessage<'_> {
    /// Returns the sender.
    pub const fn from(&self) -> usize {
        self.found.from
    }

    /// Returns the tag.
    pub fn tag(&self) -> u32 {
        self.found.call.tag().expect("messages have tags")
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        usize::try_from(self.found.call.count).expect("the message fits into memory")
    }

    /// Returns `true` if the message has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.found.call.element.expect("messages have elements")
    }

    /// Receives the message.
    ///
    /// # Errors
    /// If the message has another type or length.
    #[doc(alias = "MPI_Mrecv")]
    pub fn recv<T: Pod>(self, elements: &mut [T]) -> Result<()> {
        let (from, tag) = (self.from(), self.tag());
        self.communicator.with_tag(tag).recv(elements, from)
    }

    /// Receives the message in a new vector.
    ///
    /// # Errors
    /// If the message has another type.
    #[doc(alias = "MPI_Mrecv")]
    pub fn recv_vec<T: Pod>(self) -> Result<Vec<T>> {
        let (from, tag) = (self.from(), self.tag());
        self.communicator.with_tag(tag).recv_vec(from)
    }
}

/// # Messages between two ranks
///
/// Messages and collectives are separate streams: a rank may send a message, take part in a collective, and the
/// receiver may receive the message after that collective. Every message has a tag, which is 0 unless
/// [`with_tag`](Communicator::with_tag) sets another. A receive takes the oldest message of its sender with its
/// tag. Messages with other tags that arrive before it are kept for later receives, up to 64 MiB of each sender. Then the
/// sender waits until some are received.
///
/// Messages of more than 4 MiB ([`KEPT_MESSAGE_BYTES_MAX`](crate::transport::KEPT_MESSAGE_BYTES_MAX)) are never kept: the
/// receiver is told of such a message, and its bytes stay with the sender until a receive has matched it. They then go
/// directly into the memory of the receive.
///
/// A message that was started meets a blocking call, and the reverse. Started messages go on while collectives of the same
/// communicator run.
///
/// The other rank may be an `Option`. A message to or from `None` ends at once and changes no memory, so that a rank at the
/// edge of a grid calls the same as the others.
impl Communicator {
    /// Sends a message, which `to` receives with [`recv`](Self::recv). The call may return before `to` receives it,
    /// or wait for it. A message of more than 4 MiB waits for its receive. Two ranks that both send one first, and receive
    /// afterwards, would wait forever: use [`send_recv`](Self::send_recv), [`batch`](Self::batch) or
    /// [`start_send`](Self::start_send). A rank may send to itself.
    ///
    /// # Errors
    /// If there is no such rank, or if it died or does not take the message in time. If no receive has matched a message of
    /// more than 4 MiB in time, the error is [`Error::NotReceived`](crate::Error::NotReceived).
    #[doc(alias = "MPI_Send")]
    #[doc(alias = "ncclSend")]
    #[doc(alias = "MPI_PROC_NULL")]
    pub fn send<T: Pod>(&mut self, elements: &[T], to: impl Into<Option<usize>>) -> Result<()> {
        let Some(to) = to.into() else { return Ok(()) };
        self.call_messages(|engine, options| engine.send(elements, to, &options))
    }

    /// Receives the oldest message from `from` with the [tag](Self::with_tag) of this call that this rank has not
    /// received yet. It must have the same type and the same number of elements.
    ///
    /// # Errors
    /// If there is no such rank, or if its message has another type or length. If it died or sends no such message in
    /// time; [`Error::Unmatched`](crate::Error::Unmatched) then lists the messages with other tags that it has sent.
    #[doc(alias = "MPI_Recv")]
    #[doc(alias = "ncclRecv")]
    #[doc(alias = "receive")]
    #[doc(alias = "MPI_PROC_NULL")]
    pub fn recv<T: Pod>(&mut self, elements: &mut [T], from: impl Into<Option<usize>>) -> Result<()> {
        let Some(from) = from.into() else { return Ok(()) };
        self.call_messages(|engine, options| engine.receive(elements, from, &options))
    }

    /// Receives a message like [`recv`](Self::recv) that may be shorter than the slice. Returns its number of elements;
    /// the rest of the slice is unchanged.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv), but only a longer message has the wrong length.
    #[doc(alias = "MPI_Get_count")]
    pub fn recv_up_to<T: Pod>(
        &mut self,
        elements: &mut [T],
        from: impl Into<Option<usize>>,
    ) -> Result<usize> {
        let Some(from) = from.into() else { return Ok(0) };
        self.call_messages(|engine, options| engine.receive_up_to(elements, from, &options))
    }

    /// Receives the next message of any rank with the [tag](Self::with_tag) of this call. Returns the sender. If several
    /// ranks have sent one, they take turns.
    ///
    /// The result depends on the order in which messages arrive, so a program that uses it may compute other bits in
    /// every run. On the simulated network the seed decides.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     if comm.rank() > 0 {
    ///         comm.send(&[10 * comm.rank()], 0).unwrap();
    ///         return 0;
    ///     }
    ///     let mut sum = 0;
    ///     for _ in 1..comm.world_size() {
    ///         let mut value = [0];
    ///         let sender = comm.recv_any(&mut value).unwrap();
    ///         assert_eq!(value[0], 10 * sender);
    ///         sum += value[0];
    ///     }
    ///     sum
    /// });
    /// assert_eq!(outcome.results[0], 30);
    /// ```
    ///
    /// # Errors
    /// If a message with this tag has another type or length. If a rank died, all other ranks have left, or none sends
    /// such a message in time; [`Error::UnmatchedAny`](crate::Error::UnmatchedAny) then lists the messages with other
    /// tags that have come.
    #[doc(alias = "MPI_ANY_SOURCE")]
    #[doc(alias = "recvAnysource")]
    pub fn recv_any<T: Pod>(&mut self, elements: &mut [T]) -> Result<usize> {
        self.call_messages(|engine, options| engine.receive_any(elements, &options))
    }

    /// Receives a message of any rank like [`recv_any`](Self::recv_any), of any length. Returns the sender and the
    /// elements.
    ///
    /// # Errors
    /// As for [`recv_any`](Self::recv_any), but any length is right.
    #[doc(alias = "MPI_ANY_SOURCE")]
    pub fn recv_any_vec<T: Pod>(&mut self) -> Result<(usize, Vec<T>)> {
        self.call_messages(|engine, options| engine.receive_vec(None, &options))
    }

    /// Waits until a message of this rank with the [tag](Self::with_tag) of this call has arrived, without receiving it. A
    /// message of more than 4 MiB is found while its bytes are still with its sender; its receive gets them directly.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     if comm.rank() == 0 {
    ///         comm.send(&[1.5, 2.5], 1).unwrap();
    ///         return Vec::new();
    ///     }
    ///     let message = comm.probe(0).unwrap();
    ///     let mut received = vec![0.0; message.len()];
    ///     message.recv(&mut received).unwrap();
    ///     received
    /// });
    /// assert_eq!(outcome.results[1], [1.5, 2.5]);
    /// ```
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv), but any type and any length are right.
    #[doc(alias = "MPI_Probe")]
    #[doc(alias = "MPI_Mprobe")]
    pub fn probe(&mut self, from: usize) -> Result<ProbedMessage<'_>> {
        let found = self.call_messages(|engine, options| engine.probe(Some(from), true, &options))?;
        Ok(ProbedMessage { communicator: self, found: found.expect("a probe that waits finds a message") })
    }

    /// Waits like [`probe`](Self::probe) until a message of any rank has arrived.
    ///
    /// # Errors
    /// Those of [`recv_any`](Self::recv_any), but any type and any length are right.
    #[doc(alias = "MPI_Mprobe")]
    pub fn probe_any(&mut self) -> Result<ProbedMessage<'_>> {
        let found = self.call_messages(|engine, options| engine.probe(None, true, &options))?;
        Ok(ProbedMessage { communicator: self, found: found.expect("a probe that waits finds a message") })
    }

    /// Returns a message of this rank with the [tag](Self::with_tag) of this call if one has arrived, without receiving
    /// it. Does not wait. A loop that calls it receives what the peers send.
    ///
    /// # Errors
    /// If there is no such rank, or the job was aborted.
    #[doc(alias = "MPI_Iprobe")]
    #[doc(alias = "MPI_Improbe")]
    pub fn try_probe(&mut self, from: usize) -> Result<Option<ProbedMessage<'_>>> {
        let found = self.call_messages(|engine, options| engine.probe(Some(from), false, &options))?;
        Ok(found.map(|found| ProbedMessage { communicator: self, found }))
    }

    /// Returns a message of any rank like [`try_probe`](Self::try_probe).
    ///
    /// # Errors
    /// If the job was aborted.
    #[doc(alias = "MPI_Improbe")]
    pub fn try_probe_any(&mut self) -> Result<Option<ProbedMessage<'_>>> {
        let found = self.call_messages(|engine, options| engine.probe(None, false, &options))?;
        Ok(found.map(|found| ProbedMessage { communicator: self, found }))
    }

    /// Receives a message like [`recv`](Self::recv), of any length.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     if comm.rank() == 0 {
    ///         comm.send(&[1, 2, 3], 1).unwrap();
    ///         return Vec::new();
    ///     }
    ///     comm.recv_vec::<i32>(0).unwrap()
    /// });
    /// assert_eq!(outcome.results[1], [1, 2, 3]);
    /// ```
    ///
    /// # Errors
    /// As for [`recv`](Self::recv), but any length is right.
    #[doc(alias = "MPI_Mprobe")]
    #[doc(alias = "MPI_Get_count")]
    pub fn recv_vec<T: Pod>(&mut self, from: impl Into<Option<usize>>) -> Result<Vec<T>> {
        let Some(from) = from.into() else { return Ok(Vec::new()) };
        self.call_messages(|engine, options| engine.receive_vec(Some(from), &options))
            .map(|(_, elements)| elements)
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
        to: impl Into<Option<usize>>,
        received: &mut [T],
        from: impl Into<Option<usize>>,
    ) -> Result<()> {
        match (to.into(), from.into()) {
            (Some(to), Some(from)) => {
                self.call_messages(|engine, options| engine.send_receive(sent, to, received, from, &options))
            }
            (to, None) => self.send(sent, to),
            (None, from) => self.recv(received, from),
        }
    }

    /// Sends and receives all of these messages at once, in any order of the peers. Messages between two ranks with
    /// one tag keep the order of the lists. The peer can use another batch, or [`send`](Self::send),
    /// [`recv`](Self::recv) and [`send_recv`](Self::send_recv).
    ///
    /// In this example the tag is the direction of a message. On two ranks both neighbours are the same rank, and
    /// without tags the two halos would be swapped.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Message};
    /// use dist_transport::sim;
    ///
    /// const TO_LEFT: u32 = 1;
    /// const TO_RIGHT: u32 = 2;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (rank, ranks) = (comm.rank(), comm.world_size());
    ///     let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    ///     let (first, last) = ([10 * rank as i32], [10 * rank as i32 + 1]);
    ///     let (mut before, mut after) = ([-1], [-1]);
    ///     comm.batch(&mut [
    ///         Message::receive(left, &mut before).with_tag(TO_RIGHT),
    ///         Message::receive(right, &mut after).with_tag(TO_LEFT),
    ///         Message::send(left, &first).with_tag(TO_LEFT),
    ///         Message::send(right, &last).with_tag(TO_RIGHT),
    ///     ])
    ///     .unwrap();
    ///     [before[0], after[0]]
    /// });
    /// assert_eq!(outcome.results, [[11, 10], [1, 0]]);
    /// ```
    ///
    /// # Errors
    /// Those of [`send`](Self::send) and [`recv`](Self::recv).
    #[doc(alias = "batch_isend_irecv")]
    #[doc(alias = "ncclGroupStart")]
    #[doc(alias = "MPI_Waitall")]
    pub fn batch<T: Pod>(&mut self, messages: &mut [Message<'_, T>]) -> Result<()> {
        self.call_messages(|engine, options| engine.batch(messages, &options))
    }

    /// Starts a [`batch`](Self::batch) of messages that own their memory. They are returned with the received
    /// elements.
    #[doc(alias = "batch_isend_irecv")]
    #[doc(alias = "MPI_Startall")]
    pub fn start_batch<T: Pod + Send>(
        &mut self,
        messages: Vec<OwnedMessage<T>>,
    ) -> Pending<Vec<OwnedMessage<T>>> {
        self.start_owned(messages, |messages| messages)
    }

    /// Starts messages, and returns what `collect` makes of them at their end.
    fn start_owned<T: Pod + Send, B: Send + 'static>(
        &mut self,
        messages: Vec<OwnedMessage<T>>,
        collect: impl FnOnce(Vec<OwnedMessage<T>>) -> B + Send + 'static,
    ) -> Pending<B> {
        let (started, mut messages): (Vec<_>, Vec<_>) =
            messages.into_iter().map(OwnedMessage::into_new).unzip();
        let is_started: Vec<_> = started.iter().map(Option::is_some).collect();
        self.start_messages(started.into_iter().flatten().collect(), move |memories| {
            let started = messages.iter_mut().zip(is_started).filter(|(_, is_started)| *is_started);
            for ((message, _), memory) in started.zip(memories) {
                message.set_elements(into_memory(memory));
            }
            collect(messages)
        })
    }

    /// Starts one message of elements of type `T`. Without a direction there is no other rank.
    fn start_message<T: Pod, M: MessageMemory>(
        &mut self,
        direction: Option<Direction>,
        memory: M,
    ) -> Pending<M> {
        let Some(direction) = direction else { return self.start_messages(Vec::new(), |_| memory) };
        let message = NewMessage::new::<T>(direction, self.settings.tag, memory);
        self.start_messages(vec![message], |mut memories| into_memory(memories.pop().expect("one message")))
    }

    /// Starts to [`send`](Self::send) a message. It may end before `to` has received the message, or only then. The
    /// messages that were sent or started before it to the same rank are sent first, except those of more than 4 MiB that no
    /// receive has matched.
    ///
    /// Started messages are independent: each waits for its own peer only. All ranks may first start to receive, then
    /// send, and then wait:
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (rank, ranks) = (comm.rank(), comm.world_size());
    ///     let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    ///     let halos = [left, right].map(|from| comm.start_recv(vec![0_usize], from));
    ///     comm.send(&[rank], left).unwrap();
    ///     comm.send(&[rank], right).unwrap();
    ///     halos.map(|halo| halo.wait().unwrap()[0])
    /// });
    /// assert_eq!(outcome.results, [[2, 1], [0, 2], [1, 0]]);
    /// ```
    #[doc(alias = "MPI_Isend")]
    #[doc(alias = "isend")]
    pub fn start_send<T: Pod + Send>(
        &mut self,
        elements: impl Into<Buffer<T>>,
        to: impl Into<Option<usize>>,
    ) -> Pending<Buffer<T>> {
        self.start_message::<T, _>(to.into().map(Direction::To), elements.into())
    }

    /// Starts to [receive](Self::recv) a message of `from`. It gets the oldest message with the tag of this call that no
    /// earlier receive has matched. A later receive from the same rank with the same tag gets a later message.
    #[doc(alias = "MPI_Irecv")]
    #[doc(alias = "irecv")]
    pub fn start_recv<T: Pod + Send>(
        &mut self,
        elements: impl Into<Buffer<T>>,
        from: impl Into<Option<usize>>,
    ) -> Pending<Buffer<T>> {
        self.start_message::<T, _>(from.into().map(Direction::From), elements.into())
    }

    /// Starts to [receive](Self::start_recv) a message of any length.
    #[doc(alias = "MPI_Improbe")]
    pub fn start_recv_vec<T: Pod + Send>(&mut self, from: impl Into<Option<usize>>) -> Pending<Vec<T>> {
        self.start_message::<T, _>(from.into().map(Direction::From), Vec::new())
    }

    /// Starts to [receive](Self::recv_any) a message of any rank. It gets the next message with the tag of this call that
    /// no earlier receive has matched. If several ranks have sent one, they take turns.
    ///
    /// The receive fails if all other ranks have left. A receive that is not needed any more is
    /// [cancelled](Pending::cancel) or dropped before. As for [`recv_any`](Self::recv_any), results may depend on the
    /// order in which messages arrive. On the simulated network the seed decides.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Pending};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     if comm.rank() > 0 {
    ///         comm.send(&[10 * comm.rank()], 0).unwrap();
    ///         return 0;
    ///     }
    ///     let receives = [0; 2].map(|_| comm.start_recv_any(vec![0_usize]));
    ///     let received = Pending::wait_all(receives).into_iter().map(Result::unwrap);
    ///     received.map(|message| message.elements[0] + message.from.unwrap()).sum()
    /// });
    /// assert_eq!(outcome.results[0], 33);
    /// ```
    #[doc(alias = "MPI_ANY_SOURCE")]
    #[doc(alias = "MPI_Irecv")]
    pub fn start_recv_any<T: Pod + Send>(
        &mut self,
        elements: impl Into<Buffer<T>>,
    ) -> Pending<ReceivedMessage<Buffer<T>>> {
        let memory = ReceivedMessage { from: None, elements: elements.into() };
        self.start_message::<T, _>(Some(Direction::FromAny), memory)
    }

    /// Starts to [receive](Self::start_recv_any) a message of any rank and any length.
    #[doc(alias = "MPI_ANY_SOURCE")]
    pub fn start_recv_any_vec<T: Pod + Send>(&mut self) -> Pending<ReceivedMessage<Vec<T>>> {
        let memory = ReceivedMessage { from: None, elements: Vec::new() };
        self.start_message::<T, _>(Some(Direction::FromAny), memory)
    }

    /// Starts a [`send_recv`](Self::send_recv); both buffers are returned.
    #[doc(alias = "MPI_Isendrecv")]
    #[doc(alias = "isendrecv")]
    pub fn start_send_recv<T: Pod + Send>(
        &mut self,
        sent: impl Into<Buffer<T>>,
        to: impl Into<Option<usize>>,
        received: impl Into<Buffer<T>>,
        from: impl Into<Option<usize>>,
    ) -> Pending<(Buffer<T>, Buffer<T>)> {
        let messages = vec![OwnedMessage::send(to, sent), OwnedMessage::receive(from, received)];
        let tag = self.settings.tag;
        let messages = messages.into_iter().map(|message| message.with_tag(tag)).collect();
        self.start_owned(messages, |messages| {
            let mut elements = messages.into_iter().map(OwnedMessage::into_elements);
            let mut next = || elements.next().expect("two messages");
            (next(), next())
        })
    }
}
