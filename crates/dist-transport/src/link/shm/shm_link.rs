//! A link whose bytes go through shared memory.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use socket2::Socket;

use super::offer::{FILE, GOODBYE, SharedSegment, WAKE, receive_with_file, send_byte, send_file};
use super::segment::{Broken, Consumer, Ends, FASTBOX_BYTES, Fastboxes, NoRoom, Producer, RING_BYTES, Sleep};
use super::single_copy;
use crate::cpu::CacheLine;
use crate::host_memory::{peer_of, read_process};

/// Bytes that are read at once from the peer's socket.
const HEARD_BYTES: usize = 64;
/// The most reads in a row: a peer that sends more and more must not delay this side beyond its deadline.
const HEARD_MAX: usize = 16;

/// A link in shared memory with one peer, for one channel.
#[derive(Debug)]
pub(crate) struct ShmLink {
    socket: Socket,
    outgoing: Producer,
    incoming: Consumer,
    fastboxes: Fastboxes,
    sleep: Sleep,
    /// `true` if this side may offer messages as single copies.
    offers_single_copy: bool,
    /// `true` if this side copies offered messages from the peer's memory.
    gets: bool,
    /// `true` if a message of this side is offered, and the peer has not acknowledged it.
    is_offered: bool,
    /// A descriptor that the peer has passed and that was not taken yet.
    file: Option<OwnedFd>,
    /// The end of the stream; `None` while the link is open. Bytes in the rings can still be received after it.
    ended: Option<StreamEnd>,
}

/// The header of the next message.
#[derive(Debug)]
pub(crate) enum NextMessage<'a> {
    /// The header in the ring; the message follows it there.
    InRing(&'a [u8]),
    /// The header without its magic number; the message is in a fastbox.
    InFastbox(&'a [u8]),
}

/// The reason why the link carries no more bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The peer has left in order.
    Goodbye,
    /// The peer is gone.
    Closed,
    /// The peer has corrupted the memory.
    Broken,
    /// The system has no memory for the pages of the ring.
    NoMemory,
}

impl From<Broken> for StreamEnd {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

impl From<NoRoom> for StreamEnd {
    fn from(reason: NoRoom) -> Self {
        match reason {
            NoRoom::Broken => Self::Broken,
            NoRoom::NoMemory => Self::NoMemory,
        }
    }
}

impl ShmLink {
    /// Creates the link after both sides have agreed on the memory.
    pub(crate) fn new(
        socket: Socket,
        SharedSegment(Ends { outgoing, incoming, fastboxes, sleep }): SharedSegment,
        offers_single_copy: bool,
    ) -> Self {
        let (gets, is_offered, file, ended) = (offers_single_copy, false, None, None);
        Self {
            socket,
            outgoing,
            incoming,
            fastboxes,
            sleep,
            offers_single_copy,
            gets,
            is_offered,
            file,
            ended,
        }
    }

    /// Returns how many bytes can be written, if `wanted` are needed; whole cache lines.
    pub(crate) fn room(&mut self, wanted: usize) -> Result<usize, StreamEnd> {
        match (self.outgoing.room(wanted)?, self.ended) {
            (0, Some(end)) => Err(end),
            (room, _) => Ok(room),
        }
    }

    /// Writes bytes into the room, `ahead` of the published ones.
    pub(crate) fn write(&mut self, ahead: usize, bytes: &[u8]) {
        self.outgoing.write(ahead, bytes);
    }

    /// Sends a message of this many bytes, with its header, through a fastbox. Returns `false` if no fastbox is
    /// free, or the message does not fit.
    pub(crate) fn put_in_fastbox(
        &mut self,
        about: &[u8],
        parts: &[&[u8]],
        bytes: usize,
    ) -> Result<bool, StreamEnd> {
        if !self.fastboxes.takes(bytes) || self.room(CacheLine::BYTES)? == 0 {
            return Ok(false);
        }
        let mut at = 0;
        for part in parts {
            self.fastboxes.write(at, part);
            at += part.len();
        }
        self.fastboxes.hand_over(about, self.outgoing.skip());
        self.wake_peer();
        Ok(true)
    }

