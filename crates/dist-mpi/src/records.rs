//! Abort records and reports of waits, as bytes.

use std::time::Duration;

use dist_transport::{Abort, Cause, CircularWait, Fingerprint};

/// A rank that has waited long: the calls that it is in, the current one first, and the rank that it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitReport {
    pub(crate) waits_for: usize,
    pub(crate) calls: Vec<Fingerprint>,
}

impl WaitReport {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.waits_for as u64).to_le_bytes().to_vec();
        self.calls.iter().for_each(|call| bytes.extend(call.0));
        bytes
    }

    /// Returns `None` for an empty report: the rank waits no longer.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (waits_for, calls) = bytes.split_first_chunk::<8>()?;
        let (calls, _) = calls.as_chunks::<{ Fingerprint::SIZE }>();
        let waits_for = usize::try_from(u64::from_le_bytes(*waits_for)).ok()?;
        Some(Self { waits_for, calls: calls.iter().map(|&call| Fingerprint(call)).collect() })
    }

    /// Returns the first pair of calls of two ranks that contradict each other.
    pub(crate) fn contradiction(&self, other: &Self) -> Option<(Fingerprint, Fingerprint)> {
        let number = |call: &Fingerprint| u64::from_le_bytes(call.0[..8].try_into().expect("8 bytes"));
        let pairs = self.calls.iter().flat_map(|ours| other.calls.iter().map(move |theirs| (*ours, *theirs)));
        pairs.filter(|(ours, theirs)| ours.contradicts(theirs)).min_by_key(|(ours, _)| number(ours))
    }
}

/// Follows a chain of waits in the call of a timeout to its last rank. `waits_for` returns the rank that another one
/// waits for in a call. If the ranks wait in a cycle, the record stays as it is.
pub(crate) fn followed(record: Abort, waits_for: impl Fn(usize, &Fingerprint) -> Option<usize>) -> Abort {
    if !matches!(record.cause, Cause::TimedOut { .. }) || record.call == Fingerprint::NONE {
        return record;
    }
    let mut chain = vec![record.reporter, record.rank];
    while let Some(next) = waits_for(chain[chain.len() - 1], &record.call) {
        if chain.contains(&next) {
            return record;
        }
        chain.push(next);
    }
    Abort { rank: chain[chain.len() - 1], ..record }
}

const LEFT: u64 = 0;
const TIMED_OUT: u64 = 1;
const MISMATCH: u64 = 2;
const LENGTH: u64 = 3;
const PROTOCOL: u64 = 4;
const PANICKED: u64 = 5;
const GAVE_UP: u64 = 6;
const DIED: u64 = 7;
const SILENT: u64 = 8;
const CIRCULAR_WAIT: u64 = 9;

/// Returns the record as bytes: five numbers, the reporter's call, and the rest of the cause.
pub(crate) fn encode(record: &Abort) -> Vec<u8> {
    let (code, numbers, rest): (_, [u64; 2], Vec<u8>) = match &record.cause {
        Cause::Left => (LEFT, [0; 2], Vec::new()),
        Cause::TimedOut { waits, count } => (TIMED_OUT, [*count as u64, 0], encode_waits(waits)),
        Cause::Mismatch { theirs } => (MISMATCH, [0; 2], theirs.0.to_vec()),
        Cause::Length { expected, got } => (LENGTH, [*expected, *got], Vec::new()),
        Cause::Protocol => (PROTOCOL, [0; 2], Vec::new()),
        Cause::Panicked => (PANICKED, [0; 2], Vec::new()),
        Cause::GaveUp { why } => (GAVE_UP, [0; 2], why.as_bytes().to_vec()),
        Cause::Died => (DIED, [0; 2], Vec::new()),
        Cause::Silent => (SILENT, [0; 2], Vec::new()),
        Cause::CircularWait { waits, count } => (CIRCULAR_WAIT, [*count as u64, 0], encode_waits(waits)),
        // This crate reports no other cause; a program may give one to `abort`.
        other => {
            let cause = Cause::gave_up(other);
            return encode(&Abort { cause, ..record.clone() });
        }
    };
    let numbers = [code, record.rank as u64, record.reporter as u64, numbers[0], numbers[1]];
    let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.extend(record.call.0);
    bytes.extend(rest);
    bytes
}

