//! The arithmetic of Adam(W), written once, and the loop that carries it over a chunk.
//!
//! Order of operations, each rounded to fp32 once (`fma` is fused):
//!
//! ```text
//! g     = grad * grad_scale                     (negated for maximize)
//! g     = fma(l2, p, g)                         (Adam with L2 only)
//! m     = fma(beta1, m, (1 - beta1) * g)
//! v     = fma(beta2, v, ((1 - beta2) * g) * g)
//! denom = fma(sqrt(v), 1 / sqrt(1 - beta2^t), eps)
//! p     = fma(-lr / (1 - beta1^t), m / denom, p * (1 - lr * weight_decay))
//! ```
//!
//! A unit of elements is loaded whole, computed, and stored whole, which is right in place and out
//! of place. The tail runs the same unit with fewer lanes loaded and stored; the lanes behind them
//! compute on zeros and stay zeros.

use crate::{
    adam::Step,
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    state::{Master, MomentLanes, Moments, decode_unit, dither::Dither, each_vector, encode_unit},
    stream::{
        BLOCK,
        cursor::Source,
        element::{Element, widen},
    },
};

/// The scalars of a step in all lanes.
#[derive(Clone, Copy)]
pub(super) struct StepLanes<S: Simd> {
    grad_scale: S::F,
    weight_keep: S::F,
    l2: S::F,
    has_l2: bool,
    beta1: S::F,
    one_minus_beta1: S::F,
    beta2: S::F,
    one_minus_beta2: S::F,
    minus_step_size: S::F,
    denom_scale: S::F,
    eps: S::F,
}

impl<S: Simd> StepLanes<S> {
    #[inline(always)]
    pub(super) fn new(simd: S, step: &Step) -> Self {
        Self {
            grad_scale: simd.splat(step.grad_scale),
            weight_keep: simd.splat(step.weight_keep),
            l2: simd.splat(step.l2),
            has_l2: step.has_l2,
            beta1: simd.splat(step.beta1),
            one_minus_beta1: simd.splat(step.one_minus_beta1),
            beta2: simd.splat(step.beta2),
            one_minus_beta2: simd.splat(step.one_minus_beta2),
            minus_step_size: simd.splat(-step.step_size),
            denom_scale: simd.splat(step.denom_scale),
            eps: simd.splat(step.eps),
        }
    }

    /// 16 elements: `(master, exp_avg, exp_avg_sq)` after the step.
    #[inline(always)]
    fn update(&self, simd: S, p: S::F, grad: S::F, m: S::F, v: S::F) -> (S::F, S::F, S::F) {
        let (p, m, v, _) = self.update_along(simd, p, grad, m, v);
        (p, m, v)
    }

    /// As [`Self::update`], and the direction that the master has gone: `m / denom`.
    #[inline(always)]
    pub(super) fn update_along(
        &self,
        simd: S,
        p: S::F,
        grad: S::F,
        m: S::F,
        v: S::F,
    ) -> (S::F, S::F, S::F, S::F) {
        let g = simd.mul(grad, self.grad_scale);
        let g = if self.has_l2 { simd.fma(self.l2, p, g) } else { g };
        let m = simd.fma(self.beta1, m, simd.mul(self.one_minus_beta1, g));
        let v = simd.fma(self.beta2, v, simd.mul(simd.mul(self.one_minus_beta2, g), g));
        let denom = simd.fma(simd.sqrt(v), self.denom_scale, self.eps);
        let direction = simd.div(m, denom);
        let p = simd.fma(self.minus_step_size, direction, simd.mul(p, self.weight_keep));
        (p, m, v, direction)
    }
}

struct Update<'a, const Q: usize, G, P, M> {
    step: Step,
    grad: Source<'a, G>,
    master: P,
    moments: M,
    dither: Dither,
    /// All stores of whole units may bypass the cache.
    streams: bool,
}

/// A unit that is stepped and not yet written.
struct Stepped<S: Simd, M: Moments<Q>, const Q: usize> {
    at: usize,
    master: [S::F; Q],
    moments: MomentLanes<S, Q>,
    measure: M::Measure<S>,
}