    /// Returns the header of the next message, if it has arrived in the ring, in this many bytes, or in a
    /// fastbox.
    pub(crate) fn next(&mut self, header: usize) -> Result<Option<NextMessage<'_>>, StreamEnd> {
        let Self { incoming, fastboxes, ended, .. } = self;
        let count = incoming.next();
        let in_ring = incoming.peek(header)?;
        // Read after the ring: a side that sees a published cache line of the ring also sees the fastbox that it
        // stands for.
        Ok(match (fastboxes.look(count), in_ring) {
            (Some(about), _) => Some(NextMessage::InFastbox(about)),
            (None, []) => return ended.map_or(Ok(None), Err),
            (None, header) => Some(NextMessage::InRing(header)),
        })
    }

    /// Takes the fastbox that has just arrived, with a message of this many bytes.
    pub(crate) fn receive_fastbox(&mut self, bytes: usize) -> Result<(), StreamEnd> {
        self.fastboxes.receive();
        if self.incoming.skip() {
            self.wake_peer();
        }
        match bytes {
            // An empty message is never delivered, so nothing else would clear it.
            0 => self.fastboxes.clear(),
            1..=FASTBOX_BYTES => {}
            _ => return Err(StreamEnd::Broken),
        }
        Ok(())
    }

    /// Returns a range of the message in the last received fastbox.
    pub(crate) fn fastbox_bytes(&self, range: Range<usize>) -> &[u8] {
        self.fastboxes.bytes(range)
    }

    /// Marks this message as delivered.
    pub(crate) const fn clear_fastbox(&mut self) {
        self.fastboxes.clear();
    }

    /// Offers a message as a single copy: writes its header and its address for the peer. Returns `false` if
    /// single copies are not used, or the ring has no room for the header. A message that fits into the ring is
    /// not offered, because its sender would have to wait for the peer.
    pub(crate) fn offer_message(&mut self, header: &[u8], message: &[u8]) -> Result<bool, StreamEnd> {
        let bytes = header.len() + CacheLine::BYTES;
        if !self.offers_single_copy || message.len() < RING_BYTES || self.room(bytes)? < bytes {
            return Ok(false);
        }
        let mut place = [0; CacheLine::BYTES];
        place[..8].copy_from_slice(&(message.as_ptr().expose_provenance() as u64).to_ne_bytes());
        single_copy::offer(self.outgoing.single_copy());
        self.is_offered = true;
        self.write(0, header);
        self.write(header.len(), &place);
        self.publish(bytes);
        Ok(true)
    }

    /// Returns how many bytes of an offered message the peer has copied; `None` until it acknowledges. If it
    /// copied fewer than all, the rest goes through the ring, and later messages are not offered.
    pub(crate) fn acked(&mut self, bytes: usize) -> Result<Option<usize>, StreamEnd> {
        let Some(acked) = single_copy::acked(self.outgoing.single_copy()) else {
            return self.ended.map_or(Ok(None), Err);
        };
        let acked = usize::try_from(acked).ok().filter(|&acked| acked <= bytes).ok_or(StreamEnd::Broken)?;
        self.is_offered = false;
        self.offers_single_copy &= acked == bytes;
        Ok(Some(acked))
    }

    /// Cancels an offer that the peer has not acknowledged, because this side's call has failed.
    pub(crate) fn cancel_offer(&mut self) {
        if std::mem::take(&mut self.is_offered) {
            single_copy::cancel(self.outgoing.single_copy());
        }
    }

    /// Returns the address of the offered message whose header was read last.
    pub(crate) fn receive_offer(&mut self) -> Result<u64, StreamEnd> {
        let place = self.peek(CacheLine::BYTES)?;
        let address = place.first_chunk().copied().map(u64::from_ne_bytes).ok_or(StreamEnd::Broken)?;
        self.advance(CacheLine::BYTES);
        Ok(address)
    }

