//! Waits: a wait ends in time, and the error names the rank that delays all others.

use std::time::Duration;

use crate::shm_group::{ExposedRegion, SlotUse};
use crate::{
    Abort, Activity, Cause, CircularWait, Error, Fingerprint, LazyDeadline, StartedCount, Transport,
};

use super::Unchecked;
use super::backend::{AFTER_ALL_WAIT, Backend, Fabric, LONG};
use super::calls::{
    await_abort, await_record, call, exchange_a_byte_with_all, receive, receive_within, send, soon, stand_by,
    wait_in_vain,
};
use super::shm_group::barrier;

const OURS: Fingerprint = Fingerprint([1; Fingerprint::SIZE]);

/// The timeout of a rank that has reported its wait and then stops waiting.
const SAID: Duration = Duration::from_millis(300);

/// A wait ends at its deadline and names the peer.
pub(super) fn a_wait_ends_at_its_deadline_and_names_the_peer(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, at_once: bool) {
        let expected = if at_once { Duration::ZERO } else { backend.short() };
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            let error = match transport.rank().index() {
                0 => {
                    exchange_a_byte_with_all(transport).unwrap();
                    receive_within(transport, 1, 1, expected).unwrap_err()
                }
                _ => stand_by(transport, 0),
            };
            (error, await_abort(transport))
        };
        let record = Abort { cause: Cause::timed_out(), rank: 1, reporter: 0, call: Fingerprint::NONE };
        backend.check(world_size, program, move |ends| {
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!(*abort, record, "rank {rank}");
                match error {
                    Error::Timeout { activity: Activity::Receive, peer: 1, elapsed, limit, .. }
                        if rank == 0 =>
                    {
                        assert_eq!(*limit, expected);
                        assert!((expected..LONG).contains(elapsed), "{elapsed:?}");
                    }
                    Error::Aborted(abort) if rank > 0 => assert_eq!(*abort, record),
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    for world_size in [2, 3, 5, 8] {
        for at_once in [false, true] {
            check(backend, world_size, at_once);
        }
    }
}

/// If ranks wait for each other in a chain, the last is named: it delays all others. On a fabric that does not find circles,
/// no rank of a circle is the last.
pub(super) fn the_last_rank_of_a_chain_of_waits_is_named(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, is_connected: bool, is_circle: bool) {
        let rank = if is_circle { 1 } else { 3 };
        let record = Abort { cause: Cause::timed_out(), rank, reporter: 0, call: OURS };
        let told = record.clone();
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            if is_connected {
                exchange_a_byte_with_all(transport).unwrap();
            }
            transport.begin(&OURS);
            let right = transport.rank().right().index();
            let error = match transport.rank().index() {
                0 => Some(receive_within(transport, right, 1, AFTER_ALL_WAIT).unwrap_err()),
                last if last == 3 && !is_circle => None,
                _ => Some(wait_in_vain(transport, right)),
            };
            await_record(transport, &told);
            error
        };
        backend.check(4, program, move |errors| {
            for (rank, error) in errors.into_iter().enumerate() {
                match error {
                    Some(Error::Timeout { peer, .. }) if rank == 0 => assert_eq!(peer, record.rank),
                    Some(Error::Aborted(abort)) if rank > 0 => assert_eq!(abort, record),
                    None if rank == record.rank => {}
                    other => panic!("rank {rank}: {other:?}"),
                }
            }
        });
    }
    for is_connected in [true, false] {
        check(Backend(fabric), is_connected, false);
        if !fabric.finds_circles() {
            check(Backend(fabric), is_connected, true);
        }
    }
}

/// Ranks that wait for each other's messages in a circle are told so long before the deadline, with the call of every rank.
pub(super) fn ranks_that_wait_in_a_circle_are_told_soon(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, world_size: usize, is_connected: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            if is_connected {
                exchange_a_byte_with_all(transport).unwrap();
            }
            transport.begin(&OURS);
            let right = transport.rank().right().index();
            let error = wait_in_vain(transport, right);
            (error, await_abort(transport))
        };
        backend.check(world_size, program, move |ends| {
            let wait = |rank| CircularWait { rank, on: (rank + 1) % world_size, call: OURS };
            let waits = (0..world_size).map(wait).collect();
            let cause = Cause::CircularWait { waits, count: world_size };
            for (rank, (error, abort)) in ends.into_iter().enumerate() {
                assert_eq!((&abort.cause, abort.call), (&cause, OURS), "rank {rank}");
                assert!(!error.is_timeout() && error.peer().is_none(), "rank {rank}: {error}");
                assert!(matches!(&error, Error::Aborted(record) if *record == abort), "rank {rank}: {error}");
            }
        });
    }
    if !fabric.finds_circles() {
        return;
    }
    for world_size in [2, 3, 5] {
        for is_connected in [true, false] {
            check(Backend(fabric), world_size, is_connected);
        }
    }
}

