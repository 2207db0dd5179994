//! What is done in shared memory without a lock, in every interleaving and every order in which memory may be seen.
//!
//! Loom runs the code of this module and of [`cursor`](super::super::cursor) on words of its own. What sleeps for ever
//! is a deadlock, and what is written while it is read a race; both end a test. The same with less order ends in
//! one of them, so loom looks where it matters.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::atomic::{self, AtomicU32, AtomicU64};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use rstest::rstest;

use super::super::cursor::{Consumed, Produced};
use super::super::segment::RING_BYTES;
use super::super::turn::is_same_call;
use super::*;
use crate::CALLS_MAX;

impl Word for AtomicU32 {
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

impl Word for Unfenced {
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

/// What the system does for those who sleep by a word: it looks at it and goes to sleep at once.
#[derive(Default)]
struct Bed {
    lock: Mutex<()>,
    woken: Condvar,
}

impl Bed {
    fn sleep<W: Word>(&self, rung: &W, before: u32) {
        let mut held = self.lock.lock().expect("nobody panics");
        while rung.load(Ordering::Acquire) == before {
            held = self.woken.wait(held).expect("nobody panics");
        }
    }

    fn wake(&self) {
        let _held = self.lock.lock().expect("nobody panics");
        self.woken.notify_one();
    }
}

/// Posts of some ranks, a number that each has written before its post, and the words that one sleeps by.
struct Posts<W> {
    posts: Vec<AtomicU64>,
    written: Vec<UnsafeCell<u32>>,
    sleeping: W,
    rung: W,
    bed: Bed,
}

impl<W: Word> Posts<W> {
    fn new(ranks: usize, word: fn() -> W) -> Arc<Self> {
        Arc::new(Self {
            posts: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
            written: (0..ranks).map(|_| UnsafeCell::new(0)).collect(),
            sleeping: word(),
            rung: word(),
            bed: Bed::default(),
        })
    }

    fn post(&self, rank: usize) {
        self.written[rank].with_mut(drop);
        self.posts[rank].store(1, Ordering::Release);
        after_post::<W>();
        if ring(&self.sleeping, &self.rung, name(rank)) {
            self.bed.wake();
        }
    }