/// Returns the record of these bytes, or `None` if they are none.
pub(crate) fn decode(bytes: &[u8]) -> Option<Abort> {
    let (numbers, bytes) = bytes.split_first_chunk::<40>()?;
    let (call, rest) = bytes.split_first_chunk::<{ Fingerprint::SIZE }>()?;
    let number = |index: usize| u64::from_le_bytes(numbers[index * 8..][..8].try_into().expect("8 bytes"));
    let cause = match number(0) {
        LEFT => Cause::Left,
        TIMED_OUT => Cause::TimedOut { waits: decode_waits(rest)?, count: usize::try_from(number(3)).ok()? },
        MISMATCH => Cause::Mismatch { theirs: Fingerprint(rest.try_into().ok()?) },
        LENGTH => Cause::Length { expected: number(3), got: number(4) },
        PROTOCOL => Cause::Protocol,
        PANICKED => Cause::Panicked,
        GAVE_UP => Cause::gave_up(String::from_utf8_lossy(rest)),
        DIED => Cause::Died,
        SILENT => Cause::Silent,
        CIRCULAR_WAIT => {
            Cause::CircularWait { waits: decode_waits(rest)?, count: usize::try_from(number(3)).ok()? }
        }
        _ => return None,
    };
    let [rank, reporter] = [number(1), number(2)].map(usize::try_from);
    Some(Abort { cause, rank: rank.ok()?, reporter: reporter.ok()?, call: Fingerprint(*call) })
}

/// The bytes of a wait in a circle: two numbers and a call.
const CIRCULAR_WAIT_BYTES: usize = 16 + Fingerprint::SIZE;

fn encode_waits(waits: &[CircularWait]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(waits.len() * CIRCULAR_WAIT_BYTES);
    for wait in waits {
        bytes.extend([wait.rank as u64, wait.on as u64].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend(wait.call.0);
    }
    bytes
}

fn decode_waits(bytes: &[u8]) -> Option<Vec<CircularWait>> {
    let (waits, []) = bytes.as_chunks::<CIRCULAR_WAIT_BYTES>() else { return None };
    let number = |wait: &[u8], index: usize| {
        let bytes = wait[index * 8..][..8].try_into().expect("8 bytes");
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let decode = |wait: &[u8; CIRCULAR_WAIT_BYTES]| {
        let call = Fingerprint(wait[16..].try_into().expect("the rest is a call"));
        Some(CircularWait { rank: number(wait, 0)?, on: number(wait, 1)?, call })
    };
    waits.iter().map(decode).collect()
}

/// The time after which a rank that waits tells rank 0, which compares calls and follows chains of waits.
pub(crate) const LONG_WAIT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_way_to_another_rank() {
        let waits = vec![
            CircularWait { rank: 0, on: 3, call: Fingerprint([4; Fingerprint::SIZE]) },
            CircularWait { rank: 3, on: 0, call: Fingerprint::NONE },
        ];
        let causes = [
            Cause::Left,
            Cause::timed_out(),
            Cause::TimedOut { waits: waits.clone(), count: 40 },
            Cause::Mismatch { theirs: Fingerprint([3; Fingerprint::SIZE]) },
            Cause::Length { expected: 5, got: u64::MAX },
            Cause::Protocol,
            Cause::Panicked,
            Cause::gave_up("no more data"),
            Cause::gave_up(""),
            Cause::Died,
            Cause::Silent,
            Cause::CircularWait { waits, count: 40 },
        ];
        for cause in causes {
            let record = Abort { cause, rank: 7, reporter: 2, call: Fingerprint([9; Fingerprint::SIZE]) };
            let bytes = encode(&record);
            assert_eq!(decode(&bytes), Some(record));
            assert_eq!(decode(&bytes[..bytes.len().min(80)]), None, "a part of a record is not a record");
        }
    }

    #[test]
    fn a_cause_of_another_transport_becomes_a_reason() {
        let record = Abort { cause: Cause::NotJoined, rank: 1, reporter: 0, call: Fingerprint::NONE };
        let decoded = decode(&encode(&record)).unwrap();
        assert_eq!(decoded.to_string(), "rank 1 gave up: ended before it joined (reported by rank 0)");
    }

    #[test]
    fn a_report_is_decoded_and_an_empty_one_ends_the_wait() {
        let report = WaitReport { waits_for: 3, calls: vec![Fingerprint([1; 48]), Fingerprint([2; 48])] };
        assert_eq!(WaitReport::decode(&report.encode()), Some(report));
        assert_eq!(WaitReport::decode(&[]), None);
    }
}