/// Ranks that wait for each other in calls on two channels of one communicator are told so long before the deadline. If a started
/// operation of one of them may still end a wait, the abort of the deadline lists them.
pub(super) fn calls_on_two_channels_that_wait_for_each_other_are_told_soon(fabric: &'static dyn Fabric) {
    const MESSAGE: u8 = 5;
    const COLLECTIVE: u8 = 7;
    fn check(backend: Backend, world_size: usize, is_started: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let all: Vec<usize> = (0..world_size).collect();
            let mut messages = transport.fork(&all).unwrap().expect("every rank is a member");
            let (transport, started) = (&mut *transport, StartedCount::default());
            transport.set_started_count(&started);
            messages.set_started_count(&started);
            transport.begin(&call(1, COLLECTIVE));
            barrier(transport).unwrap();
            transport.begin(&call(2, COLLECTIVE));
            let (rank, due) = (transport.rank(), soon(transport));
            let right = rank.right().index();
            let error = if rank.index() == 0 {
                let limit = if is_started { AFTER_ALL_WAIT } else { LONG };
                messages.begin(&call(0, MESSAGE));
                receive_within(&mut *messages, right, 1, limit).unwrap_err()
            } else {
                if is_started {
                    started.record_start();
                }
                match Unchecked::of(transport, &due).unwrap() {
                    Some(mut shm_group) => {
                        shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &due).unwrap();
                        shm_group.wait(right, 1, &due).unwrap_err()
                    }
                    None => wait_in_vain(transport, right),
                }
            };
            (error, await_abort(transport))
        };
        backend.check(world_size, program, move |ends| {
            let call = |rank| if rank == 0 { call(0, MESSAGE) } else { call(2, COLLECTIVE) };
            let wait = |rank| CircularWait { rank, on: (rank + 1) % world_size, call: call(rank) };
            let circle =
                Cause::CircularWait { waits: (0..world_size).map(wait).collect(), count: world_size };
            for (rank, (error, abort)) in ends.into_iter().enumerate() {
                if is_started {
                    let waits = (0..world_size).map(wait).collect();
                    let late = Cause::TimedOut { waits, count: world_size };
                    assert_eq!((abort.cause, abort.rank, abort.reporter), (late, 1, 0), "rank {rank}");
                } else {
                    assert_eq!(abort.cause, circle, "rank {rank}");
                    assert!(!error.is_timeout() && error.peer().is_none(), "rank {rank}: {error}");
                }
            }
        });
    }
    if !fabric.finds_circles() {
        return;
    }
    for world_size in [2, 3, 5] {
        check(Backend(fabric), world_size, false);
    }
    check(Backend(fabric), 2, true);
}

/// A rank that waits for a message of a rank that waits, and that is late itself, is in no circle.
pub(super) fn a_late_rank_ends_the_waits_of_all_others(fabric: &'static dyn Fabric) {
    let program = move |mut transport: Box<dyn Transport>| {
        let transport = &mut *transport;
        transport.begin(&OURS);
        let (left, right) = (transport.rank().left().index(), transport.rank().right().index());
        if transport.rank().index() == 0 {
            transport.runtime().sleep(SAID);
            send(transport, left, &[1]).unwrap();
        }
        assert_eq!(receive(transport, right, 1).unwrap(), [1]);
        if transport.rank().index() > 0 {
            send(transport, left, &[1]).unwrap();
        }
    };
    Backend(fabric).check(4, program, |_| {});
}

