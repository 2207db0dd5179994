//! Fingerprints of calls. Two ranks compare them to detect that they are in different calls.

use std::fmt;

/// A value that identifies the call of a message, as bytes that the layer above encodes.
///
/// A transport sends the fingerprint in the header of every message and compares it with its own before it
/// delivers a byte. It interprets only four parts:
///
/// - Bytes 0 to 7 are the number of the call among the calls that all ranks of a communicator make in the
///   same order, or 0 for other calls.
/// - Bytes 8 to 15 identify the communicator, which may use several channels.
/// - The last byte identifies the algorithm of the call. Its highest bit separates two stages of a call that
///   ranks may be in at the same time. If it differs, the rest of the byte may differ too.
/// - Numbers from 2⁶³ on belong to [announced](crate::Transport::announce) calls. Their bytes 24 to 39 are a
///   name, which may differ.
///
/// Two ranks contradict each other if their calls have the same number on the same communicator and differ
/// otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; Self::SIZE]);

impl Fingerprint {
    /// Bytes of a fingerprint.
    pub const SIZE: usize = 48;

    /// The fingerprint of messages outside any call.
    pub const NONE: Self = Self([0; Self::SIZE]);

    /// Returns `true` if two ranks in these calls would wait for each other forever.
    pub fn contradicts(&self, other: &Self) -> bool {
        let [ours, theirs] = [self, other].map(|fingerprint| {
            let mut call = fingerprint.0;
            if call[7] >= 0x80 {
                // The name of an announced call.
                call[24..40].fill(0);
            }
            let how = std::mem::take(&mut call[47]);
            (call, how)
        });
        let same_stage = ours.1 >> 7 == theirs.1 >> 7;
        let same_place = ours.0[..8] != [0; 8] && ours.0[..16] == theirs.0[..16];
        same_place && (ours.0 != theirs.0 || (same_stage && ours.1 != theirs.1))
    }

    /// Returns the communicator of the call.
    #[cfg(any(feature = "tcp", feature = "sim"))]
    pub(crate) fn communicator(&self) -> u64 {
        u64::from_le_bytes(self.0[8..16].try_into().expect("8 bytes"))
    }

    /// Returns the number of the call.
    #[cfg(any(feature = "tcp", feature = "sim"))]
    fn number(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().expect("8 bytes"))
    }

    /// Returns the first pair of calls that contradict each other: a call of ours and one of theirs. Later
    /// contradictions may follow from it.
    #[cfg(any(feature = "tcp", feature = "sim"))]
    pub(crate) fn contradiction(ours: &[Self], theirs: &[Self]) -> Option<(Self, Self)> {
        let pairs = ours.iter().flat_map(|ours| theirs.iter().map(move |theirs| (*ours, *theirs)));
        pairs
            .into_iter()
            .filter(|(ours, theirs)| ours.contradicts(theirs))
            .min_by_key(|(ours, _)| ours.number())
    }
}

impl fmt::Debug for Fingerprint {
    /// Writes the fingerprint in hexadecimal digits, as reports show it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.write_str("Fingerprint::NONE");
        }
        f.write_str("Fingerprint(")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a call with this number, communicator, operation and algorithm.
    fn call(number: u8, communicator: u8, what: u8, how: u8) -> Fingerprint {
        let mut bytes = [0; Fingerprint::SIZE];
        (bytes[0], bytes[8], bytes[20], bytes[47]) = (number, communicator, what, how);
        Fingerprint(bytes)
    }

    #[test]
    fn calls_of_one_number_contradict_each_other_unless_they_are_stages_of_one() {
        let ours = call(3, 1, 5, 7);
        assert!(ours.contradicts(&call(3, 1, 6, 7)), "another call");
        assert!(ours.contradicts(&call(3, 1, 5, 8)), "done in another way");
        assert!(ours.contradicts(&call(3, 1, 6, 128)), "another call, at another stage");
        assert!(!ours.contradicts(&ours));
        assert!(!ours.contradicts(&call(3, 1, 5, 128 + 8)), "the same call at another stage");
        assert!(!ours.contradicts(&call(4, 1, 6, 7)), "one of them is late");
        assert!(!ours.contradicts(&call(3, 2, 6, 7)), "on another communicator");
        assert!(!call(0, 1, 5, 7).contradicts(&call(0, 1, 6, 7)), "neither has a number");
    }

    #[test]
    #[cfg(any(feature = "tcp", feature = "sim"))]
    fn the_first_differing_calls_are_found_in_any_order() {
        let [ours, theirs] =
            [5, 6].map(|what| [call(9, 1, what, 0), call(7, 1, what, 0), call(8, 1, what, 0)]);
        assert_eq!(Fingerprint::contradiction(&ours, &theirs), Some((ours[1], theirs[1])));
    }
}
