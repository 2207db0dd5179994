//! Memory that all ranks of a group share. A transport without it keeps these promises trivially.

use crate::shm_group::{CALLS_MAX, ExposedRegion, MemoryArea, SlotUse};
use crate::{Abort, Cause, Error, Fingerprint, LazyDeadline, Result, Transport};

use super::Unchecked;
use super::backend::{Backend, Fabric, LONG};
use super::calls::{
    assert_one_contradicts, await_abort, call, exchange_a_byte_with_all, payload, receive_within, soon,
    wait_in_vain,
};

/// Signals once, and waits for every other rank.
pub(super) fn barrier(transport: &mut dyn Transport) -> Result<()> {
    let (rank, due) = (transport.rank(), soon(transport));
    let Some(mut shm_group) = Unchecked::of(transport, &due)? else { return Ok(()) };
    shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &due)?;
    shm_group.signal();
    (1..rank.world_size()).try_for_each(|distance| shm_group.wait(rank.plus(distance).index(), 1, &due))?;
    shm_group.wake_waiters();
    Ok(())
}

/// Makes a call without a wait on this rank. Returns `false` if the ranks share no memory.
fn pass(transport: &mut dyn Transport, call: Fingerprint) -> Result<bool> {
    let due = soon(transport);
    transport.begin(&call);
    let Some(mut shm_group) = Unchecked::of(transport, &due)? else { return Ok(false) };
    shm_group.enter(1, SlotUse::Unused, ExposedRegion::Nothing, &due)?;
    shm_group.signal();
    shm_group.wake_waiters();
    Ok(true)
}

/// All ranks of a group share memory, or none does.
pub(super) fn all_ranks_of_a_group_share_memory_or_none_does(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    for world_size in [1, 2, 5] {
        let program = |mut transport: Box<dyn Transport>| {
            let due = soon(&*transport);
            // Each rank has done something else before.
            transport.begin(&call(0, u8::from(transport.rank().index() == 1)));
            transport.begin(&call(1, 0));
            let shared = transport.shm_group(&due).unwrap().map(|shm_group| shm_group.shared());
            transport.begin(&call(2, 0));
            assert_eq!(transport.shm_group(&due).unwrap().map(|shm_group| shm_group.shared()), shared);
            // Other ranks may still be agreeing.
            exchange_a_byte_with_all(&mut *transport).unwrap();
            shared.map(|shared| format!("{shared:?}"))
        };
        backend.check(world_size, program, |shared| assert!(shared.iter().all(|one| *one == shared[0])));
    }
}

/// A rank that waits for a signal sees the bytes published before it.
pub(super) fn a_rank_that_waits_for_a_signal_sees_the_published_bytes(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn one_call(transport: &mut dyn Transport, number: usize) {
        let (rank, due) = (transport.rank(), soon(transport));
        transport.begin(&call(number as u64, 0));
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return };
        let shared = shm_group.shared();
        let sheet = (MemoryArea::EagerBuffer, 0, shared.eager_bytes);
        let places =
            [(MemoryArea::FlagLine, 0, shared.flag_line_bytes), sheet, (MemoryArea::Slot(0), 64, 1000)];
        let last = (MemoryArea::Slot(shared.slots - 1), 0, shared.slot_bytes);
        shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due).unwrap();
        for (place, offset, len) in places.into_iter().chain([last]) {
            let bytes = payload(rank, number, len);
            shm_group.publish(place, offset, &bytes[..len / 2]);
            shm_group.publish(place, offset + len / 2, &bytes[len / 2..]);
        }
        shm_group.signal();
        for distance in 1..rank.world_size() {
            let peer = rank.minus(distance);
            shm_group.wait(peer.index(), 1, &due).unwrap();
            for (place, offset, len) in places.into_iter().chain([last]) {
                let mut read = vec![0; len];
                shm_group.read(peer.index(), place, offset, &mut read).unwrap();
                assert!(read == payload(peer, number, len), "{place:?} of {peer} in call {number}");
                let mut seen = Vec::new();
                let view = &mut |at: usize, piece: &[u8]| {
                    assert_eq!((at, at % 64), (seen.len(), 0));
                    seen.extend_from_slice(piece);
                };
                shm_group.view(peer.index(), place, offset..offset + len, view).unwrap();
                assert_eq!(seen, read);
            }
        }
        shm_group.wake_waiters();
    }
    for world_size in [2, 3, 5] {
        let program = |mut transport: Box<dyn Transport>| {
            (1..12).for_each(|number| one_call(&mut *transport, number));
            barrier(&mut *transport).unwrap();
        };
        backend.check(world_size, program, drop);
    }
}

