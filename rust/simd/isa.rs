//! Instruction sets: detected once, and the one place where a kernel body is compiled for each of
//! them.
//!
//! A kernel is written once, as a [`Kernel`] whose `run` is generic over [`Simd`] and
//! `#[inline(always)]`. [`Isa::run`] inlines it into one `#[target_feature]` function per ISA,
//! where its operations become single instructions. `STEPWELL_ISA` forces an ISA, for tests and for
//! bug reports.

use std::{fmt, sync::OnceLock};
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

/// An instruction set that this machine can run.
///
/// There is no way to make one of another: [`Isa::detect`], [`Isa::available`] and [`Isa::named`]
/// look first, and [`Isa::SCALAR`] is the baseline. So [`Isa::run`] is safe.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

/// What kernels are compiled for, whether this machine can run it or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
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
    // SAFETY: this function has the features: its caller has shown that the machine has them.
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

impl Kind {
    /// All that this crate was compiled for, widest last.
    const ALL: &'static [Self] = &[
        Self::Scalar,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
    ];

    fn name(self) -> &'static str {
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
    fn is_available(self) -> bool {
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
}

impl Isa {
    /// The target's baseline, which every machine runs.
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// As `STEPWELL_ISA` spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// The ISAs that this machine can run, widest last.
    pub fn available() -> impl Iterator<Item = Self> {
        Kind::ALL.iter().copied().filter(|kind| kind.is_available()).map(Self)
    }

    /// The ISA of this name.
    ///
    /// # Errors
    /// [`Error::Value`] for one that is unknown or that this machine cannot run.
    pub fn named(name: &str) -> Result<Self> {
        Self::available().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::available().map(Self::name).collect();
            Error::value(format!(
                "the instruction set is `{name}`, expected one that this machine runs: {}",
                names.join(", ")
            ))
        })
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
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        let _standard = StandardFpEnv::enter();
        if cfg!(feature = "baseline-only") {
            return run_scalar(kernel);
        }
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` is only made of a kind that is available here, or of the baseline,
            // so the features are there.
            Kind::Avx2 => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Kind::Neon => unsafe { run_neon(kernel) },
            Kind::Scalar => run_scalar(kernel),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn choose(forced: Option<&str>) -> std::result::Result<Isa, String> {
    let widest = Isa::available().last().unwrap_or(Isa::SCALAR);
    match forced {
        None | Some("") => Ok(widest),
        Some(name) => Isa::named(name).map_err(|error| {
            format!("STEPWELL_ISA: {error}\nhint: unset it to use `{}`", widest.name())
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
        assert!(message.contains("STEPWELL_ISA") && message.contains(widest.name()), "{message}");
    }

    #[test]
    fn there_is_an_isa_for_what_this_machine_runs_and_for_nothing_else() {
        for kind in Kind::ALL {
            assert_eq!(Isa::named(kind.name()).is_ok(), kind.is_available());
            assert_eq!(Isa::available().any(|isa| isa.0 == *kind), kind.is_available());
        }
    }
}
