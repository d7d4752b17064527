//! `q8`: both moments in 8 bits per element and a bf16 scale per 32 elements, 2.125 B per parameter.
//!
//! A code `c` stands for `T(c) * scale`: `T(c) = c^2`, with the sign of the code, for `exp_avg` (|c| <= 127), and `T(c) = c^4` for
//! `exp_avg_sq` (c <= 255), whose square root is what an update is divided by. The relative step is 2/c in both `exp_avg` and
//! that root, and the range of a group is 1.6e4 and, of the root, 6.5e4. With `q = |x| / scale` and c the largest code
//! of `T(c) <= q`, x is rounded up to c + 1 with probability `(q - T(c)) / (T(c + 1) - T(c))`: unbiased in the decoded domain, and no
//! division per element.
//!
//! - `exp_avg_sq > 0` is coded to at least 1: a 0 beside a nonzero `exp_avg` would blow the update up.
//! - A scale is the group's largest magnitude over `T` of the largest code, rounded *up* to bf16, so that no element
//!   overflows the codes. The frozen bf16 scale does not freeze the decay: codes shrink under it, in expectation exactly.
//! - A nonzero scale is at least the smallest normal number, so its reciprocal is finite; a group of zeros has scale 0.
//! - Square roots are what limits the rate: `exp_avg` takes one, `exp_avg_sq` one of the root that the step divides by anyway. Roundings
//!   on the way move `c` at a code's very boundary only, where both neighbours are right, and do so alike on every ISA.
//!
//! Chosen by the error of the update (simulated, lognormal gradient scales within a group of sigma 0.5, 1, 2): softsign and square
//! root, the published pair, rounded stochastically 1.3 %, 7 %, 140 %; `c^2` and `c^2` 1.3 %, 5 %, 37 %; this 1.3 %, 2.6 %, 20 %.
//!
//! Layout: 64 elements are 64 bytes, byte `4 * lane + quarter` is element `16 * quarter + lane`, so that a quarter is one shift and
//! mask of sixteen 32-bit words. The last block of a parameter is padded.

use crate::{
    cursor::Cursor,
    element::Bf16,
    simd::{LANES, Simd},
    state::{BLOCK, MomentLanes, Moments},
};

/// Elements that share a scale.
pub const GROUP: usize = 32;

const QUARTERS: usize = BLOCK / LANES;
const QUARTERS_PER_GROUP: usize = GROUP / LANES;
const GROUPS_PER_BLOCK: usize = BLOCK / GROUP;

/// The largest code of `exp_avg`.
const EXP_AVG_CODE_MAX: f32 = 127.0;
/// The largest code of `exp_avg_sq`.
const EXP_AVG_SQ_CODE_MAX: f32 = 255.0;

/// Bytes of one moment's codes for `len` elements: padded to whole blocks.
#[must_use]
pub fn codes_len(len: usize) -> usize {
    len.next_multiple_of(BLOCK)
}

/// Scales of one moment for `len` elements: those of whole blocks.
#[must_use]
pub fn scales_len(len: usize) -> usize {
    len.div_ceil(BLOCK) * GROUPS_PER_BLOCK
}

/// Codes, four to a word, and scales of one moment.
pub struct Coded<'a> {
    /// `codes_len / 4` words.
    pub codes: Cursor<'a, u32>,
    /// `scales_len` scales.
    pub scales: Cursor<'a, Bf16>,
}

/// `exp_avg` and `exp_avg_sq` in q8.
pub struct Q8<'a> {
    /// Signed codes.
    pub exp_avg: Coded<'a>,
    /// Unsigned codes.
    pub exp_avg_sq: Coded<'a>,
}

/// The largest magnitude whose scale, rounded up by at most 2^-7 of itself, decodes to a finite number again; what is above
/// has the largest code.
const MAGNITUDE_MAX_BITS: u32 = 0x7f7e_0000;