    /// Copies bytes of an offered message. Returns `false` if they are out of reach.
    pub(crate) fn get_message(&mut self, address: u64, into: &mut [u8]) -> bool {
        if !self.gets {
            return false;
        }
        let copied = self.peer_process().and_then(|peer| read_process(peer.cast_signed(), address, into));
        if let Err(error) = &copied {
            tracing::info!(%error, "a single-copy message is out of reach and comes through the ring");
        }
        copied.is_ok()
    }

    /// Acknowledges copied bytes. Returns `false` if the peer has cancelled the offer, so that the copy is not
    /// valid.
    pub(crate) fn ack_offer(&mut self, acked: usize) -> Result<bool, StreamEnd> {
        // Checks that the peer lives: another process may have the number of an ended one.
        self.read_control();
        if let Some(end) = self.ended {
            return Err(end);
        }
        let settled = single_copy::ack(self.incoming.single_copy(), acked as u64);
        if settled {
            self.wake_peer();
        }
        Ok(settled)
    }

    #[cfg(test)]
    pub(crate) fn get_no_more(&mut self) {
        self.gets = false;
    }

    /// Publishes the next bytes, rounded up to whole cache lines.
    pub(crate) fn publish(&mut self, bytes: usize) {
        self.outgoing.publish(bytes);
        self.wake_peer();
    }

    /// Returns the oldest bytes, at most `max` and contiguous. Returns none if none have arrived.
    pub(crate) fn peek(&mut self, max: usize) -> Result<&[u8], StreamEnd> {
        let ended = self.ended;
        match (self.incoming.peek(max)?, ended) {
            ([], Some(end)) => Err(end),
            (bytes, _) => Ok(bytes),
        }
    }

    /// Returns `true` if a message or a part of one has arrived that was not received yet.
    pub(crate) fn has_arrived(&mut self) -> Result<bool, StreamEnd> {
        self.next(1).map(|next| next.is_some())
    }

    /// Consumes these bytes, rounded up to whole cache lines.
    pub(crate) fn advance(&mut self, bytes: usize) {
        if self.incoming.advance(bytes) {
            self.wake_peer();
        }
    }

    /// Returns `true` if the peer was on this core when it last waited, as far as is known.
    pub(crate) fn shares_core(&self) -> bool {
        self.sleep.shares_core()
    }

    /// Announces that this side is about to sleep until it can receive or send. Returns `false` if it need
    /// not sleep.
    pub(crate) fn prepare_sleep(&mut self, to_receive: bool) -> bool {
        self.sleep.begin();
        let ready = match to_receive {
            true => self.has_arrived(),
            false if self.is_offered => {
                self.ended.map_or(Ok(single_copy::acked(self.outgoing.single_copy()).is_some()), Err)
            }
            false => self.room(1).map(|room| room > 0),
        };
        matches!(ready, Ok(false))
    }

    /// Announces that this side is awake, and reads control messages of the peer from the socket.
    pub(crate) fn end_sleep(&mut self) {
        self.sleep.end();
        self.read_control();
    }

    /// Reads control messages of the peer from the socket.
    fn read_control(&mut self) {
        let mut said = [0; HEARD_BYTES];
        for _ in 0..HEARD_MAX {
            match receive_with_file(&self.socket, &mut said) {
                Ok((0, _)) => self.ended = self.ended.or(Some(StreamEnd::Closed)),
                Ok((count, file)) => {
                    self.file = file.or_else(|| self.file.take());
                    if said[..count].contains(&GOODBYE) {
                        self.ended = Some(StreamEnd::Goodbye);
                    }
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.ended = self.ended.or(Some(StreamEnd::Closed)),
            }
            return;
        }
    }

    /// Sends a file descriptor to the peer, before a message that announces it.
    pub(crate) fn pass(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        send_file(&self.socket, &[FILE], file)
    }

    /// Receives a file descriptor from the peer, after a message that announced it.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.read_control();
        self.file.take()
    }

    /// Returns the peer's process id as the system reports it.
    pub(crate) fn peer_process(&self) -> io::Result<u32> {
        peer_of(&self.socket).map(|(process, _)| process)
    }

