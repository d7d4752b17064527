//! State to fp32 and back: what state dicts, checkpoints and consolidation tools see.

use crate::{
    cursor::{Cursor, Source},
    isa::Kernel,
    simd::{LANES, Simd},
    state::{Master, MomentLanes, Moments, dither::Dither, lanes_in},
};

/// Decodes masters into fp32.
pub struct ReadMaster<'a, P> {
    /// What is read.
    pub master: P,
    /// Where the values go.
    pub to: Cursor<'a, f32>,
}

impl<P: Master> Kernel for ReadMaster<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.to.len()).step_by(LANES) {
            let count = (self.to.len() - at).min(LANES);
            self.to.store(simd, at, count, simd.bits(self.master.load(simd, at, count)));
        }
    }
}

/// Encodes masters from fp32, and writes the 16-bit weights that go with them.
pub struct WriteMaster<'a, P> {
    /// The values.
    pub from: Source<'a, f32>,
    /// What is written.
    pub master: P,
}

impl<P: Master> Kernel for WriteMaster<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.from.len()).step_by(LANES) {
            let count = (self.from.len() - at).min(LANES);
            self.master.store(simd, at, count, simd.of_bits(self.from.load(simd, at, count)));
        }
    }
}

/// Decodes moments into fp32.
pub struct ReadMoments<'a, M> {
    /// What is read.
    pub moments: M,
    /// Where `exp_avg` goes.
    pub exp_avg: Cursor<'a, f32>,
    /// Where `exp_avg_sq` goes.
    pub exp_avg_sq: Cursor<'a, f32>,
}

impl<const Q: usize, M: Moments<Q>> Kernel for (ReadMoments<'_, M>, [(); Q]) {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (ReadMoments { moments, exp_avg, exp_avg_sq }, _) = self;
        for at in (0..exp_avg.len()).step_by(Q * LANES) {
            let count = (exp_avg.len() - at).min(Q * LANES);
            let (first, second) = moments.load(simd, at, count);
            for quarter in 0..Q {
                let (to, count) = (at + quarter * LANES, lanes_in(count, quarter));
                exp_avg.store(simd, to, count, simd.bits(first[quarter]));
                exp_avg_sq.store(simd, to, count, simd.bits(second[quarter]));
            }
        }
    }
}

/// Encodes moments from fp32.
pub struct WriteMoments<'a, M> {
    /// `exp_avg`.
    pub exp_avg: Source<'a, f32>,
    /// `exp_avg_sq`.
    pub exp_avg_sq: Source<'a, f32>,
    /// What is written.
    pub moments: M,
    /// The random bits of the rounding.
    pub dither: Dither,
}

impl<const Q: usize, M: Moments<Q>> Kernel for (WriteMoments<'_, M>, [(); Q]) {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (WriteMoments { exp_avg, exp_avg_sq, moments, dither }, _) = self;
        for at in (0..exp_avg.len()).step_by(Q * LANES) {
            let count = (exp_avg.len() - at).min(Q * LANES);
            let zeros = [simd.splat(0.0); Q];
            let mut lanes: MomentLanes<S, Q> = MomentLanes { exp_avg: zeros, exp_avg_sq: zeros };
            for quarter in 0..Q {
                let (from, count) = (at + quarter * LANES, lanes_in(count, quarter));
                lanes.exp_avg[quarter] = simd.of_bits(exp_avg.load(simd, from, count));
                lanes.exp_avg_sq[quarter] = simd.of_bits(exp_avg_sq.load(simd, from, count));
            }
            let measure = moments.measure(simd, &lanes);
            moments.store(simd, at, count, lanes, measure, dither.lanes(simd, at));
        }
    }
}
