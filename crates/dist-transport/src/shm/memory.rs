//! A connection whose bytes go through memory.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use socket2::Socket;

use super::loan;
use super::offer::{FILE, GOODBYE, Share, WAKE, hear, say, send_file};
use super::process::{peer_of, read_process};
use super::segment::{Broken, Consumer, Ends, Producer, RING_BYTES, Sleep, TRAY_BYTES, Trays};
use crate::Grain;

/// What is heard at once of what a peer says on its socket.
const HEARD_BYTES: usize = 64;
/// How often in a row: whoever says more and more must not keep this side from its deadline.
const HEARD_MAX: usize = 16;

/// Memory shared with one peer, for one channel.
#[derive(Debug)]
pub(crate) struct Memory {
    socket: Socket,
    outgoing: Producer,
    incoming: Consumer,
    trays: Trays,
    sleep: Sleep,
    /// Whether messages may stay in this side's own memory, for the other to copy from there.
    lends: bool,
    /// Whether this side copies from the other's.
    borrows: bool,
    /// Whether one of this side's does, and the peer has not said that it has it.
    lent: bool,
    /// What the peer has passed and nobody has asked for yet.
    file: Option<OwnedFd>,
    /// Set when nothing more will come or go than what is in the rings.
    ended: Option<End>,
}

/// What is said of the next message.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    /// Its header, which it follows in the ring.
    Following(&'a [u8]),
    /// What its header says, without the magic; it lies on a tray.
    Laid(&'a [u8]),
}

/// Why nothing more will come or go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The peer has left in order.
    Goodbye,
    /// The peer is gone.
    Closed,
    /// The peer has broken the memory.
    Broken,
}

impl From<Broken> for End {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

impl Memory {
    /// Memory that both sides have agreed on. Whether this side lends large messages, and borrows them, it says itself.
    pub(crate) fn new(
        socket: Socket,
        Share(Ends { outgoing, incoming, trays, sleep }): Share,
        lends: bool,
    ) -> Self {
        let (borrows, lent, file, ended) = (lends, false, None, None);
        Self { socket, outgoing, incoming, trays, sleep, lends, borrows, lent, file, ended }
    }

    /// How many bytes can be written, if `wanted` are to be; whole grains.
    pub(crate) fn room(&mut self, wanted: usize) -> Result<usize, End> {
        match (self.outgoing.room(wanted)?, self.ended) {
            (0, Some(end)) => Err(end),
            (room, _) => Ok(room),
        }
    }

    /// Writes bytes into the room, `ahead` of what is published.
    pub(crate) fn write(&mut self, ahead: usize, bytes: &[u8]) {
        self.outgoing.write(ahead, bytes);
    }

    /// Hands over a message of so many bytes on a tray, with what is said of it; `false` if no tray is here, or something
    /// does not fit.
    pub(crate) fn lay_down(&mut self, about: &[u8], parts: &[&[u8]], bytes: usize) -> Result<bool, End> {
        if !self.trays.takes(bytes) || self.room(Grain::BYTES)? == 0 {
            return Ok(false);
        }
        let mut at = 0;
        for part in parts {
            self.trays.write(at, part);
            at += part.len();
        }
        self.trays.hand_over(about, self.outgoing.skip());
        self.wake_peer();
        Ok(true)
    }

    /// What is said of the next message, if that has come: in the ring, in so many bytes, or on a tray.
    pub(crate) fn next(&mut self, header: usize) -> Result<Option<Next<'_>>, End> {
        let Self { incoming, trays, ended, .. } = self;
        let count = incoming.next();
        let in_ring = incoming.peek(header)?;
        // Now: whoever sees that a grain of the ring is published sees the tray that it stands for.
        Ok(match (trays.look(count), in_ring) {
            (Some(about), _) => Some(Next::Laid(about)),
            (None, []) => return ended.map_or(Ok(None), Err),
            (None, header) => Some(Next::Following(header)),
        })
    }

