//! `q8`: both moments in 8 bits per element and a bf16 scale per 32 elements, 2.125 B per parameter.
//!
//! A code `c` stands for `c^2 * scale`, with its sign for `exp_avg` (|c| <= 127) and without for `exp_avg_sq` (c <= 255):
//! companding by the square root, so the relative step is 2/c and the range of a group 1.6e4 and 6.5e4. With `q = |x| / scale` and
//! `c = floor(sqrt(q))`, x lies between the codes c and c + 1, which stand 2c + 1 apart; it is rounded up with probability
//! `(q - c^2) / (2c + 1)`: unbiased in the decoded domain, and no division per element.
//!
//! - `exp_avg_sq > 0` is coded to at least 1: a 0 beside a nonzero `exp_avg` would blow the update up.
//! - A scale is the group's largest magnitude over the largest code squared, rounded *up* to bf16, so that no element
//!   overflows the codes. The frozen bf16 scale does not freeze the decay: codes shrink under it, in expectation exactly.
//! - A nonzero scale is at least the smallest normal number, so its reciprocal is finite; a group of zeros has scale 0.
//!
//! Compared with softsign companding of `exp_avg` (FlashOptim): equal at a uniform group, 9 times less error
//! of the update where the magnitudes within a group spread over 1e3, cheaper by a division each way.
//!
//! Layout: 64 elements are 64 bytes, byte `4 * lane + quarter` is element `16 * quarter + lane`, so that a quarter is one shift and
//! mask of sixteen 32-bit words. The last block of a parameter is padded.

use crate::{
    cursor::Cursor,
    element::Bf16,
    simd::{LANES, Simd},
    state::{BLOCK, MomentLanes, Moments, lanes_in},
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

/// The bf16 number at or above a non-negative finite `value`, at most the largest finite one.
#[inline(always)]
fn round_up(value: f32) -> Bf16 {
    let rounded = value.to_bits().wrapping_add(0xffff) >> 16;
    Bf16(rounded.min(u32::from(Bf16::MAX.0)) as u16)
}

/// The scale of a group whose largest magnitude has these bits.
#[inline(always)]
fn scale_of(magnitude_bits: u32, code_max: f32) -> Bf16 {
    let is_nan = magnitude_bits > 0x7f80_0000;
    let magnitude = f32::from_bits(magnitude_bits.min(f32::MAX.to_bits()));
    let scale = round_up((magnitude * (1.0 / (code_max * code_max))).max(f32::MIN_POSITIVE));
    if is_nan {
        Bf16::NAN
    } else if magnitude_bits == 0 {
        Bf16(0)
    } else {
        scale
    }
}

/// The codes of magnitudes that are `q` scales: `floor(sqrt(q))` or one more, by 16 uniform bits.
#[inline(always)]
fn codes_of<S: Simd>(simd: S, q: S::F, noise: S::U, code_max: f32) -> S::F {
    let one = simd.splat(1.0);
    let code = simd.floor(simd.sqrt(q));
    let minus_code = simd.from_bits(simd.xor(simd.bits(code), simd.splat_u(0x8000_0000)));
    let missing = simd.mul(simd.fma(code, minus_code, q), simd.splat(65536.0));
    let uniform = simd.add(simd.to_f(noise), simd.splat(0.5));
    let apart = simd.fma(code, simd.splat(2.0), one);
    let up = simd.lt(simd.mul(uniform, apart), missing);
    simd.at_most(simd.select_f(up, simd.add(code, one), code), simd.splat(code_max))
}

/// Small integers held in fp32, in two's complement: 1.5 * 2^23 puts the units at the last place. Only the low byte counts.
#[inline(always)]
fn integers<S: Simd>(simd: S, codes: S::F) -> S::U {
    simd.bits(simd.add(codes, simd.splat(12_582_912.0)))
}

#[inline(always)]
fn largest_magnitude<S: Simd>(simd: S, vectors: &[S::F]) -> u32 {
    let mut largest = simd.splat_u(0);
    for &vector in vectors {
        largest = simd.max_u(largest, simd.magnitude(vector));
    }
    simd.max_lane(largest)
}

/// Byte `QUARTER` of each word, with its sign.
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

    /// Sets the scales of the block at `at` from its values and returns the reciprocal of each quarter's, 0 for a group
    /// of zeros.
    #[inline(always)]
    fn set_scales<S: Simd>(&self, simd: S, at: usize, values: &[S::F; QUARTERS], code_max: f32) -> [S::F; QUARTERS] {
        let mut reciprocals = [simd.splat(0.0); QUARTERS];
        for group in 0..GROUPS_PER_BLOCK {
            let quarters = group * QUARTERS_PER_GROUP..(group + 1) * QUARTERS_PER_GROUP;
            let scale = scale_of(largest_magnitude(simd, &values[quarters.clone()]), code_max);
            self.scales.set(at / GROUP + group, scale);
            let reciprocal = simd.splat(if scale.0 == 0 { 0.0 } else { 1.0 / scale.to_f32() });
            reciprocals[quarters].fill(reciprocal);
        }
        reciprocals
    }
}

