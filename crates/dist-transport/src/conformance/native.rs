//! Collectives of a library below the transport: the right results, and only if all ranks make the same call.

use crate::native::{
    NativeCollective, NativeElement, NativeMemory, NativeOp, NativeOperation, NativeParts, NativeReduction,
};
use crate::{Abort, Cause, Error, Fingerprint, LazyDeadline, Result, Transport};

use super::backend::{Backend, Fabric};
use super::calls::{await_record, exchange_a_byte_with_all, soon, wait_in_vain};

const OURS: Fingerprint = Fingerprint([1; Fingerprint::SIZE]);
const THEIRS: Fingerprint = Fingerprint([2; Fingerprint::SIZE]);
const SUM: NativeReduction = NativeReduction { element: NativeElement::U32, op: NativeOp::Sum };
/// Bytes of an element.
const SIZE: usize = NativeElement::U32.size();

/// The operations, with and without a separate input where there are both forms.
const CASES: &[(NativeOperation, bool)] = &[
    (NativeOperation::AllReduce(SUM), false),
    (NativeOperation::Reduce { reduction: SUM, root: 1 }, false),
    (NativeOperation::ReduceScatter(SUM), false),
    (NativeOperation::ReduceScatter(SUM), true),
    (NativeOperation::Broadcast { root: 1 }, false),
    (NativeOperation::AllGather, false),
    (NativeOperation::AllGather, true),
    (NativeOperation::AllToAll, true),
];

/// The operations on parts of different sizes.
const UNEVEN_CASES: &[(NativeOperation, bool)] = &[
    (NativeOperation::ReduceScatterV(SUM), false),
    (NativeOperation::ReduceScatterV(SUM), true),
    (NativeOperation::AllGatherV, false),
    (NativeOperation::AllGatherV, true),
    (NativeOperation::AllToAllV, true),
];

/// Elements after which an input repeats itself: a prime number, so that no two parts are equal.
const PERIOD: usize = 997;

/// Returns the input of a rank, which has a part for each rank.
fn input(rank: usize, world_size: usize, part: usize) -> Vec<u8> {
    repeated(|index| element(rank, index), part * world_size)
}

fn element(rank: usize, index: usize) -> u32 {
    u32::try_from(rank * 1000 + index).expect("a small number")
}

fn repeated(element: impl Fn(usize) -> u32, len: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..PERIOD).flat_map(|index| element(index).to_ne_bytes()).collect();
    let mut bytes = period.repeat(len.div_ceil(PERIOD));
    bytes.truncate(len * SIZE);
    bytes
}

/// Returns the sums of all inputs.
fn sums(world_size: usize, part: usize) -> Vec<u8> {
    repeated(|index| (0..world_size).map(|rank| element(rank, index)).sum(), part * world_size)
}

/// Executes an operation on parts of this many elements. Returns the memory of the result and the expected result;
/// `None` on ranks without one.
fn execute(
    transport: &mut dyn Transport,
    (operation, has_input): (NativeOperation, bool),
    part: usize,
    due: &LazyDeadline<'_>,
) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    let (me, world_size) = (transport.rank().index(), transport.rank().world_size());
    let own = input(me, world_size, part);
    let of_part = |rank: usize| rank * part * SIZE..(rank + 1) * part * SIZE;
    let from_all = |place: usize| -> Vec<u8> {
        let inputs = (0..world_size).map(|rank| input(rank, world_size, part));
        inputs.flat_map(|input| input[of_part(place)].to_vec()).collect()
    };
    let sums = sums(world_size, part);
    let (given, mut buffer, result, expected) = match (operation, has_input) {
        (NativeOperation::ReduceScatter(_), true) => {
            (&own[..], vec![0; part * SIZE], 0..part * SIZE, sums[of_part(me)].to_vec())
        }
        (NativeOperation::ReduceScatter(_), false) => {
            (&[][..], own.clone(), of_part(me), sums[of_part(me)].to_vec())
        }
        (NativeOperation::AllGather, true) => {
            (&own[of_part(0)], vec![0; own.len()], 0..own.len(), from_all(0))
        }
        (NativeOperation::AllGather, false) => {
            let mut buffer = vec![0; own.len()];
            buffer[of_part(me)].copy_from_slice(&own[of_part(0)]);
            (&[][..], buffer, 0..own.len(), from_all(0))
        }
        (NativeOperation::AllToAll, _) => (&own[..], vec![0; own.len()], 0..own.len(), from_all(me)),
        (NativeOperation::Broadcast { root }, _) => {
            (&[][..], own.clone(), 0..own.len(), input(root, world_size, part))
        }
        _ => (&[][..], own.clone(), 0..own.len(), sums),
    };
    let collective = NativeCollective { operation, bytes: own.len() };
    let native = transport.native().expect("it was looked at before");
    assert!(native.supports(&collective), "{collective:?}");
    let memory = NativeMemory { input: has_input.then_some(given), buffer: &mut buffer, parts: None };
    native.execute(&collective, memory, due)?;
    let is_result = !matches!(operation, NativeOperation::Reduce { root, .. } if root != me);
    Ok(is_result.then(|| (buffer[result].to_vec(), expected)))
}

