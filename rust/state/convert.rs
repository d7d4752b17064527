//! State to fp32 and back: what state dicts, checkpoints and consolidation tools see.

use crate::{
    simd::{LANES, Simd, isa::Kernel},
    state::{Master, MomentLanes, Moments, decode_unit, dither::Dither, encode_unit},
    stream::{
        cursor::{Cursor, Source},
        element::{narrow, widen},
    },
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
            let [master] = self.master.load(simd, at, count);
            self.to.store(simd, at, count, simd.bits(master));
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
            self.master.store::<S, 1, false>(
                simd,
                at,
                count,
                [simd.of_bits(self.from.load(simd, at, count))],
            );
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
            let unit = decode_unit::<S, M, Q>(simd, &moments.load(simd, at, count));
            exp_avg.store_unit::<S, Q, false>(
                simd,
                at,
                count,
                narrow::<S, f32, Q>(simd, unit.exp_avg),
            );
            exp_avg_sq.store_unit::<S, Q, false>(
                simd,
                at,
                count,
                narrow::<S, f32, Q>(simd, unit.exp_avg_sq),
            );
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
            let mut unit = MomentLanes {
                exp_avg: widen::<S, f32, Q>(simd, exp_avg.load_unit(simd, at, count)),
                exp_avg_sq: widen::<S, f32, Q>(simd, exp_avg_sq.load_unit(simd, at, count)),
            };
            let measure = M::measure(simd, &mut unit);
            let (first, second) =
                encode_unit::<S, M, Q>(simd, &unit, &measure, &dither.lanes(simd, at));
            moments.store::<S, false>(simd, at, count, first, second, measure);
        }
    }
}
