//! Tests of the scheduler. The conformance suite tests the network.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rstest::rstest;

use super::scheduler::Failure;
use super::*;
use crate::{Activity, Cause, Deadline, Error, Incoming, LazyDeadline, Outgoing, Result, Sink, Transport};

const MINUTE: Duration = Duration::from_secs(60);

fn send(transport: &mut dyn Transport, to: usize, bytes: &[u8], deadline: Deadline) -> Result<()> {
    transport.exchange(Some(Outgoing { to, parts: &[bytes] }), None, &deadline.into())
}

fn receive<const N: usize>(
    transport: &mut dyn Transport,
    from: usize,
    deadline: Deadline,
) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let incoming = Incoming { from, len: N, sink: Sink::Into(&mut bytes) };
    transport.exchange(None, Some(incoming), &deadline.into())?;
    Ok(bytes)
}

/// Returns the message with which `run` panics.
#[track_caller]
fn report<T: Send + 'static>(
    seed: u64,
    world_size: usize,
    program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
) -> String {
    let run = AssertUnwindSafe(|| run(seed, world_size, program).elapsed);
    *catch_unwind(run).unwrap_err().downcast::<String>().expect("the report is text")
}

/// Logs each rank's arrival at every step: the log is the interleaving.
fn logged_ring(seed: u64) -> (Vec<usize>, Outcome<u8>) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let ranks_log = log.clone();
    let outcome = run(seed, 4, move |mut transport| {
        let deadline = transport.runtime().deadline(MINUTE);
        let rank = transport.rank();
        let mut sum = 0;
        for _ in 0..5 {
            ranks_log.lock().unwrap().push(rank.index());
            send(&mut transport, rank.right().index(), &[1], deadline).unwrap();
            sum += receive::<1>(&mut transport, rank.left().index(), deadline).unwrap()[0];
        }
        sum
    });
    let log = log.lock().unwrap().clone();
    (log, outcome)
}

#[test]
#[should_panic(expected = "a world has at least one rank")]
fn a_world_of_no_ranks_is_refused() {
    let _ = run(7, 0, |_| ());
}

#[test]
fn a_seed_decides_the_interleaving_and_other_seeds_decide_others() {
    let mut interleavings = HashSet::new();
    let mut hashes = HashSet::new();
    for seed in 0..100 {
        let (log, outcome) = logged_ring(seed);
        assert_eq!((log.clone(), outcome.clone()), logged_ring(seed));
        assert_eq!(outcome.results, [5; 4]);
        assert_eq!(outcome.elapsed, Duration::ZERO);
        interleavings.insert(log);
        hashes.insert(outcome.trace_hash);
    }
    assert!(interleavings.len() > 90, "only {} interleavings", interleavings.len());
    assert_eq!(hashes.len(), 100);
}

#[test]
fn a_timeout_of_a_minute_takes_exactly_that_of_virtual_time() {
    let outcome = run(1, 2, |mut transport| {
        if transport.rank().index() == 1 {
            // Waits longer than its peer, so that it is still there when the peer gives up.
            let deadline = transport.runtime().deadline(2 * MINUTE);
            return receive::<1>(&mut transport, 0, deadline).map(drop);
        }
        let deadline = transport.runtime().deadline(MINUTE);
        receive::<1>(&mut transport, 1, deadline).map(drop)
    });
    assert_eq!(outcome.elapsed, MINUTE);
    let [first, second] = &outcome.results[..] else { panic!("two ranks") };
    assert!(
        matches!(
            first,
            Err(Error::Timeout { activity: Activity::Receive, peer: 1, elapsed: MINUTE, limit: MINUTE, .. })
        ),
        "{first:?}"
    );
    assert!(
        matches!(second, Err(Error::Aborted(abort))
            if matches!(abort.cause, Cause::TimedOut { .. }) && abort.rank == 1 && abort.reporter == 0),
        "{second:?}"
    );
}

