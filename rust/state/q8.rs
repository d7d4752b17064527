//! `q8`: both moments in 8 bits per element and a bf16 scale per 32 elements, 2.125 B per
//! parameter.
//!
//! A code `c` stands for `T(c) * scale`. `exp_avg` has a sign and `c <= 127`, and `T` is close to a
//! square; `exp_avg_sq` has `c <= 255`, and `T` is close to a fourth power, since an update is
//! divided by its square root:
//!
//! ```text
//! exp_avg     T(c) = R2(c + 2) - 1/2      R2(2^k) = 2^(2k) / 8
//! exp_avg_sq  T(c) = R4(c + 3) - 1/2      R4(2^k) = 2^(4k) / 128
//! ```
//!
//! From 2^k to 2^(k + 1), `R2` doubles with each half of the way, `R4` with each quarter, and both
//! are linear in between. So the bits of the float `R2(x)` are those of `x`, shifted left by
//! 1, and of `R4(x)` by 2 (but for a power of two, which the unit of `x` takes in): the inverse is
//! a shift to the right, and no root. `exp_avg` has 32, 32, 16, 16, 8, ... codes per doubling from
//! the largest down, `exp_avg_sq` four times 32, four times 16, ...; a group's range is 4.2e3, and
//! the root's 4.8e3.
//!
//! From a code to the next `T` is linear (but below code 1 of `exp_avg_sq`, which takes all of
//! that), so rounding `x` to an integer stochastically, by adding a uniform number and cutting off,
//! is unbiased in the decoded domain: `x = R^-1(|value| / scale + 1/2)`, and the code is the
//! integer part of `x - 2 + uniform` (`x - 3` for `exp_avg_sq`). The sum is a float of a magnitude
//! that puts the point at a fixed bit. `uniform` has 15 bits: probabilities are within 2^-16 of
//! what they should be.
//!
//! - `exp_avg_sq > 0` is coded to at least 1: a 0 beside a nonzero `exp_avg` would blow the update
//!   up. The 0 of both moments is the code 0.
//! - A scale is the group's largest magnitude over `T` of the largest code, rounded *up* to bf16,
//!   so that no element overflows the codes. The frozen bf16 scale does not freeze the decay: codes
//!   shrink under it, in expectation exactly.
//! - A nonzero scale is at least the smallest normal number, so its reciprocal is finite; a group
//!   of zeros has scale 0.
//! - The range of `exp_avg` is nearly that of the root, so magnitudes that spread further do not
//!   blow the update up: to 5.1 times what fp32 has made in the group at most (512 groups of spread
//!   1e3, and of 1e6, 2,000 steps).
//!
//! Chosen by the error of the update (simulated, lognormal gradient scales within a group of sigma
//! 0.5, 1, 2): softsign and square root, the published pair, rounded stochastically 1.3 %, 7 %, 140
//! %; `c^2` and `c^2` 1.3 %, 5 %, 37 %; exact `c^2` and `c^4` 1.3 %, 2.6 %, 21 %; this 1.4 %, 2.7
//! %, 18 %. Exact powers take three square roots per element with the step's own, which bound the
//! kernel. A plain minifloat takes no root either, but 3 bits of exponent for the range that groups
//! have, and the 4 bits that are left to `exp_avg` have steps of 1/16 to 1/32, twice as coarse.
//!
//! Layout: 64 elements are 64 bytes, and byte `4 * lane + i` is the element in that lane of vector
//! `i` of their unit ([`crate::stream::cursor`]), so that a vector is one shift and mask of sixteen
//! 32-bit words. The sign of `exp_avg` is the top bit of its byte. The last block of a parameter is
//! padded.
//!
//! Cost, with the step of a `split` master: 63 vector operations per 16 elements on AVX-512, one
//! square root and one division, which are the step's, and a division per 64 elements. Finding the
//! scales of a unit is a chain of a dozen operations that each wait for the one before: the kernel
//! puts the step of the next unit between them and the coding that needs them. What is all but
//! never met, values beyond what a scale can reach, is looked for once per unit and put right
//! behind a branch.

use crate::{
    simd::{LANES, Simd},
    state::{
        MomentLanes, Moments, each_vector,
        part::{HeldMoments, Part},
    },
    stream::{
        BLOCK,
        cursor::Cursor,
        element::{Bf16, Dtype},
        view::Route,
    },
};

/// Elements that share a scale.
pub const GROUP: usize = 32;

const VECTORS: usize = BLOCK / LANES;
const VECTORS_PER_GROUP: usize = GROUP / LANES;
const GROUPS_PER_BLOCK: usize = BLOCK / GROUP;

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

