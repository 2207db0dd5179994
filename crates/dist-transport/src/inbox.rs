//! The receiver's side of [matched messages](crate::Transport::exchange_matched).

use crate::Fingerprint;

/// Decides where arriving messages go. A transport gives it the fingerprint and the length of each message before
/// it delivers a byte.
///
/// A transport handles one message of a peer at a time: it calls [`accept`](Self::accept), fills
/// [`memory`](Self::memory), and calls [`complete`](Self::complete). If nothing is awaited before a message is
/// complete, a later call to [`exchange_matched`](crate::Transport::exchange_matched) goes on with it. The inbox of that
/// call then returns the same memory, with the bytes that have arrived.
pub trait Inbox {
    /// Returns the ranks of the group whose messages are awaited at the beginning, each once.
    fn sources(&self) -> &[usize];

    /// Returns `true` as long as another message of this rank is awaited, or the rest of one.
    fn awaits(&self, from: usize) -> bool;

    /// Returns the sum of the lengths of the awaited messages in bytes, as far as it is known.
    fn awaited_bytes(&self) -> usize;

    /// Takes the next message of this rank, which has this fingerprint and this length in bytes.
    ///
    /// # Errors
    /// The reason why the message is refused. The job is then aborted.
    fn accept(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<(), Refusal>;

    /// Returns the memory of the accepted message, in its length.
    fn memory(&mut self, from: usize) -> &mut [u8];

    /// Ends the accepted message, whose bytes are all in its memory.
    fn complete(&mut self, from: usize);

    /// Handles that an awaited rank has left and that all its messages were received. This rank is reported too, if its
    /// messages to itself are awaited and there is none. Returns `true` if the call goes on without the rank, which is
    /// then no longer awaited. Otherwise the call fails.
    fn peer_left(&mut self, _from: usize) -> bool {
        false
    }

    /// Returns `true` if the call must not wait for messages: it returns as soon as nothing more is sent or received.
    fn returns_at_once(&self) -> bool {
        false
    }
}

/// The reason why an [`Inbox`] refuses a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It belongs to another call.
    Mismatch,
    /// It should have this length in bytes.
    Length(usize),
    /// There is no memory for it.
    NoMemory,
}
