//! Memory that ranks expose to each other.

use crate::shm_group::{CHANGED_MAX, ExposedRegion, MemoryArea, Reach, SlotUse, WordSize, WordUpdate};
use crate::{Error, Owned, Transport};

use super::Unchecked;
use super::backend::{Backend, Fabric};
use super::calls::{call, pass_round, payload, soon};
use super::shm_group::barrier;

/// Reads from every other rank's memory and writes into it, if it is accessible. Returns the memory.
fn reach_into_all(transport: &mut dyn Transport, mut memory: Owned<u8>, number: usize) -> Owned<u8> {
    let (rank, due) = (transport.rank(), soon(transport));
    let (me, bytes, is_allocated) = (rank.index(), memory.len(), memory.is_allocated());
    let (half, len) = (bytes / 2, bytes / 2 / rank.world_size());
    let place = |of: usize| memory_place(of, len);
    memory.fill(0);
    memory[place(me)].copy_from_slice(&payload(rank, number, len));
    transport.begin(&call(number as u64, 0));
    let Some(mut shm_group) = Unchecked::of(transport, &due).unwrap() else { return memory };
    let reach = if is_allocated { Reach::Write } else { shm_group.shared().reach };
    let mut kept = None;
    match reach {
        Reach::Slots => return memory,
        Reach::Read => {
            shm_group.enter(2, SlotUse::Used, ExposedRegion::Read(&memory), &due).unwrap();
            shm_group.update_exposed(&memory);
            kept = Some(memory);
        }
        Reach::Write => shm_group.enter(2, SlotUse::Used, ExposedRegion::Write(memory.lend()), &due).unwrap(),
    }
    shm_group.signal();
    let others = || (1..rank.world_size()).map(move |distance| rank.plus(distance));
    for peer in others() {
        shm_group.wait(peer.index(), 1, &due).unwrap();
        let expected = payload(peer, number, len);
        let mut seen = vec![0; len];
        shm_group.read(peer.index(), MemoryArea::Exposed, place(peer.index()).start, &mut seen).unwrap();
        assert!(seen == expected, "read from {peer}");
        let mut pieces = Vec::new();
        let view = &mut |at: usize, piece: &[u8]| {
            assert_eq!((at, at % 64), (pieces.len(), 0));
            pieces.extend_from_slice(piece);
        };
        shm_group.view(peer.index(), MemoryArea::Exposed, place(peer.index()), view).unwrap();
        assert!(pieces == expected, "view of {peer}");
        if reach == Reach::Write {
            shm_group.write(peer.index(), MemoryArea::Exposed, half + place(me).start, &seen).unwrap();
        }
        let outside = shm_group.read(peer.index(), MemoryArea::Exposed, 2 * half, &mut [0]).unwrap_err();
        assert!(matches!(outside, Error::OutOfReach { .. }), "{outside}");
    }
    assert!(shm_group.reclaim().is_none(), "not every rank has signalled for the last time");
    shm_group.signal();
    others().for_each(|peer| shm_group.wait(peer.index(), 2, &due).unwrap());
    shm_group.wake_waiters();
    assert!(shm_group.is_finished());
    if let Some(memory) = kept {
        return memory;
    }
    let memory = shm_group.reclaim().unwrap().into_owned::<u8>().unwrap();
    assert!(shm_group.reclaim().is_none(), "it is there once");
    let own = payload(rank, number, len);
    for peer in others() {
        assert!(memory[half..][place(peer.index())] == own, "{peer} has written it back");
    }
    memory
}

fn memory_place(of: usize, len: usize) -> std::ops::Range<usize> {
    of * len..(of + 1) * len
}

/// Exposed memory is read and written.
pub(super) fn memory_that_is_exposed_is_read_and_written(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    for world_size in [2, 3] {
        let program = |mut transport: Box<dyn Transport>| {
            let mut numbers = 1..;
            for len in [64, 4000, 1_000_000] {
                let bytes = 2 * len * transport.rank().world_size();
                let allocated = transport.allocate(bytes).and_then(Owned::allocated);
                for memory in [Some(Owned::from(vec![0; bytes])), allocated].into_iter().flatten() {
                    numbers
                        .by_ref()
                        .take(3)
                        .fold(memory, |memory, number| reach_into_all(&mut *transport, memory, number));
                }
            }
            barrier(&mut *transport).unwrap();
        };
        backend.check(world_size, program, drop);
    }
}

