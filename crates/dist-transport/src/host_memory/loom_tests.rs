//! Lock-free protocols of shared memory, in every interleaving and every allowed order of memory.
//!
//! Loom runs the code of this module and of [`cursor`](crate::link::shm::cursor) on its own words. A lost wake-up
//! is a deadlock, and a write during a read is a race; both end a test. The same protocol with weaker order
//! ends in one of them, so loom finds the cases that matter.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::atomic::{self, AtomicU32, AtomicU64};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use rstest::rstest;

use super::super::generation::is_same_call;
use super::*;
use crate::link::shm::cursor::{Consumed, Produced};
use crate::link::shm::segment::RING_BYTES;
use crate::shm_group::CALLS_MAX;

impl FutexWord for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    fn clear_if(&self, from: u32) -> bool {
        self.compare_exchange(from, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn increment(&self) {
        self.fetch_add(1, Ordering::Release);
    }

    fn fence() {
        atomic::fence(Ordering::SeqCst);
    }
}

/// A word without the fence.
struct Unfenced(AtomicU32);

impl FutexWord for Unfenced {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn clear_if(&self, from: u32) -> bool {
        self.0.clear_if(from)
    }

    fn increment(&self) {
        self.0.increment();
    }

    fn fence() {}
}

fn explore(preemptions: usize, program: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(program);
}

/// The system's side of a futex: it checks the word and sleeps.
#[derive(Default)]
struct Futex {
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn sleep<W: FutexWord>(&self, wake_count: &W, before: u32) {
        let mut held = self.lock.lock().expect("no thread panics");
        while wake_count.load(Ordering::Acquire) == before {
            held = self.woken.wait(held).expect("no thread panics");
        }
    }

    fn wake(&self) {
        let _held = self.lock.lock().expect("no thread panics");
        self.woken.notify_one();
    }
}

/// The signals of several ranks, a number that each has written before its signal, and the futex words of one
/// sleeping rank.
struct Signals<W> {
    signals: Vec<AtomicU64>,
    written: Vec<UnsafeCell<u32>>,
    sleeping: W,
    wake_count: W,
    futex: Futex,
}

impl<W: FutexWord> Signals<W> {
    fn new(ranks: usize, word: fn() -> W) -> Arc<Self> {
        Arc::new(Self {
            signals: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
            written: (0..ranks).map(|_| UnsafeCell::new(0)).collect(),
            sleeping: word(),
            wake_count: word(),
            futex: Futex::default(),
        })
    }

    fn signal(&self, rank: usize) {
        self.written[rank].with_mut(drop);
        self.signals[rank].store(1, Ordering::Release);
        fence_after_signal::<W>();
        if claim_wake(&self.sleeping, &self.wake_count, name(rank)) {
            self.futex.wake();
        }
    }

    fn wait(&self, rank: usize) {
        let ready = || self.signals[rank].load(Ordering::Acquire) == 1;
        while !ready() {
            let before = prepare_sleep(&self.sleeping, &self.wake_count, name(rank));
            if !ready() {
                self.futex.sleep(&self.wake_count, before);
            }
            self.sleeping.store(0, Ordering::Relaxed);
        }
        self.written[rank].with(drop);
    }
}

fn name(rank: usize) -> u32 {
    u32::try_from(rank + 1).expect("there are few")
}

/// Waits on one rank for each of the others in turn.
fn signals<W: FutexWord + Send + Sync + 'static>(others: usize, word: fn() -> W) {
    let all = Signals::new(others, word);
    let signal = |rank: usize| {
        let all = all.clone();
        thread::spawn(move || all.signal(rank))
    };
    let signalling: Vec<_> = (0..others).map(signal).collect();
    (0..others).for_each(|rank| all.wait(rank));
    signalling.into_iter().for_each(|signalling| signalling.join().expect("no thread panics"));
}