    /// Takes the tray that was just seen to have come, with a message of so many bytes.
    pub(crate) fn receive_tray(&mut self, bytes: usize) -> Result<(), End> {
        self.trays.receive();
        if self.incoming.skip() {
            self.wake_peer();
        }
        match bytes {
            // Nothing is to be delivered after which it would be cleared.
            0 => self.trays.clear(),
            1..=TRAY_BYTES => {}
            _ => return Err(End::Broken),
        }
        Ok(())
    }

    /// A range of the message on the tray that came last.
    pub(crate) fn on_tray(&self, range: Range<usize>) -> &[u8] {
        self.trays.bytes(range)
    }

    /// Notes that this message is not needed any more.
    pub(crate) const fn clear_tray(&mut self) {
        self.trays.clear();
    }

    /// Writes the header of a message and where it lies, for the peer to copy it from there; `false` if messages are not
    /// lent, or there is no room. A message that the ring has room for is not: its sender need not wait for the peer.
    pub(crate) fn lend(&mut self, header: &[u8], message: &[u8]) -> Result<bool, End> {
        let bytes = header.len() + Grain::BYTES;
        if !self.lends || message.len() < RING_BYTES || self.room(bytes)? < bytes {
            return Ok(false);
        }
        let mut place = [0; Grain::BYTES];
        place[..8].copy_from_slice(&(message.as_ptr().expose_provenance() as u64).to_ne_bytes());
        loan::open(self.outgoing.loan());
        self.lent = true;
        self.write(0, header);
        self.write(header.len(), &place);
        self.publish(bytes);
        Ok(true)
    }

    /// How many bytes of what was lent the peer has taken, once it says so. It wants the others in the ring, then and from
    /// then on.
    pub(crate) fn taken(&mut self, bytes: usize) -> Result<Option<usize>, End> {
        let Some(taken) = loan::taken(self.outgoing.loan()) else {
            return self.ended.map_or(Ok(None), Err);
        };
        let taken = usize::try_from(taken).ok().filter(|&taken| taken <= bytes).ok_or(End::Broken)?;
        self.lent = false;
        self.lends &= taken == bytes;
        Ok(Some(taken))
    }

    /// Ends a loan that the peer has not answered: this side's call has failed.
    pub(crate) fn call_back(&mut self) {
        if std::mem::take(&mut self.lent) {
            loan::call_back(self.outgoing.loan());
        }
    }

    /// Where the message lies in the peer's memory whose header was read last.
    pub(crate) fn receive_loan(&mut self) -> Result<u64, End> {
        let place = self.peek(Grain::BYTES)?;
        let address = place.first_chunk().copied().map(u64::from_ne_bytes).ok_or(End::Broken)?;
        self.advance(Grain::BYTES);
        Ok(address)
    }

    /// Copies bytes of a message that the peer has lent; `false` if they are out of reach.
    pub(crate) fn borrow(&mut self, address: u64, into: &mut [u8]) -> bool {
        if !self.borrows {
            return false;
        }
        let copied = self.peer_process().and_then(|peer| read_process(peer.cast_signed(), address, into));
        if let Err(error) = &copied {
            tracing::info!(%error, "a message is out of reach that was lent, and comes through the ring");
        }
        copied.is_ok()
    }

    /// Tells the peer how much of what it has lent was copied; `false` if it has called that back, and nothing counts.
    pub(crate) fn give_back(&mut self, taken: usize) -> Result<bool, End> {
        // Another process may have the number of one that has ended.
        self.listen();
        if let Some(end) = self.ended {
            return Err(end);
        }
        let settled = loan::settle(self.incoming.loan(), taken as u64);
        if settled {
            self.wake_peer();
        }
        Ok(settled)
    }

    #[cfg(test)]
    pub(crate) fn borrow_no_more(&mut self) {
        self.borrows = false;
    }

    /// Hands the next bytes over to the peer, rounded up to whole grains.
    pub(crate) fn publish(&mut self, bytes: usize) {
        self.outgoing.publish(bytes);
        self.wake_peer();
    }

