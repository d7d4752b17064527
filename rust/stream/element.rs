//! Element types: fp32, bf16, fp16, and how each widens to fp32 and narrows from it.
//!
//! Both conversions are written with integer operations and exact multiplications only, so that
//! they vectorise on every ISA and give the same bits on each. Hardware conversions do not:
//! `vcvtneps2bf16` flushes subnormals to zero. A NaN narrows to one canonical quiet NaN, whatever
//! its sign and payload.

use std::fmt;

use crate::simd::Simd;

/// Brain float: the upper half of an fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// IEEE half precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

impl Bf16 {
    /// The NaN that every NaN narrows to.
    pub const NAN: Self = Self(0x7fc0);
    /// The largest finite value.
    pub const MAX: Self = Self(0x7f7f);

    /// The value, exactly.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

impl F16 {
    /// The NaN that every NaN narrows to.
    pub const NAN: Self = Self(0x7e00);
}

/// The element types that cross the boundary to Python, with torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// fp32
    Float32,
    /// bf16
    BFloat16,
    /// fp16
    Float16,
    /// Trailing bits of a split master.
    Int16,
    /// Fingerprints of a split master.
    Int32,
    /// 8-bit moment codes.
    Uint8,
    /// Sums of squares.
    Float64,
}

impl Dtype {
    /// Every dtype, for messages and tests.
    pub const ALL: [Self; 7] = [
        Self::Float32,
        Self::BFloat16,
        Self::Float16,
        Self::Int16,
        Self::Int32,
        Self::Uint8,
        Self::Float64,
    ];

    /// torch's name without the `torch.` prefix.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::BFloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Uint8 => "uint8",
            Self::Float64 => "float64",
        }
    }

    /// The dtype that torch calls `name`, if it is one of ours.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes per element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Float32 | Self::Int32 => 4,
            Self::BFloat16 | Self::Float16 | Self::Int16 => 2,
            Self::Uint8 => 1,
            Self::Float64 => 8,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a kernel loads and stores lane by lane: 4 or 2 bytes of plain data in the low bits of a
/// 32-bit lane.
pub trait Lane: Copy + Default + Send + Sync + 'static {
    /// Reads 16 elements, zero-extended.
    ///
    /// # Safety
    /// `from` is valid for reads of 16 elements.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::U;
    /// Writes the low bits of 16 lanes.
    ///
    /// # Safety
    /// `to` is valid for writes of 16 elements.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, lanes: S::U);
    /// Writes the low bits of 16 lanes past the cache where the ISA can.
    ///
    /// # Safety
    /// `to` is valid for writes of 16 elements and aligned to all of them.
    unsafe fn stream<S: Simd>(simd: S, to: *mut Self, lanes: S::U);
    /// Reads 32 elements, zero-extended: those of an even index, those of an odd one.
    ///
    /// # Safety
    /// `from` is valid for reads of 32 elements.
    unsafe fn load_pair<S: Simd>(simd: S, from: *const Self) -> [S::U; 2];
    /// Writes the low bits of the lanes of a pair.
    ///
    /// # Safety
    /// `to` is valid for writes of 32 elements.
    unsafe fn store_pair<S: Simd>(simd: S, to: *mut Self, pair: [S::U; 2]);
    /// Writes the low bits of the lanes of a pair past the cache where the ISA can.
    ///
    /// # Safety
    /// `to` is valid for writes of 32 elements and aligned to all of them, up to 64 bytes.
    unsafe fn stream_pair<S: Simd>(simd: S, to: *mut Self, pair: [S::U; 2]);
}