/// One over T of the largest code, for the groups in the order of [`Scales`], four times over.
const CODES_TO_SCALES: [f32; LANES] = {
    let signed = 1.0 / (EXP_AVG_CODE_MAX * EXP_AVG_CODE_MAX);
    let root = EXP_AVG_SQ_CODE_MAX * EXP_AVG_SQ_CODE_MAX;
    let unsigned = 1.0 / (root * root);
    let mut lanes = [signed; LANES];
    let mut lane = 0;
    while lane < LANES {
        if lane % 4 >= 2 {
            lanes[lane] = unsigned;
        }
        lane += 1;
    }
    lanes
};

/// The scales of a block, in every four lanes: `exp_avg` of both groups, then `exp_avg_sq` of both.
pub struct Scales<S: Simd> {
    /// bf16 bits.
    bits: S::U,
    /// One over each, 0 for a group of zeros.
    reciprocals: S::U,
    /// The square roots of those.
    roots: S::U,
}

impl<S: Simd> Scales<S> {
    /// The scales of groups whose largest magnitudes have these bits.
    #[inline(always)]
    fn new(simd: S, magnitudes: S::U) -> Self {
        // SAFETY: the array holds LANES words.
        let factors = simd.of_bits(unsafe { simd.load_u32(CODES_TO_SCALES.as_ptr().cast()) });
        let finite = simd.min_u(magnitudes, simd.splat_u(MAGNITUDE_MAX_BITS));
        let scale = simd.bits(simd.mul(simd.of_bits(finite), factors));
        let scale = simd.max_u(scale, simd.splat_u(f32::MIN_POSITIVE.to_bits()));
        let rounded_up = simd.shr::<16>(simd.add_u(scale, simd.splat_u(0xffff)));
        let zero = simd.splat_u(0);
        let is_zero = simd.eq_u(magnitudes, zero);
        let is_nan = simd.gt_u(magnitudes, simd.splat_u(0x7f80_0000));
        let nan = simd.splat_u(u32::from(Bf16::NAN.0));
        let bits = simd.select(is_zero, zero, simd.select(is_nan, nan, rounded_up));
        let reciprocal = simd.div(simd.splat(1.0), simd.of_bits(simd.shl::<16>(bits)));
        let reciprocals = simd.select(is_zero, zero, simd.bits(reciprocal));
        Self { bits, reciprocals, roots: simd.bits(simd.sqrt(simd.of_bits(reciprocals))) }
    }

    /// Of the `quarter`'s group, in all lanes: one over the scale of `exp_avg`, the same of `exp_avg_sq`, and its root.
    #[inline(always)]
    fn reciprocals_of(&self, simd: S, quarter: usize) -> (S::F, S::F, S::F) {
        let (signed, unsigned, root) = match quarter / QUARTERS_PER_GROUP {
            0 => (
                simd.splat_lane::<0>(self.reciprocals),
                simd.splat_lane::<2>(self.reciprocals),
                simd.splat_lane::<2>(self.roots),
            ),
            _ => (
                simd.splat_lane::<1>(self.reciprocals),
                simd.splat_lane::<3>(self.reciprocals),
                simd.splat_lane::<3>(self.roots),
            ),
        };
        (simd.of_bits(signed), simd.of_bits(unsigned), simd.of_bits(root))
    }
}

/// A number in [1, 2) from 16 random bits at bit 7 and up, in the middle of the interval that they name.
#[inline(always)]
fn one_plus_uniform<S: Simd>(simd: S, noise: S::U) -> S::F {
    let mantissa = simd.and(noise, simd.splat_u(0x007f_ff80));
    simd.of_bits(simd.or(mantissa, simd.splat_u(0x3f80_0040)))
}

/// `T(c) = c^4`, of `exp_avg_sq`; rounded to fp32 above 2^24, where its steps are 2^18 times larger.
#[inline(always)]
fn fourth_power<S: Simd>(simd: S, code: S::F) -> S::F {
    let square = simd.mul(code, code);
    simd.mul(square, square)
}

/// `code`, or one more if `uniform < missing / apart`; at most `code_max`.
#[inline(always)]
fn round_stochastically<S: Simd>(
    simd: S,
    code: S::F,
    missing: S::F,
    apart: S::F,
    one_plus_uniform: S::F,
    code_max: f32,
) -> S::F {
    let up = simd.lt(simd.mul(one_plus_uniform, apart), simd.add(missing, apart));
    // An infinite magnitude ends here, and so does a NaN, whose scale is one too.
    simd.at_most(simd.select_f(up, simd.add(code, simd.splat(1.0)), code), simd.splat(code_max))
}

