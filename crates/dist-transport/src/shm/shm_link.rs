//! A connection whose bytes go through memory.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use socket2::Socket;

use super::offer::{FILE, GOODBYE, SharedSegment, WAKE, receive_with_file, send_byte, send_file};
use super::process::{peer_of, read_process};
use super::segment::{Broken, Consumer, Ends, FASTBOX_BYTES, Fastboxes, Producer, RING_BYTES, Sleep};
use super::single_copy;
use crate::Grain;

/// What is heard at once of what a peer says on its socket.
const HEARD_BYTES: usize = 64;
/// How often in a row: whoever says more and more must not keep this side from its deadline.
const HEARD_MAX: usize = 16;

/// ShmLink shared with one peer, for one channel.
#[derive(Debug)]
pub(crate) struct ShmLink {
    socket: Socket,
    outgoing: Producer,
    incoming: Consumer,
    fastboxes: Fastboxes,
    sleep: Sleep,
    /// Whether messages may stay in this side's own memory, for the other to copy from there.
    offers_single_copy: bool,
    /// Whether this side copies from the other's.
    gets: bool,
    /// Whether one of this side's does, and the peer has not said that it has it.
    is_offered: bool,
    /// What the peer has passed and nobody has asked for yet.
    file: Option<OwnedFd>,
    /// Set when nothing more will come or go than what is in the rings.
    ended: Option<StreamEnd>,
}

/// What is said of the next message.
#[derive(Debug)]
pub(crate) enum NextMessage<'a> {
    /// Its header, which it follows in the ring.
    InRing(&'a [u8]),
    /// What its header says, without the magic; it lies on a fastbox.
    InFastbox(&'a [u8]),
}

/// Why nothing more will come or go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The peer has left in order.
    Goodbye,
    /// The peer is gone.
    Closed,
    /// The peer has broken the memory.
    Broken,
}

impl From<Broken> for StreamEnd {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

impl ShmLink {
    /// ShmLink that both sides have plan_digest on. Whether this side offers_single_copy large messages, and gets them, it says itself.
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

    /// How many bytes can be written, if `wanted` are to be; whole grains.
    pub(crate) fn room(&mut self, wanted: usize) -> Result<usize, StreamEnd> {
        match (self.outgoing.room(wanted)?, self.ended) {
            (0, Some(end)) => Err(end),
            (room, _) => Ok(room),
        }
    }

    /// Writes bytes into the room, `ahead` of what is published.
    pub(crate) fn write(&mut self, ahead: usize, bytes: &[u8]) {
        self.outgoing.write(ahead, bytes);
    }

