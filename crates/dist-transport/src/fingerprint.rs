//! What says that two ranks are in the same call.

use std::fmt;

/// Names the operation that a message belongs to, as bytes that the layer above encodes.
///
/// A transport sends the fingerprint in front of every message and compares it with its own before it delivers
/// a byte. What the bytes mean is not its business, but for one thing: the first eight are the number of the call
/// among those that all ranks of a channel make in the same order, counted from 1, or 0 if it is not one of those.
/// Two ranks whose calls have the same number and differ otherwise can never meet. Numbers from 2⁶³ on are those of
/// [announced](crate::Transport::announce) calls: their bytes 24 to 31 and 40 to 47 are a name, which may differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; Self::SIZE]);

impl Fingerprint {
    /// Bytes of a fingerprint.
    pub const SIZE: usize = 48;

    /// Of messages outside any call.
    pub const NONE: Self = Self([0; Self::SIZE]);

    /// Whether two ranks of one channel that are in these calls can never meet.
    pub fn contradicts(&self, other: &Self) -> bool {
        let number = &self.0[..8];
        let is_announced = number[7] >= 0x80;
        let differ = if is_announced { self.without_name() != other.without_name() } else { self != other };
        number != [0; 8] && *number == other.0[..8] && differ
    }

    /// What ranks compare of an announced call.
    fn without_name(&self) -> Self {
        let mut compared = *self;
        compared.0[24..32].fill(0);
        compared.0[40..48].fill(0);
        compared
    }

    /// Two of these calls that contradict each other: one of ours and one of theirs.
    #[cfg(any(feature = "tcp", feature = "sim"))]
    pub(crate) fn contradiction(ours: &[Self], theirs: &[Self]) -> Option<(Self, Self)> {
        let pairs = ours.iter().flat_map(|ours| theirs.iter().map(move |theirs| (*ours, *theirs)));
        pairs.into_iter().find(|(ours, theirs)| ours.contradicts(theirs))
    }
}

impl fmt::Debug for Fingerprint {
    /// In hexadecimal digits, as reports show it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.write_str("Fingerprint::NONE");
        }
        f.write_str("Fingerprint(")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}