#[test]
fn the_clock_stands_still_while_anybody_can_go_on() {
    let outcome = run(3, 3, |transport| {
        let runtime = transport.runtime().clone();
        for _ in 0..10 * transport.rank().index() {
            runtime.yield_now();
        }
        assert_eq!(runtime.now(), Duration::ZERO);
        let deadline = runtime.deadline(Duration::from_secs(1 + transport.rank().index() as u64));
        while !runtime.expired(deadline) {
            runtime.park(Some(deadline));
        }
        runtime.now()
    });
    assert_eq!(outcome.results, [1, 2, 3].map(Duration::from_secs));
    assert_eq!(outcome.elapsed, Duration::from_secs(3));
}

#[rstest]
fn a_wake_up_before_the_wait_is_not_lost(#[values(0, 1, 2, 3, 4, 5, 6, 7)] seed: u64) {
    let outcome = run(seed, 1, |transport| {
        let runtime = transport.runtime().clone();
        let woken = Arc::new(AtomicBool::new(false));
        let (unparker, set) = (runtime.unparker(), woken.clone());
        let task = runtime.spawn("waker", move || {
            set.store(true, Ordering::SeqCst);
            unparker.unpark();
        });
        while !woken.load(Ordering::SeqCst) {
            runtime.park(None);
        }
        task.unwrap().join().unwrap();
    });
    assert_eq!(outcome.elapsed, Duration::ZERO);
}

#[test]
fn seeds_find_a_wake_up_in_the_wrong_order() {
    // The planted bug: the flag is set after the wake-up, so the waiter may look in between and sleep on.
    let finds = |seed| {
        catch_unwind(|| {
            run(seed, 1, |transport| {
                let runtime = transport.runtime().clone();
                let flag = Arc::new(AtomicBool::new(false));
                let (unparker, set) = (runtime.unparker(), flag.clone());
                let task = runtime.spawn("waker", move || {
                    unparker.unpark();
                    set.store(true, Ordering::SeqCst);
                });
                while !flag.load(Ordering::SeqCst) {
                    runtime.park(None);
                }
                drop(task);
            })
        })
        .is_err()
    };
    let found = (0..100).filter(|&seed| finds(seed)).count();
    assert!(found > 0 && found < 100, "{found} of 100");
}

#[test]
fn a_deadlock_is_reported_with_the_seed_and_the_waiting_threads() {
    let report = report(11, 3, |transport| {
        let runtime = transport.runtime().clone();
        match transport.rank().index() {
            0 => runtime.park(None),
            1 => {
                let (sender, mut receiver) = runtime.mailbox::<u8>();
                let task = runtime.spawn("worker", move || receiver.receive(None)).unwrap();
                let _ = task.join();
                drop(sender);
            }
            _ => {}
        }
    });
    assert_eq!(
        report.lines().collect::<Vec<_>>(),
        [
            "seed 11: deadlock: nobody can wake those who wait without a deadline: rank 0, rank 1, rank 1/worker",
            "  rank 0 waits for no message",
            "  rank 1 waits for no message",
        ]
    );
}

#[rstest]
fn a_panic_of_a_rank_ends_the_run_and_is_the_one_reported(#[values(0, 1, 2, 3, 4)] seed: u64) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let ranks_dropped = dropped.clone();
    let report = report(seed, 4, move |mut transport| {
        let _guard = CountDrop(ranks_dropped.clone());
        let deadline = transport.runtime().deadline(MINUTE);
        assert_ne!(transport.rank().index(), 2, "planted");
        // This would panic too if the other threads saw the effects of the first panic.
        receive::<1>(&mut transport, 2, deadline).unwrap();
    });
    assert!(report.starts_with(&format!("seed {seed}: rank 2 panicked: assertion")), "{report}");
    assert!(report.contains("planted"), "{report}");
    let started = dropped.load(Ordering::SeqCst);
    assert_eq!(started, 4, "every rank's stack is unwound");
}

struct CountDrop(Arc<AtomicUsize>);

impl Drop for CountDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_panic_of_a_task_goes_to_the_joining_thread() {
    let outcome = run(5, 2, |transport| {
        let task = transport.runtime().spawn("worker", || panic!("planted")).unwrap();
        *task.join().unwrap_err().downcast::<&str>().unwrap()
    });
    assert_eq!(outcome.results, ["planted"; 2]);
}