macro_rules! lane {
    ($width:ident, $load:ident, $store:ident, $stream:ident: $($lane:ty),+) => {
        $(impl Lane for $lane {
            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::U {
                // SAFETY: the caller vouches for 16 elements, and an element has the width of the
                // access.
                unsafe { simd.$load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(simd: S, to: *mut Self, lanes: S::U) {
                // SAFETY: as above; any bits are an element.
                unsafe { simd.$store(to.cast(), lanes) };
            }
            #[inline(always)]
            unsafe fn stream<S: Simd>(simd: S, to: *mut Self, lanes: S::U) {
                // SAFETY: as above, and the caller vouches for the alignment.
                unsafe { simd.$stream(to.cast(), lanes) };
            }
            #[inline(always)]
            unsafe fn load_pair<S: Simd>(simd: S, from: *const Self) -> [S::U; 2] {
                // SAFETY: the caller vouches for 32 elements: as many words as the width says.
                unsafe { $width::load_pair(simd, from.cast()) }
            }
            #[inline(always)]
            unsafe fn store_pair<S: Simd>(simd: S, to: *mut Self, pair: [S::U; 2]) {
                // SAFETY: as above; any bits are an element.
                unsafe { $width::store_pair(simd, to.cast(), pair) };
            }
            #[inline(always)]
            unsafe fn stream_pair<S: Simd>(simd: S, to: *mut Self, pair: [S::U; 2]) {
                // SAFETY: as above, and the caller vouches for the alignment.
                unsafe { $width::stream_pair(simd, to.cast(), pair) };
            }
        })+
    };
}

/// Pairs of 4-byte elements: two vectors, taken apart.
mod word {
    use crate::simd::{LANES, Simd};

    #[inline(always)]
    pub(super) unsafe fn load_pair<S: Simd>(simd: S, from: *const u32) -> [S::U; 2] {
        // SAFETY: the caller vouches for 32 words.
        unsafe { simd.unzip(simd.load_u32(from), simd.load_u32(from.add(LANES))) }
    }

    #[inline(always)]
    pub(super) unsafe fn store_pair<S: Simd>(simd: S, to: *mut u32, [even, odd]: [S::U; 2]) {
        let [low, high] = simd.zip(even, odd);
        // SAFETY: as above.
        unsafe {
            simd.store_u32(to, low);
            simd.store_u32(to.add(LANES), high);
        }
    }

    #[inline(always)]
    pub(super) unsafe fn stream_pair<S: Simd>(simd: S, to: *mut u32, [even, odd]: [S::U; 2]) {
        let [low, high] = simd.zip(even, odd);
        // SAFETY: as above, and the caller vouches for the alignment.
        unsafe {
            simd.stream_u32(to, low);
            simd.stream_u32(to.add(LANES), high);
        }
    }
}

/// Pairs of 2-byte elements: the halves of one vector's words.
mod half {
    use crate::simd::Simd;

    const LOW: u32 = 0xffff;

    #[inline(always)]
    pub(super) unsafe fn load_pair<S: Simd>(simd: S, from: *const u32) -> [S::U; 2] {
        // SAFETY: the caller vouches for 32 half words.
        let words = unsafe { simd.load_u32(from) };
        [simd.and(words, simd.splat_u(LOW)), simd.shr::<16>(words)]
    }

    #[inline(always)]
    pub(super) unsafe fn store_pair<S: Simd>(simd: S, to: *mut u32, [even, odd]: [S::U; 2]) {
        // SAFETY: as above.
        unsafe { simd.store_u32(to, simd.merge(LOW, even, simd.shl::<16>(odd))) };
    }

    #[inline(always)]
    pub(super) unsafe fn stream_pair<S: Simd>(simd: S, to: *mut u32, [even, odd]: [S::U; 2]) {
        // SAFETY: as above, and the caller vouches for the alignment.
        unsafe { simd.stream_u32(to, simd.merge(LOW, even, simd.shl::<16>(odd))) };
    }
}

lane!(word, load_u32, store_u32, stream_u32: f32, u32, i32);
lane!(half, load_u16, store_u16, stream_u16: Bf16, F16, i16);

/// A floating-point type that widens to fp32 without loss and narrows by rounding to nearest, ties
/// to even.
pub trait Element: Lane {
    /// Its name across the boundary.
    const DTYPE: Dtype;
    /// The values of 16 zero-extended elements, exactly.
    fn widen<S: Simd>(simd: S, lanes: S::U) -> S::F;
    /// The nearest representable values, zero-extended; a NaN becomes the canonical NaN.
    fn narrow<S: Simd>(simd: S, values: S::F) -> S::U;
}

/// [`Element::widen`] of a unit.
#[inline(always)]
pub fn widen<S: Simd, T: Element, const Q: usize>(simd: S, unit: [S::U; Q]) -> [S::F; Q] {
    let mut values = [simd.splat(0.0); Q];
    for (value, lanes) in values.iter_mut().zip(unit) {
        *value = T::widen(simd, lanes);
    }
    values
}

/// [`Element::narrow`] of a unit.
#[inline(always)]
pub fn narrow<S: Simd, T: Element, const Q: usize>(simd: S, unit: [S::F; Q]) -> [S::U; Q] {
    let mut lanes = [simd.splat_u(0); Q];
    for (lanes, values) in lanes.iter_mut().zip(unit) {
        *lanes = T::narrow(simd, values);
    }
    lanes
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::Float32;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, lanes: S::U) -> S::F {
        simd.of_bits(lanes)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, values: S::F) -> S::U {
        simd.bits(values)
    }
}

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::BFloat16;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, lanes: S::U) -> S::F {
        simd.of_bits(simd.shl::<16>(lanes))
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, values: S::F) -> S::U {
        let bits = simd.bits(values);
        let odd = simd.and(simd.shr::<16>(bits), simd.splat_u(1));
        let rounded = simd.shr::<16>(simd.add_u(bits, simd.add_u(odd, simd.splat_u(0x7fff))));
        simd.select(simd.is_nan(values), simd.splat_u(u32::from(Self::NAN.0)), rounded)
    }
}

