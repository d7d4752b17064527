//! Asking for the lines of a stream before they are loaded, and how far ahead.
//!
//! Kernels read every stream from its first element to its last, which the machine's own
//! prefetchers see as well. What asking is worth depends on them: on a Xeon it is up to a tenth; on
//! an EPYC, lines asked for far ahead occupy what the machine would have fetched the next ones
//! with.

use std::sync::OnceLock;

/// Bytes of a cache line on every machine that we compile for.
pub(crate) const LINE_BYTES: usize = 64;

/// Elements between a load and the line that is asked for meanwhile. Measured with 64 Mi parameters
/// in pairs: on 2 cores of an EPYC (Zen 4) 32 to 96 are equal, and 384 is slower by 4 to 16 % (q8
/// by 0 to 3); on 16 cores of a Xeon (Sapphire Rapids) 768 to 1536 are equal, 384 is slower by 0 to
/// 10 %, 64 by 2 to 12 %. Others are taken for the latter.
#[must_use]
pub fn ahead() -> usize {
    static AHEAD: OnceLock<usize> = OnceLock::new();
    *AHEAD.get_or_init(|| if is_amd() { 64 } else { 1024 })
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

/// Asks for the lines of `count` elements `at` after `from`; beyond the end of a stream that is
/// nothing that could fault.
#[inline(always)]
pub(crate) fn lines<T>(from: *const T, at: usize, count: usize) {
    let first = from.wrapping_add(at).cast::<u8>();
    let mut offset = 0;
    while offset < count * size_of::<T>() {
        prefetch_line(first.wrapping_add(offset));
        offset += LINE_BYTES;
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch of any address, mapped or not, changes nothing but the cache; SSE is in
    // the baseline.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast::<i8>()) };
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn prefetch_line(address: *const u8) {
    // SAFETY: a prefetch of any address, mapped or not, changes nothing but the cache.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{}]",
            in(reg) address,
            options(nostack, readonly, preserves_flags)
        )
    };
}