/// Moments in code.
struct Coded<S: Simd, M: Moments<Q>, const Q: usize> {
    at: usize,
    exp_avg: [S::U; Q],
    exp_avg_sq: [S::U; Q],
    measure: M::Measure<S>,
}

impl<const Q: usize, G: Element, P: Master, M: Moments<Q>> Update<'_, Q, G, P, M> {
    /// Steps `at..at + count`, a unit but at the tail; zeros behind them.
    #[inline(always)]
    fn step<S: Simd>(
        &self,
        simd: S,
        step: &StepLanes<S>,
        at: usize,
        count: usize,
    ) -> Stepped<S, M, Q> {
        let mut moments = decode_unit::<S, M, Q>(simd, &self.moments.load(simd, at, count));
        let mut master: [S::F; Q] = self.master.load(simd, at, count);
        let grad = widen::<S, G, Q>(simd, self.grad.load_unit(simd, at, count));
        let MomentLanes { exp_avg, exp_avg_sq } = &mut moments;
        for i in 0..Q {
            (master[i], exp_avg[i], exp_avg_sq[i]) =
                step.update(simd, master[i], grad[i], exp_avg[i], exp_avg_sq[i]);
        }
        let measure = M::measure(simd, &mut moments);
        Stepped { at, master, moments, measure }
    }

    /// [`Self::step`] of the unit at `at` and [`Self::encode`] of the one before, vector by vector:
    /// one fills the pauses of the other. It is one piece without a branch, or the compiler would
    /// part them.
    #[inline(always)]
    fn step_and_encode<S: Simd>(
        &self,
        simd: S,
        step: &StepLanes<S>,
        at: usize,
        before: Stepped<S, M, Q>,
    ) -> (Stepped<S, M, Q>, Coded<S, M, Q>) {
        let (unit, zeros) = (Q * LANES, [simd.splat(0.0); Q]);
        self.moments.expect_unit(before.at);
        let held = self.moments.load(simd, at, unit);
        let mut master: [S::F; Q] = self.master.load(simd, at, unit);
        let grad = widen::<S, G, Q>(simd, self.grad.load_unit(simd, at, unit));
        let noise = self.noise(simd, before.at);
        let mut moments = MomentLanes { exp_avg: zeros, exp_avg_sq: zeros };
        let (mut first, mut second) = ([simd.splat_u(0); Q], [simd.splat_u(0); Q]);
        let measure = before.measure;
        each_vector!(Q, |I| {
            let (exp_avg, exp_avg_sq) = M::decode::<S, I>(simd, &held);
            (master[I], moments.exp_avg[I], moments.exp_avg_sq[I]) =
                step.update(simd, master[I], grad[I], exp_avg, exp_avg_sq);
            let MomentLanes { exp_avg, exp_avg_sq } = &before.moments;
            (first[I], second[I]) =
                M::encode::<S, I>(simd, &measure, exp_avg[I], exp_avg_sq[I], noise[I]);
        });
        let coded = Coded { at: before.at, exp_avg: first, exp_avg_sq: second, measure };
        let measure = M::measure(simd, &mut moments);
        (Stepped { at, master, moments, measure }, coded)
    }

    #[inline(always)]
    fn encode<S: Simd>(&self, simd: S, stepped: Stepped<S, M, Q>) -> Coded<S, M, Q> {
        let Stepped { at, moments, measure, .. } = stepped;
        let (exp_avg, exp_avg_sq) =
            encode_unit::<S, M, Q>(simd, &moments, &measure, &self.noise(simd, at));
        Coded { at, exp_avg, exp_avg_sq, measure }
    }

    /// Writes the masters of `at..at + count`, and moments, of as many elements: with one branch,
    /// behind all arithmetic.
    #[inline(always)]
    fn store<S: Simd>(
        &self,
        simd: S,
        at: usize,
        count: usize,
        master: [S::F; Q],
        coded: Coded<S, M, Q>,
    ) {
        if self.streams && count == Q * LANES {
            self.master.store::<S, Q, true>(simd, at, count, master);
            self.store_moments::<S, true>(simd, count, coded);
        } else {
            self.master.store::<S, Q, false>(simd, at, count, master);
            self.store_moments::<S, false>(simd, count, coded);
        }
    }

    #[inline(always)]
    fn store_moments<S: Simd, const STREAM: bool>(
        &self,
        simd: S,
        count: usize,
        coded: Coded<S, M, Q>,
    ) {
        let Coded { at, exp_avg, exp_avg_sq, measure } = coded;
        self.moments.store::<S, STREAM>(simd, at, count, exp_avg, exp_avg_sq, measure);
    }

    #[inline(always)]
    fn noise<S: Simd>(&self, simd: S, at: usize) -> [S::U; Q] {
        if M::STOCHASTIC { self.dither.lanes(simd, at) } else { [simd.splat_u(0); Q] }
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.grad.prefetch(at, BLOCK);
        self.master.prefetch(at);
        self.moments.prefetch(at);
    }

    #[inline(always)]
    fn blocks<S: Simd>(&self, simd: S, step: &StepLanes<S>, blocks: usize) {
        for at in (0..blocks * BLOCK).step_by(BLOCK) {
            self.prefetch(at);
            for at in (at..at + BLOCK).step_by(Q * LANES) {
                self.one(simd, step, at, Q * LANES);
            }
        }
    }

    /// A unit, or the `count` elements of the tail.
    #[inline(always)]
    fn one<S: Simd>(&self, simd: S, step: &StepLanes<S>, at: usize, count: usize) {
        let stepped = self.step(simd, step, at, count);
        let master = stepped.master;
        let coded = self.encode(simd, stepped);
        self.store(simd, at, count, master, coded);
    }

    /// As [`Self::blocks`] for units of a whole block, whose measure takes long: the next is
    /// stepped before it is needed.
    #[inline(always)]
    fn blocks_pipelined<S: Simd>(&self, simd: S, step: &StepLanes<S>, blocks: usize) {
        if blocks == 0 {
            return;
        }
        let mut stepped = self.step(simd, step, 0, BLOCK);
        self.master.store::<S, Q, false>(simd, 0, BLOCK, stepped.master);
        for at in (BLOCK..blocks * BLOCK).step_by(BLOCK) {
            self.prefetch(at);
            let (next, coded) = if S::HOLDS_TWO_UNITS {
                self.step_and_encode(simd, step, at, stepped)
            } else {
                (self.step(simd, step, at, BLOCK), self.encode(simd, stepped))
            };
            self.store(simd, at, BLOCK, next.master, coded);
            stepped = next;
        }
        let coded = self.encode(simd, stepped);
        self.store_moments::<S, false>(simd, BLOCK, coded);
    }
}

