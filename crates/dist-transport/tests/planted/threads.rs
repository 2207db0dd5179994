//! Threads of one rank that wake each other, share memory and take turns, each with a bug that can be
//! planted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dist_transport::runtime::{Mailbox, Receiver, Task, Unparker};
use dist_transport::sim::SimTransport;
use dist_transport::{Runtime, Transport};

use crate::Bug;

fn spawn<T: Send + 'static>(runtime: &Runtime, work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    runtime.spawn("worker", work).unwrap()
}

pub(crate) fn wakes_before_it_sets(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let flag = Arc::new(AtomicBool::new(false));
    let (unparker, set) = (runtime.unparker(), flag.clone());
    let task = spawn(&runtime, move || {
        if bug.is_planted() {
            unparker.unpark();
            set.store(true, Ordering::SeqCst);
        } else {
            set.store(true, Ordering::SeqCst);
            unparker.unpark();
        }
    });
    while !flag.load(Ordering::SeqCst) {
        runtime.park(None);
    }
    task.join().unwrap();
}

/// Runs a waiter that its waker finds in a list.
pub(crate) fn registers_too_late(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let flag = Arc::new(AtomicBool::new(false));
    let waiting: Arc<Mutex<Option<Unparker>>> = Arc::default();
    let (set, list) = (flag.clone(), waiting.clone());
    let task = spawn(&runtime, move || {
        set.store(true, Ordering::SeqCst);
        let waiter = list.lock().unwrap().take();
        waiter.iter().for_each(Unparker::unpark);
    });
    loop {
        if !bug.is_planted() {
            *waiting.lock().unwrap() = Some(runtime.unparker());
        }
        if flag.load(Ordering::SeqCst) {
            break;
        }
        runtime.interleave();
        if bug.is_planted() {
            *waiting.lock().unwrap() = Some(runtime.unparker());
        }
        runtime.park(None);
    }
    task.join().unwrap();
}

pub(crate) fn wakes_one_of_two(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let flag = Arc::new(AtomicBool::new(false));
    let waiting: Arc<Mutex<Vec<Unparker>>> = Arc::default();
    let waiters = [(); 2].map(|()| {
        let (flag, waiting, own) = (flag.clone(), waiting.clone(), runtime.clone());
        spawn(&runtime, move || {
            waiting.lock().unwrap().push(own.unparker());
            while !flag.load(Ordering::SeqCst) {
                own.park(None);
            }
        })
    });
    flag.store(true, Ordering::SeqCst);
    runtime.interleave();
    let woken = std::mem::take(&mut *waiting.lock().unwrap());
    let count = if bug.is_planted() { 1 } else { 2 };
    woken.iter().take(count).for_each(Unparker::unpark);
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
}

pub(crate) fn counts_in_two_steps(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let count = Arc::new(AtomicU64::new(0));
    let tasks = [(); 2].map(|()| {
        let (count, own) = (count.clone(), runtime.clone());
        spawn(&runtime, move || {
            if bug.is_planted() {
                let before = count.load(Ordering::SeqCst);
                own.interleave();
                count.store(before + 1, Ordering::SeqCst);
            } else {
                count.fetch_add(1, Ordering::SeqCst);
            }
        })
    });
    tasks.into_iter().for_each(|task| task.join().unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 2);
}

pub(crate) fn looks_and_takes_apart(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let queue: Arc<Mutex<VecDeque<u8>>> = Arc::new(Mutex::new([1, 2, 3].into()));
    let tasks = [(); 2].map(|()| {
        let (queue, own) = (queue.clone(), runtime.clone());
        spawn(&runtime, move || {
            if !bug.is_planted() {
                while queue.lock().unwrap().pop_front().is_some() {
                    own.interleave();
                }
                return;
            }
            while !queue.lock().unwrap().is_empty() {
                own.interleave();
                let taken = queue.lock().unwrap().pop_front();
                taken.expect("there was one");
            }
        })
    });
    tasks.into_iter().for_each(|task| task.join().unwrap());
}

/// A lock that waits by the runtime: the thread with the token holds it.
type Lock = (Mailbox<()>, Mutex<Receiver<()>>);

fn lock(lock: &Lock, runtime: &Runtime) {
    // Never waited for: the token is taken, or other threads run.
    loop {
        let token = lock.1.lock().unwrap().try_receive();
        if token.is_some() {
            return;
        }
        runtime.yield_now();
    }
}

pub(crate) fn takes_locks_in_two_orders(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let locks: Arc<Vec<Lock>> = Arc::new(
        (0..2)
            .map(|_| {
                let (sender, receiver) = runtime.mailbox();
                sender.send(());
                (sender, Mutex::new(receiver))
            })
            .collect(),
    );
    let tasks = [0, 1].map(|number| {
        let (locks, own) = (locks.clone(), runtime.clone());
        spawn(&runtime, move || {
            let order = if bug.is_planted() && number == 1 { [1, 0] } else { [0, 1] };
            for which in order {
                lock(&locks[which], &own);
                own.interleave();
            }
            locks.iter().for_each(|lock| lock.0.send(()));
        })
    });
    tasks.into_iter().for_each(|task| task.join().unwrap());
}

/// Runs a barrier that counts to two; a correct one continues to count.
pub(crate) fn uses_a_barrier_again(transport: SimTransport, bug: Bug) {
    const ROUNDS: u64 = 3;
    let runtime = transport.runtime().clone();
    let count = Arc::new(AtomicU64::new(0));
    let tasks = [(); 2].map(|()| {
        let (count, own) = (count.clone(), runtime.clone());
        spawn(&runtime, move || {
            for round in 1..=ROUNDS {
                let last = count.fetch_add(1, Ordering::SeqCst) + 1 == 2;
                own.interleave();
                if bug.is_planted() {
                    // The last thread begins the next round, while the other may not have seen the end of
                    // this one.
                    if last {
                        count.store(0, Ordering::SeqCst);
                    }
                    while !last && count.load(Ordering::SeqCst) != 0 {
                        own.yield_now();
                    }
                } else {
                    while count.load(Ordering::SeqCst) < 2 * round {
                        own.yield_now();
                    }
                }
            }
        })
    });
    tasks.into_iter().for_each(|task| task.join().unwrap());
}

pub(crate) fn reads_before_the_end(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let result = Arc::new(AtomicU64::new(0));
    let written = result.clone();
    let task = spawn(&runtime, move || written.store(42, Ordering::SeqCst));
    if bug.is_planted() {
        drop(task);
    } else {
        task.join().unwrap();
    }
    assert_eq!(result.load(Ordering::SeqCst), 42);
}

/// Runs a worker that must end on request, after everything that was queued before.
pub(crate) fn forgets_queued_items(transport: SimTransport, bug: Bug) {
    let runtime = transport.runtime().clone();
    let (sender, mut receiver) = runtime.mailbox();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let worker = spawn(&runtime, move || {
        let mut done = 0;
        while let Ok(()) = receiver.receive(None) {
            if bug.is_planted() && stopped.load(Ordering::SeqCst) {
                break;
            }
            done += 1;
        }
        done
    });
    for _ in 0..3 {
        sender.send(());
    }
    stop.store(true, Ordering::SeqCst);
    drop(sender);
    assert_eq!(worker.join().unwrap(), 3);
}
