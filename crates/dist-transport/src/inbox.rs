//! The receiver's side of [matched messages](crate::Transport::exchange_matched), and the ways to end such a call early.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Fingerprint;
use crate::runtime::Unparker;

/// Decides where arriving messages go. A transport gives it the fingerprint and the length of each message before
/// it delivers a byte.
///
/// A transport handles one message of a peer at a time: it calls [`accept`](Self::accept), fills
/// [`memory`](Self::memory), and calls [`complete`](Self::complete). If nothing is awaited before a message is
/// complete, a later call to [`exchange_matched`](crate::Transport::exchange_matched) goes on with it. The inbox of that
/// call then returns the same memory, with the bytes that have arrived.
///
/// The bytes of a message longer than [`KEPT_MESSAGE_BYTES_MAX`](crate::KEPT_MESSAGE_BYTES_MAX) stay with its sender
/// first: the transport calls [`announce`](Self::announce) instead of `accept`. Other messages of the peer follow
/// meanwhile. When the inbox wants the bytes, the transport asks the peer for them, and calls
/// [`begin_announced`](Self::begin_announced) before they arrive.
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

    /// Takes the announcement of the next message of this rank, which has this fingerprint and this length in bytes.
    /// Numbers count the announced messages of a rank from 0. Returns `true` if the inbox wants the bytes now.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    fn announce(&mut self, from: usize, call: &Fingerprint, len: usize, number: u64)
    -> Result<bool, Refusal>;

    /// Returns an announced message that the inbox has come to want between two calls, as its sender and its number. The
    /// transport asks at the beginning of a call, until it gets `None`. Each message is returned once.
    fn next_wanted(&mut self) -> Option<(usize, u64)>;

    /// Begins to receive a wanted message: [`memory`](Self::memory) is asked for next.
    fn begin_announced(&mut self, from: usize, number: u64);

    /// Returns `true` if the inbox accepts another message of this rank that is not awaited. A rank that waits until a
    /// receiver wants an announced message may have to receive other messages of it first.
    fn keeps(&self, from: usize) -> bool;

    /// Returns the fingerprint and the memory of the next message of this rank, if both are known before it arrives. A
    /// message with this fingerprint and the length of the memory is then [accepted](Self::accept) into this memory.
    ///
    /// The transport may receive bytes there before it knows which message they belong to. If it is another message, the
    /// transport moves them away.
    fn next_memory(&mut self, _from: usize) -> Option<(Fingerprint, &mut [u8])> {
        None
    }

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

    /// Handles that the message at this position in the list of sends is sent.
    fn sent(&mut self, _position: usize) {}

    /// Returns whether the call pauses before everything is sent and received. The transport asks after each step.
    fn pause(&self) -> Pause {
        Pause::Never
    }

    /// Returns `true` if the call pauses at its deadline. Otherwise it fails then.
    fn pauses_at_deadline(&self) -> bool {
        false
    }

    /// Returns what ends the sleep of the call when another thread wants it to ask [`pause`](Self::pause) again.
    fn interrupt(&self) -> Option<Interrupt> {
        None
    }
}

/// The point at which a call to [`exchange_matched`](crate::Transport::exchange_matched) pauses: it returns, and a
/// later call goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// The call ends when everything is sent and received.
    Never,
    /// It pauses as soon as nothing more is sent or received without waiting.
    WhenIdle,
    /// It pauses now.
    Now,
}

/// A request to a call of [`exchange_matched`](crate::Transport::exchange_matched) in another thread, which may sleep.
/// Clones are the same request.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<InterruptShared>);

#[derive(Debug, Default)]
struct InterruptShared {
    is_requested: AtomicBool,
    /// The thread that sleeps. The lock is held while the flag is set, so that no request is missed.
    sleeper: Mutex<Option<Unparker>>,
}

impl Interrupt {
    /// Requests the interruption, and wakes the thread that sleeps.
    pub fn request(&self) {
        let mut sleeper = self.lock();
        self.0.is_requested.store(true, Ordering::Release);
        let woken = sleeper.take();
        drop(sleeper);
        if let Some(unparker) = woken {
            unparker.unpark();
        }
    }

    /// Returns `true` if an interruption was requested and not [cleared](Self::clear).
    #[inline]
    pub fn is_requested(&self) -> bool {
        self.0.is_requested.load(Ordering::Acquire)
    }

    /// Clears the request.
    pub fn clear(&self) {
        self.0.is_requested.store(false, Ordering::Release);
    }

    /// Sets what wakes the calling thread, which sleeps next, until [`end_sleep`](Self::end_sleep). Returns `false` if
    /// an interruption is requested, and the thread must not sleep.
    pub fn begin_sleep(&self, unparker: Unparker) -> bool {
        let mut sleeper = self.lock();
        if self.is_requested() {
            return false;
        }
        *sleeper = Some(unparker);
        true
    }

    /// Ends a sleep.
    pub fn end_sleep(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Unparker>> {
        self.0.sleeper.lock().unwrap_or_else(PoisonError::into_inner)
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