/// Executes an operation on parts of different sizes: some are empty, and the largest has `world_size` times this many
/// elements. Returns the memory of the result and the expected result.
fn execute_uneven(
    transport: &mut dyn Transport,
    (operation, has_input): (NativeOperation, bool),
    part: usize,
    due: &LazyDeadline<'_>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let (me, world_size) = (transport.rank().index(), transport.rank().world_size());
    let exchanges = operation == NativeOperation::AllToAllV;
    // The size of the part that a rank sends to another one, or of the part of that one.
    let size = |from: usize, to: usize| {
        let units = if exchanges { (2 * from + to) % (world_size + 1) } else { to };
        units * part * SIZE
    };
    let sizes = |from: usize| -> Vec<usize> { (0..world_size).map(|to| size(from, to)).collect() };
    let place = |from: usize, to: usize| {
        let start: usize = (0..to).map(|to| size(from, to)).sum();
        start..start + size(from, to)
    };
    let whole = |from: usize| sizes(from).iter().sum::<usize>();
    let bytes_of = |from: usize| repeated(|index| element(from, index), whole(from) / SIZE);
    let own = bytes_of(me);
    let sums = repeated(|index| (0..world_size).map(|rank| element(rank, index)).sum(), whole(me) / SIZE);
    let (given, mut buffer, result, expected) = match operation {
        NativeOperation::ReduceScatterV(_) => {
            let expected = sums[place(me, me)].to_vec();
            match has_input {
                true => (own.clone(), vec![0; size(me, me)], 0..size(me, me), expected),
                false => (Vec::new(), own.clone(), place(me, me), expected),
            }
        }
        NativeOperation::AllGatherV => {
            let expected: Vec<u8> =
                (0..world_size).flat_map(|rank| bytes_of(rank)[..size(rank, rank)].to_vec()).collect();
            let (given, mut buffer) = (own[..size(me, me)].to_vec(), vec![0; whole(me)]);
            if !has_input {
                buffer[place(me, me)].copy_from_slice(&given);
            }
            (given, buffer, 0..whole(me), expected)
        }
        _ => {
            let expected: Vec<u8> =
                (0..world_size).flat_map(|from| bytes_of(from)[place(from, me)].to_vec()).collect();
            (own.clone(), vec![0; expected.len()], 0..expected.len(), expected)
        }
    };
    let sent = sizes(me);
    let received: Vec<usize> = match exchanges {
        true => (0..world_size).map(|from| size(from, me)).collect(),
        false => sent.clone(),
    };
    let all = || (0..world_size).flat_map(&sizes);
    let parts = match exchanges {
        true => NativeParts { sent: &sent, received: &received, largest: all().max().unwrap_or(0) },
        false => NativeParts::of_all(&sent),
    };
    let collective = NativeCollective { operation, bytes: all().sum::<usize>() / world_size };
    let native = transport.native().expect("it was looked at before");
    assert!(native.supports(&collective), "{collective:?}");
    let input = has_input.then_some(&given[..]);
    native.execute(&collective, NativeMemory { input, buffer: &mut buffer, parts: Some(parts) }, due)?;
    Ok((buffer[result].to_vec(), expected))
}

