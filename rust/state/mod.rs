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
//! A codec knows nothing of tiers, threads or chunks: it loads lanes from cursors and stores lanes to them. What it holds is cut into chunks ([`chunk`]),
//! and where each chunk's state is, an index says ([`slots`]).
//!
//! Invariants: a finite value is never coded to an infinity; `exp_avg_sq > 0` never decodes to 0 (the update would be
//! divided by eps alone); what leaves fp32 leaves without loss or stochastically, unbiased in the decoded domain.

pub mod chunk;
pub mod convert;
pub mod dither;
pub mod master;
pub mod moments;
pub mod q8;
pub mod slots;
pub mod split;

use crate::simd::{LANES, Simd};

/// Elements between two prefetches, and the smallest piece that q8 codes: every chunk is a multiple of it.
pub const BLOCK: usize = 64;

/// Lanes `at..` of a unit of `count` elements that fall into its `quarter`-th array.
#[inline(always)]
pub(crate) fn lanes_in(count: usize, quarter: usize) -> usize {
    count.saturating_sub(quarter * LANES).min(LANES)
}

/// Loads and stores fp32 masters, 16 lanes at a time. `count` is `LANES` but at the tail.
pub trait Master {
    /// Elements.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fetches what the block at `at` will need some blocks later.
    fn prefetch(&self, at: usize);
    /// The masters of `at..at + count`, zeros behind them.
    fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> S::F;
    /// Writes the masters of `at..at + count`, and the 16-bit weight where there is one.
    fn store<S: Simd>(&self, simd: S, at: usize, count: usize, master: S::F);
}

/// Both moments of a unit of `Q` vectors.
pub struct MomentLanes<S: Simd, const Q: usize> {
    /// The decayed mean of the gradients.
    pub exp_avg: [S::F; Q],
    /// The decayed mean of their squares.
    pub exp_avg_sq: [S::F; Q],
}

/// Loads and stores `exp_avg` and `exp_avg_sq`, a unit of `Q * LANES` elements at a time.
pub trait Moments<const Q: usize> {
    /// Whether `store` draws on its noise.
    const STOCHASTIC: bool;
    /// What `measure` finds: nothing, or the scales of a group. Where it is something, it takes as long as all the rest, so the
    /// kernel computes the next unit before it stores this one.
    type Measure<S: Simd>;
    /// Whether the moments of `len` elements are what this holds.
    fn covers(&self, len: usize) -> bool;
    /// Fetches what the block at `at` will need some blocks later.
    fn prefetch(&self, at: usize);
    /// `(exp_avg, exp_avg_sq)` of `at..at + count`, zeros behind them.
    fn load<S: Simd>(&self, simd: S, at: usize, count: usize) -> ([S::F; Q], [S::F; Q]);
    /// What `store` needs to know of all lanes of a unit before it can code the first.
    fn measure<S: Simd>(&self, simd: S, moments: &MomentLanes<S, Q>) -> Self::Measure<S>;
    /// Writes both moments of `at..at + count`; `noise` is 32 random bits per element.
    fn store<S: Simd>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        moments: MomentLanes<S, Q>,
        measure: Self::Measure<S>,
        noise: [S::U; Q],
    );
}