    /// Hands over a message of so many bytes on a fastbox, with what is said of it; `false` if no fastbox is here, or something
    /// does not fit.
    pub(crate) fn put_in_fastbox(
        &mut self,
        about: &[u8],
        parts: &[&[u8]],
        bytes: usize,
    ) -> Result<bool, StreamEnd> {
        if !self.fastboxes.takes(bytes) || self.room(Grain::BYTES)? == 0 {
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

    /// What is said of the next message, if that has come: in the ring, in so many bytes, or on a fastbox.
    pub(crate) fn next(&mut self, header: usize) -> Result<Option<NextMessage<'_>>, StreamEnd> {
        let Self { incoming, fastboxes, ended, .. } = self;
        let count = incoming.next();
        let in_ring = incoming.peek(header)?;
        // Now: whoever sees that a grain of the ring is published sees the fastbox that it stands for.
        Ok(match (fastboxes.look(count), in_ring) {
            (Some(about), _) => Some(NextMessage::InFastbox(about)),
            (None, []) => return ended.map_or(Ok(None), Err),
            (None, header) => Some(NextMessage::InRing(header)),
        })
    }

    /// Takes the fastbox that was just seen to have come, with a message of so many bytes.
    pub(crate) fn receive_fastbox(&mut self, bytes: usize) -> Result<(), StreamEnd> {
        self.fastboxes.receive();
        if self.incoming.skip() {
            self.wake_peer();
        }
        match bytes {
            // Nothing is to be delivered after which it would be cleared.
            0 => self.fastboxes.clear(),
            1..=FASTBOX_BYTES => {}
            _ => return Err(StreamEnd::Broken),
        }
        Ok(())
    }

    /// A range of the message on the fastbox that came last.
    pub(crate) fn fastbox_bytes(&self, range: Range<usize>) -> &[u8] {
        self.fastboxes.bytes(range)
    }

    /// Notes that this message is not needed any more.
    pub(crate) const fn clear_fastbox(&mut self) {
        self.fastboxes.clear();
    }

    /// Writes the header of a message and where it lies, for the peer to copy it from there; `false` if messages are not
    /// is_offered, or there is no room. A message that the ring has room for is not: its sender need not wait for the peer.
    pub(crate) fn offer_message(&mut self, header: &[u8], message: &[u8]) -> Result<bool, StreamEnd> {
        let bytes = header.len() + Grain::BYTES;
        if !self.offers_single_copy || message.len() < RING_BYTES || self.room(bytes)? < bytes {
            return Ok(false);
        }
        let mut place = [0; Grain::BYTES];
        place[..8].copy_from_slice(&(message.as_ptr().expose_provenance() as u64).to_ne_bytes());
        single_copy::offer(self.outgoing.single_copy());
        self.is_offered = true;
        self.write(0, header);
        self.write(header.len(), &place);
        self.publish(bytes);
        Ok(true)
    }

    /// How many bytes of what was is_offered the peer has acked, once it says so. It wants the others in the ring, then and from
    /// then on.
    pub(crate) fn acked(&mut self, bytes: usize) -> Result<Option<usize>, StreamEnd> {
        let Some(acked) = single_copy::acked(self.outgoing.single_copy()) else {
            return self.ended.map_or(Ok(None), Err);
        };
        let acked = usize::try_from(acked).ok().filter(|&acked| acked <= bytes).ok_or(StreamEnd::Broken)?;
        self.is_offered = false;
        self.offers_single_copy &= acked == bytes;
        Ok(Some(acked))
    }

    /// Ends a single_copy that the peer has not answered: this side's call has failed.
    pub(crate) fn cancel_offer(&mut self) {
        if std::mem::take(&mut self.is_offered) {
            single_copy::cancel(self.outgoing.single_copy());
        }
    }

    /// Where the message lies in the peer's memory whose header was read last.
    pub(crate) fn receive_offer(&mut self) -> Result<u64, StreamEnd> {
        let place = self.peek(Grain::BYTES)?;
        let address = place.first_chunk().copied().map(u64::from_ne_bytes).ok_or(StreamEnd::Broken)?;
        self.advance(Grain::BYTES);
        Ok(address)
    }

    /// Copies bytes of a message that the peer has is_offered; `false` if they are out of reach.
    pub(crate) fn get_message(&mut self, address: u64, into: &mut [u8]) -> bool {
        if !self.gets {
            return false;
        }
        let copied = self.peer_process().and_then(|peer| read_process(peer.cast_signed(), address, into));
        if let Err(error) = &copied {
            tracing::info!(%error, "a message is out of reach that was is_offered, and comes through the ring");
        }
        copied.is_ok()
    }

    /// Tells the peer how much of what it has is_offered was copied; `false` if it has called that back, and nothing counts.
    pub(crate) fn ack_offer(&mut self, acked: usize) -> Result<bool, StreamEnd> {
        // Another process may have the number of one that has ended.
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

    /// Hands the next bytes over to the peer, rounded up to whole grains.
    pub(crate) fn publish(&mut self, bytes: usize) {
        self.outgoing.publish(bytes);
        self.wake_peer();
    }

    /// The oldest bytes, at most `max` and as far as they lie side by side; none if none have come.
    pub(crate) fn peek(&mut self, max: usize) -> Result<&[u8], StreamEnd> {
        let ended = self.ended;
        match (self.incoming.peek(max)?, ended) {
            ([], Some(end)) => Err(end),
            (bytes, _) => Ok(bytes),
        }
    }

    /// Whether a message or more of one has come that was not received yet.
    pub(crate) fn has_arrived(&mut self) -> Result<bool, StreamEnd> {
        self.next(1).map(|next| next.is_some())
    }

    /// Leaves these bytes behind, rounded up to whole grains.
    pub(crate) fn advance(&mut self, bytes: usize) {
        if self.incoming.advance(bytes) {
            self.wake_peer();
        }
    }

    /// Whether the peer waited on this core when it did last, as far as is known.
    pub(crate) fn shares_core(&self) -> bool {
        self.sleep.shares_core()
    }

    /// Says that this side is about to sleep until it can do the one or the other; `false` if it need not sleep.
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

    /// Says that this side is awake, and listens to what the peer has said meanwhile.
    pub(crate) fn end_sleep(&mut self) {
        self.sleep.end();
        self.read_control();
    }

    /// Hears what the peer has said.
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

    /// Passes a descriptor to the peer, before a message that says so.
    pub(crate) fn pass(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        send_file(&self.socket, &[FILE], file)
    }

    /// Takes the descriptor that the peer has passed, after a message that says so.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.read_control();
        self.file.take()
    }

    /// The peer's process, as the system tells it.
    pub(crate) fn peer_process(&self) -> io::Result<u32> {
        peer_of(&self.socket).map(|(process, _)| process)
    }

    /// Tells the peer that nothing more will come.
    pub(crate) fn say_goodbye(&self) {
        // Whoever does not receive_with_file it hears the end of the connection.
        let _ = send_byte(&self.socket, GOODBYE);
    }

    fn wake_peer(&self) {
        if self.sleep.is_to_be_woken() {
            // If the connection takes no more, the peer has enough to wake up from.
            let _ = send_byte(&self.socket, WAKE);
        }
    }
}

/// What becomes readable when the peer wakes this side, or ends.
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
        let acked = take(&other).unwrap().expect("it is what was offered");
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
    fn a_peer_that_says_more_and_more_is_not_listened_to_for_ever() {
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
    fn what_was_sent_before_the_end_is_received_before_it() {
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
            // There is room for a message that nobody will read, as in a socket's buffer, until it is full.
            let room = other.room(usize::MAX).unwrap();
            send(&mut other, &vec![2; room]);
            assert_eq!(other.room(1).unwrap_err(), end);
        }
    }

    #[test]
    fn nobody_knows_where_a_peer_is_that_has_not_waited() {
        let (one, other) = shared();
        assert!(!one.shares_core());
        drop(other);
    }

    #[test]
    fn whoever_lies_down_is_woken_or_need_not_sleep() {
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
