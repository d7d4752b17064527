//! AVX2 with FMA: two registers per vector.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Shows that the machine has AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The token.
    ///
    /// # Safety
    /// The machine has AVX2 and FMA.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

/// Registers of a vector.
const PARTS: usize = 2;

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
        ]
    };
}

// SAFETY (every block below): the token shows that the features are there, and register operations
// have no other precondition. Where memory is touched, the caller vouches for it as the trait says,
// and the parts lie within.
#[expect(clippy::undocumented_unsafe_blocks, reason = "one argument for all, above")]
impl Simd for Avx2 {
    type F = [__m256; PARTS];
    type U = [__m256i; PARTS];
    type M = [__m256i; PARTS];
    type D = [__m256d; 4];
    const HOLDS_TWO_UNITS: bool = false;

    #[inline(always)]
    unsafe fn load_u32(self, from: *const u32) -> Self::U {
        unsafe { parts!(|i| _mm256_loadu_si256(from.add(8 * i).cast())) }
    }
    #[inline(always)]
    unsafe fn store_u32(self, to: *mut u32, value: Self::U) {
        unsafe { parts!(|i| _mm256_storeu_si256(to.add(8 * i).cast(), value[i])) };
    }
    #[inline(always)]
    unsafe fn stream_u32(self, to: *mut u32, value: Self::U) {
        unsafe { parts!(|i| _mm256_stream_si256(to.add(8 * i).cast(), value[i])) };
    }
    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> Self::U {
        unsafe { parts!(|i| _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, value: Self::U) {
        unsafe { _mm256_storeu_si256(to.cast(), low_halves(value)) };
    }
    #[inline(always)]
    unsafe fn stream_u16(self, to: *mut u16, value: Self::U) {
        unsafe { _mm256_stream_si256(to.cast(), low_halves(value)) };
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(value); PARTS] }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| _mm256_add_ps(a[i], b[i])) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| _mm256_mul_ps(a[i], b[i])) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { parts!(|i| _mm256_fmadd_ps(a[i], b[i], c[i])) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { parts!(|i| _mm256_div_ps(a[i], b[i])) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        unsafe { parts!(|i| _mm256_sqrt_ps(a[i])) }
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { parts!(|i| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i]))) }
    }
    #[inline(always)]
    fn is_either_nan(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { parts!(|i| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a[i], b[i]))) }
    }
    #[inline(always)]
    fn any(self, mask: Self::M) -> bool {
        unsafe { _mm256_movemask_epi8(_mm256_or_si256(mask[0], mask[1])) != 0 }
    }
    #[inline(always)]
    fn splat_u(self, value: u32) -> Self::U {
        unsafe { [_mm256_set1_epi32(value.cast_signed()); PARTS] }
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_add_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_sub_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_mullo_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    fn add_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_add_epi16(a[i], b[i])) }
    }
    #[inline(always)]
    fn mul_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_mullo_epi16(a[i], b[i])) }
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_and_si256(a[i], b[i])) }
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_or_si256(a[i], b[i])) }
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_xor_si256(a[i], b[i])) }
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_sll_epi32(a[i], _mm_cvtsi32_si128(N.cast_signed()))) }
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_srl_epi32(a[i], _mm_cvtsi32_si128(N.cast_signed()))) }
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_sra_epi32(a[i], _mm_cvtsi32_si128(N.cast_signed()))) }
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_max_epu32(a[i], b[i])) }
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_min_epu32(a[i], b[i])) }
    }
    #[inline(always)]
    fn gt_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { parts!(|i| _mm256_cmpgt_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    fn eq_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { parts!(|i| _mm256_cmpeq_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        unsafe { parts!(|i| _mm256_castps_si256(a[i])) }
    }
    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        unsafe { parts!(|i| _mm256_castsi256_ps(a[i])) }
    }
    #[inline(always)]
    fn select(self, mask: Self::M, a: Self::U, b: Self::U) -> Self::U {
        unsafe { parts!(|i| _mm256_blendv_epi8(b[i], a[i], mask[i])) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::U) -> u32 {
        unsafe {
            let pair = _mm256_max_epu32(a[0], a[1]);
            let four =
                _mm_max_epu32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256::<1>(pair));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            _mm_cvtsi128_si32(one).cast_unsigned()
        }
    }
    #[inline(always)]
    fn max_lanes(self, a: Self::U, b: Self::U, c: Self::U, d: Self::U) -> Self::U {
        unsafe {
            let (a, b) = (_mm256_max_epu32(a[0], a[1]), _mm256_max_epu32(b[0], b[1]));
            let (c, d) = (_mm256_max_epu32(c[0], c[1]), _mm256_max_epu32(d[0], d[1]));
            let ab = _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let cd = _mm256_max_epu32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            let quads =
                _mm256_max_epu32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
            [_mm256_max_epu32(quads, _mm256_permute2x128_si256::<0x01>(quads, quads)); PARTS]
        }
    }
    #[inline(always)]
    fn splat_lane<const I: i32>(self, a: Self::U) -> Self::U {
        unsafe {
            parts!(|i| match I {
                0 => _mm256_shuffle_epi32::<0b00_00_00_00>(a[i]),
                1 => _mm256_shuffle_epi32::<0b01_01_01_01>(a[i]),
                2 => _mm256_shuffle_epi32::<0b10_10_10_10>(a[i]),
                _ => _mm256_shuffle_epi32::<0b11_11_11_11>(a[i]),
            })
        }
    }
    #[inline(always)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        unsafe {
            let both = [a, b];
            let (low, high) = (
                parts!(|i| _mm256_castsi256_ps(both[i][0])),
                parts!(|i| _mm256_castsi256_ps(both[i][1])),
            );
            let even = parts!(|i| _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(
                low[i], high[i]
            )));
            let odd = parts!(|i| _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(
                low[i], high[i]
            )));
            [
                parts!(|i| _mm256_permute4x64_epi64::<0b11_01_10_00>(even[i])),
                parts!(|i| _mm256_permute4x64_epi64::<0b11_01_10_00>(odd[i])),
            ]
        }
    }
    #[inline(always)]
    fn zip(self, even: Self::U, odd: Self::U) -> [Self::U; 2] {
        unsafe {
            parts!(|i| {
                let low = _mm256_unpacklo_epi32(even[i], odd[i]);
                let high = _mm256_unpackhi_epi32(even[i], odd[i]);
                [
                    _mm256_permute2x128_si256::<0x20>(low, high),
                    _mm256_permute2x128_si256::<0x31>(low, high),
                ]
            })
        }
    }
    #[inline(always)]
    fn first_lanes(self, a: Self::U) -> [u32; 4] {
        unsafe { std::mem::transmute(_mm256_castsi256_si128(a[0])) }
    }

    #[inline(always)]
    fn zero_sums(self) -> Self::D {
        unsafe { [_mm256_setzero_pd(); 4] }
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::D, a: Self::F) -> Self::D {
        unsafe {
            [
                add_square(sums[0], _mm256_castps256_ps128(a[0])),
                add_square(sums[1], _mm256_extractf128_ps::<1>(a[0])),
                add_square(sums[2], _mm256_castps256_ps128(a[1])),
                add_square(sums[3], _mm256_extractf128_ps::<1>(a[1])),
            ]
        }
    }
    #[inline(always)]
    fn sums(self, sums: Self::D) -> [f64; LANES] {
        unsafe { std::mem::transmute(sums) }
    }
}

/// The low halves of 16 words, in order.
#[inline(always)]
fn low_halves(words: [__m256i; PARTS]) -> __m256i {
    // SAFETY: only reached through the token, which shows that AVX2 is there.
    unsafe {
        let mask = _mm256_set1_epi32(0xffff);
        let packed =
            _mm256_packus_epi32(_mm256_and_si256(words[0], mask), _mm256_and_si256(words[1], mask));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

#[inline(always)]
fn add_square(sum: __m256d, half: __m128) -> __m256d {
    // SAFETY: only reached through the token, which shows that AVX2 and FMA are there.
    unsafe {
        let wide = _mm256_cvtps_pd(half);
        _mm256_fmadd_pd(wide, wide, sum)
    }
}
