//! The contract between those who move bytes and those who decide which.

use std::fmt;
use std::ops::Add;

use crate::{Abort, Allocation, Cause, ChannelId, Direct, Fingerprint, LazyDeadline, Rank, Result, Runtime};

/// Bytes between the ranks of one group, on one channel.
///
/// Messages of an ordered pair of ranks arrive in the order in which they were sent; a message of no bytes is a
/// message. Every message carries the [`Fingerprint`] given to [`begin`](Transport::begin) and its length: a
/// receiver in another call, or expecting another length, gets an error before a byte is delivered.
///
/// Every method that waits takes a [`LazyDeadline`] and returns by its deadline; where that is what ends it, it may take some 50
/// milliseconds more to hear who was waited for in truth. After an error, or a panic of a function that was given bytes, the
/// bytes of the message are lost, so the whole job is aborted: every later call on any of its transports fails with the
/// same [`Abort`]. Calls with arguments that make no sense are refused without harm. Errors name ranks by their numbers in
/// the world ([`members`](Transport::members)).
///
/// A rank may exchange with itself; the bytes are copied.
pub trait Transport: Send + fmt::Debug {
    /// This rank and the size of the group.
    fn rank(&self) -> Rank;

    /// The ranks of the group by their numbers in the world, in the group's order.
    fn members(&self) -> &[usize];

    /// The channel whose messages this transport carries.
    fn channel(&self) -> ChannelId;

    /// The clock and the threads that this transport lives by.
    fn runtime(&self) -> &Runtime;

    /// Says which call the following messages belong to.
    fn begin(&mut self, call: &Fingerprint);

    /// Announces a call that is made of many others, on this channel and on others: a step of a training, a save. All ranks of
    /// the group announce the same calls in the same order, numbered as those that they [begin](Self::begin) are, but by
    /// themselves. Nothing is sent. If a rank waits for long, whatever for, its last announced calls are compared with those of
    /// the other ranks that do: two with one number that differ end the job with [`Cause::Mismatch`], because ranks in different
    /// calls of this kind wait for each other where they never meet. A transport that does not compare them does nothing.
    fn announce(&mut self, _call: &Fingerprint) {}

    /// Sends to one peer while receiving from another, or the same; either half may be absent.
    ///
    /// # Errors
    /// As described for the trait; the error names the peer.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Sends all of `buffer` to `peer`, which sends as many bytes of its own: `combine` is given each range of
    /// `buffer` with the peer's bytes for it, once this rank's own bytes of that range have left.
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

    /// Sends and receives all of these messages at once, whatever order the peers do it in. Messages to one peer leave
    /// in the order of the list, and those of one peer are received in the order of theirs.
    ///
    /// # Errors
    /// As for [`exchange`](Transport::exchange).
    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()>;

    /// Waits until one of these peers has sent something that was not received yet; gives those that have not by then, or by
    /// the deadline, in the order of the list. Their silence harms nothing: messages can be received as before. It may
    /// take longer than the deadline by as much as connections take that were not open yet.
    ///
    /// # Errors
    /// If the job is aborted, a peer has left, or one cannot be connected to.
    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>>;

    /// Returns a rank of the group that has sent a message which this rank has not received, if one is known. It does not
    /// wait: a message that is still on its way may be missed. Transports that cannot tell return `None`.
    fn unread(&mut self) -> Option<usize> {
        None
    }

    /// Where each rank of the group runs: ranks with equal numbers share a machine and its memory. Any rank sees
    /// the same numbers.
    fn hosts(&self) -> Vec<u64>;

    /// How many cores the ranks of the group on this rank's host have between them: where that is less than they are, whoever
    /// waits busily keeps another from running. All of these ranks see the same number; unless more is known, a core
    /// for each.
    fn cores(&self) -> usize {
        self.rank().world_size()
    }

    /// A transport among these ranks of this group, numbered in the order of the list, on a channel of its own.
    /// `None` if this rank is not among them.
    ///
    /// Nothing is sent: every rank of the group, member or not, makes the same calls in the same order. Several
    /// groups that share no rank can be made by one call: each rank names the members of its own group.
    ///
    /// # Errors
    /// If the list is empty, names a rank twice, or names one that does not exist.
    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>>;

    /// Ends the job for every rank, with this rank as the cause: it has [given up](crate::Cause::gave_up) or panicked. An earlier
    /// abort stands.
    fn abort(&mut self, cause: Cause);

    /// Why the job was aborted, if it was: the same on every rank, once whoever decides has been heard. Until then it is what this
    /// rank has noticed itself.
    fn aborted(&self) -> Option<Abort>;

    /// What this transport has moved so far.
    fn traffic(&self) -> Traffic;

