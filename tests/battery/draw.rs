//! Generators: values with the specials among them, hyper-parameters, counts.

use proptest::prelude::*;
use stepwell::{adam::Hyper, state::dither::mix64};

/// How values are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// As in training: magnitudes of 1e-6 to 10.
    Ordinary,
    /// Every finite bit pattern alike, so magnitudes of 1e-45 to 3e38.
    Wide,
    /// Ordinary ones, with [`SPECIALS`] among them.
    Special,
}

impl Spread {
    pub(crate) fn any() -> impl Strategy<Value = Self> {
        prop_oneof![Just(Self::Ordinary), Just(Self::Wide), Just(Self::Special)]
    }
}

/// Bits of fp32 values at which something changes: for fp32 itself, and where bf16 and fp16 round.
pub(crate) const SPECIALS: [u32; 26] = [
    0x0000_0000, // 0
    0x8000_0000, // -0
    0x0000_0001, // the smallest subnormal
    0x8000_0001,
    0x007f_ffff, // the largest subnormal
    0x0080_0000, // the smallest normal
    0x8080_0000,
    0x3f80_0000, // 1 and its neighbours
    0x3f7f_ffff,
    0x3f80_0001,
    0x3f80_8000, // ties of bf16, to even and to odd
    0x3f81_8000,
    0x3f80_1000, // a tie of fp16
    0x3380_0000, // 2^-24, fp16's smallest, and the tie below it
    0x3300_0000,
    0x387f_c000, // fp16's largest subnormal
    0x477f_e000, // 65504, fp16's largest, and the tie above it
    0x477f_f000,
    0x7f7f_ffff, // the largest
    0x7f7f_fffe,
    0xff7f_ffff,
    0x7f80_0000, // infinities, and NaNs: quiet, with a sign, signalling
    0xff80_0000,
    0x7fc0_0000,
    0xffc1_2345,
    0x7f80_0001,
];

/// A reproducible sequence of values.
#[derive(Clone, Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// In `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (0.5_f64).powi(53)
    }

    /// Normally distributed (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    pub(crate) fn value(&mut self, spread: Spread) -> f32 {
        match spread {
            Spread::Ordinary => {
                let magnitude = 10_f64.powf(7.0 * self.unit() - 6.0) as f32;
                if self.bits().is_multiple_of(2) { magnitude } else { -magnitude }
            }
            Spread::Wide => loop {
                let value = f32::from_bits(self.bits() as u32);
                if value.is_finite() {
                    return value;
                }
            },
            Spread::Special => match self.below(16) {
                0 => f32::from_bits(SPECIALS[self.below(SPECIALS.len())]),
                1 => self.value(Spread::Wide),
                _ => self.value(Spread::Ordinary),
            },
        }
    }

    pub(crate) fn values(&mut self, spread: Spread, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value(spread)).collect()
    }
}

fn betas() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(0.9), Just(0.95), Just(0.999), Just(0.9999), 0.0..0.99999]
}

/// Hyper-parameters, usual ones and odd ones.
pub(crate) fn hypers() -> impl Strategy<Value = Hyper> {
    let lr = prop_oneof![
        Just(0.0),
        Just(1e-3),
        (-8.0..0.0).prop_map(|exponent| 10_f64.powf(exponent)),
        Just(-1e-2)
    ];
    let eps = prop_oneof![
        Just(0.0),
        Just(1e-8),
        (-16.0..-1.0).prop_map(|exponent| 10_f64.powf(exponent))
    ];
    let weight_decay = prop_oneof![Just(0.0), Just(0.01), 0.0..1.0, Just(-0.1)];
    let grad_scale = prop_oneof![
        Just(1.0),
        Just(1.0 / 65536.0),
        Just(0.0),
        (-6.0..6.0).prop_map(|exponent| 10_f64.powf(exponent))
    ];
    (lr, (betas(), betas()), eps, weight_decay, grad_scale, any::<[bool; 3]>()).prop_map(
        |(lr, betas, eps, weight_decay, grad_scale, [decoupled, bias_correction, maximize])| {
            Hyper { lr, betas, eps, weight_decay, decoupled, bias_correction, maximize, grad_scale }
        },
    )
}

/// Numbers of an update, from 1.
pub(crate) fn counts() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1), Just(2), 1_u64..1000, 1_u64..1_000_000]
}
