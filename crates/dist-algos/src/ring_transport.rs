//! What a schedule needs of a transport.

use std::error::Error as StdError;

use dist_transport::{Combine, Incoming, LazyDeadline, Outgoing, Progress, Rank, Sink, Transport};

use crate::Scratch;

/// A full-duplex exchange of bytes between the ranks of a group: all that [`run`](crate::run) needs.
///
/// Every [`Transport`] is a `RingTransport`. Whoever has another link between processes implements these two
/// methods for it, and has every algorithm of this crate.
///
/// Messages of an ordered pair of ranks arrive in the order in which they were sent, and a message of no bytes
/// is a message. Both halves of an exchange make progress at once: a rank that waits for its peer to receive
/// receives itself meanwhile.
pub trait RingTransport {
    /// What can go wrong.
    type Error: StdError + 'static;

    /// This rank and the size of the group.
    fn rank(&self) -> Rank;

    /// Sends to one peer while receiving from another, or the same; either half may be absent.
    ///
    /// What [`Sink::Each`] is given comes in order, in pieces that begin at multiples of 64 bytes from the
    /// start of the message and are aligned to 64 bytes in memory.
    ///
    /// # Errors
    /// The transport's own.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Self::Error>;

    /// Sends all of `buffer` to `peer`, which does the same, and gives `combine` each range of `buffer` with the
    /// peer's bytes for it.
    ///
    /// This provided form receives the whole message beside the buffer and then combines it. A transport that
    /// knows which bytes have left can combine them as they arrive, in half the time.
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

    /// Sends and receives all of these messages at once, whatever order the peers do it in. Messages to one peer
    /// leave in the order of the list, and those of one peer are received in the order of theirs.
    ///
    /// This provided form goes through the peers one after the other, in an order in which no two ranks wait for
    /// each other: in round `c` ranks `i` and `j` meet where `i + j = c` modulo the world size.
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
    /// Says which step this rank comes to, for reports of what ranks wait for.
    fn note(&mut self, _progress: Progress) {}
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

    fn note(&mut self, progress: Progress) {
        Transport::set_progress(self, progress);
    }
}