/// The magnitude of `exp_avg`'s codes, from its magnitudes in scales.
#[inline(always)]
fn exp_avg_codes<S: Simd>(simd: S, q: S::F, one_plus_uniform: S::F) -> S::F {
    let code = simd.floor(simd.sqrt(q));
    let missing = simd.fnma(code, code, q);
    let apart = simd.fma(code, simd.splat(2.0), simd.splat(1.0));
    round_stochastically(simd, code, missing, apart, one_plus_uniform, EXP_AVG_CODE_MAX)
}

/// `exp_avg_sq`'s codes, from its values in scales and their square roots.
#[inline(always)]
fn exp_avg_sq_codes<S: Simd>(simd: S, q: S::F, root: S::F, one_plus_uniform: S::F) -> S::F {
    let minus_one = simd.splat(-1.0);
    let code = simd.floor(simd.sqrt(root));
    let below = fourth_power(simd, code);
    let above = fourth_power(simd, simd.add(code, simd.splat(1.0)));
    let missing = simd.fma(below, minus_one, q);
    let apart = simd.fma(below, minus_one, above);
    round_stochastically(simd, code, missing, apart, one_plus_uniform, EXP_AVG_SQ_CODE_MAX)
}

/// Small integers held in fp32, in two's complement: 1.5 * 2^23 puts the units at the last place. Only the low byte counts.
#[inline(always)]
fn integers<S: Simd>(simd: S, codes: S::F) -> S::U {
    simd.bits(simd.add(codes, simd.splat(12_582_912.0)))
}

/// The magnitudes' bits of the larger of two vectors, lane by lane.
#[inline(always)]
fn larger_magnitude<S: Simd>(simd: S, a: S::F, b: S::F) -> S::U {
    simd.max_u(simd.magnitude(a), simd.magnitude(b))
}

/// Byte `quarter` of each word, with its sign.
#[inline(always)]
fn signed_byte<S: Simd>(simd: S, words: S::U, quarter: usize) -> S::U {
    simd.sar::<24>(match quarter {
        0 => simd.shl::<24>(words),
        1 => simd.shl::<16>(words),
        2 => simd.shl::<8>(words),
        _ => words,
    })
}

/// Byte `quarter` of each word.
#[inline(always)]
fn byte<S: Simd>(simd: S, words: S::U, quarter: usize) -> S::U {
    let mask = simd.splat_u(0xff);
    match quarter {
        0 => simd.and(words, mask),
        1 => simd.and(simd.shr::<8>(words), mask),
        2 => simd.and(simd.shr::<16>(words), mask),
        _ => simd.shr::<24>(words),
    }
}

/// The low bytes of four vectors as one vector of words.
#[inline(always)]
fn pack<S: Simd>(simd: S, quarters: [S::U; QUARTERS]) -> S::U {
    let mask = simd.splat_u(0xff);
    let low = simd.or(simd.and(quarters[0], mask), simd.shl::<8>(simd.and(quarters[1], mask)));
    let high = simd.or(simd.shl::<16>(simd.and(quarters[2], mask)), simd.shl::<24>(quarters[3]));
    simd.or(low, high)
}

impl Coded<'_> {
    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.codes.prefetch(at / 4, BLOCK / 4);
        self.scales.prefetch(at / GROUP, GROUPS_PER_BLOCK);
    }

    /// The words of the block at `at`, and the scale of each of its quarters.
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize) -> (S::U, [S::F; QUARTERS]) {
        let mut scales = [simd.splat(0.0); QUARTERS];
        for (quarter, scale) in scales.iter_mut().enumerate() {
            *scale = simd.splat(self.scales.get(at / GROUP + quarter / QUARTERS_PER_GROUP).to_f32());
        }
        (self.codes.load(simd, at / 4, LANES), scales)
    }
}