#[rstest]
#[case::one_signaller(1, 5)]
#[case::two_posters_of_which_one_is_awaited_later(2, 2)]
fn no_wake_up_is_lost(#[case] others: usize, #[case] preemptions: usize) {
    explore(preemptions, move || signals(others, || AtomicU32::new(0)));
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_a_wake_up_is_lost() {
    explore(5, || signals(1, || Unfenced(AtomicU32::new(0))));
}

/// The flag lines of two ranks in several generations, with several signals of each rank in a call.
struct Lines<const GENERATIONS: usize, const SIGNALS: usize> {
    of_each: [[Line<SIGNALS>; GENERATIONS]; 2],
    /// `true` if the ranks swap their flag lines every round.
    change_hands: bool,
}

struct Line<const SIGNALS: usize> {
    signals: AtomicU64,
    hash: AtomicU64,
    /// The data that each signal of a call publishes.
    data: [UnsafeCell<u32>; SIGNALS],
}

impl<const GENERATIONS: usize, const SIGNALS: usize> Lines<GENERATIONS, SIGNALS> {
    fn line(&self, rank: usize, call: u64) -> &Line<SIGNALS> {
        let call = usize::try_from(call).expect("there are few");
        let changed = self.change_hands && call / GENERATIONS % 2 == 1;
        &self.of_each[if changed { 1 - rank } else { rank }][call % GENERATIONS]
    }

    /// Waits for one of the signals of a call, counted from 0.
    fn wait(&self, rank: usize, call: u64, signal: u64) {
        while self.line(rank, call).signals.load(Ordering::Acquire) <= Self::signalled_before(call) + signal {
            thread::yield_now();
        }
    }

    const fn signalled_before(call: u64) -> u64 {
        SIGNALS as u64 * (call - 1)
    }

    /// Compares the hash of a call, which is its number.
    fn compare(&self, rank: usize, call: u64) {
        let found = || self.line(rank, call).hash.load(Ordering::Acquire);
        let in_line_before =
            || self.line(rank, call + GENERATIONS as u64 - 1).signals.load(Ordering::Acquire);
        assert!(
            is_same_call((call, Self::signalled_before(call)), found, in_line_before),
            "they seem to differ"
        );
    }

    /// Makes consecutive calls: the first rank waits only to enter, as late as `distance` allows, and the
    /// other reads. Both compare calls late.
    fn run(&self, me: usize, calls: u64, distance: u64, say: Ordering) {
        for call in 1..=calls {
            if let Some(begun @ 1..) = call.checked_sub(distance) {
                self.wait(1 - me, begun, 0);
                self.compare(1 - me, begun);
            }
            let line = self.line(me, call);
            line.hash.store(call, say);
            for (signal, data) in (0..).zip(&line.data) {
                data.with_mut(drop);
                line.signals.store(Self::signalled_before(call) + signal + 1, Ordering::Release);
            }
            if me == 1 {
                for (signal, data) in (0..).zip(&self.line(0, call).data) {
                    self.wait(0, call, signal);
                    data.with(drop);
                }
            }
        }
    }
}

fn lines<const GENERATIONS: usize>(distance: u64, say: Ordering) {
    explore_lines::<GENERATIONS, 1>(false, distance, say);
}

fn lines_that_change_hands<const GENERATIONS: usize, const SIGNALS: usize>(distance: u64, say: Ordering) {
    explore_lines::<GENERATIONS, SIGNALS>(true, distance, say);
}

fn explore_lines<const GENERATIONS: usize, const SIGNALS: usize>(
    change_hands: bool,
    distance: u64,
    say: Ordering,
) {
    explore(2, move || {
        let line = || Line {
            signals: AtomicU64::new(0),
            hash: AtomicU64::new(0),
            data: [(); SIGNALS].map(|()| UnsafeCell::new(0)),
        };
        let of_each = [(); 2].map(|()| [(); GENERATIONS].map(|()| line()));
        let lines = Arc::new(Lines { of_each, change_hands });
        let reader = lines.clone();
        let reader = thread::spawn(move || reader.run(1, GENERATIONS as u64 + 2, distance, say));
        lines.run(0, GENERATIONS as u64 + 2, distance, say);
        reader.join().expect("no thread panics");
    });
}

#[rstest]
#[case::two_turns(lines::<2>, 1)]
#[case::three_turns(lines::<3>, 2)]
#[case::as_many_as_there_are(lines::<CALLS_MAX>, CALLS_MAX as u64 - 1)]
#[case::two_turns_that_change_hands(lines_that_change_hands::<2, 2>, 1)]
#[case::as_many_as_there_are_and_change_hands(lines_that_change_hands::<CALLS_MAX, 1>, CALLS_MAX as u64 - 1)]
fn a_line_is_used_again_when_all_have_left_its_last_call(
    #[case] lines: fn(u64, Ordering),
    #[case] distance: u64,
) {
    lines(distance, Ordering::Release);
}

#[rstest]
#[case::two_turns(lines::<2>, 2)]
#[case::as_many_as_there_are(lines::<CALLS_MAX>, CALLS_MAX as u64)]
#[case::two_turns_that_change_hands_while_there_are_signals(lines_that_change_hands::<2, 2>, 2)]
#[case::as_many_as_there_are_and_change_hands_while_there_are_signals(lines_that_change_hands::<CALLS_MAX, 2>, CALLS_MAX as u64)]
#[should_panic(expected = "ausality")]
fn a_line_that_is_used_again_too_early_is_a_race(#[case] lines: fn(u64, Ordering), #[case] distance: u64) {
    lines(distance, Ordering::Release);
}

#[test]
#[should_panic(expected = "seem to differ")]
fn a_hash_of_the_next_call_that_is_seen_before_the_signal_before_it_looks_like_another_call() {
    lines::<3>(2, Ordering::Relaxed);
}

/// A ring with a message in each half, by its cursors.
struct LoomRing {
    halves: [UnsafeCell<u32>; 2],
    produced: AtomicU64,
    consumed: AtomicU64,
}

const HALF: usize = RING_BYTES / 2;

impl LoomRing {
    fn produce(&self, messages: usize, publish: Ordering) {
        let mut cursor = Produced::default();
        for _ in 0..messages {
            while cursor.room(HALF, || self.consumed.load(Ordering::Acquire)).expect("it makes sense") < HALF
            {
                thread::yield_now();
            }
            let [place, _] = cursor.places(0, HALF);
            self.halves[place.start / HALF].with_mut(drop);
            self.produced.store(cursor.advance(HALF), publish);
        }
    }

    fn consume(&self, messages: usize, give_back: Ordering) {
        let mut cursor = Consumed::default();
        for _ in 0..messages {
            let place = loop {
                let next = cursor.next(HALF, || self.produced.load(Ordering::Acquire));
                let place = next.expect("it makes sense");
                if !place.is_empty() {
                    break place;
                }
                thread::yield_now();
            };
            self.halves[place.start / HALF].with(drop);
            let given_back = cursor.advance(place.len()).expect("a parity is worth it");
            self.consumed.store(given_back, give_back);
        }
    }
}

fn ring_of(publish: Ordering, give_back: Ordering) {
    explore(2, move || {
        let halves = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let ring = Arc::new(LoomRing { halves, produced: AtomicU64::new(0), consumed: AtomicU64::new(0) });
        let consumer = ring.clone();
        let consumer = thread::spawn(move || consumer.consume(4, give_back));
        ring.produce(4, publish);
        consumer.join().expect("no thread panics");
    });
}

#[test]
fn bytes_in_a_ring_are_read_before_they_are_overwritten() {
    ring_of(Ordering::Release, Ordering::Release);
}

#[rstest]
#[case::what_is_produced(Ordering::Relaxed, Ordering::Release)]
#[case::what_is_given_back(Ordering::Release, Ordering::Relaxed)]
#[should_panic(expected = "ausality")]
fn a_ring_without_order_is_a_race(#[case] publish: Ordering, #[case] give_back: Ordering) {
    ring_of(publish, give_back);
}
