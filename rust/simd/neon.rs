//! NEON: four registers per vector.

use std::arch::aarch64::*;

use super::{LANES, Simd};

/// Shows that the machine has NEON, the baseline of aarch64.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// The token.
    ///
    /// # Safety
    /// The machine has NEON.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

/// Registers of a vector.
const PARTS: usize = 4;

/// One expression per register.
macro_rules! parts {
    (|$i:ident| $each:expr) => {
        [
            {
                let $i = 0;
                $each
            },
            {
                let $i = 1;
                $each
            },
            {
                let $i = 2;
                $each
            },
            {
                let $i = 3;
                $each
            },
        ]
    };
}

// SAFETY (every block below): the token shows that the features are there, and register operations
// have no other precondition. Where memory is touched, the caller vouches for it as the trait says,
// and the parts lie within.
#[expect(clippy::undocumented_unsafe_blocks, reason = "one argument for all, above")]
impl Simd for Neon {
    type F = [float32x4_t; PARTS];
    type U = [uint32x4_t; PARTS];
    type M = [uint32x4_t; PARTS];
    type D = [[float64x2_t; 2]; PARTS];
    const HOLDS_TWO_UNITS: bool = false;

    #[inline(always)]
    unsafe fn load_u32(self, from: *const u32) -> Self::U {
        unsafe { parts!(|i| vld1q_u32(from.add(4 * i))) }
    }
    #[inline(always)]
    unsafe fn store_u32(self, to: *mut u32, value: Self::U) {
        unsafe { parts!(|i| vst1q_u32(to.add(4 * i), value[i])) };
    }
    #[inline(always)]
    unsafe fn stream_u32(self, to: *mut u32, value: Self::U) {
        unsafe { self.store_u32(to, value) };
    }
    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> Self::U {
        unsafe { parts!(|i| vmovl_u16(vld1_u16(from.add(4 * i)))) }
    }
    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, value: Self::U) {
        unsafe { parts!(|i| vst1_u16(to.add(4 * i), vmovn_u32(value[i]))) };
    }
    #[inline(always)]
    unsafe fn stream_u16(self, to: *mut u16, value: Self::U) {
        unsafe { self.store_u16(to, value) };
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        unsafe { [vdupq_n_f32(value); PARTS] }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| vaddq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| vmulq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { parts!(|i| vfmaq_f32(c[i], a[i], b[i])) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| vdivq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        unsafe { parts!(|i| vsqrtq_f32(a[i])) }
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { parts!(|i| vcltq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    fn is_either_nan(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { parts!(|i| vmvnq_u32(vandq_u32(vceqq_f32(a[i], a[i]), vceqq_f32(b[i], b[i])))) }
    }
    #[inline(always)]
    fn any(self, mask: Self::M) -> bool {
        self.max_lane(mask) != 0
    }
    #[inline(always)]
    fn splat_u(self, value: u32) -> Self::U {
        unsafe { [vdupq_n_u32(value); PARTS] }
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vaddq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vsubq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vmulq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn add_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| of_halves(vaddq_u16(halves(a[i]), halves(b[i])))) }
    }
    #[inline(always)]
    fn mul_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| of_halves(vmulq_u16(halves(a[i]), halves(b[i])))) }
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vandq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vorrq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| veorq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| vshlq_u32(a[i], vdupq_n_s32(N.cast_signed()))) }
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| vshlq_u32(a[i], vdupq_n_s32(-N.cast_signed()))) }
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe {
            parts!(|i| vreinterpretq_u32_s32(vshlq_s32(
                vreinterpretq_s32_u32(a[i]),
                vdupq_n_s32(-N.cast_signed())
            )))
        }
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vmaxq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vminq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn gt_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { parts!(|i| vcgtq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn eq_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { parts!(|i| vceqq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        unsafe { parts!(|i| vreinterpretq_u32_f32(a[i])) }
    }
    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        unsafe { parts!(|i| vreinterpretq_f32_u32(a[i])) }
    }
    #[inline(always)]
    fn select(self, mask: Self::M, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| vbslq_u32(mask[i], a[i], b[i])) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::U) -> u32 {
        unsafe { vmaxvq_u32(vmaxq_u32(vmaxq_u32(a[0], a[1]), vmaxq_u32(a[2], a[3]))) }
    }
    #[inline(always)]
    fn max_lanes(self, a: Self::U, b: Self::U, c: Self::U, d: Self::U) -> Self::U {
        unsafe {
            let ab = vpmaxq_u32(four_parts(a), four_parts(b));
            let cd = vpmaxq_u32(four_parts(c), four_parts(d));
            [vpmaxq_u32(ab, cd); PARTS]
        }
    }
    #[inline(always)]
    fn splat_lane<const I: i32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| vdupq_laneq_u32::<I>(a[i])) }
    }
    #[inline(always)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        unsafe {
            [
                [
                    vuzp1q_u32(a[0], a[1]),
                    vuzp1q_u32(a[2], a[3]),
                    vuzp1q_u32(b[0], b[1]),
                    vuzp1q_u32(b[2], b[3]),
                ],
                [
                    vuzp2q_u32(a[0], a[1]),
                    vuzp2q_u32(a[2], a[3]),
                    vuzp2q_u32(b[0], b[1]),
                    vuzp2q_u32(b[2], b[3]),
                ],
            ]
        }
    }
    #[inline(always)]
    fn zip(self, even: Self::U, odd: Self::U) -> [Self::U; 2] {
        unsafe {
            let (low, high) =
                (parts!(|i| vzip1q_u32(even[i], odd[i])), parts!(|i| vzip2q_u32(even[i], odd[i])));
            [[low[0], high[0], low[1], high[1]], [low[2], high[2], low[3], high[3]]]
        }
    }
    #[inline(always)]
    fn first_lanes(self, a: Self::U) -> [u32; 4] {
        unsafe { std::mem::transmute(a[0]) }
    }

    #[inline(always)]
    fn zero_sums(self) -> Self::D {
        unsafe { [[vdupq_n_f64(0.0); 2]; PARTS] }
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::D, a: Self::F) -> Self::D {
        unsafe {
            parts!(|i| {
                let (low, high) = (vcvt_f64_f32(vget_low_f32(a[i])), vcvt_high_f64_f32(a[i]));
                [vfmaq_f64(sums[i][0], low, low), vfmaq_f64(sums[i][1], high, high)]
            })
        }
    }
    #[inline(always)]
    fn sums(self, sums: Self::D) -> [f64; LANES] {
        unsafe { std::mem::transmute(sums) }
    }
}

/// The words as half words.
#[inline(always)]
fn halves(words: uint32x4_t) -> uint16x8_t {
    // SAFETY: only reached through the token, which shows that NEON is there.
    unsafe { vreinterpretq_u16_u32(words) }
}

/// The half words as words.
#[inline(always)]
fn of_halves(halves: uint16x8_t) -> uint32x4_t {
    // SAFETY: only reached through the token, which shows that NEON is there.
    unsafe { vreinterpretq_u32_u16(halves) }
}

/// The largest of the four registers, lane by lane.
#[inline(always)]
fn four_parts(a: [uint32x4_t; PARTS]) -> uint32x4_t {
    // SAFETY: only reached through the token, which shows that NEON is there.
    unsafe { vmaxq_u32(vmaxq_u32(a[0], a[1]), vmaxq_u32(a[2], a[3])) }
}
