//! The contract between code that moves bytes and code that decides which bytes move.

use std::fmt;
use std::ops::Add;
use std::sync::Arc;

use crate::native::NativeCollectives;
use crate::shm_group::ShmGroup;
use crate::{
    Abort, AbortDecision, Allocation, Cause, ChannelId, Fingerprint, Inbox, LazyDeadline, Rank, Result,
    Runtime, StartedCount, Store, StoreError,
};

/// One rank's endpoint on one channel of a group: the interface that a `Communicator` uses.
///
/// Implement this trait to let a `Communicator` use another network. To run an algorithm of dist-algos alone over a
/// link, its trait `RingTransport` is enough: an exchange of bytes, which every `Transport` has.
///
/// Messages from one rank to another arrive in the order in which they were sent. A message may be empty.
/// Every message carries its length and the [`Fingerprint`] given to [`begin`](Transport::begin). A receiver
/// that is in another call, or expects another length, gets an error before any byte is delivered.
///
/// Every method that waits takes a [`LazyDeadline`] and returns by it. A call that ends at its deadline may
/// take about 50 ms longer, to learn which rank caused the wait. After an error, or after a panic in a
/// function that receives bytes, the message is lost and the whole job is aborted. All later calls on all
/// transports of the job then fail with the same [`Abort`]. Invalid arguments are refused without an abort.
/// Errors name ranks by their numbers in the world ([`members`](Transport::members)).
///
/// A rank may exchange messages with itself; the bytes are copied.
pub trait Transport: Send + fmt::Debug {
    /// Returns this rank and the size of the group.
    fn rank(&self) -> Rank;

    /// Returns the ranks of the group by their numbers in the world, in the group's order.
    fn members(&self) -> &[usize];

    /// Returns the channel whose messages this transport carries.
    fn channel(&self) -> ChannelId;

    /// Returns the clock and the threads that this transport uses.
    fn runtime(&self) -> &Runtime;

    /// Sets the call that the following messages belong to.
    fn begin(&mut self, call: &Fingerprint);

    /// Announces a call that consists of many others, on this channel and on others: a training step or a
    /// save. All ranks of the group announce the same calls in the same order. Announced calls have their own
    /// numbers, separate from those that they [begin](Self::begin). Nothing is sent.
    ///
    /// If a rank waits long for any reason, its last announced calls are compared with those of other ranks
    /// that wait long. Two calls with the same number that differ end the job with [`Cause::Mismatch`],
    /// because those ranks would wait forever. A transport that does not compare announced calls does
    /// nothing.
    fn announce(&mut self, _call: &Fingerprint) {}

    /// Sends to one peer while receiving from another, or from the same one. Either direction may be absent.
    ///
    /// # Errors
    /// As described for the trait; the error names the peer.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Sends all of `buffer` to `peer`, which sends equally many bytes. Calls `combine` with each range of
    /// `buffer` and the peer's bytes for it, after this rank's own bytes of that range have been sent.
    ///
    /// # Errors
    /// As for [`exchange`](Transport::exchange).
    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Sends and receives all of these messages at once, in whatever order the peers do it. Messages to one
    /// peer are sent in the order of the list; messages from one peer are received in the order of the list.
    ///
    /// # Errors
    /// As for [`exchange`](Transport::exchange).
    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Sends messages that their receivers match, and receives the messages that `inbox` awaits, all at once.
    /// Each message has its own fingerprint. The inbox of the receiver learns the fingerprint and the length of
    /// a message before it decides where the bytes go. Returns as soon as everything is sent and nothing more is
    /// awaited.
    ///
    /// Messages to one peer are sent in the order of the list. A message of at most
    /// [`KEPT_MESSAGE_BYTES_MAX`](crate::KEPT_MESSAGE_BYTES_MAX) bytes never waits for its receiver to enter a call, only
    /// for it to take the bytes. A longer one is [announced](Inbox::announce), and waits until the inbox of its receiver
    /// wants the bytes. Later messages to the same peer are sent meanwhile, and this rank's inbox gets those that the
    /// peer sends, if it [keeps](Inbox::keeps) more of them. If nothing wants the bytes by the deadline, the error is a
    /// timeout of [`Activity::Match`](crate::Activity::Match).
    ///
    /// To report waits, the transport uses the call of [`begin`](Transport::begin).
    ///
    /// The inbox may [pause](Inbox::pause) the call, which then returns early. Messages that were not reported as
    /// [sent](Inbox::sent) may have been sent in part. The next call must get them again, in the same order, before
    /// other messages to the same ranks. Until they are sent, their memory must not change or be freed.
    ///
    /// A transport carries either matched messages or those of the other methods, never both: [fork](Transport::fork)
    /// one for each.
    ///
    /// # Errors
    /// As for [`exchange`](Transport::exchange), and if the inbox refuses a message.
    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Waits until at least one of these peers has sent a message that was not received yet. Returns the
    /// peers that have sent none by then, or by the deadline, in the order of the list.
    ///
    /// The result ends nothing: messages can be received as before. Opening connections may take longer than
    /// the deadline.
    ///
    /// # Errors
    /// If the job is aborted, a peer has left, or a peer cannot be connected to.
    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>>;

