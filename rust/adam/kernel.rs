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
//! A unit of elements is loaded whole, computed, and stored whole, which is right in place and out of place. The tail runs
//! the same unit with fewer lanes loaded and stored; the lanes behind them compute on zeros and stay zeros.

use crate::{
    adam::Step,
    cursor::Source,
    element::Element,
    isa::{Isa, Kernel},
    simd::{LANES, Simd},
    state::{BLOCK, Master, MomentLanes, Moments, dither::Dither, lanes_in},
};

/// The scalars of a step in all lanes.
#[derive(Clone, Copy)]
struct StepLanes<S: Simd> {
    grad_scale: S::F,
    weight_keep: S::F,
    l2: S::F,
    has_l2: S::M,
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
    fn new(simd: S, step: &Step) -> Self {
        Self {
            grad_scale: simd.splat(step.grad_scale),
            weight_keep: simd.splat(step.weight_keep),
            l2: simd.splat(step.l2),
            has_l2: simd.eq_u(simd.splat_u(u32::from(step.has_l2)), simd.splat_u(1)),
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
        let g = simd.mul(grad, self.grad_scale);
        let g = simd.select_f(self.has_l2, simd.fma(self.l2, p, g), g);
        let m = simd.fma(self.beta1, m, simd.mul(self.one_minus_beta1, g));
        let v = simd.fma(self.beta2, v, simd.mul(simd.mul(self.one_minus_beta2, g), g));
        let denom = simd.fma(simd.sqrt(v), self.denom_scale, self.eps);
        let p = simd.fma(self.minus_step_size, simd.div(m, denom), simd.mul(p, self.weight_keep));
        (p, m, v)
    }
}

struct Update<'a, const Q: usize, G, P, M> {
    step: Step,
    grad: Source<'a, G>,
    master: P,
    moments: M,
    dither: Dither,
}

impl<const Q: usize, G: Element, P: Master, M: Moments<Q>> Update<'_, Q, G, P, M> {
    /// Steps the masters of `at..at + count`, `Q * LANES` of them but at the tail, and returns their moments, zeros behind
    /// them.
    #[inline(always)]
    fn step<S: Simd>(&self, simd: S, step: &StepLanes<S>, at: usize, count: usize) -> MomentLanes<S, Q> {
        let (mut exp_avg, mut exp_avg_sq) = self.moments.load(simd, at, count);
        let mut master = [simd.splat(0.0); Q];
        for (quarter, master) in master.iter_mut().enumerate() {
            let (from, lanes) = (at + quarter * LANES, lanes_in(count, quarter));
            let weight = self.master.load(simd, from, lanes);
            let grad = G::widen(simd, self.grad.load(simd, from, lanes));
            (*master, exp_avg[quarter], exp_avg_sq[quarter]) =
                step.update(simd, weight, grad, exp_avg[quarter], exp_avg_sq[quarter]);
        }
        for (quarter, master) in master.into_iter().enumerate() {
            self.master.store(simd, at + quarter * LANES, lanes_in(count, quarter), master);
        }
        MomentLanes { exp_avg, exp_avg_sq }
    }

    /// Writes the moments of `at..at + count`.
    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, at: usize, count: usize, moments: MomentLanes<S, Q>, measure: M::Measure<S>) {
        let noise = if M::STOCHASTIC { self.dither.lanes(simd, at) } else { [simd.splat_u(0); Q] };
        self.moments.store(simd, at, count, moments, measure, noise);
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        self.grad.prefetch(at, BLOCK);
        self.master.prefetch(at);
        self.moments.prefetch(at);
    }

    #[inline(always)]
    fn blocks<S: Simd>(&self, simd: S, step: &StepLanes<S>, blocks: usize) {
        let unit = Q * LANES;
        for at in (0..blocks * BLOCK).step_by(BLOCK) {
            self.prefetch(at);
            for at in (at..at + BLOCK).step_by(unit) {
                let moments = self.step(simd, step, at, unit);
                let measure = self.moments.measure(simd, &moments);
                self.store(simd, at, unit, moments, measure);
            }
        }
    }

    /// As [`Self::blocks`] for units of a whole block, whose measure takes long: the next is stepped meanwhile.
    #[inline(always)]
    fn blocks_pipelined<S: Simd>(&self, simd: S, step: &StepLanes<S>, blocks: usize) {
        if blocks == 0 {
            return;
        }
        let mut moments = self.step(simd, step, 0, BLOCK);
        let mut measure = self.moments.measure(simd, &moments);
        for at in (BLOCK..blocks * BLOCK).step_by(BLOCK) {
            self.prefetch(at);
            let next = self.step(simd, step, at, BLOCK);
            let next_measure = self.moments.measure(simd, &next);
            self.store(simd, at - BLOCK, BLOCK, moments, measure);
            (moments, measure) = (next, next_measure);
        }
        self.store(simd, (blocks - 1) * BLOCK, BLOCK, moments, measure);
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
        let mut at = blocks * BLOCK;
        while at < len {
            let count = (len - at).min(unit);
            let moments = self.step(simd, &step, at, count);
            let measure = self.moments.measure(simd, &moments);
            self.store(simd, at, count, moments, measure);
            at += count;
        }
    }
}

/// Steps the elements of `grad` with the master and moments of the same elements, in one pass.
///
/// Out of place, the caller publishes what was stored ([`crate::cursor::publish`]).
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
    isa.run(Update { step: *step, grad: Source::new(grad), master, moments, dither });
}
