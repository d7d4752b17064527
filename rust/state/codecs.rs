//! The codecs by name, and the one place where what a state is held in becomes a type.
//!
//! A kernel is generic over the master and the moments. [`visit_master`] and [`visit_moments`] open
//! the parts of a chunk as what their kind says, and call a visitor with it. Every type that a
//! visitor is called with is one more instantiation of its kernels per ISA, so a master without
//! moments of its own ([`MasterVisitor::visit_plain16`]) is not combined with all of them.

use crate::{
    error::{Error, Result},
    simd::isa::Isa,
    state::{
        Master, Moments,
        chunk::CHUNK_LEN,
        master::{Plain, Shadowed, WithWeightOut},
        moments::{Nearest, Stochastic},
        part::{HeldMoments, Part},
        q8::Q8,
        split::{Fingerprint, Split},
    },
    stream::{
        element::{Bf16, Dtype, Element, F16},
        view::Route,
    },
};

/// Something to do with moments, whatever they are held in.
pub trait MomentsVisitor {
    /// Does it.
    fn visit<const Q: usize, M: Moments<Q>>(self, moments: M);
}

/// Something to do with a master, whatever it is held in.
pub trait MasterVisitor: Sized {
    /// Whether it writes every element.
    const REWRITES: bool;
    /// Does it.
    fn visit<P: Master>(self, master: P);
    /// Does it with a 16-bit parameter that has no master: its gradient and moments are of its own
    /// dtype, or the moments are fp32.
    fn visit_plain16<T: Element>(self, parameter: Plain<'_, T>) {
        self.visit(parameter);
    }
}

/// How the master of a parameter is held (`rust/state/mod.rs` has the table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterKind {
    /// The fp32 parameter is its own master.
    Float32,
    /// A bf16 parameter is the rounded upper half of the master. The trailing bits are held beside
    /// it.
    Split {
        /// Whether each chunk has a fingerprint, which tells if its trailing bits still belong to
        /// the parameter. Without fingerprints, the maker of the state vouches that nothing but a
        /// step writes the parameter.
        has_fingerprints: bool,
    },
    /// An fp16 parameter beside its fp32 master.
    Shadowed,
    /// A 16-bit parameter without a master, rounded to nearest.
    Plain16,
}

/// The name of the part that tells which weights the trailing bits belong to.
pub const FINGERPRINTS: &str = "fingerprints";

const SPLIT: [Part; 2] =
    [Part::per_element("trailing", Dtype::Int16), Part::per(CHUNK_LEN, FINGERPRINTS, Dtype::Int32)];
const SHADOWED: [Part; 1] = [Part::per_element("master", Dtype::Float32)];

impl MasterKind {
    /// The kind that keeps all bits of the master of a parameter of this dtype.
    ///
    /// # Errors
    /// [`Error::Value`] for a dtype that parameters do not have.
    pub fn exact(param: Dtype) -> Result<Self> {
        match param {
            Dtype::Float32 => Ok(Self::Float32),
            Dtype::BFloat16 => Ok(Self::Split { has_fingerprints: true }),
            Dtype::Float16 => Ok(Self::Shadowed),
            other => Err(Error::value(format!(
                "param is `{other}`, expected float32 or bfloat16 or float16"
            ))),
        }
    }

    /// What is held beside the parameter.
    #[must_use]
    pub fn parts(self) -> &'static [Part] {
        match self {
            Self::Float32 | Self::Plain16 => &[],
            Self::Split { has_fingerprints: true } => &SPLIT,
            Self::Split { has_fingerprints: false } => &SPLIT[..1],
            Self::Shadowed => &SHADOWED,
        }
    }
}

macro_rules! moments_codecs {
    ($($(#[$doc:meta])* $kind:ident, $name:literal, $codec:ty;)+) => {
        /// How the moments of a parameter are held.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum MomentsKind {
            $($(#[$doc])* $kind,)+
            /// The dtype of a 16-bit parameter without a master, rounded to nearest.
            Nearest16,
        }

        impl MomentsKind {
            /// The codecs that a user chooses from.
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            /// As the user calls it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                    Self::Nearest16 => "16-bit, rounded to nearest",
                }
            }

            /// What is held, beside a parameter of this dtype.
            #[must_use]
            pub fn parts(self, param: Dtype) -> &'static [Part] {
                match self {
                    $(Self::$kind => <$codec as HeldMoments>::PARTS,)+
                    Self::Nearest16 => match param {
                        Dtype::Float16 => <Nearest<'_, F16> as HeldMoments>::PARTS,
                        _ => <Nearest<'_, Bf16> as HeldMoments>::PARTS,
                    },
                }
            }
        }

        /// Calls the visitor with the moments of a chunk of a parameter that has a master.
        ///
        /// # Safety
        /// As [`HeldMoments::open`].
        ///
        /// # Panics
        /// If the routes are not those of the parts of `kind`.
        pub unsafe fn visit_moments(
            kind: MomentsKind,
            routes: &[Route],
            visitor: impl MomentsVisitor,
        ) {
            // SAFETY: passed on from the caller.
            unsafe {
                match kind {
                    $(MomentsKind::$kind => visitor.visit(<$codec as HeldMoments>::open(routes)),)+
                    MomentsKind::Nearest16 => {
                        unreachable!("only beside a parameter without a master")
                    }
                }
            }
        }
    };
}

