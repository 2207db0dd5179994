//! Copies of what ranks share.

use crate::processor::is_intel;

/// From how many bytes on the C library copies by one instruction for all of them.
const LONG: usize = 2 << 10;
const PAGE: usize = 4 << 10;
const LINE: usize = 64;

/// Copies bytes as [`copy_from_slice`](slice::copy_from_slice) does, and not much slower wherever they lie.
///
/// The C library copies more than some 2 KiB by `rep movsb`, which processors of AMD carry out 15 to 20 times as slowly where
/// the destination lies 1 to 15 bytes (Zen 4), or 1 to 31 (Zen 3), further into its page than the source into its own, and
/// somewhat more slowly up to 63. Vectors that are made one after the other lie like that, with 16 bytes between them. There
/// the processor's vectors are copied one by one. Everywhere else nothing is faster than the instruction: on Zen 5, which
/// loses a quarter at the most, it is nearly twice as fast as vectors of 16 bytes, and Intel's take as long by it wherever
/// bytes lie, but up to three times as long by vectors.
///
/// # Panics
/// If one is not as long as the other.
#[inline]
pub fn copy(from: &[u8], into: &mut [u8]) {
    if cfg!(target_arch = "x86_64") && from.len() >= LONG && is_just_ahead(into, from) && !is_intel() {
        copy_by_vectors(from, into);
    } else {
        into.copy_from_slice(from);
    }
}

/// Whether the destination lies less than a line further into its page than the source into its own.
#[inline]
fn is_just_ahead(into: &[u8], from: &[u8]) -> bool {
    let ahead = into.as_ptr().addr().wrapping_sub(from.as_ptr().addr()) % PAGE;
    (1..LINE).contains(&ahead)
}

#[inline(never)]
fn copy_by_vectors(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "what is copied has one length");
    let (pairs, rest) = from.as_chunks::<{ 2 * LINE }>();
    let (into, rest_into) = into.as_chunks_mut::<{ 2 * LINE }>();
    for (from, into) in pairs.iter().zip(into) {
        // A loop that copied whole chunks would be compiled to one call of the C library.
        into[..LINE].copy_from_slice(&from[..LINE]);
        into[LINE..].copy_from_slice(&from[LINE..]);
    }
    rest_into.copy_from_slice(rest);
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn all_bytes_are_copied_and_no_others(
        #[values(0, 1, 127, LONG - 1, LONG, LONG + 127, 16 * LONG + 129)] len: usize,
        #[values(0, 1, 16, 63, 64)] ahead: usize,
        #[values(copy, copy_by_vectors)] copy: fn(&[u8], &mut [u8]),
    ) {
        let from: Vec<u8> = (0..=250).cycle().take(len).collect();
        let mut memory = vec![0xff; len + 2 * PAGE];
        // The destination's place in its page is told by the source's.
        let first = from.as_ptr().addr().wrapping_sub(memory.as_ptr().addr()).wrapping_add(ahead) % PAGE;
        copy(&from, &mut memory[first..first + len]);
        assert_eq!(memory[first..first + len], from);
        assert!(memory[..first].iter().chain(&memory[first + len..]).all(|&byte| byte == 0xff));
    }

    #[test]
    #[should_panic(expected = "length")]
    fn lengths_have_to_agree() {
        copy(&[0; LONG], &mut [0; LONG + 1]);
    }
}