    /// Memory that all ranks of the group share, if they share any.
    ///
    /// The first call is made by every rank of the group at the same place among its calls, with the same fingerprint
    /// [begun](Self::begin), and they agree: if one of them cannot, none does. Later calls only look.
    ///
    /// # Errors
    /// If the ranks cannot come to an agreement by the deadline.
    fn direct(&mut self, _due: &LazyDeadline<'_>) -> Result<Option<&mut dyn Direct>> {
        Ok(None)
    }

    /// This many bytes, zero at first, that the ranks of this host which share memory with this one reach as their own, from
    /// every channel of the job. `None` if there is no such memory, or none left.
    fn allocate(&mut self, _bytes: usize) -> Option<Allocation> {
        None
    }

    /// Says which step of its call this rank comes to. Transports that report what ranks wait for keep it; for the
    /// others there is nothing to do.
    fn set_progress(&mut self, _progress: Progress) {}

    /// Says how calls read in reports; `None` for what is no call.
    fn set_call_formatter(&mut self, _describe: fn(&Fingerprint) -> Option<String>) {}
}

/// A boxed transport is one too, such as that of a [fork](Transport::fork).
impl<T: Transport + ?Sized> Transport for Box<T> {
    fn rank(&self) -> Rank {
        (**self).rank()
    }

    fn members(&self) -> &[usize] {
        (**self).members()
    }

    fn channel(&self) -> ChannelId {
        (**self).channel()
    }

    fn runtime(&self) -> &Runtime {
        (**self).runtime()
    }

    fn begin(&mut self, call: &Fingerprint) {
        (**self).begin(call);
    }

    fn announce(&mut self, call: &Fingerprint) {
        (**self).announce(call);
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        (**self).exchange(send, receive, due)
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        (**self).exchange_in_place(peer, buffer, combine, due)
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        (**self).exchange_all(sends, receives, due)
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        (**self).wait_any_peer(peers, due)
    }

    fn unread(&mut self) -> Option<usize> {
        (**self).unread()
    }

    fn hosts(&self) -> Vec<u64> {
        (**self).hosts()
    }

    fn cores(&self) -> usize {
        (**self).cores()
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        (**self).fork(members)
    }

    fn abort(&mut self, cause: Cause) {
        (**self).abort(cause);
    }

    fn aborted(&self) -> Option<Abort> {
        (**self).aborted()
    }

    fn traffic(&self) -> Traffic {
        (**self).traffic()
    }

    fn direct(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn Direct>> {
        (**self).direct(due)
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        (**self).allocate(bytes)
    }

    fn set_progress(&mut self, progress: Progress) {
        (**self).set_progress(progress);
    }

    fn set_call_formatter(&mut self, describe: fn(&Fingerprint) -> Option<String>) {
        (**self).set_call_formatter(describe);
    }
}

/// How far a rank is in its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The step, counted from 0.
    pub step: usize,
    /// The first of the chunks that it receives there, and how many they are.
    pub receives: Option<(usize, usize)>,
}

/// Adds a range of the peer's bytes into the same range of ours. Ranges begin at multiples of 64 bytes from
/// the start of the message, and so do the peer's bytes in memory.
pub type Combine<'a> = dyn FnMut(&mut [u8], &[u8]) + 'a;

/// What to send, and to whom.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// The receiving rank.
    pub to: usize,
    /// The message, in pieces.
    pub parts: &'a [&'a [u8]],
}

impl Outgoing<'_> {
    /// Bytes of the message.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Whether the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What to receive, and from whom.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// The sending rank.
    pub from: usize,
    /// Bytes of the message; another length is an error.
    pub len: usize,
    /// Where the bytes go.
    pub sink: Sink<'a>,
}

impl Incoming<'_> {
    /// The same, for as long as this one is lent.
    pub fn reborrow(&mut self) -> Incoming<'_> {
        let sink = match &mut self.sink {
            Sink::Into(memory) => Sink::Into(memory),
            Sink::Each(take) => Sink::Each(take),
        };
        Incoming { from: self.from, len: self.len, sink }
    }
}

/// Where received bytes go.
pub enum Sink<'a> {
    /// Into this memory, which is as long as the message. After an error it may hold anything, also bytes of the
    /// message that was refused.
    Into(&'a mut [u8]),
    /// To this function, piece by piece and in order, with each piece's offset in the message. Offsets are
    /// multiples of 64, each piece but the last is a multiple of 64 long, and pieces are aligned to 64 bytes.
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

/// Messages and their bytes, headers not counted; and the bytes that ranks put where [others find them](Direct) and take
/// from there, which are no messages. What one rank publishes, several may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub messages_sent: u64,
    /// Bytes sent, published for others, or written into their memory.
    pub bytes_sent: u64,
    /// Messages received.
    pub messages_received: u64,
    /// Bytes received, or read where others have them.
    pub bytes_received: u64,
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