/// After a fused barrier every rank has the bytes of all ranks: in the flag line, in the eager buffer, in
/// slots, and in each other's slots.
pub(super) fn after_a_fused_barrier_every_rank_has_the_bytes_of_all(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn run_fused_barrier(transport: &mut dyn Transport, number: usize) {
        let (rank, due) = (transport.rank(), soon(transport));
        transport.begin(&call(number as u64, 0));
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return };
        let (place, shift, len) = match number % 4 {
            0 => (MemoryArea::FlagLine, 0, 40),
            1 => (MemoryArea::Slot(0), 0, 1000),
            2 => (MemoryArea::EagerBuffer, 0, 2000),
            _ => (MemoryArea::Slot(1), 1, 5000),
        };
        let bytes = payload(rank, number, len);
        shm_group.signal_and_wait((rank.plus(shift).index(), place, 0), &bytes, &due).unwrap();
        for distance in 0..rank.world_size() {
            let peer = rank.plus(distance);
            let mut read = vec![0; len];
            shm_group.read(peer.plus(shift).index(), place, 0, &mut read).unwrap();
            assert!(read == payload(peer, number, len), "{place:?} of {peer} in call {number}");
        }
        let others: Vec<_> = (1..rank.world_size()).map(|distance| rank.minus(distance)).collect();
        let there: Vec<_> = others.iter().map(|peer| (peer.plus(shift).index(), 8)).collect();
        let expected: Vec<_> = others.iter().map(|&peer| payload(peer, number, len)[8..].to_vec()).collect();
        let mut seen = Vec::new();
        let view = &mut |all: &[&[u8]]| seen.extend(all.iter().map(|one| one.to_vec()));
        shm_group.view_all(place, &there, len - 8, view).unwrap();
        assert!(seen == expected, "{place:?} of all in call {number}");
        let nothing = shm_group.view_all(MemoryArea::Exposed, &there, 1, &mut |all| assert!(all.is_empty()));
        assert!(there.is_empty() || matches!(nothing, Err(Error::OutOfReach { .. })), "{nothing:?}");
    }
    for world_size in [1, 2, 4] {
        let program = |mut transport: Box<dyn Transport>| {
            (1..20).for_each(|number| run_fused_barrier(&mut *transport, number));
            barrier(&mut *transport).unwrap();
        };
        backend.check(world_size, program, drop);
    }
}

