//! The vendor of the processor, on which the fastest of several correct methods depends.

/// Returns `true` if the processor is made by Intel.
///
/// Several methods with the same instructions are correct, and the fastest differs between vendors. Code that
/// was measured to be faster with another method on Intel processors calls this function.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn is_intel() -> bool {
    use std::arch::x86_64::__cpuid;
    use std::sync::OnceLock;

    static IS_INTEL: OnceLock<bool> = OnceLock::new();
    *IS_INTEL.get_or_init(|| {
        let maker = __cpuid(0);
        [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    })
}

/// Intel makes no processors of other architectures.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn is_intel() -> bool {
    false
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_maker_is_whom_the_system_names() {
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        assert_eq!(is_intel(), processors.contains("GenuineIntel"));
    }
}