/// A rank that has waited and waits no longer delays the ranks that wait for it itself.
pub(super) fn a_rank_that_waits_no_longer_is_named(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, is_connected: bool, listens: bool) {
        let record = Abort { cause: Cause::timed_out(), rank: 1, reporter: 0, call: OURS };
        let told = record.clone();
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            if is_connected {
                exchange_a_byte_with_all(transport).unwrap();
            }
            transport.begin(&OURS);
            let mut error = None;
            match transport.rank().index() {
                0 => error = Some(receive_within(transport, 1, 1, AFTER_ALL_WAIT).unwrap_err()),
                1 if listens => {
                    let due = LazyDeadline::from(transport.runtime().deadline(SAID));
                    assert_eq!(transport.wait_any_peer(&[2], &due).unwrap(), [2]);
                }
                1 => assert_eq!(receive(transport, 2, 1).unwrap(), [5]),
                _ if listens => {}
                _ => {
                    transport.runtime().sleep(SAID);
                    send(transport, 1, &[5]).unwrap();
                }
            }
            await_record(transport, &told);
            error
        };
        backend.check(3, program, move |errors| {
            assert!(matches!(errors[0], Some(Error::Timeout { peer: 1, .. })), "{:?}", errors[0]);
        });
    }
    for is_connected in [true, false] {
        for listens in [true, false] {
            check(Backend(fabric), is_connected, listens);
        }
    }
}

/// A wait in shared memory ends at its deadline and names the peer, by its number in the world.
pub(super) fn a_wait_in_shared_memory_ends_at_its_deadline_and_names_the_peer(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, members: [usize; 3]) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut group = transport.fork(&members).unwrap().unwrap();
            barrier(&mut *group).unwrap();
            let (me, long) = (group.rank().index(), soon(&*group));
            let short = group.runtime().deadline(backend.short());
            let due = if me == 0 { short.into() } else { long };
            let mut shm_group = Unchecked::of(&mut *group, &due).unwrap()?;
            shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due).unwrap();
            // The others wait for the first rank, which waits for one that does not signal.
            let error = shm_group.wait(usize::from(me == 0), 1, &due).expect_err("no rank signals");
            Some((error, await_abort(&*group)))
        };
        let [first, silent, _] = members;
        backend.check(3, program, move |ends| {
            for (rank, (error, abort)) in ends.into_iter().flatten().enumerate() {
                assert_eq!((abort.cause, abort.rank, abort.reporter), (Cause::timed_out(), silent, first));
                match error {
                    Error::Timeout { peer, .. } if rank == first => assert_eq!(peer, silent),
                    Error::Aborted(_) if rank != first => {}
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    for members in [[0, 1, 2], [2, 0, 1]] {
        check(Backend(fabric), members);
    }
}

/// If ranks wait for each other's signals in a chain, the last is named.
pub(super) fn the_last_rank_of_a_chain_of_waits_in_shared_memory_is_named(fabric: &'static dyn Fabric) {
    let record = Abort { cause: Cause::timed_out(), rank: 3, reporter: 0, call: call(1, 0) };
    let program = move |mut transport: Box<dyn Transport>| {
        let transport = &mut *transport;
        barrier(transport).unwrap();
        transport.begin(&call(1, 0));
        let (rank, long) = (transport.rank(), soon(transport));
        let due = match rank.index() {
            0 => transport.runtime().deadline(AFTER_ALL_WAIT).into(),
            _ => long,
        };
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return };
        shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &due).unwrap();
        if rank.index() < 3 {
            shm_group.wait(rank.right().index(), 1, &due).expect_err("no rank signals");
        }
        await_record(transport, &record);
    };
    Backend(fabric).check(4, program, |_| {});
}

/// A rank that has waited for signals and waits no longer delays the ranks that wait for it itself.
pub(super) fn a_rank_that_waits_no_longer_in_shared_memory_is_named(fabric: &'static dyn Fabric) {
    let record = Abort { cause: Cause::timed_out(), rank: 1, reporter: 0, call: call(1, 0) };
    let program = move |mut transport: Box<dyn Transport>| {
        let transport = &mut *transport;
        barrier(transport).unwrap();
        transport.begin(&call(1, 0));
        let (rank, long, runtime) = (transport.rank(), soon(transport), transport.runtime().clone());
        let due = if rank.index() == 0 { runtime.deadline(AFTER_ALL_WAIT).into() } else { long };
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return };
        shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &due).unwrap();
        match rank.index() {
            0 => drop(shm_group.wait(1, 1, &due).expect_err("it does not signal")),
            1 => shm_group.wait(2, 1, &due).unwrap(),
            _ => {
                runtime.sleep(SAID);
                shm_group.signal();
                shm_group.wake_waiters();
            }
        }
        await_record(transport, &record);
    };
    Backend(fabric).check(3, program, |_| {});
}
