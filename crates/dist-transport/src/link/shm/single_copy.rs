//! The protocol of a single-copy send: the message stays in the sender's memory until the receiver has copied
//! it.
//!
//! Both sides agree in one word. The sender opens the offer before it publishes the address of the message.
//! Then either the receiver acknowledges the number of bytes that it has copied, or the sender cancels
//! because its call has failed; the first one wins. Bytes that were copied after the sender continued
//! therefore never count as received.

use std::sync::atomic::{AtomicU64, Ordering};

/// The offer is open.
const OPEN: u64 = u64::MAX;
/// The sender has cancelled the offer.
const CANCELLED: u64 = u64::MAX - 1;

/// A shared word. The trait lets loom test the protocol in every interleaving.
pub(super) trait AckWord {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// Sets the word to `to` if it was `from`, and returns `true` if it was.
    fn change(&self, from: u64, to: u64) -> bool;
}

impl AckWord for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    fn change(&self, from: u64, to: u64) -> bool {
        self.compare_exchange(from, to, Ordering::Release, Ordering::Acquire).is_ok()
    }
}

/// Opens an offer, which the next publication hands over.
pub(super) fn offer<W: AckWord>(word: &W) {
    word.store(OPEN, Ordering::Relaxed);
}

/// Returns how many bytes the receiver has copied; `None` until it acknowledges. Afterwards the sender may
/// write to the message again.
pub(super) fn acked<W: AckWord>(word: &W) -> Option<u64> {
    let word = word.load(Ordering::Acquire);
    (word != OPEN).then_some(word)
}

/// Acknowledges this many copied bytes. Returns `false` if the sender has cancelled before, and the copy does
/// not count.
pub(super) fn ack<W: AckWord>(word: &W, acked: u64) -> bool {
    word.change(OPEN, acked)
}

/// Cancels an open offer. Afterwards the sender may write to the message again.
pub(super) fn cancel<W: AckWord>(word: &W) {
    word.change(OPEN, CANCELLED);
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic;
    use loom::thread;
    use rstest::rstest;

    use super::*;

    /// A word with weaker memory order.
    struct Weak<const TO_SETTLE: bool, const TO_LOOK: bool>(atomic::AtomicU64);

    impl<const TO_SETTLE: bool, const TO_LOOK: bool> AckWord for Weak<TO_SETTLE, TO_LOOK> {
        fn load(&self, order: Ordering) -> u64 {
            self.0.load(if TO_LOOK { Ordering::Relaxed } else { order })
        }

        fn store(&self, value: u64, order: Ordering) {
            self.0.store(value, order);
        }

        fn change(&self, from: u64, to: u64) -> bool {
            let ack = if TO_SETTLE { Ordering::Relaxed } else { Ordering::Release };
            let look = if TO_LOOK { Ordering::Relaxed } else { Ordering::Acquire };
            self.0.compare_exchange(from, to, ack, look).is_ok()
        }
    }

    /// A message and the word of its offer.
    struct Offered<W> {
        word: W,
        published: atomic::AtomicU64,
        message: UnsafeCell<u32>,
    }

    /// Sends a message. The sender may look once, and cancels otherwise. If the message counts as received,
    /// the sender writes again: the message must have been read before.
    fn send<const TO_SETTLE: bool, const TO_LOOK: bool>(looks: bool) {
        loom::model(move || {
            let word = Weak::<TO_SETTLE, TO_LOOK>(atomic::AtomicU64::new(0));
            let (published, message) = (atomic::AtomicU64::new(0), UnsafeCell::new(1));
            let shared = Arc::new(Offered { word, published, message });
            let receiver = shared.clone();
            let receiver = thread::spawn(move || {
                let published = receiver.published.load(Ordering::Acquire) == 1;
                published && {
                    receiver.message.with(drop);
                    ack(&receiver.word, 8)
                }
            });
            offer(&shared.word);
            shared.published.store(1, Ordering::Release);
            if !(looks && acked(&shared.word).is_some()) {
                cancel(&shared.word);
            }
            let received = shared.word.load(Ordering::Relaxed) != CANCELLED;
            if received {
                shared.message.with_mut(drop);
            }
            assert_eq!(receiver.join().expect("no thread panics"), received);
        });
    }

    #[rstest]
    fn bytes_written_after_a_cancelled_offer_were_not_received(#[values(true, false)] looks: bool) {
        send::<false, false>(looks);
    }

    #[rstest]
    #[case::on_the_receivers_side(send::<true, false>)]
    #[case::on_the_senders_side(send::<false, true>)]
    #[should_panic(expected = "ausality")]
    fn without_order_it_may_be(#[case] send: fn(bool), #[values(true, false)] looks: bool) {
        send(looks);
    }
}
