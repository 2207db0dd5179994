//! The history of a communicator: the number of its collectives, and a hash of them that every call carries.

use std::fmt;

use dist_algos::AlgorithmTable;

use crate::digest::digest;
use crate::{Call, Operation};

/// The collectives that this rank has executed on a communicator, and the forks and subgroups it has made. A started
/// collective counts like one that is called.
///
/// Every call carries the [`HistoryDigest`] in its fingerprint. If an earlier call of two ranks differed, they find
/// out in the next call in which they compare fingerprints. This works even if the messages of the calls that
/// differed never met. Messages between two ranks are not part of the history. Counts and members that may differ
/// between ranks are not part of it either.
#[derive(Clone, Copy, Debug)]
pub(crate) struct History {
    sequence: u64,
    hash: u64,
    past: HistoryDigest,
}

/// The digest of earlier calls that a call carries: 32 bits of a hash of all of them, and 8 bits for each of the
/// last four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct HistoryDigest(u64);

/// One entry of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistoryEvent {
    digest: u64,
    /// The code of the event in a [`HistoryDigest`].
    code: u8,
}

/// One of the last four events, as a [`HistoryDigest`] describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecentEvent {
    /// There was no such event.
    Nothing,
    /// A fork or subgroup was made.
    Fork,
    /// A collective was executed.
    Collective(Operation),
}

impl History {
    /// The history of a communicator that was not made from another one.
    pub(crate) const NEW: Self = Self { sequence: 0, hash: 0, past: HistoryDigest::NOTHING };

    /// Returns the first history of a fork or subgroup. Its calls carry the hash of the parent's calls before it.
    pub(crate) const fn of_child(&self) -> Self {
        Self { hash: mix(self.hash, CHILD), ..Self { past: self.past, ..Self::NEW } }
    }

    /// Returns the number of the next call.
    #[inline]
    pub(crate) const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the digest of earlier calls for the next call.
    #[inline]
    pub(crate) const fn past(&self) -> HistoryDigest {
        self.past
    }

    /// Counts a call.
    #[inline]
    pub(crate) const fn add_call(&mut self, event: HistoryEvent) {
        self.sequence += 1;
        self.add(event);
    }

    /// Begins calls that the user did not make. Returns the place to pass to [`end_internal`](Self::end_internal).
    pub(crate) const fn begin_internal(&mut self) -> u64 {
        let before = self.sequence;
        let phase = before >> PHASE_SHIFT;
        if phase.is_multiple_of(2) && phase < PHASES_MAX {
            self.sequence += 1 << PHASE_SHIFT;
        }
        before
    }

    /// Ends calls that the user did not make, and leaves them out of the numbers that users see. Sequence numbers
    /// still increase.
    pub(crate) const fn end_internal(&mut self, before: u64) {
        if self.sequence >> PHASE_SHIFT == before >> PHASE_SHIFT {
            return;
        }
        let calls = (self.sequence & COUNT_BITS) - (before & COUNT_BITS);
        self.sequence += 1 << PHASE_SHIFT;
        if (before >> INTERNAL_SHIFT & INTERNAL_MAX) + calls <= INTERNAL_MAX {
            self.sequence += calls << INTERNAL_SHIFT;
        }
    }

    /// Counts a fork or subgroup, which has no number among the calls.
    pub(crate) const fn add_fork(&mut self) {
        self.add(HistoryEvent::FORK);
    }

    #[inline]
    const fn add(&mut self, event: HistoryEvent) {
        self.hash = mix(self.hash, event.digest);
        self.past = self.past.followed_by(event.code).with_hash(self.hash);
    }
}

impl HistoryDigest {
    const NOTHING: Self = Self(0);

    pub(crate) const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    #[inline]
    pub(crate) const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// The number of last events that a call distinguishes.
    pub(crate) const RECENT: usize = 4;

