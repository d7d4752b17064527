//! Instruction sets: detected once, and the one place where a kernel body is compiled for each of
//! them.
//!
//! A kernel is written once, as a [`Kernel`] whose `run` is generic over [`Simd`] and
//! `#[inline(always)]`. [`Isa::run`] inlines it into one `#[target_feature]` function per ISA,
//! where its operations become single instructions. `STEPWELL_ISA` forces an ISA, for tests and for
//! bug reports.

use std::sync::OnceLock;
#[cfg(target_arch = "x86_64")]
use std::{hint::black_box, mem::MaybeUninit};

#[cfg(target_arch = "aarch64")]
use crate::simd::neon::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};
use crate::{
    error::{Error, Result},
    simd::{Simd, fp_env::StandardFpEnv, scalar::Scalar},
};

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// The target's baseline. On x86-64 it has no fused multiply-add and calls libm for it: right,
    /// and very slow.
    Scalar,
    /// AVX2 with FMA and F16C (x86-64-v3).
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL (x86-64-v4).
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON, the baseline of aarch64.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// A body that [`Isa::run`] compiles for every ISA.
pub trait Kernel {
    /// What the body returns.
    type Output;
    /// The body. Must be `#[inline(always)]`, as must everything that it calls, or it is compiled
    /// for the baseline.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Makes the compiler align the frame of the function that this is inlined into to cache lines.
///
/// It spills vectors where they fall on a stack of 16-byte alignment, unless the function has a
/// local with a larger one when registers are assigned: then, by the luck of the callers' frames,
/// every spilled vector is in two lines. Measured on an EPYC: q8 41 instead of 30 ms.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn align_frame() {
    #[repr(align(64))]
    struct Line(MaybeUninit<u8>);
    black_box(&mut Line(MaybeUninit::uninit()).0);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    align_frame();
    // SAFETY: this function has the features, so whoever called it has shown that the machine has.
    kernel.run(unsafe { Avx2::new_unchecked() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    align_frame();
    // SAFETY: as above.
    kernel.run(unsafe { Avx512::new_unchecked() })
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: as above.
    kernel.run(unsafe { Neon::new_unchecked() })
}

#[inline(never)]
fn run_scalar<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Scalar)
}

impl Isa {
    /// Every ISA this crate was compiled for, widest last.
    pub const ALL: &'static [Self] = &[
        Self::Scalar,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
    ];

    /// As `STEPWELL_ISA` spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
        }
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("lzcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
        }
    }

    /// The ISAs that this machine can run, widest last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The ISA in use: the widest available, or what `STEPWELL_ISA` names.
    ///
    /// # Errors
    /// [`Error::Value`] where `STEPWELL_ISA` names an ISA that is unknown or that this machine
    /// cannot run.
    pub fn detect() -> Result<Self> {
        static DETECTED: OnceLock<std::result::Result<Isa, String>> = OnceLock::new();
        DETECTED
            .get_or_init(|| choose(std::env::var("STEPWELL_ISA").ok().as_deref()))
            .clone()
            .map_err(Error::Value)
    }

    /// Runs the kernel, compiled for this ISA, in the standard floating-point environment.
    ///
    /// # Panics
    /// If this machine cannot run the ISA; [`Isa::detect`] and [`Isa::available`] only give those
    /// that it can.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        debug_assert!(self.is_available(), "{} is not available here", self.name());
        let _standard = StandardFpEnv::enter();
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` is only handed out where `is_available` holds, so the features are
            // there.
            Self::Avx2 => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Self::Neon => unsafe { run_neon(kernel) },
            Self::Scalar => run_scalar(kernel),
        }
    }
}

fn choose(forced: Option<&str>) -> std::result::Result<Isa, String> {
    let available: Vec<Isa> = Isa::available().collect();
    match forced {
        None | Some("") => Ok(available.last().copied().unwrap_or(Isa::Scalar)),
        Some(name) => available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            format!(
                "STEPWELL_ISA is `{name}`, expected one that this machine runs: {}\nhint: unset it to use `{}`",
                names.join(", "),
                names.last().copied().unwrap_or("scalar"),
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_is_chosen_unless_one_is_forced() {
        let widest = Isa::available().last().expect("scalar is always there");
        assert_eq!(choose(None), Ok(widest));
        for isa in Isa::available() {
            assert_eq!(choose(Some(isa.name())), Ok(isa));
        }
        let message = choose(Some("mmx")).expect_err("mmx is unknown");
        assert!(message.contains("`mmx`") && message.contains("scalar"), "{message}");
    }
}