/// Memory lent to the call of one group is returned only at the end of that call: another group's calls may
/// be over.
pub(super) fn lent_memory_is_returned_by_its_own_call_only(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let (me, due) = (transport.rank().index(), soon(&*transport));
        let mut other = transport.fork(&[0, 1]).unwrap().unwrap();
        let memory = transport.allocate(1000).and_then(Owned::<u8>::allocated);
        let Some(mut memory) = memory else { return };
        memory.fill(7);
        transport.begin(&call(1, 0));
        let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() else { return };
        shm_group.enter(1, SlotUse::Unused, ExposedRegion::Write(memory.lend()), &due).unwrap();
        barrier(&mut *other).unwrap();
        let mut elsewhere = Unchecked::of(&mut *other, &due).unwrap().expect("as in the other group");
        assert!(elsewhere.is_finished() && elsewhere.reclaim().is_none());
        assert!(shm_group.reclaim().is_none(), "no rank has signalled");
        shm_group.signal();
        shm_group.wait(1 - me, 1, &due).unwrap();
        shm_group.wake_waiters();
        let memory = shm_group.reclaim().unwrap().into_owned::<u8>().unwrap();
        assert_eq!(memory[..1000], [7; 1000]);
        barrier(&mut *other).unwrap();
    };
    backend.check(2, program, drop);
}

/// The memory, or a slot, of each other rank has a part for every rank. The rank changes its part of all
/// others at once, or by reading and writing if it cannot. Returns the memory.
fn change_in_all(transport: &mut dyn Transport, mut memory: Owned<u8>, place: MemoryArea) -> Owned<u8> {
    const LEN: usize = 640;
    let (rank, due) = (transport.rank(), soon(transport));
    let (me, world_size) = (rank.index(), rank.world_size());
    let contents = |of: usize, part: usize| vec![u8::try_from(of * world_size + part).unwrap(); LEN];
    let changed_by = |rank: usize| [u8::try_from(200 + rank).unwrap(); LEN];
    let parts: Vec<u8> = (0..world_size).flat_map(|part| contents(me, part)).collect();
    memory[..parts.len()].copy_from_slice(&parts);
    let mut shm_group = Unchecked::of(transport, &due).unwrap().expect("as before");
    let mut kept = None;
    if place == MemoryArea::Exposed {
        shm_group.enter(2, SlotUse::Used, ExposedRegion::Write(memory.lend()), &due).unwrap();
    } else {
        shm_group.enter(2, SlotUse::Used, ExposedRegion::Nothing, &due).unwrap();
        shm_group.publish(place, 0, &parts);
        kept = Some(memory);
    }
    shm_group.signal();
    let others: Vec<usize> = (0..world_size).filter(|&peer| peer != me).collect();
    others.iter().for_each(|&peer| shm_group.wait(peer, 1, &due).unwrap());
    let mut seen: Vec<Vec<u8>> = Vec::new();
    let there: Vec<(usize, usize)> = others.iter().map(|&peer| (peer, me * LEN)).collect();
    let changed = shm_group.change(place, &there, LEN, &mut |all| {
        for bytes in all {
            seen.push(bytes.to_vec());
            bytes.copy_from_slice(&changed_by(me));
        }
    });
    if !changed.unwrap() {
        assert!(seen.is_empty(), "nothing was done");
        for &(peer, offset) in &there {
            let mut bytes = vec![0; LEN];
            shm_group.read(peer, place, offset, &mut bytes).unwrap();
            seen.push(bytes);
            shm_group.write(peer, place, offset, &changed_by(me)).unwrap();
        }
    }
    assert!(seen.iter().eq(&others.iter().map(|&peer| contents(peer, me)).collect::<Vec<_>>()));
    shm_group.signal();
    others.iter().for_each(|&peer| shm_group.wait(peer, 2, &due).unwrap());
    let memory = match kept {
        Some(mut memory) => {
            shm_group.read(me, place, 0, &mut memory[..parts.len()]).unwrap();
            shm_group.wake_waiters();
            memory
        }
        None => {
            shm_group.wake_waiters();
            shm_group.reclaim().unwrap().into_owned::<u8>().unwrap()
        }
    };
    for &peer in &others {
        assert!(memory[peer * LEN..][..LEN] == changed_by(peer), "{peer} has changed it");
    }
    assert!(memory[me * LEN..][..LEN] == contents(me, me), "no other rank has changed this part");
    memory
}

/// Each rank finds the bytes that another rank has changed in several ranks' memory at once.
pub(super) fn memory_of_several_ranks_is_changed_at_once(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    for world_size in [2, CHANGED_MAX + 1, CHANGED_MAX + 2] {
        let program = |mut transport: Box<dyn Transport>| {
            let due = soon(&*transport);
            let Some(shm_group) = transport.shm_group(&due).unwrap() else { return };
            let reach = shm_group.shared().reach;
            let bytes = 640 * transport.rank().world_size();
            let mut private = Owned::from(vec![0; bytes]);
            let mut allocated = transport.allocate(bytes).and_then(Owned::allocated);
            let mut numbers = 1..;
            let mut change = |memory, place| {
                transport.begin(&call(numbers.next().unwrap(), 0));
                change_in_all(&mut *transport, memory, place)
            };
            for _ in 0..3 {
                private = change(private, MemoryArea::Slot(0));
                if reach == Reach::Write {
                    private = change(private, MemoryArea::Exposed);
                }
                allocated = allocated.map(|allocated| change(allocated, MemoryArea::Exposed));
            }
            barrier(&mut *transport).unwrap();
        };
        backend.check(world_size, program, drop);
    }
}