/// `values` with zeros from lane `count` on.
#[inline(always)]
fn keep<S: Simd>(simd: S, values: S::F, count: usize) -> S::F {
    let mut lanes = [0_u32; LANES];
    // SAFETY: `lanes` holds LANES words.
    unsafe { simd.store_u32(lanes.as_mut_ptr(), simd.bits(values)) };
    lanes[count..].fill(0);
    // SAFETY: as above.
    simd.from_bits(unsafe { simd.load_u32(lanes.as_ptr()) })
}

impl Moments<QUARTERS> for Q8<'_> {
    const STOCHASTIC: bool = true;

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
    fn load<S: Simd>(&self, simd: S, at: usize, _count: usize) -> MomentLanes<S, QUARTERS> {
        let (signed, signed_scales) = self.exp_avg.load(simd, at);
        let (unsigned, unsigned_scales) = self.exp_avg_sq.load(simd, at);
        // Padding holds zeros: `store` keeps it so.
        let (mut exp_avg, mut exp_avg_sq) = ([simd.splat(0.0); QUARTERS], [simd.splat(0.0); QUARTERS]);
        for quarter in 0..QUARTERS {
            let code = simd.to_f(signed_byte(simd, signed, quarter));
            let magnitude = simd.from_bits(simd.magnitude(code));
            exp_avg[quarter] = simd.mul(simd.mul(code, magnitude), signed_scales[quarter]);
            let code = simd.to_f(byte(simd, unsigned, quarter));
            exp_avg_sq[quarter] = simd.mul(simd.mul(code, code), unsigned_scales[quarter]);
        }
        MomentLanes { exp_avg, exp_avg_sq }
    }

    #[inline(always)]
    fn store<S: Simd>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        moments: MomentLanes<S, QUARTERS>,
        noise: [S::U; QUARTERS],
    ) {
        let MomentLanes { mut exp_avg, mut exp_avg_sq } = moments;
        if count < BLOCK {
            for quarter in 0..QUARTERS {
                let lanes = lanes_in(count, quarter);
                exp_avg[quarter] = keep(simd, exp_avg[quarter], lanes);
                exp_avg_sq[quarter] = keep(simd, exp_avg_sq[quarter], lanes);
            }
        }
        let signed_reciprocals = self.exp_avg.set_scales(simd, at, &exp_avg, EXP_AVG_CODE_MAX);
        let unsigned_reciprocals = self.exp_avg_sq.set_scales(simd, at, &exp_avg_sq, EXP_AVG_SQ_CODE_MAX);
        let max = simd.splat(f32::MAX);
        // The integers of the codes 0 and 1 are large, but in this order.
        let least = integers(simd, simd.splat(1.0));
        let (mut signed, mut unsigned) = ([least; QUARTERS], [least; QUARTERS]);
        for quarter in 0..QUARTERS {
            let magnitude = simd.at_most(simd.from_bits(simd.magnitude(exp_avg[quarter])), max);
            let q = simd.mul(magnitude, signed_reciprocals[quarter]);
            let code = codes_of(simd, q, simd.and(noise[quarter], simd.splat_u(0xffff)), EXP_AVG_CODE_MAX);
            let sign = simd.and(simd.bits(exp_avg[quarter]), simd.splat_u(0x8000_0000));
            signed[quarter] = integers(simd, simd.from_bits(simd.or(simd.bits(code), sign)));

            let value = simd.at_most(exp_avg_sq[quarter], max);
            let q = simd.mul(value, unsigned_reciprocals[quarter]);
            let code = codes_of(simd, q, simd.shr::<16>(noise[quarter]), EXP_AVG_SQ_CODE_MAX);
            let code = integers(simd, code);
            let is_positive = simd.lt(simd.splat(0.0), exp_avg_sq[quarter]);
            unsigned[quarter] = simd.select(is_positive, simd.max_u(code, least), code);
        }
        self.exp_avg.codes.store(simd, at / 4, LANES, pack(simd, signed));
        self.exp_avg_sq.codes.store(simd, at / 4, LANES, pack(simd, unsigned));
    }
}
