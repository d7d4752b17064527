//! The baseline: arrays and loops. Right on every machine; on x86-64 without FMA each `fma` is a
//! call into libm.
//!
//! Every operation is a function of its own. Inlined into all kernels, they were 40 % of the time
//! that the crate takes to compile.

use super::{LANES, Simd};

/// The token of the baseline, which every machine has.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

#[inline(always)]
fn zip<A: Copy, B: Copy, R>(a: [A; LANES], b: [B; LANES], f: impl Fn(A, B) -> R) -> [R; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// `f` of the low halves and of the high ones.
#[inline(always)]
fn each_half(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type U = [u32; LANES];
    type M = [bool; LANES];
    type D = [f64; LANES];
    const HOLDS_TWO_UNITS: bool = false;

    #[inline(never)]
    unsafe fn load_u32(self, from: *const u32) -> Self::U {
        // SAFETY: the caller vouches for 64 bytes, and any bits are integers.
        unsafe { from.cast::<Self::U>().read_unaligned() }
    }
    #[inline(never)]
    unsafe fn store_u32(self, to: *mut u32, value: Self::U) {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { to.cast::<Self::U>().write_unaligned(value) };
    }
    #[inline(never)]
    unsafe fn stream_u32(self, to: *mut u32, value: Self::U) {
        // SAFETY: the caller vouches for more than a plain store needs.
        unsafe { self.store_u32(to, value) };
    }
    #[inline(never)]
    unsafe fn load_u16(self, from: *const u16) -> Self::U {
        // SAFETY: the caller vouches for 32 bytes, and any bits are integers.
        unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(u32::from)
    }
    #[inline(never)]
    unsafe fn store_u16(self, to: *mut u16, value: Self::U) {
        // SAFETY: the caller vouches for 32 bytes.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(value.map(|word| word as u16)) };
    }
    #[inline(never)]
    unsafe fn stream_u16(self, to: *mut u16, value: Self::U) {
        // SAFETY: the caller vouches for more than a plain store needs.
        unsafe { self.store_u16(to, value) };
    }

    #[inline(never)]
    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(never)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(never)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(never)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(never)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(never)]
    fn sqrt(self, a: Self::F) -> Self::F {
        a.map(f32::sqrt)
    }
    #[inline(never)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        zip(a, b, |a, b| a < b)
    }
    #[inline(never)]
    fn is_either_nan(self, a: Self::F, b: Self::F) -> Self::M {
        std::array::from_fn(|i| a[i].is_nan() || b[i].is_nan())
    }
    #[inline(never)]
    fn any(self, mask: Self::M) -> bool {
        mask.contains(&true)
    }
    #[inline(never)]
    fn splat_u(self, value: u32) -> Self::U {
        [value; LANES]
    }
    #[inline(never)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_add)
    }
    #[inline(never)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_sub)
    }
    #[inline(never)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_mul)
    }
    #[inline(never)]
    fn add_u16(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| each_half(a, b, u16::wrapping_add))
    }
    #[inline(never)]
    fn mul_u16(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| each_half(a, b, u16::wrapping_mul))
    }
    #[inline(never)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a & b)
    }
    #[inline(never)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a | b)
    }
    #[inline(never)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a ^ b)
    }
    #[inline(never)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|a| a << N)
    }
    #[inline(never)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|a| a >> N)
    }
    #[inline(never)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|a| (a as i32 >> N) as u32)
    }
    #[inline(never)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::max)
    }
    #[inline(never)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::min)
    }
    #[inline(never)]
    fn gt_u(self, a: Self::U, b: Self::U) -> Self::M {
        zip(a, b, |a, b| a > b)
    }
    #[inline(never)]
    fn eq_u(self, a: Self::U, b: Self::U) -> Self::M {
        zip(a, b, |a, b| a == b)
    }
    #[inline(never)]
    fn bits(self, a: Self::F) -> Self::U {
        a.map(f32::to_bits)
    }
    #[inline(never)]
    fn of_bits(self, a: Self::U) -> Self::F {
        a.map(f32::from_bits)
    }
    #[inline(never)]
    fn select(self, mask: Self::M, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| if mask[i] { a[i] } else { b[i] })
    }
    #[inline(never)]
    fn max_lane(self, a: Self::U) -> u32 {
        a.into_iter().fold(0, u32::max)
    }

    #[inline(never)]
    fn max_lanes(self, a: Self::U, b: Self::U, c: Self::U, d: Self::U) -> Self::U {
        let largest = [a, b, c, d].map(|lanes| self.max_lane(lanes));
        std::array::from_fn(|i| largest[i % 4])
    }
    #[inline(never)]
    fn splat_lane<const I: i32>(self, a: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i / 4 * 4 + I as usize])
    }
    #[inline(never)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        let at = |i: usize| if i < LANES { a[i] } else { b[i - LANES] };
        [std::array::from_fn(|i| at(2 * i)), std::array::from_fn(|i| at(2 * i + 1))]
    }
    #[inline(never)]
    fn zip(self, even: Self::U, odd: Self::U) -> [Self::U; 2] {
        let at = |i: usize| if i.is_multiple_of(2) { even[i / 2] } else { odd[i / 2] };
        [std::array::from_fn(at), std::array::from_fn(|i| at(LANES + i))]
    }
    #[inline(never)]
    fn first_lanes(self, a: Self::U) -> [u32; 4] {
        [a[0], a[1], a[2], a[3]]
    }

    #[inline(never)]
    fn zero_sums(self) -> Self::D {
        [0.0; LANES]
    }
    #[inline(never)]
    fn add_squares(self, sums: Self::D, a: Self::F) -> Self::D {
        zip(sums, a, |sum, a| f64::from(a).mul_add(f64::from(a), sum))
    }
    #[inline(never)]
    fn sums(self, sums: Self::D) -> [f64; LANES] {
        sums
    }
}