/// Every rank stores words into the memory of every rank, and all add to one word of each. No addition is lost.
pub(super) fn words_of_every_rank_are_changed_by_all(fabric: &'static dyn Fabric) {
    const ADDED: u64 = 100;
    let backend = Backend(fabric);
    for world_size in [2, 3] {
        for size in [WordSize::Two, WordSize::Four, WordSize::Eight] {
            let program = move |mut transport: Box<dyn Transport>| {
                let (me, due) = (transport.rank().index(), soon(&*transport));
                let bytes = (1 + world_size) * size.bytes();
                let allocated = transport.allocate(bytes).and_then(Owned::<u8>::allocated);
                transport.begin(&call(1, 0));
                let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() else { return };
                // Without memory of the heap there is nothing that another rank could map.
                let Some(memory) = allocated else { return };
                shm_group.enter(2, SlotUse::Unused, ExposedRegion::Write(memory.lend()), &due).unwrap();
                shm_group.signal();
                (1..world_size)
                    .for_each(|distance| shm_group.wait((me + distance) % world_size, 1, &due).unwrap());
                for rank in 0..world_size {
                    let value = vec![u8::try_from(1 + me).unwrap(); size.bytes()];
                    shm_group.store_words(rank, (1 + me) * size.bytes(), size, &value).unwrap();
                    for _ in 0..ADDED {
                        shm_group.update_word(rank, 0, size, WordUpdate::Add(1)).unwrap();
                    }
                    let outside = shm_group.update_word(rank, bytes, size, WordUpdate::Add(1));
                    assert!(matches!(outside, Err(Error::OutOfReach { .. })), "{outside:?}");
                    let crooked = shm_group.store_words(rank, 1, size, &value);
                    assert!(matches!(crooked, Err(Error::OutOfReach { .. })), "{crooked:?}");
                }
                shm_group.signal();
                (1..world_size)
                    .for_each(|distance| shm_group.wait((me + distance) % world_size, 2, &due).unwrap());
                shm_group.wake_waiters();
                let memory = shm_group.reclaim().unwrap().into_owned::<u8>().unwrap();
                let sum = ADDED * world_size as u64;
                assert_eq!(memory[..size.bytes()], sum.to_le_bytes()[..size.bytes()]);
                for rank in 0..world_size {
                    let value = u8::try_from(1 + rank).unwrap();
                    assert!(
                        memory[(1 + rank) * size.bytes()..][..size.bytes()].iter().all(|&it| it == value)
                    );
                }
            };
            backend.check(world_size, program, drop);
        }
    }
}

/// Of all ranks that swap one word, one at a time finds the expected value.
pub(super) fn one_rank_at_a_time_swaps_a_word(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let (me, due) = (transport.rank().index(), soon(&*transport));
        let runtime = transport.runtime().clone();
        let allocated = transport.allocate(8).and_then(Owned::<u64>::allocated);
        transport.begin(&call(1, 0));
        let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() else { return };
        let Some(memory) = allocated else { return };
        shm_group.enter(2, SlotUse::Unused, ExposedRegion::Write(memory.lend()), &due).unwrap();
        shm_group.signal();
        shm_group.wait(1 - me, 1, &due).unwrap();
        // The ranks take turns in counting up.
        for next in (me as u64..20).step_by(2) {
            let update = WordUpdate::CompareAndSwap { expected: next, new: next + 1 };
            while shm_group.update_word(0, 0, WordSize::Eight, update).unwrap() != next {
                runtime.yield_now();
            }
        }
        shm_group.signal();
        shm_group.wait(1 - me, 2, &due).unwrap();
        shm_group.wake_waiters();
        let memory = shm_group.reclaim().unwrap().into_owned::<u64>().unwrap();
        assert_eq!(memory[0], if me == 0 { 20 } else { 0 });
    };
    backend.check(2, program, drop);
}

