//! The random bits of stochastic rounding: a counter-based hash, so that there is no state to store and a resumed run
//! draws what an uninterrupted one would have drawn.
//!
//! Bits depend on the parameter's key, the step and the element's index within the parameter, and on nothing else:
//! neither on chunks nor on threads. One draw serves both moments: the low 16 bits are `exp_avg`'s, the high 16
//! `exp_avg_sq`'s. A low-discrepancy sequence over the steps instead of fresh bits was tried and is worse: its errors
//! are correlated with the decay of `exp_avg_sq` and add up (15 % of the update after 1,000 steps, where fresh bits give 8 %).

use crate::simd::{LANES, Simd};

/// The random bits of one parameter at one step.
#[derive(Clone, Copy, Debug)]
pub struct Dither {
    key: u32,
    base: u32,
}

/// A bijection of 64-bit numbers in which every input bit changes half of the output bits (the finaliser of `SplitMix64`:
/// Steele, Lea, Flood, 2014).
#[must_use]
pub fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Dither {
    /// Bits for the elements from `first` on of the parameter `key` at `step`.
    ///
    /// `first` must lie in a chunk, so that no draw crosses a multiple of 2^32 elements.
    #[must_use]
    pub fn new(key: u64, step: u64, first: u64) -> Self {
        let mixed = mix64(mix64(key.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ step).wrapping_add(first >> 32);
        Self { key: mix64(mixed) as u32, base: first as u32 }
    }

    /// 32 bits for each of the elements `at..at + LANES`, counted from `first`.
    #[inline(always)]
    #[must_use]
    pub fn lanes<S: Simd>(&self, simd: S, at: usize) -> S::U {
        const FIRST: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        // SAFETY: FIRST holds LANES words.
        let first = unsafe { simd.load_u32(FIRST.as_ptr()) };
        let index = simd.add_u(first, simd.splat_u(self.base.wrapping_add(at as u32)));
        hash(simd, simd.xor(index, simd.splat_u(self.key)))
    }
}

/// A 32-bit bijection with little bias: xor-shift and two multiplications (constants from Wellons' search, 2018).
#[inline(always)]
fn hash<S: Simd>(simd: S, x: S::U) -> S::U {
    let x = simd.mul_u(simd.xor(x, simd.shr::<16>(x)), simd.splat_u(0x7feb_352d));
    let x = simd.mul_u(simd.xor(x, simd.shr::<15>(x)), simd.splat_u(0x846c_a68b));
    simd.xor(x, simd.shr::<16>(x))
}