impl HeldMoments for Q8<'_> {
    const PARTS: &'static [Part] = &[
        Part::per_element("exp_avg_codes", Dtype::Uint8).padded(),
        Part::per(GROUP, "exp_avg_scales", Dtype::BFloat16).padded(),
        Part::per_element("exp_avg_sq_codes", Dtype::Uint8).padded(),
        Part::per(GROUP, "exp_avg_sq_scales", Dtype::BFloat16).padded(),
    ];

    unsafe fn open(routes: &[Route]) -> Self {
        // SAFETY: passed on from the caller.
        unsafe {
            Self {
                exp_avg: Coded { codes: routes[0].words(), scales: routes[1].cursor() },
                exp_avg_sq: Coded { codes: routes[2].words(), scales: routes[3].cursor() },
            }
        }
    }
}

/// What `R` is at the code 0, of both moments.
const R_ZERO: f32 = 0.5;
/// `R` at the largest code of `exp_avg`: of 129.
const EXP_AVG_R_MAX: f32 = 2080.0;
/// `R` at the largest code of `exp_avg_sq`: of 258.
const EXP_AVG_SQ_R_MAX: f32 = 34_603_008.0;

/// 2 to the power of `exponent`.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// The unit of `exp_avg`'s codes before its bits are doubled: what makes `R` of 2 the half.
const EXP_AVG_UNIT: f32 = power_of_two(-65);
/// The unit of `exp_avg_sq`'s codes before its bits are multiplied by 4: what makes `R` of 3 the
/// half.
const EXP_AVG_SQ_UNIT: f32 = power_of_two(-97);

/// The largest magnitude whose scale, rounded up by at most 2^-7 of itself, decodes to a finite
/// number again; what is above has the largest code.
const MAGNITUDE_MAX_BITS: u32 = 0x7f7e_0000;

