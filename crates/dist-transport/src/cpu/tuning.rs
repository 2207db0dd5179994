//! The fastest of several correct methods, by processor.

use std::sync::OnceLock;

/// The methods that were measured to be fastest on one kind of processor.
///
/// All of them are correct on every processor. Code that has a choice asks [`tuning`]; nothing else asks for
/// the vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "it is a table of independent choices")]
pub struct Tuning {
    /// Copies of more than 2 KiB move vectors of 16 bytes if the destination is just ahead of the source, as
    /// [`copy`](super::copy) says.
    pub(crate) copies_by_vectors: bool,
    /// Copies of 1 to 4 KiB into memory that another core has read use `rep movsb`, which the C library uses
    /// for larger ones only.
    #[cfg_attr(
        not(all(feature = "shm", target_os = "linux")),
        allow(dead_code, reason = "for shared memory")
    )]
    pub(crate) copies_by_string: bool,
    /// Two ranks; each waits for a third longer between its signal and its first look for the other one.
    #[cfg_attr(
        not(all(feature = "shm", target_os = "linux")),
        allow(dead_code, reason = "for shared memory")
    )]
    pub(crate) long_delay: bool,
    /// After a fused barrier of more than two ranks, a rank prefetches for writing what it publishes in the
    /// next call.
    #[cfg_attr(
        not(all(feature = "shm", target_os = "linux")),
        allow(dead_code, reason = "for shared memory")
    )]
    pub(crate) prefetches_next_call: bool,
    /// The system copies large ordinary memory between processes faster than the two sides copy it through
    /// shared memory.
    #[cfg_attr(not(feature = "tcp"), allow(dead_code, reason = "for shared memory"))]
    pub(crate) copies_by_system: bool,
    /// A sum over the memory of several ranks works in pieces, one rank after the other, and not in one loop
    /// over all of them.
    pub sums_in_pieces: bool,
}

/// Intel's processors. A cache line of another core arrives late; writing one line while reads of others are
/// outstanding delays both.
const INTEL: Tuning = Tuning {
    copies_by_vectors: false,
    copies_by_string: true,
    long_delay: true,
    prefetches_next_call: true,
    copies_by_system: true,
    sums_in_pieces: true,
};

/// All other processors, as measured on AMD's.
const OTHER: Tuning = Tuning {
    copies_by_vectors: cfg!(target_arch = "x86_64"),
    copies_by_string: false,
    long_delay: false,
    prefetches_next_call: false,
    copies_by_system: false,
    sums_in_pieces: false,
};

/// Returns the tuning for this processor.
#[inline]
pub fn tuning() -> &'static Tuning {
    static TUNING: OnceLock<Tuning> = OnceLock::new();
    TUNING.get_or_init(|| if is_intel() { INTEL } else { OTHER })
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_tuning_is_that_of_the_vendor_that_the_system_names() {
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let expected = if processors.contains("GenuineIntel") { INTEL } else { OTHER };
        assert_eq!(*tuning(), expected);
    }
}
