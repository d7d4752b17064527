//! bf16 and fp16 to fp32 and back, on every ISA, against the crate `half`.

mod battery;

use battery::{SPECIALS, is_hurried};
use stepwell::{
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    stream::{
        cursor::{Cursor, Source},
        element::{Bf16, Element, F16},
    },
};

struct Widen<'a, T> {
    from: Source<'a, T>,
    to: Cursor<'a, f32>,
}

impl<T: Element> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.to.len()).step_by(LANES) {
            let count = (self.to.len() - at).min(LANES);
            self.to.store(
                simd,
                at,
                count,
                simd.bits(T::widen(simd, self.from.load(simd, at, count))),
            );
        }
    }
}

struct Narrow<'a, T> {
    from: Source<'a, f32>,
    to: Cursor<'a, T>,
}

impl<T: Element> Kernel for Narrow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.to.len()).step_by(LANES) {
            let count = (self.to.len() - at).min(LANES);
            self.to.store(
                simd,
                at,
                count,
                T::narrow(simd, simd.of_bits(self.from.load(simd, at, count))),
            );
        }
    }
}

fn widen<T: Element>(isa: Isa, from: &[T]) -> Vec<f32> {
    let mut to = vec![0.0; from.len()];
    isa.run(Widen { from: Source::new(from), to: Cursor::in_place(&mut to) });
    to
}

fn narrow<T: Element>(isa: Isa, from: &[f32]) -> Vec<T> {
    let mut to = vec![T::default(); from.len()];
    isa.run(Narrow { from: Source::new(from), to: Cursor::in_place(&mut to) });
    to
}

/// fp32 values at, half way between and right beside the neighbours of a 16-bit type, the specials,
/// and a sweep over all bits.
fn sweep(of_bits: impl Fn(u16) -> f32) -> Vec<f32> {
    let mut values: Vec<f32> = SPECIALS.iter().map(|&bits| f32::from_bits(bits)).collect();
    for bits in 0..u16::MAX {
        let (value, next) = (of_bits(bits), of_bits(bits + 1));
        let half_way = ((f64::from(value) + f64::from(next)) / 2.0) as f32;
        for near in [value, half_way, 1.5 * value] {
            values.extend([near.next_down(), near, near.next_up()]);
        }
    }
    // A prime, so that all low and high bits come by.
    let stride = if is_hurried() { 65_537 } else { 4_099 };
    values.extend((0..=u32::MAX).step_by(stride).map(f32::from_bits));
    values
}

fn same(value: f32, expected: f32) -> bool {
    value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan())
}

#[test]
fn every_16_bit_pattern_widens_exactly() {
    let patterns = 0..=u16::MAX;
    for isa in Isa::available() {
        let bf16 = widen(isa, &patterns.clone().map(Bf16).collect::<Vec<_>>());
        let f16 = widen(isa, &patterns.clone().map(F16).collect::<Vec<_>>());
        for (bits, (bf16, f16)) in patterns.clone().zip(bf16.into_iter().zip(f16)) {
            assert!(
                same(bf16, half::bf16::from_bits(bits).to_f32()),
                "bf16 {bits:#x} on {}: {bf16:e}",
                isa.name()
            );
            assert!(
                same(f16, half::f16::from_bits(bits).to_f32()),
                "fp16 {bits:#x} on {}: {f16:e}",
                isa.name()
            );
            assert!(same(Bf16(bits).to_f32(), bf16));
        }
    }
}

#[test]
fn fp32_narrows_to_the_nearest_bf16() {
    let values = sweep(|bits| half::bf16::from_bits(bits).to_f32());
    for isa in Isa::available() {
        for (value, got) in values.iter().zip(narrow::<Bf16>(isa, &values)) {
            let expected =
                if value.is_nan() { Bf16::NAN.0 } else { half::bf16::from_f32(*value).to_bits() };
            assert_eq!(got.0, expected, "{value:e} ({:#x}) on {}", value.to_bits(), isa.name());
        }
    }
}

#[test]
fn fp32_narrows_to_the_nearest_fp16() {
    let values = sweep(|bits| half::f16::from_bits(bits).to_f32());
    for isa in Isa::available() {
        for (value, got) in values.iter().zip(narrow::<F16>(isa, &values)) {
            let expected =
                if value.is_nan() { F16::NAN.0 } else { half::f16::from_f32(*value).to_bits() };
            assert_eq!(got.0, expected, "{value:e} ({:#x}) on {}", value.to_bits(), isa.name());
        }
    }
}

#[test]
fn fp32_passes_through() {
    for isa in Isa::available() {
        let bits: Vec<u32> = SPECIALS.to_vec();
        let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        for passed in [widen(isa, &values), narrow::<f32>(isa, &values)] {
            assert_eq!(
                passed.iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
                bits,
                "{}",
                isa.name()
            );
        }
    }
}