/// Bytes read from a rank's memory after the call has failed there, and after the rank has overwritten them,
/// are no result. Mapped memory does not change under its readers.
pub(super) fn bytes_written_after_a_call_failed_are_no_result_of_it(fabric: &'static dyn Fabric) {
    const LEN: usize = 100_000;
    let backend = Backend(fabric);
    let short = backend.short();
    let program = move |mut transport: Box<dyn Transport>, is_allocated| {
        let (me, due) = (transport.rank().index(), soon(&*transport));
        let runtime = transport.runtime().clone();
        let allocated = transport.allocate(LEN).filter(|_| is_allocated).and_then(Owned::allocated);
        let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() else { return };
        if allocated.is_none() && (is_allocated || shm_group.shared().reach == Reach::Slots) {
            return;
        }
        let mut memory = allocated.unwrap_or_else(|| Owned::from(vec![0; LEN]));
        memory.fill(1);
        shm_group.enter(2, SlotUse::Used, ExposedRegion::Read(&memory), &due).unwrap();
        shm_group.update_exposed(&memory);
        shm_group.signal();
        shm_group.wait(1 - me, 1, &due).unwrap();
        if me == 0 {
            shm_group.signal();
            shm_group.wait(1, 2, &runtime.deadline(short).into()).unwrap_err();
            shm_group.abandon();
            memory.fill(2);
            runtime.sleep(4 * short);
        } else {
            let mut seen = Vec::new();
            let view = &mut |_, bytes: &[u8]| {
                seen.extend_from_slice(bytes);
                // A mapped range: the owner writes it meanwhile.
                if seen.len() == LEN {
                    runtime.sleep(3 * short);
                    assert!(bytes.iter().all(|&byte| byte == 1), "borrowed bytes have changed");
                }
            };
            let viewed = shm_group.view(0, MemoryArea::Exposed, 0..LEN, view);
            assert!(viewed.is_err() || seen.iter().all(|&byte| byte == 1), "{viewed:?} gave {}", seen[0]);
            let mut seen = vec![0; LEN];
            let read = shm_group.read(0, MemoryArea::Exposed, 0, &mut seen);
            assert!(read.is_err() || seen.iter().all(|&byte| byte == 1), "{read:?} gave {}", seen[0]);
        }
    };
    for is_allocated in [false, true] {
        backend.check(2, move |transport| program(transport, is_allocated), drop);
    }
}

/// Memory that is not exposed is out of reach, and the attempt harms nothing.
pub(super) fn memory_that_is_not_exposed_is_out_of_reach_without_harm(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let (peer, due) = (transport.rank().right().index(), soon(&*transport));
        if let Some(mut shm_group) = Unchecked::of(&mut *transport, &due).unwrap() {
            let shared = shm_group.shared();
            for readable in [false, true] {
                let exposed = if readable { ExposedRegion::Read(&[7; 100]) } else { ExposedRegion::Nothing };
                shm_group.enter(1, SlotUse::Used, exposed, &due).unwrap();
                shm_group.signal();
                shm_group.wait(peer, 1, &due).unwrap();
                let beyond = if readable { 100 } else { 0 };
                let wrong = [
                    shm_group.read(peer, MemoryArea::Exposed, beyond, &mut [0]),
                    shm_group.read(peer, MemoryArea::FlagLine, shared.flag_line_bytes, &mut [0]),
                    shm_group.read(peer, MemoryArea::EagerBuffer, shared.eager_bytes, &mut [0]),
                    shm_group.read(peer, MemoryArea::Slot(shared.slots), 0, &mut [0]),
                    shm_group.read(peer, MemoryArea::Slot(0), shared.slot_bytes, &mut [0]),
                    shm_group.view(peer, MemoryArea::Exposed, 0..101, &mut |_, _| panic!("nothing is there")),
                    shm_group.write(peer, MemoryArea::Exposed, 0, &[1]),
                    shm_group.write(peer, MemoryArea::FlagLine, 0, &[1]),
                    shm_group.write(peer, MemoryArea::EagerBuffer, 0, &[1]),
                    shm_group.write(peer, MemoryArea::Slot(shared.slots), 0, &[1]),
                    shm_group.write(peer, MemoryArea::Slot(0), shared.slot_bytes, &[1]),
                ];
                for outcome in wrong {
                    assert!(matches!(outcome, Err(Error::OutOfReach { .. })), "{outcome:?}");
                }
                let nowhere = [
                    (MemoryArea::Exposed, 0),
                    (MemoryArea::FlagLine, 0),
                    (MemoryArea::EagerBuffer, 0),
                    (MemoryArea::Slot(shared.slots), 0),
                    (MemoryArea::Slot(0), shared.slot_bytes),
                ];
                for (place, offset) in nowhere {
                    let outcome =
                        shm_group.change(place, &[(peer, offset)], 1, &mut |_| panic!("nothing is there"));
                    assert!(matches!(outcome, Ok(false) | Err(Error::OutOfReach { .. })), "{outcome:?}");
                }
                shm_group.wake_waiters();
            }
        }
        barrier(&mut *transport).unwrap();
        pass_round(&mut *transport, &[7]).unwrap();
    };
    backend.check(2, program, drop);
}
