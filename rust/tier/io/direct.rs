//! What direct I/O (`O_DIRECT`) asks of memory and of offsets.

use std::fs::File;

use rustix::fs::{AtFlags, StatxFlags};

use super::disk::BLOCK_BYTES;

/// What addresses, offsets and sizes are multiples of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory; a power of two.
    pub memory_bytes: usize,
    /// Of offsets in the file, and of sizes; a power of two.
    pub offset_bytes: usize,
}

/// What the kernel asks of direct I/O on this file; nothing where there is none. A file system that
/// does not say takes whole pages, as all that are known do.
#[must_use]
pub fn alignment(file: &File) -> Option<Alignment> {
    let whole = Alignment { memory_bytes: BLOCK_BYTES, offset_bytes: BLOCK_BYTES };
    let Ok(found) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Some(whole);
    };
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(whole);
    }
    let [memory_bytes, offset_bytes] =
        [found.stx_dio_mem_align, found.stx_dio_offset_align].map(|bytes| bytes as usize);
    let is_usable = memory_bytes.is_power_of_two() && offset_bytes.is_power_of_two();
    is_usable.then_some(Alignment { memory_bytes, offset_bytes })
}