    fn wait(&self, rank: usize) {
        let ready = || self.posts[rank].load(Ordering::Acquire) == 1;
        while !ready() {
            let before = lie_down(&self.sleeping, &self.rung, name(rank));
            if !ready() {
                self.bed.sleep(&self.rung, before);
            }
            self.sleeping.store(0, Ordering::Relaxed);
        }
        self.written[rank].with(drop);
    }
}

fn name(rank: usize) -> u32 {
    u32::try_from(rank + 1).expect("there are few")
}

/// One rank waits for each of the others in turn.
fn posts<W: Word + Send + Sync + 'static>(others: usize, word: fn() -> W) {
    let all = Posts::new(others, word);
    let post = |rank: usize| {
        let all = all.clone();
        thread::spawn(move || all.post(rank))
    };
    let posting: Vec<_> = (0..others).map(post).collect();
    (0..others).for_each(|rank| all.wait(rank));
    posting.into_iter().for_each(|posting| posting.join().expect("nobody panics"));
}

#[rstest]
#[case::one_poster(1, 5)]
#[case::two_posters_of_which_one_is_awaited_later(2, 2)]
fn no_wake_up_is_lost(#[case] others: usize, #[case] preemptions: usize) {
    explore(preemptions, move || posts(others, || AtomicU32::new(0)));
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_a_wake_up_is_lost() {
    explore(5, || posts(1, || Unfenced(AtomicU32::new(0))));
}

/// Lines of two ranks, of which calls have so many in turn, with so many posts of each rank in a call.
struct Lines<const TURNS: usize, const POSTS: usize> {
    of_each: [[Line<POSTS>; TURNS]; 2],
    /// Whether each rank has a line where the other had it the last time.
    change_hands: bool,
}

struct Line<const POSTS: usize> {
    posts: AtomicU64,
    hash: AtomicU64,
    /// What each post of a call hands over.
    data: [UnsafeCell<u32>; POSTS],
}

impl<const TURNS: usize, const POSTS: usize> Lines<TURNS, POSTS> {
    fn line(&self, rank: usize, call: u64) -> &Line<POSTS> {
        let call = usize::try_from(call).expect("there are few");
        let changed = self.change_hands && call / TURNS % 2 == 1;
        &self.of_each[if changed { 1 - rank } else { rank }][call % TURNS]
    }

    /// Waits for one of the posts of a call, counted from 0.
    fn wait(&self, rank: usize, call: u64, post: u64) {
        while self.line(rank, call).posts.load(Ordering::Acquire) <= Self::posted_before(call) + post {
            thread::yield_now();
        }
    }

    const fn posted_before(call: u64) -> u64 {
        POSTS as u64 * (call - 1)
    }

    /// The hash of a call is its number.
    fn compare(&self, rank: usize, call: u64) {
        let found = || self.line(rank, call).hash.load(Ordering::Acquire);
        let in_line_before = || self.line(rank, call + TURNS as u64 - 1).posts.load(Ordering::Acquire);
        assert!(
            is_same_call((call, Self::posted_before(call)), found, in_line_before),
            "they seem to differ"
        );
    }

    /// Calls in a row: the first rank waits for nobody but to enter, as late as `apart` says, and
    /// the other reads. Both compare calls late.
    fn run(&self, me: usize, calls: u64, apart: u64, say: Ordering) {
        for call in 1..=calls {
            if let Some(begun @ 1..) = call.checked_sub(apart) {
                self.wait(1 - me, begun, 0);
                self.compare(1 - me, begun);
            }
            let line = self.line(me, call);
            line.hash.store(call, say);
            for (post, data) in (0..).zip(&line.data) {
                data.with_mut(drop);
                line.posts.store(Self::posted_before(call) + post + 1, Ordering::Release);
            }
            if me == 1 {
                for (post, data) in (0..).zip(&self.line(0, call).data) {
                    self.wait(0, call, post);
                    data.with(drop);
                }
            }
        }
    }
}

fn lines<const TURNS: usize>(apart: u64, say: Ordering) {
    explore_lines::<TURNS, 1>(false, apart, say);
}

fn lines_that_change_hands<const TURNS: usize, const POSTS: usize>(apart: u64, say: Ordering) {
    explore_lines::<TURNS, POSTS>(true, apart, say);
}

fn explore_lines<const TURNS: usize, const POSTS: usize>(change_hands: bool, apart: u64, say: Ordering) {
    explore(2, move || {
        let line = || Line {
            posts: AtomicU64::new(0),
            hash: AtomicU64::new(0),
            data: [(); POSTS].map(|()| UnsafeCell::new(0)),
        };
        let of_each = [(); 2].map(|()| [(); TURNS].map(|()| line()));
        let lines = Arc::new(Lines { of_each, change_hands });
        let reader = lines.clone();
        let reader = thread::spawn(move || reader.run(1, TURNS as u64 + 2, apart, say));
        lines.run(0, TURNS as u64 + 2, apart, say);
        reader.join().expect("nobody panics");
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
    #[case] apart: u64,
) {
    lines(apart, Ordering::Release);
}

#[rstest]
#[case::two_turns(lines::<2>, 2)]
#[case::as_many_as_there_are(lines::<CALLS_MAX>, CALLS_MAX as u64)]
#[case::two_turns_that_change_hands_while_there_are_posts(lines_that_change_hands::<2, 2>, 2)]
#[case::as_many_as_there_are_and_change_hands_while_there_are_posts(lines_that_change_hands::<CALLS_MAX, 2>, CALLS_MAX as u64)]
#[should_panic(expected = "ausality")]
fn a_line_that_is_used_again_too_early_is_a_race(#[case] lines: fn(u64, Ordering), #[case] apart: u64) {
    lines(apart, Ordering::Release);
}

#[test]
#[should_panic(expected = "seem to differ")]
fn a_hash_of_the_next_call_that_is_seen_before_the_post_before_it_looks_like_another_call() {
    lines::<3>(2, Ordering::Relaxed);
}

/// A ring with a message in each half, by its cursors.
struct Ring {
    halves: [UnsafeCell<u32>; 2],
    produced: AtomicU64,
    consumed: AtomicU64,
}

const HALF: usize = RING_BYTES / 2;

impl Ring {
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
            let given_back = cursor.advance(place.len()).expect("a half is worth it");
            self.consumed.store(given_back, give_back);
        }
    }
}

fn ring_of(publish: Ordering, give_back: Ordering) {
    explore(2, move || {
        let halves = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let ring = Arc::new(Ring { halves, produced: AtomicU64::new(0), consumed: AtomicU64::new(0) });
        let consumer = ring.clone();
        let consumer = thread::spawn(move || consumer.consume(4, give_back));
        ring.produce(4, publish);
        consumer.join().expect("nobody panics");
    });
}

#[test]
fn what_is_in_a_ring_is_read_before_it_is_written_again() {
    ring_of(Ordering::Release, Ordering::Release);
}

#[rstest]
#[case::what_is_produced(Ordering::Relaxed, Ordering::Release)]
#[case::what_is_given_back(Ordering::Release, Ordering::Relaxed)]
#[should_panic(expected = "ausality")]
fn a_ring_without_order_is_a_race(#[case] publish: Ordering, #[case] give_back: Ordering) {
    ring_of(publish, give_back);
}