    /// Sends the goodbye: this side sends nothing more.
    pub(crate) fn say_goodbye(&self) {
        // A peer that misses it sees the end of the connection.
        let _ = send_byte(&self.socket, GOODBYE);
    }

    fn wake_peer(&self) {
        if self.sleep.is_to_be_woken() {
            // If the socket is full, the peer has enough to wake up from.
            let _ = send_byte(&self.socket, WAKE);
        }
    }
}

/// The descriptor becomes readable if the peer wakes this side, or ends.
impl AsFd for ShmLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::net::{RecvFlags, SendFlags};

    use super::super::offer::tests::{answer, sockets};
    use super::super::offer::{ACCEPTED, offer, take};
    use super::*;

    fn shared() -> (ShmLink, ShmLink) {
        let (one, other) = sockets();
        assert_eq!(take(&other).unwrap_err().kind(), ErrorKind::WouldBlock);
        let offered = offer(&one, &[5; 32]).unwrap();
        let acked = take(&other).unwrap().expect("it was offered");
        assert_eq!(answer(&one), ACCEPTED);
        (ShmLink::new(one, offered, true), ShmLink::new(other, acked, true))
    }

    fn send(memory: &mut ShmLink, bytes: &[u8]) {
        assert!(memory.room(bytes.len()).unwrap() >= bytes.len());
        memory.write(0, bytes);
        memory.publish(bytes.len());
    }

    #[test]
    fn a_descriptor_is_taken_from_behind_wake_ups() {
        let (mut one, mut other) = shared();
        assert!(other.prepare_sleep(true));
        send(&mut one, &[1; 64]);
        one.pass(other.as_fd()).unwrap();
        assert!(other.take_file().is_some());
        assert!(other.take_file().is_none());
    }

    #[test]
    fn reading_from_a_peer_that_sends_without_end_is_limited() {
        let (one, mut other) = shared();
        rustix::net::send(&one.socket, &[WAKE; 2 * HEARD_MAX * HEARD_BYTES], SendFlags::NOSIGNAL).unwrap();
        drop(one);
        other.end_sleep();
        assert!(rustix::net::recv(&other.socket, &mut [0][..], RecvFlags::PEEK).unwrap().0 > 0);
        assert_eq!(other.peek(64).unwrap(), []);
        (0..=HEARD_MAX).for_each(|_| other.end_sleep());
        assert_eq!(other.peek(64).unwrap_err(), StreamEnd::Closed);
    }

    #[test]
    fn bytes_sent_before_the_end_are_received_before_it() {
        for goodbye in [true, false] {
            let (mut one, mut other) = shared();
            send(&mut one, &[1; 64]);
            if goodbye {
                one.say_goodbye();
            }
            drop(one);
            other.end_sleep();
            other.end_sleep();
            assert_eq!(other.peek(100).unwrap(), [1; 64]);
            other.advance(64);
            let end = if goodbye { StreamEnd::Goodbye } else { StreamEnd::Closed };
            assert_eq!(other.peek(100).unwrap_err(), end);
            // Unread messages fit in until the ring is full, as in a socket's buffer.
            let room = other.room(usize::MAX).unwrap();
            send(&mut other, &vec![2; room]);
            assert_eq!(other.room(1).unwrap_err(), end);
        }
    }

    #[test]
    fn the_core_of_a_peer_that_has_not_waited_is_unknown() {
        let (one, other) = shared();
        assert!(!one.shares_core());
        drop(other);
    }

    #[test]
    fn a_side_that_prepares_to_sleep_is_woken_or_need_not_sleep() {
        let (mut one, mut other) = shared();
        assert!(other.prepare_sleep(true), "nothing is here");
        send(&mut one, &[1; 64]);
        assert_eq!(answer(&other.socket), WAKE);
        assert!(!other.prepare_sleep(true), "something is here");
        other.end_sleep();
        send(&mut one, &[1; 64]);
        assert_eq!((&other.socket).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}