    /// Returns a rank of the group that has sent a message which was not received yet, if one is known. Does
    /// not wait: a message in flight may be missed. Transports that cannot tell return `None`.
    fn unread(&mut self) -> Option<usize> {
        None
    }

    /// Returns the host number of each rank of the group. Ranks with equal numbers share a machine and its
    /// memory. Every rank sees the same numbers.
    fn hosts(&self) -> Vec<u64>;

    /// Returns how many cores the ranks of the group on this host have together. If that is fewer than the
    /// ranks, the host is oversubscribed and a spinning rank keeps another from running. All ranks of a host
    /// see the same number. The default is one core per rank.
    fn cores(&self) -> usize {
        self.rank().world_size()
    }

    /// Creates a transport among these ranks of this group, numbered in the order of the list, on its own
    /// channel. Returns `None` if this rank is not in the list.
    ///
    /// Nothing is sent: every rank of the group, member or not, makes the same calls in the same order. One
    /// call can create several groups that share no rank; each rank names the members of its own group.
    ///
    /// # Errors
    /// If the list is empty, names a rank twice, or names a rank that does not exist.
    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>>;

    /// Creates a transport among these ranks of this group, which includes this rank. Only the members make
    /// the call, at any time; it is not a [`fork`](Self::fork), and other ranks do not know of it. Its
    /// channel depends on the number: members that give the same number and the same list are on one channel.
    /// A number may be used only once with the same list. Nothing is sent.
    ///
    /// If the lists of two members differ, they wait for each other until their deadlines.
    ///
    /// # Errors
    /// As for [`fork`](Self::fork), and if this rank is not in the list.
    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>>;

    /// Ends the job for every rank, with this rank as the cause: it has [given up](crate::Cause::gave_up) or
    /// panicked. An earlier abort is kept.
    fn abort(&mut self, cause: Cause);

    /// Returns the abort record of the job, if it was aborted. After the coordinator has committed a record, it
    /// is the same on every rank. Until then it is what this rank itself has noticed.
    fn aborted(&self) -> Option<Abort>;

    /// Returns the place that decides about aborts, for a transport that runs beside this one in the same job. Proposals of
    /// both then get one record. Transports that offer none return `None`.
    fn abort_decision(&self) -> Option<Arc<dyn AbortDecision>> {
        None
    }

    /// Returns the traffic of this transport so far.
    fn traffic(&self) -> Traffic;

    /// Returns the memory that all ranks of the group share, if they share any.
    ///
    /// The first call is collective: every rank of the group makes it at the same point among its calls,
    /// after the same [`begin`](Self::begin). The ranks then agree; if one of them cannot share memory, none
    /// does. Later calls only return the result.
    ///
    /// # Errors
    /// If the ranks do not reach an agreement by the deadline.
    fn shm_group(&mut self, _due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        Ok(None)
    }