/// Each signal of a call publishes the bytes written before it.
pub(super) fn each_signal_of_a_call_publishes_earlier_writes(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    /// Passes a number around the ring in shared memory: each rank adds one to the number that its left
    /// neighbour has published.
    fn go_round(transport: &mut dyn Transport, number: u64) {
        let (rank, due) = (transport.rank(), soon(transport));
        transport.begin(&call(number, 0));
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return };
        let signals = u32::try_from(rank.world_size()).unwrap();
        shm_group.enter(signals, SlotUse::Used, ExposedRegion::Nothing, &due).unwrap();
        let mut word = number + rank.index() as u64;
        for signal in 1..=signals {
            let slot = MemoryArea::Slot(signal as usize % 2);
            shm_group.publish(slot, 8, &word.to_le_bytes());
            shm_group.signal();
            // Neither neighbour may be more than a slot ahead.
            for peer in [rank.left(), rank.right()] {
                shm_group.wait(peer.index(), signal, &due).unwrap();
            }
            let mut theirs = [0; 8];
            shm_group.read(rank.left().index(), slot, 8, &mut theirs).unwrap();
            word = u64::from_le_bytes(theirs) + 1;
        }
        shm_group.wake_waiters();
        assert_eq!(word, number + rank.index() as u64 + u64::from(signals));
    }
    for world_size in [2, 3, 4] {
        let program = move |mut transport: Box<dyn Transport>| {
            (1..20).for_each(|number| go_round(&mut *transport, number));
            barrier(&mut *transport).unwrap();
        };
        backend.check(world_size, program, drop);
    }
}

/// Bytes that a rank is still reading are not overwritten, however many calls it is behind.
pub(super) fn bytes_that_a_rank_is_still_reading_are_not_overwritten(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    const CALLS: u64 = 240;
    /// Returns the memory area for the data that the first rank publishes in a call. That rank does not wait.
    fn place_in(number: u64) -> MemoryArea {
        match number % 60 {
            0..20 => MemoryArea::FlagLine,
            20..40 => MemoryArea::EagerBuffer,
            40..50 if number.is_multiple_of(2) => MemoryArea::Slot(0),
            40..50 => MemoryArea::EagerBuffer,
            _ if number.is_multiple_of(2) => MemoryArea::FlagLine,
            _ => MemoryArea::Slot(1),
        }
    }
    let program = |mut transport: Box<dyn Transport>| {
        let (rank, due) = (transport.rank(), soon(&*transport));
        for number in 1..=CALLS {
            transport.begin(&call(number, 0));
            let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() else { return };
            let place = place_in(number);
            shm_group.enter(1, SlotUse::of(place), ExposedRegion::Nothing, &due).unwrap();
            if rank.index() == 0 {
                shm_group.publish(place, 0, &number.to_le_bytes());
                shm_group.signal();
            } else {
                shm_group.signal();
                shm_group.wait(0, 1, &due).unwrap();
                let mut read = [0; 8];
                shm_group.read(0, place, 0, &mut read).unwrap();
                assert_eq!(u64::from_le_bytes(read), number);
            }
            shm_group.wake_waiters();
        }
        barrier(&mut *transport).unwrap();
    };
    for world_size in [2, 4] {
        backend.check(world_size, program, drop);
    }
}

/// All ranks get an error if their calls in shared memory differ.
pub(super) fn all_ranks_in_shared_memory_get_the_error_of_differing_calls(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    for world_size in [2, 4] {
        /// Makes a call that differs on one rank, and a barrier. Returns `true` if the ranks share memory.
        fn disagree(transport: &mut dyn Transport) -> Result<bool> {
            barrier(transport)?;
            transport.begin(&call(1, u8::from(transport.rank().index() == 1)));
            let due = soon(transport);
            let shares = transport.shm_group(&due)?.is_some();
            barrier(transport).map(|()| shares)
        }
        let program = |mut transport: Box<dyn Transport>| match disagree(&mut *transport) {
            Ok(shares) => {
                assert!(!shares, "the difference was not detected");
                None
            }
            Err(error) => Some((error, await_abort(&*transport))),
        };
        backend.check(world_size, program, |ends| assert_one_contradicts(ends.into_iter().flatten()));
    }
}