impl Moments<QUARTERS> for Q8<'_> {
    const STOCHASTIC: bool = true;
    type Measure<S: Simd> = Scales<S>;

    fn covers(&self, len: usize) -> bool {
        [&self.exp_avg, &self.exp_avg_sq]
            .iter()
            .all(|moment| moment.codes.len() * 4 == codes_len(len) && moment.scales.len() == scales_len(len))
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.exp_avg.prefetch(at);
        self.exp_avg_sq.prefetch(at);
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize, _count: usize) -> ([S::F; QUARTERS], [S::F; QUARTERS]) {
        let (signed, signed_scales) = self.exp_avg.load(simd, at);
        let (unsigned, unsigned_scales) = self.exp_avg_sq.load(simd, at);
        let (mut exp_avg, mut exp_avg_sq) = ([simd.splat(0.0); QUARTERS], [simd.splat(0.0); QUARTERS]);
        for quarter in 0..QUARTERS {
            let code = simd.to_f(signed_byte(simd, signed, quarter));
            let magnitude = simd.of_bits(simd.magnitude(code));
            exp_avg[quarter] = simd.mul(simd.mul(code, magnitude), signed_scales[quarter]);
            let code = simd.to_f(byte(simd, unsigned, quarter));
            exp_avg_sq[quarter] = simd.mul(fourth_power(simd, code), unsigned_scales[quarter]);
        }
        (exp_avg, exp_avg_sq)
    }

    #[inline(always)]
    fn measure<S: Simd>(&self, simd: S, moments: &MomentLanes<S, QUARTERS>) -> Scales<S> {
        let MomentLanes { exp_avg, exp_avg_sq, .. } = moments;
        Scales::new(
            simd,
            simd.max_lanes(
                larger_magnitude(simd, exp_avg[0], exp_avg[1]),
                larger_magnitude(simd, exp_avg[2], exp_avg[3]),
                larger_magnitude(simd, exp_avg_sq[0], exp_avg_sq[1]),
                larger_magnitude(simd, exp_avg_sq[2], exp_avg_sq[3]),
            ),
        )
    }

    #[inline(always)]
    fn store<S: Simd>(
        &self,
        simd: S,
        at: usize,
        _count: usize,
        MomentLanes { exp_avg, exp_avg_sq, root }: MomentLanes<S, QUARTERS>,
        scales: Scales<S>,
        noise: [S::U; QUARTERS],
    ) {
        // The integers of the codes 0 and 1 are large, but in this order.
        let least = integers(simd, simd.splat(1.0));
        let (mut signed, mut unsigned) = ([least; QUARTERS], [least; QUARTERS]);
        for quarter in 0..QUARTERS {
            let (signed_reciprocal, unsigned_reciprocal, unsigned_root) = scales.reciprocals_of(simd, quarter);
            let uniform = one_plus_uniform(simd, simd.shl::<7>(noise[quarter]));
            let q = simd.mul(simd.of_bits(simd.magnitude(exp_avg[quarter])), signed_reciprocal);
            let code = exp_avg_codes(simd, q, uniform);
            let sign = simd.and(simd.bits(exp_avg[quarter]), simd.splat_u(0x8000_0000));
            signed[quarter] = integers(simd, simd.of_bits(simd.or(simd.bits(code), sign)));

            let uniform = one_plus_uniform(simd, simd.shr::<9>(noise[quarter]));
            let q = simd.mul(exp_avg_sq[quarter], unsigned_reciprocal);
            let root = simd.mul(root[quarter], unsigned_root);
            let code = integers(simd, exp_avg_sq_codes(simd, q, root, uniform));
            let is_positive = simd.lt(simd.splat(0.0), exp_avg_sq[quarter]);
            unsigned[quarter] = simd.select(is_positive, simd.max_u(code, least), code);
        }
        self.exp_avg.codes.store(simd, at / 4, LANES, pack(simd, signed));
        self.exp_avg_sq.codes.store(simd, at / 4, LANES, pack(simd, unsigned));
        for (group, bits) in simd.first_lanes(scales.bits).into_iter().enumerate() {
            let moment = if group < GROUPS_PER_BLOCK { &self.exp_avg } else { &self.exp_avg_sq };
            moment.scales.set(at / GROUP + group % GROUPS_PER_BLOCK, Bf16(bits as u16));
        }
    }
}
