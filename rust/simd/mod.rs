//! Sixteen lanes of fp32 or 32-bit integers, on every ISA: what kernel bodies are written in.
//!
//! A body is generic over [`Simd`] and written once; [`crate::simd::isa::Isa::run`] compiles it for
//! each ISA. Every operation here gives the same bits on every ISA: integers, and the IEEE
//! operations add, mul, fma, div and sqrt. There are no approximations and no hardware conversions
//! to 16-bit types. (Automatic vectorisation of lane arrays was tried first: as fast for the simple
//! bodies, and 2 to 3 times slower where it chose the wrong loop.)
//!
//! The implementors are tokens: code that holds one has shown that the machine has the features, so
//! their methods are safe.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod fp_env;
pub mod isa;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod prefetch;
pub mod scalar;

/// Lanes of a vector: one AVX-512 register, two of AVX2, four of NEON.
pub const LANES: usize = 16;

/// Operations on 16 lanes. Names as in torch and in Rust's integers; all of them lane by lane.
pub trait Simd: Copy {
    /// 16 fp32.
    type F: Copy;
    /// 16 32-bit integers, signed or not as the operation says.
    type U: Copy;
    /// 16 truth values.
    type M: Copy;
    /// 16 fp64 sums.
    type D: Copy;

    /// Whether two units of 64 elements, both moments of each, fit into the registers together:
    /// then work on the one may stand between that on the other.
    const HOLDS_TWO_UNITS: bool;

    /// Reads 16 words.
    ///
    /// # Safety
    /// `from` is valid for reads of 64 bytes; it need not be aligned.
    unsafe fn load_u32(self, from: *const u32) -> Self::U;
    /// Writes 16 words.
    ///
    /// # Safety
    /// `to` is valid for writes of 64 bytes; it need not be aligned.
    unsafe fn store_u32(self, to: *mut u32, value: Self::U);
    /// Writes 16 words past the cache where the ISA can.
    ///
    /// # Safety
    /// `to` is valid for writes of 64 bytes and aligned to 64.
    unsafe fn stream_u32(self, to: *mut u32, value: Self::U);
    /// Reads 16 half words, zero-extended.
    ///
    /// # Safety
    /// `from` is valid for reads of 32 bytes; it need not be aligned.
    unsafe fn load_u16(self, from: *const u16) -> Self::U;
    /// Writes the low halves of 16 words.
    ///
    /// # Safety
    /// `to` is valid for writes of 32 bytes; it need not be aligned.
    unsafe fn store_u16(self, to: *mut u16, value: Self::U);
    /// Writes the low halves of 16 words past the cache where the ISA can.
    ///
    /// # Safety
    /// `to` is valid for writes of 32 bytes and aligned to 32.
    unsafe fn stream_u16(self, to: *mut u16, value: Self::U);

    /// The same number in all lanes.
    fn splat(self, value: f32) -> Self::F;
    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The square root, correctly rounded.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a < b`, false for a NaN.
    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    /// Whether either is a NaN.
    fn is_either_nan(self, a: Self::F, b: Self::F) -> Self::M;
    /// Whether the mask holds anywhere.
    fn any(self, mask: Self::M) -> bool;

    /// The same integer in all lanes.
    fn splat_u(self, value: u32) -> Self::U;
    /// `a + b`, wrapping.
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a - b`, wrapping.
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a * b`, wrapping.
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a + b` of each half word, wrapping.
    fn add_u16(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a * b` of each half word, wrapping.
    fn mul_u16(self, a: Self::U, b: Self::U) -> Self::U;
    /// Bits of both.
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    /// Bits of either.
    fn or(self, a: Self::U, b: Self::U) -> Self::U;
    /// Bits of one of the two.
    fn xor(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a << N`
    fn shl<const N: u32>(self, a: Self::U) -> Self::U;
    /// `a >> N`, zeros coming in.
    fn shr<const N: u32>(self, a: Self::U) -> Self::U;
    /// `a >> N`, copies of the sign coming in.
    fn sar<const N: u32>(self, a: Self::U) -> Self::U;
    /// The larger, unsigned.
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// The smaller, unsigned.
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a > b`, both below 2^31.
    fn gt_u(self, a: Self::U, b: Self::U) -> Self::M;
    /// `a == b`
    fn eq_u(self, a: Self::U, b: Self::U) -> Self::M;
    /// The bits of a float.
    fn bits(self, a: Self::F) -> Self::U;
    /// The float of these bits.
    fn of_bits(self, a: Self::U) -> Self::F;
    /// `a` where the mask holds, else `b`.
    fn select(self, mask: Self::M, a: Self::U, b: Self::U) -> Self::U;
    /// The largest lane, unsigned.
    fn max_lane(self, a: Self::U) -> u32;
    /// The largest lane of each, unsigned: those of `a`, `b`, `c`, `d` are lanes 0 to 3, and again
    /// 4 to 7, and so on.
    fn max_lanes(self, a: Self::U, b: Self::U, c: Self::U, d: Self::U) -> Self::U;
    /// Lane `I` of every four lanes, in all four; `I < 4`.
    fn splat_lane<const I: i32>(self, a: Self::U) -> Self::U;
    /// Those of 32 elements in memory order, `a` and then `b`, that have an even and an odd index.
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2];
    /// The other way round.
    fn zip(self, even: Self::U, odd: Self::U) -> [Self::U; 2];
    /// Lanes 0 to 3.
    fn first_lanes(self, a: Self::U) -> [u32; 4];

    /// Sums of nothing.
    fn zero_sums(self) -> Self::D;
    /// `sums + a * a`, widened to fp64 and rounded once.
    fn add_squares(self, sums: Self::D, a: Self::F) -> Self::D;
    /// The sums, lane by lane.
    fn sums(self, sums: Self::D) -> [f64; LANES];

    /// The bits of `a` where `mask` has ones, else those of `b`: one operation on AVX-512.
    #[inline(always)]
    fn merge(self, mask: u32, a: Self::U, b: Self::U) -> Self::U {
        self.or(self.and(a, self.splat_u(mask)), self.and(b, self.splat_u(!mask)))
    }

    /// [`Simd::select`] for floats.
    #[inline(always)]
    fn select_f(self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F {
        self.of_bits(self.select(mask, self.bits(a), self.bits(b)))
    }

    /// Whether it is a NaN.
    #[inline(always)]
    fn is_nan(self, a: Self::F) -> Self::M {
        self.is_either_nan(a, a)
    }

    /// The magnitude's bits: those of NaNs are above infinity's, and those above every finite
    /// number's.
    #[inline(always)]
    fn magnitude(self, a: Self::F) -> Self::U {
        self.and(self.bits(a), self.splat_u(0x7fff_ffff))
    }
}