impl Element for F16 {
    const DTYPE: Dtype = Dtype::Float16;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, lanes: S::U) -> S::F {
        let sign = simd.shl::<16>(simd.and(lanes, simd.splat_u(0x8000)));
        let magnitude = simd.and(lanes, simd.splat_u(0x7fff));
        // Exponent and mantissa at their fp32 places are the value times 2^-112, subnormals
        // included: the product is exact.
        let scaled = simd.mul(
            simd.of_bits(simd.shl::<13>(magnitude)),
            simd.splat(f32::from_bits((127 + 112) << 23)),
        );
        let is_special = simd.gt_u(magnitude, simd.splat_u(0x7bff));
        let special = simd.select(is_special, simd.splat_u(0x7f80_0000), simd.splat_u(0));
        simd.of_bits(simd.or(simd.or(simd.bits(scaled), special), sign))
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, values: S::F) -> S::U {
        let magnitude = simd.magnitude(values);
        // Below 2^-14 the result is subnormal: adding 0.5 puts its last place at 2^-24 and lets the
        // addition round.
        let shifted = simd.add(simd.of_bits(magnitude), simd.splat(0.5));
        let subnormal = simd.sub_u(simd.bits(shifted), simd.splat_u(0x3f00_0000));
        let odd = simd.and(simd.shr::<13>(magnitude), simd.splat_u(1));
        let rebiased = simd.sub_u(magnitude, simd.splat_u((112 << 23) - 0x0fff));
        let normal = simd.shr::<13>(simd.add_u(rebiased, odd));
        let finite =
            simd.select(simd.gt_u(simd.splat_u(0x3880_0000), magnitude), subnormal, normal);
        // 65520 is half way between the largest finite value and the next: it and all above round
        // to infinity.
        let rounded = simd.select(
            simd.gt_u(magnitude, simd.splat_u(0x477f_efff)),
            simd.splat_u(0x7c00),
            finite,
        );
        let sign = simd.and(simd.shr::<16>(simd.bits(values)), simd.splat_u(0x8000));
        let is_nan = simd.gt_u(magnitude, simd.splat_u(0x7f80_0000));
        simd.select(is_nan, simd.splat_u(u32::from(Self::NAN.0)), simd.or(rounded, sign))
    }
}
