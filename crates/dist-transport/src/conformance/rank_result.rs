//! The results of ranks as bytes, for fabrics whose ranks are processes.

use std::io;
use std::time::Duration;

use crate::{Abort, Activity, Cause, CircularWait, Error, Fingerprint, Rank, Traffic};

/// A result of a rank that can be sent to another process.
pub(super) trait RankResult: Sized {
    /// Appends the bytes of the value.
    fn encode(&self, bytes: &mut Vec<u8>);

    /// Takes the bytes of a value from the front.
    fn decode(bytes: &mut &[u8]) -> Self;
}

impl RankResult for u64 {
    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        let (number, rest) = bytes.split_first_chunk().expect("the other process has sent a number");
        *bytes = rest;
        Self::from_le_bytes(*number)
    }
}

/// Implements [`RankResult`] for a type by its conversion to another type and back.
macro_rules! rank_result_as {
    ($($type:ty as $other:ty: |$value:ident| $to:expr, |$decoded:pat_param| $from:expr;)*) => {$(
        impl RankResult for $type {
            fn encode(&self, bytes: &mut Vec<u8>) {
                let $value = self;
                let other: $other = $to;
                other.encode(bytes);
            }

            fn decode(bytes: &mut &[u8]) -> Self {
                let $decoded = <$other>::decode(bytes);
                $from
            }
        }
    )*};
}

rank_result_as! {
    () as u64: |_value| 0, |_| ();
    bool as u64: |value| u64::from(*value), |number| number != 0;
    u8 as u64: |value| u64::from(*value), |number| Self::try_from(number).unwrap();
    usize as u64: |value| *value as u64, |number| Self::try_from(number).unwrap();
    i64 as u64: |value| value.cast_unsigned(), |number| number.cast_signed();
    Duration as u64: |value| u64::try_from(value.as_nanos()).unwrap(), |number| Self::from_nanos(number);
    String as Vec<u8>: |value| value.clone().into_bytes(), |bytes| Self::from_utf8(bytes).unwrap();
    Fingerprint as Vec<u8>: |value| value.0.to_vec(), |bytes| Self(bytes.try_into().unwrap());
    Rank as (usize, usize): |value| (value.index(), value.world_size()),
        |(index, world_size)| Self::new(index, world_size).unwrap();
    Traffic as ((u64, u64), (u64, u64)): |value| (
        (value.messages_sent, value.bytes_sent),
        (value.messages_received, value.bytes_received),
    ), |((messages_sent, bytes_sent), (messages_received, bytes_received))|
        Self { messages_sent, bytes_sent, messages_received, bytes_received };
    CircularWait as ((usize, usize), Fingerprint): |value| ((value.rank, value.on), value.call),
        |((rank, on), call)| Self { rank, on, call };
    Abort as ((Cause, Fingerprint), (usize, usize)): |value|
        ((value.cause.clone(), value.call), (value.rank, value.reporter)),
        |((cause, call), (rank, reporter))| Self { cause, rank, reporter, call };
}

impl<T: RankResult> RankResult for Option<T> {
    fn encode(&self, bytes: &mut Vec<u8>) {
        self.is_some().encode(bytes);
        self.iter().for_each(|value| value.encode(bytes));
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        bool::decode(bytes).then(|| T::decode(bytes))
    }
}

impl<T: RankResult> RankResult for Vec<T> {
    fn encode(&self, bytes: &mut Vec<u8>) {
        self.len().encode(bytes);
        self.iter().for_each(|value| value.encode(bytes));
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        (0..usize::decode(bytes)).map(|_| T::decode(bytes)).collect()
    }
}

impl<T: RankResult> RankResult for [T; 2] {
    fn encode(&self, bytes: &mut Vec<u8>) {
        self.iter().for_each(|value| value.encode(bytes));
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        [T::decode(bytes), T::decode(bytes)]
    }
}

impl<A: RankResult, B: RankResult> RankResult for (A, B) {
    fn encode(&self, bytes: &mut Vec<u8>) {
        self.0.encode(bytes);
        self.1.encode(bytes);
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        (A::decode(bytes), B::decode(bytes))
    }
}

/// A cause that no promise compares is decoded as the reason of a rank that gave up.
impl RankResult for Cause {
    fn encode(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Left => 0_u64.encode(bytes),
            Self::TimedOut { waits, count } => (1_u64, (waits.clone(), *count)).encode(bytes),
            Self::Panicked => 2_u64.encode(bytes),
            Self::Mismatch { theirs } => (3_u64, *theirs).encode(bytes),
            Self::Length { expected, got } => (4_u64, (*expected, *got)).encode(bytes),
            Self::GaveUp { why } => (5_u64, why.to_string()).encode(bytes),
            Self::CircularWait { waits, count } => (6_u64, (waits.clone(), *count)).encode(bytes),
            other => (5_u64, other.to_string()).encode(bytes),
        }
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        match u64::decode(bytes) {
            0 => Self::Left,
            1 => {
                let (waits, count) = RankResult::decode(bytes);
                Self::TimedOut { waits, count }
            }
            2 => Self::Panicked,
            3 => Self::Mismatch { theirs: Fingerprint::decode(bytes) },
            4 => Self::Length { expected: u64::decode(bytes), got: u64::decode(bytes) },
            6 => {
                let (waits, count) = RankResult::decode(bytes);
                Self::CircularWait { waits, count }
            }
            _ => Self::gave_up(String::decode(bytes)),
        }
    }
}

rank_result_as! {
    Activity as u64: |value| match value {
        Self::Receive => 0,
        Self::Match => 1,
        _ => 2,
    }, |number| match number {
        0 => Self::Receive,
        1 => Self::Match,
        _ => Self::Send,
    };
}

/// An error that no promise compares is decoded as one of the system, with the text of the original.
impl RankResult for Error {
    fn encode(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Timeout { activity, peer, elapsed, limit, .. } => {
                (0_u64, ((*activity, *peer), (*elapsed, *limit))).encode(bytes);
            }
            Self::Closed { activity, peer } => (1_u64, (*activity, *peer)).encode(bytes),
            Self::Mismatch { peer, ours, theirs } => (2_u64, (*peer, (*ours, *theirs))).encode(bytes),
            Self::Length { peer, expected, got } => (3_u64, (*peer, (*expected, *got))).encode(bytes),
            Self::Aborted(abort) => (4_u64, abort.clone()).encode(bytes),
            Self::System { activity, source } => (5_u64, (*activity, source.to_string())).encode(bytes),
            other => (5_u64, (Activity::Receive, other.to_string())).encode(bytes),
        }
    }

    fn decode(bytes: &mut &[u8]) -> Self {
        match u64::decode(bytes) {
            0 => {
                let ((activity, peer), (elapsed, limit)) = RankResult::decode(bytes);
                Self::Timeout { activity, peer, elapsed, limit, waits: Vec::new(), count: 0 }
            }
            1 => Self::Closed { activity: Activity::decode(bytes), peer: usize::decode(bytes) },
            2 => {
                let (peer, (ours, theirs)) = RankResult::decode(bytes);
                Self::Mismatch { peer, ours, theirs }
            }
            3 => {
                let (peer, (expected, got)) = RankResult::decode(bytes);
                Self::Length { peer, expected, got }
            }
            4 => Self::Aborted(Abort::decode(bytes)),
            _ => {
                let (activity, text) = <(Activity, String)>::decode(bytes);
                Self::System { activity, source: io::Error::other(text) }
            }
        }
    }
}
