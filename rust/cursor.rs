//! Where a kernel reads a stream of elements and where it writes it: one body for in place and out of place.
//!
//! A [`Cursor`] loads vectors of 16 lanes from one place and stores them to another; the two are the same memory (made from
//! one `&mut [T]`) or disjoint (made from `&[T]` and `&mut [T]`), never partly overlapping. The kernel's rule is load,
//! compute, store, lane block by lane block, so both cases are right with one body, and no `&` and `&mut` to the same
//! element exist at once. Out of place, stores bypass the cache where the machine can: half the traffic of an ordinary
//! store, which reads its line first. Whoever made an out-of-place cursor calls [`publish`] before others read.

use std::marker::PhantomData;

use crate::{
    element::Lane,
    simd::{LANES, Simd},
};

/// How far ahead of the loads the lines are fetched, in elements. Measured: 512 to 1024 are equal, less is slower.
pub const PREFETCH_AHEAD: usize = 1024;

/// Bytes of a cache line on every machine that we compile for.
pub(crate) const LINE_BYTES: usize = 64;

/// A stream of `len` elements, read from one place and written to the same or another.
pub struct Cursor<'a, T> {
    from: *const T,
    to: *mut T,
    len: usize,
    stream: bool,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T: Lane> Cursor<'a, T> {
    /// Reads and writes the same elements.
    #[must_use]
    pub fn in_place(elements: &'a mut [T]) -> Self {
        let to = elements.as_mut_ptr();
        Self { from: to, to, len: elements.len(), stream: false, memory: PhantomData }
    }

    /// Reads `from` and writes `to`, which must be as long.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn out_of_place(from: &'a [T], to: &'a mut [T]) -> Self {
        assert_eq!(from.len(), to.len(), "a slot is written to one of its own size");
        let stream = (to.as_ptr() as usize).is_multiple_of(LINE_BYTES);
        Self { from: from.as_ptr(), to: to.as_mut_ptr(), len: from.len(), stream, memory: PhantomData }
    }

    /// Elements.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements `at..at + count`, zero-extended, and zeros behind them. `count` is `LANES` but at the tail.
    #[inline(always)]
    #[must_use]
    pub fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> S::U {
        load_lanes(simd, self.from, self.len, at, count)
    }

    /// Writes the first `count` lanes to `at..at + count`.
    #[inline(always)]
    pub fn store<S: Simd>(&self, simd: S, at: usize, count: usize, lanes: S::U) {
        if count == LANES {
            assert!(at + LANES <= self.len);
            // SAFETY: `at + LANES <= len`, and `to` is valid for writes of `len` elements for 'a (made from `&mut [T]`).
            // No reference to them exists while the cursor does. Streamed, `to` is aligned to a line and `at` is a
            // multiple of LANES, so the store is aligned to all its elements.
            unsafe {
                if self.stream {
                    debug_assert!(at.is_multiple_of(LANES));
                    T::stream(simd, self.to.add(at), lanes);
                } else {
                    T::store(simd, self.to.add(at), lanes);
                }
            }
        } else {
            assert!(count < LANES && (count == 0 || at + count <= self.len));
            let mut spilled = [T::default(); LANES];
            // SAFETY: `spilled` holds LANES elements; `count` of them fit behind `at`, as asserted, and cannot overlap a
            // local array.
            unsafe {
                T::store(simd, spilled.as_mut_ptr(), lanes);
                self.to.wrapping_add(at).copy_from_nonoverlapping(spilled.as_ptr(), count);
            }
        }
    }

    /// The element `at` of what is read.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, at: usize) -> T {
        assert!(at < self.len);
        // SAFETY: `at < len`, and `from` is valid for reads of `len` elements while the cursor lives.
        unsafe { self.from.add(at).read() }
    }

    /// Writes the element `at`.
    #[inline(always)]
    pub fn set(&self, at: usize, value: T) {
        assert!(at < self.len);
        // SAFETY: `at < len`, and `to` is valid for writes of `len` elements while the cursor lives.
        unsafe { self.to.add(at).write(value) };
    }

    /// Asks for the lines of `count` elements that lie [`PREFETCH_AHEAD`] after `at`; beyond the end it asks for nothing
    /// that could fault.
    #[inline(always)]
    pub fn prefetch(&self, at: usize, count: usize) {
        prefetch_lines(self.from, at, count);
    }
}

/// A stream that a kernel only reads.
#[derive(Clone, Copy)]
pub struct Source<'a, T> {
    from: *const T,
    len: usize,
    memory: PhantomData<&'a [T]>,
}

impl<'a, T: Lane> Source<'a, T> {
    /// Reads these elements.
    #[must_use]
    pub fn new(elements: &'a [T]) -> Self {
        Self { from: elements.as_ptr(), len: elements.len(), memory: PhantomData }
    }

    /// Elements.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// As [`Cursor::load`].
    #[inline(always)]
    #[must_use]
    pub fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> S::U {
        load_lanes(simd, self.from, self.len, at, count)
    }

    /// As [`Cursor::prefetch`].
    #[inline(always)]
    pub fn prefetch(&self, at: usize, count: usize) {
        prefetch_lines(self.from, at, count);
    }
}

#[inline(always)]
fn load_lanes<S: Simd, T: Lane>(simd: S, from: *const T, len: usize, at: usize, count: usize) -> S::U {
    if count == LANES {
        assert!(at + LANES <= len);
        // SAFETY: `at + LANES <= len`, and `from` is valid for reads of `len` elements while the cursor lives.
        unsafe { T::load(simd, from.add(at)) }
    } else {
        assert!(count < LANES && (count == 0 || at + count <= len));
        let mut padded = [T::default(); LANES];
        // SAFETY: `count` elements lie behind `at`, as asserted, and cannot overlap a local array of LANES elements.
        unsafe {
            padded.as_mut_ptr().copy_from_nonoverlapping(from.wrapping_add(at), count);
            T::load(simd, padded.as_ptr())
        }
    }
}

#[inline(always)]
fn prefetch_lines<T>(from: *const T, at: usize, count: usize) {
    let first = from.wrapping_add(at + PREFETCH_AHEAD).cast::<u8>();
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
    // SAFETY: a prefetch of any address, mapped or not, changes nothing but the cache; SSE is in the baseline.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast::<i8>()) };
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn prefetch_line(address: *const u8) {
    // SAFETY: a prefetch of any address, mapped or not, changes nothing but the cache.
    unsafe { std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags)) };
}

/// Orders streaming stores before whatever follows: call it on the thread that stored, before a slot is published.
#[inline]
pub fn publish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a store fence; SSE is in the baseline.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