/// One over T of the largest code, for the groups in the order of [`Scales`], four times over.
const CODES_TO_SCALES: [f32; LANES] = {
    let mut lanes = [(1.0 / (EXP_AVG_R_MAX as f64 - R_ZERO as f64)) as f32; LANES];
    let mut lane = 0;
    while lane < LANES {
        if lane % 4 >= 2 {
            lanes[lane] = (1.0 / (EXP_AVG_SQ_R_MAX as f64 - R_ZERO as f64)) as f32;
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
}

impl<S: Simd> Scales<S> {
    /// The scales of groups whose largest magnitudes have these bits: up to [`MAGNITUDE_MAX_BITS`],
    /// or the canonical NaN.
    #[inline(always)]
    fn new(simd: S, magnitudes: S::U) -> Self {
        // SAFETY: the array holds LANES words.
        let factors = simd.of_bits(unsafe { simd.load_u32(CODES_TO_SCALES.as_ptr().cast()) });
        let scale = simd.bits(simd.mul(simd.of_bits(magnitudes), factors));
        let scale = simd.max_u(scale, simd.splat_u(f32::MIN_POSITIVE.to_bits()));
        let rounded_up = simd.shr::<16>(simd.add_u(scale, simd.splat_u(0xffff)));
        let zero = simd.splat_u(0);
        let is_zero = simd.eq_u(magnitudes, zero);
        let bits = simd.select(is_zero, zero, rounded_up);
        let reciprocal = simd.div(simd.splat(1.0), simd.of_bits(simd.shl::<16>(bits)));
        Self { bits, reciprocals: simd.select(is_zero, zero, simd.bits(reciprocal)) }
    }

    /// What `lanes`, in the order of these scales, have for `exp_avg` and for `exp_avg_sq` of the
    /// group of vector `I`, in all lanes.
    #[inline(always)]
    fn of<const I: usize>(simd: S, lanes: S::U) -> (S::F, S::F) {
        let (signed, unsigned) = match I / VECTORS_PER_GROUP {
            0 => (simd.splat_lane::<0>(lanes), simd.splat_lane::<2>(lanes)),
            _ => (simd.splat_lane::<1>(lanes), simd.splat_lane::<3>(lanes)),
        };
        (simd.of_bits(signed), simd.of_bits(unsigned))
    }
}

/// The scale of a group, for decoding.
struct DecodingScale<S: Simd> {
    scale: S::F,
    /// `-scale * R_ZERO`
    zero: S::F,
}

impl<S: Simd> DecodingScale<S> {
    #[inline(always)]
    fn new(simd: S, scale: f32) -> Self {
        Self { scale: simd.splat(scale), zero: simd.splat(-scale * R_ZERO) }
    }

    /// `T * scale`, rounded once, from `R`.
    #[inline(always)]
    fn times_less_zero(&self, simd: S, r: S::F) -> S::F {
        simd.fma(r, self.scale, self.zero)
    }
}

/// `exp_avg`'s bytes at the top of their words, from its values.
#[inline(always)]
fn encode_exp_avg<S: Simd>(simd: S, values: S::F, reciprocal: S::F, noise: S::U) -> S::U {
    let q = simd.fma(simd.of_bits(simd.magnitude(values)), reciprocal, simd.splat(R_ZERO));
    let root = simd.shr::<1>(simd.bits(q));
    // 126 plus 15 random bits behind the point: with a code of 2 to 129, less than 256, whose last
    // place has a bit more. Three roundings, of a scale, of its reciprocal and of what is
    // multiplied with it, may lead beyond 129 by that bit, and the sum to less than 256 still.
    let uniform = simd
        .or(simd.and(simd.shr::<15>(noise), simd.splat_u(0x0001_fffc)), simd.splat_u(0x42fc_0000));
    let code = simd.fma(simd.of_bits(root), simd.splat(1.0 / EXP_AVG_UNIT), simd.of_bits(uniform));
    let sign = simd.and(simd.bits(values), simd.splat_u(SIGN));
    simd.or(simd.shl::<8>(simd.bits(code)), sign)
}

/// `exp_avg_sq`'s bytes at bits 15 to 22 of their words, from its values.
#[inline(always)]
fn encode_exp_avg_sq<S: Simd>(simd: S, values: S::F, reciprocal: S::F, noise: S::U) -> S::U {
    let q = simd.fma(values, reciprocal, simd.splat(R_ZERO));
    let root = simd.shr::<2>(simd.bits(q));
    // A positive value has a code of 1 at least.
    let is_positive = simd.lt(simd.splat(0.0), values);
    let root = simd.select(
        is_positive,
        simd.max_u(root, simd.splat_u((4.0 * EXP_AVG_SQ_UNIT).to_bits())),
        root,
    );
    // 253 plus 15 random bits behind the point: with a code of 3 to 258, less than 512, whose last
    // place has 15 bits too. What those roundings lead beyond 258 the shift has cut off.
    let uniform = simd.or(simd.and(noise, simd.splat_u(0x0000_fffe)), simd.splat_u(0x437d_0000));
    simd.bits(simd.fma(
        simd.of_bits(root),
        simd.splat(1.0 / EXP_AVG_SQ_UNIT),
        simd.of_bits(uniform),
    ))
}

/// `exp_avg`, from the byte `I` of its words.
#[inline(always)]
fn decode_exp_avg<S: Simd, const I: usize>(simd: S, words: S::U, scale: &DecodingScale<S>) -> S::F {
    const ZERO: f32 = EXP_AVG_UNIT * 8_388_608.0;
    let code = simd.or(
        simd.and(byte_down::<S, I>(simd, words), simd.splat_u(0x7f)),
        simd.splat_u(ZERO.to_bits()),
    );
    let code = simd.add(simd.of_bits(code), simd.splat(-(ZERO - 2.0 * EXP_AVG_UNIT)));
    let value = scale.times_less_zero(simd, simd.of_bits(simd.shl::<1>(simd.bits(code))));
    let sign = simd.and(byte_up::<S, I>(simd, words), simd.splat_u(SIGN));
    simd.of_bits(simd.or(simd.bits(value), sign))
}

/// `exp_avg_sq`, from the byte `I` of its words.
#[inline(always)]
fn decode_exp_avg_sq<S: Simd, const I: usize>(
    simd: S,
    words: S::U,
    scale: &DecodingScale<S>,
) -> S::F {
    const ZERO: f32 = EXP_AVG_SQ_UNIT * 8_388_608.0;
    let code = simd.or(
        simd.and(byte_down::<S, I>(simd, words), simd.splat_u(0xff)),
        simd.splat_u(ZERO.to_bits()),
    );
    let code = simd.add(simd.of_bits(code), simd.splat(-(ZERO - 3.0 * EXP_AVG_SQ_UNIT)));
    scale.times_less_zero(simd, simd.of_bits(simd.shl::<2>(simd.bits(code))))
}

const SIGN: u32 = 0x8000_0000;

/// The words with byte `I` at the bottom, and others above it.
#[inline(always)]
fn byte_down<S: Simd, const I: usize>(simd: S, words: S::U) -> S::U {
    match I {
        0 => words,
        1 => simd.shr::<8>(words),
        2 => simd.shr::<16>(words),
        _ => simd.shr::<24>(words),
    }
}

/// The words with byte `I` at the top, and others below it.
#[inline(always)]
fn byte_up<S: Simd, const I: usize>(simd: S, words: S::U) -> S::U {
    match I {
        0 => simd.shl::<24>(words),
        1 => simd.shl::<16>(words),
        2 => simd.shl::<8>(words),
        _ => words,
    }
}

/// Four vectors as one: byte `i` of a word is byte `i` of vector `i`.
#[inline(always)]
fn interleave<S: Simd>(simd: S, [a, b, c, d]: [S::U; VECTORS]) -> S::U {
    let low = simd.merge(0x0000_ff00, b, a);
    let high = simd.merge(0xff00_0000, d, c);
    simd.merge(0xffff_0000, high, low)
}

/// A unit as it is held: the words and scales of both moments.
pub struct HeldUnit<S: Simd> {
    exp_avg: (S::U, [DecodingScale<S>; GROUPS_PER_BLOCK]),
    exp_avg_sq: (S::U, [DecodingScale<S>; GROUPS_PER_BLOCK]),
}

/// With the magnitude `limit` for larger ones, and for NaNs.
#[inline(always)]
fn at_most<S: Simd>(simd: S, values: S::F, limit: S::F) -> S::F {
    let magnitude = simd.min_u(simd.magnitude(values), simd.bits(limit));
    simd.of_bits(simd.or(magnitude, simd.and(simd.bits(values), simd.splat_u(SIGN))))
}

/// The larger magnitude's bits, lane by lane.
#[inline(always)]
fn larger_magnitude<S: Simd>(simd: S, a: S::F, b: S::F) -> S::U {
    simd.max_u(simd.magnitude(a), simd.magnitude(b))
}

impl Coded<'_> {
    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.codes.prefetch(at / 4, BLOCK / 4);
        self.scales.prefetch(at / GROUP, GROUPS_PER_BLOCK);
    }

    #[inline(always)]
    fn expect_block(&self, at: usize) {
        self.codes.expect_unit::<1>(at / 4);
        assert!(at / GROUP + GROUPS_PER_BLOCK <= self.scales.len());
    }

    /// The words of the block at `at`, and the scales of its groups.
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize) -> (S::U, [DecodingScale<S>; GROUPS_PER_BLOCK]) {
        let scale = |group: usize| self.scales.get(at / GROUP + group).to_f32();
        let scales = [DecodingScale::new(simd, scale(0)), DecodingScale::new(simd, scale(1))];
        (self.codes.load(simd, at / 4, LANES), scales)
    }
}