/// Ranks whose calls in shared memory differ get an error, even if no rank waits for another one in these calls.
pub(super) fn differing_calls_in_shared_memory_are_detected_without_waits(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    /// Makes some calls without waits, the first of which differs on one rank, and then a barrier. Returns
    /// `true` if the ranks share memory.
    fn disagree(transport: &mut dyn Transport, calls: u64) -> Result<bool> {
        barrier(transport)?;
        for number in 1..=calls {
            let differs = number == 1 && transport.rank().index() == 1;
            if !pass(transport, call(number, u8::from(differs)))? {
                return Ok(false);
            }
        }
        transport.begin(&call(calls + 1, 0));
        barrier(transport).map(|()| true)
    }
    for calls in 1..=CALLS_MAX as u64 + 1 {
        let program = move |mut transport: Box<dyn Transport>| match disagree(&mut *transport, calls) {
            Ok(shares) => {
                assert!(!shares, "the difference was not detected");
                None
            }
            Err(error) => Some((error, await_abort(&*transport))),
        };
        backend.check(3, program, |ends| assert_one_contradicts(ends.into_iter().flatten()));
    }
}

/// Contradicting calls are reported long before the deadline, also by ranks that ran ahead of one that waits
/// for a message.
pub(super) fn contradicting_calls_are_reported_by_ranks_that_ran_ahead(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn disagree(transport: &mut dyn Transport) -> Result<()> {
        barrier(transport)?;
        let due = soon(transport);
        if transport.shm_group(&due)?.is_none() {
            return Ok(());
        }
        if transport.rank().index() == 1 {
            transport.begin(&call(1, 1));
            return receive_within(transport, 0, 1, LONG).map(drop);
        }
        (1..=CALLS_MAX as u64).try_for_each(|number| pass(transport, call(number, 0)).map(drop))?;
        barrier(transport)
    }
    let program = |mut transport: Box<dyn Transport>| {
        let ended = disagree(&mut *transport);
        ended.err().map(|error| (error, await_abort(&*transport)))
    };
    backend.check(3, program, |ends| assert_one_contradicts(ends.into_iter().flatten()));
}

/// Waits for the second rank, and returns whether there is memory to do so.
fn wait_for_the_second(transport: &mut dyn Transport) -> Result<bool> {
    let due = soon(transport);
    let Some(mut shm_group) = Unchecked::of(transport, &due)? else { return Ok(false) };
    shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due)?;
    shm_group.signal();
    shm_group.wait(1, 1, &due).map(|()| true)
}

/// Returns why the job was aborted, if the second rank was waited for in memory, and the wait ended before
/// its deadline.
fn woken_by(transport: &dyn Transport, waited: Result<bool>, due: &LazyDeadline<'_>) -> Option<Abort> {
    match waited {
        Ok(waited) => {
            assert!(!waited, "it has not signalled");
            None
        }
        Err(error) => {
            assert!(!transport.runtime().expired(due.deadline()), "not woken: {error}");
            Some(await_abort(transport))
        }
    }
}

/// Checks that the end of a rank's part in shared memory wakes the ranks that wait for it.
fn check_end(
    backend: Backend,
    end: fn(Box<dyn Transport>),
    expected: impl Fn(&Abort) + Copy + Send + Sync + 'static,
) {
    let program = move |mut transport: Box<dyn Transport>| {
        let met = barrier(&mut *transport);
        let due = soon(&*transport);
        if transport.rank().index() == 1 {
            let shares = transport.shm_group(&due).unwrap().is_some();
            if shares {
                end(transport);
            }
            return None;
        }
        let waited = met.and_then(|()| wait_for_the_second(&mut *transport));
        woken_by(&*transport, waited, &due)
    };
    backend.check(3, program, move |ends| ends.iter().flatten().for_each(expected));
}

/// A rank that leaves shared memory is named.
pub(super) fn a_rank_that_leaves_shared_memory_is_named(fabric: &'static dyn Fabric) {
    check_end(Backend(fabric), drop, |abort| assert_eq!((&abort.cause, abort.rank), (&Cause::Left, 1)));
}

