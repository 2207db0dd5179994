//! Helpers of the tests' programs.

use std::time::Duration;

use crate::{
    Abort, Cause, Error, Fingerprint, Incoming, LazyDeadline, Outgoing, Rank, Result, Sink, Transport,
};

use super::backend::LONG;

/// Returns the call with this number, in one of several forms.
pub(super) fn call(number: u64, form: u8) -> Fingerprint {
    let mut call = [form; Fingerprint::SIZE];
    call[..8].copy_from_slice(&number.to_le_bytes());
    // All of them are calls of one communicator.
    call[8..16].fill(0);
    Fingerprint(call)
}

/// Returns a deadline that must not pass.
pub(super) fn soon(transport: &dyn Transport) -> LazyDeadline<'static> {
    transport.runtime().deadline(LONG).into()
}

/// Returns the bytes that `from` sends as its message number `round`: different for all ranks and rounds.
pub(super) fn payload(from: Rank, round: usize, len: usize) -> Vec<u8> {
    let seed = from.index() * 31 + round * 17;
    let byte = |index| u8::try_from((seed + index * 7 + index / 256) % 256).expect("below 256");
    // The bytes repeat. A copy is much faster than a computation in a test.
    let period: Vec<u8> = (0..len.min(256 * 256)).map(byte).collect();
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&period[..period.len().min(len - bytes.len())]);
    }
    bytes
}

pub(super) fn send(transport: &mut dyn Transport, to: usize, bytes: &[u8]) -> Result<()> {
    let due = soon(transport);
    transport.exchange(Some(Outgoing { to, parts: &[bytes] }), None, &due)
}

pub(super) fn receive(transport: &mut dyn Transport, from: usize, len: usize) -> Result<Vec<u8>> {
    receive_within(transport, from, len, LONG)
}

pub(super) fn receive_within(
    transport: &mut dyn Transport,
    from: usize,
    len: usize,
    limit: Duration,
) -> Result<Vec<u8>> {
    let due = LazyDeadline::from(transport.runtime().deadline(limit));
    let mut bytes = vec![0; len];
    transport.exchange(None, Some(Incoming { from, len, sink: Sink::Into(&mut bytes) }), &due)?;
    Ok(bytes)
}

/// Sends to the right while receiving equally many bytes from the left.
pub(super) fn pass_round(transport: &mut dyn Transport, bytes: &[u8]) -> Result<Vec<u8>> {
    let (rank, due) = (transport.rank(), soon(transport));
    let mut received = vec![0; bytes.len()];
    let outgoing = Outgoing { to: rank.right().index(), parts: &[bytes] };
    let incoming = Incoming { from: rank.left().index(), len: bytes.len(), sink: Sink::Into(&mut received) };
    transport.exchange(Some(outgoing), Some(incoming), &due)?;
    Ok(received)
}

/// Exchanges a byte with every other rank. Afterwards this rank has all its connections. An abort may find
/// other ranks still in this function.
pub(super) fn exchange_a_byte_with_all(transport: &mut dyn Transport) -> Result<()> {
    let (rank, due) = (transport.rank(), soon(transport));
    for distance in 1..rank.world_size() {
        let outgoing = Outgoing { to: rank.plus(distance).index(), parts: &[&[0]] };
        let mut byte = [0];
        let incoming = Incoming { from: rank.minus(distance).index(), len: 1, sink: Sink::Into(&mut byte) };
        transport.exchange(Some(outgoing), Some(incoming), &due)?;
    }
    Ok(())
}

/// Waits for a message of `peer`, which sends nothing, and returns the error that ends the wait. The error must
/// come before the deadline.
pub(super) fn wait_in_vain(transport: &mut dyn Transport, peer: usize) -> Error {
    let due = soon(transport);
    let error = receive(transport, peer, 1).expect_err("no rank sends this byte");
    assert!(!transport.runtime().expired(due.deadline()), "not woken: {error}");
    error
}

/// Exchanges a byte with all ranks and then waits for the end of the job. The job may also end while ranks
/// still exchange.
pub(super) fn stand_by(transport: &mut dyn Transport, peer: usize) -> Error {
    exchange_a_byte_with_all(transport).err().unwrap_or_else(|| wait_in_vain(transport, peer))
}

/// Waits until this rank has this abort record, whatever it proposed itself.
pub(super) fn await_record(transport: &dyn Transport, record: &Abort) {
    let runtime = transport.runtime();
    let due = soon(transport);
    while transport.aborted().as_ref() != Some(record) {
        assert!(!runtime.expired(due.deadline()), "it is {:?}", transport.aborted());
        runtime.park(Some(runtime.deadline(Duration::from_millis(1))));
    }
}

/// Waits until this rank has the abort record of the job, and returns it.
pub(super) fn await_abort(transport: &dyn Transport) -> Abort {
    let runtime = transport.runtime();
    let due = soon(transport);
    loop {
        if let Some(abort) = transport.aborted() {
            return abort;
        }
        assert!(!runtime.expired(due.deadline()), "no abort came");
        runtime.park(Some(runtime.deadline(Duration::from_millis(1))));
    }
}

/// Asserts that all ranks have the same abort record: the call of the second rank contradicts the call of
/// another rank.
pub(super) fn assert_one_contradicts(ends: impl IntoIterator<Item = (Error, Abort)>) {
    for (error, abort) in ends {
        let Cause::Mismatch { theirs } = abort.cause else { panic!("{abort}") };
        assert!([abort.rank, abort.reporter].contains(&1), "{abort}");
        assert!(theirs.contradicts(&abort.call));
        assert!(matches!(error, Error::Aborted(_) | Error::Mismatch { .. }), "{error}");
    }
}
