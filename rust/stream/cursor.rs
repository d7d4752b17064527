//! Where a kernel reads a stream of elements and where it writes it: one body for in place and out
//! of place.
//!
//! A [`Cursor`] loads vectors of 16 lanes from one place and stores them to another; the two are
//! the same memory (made from one `&mut [T]`) or disjoint (made from `&[T]` and `&mut [T]`), never
//! partly overlapping. The kernel's rule is load, compute, store, lane block by lane block, so both
//! cases are right with one body, and no `&` and `&mut` to the same element exist at once. Out of
//! place, stores bypass the cache where the machine can: half the traffic of an ordinary store,
//! which reads its line first. The maker of an out-of-place cursor calls [`publish`] before others
//! read.
//!
//! A unit is what a kernel has in registers at once: `Q` vectors. One vector holds 16 elements in
//! their order. A unit of more holds runs of 32, each as a pair, the elements of an even index and
//! those of an odd one: 16-bit elements come apart and together again with a shift and a mask for
//! 32 of them, where their order would take a widening and a narrowing of 16 each.

use std::marker::PhantomData;

use crate::{
    simd::{
        LANES, Simd,
        prefetch::{self, LINE_BYTES},
    },
    stream::{BLOCK, element::Lane},
};

/// Elements of the largest unit.
const UNIT_LEN_MAX: usize = BLOCK;

/// Whether `count` elements from `at` on lie within `len`, for any three numbers.
///
/// In a loop over `at`, both `count <= len` and `len - count` stay the same: one comparison is left
/// of it.
#[inline(always)]
const fn holds(len: usize, at: usize, count: usize) -> bool {
    count <= len && at <= len - count
}

/// What `at` of a unit of so many vectors is a multiple of where its stores bypass the cache: then
/// every store of a stream that begins with a line is aligned. A pair of 16-bit elements is one
/// store of 32, everything else is stored by 16.
const fn stream_align(vectors: usize) -> usize {
    if vectors == 1 { LANES } else { 2 * LANES }
}

/// Whether a unit has so many vectors: one, or pairs.
const fn is_unit(vectors: usize) -> bool {
    vectors == 1 || vectors.is_multiple_of(2) && vectors * LANES <= UNIT_LEN_MAX
}

/// A stream of `len` elements, read from one place and written to the same or another.
pub struct Cursor<'a, T> {
    from: *const T,
    to: *mut T,
    len: usize,
    streams: bool,
    ahead: usize,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T: Lane> Cursor<'a, T> {
    /// Reads and writes the same elements.
    #[must_use]
    pub fn in_place(elements: &'a mut [T]) -> Self {
        let to = elements.as_mut_ptr();
        Self {
            from: to,
            to,
            len: elements.len(),
            streams: false,
            ahead: prefetch::ahead(),
            memory: PhantomData,
        }
    }

    /// Reads `from` and writes `to`, which must be as long.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn out_of_place(from: &'a [T], to: &'a mut [T]) -> Self {
        assert_eq!(from.len(), to.len(), "a slot is written to one of its own size");
        let streams = (to.as_ptr() as usize).is_multiple_of(LINE_BYTES);
        Self {
            from: from.as_ptr(),
            to: to.as_mut_ptr(),
            len: from.len(),
            streams,
            ahead: prefetch::ahead(),
            memory: PhantomData,
        }
    }

    /// For elements that the kernel writes and does not read: stores bypass the cache, as out of
    /// place.
    #[must_use]
    pub fn write_only(elements: &'a mut [T]) -> Self {
        let streams = (elements.as_ptr() as usize).is_multiple_of(LINE_BYTES);
        Self { streams, ..Self::in_place(elements) }
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

    /// The elements `at..at + count`, zero-extended, and zeros behind them. `count` is `LANES` but
    /// at the tail.
    #[inline(always)]
    #[must_use]
    pub fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> S::U {
        let [lanes] = self.load_unit(simd, at, count);
        lanes
    }

    /// Writes the first `count` lanes to `at..at + count`.
    #[inline(always)]
    pub fn store<S: Simd>(&self, simd: S, at: usize, count: usize, lanes: S::U) {
        if self.streams {
            self.store_unit::<S, 1, true>(simd, at, count, [lanes]);
        } else {
            self.store_unit::<S, 1, false>(simd, at, count, [lanes]);
        }
    }

    /// Whether stores may bypass the cache.
    #[inline(always)]
    #[must_use]
    pub fn streams(&self) -> bool {
        self.streams
    }

    /// Asserts that a whole unit lies behind `at`: before the arithmetic, which is then one piece
    /// without a branch.
    #[inline(always)]
    pub fn expect_unit<const Q: usize>(&self, at: usize) {
        assert!(holds(self.len, at, Q * LANES), "the unit lies within the stream");
    }

    /// The unit `at..at + count`, zero-extended, and zeros behind it. `count` is `Q * LANES` but at
    /// the tail.
    #[inline(always)]
    #[must_use]
    pub fn load_unit<S: Simd, const Q: usize>(
        &self,
        simd: S,
        at: usize,
        count: usize,
    ) -> [S::U; Q] {
        load_unit(simd, self.from, self.len, at, count)
    }

    /// Writes the first `count` elements of a unit to `at..at + count`; past the cache with
    /// `STREAM`.
    #[inline(always)]
    pub fn store_unit<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        unit: [S::U; Q],
    ) {
        // One branch that is never taken beside a store that would fault.
        assert!(
            !STREAM || self.streams && at.is_multiple_of(stream_align(Q)),
            "the target is aligned to its lines"
        );
        if count == Q * LANES {
            self.expect_unit::<Q>(at);
            // SAFETY: `at..at + Q * LANES` lies within `len`, and `to` is valid for writes of `len`
            // elements for 'a (made from `&mut [T]`). No reference to them exists while the cursor
            // does. Streamed, `to` is aligned to a line (`streams`) and `at` is a multiple of what
            // one store holds: LANES elements of a single vector or of 4 bytes, 2 * LANES of a pair
            // of 2 bytes. So each store is aligned to all its bytes, 32 or 64.
            unsafe { store_whole::<S, T, Q, STREAM>(simd, self.to.add(at), unit) };
        } else {
            assert_tail::<Q>(self.len, at, count);
            let mut spilled = [T::default(); UNIT_LEN_MAX];
            // SAFETY: `spilled` holds the unit; `count` elements of it fit behind `at`, as
            // asserted, and cannot overlap a local array.
            unsafe {
                store_whole::<S, T, Q, false>(simd, spilled.as_mut_ptr(), unit);
                self.to.wrapping_add(at).copy_from_nonoverlapping(spilled.as_ptr(), count);
            }
        }
    }

    /// The element `at` of what is read.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, at: usize) -> T {
        assert!(at < self.len);
        // SAFETY: `at < len`, and `from` is valid for reads of `len` elements while the cursor
        // lives.
        unsafe { self.from.add(at).read() }
    }

    /// Writes the element `at`.
    #[inline(always)]
    pub fn set(&self, at: usize, value: T) {
        assert!(at < self.len);
        // SAFETY: `at < len`, and `to` is valid for writes of `len` elements while the cursor
        // lives.
        unsafe { self.to.add(at).write(value) };
    }

    /// With lines fetched `ahead` elements before they are loaded, instead of [`prefetch::ahead`].
    #[must_use]
    pub fn fetched(self, ahead: usize) -> Self {
        Self { ahead, ..self }
    }

    /// Asks for the lines of `count` elements that lie [`prefetch::ahead`] after `at`, or as far as
    /// was said; beyond the end it asks for nothing that could fault.
    #[inline(always)]
    pub fn prefetch(&self, at: usize, count: usize) {
        prefetch::lines(self.from, at.wrapping_add(self.ahead), count);
    }
}