/// A rank that leaves a group before it uses the group's memory is named.
pub(super) fn a_rank_that_leaves_a_group_before_it_shares_memory_is_named(fabric: &'static dyn Fabric) {
    /// Returns `true` if the group had shared memory in which this rank could wait for the other.
    fn lose_the_second(transport: &mut dyn Transport) -> Result<bool> {
        barrier(transport)?;
        let due = soon(transport);
        if transport.shm_group(&due)?.is_none() {
            return Ok(false);
        }
        let mut group = transport.fork(&[0, 1, 2])?.expect("all are in it");
        if transport.rank().index() == 1 {
            drop(group);
            return Err(wait_in_vain(transport, 0));
        }
        wait_for_the_second(&mut *group)
    }
    let program = |mut transport: Box<dyn Transport>| {
        let due = soon(&*transport);
        let waited = lose_the_second(&mut *transport);
        woken_by(&*transport, waited, &due)
    };
    Backend(fabric).check(3, program, |ends| {
        for abort in ends.into_iter().flatten() {
            assert_eq!((abort.cause, abort.rank), (Cause::Left, 1));
        }
    });
}

/// An abort wakes ranks that wait in shared memory.
pub(super) fn an_abort_wakes_ranks_that_wait_in_shared_memory(fabric: &'static dyn Fabric) {
    let end = |mut transport: Box<dyn Transport>| transport.abort(Cause::gave_up("enough"));
    check_end(Backend(fabric), end, |abort| {
        assert_eq!((&abort.cause, abort.rank), (&Cause::gave_up("enough"), 1));
    });
}

/// Each group has its own shared memory.
pub(super) fn groups_share_memory_of_their_own(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn tell(transport: &mut dyn Transport, number: u64) -> Vec<u64> {
        let (rank, due) = (transport.rank(), soon(transport));
        let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return Vec::new() };
        shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due).unwrap();
        shm_group.publish(MemoryArea::FlagLine, 0, &number.to_le_bytes());
        shm_group.signal();
        let hear = |peer| {
            shm_group.wait(peer, 1, &due).unwrap();
            let mut word = [0; 8];
            shm_group.read(peer, MemoryArea::FlagLine, 0, &mut word).unwrap();
            u64::from_le_bytes(word)
        };
        let heard = (0..rank.world_size()).filter(|&peer| peer != rank.index()).map(hear).collect();
        shm_group.wake_waiters();
        heard
    }
    let program = |mut transport: Box<dyn Transport>| {
        let me = transport.rank().index();
        let mine = [me % 2, me % 2 + 2];
        let mut pair = transport.fork(&mine).unwrap().unwrap();
        for number in 0..10 {
            let others = tell(&mut *transport, (100 * number + me) as u64);
            let expected = (0..4).filter(|&peer| peer != me).map(|peer| (100 * number + peer) as u64);
            assert!(others.is_empty() || others == expected.collect::<Vec<_>>(), "{others:?}");
            let other = tell(&mut *pair, (1000 * number + me) as u64);
            assert!(other.is_empty() || other == [(1000 * number + (me + 2) % 4) as u64], "{other:?}");
        }
        barrier(&mut *transport).unwrap();
    };
    backend.check(4, program, drop);
}

/// A rank sees its own published bytes without waiting.
pub(super) fn a_rank_sees_its_own_places(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let (me, due) = (transport.rank().index(), soon(&*transport));
        if let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() {
            look_at_itself(&mut shm_group, me, &due);
        }
        barrier(&mut *transport).unwrap();
    };
    backend.check(2, program, drop);
}

fn look_at_itself(shm_group: &mut Unchecked<'_>, me: usize, due: &LazyDeadline<'_>) {
    shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, due).unwrap();
    shm_group.publish(MemoryArea::Slot(0), 128, b"hello");
    let mut seen = [0; 5];
    shm_group.read(me, MemoryArea::Slot(0), 128, &mut seen).unwrap();
    assert_eq!(&seen, b"hello");
    shm_group.signal();
    shm_group.wait(me, 1, due).unwrap();
    shm_group.wake_waiters();
}
