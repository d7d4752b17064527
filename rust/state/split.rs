//! The `split` master: a bf16 parameter is the rounded upper half of an fp32 number, 16 trailing
//! bits hold the rest.
//!
//! For fp32 bits `x` that are not a NaN: `hi = (x + 0x8000) >> 16`, `lo = x - (hi << 16)` as a
//! signed 16-bit number, and `x = (hi << 16) + lo`: a bijection, so the master is exact. `hi`
//! differs from round-to-nearest-even on exact ties only (they round away from zero). A NaN becomes
//! the canonical NaN.
//!
//! Trailing bits belong to the parameter that they were written with. Code that writes a parameter
//! (`load_state_dict`, `copy_`, `.data`) leaves them stale, and stale bits may turn a 0 into a NaN.
//! So a 32-bit fingerprint per chunk tells whether the parameter is still ours; where it is not,
//! the chunk's trailing bits are void and read as 0: what the user wrote wins. The fingerprint sees
//! every change of a single element, and misses one in about 2^32 of the others.

use crate::{
    simd::{LANES, Simd, isa::Kernel},
    state::Master,
    stream::{
        BLOCK,
        cursor::{Cursor, Source},
        element::Bf16,
    },
};

/// With the canonical NaN for every NaN. Hardly ever is there one: looked for in two vectors at a
/// time, replaced behind a branch.
#[inline(always)]
fn with_canonical_nans<S: Simd, const Q: usize>(simd: S, mut values: [S::F; Q]) -> [S::F; Q] {
    let mut found = false;
    for i in (0..Q).step_by(2) {
        found |= simd.any(simd.is_either_nan(values[i], values[(i + 1) % Q]));
    }
    if found {
        for values in &mut values {
            let nan = simd.splat_u(u32::from(Bf16::NAN.0) << 16);
            *values = simd.of_bits(simd.select(simd.is_nan(*values), nan, simd.bits(*values)));
        }
    }
    values
}

/// The halves of a unit of fp32 numbers: the bf16 parameters and the trailing bits, both in the low
/// 16 bits of their lanes.
#[inline(always)]
pub fn split<S: Simd, const Q: usize>(simd: S, values: [S::F; Q]) -> ([S::U; Q], [S::U; Q]) {
    let (mut high, mut low) = ([simd.splat_u(0); Q], [simd.splat_u(0); Q]);
    for (values, (high, low)) in
        with_canonical_nans(simd, values).into_iter().zip(high.iter_mut().zip(&mut low))
    {
        let bits = simd.bits(values);
        *high = simd.shr::<16>(simd.add_u(bits, simd.splat_u(0x8000)));
        // The low half of `bits - (high << 16)` is that of `bits`: only the low 16 bits are stored.
        *low = simd.and(bits, simd.splat_u(0xffff));
    }
    (high, low)
}

/// The fp32 numbers that were split; the trailing bits count where `valid` has ones.
#[inline(always)]
pub fn join<S: Simd>(simd: S, high: S::U, low: S::U, valid: S::U) -> S::F {
    // Extended first: that comes with the load.
    let low = simd.and(simd.sar::<16>(simd.shl::<16>(low)), valid);
    simd.of_bits(simd.add_u(simd.shl::<16>(high), low))
}

/// A bf16 parameter with its trailing bits.
pub struct Split<'a> {
    high: Cursor<'a, Bf16>,
    low: Cursor<'a, i16>,
    /// All ones, or 0 where the trailing bits are void.
    valid: u32,
}

impl<'a> Split<'a> {
    /// The parameter and its trailing bits, which read as 0 if they are `void`.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn new(high: Cursor<'a, Bf16>, low: Cursor<'a, i16>, void: bool) -> Self {
        assert_eq!(high.len(), low.len(), "every element has its trailing bits");
        Self { high, low, valid: if void { 0 } else { u32::MAX } }
    }
}

impl Master for Split<'_> {
    type Weight = Bf16;

    #[inline(always)]
    fn len(&self) -> usize {
        self.high.len()
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.high.prefetch(at, BLOCK);
        self.low.prefetch(at, BLOCK);
    }

    #[inline(always)]
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q] {
        let high = self.high.load_unit::<S, Q>(simd, at, count);
        let low = self.low.load_unit::<S, Q>(simd, at, count);
        let mut masters = [simd.splat(0.0); Q];
        for (master, (high, low)) in masters.iter_mut().zip(high.into_iter().zip(low)) {
            *master = join(simd, high, low, simd.splat_u(self.valid));
        }
        masters
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.high.streams() && self.low.streams()
    }

    #[inline(always)]
    fn store<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
    ) {
        let (high, low) = split(simd, master);
        self.high.store_unit::<S, Q, STREAM>(simd, at, count, high);
        self.low.store_unit::<S, Q, STREAM>(simd, at, count, low);
    }

    #[inline(always)]
    fn weights<S: Simd, const Q: usize>(simd: S, master: [S::F; Q]) -> [S::U; Q] {
        split(simd, master).0
    }
}

/// The fingerprint of a chunk of a bf16 parameter; never 0, which stands for "no trailing bits
/// yet".
///
/// A chain of hashes per lane, folded into one by the same hash, which is a bijection of the chain
/// for every word and of the word for every chain: so a single change is always seen (but where one
/// of the fingerprints would be 0). A polynomial in the multiplier, which is linear, was tried
/// first and missed one in some hundred swaps of two elements.
pub struct Fingerprint<'a>(pub &'a [Bf16]);

const MULTIPLIER: u32 = 0x9e37_79b1;

impl Kernel for Fingerprint<'_> {
    type Output = u32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        // Two neighbours make a word, and four sets of chains hide the multiplication's latency.
        const PAIR: usize = 2 * LANES;
        const SETS: usize = 4;
        let source = Source::new(self.0);
        let mut chains = [simd.splat_u(MULTIPLIER); SETS];
        let len = self.0.len();
        let mut at = 0;
        while at + SETS * PAIR <= len {
            source.prefetch(at, SETS * PAIR);
            for (set, chain) in chains.iter_mut().enumerate() {
                let [even, odd] = source.load_unit(simd, at + set * PAIR, PAIR);
                *chain = absorb(simd, *chain, simd.or(even, simd.shl::<16>(odd)));
            }
            at += SETS * PAIR;
        }
        while at < len {
            let count = (len - at).min(LANES);
            chains[0] = absorb(simd, chains[0], source.load(simd, at, count));
            at += count;
        }
        let mut folded = len as u32;
        for chain in chains {
            let mut lanes = [0_u32; LANES];
            // SAFETY: `lanes` holds LANES words.
            unsafe { simd.store_u32(lanes.as_mut_ptr(), chain) };
            for lane in lanes {
                folded = absorb_word(folded, lane);
            }
        }
        folded.max(1)
    }
}

/// Every word's bits reach all bits of its chain within two words: the shift brings the upper half
/// down, the multiplication the lower half up.
#[inline(always)]
fn absorb<S: Simd>(simd: S, chain: S::U, words: S::U) -> S::U {
    let mixed = simd.xor(chain, words);
    simd.mul_u(simd.xor(mixed, simd.shr::<16>(mixed)), simd.splat_u(MULTIPLIER))
}

/// [`absorb`] of one lane.
#[inline(always)]
fn absorb_word(chain: u32, word: u32) -> u32 {
    let mixed = chain ^ word;
    (mixed ^ (mixed >> 16)).wrapping_mul(MULTIPLIER)
}