    /// Returns the collectives that a library below the transport executes, if the ranks have chosen that. Every rank of
    /// the group returns the same.
    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        None
    }

    /// Allocates this many zeroed bytes that the other ranks of this host can map, on every channel of the
    /// job. Returns `None` if the transport does not support that, or no memory is left.
    fn allocate(&mut self, _bytes: usize) -> Option<Allocation> {
        None
    }

    /// Returns the key-value store of the job. All transports of all ranks reach the same one. A transport of ranks
    /// without a coordinator may have none.
    ///
    /// # Errors
    /// [`StoreError::NoStore`] if the transport has no store.
    fn store(&self) -> Result<Store, StoreError> {
        Err(StoreError::NoStore)
    }

    /// Records the step of the current call that this rank has reached, for transports that report waits. The
    /// default does nothing.
    fn set_progress(&mut self, _progress: Progress) {}

    /// Sets the count of the started operations of the communicator that this transport belongs to. All transports of the
    /// communicator on this rank get the same count.
    ///
    /// A transport that reports circles of waits needs the count for circles of calls on several channels of one
    /// communicator. It reports such a circle only if the count is 0 on each of the ranks, because a started operation may
    /// end the wait of another rank. The default does nothing.
    fn set_started_count(&mut self, _count: &StartedCount) {}

    /// Sets the function that formats calls in reports. It returns `None` for a fingerprint that is no call.
    fn set_call_formatter(&mut self, _describe: fn(&Fingerprint) -> Option<String>) {}
}

/// The progress of a rank in its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The step, counted from 0.
    pub step: usize,
    /// The first chunk that the step receives, and the number of chunks.
    pub receives: Option<(usize, usize)>,
}

/// A function that combines a range of the peer's bytes into the same range of this rank's bytes. Ranges
/// begin at multiples of 64 bytes from the start of the message, and the peer's bytes are aligned to 64.
pub type Combine<'a> = dyn FnMut(&mut [u8], &[u8]) + 'a;

/// A message to send, and its receiver.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// The receiving rank.
    pub to: usize,
    /// The message, in pieces.
    pub parts: &'a [&'a [u8]],
}

impl Outgoing<'_> {
    /// Returns the number of bytes of the message.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Returns `true` if the message is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A message to receive, and its sender.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// The sending rank.
    pub from: usize,
    /// Bytes of the message; another length is an error.
    pub len: usize,
    /// The destination of the bytes.
    pub sink: Sink<'a>,
}

impl Incoming<'_> {
    /// Reborrows the sink for a shorter lifetime.
    pub fn reborrow(&mut self) -> Incoming<'_> {
        let sink = match &mut self.sink {
            Sink::Into(memory) => Sink::Into(memory),
            Sink::Each(take) => Sink::Each(take),
        };
        Incoming { from: self.from, len: self.len, sink }
    }
}

/// The destination of received bytes.
pub enum Sink<'a> {
    /// This memory, which is as long as the message. After an error its contents are unspecified.
    Into(&'a mut [u8]),
    /// This function. It gets the pieces of the message in order, each with its offset. Offsets are multiples
    /// of 64, each piece except the last is a multiple of 64 long, and pieces are aligned to 64 bytes.
    Each(&'a mut dyn FnMut(usize, &[u8])),
}

impl fmt::Debug for Sink<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Into(memory) => write!(f, "Into({} bytes)", memory.len()),
            Self::Each(_) => write!(f, "Each(..)"),
        }
    }
}

/// A count of messages and of payload bytes, without headers. Bytes that ranks publish or read in [shared
/// memory](ShmGroup) count as bytes, not as messages. Several ranks may read the bytes that one rank
/// publishes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub messages_sent: u64,
    /// Bytes sent, published for others, or written into their memory.
    pub bytes_sent: u64,
    /// Messages received.
    pub messages_received: u64,
    /// Bytes received, or read from the memory of others.
    pub bytes_received: u64,
}

#[cfg(any(feature = "tcp", feature = "sim"))]
impl Traffic {
    /// Counts the messages and bytes of one exchange.
    pub(crate) fn count(&mut self, sent: Option<usize>, received: Option<usize>) {
        self.messages_sent += u64::from(sent.is_some());
        self.bytes_sent += sent.unwrap_or(0) as u64;
        self.messages_received += u64::from(received.is_some());
        self.bytes_received += received.unwrap_or(0) as u64;
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            messages_sent: self.messages_sent + other.messages_sent,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            messages_received: self.messages_received + other.messages_received,
            bytes_received: self.bytes_received + other.bytes_received,
        }
    }
}
