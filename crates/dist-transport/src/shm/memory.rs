//! A connection whose bytes go through memory.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use socket2::Socket;

use super::segment::{self, Broken, Consumer, Ends, Nonce, Producer, Sleep};

/// What is said on the socket, a byte at a time.
const REFUSED: u8 = 0;
pub(crate) const ACCEPTED: u8 = 1;
const WAKE: u8 = 2;
const GOODBYE: u8 = 3;

/// Memory shared with one peer, for one channel.
#[derive(Debug)]
pub(crate) struct Memory {
    socket: Socket,
    outgoing: Producer,
    incoming: Consumer,
    sleep: Sleep,
    /// Set when nothing more will come or go than what is in the rings.
    ended: Option<End>,
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

/// Memory that is made or taken, before anything moved.
#[derive(Debug)]
pub(crate) struct Share(Ends);

/// Makes memory and offers it to the proven peer on the other side, which answers with [`ACCEPTED`] or something else.
///
/// # Errors
/// If the system has no memory to give, or the peer is gone.
pub(crate) fn offer(socket: &Socket, nonce: &Nonce) -> io::Result<Share> {
    let (file, ends) = segment::create(nonce)?;
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    attached.push(SendAncillaryMessage::ScmRights(&files));
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(nonce)], &mut attached, SendFlags::NOSIGNAL)?;
    // A new connection's buffer takes these few bytes at once.
    if sent == nonce.len() { Ok(Share(ends)) } else { Err(ErrorKind::WriteZero.into()) }
}

/// Takes the memory that the proven peer on the other side offers, and tells it. `None` if it is not to be had: then
/// the peer is told that.
///
/// # Errors
/// `WouldBlock` if nothing is offered yet; otherwise if the peer is gone.
pub(crate) fn take(socket: &Socket) -> io::Result<Option<Share>> {
    let mut nonce = Nonce::default();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut nonce)],
        &mut attached,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let files = attached.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file: Option<OwnedFd> = files.flatten().last();
    let ends = match file {
        Some(file) if message.bytes == nonce.len() => segment::open(&file, &nonce).unwrap_or_else(|error| {
            tracing::debug!(%error, "memory that was offered cannot be mapped");
            None
        }),
        _ => None,
    };
    say(socket, if ends.is_some() { ACCEPTED } else { REFUSED })?;
    Ok(ends.map(Share))
}

impl Memory {
    /// Memory that both sides have agreed on.
    pub(crate) fn new(socket: Socket, Share(Ends { outgoing, incoming, sleep }): Share) -> Self {
        Self { socket, outgoing, incoming, sleep, ended: None }
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

    /// Leaves these bytes behind, rounded up to whole grains.
    pub(crate) fn advance(&mut self, bytes: usize) {
        if self.incoming.advance(bytes) {
            self.wake_peer();
        }
    }

    /// Says that this side is about to sleep until it can do the one or the other; `false` if it need not sleep.
    pub(crate) fn lie_down(&mut self, to_receive: bool) -> bool {
        self.sleep.begin();
        let ready = if to_receive { self.peek(1).map(<[u8]>::len) } else { self.room(1) };
        matches!(ready, Ok(0))
    }

    /// Says that this side is awake, and listens to what the peer has said meanwhile.
    pub(crate) fn get_up(&mut self) {
        self.sleep.end();
        let mut said = [0; 64];
        match (&self.socket).read(&mut said) {
            Ok(0) => self.ended = self.ended.or(Some(End::Closed)),
            Ok(count) if said[..count].contains(&GOODBYE) => self.ended = Some(End::Goodbye),
            Err(e) if !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.ended = self.ended.or(Some(End::Closed));
            }
            _ => {}
        }
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

fn say(socket: &Socket, word: u8) -> io::Result<()> {
    let sent = rustix::net::send(socket, &[word], SendFlags::NOSIGNAL)?;
    if sent == 1 { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Type};

    use super::*;

    fn sockets() -> (Socket, Socket) {
        let (one, other) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        (one, other)
    }

    fn answer(socket: &Socket) -> u8 {
        let mut word = [9];
        let mut socket = socket;
        socket.read_exact(&mut word).unwrap();
        word[0]
    }

    fn shared() -> (Memory, Memory) {
        let (one, other) = sockets();
        assert_eq!(take(&other).unwrap_err().kind(), ErrorKind::WouldBlock);
        let offered = offer(&one, &[5; 32]).unwrap();
        let taken = take(&other).unwrap().expect("it is what was offered");
        assert_eq!(answer(&one), ACCEPTED);
        (Memory::new(one, offered), Memory::new(other, taken))
    }

    fn send(memory: &mut Memory, bytes: &[u8]) {
        assert!(memory.room(bytes.len()).unwrap() >= bytes.len());
        memory.write(0, bytes);
        memory.publish(bytes.len());
    }

    #[test]
    fn what_is_no_offer_is_refused_and_told_so() {
        let (one, other) = sockets();
        rustix::net::send(&one, &[5; 32], SendFlags::NOSIGNAL).unwrap();
        assert!(take(&other).unwrap().is_none());
        assert_eq!(answer(&one), REFUSED);
    }

    #[test]
    fn an_offer_of_something_else_is_refused_and_told_so() {
        let (one, other) = sockets();
        let (file, _ends) = segment::create(&[5; 32]).unwrap();
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        attached.push(SendAncillaryMessage::ScmRights(&files));
        let nonce = [6; 32];
        rustix::net::sendmsg(&one, &[IoSlice::new(&nonce)], &mut attached, SendFlags::NOSIGNAL).unwrap();
        assert!(take(&other).unwrap().is_none());
        assert_eq!(answer(&one), REFUSED);
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