    /// The oldest bytes, at most `max` and as far as they lie side by side; none if none have come.
    pub(crate) fn peek(&mut self, max: usize) -> Result<&[u8], End> {
        let ended = self.ended;
        match (self.incoming.peek(max)?, ended) {
            ([], Some(end)) => Err(end),
            (bytes, _) => Ok(bytes),
        }
    }

    /// Whether a message or more of one has come that was not received yet.
    pub(crate) fn has_come(&mut self) -> Result<bool, End> {
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
    pub(crate) fn lie_down(&mut self, to_receive: bool) -> bool {
        self.sleep.begin();
        let ready = match to_receive {
            true => self.has_come(),
            false if self.lent => self.ended.map_or(Ok(loan::taken(self.outgoing.loan()).is_some()), Err),
            false => self.room(1).map(|room| room > 0),
        };
        matches!(ready, Ok(false))
    }

    /// Says that this side is awake, and listens to what the peer has said meanwhile.
    pub(crate) fn get_up(&mut self) {
        self.sleep.end();
        self.listen();
    }

    /// Hears what the peer has said.
    fn listen(&mut self) {
        let mut said = [0; HEARD_BYTES];
        for _ in 0..HEARD_MAX {
            match hear(&self.socket, &mut said) {
                Ok((0, _)) => self.ended = self.ended.or(Some(End::Closed)),
                Ok((count, file)) => {
                    self.file = file.or_else(|| self.file.take());
                    if said[..count].contains(&GOODBYE) {
                        self.ended = Some(End::Goodbye);
                    }
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.ended = self.ended.or(Some(End::Closed)),
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
        self.listen();
        self.file.take()
    }

    /// The peer's process, as the system tells it.
    pub(crate) fn peer_process(&self) -> io::Result<u32> {
        peer_of(&self.socket).map(|(process, _)| process)
    }

    /// Tells the peer that nothing more will come.
    pub(crate) fn say_goodbye(&self) {
        // Whoever does not hear it hears the end of the connection.
        let _ = say(&self.socket, GOODBYE);
    }

    fn wake_peer(&self) {
        if self.sleep.is_to_be_woken() {
            // If the connection takes no more, the peer has enough to wake up from.
            let _ = say(&self.socket, WAKE);
        }
    }
}

/// What becomes readable when the peer wakes this side, or ends.
impl AsFd for Memory {
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

    fn shared() -> (Memory, Memory) {
        let (one, other) = sockets();
        assert_eq!(take(&other).unwrap_err().kind(), ErrorKind::WouldBlock);
        let offered = offer(&one, &[5; 32]).unwrap();
        let taken = take(&other).unwrap().expect("it is what was offered");
        assert_eq!(answer(&one), ACCEPTED);
        (Memory::new(one, offered, true), Memory::new(other, taken, true))
    }

    fn send(memory: &mut Memory, bytes: &[u8]) {
        assert!(memory.room(bytes.len()).unwrap() >= bytes.len());
        memory.write(0, bytes);
        memory.publish(bytes.len());
    }

    #[test]
    fn a_descriptor_is_taken_from_behind_wake_ups() {
        let (mut one, mut other) = shared();
        assert!(other.lie_down(true));
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
        other.get_up();
        assert!(rustix::net::recv(&other.socket, &mut [0][..], RecvFlags::PEEK).unwrap().0 > 0);
        assert_eq!(other.peek(64).unwrap(), []);
        (0..=HEARD_MAX).for_each(|_| other.get_up());
        assert_eq!(other.peek(64).unwrap_err(), End::Closed);
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
            other.get_up();
            other.get_up();
            assert_eq!(other.peek(100).unwrap(), [1; 64]);
            other.advance(64);
            let end = if goodbye { End::Goodbye } else { End::Closed };
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
        assert!(other.lie_down(true), "nothing is here");
        send(&mut one, &[1; 64]);
        assert_eq!(answer(&other.socket), WAKE);
        assert!(!other.lie_down(true), "something is here");
        other.get_up();
        send(&mut one, &[1; 64]);
        assert_eq!((&other.socket).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}