impl<const Q: usize, G: Element, P: Master, M: Moments<Q>> Kernel for Update<'_, Q, G, P, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let step = StepLanes::new(simd, &self.step);
        let (len, unit) = (self.grad.len(), Q * LANES);
        let blocks = len / BLOCK;
        if unit == BLOCK {
            self.blocks_pipelined(simd, &step, blocks);
        } else {
            self.blocks(simd, &step, blocks);
        }
        for at in (blocks * BLOCK..len).step_by(unit) {
            self.one(simd, &step, at, (len - at).min(unit));
        }
    }
}

/// Steps the elements of `grad` with the master and moments of the same elements, in one pass.
///
/// Out of place, the caller publishes what was stored ([`crate::stream::cursor::publish`]).
///
/// # Panics
/// If the lengths differ.
pub fn update<const Q: usize, G: Element, P: Master, M: Moments<Q>>(
    isa: Isa,
    step: &Step,
    grad: &[G],
    master: P,
    moments: M,
    dither: Dither,
) {
    assert_eq!(grad.len(), master.len(), "every gradient has its master");
    assert!(moments.covers(grad.len()), "every gradient has its moments");
    let streams = master.streams() && moments.streams();
    isa.run(Update { step: *step, grad: Source::new(grad), master, moments, dither, streams });
}