/// Returns `true` if the transport has collectives of a library, as the fabric has stated.
fn has_native(fabric: &dyn Fabric, transport: &mut dyn Transport) -> bool {
    let has_native = transport.native().is_some();
    assert_eq!(has_native, fabric.has_native(), "the fabric states otherwise");
    has_native
}

/// A library executes every operation, on few and on many elements, in even and in uneven parts, among all ranks and in a
/// group.
pub(super) fn collectives_of_a_library_have_the_result_of_all_ranks(fabric: &'static dyn Fabric) {
    for world_size in [2, 3, 4] {
        let program = move |mut transport: Box<dyn Transport>| {
            if !has_native(fabric, &mut *transport) {
                return;
            }
            let members: Vec<usize> = (0..world_size).rev().collect();
            let mut group = transport.fork(&members).unwrap().unwrap();
            for part in [1, 1000, 300_001] {
                for &case in CASES {
                    for transport in [&mut transport, &mut group] {
                        let due = soon(&**transport);
                        transport.begin(&OURS);
                        if let Some((result, expected)) = execute(&mut **transport, case, part, &due).unwrap()
                        {
                            assert!(result == expected, "{case:?} of {part} elements");
                        }
                    }
                }
                for &case in UNEVEN_CASES {
                    for transport in [&mut transport, &mut group] {
                        let due = soon(&**transport);
                        transport.begin(&OURS);
                        let (result, expected) = execute_uneven(&mut **transport, case, part, &due).unwrap();
                        assert!(result == expected, "{case:?} of {part} elements");
                    }
                }
            }
        };
        Backend(fabric).check(world_size, program, |_| {});
    }
}

/// If the calls of the ranks differ, a collective of a library is refused on every rank, before memory changes.
pub(super) fn a_collective_of_a_library_is_refused_on_every_rank_if_calls_differ(
    fabric: &'static dyn Fabric,
) {
    let program = move |mut transport: Box<dyn Transport>| {
        let transport = &mut *transport;
        if !has_native(fabric, transport) {
            return None;
        }
        let due = soon(transport);
        // Two ranks may learn that their calls differ before the third one has its bytes.
        if let Err(error) = exchange_a_byte_with_all(transport) {
            return Some(error);
        }
        transport.begin(if transport.rank().index() == 1 { &THEIRS } else { &OURS });
        let mut buffer = vec![7; 1000 * SIZE];
        let collective = NativeCollective { operation: NativeOperation::AllReduce(SUM), bytes: buffer.len() };
        let memory = NativeMemory { input: None, buffer: &mut buffer, parts: None };
        let error = transport.native().unwrap().execute(&collective, memory, &due).unwrap_err();
        assert!(buffer.iter().all(|&byte| byte == 7), "the memory has changed");
        Some(error)
    };
    Backend(fabric).check(3, program, |errors| {
        for error in errors.into_iter().flatten() {
            let is_mismatch = match &error {
                Error::Mismatch { .. } => true,
                Error::Aborted(abort) => matches!(abort.cause, Cause::Mismatch { .. }),
                _ => false,
            };
            assert!(is_mismatch, "{error}");
        }
    });
}

/// A rank that does not come to a collective of a library is named when the deadline has passed.
pub(super) fn a_rank_that_does_not_come_to_a_collective_of_a_library_is_named(fabric: &'static dyn Fabric) {
    let record = Abort { cause: Cause::timed_out(), rank: 2, reporter: 0, call: OURS };
    let program = move |mut transport: Box<dyn Transport>| {
        let transport = &mut *transport;
        if !has_native(fabric, transport) {
            return;
        }
        let long = soon(transport);
        exchange_a_byte_with_all(transport).unwrap();
        let short = transport.runtime().deadline(Backend(fabric).short()).into();
        let error = match transport.rank().index() {
            2 => wait_in_vain(transport, 0),
            me => {
                transport.begin(&OURS);
                let due = if me == 0 { &short } else { &long };
                execute(transport, CASES[0], 1000, due).expect_err("rank 2 does not come")
            }
        };
        assert_eq!(error.peer(), Some(2), "{error}");
        await_record(transport, &record);
    };
    Backend(fabric).check(3, program, |_| {});
}