/// A stream that a kernel only reads.
#[derive(Clone, Copy)]
pub struct Source<'a, T> {
    from: *const T,
    len: usize,
    ahead: usize,
    memory: PhantomData<&'a [T]>,
}

impl<'a, T: Lane> Source<'a, T> {
    /// Reads these elements.
    #[must_use]
    pub fn new(elements: &'a [T]) -> Self {
        Self {
            from: elements.as_ptr(),
            len: elements.len(),
            ahead: prefetch::ahead(),
            memory: PhantomData,
        }
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
        let [lanes] = self.load_unit(simd, at, count);
        lanes
    }

    /// As [`Cursor::load_unit`].
    #[inline(always)]
    #[must_use]
    pub fn load_unit<S: Simd, const Q: usize>(
        &self,
        simd: S,
        at: usize,
        count: usize,
    ) -> [S::U; Q] {
        load_unit(simd, self.from, self.len, at, count)
    }

    /// As [`Cursor::prefetch`].
    #[inline(always)]
    pub fn prefetch(&self, at: usize, count: usize) {
        prefetch::lines(self.from, at.wrapping_add(self.ahead), count);
    }
}

/// Asserts that `at..at + count`, less than a unit, lies within `len`. No elements lie anywhere.
#[inline(always)]
fn assert_tail<const Q: usize>(len: usize, at: usize, count: usize) {
    assert!(
        count < Q * LANES && (count == 0 || holds(len, at, count)),
        "the tail of a unit lies within the stream"
    );
}

#[inline(always)]
fn load_unit<S: Simd, T: Lane, const Q: usize>(
    simd: S,
    from: *const T,
    len: usize,
    at: usize,
    count: usize,
) -> [S::U; Q] {
    if count == Q * LANES {
        assert!(holds(len, at, Q * LANES), "the unit lies within the stream");
        // SAFETY: `at..at + Q * LANES` lies within `len`, and `from` is valid for reads of `len`
        // elements while the cursor lives.
        unsafe { load_whole(simd, from.add(at)) }
    } else {
        assert_tail::<Q>(len, at, count);
        let mut padded = [T::default(); UNIT_LEN_MAX];
        // SAFETY: `count` elements lie behind `at`, as asserted, and cannot overlap a local array
        // that holds the unit.
        unsafe {
            padded.as_mut_ptr().copy_from_nonoverlapping(from.wrapping_add(at), count);
            load_whole(simd, padded.as_ptr())
        }
    }
}