#[test]
fn tasks_that_wait_for_the_clock_unwind_when_every_rank_has_returned() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let tasks_dropped = dropped.clone();
    let outcome = run(9, 2, move |transport| {
        let (runtime, guard) = (transport.runtime().clone(), CountDrop(tasks_dropped.clone()));
        let beat = move || {
            let _guard = guard;
            loop {
                runtime.park(Some(runtime.deadline(Duration::from_secs(1))));
            }
        };
        drop(transport.runtime().spawn::<()>("heartbeat", beat).unwrap());
    });
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
    assert_eq!(outcome.elapsed, Duration::ZERO);
}

#[test]
fn a_sleeper_that_is_woken_sleeps_on() {
    let outcome = run(9, 1, |transport| {
        let runtime = transport.runtime().clone();
        runtime.unparker().unpark();
        runtime.sleep(Duration::from_secs(5));
        runtime.now()
    });
    assert_eq!(outcome.results, [Duration::from_secs(5)]);
}

#[test]
fn a_panic_of_a_spawned_thread_is_in_the_report_of_its_consequences() {
    let report = report(2, 2, |transport| {
        let worker = transport.runtime().spawn("worker", || assert_eq!(1, 2, "the cause"));
        if transport.rank().index() == 1 {
            worker.unwrap().join().unwrap();
        }
    });
    let lines: Vec<_> = report.lines().collect();
    assert!(lines[0].starts_with("seed 2: rank 1 panicked: called `Result::unwrap()`"), "{report}");
    assert!(
        lines[1].contains("first, rank ") && lines[1].contains("/worker panicked: assertion"),
        "{report}"
    );
    assert!(lines[1].ends_with("the cause"), "{report}");
}

#[test]
fn a_task_that_cannot_be_woken_is_reported_when_every_rank_has_returned() {
    let report = report(2, 2, |transport| {
        let runtime = transport.runtime().clone();
        if transport.rank().index() == 1 {
            drop(transport.runtime().spawn("worker", move || runtime.park(None)).unwrap());
        }
    });
    assert_eq!(
        report,
        "seed 2: every rank has returned, but nobody can wake those who wait without a deadline: rank 1/worker"
    );
}

#[test]
fn yielding_without_end_is_reported() {
    let report = report(4, 1, |transport| {
        loop {
            transport.runtime().yield_now();
        }
    });
    let first = report.lines().next();
    assert_eq!(first, Some("seed 4: livelock: 100000 yields in a row, and nothing else, by rank 0"));
}

#[test]
fn a_destructor_may_wait_while_the_run_unwinds() {
    struct JoinOnDrop(Option<crate::runtime::Task<()>>);
    impl Drop for JoinOnDrop {
        fn drop(&mut self) {
            let _ = self.0.take().expect("joined once").join();
        }
    }
    let report = report(8, 2, |transport| {
        let runtime = transport.runtime().clone();
        let worker = runtime.clone();
        let _join = JoinOnDrop(runtime.spawn("worker", move || worker.park(None)).ok());
        assert_eq!(transport.rank().index(), 1, "planted");
        runtime.park(None);
    });
    assert!(report.starts_with("seed 8: rank 0 panicked"), "{report}");
}

#[test]
fn a_destructor_that_waits_for_ever_does_not_hang_the_run() {
    struct ParkOnDrop(Runtime);
    impl Drop for ParkOnDrop {
        fn drop(&mut self) {
            self.0.park(None);
            self.0.park(None);
        }
    }
    let report = report(8, 1, |transport| {
        let _park = ParkOnDrop(transport.runtime().clone());
        panic!("planted");
    });
    assert!(report.contains("left behind") && report.contains("rank 0"), "{report}");
}

#[test]
fn a_wait_outside_the_runtime_is_reported_and_does_not_hang() {
    let lock = Arc::new(Mutex::new(()));
    let ranks_lock = lock.clone();
    let held = lock.lock().unwrap();
    let program = move |transport: SimTransport| {
        if transport.rank().index() == 1 {
            drop(ranks_lock.lock().unwrap());
        }
    };
    let limit = Duration::from_millis(20);
    let failed = Network::new(2).with_seed(3).run_turns(limit, program).unwrap_err();
    let failure = failed.failure();
    drop(held);
    assert!(matches!(failure, Failure::Stalled { task, .. } if task == "rank 1"), "{failure}");
}