impl Moments<VECTORS> for Q8<'_> {
    const STOCHASTIC: bool = true;
    type Held<S: Simd> = HeldUnit<S>;
    type Measure<S: Simd> = Scales<S>;

    fn covers(&self, len: usize) -> bool {
        [&self.exp_avg, &self.exp_avg_sq].iter().all(|moment| {
            moment.codes.len() * 4 == codes_len(len) && moment.scales.len() == scales_len(len)
        })
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.exp_avg.prefetch(at);
        self.exp_avg_sq.prefetch(at);
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize, _count: usize) -> HeldUnit<S> {
        HeldUnit {
            exp_avg: self.exp_avg.load(simd, at),
            exp_avg_sq: self.exp_avg_sq.load(simd, at),
        }
    }

    #[inline(always)]
    fn decode<S: Simd, const I: usize>(simd: S, held: &HeldUnit<S>) -> (S::F, S::F) {
        let group = I / VECTORS_PER_GROUP;
        let ((exp_avg, exp_avg_scales), (exp_avg_sq, exp_avg_sq_scales)) =
            (&held.exp_avg, &held.exp_avg_sq);
        (
            decode_exp_avg::<S, I>(simd, *exp_avg, &exp_avg_scales[group]),
            decode_exp_avg_sq::<S, I>(simd, *exp_avg_sq, &exp_avg_sq_scales[group]),
        )
    }

    #[inline(always)]
    fn measure<S: Simd>(simd: S, moments: &mut MomentLanes<S, VECTORS>) -> Scales<S> {
        let MomentLanes { exp_avg, exp_avg_sq } = moments;
        let mut magnitudes = simd.max_lanes(
            larger_magnitude(simd, exp_avg[0], exp_avg[1]),
            larger_magnitude(simd, exp_avg[2], exp_avg[3]),
            larger_magnitude(simd, exp_avg_sq[0], exp_avg_sq[1]),
            larger_magnitude(simd, exp_avg_sq[2], exp_avg_sq[3]),
        );
        // Hardly ever: behind a branch.
        let is_beyond = simd.any(simd.gt_u(magnitudes, simd.splat_u(MAGNITUDE_MAX_BITS)));
        if is_beyond {
            let nan = simd.splat_u(u32::from(Bf16::NAN.0) << 16);
            let finite = simd.min_u(magnitudes, simd.splat_u(MAGNITUDE_MAX_BITS));
            magnitudes = simd.select(simd.is_nan(simd.of_bits(magnitudes)), nan, finite);
        }
        let scales = Scales::new(simd, magnitudes);
        if is_beyond {
            each_vector!(VECTORS, |I| {
                let (signed, unsigned) = Scales::<S>::of::<I>(simd, simd.shl::<16>(scales.bits));
                exp_avg[I] =
                    at_most(simd, exp_avg[I], simd.mul(signed, simd.splat(EXP_AVG_R_MAX - R_ZERO)));
                exp_avg_sq[I] = at_most(
                    simd,
                    exp_avg_sq[I],
                    simd.mul(unsigned, simd.splat(EXP_AVG_SQ_R_MAX - R_ZERO)),
                );
            });
        }
        scales
    }

    #[inline(always)]
    fn encode<S: Simd, const I: usize>(
        simd: S,
        scales: &Scales<S>,
        exp_avg: S::F,
        exp_avg_sq: S::F,
        noise: S::U,
    ) -> (S::U, S::U) {
        let (signed, unsigned) = Scales::<S>::of::<I>(simd, scales.reciprocals);
        (
            encode_exp_avg(simd, exp_avg, signed, noise),
            encode_exp_avg_sq(simd, exp_avg_sq, unsigned, noise),
        )
    }

    #[inline(always)]
    fn streams(&self) -> bool {
        self.exp_avg.codes.streams() && self.exp_avg_sq.codes.streams()
    }

    #[inline(always)]
    fn expect_unit(&self, at: usize) {
        self.exp_avg.expect_block(at);
        self.exp_avg_sq.expect_block(at);
    }

    #[inline(always)]
    fn store<S: Simd, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        _count: usize,
        exp_avg: [S::U; VECTORS],
        exp_avg_sq: [S::U; VECTORS],
        scales: Scales<S>,
    ) {
        // From the top, and from bits 15 to 22, to the byte of the vector.
        let [a, b, c, d] = exp_avg;
        let signed = [simd.shr::<24>(a), simd.shr::<16>(b), simd.shr::<8>(c), d];
        let [a, b, c, d] = exp_avg_sq;
        let unsigned = [simd.shr::<15>(a), simd.shr::<7>(b), simd.shl::<1>(c), simd.shl::<9>(d)];
        self.exp_avg.codes.store_unit::<S, 1, STREAM>(
            simd,
            at / 4,
            LANES,
            [interleave(simd, signed)],
        );
        self.exp_avg_sq.codes.store_unit::<S, 1, STREAM>(
            simd,
            at / 4,
            LANES,
            [interleave(simd, unsigned)],
        );
        for (group, bits) in simd.first_lanes(scales.bits).into_iter().enumerate() {
            let moment = if group < GROUPS_PER_BLOCK { &self.exp_avg } else { &self.exp_avg_sq };
            moment.scales.set(at / GROUP + group % GROUPS_PER_BLOCK, Bf16(bits as u16));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far beyond the largest code the largest magnitude of a group comes, in last places of
    /// the root: for every mantissa.
    fn excess_max(codes_to_scale: f32, r_max: f32, shift: u32) -> u32 {
        let excess = |mantissa: u32| {
            let value = f32::from_bits(0x3f80_0000 | mantissa);
            let scale = f32::from_bits(((value * codes_to_scale).to_bits() + 0xffff) & 0xffff_0000);
            let q = value.mul_add(1.0 / scale, R_ZERO);
            (q.to_bits() >> shift).saturating_sub(r_max.to_bits() >> shift)
        };
        (0..1 << 23).map(excess).max().expect("there are mantissas")
    }

    /// `encode_exp_avg` leaves room for one last place, `encode_exp_avg_sq` for none.
    #[test]
    fn the_largest_magnitude_does_not_overflow_the_codes() {
        assert!(excess_max(CODES_TO_SCALES[0], EXP_AVG_R_MAX, 1) <= 1);
        assert_eq!(excess_max(CODES_TO_SCALES[2], EXP_AVG_SQ_R_MAX, 2), 0);
    }
}
