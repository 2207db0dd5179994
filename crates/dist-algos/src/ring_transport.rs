//! The trait through which schedules use a transport.

use std::error::Error as StdError;

use dist_transport::{Combine, Incoming, LazyDeadline, Outgoing, Progress, Rank, Sink, Transport};

use crate::Scratch;

/// The minimum that an algorithm needs of a link between ranks: [`run`](crate::run) takes any `RingTransport`.
///
/// Implement this trait to run the algorithms of this crate alone over a link of your own: two methods are required.
/// Implement [`Transport`] instead to use a link with a `Communicator`. It adds deadlines and aborts that all ranks
/// see, groups and shared memory, and every `Transport` is a `RingTransport`.
///
/// Messages between an ordered pair of ranks arrive in the order in which they were sent. An empty message is
/// a message too. Both halves of an exchange make progress at once: a rank that waits for its peer to receive
/// must also receive.
pub trait RingTransport {
    /// The error of the transport.
    type Error: StdError + 'static;

    /// Returns this rank and the size of the group.
    fn rank(&self) -> Rank;

    /// Sends to one peer while receiving from another, or the same; either half may be absent.
    ///
    /// [`Sink::Each`] gets the bytes in order. They come in pieces that begin at multiples of 64 bytes from the
    /// start of the message and are aligned to 64 bytes in memory.
    ///
    /// # Errors
    /// Those of the transport.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error>;

    /// Sends all of `buffer` to `peer`, which sends equally many bytes. Calls `combine` with each range of `buffer`
    /// and the peer's bytes for that range.
    ///
    /// The default implementation receives the whole message beside the buffer and then combines it. A transport
    /// that knows which bytes have left can combine them as they arrive, in half the time.
    ///
    /// # Errors
    /// As for [`exchange`](RingTransport::exchange).
    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error> {
        let len = buffer.len();
        let mut scratch = Scratch::new();
        let theirs = scratch.bytes(len);
        let send = Outgoing { to: peer, parts: &[buffer] };
        let receive = Incoming { from: peer, len, sink: Sink::Into(theirs) };
        self.exchange(Some(send), Some(receive), due)?;
        combine(buffer, theirs);
        Ok(())
    }

    /// Sends and receives all of these messages at once, in any order of the peers. Messages to one peer are sent in
    /// the order of the list. Messages from one peer are received in the order of the list, too.
    ///
    /// The default implementation exchanges with one peer after the other, in an order in which no two ranks wait for
    /// each other. In round `c` rank `i` exchanges with rank `j` if `i + j = c` modulo the world size.
    ///
    /// # Errors
    /// As for [`exchange`](RingTransport::exchange).
    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error> {
        let rank = self.rank();
        for round in 0..rank.world_size() {
            let peer = (round + rank.world_size() - rank.index()) % rank.world_size();
            let mut sends = sends.iter().filter(|send| send.to == peer).copied();
            let mut receives = receives.iter_mut().filter(|receive| receive.from == peer);
            loop {
                match (sends.next(), receives.next()) {
                    (None, None) => break,
                    (send, receive) => self.exchange(send, receive.map(Incoming::reborrow), due)?,
                }
            }
        }
        Ok(())
    }

    /// Records the current step of this rank, for reports about waiting ranks.
    fn set_progress(&mut self, _progress: Progress) {}
}

impl<T: Transport + ?Sized> RingTransport for T {
    type Error = dist_transport::Error;

    fn rank(&self) -> Rank {
        Transport::rank(self)
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error> {
        Transport::exchange(self, send, receive, due)
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error> {
        Transport::exchange_in_place(self, peer, buffer, combine, due)
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error> {
        Transport::exchange_all(self, sends, receives, due)
    }

    fn set_progress(&mut self, progress: Progress) {
        Transport::set_progress(self, progress);
    }
}