#[test]
fn a_simulated_run_may_hold_another() {
    let outcome = run(1, 2, |_| run(2, 3, |transport| transport.rank().index()).results);
    assert_eq!(outcome.results, [[0, 1, 2], [0, 1, 2]]);
}

#[test]
fn no_thread_of_a_run_is_left_when_it_has_returned() {
    // A thread's local variables are destroyed when it ends, after all of its work.
    thread_local! {
        static GUARD: std::cell::RefCell<Option<CountDrop>> = const { std::cell::RefCell::new(None) };
    }
    let ended = Arc::new(AtomicUsize::new(0));
    let ranks_ended = ended.clone();
    let _ = run(6, 8, move |transport| {
        GUARD.set(Some(CountDrop(ranks_ended.clone())));
        let ended = ranks_ended.clone();
        let task = transport.runtime().spawn("worker", move || GUARD.set(Some(CountDrop(ended))));
        task.unwrap().join().unwrap();
    });
    assert_eq!(ended.load(Ordering::SeqCst), 16);
}

#[test]
fn ranks_run_on_the_hosts_of_the_network() {
    let outcome = Network::new(3).with_hosts(&[5, 6, 5]).run(|mut transport| {
        let fork = transport.fork(&[2, 1]).unwrap();
        (transport.hosts(), fork.map(|fork| fork.hosts()))
    });
    assert_eq!(outcome.results[1], (vec![5, 6, 5], Some(vec![5, 6])));
    assert_eq!(outcome.results[0].1, None);
}

#[test]
fn nothing_is_kept_of_channels_that_everyone_has_left() {
    let outcome = Network::new(3).with_seed(5).with_shared_memory().run(|mut transport| {
        let due = LazyDeadline::from(transport.runtime().deadline(MINUTE));
        for number in 0..1000 {
            let members = if number % 2 == 0 { [2, 0] } else { [0, 1] };
            let Some(mut group) = transport.fork(&members).unwrap() else { continue };
            // The last ranks of some groups leave before the memory there is used.
            if number % 3 == 0 || group.rank().index() == 0 {
                assert!(group.shm_group(&due).unwrap().is_some());
            }
        }
        (transport.channels(), transport)
    });
    // The rank that was last saw only the world's channel.
    assert_eq!(outcome.results.iter().map(|(channels, _)| *channels).min(), Some(1));
}

#[test]
fn a_report_has_the_wait_and_the_call_of_every_rank() {
    fn call(number: u8) -> crate::Fingerprint {
        crate::Fingerprint([number; crate::Fingerprint::SIZE])
    }
    let program = |mut transport: SimTransport| {
        let deadline = transport.runtime().deadline(MINUTE);
        transport.set_call_formatter(|call| (call.0[0] == 7).then(|| "broadcast #7".to_owned()));
        let mut fork = transport.fork(&[3, 0]).unwrap();
        match transport.rank().index() {
            0 => {
                transport.begin(&call(7));
                transport.set_progress(crate::Progress { step: 3, receives: Some((2, 1)) });
                let _ = receive::<1>(&mut transport, 1, deadline);
            }
            1 => {
                transport.begin(&call(7));
                transport.set_progress(crate::Progress { step: 1, receives: Some((4, 5)) });
                let _ = receive::<1>(&mut transport, 2, deadline);
            }
            2 => {
                transport.begin(&call(8));
                let _ = send(&mut transport, 3, &[0; 9], deadline);
            }
            _ => {
                let _ = receive::<1>(&mut **fork.as_mut().unwrap(), 1, deadline);
            }
        }
        fork
    };
    let outcome = Network::new(4).with_window(8).run(program);
    let channel = crate::ChannelId::WORLD.child(0, &[3, 0]).get();
    assert_eq!(
        outcome.waits,
        [
            "rank 0 waits in step 3 of broadcast #7 for chunk 2 from rank 1, which is in step 1".to_owned(),
            "rank 1 waits in step 1 of broadcast #7 for 5 chunks, the first 4, from rank 2, which is in call "
                .to_owned() + &"08".repeat(crate::Fingerprint::SIZE),
            format!(
                "rank 2 waits in call {} to be rid of what it sent to rank 3, which is in no call",
                "08".repeat(48)
            ),
            format!("rank 3 waits for a message from rank 0 on channel {channel:016x}"),
        ]
    );
}
