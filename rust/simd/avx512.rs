//! AVX-512 F, BW, DQ, VL: one register per vector.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Shows that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The token.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

// SAFETY (every block below): the token shows that the features are there, and register operations
// have no other precondition. Where memory is touched, the caller vouches for it as the trait says.
#[expect(clippy::undocumented_unsafe_blocks, reason = "one argument for all, above")]
impl Simd for Avx512 {
    type F = __m512;
    type U = __m512i;
    type M = __mmask16;
    type D = [__m512d; 2];
    const HOLDS_TWO_UNITS: bool = true;

    #[inline(always)]
    unsafe fn load_u32(self, from: *const u32) -> Self::U {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_u32(self, to: *mut u32, value: Self::U) {
        unsafe { _mm512_storeu_si512(to.cast(), value) };
    }
    #[inline(always)]
    unsafe fn stream_u32(self, to: *mut u32, value: Self::U) {
        unsafe { _mm512_stream_si512(to.cast(), value) };
    }
    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> Self::U {
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, value: Self::U) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(value)) };
    }
    #[inline(always)]
    unsafe fn stream_u16(self, to: *mut u16, value: Self::U) {
        unsafe { _mm256_stream_si256(to.cast(), _mm512_cvtepi32_epi16(value)) };
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    fn is_either_nan(self, a: Self::F, b: Self::F) -> Self::M {
        unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b) }
    }
    #[inline(always)]
    fn any(self, mask: Self::M) -> bool {
        mask != 0
    }
    #[inline(always)]
    fn splat_u(self, value: u32) -> Self::U {
        unsafe { _mm512_set1_epi32(value.cast_signed()) }
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    fn add_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_add_epi16(a, b) }
    }
    #[inline(always)]
    fn mul_u16(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_mullo_epi16(a, b) }
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { _mm512_srli_epi32::<N>(a) }
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        unsafe { _mm512_srai_epi32::<N>(a) }
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_max_epu32(a, b) }
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_min_epu32(a, b) }
    }
    #[inline(always)]
    fn gt_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { _mm512_cmpgt_epi32_mask(a, b) }
    }
    #[inline(always)]
    fn eq_u(self, a: Self::U, b: Self::U) -> Self::M {
        unsafe { _mm512_cmpeq_epi32_mask(a, b) }
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    fn select(self, mask: Self::M, a: Self::U, b: Self::U) -> Self::U {
        unsafe { _mm512_mask_blend_epi32(mask, b, a) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::U) -> u32 {
        unsafe { _mm512_reduce_max_epu32(a) }
    }
    #[inline(always)]
    fn max_lanes(self, a: Self::U, b: Self::U, c: Self::U, d: Self::U) -> Self::U {
        unsafe {
            let ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            let quads =
                _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
            let halves =
                _mm512_max_epu32(quads, _mm512_shuffle_i32x4::<0b01_00_11_10>(quads, quads));
            _mm512_max_epu32(halves, _mm512_shuffle_i32x4::<0b10_11_00_01>(halves, halves))
        }
    }
    #[inline(always)]
    fn splat_lane<const I: i32>(self, a: Self::U) -> Self::U {
        unsafe {
            match I {
                0 => _mm512_shuffle_epi32::<0b00_00_00_00>(a),
                1 => _mm512_shuffle_epi32::<0b01_01_01_01>(a),
                2 => _mm512_shuffle_epi32::<0b10_10_10_10>(a),
                _ => _mm512_shuffle_epi32::<0b11_11_11_11>(a),
            }
        }
    }
    #[inline(always)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
        }
    }
    #[inline(always)]
    fn zip(self, even: Self::U, odd: Self::U) -> [Self::U; 2] {
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            [_mm512_permutex2var_epi32(even, low, odd), _mm512_permutex2var_epi32(even, high, odd)]
        }
    }
    #[inline(always)]
    fn first_lanes(self, a: Self::U) -> [u32; 4] {
        unsafe { std::mem::transmute(_mm512_castsi512_si128(a)) }
    }

    #[inline(always)]
    fn zero_sums(self) -> Self::D {
        unsafe { [_mm512_setzero_pd(); 2] }
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::D, a: Self::F) -> Self::D {
        unsafe {
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(a));
            [_mm512_fmadd_pd(low, low, sums[0]), _mm512_fmadd_pd(high, high, sums[1])]
        }
    }
    #[inline(always)]
    fn sums(self, sums: Self::D) -> [f64; LANES] {
        unsafe { std::mem::transmute(sums) }
    }
}