    /// Returns the newest event in which two digests differ: its distance in calls, and the event in each digest.
    /// Returns `None` if the last four events are equal.
    pub(crate) fn newest_difference(self, other: Self) -> Option<(usize, RecentEvent, RecentEvent)> {
        let differs = |ago: &usize| self.code(*ago) != other.code(*ago);
        let ago = (1..=Self::RECENT).find(differs)?;
        Some((ago, RecentEvent::of(self.code(ago)), RecentEvent::of(other.code(ago))))
    }

    /// Returns the newest event.
    pub(crate) fn newest(self) -> RecentEvent {
        RecentEvent::of(self.code(1))
    }

    /// Returns the code of the event `ago` events ago; 1 is the newest.
    const fn code(self, ago: usize) -> u8 {
        self.0.to_le_bytes()[ago - 1]
    }

    #[inline]
    const fn followed_by(self, code: u8) -> Self {
        Self(((self.0 << 8) | code as u64) & RECENT_BITS)
    }

    #[inline]
    const fn with_hash(self, hash: u64) -> Self {
        Self((self.0 & RECENT_BITS) | (hash & !RECENT_BITS))
    }
}

impl HistoryEvent {
    /// A fork or subgroup.
    const FORK: Self = Self { digest: CHILD, code: FORK_CODE };

    /// Returns the event of a call. Calls that differ in more than their number have different digests.
    pub(crate) fn of(call: &Call, table: AlgorithmTable<'_>) -> Self {
        let bytes = call.without_history().encode_with(table).0;
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
        // Uses four bits of a sum and not of the digest: roots, types and counts that are close to each other
        // always differ in the sum.
        let sum = bytes.iter().fold(0, |sum: u8, &byte| sum.wrapping_add(byte));
        Self::new(call.operation, sum, digest(words))
    }

    const fn new(operation: Operation, sum: u8, digest: u64) -> Self {
        let code = (operation as u8 + 1) | (sum << SUM_SHIFT);
        Self { digest, code }
    }
}

impl RecentEvent {
    fn of(code: u8) -> Self {
        let kind = code & KIND_BITS;
        if kind == FORK_CODE {
            return Self::Fork;
        }
        let operation = usize::from(kind).checked_sub(1).and_then(|index| Operation::ALL.get(index));
        operation.map_or(Self::Nothing, |&operation| Self::Collective(operation))
    }
}

/// Writes the event as the predicate of a sentence about a rank.
impl fmt::Display for RecentEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("had called nothing yet"),
            Self::Fork => f.write_str("made a fork or subgroup"),
            Self::Collective(operation) => write!(f, "called {operation}"),
        }
    }
}

/// Returns the number of calls that the user has made before the call with this sequence number.
pub(crate) const fn user_calls_before(sequence: u64) -> u64 {
    (sequence & COUNT_BITS).saturating_sub(sequence >> INTERNAL_SHIFT & INTERNAL_MAX)
}

/// Returns `true` if the user did not make the call with this sequence number.
pub(crate) const fn is_internal(sequence: u64) -> bool {
    !(sequence >> PHASE_SHIFT).is_multiple_of(2)
}

/// Mixes a word into a hash. The function is a bijection of the hash for every word, so a call that differs is
/// never forgotten.
#[inline]
const fn mix(hash: u64, word: u64) -> u64 {
    let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 32)
}

/// The bits of a sequence number that count all calls before it. A sequence number has 55 bits: 40 of these, 9 for the
/// number of internal calls, and 6 for the number of changes between calls of the user and internal ones.
const COUNT_BITS: u64 = (1 << INTERNAL_SHIFT) - 1;
const INTERNAL_SHIFT: u32 = 40;
const INTERNAL_MAX: u64 = (1 << 9) - 1;
const PHASE_SHIFT: u32 = 49;
/// From this change on, internal calls are counted like those of the user.
const PHASES_MAX: u64 = (1 << 6) - 2;