// A new codec is a file beside this one and a line here.
moments_codecs! {
    /// fp32.
    Float32, "fp32", Nearest<'_, f32>;
    /// bf16, rounded stochastically.
    Stochastic, "bf16", Stochastic<'_>;
    /// 8-bit codes with scales.
    Q8, "q8", Q8<'_>;
}

impl MomentsKind {
    /// The codec of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// Calls the visitor with the moments of a chunk of a parameter in `T` that has no master.
///
/// # Safety
/// As [`HeldMoments::open`].
///
/// # Panics
/// As [`visit_moments`].
pub unsafe fn visit_plain16_moments<T: Element>(
    kind: MomentsKind,
    routes: &[Route],
    visitor: impl MomentsVisitor,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match kind {
            MomentsKind::Nearest16 => visitor.visit(Nearest::<T>::open(routes)),
            _ => visitor.visit(Nearest::<f32>::open(routes)),
        }
    }
}

/// Calls the visitor with the master of a chunk: its parameter, the parts of the master, and the
/// 16-bit weight that is written beside it.
///
/// A split master's trailing bits are void where the parameter is not what its fingerprint was
/// taken of. If the visitor rewrites the chunk, the fingerprint is taken anew: only then do
/// parameter and trailing bits belong together again. Without fingerprints they always do.
///
/// # Safety
/// The memory of all routes is alive, and nothing else uses it during the call.
///
/// # Panics
/// If the routes are not those of the parts of `kind`.
pub unsafe fn visit_master<V: MasterVisitor>(
    isa: Isa,
    kind: MasterKind,
    param: Route,
    parts: &[Route],
    weight_out: Option<Route>,
    visitor: V,
) {
    // SAFETY: the caller vouches for the memory; each route is borrowed once at a time.
    unsafe {
        match kind {
            MasterKind::Float32 => match weight_out.map(|weight| (weight.to.dtype(), weight)) {
                None => visitor.visit(Plain(param.cursor::<f32>())),
                Some((Dtype::Float16, weight)) => {
                    visitor.visit(WithWeightOut::new(param.cursor(), weight.cursor::<F16>()));
                }
                Some((_, weight)) => {
                    visitor.visit(WithWeightOut::new(param.cursor(), weight.cursor::<Bf16>()));
                }
            },
            MasterKind::Split { .. } => visit_split(isa, param, parts, visitor),
            MasterKind::Shadowed => {
                visitor.visit(Shadowed::new(parts[0].cursor(), param.cursor::<F16>()));
            }
            MasterKind::Plain16 => match param.to.dtype() {
                Dtype::Float16 => visitor.visit_plain16(Plain(param.cursor::<F16>())),
                _ => visitor.visit_plain16(Plain(param.cursor::<Bf16>())),
            },
        }
    }
}

/// # Safety
/// As [`visit_master`].
unsafe fn visit_split<V: MasterVisitor>(isa: Isa, param: Route, parts: &[Route], visitor: V) {
    let (trailing, fingerprint) = (parts[0], parts.get(1));
    // SAFETY: the caller vouches for the memory; every borrow of it ends before the next begins.
    unsafe {
        let fingerprint_of = |high: crate::stream::view::View| {
            isa.run(Fingerprint(high.slice(0..high.numel()))).cast_signed()
        };
        let is_void =
            |known: &Route| fingerprint_of(param.from) != known.from.slice::<i32>(0..1)[0];
        let void = fingerprint.is_some_and(is_void);
        let mut high = param.cursor();
        if fingerprint.is_some() {
            // These are in the cache now. Those of the next chunk, which are read as fast as they
            // come before its arithmetic begins, had better be.
            high = high.fetched(CHUNK_LEN);
        }
        visitor.visit(Split::new(high, trailing.cursor(), void));
        if let Some(fingerprint) = fingerprint.filter(|_| V::REWRITES) {
            fingerprint.to.slice_mut::<i32>(0..1)[0] = fingerprint_of(param.to);
        }
    }
}
