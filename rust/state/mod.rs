//! How a step's state is held: two independent choices, the master and the moments.
//!
//! | parameter | master | reads | writes | file |
//! |---|---|---|---|---|
//! | fp32 | itself, optionally with a 16-bit copy out | 4 B | 4 (+2) B | [`master`] |
//! | bf16 | `split`: the parameter and 16 trailing bits | 4 B | 4 B | [`split`] |
//! | fp16 | a separate fp32 beside the parameter | 6 B | 6 B | [`master`] |
//! | bf16, fp16 without a master | itself, rounded to nearest | 2 B | 2 B | [`master`] |
//!
//! | moments | reads | writes | file |
//! |---|---|---|---|
//! | fp32 | 8 B | 8 B | [`moments`] |
//! | bf16, stochastic rounding | 4 B | 4 B | [`moments`] |
//! | 16-bit, rounded to nearest (DeepSpeed's native ABI) | 4 B | 4 B | [`moments`] |
//! | q8 | 2.125 B | 2.125 B | [`q8`] |
//!
//! What parts a state has follows from both ([`layout`]), and [`codecs`] finds the type of each.
//!
//! A codec knows nothing of tiers, threads or chunks: it loads lanes from cursors and stores lanes
//! to them. What it holds is cut into chunks ([`chunk`]), and where each chunk's state is, an index
//! says ([`crate::tier::slots`]).
//!
//! Invariants: a finite value is never coded to an infinity; `exp_avg_sq > 0` never decodes to 0
//! (the update would be divided by eps alone); what leaves fp32 leaves without loss or
//! stochastically, unbiased in the decoded domain.

pub mod chunk;
pub mod codecs;
pub mod convert;
pub mod dither;
pub mod layout;
pub mod master;
pub mod moments;
pub mod part;
pub mod q8;
pub mod split;

use crate::{simd::Simd, stream::element::Element};

/// What the bytes of coded state mean: trailing bits and their fingerprints, q8's codes, their
/// order and their scales. State dicts carry it, and one of another format is refused. A
/// change of a meaning counts up; `tests/format.rs` notices.
pub const STATE_FORMAT: u32 = 1;

/// Loads and stores fp32 masters, a unit of `Q` vectors at a time (its order:
/// [`crate::stream::cursor`]). `count` is `Q * LANES` but at the tail.
pub trait Master {
    /// What the model computes with: the dtype of the 16-bit weight, or of the parameter.
    type Weight: Element;
    /// Elements.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fetches what the block at `at` will need some blocks later.
    fn prefetch(&self, at: usize);
    /// The masters of `at..at + count`, zeros behind them.
    fn load<S: Simd, const Q: usize>(&self, simd: S, at: usize, count: usize) -> [S::F; Q];
    /// Whether all stores may bypass the cache.
    fn streams(&self) -> bool;
    /// Writes the masters of `at..at + count`, and the 16-bit weight where there is one; past the
    /// cache with `STREAM`.
    fn store<S: Simd, const Q: usize, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
    );
    /// The weights that a store of these masters writes, in the low bits of their lanes.
    fn weights<S: Simd, const Q: usize>(simd: S, master: [S::F; Q]) -> [S::U; Q];
}

/// Both moments of a unit of `Q` vectors.
pub struct MomentLanes<S: Simd, const Q: usize> {
    /// The decayed mean of the gradients.
    pub exp_avg: [S::F; Q],
    /// The decayed mean of their squares.
    pub exp_avg_sq: [S::F; Q],
}

/// Loads and stores `exp_avg` and `exp_avg_sq`, a unit of `Q` vectors at a time. Vectors are
/// decoded and coded one by one, so that the kernel can do what belongs to one unit between what
/// belongs to another.
pub trait Moments<const Q: usize> {
    /// Whether `encode` draws on its noise.
    const STOCHASTIC: bool;
    /// A unit as it is held.
    type Held<S: Simd>;
    /// What `measure` finds: nothing, or the scales of a group. Where it is something, it takes as
    /// long as all the rest, so the kernel computes the next unit before it stores this one.
    type Measure<S: Simd>;
    /// Whether the moments of `len` elements are what this holds.
    fn covers(&self, len: usize) -> bool;
    /// Fetches what the block at `at` will need some blocks later.
    fn prefetch(&self, at: usize);
    /// The unit `at..at + count`, zeros behind it.
    fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> Self::Held<S>;
    /// `(exp_avg, exp_avg_sq)` of vector `I` of a unit.
    fn decode<S: Simd, const I: usize>(simd: S, held: &Self::Held<S>) -> (S::F, S::F);
    /// What `encode` needs to know of all lanes of a unit before it can code the first.
    fn measure<S: Simd>(simd: S, moments: &mut MomentLanes<S, Q>) -> Self::Measure<S>;
    /// Both moments of vector `I` in code; `noise` is 32 random bits per element.
    fn encode<S: Simd, const I: usize>(
        simd: S,
        measure: &Self::Measure<S>,
        exp_avg: S::F,
        exp_avg_sq: S::F,
        noise: S::U,
    ) -> (S::U, S::U);
    /// Whether all stores may bypass the cache.
    fn streams(&self) -> bool;
    /// Asserts that a whole unit lies behind `at` ([`crate::stream::cursor::Cursor::expect_unit`]).
    fn expect_unit(&self, at: usize);
    /// Writes both moments of `at..at + count`, in code; past the cache with `STREAM`.
    fn store<S: Simd, const STREAM: bool>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        exp_avg: [S::U; Q],
        exp_avg_sq: [S::U; Q],
        measure: Self::Measure<S>,
    );
}

/// The same for every vector of a unit, `$i` being its number: constants, which a loop would not
/// make of it.
macro_rules! each_vector {
    ($q:expr, |$i:ident| $each:expr) => {{
        {
            const $i: usize = 0;
            $each;
        }
        if $q > 1 {
            {
                const $i: usize = 1;
                $each;
            }
            {
                const $i: usize = 2;
                $each;
            }
            {
                const $i: usize = 3;
                $each;
            }
        }
    }};
}
pub(crate) use each_vector;

/// `(exp_avg, exp_avg_sq)` of a unit.
#[inline(always)]
pub(crate) fn decode_unit<S: Simd, M: Moments<Q>, const Q: usize>(
    simd: S,
    held: &M::Held<S>,
) -> MomentLanes<S, Q> {
    let zeros = [simd.splat(0.0); Q];
    let mut unit = MomentLanes { exp_avg: zeros, exp_avg_sq: zeros };
    each_vector!(Q, |I| (unit.exp_avg[I], unit.exp_avg_sq[I]) = M::decode::<S, I>(simd, held));
    unit
}

/// `(exp_avg, exp_avg_sq)` of a unit in code; `noise` is 32 random bits per element.
#[inline(always)]
pub(crate) fn encode_unit<S: Simd, M: Moments<Q>, const Q: usize>(
    simd: S,
    unit: &MomentLanes<S, Q>,
    measure: &M::Measure<S>,
    noise: &[S::U; Q],
) -> ([S::U; Q], [S::U; Q]) {
    let (mut first, mut second) = ([simd.splat_u(0); Q], [simd.splat_u(0); Q]);
    each_vector!(Q, |I| (first[I], second[I]) =
        M::encode::<S, I>(simd, measure, unit.exp_avg[I], unit.exp_avg_sq[I], noise[I]));
    (first, second)
}
