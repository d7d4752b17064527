//! The random bits of stochastic rounding: a counter-based hash, so that there is no state to store
//! and a resumed run draws what an uninterrupted one would have drawn.
//!
//! Bits depend on the parameter's key, the step and the element's index within the parameter, and
//! on nothing else: neither on chunks nor on threads. An element has 32 of them in two halves,
//! which serve one moment each.
//!
//! A strong hash is drawn once per block of 64 elements, on the scalar units: an odd multiplier `b`
//! and an offset `a` for either half. A half's bits are `a + b * r` mod 2^16, `r` a constant of its
//! place in the block: uniform, and two of a block are as good as independent, since they differ by
//! `b` times a number of which 2^6 is no divisor. So rounding errors are not correlated, and those
//! of a block add up as independent ones do, which is what a sum of errors needs. It is two
//! operations for 16 elements; a 32-bit hash per element, two multiplications of 32 bits, is six
//! times that.
//!
//! A low-discrepancy sequence over the steps instead of fresh bits was tried and is worse: its
//! errors are correlated with the decay of `exp_avg_sq` and add up (15 % of the update after 1,000
//! steps, where fresh bits give 8 %).

use crate::{
    simd::{LANES, Simd},
    stream::BLOCK,
};

/// Vectors of a block.
const QUARTERS: usize = BLOCK / LANES;

/// The random bits of one parameter at one step.
#[derive(Clone, Copy, Debug)]
pub struct Dither {
    key: u64,
    /// The block that the first element begins.
    block: u64,
}

/// A bijection of 64-bit numbers in which every input bit changes half of the output bits (the
/// finaliser of `SplitMix64`: Steele, Lea, Flood, 2014).
#[must_use]
#[inline(always)]
pub const fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The step of `SplitMix64`'s counter: 2^64 over the golden ratio.
const COUNTER_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The constants `r`, two per word: random, but that the 64 of a block differ in their low 6 bits.
const PLACES: [[u32; LANES]; QUARTERS] = {
    let mut places = [[0; LANES]; QUARTERS];
    let mut element = 0;
    while element < BLOCK {
        let random = mix64(COUNTER_STEP.wrapping_mul(element as u64 + 1)) as u32 & 0xffc0_ffc0;
        let number = element as u32;
        places[element / LANES][element % LANES] = random | number << 16 | number;
        element += 1;
    }
    places
};

impl Dither {
    /// Bits for the elements from `first` on, with which a block begins, of the parameter `key` at
    /// `step`.
    #[must_use]
    pub fn new(key: u64, step: u64, first: u64) -> Self {
        debug_assert!(first.is_multiple_of(BLOCK as u64));
        Self {
            key: mix64(mix64(key.wrapping_add(COUNTER_STEP)) ^ step),
            block: first / BLOCK as u64,
        }
    }

    /// 32 bits for each of `Q * LANES` elements from `at` on, counted from `first`, which lie in
    /// one block.
    #[inline(always)]
    #[must_use]
    pub fn lanes<S: Simd, const Q: usize>(&self, simd: S, at: usize) -> [S::U; Q] {
        let block = self.block + (at / BLOCK) as u64;
        let hash = mix64(self.key.wrapping_add(block.wrapping_mul(COUNTER_STEP)));
        let (offsets, multipliers) = (hash as u32, (hash >> 32) as u32 | 0x0001_0001);
        let (offsets, multipliers) = (simd.splat_u(offsets), simd.splat_u(multipliers));
        let mut lanes = [offsets; Q];
        for (quarter, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: an array of PLACES holds LANES words.
            let places = unsafe { simd.load_u32(PLACES[at / LANES % QUARTERS + quarter].as_ptr()) };
            *lanes = simd.add_u16(simd.mul_u16(places, multipliers), offsets);
        }
        lanes
    }
}