const RECENT_BITS: u64 = u32::MAX as u64;
const KIND_BITS: u8 = 0xf;
/// Messages are not part of the history, so forks use their code.
const FORK_CODE: u8 = Operation::Message as u8 + 1;
/// The position of the lowest bits of the sum over the call's bytes, which distinguish calls of one operation.
const SUM_SHIFT: u8 = 4;
const _: () = assert!(Operation::ALL.len() <= KIND_BITS as usize, "every operation has a code");

/// An arbitrary constant.
const CHILD: u64 = 0xd6e8_feb8_6659_fd93;

#[cfg(test)]
mod tests {
    use super::*;

    fn event(operation: Operation, digest: u64) -> HistoryEvent {
        HistoryEvent::new(operation, 0, digest)
    }

    fn after(events: &[HistoryEvent]) -> HistoryDigest {
        let mut history = History::NEW;
        events.iter().for_each(|&event| history.add_call(event));
        history.past()
    }

    #[test]
    fn a_call_that_differed_shows_in_every_later_call() {
        let [gather, scatter] = [(Operation::Gather, 7), (Operation::Scatter, 8)]
            .map(|(operation, digest)| event(operation, digest));
        let barriers = vec![event(Operation::Barrier, 3); 300];
        for count in 0..barriers.len() {
            let pasts = [gather, scatter].map(|first| after(&[&[first], &barriers[..count]].concat()));
            assert_ne!(pasts[0], pasts[1], "{count} calls later");
            let difference = pasts[0].newest_difference(pasts[1]);
            let [one, other] = [Operation::Gather, Operation::Scatter].map(RecentEvent::Collective);
            assert_eq!(difference, (count < HistoryDigest::RECENT).then_some((count + 1, one, other)));
        }
    }

    #[test]
    fn the_order_of_calls_counts() {
        let [one, other] = [Operation::Gather, Operation::Barrier].map(|operation| event(operation, 7));
        assert_ne!(after(&[one, other]), after(&[other, one]));
    }

    #[test]
    fn a_child_carries_its_parents_history() {
        let [mut one, mut other] = [History::NEW; 2];
        one.add_call(event(Operation::Gather, 1));
        other.add_call(event(Operation::Scatter, 1));
        let children = [one, other].map(|mut parent| {
            parent.add_fork();
            let mut child = parent.of_child();
            child.add_call(event(Operation::Barrier, 1));
            child
        });
        assert_ne!(children[0].past(), children[1].past());
        let (ago, one, other) = children[0].past().newest_difference(children[1].past()).unwrap();
        assert_eq!(ago, 3, "the fork and the barrier are alike");
        assert_ne!(one, other);
    }

    #[test]
    fn internal_calls_are_not_counted_in_the_numbers_that_users_see() {
        let (mut history, barrier) = (History::NEW, event(Operation::Barrier, 1));
        let mut numbers = Vec::new();
        for _ in 0..100 {
            let before = history.begin_internal();
            for _ in 0..4 {
                numbers.push(history.sequence());
                assert!(is_internal(history.sequence()) || numbers.len() > 100);
                history.add_call(barrier);
            }
            history.end_internal(before);
            numbers.push(history.sequence());
            if numbers.len() <= 100 {
                assert_eq!(user_calls_before(history.sequence()), numbers.len() as u64 / 5 - 1);
            }
            assert!(!is_internal(history.sequence()));
            history.add_call(barrier);
        }
        assert!(numbers.is_sorted_by(|one, next| one < next), "no number is used twice");
        assert!(history.sequence() < 1 << 55);
    }

    #[test]
    fn every_event_says_what_it_was() {
        for operation in Operation::ALL.into_iter().filter(|operation| *operation != Operation::Message) {
            let HistoryEvent { code, .. } = HistoryEvent::new(operation, 7, u64::MAX);
            assert_eq!(RecentEvent::of(code), RecentEvent::Collective(operation));
        }
        assert_eq!(RecentEvent::of(HistoryEvent::FORK.code), RecentEvent::Fork);
        assert_eq!(RecentEvent::of(0), RecentEvent::Nothing);
    }
}