/// # Safety
/// `from` is valid for reads of `Q * LANES` elements.
#[inline(always)]
unsafe fn load_whole<S: Simd, T: Lane, const Q: usize>(simd: S, from: *const T) -> [S::U; Q] {
    const { assert!(is_unit(Q)) };
    let mut unit = [simd.splat_u(0); Q];
    // SAFETY: passed on from the caller.
    unsafe {
        if Q == 1 {
            unit[0] = T::load(simd, from);
        } else {
            for i in 0..Q / 2 {
                [unit[2 * i], unit[2 * i + 1]] = T::load_pair(simd, from.add(i * 2 * LANES));
            }
        }
    }
    unit
}

/// # Safety
/// `to` is valid for writes of `Q * LANES` elements; with `STREAM`, aligned to `stream_align(Q)` of
/// them.
#[inline(always)]
unsafe fn store_whole<S: Simd, T: Lane, const Q: usize, const STREAM: bool>(
    simd: S,
    to: *mut T,
    unit: [S::U; Q],
) {
    const { assert!(is_unit(Q)) };
    // SAFETY: passed on from the caller.
    unsafe {
        if Q == 1 {
            if STREAM { T::stream(simd, to, unit[0]) } else { T::store(simd, to, unit[0]) }
        } else {
            for i in 0..Q / 2 {
                let (to, pair) = (to.add(i * 2 * LANES), [unit[2 * i], unit[2 * i + 1]]);
                if STREAM { T::stream_pair(simd, to, pair) } else { T::store_pair(simd, to, pair) }
            }
        }
    }
}

/// Orders streaming stores before whatever follows: call it on the thread that stored, before a
/// slot is published.
#[inline]
pub fn publish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a store fence; SSE is in the baseline.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{simd::scalar::Scalar, stream::element::Bf16};

    const LEN: usize = 256;

    #[repr(align(64))]
    struct Lines<T>([T; LEN]);

    /// What an access that must be refused says.
    fn refusal(access: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(access)).expect_err("must be refused");
        panic.downcast_ref::<&str>().map_or_else(
            || panic.downcast_ref::<String>().cloned().unwrap_or_default(),
            ToString::to_string,
        )
    }

    #[test]
    fn a_range_that_wraps_around_is_refused() {
        let mut elements = [1_u32; LEN];
        let cursor = Cursor::in_place(&mut elements);
        let (one, four) = ([Scalar.splat_u(2)], [Scalar.splat_u(2); 4]);
        for at in [LEN - 15, LEN, usize::MAX / 4, usize::MAX - 63, usize::MAX - 15, usize::MAX] {
            let source = Source::new(&[1_u32; LEN]);
            let refused = [
                refusal(|| cursor.store_unit::<_, 1, false>(Scalar, at, 16, one)),
                refusal(|| cursor.store_unit::<_, 4, false>(Scalar, at, 64, four)),
                refusal(|| cursor.store_unit::<_, 4, false>(Scalar, at, 63, four)),
                refusal(|| cursor.store(Scalar, at, 16, Scalar.splat_u(2))),
                refusal(|| _ = cursor.load_unit::<_, 4>(Scalar, at, 64)),
                refusal(|| _ = cursor.load_unit::<_, 4>(Scalar, at, 63)),
                refusal(|| _ = source.load(Scalar, at, 16)),
                refusal(|| cursor.expect_unit::<1>(at)),
            ];
            for said in refused {
                assert!(said.contains("lies within the stream"), "at {at}: {said}");
            }
            cursor.prefetch(at, 16);
            source.prefetch(at, 16);
        }
        assert_eq!(elements, [1; LEN]);
    }

    #[test]
    fn a_streamed_store_that_is_not_aligned_is_refused() {
        let (from, mut to) = (Lines([Bf16(1); LEN]), Lines([Bf16(1); LEN]));
        let (one, four) = ([Scalar.splat_u(2)], [Scalar.splat_u(2); 4]);
        let said = "aligned to its lines";
        let cursor = Cursor::out_of_place(&from.0, &mut to.0);
        assert!(cursor.streams());
        // 16 half words are 32 bytes: enough for a vector, not for a pair, which is one store of
        // 64.
        assert!(refusal(|| cursor.store_unit::<_, 4, true>(Scalar, 16, 64, four)).contains(said));
        assert!(refusal(|| cursor.store_unit::<_, 1, true>(Scalar, 8, 16, one)).contains(said));
        cursor.store_unit::<_, 1, true>(Scalar, 16, 16, one);
        cursor.store_unit::<_, 4, true>(Scalar, 32, 64, four);
        let cursor = Cursor::out_of_place(&from.0[1..], &mut to.0[1..]);
        assert!(!cursor.streams(), "its base is not aligned");
        assert!(refusal(|| cursor.store_unit::<_, 1, true>(Scalar, 0, 16, one)).contains(said));
        assert_eq!(to.0.iter().filter(|element| element.0 == 2).count(), 80);
    }
}
